/* commands.c - the lines that the control program passes on. */
#define _GNU_SOURCE
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../../../../lib/include/cuda_abi.h"
#include "../../../state/clock.h"
#include "../../../state/lock.h"
#include "../../../state/mps.h"
#include "../../units.h"
#include "control.h"

enum { MOST_WORDS = 8 };

typedef struct {
  mps_daemon *d;
  FILE *out;
  int count;                 /* words after the command */
  char **words;
} request;

static int wrong(request *r, const char *what) {
  fprintf(r->out, "%s\n", what);
  return 1;
}

static bool number(const char *text, uint64_t *out) { return text && units_number(text, out) && *out <= UINT32_MAX; }

static mps_server *server_named(request *r, int word) {
  uint64_t pid;
  mps_server *s = word < r->count && number(r->words[word], &pid) ? server_by_pid(r->d, (pid_t)pid) : NULL;
  return s && s->phase == SERVER_READY ? s : NULL;
}

#define SERVER(s, word)                    \
  mps_server *s = server_named(r, word);   \
  if (!s) return wrong(r, "no server has that PID")

static int get_server_list(request *r) {
  for (int i = 0; i < MOST_SERVERS; i++)
    if (r->d->servers[i].phase == SERVER_READY) fprintf(r->out, "%d\n", (int)r->d->servers[i].pid);
  return 0;
}

static int start_server(request *r) {
  uint64_t uid;
  bool failed;
  if (r->count != 2 || strcmp(r->words[0], "-uid") != 0 || !number(r->words[1], &uid)) return wrong(r, "start_server -uid USER");
  if (r->d->quitting) return wrong(r, "the daemon ends");
  mps_server *s = server_of_user(r->d, (uid_t)uid);
  if (!s) s = server_start(r->d, (uid_t)uid, &failed);
  while (s && s->phase == SERVER_STARTING) server_hear(r->d, s);
  if (s && s->phase == SERVER_READY) return 0;
  if (s || failed) fprintf(r->out, "no server for user %" PRIu64 ": %s\n", uid, r->d->last_reason);
  else fprintf(r->out, "no server for user %" PRIu64 ": another user's has to end first\n", uid);
  return 1;
}

static int shutdown_server(request *r) {
  SERVER(s, 0);
  if (r->count > 2 || (r->count == 2 && strcmp(r->words[1], "-f") != 0)) return wrong(r, "shutdown_server PID [-f]");
  server_end(r->d, s, r->count == 2);
  servers_look(r->d);
  return 0;
}

static uint32_t pid_of(request *r, uint32_t slot) {
  uint32_t pid = 0;
  return soft_slot_alive(&r->d->node.region, slot, &pid) ? pid : 0;
}

static int get_client_list(request *r) {
  static uint32_t slots[SOFT_SLOTS];
  SERVER(s, 0);
  uint32_t count = server_clients(r->d, s, slots, SOFT_SLOTS);
  for (uint32_t i = 0; i < count; i++) fprintf(r->out, "%u\n", pid_of(r, slots[i]));
  return 0;
}

static int get_server_status(request *r) {
  uint64_t pid;
  mps_server *s = r->count == 1 && number(r->words[0], &pid) ? server_by_pid(r->d, (pid_t)pid) : NULL;
  if (!s) return wrong(r, "no server has that PID");
  fprintf(r->out, "%s\n", s->phase == SERVER_STARTING ? "INITIALIZING" : server_fault(r->d, s) ? "FAULT" : "ACTIVE");
  return 0;
}

static int ps(request *r) {
  static uint32_t slots[SOFT_SLOTS];
  char name[64], uuid[48];
  soft_region *region = &r->d->node.region;
  fprintf(r->out, "%-10s%-6s%-10s%-26s%-13s%s\n", "PID", "ID", "SERVER", "DEVICE", "NAMESPACE", "COMMAND");
  for (int i = 0; i < MOST_SERVERS; i++) {
    const mps_server *s = &r->d->servers[i];
    uint32_t count = server_clients(r->d, s, slots, SOFT_SLOTS);
    for (uint32_t c = 0; c < count; c++) {
      const soft_slot *slot = soft_slot_at(region, slots[c]);
      soft_text(name, sizeof name, slot->name, sizeof slot->name);
      for (uint32_t card = 0; card < soft_card_count(region); card++) {
        if (!(slot->mps.cards >> card & 1)) continue;
        soft_text(uuid, sizeof uuid, soft_card_at(region, card)->facts.uuid, sizeof uuid);
        fprintf(r->out, "%-10u%-6u%-10d%-26.22s%-13" PRIu64 "%s\n", pid_of(r, slots[c]), slot->mps.id, (int)s->pid, uuid, slot->pid_namespace, name);
      }
    }
  }
  return 0;
}

static int quit(request *r) {
  uint64_t seconds = 0;
  bool limited = r->count == 2 && strcmp(r->words[0], "-t") == 0 && number(r->words[1], &seconds);
  if (r->count && !limited) return wrong(r, "quit [-t SECONDS]");
  r->d->quitting = true;
  r->d->quit_by_ns = limited ? soft_real_ns() + seconds * 1000000000ull : SOFT_FOREVER;
  for (int i = 0; i < MOST_SERVERS; i++)
    if (r->d->servers[i].phase != SERVER_NONE) server_end(r->d, &r->d->servers[i], false);
  return 0;
}

static int say_percentage(request *r, uint32_t ppm) {
  fprintf(r->out, "%u.%u\n", ppm / 10000, ppm % 10000 / 1000);
  return 0;
}

static int set_percentage(request *r, mps_limits *limits, int word) {
  if (r->count != word + 1 || !soft_mps_percentage(r->words[word], &limits->ppm)) return wrong(r, "a percentage is above 0 and up to 100");
  return say_percentage(r, limits->ppm);
}

static int get_default_percentage(request *r) { return say_percentage(r, r->d->defaults.ppm); }
static int set_default_percentage(request *r) { return set_percentage(r, &r->d->defaults, 0); }
static int get_percentage(request *r) {
  SERVER(s, 0);
  return say_percentage(r, s->limits.ppm);
}
static int set_percentage_of(request *r) {
  SERVER(s, 0);
  return set_percentage(r, &s->limits, 1);
}

static int say_limit(request *r, uint64_t bytes) {
  if (!bytes) fputs("no limit\n", r->out);
  else if (bytes % (1ull << 30) == 0) fprintf(r->out, "%" PRIu64 "G\n", bytes >> 30);
  else if (bytes % (1ull << 20) == 0) fprintf(r->out, "%" PRIu64 "M\n", bytes >> 20);
  else fprintf(r->out, "%" PRIu64 "\n", bytes);
  return 0;
}

/* DEV [VALUE] from that word on; without a value as if to ask. */
static int limit(request *r, mps_limits *limits, int word, bool set) {
  uint32_t card = word < r->count ? mps_node_card(&r->d->node, r->words[word]) : SOFT_NO_INDEX;
  if (card == SOFT_NO_INDEX) return wrong(r, "no such device");
  if (r->count > word + 2 || (!set && r->count > word + 1)) return wrong(r, "too many words");
  if (set && r->count == word + 2 && !soft_mps_bytes(r->words[word + 1], &limits->bytes[card])) return wrong(r, "a limit is a number with K, M or G");
  return set ? 0 : say_limit(r, limits->bytes[card]);
}

static int get_default_limit(request *r) { return limit(r, &r->d->defaults, 0, false); }
static int set_default_limit(request *r) { return limit(r, &r->d->defaults, 0, true); }
static int get_limit(request *r) {
  SERVER(s, 0);
  return limit(r, &s->limits, 1, false);
}
static int set_limit(request *r) {
  SERVER(s, 0);
  return limit(r, &s->limits, 1, true);
}

static int terminate_client(request *r) {
  static uint32_t slots[SOFT_SLOTS];
  uint64_t pid;
  soft_region *region = &r->d->node.region;
  SERVER(s, 0);
  if (r->count != 2 || !number(r->words[1], &pid)) return wrong(r, "terminate_client SERVER CLIENT");
  uint32_t count = server_clients(r->d, s, slots, SOFT_SLOTS), found = 0;
  if (soft_lock(region, SOFT_PATIENCE_MS) != SOFT_OK) return wrong(r, "the cards can't be reached");
  for (uint32_t i = 0; i < count; i++) {
    if (pid_of(r, slots[i]) != (uint32_t)pid) continue;
    soft_mps_fail(region, slots[i], CUDA_ERROR_MPS_CLIENT_TERMINATED);
    found++;
  }
  soft_unlock(region);
  return found ? 0 : wrong(r, "the server has no client with that PID");
}

static const struct {
  const char *name;
  int (*run)(request *r);
} commands[] = {{"get_server_list", get_server_list},
                {"start_server", start_server},
                {"shutdown_server", shutdown_server},
                {"get_client_list", get_client_list},
                {"get_server_status", get_server_status},
                {"ps", ps},
                {"quit", quit},
                {"get_default_active_thread_percentage", get_default_percentage},
                {"set_default_active_thread_percentage", set_default_percentage},
                {"get_active_thread_percentage", get_percentage},
                {"set_active_thread_percentage", set_percentage_of},
                {"get_default_device_pinned_mem_limit", get_default_limit},
                {"set_default_device_pinned_mem_limit", set_default_limit},
                {"get_device_pinned_mem_limit", get_limit},
                {"set_device_pinned_mem_limit", set_limit},
                {"terminate_client", terminate_client}};

int command_run(mps_daemon *d, char *line, FILE *out) {
  char *words[MOST_WORDS], *save;
  int count = 0;
  for (char *word = strtok_r(line, " \t\r\n", &save); word && count < MOST_WORDS; word = strtok_r(NULL, " \t\r\n", &save)) words[count++] = word;
  if (!count) return 0;
  request r = {.d = d, .out = out, .count = count - 1, .words = words + 1};
  for (size_t i = 0; i < sizeof commands / sizeof commands[0]; i++)
    if (strcmp(words[0], commands[i].name) == 0) return commands[i].run(&r);
  fprintf(out, "%s is no command of this daemon (software GPU)\n", words[0]);
  return 1;
}
