/* eventset.c - event sets: who wants which events, and waiting for them. */
#include <stdlib.h>
#include <string.h>

#include "../state/events.h"
#include "library.h"

enum { SETS = 64, NAP_MS = 200 };

struct nvmlEventSet_st {
  bool used;
  uint64_t seq;                /* newest event already given out */
  uint64_t masks[SOFT_CARDS];
};

/* A fixed table, so that a handle can be checked; under the library's lock. */
static struct nvmlEventSet_st sets[SETS];

#define SUPPORTED (NVML_EVENT_XID_CRITICAL | NVML_EVENT_SINGLE_BIT_ECC | NVML_EVENT_DOUBLE_BIT_ECC | NVML_EVENT_PSTATE | NVML_EVENT_CLOCK)

static bool known(nvmlEventSet_t set) { return set >= sets && set < sets + SETS && set->used; }

EXPORT nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *out) {
  nvmlReturn_t result = nvml_ready(__func__);
  if (result != NVML_SUCCESS) return result;
  if (!out) return NVML_ERROR_INVALID_ARGUMENT;
  result = nvml_lock();
  if (result != NVML_SUCCESS) return result;
  for (int i = 0; i < SETS; i++) {
    if (sets[i].used) continue;
    sets[i] = (struct nvmlEventSet_st){.used = true, .seq = nvml_region.state->header.event_seq};
    *out = &sets[i];
    return nvml_end(NVML_SUCCESS);
  }
  return nvml_end(NVML_ERROR_INSUFFICIENT_RESOURCES);
}

EXPORT nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t set) {
  nvmlReturn_t result = nvml_ready(__func__);
  if (result == NVML_SUCCESS) result = nvml_lock();
  if (result != NVML_SUCCESS) return result;
  if (!known(set)) return nvml_end(NVML_ERROR_INVALID_ARGUMENT);
  memset(set, 0, sizeof *set);
  return nvml_end(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetSupportedEventTypes(nvmlDevice_t device, unsigned long long *types) {
  BEGIN(device);
  if (!types) END(NVML_ERROR_INVALID_ARGUMENT);
  *types = SUPPORTED;
  END(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types, nvmlEventSet_t set) {
  BEGIN(device);
  if (!known(set)) END(NVML_ERROR_INVALID_ARGUMENT);
  if (types & ~SUPPORTED) END(NVML_ERROR_NOT_SUPPORTED);
  set->masks[index] |= types;
  END(NVML_SUCCESS);
}

/* Copies data and says SUCCESS, or TIMEOUT. A set that another thread frees meanwhile ends the wait. */
static nvmlReturn_t wait(nvmlEventSet_t set, soft_event *out, unsigned int timeout_ms, const char *call) {
  nvmlReturn_t result = nvml_ready(call);
  if (result != NVML_SUCCESS) return result;
  uint64_t deadline = soft_real_ns() + timeout_ms * 1000000ull;
  for (;;) {
    if (!soft_region_sound(&nvml_region)) return NVML_ERROR_UNKNOWN;
    uint32_t word = soft_event_word(&nvml_region);
    result = nvml_lock();
    if (result != NVML_SUCCESS) return result;
    if (!known(set)) return nvml_end(NVML_ERROR_INVALID_ARGUMENT);
    bool found = soft_event_next(&nvml_region, &set->seq, set->masks, out);
    nvml_end(NVML_SUCCESS);
    if (found) return NVML_SUCCESS;
    uint64_t now = soft_real_ns();
    if (now >= deadline) return NVML_ERROR_TIMEOUT;
    uint64_t nap = deadline - now < NAP_MS * 1000000ull ? deadline - now : NAP_MS * 1000000ull;
    soft_event_sleep(&nvml_region, word, nap);
  }
}

EXPORT nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *data, unsigned int timeout_ms) {
  soft_event event;
  if (!data) return NVML_ERROR_INVALID_ARGUMENT;
  nvmlReturn_t result = wait(set, &event, timeout_ms, __func__);
  if (result != NVML_SUCCESS) return result;
  *data = (nvmlEventData_t){.device = nvml_handle(event.card), .eventType = event.type, .eventData = event.data,
                            .gpuInstanceId = NVML_NO_INSTANCE_ID, .computeInstanceId = NVML_NO_INSTANCE_ID};
  return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlEventSetWait(nvmlEventSet_t set, nvmlEventData_v1_t *data, unsigned int timeout_ms) {
  soft_event event;
  if (!data) return NVML_ERROR_INVALID_ARGUMENT;
  nvmlReturn_t result = wait(set, &event, timeout_ms, __func__);
  if (result != NVML_SUCCESS) return result;
  *data = (nvmlEventData_v1_t){.device = nvml_handle(event.card), .eventType = event.type, .eventData = event.data};
  return NVML_SUCCESS;
}
