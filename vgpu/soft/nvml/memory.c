/* memory.c - memory of cards and processes. */
#include <string.h>

#include "library.h"

EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *out) {
  BEGIN(device);
  if (!out) END(NVML_ERROR_INVALID_ARGUMENT);
  out->total = card->facts.total_bytes;
  out->free = soft_card_free(card);
  out->used = out->total - out->free; /* the driver's part counts as used here */
  END(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *out) {
  BEGIN(device);
  if (!out) END(NVML_ERROR_INVALID_ARGUMENT);
  if (out->version != NVML_MEMORY_V2_VERSION) END(NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
  out->total = card->facts.total_bytes;
  out->free = soft_card_free(card);
  out->used = soft_card_capacity(card) - out->free;
  out->reserved = out->total - soft_card_capacity(card);
  END(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetBAR1MemoryInfo(nvmlDevice_t device, nvmlBAR1Memory_t *out) {
  BEGIN(device);
  if (!out) END(NVML_ERROR_INVALID_ARGUMENT);
  out->bar1Total = card->facts.bar1_bytes;
  out->bar1Used = 2ull << 20;
  out->bar1Free = out->bar1Total - out->bar1Used;
  END(NVML_SUCCESS);
}

/* ---- processes ----------------------------------------------------------- */

typedef struct { uint32_t pid; uint64_t bytes; } holder;

/* Managed memory is the driver's own, as NVML has it: in the card's figure and in no process's (an assumption, README). */
/* Processes with a context on the card, visible from this PID namespace, one row each: clients of MPS, or the others (its servers too).
 * Two libraries of one process (a second libcuda in another link namespace) are one row. */
static uint32_t holders(uint32_t index, bool clients, holder *out, uint32_t room) {
  uint32_t found = 0, high = soft_slots_high(&nvml_region);
  for (uint32_t i = 0; i < high; i++) {
    const soft_slot *slot = soft_slot_at(&nvml_region, i);
    if (atomic_load(&slot->state) != SOFT_SLOT_LIVE || slot->kind == SOFT_KIND_OBSERVER || !slot->usage[index].context_count) continue;
    if ((slot->mps.server != 0) != clients) continue;
    uint32_t pid = nvml_pid_of(i), at = 0;
    if (!pid) continue;
    uint64_t bytes = slot->usage[index].context_bytes + slot->usage[index].memory_bytes;
    while (at < found && at < room && out[at].pid != pid) at++;
    if (at < found && at < room) {
      out[at].bytes += bytes;
      continue;
    }
    if (found < room) out[found] = (holder){pid, bytes};
    found++;
  }
  return found;
}

enum { MOST = SOFT_SLOTS };

typedef void (*put)(void *to, unsigned int at, const holder *from);

static nvmlReturn_t list(nvmlDevice_t device, const char *call, bool clients, unsigned int *count, void *infos, put store) {
  static holder rows[MOST]; /* under the library's lock */
  soft_card *card;
  uint32_t index;
  nvmlReturn_t result = nvml_begin(device, call, &card, &index);
  if (result != NVML_SUCCESS) return result;
  if (!count) END(NVML_ERROR_INVALID_ARGUMENT);
  uint32_t found = holders(index, clients, rows, MOST);
  uint32_t room = *count;
  *count = found;
  if (found > room) END(NVML_ERROR_INSUFFICIENT_SIZE);
  if (found && !infos) END(NVML_ERROR_INVALID_ARGUMENT);
  for (uint32_t i = 0; i < found; i++) store(infos, i, &rows[i]);
  END(NVML_SUCCESS);
}

static void put_v1(void *to, unsigned int at, const holder *from) {
  ((nvmlProcessInfo_v1_t *)to)[at] = (nvmlProcessInfo_v1_t){.pid = from->pid, .usedGpuMemory = from->bytes};
}

static void put_v2(void *to, unsigned int at, const holder *from) {
  ((nvmlProcessInfo_t *)to)[at] = (nvmlProcessInfo_t){
      .pid = from->pid, .usedGpuMemory = from->bytes, .gpuInstanceId = NVML_NO_INSTANCE_ID, .computeInstanceId = NVML_NO_INSTANCE_ID};
}

EXPORT nvmlReturn_t nvmlDeviceGetComputeRunningProcesses(nvmlDevice_t d, unsigned int *n, nvmlProcessInfo_v1_t *out) {
  return list(d, __func__, false, n, out, put_v1);
}
EXPORT nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v2(nvmlDevice_t d, unsigned int *n, nvmlProcessInfo_v2_t *out) {
  return list(d, __func__, false, n, out, put_v2);
}
EXPORT nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t d, unsigned int *n, nvmlProcessInfo_t *out) {
  return list(d, __func__, false, n, out, put_v2);
}

/* Nobody draws here. */
static nvmlReturn_t nobody(nvmlDevice_t device, unsigned int *count) {
  BEGIN(device);
  if (!count) END(NVML_ERROR_INVALID_ARGUMENT);
  *count = 0;
  END(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetGraphicsRunningProcesses(nvmlDevice_t d, unsigned int *n, nvmlProcessInfo_v1_t *out) { (void)out; return nobody(d, n); }
EXPORT nvmlReturn_t nvmlDeviceGetGraphicsRunningProcesses_v2(nvmlDevice_t d, unsigned int *n, nvmlProcessInfo_v2_t *out) { (void)out; return nobody(d, n); }
EXPORT nvmlReturn_t nvmlDeviceGetGraphicsRunningProcesses_v3(nvmlDevice_t d, unsigned int *n, nvmlProcessInfo_t *out) { (void)out; return nobody(d, n); }
/* Clients of MPS are listed by themselves, and not among those that have the card in turns. */
EXPORT nvmlReturn_t nvmlDeviceGetMPSComputeRunningProcesses(nvmlDevice_t d, unsigned int *n, nvmlProcessInfo_v1_t *out) {
  return list(d, __func__, true, n, out, put_v1);
}
EXPORT nvmlReturn_t nvmlDeviceGetMPSComputeRunningProcesses_v2(nvmlDevice_t d, unsigned int *n, nvmlProcessInfo_v2_t *out) {
  return list(d, __func__, true, n, out, put_v2);
}
EXPORT nvmlReturn_t nvmlDeviceGetMPSComputeRunningProcesses_v3(nvmlDevice_t d, unsigned int *n, nvmlProcessInfo_t *out) {
  return list(d, __func__, true, n, out, put_v2);
}

static void put_detail(void *to, unsigned int at, const holder *from) {
  ((nvmlProcessDetail_v1_t *)to)[at] = (nvmlProcessDetail_v1_t){.pid = from->pid,
                                                                .usedGpuMemory = from->bytes,
                                                                .gpuInstanceId = NVML_NO_INSTANCE_ID,
                                                                .computeInstanceId = NVML_NO_INSTANCE_ID,
                                                                .usedGpuCcProtectedMemory = 0};
}

EXPORT nvmlReturn_t nvmlDeviceGetRunningProcessDetailList(nvmlDevice_t device, nvmlProcessDetailList_v1_t *out) {
  if (!out) return NVML_ERROR_INVALID_ARGUMENT;
  if (out->version != NVML_ABI_STRUCT_VERSION(nvmlProcessDetailList_v1_t, 1)) return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
  if (out->mode > 2) return NVML_ERROR_INVALID_ARGUMENT;
  if (out->mode == 1) return nobody(device, &out->numProcArrayEntries);
  return list(device, __func__, out->mode == 2, &out->numProcArrayEntries, out->procArray, put_detail);
}
