/* event.c - events: records in a queue whose times come back to the event. */
#include <stdlib.h>

#include "../state/clock.h"
#include "capture.h"
#include "ipc.h"

EXPORT CUresult cuEventCreate(CUevent *out, unsigned int flags) {
  context *ctx;
  ENTER();
  CUresult result = context_current(&ctx);
  if (result != CUDA_SUCCESS) LEAVE(result);
  if (!out || flags > 7 || ((flags & CU_EVENT_INTERPROCESS) && !(flags & CU_EVENT_DISABLE_TIMING))) LEAVE(CUDA_ERROR_INVALID_VALUE);
  event *fresh = calloc(1, sizeof *fresh);
  if (!fresh || !handle_add(fresh, HANDLE_EVENT)) {
    free(fresh);
    LEAVE(CUDA_ERROR_OUT_OF_MEMORY);
  }
  fresh->owner = ctx;
  fresh->flags = flags;
  fresh->next = ctx->events;
  ctx->events = fresh;
  *out = fresh;
  LEAVE(CUDA_SUCCESS);
}

static CUresult destroy(CUevent handle) {
  ENTER();
  if (!handle_is(handle, HANDLE_EVENT)) LEAVE(CUDA_ERROR_INVALID_HANDLE);
  event **link = &handle->owner->events;
  while (*link && *link != handle) link = &(*link)->next;
  if (*link) *link = handle->next;
  ipc_event_drop(handle);
  capture_forget_event(handle);
  handle_remove(handle);
  free(handle);
  LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuEventDestroy(CUevent handle) { return destroy(handle); }
EXPORT CUresult cuEventDestroy_v2(CUevent handle) { return destroy(handle); }

void events_drop(context *ctx) {
  while (ctx->events) {
    event *gone = ctx->events;
    ctx->events = gone->next;
    ipc_event_drop(gone);
    capture_forget_event(gone);
    handle_remove(gone);
    free(gone);
  }
}

CUresult event_record(const stream *on, CUevent handle, uint32_t *out_queue, uint64_t *out_seq) {
  uint32_t queue;
  uint64_t seq;
  handle->pending = false; /* an older record that is still out must not fill in this one */
  CUresult result = work_submit(on->owner, on, (soft_entry){.kind = SOFT_ENTRY_EVENT, .cookie = (uintptr_t)handle}, &queue, &seq);
  if (result != CUDA_SUCCESS || !handle_is(handle, HANDLE_EVENT)) return result; /* destroyed while we waited for room */
  handle->recorded = handle->pending = true;
  handle->queue = queue;
  handle->seq = seq;
  handle->stream_number = on->number;
  if (handle->shared) ipc_event_recorded(handle);
  if (out_queue) *out_queue = queue;
  if (out_seq) *out_seq = seq;
  return CUDA_SUCCESS;
}

static CUresult record(CUevent handle, CUstream stream_handle, unsigned int flags, bool per_thread) {
  context *ctx;
  stream *on;
  ENTER();
  CUresult result = context_current(&ctx);
  if (result == CUDA_SUCCESS) result = stream_for_work(ctx, stream_handle, per_thread, &on);
  if (result != CUDA_SUCCESS) LEAVE(result);
  if (flags > CU_EVENT_RECORD_EXTERNAL) LEAVE(CUDA_ERROR_INVALID_VALUE);
  if (!handle_is(handle, HANDLE_EVENT) || handle->owner != on->owner) LEAVE(CUDA_ERROR_INVALID_HANDLE);
  if (flags == CU_EVENT_RECORD_EXTERNAL && !stream_capturing(on)) LEAVE(CUDA_ERROR_INVALID_VALUE); /* the flag is for captures only */
  if (stream_capturing(on)) LEAVE(capture_record(on, handle, flags == CU_EVENT_RECORD_EXTERNAL));
  capture_forget_event(handle);
  LEAVE(event_record(on, handle, NULL, NULL));
}

EXPORT CUresult cuEventRecord(CUevent handle, CUstream on) { return record(handle, on, 0, false); }
EXPORT CUresult cuEventRecord_ptsz(CUevent handle, CUstream on) { return record(handle, on, 0, true); }
EXPORT CUresult cuEventRecordWithFlags(CUevent handle, CUstream on, unsigned int flags) { return record(handle, on, flags, false); }
EXPORT CUresult cuEventRecordWithFlags_ptsz(CUevent handle, CUstream on, unsigned int flags) { return record(handle, on, flags, true); }

EXPORT CUresult cuEventQuery(CUevent handle) {
  ENTER();
  if (!handle_is(handle, HANDLE_EVENT)) LEAVE(CUDA_ERROR_INVALID_HANDLE);
  CUresult lost = context_lost(handle->owner);
  if (lost == CUDA_SUCCESS) lost = capture_event_usable(handle);
  if (lost != CUDA_SUCCESS) LEAVE(lost);
  if (handle->shared) {
    uint32_t queue, stream_number;
    uint64_t seq;
    LEAVE(ipc_event_pending(handle, &queue, &stream_number, &seq) ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS);
  }
  if (handle->pending) work_collect(handle->owner);
  LEAVE(handle->pending ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS);
}

static CUresult synchronize_shared(CUevent handle) {
  context *ctx = handle->owner;
  uint32_t queue, stream_number;
  uint64_t seq;
  if (!ipc_event_pending(handle, &queue, &stream_number, &seq)) return CUDA_SUCCESS;
  driver_pause();
  soft_error error = soft_wait_queue(&the_driver.region, queue, stream_number, seq, work_spins(ctx));
  driver_resume();
  if (error != SOFT_OK) return driver_from(error);
  return ctx->destroyed ? CUDA_ERROR_CONTEXT_IS_DESTROYED : context_lost(ctx);
}

EXPORT CUresult cuEventSynchronize(CUevent handle) {
  ENTER();
  if (!handle_is(handle, HANDLE_EVENT)) LEAVE(CUDA_ERROR_INVALID_HANDLE);
  context *ctx = handle->owner;
  CUresult lost = context_lost(ctx);
  if (lost == CUDA_SUCCESS) lost = capture_event_usable(handle);
  if (lost != CUDA_SUCCESS) LEAVE(lost);
  if (handle->shared) LEAVE(synchronize_shared(handle));
  if (!handle->pending) LEAVE(CUDA_SUCCESS);
  bool spin = !(handle->flags & CU_EVENT_BLOCKING_SYNC) && work_spins(ctx);
  CUresult result = work_wait(ctx, handle->stream_number, handle->seq, spin);
  if (result == CUDA_SUCCESS) pools_trim(ctx);
  LEAVE(result);
}

static CUresult elapsed(float *milliseconds, CUevent start, CUevent end) {
  ENTER();
  if (!milliseconds) LEAVE(CUDA_ERROR_INVALID_VALUE);
  if (!handle_is(start, HANDLE_EVENT) || !handle_is(end, HANDLE_EVENT)) LEAVE(CUDA_ERROR_INVALID_HANDLE);
  if (start->captured_in || end->captured_in) LEAVE(CUDA_ERROR_CAPTURED_EVENT);
  if (!start->recorded || !end->recorded || (start->flags | end->flags) & CU_EVENT_DISABLE_TIMING) LEAVE(CUDA_ERROR_INVALID_HANDLE);
  if (start->pending) work_collect(start->owner);
  if (end->pending) work_collect(end->owner);
  if (start->pending || end->pending) LEAVE(CUDA_ERROR_NOT_READY);
  *milliseconds = (float)((double)(int64_t)(end->time_ns - start->time_ns) / 1e6);
  LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuEventElapsedTime(float *milliseconds, CUevent start, CUevent end) { return elapsed(milliseconds, start, end); }
EXPORT CUresult cuEventElapsedTime_v2(float *milliseconds, CUevent start, CUevent end) { return elapsed(milliseconds, start, end); }
