/*
 * mps.c - this process as a client of MPS.
 *
 * Whether it is one is decided once, at the start, as by NVIDIA's driver: by
 * the control daemon's socket in the pipe directory. Nobody listens there: the
 * program runs without MPS. Somebody does: it runs as a client, or not at all.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "../state/lock.h"
#include "../state/mps.h"
#include "driver.h"

/* A connection to the daemon; -1 when there is none. */
static int dial(const char *dir) {
  struct sockaddr_un to = {.sun_family = AF_UNIX};
  if (snprintf(to.sun_path, sizeof to.sun_path, "%s/%s", dir, SOFT_MPS_SOCKET) >= (int)sizeof to.sun_path) return -1;
  int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  if (fd < 0) return -1;
  int result;
  while ((result = connect(fd, (struct sockaddr *)&to, sizeof to)) != 0 && errno == EINTR) {
  }
  if (result == 0) return fd;
  close(fd);
  return -1;
}

static bool say(int fd, const char *text) {
  ssize_t n;
  while ((n = send(fd, text, strlen(text), MSG_NOSIGNAL)) < 0 && errno == EINTR) {
  }
  return n == (ssize_t)strlen(text);
}

/* Waits for as long as it takes: another user's server may have to end first. */
static bool hear(int fd, char *out, size_t size) {
  ssize_t n;
  while ((n = recv(fd, out, size - 1, 0)) < 0 && errno == EINTR) {
  }
  out[n > 0 ? n : 0] = 0;
  return n > 0;
}

/* The server's file, as its own words in it say: without a common /dev/shm the two can't talk. */
static bool sees_file(const char *name, uint32_t server, uint64_t generation) {
  char path[128], text[64] = "", want[64];
  if (strchr(name, '/') || snprintf(path, sizeof path, "%s/%s", SOFT_MPS_SHM_DIR, name) >= (int)sizeof path) return false;
  int fd = open(path, O_RDWR | O_CLOEXEC | O_NOFOLLOW);
  if (fd < 0) return false;
  ssize_t n = read(fd, text, sizeof text - 1);
  close(fd);
  snprintf(want, sizeof want, "%" PRIu32 " %" PRIu64 "\n", server, generation);
  return n > 0 && strcmp(text, want) == 0;
}

static CUresult understand(const soft_region *region, const char *answer, mps_offer *out) {
  char name[65];
  int code, used = 0;
  if (sscanf(answer, "error %d", &code) == 1 && code > 0) return (CUresult)code;
  if (sscanf(answer, "server %" SCNu32 " %" SCNu64 " %64s %" SCNu32 " %n", &out->server, &out->generation, name, &out->ppm, &used) < 4 || !used)
    return CUDA_ERROR_MPS_CONNECTION_FAILED;
  const char *at = answer + used;
  for (uint32_t i = 0; i < SOFT_CARDS && *at; i++) {
    char *end;
    out->limits[i] = strtoull(at, &end, 10);
    at = *end == ',' ? end + 1 : "";
  }
  const soft_slot *slot = soft_slot_at(region, out->server);
  if (!slot || slot->generation != out->generation || !sees_file(name, out->server, out->generation)) return CUDA_ERROR_MPS_CONNECTION_FAILED;
  out->cards = slot->mps.cards;
  out->client = true;
  return CUDA_SUCCESS;
}

CUresult mps_connect(const soft_region *region, mps_offer *out) {
  char answer[1024];
  *out = (mps_offer){.ppm = SOFT_MPS_WHOLE};
  const char *dir = getenv("CUDA_MPS_PIPE_DIRECTORY");
  int fd = dial(dir && dir[0] ? dir : SOFT_MPS_PIPE_DIR);
  if (fd < 0) return CUDA_SUCCESS;
  CUresult result = say(fd, SOFT_MPS_ATTACH) && hear(fd, answer, sizeof answer) ? understand(region, answer, out) : CUDA_ERROR_MPS_CONNECTION_FAILED;
  close(fd);
  return result;
}

/* "0=1G,GPU-1234=512M": takes what is smaller than before. A part that isn't understood is passed over. */
static void own_limits(const driver *d, const char *text, uint64_t *limits) {
  char part[96];
  while (text && *text) {
    size_t length = strcspn(text, ",");
    snprintf(part, sizeof part, "%.*s", (int)(length < sizeof part ? length : sizeof part - 1), text);
    text += length + (text[length] == ',');
    char *value = strchr(part, '=');
    uint64_t bytes;
    if (!value) continue;
    *value++ = 0;
    if (!soft_mps_bytes(value, &bytes) || !bytes) continue;
    char *end;
    unsigned long ordinal = strtoul(part, &end, 10);
    for (uint32_t i = 0; i < d->device_count; i++) {
      uint32_t card = d->cards[i];
      bool meant = strncmp(part, "GPU-", 4) == 0 ? strncmp(soft_card_at(&d->region, card)->facts.uuid, part, strlen(part)) == 0 : end != part && !*end && ordinal == i;
      if (meant && (!limits[card] || bytes < limits[card])) limits[card] = bytes;
    }
  }
}

CUresult mps_join(driver *d, const mps_offer *offer, const char *percentage, const char *limits) {
  soft_region *region = &d->region;
  uint64_t bytes[SOFT_CARDS];
  uint32_t ppm = offer->ppm, own, cards = 0;
  memcpy(bytes, offer->limits, sizeof bytes);
  own_limits(d, limits, bytes);
  if (soft_mps_percentage(percentage, &own) && own < ppm) ppm = own;
  for (uint32_t i = 0; i < d->device_count; i++) cards |= 1u << d->cards[i];
  soft_error error = soft_lock(region, SOFT_PATIENCE_MS);
  if (error != SOFT_OK) return driver_from(error);
  uint32_t refused = soft_mps_attach(region, offer->server, offer->generation, cards);
  soft_slot *slot = soft_slot_at(region, region->me);
  for (uint32_t i = 0; !refused && i < d->device_count; i++) {
    uint32_t card = d->cards[i], all = soft_card_at(region, card)->facts.sm_count;
    slot->usage[card].sm_limit = ppm < SOFT_MPS_WHOLE ? soft_mps_multiprocessors(all, ppm) : 0;
    slot->usage[card].limit_bytes = bytes[card];
  }
  soft_unlock(region);
  return (CUresult)refused;
}

static soft_slot *own_slot(void) { return the_driver.region.state ? soft_slot_at(&the_driver.region, the_driver.region.me) : NULL; }

bool mps_client(void) {
  const soft_slot *slot = own_slot();
  return slot && slot->mps.server;
}

CUresult mps_lost(void) {
  soft_region *region = &the_driver.region;
  const soft_slot *slot = own_slot();
  if (!slot || !slot->mps.server) return CUDA_SUCCESS;
  if (!slot->mps.error && !soft_mps_server_lives(region, slot) && soft_lock(region, SOFT_PATIENCE_MS) == SOFT_OK) {
    soft_mps_fail(region, region->me, CUDA_ERROR_MPS_RPC_FAILURE);
    soft_unlock(region);
  }
  return (CUresult)slot->mps.error;
}

void mps_fault(CUresult error) {
  soft_region *region = &the_driver.region;
  if (!mps_client() || soft_lock(region, SOFT_PATIENCE_MS) != SOFT_OK) return;
  soft_mps_fault(region, region->me, error);
  soft_unlock(region);
}

uint32_t card_multiprocessors(uint32_t card) {
  const soft_slot *slot = own_slot();
  uint32_t all = soft_card_at(&the_driver.region, card)->facts.sm_count;
  uint32_t limit = slot ? slot->usage[card].sm_limit : 0;
  return limit && limit < all ? limit : all;
}
