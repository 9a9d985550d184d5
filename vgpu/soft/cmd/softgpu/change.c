/* change.c - settings, faults, and watching. */
#include <stdlib.h>
#include <string.h>

#include "../../../lib/include/nvml_abi.h"
#include "softgpu.h"

typedef struct {
  soft_region region;
  int first, last; /* cards concerned */
} target;

/* ROOT [--card N] rest... Moves argv past what it read. */
static int open_target(int *argc, char ***argv, target *t) {
  const char *root = NULL;
  uint64_t card = 0;
  bool named = false;
  int kept = 0;
  char **in = *argv;
  for (int i = 0; i < *argc; i++) {
    if (strcmp(in[i], "--card") == 0) {
      if (i + 1 == *argc || !units_number(in[++i], &card)) return complain(EXIT_USAGE, "--card needs a number");
      named = true;
    } else if (!root) {
      root = in[i];
    } else {
      in[kept++] = in[i];
    }
  }
  *argc = kept;
  if (!root) return complain(EXIT_USAGE, "a root is needed");
  int code = root_open(root, &t->region);
  if (code != EXIT_OK) return code;
  uint32_t count = soft_card_count(&t->region);
  if (named && card >= count) {
    root_close(&t->region);
    return complain(EXIT_FAILED, "%s has %u card%s, no card %llu", root, count, count == 1 ? "" : "s", (unsigned long long)card);
  }
  t->first = named ? (int)card : 0;
  t->last = named ? (int)card : (int)count - 1;
  soft_ledger_sweep(&t->region, true);
  soft_sched_advance(&t->region, soft_now(&t->region));
  return EXIT_OK;
}

/* ---- set ----------------------------------------------------------------- */

static bool set_node(soft_header *h, const char *name, const char *value) {
  uint64_t number;
  if (strcmp(name, "clock") == 0) {
    bool is_virtual = strcmp(value, "virtual") == 0;
    if (!is_virtual && strcmp(value, "real") != 0) return false;
    if (is_virtual && h->clock_mode != SOFT_CLOCK_VIRTUAL) h->virtual_ns = soft_real_ns(); /* time goes on from here */
    h->clock_mode = is_virtual ? SOFT_CLOCK_VIRTUAL : SOFT_CLOCK_REAL;
    return true;
  }
  if (!units_nanoseconds(value, &number)) return false;
  if (strcmp(name, "free-delay") == 0) h->free_delay_ns = number;
  else if (strcmp(name, "quantum") == 0 && number) h->quantum_ns = number;
  else if (strcmp(name, "switch") == 0) h->switch_ns = number;
  else return false;
  return true;
}

static bool set_card(soft_card *card, const char *name, const char *value) {
  static const char *const modes[] = {"default", NULL, "prohibited", "exclusive-process"};
  uint64_t number;
  if (strcmp(name, "context") == 0) {
    if (!units_bytes(value, &number) || number > card->facts.total_bytes) return false;
    card->context_bytes = number;
    return true;
  }
  if (strcmp(name, "compute-mode") == 0) {
    for (uint32_t i = 0; i < 4; i++)
      if (modes[i] && strcmp(value, modes[i]) == 0) {
        card->compute_mode = i;
        return true;
      }
    return false;
  }
  if (!units_number(value, &number)) return false;
  if (strcmp(name, "temperature") == 0 && number <= 200) card->temperature_c = (uint32_t)number;
  else if (strcmp(name, "persistence") == 0 && number <= 1) card->persistence = (uint32_t)number;
  else if (strcmp(name, "stacks") == 0 && number >= 100 && number <= 400) card->stack_extra = (uint32_t)number - 100;
  else if (strcmp(name, "stacks-stay") == 0 && number <= 1) card->stacks_stay = (uint32_t)number;
  else if (strcmp(name, "accounting") == 0 && number <= 1) card->accounting = (uint32_t)number;
  else return false;
  return true;
}

int command_set(int argc, char **argv) {
  static const char *const node_names[] = {"clock", "free-delay", "quantum", "switch"};
  target t = {.region = {0}};
  int code = open_target(&argc, &argv, &t);
  if (code != EXIT_OK) return code;
  if (!argc) code = complain(EXIT_USAGE, "set needs NAME=VALUE");
  for (int i = 0; i < argc && code == EXIT_OK; i++) {
    char *value = strchr(argv[i], '=');
    bool ok = value != NULL, of_node = false;
    if (ok) *value++ = 0;
    for (unsigned n = 0; n < sizeof node_names / sizeof node_names[0]; n++) of_node |= strcmp(argv[i], node_names[n]) == 0;
    if (ok && of_node) ok = set_node(&t.region.state->header, argv[i], value);
    for (int c = t.first; ok && !of_node && c <= t.last; c++) ok = set_card(&t.region.state->header.cards[c], argv[i], value);
    if (!ok) code = complain(EXIT_USAGE, "set %s can't be %s", argv[i], value ? value : "empty");
  }
  root_close(&t.region);
  if (code == EXIT_OK) puts("software GPU changed");
  return code;
}

/* ---- fault --------------------------------------------------------------- */

static void post(target *t, int card, uint64_t xid) {
  t->region.state->header.cards[card].last_xid = xid;
  soft_event_post(&t->region, (uint32_t)card, NVML_EVENT_XID_CRITICAL, xid);
}

static bool fault_card(target *t, int index, const char *kind, uint64_t number) {
  soft_card *card = &t->region.state->header.cards[index];
  if (strcmp(kind, "lost") == 0) {
    card->lost = 1;
    post(t, index, 79); /* fallen off the bus */
  } else if (strcmp(kind, "restore") == 0) {
    card->lost = 0;
    card->alloc_fail_count = 0;
    card->nvml_delay_ns = 0;
  } else if (strcmp(kind, "xid") == 0) {
    post(t, index, number);
  } else if (strcmp(kind, "alloc-fail") == 0) {
    card->alloc_fail_count = (uint32_t)number;
  } else if (strcmp(kind, "ecc-corrected") == 0) {
    card->ecc_corrected += number;
    soft_event_post(&t->region, (uint32_t)index, NVML_EVENT_SINGLE_BIT_ECC, number);
  } else if (strcmp(kind, "ecc-uncorrected") == 0) {
    card->ecc_uncorrected += number;
    soft_event_post(&t->region, (uint32_t)index, NVML_EVENT_DOUBLE_BIT_ECC, number);
  } else if (strcmp(kind, "remap-pending") == 0) {
    card->remap_pending = number != 0;
    if (number) card->remapped_uncorrected++;
  } else if (strcmp(kind, "remap-failed") == 0) {
    card->remap_failed = number != 0;
  } else {
    return false;
  }
  return true;
}

int command_fault(int argc, char **argv) {
  target t = {.region = {0}};
  int code = open_target(&argc, &argv, &t);
  if (code != EXIT_OK) return code;
  const char *kind = argc ? argv[0] : "";
  uint64_t number = 0;
  bool bare = strcmp(kind, "lost") == 0 || strcmp(kind, "restore") == 0, ok;
  soft_header *h = &t.region.state->header;
  if (strcmp(kind, "nvml-delay") == 0) {
    ok = (argc == 2 || argc == 3) && units_nanoseconds(argv[1], &number) && (argc == 2 || strlen(argv[2]) < sizeof h->nvml_delay_call);
    bool all = t.first == 0 && t.last == (int)soft_card_count(&t.region) - 1;
    if (ok && (all || argc == 3)) {
      h->nvml_delay_ns = number;
      memset(h->nvml_delay_call, 0, sizeof h->nvml_delay_call);
      if (argc == 3) memcpy(h->nvml_delay_call, argv[2], strlen(argv[2]));
    } else if (ok) {
      h->cards[t.first].nvml_delay_ns = number;
    }
  } else {
    ok = argc == (bare ? 1 : 2) && (bare || units_number(argv[1], &number));
    for (int c = t.first; ok && c <= t.last; c++) ok = fault_card(&t, c, kind, number);
    if (ok && strcmp(kind, "restore") == 0) h->nvml_delay_ns = 0;
  }
  root_close(&t.region);
  if (!ok) return complain(EXIT_USAGE, "no such fault: %s; see softgpu help", kind);
  puts("software GPU fault set");
  return EXIT_OK;
}

/* ---- watch --------------------------------------------------------------- */

int command_watch(int argc, char **argv) {
  soft_region region = {0};
  const char *root = NULL;
  uint64_t every = 5000000, length = SOFT_FOREVER;
  for (int i = 0; i < argc; i++) {
    bool has_every = strcmp(argv[i], "--every") == 0, has_for = strcmp(argv[i], "--for") == 0;
    if (!has_every && !has_for) {
      root = argv[i];
      continue;
    }
    if (i + 1 == argc || !units_nanoseconds(argv[++i], has_every ? &every : &length)) return complain(EXIT_USAGE, "%s needs a time", argv[i - 1]);
  }
  if (!root) return complain(EXIT_USAGE, "watch needs a root");
  int code = root_open(root, &region);
  if (code != EXIT_OK) return code;
  soft_unlock(&region);
  uint64_t start = soft_real_ns();
  while (soft_region_sound(&region) && soft_real_ns() - start < length) {
    if (soft_lock(&region, 1000) == SOFT_OK) {
      soft_ledger_sweep(&region, true);
      soft_unlock(&region);
    }
    soft_real_sleep_ns(every);
  }
  soft_slot_release(&region);
  return EXIT_OK;
}
