#define _GNU_SOURCE
#include "region.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static uint64_t file_size(int fd) {
  off_t end = lseek(fd, 0, SEEK_END); /* fstat would bring a symbol newer than GLIBC_2.17 */
  return end < 0 ? 0 : (uint64_t)end;
}

static bool header_sound(const soft_header *header) {
  return header->magic == SOFT_MAGIC && header->abi == SOFT_ABI && header->size == sizeof(soft_state) && header->card_count >= 1 &&
         header->card_count <= SOFT_CARDS;
}

soft_error soft_region_open(soft_region *region, const char *dir, const char *device_prefix) {
  char path[PATH_MAX];

  if (region->state) return SOFT_OK;
  if (snprintf(path, sizeof path, "%s/state", dir) >= (int)sizeof path) return SOFT_ENOSTATE;
  int fd = open(path, O_RDWR | O_CLOEXEC | O_NOCTTY);
  if (fd < 0) return errno == ENOENT || errno == ENOTDIR ? SOFT_ENOSTATE : SOFT_ESYSTEM;
  if (file_size(fd) != sizeof(soft_state)) {
    close(fd);
    return SOFT_EBADSTATE;
  }
  void *map = mmap(NULL, sizeof(soft_state), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (map == MAP_FAILED) {
    close(fd);
    return SOFT_ESYSTEM;
  }
  if (!header_sound(&((soft_state *)map)->header)) {
    munmap(map, sizeof(soft_state));
    close(fd);
    return SOFT_EBADSTATE;
  }
  snprintf(path, sizeof path, "%s/alive", dir);
  int alive = open(path, O_RDWR | O_CLOEXEC | O_NOCTTY);
  if (alive < 0) {
    munmap(map, sizeof(soft_state));
    close(fd);
    return SOFT_ESYSTEM;
  }
  snprintf(path, sizeof path, "%s/shared", dir);
  int shared = open(path, O_RDWR | O_CLOEXEC | O_NOCTTY);
  if (shared < 0) {
    munmap(map, sizeof(soft_state));
    close(alive);
    close(fd);
    return SOFT_ESYSTEM;
  }
  snprintf(region->device_prefix, sizeof region->device_prefix, "%s", device_prefix);
  region->state_fd = fd;
  region->alive_fd = alive;
  region->shared_fd = shared;
  region->me = SOFT_NO_INDEX;
  region->state = map;
  return SOFT_OK;
}

soft_error soft_region_open_for(soft_region *region, const void *address) {
  Dl_info info;
  char real[PATH_MAX];

  if (region->state) return SOFT_OK;
  if (dladdr(address, &info) && info.dli_fname && realpath(info.dli_fname, real)) {
    /* the root is four parts up: ROOT/usr/lib/TRIPLET/libX.so */
    bool whole = true;
    for (int up = 0; up < 4 && whole; up++) {
      char *slash = strrchr(real, '/');
      if (!slash) whole = false;
      else *slash = 0;
    }
    if (whole) {
      char dir[PATH_MAX];
      if (snprintf(dir, sizeof dir, "%s/softgpu", real) < (int)sizeof dir) {
        soft_error error = soft_region_open(region, dir, real);
        if (error != SOFT_ENOSTATE) return error;
      }
    }
  }
  return soft_region_open(region, SOFT_CONTAINER_DIR, "");
}

bool soft_region_sound(const soft_region *region) {
  return region->state && file_size(region->state_fd) == sizeof(soft_state) && header_sound(&region->state->header);
}

uint32_t soft_card_count(const soft_region *region) {
  uint32_t count = region->state->header.card_count;
  return count <= SOFT_CARDS ? count : SOFT_CARDS;
}

soft_card *soft_card_at(const soft_region *region, uint32_t index) {
  return index < soft_card_count(region) ? &region->state->header.cards[index] : NULL;
}

soft_slot *soft_slot_at(const soft_region *region, uint32_t index) {
  return index < SOFT_SLOTS ? &region->state->slots[index] : NULL;
}

soft_queue *soft_queue_at(const soft_region *region, uint32_t index) {
  return index < SOFT_QUEUES ? &region->state->queues[index] : NULL;
}

uint32_t soft_slots_high(const soft_region *region) {
  uint32_t high = region->state->header.slots_high;
  return high <= SOFT_SLOTS ? high : SOFT_SLOTS;
}

void soft_text(char *out, size_t size, const char *text, size_t text_size) {
  if (!size) return;
  size_t n = strnlen(text, text_size);
  if (n >= size) n = size - 1;
  memcpy(out, text, n);
  out[n] = 0;
}

const char *soft_error_text(soft_error error) {
  switch (error) {
  case SOFT_OK: return "no error";
  case SOFT_ENOSTATE: return "no software GPU state there";
  case SOFT_EBADSTATE: return "the software GPU's state is damaged or of another version";
  case SOFT_ELOCK: return "the software GPU's lock could not be had";
  case SOFT_EFULL: return "the software GPU has no process slot left";
  case SOFT_EMEMORY: return "the card has not that much memory left";
  case SOFT_ELOST: return "the card is lost";
  case SOFT_ESYSTEM: return "a system call failed";
  }
  return "unknown error";
}
