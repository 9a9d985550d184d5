/* library.c - start and end of the library, handles, and finding cards. */
#define _GNU_SOURCE
#include "library.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "../state/nodes.h"

enum { PATIENCE_MS = 3000 };

struct nvmlDevice_st { uint32_t card; };

soft_region nvml_region;

static _Atomic uint32_t lock_word;
static _Atomic int initialised;      /* how often */
static pid_t owner;
static soft_nodes nodes = {.control = -1};
static uint32_t count;
static uint32_t order[SOFT_CARDS];   /* NVML index -> card */
static struct nvmlDevice_st handles[SOFT_CARDS];

static void lock(void) {
  uint32_t seen = 0;
  if (atomic_compare_exchange_strong(&lock_word, &seen, 1)) return;
  while (atomic_exchange(&lock_word, 2) != 0) syscall(SYS_futex, &lock_word, FUTEX_WAIT_PRIVATE, 2, NULL, NULL, 0);
}

static void unlock(void) {
  if (atomic_exchange(&lock_word, 0) == 2) syscall(SYS_futex, &lock_word, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}

/* ---- start and end ------------------------------------------------------- */

static nvmlReturn_t from(soft_error error) {
  switch (error) {
  case SOFT_OK: return NVML_SUCCESS;
  case SOFT_ENOSTATE: return NVML_ERROR_DRIVER_NOT_LOADED;
  case SOFT_EBADSTATE: return NVML_ERROR_LIB_RM_VERSION_MISMATCH;
  case SOFT_ELOCK: return NVML_ERROR_TIMEOUT;
  case SOFT_EFULL: return NVML_ERROR_INSUFFICIENT_RESOURCES;
  case SOFT_EMEMORY: return NVML_ERROR_MEMORY;
  case SOFT_ELOST: return NVML_ERROR_GPU_IS_LOST;
  case SOFT_ESYSTEM: return NVML_ERROR_OPERATING_SYSTEM;
  }
  return NVML_ERROR_UNKNOWN;
}

static uint64_t bus_place(uint32_t card) {
  const soft_card_facts *facts = &soft_card_at(&nvml_region, card)->facts;
  return (uint64_t)facts->pci_domain << 32 | facts->pci_bus << 8 | facts->pci_device;
}

static void find_cards(unsigned int flags) {
  count = 0;
  for (uint32_t i = 0; i < soft_card_count(&nvml_region); i++) {
    handles[i].card = i;
    if (nodes.cards[i] < 0 || flags & NVML_INIT_FLAG_NO_ATTACH) continue;
    uint32_t at = count++;
    while (at > 0 && bus_place(i) < bus_place(order[at - 1])) {
      order[at] = order[at - 1];
      at--;
    }
    order[at] = i;
  }
}

static nvmlReturn_t start(unsigned int flags) {
  nvmlReturn_t result = from(soft_region_open_for(&nvml_region, (const void *)&start));
  if (result != NVML_SUCCESS) return result;
  if (!soft_region_sound(&nvml_region)) return NVML_ERROR_LIB_RM_VERSION_MISMATCH;
  if (soft_nodes_open(&nvml_region, &nodes) < 0) return errno == ENOENT ? NVML_ERROR_DRIVER_NOT_LOADED : NVML_ERROR_UNKNOWN;
  result = from(soft_slot_claim(&nvml_region, SOFT_KIND_OBSERVER));
  if (result != NVML_SUCCESS) {
    soft_nodes_close(&nodes);
    return result;
  }
  find_cards(flags);
  owner = getpid();
  return NVML_SUCCESS;
}

/* In a child of fork another thread's lock, copied held, would never be released. */
static void after_fork(void) {
  if (initialised && owner != getpid()) atomic_store(&lock_word, 0);
}

static nvmlReturn_t initialise(unsigned int flags) {
  after_fork();
  lock();
  nvmlReturn_t result = initialised ? NVML_SUCCESS : start(flags);
  if (result == NVML_SUCCESS) initialised++;
  unlock();
  return result;
}

EXPORT nvmlReturn_t nvmlInit(void) { return initialise(0); }
EXPORT nvmlReturn_t nvmlInit_v2(void) { return initialise(0); }
EXPORT nvmlReturn_t nvmlInitWithFlags(unsigned int flags) { return initialise(flags); }

EXPORT nvmlReturn_t nvmlShutdown(void) {
  after_fork();
  lock();
  nvmlReturn_t result = initialised ? NVML_SUCCESS : NVML_ERROR_UNINITIALIZED;
  if (initialised && --initialised == 0) {
    soft_nodes_close(&nodes);
    if (owner == getpid()) soft_slot_release(&nvml_region);
    nvml_region.me = SOFT_NO_INDEX;
    count = 0;
  }
  unlock();
  return result;
}

/* A forked child has the parent's handles and descriptors, but needs a slot of its own. */
static nvmlReturn_t own_slot(void) {
  if (owner == getpid()) return NVML_SUCCESS;
  after_fork();
  lock();
  nvmlReturn_t result = NVML_SUCCESS;
  if (owner != getpid()) {
    nvml_region.me = SOFT_NO_INDEX;
    result = from(soft_slot_claim(&nvml_region, SOFT_KIND_OBSERVER));
    if (result == NVML_SUCCESS) owner = getpid();
    else nvml_region.me = SOFT_NO_INDEX;
  }
  unlock();
  return result;
}

static void delay(const char *call, uint64_t ns) {
  char name[64];
  const soft_header *header = &nvml_region.state->header;
  soft_text(name, sizeof name, header->nvml_delay_call, sizeof header->nvml_delay_call);
  uint64_t all = header->nvml_delay_ns;
  if (!name[0] || strcmp(name, call) == 0) ns += all;
  enum { LONGEST_NS = 2000000000 };
  while (ns) {
    uint64_t part = ns < LONGEST_NS ? ns : LONGEST_NS;
    soft_real_sleep_ns(part);
    ns -= part;
  }
}

nvmlReturn_t nvml_ready(const char *call) {
  if (!initialised) return NVML_ERROR_UNINITIALIZED;
  if (!soft_region_sound(&nvml_region)) return NVML_ERROR_UNKNOWN;
  nvmlReturn_t result = own_slot();
  if (result != NVML_SUCCESS) return result;
  delay(call, 0);
  return NVML_SUCCESS;
}

nvmlReturn_t nvml_lock(void) {
  lock();
  soft_error error = soft_lock(&nvml_region, PATIENCE_MS);
  if (error == SOFT_OK) return NVML_SUCCESS;
  unlock();
  return from(error);
}

nvmlReturn_t nvml_begin(nvmlDevice_t device, const char *call, soft_card **card, uint32_t *index) {
  nvmlReturn_t result = nvml_ready(call);
  if (result != NVML_SUCCESS) return result;
  int at = nvml_card_of(device);
  if (at < 0) return NVML_ERROR_INVALID_ARGUMENT;
  *index = (uint32_t)at;
  *card = soft_card_at(&nvml_region, *index);
  if (!*card) return NVML_ERROR_UNKNOWN;
  if ((*card)->nvml_delay_ns) soft_real_sleep_ns((*card)->nvml_delay_ns);
  if ((*card)->lost) return NVML_ERROR_GPU_IS_LOST;
  result = nvml_lock();
  if (result != NVML_SUCCESS) return result;
  soft_ledger_sweep(&nvml_region, false);
  soft_sched_advance(&nvml_region, soft_now(&nvml_region));
  return NVML_SUCCESS;
}

nvmlReturn_t nvml_end(nvmlReturn_t result) {
  soft_unlock(&nvml_region);
  unlock();
  return result;
}

nvmlReturn_t nvml_text(char *out, unsigned int length, const char *text) {
  if (!out) return NVML_ERROR_INVALID_ARGUMENT;
  if (strlen(text) >= length) return NVML_ERROR_INSUFFICIENT_SIZE;
  strcpy(out, text);
  return NVML_SUCCESS;
}

uint32_t nvml_pid_of(uint32_t slot) {
  uint32_t pid;
  return soft_slot_alive(&nvml_region, slot, &pid) ? pid : 0;
}

/* ---- handles ------------------------------------------------------------- */

uint32_t nvml_count(void) { return count; }

uint32_t nvml_position(uint32_t card) {
  for (uint32_t i = 0; i < count; i++)
    if (order[i] == card) return i;
  return SOFT_NO_INDEX;
}

nvmlDevice_t nvml_handle(uint32_t card) { return nvml_position(card) == SOFT_NO_INDEX ? NULL : &handles[card]; }

int nvml_card_of(nvmlDevice_t device) {
  for (uint32_t i = 0; i < count; i++)
    if (&handles[order[i]] == device) return (int)order[i];
  return -1;
}

static nvmlReturn_t card_count(unsigned int *out, const char *call) {
  nvmlReturn_t result = nvml_ready(call);
  if (result != NVML_SUCCESS) return result;
  if (!out) return NVML_ERROR_INVALID_ARGUMENT;
  *out = count;
  return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetCount(unsigned int *out) { return card_count(out, __func__); }
EXPORT nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *out) { return card_count(out, __func__); }

static nvmlReturn_t by_index(unsigned int index, nvmlDevice_t *device, const char *call) {
  nvmlReturn_t result = nvml_ready(call);
  if (result != NVML_SUCCESS) return result;
  if (!device || index >= count) return NVML_ERROR_INVALID_ARGUMENT;
  const soft_card *card = soft_card_at(&nvml_region, order[index]);
  if (!card) return NVML_ERROR_UNKNOWN;
  if (card->lost) return NVML_ERROR_GPU_IS_LOST;
  *device = &handles[order[index]];
  return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByIndex(unsigned int index, nvmlDevice_t *device) { return by_index(index, device, __func__); }
EXPORT nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device) { return by_index(index, device, __func__); }

typedef bool (*matches)(const soft_card_facts *facts, const void *wanted);

static nvmlReturn_t by(matches match, const void *wanted, nvmlDevice_t *device, const char *call) {
  nvmlReturn_t result = nvml_ready(call);
  if (result != NVML_SUCCESS) return result;
  if (!wanted || !device) return NVML_ERROR_INVALID_ARGUMENT;
  for (uint32_t i = 0; i < count; i++) {
    const soft_card *card = soft_card_at(&nvml_region, order[i]);
    if (!card || !match(&card->facts, wanted)) continue;
    if (card->lost) return NVML_ERROR_GPU_IS_LOST;
    *device = &handles[order[i]];
    return NVML_SUCCESS;
  }
  return NVML_ERROR_NOT_FOUND;
}

static bool has_uuid(const soft_card_facts *facts, const void *wanted) { return strncmp(facts->uuid, wanted, sizeof facts->uuid) == 0; }
static bool has_bytes(const soft_card_facts *facts, const void *wanted) { return memcmp(facts->uuid_bytes, wanted, 16) == 0; }
static bool has_serial(const soft_card_facts *facts, const void *wanted) { return strncmp(facts->serial, wanted, sizeof facts->serial) == 0; }

static bool has_bus_id(const soft_card_facts *facts, const void *wanted) {
  unsigned int domain = 0, bus, device;
  if (sscanf(wanted, "%x:%x:%x", &domain, &bus, &device) != 3) {
    domain = 0;
    if (sscanf(wanted, "%x:%x", &bus, &device) != 2) return false;
  }
  return facts->pci_domain == domain && facts->pci_bus == bus && facts->pci_device == device;
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device) { return by(has_uuid, uuid, device, __func__); }
EXPORT nvmlReturn_t nvmlDeviceGetHandleBySerial(const char *serial, nvmlDevice_t *device) { return by(has_serial, serial, device, __func__); }
EXPORT nvmlReturn_t nvmlDeviceGetHandleByPciBusId(const char *id, nvmlDevice_t *device) { return by(has_bus_id, id, device, __func__); }
EXPORT nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *id, nvmlDevice_t *device) { return by(has_bus_id, id, device, __func__); }

EXPORT nvmlReturn_t nvmlDeviceGetHandleByUUIDV(const nvmlUUID_v1_t *uuid, nvmlDevice_t *device) {
  if (!uuid) return NVML_ERROR_INVALID_ARGUMENT;
  if (uuid->version != NVML_ABI_STRUCT_VERSION(nvmlUUID_v1_t, 1)) return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
  if (uuid->type == 1) {
    char text[42];
    soft_text(text, sizeof text, uuid->value.str, sizeof uuid->value.str);
    return by(has_uuid, text, device, __func__);
  }
  return uuid->type == 2 ? by(has_bytes, uuid->value.bytes, device, __func__) : NVML_ERROR_INVALID_ARGUMENT;
}

EXPORT nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned int *out) {
  BEGIN(device);
  if (!out) END(NVML_ERROR_INVALID_ARGUMENT);
  *out = nvml_position(index);
  END(NVML_SUCCESS);
}
