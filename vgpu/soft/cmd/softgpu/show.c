/* show.c - the state in words or JSON. Reads foreign bytes: texts are ended, indices checked. */
#include <inttypes.h>
#include <string.h>

#include "softgpu.h"

enum { MOST_ROWS = SOFT_SLOTS };

typedef struct {
  uint32_t slot, pid;
  bool ended;
} process;

static uint32_t processes_on(soft_region *region, uint32_t card, process *out) {
  uint32_t count = 0, high = soft_slots_high(region);
  for (uint32_t i = 0; i < high; i++) {
    const soft_slot *slot = soft_slot_at(region, i);
    uint32_t state = atomic_load(&slot->state), pid = 0;
    if (slot->kind == SOFT_KIND_OBSERVER || (state != SOFT_SLOT_LIVE && state != SOFT_SLOT_DEAD)) continue;
    const soft_usage *usage = &slot->usage[card];
    if (!usage->context_count && !usage->memory_bytes) continue;
    soft_slot_alive(region, i, &pid);
    out[count++] = (process){i, pid, state == SOFT_SLOT_DEAD};
  }
  return count;
}

/* What it is to MPS, empty nothing. */
static const char *part(const soft_slot *slot) { return slot->kind == SOFT_KIND_SERVER ? "server" : slot->mps.server ? "client" : ""; }

static double mib(uint64_t bytes) { return (double)bytes / (1 << 20); }

static uint32_t holders(const soft_object *object) {
  uint32_t count = 0;
  for (uint32_t i = 0; i < SOFT_SLOTS / 64; i++) count += (uint32_t)__builtin_popcountll(object->holders[i]);
  return count;
}

/* Own pid of who pays for a card's object, 0 nobody. */
static uint32_t payer(const soft_region *region, const soft_object *object) {
  const soft_slot *slot = soft_slot_at(region, object->payer);
  return slot ? slot->pid : 0;
}

static const soft_object *shared_memory(const soft_region *region, uint32_t index, uint32_t card) {
  const soft_object *object = soft_object_seen(region, index);
  return object && object->kind == SOFT_OBJECT_MEMORY && object->card == card ? object : NULL;
}

static void show_table(soft_region *region) {
  static process rows[MOST_ROWS];
  const soft_header *h = &region->state->header;
  char driver[32], name[64], uuid[48];
  soft_text(driver, sizeof driver, h->driver_version, sizeof h->driver_version);
  printf("software GPU, driver %s, %s clock, quantum %" PRIu64 " us, free delay %" PRIu64 " ms\n", driver,
         h->clock_mode == SOFT_CLOCK_VIRTUAL ? "virtual" : "real", h->quantum_ns / 1000, h->free_delay_ns / 1000000);
  if (h->unmodelled_calls) {
    soft_text(name, sizeof name, h->unmodelled_last, sizeof h->unmodelled_last);
    printf("%" PRIu64 " calls of what is not modelled, last %s\n", h->unmodelled_calls, name);
  }
  printf("%-4s %-42s %-30s %12s %12s %6s %s\n", "CARD", "UUID", "NAME", "USED MiB", "FREE MiB", "BUSY%", "STATE");
  for (uint32_t c = 0; c < soft_card_count(region); c++) {
    const soft_card *card = soft_card_at(region, c);
    soft_text(name, sizeof name, card->facts.name, sizeof card->facts.name);
    soft_text(uuid, sizeof uuid, card->facts.uuid, sizeof card->facts.uuid);
    printf("%-4u %-42s %-30s %12.1f %12.1f %6" PRIu64 " %s\n", c, uuid, name, mib(card->used_bytes), mib(soft_card_free(card)),
           (uint64_t)(soft_sched_card_busy(card, soft_now(region)) * 100 / SOFT_SAMPLE_NS), card->lost ? "lost" : "ok");
    uint32_t count = processes_on(region, c, rows);
    for (uint32_t i = 0; i < count; i++) {
      const soft_slot *slot = soft_slot_at(region, rows[i].slot);
      const soft_usage *usage = &slot->usage[c];
      soft_text(name, sizeof name, slot->name, sizeof slot->name);
      printf("     pid %-7u (own %u) contexts %u, %.1f MiB + %.1f MiB + %.1f MiB managed, busy %.3f s%s%s%s  %s\n", rows[i].pid, slot->pid, usage->context_count,
             mib(usage->context_bytes), mib(usage->memory_bytes), mib(usage->managed_bytes), (double)usage->busy_ns / 1e9, rows[i].ended ? ", ended" : "", *part(slot) ? ", MPS " : "", part(slot), name);
    }
    for (uint32_t i = 0; i < soft_objects_high(region); i++) {
      const soft_object *object = shared_memory(region, i, c);
      if (!object) continue;
      printf("     shared %.1f MiB, held by %u, ", mib(object->bytes), holders(object));
      if (payer(region, object)) printf("charged to pid %u (its own)\n", payer(region, object));
      else printf("charged to nobody: only descriptors are left\n");
    }
  }
}

static void show_json(soft_region *region) {
  static process rows[MOST_ROWS];
  const soft_header *h = &region->state->header;
  char text[64];
  soft_text(text, sizeof text, h->driver_version, sizeof h->driver_version);
  printf("{\"software\":true,\"driver\":");
  json_text(stdout, text);
  printf(",\"cudaVersion\":%u,\"clock\":\"%s\",\"nowNanoseconds\":%" PRIu64 ",\"quantumNanoseconds\":%" PRIu64 ",\"switchNanoseconds\":%" PRIu64
         ",\"freeDelayNanoseconds\":%" PRIu64 ",\"lockBroken\":%u,\"unmodelledCalls\":%" PRIu64 ",\"unmodelledLast\":",
         h->cuda_version, h->clock_mode == SOFT_CLOCK_VIRTUAL ? "virtual" : "real", soft_now(region), h->quantum_ns, h->switch_ns,
         h->free_delay_ns, h->lock_broken, h->unmodelled_calls);
  soft_text(text, sizeof text, h->unmodelled_last, sizeof h->unmodelled_last);
  json_text(stdout, text);
  printf(",\"cards\":[");
  for (uint32_t c = 0; c < soft_card_count(region); c++) {
    const soft_card *card = soft_card_at(region, c);
    printf("%s{\"index\":%u,\"uuid\":", c ? "," : "", c);
    soft_text(text, sizeof text, card->facts.uuid, sizeof card->facts.uuid);
    json_text(stdout, text);
    printf(",\"model\":");
    soft_text(text, sizeof text, card->facts.key, sizeof card->facts.key);
    json_text(stdout, text);
    printf(",\"totalBytes\":%" PRIu64 ",\"reservedBytes\":%" PRIu64 ",\"usedBytes\":%" PRIu64 ",\"freeBytes\":%" PRIu64
           ",\"contextBytes\":%" PRIu64 ",\"contexts\":%u,\"lost\":%s,\"busyNanoseconds\":%" PRIu64 ",\"switches\":%" PRIu64
           ",\"lastXid\":%" PRIu64 ",\"processes\":[",
           card->facts.total_bytes, card->facts.reserved_bytes, card->used_bytes, soft_card_free(card), card->context_bytes,
           card->context_count, card->lost ? "true" : "false", card->busy_ns, card->switches, card->last_xid);
    uint32_t count = processes_on(region, c, rows);
    for (uint32_t i = 0; i < count; i++) {
      const soft_slot *slot = soft_slot_at(region, rows[i].slot);
      const soft_usage *usage = &slot->usage[c];
      printf("%s{\"pid\":%u,\"ownPid\":%u,\"mps\":\"%s\",\"ended\":%s,\"contexts\":%u,\"contextBytes\":%" PRIu64 ",\"memoryBytes\":%" PRIu64
             ",\"managedBytes\":%" PRIu64 ",\"peakBytes\":%" PRIu64 ",\"busyNanoseconds\":%" PRIu64 ",\"name\":",
             i ? "," : "", rows[i].pid, slot->pid, part(slot), rows[i].ended ? "true" : "false", usage->context_count, usage->context_bytes,
             usage->memory_bytes, usage->managed_bytes, usage->peak_bytes, usage->busy_ns);
      soft_text(text, sizeof text, slot->name, sizeof slot->name);
      json_text(stdout, text);
      printf("}");
    }
    printf("],\"shared\":[");
    const char *between = "";
    for (uint32_t i = 0; i < soft_objects_high(region); i++) {
      const soft_object *object = shared_memory(region, i, c);
      if (!object) continue;
      printf("%s{\"bytes\":%" PRIu64 ",\"holders\":%u,\"payerOwnPid\":%u}", between, object->bytes, holders(object), payer(region, object));
      between = ",";
    }
    printf("]}");
  }
  printf("]}\n");
}

int command_show(int argc, char **argv) {
  soft_region region = {0};
  const char *root = NULL;
  bool json = false;
  for (int i = 0; i < argc; i++) {
    if (strcmp(argv[i], "-o") != 0) {
      root = argv[i];
      continue;
    }
    const char *form = i + 1 < argc ? argv[++i] : "";
    json = strcmp(form, "json") == 0;
    if (!json && strcmp(form, "table") != 0) return complain(EXIT_USAGE, "-o is table or json");
  }
  if (!root) return complain(EXIT_USAGE, "show needs a root");
  int code = root_open(root, &region);
  if (code != EXIT_OK) return code;
  soft_ledger_sweep(&region, true);
  soft_sched_advance(&region, soft_now(&region));
  if (json) show_json(&region);
  else show_table(&region);
  root_close(&region);
  return EXIT_OK;
}
