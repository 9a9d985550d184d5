/*
 * process.c - the driver's start in this process, its lock, and its end.
 *
 * A child that was forked after cuInit can't use CUDA: a page that the kernel
 * wipes on fork tells it apart, raw clone included.
 */
#define _GNU_SOURCE
#include <linux/futex.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "../state/clock.h"
#include "../state/lock.h"
#include "../state/nodes.h"
#include "../state/sched.h"
#include "driver.h"

#ifndef MADV_WIPEONFORK
#define MADV_WIPEONFORK 18
#endif

driver the_driver;

static _Atomic uint32_t lock_word; /* 0 free, 1 held, 2 held and waited for */
static volatile char *fork_page;   /* 1 in the process that initialised */
static pid_t init_pid;             /* where the kernel can't wipe */
static bool wiped_on_fork;
static soft_nodes nodes;

static void lock(void) {
  uint32_t seen = 0;
  if (atomic_compare_exchange_strong(&lock_word, &seen, 1)) return;
  while (atomic_exchange(&lock_word, 2) != 0) syscall(SYS_futex, &lock_word, FUTEX_WAIT_PRIVATE, 2, NULL, NULL, 0);
}

static void unlock(void) {
  if (atomic_exchange(&lock_word, 0) == 2) syscall(SYS_futex, &lock_word, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}

static bool is_forked_child(void) {
  if (!fork_page) return false;
  return wiped_on_fork ? !*fork_page : getpid() != init_pid;
}

static bool mark_process(void) {
  void *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) return false;
  wiped_on_fork = madvise(page, 4096, MADV_WIPEONFORK) == 0;
  init_pid = getpid();
  *(volatile char *)page = 1;
  fork_page = page;
  return true;
}

CUresult driver_from(soft_error error) {
  switch (error) {
  case SOFT_OK: return CUDA_SUCCESS;
  case SOFT_ENOSTATE: return CUDA_ERROR_NO_DEVICE;
  case SOFT_EBADSTATE: return CUDA_ERROR_SYSTEM_DRIVER_MISMATCH;
  case SOFT_EMEMORY: return CUDA_ERROR_OUT_OF_MEMORY;
  case SOFT_EFULL: return CUDA_ERROR_DEVICE_UNAVAILABLE;
  case SOFT_ESYSTEM: return CUDA_ERROR_OPERATING_SYSTEM;
  case SOFT_ELOCK:
  case SOFT_ELOST: return CUDA_ERROR_UNKNOWN;
  }
  return CUDA_ERROR_UNKNOWN;
}

static CUresult start(void) {
  driver *d = &the_driver;
  bool reachable[SOFT_CARDS] = {false};

  soft_error error = soft_region_open_for(&d->region, (const void *)&start);
  if (error != SOFT_OK) return driver_from(error);
  if (soft_nodes_open(&d->region, &nodes) <= 0) {
    soft_nodes_close(&nodes);
    return CUDA_ERROR_NO_DEVICE;
  }
  for (uint32_t i = 0; i < soft_card_count(&d->region); i++) reachable[i] = nodes.cards[i] >= 0 && !soft_card_at(&d->region, i)->lost;
  mps_offer offer;
  CUresult result = mps_connect(&d->region, &offer);
  if (result != CUDA_SUCCESS) {
    soft_nodes_close(&nodes);
    return result;
  }
  for (uint32_t i = 0; offer.client && i < SOFT_CARDS; i++) reachable[i] &= offer.cards >> i & 1;
  visible_devices(d, reachable, getenv("CUDA_VISIBLE_DEVICES"), getenv("CUDA_DEVICE_ORDER"));
  if (!d->device_count) {
    soft_nodes_close(&nodes);
    return CUDA_ERROR_NO_DEVICE;
  }
  error = soft_slot_claim(&d->region, SOFT_KIND_CUDA);
  if (error == SOFT_OK && offer.client) {
    result = mps_join(d, &offer, getenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"), getenv("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"));
    if (result != CUDA_SUCCESS) {
      soft_slot_release(&d->region);
      soft_nodes_close(&nodes);
      return result;
    }
  }
  if (error == SOFT_OK && d->region.state->header.clock_mode == SOFT_CLOCK_VIRTUAL) error = soft_clock_join(&d->region);
  if (error != SOFT_OK || !mark_process()) {
    soft_nodes_close(&nodes);
    return error != SOFT_OK ? driver_from(error) : CUDA_ERROR_OPERATING_SYSTEM;
  }
  d->next_id = 1;
  d->next_stream = 1;
  d->initialised = true;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuInit(unsigned int flags) {
  if (flags) return CUDA_ERROR_INVALID_VALUE;
  if (is_forked_child()) return CUDA_ERROR_NOT_INITIALIZED;
  lock();
  CUresult result = the_driver.initialised ? CUDA_SUCCESS : start();
  unlock();
  return result;
}

__thread bool driver_in_host_function;

CUresult driver_enter(void) {
  if (driver_in_host_function) return CUDA_ERROR_NOT_PERMITTED;
  if (!the_driver.initialised || is_forked_child()) return CUDA_ERROR_NOT_INITIALIZED;
  lock();
  return CUDA_SUCCESS;
}

CUresult driver_leave(CUresult result) {
  unlock();
  return result;
}

void driver_pause(void) { unlock(); }
void driver_resume(void) { lock(); }

/* The kernel driver starts to free when the descriptors close; say when that is. */
__attribute__((destructor)) static void say_exit(void) {
  soft_slot *slot = the_driver.initialised && !is_forked_child() ? soft_slot_at(&the_driver.region, the_driver.region.me) : NULL;
  if (slot && soft_slot_mine(&the_driver.region)) slot->exit_real_ns = soft_real_ns();
}

/* The one door for time, for code that must agree with this driver about it (tests, the compute controller). */
EXPORT uint64_t softgpu_clock_ns(void);
EXPORT int softgpu_sleep_until_ns(uint64_t until_ns);
EXPORT int softgpu_clock_join(void);
EXPORT int softgpu_clock_leave(void);

EXPORT uint64_t softgpu_clock_ns(void) { return the_driver.initialised ? soft_now(&the_driver.region) : soft_real_ns(); }
EXPORT int softgpu_sleep_until_ns(uint64_t until_ns) {
  if (!the_driver.initialised || is_forked_child()) return CUDA_ERROR_NOT_INITIALIZED;
  return driver_from(soft_sleep_until(&the_driver.region, until_ns));
}
EXPORT int softgpu_clock_join(void) {
  if (!the_driver.initialised || is_forked_child()) return CUDA_ERROR_NOT_INITIALIZED;
  return driver_from(soft_clock_join(&the_driver.region));
}
EXPORT int softgpu_clock_leave(void) {
  if (!the_driver.initialised || is_forked_child()) return CUDA_ERROR_NOT_INITIALIZED;
  return driver_from(soft_clock_leave(&the_driver.region));
}

/* How long a card worked for a process (by the pid that it has in its own namespace) up to now, of all its life. */
EXPORT int softgpu_busy_ns(unsigned int card, unsigned int pid, uint64_t *out);
EXPORT int softgpu_busy_ns(unsigned int card, unsigned int pid, uint64_t *out) {
  CUresult result = driver_enter();
  if (result != CUDA_SUCCESS) return result;
  soft_region *region = &the_driver.region;
  if (!out || card >= region->state->header.card_count) return driver_leave(CUDA_ERROR_INVALID_VALUE);
  result = driver_from(soft_lock(region, SOFT_PATIENCE_MS));
  if (result != CUDA_SUCCESS) return driver_leave(result);
  soft_sched_advance_card(region, card, soft_now(region));
  result = CUDA_ERROR_NOT_FOUND;
  for (uint32_t i = 0; i < soft_slots_high(region); i++) {
    const soft_slot *slot = soft_slot_at(region, i);
    if (slot->kind != SOFT_KIND_CUDA || slot->state != SOFT_SLOT_LIVE || slot->pid != pid) continue;
    *out = slot->usage[card].busy_ns;
    result = CUDA_SUCCESS;
  }
  soft_unlock(region);
  return driver_leave(result);
}
