#define _GNU_SOURCE
#include "lock.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "clock.h"
#include "ledger.h"

#define WAITERS 0x80000000u

static void futex_wait(_Atomic uint32_t *word, uint32_t value, uint64_t ns) {
  struct timespec limit = {(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)};
  syscall(SYS_futex, word, FUTEX_WAIT, value, &limit, NULL, 0);
}

static void futex_wake(_Atomic uint32_t *word, int count) { syscall(SYS_futex, word, FUTEX_WAKE, count, NULL, NULL, 0); }

/* ---- identity ------------------------------------------------------------ */

static uint64_t namespace_inode(void) {
  char text[64];
  ssize_t n = readlink("/proc/self/ns/pid", text, sizeof text - 1);
  if (n <= 0) return 0;
  text[n] = 0;
  const char *bracket = strchr(text, '[');
  return bracket ? strtoull(bracket + 1, NULL, 10) : 0;
}

static uint64_t start_ticks(void) {
  char text[1024];
  int fd = open("/proc/self/stat", O_RDONLY | O_CLOEXEC);
  if (fd < 0) return 0;
  ssize_t n = read(fd, text, sizeof text - 1);
  close(fd);
  if (n <= 0) return 0;
  text[n] = 0;
  char *at = strrchr(text, ')'); /* a command name may hold blanks and brackets */
  for (int field = 2; at && field < 22; field++) at = strchr(at + 1, ' ');
  return at ? strtoull(at + 1, NULL, 10) : 0;
}

/* The kernel gives each program 16 random bytes. */
static uint64_t image(void) {
  uint64_t bytes[2] = {0};
  const void *at = (const void *)getauxval(AT_RANDOM);
  if (at) memcpy(bytes, at, sizeof bytes);
  return bytes[0] ^ bytes[1];
}

static void own_name(char *out, size_t size) {
  ssize_t n = readlink("/proc/self/exe", out, size - 1);
  if (n < 0) n = 0;
  out[n] = 0;
}

static bool same_process(const soft_region *region, const soft_slot *slot) {
  return slot->pid == region->pid && slot->pid_namespace == region->pid_namespace && slot->start_ticks == region->start_ticks;
}

/* What ran in this process before exec: its locks went with its descriptors. */
static bool predecessor(const soft_region *region, const soft_slot *slot) { return same_process(region, slot) && slot->image != region->image; }

bool soft_slot_alive(const soft_region *region, uint32_t index, uint32_t *host_pid) {
  if (host_pid) *host_pid = 0;
  const soft_slot *slot = soft_slot_at(region, index);
  if (!slot) return false;
  /* the kernel never reports our own locks as in the way */
  if (predecessor(region, slot)) return false;
  if (same_process(region, slot)) {
    if (host_pid) *host_pid = region->pid;
    return true;
  }
  struct flock probe = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = index, .l_len = 1};
  if (fcntl(region->alive_fd, F_GETLK, &probe) != 0) return true; /* can't tell: bury nobody */
  if (probe.l_type == F_UNLCK) return false;
  if (host_pid && probe.l_pid > 0) *host_pid = (uint32_t)probe.l_pid;
  return true;
}

/* ---- slots --------------------------------------------------------------- */

soft_error soft_slot_claim(soft_region *region, uint32_t kind) {
  if (region->me != SOFT_NO_INDEX) return SOFT_OK;
  region->pid = (uint32_t)getpid();
  region->pid_namespace = namespace_inode();
  region->start_ticks = start_ticks();
  region->image = image();

  for (int attempt = 0; attempt < 2; attempt++) {
    for (uint32_t i = 0; i < SOFT_SPARE_SLOT; i++) {
      soft_slot *slot = &region->state->slots[i];
      uint32_t expected = SOFT_SLOT_FREE;
      if (atomic_load(&slot->state) != SOFT_SLOT_FREE) continue;
      if (!atomic_compare_exchange_strong(&slot->state, &expected, SOFT_SLOT_CLAIMED)) continue;
      slot->claimed_real_ns = soft_real_ns();
      struct flock mine = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = i, .l_len = 1};
      if (fcntl(region->alive_fd, F_SETLK, &mine) != 0) {
        int reason = errno;
        atomic_store(&slot->state, SOFT_SLOT_FREE);
        if (reason == EAGAIN || reason == EACCES) continue; /* its last owner was buried alive */
        errno = reason;
        return SOFT_ESYSTEM;
      }
      region->me = i;
      /* identity first: the lock's waiters judge us by it */
      slot->kind = kind;
      slot->pid = region->pid;
      slot->pid_namespace = region->pid_namespace;
      slot->start_ticks = region->start_ticks;
      slot->image = region->image;
      soft_error error = soft_lock(region, SOFT_PATIENCE_MS);
      if (error != SOFT_OK) {
        region->me = SOFT_NO_INDEX;
        atomic_store(&slot->state, SOFT_SLOT_FREE);
        return error;
      }
      for (uint32_t k = 0; k < soft_slots_high(region); k++) {
        const soft_slot *other = &region->state->slots[k];
        uint32_t state = atomic_load(&other->state);
        if (k != i && (state == SOFT_SLOT_LIVE || state == SOFT_SLOT_DEAD) && predecessor(region, other)) soft_ledger_replaced(region, k);
      }
      region->my_generation = ++slot->generation;
      slot->clock_members = 0;
      slot->seen_real_ns = soft_real_ns();
      slot->seen_namespace = slot->seen_pid = 0;
      slot->dead_real_ns = slot->exit_real_ns = 0;
      own_name(slot->name, sizeof slot->name);
      memset(&slot->mps, 0, sizeof slot->mps);
      memset(slot->waiters, 0, sizeof slot->waiters);
      memset(slot->usage, 0, sizeof slot->usage);
      for (uint32_t c = 0; c < SOFT_CARDS; c++) slot->usage[c].queue = SOFT_NO_INDEX;
      if (region->state->header.slots_high < i + 1) region->state->header.slots_high = i + 1;
      atomic_store(&slot->state, SOFT_SLOT_LIVE);
      soft_unlock(region);
      return SOFT_OK;
    }
    /* full: there may be dead ones that nobody has looked at */
    if (attempt == 0) soft_ledger_sweep_from_outside(region);
  }
  return SOFT_EFULL;
}

void soft_slot_release(soft_region *region) {
  uint32_t index = region->me;
  if (index == SOFT_NO_INDEX) return;
  region->me = SOFT_NO_INDEX;
  struct flock mine = {.l_type = F_UNLCK, .l_whence = SEEK_SET, .l_start = index, .l_len = 1};
  atomic_store(&region->state->slots[index].state, SOFT_SLOT_FREE);
  (void)fcntl(region->alive_fd, F_SETLK, &mine);
}

bool soft_slot_mine(const soft_region *region) {
  const soft_slot *slot = soft_slot_at(region, region->me);
  return slot && slot->generation == region->my_generation && atomic_load(&slot->state) == SOFT_SLOT_LIVE;
}

/* ---- lock ---------------------------------------------------------------- */

static bool owner_alive(const soft_region *region, uint32_t word) {
  uint32_t owner = (word & ~WAITERS) - 1;
  if (owner >= SOFT_SLOTS) return false;
  return soft_slot_alive(region, owner, NULL);
}

soft_error soft_lock(soft_region *region, unsigned patience_ms) {
  _Atomic uint32_t *lock = &region->state->header.lock;
  uint32_t mine = region->me + 1;
  uint32_t seen = 0;

  if (atomic_compare_exchange_strong(lock, &seen, mine)) return SOFT_OK;
  for (int spin = 0; spin < 100; spin++) {
    seen = 0;
    if (atomic_load_explicit(lock, memory_order_relaxed) == 0 && atomic_compare_exchange_strong(lock, &seen, mine)) return SOFT_OK;
  }
  uint64_t deadline = soft_real_ns() + patience_ms * 1000000ull;
  for (;;) {
    seen = atomic_load(lock);
    if (seen == 0) {
      /* others may sleep on it still: take it as a waiter */
      if (atomic_compare_exchange_strong(lock, &seen, mine | WAITERS)) return SOFT_OK;
      continue;
    }
    if (!(seen & WAITERS)) {
      if (!atomic_compare_exchange_strong(lock, &seen, seen | WAITERS)) continue;
      seen |= WAITERS;
    }
    futex_wait(lock, seen, 10000000);
    uint32_t again = atomic_load(lock);
    if (again == seen && !owner_alive(region, again)) {
      if (atomic_compare_exchange_strong(lock, &again, mine | WAITERS)) {
        region->state->header.lock_broken++;
        soft_ledger_recount(region);
        return SOFT_OK;
      }
    }
    if (soft_real_ns() > deadline) return SOFT_ELOCK;
  }
}

void soft_unlock(soft_region *region) {
  uint32_t word = atomic_exchange(&region->state->header.lock, 0);
  if (word & WAITERS) futex_wake(&region->state->header.lock, 1);
}
