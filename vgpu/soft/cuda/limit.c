/*
 * limit.c - limits of contexts, and the memory that some of them take.
 *
 * A context's cost has in it what the limits take that it starts with; what is
 * charged here is what higher ones take beyond that, in whole pages:
 *   - stacks at once: one, in steps of 16 bytes, for each thread that the card
 *     can have resident, and more on a card that is told to
 *     (softgpu set ROOT stacks=…); a card may be told to keep what they took
 *     until the context ends (stacks-stay);
 *   - the FIFO of printf at once, which is an assumption;
 *   - the heap of malloc when the first module is loaded, and from then on at
 *     once. A load that finds no room for it fails.
 * A limit that is lowered gives back; one that doesn't fit stays as it was.
 */
#include "../state/ledger.h"
#include "../state/lock.h"
#include "driver.h"

enum { STACK_STEP_BYTES = 16, STACK_MOST_BYTES = 512 << 10 };

static const size_t defaults[CONTEXT_LIMITS] = {
    [CU_LIMIT_STACK_SIZE] = 1024,       [CU_LIMIT_PRINTF_FIFO_SIZE] = 7 << 20,
    [CU_LIMIT_MALLOC_HEAP_SIZE] = 8 << 20, [CU_LIMIT_DEV_RUNTIME_SYNC_DEPTH] = 2,
    [CU_LIMIT_DEV_RUNTIME_PENDING_LAUNCH_COUNT] = 2048, [CU_LIMIT_MAX_L2_FETCH_GRANULARITY] = 128,
    [CU_LIMIT_PERSISTING_L2_CACHE_SIZE] = 0,
};

void limits_begin(context *ctx) {
  for (int i = 0; i < CONTEXT_LIMITS; i++) ctx->limits[i] = defaults[i];
}

/* All that a limit takes; no more than any card has. */
static uint64_t takes(const context *ctx, CUlimit limit, uint64_t value) {
  const soft_card_facts *facts = &context_card(ctx)->facts;
  uint64_t bytes = 0;
  if (value > 1ull << 50) value = 1ull << 50;
  if (limit == CU_LIMIT_STACK_SIZE)
    bytes = (value + STACK_STEP_BYTES - 1) / STACK_STEP_BYTES * STACK_STEP_BYTES * facts->sm_count * facts->threads_per_sm / 100 *
            (100 + context_card(ctx)->stack_extra);
  else if (limit == CU_LIMIT_PRINTF_FIFO_SIZE || limit == CU_LIMIT_MALLOC_HEAP_SIZE)
    bytes = value;
  return (bytes + SOFT_PAGE_BYTES - 1) / SOFT_PAGE_BYTES * SOFT_PAGE_BYTES;
}

static CUresult fit(context *ctx, CUlimit limit, uint64_t value) {
  soft_region *region = &the_driver.region;
  uint64_t all = takes(ctx, limit, value), included = takes(ctx, limit, defaults[limit]);
  uint64_t now = all > included ? all - included : 0, before = ctx->limit_bytes[limit];
  if (now == before || (now < before && value && limit == CU_LIMIT_STACK_SIZE && context_card(ctx)->stacks_stay)) return CUDA_SUCCESS;
  soft_error error = soft_lock(region, SOFT_PATIENCE_MS);
  if (error != SOFT_OK) return driver_from(error);
  if (now > before) error = soft_ledger_charge(region, ctx->card, now - before);
  else soft_ledger_release(region, ctx->card, before - now);
  soft_unlock(region);
  if (error == SOFT_OK) ctx->limit_bytes[limit] = now;
  return driver_from(error);
}

void limits_drop(context *ctx) {
  for (int i = 0; i < CONTEXT_LIMITS; i++) (void)fit(ctx, i, 0);
}

CUresult limits_heap(context *ctx) {
  if (ctx->heap_made) return CUDA_SUCCESS;
  CUresult result = fit(ctx, CU_LIMIT_MALLOC_HEAP_SIZE, ctx->limits[CU_LIMIT_MALLOC_HEAP_SIZE]);
  ctx->heap_made = result == CUDA_SUCCESS;
  return result == CUDA_ERROR_OUT_OF_MEMORY ? CUDA_ERROR_SHARED_OBJECT_INIT_FAILED : result;
}

#define CURRENT(ctx)                        \
  context *ctx;                             \
  ENTER();                                  \
  CUresult current = context_current(&ctx); \
  if (current != CUDA_SUCCESS) LEAVE(current)

EXPORT CUresult cuCtxSetLimit(CUlimit limit, size_t value) {
  CURRENT(ctx);
  if (limit < 0 || limit >= CONTEXT_LIMITS) LEAVE(CUDA_ERROR_UNSUPPORTED_LIMIT);
  if (limit == CU_LIMIT_STACK_SIZE && value > STACK_MOST_BYTES) LEAVE(CUDA_ERROR_INVALID_VALUE);
  if (limit != CU_LIMIT_MALLOC_HEAP_SIZE || ctx->heap_made) {
    CUresult result = fit(ctx, limit, value);
    if (result != CUDA_SUCCESS) LEAVE(result);
  }
  ctx->limits[limit] = value;
  LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuCtxGetLimit(size_t *value, CUlimit limit) {
  CURRENT(ctx);
  if (!value) LEAVE(CUDA_ERROR_INVALID_VALUE);
  if (limit < 0 || limit >= CONTEXT_LIMITS) LEAVE(CUDA_ERROR_UNSUPPORTED_LIMIT);
  *value = ctx->limits[limit];
  LEAVE(CUDA_SUCCESS);
}
