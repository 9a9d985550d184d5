/*
 * external.c - memory that comes in as a descriptor: cuImportExternalMemory.
 *
 * The descriptors are those that cuMemExportToShareableHandle makes: nobody
 * draws here, so no other maker of such memory exists. An import holds the
 * memory as an imported handle does, and each mapping of it by itself too.
 */
#include <stdlib.h>
#include <unistd.h>

#include "../state/state.h"
#include "array.h"
#include "shared.h"

struct CUextMemory_st {
  shared_ref shared;
  uint64_t bytes; /* as the importer says */
};

EXPORT CUresult cuImportExternalMemory(CUexternalMemory *out, const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *description) {
  context *ctx;
  ENTER();
  CUresult result = context_current(&ctx);
  if (result != CUDA_SUCCESS) LEAVE(result);
  if (!out || !description || !description->size || description->flags & ~(unsigned int)CUDA_EXTERNAL_MEMORY_DEDICATED) LEAVE(CUDA_ERROR_INVALID_VALUE);
  if (description->type != CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD) LEAVE(CUDA_ERROR_NOT_SUPPORTED);
  struct CUextMemory_st *fresh = calloc(1, sizeof *fresh);
  if (!fresh || !handle_add(fresh, HANDLE_EXTERNAL)) {
    free(fresh);
    LEAVE(CUDA_ERROR_OUT_OF_MEMORY);
  }
  result = shared_take_descriptor(SOFT_OBJECT_MEMORY, description->handle.fd, &fresh->shared);
  if (result == CUDA_SUCCESS && description->size > fresh->shared.bytes) {
    shared_give(&fresh->shared);
    result = CUDA_ERROR_INVALID_VALUE;
  }
  if (result != CUDA_SUCCESS) {
    handle_remove(fresh);
    free(fresh);
    LEAVE(result);
  }
  close(description->handle.fd); /* it is the driver's from a successful import on */
  fresh->bytes = description->size;
  *out = fresh;
  LEAVE(CUDA_SUCCESS);
}

static CUresult map(context *ctx, const struct CUextMemory_st *memory, import_way way, uint64_t offset, uint64_t bytes, CUdeviceptr *out) {
  shared_ref again;
  if (offset > memory->bytes || bytes > memory->bytes - offset) return CUDA_ERROR_INVALID_VALUE;
  CUresult result = shared_take(SOFT_OBJECT_MEMORY, memory->shared.index, memory->shared.generation, &again);
  if (result != CUDA_SUCCESS) return result;
  result = import_map(ctx, &again, way, NULL, offset, bytes, out);
  if (result != CUDA_SUCCESS) shared_give(&again);
  return result;
}

EXPORT CUresult cuExternalMemoryGetMappedBuffer(CUdeviceptr *out, CUexternalMemory handle, const CUDA_EXTERNAL_MEMORY_BUFFER_DESC *d) {
  context *ctx;
  ENTER();
  CUresult result = context_current(&ctx);
  if (result != CUDA_SUCCESS) LEAVE(result);
  if (!handle_is(handle, HANDLE_EXTERNAL)) LEAVE(CUDA_ERROR_INVALID_HANDLE);
  if (!out || !d || d->flags) LEAVE(CUDA_ERROR_INVALID_VALUE);
  LEAVE(map(ctx, handle, IMPORT_EXTERNAL, d->offset, d->size, out));
}

EXPORT CUresult cuExternalMemoryGetMappedMipmappedArray(CUmipmappedArray *out, CUexternalMemory handle,
                                                        const CUDA_EXTERNAL_MEMORY_MIPMAPPED_ARRAY_DESC *d) {
  context *ctx;
  CUdeviceptr base;
  ENTER();
  CUresult result = context_current(&ctx);
  if (result != CUDA_SUCCESS) LEAVE(result);
  if (!handle_is(handle, HANDLE_EXTERNAL)) LEAVE(CUDA_ERROR_INVALID_HANDLE);
  if (!out || !d || d->offset > handle->bytes) LEAVE(CUDA_ERROR_INVALID_VALUE);
  uint64_t bytes = handle->bytes - d->offset;
  result = map(ctx, handle, IMPORT_ARRAY, d->offset, bytes, &base);
  if (result != CUDA_SUCCESS) LEAVE(result);
  result = mipmap_over(ctx, &d->arrayDesc, d->numLevels, base, bytes, out);
  if (result != CUDA_SUCCESS) (void)import_close(base, IMPORT_ARRAY);
  LEAVE(result);
}

EXPORT CUresult cuDestroyExternalMemory(CUexternalMemory handle) {
  ENTER();
  if (!handle_is(handle, HANDLE_EXTERNAL)) LEAVE(CUDA_ERROR_INVALID_HANDLE);
  shared_give(&handle->shared);
  handle_remove(handle);
  free(handle);
  LEAVE(CUDA_SUCCESS);
}
