/*
 * pool.c - stream-ordered memory: cuMemAllocAsync and pools.
 *
 * A pool reserves segments of at least 32 MiB from its card and cuts 512-byte
 * aligned spans from them. What it reserves is what the card is charged.
 * Allocation and free happen at the call, an order that the streams allow.
 * Segments without a span go back at the next synchronisation, as far as the
 * release threshold (0 unless set) lets them.
 */
#include <stdlib.h>
#include <string.h>

#include "../state/ledger.h"
#include "../state/lock.h"
#include "capture.h"
#include "deferred.h"
#include "shared.h"

#define SEGMENT_BYTES (32ull << 20)

typedef struct span {
  uint64_t offset, bytes; /* bytes: rounded */
  uint64_t asked;         /* 0: free */
  context *by;
  struct span *next;
} span;

typedef struct segment {
  block *memory;
  uint64_t bytes;
  span *spans;            /* all of the segment, by offset */
  struct segment *next;
} segment;

struct CUmemPoolHandle_st {
  uint32_t card;
  bool is_default;
  bool imported;          /* another process's: only its pointers can be brought in */
  shared_ref shared;      /* made to be shared, or imported */
  segment *segments;
  uint64_t reserved, used, reserved_high, used_high, threshold;
  int reuse[3];
  struct CUmemPoolHandle_st *next;
};
typedef struct CUmemPoolHandle_st pool;

static pool *pools;
static pool *default_pool[SOFT_CARDS], *current_pool[SOFT_CARDS];

static pool *pool_new(uint32_t card, bool is_default) {
  pool *fresh = calloc(1, sizeof *fresh);
  if (!fresh || !handle_add(fresh, HANDLE_POOL)) {
    free(fresh);
    return NULL;
  }
  *fresh = (pool){.card = card, .is_default = is_default, .reuse = {1, 1, 1}, .next = pools};
  pools = fresh;
  return fresh;
}

static void pool_delete(pool *gone) {
  for (int i = 0; i < SOFT_CARDS; i++)
    if (current_pool[i] == gone) current_pool[i] = NULL;
  for (pool **link = &pools; *link; link = &(*link)->next)
    if (*link == gone) {
      *link = gone->next;
      break;
    }
  shared_give(&gone->shared);
  handle_remove(gone);
  free(gone);
}

static pool *pool_of_card(uint32_t card) {
  if (!default_pool[card]) default_pool[card] = pool_new(card, true);
  return current_pool[card] ? current_pool[card] : default_pool[card];
}

/* ---- segments ------------------------------------------------------------ */

static void give_back(const pool *p, block *memory, uint64_t bytes) {
  soft_region *region = &the_driver.region;
  if (!memory->shared && soft_lock(region, SOFT_PATIENCE_MS) == SOFT_OK) { /* what is shared carries its charge itself */
    soft_ledger_release(region, p->card, bytes);
    soft_unlock(region);
  }
  pages_give(memory);
}

static CUresult add_segment(pool *p, uint64_t bytes) {
  soft_region *region = &the_driver.region;
  bytes = bytes <= SEGMENT_BYTES ? SEGMENT_BYTES : (bytes + SOFT_PAGE_BYTES - 1) / SOFT_PAGE_BYTES * SOFT_PAGE_BYTES;
  segment *fresh = calloc(1, sizeof *fresh);
  span *whole = calloc(1, sizeof *whole);
  soft_error error = fresh && whole ? soft_lock(region, SOFT_PATIENCE_MS) : SOFT_EMEMORY;
  if (error == SOFT_OK) {
    error = soft_ledger_charge(region, p->card, bytes);
    soft_unlock(region);
  }
  if (error == SOFT_OK && !(fresh->memory = pages_take(p->card, bytes))) {
    if (soft_lock(region, SOFT_PATIENCE_MS) == SOFT_OK) {
      soft_ledger_release(region, p->card, bytes);
      soft_unlock(region);
    }
    error = SOFT_EMEMORY;
  }
  if (error == SOFT_OK && p->shared.there && block_share(fresh->memory) != CUDA_SUCCESS) {
    give_back(p, fresh->memory, bytes);
    error = SOFT_EMEMORY;
  }
  if (error != SOFT_OK) {
    free(fresh);
    free(whole);
    return driver_from(error);
  }
  whole->bytes = fresh->bytes = bytes;
  fresh->spans = whole;
  fresh->next = p->segments;
  p->segments = fresh;
  p->reserved += bytes;
  if (p->reserved > p->reserved_high) p->reserved_high = p->reserved;
  return CUDA_SUCCESS;
}

static bool empty(const segment *s) { return !s->spans->next && !s->spans->asked; }

static void trim(pool *p, uint64_t keep) {
  for (segment **link = &p->segments; *link;) {
    segment *gone = *link;
    if (!empty(gone) || p->reserved - gone->bytes < keep) {
      link = &gone->next;
      continue;
    }
    *link = gone->next;
    p->reserved -= gone->bytes;
    give_back(p, gone->memory, gone->bytes);
    free(gone->spans);
    free(gone);
  }
}

void pools_trim(context *ctx) {
  for (pool *p = pools; p; p = p->next)
    if (p->card == ctx->card) trim(p, p->threshold);
}

/* ---- spans --------------------------------------------------------------- */

static bool cut(pool *p, context *ctx, uint64_t asked, CUdeviceptr *out) {
  uint64_t bytes = (asked + SOFT_PIECE_BYTES - 1) / SOFT_PIECE_BYTES * SOFT_PIECE_BYTES;
  for (segment *s = p->segments; s; s = s->next)
    for (span *at = s->spans; at; at = at->next) {
      if (at->asked || at->bytes < bytes) continue;
      if (at->bytes > bytes) {
        span *rest = calloc(1, sizeof *rest);
        if (!rest) return false;
        *rest = (span){.offset = at->offset + bytes, .bytes = at->bytes - bytes, .next = at->next};
        at->next = rest;
        at->bytes = bytes;
      }
      at->asked = asked;
      at->by = ctx;
      p->used += at->bytes;
      if (p->used > p->used_high) p->used_high = p->used;
      *out = s->memory->base + at->offset;
      return true;
    }
  return false;
}

static void merge(segment *s) {
  for (span *at = s->spans; at && at->next;) {
    span *after = at->next;
    if (at->asked || after->asked) {
      at = after;
      continue;
    }
    at->bytes += after->bytes;
    at->next = after->next;
    free(after);
  }
}

static span *span_at(CUdeviceptr pointer, pool **in, segment **of) {
  for (pool *p = pools; p; p = p->next)
    for (segment *s = p->segments; s; s = s->next) {
      if (pointer - s->memory->base >= s->bytes) continue;
      for (span *at = s->spans; at; at = at->next) {
        if (pointer - s->memory->base - at->offset >= at->bytes) continue;
        *in = p;
        *of = s;
        return at;
      }
    }
  return NULL;
}

bool pool_allocation_at(CUdeviceptr pointer, allocation *out) {
  pool *p;
  segment *s;
  span *at = span_at(pointer, &p, &s);
  if (!at || !at->asked) return false;
  *out = (allocation){s->memory, s->memory->base + at->offset, at->asked};
  return pointer - out->base < out->bytes;
}

CUresult pool_free(CUdeviceptr pointer, bool *found) {
  pool *p;
  segment *s;
  span *at = span_at(pointer, &p, &s);
  *found = at != NULL;
  if (!at || !at->asked || pointer != s->memory->base + at->offset) return CUDA_ERROR_INVALID_VALUE;
  p->used -= at->bytes;
  at->asked = 0;
  at->by = NULL;
  merge(s);
  return CUDA_SUCCESS;
}

void pools_drop(context *ctx) {
  for (pool *p = pools; p; p = p->next) {
    for (segment *s = p->segments; s; s = s->next) {
      for (span *at = s->spans; at; at = at->next) {
        if (at->by != ctx) continue;
        p->used -= at->bytes;
        at->asked = 0;
        at->by = NULL;
      }
      merge(s);
    }
    if (p->card == ctx->card) trim(p, 0);
  }
}

/* ---- entry points -------------------------------------------------------- */

/* In a capture an allocation is a node, and its memory the graph's. */
static CUresult allocate_in_graph(const pool *from, stream *on, uint64_t bytes, CUdeviceptr *pointer) {
  CUDA_MEM_ALLOC_NODE_PARAMS params = {.poolProps = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}},
                                       .bytesize = bytes};
  for (uint32_t i = 0; i < the_driver.device_count; i++)
    if (the_driver.cards[i] == from->card) params.poolProps.location.id = (int)i;
  size_t count;
  CUgraphNode node;
  const CUgraphNode *after = capture_after(on, &count);
  CUresult result = node_add_allocation(capture_graph(on), after, count, &params, &node);
  if (result != CUDA_SUCCESS) return result;
  capture_moved(on, node);
  *pointer = params.dptr;
  return CUDA_SUCCESS;
}

static CUresult allocate(CUdeviceptr *pointer, uint64_t bytes, CUmemoryPool wanted, bool named, CUstream handle, bool per_thread) {
  context *ctx;
  stream *on;
  ENTER();
  CUresult result = context_current(&ctx);
  if (result == CUDA_SUCCESS) result = stream_for_work(ctx, handle, per_thread, &on);
  if (result != CUDA_SUCCESS) LEAVE(result);
  if (!pointer || !bytes || (named && (!handle_is(wanted, HANDLE_POOL) || wanted->imported))) LEAVE(CUDA_ERROR_INVALID_VALUE);
  if (bytes > UINT64_MAX - SEGMENT_BYTES) LEAVE(CUDA_ERROR_OUT_OF_MEMORY);
  pool *from = named ? wanted : pool_of_card(on->owner->card);
  if (!from) LEAVE(CUDA_ERROR_OUT_OF_MEMORY);
  if (stream_capturing(on)) LEAVE(allocate_in_graph(from, on, bytes, pointer));
  if (cut(from, on->owner, bytes, pointer)) LEAVE(CUDA_SUCCESS);
  result = add_segment(from, bytes);
  if (result != CUDA_SUCCESS) LEAVE(result);
  LEAVE(cut(from, on->owner, bytes, pointer) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY);
}

EXPORT CUresult cuMemAllocAsync(CUdeviceptr *p, size_t n, CUstream on) { return allocate(p, n, NULL, false, on, false); }
EXPORT CUresult cuMemAllocAsync_ptsz(CUdeviceptr *p, size_t n, CUstream on) { return allocate(p, n, NULL, false, on, true); }
EXPORT CUresult cuMemAllocFromPoolAsync(CUdeviceptr *p, size_t n, CUmemoryPool from, CUstream on) { return allocate(p, n, from, true, on, false); }
EXPORT CUresult cuMemAllocFromPoolAsync_ptsz(CUdeviceptr *p, size_t n, CUmemoryPool from, CUstream on) {
  return allocate(p, n, from, true, on, true);
}

static CUresult free_in_graph(stream *on, operation *op) {
  size_t count;
  CUgraphNode node;
  const CUgraphNode *after = capture_after(on, &count);
  CUdeviceptr pointer = op->pointer;
  CUresult result = graph_memory_freed_by(pointer, NULL); /* memory from outside can't be freed by a graph */
  if (result == CUDA_SUCCESS) result = node_add(capture_graph(on), after, count, op, &node);
  if (result == CUDA_SUCCESS) result = graph_memory_freed_by(pointer, node);
  if (result == CUDA_SUCCESS) capture_moved(on, node);
  return result;
}

/* What is freed may still be used by what waits for the host. */
static CUresult free_later(const stream *on, const operation *op) {
  allocation found;
  if (!allocation_at(op->pointer, &found) || found.base != op->pointer) return CUDA_ERROR_INVALID_VALUE;
  return operation_issue(on, op, NULL, NULL);
}

static CUresult release(CUdeviceptr pointer, CUstream handle, bool per_thread) {
  context *ctx;
  stream *on;
  ENTER();
  CUresult result = context_current(&ctx);
  if (result == CUDA_SUCCESS) result = stream_for_work(ctx, handle, per_thread, &on);
  if (result != CUDA_SUCCESS) LEAVE(result);
  operation op = {.type = CU_GRAPH_NODE_TYPE_MEM_FREE, .ctx = on->owner, .pointer = pointer};
  if (stream_capturing(on)) LEAVE(free_in_graph(on, &op));
  if (graph_memory_end(pointer)) LEAVE(free_later(on, &op));
  allocation found;
  bool pooled = pool_allocation_at(pointer, &found);
  if (!pooled && allocation_at(pointer, &found) && found.base == pointer && found.in->owner && !found.in->opaque) LEAVE(deferred_free(on, &op));
  LEAVE(deferred_any() ? free_later(on, &op) : memory_free(pointer));
}

EXPORT CUresult cuMemFreeAsync(CUdeviceptr pointer, CUstream on) { return release(pointer, on, false); }
EXPORT CUresult cuMemFreeAsync_ptsz(CUdeviceptr pointer, CUstream on) { return release(pointer, on, true); }

EXPORT CUresult cuMemPoolCreate(CUmemoryPool *out, const CUmemPoolProps *properties) {
  ENTER();
  if (!out || !properties || properties->allocType != CU_MEM_ALLOCATION_TYPE_PINNED) LEAVE(CUDA_ERROR_INVALID_VALUE);
  if (properties->location.type != CU_MEM_LOCATION_TYPE_DEVICE || properties->handleTypes & ~CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
    LEAVE(CUDA_ERROR_NOT_SUPPORTED);
  if (properties->location.id < 0 || (uint32_t)properties->location.id >= the_driver.device_count) LEAVE(CUDA_ERROR_INVALID_DEVICE);
  pool *fresh = pool_new(the_driver.cards[properties->location.id], false);
  if (!fresh) LEAVE(CUDA_ERROR_OUT_OF_MEMORY);
  CUresult result = properties->handleTypes ? shared_make(SOFT_OBJECT_POOL, fresh->card, 0, &fresh->shared) : CUDA_SUCCESS;
  if (result != CUDA_SUCCESS) {
    pool_delete(fresh);
    LEAVE(result);
  }
  *out = fresh;
  LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuMemPoolDestroy(CUmemoryPool handle) {
  ENTER();
  if (!handle_is(handle, HANDLE_POOL) || handle->is_default) LEAVE(CUDA_ERROR_INVALID_VALUE);
  if (handle->used || import_pool_used(handle)) LEAVE(CUDA_ERROR_INVALID_VALUE);
  trim(handle, 0);
  pool_delete(handle);
  LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuMemPoolTrimTo(CUmemoryPool handle, size_t keep) {
  ENTER();
  if (!handle_is(handle, HANDLE_POOL) || handle->imported) LEAVE(CUDA_ERROR_INVALID_VALUE);
  trim(handle, keep);
  LEAVE(CUDA_SUCCESS);
}

static uint64_t *counter(pool *p, CUmemPool_attribute which) {
  switch (which) {
  case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD: return &p->threshold;
  case CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT: return &p->reserved;
  case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH: return &p->reserved_high;
  case CU_MEMPOOL_ATTR_USED_MEM_CURRENT: return &p->used;
  case CU_MEMPOOL_ATTR_USED_MEM_HIGH: return &p->used_high;
  default: return NULL;
  }
}

EXPORT CUresult cuMemPoolGetAttribute(CUmemoryPool handle, CUmemPool_attribute which, void *value) {
  ENTER();
  if (!value || !handle_is(handle, HANDLE_POOL)) LEAVE(CUDA_ERROR_INVALID_VALUE);
  if (which >= 1 && which <= 3) {
    *(int *)value = handle->reuse[which - 1];
    LEAVE(CUDA_SUCCESS);
  }
  uint64_t *at = counter(handle, which);
  if (!at) LEAVE(CUDA_ERROR_INVALID_VALUE);
  *(cuuint64_t *)value = *at;
  LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuMemPoolSetAttribute(CUmemoryPool handle, CUmemPool_attribute which, void *value) {
  ENTER();
  if (!value || !handle_is(handle, HANDLE_POOL)) LEAVE(CUDA_ERROR_INVALID_VALUE);
  if (which >= 1 && which <= 3) {
    handle->reuse[which - 1] = *(int *)value;
    LEAVE(CUDA_SUCCESS);
  }
  if (which == CU_MEMPOOL_ATTR_RELEASE_THRESHOLD) {
    handle->threshold = *(cuuint64_t *)value;
    LEAVE(CUDA_SUCCESS);
  }
  if (*(cuuint64_t *)value != 0) LEAVE(CUDA_ERROR_INVALID_VALUE); /* high marks can be cleared, nothing else */
  if (which == CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH) handle->reserved_high = handle->reserved;
  else if (which == CU_MEMPOOL_ATTR_USED_MEM_HIGH) handle->used_high = handle->used;
  else LEAVE(CUDA_ERROR_INVALID_VALUE);
  LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuMemPoolSetAccess(CUmemoryPool handle, const CUmemAccessDesc *access, size_t count) {
  ENTER();
  LEAVE(handle_is(handle, HANDLE_POOL) && access && count ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
}

EXPORT CUresult cuMemPoolGetAccess(int *flags, CUmemoryPool handle, CUmemLocation *location) {
  ENTER();
  if (!flags || !location || !handle_is(handle, HANDLE_POOL)) LEAVE(CUDA_ERROR_INVALID_VALUE);
  *flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  LEAVE(CUDA_SUCCESS);
}

static CUresult device_pool(CUmemoryPool *out, CUdevice device, bool only_default) {
  ENTER();
  if (device < 0 || (uint32_t)device >= the_driver.device_count) LEAVE(CUDA_ERROR_INVALID_DEVICE);
  if (!out) LEAVE(CUDA_ERROR_INVALID_VALUE);
  pool *p = pool_of_card(the_driver.cards[device]);
  if (only_default) p = default_pool[the_driver.cards[device]];
  if (!p) LEAVE(CUDA_ERROR_OUT_OF_MEMORY);
  *out = p;
  LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuDeviceGetDefaultMemPool(CUmemoryPool *out, CUdevice device) { return device_pool(out, device, true); }
EXPORT CUresult cuDeviceGetMemPool(CUmemoryPool *out, CUdevice device) { return device_pool(out, device, false); }

EXPORT CUresult cuDeviceSetMemPool(CUdevice device, CUmemoryPool handle) {
  ENTER();
  if (device < 0 || (uint32_t)device >= the_driver.device_count) LEAVE(CUDA_ERROR_INVALID_DEVICE);
  if (!handle_is(handle, HANDLE_POOL) || handle->imported || handle->card != the_driver.cards[device]) LEAVE(CUDA_ERROR_INVALID_VALUE);
  current_pool[the_driver.cards[device]] = handle;
  LEAVE(CUDA_SUCCESS);
}

/* ---- pools of other processes -------------------------------------------- */

/* What cuMemPoolExportPointer writes. */
typedef struct {
  uint64_t magic, pool_generation, memory_generation, offset, bytes;
  uint32_t pool, memory;
} pointer_data;
_Static_assert(sizeof(pointer_data) <= sizeof(CUmemPoolPtrExportData), "fits");
#define POINTER_MAGIC 0x726f6f7074666f73ull

EXPORT CUresult cuMemPoolExportToShareableHandle(void *shareable, CUmemoryPool handle, int type, unsigned long long flags) {
  ENTER();
  if (!handle_is(handle, HANDLE_POOL) || !shareable || flags) LEAVE(CUDA_ERROR_INVALID_VALUE);
  if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || !handle->shared.there || handle->imported) LEAVE(CUDA_ERROR_INVALID_VALUE);
  LEAVE(shared_export(&handle->shared, (int *)shareable));
}

EXPORT CUresult cuMemPoolImportFromShareableHandle(CUmemoryPool *out, void *shareable, int type, unsigned long long flags) {
  shared_ref shared;
  ENTER();
  if (!out || flags || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) LEAVE(CUDA_ERROR_INVALID_VALUE);
  CUresult result = shared_take_descriptor(SOFT_OBJECT_POOL, (int)(intptr_t)shareable, &shared);
  if (result != CUDA_SUCCESS) LEAVE(result);
  pool *fresh = pool_new(shared.card, false);
  if (!fresh) {
    shared_give(&shared);
    LEAVE(CUDA_ERROR_OUT_OF_MEMORY);
  }
  fresh->imported = true;
  fresh->shared = shared;
  *out = fresh;
  LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuMemPoolExportPointer(CUmemPoolPtrExportData *out, CUdeviceptr pointer) {
  pool *p;
  segment *s;
  ENTER();
  span *at = span_at(pointer, &p, &s);
  if (!out || !at || !at->asked || pointer != s->memory->base + at->offset || !s->memory->shared) LEAVE(CUDA_ERROR_INVALID_VALUE);
  pointer_data data = {.magic = POINTER_MAGIC, .pool = p->shared.index, .pool_generation = p->shared.generation,
                       .memory = s->memory->shared->index, .memory_generation = s->memory->shared->generation,
                       .offset = at->offset, .bytes = at->asked};
  memset(out, 0, sizeof *out);
  memcpy(out, &data, sizeof data);
  LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuMemPoolImportPointer(CUdeviceptr *out, CUmemoryPool handle, CUmemPoolPtrExportData *from) {
  pointer_data data;
  context *ctx;
  shared_ref memory;
  ENTER();
  CUresult result = context_current(&ctx);
  if (result != CUDA_SUCCESS) LEAVE(result);
  if (!out || !from || !handle_is(handle, HANDLE_POOL) || !handle->imported) LEAVE(CUDA_ERROR_INVALID_VALUE);
  memcpy(&data, from, sizeof data);
  if (data.magic != POINTER_MAGIC || data.pool != handle->shared.index || data.pool_generation != handle->shared.generation)
    LEAVE(CUDA_ERROR_INVALID_VALUE);
  if (import_again(ctx, IMPORT_POOL, data.memory, data.memory_generation, data.offset, out)) LEAVE(CUDA_SUCCESS);
  result = shared_take(SOFT_OBJECT_MEMORY, data.memory, data.memory_generation, &memory);
  if (result != CUDA_SUCCESS) LEAVE(result);
  result = import_map(ctx, &memory, IMPORT_POOL, handle, data.offset, data.bytes, out);
  if (result != CUDA_SUCCESS) shared_give(&memory);
  LEAVE(result);
}

/* ---- pools by place, CUDA 13 ---------------------------------------------- */

/* Only pinned memory of a card has pools here. */
static CUresult place(const CUmemLocation *location, int type) {
  if (!location || type == CU_MEM_ALLOCATION_TYPE_INVALID) return CUDA_ERROR_INVALID_VALUE;
  if (type != CU_MEM_ALLOCATION_TYPE_PINNED || location->type != CU_MEM_LOCATION_TYPE_DEVICE) return CUDA_ERROR_NOT_SUPPORTED;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemGetDefaultMemPool(CUmemoryPool *out, CUmemLocation *location, int type) {
  CUresult result = place(location, type);
  return result == CUDA_SUCCESS ? device_pool(out, location->id, true) : result;
}

EXPORT CUresult cuMemGetMemPool(CUmemoryPool *out, CUmemLocation *location, int type) {
  CUresult result = place(location, type);
  return result == CUDA_SUCCESS ? device_pool(out, location->id, false) : result;
}

EXPORT CUresult cuMemSetMemPool(CUmemLocation *location, int type, CUmemoryPool handle) {
  CUresult result = place(location, type);
  return result == CUDA_SUCCESS ? cuDeviceSetMemPool(location->id, handle) : result;
}
