/*
 * load.c - utilization, clocks, power, heat.
 *
 * Utilization follows what the cards computed. The rest is a simple function
 * of it, there to have figures that move: power between idle and four fifths
 * of the limit, clocks that rise with the first kernel, heat after power.
 */
#include <string.h>

#include "library.h"

static uint64_t now_ns(void) { return soft_now(&nvml_region); }

unsigned int nvml_busy_percent(const soft_card *card) { return (unsigned int)(soft_sched_card_busy(card, now_ns()) * 100 / SOFT_SAMPLE_NS); }

static uint64_t wall_us(uint64_t clock_ns) { return soft_wall_ns(&nvml_region, clock_ns) / 1000; }

EXPORT nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *out) {
  BEGIN(device);
  if (!out) END(NVML_ERROR_INVALID_ARGUMENT);
  out->gpu = nvml_busy_percent(card);
  out->memory = out->gpu / 2;
  END(NVML_SUCCESS);
}

static nvmlReturn_t no_codec(nvmlDevice_t device, unsigned int *percent, unsigned int *period) {
  BEGIN(device);
  if (!percent || !period) END(NVML_ERROR_INVALID_ARGUMENT);
  *percent = 0;
  *period = (unsigned int)(SOFT_SAMPLE_NS / 1000);
  END(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetEncoderUtilization(nvmlDevice_t d, unsigned int *percent, unsigned int *period) { return no_codec(d, percent, period); }
EXPORT nvmlReturn_t nvmlDeviceGetDecoderUtilization(nvmlDevice_t d, unsigned int *percent, unsigned int *period) { return no_codec(d, percent, period); }

/* ---- per process --------------------------------------------------------- */

typedef struct { uint32_t pid; unsigned int percent; } share;

/* Mean over the whole sample periods after last_us; processes without work are left out. */
static uint32_t shares(uint32_t index, uint64_t last_us, share *out, uint32_t room, uint64_t *end_us) {
  uint64_t period = now_ns() / SOFT_SAMPLE_NS, found = 0;
  uint64_t first = period > SOFT_QUEUE_BUCKETS - 1 ? period - (SOFT_QUEUE_BUCKETS - 1) : 0;
  while (first < period && wall_us((first + 1) * SOFT_SAMPLE_NS) <= last_us) first++;
  *end_us = wall_us(period * SOFT_SAMPLE_NS);
  uint32_t high = soft_slots_high(&nvml_region);
  for (uint32_t i = 0; i < high && first < period; i++) {
    const soft_slot *slot = soft_slot_at(&nvml_region, i);
    if (atomic_load(&slot->state) != SOFT_SLOT_LIVE) continue;
    const soft_queue *queue = soft_queue_at(&nvml_region, slot->usage[index].queue);
    if (!queue || queue->owner != i + 1) continue;
    uint64_t busy = 0;
    for (uint64_t p = first; p < period; p++) busy += soft_sched_queue_busy(queue, p);
    uint32_t pid = busy ? nvml_pid_of(i) : 0;
    if (!pid) continue;
    if (found < room) out[found] = (share){pid, (unsigned int)(busy * 100 / ((period - first) * SOFT_SAMPLE_NS))};
    found++;
  }
  return (uint32_t)found;
}

static share rows[SOFT_QUEUES]; /* under the library's lock */

EXPORT nvmlReturn_t nvmlDeviceGetProcessUtilization(nvmlDevice_t device, nvmlProcessUtilizationSample_t *out, unsigned int *count,
                                                    unsigned long long last_us) {
  uint64_t end_us;
  BEGIN(device);
  if (!count) END(NVML_ERROR_INVALID_ARGUMENT);
  uint32_t found = shares(index, last_us, rows, SOFT_QUEUES, &end_us);
  uint32_t room = *count;
  *count = found;
  if (!found) END(NVML_ERROR_NOT_FOUND);
  if (!out || room < found) END(NVML_ERROR_INSUFFICIENT_SIZE);
  for (uint32_t i = 0; i < found; i++)
    out[i] = (nvmlProcessUtilizationSample_t){.pid = rows[i].pid, .timeStamp = end_us, .smUtil = rows[i].percent, .memUtil = rows[i].percent / 2};
  END(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetProcessesUtilizationInfo(nvmlDevice_t device, nvmlProcessesUtilizationInfo_v1_t *out) {
  uint64_t end_us;
  BEGIN(device);
  if (!out) END(NVML_ERROR_INVALID_ARGUMENT);
  if (out->version != NVML_ABI_STRUCT_VERSION(nvmlProcessesUtilizationInfo_v1_t, 1)) END(NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
  uint32_t found = shares(index, out->lastSeenTimeStamp, rows, SOFT_QUEUES, &end_us);
  uint32_t room = out->processSamplesCount;
  out->processSamplesCount = found;
  if (!found) END(NVML_ERROR_NOT_FOUND);
  if (!out->procUtilArray || room < found) END(NVML_ERROR_INSUFFICIENT_SIZE);
  for (uint32_t i = 0; i < found; i++)
    out->procUtilArray[i] = (nvmlProcessUtilizationInfo_v1_t){
        .timeStamp = end_us, .pid = rows[i].pid, .smUtil = rows[i].percent, .memUtil = rows[i].percent / 2};
  END(NVML_SUCCESS);
}

/* ---- samples ------------------------------------------------------------- */

static unsigned int clock_mhz(const soft_card *card, int type) {
  bool busy = nvml_busy_percent(card) > 0;
  switch (type) {
  case NVML_CLOCK_GRAPHICS:
  case NVML_CLOCK_SM: return busy ? card->facts.sm_clock_mhz : 210;
  case NVML_CLOCK_MEM: return card->facts.mem_clock_mhz;
  case NVML_CLOCK_VIDEO: return busy ? card->facts.sm_clock_mhz * 9 / 10 : 555;
  default: return 0;
  }
}

static unsigned int power_mw(const soft_card *card, uint64_t busy_ns) {
  uint64_t idle = card->facts.power_idle_mw, limit = card->facts.power_limit_mw;
  return (unsigned int)(idle + (limit > idle ? limit - idle : 0) * 4 / 5 * busy_ns / SOFT_SAMPLE_NS);
}

EXPORT nvmlReturn_t nvmlDeviceGetSamples(nvmlDevice_t device, int type, unsigned long long last_us, int *value_type, unsigned int *count,
                                         nvmlSample_t *out) {
  BEGIN(device);
  if (!count || !value_type) END(NVML_ERROR_INVALID_ARGUMENT);
  if (type != NVML_GPU_UTILIZATION_SAMPLES && type != NVML_MEMORY_UTILIZATION_SAMPLES && type != NVML_TOTAL_POWER_SAMPLES &&
      type != NVML_PROCESSOR_CLK_SAMPLES && type != NVML_MEMORY_CLK_SAMPLES)
    END(NVML_ERROR_NOT_SUPPORTED);
  *value_type = NVML_VALUE_TYPE_UNSIGNED_INT;
  uint64_t period = now_ns() / SOFT_SAMPLE_NS;
  uint64_t first = period > SOFT_CARD_BUCKETS - 1 ? period - (SOFT_CARD_BUCKETS - 1) : 0;
  while (first < period && wall_us((first + 1) * SOFT_SAMPLE_NS) <= last_us) first++;
  unsigned int found = (unsigned int)(period - first);
  if (!out) {
    *count = found;
    END(NVML_SUCCESS);
  }
  if (!found) END(NVML_ERROR_NOT_FOUND);
  if (found > *count) first = period - *count; /* the newest */
  *count = (unsigned int)(period - first);
  for (uint64_t p = first; p < period; p++) {
    uint64_t busy = soft_sched_card_busy(card, (p + 1) * SOFT_SAMPLE_NS);
    unsigned int percent = (unsigned int)(busy * 100 / SOFT_SAMPLE_NS);
    nvmlSample_t *to = &out[p - first];
    memset(to, 0, sizeof *to);
    to->timeStamp = wall_us((p + 1) * SOFT_SAMPLE_NS);
    to->sampleValue.uiVal = type == NVML_GPU_UTILIZATION_SAMPLES      ? percent
                            : type == NVML_MEMORY_UTILIZATION_SAMPLES ? percent / 2
                            : type == NVML_TOTAL_POWER_SAMPLES        ? power_mw(card, busy)
                            : type == NVML_PROCESSOR_CLK_SAMPLES      ? clock_mhz(card, NVML_CLOCK_SM)
                                                                      : card->facts.mem_clock_mhz;
  }
  END(NVML_SUCCESS);
}

/* ---- clocks -------------------------------------------------------------- */

#define CLOCK(name, value)                                                   \
  EXPORT nvmlReturn_t name(nvmlDevice_t device, int type, unsigned int *mhz) { \
    BEGIN(device);                                                           \
    if (!mhz || type < 0 || type >= NVML_CLOCK_COUNT) END(NVML_ERROR_INVALID_ARGUMENT); \
    *mhz = value;                                                            \
    END(NVML_SUCCESS);                                                       \
  }

static unsigned int most_mhz(const soft_card *card, int type) {
  return type == NVML_CLOCK_MEM ? card->facts.mem_clock_mhz : type == NVML_CLOCK_VIDEO ? card->facts.sm_clock_mhz * 9 / 10 : card->facts.sm_clock_mhz;
}

CLOCK(nvmlDeviceGetClockInfo, clock_mhz(card, type))
CLOCK(nvmlDeviceGetMaxClockInfo, most_mhz(card, type))
CLOCK(nvmlDeviceGetApplicationsClock, most_mhz(card, type))
CLOCK(nvmlDeviceGetDefaultApplicationsClock, most_mhz(card, type))

EXPORT nvmlReturn_t nvmlDeviceGetClock(nvmlDevice_t device, int type, int id, unsigned int *mhz) {
  BEGIN(device);
  if (!mhz || type < 0 || type >= NVML_CLOCK_COUNT || id < 0 || id > NVML_CLOCK_ID_CUSTOMER_BOOST_MAX) END(NVML_ERROR_INVALID_ARGUMENT);
  *mhz = id == NVML_CLOCK_ID_CURRENT ? clock_mhz(card, type) : most_mhz(card, type);
  END(NVML_SUCCESS);
}

#define VALUE(name, type, value)                             \
  EXPORT nvmlReturn_t name(nvmlDevice_t device, type *out) { \
    BEGIN(device);                                           \
    if (!out) END(NVML_ERROR_INVALID_ARGUMENT);              \
    *out = (type)(value);                                    \
    END(NVML_SUCCESS);                                       \
  }

#define REASONS (nvml_busy_percent(card) ? NVML_CLOCKS_REASON_NONE : NVML_CLOCKS_REASON_GPU_IDLE)
VALUE(nvmlDeviceGetCurrentClocksThrottleReasons, unsigned long long, REASONS)
VALUE(nvmlDeviceGetCurrentClocksEventReasons, unsigned long long, REASONS)
VALUE(nvmlDeviceGetSupportedClocksThrottleReasons, unsigned long long, 0x1ff)
VALUE(nvmlDeviceGetSupportedClocksEventReasons, unsigned long long, 0x1ff)
VALUE(nvmlDeviceGetPerformanceState, int, nvml_busy_percent(card) ? NVML_PSTATE_0 : card->facts.ecc ? NVML_PSTATE_0 : NVML_PSTATE_8)
VALUE(nvmlDeviceGetPowerState, int, nvml_busy_percent(card) ? NVML_PSTATE_0 : card->facts.ecc ? NVML_PSTATE_0 : NVML_PSTATE_8)

/* ---- power and heat ------------------------------------------------------ */

static unsigned int power_now(const soft_card *card) { return power_mw(card, soft_sched_card_busy(card, now_ns())); }

static uint64_t energy_mj(const soft_card *card) {
  uint64_t start = nvml_region.state->header.start_ns, now = now_ns();
  uint64_t alive_ms = (now > start ? now - start : 0) / 1000000, work_ms = card->work_ns / 1000000;
  uint64_t idle = card->facts.power_idle_mw, more = card->facts.power_limit_mw > idle ? (card->facts.power_limit_mw - idle) * 4ull / 5 : 0;
  return alive_ms / 1000 * idle + alive_ms % 1000 * idle / 1000 + work_ms / 1000 * more + work_ms % 1000 * more / 1000;
}

static unsigned int celsius(const soft_card *card) { return card->temperature_c ? card->temperature_c : 31 + nvml_busy_percent(card) * 38 / 100; }

VALUE(nvmlDeviceGetPowerUsage, unsigned int, power_now(card))
VALUE(nvmlDeviceGetPowerManagementMode, nvmlEnableState_t, NVML_FEATURE_ENABLED)
VALUE(nvmlDeviceGetPowerManagementLimit, unsigned int, card->facts.power_limit_mw)
VALUE(nvmlDeviceGetPowerManagementDefaultLimit, unsigned int, card->facts.power_limit_mw)
VALUE(nvmlDeviceGetEnforcedPowerLimit, unsigned int, card->facts.power_limit_mw)
VALUE(nvmlDeviceGetTotalEnergyConsumption, unsigned long long, energy_mj(card))

EXPORT nvmlReturn_t nvmlDeviceGetPowerManagementLimitConstraints(nvmlDevice_t device, unsigned int *least, unsigned int *most) {
  BEGIN(device);
  if (!least || !most) END(NVML_ERROR_INVALID_ARGUMENT);
  *least = card->facts.power_limit_mw / 4;
  *most = card->facts.power_limit_mw;
  END(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, int sensor, unsigned int *out) {
  BEGIN(device);
  if (!out || sensor != NVML_TEMPERATURE_GPU) END(NVML_ERROR_INVALID_ARGUMENT);
  *out = celsius(card);
  END(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetTemperatureV(nvmlDevice_t device, nvmlTemperature_v1_t *out) {
  BEGIN(device);
  if (!out) END(NVML_ERROR_INVALID_ARGUMENT);
  if (out->version != NVML_ABI_STRUCT_VERSION(nvmlTemperature_v1_t, 1)) END(NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
  if (out->sensorType != NVML_TEMPERATURE_GPU) END(NVML_ERROR_INVALID_ARGUMENT);
  out->temperature = (int)celsius(card);
  END(NVML_SUCCESS);
}

enum { SLOWDOWN_C = 92, SHUTDOWN_C = 95, GPU_MAX_C = 85 };

EXPORT nvmlReturn_t nvmlDeviceGetMarginTemperature(nvmlDevice_t device, nvmlMarginTemperature_v1_t *out) {
  BEGIN(device);
  if (!out) END(NVML_ERROR_INVALID_ARGUMENT);
  if (out->version != NVML_ABI_STRUCT_VERSION(nvmlMarginTemperature_v1_t, 1)) END(NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
  out->marginTemperature = SLOWDOWN_C - (int)celsius(card);
  END(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetTemperatureThreshold(nvmlDevice_t device, int threshold, unsigned int *out) {
  BEGIN(device);
  if (!out) END(NVML_ERROR_INVALID_ARGUMENT);
  switch (threshold) {
  case NVML_TEMPERATURE_THRESHOLD_SHUTDOWN: *out = SHUTDOWN_C; break;
  case NVML_TEMPERATURE_THRESHOLD_SLOWDOWN: *out = SLOWDOWN_C; break;
  case NVML_TEMPERATURE_THRESHOLD_MEM_MAX:
  case NVML_TEMPERATURE_THRESHOLD_GPU_MAX: *out = GPU_MAX_C; break;
  default: END(NVML_ERROR_NOT_SUPPORTED);
  }
  END(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetViolationStatus(nvmlDevice_t device, int policy, nvmlViolationTime_t *out) {
  BEGIN(device);
  if (!out || policy < 0 || policy > 11) END(NVML_ERROR_INVALID_ARGUMENT);
  *out = (nvmlViolationTime_t){.referenceTime = wall_us(now_ns()), .violationTime = 0};
  END(NVML_SUCCESS);
}

/* ---- fields -------------------------------------------------------------- */

static nvmlReturn_t field(const soft_card *card, nvmlFieldValue_t *out) {
  out->valueType = NVML_VALUE_TYPE_UNSIGNED_INT;
  switch (out->fieldId) {
  case NVML_FI_DEV_ECC_CURRENT:
  case NVML_FI_DEV_ECC_PENDING: out->value.uiVal = card->facts.ecc; break;
  case NVML_FI_DEV_ECC_SBE_VOL_TOTAL:
  case NVML_FI_DEV_ECC_SBE_AGG_TOTAL:
    out->valueType = NVML_VALUE_TYPE_UNSIGNED_LONG_LONG;
    out->value.ullVal = card->ecc_corrected;
    break;
  case NVML_FI_DEV_ECC_DBE_VOL_TOTAL:
  case NVML_FI_DEV_ECC_DBE_AGG_TOTAL:
    out->valueType = NVML_VALUE_TYPE_UNSIGNED_LONG_LONG;
    out->value.ullVal = card->ecc_uncorrected;
    break;
  case NVML_FI_DEV_MEMORY_TEMP: out->value.uiVal = celsius(card) + 4; break;
  case NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION:
    out->valueType = NVML_VALUE_TYPE_UNSIGNED_LONG_LONG;
    out->value.ullVal = energy_mj(card);
    break;
  case NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON: out->value.uiVal = card->facts.link_count ? 25781 : 0; break;
  case NVML_FI_DEV_NVLINK_LINK_COUNT: out->value.uiVal = card->facts.link_count; break;
  case NVML_FI_DEV_PCIE_REPLAY_COUNTER: out->value.uiVal = 0; break;
  case NVML_FI_DEV_REMAPPED_COR: out->value.uiVal = card->remapped_corrected; break;
  case NVML_FI_DEV_REMAPPED_UNC: out->value.uiVal = card->remapped_uncorrected; break;
  case NVML_FI_DEV_REMAPPED_PENDING: out->value.uiVal = card->remap_pending; break;
  case NVML_FI_DEV_REMAPPED_FAILURE: out->value.uiVal = card->remap_failed; break;
  case NVML_FI_DEV_POWER_AVERAGE:
  case NVML_FI_DEV_POWER_INSTANT: out->value.uiVal = power_now(card); break;
  case NVML_FI_DEV_POWER_MIN_LIMIT: out->value.uiVal = card->facts.power_limit_mw / 4; break;
  case NVML_FI_DEV_POWER_MAX_LIMIT:
  case NVML_FI_DEV_POWER_DEFAULT_LIMIT:
  case NVML_FI_DEV_POWER_CURRENT_LIMIT: out->value.uiVal = card->facts.power_limit_mw; break;
  case NVML_FI_DEV_GET_GPU_RECOVERY_ACTION: out->value.uiVal = card->remap_failed ? 1 : 0; break;
  default: return NVML_ERROR_NOT_SUPPORTED;
  }
  return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, nvmlFieldValue_t *values) {
  BEGIN(device);
  if (!values || count < 1) END(NVML_ERROR_INVALID_ARGUMENT);
  for (int i = 0; i < count; i++) {
    values[i].timestamp = (long long)wall_us(now_ns());
    values[i].latencyUsec = 0;
    memset(&values[i].value, 0, sizeof values[i].value);
    values[i].nvmlReturn = field(card, &values[i]);
  }
  END(NVML_SUCCESS);
}
