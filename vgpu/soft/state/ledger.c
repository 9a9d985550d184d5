#define _GNU_SOURCE
#include "ledger.h"

#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "clock.h"
#include "lock.h"
#include "mps.h"
#include "objects.h"
#include "sched.h"

static uint64_t add(uint64_t a, uint64_t b) { return a + b < a ? UINT64_MAX : a + b; }
static uint64_t less(uint64_t a, uint64_t b) { return a > b ? a - b : 0; }

static uint64_t all_bytes(const soft_usage *usage) { return add(usage->context_bytes, add(usage->memory_bytes, usage->managed_bytes)); }

uint64_t soft_card_capacity(const soft_card *card) { return less(card->facts.total_bytes, card->facts.reserved_bytes); }
uint64_t soft_card_free(const soft_card *card) { return less(soft_card_capacity(card), card->used_bytes); }

static soft_usage *own_usage(soft_region *region, uint32_t card) {
  soft_slot *slot = soft_slot_at(region, region->me);
  return slot && card < SOFT_CARDS ? &slot->usage[card] : NULL;
}

static void note_peak(soft_usage *usage) {
  uint64_t now = usage->context_bytes + usage->memory_bytes;
  if (now > usage->peak_bytes) usage->peak_bytes = now;
}

/* Takes whole pages of managed memory off a slot's figure; the slot's own process notices later. */
static uint64_t evict_from(soft_card *card, soft_usage *usage, uint64_t need) {
  uint64_t whole = need > UINT64_MAX - SOFT_PAGE_BYTES ? need : (need + SOFT_PAGE_BYTES - 1) / SOFT_PAGE_BYTES * SOFT_PAGE_BYTES;
  uint64_t taken = whole < usage->managed_bytes ? whole : usage->managed_bytes;
  usage->managed_bytes -= taken;
  card->used_bytes = less(card->used_bytes, taken);
  return taken;
}

/* Managed memory makes room for bytes: all that is needed, or nothing. */
static bool evict(soft_region *region, uint32_t index, uint64_t bytes) {
  soft_card *card = soft_card_at(region, index);
  uint32_t high = soft_slots_high(region);
  uint64_t there = 0, need = less(bytes, soft_card_free(card));
  for (uint32_t i = 0; i < high; i++) there = add(there, region->state->slots[i].usage[index].managed_bytes);
  if (there < need) return false;
  soft_usage *own = own_usage(region, index);
  if (own) need = less(need, evict_from(card, own, need));
  for (uint32_t i = 0; i < high && need; i++) need = less(need, evict_from(card, &region->state->slots[i].usage[index], need));
  return bytes <= soft_card_free(card);
}

static soft_error reserve(soft_region *region, uint32_t index, uint64_t bytes) {
  soft_card *card = soft_card_at(region, index);
  if (!card || card->lost) return SOFT_ELOST;
  if (!soft_slot_mine(region)) return SOFT_ELOST;
  const soft_usage *own = own_usage(region, index);
  if (own->limit_bytes && bytes > less(own->limit_bytes, add(own->context_bytes, own->memory_bytes))) return SOFT_EMEMORY;
  if (card->alloc_fail_count) {
    card->alloc_fail_count--;
    return SOFT_EMEMORY;
  }
  if (bytes > soft_card_free(card)) {
    if (bytes > soft_card_capacity(card)) return SOFT_EMEMORY;
    soft_ledger_sweep(region, true);
    if (bytes > soft_card_free(card) && !evict(region, index, bytes)) return SOFT_EMEMORY;
  }
  card->used_bytes += bytes;
  return SOFT_OK;
}

soft_error soft_ledger_charge(soft_region *region, uint32_t card, uint64_t bytes) {
  soft_usage *usage = own_usage(region, card);
  if (!usage) return SOFT_ELOST;
  soft_error error = reserve(region, card, bytes);
  if (error != SOFT_OK) return error;
  usage->memory_bytes += bytes;
  note_peak(usage);
  region->state->slots[region->me].seen_real_ns = soft_real_ns();
  return SOFT_OK;
}

void soft_ledger_release(soft_region *region, uint32_t card, uint64_t bytes) {
  soft_usage *usage = own_usage(region, card);
  soft_card *on = soft_card_at(region, card);
  if (!usage || !on || !soft_slot_mine(region)) return;
  bytes = bytes < usage->memory_bytes ? bytes : usage->memory_bytes;
  usage->memory_bytes -= bytes;
  on->used_bytes = less(on->used_bytes, bytes);
}

soft_error soft_ledger_move_in(soft_region *region, uint32_t index, uint64_t bytes) {
  soft_usage *usage = own_usage(region, index);
  soft_card *card = soft_card_at(region, index);
  if (!usage || !card || card->lost || !soft_slot_mine(region)) return SOFT_ELOST;
  if (bytes > soft_card_free(card) && !evict(region, index, bytes)) return SOFT_EMEMORY;
  usage->managed_bytes += bytes;
  card->used_bytes += bytes;
  return SOFT_OK;
}

void soft_ledger_move_out(soft_region *region, uint32_t index, uint64_t bytes) {
  soft_usage *usage = own_usage(region, index);
  soft_card *card = soft_card_at(region, index);
  if (!usage || !card || !soft_slot_mine(region)) return;
  bytes = bytes < usage->managed_bytes ? bytes : usage->managed_bytes;
  usage->managed_bytes -= bytes;
  card->used_bytes = less(card->used_bytes, bytes);
}

static soft_error open_context(soft_region *region, uint32_t card, uint64_t bytes) {
  soft_usage *usage = own_usage(region, card);
  soft_card *on = soft_card_at(region, card);
  if (!usage || !on) return SOFT_ELOST;
  if (usage->context_count == 0) {
    soft_error error = reserve(region, card, bytes);
    if (error != SOFT_OK) return error;
    usage->context_bytes = bytes;
    usage->since_ns = soft_now(region);
    note_peak(usage);
  }
  usage->context_count++;
  on->context_count++;
  region->state->slots[region->me].seen_real_ns = soft_real_ns();
  return SOFT_OK;
}

soft_error soft_ledger_open_context(soft_region *region, uint32_t card) {
  const soft_card *on = soft_card_at(region, card);
  return on ? open_context(region, card, on->context_bytes) : SOFT_ELOST;
}

soft_error soft_ledger_open_server(soft_region *region, uint32_t card) { return open_context(region, card, SOFT_SERVER_BYTES); }

void soft_ledger_close_context(soft_region *region, uint32_t card) {
  soft_usage *usage = own_usage(region, card);
  soft_card *on = soft_card_at(region, card);
  if (!usage || !on || !usage->context_count || !soft_slot_mine(region)) return;
  usage->context_count--;
  if (on->context_count) on->context_count--;
  if (usage->context_count == 0) {
    on->used_bytes = less(on->used_bytes, usage->context_bytes);
    usage->context_bytes = 0;
  }
}

/* ---- death --------------------------------------------------------------- */

static void retire(soft_region *region, const soft_slot *slot, uint32_t card) {
  soft_header *header = &region->state->header;
  const soft_usage *usage = &slot->usage[card];
  if (!usage->peak_bytes || !header->cards[card].accounting) return;
  soft_retired *record = &header->retired[header->retired_count++ % SOFT_RETIRED];
  *record = (soft_retired){.pid_namespace = slot->pid_namespace,
                           .seen_namespace = slot->seen_namespace,
                           .pid = slot->pid,
                           .seen_pid = slot->seen_pid,
                           .card = card,
                           .peak_bytes = usage->peak_bytes,
                           .busy_ns = usage->busy_ns,
                           .start_ns = usage->since_ns,
                           .end_ns = soft_now(region)};
}

static void bury(soft_region *region, uint32_t index) {
  soft_slot *slot = &region->state->slots[index];
  soft_objects_bury(region, index);
  for (uint32_t c = 0; c < soft_card_count(region); c++) {
    soft_usage *usage = &slot->usage[c];
    soft_card *card = &region->state->header.cards[c];
    retire(region, slot, c);
    card->used_bytes = less(card->used_bytes, all_bytes(usage));
    card->context_count = usage->context_count < card->context_count ? card->context_count - usage->context_count : 0;
    memset(usage, 0, sizeof *usage);
    usage->queue = SOFT_NO_INDEX;
  }
  slot->generation++;
  atomic_store(&slot->state, SOFT_SLOT_FREE);
}

/* The kernel closes descriptors, and so frees, before it starts the next program. */
void soft_ledger_replaced(soft_region *region, uint32_t index) {
  soft_slot *slot = &region->state->slots[index];
  slot->dead_real_ns = slot->seen_real_ns;
  atomic_store(&slot->state, SOFT_SLOT_DEAD);
  soft_sched_drop_slot(region, index);
  if (slot->kind == SOFT_KIND_SERVER) soft_mps_end_clients(region, index);
  bury(region, index);
}

void soft_ledger_sweep(soft_region *region, bool force) {
  soft_header *header = &region->state->header;
  uint64_t now = soft_real_ns();
  if (!force && header->scan_real_ns <= now && now - header->scan_real_ns < 1000000) return;
  header->scan_real_ns = now;

  uint32_t high = soft_slots_high(region);
  for (uint32_t i = 0; i < high; i++) {
    soft_slot *slot = &region->state->slots[i];
    uint32_t state = atomic_load(&slot->state), pid = 0;
    if (state == SOFT_SLOT_FREE) continue;
    if (i == region->me) {
      slot->seen_real_ns = now;
      continue;
    }
    if (state == SOFT_SLOT_CLAIMED) {
      /* killed while it came in; the owner needs a moment between claim and lock */
      if (now - slot->claimed_real_ns > 1000000000ull && !soft_slot_alive(region, i, NULL)) atomic_store(&slot->state, SOFT_SLOT_FREE);
      continue;
    }
    if (state == SOFT_SLOT_LIVE) {
      if (soft_slot_alive(region, i, &pid)) {
        slot->seen_real_ns = now;
        if (pid) {
          slot->seen_pid = pid;
          slot->seen_namespace = region->pid_namespace;
        }
        continue;
      }
      uint64_t last = slot->exit_real_ns ? slot->exit_real_ns : slot->seen_real_ns;
      bool known = slot->exit_real_ns != 0 || now - last >= header->free_delay_ns;
      slot->dead_real_ns = known && last <= now ? last : now;
      atomic_store(&slot->state, SOFT_SLOT_DEAD);
      soft_sched_drop_slot(region, i);
      if (slot->kind == SOFT_KIND_SERVER) soft_mps_end_clients(region, i);
    }
    if (now < slot->dead_real_ns || now - slot->dead_real_ns >= header->free_delay_ns) bury(region, i);
  }
  soft_objects_sweep(region);
}

void soft_ledger_sweep_from_outside(soft_region *region) {
  struct flock spare = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = SOFT_SPARE_SLOT, .l_len = 1};
  if (fcntl(region->alive_fd, F_SETLKW, &spare) != 0) return;
  region->me = SOFT_SPARE_SLOT;
  if (soft_lock(region, SOFT_PATIENCE_MS) == SOFT_OK) {
    soft_ledger_sweep(region, true);
    soft_unlock(region);
  }
  region->me = SOFT_NO_INDEX;
  spare.l_type = F_UNLCK;
  (void)fcntl(region->alive_fd, F_SETLK, &spare);
}

void soft_ledger_recount(soft_region *region) {
  uint64_t used[SOFT_CARDS] = {0};
  uint32_t contexts[SOFT_CARDS] = {0};
  uint32_t high = soft_slots_high(region);
  for (uint32_t i = 0; i < high; i++) {
    const soft_slot *slot = &region->state->slots[i];
    uint32_t state = atomic_load(&slot->state);
    if (state != SOFT_SLOT_LIVE && state != SOFT_SLOT_DEAD) continue;
    for (uint32_t c = 0; c < SOFT_CARDS; c++) {
      used[c] = add(used[c], all_bytes(&slot->usage[c]));
      contexts[c] += slot->usage[c].context_count;
    }
  }
  soft_objects_recount(region, used);
  for (uint32_t c = 0; c < soft_card_count(region); c++) {
    region->state->header.cards[c].used_bytes = used[c];
    region->state->header.cards[c].context_count = contexts[c];
  }
  soft_sched_repair(region);
}
