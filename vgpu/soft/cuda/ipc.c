/*
 * ipc.c - handles of 64 bytes by which processes open each other's memory and events.
 *
 * A memory handle stands for the whole block that the memory lies in, as with
 * drivers: a 2 MiB page of small pieces, or the allocation. Where the maker
 * frees what others have still open, CUDA leaves open what happens; here, as
 * the kernel driver keeps it, the memory stays and another opener pays.
 */
#include "ipc.h"

#include <stdlib.h>
#include <string.h>

#include "../state/clock.h"
#include "../state/ledger.h"
#include "../state/lock.h"
#include "../state/objects.h"
#include "../state/sched.h"
#include "shared.h"

typedef struct {
  uint64_t magic, generation, offset, bytes;
  uint32_t index, pad;
} handle_data;
_Static_assert(sizeof(handle_data) <= sizeof(CUipcMemHandle), "fits");
#define MEMORY_MAGIC 0x6d656d7074666f73ull
#define EVENT_MAGIC 0x6e76657074666f73ull

#define CURRENT(ctx)                        \
  context *ctx;                             \
  ENTER();                                  \
  CUresult current = context_current(&ctx); \
  if (current != CUDA_SUCCESS) LEAVE(current)

/* ---- memory -------------------------------------------------------------- */

EXPORT CUresult cuIpcGetMemHandle(CUipcMemHandle *out, CUdeviceptr pointer) {
  allocation found;
  CURRENT(ctx);
  (void)ctx;
  if (!out || !allocation_at(pointer, &found)) LEAVE(CUDA_ERROR_INVALID_VALUE);
  block *b = found.in;
  if ((b->kind != BLOCK_PAGES && b->kind != BLOCK_CHUNK) || !b->owner || b->opaque) LEAVE(CUDA_ERROR_INVALID_VALUE);
  CUresult result = block_share(b);
  if (result != CUDA_SUCCESS) LEAVE(result);
  handle_data data = {.magic = MEMORY_MAGIC, .index = b->shared->index, .generation = b->shared->generation,
                      .offset = found.base - b->base, .bytes = found.bytes};
  memset(out, 0, sizeof *out);
  memcpy(out, &data, sizeof data);
  LEAVE(CUDA_SUCCESS);
}

static CUresult open_memory(CUdeviceptr *out, const CUipcMemHandle *handle, unsigned int flags) {
  handle_data data;
  shared_ref memory;
  CURRENT(ctx);
  memcpy(&data, handle, sizeof data);
  if (!out || flags & ~(unsigned int)CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS) LEAVE(CUDA_ERROR_INVALID_VALUE);
  if (data.magic != MEMORY_MAGIC) LEAVE(CUDA_ERROR_INVALID_VALUE);
  if (import_again(ctx, IMPORT_IPC, data.index, data.generation, data.offset, out)) LEAVE(CUDA_SUCCESS);
  CUresult result = shared_here(data.index, data.generation) && !import_any(data.index, data.generation) ? CUDA_ERROR_INVALID_CONTEXT : CUDA_SUCCESS;
  if (result == CUDA_SUCCESS) result = shared_take(SOFT_OBJECT_MEMORY, data.index, data.generation, &memory);
  if (result != CUDA_SUCCESS) LEAVE(result);
  result = memory.card != ctx->card && !(flags & CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS) ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
  if (result == CUDA_SUCCESS) result = import_map(ctx, &memory, IMPORT_IPC, NULL, data.offset, data.bytes, out);
  if (result != CUDA_SUCCESS) shared_give(&memory);
  LEAVE(result);
}

EXPORT CUresult cuIpcOpenMemHandle(CUdeviceptr *out, CUipcMemHandle handle, unsigned int flags) { return open_memory(out, &handle, flags); }
EXPORT CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *out, CUipcMemHandle handle, unsigned int flags) { return open_memory(out, &handle, flags); }

EXPORT CUresult cuIpcCloseMemHandle(CUdeviceptr pointer) {
  CURRENT(ctx);
  CUresult result = work_wait(ctx, SOFT_ALL_STREAMS, SOFT_FOREVER, work_spins(ctx));
  LEAVE(result == CUDA_SUCCESS ? import_close(pointer, IMPORT_IPC) : result);
}

/* ---- events -------------------------------------------------------------- */

EXPORT CUresult cuIpcGetEventHandle(CUipcEventHandle *out, CUevent handle) {
  ENTER();
  if (!handle_is(handle, HANDLE_EVENT)) LEAVE(CUDA_ERROR_INVALID_HANDLE);
  if (!out || !(handle->flags & CU_EVENT_INTERPROCESS)) LEAVE(CUDA_ERROR_INVALID_VALUE);
  if (!handle->shared) {
    shared_ref *fresh = calloc(1, sizeof *fresh);
    CUresult result = fresh ? shared_make(SOFT_OBJECT_EVENT, handle->owner->card, 0, fresh) : CUDA_ERROR_OUT_OF_MEMORY;
    if (result != CUDA_SUCCESS) {
      free(fresh);
      LEAVE(result);
    }
    handle->shared = fresh;
    if (handle->recorded) ipc_event_recorded(handle);
  }
  handle_data data = {.magic = EVENT_MAGIC, .index = handle->shared->index, .generation = handle->shared->generation};
  memset(out, 0, sizeof *out);
  memcpy(out, &data, sizeof data);
  LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuIpcOpenEventHandle(CUevent *out, CUipcEventHandle handle) {
  handle_data data;
  CURRENT(ctx);
  memcpy(&data, &handle, sizeof data);
  if (!out || data.magic != EVENT_MAGIC) LEAVE(CUDA_ERROR_INVALID_VALUE);
  if (shared_here(data.index, data.generation)) LEAVE(CUDA_ERROR_INVALID_CONTEXT);
  event *fresh = calloc(1, sizeof *fresh);
  shared_ref *shared = calloc(1, sizeof *shared);
  CUresult result = fresh && shared ? shared_take(SOFT_OBJECT_EVENT, data.index, data.generation, shared) : CUDA_ERROR_OUT_OF_MEMORY;
  if (result == CUDA_SUCCESS && !handle_add(fresh, HANDLE_EVENT)) {
    shared_give(shared);
    result = CUDA_ERROR_OUT_OF_MEMORY;
  }
  if (result != CUDA_SUCCESS) {
    free(fresh);
    free(shared);
    LEAVE(result);
  }
  *fresh = (event){.owner = ctx, .flags = CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING, .shared = shared, .next = ctx->events};
  ctx->events = fresh;
  *out = fresh;
  LEAVE(CUDA_SUCCESS);
}

void ipc_event_recorded(const event *e) {
  soft_region *region = &the_driver.region;
  if (soft_lock(region, SOFT_PATIENCE_MS) != SOFT_OK) return;
  soft_object *object = soft_object_at(region, e->shared->index, e->shared->generation);
  const soft_queue *queue = soft_queue_at(region, e->queue);
  if (object && queue) {
    object->queue = e->queue;
    object->queue_owner = queue->owner;
    object->stream = e->stream_number;
    object->seq = e->seq;
  }
  soft_unlock(region);
}

bool ipc_event_pending(const event *e, uint32_t *queue, uint32_t *stream, uint64_t *seq) {
  soft_region *region = &the_driver.region;
  bool pending = false;
  if (soft_lock(region, SOFT_PATIENCE_MS) != SOFT_OK) return false;
  const soft_object *object = soft_object_at(region, e->shared->index, e->shared->generation);
  const soft_queue *at = object ? soft_queue_at(region, object->queue) : NULL;
  if (at && at->owner && at->owner == object->queue_owner) {
    soft_ledger_sweep(region, false);
    soft_sched_advance(region, soft_now(region));
    *queue = object->queue;
    *stream = object->stream;
    *seq = object->seq;
    pending = !soft_sched_done(region, *queue, *stream, *seq);
  }
  soft_unlock(region);
  return pending;
}

void ipc_event_drop(event *e) {
  if (!e->shared) return;
  shared_give(e->shared);
  free(e->shared);
  e->shared = NULL;
}
