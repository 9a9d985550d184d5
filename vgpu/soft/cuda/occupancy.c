/* occupancy.c - how much of a kernel a multiprocessor holds, and what functions are like. */
#include "operation.h"

unsigned int blocks_per_sm(const soft_card *card, unsigned int threads, size_t shared) {
  const soft_card_facts *facts = &card->facts;
  unsigned int whole = (threads + 31) / 32 * 32;
  unsigned int fit = facts->threads_per_sm / (whole ? whole : 1);
  unsigned int most = facts->threads_per_sm >= 2048 ? 32 : facts->threads_per_sm >= 1536 ? 24 : 16;
  size_t each = shared ? shared + (facts->cc_major >= 8 ? 1024 : 0) : 0; /* the driver keeps 1 KiB of each block's */
  if (each && (size_t)facts->shared_per_sm_kib * 1024 / each < fit) fit = (unsigned int)((size_t)facts->shared_per_sm_kib * 1024 / each);
  return fit < 1 ? 1 : fit > most ? most : fit;
}

#define FUNCTION(handle)                                             \
  context *ctx;                                                      \
  struct CUfunc_st *function;                                        \
  ENTER();                                                           \
  CUresult result = context_current(&ctx);                           \
  if (result == CUDA_SUCCESS) result = function_resolve(ctx, handle, &function); \
  if (result != CUDA_SUCCESS) LEAVE(result);                         \
  const soft_card *card = context_card(ctx)

static CUresult most_blocks(int *blocks, CUfunction handle, int threads, size_t shared) {
  FUNCTION(handle);
  if (!blocks || threads <= 0 || threads > 1024) LEAVE(CUDA_ERROR_INVALID_VALUE);
  *blocks = shared > (size_t)card->facts.shared_per_block_kib * 1024 ? 0 : (int)blocks_per_sm(card, (unsigned int)threads, shared);
  LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction function, int threads, size_t shared) {
  return most_blocks(blocks, function, threads, shared);
}
EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, CUfunction function, int threads, size_t shared,
                                                                     unsigned int flags) {
  return flags > 1 ? CUDA_ERROR_INVALID_VALUE : most_blocks(blocks, function, threads, shared);
}

/* The block size with which most threads are resident; the largest of several. */
static CUresult best(int *grid, int *block, CUfunction handle, CUoccupancyB2DSize shared_of, size_t shared, int limit, unsigned int flags) {
  FUNCTION(handle);
  if (!grid || !block || limit < 0 || flags > 1) LEAVE(CUDA_ERROR_INVALID_VALUE);
  unsigned int most = 0, threads = limit && limit < 1024 ? (unsigned int)limit : 1024;
  *grid = *block = 0;
  while (threads) {
    if (shared_of) { /* the program's own: not under our lock */
      driver_pause();
      shared = shared_of((int)threads);
      driver_resume();
    }
    unsigned int blocks = shared > (size_t)card->facts.shared_per_block_kib * 1024 ? 0 : blocks_per_sm(card, threads, shared);
    if (blocks * threads > most) {
      most = blocks * threads;
      *block = (int)threads;
      *grid = (int)(blocks * ctx->sm_count);
    }
    threads = threads % 32 ? threads / 32 * 32 : threads - 32;
  }
  LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuOccupancyMaxPotentialBlockSize(int *grid, int *block, CUfunction function, CUoccupancyB2DSize shared_of, size_t shared, int limit) {
  return best(grid, block, function, shared_of, shared, limit, 0);
}
EXPORT CUresult cuOccupancyMaxPotentialBlockSizeWithFlags(int *grid, int *block, CUfunction function, CUoccupancyB2DSize shared_of, size_t shared,
                                                          int limit, unsigned int flags) {
  return best(grid, block, function, shared_of, shared, limit, flags);
}

EXPORT CUresult cuOccupancyAvailableDynamicSMemPerBlock(size_t *bytes, CUfunction handle, int blocks, int threads) {
  FUNCTION(handle);
  if (!bytes || blocks <= 0 || threads <= 0 || threads > 1024) LEAVE(CUDA_ERROR_INVALID_VALUE);
  if ((unsigned int)blocks > blocks_per_sm(card, (unsigned int)threads, 0)) LEAVE(CUDA_ERROR_INVALID_VALUE);
  size_t reserved = card->facts.cc_major >= 8 ? 1024 : 0, most = (size_t)card->facts.shared_per_block_kib * 1024;
  size_t each = (size_t)card->facts.shared_per_sm_kib * 1024 / (size_t)blocks / 1024 * 1024;
  each = each > reserved ? each - reserved : 0;
  *bytes = each < most ? each : most;
  LEAVE(CUDA_SUCCESS);
}

/* ---- functions ----------------------------------------------------------- */

EXPORT CUresult cuFuncGetParamInfo(CUfunction handle, size_t index, size_t *offset, size_t *bytes) {
  FUNCTION(handle);
  (void)card;
  if (!offset || index >= function->entry->parameter_count) LEAVE(CUDA_ERROR_INVALID_VALUE);
  size_t at = 0;
  for (size_t i = 0; i <= index; i++) {
    size_t size = function->entry->parameter_bytes[i];
    at = (at + size - 1) / size * size;
    *offset = at;
    if (bytes) *bytes = size;
    at += size;
  }
  LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuFuncIsLoaded(int *state, CUfunction handle) {
  FUNCTION(handle);
  (void)card;
  if (!state) LEAVE(CUDA_ERROR_INVALID_VALUE);
  *state = 1;
  LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuFuncLoad(CUfunction handle) {
  FUNCTION(handle);
  (void)card;
  LEAVE(CUDA_SUCCESS);
}
