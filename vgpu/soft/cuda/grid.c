/* grid.c - launches as CUDA 2 had them: shape and arguments are the function's, set call by call. */
#include <string.h>

#include "operation.h"

#define FUNCTION(handle)                                             \
  context *ctx;                                                      \
  struct CUfunc_st *function;                                        \
  ENTER();                                                           \
  CUresult result = context_current(&ctx);                           \
  if (result == CUDA_SUCCESS) result = function_resolve(ctx, handle, &function); \
  if (result != CUDA_SUCCESS) LEAVE(result)

EXPORT CUresult cuFuncSetBlockShape(CUfunction handle, int x, int y, int z) {
  FUNCTION(handle);
  if (x <= 0 || y <= 0 || z <= 0) LEAVE(CUDA_ERROR_INVALID_VALUE);
  function->old_block[0] = (unsigned int)x;
  function->old_block[1] = (unsigned int)y;
  function->old_block[2] = (unsigned int)z;
  LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuFuncSetSharedSize(CUfunction handle, unsigned int bytes) {
  FUNCTION(handle);
  function->old_shared = bytes;
  LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuFuncSetSharedMemConfig(CUfunction handle, CUsharedconfig config) {
  FUNCTION(handle);
  LEAVE(config < 0 || config > 2 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS);
}

EXPORT CUresult cuParamSetSize(CUfunction handle, unsigned int bytes) {
  FUNCTION(handle);
  if (bytes > sizeof function->old_arguments) LEAVE(CUDA_ERROR_INVALID_VALUE);
  function->old_bytes = bytes;
  LEAVE(CUDA_SUCCESS);
}

static CUresult put(CUfunction handle, int offset, const void *from, unsigned int bytes) {
  FUNCTION(handle);
  size_t room = sizeof function->old_arguments;
  if (offset < 0 || !from || bytes > room || (size_t)offset > room - bytes) LEAVE(CUDA_ERROR_INVALID_VALUE);
  memcpy(function->old_arguments + offset, from, bytes);
  LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuParamSeti(CUfunction handle, int offset, unsigned int value) { return put(handle, offset, &value, sizeof value); }
EXPORT CUresult cuParamSetf(CUfunction handle, int offset, float value) { return put(handle, offset, &value, sizeof value); }
EXPORT CUresult cuParamSetv(CUfunction handle, int offset, void *from, unsigned int bytes) { return put(handle, offset, from, bytes); }

static CUresult launch(CUfunction handle, int width, int height, CUstream stream_handle) {
  stream *on;
  FUNCTION(handle);
  if (width <= 0 || height <= 0) LEAVE(CUDA_ERROR_INVALID_VALUE);
  result = stream_for_work(ctx, stream_handle, false, &on);
  if (result != CUDA_SUCCESS) LEAVE(result);
  operation op = {.type = CU_GRAPH_NODE_TYPE_KERNEL,
                  .ctx = on->owner,
                  .kernel = {.grid = {(unsigned int)width, (unsigned int)height, 1},
                             .block = {function->old_block[0], function->old_block[1], function->old_block[2]},
                             .shared_bytes = function->old_shared}};
  size_t bytes = function->old_bytes;
  void *extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, function->old_arguments, CU_LAUNCH_PARAM_BUFFER_SIZE, &bytes, CU_LAUNCH_PARAM_END};
  result = kernel_prepare(on->owner, handle, NULL, extra, &op.kernel);
  LEAVE(result == CUDA_SUCCESS ? operation_submit(on, &op) : result);
}

EXPORT CUresult cuLaunch(CUfunction handle) { return launch(handle, 1, 1, NULL); }
EXPORT CUresult cuLaunchGrid(CUfunction handle, int width, int height) { return launch(handle, width, height, NULL); }
EXPORT CUresult cuLaunchGridAsync(CUfunction handle, int width, int height, CUstream on) { return launch(handle, width, height, on); }
