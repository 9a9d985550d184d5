/* hostwork.c - what ties a stream to the host: functions, callbacks, values in memory. */
#include "capture.h"
#include "deferred.h"

static CUresult begin(CUstream handle, bool per_thread, stream **on) {
  context *ctx;
  CUresult result = context_current(&ctx);
  return result == CUDA_SUCCESS ? stream_for_work(ctx, handle, per_thread, on) : result;
}

static CUresult host_function(CUstream handle, CUhostFn function, void *data, bool per_thread) {
  stream *on;
  ENTER();
  CUresult result = begin(handle, per_thread, &on);
  if (result == CUDA_SUCCESS && !function) result = CUDA_ERROR_INVALID_VALUE;
  if (result != CUDA_SUCCESS) LEAVE(result);
  operation op = {.type = CU_GRAPH_NODE_TYPE_HOST, .ctx = on->owner, .host = {.function = function, .data = data}};
  LEAVE(operation_submit(on, &op));
}

EXPORT CUresult cuLaunchHostFunc(CUstream on, CUhostFn function, void *data) { return host_function(on, function, data, false); }
EXPORT CUresult cuLaunchHostFunc_ptsz(CUstream on, CUhostFn function, void *data) { return host_function(on, function, data, true); }

/* Unlike a host function it is also called when the context is broken, and can't be captured. */
static CUresult callback(CUstream handle, CUstreamCallback function, void *data, unsigned int flags, bool per_thread) {
  stream *on;
  ENTER();
  CUresult result = begin(handle, per_thread, &on);
  if (result == CUDA_SUCCESS && (!function || flags)) result = CUDA_ERROR_INVALID_VALUE;
  if (result == CUDA_SUCCESS && stream_capturing(on)) result = capture_refuse(on);
  if (result != CUDA_SUCCESS) LEAVE(result);
  operation op = {.type = CU_GRAPH_NODE_TYPE_HOST, .ctx = on->owner, .host = {.callback = function, .stream = handle, .data = data}};
  LEAVE(operation_submit(on, &op));
}

EXPORT CUresult cuStreamAddCallback(CUstream on, CUstreamCallback function, void *data, unsigned int flags) {
  return callback(on, function, data, flags, false);
}
EXPORT CUresult cuStreamAddCallback_ptsz(CUstream on, CUstreamCallback function, void *data, unsigned int flags) {
  return callback(on, function, data, flags, true);
}

/* ---- values -------------------------------------------------------------- */

static CUresult batch(CUstream handle, unsigned int count, CUstreamBatchMemOpParams *list, unsigned int flags, bool per_thread) {
  stream *on;
  operation op;
  ENTER();
  CUresult result = begin(handle, per_thread, &on);
  if (result != CUDA_SUCCESS) LEAVE(result);
  CUDA_BATCH_MEM_OP_NODE_PARAMS params = {.ctx = on->owner, .count = count, .paramArray = list, .flags = flags};
  result = values_operation(&params, &op);
  if (result != CUDA_SUCCESS) LEAVE(result);
  result = operation_submit(on, &op);
  operation_clear(&op);
  LEAVE(result);
}

static CUresult one(CUstream on, int operation, CUdeviceptr address, uint64_t value, unsigned int flags, bool per_thread) {
  bool waits = operation == CU_STREAM_MEM_OP_WAIT_VALUE_32 || operation == CU_STREAM_MEM_OP_WAIT_VALUE_64;
  if (waits ? flags & ~(3u | CU_STREAM_WAIT_VALUE_FLUSH) : flags > CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER) return CUDA_ERROR_INVALID_VALUE;
  CUstreamBatchMemOpParams p = {.value = {.operation = operation, .address = address, .value = value, .flags = flags}};
  return batch(on, 1, &p, 0, per_thread);
}

#define VALUE(name, type, operation)                                                                                                          \
  EXPORT CUresult name(CUstream on, CUdeviceptr at, type value, unsigned int flags) { return one(on, operation, at, value, flags, false); }     \
  EXPORT CUresult name##_ptsz(CUstream on, CUdeviceptr at, type value, unsigned int flags) { return one(on, operation, at, value, flags, true); }

VALUE(cuStreamWaitValue32, cuuint32_t, CU_STREAM_MEM_OP_WAIT_VALUE_32)
VALUE(cuStreamWaitValue32_v2, cuuint32_t, CU_STREAM_MEM_OP_WAIT_VALUE_32)
VALUE(cuStreamWaitValue64, cuuint64_t, CU_STREAM_MEM_OP_WAIT_VALUE_64)
VALUE(cuStreamWaitValue64_v2, cuuint64_t, CU_STREAM_MEM_OP_WAIT_VALUE_64)
VALUE(cuStreamWriteValue32, cuuint32_t, CU_STREAM_MEM_OP_WRITE_VALUE_32)
VALUE(cuStreamWriteValue32_v2, cuuint32_t, CU_STREAM_MEM_OP_WRITE_VALUE_32)
VALUE(cuStreamWriteValue64, cuuint64_t, CU_STREAM_MEM_OP_WRITE_VALUE_64)
VALUE(cuStreamWriteValue64_v2, cuuint64_t, CU_STREAM_MEM_OP_WRITE_VALUE_64)

#define BATCH(name)                                                                                                                               \
  EXPORT CUresult name(CUstream on, unsigned int count, CUstreamBatchMemOpParams *list, unsigned int flags) { return batch(on, count, list, flags, false); } \
  EXPORT CUresult name##_ptsz(CUstream on, unsigned int count, CUstreamBatchMemOpParams *list, unsigned int flags) { return batch(on, count, list, flags, true); }

BATCH(cuStreamBatchMemOp)
BATCH(cuStreamBatchMemOp_v2)
