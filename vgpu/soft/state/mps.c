#define _GNU_SOURCE
#include "mps.h"

#include <stdlib.h>
#include <string.h>

#include "../../lib/include/cuda_abi.h"
#include "clock.h"
#include "ledger.h"
#include "lock.h"
#include "sched.h"

bool soft_mps_percentage(const char *text, uint32_t *ppm) {
  char *end;
  if (!text || ((*text < '0' || *text > '9') && *text != '.')) return false;
  double value = strtod(text, &end);
  if (*end || !(value > 0) || value > 100) return false;
  *ppm = (uint32_t)(value * 10000 + 0.5);
  return *ppm > 0;
}

bool soft_mps_bytes(const char *text, uint64_t *bytes) {
  static const struct { char letter; unsigned int shift; } units[] = {{'K', 10}, {'M', 20}, {'G', 30}};
  char *end;
  unsigned int shift = 0;
  if (!text || *text < '0' || *text > '9') return false;
  unsigned long long value = strtoull(text, &end, 10);
  for (size_t i = 0; i < sizeof units / sizeof units[0]; i++)
    if ((*end & ~0x20) == units[i].letter) shift = units[i].shift;
  if (shift) end++;
  if ((*end & ~0x20) == 'B') end++;
  if (*end || value > UINT64_MAX >> shift) return false;
  *bytes = (uint64_t)value << shift;
  return true;
}

uint32_t soft_mps_multiprocessors(uint32_t all, uint32_t ppm) {
  uint32_t part = (uint32_t)((uint64_t)all * (ppm < SOFT_MPS_WHOLE ? ppm : SOFT_MPS_WHOLE) / SOFT_MPS_WHOLE);
  return part ? part : 1;
}

bool soft_mps_server_lives(const soft_region *region, const soft_slot *client) {
  const soft_slot *server = soft_slot_at(region, client->mps.server - 1);
  if (!server || server->kind != SOFT_KIND_SERVER || server->generation != client->mps.generation) return false;
  return atomic_load(&server->state) == SOFT_SLOT_LIVE && soft_slot_alive(region, client->mps.server - 1, NULL);
}

static bool linked(const soft_region *region, const soft_slot *client, uint32_t server) {
  const soft_slot *at = soft_slot_at(region, server);
  return at && client->mps.server == server + 1 && client->mps.generation == at->generation;
}

bool soft_mps_client_of(const soft_region *region, uint32_t index, uint32_t server) {
  const soft_slot *slot = soft_slot_at(region, index);
  return slot && atomic_load(&slot->state) == SOFT_SLOT_LIVE && linked(region, slot, server);
}

static uint32_t clients_on(const soft_region *region, uint32_t server, uint32_t card) {
  uint32_t count = 0, high = soft_slots_high(region);
  for (uint32_t i = 0; i < high; i++)
    if (soft_mps_client_of(region, i, server) && soft_slot_at(region, i)->mps.cards >> card & 1) count++;
  return count;
}

uint32_t soft_mps_attach(soft_region *region, uint32_t server, uint64_t generation, uint32_t cards) {
  soft_slot *to = soft_slot_at(region, server), *own = soft_slot_at(region, region->me);
  if (!to || !own || to->kind != SOFT_KIND_SERVER || to->generation != generation || atomic_load(&to->state) != SOFT_SLOT_LIVE)
    return CUDA_ERROR_MPS_CONNECTION_FAILED;
  if (to->mps.fault) return CUDA_ERROR_MPS_SERVER_NOT_READY;
  soft_ledger_sweep(region, true);
  for (uint32_t c = 0; c < soft_card_count(region); c++) {
    uint32_t most = soft_card_at(region, c)->facts.cc_major >= 7 ? SOFT_MPS_CLIENTS : SOFT_MPS_OLD_CLIENTS;
    if (cards >> c & 1 && clients_on(region, server, c) >= most) return CUDA_ERROR_MPS_MAX_CLIENTS_REACHED;
  }
  own->mps = (soft_mps){.server = server + 1, .generation = generation, .cards = cards, .id = to->mps.id++};
  return CUDA_SUCCESS;
}

void soft_mps_fail(soft_region *region, uint32_t client, uint32_t error) {
  soft_slot *slot = soft_slot_at(region, client);
  if (!slot || slot->mps.error) return;
  slot->mps.error = error;
  for (uint32_t c = 0; c < soft_card_count(region); c++) {
    const soft_queue *queue = soft_queue_at(region, slot->usage[c].queue);
    if (!queue || queue->owner != client + 1) continue;
    soft_sched_advance_card(region, c, soft_now(region));
    soft_sched_drop_queue(region, slot->usage[c].queue);
  }
}

void soft_mps_end_clients(soft_region *region, uint32_t server) {
  uint32_t high = soft_slots_high(region);
  for (uint32_t i = 0; i < high; i++)
    if (soft_mps_client_of(region, i, server)) soft_mps_fail(region, i, CUDA_ERROR_MPS_RPC_FAILURE);
}

void soft_mps_fault(soft_region *region, uint32_t client, uint32_t error) {
  const soft_slot *slot = soft_slot_at(region, client);
  soft_slot *server = slot ? soft_slot_at(region, slot->mps.server - 1) : NULL;
  if (!server || !linked(region, slot, slot->mps.server - 1)) return;
  uint32_t index = slot->mps.server - 1, cards = slot->mps.cards, high = soft_slots_high(region);
  server->mps.fault = error;
  for (uint32_t i = 0; i < high; i++)
    if (soft_mps_client_of(region, i, index) && soft_slot_at(region, i)->mps.cards & cards) soft_mps_fail(region, i, error);
}

/* Two slots that a card in exclusive mode takes for one process. */
static bool together(const soft_region *region, uint32_t own, uint32_t other) {
  const soft_slot *a = soft_slot_at(region, own), *b = soft_slot_at(region, other);
  if (a->mps.server) return linked(region, a, other) || (b->mps.server == a->mps.server && b->mps.generation == a->mps.generation);
  return a->kind == SOFT_KIND_SERVER && linked(region, b, own);
}

bool soft_mode_allows(soft_region *region, uint32_t index) {
  const soft_card *card = soft_card_at(region, index);
  if (!card || card->compute_mode == CU_COMPUTEMODE_PROHIBITED) return false;
  if (card->compute_mode != CU_COMPUTEMODE_EXCLUSIVE_PROCESS) return true;
  soft_ledger_sweep(region, true);
  uint32_t high = soft_slots_high(region);
  for (uint32_t i = 0; i < high; i++) {
    const soft_slot *slot = soft_slot_at(region, i);
    uint32_t state = atomic_load(&slot->state);
    if (i == region->me || (state != SOFT_SLOT_LIVE && state != SOFT_SLOT_DEAD) || !slot->usage[index].context_count) continue;
    if (!together(region, region->me, i)) return false;
  }
  return true;
}
