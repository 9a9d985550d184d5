/*
 * fill.c - the memset family. Like copies, fills happen at the call, unless
 * something before them waits for the host, and take no time on the card.
 */
#include <string.h>

#include "managed.h"
#include "operation.h"

typedef struct {
  CUDA_MEMSET_NODE_PARAMS box;
  CUstream stream;
  bool per_thread, waits;
} wish;

static void fill_row(void *view, const CUDA_MEMSET_NODE_PARAMS *f) {
  if (f->elementSize == 1) {
    memset(view, (int)f->value, f->width);
  } else if (f->elementSize == 2) {
    uint16_t *at = view, value = (uint16_t)f->value;
    for (size_t i = 0; i < f->width; i++) at[i] = value;
  } else {
    uint32_t *at = view;
    for (size_t i = 0; i < f->width; i++) at[i] = f->value;
  }
}

CUresult fill_check(const CUDA_MEMSET_NODE_PARAMS *f) {
  if (f->elementSize != 1 && f->elementSize != 2 && f->elementSize != 4) return CUDA_ERROR_INVALID_VALUE;
  if (!f->width || !f->height) return CUDA_SUCCESS;
  size_t bytes = f->width * f->elementSize;
  if (bytes / f->elementSize != f->width || f->dst % f->elementSize) return CUDA_ERROR_INVALID_VALUE;
  return f->height > 1 && (f->pitch % f->elementSize || f->pitch < bytes) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult fill_run(uint32_t card, const CUDA_MEMSET_NODE_PARAMS *f) {
  CUresult result = fill_check(f);
  if (result != CUDA_SUCCESS || !f->width || !f->height) return result;
  size_t bytes = f->width * f->elementSize;
  for (size_t row = 0; row < f->height; row++) {
    CUdeviceptr at = f->dst + row * f->pitch;
    managed_touch(card, at, bytes);
    if (!f->value && memory_zero(at, bytes)) continue;
    void *view = memory_card_view(at, bytes, true);
    if (!view) return CUDA_ERROR_INVALID_VALUE;
    fill_row(view, f);
  }
  return CUDA_SUCCESS;
}

static CUresult fill(wish w) {
  context *ctx;
  stream *on;
  ENTER();
  CUresult result = context_current(&ctx);
  if (result == CUDA_SUCCESS) result = stream_for_work(ctx, w.stream, w.per_thread, &on);
  if (result != CUDA_SUCCESS || !w.box.width || !w.box.height) LEAVE(result);
  result = fill_check(&w.box);
  if (result != CUDA_SUCCESS) LEAVE(result);
  operation op = {.type = CU_GRAPH_NODE_TYPE_MEMSET, .ctx = on->owner, .fill = w.box};
  /* fills of device memory don't wait for the card, but their bytes are there when a wait is over */
  if (!w.waits || stream_capturing(on)) LEAVE(operation_submit(on, &op));
  result = work_wait_stream(on->owner, on);
  LEAVE(result == CUDA_SUCCESS ? fill_run(on->owner->card, &w.box) : result);
}

#define LINE(p, v, w, n) .box = {.dst = (p), .value = (v), .elementSize = (w), .width = (n), .height = 1}
#define BOX(p, q, v, w, n, h) .box = {.dst = (p), .pitch = (q), .value = (v), .elementSize = (w), .width = (n), .height = (h)}
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
