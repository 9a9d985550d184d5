/*
 * nvidia-cuda-mps-server - a stand-in for driver roots of software cards.
 *
 * Started by the control daemon, one a user (or one for all). It holds a
 * context on each of its cards, so that a card in exclusive mode is its and
 * its clients', and a file in /dev/shm that clients must see. It has nothing
 * else to do: the cards know whose clients are whose (state/mps.h).
 *
 *   nvidia-cuda-mps-server READY [all]
 *
 * READY is a descriptor; on it goes "ready SLOT GENERATION SHM", or "busy"
 * when a card is taken, or "failed" and why. all: clients of every user.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "../../../../lib/include/cuda_abi.h"
#include "../../../state/ledger.h"
#include "../../../state/lock.h"
#include "../../../state/mps.h"
#include "../node.h"

enum { LOOK_NS = 20000000 };

static mps_node node;
static char shm[64];

static void answer(int fd, const char *text) {
  ssize_t n = write(fd, text, strlen(text));
  (void)n;
}

static int refuse(int fd, const char *word, const char *why) {
  char text[256];
  snprintf(text, sizeof text, "%s %s\n", word, why);
  answer(fd, text);
  fprintf(stderr, "nvidia-cuda-mps-server (software GPU): %s\n", why);
  return 1;
}

static bool make_file(bool all) {
  char path[128], text[64];
  snprintf(shm, sizeof shm, "cuda.shm.%x.%x.1", (unsigned)geteuid(), (unsigned)getpid());
  snprintf(path, sizeof path, "%s/%s", SOFT_MPS_SHM_DIR, shm);
  int length = snprintf(text, sizeof text, "%" PRIu32 " %" PRIu64 "\n", node.region.me, node.region.my_generation);
  unlink(path); /* of a server that died and had our pid */
  int fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
  bool ok = fd >= 0 && fchmod(fd, all ? 0666 : 0600) == 0 && write(fd, text, (size_t)length) == length;
  if (fd >= 0) close(fd);
  return ok;
}

static void remove_file(void) {
  char path[128];
  snprintf(path, sizeof path, "%s/%s", SOFT_MPS_SHM_DIR, shm);
  unlink(path);
}

/* Under the lock. */
static bool open_contexts(const char **word, const char **why) {
  soft_region *region = &node.region;
  soft_slot *own = soft_slot_at(region, region->me);
  for (uint32_t i = 0; i < node.count; i++) {
    *word = "busy";
    *why = "a card is taken by another process, or prohibited";
    if (!soft_mode_allows(region, node.cards[i])) return false;
    *word = "failed";
    *why = "a card has no room for the server's context";
    if (soft_ledger_open_server(region, node.cards[i]) != SOFT_OK) return false;
  }
  own->mps = (soft_mps){.cards = mps_node_cards(&node), .uid = (uint32_t)geteuid()};
  return true;
}

static void close_contexts(void) {
  soft_region *region = &node.region;
  if (soft_lock(region, SOFT_PATIENCE_MS) != SOFT_OK) return;
  soft_mps_end_clients(region, region->me);
  for (uint32_t i = 0; i < node.count; i++) soft_ledger_close_context(region, node.cards[i]);
  soft_unlock(region);
}

/* After a fault all its clients must be gone before it takes new ones. */
static void recover(void) {
  soft_region *region = &node.region;
  soft_slot *own = soft_slot_at(region, region->me);
  if (!own->mps.fault || soft_lock(region, SOFT_PATIENCE_MS) != SOFT_OK) return;
  bool clients = false;
  soft_ledger_sweep(region, true);
  for (uint32_t i = 0; i < soft_slots_high(region); i++) clients |= soft_mps_client_of(region, i, region->me);
  if (!clients) own->mps.fault = 0;
  soft_unlock(region);
}

int main(int argc, char **argv) {
  int ready = argc > 1 ? atoi(argv[1]) : -1;
  bool all = argc > 2 && strcmp(argv[2], "all") == 0;
  char text[160];
  sigset_t ends;
  if (ready < 3) {
    fprintf(stderr, "nvidia-cuda-mps-server (software GPU) is started by nvidia-cuda-mps-control\n");
    return 2;
  }
  fcntl(ready, F_SETFD, FD_CLOEXEC);
  sigemptyset(&ends);
  sigaddset(&ends, SIGTERM);
  sigaddset(&ends, SIGINT);
  sigprocmask(SIG_BLOCK, &ends, NULL);
  signal(SIGPIPE, SIG_IGN); /* its daemon may die */

  const char *wrong = mps_node_open(&node), *word = "failed";
  if (wrong) return refuse(ready, word, wrong);
  soft_error error = soft_slot_claim(&node.region, SOFT_KIND_SERVER);
  if (error == SOFT_OK) error = soft_lock(&node.region, SOFT_PATIENCE_MS);
  if (error != SOFT_OK) return refuse(ready, word, soft_error_text(error));
  bool opened = open_contexts(&word, &wrong);
  soft_unlock(&node.region);
  if (opened && !make_file(all)) {
    opened = false;
    word = "failed";
    wrong = "no file can be made in /dev/shm";
  }
  if (!opened) {
    close_contexts();
    soft_slot_release(&node.region);
    return refuse(ready, word, wrong);
  }
  snprintf(text, sizeof text, "ready %" PRIu32 " %" PRIu64 " %s\n", node.region.me, node.region.my_generation, shm);
  answer(ready, text);
  close(ready);

  struct timespec while_ns = {0, LOOK_NS};
  while (sigtimedwait(&ends, NULL, &while_ns) < 0) recover();
  close_contexts();
  remove_file();
  soft_slot_release(&node.region);
  return 0;
}
