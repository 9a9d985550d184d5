/* fill.c - the memset family. Like copies, fills happen at the call and take no time on the card. */
#include <string.h>

#include "arena.h"

typedef struct {
  CUdeviceptr pointer;
  size_t pitch;            /* bytes, 0 for one row */
  unsigned int value;
  unsigned int width;      /* bytes of an element */
  size_t count, rows;      /* elements of a row, rows */
  CUstream stream;
  bool per_thread, waits;
} wish;

static void fill_row(void *view, const wish *w) {
  if (w->width == 1) {
    memset(view, (int)w->value, w->count);
  } else if (w->width == 2) {
    uint16_t *at = view, value = (uint16_t)w->value;
    for (size_t i = 0; i < w->count; i++) at[i] = value;
  } else {
    uint32_t *at = view;
    for (size_t i = 0; i < w->count; i++) at[i] = w->value;
  }
}

static CUresult fill(wish w) {
  context *ctx;
  stream *on;
  ENTER();
  CUresult result = context_current(&ctx);
  if (result == CUDA_SUCCESS) result = stream_resolve(ctx, w.stream, w.per_thread, &on);
  if (result == CUDA_SUCCESS && w.waits) result = work_wait_stream(on->owner, on);
  if (result != CUDA_SUCCESS || !w.count || !w.rows) LEAVE(result);
  size_t bytes = w.count * w.width;
  if (bytes / w.width != w.count || w.pointer % w.width || w.pitch % w.width || (w.rows > 1 && w.pitch < bytes)) LEAVE(CUDA_ERROR_INVALID_VALUE);
  for (size_t row = 0; row < w.rows; row++) {
    CUdeviceptr at = w.pointer + row * w.pitch;
    if (!w.value && memory_zero(at, bytes)) continue;
    void *view = memory_host_view(at, bytes, true);
    if (!view) LEAVE(CUDA_ERROR_INVALID_VALUE);
    fill_row(view, &w);
  }
  LEAVE(CUDA_SUCCESS);
}

#define LINE(p, v, w, n) .pointer = (p), .value = (v), .width = (w), .count = (n), .rows = 1
#define BOX(p, q, v, w, n, h) .pointer = (p), .pitch = (q), .value = (v), .width = (w), .count = (n), .rows = (h)
#define FILL(...) return fill((wish){__VA_ARGS__})

EXPORT CUresult cuMemsetD8(CUdeviceptr_v1 p, unsigned char v, unsigned int n) { FILL(LINE(p, v, 1, n), .waits = true); }
EXPORT CUresult cuMemsetD8_v2(CUdeviceptr p, unsigned char v, size_t n) { FILL(LINE(p, v, 1, n), .waits = true); }
EXPORT CUresult cuMemsetD8_v2_ptds(CUdeviceptr p, unsigned char v, size_t n) { FILL(LINE(p, v, 1, n), .waits = true, .per_thread = true); }
EXPORT CUresult cuMemsetD16(CUdeviceptr_v1 p, unsigned short v, unsigned int n) { FILL(LINE(p, v, 2, n), .waits = true); }
EXPORT CUresult cuMemsetD16_v2(CUdeviceptr p, unsigned short v, size_t n) { FILL(LINE(p, v, 2, n), .waits = true); }
EXPORT CUresult cuMemsetD16_v2_ptds(CUdeviceptr p, unsigned short v, size_t n) { FILL(LINE(p, v, 2, n), .waits = true, .per_thread = true); }
EXPORT CUresult cuMemsetD32(CUdeviceptr_v1 p, unsigned int v, unsigned int n) { FILL(LINE(p, v, 4, n), .waits = true); }
EXPORT CUresult cuMemsetD32_v2(CUdeviceptr p, unsigned int v, size_t n) { FILL(LINE(p, v, 4, n), .waits = true); }
EXPORT CUresult cuMemsetD32_v2_ptds(CUdeviceptr p, unsigned int v, size_t n) { FILL(LINE(p, v, 4, n), .waits = true, .per_thread = true); }

EXPORT CUresult cuMemsetD2D8_v2(CUdeviceptr p, size_t q, unsigned char v, size_t n, size_t h) { FILL(BOX(p, q, v, 1, n, h), .waits = true); }
EXPORT CUresult cuMemsetD2D8_v2_ptds(CUdeviceptr p, size_t q, unsigned char v, size_t n, size_t h) {
  FILL(BOX(p, q, v, 1, n, h), .waits = true, .per_thread = true);
}
EXPORT CUresult cuMemsetD2D16_v2(CUdeviceptr p, size_t q, unsigned short v, size_t n, size_t h) { FILL(BOX(p, q, v, 2, n, h), .waits = true); }
EXPORT CUresult cuMemsetD2D16_v2_ptds(CUdeviceptr p, size_t q, unsigned short v, size_t n, size_t h) {
  FILL(BOX(p, q, v, 2, n, h), .waits = true, .per_thread = true);
}
EXPORT CUresult cuMemsetD2D32_v2(CUdeviceptr p, size_t q, unsigned int v, size_t n, size_t h) { FILL(BOX(p, q, v, 4, n, h), .waits = true); }
EXPORT CUresult cuMemsetD2D32_v2_ptds(CUdeviceptr p, size_t q, unsigned int v, size_t n, size_t h) {
  FILL(BOX(p, q, v, 4, n, h), .waits = true, .per_thread = true);
}

EXPORT CUresult cuMemsetD8Async(CUdeviceptr p, unsigned char v, size_t n, CUstream on) { FILL(LINE(p, v, 1, n), .stream = on); }
EXPORT CUresult cuMemsetD8Async_ptsz(CUdeviceptr p, unsigned char v, size_t n, CUstream on) { FILL(LINE(p, v, 1, n), .stream = on, .per_thread = true); }
EXPORT CUresult cuMemsetD16Async(CUdeviceptr p, unsigned short v, size_t n, CUstream on) { FILL(LINE(p, v, 2, n), .stream = on); }
EXPORT CUresult cuMemsetD16Async_ptsz(CUdeviceptr p, unsigned short v, size_t n, CUstream on) {
  FILL(LINE(p, v, 2, n), .stream = on, .per_thread = true);
}
EXPORT CUresult cuMemsetD32Async(CUdeviceptr p, unsigned int v, size_t n, CUstream on) { FILL(LINE(p, v, 4, n), .stream = on); }
EXPORT CUresult cuMemsetD32Async_ptsz(CUdeviceptr p, unsigned int v, size_t n, CUstream on) {
  FILL(LINE(p, v, 4, n), .stream = on, .per_thread = true);
}
EXPORT CUresult cuMemsetD2D8Async(CUdeviceptr p, size_t q, unsigned char v, size_t n, size_t h, CUstream on) {
  FILL(BOX(p, q, v, 1, n, h), .stream = on);
}
EXPORT CUresult cuMemsetD2D8Async_ptsz(CUdeviceptr p, size_t q, unsigned char v, size_t n, size_t h, CUstream on) {
  FILL(BOX(p, q, v, 1, n, h), .stream = on, .per_thread = true);
}
EXPORT CUresult cuMemsetD2D16Async(CUdeviceptr p, size_t q, unsigned short v, size_t n, size_t h, CUstream on) {
  FILL(BOX(p, q, v, 2, n, h), .stream = on);
}
EXPORT CUresult cuMemsetD2D16Async_ptsz(CUdeviceptr p, size_t q, unsigned short v, size_t n, size_t h, CUstream on) {
  FILL(BOX(p, q, v, 2, n, h), .stream = on, .per_thread = true);
}
EXPORT CUresult cuMemsetD2D32Async(CUdeviceptr p, size_t q, unsigned int v, size_t n, size_t h, CUstream on) {
  FILL(BOX(p, q, v, 4, n, h), .stream = on);
}
EXPORT CUresult cuMemsetD2D32Async_ptsz(CUdeviceptr p, size_t q, unsigned int v, size_t n, size_t h, CUstream on) {
  FILL(BOX(p, q, v, 4, n, h), .stream = on, .per_thread = true);
}
