/* linear.c - cuMemAlloc and its kin, and what is left. */
#include <string.h>

#include "../state/ledger.h"
#include "../state/lock.h"
#include "deferred.h"
#include "managed.h"

/* Rows start on 512 bytes, the texture alignment of every model. */
enum { PITCH_BYTES = 512 };

#define CURRENT(ctx)                        \
  context *ctx;                             \
  ENTER();                                  \
  CUresult current = context_current(&ctx); \
  if (current != CUDA_SUCCESS) LEAVE(current)

/* ---- free and total ------------------------------------------------------ */

static CUresult info(uint64_t *free_bytes, uint64_t *total_bytes) {
  CURRENT(ctx);
  soft_region *region = &the_driver.region;
  const soft_card *card = context_card(ctx);
  managed_settle(ctx->card);
  deferred_run();
  soft_error error = soft_lock(region, SOFT_PATIENCE_MS);
  if (error != SOFT_OK) LEAVE(driver_from(error));
  soft_ledger_sweep(region, false);
  *total_bytes = soft_card_capacity(card);
  *free_bytes = soft_card_free(card);
  soft_unlock(region);
  LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes) {
  uint64_t left, total;
  CUresult result = info(&left, &total);
  if (result != CUDA_SUCCESS) return result;
  if (free_bytes) *free_bytes = left;
  if (total_bytes) *total_bytes = total;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemGetInfo(unsigned int *free_bytes, unsigned int *total_bytes) {
  uint64_t left, total;
  CUresult result = info(&left, &total);
  if (result != CUDA_SUCCESS) return result;
  if (free_bytes) *free_bytes = left < UINT32_MAX ? (unsigned int)left : UINT32_MAX;
  if (total_bytes) *total_bytes = total < UINT32_MAX ? (unsigned int)total : UINT32_MAX;
  return CUDA_SUCCESS;
}

/* ---- allocating ---------------------------------------------------------- */

static CUresult allocate(CUdeviceptr *out, uint64_t bytes, bool low) {
  CURRENT(ctx);
  SAFE();
  deferred_run(); /* what a stream has come to is free by now */
  LEAVE(memory_allocate(ctx, bytes, low, out));
}

EXPORT CUresult cuMemAlloc_v2(CUdeviceptr *pointer, size_t bytes) {
  if (!pointer) return CUDA_ERROR_INVALID_VALUE;
  return allocate(pointer, bytes, false);
}

EXPORT CUresult cuMemAlloc(CUdeviceptr_v1 *pointer, unsigned int bytes) {
  CUdeviceptr wide;
  if (!pointer) return CUDA_ERROR_INVALID_VALUE;
  CUresult result = allocate(&wide, bytes, true);
  if (result == CUDA_SUCCESS) *pointer = (CUdeviceptr_v1)wide;
  return result;
}

static CUresult allocate_pitch(CUdeviceptr *out, uint64_t *pitch, uint64_t width, uint64_t height, unsigned int element, bool low) {
  if (!width || !height || (element != 4 && element != 8 && element != 16)) return CUDA_ERROR_INVALID_VALUE;
  if (width > INT32_MAX) return CUDA_ERROR_INVALID_VALUE;
  uint64_t row = (width + PITCH_BYTES - 1) / PITCH_BYTES * PITCH_BYTES;
  if (height > UINT64_MAX / row) return CUDA_ERROR_OUT_OF_MEMORY;
  CUresult result = allocate(out, row * height, low);
  if (result == CUDA_SUCCESS) *pitch = row;
  return result;
}

EXPORT CUresult cuMemAllocPitch_v2(CUdeviceptr *pointer, size_t *pitch, size_t width, size_t height, unsigned int element) {
  uint64_t row;
  if (!pointer || !pitch) return CUDA_ERROR_INVALID_VALUE;
  CUresult result = allocate_pitch(pointer, &row, width, height, element, false);
  if (result == CUDA_SUCCESS) *pitch = row;
  return result;
}

EXPORT CUresult cuMemAllocPitch(CUdeviceptr_v1 *pointer, unsigned int *pitch, unsigned int width, unsigned int height, unsigned int element) {
  CUdeviceptr wide;
  uint64_t row;
  if (!pointer || !pitch) return CUDA_ERROR_INVALID_VALUE;
  CUresult result = allocate_pitch(&wide, &row, width, height, element, true);
  if (result != CUDA_SUCCESS) return result;
  *pointer = (CUdeviceptr_v1)wide;
  *pitch = (unsigned int)row;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemAllocManaged(CUdeviceptr *pointer, size_t bytes, unsigned int flags) {
  if (!pointer || (flags != CU_MEM_ATTACH_GLOBAL && flags != CU_MEM_ATTACH_HOST)) return CUDA_ERROR_INVALID_VALUE;
  CURRENT(ctx);
  SAFE();
  LEAVE(memory_allocate_managed(ctx, bytes, pointer));
}

/* ---- freeing ------------------------------------------------------------- */

static CUresult release(CUdeviceptr pointer) {
  if (!pointer) return CUDA_SUCCESS;
  CURRENT(ctx);
  SAFE();
  /* the driver lets what may still use the memory finish first */
  CUresult result = work_wait(ctx, SOFT_ALL_STREAMS, SOFT_FOREVER, work_spins(ctx));
  if (result != CUDA_SUCCESS) LEAVE(result);
  LEAVE(deferred_freed(pointer) ? CUDA_ERROR_INVALID_VALUE : memory_free(pointer));
}

EXPORT CUresult cuMemFree_v2(CUdeviceptr pointer) { return release(pointer); }
EXPORT CUresult cuMemFree(CUdeviceptr_v1 pointer) { return release(pointer); }

/* ---- asking about a pointer ---------------------------------------------- */

EXPORT CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *bytes, CUdeviceptr pointer) {
  allocation found;
  CURRENT(ctx);
  (void)ctx;
  if (!allocation_at(pointer, &found)) LEAVE(CUDA_ERROR_NOT_FOUND);
  if (base) *base = found.base;
  if (bytes) *bytes = found.bytes;
  LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuMemGetAddressRange(CUdeviceptr_v1 *base, unsigned int *bytes, CUdeviceptr_v1 pointer) {
  CUdeviceptr wide = 0;
  size_t size = 0;
  CUresult result = cuMemGetAddressRange_v2(&wide, &size, pointer);
  if (result != CUDA_SUCCESS) return result;
  if (base) *base = (CUdeviceptr_v1)wide;
  if (bytes) *bytes = (unsigned int)size;
  return CUDA_SUCCESS;
}
