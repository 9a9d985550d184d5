/* modes.c - persistence, compute mode, MIG (off), ECC, accounting. */
#include <string.h>
#include <unistd.h>

#include "library.h"

#define VALUE(name, type, value)                             \
  EXPORT nvmlReturn_t name(nvmlDevice_t device, type *out) { \
    BEGIN(device);                                           \
    if (!out) END(NVML_ERROR_INVALID_ARGUMENT);              \
    *out = (type)(value);                                    \
    END(NVML_SUCCESS);                                       \
  }

VALUE(nvmlDeviceGetPersistenceMode, nvmlEnableState_t, card->persistence != 0)
VALUE(nvmlDeviceGetComputeMode, int, card->compute_mode)
VALUE(nvmlDeviceGetDisplayMode, nvmlEnableState_t, NVML_FEATURE_DISABLED)
VALUE(nvmlDeviceGetDisplayActive, nvmlEnableState_t, NVML_FEATURE_DISABLED)
VALUE(nvmlDeviceGetVirtualizationMode, int, NVML_GPU_VIRTUALIZATION_MODE_NONE)
VALUE(nvmlDeviceGetAccountingMode, nvmlEnableState_t, card->accounting != 0)
VALUE(nvmlDeviceGetAccountingBufferSize, unsigned int, SOFT_RETIRED)
VALUE(nvmlDeviceGetMaxMigDeviceCount, unsigned int, 0)
VALUE(nvmlDeviceIsMigDeviceHandle, unsigned int, 0)

static bool privileged(void) { return geteuid() == 0; }

EXPORT nvmlReturn_t nvmlDeviceSetPersistenceMode(nvmlDevice_t device, nvmlEnableState_t mode) {
  BEGIN(device);
  if (mode != 0 && mode != 1) END(NVML_ERROR_INVALID_ARGUMENT);
  if (!privileged()) END(NVML_ERROR_NO_PERMISSION);
  card->persistence = (uint32_t)mode;
  END(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceSetComputeMode(nvmlDevice_t device, int mode) {
  BEGIN(device);
  if (mode < 0 || mode > NVML_COMPUTEMODE_EXCLUSIVE_PROCESS) END(NVML_ERROR_INVALID_ARGUMENT);
  if (mode == NVML_COMPUTEMODE_EXCLUSIVE_THREAD) END(NVML_ERROR_NOT_SUPPORTED);
  if (!privileged()) END(NVML_ERROR_NO_PERMISSION);
  card->compute_mode = (uint32_t)mode;
  END(NVML_SUCCESS);
}

/* ---- MIG: this part of the software GPU has it off ------------------------ */

EXPORT nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned int *current, unsigned int *pending) {
  BEGIN(device);
  if (!current || !pending) END(NVML_ERROR_INVALID_ARGUMENT);
  if (!card->facts.mig_capable) END(NVML_ERROR_NOT_SUPPORTED);
  *current = *pending = NVML_DEVICE_MIG_DISABLE;
  END(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned int which, nvmlDevice_t *mig) {
  (void)which;
  BEGIN(device);
  END(!mig ? NVML_ERROR_INVALID_ARGUMENT : card->facts.mig_capable ? NVML_ERROR_NOT_FOUND : NVML_ERROR_NOT_SUPPORTED);
}

/* ---- ECC ----------------------------------------------------------------- */

EXPORT nvmlReturn_t nvmlDeviceGetEccMode(nvmlDevice_t device, nvmlEnableState_t *current, nvmlEnableState_t *pending) {
  BEGIN(device);
  if (!current || !pending) END(NVML_ERROR_INVALID_ARGUMENT);
  if (!card->facts.ecc) END(NVML_ERROR_NOT_SUPPORTED);
  *current = *pending = NVML_FEATURE_ENABLED;
  END(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetDefaultEccMode(nvmlDevice_t device, nvmlEnableState_t *mode) {
  BEGIN(device);
  if (!mode) END(NVML_ERROR_INVALID_ARGUMENT);
  if (!card->facts.ecc) END(NVML_ERROR_NOT_SUPPORTED);
  *mode = NVML_FEATURE_ENABLED;
  END(NVML_SUCCESS);
}

static bool kinds_ok(int type, int counter) { return type >= 0 && type <= 1 && counter >= 0 && counter <= 1; }
static uint64_t errors(const soft_card *card, int type) { return type == NVML_MEMORY_ERROR_TYPE_CORRECTED ? card->ecc_corrected : card->ecc_uncorrected; }

EXPORT nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, int type, int counter, unsigned long long *out) {
  BEGIN(device);
  if (!out || !kinds_ok(type, counter)) END(NVML_ERROR_INVALID_ARGUMENT);
  if (!card->facts.ecc) END(NVML_ERROR_NOT_SUPPORTED);
  *out = errors(card, type);
  END(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetDetailedEccErrors(nvmlDevice_t device, int type, int counter, nvmlEccErrorCounts_t *out) {
  BEGIN(device);
  if (!out || !kinds_ok(type, counter)) END(NVML_ERROR_INVALID_ARGUMENT);
  if (!card->facts.ecc) END(NVML_ERROR_NOT_SUPPORTED);
  *out = (nvmlEccErrorCounts_t){.deviceMemory = errors(card, type)};
  END(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetMemoryErrorCounter(nvmlDevice_t device, int type, int counter, int location, unsigned long long *out) {
  BEGIN(device);
  if (!out || !kinds_ok(type, counter) || location < 0 || location > 7) END(NVML_ERROR_INVALID_ARGUMENT);
  if (!card->facts.ecc) END(NVML_ERROR_NOT_SUPPORTED);
  *out = location == 2 ? errors(card, type) : 0; /* all of them in device memory */
  END(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetRemappedRows(nvmlDevice_t device, unsigned int *corrected, unsigned int *uncorrected, unsigned int *pending,
                                              unsigned int *failed) {
  BEGIN(device);
  if (!corrected || !uncorrected || !pending || !failed) END(NVML_ERROR_INVALID_ARGUMENT);
  if (card->facts.architecture < NVML_DEVICE_ARCH_AMPERE || !card->facts.ecc) END(NVML_ERROR_NOT_SUPPORTED);
  *corrected = card->remapped_corrected;
  *uncorrected = card->remapped_uncorrected;
  *pending = card->remap_pending;
  *failed = card->remap_failed;
  END(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetRowRemapperHistogram(nvmlDevice_t device, nvmlRowRemapperHistogramValues_t *out) {
  enum { BANKS = 640 };
  BEGIN(device);
  if (!out) END(NVML_ERROR_INVALID_ARGUMENT);
  if (card->facts.architecture < NVML_DEVICE_ARCH_AMPERE || !card->facts.ecc) END(NVML_ERROR_NOT_SUPPORTED);
  unsigned int remapped = card->remapped_corrected + card->remapped_uncorrected;
  if (remapped > BANKS) remapped = BANKS;
  *out = (nvmlRowRemapperHistogramValues_t){.max = BANKS - remapped, .high = remapped};
  END(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetRetiredPagesPendingStatus(nvmlDevice_t device, nvmlEnableState_t *pending) {
  BEGIN(device);
  if (!pending) END(NVML_ERROR_INVALID_ARGUMENT);
  if (card->facts.architecture >= NVML_DEVICE_ARCH_AMPERE || !card->facts.ecc) END(NVML_ERROR_NOT_SUPPORTED);
  *pending = NVML_FEATURE_DISABLED;
  END(NVML_SUCCESS);
}

/* ---- accounting ---------------------------------------------------------- */

EXPORT nvmlReturn_t nvmlDeviceSetAccountingMode(nvmlDevice_t device, nvmlEnableState_t mode) {
  BEGIN(device);
  if (mode != 0 && mode != 1) END(NVML_ERROR_INVALID_ARGUMENT);
  if (!privileged()) END(NVML_ERROR_NO_PERMISSION);
  card->accounting = (uint32_t)mode;
  END(NVML_SUCCESS);
}

/* Pid of an ended process as seen from here, 0 when nobody here ever saw it. */
static uint32_t retired_pid(const soft_retired *record) {
  if (record->pid_namespace == nvml_region.pid_namespace) return record->pid;
  return record->seen_namespace == nvml_region.pid_namespace ? record->seen_pid : 0;
}

static uint32_t retired_high(void) {
  uint64_t all = nvml_region.state->header.retired_count;
  return all < SOFT_RETIRED ? (uint32_t)all : SOFT_RETIRED;
}

EXPORT nvmlReturn_t nvmlDeviceClearAccountingPids(nvmlDevice_t device) {
  BEGIN(device);
  if (!privileged()) END(NVML_ERROR_NO_PERMISSION);
  for (uint32_t i = 0; i < retired_high(); i++) {
    soft_retired *record = &nvml_region.state->header.retired[i];
    if (record->card == index) memset(record, 0, sizeof *record);
  }
  END(NVML_SUCCESS);
}

static uint32_t percent(uint64_t busy_ns, uint64_t life_ns) {
  return life_ns ? (uint32_t)((busy_ns < life_ns ? busy_ns : life_ns) / (life_ns / 100 ? life_ns / 100 : 1)) : 0;
}

/* Memory is said to be busy half as much as the processors. */
static void fill_stats(nvmlAccountingStats_v2_t *out, uint64_t peak_bytes, uint64_t busy_ns, uint64_t start_ns, uint64_t life_ns) {
  out->gpuUtilization = percent(busy_ns, life_ns);
  out->memoryUtilization = out->gpuUtilization / 2;
  out->maxMemoryUsage = peak_bytes;
  out->sampleCount = (unsigned int)(life_ns / SOFT_SAMPLE_NS);
  out->sumGpuUtil = (unsigned long long)((unsigned __int128)(busy_ns < life_ns ? busy_ns : life_ns) * 10000 / SOFT_SAMPLE_NS);
  out->sumFbUtil = out->sumGpuUtil / 2;
  out->startTime = soft_wall_ns(&nvml_region, start_ns) / 1000;
}

/* Under the lock. time is of ended processes only, as before. */
static nvmlReturn_t stats_of(const soft_card *card, uint32_t index, unsigned int pid, nvmlAccountingStats_v2_t *out) {
  if (!card->accounting) return NVML_ERROR_NOT_SUPPORTED;
  memset(out, 0, sizeof *out);
  out->pid = pid;
  uint32_t high = soft_slots_high(&nvml_region);
  for (uint32_t i = 0; i < high; i++) {
    const soft_slot *slot = soft_slot_at(&nvml_region, i);
    const soft_usage *usage = &slot->usage[index];
    if (atomic_load(&slot->state) != SOFT_SLOT_LIVE || !usage->peak_bytes || nvml_pid_of(i) != pid) continue;
    uint64_t now = soft_now(&nvml_region);
    fill_stats(out, usage->peak_bytes, usage->busy_ns, usage->since_ns, now > usage->since_ns ? now - usage->since_ns : 0);
    out->isRunning = 1;
    return NVML_SUCCESS;
  }
  for (uint32_t i = 0; i < retired_high(); i++) {
    const soft_retired *record = &nvml_region.state->header.retired[i];
    if (record->card != index || !record->peak_bytes || retired_pid(record) != pid) continue;
    uint64_t life = record->end_ns > record->start_ns ? record->end_ns - record->start_ns : 0;
    fill_stats(out, record->peak_bytes, record->busy_ns, record->start_ns, life);
    out->time = life / 1000000;
    return NVML_SUCCESS;
  }
  return NVML_ERROR_NOT_FOUND;
}

EXPORT nvmlReturn_t nvmlDeviceGetAccountingStats(nvmlDevice_t device, unsigned int pid, nvmlAccountingStats_t *out) {
  nvmlAccountingStats_v2_t all;
  BEGIN(device);
  if (!out) END(NVML_ERROR_INVALID_ARGUMENT);
  nvmlReturn_t result = stats_of(card, index, pid, &all);
  if (result != NVML_SUCCESS) END(result);
  memset(out, 0, sizeof *out);
  out->gpuUtilization = all.gpuUtilization;
  out->memoryUtilization = all.memoryUtilization;
  out->maxMemoryUsage = all.maxMemoryUsage;
  out->time = all.time;
  out->startTime = all.startTime;
  out->isRunning = all.isRunning;
  END(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetAccountingStats_v2(nvmlDevice_t device, nvmlAccountingStats_v2_t *out) {
  BEGIN(device);
  if (!out) END(NVML_ERROR_INVALID_ARGUMENT);
  END(stats_of(card, index, out->pid, out));
}

EXPORT nvmlReturn_t nvmlDeviceGetAccountingPids(nvmlDevice_t device, unsigned int *count, unsigned int *pids) {
  BEGIN(device);
  if (!count) END(NVML_ERROR_INVALID_ARGUMENT);
  if (!card->accounting) END(NVML_ERROR_NOT_SUPPORTED);
  unsigned int room = pids ? *count : 0, found = 0;
  uint32_t high = soft_slots_high(&nvml_region);
  for (uint32_t i = 0; i < high; i++) {
    const soft_slot *slot = soft_slot_at(&nvml_region, i);
    if (atomic_load(&slot->state) != SOFT_SLOT_LIVE || !slot->usage[index].peak_bytes) continue;
    uint32_t pid = nvml_pid_of(i);
    if (!pid) continue;
    if (found < room) pids[found] = pid;
    found++;
  }
  for (uint32_t i = 0; i < retired_high(); i++) {
    const soft_retired *record = &nvml_region.state->header.retired[i];
    if (record->card != index || !record->peak_bytes || !retired_pid(record)) continue;
    if (found < room) pids[found] = retired_pid(record);
    found++;
  }
  *count = found;
  END(found > room && pids ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS);
}
