#define _GNU_SOURCE
#include "clock.h"

#include <errno.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "ledger.h"
#include "lock.h"
#include "sched.h"

enum { LONGEST_SLEEP_NS = 20000000, SPIN_NS = 60000, SLEEP_SLACK_NS = 55000 };

uint64_t soft_real_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

void soft_real_sleep_ns(uint64_t ns) {
  struct timespec left = {(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)};
  while (nanosleep(&left, &left) != 0 && errno == EINTR) {
  }
}

static bool is_virtual(const soft_region *region) { return region->state->header.clock_mode == SOFT_CLOCK_VIRTUAL; }

uint64_t soft_now(const soft_region *region) {
  return is_virtual(region) ? __atomic_load_n(&region->state->header.virtual_ns, __ATOMIC_ACQUIRE) : soft_real_ns();
}

uint64_t soft_wall_ns(const soft_region *region, uint64_t now_ns) { return region->state->header.epoch_ns + now_ns; }

/* ---- the virtual clock --------------------------------------------------- */

static bool card_gone(const soft_region *region, uint32_t queue) {
  const soft_queue *at = soft_queue_at(region, queue);
  const soft_card *card = at ? soft_card_at(region, at->card) : NULL;
  return !card || card->lost;
}

static bool over(soft_region *region, const soft_slot *slot, const soft_waiter *waiter) {
  if (waiter->until_ns <= region->state->header.virtual_ns) return true;
  if (waiter->queue == SOFT_NO_INDEX) return waiter->stream == SOFT_GATES && slot->gates_ready;
  return card_gone(region, waiter->queue) || soft_sched_done(region, waiter->queue, waiter->stream, waiter->target_seq);
}

/* Ends the waits that are over. Says whether there was one. */
static bool release_waiters(soft_region *region) {
  bool any = false;
  uint32_t high = soft_slots_high(region);
  for (uint32_t i = 0; i < high; i++) {
    soft_slot *slot = &region->state->slots[i];
    if (atomic_load(&slot->state) != SOFT_SLOT_LIVE) continue;
    for (int w = 0; w < SOFT_WAITERS; w++) {
      soft_waiter *waiter = &slot->waiters[w];
      if (!waiter->used || atomic_load(&waiter->done) || !over(region, slot, waiter)) continue;
      atomic_store(&waiter->done, 1);
      syscall(SYS_futex, &waiter->done, FUTEX_WAKE, 1, NULL, NULL, 0);
      any = true;
    }
  }
  return any;
}

static bool all_wait(const soft_region *region, uint64_t *earliest) {
  uint32_t high = soft_slots_high(region);
  *earliest = SOFT_FOREVER;
  for (uint32_t i = 0; i < high; i++) {
    const soft_slot *slot = &region->state->slots[i];
    uint32_t waiting = 0;
    if (atomic_load(&slot->state) != SOFT_SLOT_LIVE) continue;
    for (int w = 0; w < SOFT_WAITERS; w++) {
      if (!slot->waiters[w].used || atomic_load(&slot->waiters[w].done)) continue;
      waiting++;
      if (slot->waiters[w].until_ns < *earliest) *earliest = slot->waiters[w].until_ns;
    }
    if (waiting < slot->clock_members) return false;
  }
  return true;
}

static void move_clock(soft_region *region) {
  uint64_t next;
  if (release_waiters(region)) return;
  while (all_wait(region, &next)) {
    for (uint32_t c = 0; c < soft_card_count(region); c++) {
      uint64_t change = soft_sched_next(region, c);
      if (change < next) next = change;
    }
    if (next == SOFT_FOREVER) return; /* all wait for what never comes */
    if (next > region->state->header.virtual_ns) __atomic_store_n(&region->state->header.virtual_ns, next, __ATOMIC_RELEASE);
    soft_sched_advance(region, region->state->header.virtual_ns);
    if (release_waiters(region)) return;
  }
}

static soft_error virtual_wait(soft_region *region, soft_waiter wish) {
  soft_error error = soft_lock(region, SOFT_PATIENCE_MS);
  if (error != SOFT_OK) return error;
  if (!soft_slot_mine(region)) {
    soft_unlock(region);
    return SOFT_ELOST;
  }
  soft_slot *slot = &region->state->slots[region->me];
  soft_waiter *waiter = NULL;
  for (int w = 0; w < SOFT_WAITERS && !waiter; w++)
    if (!slot->waiters[w].used) waiter = &slot->waiters[w];
  if (!waiter) {
    soft_unlock(region);
    return SOFT_EFULL;
  }
  soft_sched_advance(region, region->state->header.virtual_ns);
  wish.used = 1;
  *waiter = wish;
  for (;;) {
    move_clock(region);
    if (atomic_load(&waiter->done)) break;
    soft_unlock(region);
    struct timespec limit = {0, LONGEST_SLEEP_NS};
    long timed_out = syscall(SYS_futex, &waiter->done, FUTEX_WAIT, 0, &limit, NULL, 0) != 0 && errno == ETIMEDOUT;
    error = soft_lock(region, SOFT_PATIENCE_MS);
    if (error != SOFT_OK) return error;
    if (!soft_slot_mine(region)) {
      soft_unlock(region);
      return SOFT_ELOST;
    }
    if (timed_out) soft_ledger_sweep(region, true); /* a member that was killed must not stop the clock */
    if (timed_out && wish.stream == SOFT_GATES) break; /* its caller looks at memory that others may write, too */
  }
  waiter->used = 0;
  error = wish.queue != SOFT_NO_INDEX && card_gone(region, wish.queue) ? SOFT_ELOST : SOFT_OK;
  soft_unlock(region);
  return error;
}

/* ---- waiting ------------------------------------------------------------- */

soft_error soft_sleep_until(soft_region *region, uint64_t until_ns) {
  if (is_virtual(region)) {
    if (until_ns <= soft_now(region)) return SOFT_OK;
    return virtual_wait(region, (soft_waiter){.until_ns = until_ns, .queue = SOFT_NO_INDEX});
  }
  for (;;) {
    uint64_t now = soft_real_ns();
    if (now >= until_ns) return SOFT_OK;
    soft_real_sleep_ns(until_ns - now);
  }
}

static void wait_a_while(uint64_t least, bool on_card, bool spin) {
  if (!on_card && least < 100000) least = 100000; /* others have the card: no use in looking at once */
  if (least > LONGEST_SLEEP_NS) least = LONGEST_SLEEP_NS;
  if (spin && on_card && least <= SPIN_NS) {
    uint64_t until = soft_real_ns() + least;
    while (soft_real_ns() < until) {
    }
  } else {
    soft_real_sleep_ns(spin && least > SLEEP_SLACK_NS ? least - SLEEP_SLACK_NS : least);
  }
}

soft_error soft_wait_queue(soft_region *region, uint32_t queue, uint32_t stream, uint64_t seq, bool spin) {
  if (is_virtual(region))
    return virtual_wait(region, (soft_waiter){.until_ns = SOFT_FOREVER, .queue = queue, .stream = stream, .target_seq = seq});
  for (;;) {
    soft_error error = soft_lock(region, SOFT_PATIENCE_MS);
    if (error != SOFT_OK) return error;
    bool mine = soft_slot_mine(region), gone = card_gone(region, queue);
    if (mine && !gone) soft_sched_advance(region, soft_real_ns());
    bool done = soft_sched_done(region, queue, stream, seq);
    /* a dead one's work is in the way, a dead MPS server's clients wait for nothing, and nobody else may look */
    if (mine && !done && soft_real_ns() - region->state->header.scan_real_ns > LONGEST_SLEEP_NS) soft_ledger_sweep(region, true);
    uint64_t least = soft_sched_least(region, queue, stream, seq);
    const soft_queue *at = soft_queue_at(region, queue);
    const soft_card *card = at ? soft_card_at(region, at->card) : NULL;
    bool on_card = card && (card->current == queue || (card->current_party && at->party == card->current_party));
    soft_unlock(region);
    if (!mine || gone) return SOFT_ELOST;
    if (done) return SOFT_OK;
    wait_a_while(least ? least : 1000, on_card, spin);
  }
}

soft_error soft_wait_gates(soft_region *region) {
  return virtual_wait(region, (soft_waiter){.until_ns = SOFT_FOREVER, .queue = SOFT_NO_INDEX, .stream = SOFT_GATES});
}

soft_error soft_clock_nudge(soft_region *region) {
  soft_error error = soft_lock(region, SOFT_PATIENCE_MS);
  if (error != SOFT_OK) return error;
  soft_sched_advance(region, soft_now(region));
  if (is_virtual(region)) release_waiters(region);
  soft_unlock(region);
  return SOFT_OK;
}

static soft_error change_members(soft_region *region, bool join) {
  soft_error error = soft_lock(region, SOFT_PATIENCE_MS);
  if (error != SOFT_OK) return error;
  soft_slot *slot = soft_slot_at(region, region->me);
  if (!slot || !soft_slot_mine(region)) error = SOFT_ELOST;
  else if (join) slot->clock_members++;
  else if (slot->clock_members) slot->clock_members--;
  if (error == SOFT_OK && is_virtual(region)) move_clock(region);
  soft_unlock(region);
  return error;
}

soft_error soft_clock_join(soft_region *region) { return change_members(region, true); }
soft_error soft_clock_leave(soft_region *region) { return change_members(region, false); }
