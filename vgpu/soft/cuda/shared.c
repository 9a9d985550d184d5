#define _GNU_SOURCE
#include "shared.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "../state/ledger.h"
#include "../state/lock.h"
#include "../state/objects.h"

/* ---- holds --------------------------------------------------------------- */

/* The state knows whether this process holds an object, this table how often. */
static struct { uint64_t generation; uint32_t count; } held[SOFT_OBJECTS];

static void note(const soft_object *object, shared_ref *out) {
  uint32_t index = soft_object_index(&the_driver.region, object);
  if (held[index].generation != object->generation) held[index].count = 0;
  held[index].generation = object->generation;
  held[index].count++;
  *out = (shared_ref){.there = true, .index = index, .card = object->card, .generation = object->generation, .bytes = object->bytes, .offset = object->offset};
}

CUresult shared_make(uint32_t kind, uint32_t card, uint64_t bytes, shared_ref *out) {
  soft_region *region = &the_driver.region;
  soft_error error = soft_lock(region, SOFT_PATIENCE_MS);
  if (error != SOFT_OK) return driver_from(error);
  soft_object *object = soft_object_new(region, kind, card, bytes);
  if (object) note(object, out);
  soft_unlock(region);
  return object ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult take(uint32_t kind, soft_object *object, shared_ref *out) {
  if (!object || object->kind != kind) return CUDA_ERROR_INVALID_HANDLE;
  if (object->card != SOFT_NO_INDEX && shared_device(object->card) < 0) return CUDA_ERROR_INVALID_DEVICE;
  soft_object_hold(&the_driver.region, object);
  note(object, out);
  return CUDA_SUCCESS;
}

CUresult shared_take(uint32_t kind, uint32_t index, uint64_t generation, shared_ref *out) {
  soft_region *region = &the_driver.region;
  soft_error error = soft_lock(region, SOFT_PATIENCE_MS);
  if (error != SOFT_OK) return driver_from(error);
  soft_ledger_sweep(region, false);
  CUresult result = take(kind, soft_object_at(region, index, generation), out);
  soft_unlock(region);
  return result;
}

CUresult shared_take_descriptor(uint32_t kind, int descriptor, shared_ref *out) {
  soft_region *region = &the_driver.region;
  soft_error error = soft_lock(region, SOFT_PATIENCE_MS);
  if (error != SOFT_OK) return driver_from(error);
  CUresult result = take(kind, soft_object_of(region, descriptor), out);
  soft_unlock(region);
  return result == CUDA_ERROR_INVALID_HANDLE ? CUDA_ERROR_INVALID_VALUE : result;
}

void shared_give(shared_ref *ref) {
  soft_region *region = &the_driver.region;
  if (!ref->there) return;
  ref->there = false;
  if (held[ref->index].generation != ref->generation || !held[ref->index].count || --held[ref->index].count) return;
  if (soft_lock(region, SOFT_PATIENCE_MS) != SOFT_OK) return;
  soft_object *object = soft_object_at(region, ref->index, ref->generation);
  if (object) soft_object_drop(region, object);
  soft_unlock(region);
}

CUresult shared_export(const shared_ref *ref, int *descriptor) {
  soft_region *region = &the_driver.region;
  soft_error error = soft_lock(region, SOFT_PATIENCE_MS);
  if (error != SOFT_OK) return driver_from(error);
  soft_object *object = soft_object_at(region, ref->index, ref->generation);
  int made = object ? soft_object_export(region, object) : -1;
  soft_unlock(region);
  if (!object) return CUDA_ERROR_INVALID_HANDLE;
  if (made < 0) return CUDA_ERROR_OPERATING_SYSTEM;
  *descriptor = made;
  return CUDA_SUCCESS;
}

bool shared_here(uint32_t index, uint64_t generation) {
  return index < SOFT_OBJECTS && held[index].generation == generation && held[index].count;
}

int shared_device(uint32_t card) {
  for (uint32_t i = 0; i < the_driver.device_count; i++)
    if (the_driver.cards[i] == card) return (int)i;
  return -1;
}

/* ---- mappings ------------------------------------------------------------ */

typedef struct import {
  block as;               /* so that whoever asks about an address finds an allocation */
  uint64_t base, pages;   /* device addresses, in bytes */
  char *backing;
  CUdeviceptr given;
  uint64_t bytes, offset; /* of the allocation, in the object */
  shared_ref of;
  import_way way;
  const void *key;
  unsigned int count;
  struct import *next;
} import;

static import *imports;

static import *import_at(CUdeviceptr pointer) {
  for (import *i = imports; i; i = i->next)
    if (pointer - i->base < i->pages) return i;
  return NULL;
}

CUresult import_map(context *ctx, shared_ref *of, import_way way, const void *key, uint64_t offset, uint64_t bytes, CUdeviceptr *out) {
  if (!bytes || offset > of->bytes || bytes > of->bytes - offset) return CUDA_ERROR_INVALID_VALUE;
  uint64_t first = offset / SOFT_PAGE_BYTES * SOFT_PAGE_BYTES;
  uint64_t pages = (offset + bytes - first + SOFT_PAGE_BYTES - 1) / SOFT_PAGE_BYTES * SOFT_PAGE_BYTES;
  import *fresh = calloc(1, sizeof *fresh);
  char *device = fresh ? mmap(NULL, pages, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0) : MAP_FAILED;
  char *backing = device != MAP_FAILED ? mmap(NULL, pages, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, the_driver.region.shared_fd,
                                              (off_t)(of->offset + first))
                                       : MAP_FAILED;
  if (backing == MAP_FAILED) {
    if (device != MAP_FAILED) munmap(device, pages);
    free(fresh);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  *fresh = (import){.as = {.kind = BLOCK_IMPORT, .owner = ctx}, .base = (uintptr_t)device, .pages = pages, .backing = backing,
                    .given = (uintptr_t)device + (offset - first), .bytes = bytes, .offset = offset, .of = *of, .way = way, .key = key,
                    .count = 1, .next = imports};
  imports = fresh;
  *out = fresh->given;
  return CUDA_SUCCESS;
}

bool import_again(const context *ctx, import_way way, uint32_t index, uint64_t generation, uint64_t offset, CUdeviceptr *out) {
  for (import *i = imports; i; i = i->next) {
    if (i->way != way || i->as.owner != ctx || i->of.index != index || i->of.generation != generation || i->offset != offset) continue;
    i->count++;
    *out = i->given;
    return true;
  }
  return false;
}

static void unlink_import(import *gone) {
  import **link = &imports;
  while (*link && *link != gone) link = &(*link)->next;
  if (*link) *link = gone->next;
  munmap((void *)(uintptr_t)gone->base, gone->pages);
  munmap(gone->backing, gone->pages);
  shared_give(&gone->of);
  free(gone);
}

CUresult import_close(CUdeviceptr pointer, import_way way) {
  import *found = import_at(pointer);
  if (!found || found->given != pointer || found->way != way) return CUDA_ERROR_INVALID_VALUE;
  if (--found->count == 0) unlink_import(found);
  return CUDA_SUCCESS;
}

bool import_any(uint32_t index, uint64_t generation) {
  for (const import *i = imports; i; i = i->next)
    if (i->of.index == index && i->of.generation == generation) return true;
  return false;
}

bool import_pool_used(const void *key) {
  for (const import *i = imports; i; i = i->next)
    if (i->way == IMPORT_POOL && i->key == key) return true;
  return false;
}

void imports_drop(context *ctx) {
  for (import *i = imports; i;) {
    import *after = i->next;
    if (i->as.owner == ctx) unlink_import(i);
    i = after;
  }
}

bool import_allocation_at(CUdeviceptr pointer, allocation *out) {
  import *found = import_at(pointer);
  if (!found || pointer - found->given >= found->bytes) return false;
  *out = (allocation){&found->as, found->given, found->bytes};
  return true;
}

void *import_host_view(CUdeviceptr pointer, uint64_t bytes) {
  const import *found = import_at(pointer);
  if (!found || pointer - found->given >= found->bytes || bytes > found->bytes - (pointer - found->given)) return NULL;
  return found->backing + (pointer - found->base);
}

bool is_import_address(CUdeviceptr pointer) { return import_at(pointer) != NULL; }
