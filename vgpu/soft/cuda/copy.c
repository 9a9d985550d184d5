/*
 * copy.c - copies. The bytes move when the call is made, which is an order
 * that the streams allow; a synchronous copy first waits for its stream. A
 * copy takes no time on the card's clock.
 */
#include <string.h>

#include "arena.h"

enum { PLAIN = 0, PER_THREAD = 1, WAITS = 2, TO_DEVICE = 4, FROM_DEVICE = 8 };

static CUresult begin(context **ctx, CUstream handle, int how) {
  stream *on;
  CUresult result = context_current(ctx);
  if (result == CUDA_SUCCESS) result = stream_resolve(*ctx, handle, how & PER_THREAD, &on);
  if (result == CUDA_SUCCESS && how & WAITS) result = work_wait_stream(on->owner, on);
  return result;
}

static bool on_device(CUdeviceptr pointer) {
  void *view;
  return is_device_address(pointer) || vmm_host_view(pointer, 1, &view) >= 0;
}

static CUresult copy(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream handle, int how) {
  context *ctx;
  ENTER();
  CUresult result = begin(&ctx, handle, how);
  if (result != CUDA_SUCCESS || !bytes) LEAVE(result);
  if ((how & TO_DEVICE && !on_device(to)) || (how & FROM_DEVICE && !on_device(from))) LEAVE(CUDA_ERROR_INVALID_VALUE);
  void *target = memory_host_view(to, bytes, true), *source = memory_host_view(from, bytes, false);
  if (!target || !source) LEAVE(CUDA_ERROR_INVALID_VALUE);
  memmove(target, source, bytes);
  LEAVE(CUDA_SUCCESS);
}

#define HOST(pointer) ((CUdeviceptr)(uintptr_t)(pointer))

EXPORT CUresult cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t n) { return copy(to, from, n, NULL, WAITS); }
EXPORT CUresult cuMemcpy_ptds(CUdeviceptr to, CUdeviceptr from, size_t n) { return copy(to, from, n, NULL, WAITS | PER_THREAD); }
EXPORT CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t n, CUstream on) { return copy(to, from, n, on, PLAIN); }
EXPORT CUresult cuMemcpyAsync_ptsz(CUdeviceptr to, CUdeviceptr from, size_t n, CUstream on) { return copy(to, from, n, on, PER_THREAD); }

EXPORT CUresult cuMemcpyHtoD(CUdeviceptr_v1 to, const void *from, unsigned int n) { return copy(to, HOST(from), n, NULL, WAITS | TO_DEVICE); }
EXPORT CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t n) { return copy(to, HOST(from), n, NULL, WAITS | TO_DEVICE); }
EXPORT CUresult cuMemcpyHtoD_v2_ptds(CUdeviceptr to, const void *from, size_t n) {
  return copy(to, HOST(from), n, NULL, WAITS | TO_DEVICE | PER_THREAD);
}
EXPORT CUresult cuMemcpyDtoH(void *to, CUdeviceptr_v1 from, unsigned int n) { return copy(HOST(to), from, n, NULL, WAITS | FROM_DEVICE); }
EXPORT CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t n) { return copy(HOST(to), from, n, NULL, WAITS | FROM_DEVICE); }
EXPORT CUresult cuMemcpyDtoH_v2_ptds(void *to, CUdeviceptr from, size_t n) {
  return copy(HOST(to), from, n, NULL, WAITS | FROM_DEVICE | PER_THREAD);
}
EXPORT CUresult cuMemcpyDtoD(CUdeviceptr_v1 to, CUdeviceptr_v1 from, unsigned int n) {
  return copy(to, from, n, NULL, WAITS | TO_DEVICE | FROM_DEVICE);
}
EXPORT CUresult cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t n) { return copy(to, from, n, NULL, WAITS | TO_DEVICE | FROM_DEVICE); }
EXPORT CUresult cuMemcpyDtoD_v2_ptds(CUdeviceptr to, CUdeviceptr from, size_t n) {
  return copy(to, from, n, NULL, WAITS | TO_DEVICE | FROM_DEVICE | PER_THREAD);
}

EXPORT CUresult cuMemcpyHtoDAsync(CUdeviceptr_v1 to, const void *from, unsigned int n, CUstream on) { return copy(to, HOST(from), n, on, TO_DEVICE); }
EXPORT CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t n, CUstream on) { return copy(to, HOST(from), n, on, TO_DEVICE); }
EXPORT CUresult cuMemcpyHtoDAsync_v2_ptsz(CUdeviceptr to, const void *from, size_t n, CUstream on) {
  return copy(to, HOST(from), n, on, TO_DEVICE | PER_THREAD);
}
EXPORT CUresult cuMemcpyDtoHAsync(void *to, CUdeviceptr_v1 from, unsigned int n, CUstream on) { return copy(HOST(to), from, n, on, FROM_DEVICE); }
EXPORT CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t n, CUstream on) { return copy(HOST(to), from, n, on, FROM_DEVICE); }
EXPORT CUresult cuMemcpyDtoHAsync_v2_ptsz(void *to, CUdeviceptr from, size_t n, CUstream on) {
  return copy(HOST(to), from, n, on, FROM_DEVICE | PER_THREAD);
}
EXPORT CUresult cuMemcpyDtoDAsync(CUdeviceptr_v1 to, CUdeviceptr_v1 from, unsigned int n, CUstream on) {
  return copy(to, from, n, on, TO_DEVICE | FROM_DEVICE);
}
EXPORT CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t n, CUstream on) {
  return copy(to, from, n, on, TO_DEVICE | FROM_DEVICE);
}
EXPORT CUresult cuMemcpyDtoDAsync_v2_ptsz(CUdeviceptr to, CUdeviceptr from, size_t n, CUstream on) {
  return copy(to, from, n, on, TO_DEVICE | FROM_DEVICE | PER_THREAD);
}

/* Addresses are unique among cards, so the contexts say nothing that they don't. */
static CUresult copy_peer(CUdeviceptr to, CUcontext to_ctx, CUdeviceptr from, CUcontext from_ctx, size_t n, CUstream on, int how) {
  if (!to_ctx || !from_ctx) return CUDA_ERROR_INVALID_CONTEXT;
  return copy(to, from, n, on, how | TO_DEVICE | FROM_DEVICE);
}

EXPORT CUresult cuMemcpyPeer(CUdeviceptr to, CUcontext to_ctx, CUdeviceptr from, CUcontext from_ctx, size_t n) {
  return copy_peer(to, to_ctx, from, from_ctx, n, NULL, WAITS);
}
EXPORT CUresult cuMemcpyPeer_ptds(CUdeviceptr to, CUcontext to_ctx, CUdeviceptr from, CUcontext from_ctx, size_t n) {
  return copy_peer(to, to_ctx, from, from_ctx, n, NULL, WAITS | PER_THREAD);
}
EXPORT CUresult cuMemcpyPeerAsync(CUdeviceptr to, CUcontext to_ctx, CUdeviceptr from, CUcontext from_ctx, size_t n, CUstream on) {
  return copy_peer(to, to_ctx, from, from_ctx, n, on, PLAIN);
}
EXPORT CUresult cuMemcpyPeerAsync_ptsz(CUdeviceptr to, CUcontext to_ctx, CUdeviceptr from, CUcontext from_ctx, size_t n, CUstream on) {
  return copy_peer(to, to_ctx, from, from_ctx, n, on, PER_THREAD);
}

/* ---- boxes --------------------------------------------------------------- */

typedef struct {
  CUdeviceptr base;
  size_t x, y, z, pitch, rows; /* rows: of one slice */
} side;

static bool side_of(CUmemorytype type, const void *host, CUdeviceptr device, side *out) {
  if (type == CU_MEMORYTYPE_HOST) out->base = HOST(host);
  else if (type == CU_MEMORYTYPE_DEVICE || type == CU_MEMORYTYPE_UNIFIED) out->base = device;
  else return false; /* arrays are opaque here */
  return out->base != 0;
}

static CUdeviceptr row_at(const side *s, size_t slice, size_t row) { return s->base + ((s->z + slice) * s->rows + s->y + row) * s->pitch + s->x; }

static CUresult copy_box(const side *to, const side *from, size_t width, size_t height, size_t depth, CUstream handle, int how) {
  context *ctx;
  ENTER();
  CUresult result = begin(&ctx, handle, how);
  if (result != CUDA_SUCCESS || !width || !height || !depth) LEAVE(result);
  /* refused as a whole or not at all */
  for (int moving = 0; moving < 2; moving++)
    for (size_t slice = 0; slice < depth; slice++)
      for (size_t row = 0; row < height; row++) {
        void *target = memory_host_view(row_at(to, slice, row), width, true);
        const void *source = memory_host_view(row_at(from, slice, row), width, false);
        if (!target || !source) LEAVE(CUDA_ERROR_INVALID_VALUE);
        if (moving) memmove(target, source, width);
      }
  LEAVE(CUDA_SUCCESS);
}

static CUresult copy_2d(const CUDA_MEMCPY2D *c, CUstream on, int how) {
  side to, from;
  if (!c) return CUDA_ERROR_INVALID_VALUE;
  if (c->srcMemoryType == CU_MEMORYTYPE_ARRAY || c->dstMemoryType == CU_MEMORYTYPE_ARRAY) return CUDA_ERROR_NOT_SUPPORTED;
  from = (side){.x = c->srcXInBytes, .y = c->srcY, .pitch = c->srcPitch ? c->srcPitch : c->srcXInBytes + c->WidthInBytes};
  to = (side){.x = c->dstXInBytes, .y = c->dstY, .pitch = c->dstPitch ? c->dstPitch : c->dstXInBytes + c->WidthInBytes};
  if (!side_of(c->srcMemoryType, c->srcHost, c->srcDevice, &from) || !side_of(c->dstMemoryType, c->dstHost, c->dstDevice, &to))
    return CUDA_ERROR_INVALID_VALUE;
  if (c->WidthInBytes + from.x > from.pitch || c->WidthInBytes + to.x > to.pitch) return CUDA_ERROR_INVALID_VALUE;
  return copy_box(&to, &from, c->WidthInBytes, c->Height, 1, on, how);
}

EXPORT CUresult cuMemcpy2D_v2(const CUDA_MEMCPY2D *c) { return copy_2d(c, NULL, WAITS); }
EXPORT CUresult cuMemcpy2D_v2_ptds(const CUDA_MEMCPY2D *c) { return copy_2d(c, NULL, WAITS | PER_THREAD); }
EXPORT CUresult cuMemcpy2DUnaligned_v2(const CUDA_MEMCPY2D *c) { return copy_2d(c, NULL, WAITS); }
EXPORT CUresult cuMemcpy2DUnaligned_v2_ptds(const CUDA_MEMCPY2D *c) { return copy_2d(c, NULL, WAITS | PER_THREAD); }
EXPORT CUresult cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D *c, CUstream on) { return copy_2d(c, on, PLAIN); }
EXPORT CUresult cuMemcpy2DAsync_v2_ptsz(const CUDA_MEMCPY2D *c, CUstream on) { return copy_2d(c, on, PER_THREAD); }

static CUresult copy_3d(const CUDA_MEMCPY3D *c, CUstream on, int how) {
  side to, from;
  if (!c) return CUDA_ERROR_INVALID_VALUE;
  if (c->srcMemoryType == CU_MEMORYTYPE_ARRAY || c->dstMemoryType == CU_MEMORYTYPE_ARRAY) return CUDA_ERROR_NOT_SUPPORTED;
  from = (side){.x = c->srcXInBytes, .y = c->srcY, .z = c->srcZ, .pitch = c->srcPitch, .rows = c->srcHeight};
  to = (side){.x = c->dstXInBytes, .y = c->dstY, .z = c->dstZ, .pitch = c->dstPitch, .rows = c->dstHeight};
  if (!from.pitch) from.pitch = from.x + c->WidthInBytes;
  if (!to.pitch) to.pitch = to.x + c->WidthInBytes;
  if (!from.rows) from.rows = from.y + c->Height;
  if (!to.rows) to.rows = to.y + c->Height;
  if (!side_of(c->srcMemoryType, c->srcHost, c->srcDevice, &from) || !side_of(c->dstMemoryType, c->dstHost, c->dstDevice, &to))
    return CUDA_ERROR_INVALID_VALUE;
  if (c->WidthInBytes + from.x > from.pitch || c->WidthInBytes + to.x > to.pitch) return CUDA_ERROR_INVALID_VALUE;
  return copy_box(&to, &from, c->WidthInBytes, c->Height, c->Depth, on, how);
}

EXPORT CUresult cuMemcpy3D_v2(const CUDA_MEMCPY3D *c) { return copy_3d(c, NULL, WAITS); }
EXPORT CUresult cuMemcpy3D_v2_ptds(const CUDA_MEMCPY3D *c) { return copy_3d(c, NULL, WAITS | PER_THREAD); }
EXPORT CUresult cuMemcpy3DAsync_v2(const CUDA_MEMCPY3D *c, CUstream on) { return copy_3d(c, on, PLAIN); }
EXPORT CUresult cuMemcpy3DAsync_v2_ptsz(const CUDA_MEMCPY3D *c, CUstream on) { return copy_3d(c, on, PER_THREAD); }
