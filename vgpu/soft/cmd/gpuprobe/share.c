/* share.c - what a process has on its card, by the driver's word and by carve's ledger. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "../../../lib/include/carve_region.h"
#include "probe.h"

#define BEHIND "/usr/lib/carve/driver/"

static struct {
  __typeof__(nvmlDeviceGetMemoryInfo) *memory;
  __typeof__(nvmlDeviceGetComputeRunningProcesses_v3) *processes;
  nvmlDevice_t card;
  const struct carve_usage *usage;
  unsigned int column;
} door;

void *driver_behind(const char *library) {
  char path[256];
  snprintf(path, sizeof path, BEHIND "%s", library);
  return dlopen(path, RTLD_NOW | RTLD_NOLOAD);
}

/* The place of a card in the share: that of its UUID in the limits. */
static void find_share(const CUuuid *uuid) {
  int fd = open(CARVE_LIMITS_PATH, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return;
  static struct carve_limits limits;
  ssize_t got = read(fd, &limits, sizeof limits);
  close(fd);
  if (got != (ssize_t)sizeof limits || limits.magic != CARVE_LIMITS_MAGIC) return;
  const struct carve_limits_bank *bank = &limits.banks[limits.generation & 1];
  for (door.column = 0; door.column < bank->card_count && door.column < CARVE_MAX_CARDS; door.column++)
    if (memcmp(bank->cards[door.column].uuid, uuid->bytes, 16) == 0) break;
  if (door.column == bank->card_count || door.column == CARVE_MAX_CARDS) return;
  fd = open(CARVE_USAGE_PATH, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return;
  if (lseek(fd, 0, SEEK_END) >= (off_t)sizeof(struct carve_usage)) {
    void *at = mmap(NULL, sizeof(struct carve_usage), PROT_READ, MAP_SHARED, fd, 0);
    if (at != MAP_FAILED) door.usage = at;
  }
  close(fd);
}

int open_figures(int device) {
  CUuuid uuid;
  char text[41];
  int code = open_nvml();
  if (code != PROBE_OK) return code;
  CUresult result = cuda.cuDeviceGetUuid(&uuid, device);
  if (result != CUDA_SUCCESS) return refused("cuDeviceGetUuid", result);
  uuid_text(&uuid, text);
  void *real = driver_behind("libnvidia-ml.so.1");
  if (!real) real = nvml.handle;
  __typeof__(nvmlInit_v2) *init = (__typeof__(nvmlInit_v2) *)dlsym(real, "nvmlInit_v2");
  __typeof__(nvmlDeviceGetHandleByUUID) *handle = (__typeof__(nvmlDeviceGetHandleByUUID) *)dlsym(real, "nvmlDeviceGetHandleByUUID");
  door.memory = (__typeof__(nvmlDeviceGetMemoryInfo) *)dlsym(real, "nvmlDeviceGetMemoryInfo");
  door.processes = (__typeof__(nvmlDeviceGetComputeRunningProcesses_v3) *)dlsym(real, "nvmlDeviceGetComputeRunningProcesses_v3");
  if (!init || !handle || !door.memory || init() != NVML_SUCCESS || handle(text, &door.card) != NVML_SUCCESS) {
    line("figures");
    field_bool("ok", false);
    field_text("reason", "the driver's NVML doesn't know the card");
    line_end();
    return PROBE_REFUSED;
  }
  find_share(&uuid);
  return PROBE_OK;
}

figures figures_now(void) {
  figures f = {0};
  nvmlMemory_t memory;
  nvmlProcessInfo_t list[128];
  unsigned int count = 128;
  if (door.memory(door.card, &memory) == NVML_SUCCESS) f.card_bytes = memory.used;
  if (door.processes && door.processes(door.card, &count, list) == NVML_SUCCESS)
    for (unsigned int i = 0; i < count && i < 128; i++)
      if (list[i].pid == (unsigned int)getpid() && list[i].usedGpuMemory != NVML_VALUE_NOT_AVAILABLE) {
        f.process_known = true;
        f.process_bytes = list[i].usedGpuMemory;
      }
  for (unsigned int i = 0; door.usage && i < CARVE_MAX_SLOTS; i++) {
    uint64_t word = __atomic_load_n(&door.usage->processes[i].state_pid, __ATOMIC_ACQUIRE);
    if (CARVE_PID(word) != (uint32_t)getpid() || CARVE_STATE(word) != CARVE_SLOT_LIVE) continue;
    f.charged_known = true;
    f.charged_bytes = (uint64_t)CARVE_CHARGE_USED(__atomic_load_n(&door.usage->lines[door.column][i].charge, __ATOMIC_ACQUIRE)) << CARVE_UNIT_SHIFT;
    break;
  }
  return f;
}
