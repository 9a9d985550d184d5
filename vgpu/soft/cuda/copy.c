/*
 * copy.c - copies. The bytes move when the call is made, which is an order
 * that the streams allow, unless something before them waits for the host
 * (deferred.h); a synchronous copy first waits for its stream. A copy takes no
 * time on the card's clock.
 */
#include <string.h>

#include "arena.h"
#include "array.h"
#include "operation.h"

enum { PLAIN = 0, PER_THREAD = 1, WAITS = 2, TO_DEVICE = 4, FROM_DEVICE = 8 };

/* A copy that the caller waits for is done here and now; others go through the stream. */
static CUresult perform(CUstream handle, int how, const CUDA_MEMCPY3D *c) {
  context *ctx;
  stream *on;
  ENTER();
  CUresult result = context_current(&ctx);
  if (result == CUDA_SUCCESS) result = stream_for_work(ctx, handle, how & PER_THREAD, &on);
  if (result == CUDA_SUCCESS && how & WAITS) result = capture_unsafe();
  if (result != CUDA_SUCCESS) LEAVE(result);
  operation op = {.type = CU_GRAPH_NODE_TYPE_MEMCPY, .ctx = on->owner, .copy = *c};
  if (how & WAITS) {
    result = work_wait_stream(on->owner, on);
    LEAVE(result == CUDA_SUCCESS ? copy_run(c) : result);
  }
  result = copy_check(c);
  LEAVE(result == CUDA_SUCCESS ? operation_submit(on, &op) : result);
}

static CUmemorytype type_of(CUdeviceptr pointer) { return is_device_address(pointer) ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST; }

static CUresult copy(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream handle, int how) {
  CUDA_MEMCPY3D c = {.srcDevice = from, .srcHost = (void *)(uintptr_t)from, .dstDevice = to, .dstHost = (void *)(uintptr_t)to,
                     .WidthInBytes = bytes, .Height = 1, .Depth = 1};
  CUresult ready = driver_enter();
  if (ready != CUDA_SUCCESS) return ready;
  c.srcMemoryType = type_of(from);
  c.dstMemoryType = type_of(to);
  driver_leave(CUDA_SUCCESS);
  if ((how & TO_DEVICE && c.dstMemoryType == CU_MEMORYTYPE_HOST) || (how & FROM_DEVICE && c.srcMemoryType == CU_MEMORYTYPE_HOST))
    c.dstMemoryType = -1; /* INVALID_VALUE, after what is found first */
  return perform(handle, how, &c);
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
  CUarray array;    /* NULL: memory */
  CUdeviceptr base;
  size_t x, y, z, pitch, rows; /* rows: of one slice */
} side;

static bool side_of(CUmemorytype type, const void *host, CUdeviceptr device, CUarray array, side *out) {
  switch (type) {
  case CU_MEMORYTYPE_HOST: out->base = HOST(host); break;
  case CU_MEMORYTYPE_DEVICE:
  case CU_MEMORYTYPE_UNIFIED: out->base = device; break;
  case CU_MEMORYTYPE_ARRAY: out->array = array; return array != NULL;
  default: return false;
  }
  return out->base != 0;
}

static void *row_of(const side *s, size_t slice, size_t row, size_t width, bool write) {
  if (s->array) return array_view(s->array, s->x, s->y + row, s->z + slice, width, write);
  return memory_host_view(s->base + ((s->z + slice) * s->rows + s->y + row) * s->pitch + s->x, width, write);
}

static bool row_fits(const side *s, size_t width) { return s->array || (s->x <= s->pitch && width <= s->pitch - s->x); }

static CUresult sides(const CUDA_MEMCPY3D *c, side *to, side *from) {
  if (c->srcLOD || c->dstLOD) return CUDA_ERROR_INVALID_VALUE;
  *from = (side){.x = c->srcXInBytes, .y = c->srcY, .z = c->srcZ, .pitch = c->srcPitch, .rows = c->srcHeight};
  *to = (side){.x = c->dstXInBytes, .y = c->dstY, .z = c->dstZ, .pitch = c->dstPitch, .rows = c->dstHeight};
  if (!from->pitch) from->pitch = from->x + c->WidthInBytes;
  if (!to->pitch) to->pitch = to->x + c->WidthInBytes;
  if (!from->rows) from->rows = from->y + c->Height;
  if (!to->rows) to->rows = to->y + c->Height;
  if (!side_of(c->srcMemoryType, c->srcHost, c->srcDevice, c->srcArray, from) || !side_of(c->dstMemoryType, c->dstHost, c->dstDevice, c->dstArray, to))
    return CUDA_ERROR_INVALID_VALUE;
  if (!row_fits(from, c->WidthInBytes) || !row_fits(to, c->WidthInBytes)) return CUDA_ERROR_INVALID_VALUE;
  bool gone = (to->array && !handle_is(to->array, HANDLE_ARRAY)) || (from->array && !handle_is(from->array, HANDLE_ARRAY));
  return gone ? CUDA_ERROR_INVALID_HANDLE : CUDA_SUCCESS;
}

CUresult copy_check(const CUDA_MEMCPY3D *c) {
  side to, from;
  return sides(c, &to, &from);
}

CUresult copy_run(const CUDA_MEMCPY3D *c) {
  side to, from;
  CUresult result = sides(c, &to, &from);
  if (result != CUDA_SUCCESS || !c->WidthInBytes || !c->Height || !c->Depth) return result;
  /* refused as a whole or not at all */
  for (int moving = 0; moving < 2; moving++)
    for (size_t slice = 0; slice < c->Depth; slice++)
      for (size_t row = 0; row < c->Height; row++) {
        void *target = row_of(&to, slice, row, c->WidthInBytes, true);
        const void *source = row_of(&from, slice, row, c->WidthInBytes, false);
        if (!target || !source) return CUDA_ERROR_INVALID_VALUE;
        if (moving) memmove(target, source, c->WidthInBytes);
      }
  return CUDA_SUCCESS;
}

static CUresult copy_2d(const CUDA_MEMCPY2D *c, CUstream on, int how) {
  if (!c) return CUDA_ERROR_INVALID_VALUE;
  CUDA_MEMCPY3D box = {.srcXInBytes = c->srcXInBytes, .srcY = c->srcY, .srcMemoryType = c->srcMemoryType, .srcHost = c->srcHost,
                       .srcDevice = c->srcDevice, .srcArray = c->srcArray, .srcPitch = c->srcPitch,
                       .dstXInBytes = c->dstXInBytes, .dstY = c->dstY, .dstMemoryType = c->dstMemoryType, .dstHost = c->dstHost,
                       .dstDevice = c->dstDevice, .dstArray = c->dstArray, .dstPitch = c->dstPitch,
                       .WidthInBytes = c->WidthInBytes, .Height = c->Height, .Depth = 1};
  return perform(on, how, &box);
}

static CUresult copy_2d_v1(const CUDA_MEMCPY2D_v1 *c, CUstream on, int how) {
  if (!c) return CUDA_ERROR_INVALID_VALUE;
  CUDA_MEMCPY2D wide = {.srcXInBytes = c->srcXInBytes, .srcY = c->srcY, .srcMemoryType = c->srcMemoryType, .srcHost = c->srcHost,
                        .srcDevice = c->srcDevice, .srcArray = c->srcArray, .srcPitch = c->srcPitch,
                        .dstXInBytes = c->dstXInBytes, .dstY = c->dstY, .dstMemoryType = c->dstMemoryType, .dstHost = c->dstHost,
                        .dstDevice = c->dstDevice, .dstArray = c->dstArray, .dstPitch = c->dstPitch,
                        .WidthInBytes = c->WidthInBytes, .Height = c->Height};
  return copy_2d(&wide, on, how);
}

EXPORT CUresult cuMemcpy2D(const CUDA_MEMCPY2D_v1 *c) { return copy_2d_v1(c, NULL, WAITS); }
EXPORT CUresult cuMemcpy2D_v2(const CUDA_MEMCPY2D *c) { return copy_2d(c, NULL, WAITS); }
EXPORT CUresult cuMemcpy2D_v2_ptds(const CUDA_MEMCPY2D *c) { return copy_2d(c, NULL, WAITS | PER_THREAD); }
EXPORT CUresult cuMemcpy2DUnaligned(const CUDA_MEMCPY2D_v1 *c) { return copy_2d_v1(c, NULL, WAITS); }
EXPORT CUresult cuMemcpy2DUnaligned_v2(const CUDA_MEMCPY2D *c) { return copy_2d(c, NULL, WAITS); }
EXPORT CUresult cuMemcpy2DUnaligned_v2_ptds(const CUDA_MEMCPY2D *c) { return copy_2d(c, NULL, WAITS | PER_THREAD); }
EXPORT CUresult cuMemcpy2DAsync(const CUDA_MEMCPY2D_v1 *c, CUstream on) { return copy_2d_v1(c, on, PLAIN); }
EXPORT CUresult cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D *c, CUstream on) { return copy_2d(c, on, PLAIN); }
EXPORT CUresult cuMemcpy2DAsync_v2_ptsz(const CUDA_MEMCPY2D *c, CUstream on) { return copy_2d(c, on, PER_THREAD); }

static CUresult copy_3d(const CUDA_MEMCPY3D *c, CUstream on, int how) { return c ? perform(on, how, c) : CUDA_ERROR_INVALID_VALUE; }

static CUresult copy_3d_v1(const CUDA_MEMCPY3D_v1 *c, CUstream on, int how) {
  if (!c) return CUDA_ERROR_INVALID_VALUE;
  CUDA_MEMCPY3D wide = {.srcXInBytes = c->srcXInBytes, .srcY = c->srcY, .srcZ = c->srcZ, .srcLOD = c->srcLOD, .srcMemoryType = c->srcMemoryType,
                        .srcHost = c->srcHost, .srcDevice = c->srcDevice, .srcArray = c->srcArray, .srcPitch = c->srcPitch, .srcHeight = c->srcHeight,
                        .dstXInBytes = c->dstXInBytes, .dstY = c->dstY, .dstZ = c->dstZ, .dstLOD = c->dstLOD, .dstMemoryType = c->dstMemoryType,
                        .dstHost = c->dstHost, .dstDevice = c->dstDevice, .dstArray = c->dstArray, .dstPitch = c->dstPitch, .dstHeight = c->dstHeight,
                        .WidthInBytes = c->WidthInBytes, .Height = c->Height, .Depth = c->Depth};
  return copy_3d(&wide, on, how);
}

/* Addresses are unique among cards, so the contexts say nothing that they don't. */
static CUresult copy_3d_peer(const CUDA_MEMCPY3D_PEER *c, CUstream on, int how) {
  CUDA_MEMCPY3D plain;
  if (!c) return CUDA_ERROR_INVALID_VALUE;
  memcpy(&plain, c, sizeof plain);
  return copy_3d(&plain, on, how);
}

EXPORT CUresult cuMemcpy3D(const CUDA_MEMCPY3D_v1 *c) { return copy_3d_v1(c, NULL, WAITS); }
EXPORT CUresult cuMemcpy3D_v2(const CUDA_MEMCPY3D *c) { return copy_3d(c, NULL, WAITS); }
EXPORT CUresult cuMemcpy3D_v2_ptds(const CUDA_MEMCPY3D *c) { return copy_3d(c, NULL, WAITS | PER_THREAD); }
EXPORT CUresult cuMemcpy3DAsync(const CUDA_MEMCPY3D_v1 *c, CUstream on) { return copy_3d_v1(c, on, PLAIN); }
EXPORT CUresult cuMemcpy3DAsync_v2(const CUDA_MEMCPY3D *c, CUstream on) { return copy_3d(c, on, PLAIN); }
EXPORT CUresult cuMemcpy3DAsync_v2_ptsz(const CUDA_MEMCPY3D *c, CUstream on) { return copy_3d(c, on, PER_THREAD); }
EXPORT CUresult cuMemcpy3DPeer(const CUDA_MEMCPY3D_PEER *c) { return copy_3d_peer(c, NULL, WAITS); }
EXPORT CUresult cuMemcpy3DPeer_ptds(const CUDA_MEMCPY3D_PEER *c) { return copy_3d_peer(c, NULL, WAITS | PER_THREAD); }
EXPORT CUresult cuMemcpy3DPeerAsync(const CUDA_MEMCPY3D_PEER *c, CUstream on) { return copy_3d_peer(c, on, PLAIN); }
EXPORT CUresult cuMemcpy3DPeerAsync_ptsz(const CUDA_MEMCPY3D_PEER *c, CUstream on) { return copy_3d_peer(c, on, PER_THREAD); }

/* ---- one row of an array ------------------------------------------------- */

#define ROW(a, o) &(side){.array = (a), .x = (o)}
#define LINE(p) &(side){.base = (p)}

static CUresult copy_row(const side *to, const side *from, size_t n, CUstream on, int how) {
  if ((!to->array && !to->base) || (!from->array && !from->base)) return CUDA_ERROR_INVALID_VALUE;
  CUDA_MEMCPY3D box = {.srcXInBytes = from->x, .srcMemoryType = from->array ? CU_MEMORYTYPE_ARRAY : CU_MEMORYTYPE_UNIFIED,
                       .srcDevice = from->base, .srcArray = from->array,
                       .dstXInBytes = to->x, .dstMemoryType = to->array ? CU_MEMORYTYPE_ARRAY : CU_MEMORYTYPE_UNIFIED,
                       .dstDevice = to->base, .dstArray = to->array, .WidthInBytes = n, .Height = 1, .Depth = 1};
  return perform(on, how, &box);
}

EXPORT CUresult cuMemcpyHtoA(CUarray a, unsigned int o, const void *from, unsigned int n) { return copy_row(ROW(a, o), LINE(HOST(from)), n, NULL, WAITS); }
EXPORT CUresult cuMemcpyHtoA_v2(CUarray a, size_t o, const void *from, size_t n) { return copy_row(ROW(a, o), LINE(HOST(from)), n, NULL, WAITS); }
EXPORT CUresult cuMemcpyHtoA_v2_ptds(CUarray a, size_t o, const void *from, size_t n) {
  return copy_row(ROW(a, o), LINE(HOST(from)), n, NULL, WAITS | PER_THREAD);
}
EXPORT CUresult cuMemcpyHtoAAsync(CUarray a, unsigned int o, const void *from, unsigned int n, CUstream on) {
  return copy_row(ROW(a, o), LINE(HOST(from)), n, on, PLAIN);
}
EXPORT CUresult cuMemcpyHtoAAsync_v2(CUarray a, size_t o, const void *from, size_t n, CUstream on) {
  return copy_row(ROW(a, o), LINE(HOST(from)), n, on, PLAIN);
}
EXPORT CUresult cuMemcpyHtoAAsync_v2_ptsz(CUarray a, size_t o, const void *from, size_t n, CUstream on) {
  return copy_row(ROW(a, o), LINE(HOST(from)), n, on, PER_THREAD);
}
EXPORT CUresult cuMemcpyAtoH(void *to, CUarray a, unsigned int o, unsigned int n) { return copy_row(LINE(HOST(to)), ROW(a, o), n, NULL, WAITS); }
EXPORT CUresult cuMemcpyAtoH_v2(void *to, CUarray a, size_t o, size_t n) { return copy_row(LINE(HOST(to)), ROW(a, o), n, NULL, WAITS); }
EXPORT CUresult cuMemcpyAtoH_v2_ptds(void *to, CUarray a, size_t o, size_t n) {
  return copy_row(LINE(HOST(to)), ROW(a, o), n, NULL, WAITS | PER_THREAD);
}
EXPORT CUresult cuMemcpyAtoHAsync(void *to, CUarray a, unsigned int o, unsigned int n, CUstream on) {
  return copy_row(LINE(HOST(to)), ROW(a, o), n, on, PLAIN);
}
EXPORT CUresult cuMemcpyAtoHAsync_v2(void *to, CUarray a, size_t o, size_t n, CUstream on) { return copy_row(LINE(HOST(to)), ROW(a, o), n, on, PLAIN); }
EXPORT CUresult cuMemcpyAtoHAsync_v2_ptsz(void *to, CUarray a, size_t o, size_t n, CUstream on) {
  return copy_row(LINE(HOST(to)), ROW(a, o), n, on, PER_THREAD);
}
EXPORT CUresult cuMemcpyDtoA(CUarray a, unsigned int o, CUdeviceptr_v1 from, unsigned int n) { return copy_row(ROW(a, o), LINE(from), n, NULL, WAITS); }
EXPORT CUresult cuMemcpyDtoA_v2(CUarray a, size_t o, CUdeviceptr from, size_t n) { return copy_row(ROW(a, o), LINE(from), n, NULL, WAITS); }
EXPORT CUresult cuMemcpyDtoA_v2_ptds(CUarray a, size_t o, CUdeviceptr from, size_t n) {
  return copy_row(ROW(a, o), LINE(from), n, NULL, WAITS | PER_THREAD);
}
EXPORT CUresult cuMemcpyAtoD(CUdeviceptr_v1 to, CUarray a, unsigned int o, unsigned int n) { return copy_row(LINE(to), ROW(a, o), n, NULL, WAITS); }
EXPORT CUresult cuMemcpyAtoD_v2(CUdeviceptr to, CUarray a, size_t o, size_t n) { return copy_row(LINE(to), ROW(a, o), n, NULL, WAITS); }
EXPORT CUresult cuMemcpyAtoD_v2_ptds(CUdeviceptr to, CUarray a, size_t o, size_t n) {
  return copy_row(LINE(to), ROW(a, o), n, NULL, WAITS | PER_THREAD);
}
EXPORT CUresult cuMemcpyAtoA(CUarray a, unsigned int o, CUarray from, unsigned int p, unsigned int n) {
  return copy_row(ROW(a, o), ROW(from, p), n, NULL, WAITS);
}
EXPORT CUresult cuMemcpyAtoA_v2(CUarray a, size_t o, CUarray from, size_t p, size_t n) { return copy_row(ROW(a, o), ROW(from, p), n, NULL, WAITS); }
EXPORT CUresult cuMemcpyAtoA_v2_ptds(CUarray a, size_t o, CUarray from, size_t p, size_t n) {
  return copy_row(ROW(a, o), ROW(from, p), n, NULL, WAITS | PER_THREAD);
}
