/* stream.c - streams. */
#include <stdlib.h>

#include "../state/state.h"
#include "capture.h"
#include "green.h"
#include "ipc.h"

static __thread stream *own_stream; /* the calling thread's default stream */
static stream *own_streams;         /* those of all threads: a capture may outlive its thread */

CUresult stream_resolve(context *ctx, CUstream handle, bool per_thread, stream **out) {
  if (handle == CU_STREAM_PER_THREAD || (!handle && per_thread)) {
    if (!own_stream) {
      own_stream = calloc(1, sizeof *own_stream);
      if (!own_stream) return CUDA_ERROR_OUT_OF_MEMORY;
      own_stream->number = the_driver.next_stream++;
      own_stream->next = own_streams;
      own_streams = own_stream;
    }
    own_stream->owner = ctx;
    own_stream->green = green_current();
    *out = own_stream;
    return CUDA_SUCCESS;
  }
  if (!handle || handle == CU_STREAM_LEGACY) {
    CUgreenCtx green = green_current();
    *out = green ? &green->own : &ctx->legacy;
    return CUDA_SUCCESS;
  }
  if (!handle_is(handle, HANDLE_STREAM)) return CUDA_ERROR_INVALID_HANDLE;
  *out = handle;
  return CUDA_SUCCESS;
}

#define STREAM(ctx, on, handle, per_thread)                                                          \
  context *ctx;                                                                                      \
  stream *on;                                                                                        \
  ENTER();                                                                                           \
  CUresult current = context_current(&ctx);                                                          \
  if (current == CUDA_SUCCESS) current = stream_resolve(ctx, handle, per_thread, &on);               \
  if (current != CUDA_SUCCESS) LEAVE(current);                                                       \
  ctx = on->owner

CUresult stream_make(context *ctx, CUgreenCtx green, unsigned int flags, int priority, CUstream *out) {
  stream *fresh = calloc(1, sizeof *fresh);
  if (!fresh || !handle_add(fresh, HANDLE_STREAM)) {
    free(fresh);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  fresh->owner = ctx;
  fresh->green = green;
  fresh->number = the_driver.next_stream++;
  fresh->flags = flags;
  fresh->priority = priority > 0 ? 0 : priority < -5 ? -5 : priority;
  fresh->next = ctx->streams;
  ctx->streams = fresh;
  *out = fresh;
  return CUDA_SUCCESS;
}

static CUresult create(CUstream *out, unsigned int flags, int priority) {
  context *ctx;
  ENTER();
  CUresult result = context_current(&ctx);
  if (result != CUDA_SUCCESS) LEAVE(result);
  if (!out || flags > CU_STREAM_NON_BLOCKING) LEAVE(CUDA_ERROR_INVALID_VALUE);
  LEAVE(stream_make(ctx, green_current(), flags, priority, out));
}

EXPORT CUresult cuStreamCreate(CUstream *out, unsigned int flags) { return create(out, flags, 0); }
EXPORT CUresult cuStreamCreateWithPriority(CUstream *out, unsigned int flags, int priority) { return create(out, flags, priority); }

static CUresult destroy(CUstream handle) {
  ENTER();
  if (!handle_is(handle, HANDLE_STREAM)) LEAVE(CUDA_ERROR_INVALID_HANDLE);
  stream **link = &handle->owner->streams;
  while (*link && *link != handle) link = &(*link)->next;
  if (*link) *link = handle->next;
  capture_forget_stream(handle);
  handle_remove(handle); /* work that it still has goes on */
  free(handle);
  LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuStreamDestroy(CUstream handle) { return destroy(handle); }
EXPORT CUresult cuStreamDestroy_v2(CUstream handle) { return destroy(handle); }

static void drop(stream **link) {
  stream *gone = *link;
  *link = gone->next;
  capture_forget_stream(gone);
  handle_remove(gone);
  free(gone);
}

void streams_drop(context *ctx) {
  while (ctx->streams) drop(&ctx->streams);
}

void streams_drop_green(context *ctx, CUgreenCtx green) {
  for (stream **link = &ctx->streams; *link;) {
    if ((*link)->green == green) drop(link);
    else link = &(*link)->next;
  }
}

/* The host may not ask after captured work, nor after any where a capture forbids it. */
static CUresult lookable(context *ctx, CUstream handle, bool per_thread, stream **on) {
  CUresult result = stream_for_work(ctx, handle, per_thread, on);
  if (result != CUDA_SUCCESS) return result;
  return stream_capturing(*on) ? capture_refuse(*on) : capture_unsafe();
}

static CUresult synchronize(CUstream handle, bool per_thread) {
  STREAM(ctx, on, handle, per_thread);
  CUresult result = lookable(ctx, handle, per_thread, &on);
  if (result == CUDA_SUCCESS) result = work_wait_stream(ctx, on);
  if (result == CUDA_SUCCESS) pools_trim(ctx);
  LEAVE(result);
}

EXPORT CUresult cuStreamSynchronize(CUstream handle) { return synchronize(handle, false); }
EXPORT CUresult cuStreamSynchronize_ptsz(CUstream handle) { return synchronize(handle, true); }

static CUresult query(CUstream handle, bool per_thread) {
  STREAM(ctx, on, handle, per_thread);
  CUresult result = lookable(ctx, handle, per_thread, &on);
  LEAVE(result == CUDA_SUCCESS ? work_query(ctx, on->number) : result);
}

EXPORT CUresult cuStreamQuery(CUstream handle) { return query(handle, false); }
EXPORT CUresult cuStreamQuery_ptsz(CUstream handle) { return query(handle, true); }

CUresult event_wait(const stream *on, CUevent handle, uint32_t *queue, uint64_t *seq) {
  soft_entry wait = {.kind = SOFT_ENTRY_WAIT, .wait_queue = handle->queue, .wait_seq = handle->seq};
  uint32_t stream_number;
  if (handle->shared) {
    if (!ipc_event_pending(handle, &wait.wait_queue, &stream_number, &wait.wait_seq)) return CUDA_SUCCESS;
    return work_submit(on->owner, on, wait, queue, seq);
  }
  if (handle->pending) work_collect(handle->owner);
  if (!handle->pending) return CUDA_SUCCESS;
  return work_submit(on->owner, on, wait, queue, seq);
}

static CUresult wait_event(CUstream handle, CUevent on_event, unsigned int flags, bool per_thread) {
  STREAM(ctx, on, handle, per_thread);
  bool taken;
  CUresult result = stream_for_work(ctx, handle, per_thread, &on);
  if (result != CUDA_SUCCESS) LEAVE(result);
  if (flags > CU_EVENT_WAIT_EXTERNAL) LEAVE(CUDA_ERROR_INVALID_VALUE);
  if (!handle_is(on_event, HANDLE_EVENT)) LEAVE(CUDA_ERROR_INVALID_HANDLE);
  result = capture_wait(on, on_event, flags == CU_EVENT_WAIT_EXTERNAL, &taken);
  LEAVE(taken ? result : event_wait(on, on_event, NULL, NULL));
}

EXPORT CUresult cuStreamWaitEvent(CUstream handle, CUevent on, unsigned int flags) { return wait_event(handle, on, flags, false); }
EXPORT CUresult cuStreamWaitEvent_ptsz(CUstream handle, CUevent on, unsigned int flags) { return wait_event(handle, on, flags, true); }

/* ---- asking -------------------------------------------------------------- */

#define ASK(name, type, value)                                       \
  static CUresult name(CUstream handle, type *out, bool per_thread) { \
    STREAM(ctx, on, handle, per_thread);                             \
    (void)ctx;                                                       \
    (void)on;                                                        \
    if (!out) LEAVE(CUDA_ERROR_INVALID_VALUE);                       \
    *out = value;                                                    \
    LEAVE(CUDA_SUCCESS);                                             \
  }

ASK(ask_priority, int, on->priority)
ASK(ask_flags, unsigned int, on->flags)
ASK(ask_context, CUcontext, on->green ? &on->green->name : ctx)
ASK(ask_number, unsigned long long, on->number + 1ull)

EXPORT CUresult cuStreamGetPriority(CUstream handle, int *out) { return ask_priority(handle, out, false); }
EXPORT CUresult cuStreamGetPriority_ptsz(CUstream handle, int *out) { return ask_priority(handle, out, true); }
EXPORT CUresult cuStreamGetFlags(CUstream handle, unsigned int *out) { return ask_flags(handle, out, false); }
EXPORT CUresult cuStreamGetFlags_ptsz(CUstream handle, unsigned int *out) { return ask_flags(handle, out, true); }
EXPORT CUresult cuStreamGetCtx(CUstream handle, CUcontext *out) { return ask_context(handle, out, false); }
EXPORT CUresult cuStreamGetCtx_ptsz(CUstream handle, CUcontext *out) { return ask_context(handle, out, true); }
EXPORT CUresult cuStreamGetId(CUstream handle, unsigned long long *out) { return ask_number(handle, out, false); }
EXPORT CUresult cuStreamGetId_ptsz(CUstream handle, unsigned long long *out) { return ask_number(handle, out, true); }
