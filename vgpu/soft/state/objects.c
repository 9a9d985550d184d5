#define _GNU_SOURCE
#include "objects.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "lock.h"

#ifndef F_OFD_SETLK
#define F_OFD_SETLK 37
#endif

enum { GENERATION_BITS = 24, INDEX_BITS = 12 };
#define MOST_FILE_BYTES (1ull << 43)
_Static_assert(SOFT_OBJECTS <= 1 << INDEX_BITS, "an object's number fits beside its generation");

static uint64_t less(uint64_t a, uint64_t b) { return a > b ? a - b : 0; }

uint32_t soft_objects_high(const soft_region *region) {
  uint32_t high = region->state->header.objects_high;
  return high <= SOFT_OBJECTS ? high : SOFT_OBJECTS;
}

const soft_object *soft_object_seen(const soft_region *region, uint32_t index) {
  if (index >= SOFT_OBJECTS) return NULL;
  const soft_object *object = &region->state->objects[index];
  return object->kind != SOFT_OBJECT_FREE ? object : NULL;
}

soft_object *soft_object_at(const soft_region *region, uint32_t index, uint64_t generation) {
  if (index >= SOFT_OBJECTS) return NULL;
  soft_object *object = &region->state->objects[index];
  return object->kind != SOFT_OBJECT_FREE && object->generation == generation ? object : NULL;
}

uint32_t soft_object_index(const soft_region *region, const soft_object *object) { return (uint32_t)(object - region->state->objects); }

/* ---- ranges of the file -------------------------------------------------- */

static uint64_t end_of(const soft_object *object) { return object->offset + object->bytes < object->offset ? UINT64_MAX : object->offset + object->bytes; }

/* The first hole that is large enough. */
static bool find_range(const soft_region *region, uint64_t bytes, uint64_t *out) {
  uint32_t high = soft_objects_high(region);
  uint64_t at = 0;
  for (uint32_t moves = 0; moves <= high; moves++) {
    bool taken = false;
    for (uint32_t i = 0; i < high && !taken; i++) {
      const soft_object *other = soft_object_seen(region, i);
      if (!other || !other->bytes || at >= end_of(other) || other->offset >= at + bytes) continue;
      at = end_of(other);
      taken = true;
    }
    if (bytes > MOST_FILE_BYTES || at > MOST_FILE_BYTES - bytes) return false;
    if (taken) continue;
    *out = at;
    return true;
  }
  return false;
}

static bool grow_file(const soft_region *region, uint64_t end) {
  off_t size = lseek(region->shared_fd, 0, SEEK_END);
  return size >= 0 && ((uint64_t)size >= end || ftruncate(region->shared_fd, (off_t)end) == 0);
}

/* ---- holders ------------------------------------------------------------- */

static bool holds(const soft_object *object, uint32_t slot) { return slot < SOFT_SLOTS && object->holders[slot / 64] >> (slot % 64) & 1; }

static uint32_t first_holder(const soft_object *object) {
  for (uint32_t i = 0; i < SOFT_SLOTS / 64; i++)
    if (object->holders[i]) return i * 64 + (uint32_t)__builtin_ctzll(object->holders[i]);
  return SOFT_NO_INDEX;
}

static bool described(const soft_region *region, uint32_t index) {
  struct flock probe = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = index, .l_len = 1};
  if (fcntl(region->shared_fd, F_GETLK, &probe) != 0) return true; /* can't tell: free nothing */
  return probe.l_type != F_UNLCK;
}

/* A tenant may change the card between two looks at it: so there is one. */
static bool on_card(const soft_region *region, const soft_object *object, uint32_t *card) {
  *card = __atomic_load_n(&object->card, __ATOMIC_RELAXED);
  return object->kind == SOFT_OBJECT_MEMORY && object->bytes && *card < soft_card_count(region);
}

static void free_object(soft_region *region, soft_object *object) {
  uint64_t offset = __atomic_load_n(&object->offset, __ATOMIC_RELAXED), bytes = __atomic_load_n(&object->bytes, __ATOMIC_RELAXED);
  uint32_t card;
  if (on_card(region, object, &card)) {
    soft_card *of = soft_card_at(region, card);
    if (of) of->used_bytes = less(of->used_bytes, bytes);
  }
  /* what was written goes back to the machine */
  if (bytes && offset < MOST_FILE_BYTES && bytes <= MOST_FILE_BYTES)
    (void)fallocate(region->shared_fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)offset, (off_t)bytes);
  object->kind = SOFT_OBJECT_FREE;
}

static void pay(soft_usage *usage, uint64_t bytes) {
  usage->memory_bytes += bytes;
  if (usage->context_bytes + usage->memory_bytes > usage->peak_bytes) usage->peak_bytes = usage->context_bytes + usage->memory_bytes;
}

static void let_go(soft_region *region, soft_object *object, uint32_t slot) {
  uint32_t card;
  object->holders[slot / 64] &= ~(1ull << (slot % 64));
  if (object->payer == slot && on_card(region, object, &card)) {
    uint32_t heir = first_holder(object);
    soft_usage *from = &soft_slot_at(region, slot)->usage[card];
    from->memory_bytes = less(from->memory_bytes, object->bytes);
    object->payer = heir;
    if (heir != SOFT_NO_INDEX) pay(&soft_slot_at(region, heir)->usage[card], object->bytes);
  }
  if (first_holder(object) == SOFT_NO_INDEX && !described(region, soft_object_index(region, object))) free_object(region, object);
}

soft_object *soft_object_new(soft_region *region, uint32_t kind, uint32_t card, uint64_t bytes) {
  uint64_t offset = 0;
  uint32_t index = 0;
  while (index < SOFT_OBJECTS && region->state->objects[index].kind != SOFT_OBJECT_FREE) index++;
  if (index == SOFT_OBJECTS || !soft_slot_mine(region)) return NULL;
  if (bytes && (!find_range(region, bytes, &offset) || !grow_file(region, offset + bytes))) return NULL;
  soft_object *object = &region->state->objects[index];
  uint64_t generation = (object->generation + 1) & ((1ull << GENERATION_BITS) - 1);
  *object = (soft_object){.kind = kind, .card = card, .generation = generation, .bytes = bytes, .offset = offset, .payer = region->me, .queue = SOFT_NO_INDEX};
  object->holders[region->me / 64] |= 1ull << (region->me % 64);
  if (region->state->header.objects_high < index + 1) region->state->header.objects_high = index + 1;
  return object;
}

void soft_object_hold(soft_region *region, soft_object *object) {
  uint32_t card;
  if (!soft_slot_mine(region)) return;
  object->holders[region->me / 64] |= 1ull << (region->me % 64);
  if (object->payer < SOFT_SLOTS || !on_card(region, object, &card)) return;
  object->payer = region->me; /* only descriptors were left */
  pay(&soft_slot_at(region, region->me)->usage[card], object->bytes);
}

bool soft_object_held(const soft_region *region, const soft_object *object) { return holds(object, region->me); }

void soft_object_drop(soft_region *region, soft_object *object) {
  if (soft_slot_mine(region) && holds(object, region->me)) let_go(region, object, region->me);
}

/* ---- descriptors --------------------------------------------------------- */

int soft_object_export(const soft_region *region, const soft_object *object) {
  char path[64];
  uint32_t index = soft_object_index(region, object);
  struct flock mine = {.l_type = F_RDLCK, .l_whence = SEEK_SET, .l_start = index, .l_len = 1};
  snprintf(path, sizeof path, "/proc/self/fd/%d", region->shared_fd);
  int descriptor = open(path, O_RDWR | O_CLOEXEC);
  if (descriptor < 0) return -1;
  off_t mark = (off_t)(object->generation << INDEX_BITS | index);
  if (fcntl(descriptor, F_OFD_SETLK, &mine) == 0 && lseek(descriptor, mark, SEEK_SET) == mark) return descriptor;
  int reason = errno;
  close(descriptor);
  errno = reason;
  return -1;
}

soft_object *soft_object_of(const soft_region *region, int descriptor) {
  struct stat file, given;
  /* the library's fstat would bring a symbol newer than GLIBC_2.17 */
  if (syscall(SYS_fstat, region->shared_fd, &file) != 0 || syscall(SYS_fstat, descriptor, &given) != 0) return NULL;
  if (file.st_dev != given.st_dev || file.st_ino != given.st_ino) return NULL;
  off_t mark = lseek(descriptor, 0, SEEK_CUR);
  if (mark < 0) return NULL;
  return soft_object_at(region, (uint32_t)((uint64_t)mark & ((1u << INDEX_BITS) - 1)), (uint64_t)mark >> INDEX_BITS);
}

/* ---- death and damage ---------------------------------------------------- */

void soft_objects_bury(soft_region *region, uint32_t slot) {
  uint32_t high = soft_objects_high(region);
  for (uint32_t i = 0; i < high; i++) {
    soft_object *object = &region->state->objects[i];
    if (object->kind != SOFT_OBJECT_FREE && holds(object, slot)) let_go(region, object, slot);
  }
}

void soft_objects_sweep(soft_region *region) {
  uint32_t high = soft_objects_high(region);
  for (uint32_t i = 0; i < high; i++) {
    soft_object *object = &region->state->objects[i];
    if (object->kind != SOFT_OBJECT_FREE && first_holder(object) == SOFT_NO_INDEX && !described(region, i)) free_object(region, object);
  }
}

static uint64_t living(const soft_region *region, uint32_t word) {
  uint64_t bits = 0;
  for (uint32_t i = 0; i < 64; i++) {
    uint32_t state = atomic_load(&region->state->slots[word * 64 + i].state);
    if (state == SOFT_SLOT_LIVE || state == SOFT_SLOT_DEAD) bits |= 1ull << i;
  }
  return bits;
}

void soft_objects_recount(soft_region *region, uint64_t used[SOFT_CARDS]) {
  uint32_t high = soft_objects_high(region);
  for (uint32_t word = 0; high && word < SOFT_SLOTS / 64; word++) {
    uint64_t alive = living(region, word);
    for (uint32_t i = 0; i < high; i++) region->state->objects[i].holders[word] &= alive;
  }
  for (uint32_t i = 0; i < high; i++) {
    soft_object *object = &region->state->objects[i];
    uint32_t card;
    if (!on_card(region, object, &card)) continue;
    if (!holds(object, object->payer)) object->payer = SOFT_NO_INDEX;
    if (object->payer != SOFT_NO_INDEX) continue;
    used[card] = used[card] + object->bytes < used[card] ? UINT64_MAX : used[card] + object->bytes;
  }
}
