/* context.c - contexts: made, kept on each thread's stack, and ended with all they own. */
#include <stdlib.h>
#include <string.h>

#include "../state/clock.h"
#include "../state/ledger.h"
#include "../state/lock.h"
#include "../state/mps.h"
#include "../state/sched.h"
#include "arena.h"
#include "capture.h"
#include "green.h"

enum { STACK_DEPTH = 64 };

static __thread context *stack[STACK_DEPTH];
static __thread int depth;

/* ---- the calling thread's context ---------------------------------------- */

context *context_peek(void) { return depth ? stack[depth - 1] : NULL; }

soft_card *context_card(const context *ctx) { return soft_card_at(&the_driver.region, ctx->card); }

CUresult context_lost(const context *ctx) {
  const soft_card *card = context_card(ctx);
  if (!card || card->lost || !soft_slot_mine(&the_driver.region)) return CUDA_ERROR_UNKNOWN;
  CUresult lost = mps_lost();
  return lost != CUDA_SUCCESS ? lost : ctx->sticky;
}

CUresult context_current(context **out) {
  context *ctx = context_peek();
  if (!ctx) return CUDA_ERROR_INVALID_CONTEXT;
  if (ctx->destroyed) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
  *out = ctx->home ? ctx->home : ctx;
  return context_lost(*out);
}

static CUresult push(context *ctx) {
  if (depth == STACK_DEPTH) return CUDA_ERROR_OUT_OF_MEMORY;
  stack[depth++] = ctx;
  return CUDA_SUCCESS;
}

static CUresult checked(CUcontext handle, context **out) {
  if (!handle) return CUDA_ERROR_INVALID_CONTEXT;
  if (!handle_is(handle, HANDLE_CONTEXT)) return CUDA_ERROR_INVALID_CONTEXT;
  *out = handle;
  return handle->destroyed ? CUDA_ERROR_CONTEXT_IS_DESTROYED : CUDA_SUCCESS;
}

/* ---- making and ending --------------------------------------------------- */

static CUresult device_card(CUdevice device, uint32_t *card) {
  if (device < 0 || (uint32_t)device >= the_driver.device_count) return CUDA_ERROR_INVALID_DEVICE;
  *card = the_driver.cards[device];
  return CUDA_SUCCESS;
}

static CUresult open_on_card(uint32_t card) {
  soft_region *region = &the_driver.region;
  CUresult result = mps_lost();
  if (result != CUDA_SUCCESS) return result;
  soft_error error = soft_lock(region, SOFT_PATIENCE_MS);
  if (error != SOFT_OK) return driver_from(error);
  if (soft_card_at(region, card)->lost) result = CUDA_ERROR_UNKNOWN;
  else if (!soft_mode_allows(region, card)) result = CUDA_ERROR_DEVICE_UNAVAILABLE;
  if (result == CUDA_SUCCESS) result = driver_from(soft_ledger_open_context(region, card));
  soft_unlock(region);
  return result;
}

/* sms: multiprocessors that the context may use, 0 all that the process may. */
static CUresult make(CUdevice device, unsigned int flags, unsigned int api_version, bool primary, uint32_t sms, context **out) {
  uint32_t card;
  CUresult result = device_card(device, &card);
  if (result != CUDA_SUCCESS) return result;
  context *ctx = calloc(1, sizeof *ctx);
  if (!ctx) return CUDA_ERROR_OUT_OF_MEMORY;
  if (!handle_add(ctx, HANDLE_CONTEXT)) result = CUDA_ERROR_OUT_OF_MEMORY;
  else result = open_on_card(card);
  if (result != CUDA_SUCCESS) {
    handle_remove(ctx);
    free(ctx);
    return result;
  }
  ctx->device = device;
  ctx->card = card;
  ctx->sm_count = sms && sms < card_multiprocessors(card) ? sms : card_multiprocessors(card);
  ctx->primary = primary;
  ctx->references = 1;
  ctx->flags = flags;
  ctx->api_version = api_version;
  ctx->id = the_driver.next_id++;
  limits_begin(ctx);
  ctx->legacy = (stream){.owner = ctx, .number = SOFT_LEGACY_STREAM};
  ctx->next = the_driver.contexts;
  the_driver.contexts = ctx;
  *out = ctx;
  return CUDA_SUCCESS;
}

/* The structure stays, since other threads may have it current; it holds nothing any more. */
static void end(context *ctx) {
  soft_region *region = &the_driver.region;
  bool only = false;
  if (ctx->primary) greens_drop(ctx);
  modules_drop(ctx);
  events_drop(ctx);
  if (soft_lock(region, SOFT_PATIENCE_MS) == SOFT_OK) {
    soft_usage *usage = &soft_slot_at(region, region->me)->usage[ctx->card];
    soft_sched_advance(region, soft_now(region));
    /* contexts of one process on a card share its queue: drop work only with the last */
    only = usage->context_count == 1;
    if (only && soft_slot_mine(region)) soft_sched_drop_queue(region, usage->queue);
    soft_unlock(region);
  }
  streams_drop(ctx);
  pools_drop(ctx);
  arrays_drop(ctx);
  imports_drop(ctx);
  if (only) graph_memory_drop(ctx->card);
  memory_drop(ctx);
  limits_drop(ctx);
  if (soft_lock(region, SOFT_PATIENCE_MS) == SOFT_OK) {
    soft_ledger_close_context(region, ctx->card);
    soft_unlock(region);
  }
  ctx->destroyed = true;
  if (ctx->primary) the_driver.primary[ctx->card] = NULL;
}

static CUresult create(CUcontext *out, unsigned int flags, CUdevice device, unsigned int api_version, uint32_t sms) {
  context *ctx;
  ENTER();
  if (!out || (flags & ~(unsigned int)CU_CTX_FLAGS_MASK) || (flags & CU_CTX_SCHED_MASK) == 3) LEAVE(CUDA_ERROR_INVALID_VALUE);
  CUresult result = make(device, flags, api_version, false, sms, &ctx);
  if (result != CUDA_SUCCESS) LEAVE(result);
  result = push(ctx);
  if (result != CUDA_SUCCESS) {
    end(ctx);
    LEAVE(result);
  }
  *out = ctx;
  LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuCtxCreate(CUcontext *out, unsigned int flags, CUdevice device) { return create(out, flags, device, 3010, 0); }
EXPORT CUresult cuCtxCreate_v2(CUcontext *out, unsigned int flags, CUdevice device) { return create(out, flags, device, 3020, 0); }

/* Processors of a context can be limited by clients of MPS only. */
static CUresult affinity(const CUexecAffinityParam *params, int count, uint32_t *sms) {
  *sms = 0;
  if (count < 0 || (count && !params)) return CUDA_ERROR_INVALID_VALUE;
  if (!count) return CUDA_SUCCESS;
  if (count > 1 || params->type || !params->param.smCount.val) return CUDA_ERROR_INVALID_VALUE;
  if (the_driver.initialised && !mps_client()) return CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY;
  *sms = params->param.smCount.val;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxCreate_v3(CUcontext *out, CUexecAffinityParam *params, int count, unsigned int flags, CUdevice device) {
  uint32_t sms;
  CUresult result = affinity(params, count, &sms);
  return result == CUDA_SUCCESS ? create(out, flags, device, 3020, sms) : result;
}

EXPORT CUresult cuCtxCreate_v4(CUcontext *out, CUctxCreateParams *params, unsigned int flags, CUdevice device) {
  if (params && params->cigParams) return CUDA_ERROR_NOT_SUPPORTED;
  uint32_t sms = 0;
  CUresult result = params ? affinity(params->execAffinityParams, params->numExecAffinityParams, &sms) : CUDA_SUCCESS;
  return result == CUDA_SUCCESS ? create(out, flags, device, 3020, sms) : result;
}

static CUresult destroy(CUcontext handle) {
  context *ctx;
  ENTER();
  CUresult result = checked(handle, &ctx);
  if (result != CUDA_SUCCESS) LEAVE(result);
  if (ctx->primary || ctx->home) LEAVE(CUDA_ERROR_INVALID_CONTEXT);
  end(ctx);
  if (context_peek() == ctx) depth--;
  LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuCtxDestroy(CUcontext handle) { return destroy(handle); }
EXPORT CUresult cuCtxDestroy_v2(CUcontext handle) { return destroy(handle); }

EXPORT CUresult cuCtxAttach(CUcontext *out, unsigned int flags) {
  context *ctx;
  ENTER();
  if (!out || flags) LEAVE(CUDA_ERROR_INVALID_VALUE);
  CUresult result = context_current(&ctx);
  if (result != CUDA_SUCCESS) LEAVE(result);
  ctx->references++;
  *out = ctx;
  LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuCtxDetach(CUcontext handle) {
  context *ctx;
  ENTER();
  CUresult result = checked(handle, &ctx);
  if (result != CUDA_SUCCESS) LEAVE(result);
  if (ctx->primary || ctx->home) LEAVE(CUDA_ERROR_INVALID_CONTEXT);
  if (--ctx->references == 0) {
    end(ctx);
    if (context_peek() == ctx) depth--;
  }
  LEAVE(CUDA_SUCCESS);
}

/* ---- primary contexts ---------------------------------------------------- */

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *out, CUdevice device) {
  uint32_t card;
  ENTER();
  if (!out) LEAVE(CUDA_ERROR_INVALID_VALUE);
  CUresult result = device_card(device, &card);
  if (result != CUDA_SUCCESS) LEAVE(result);
  context *ctx = the_driver.primary[card];
  if (ctx) {
    ctx->references++;
  } else {
    result = make(device, the_driver.primary_flags[card], 3020, true, 0, &ctx);
    if (result != CUDA_SUCCESS) LEAVE(result);
    the_driver.primary[card] = ctx;
  }
  *out = ctx;
  LEAVE(CUDA_SUCCESS);
}

static CUresult primary_release(CUdevice device, bool reset) {
  uint32_t card;
  ENTER();
  CUresult result = device_card(device, &card);
  if (result != CUDA_SUCCESS) LEAVE(result);
  context *ctx = the_driver.primary[card];
  if (!ctx) LEAVE(reset ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT);
  if (reset || --ctx->references == 0) end(ctx);
  LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuDevicePrimaryCtxRelease(CUdevice device) { return primary_release(device, false); }
EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) { return primary_release(device, false); }
EXPORT CUresult cuDevicePrimaryCtxReset(CUdevice device) { return primary_release(device, true); }
EXPORT CUresult cuDevicePrimaryCtxReset_v2(CUdevice device) { return primary_release(device, true); }

static CUresult primary_flags(CUdevice device, unsigned int flags, bool changeable) {
  uint32_t card;
  ENTER();
  CUresult result = device_card(device, &card);
  if (result != CUDA_SUCCESS) LEAVE(result);
  if (flags & ~(unsigned int)CU_CTX_FLAGS_MASK) LEAVE(CUDA_ERROR_INVALID_VALUE);
  context *ctx = the_driver.primary[card];
  if (ctx && !changeable) LEAVE(CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE);
  the_driver.primary_flags[card] = flags;
  if (ctx) ctx->flags = flags;
  LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuDevicePrimaryCtxSetFlags(CUdevice device, unsigned int flags) { return primary_flags(device, flags, false); }
EXPORT CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice device, unsigned int flags) { return primary_flags(device, flags, true); }

EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned int *flags, int *active) {
  uint32_t card;
  ENTER();
  CUresult result = device_card(device, &card);
  if (result != CUDA_SUCCESS) LEAVE(result);
  if (!flags || !active) LEAVE(CUDA_ERROR_INVALID_VALUE);
  *flags = the_driver.primary_flags[card];
  *active = the_driver.primary[card] != NULL;
  LEAVE(CUDA_SUCCESS);
}

/* ---- the stack ----------------------------------------------------------- */

static CUresult push_current(CUcontext handle) {
  context *ctx;
  ENTER();
  CUresult result = checked(handle, &ctx);
  LEAVE(result == CUDA_SUCCESS ? push(ctx) : result);
}

static CUresult pop_current(CUcontext *out) {
  ENTER();
  if (!depth) LEAVE(CUDA_ERROR_INVALID_CONTEXT);
  context *ctx = stack[--depth];
  if (out) *out = ctx;
  LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuCtxPushCurrent(CUcontext handle) { return push_current(handle); }
EXPORT CUresult cuCtxPushCurrent_v2(CUcontext handle) { return push_current(handle); }
EXPORT CUresult cuCtxPopCurrent(CUcontext *out) { return pop_current(out); }
EXPORT CUresult cuCtxPopCurrent_v2(CUcontext *out) { return pop_current(out); }

EXPORT CUresult cuCtxSetCurrent(CUcontext handle) {
  context *ctx;
  ENTER();
  if (!handle) {
    if (depth) depth--;
    LEAVE(CUDA_SUCCESS);
  }
  CUresult result = checked(handle, &ctx);
  if (result != CUDA_SUCCESS) LEAVE(result);
  if (!depth) LEAVE(push(ctx));
  stack[depth - 1] = ctx;
  LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuCtxGetCurrent(CUcontext *out) {
  ENTER();
  if (!out) LEAVE(CUDA_ERROR_INVALID_VALUE);
  *out = context_peek();
  LEAVE(CUDA_SUCCESS);
}

/* ---- asking -------------------------------------------------------------- */

#define CURRENT(ctx)                          \
  context *ctx;                               \
  ENTER();                                    \
  CUresult current = context_current(&ctx);   \
  if (current != CUDA_SUCCESS) LEAVE(current)

EXPORT CUresult cuCtxGetDevice(CUdevice *device) {
  CURRENT(ctx);
  if (!device) LEAVE(CUDA_ERROR_INVALID_VALUE);
  *device = ctx->device;
  LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuCtxGetFlags(unsigned int *flags) {
  CURRENT(ctx);
  if (!flags) LEAVE(CUDA_ERROR_INVALID_VALUE);
  *flags = ctx->flags;
  LEAVE(CUDA_SUCCESS);
}

static CUresult named_or_current(CUcontext handle, context **out) { return handle ? checked(handle, out) : context_current(out); }

EXPORT CUresult cuCtxGetId(CUcontext handle, unsigned long long *id) {
  context *ctx;
  ENTER();
  CUresult result = named_or_current(handle, &ctx);
  if (result != CUDA_SUCCESS) LEAVE(result);
  if (!id) LEAVE(CUDA_ERROR_INVALID_VALUE);
  *id = ctx->id;
  LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuCtxGetApiVersion(CUcontext handle, unsigned int *version) {
  context *ctx;
  ENTER();
  CUresult result = named_or_current(handle, &ctx);
  if (result != CUDA_SUCCESS) LEAVE(result);
  if (!version) LEAVE(CUDA_ERROR_INVALID_VALUE);
  *version = ctx->api_version;
  LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuCtxGetCacheConfig(CUfunc_cache *config) {
  CURRENT(ctx);
  if (!config) LEAVE(CUDA_ERROR_INVALID_VALUE);
  *config = ctx->cache_config;
  LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuCtxSetCacheConfig(CUfunc_cache config) {
  CURRENT(ctx);
  ctx->cache_config = config;
  LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuCtxGetSharedMemConfig(CUsharedconfig *config) {
  CURRENT(ctx);
  if (!config) LEAVE(CUDA_ERROR_INVALID_VALUE);
  *config = ctx->shared_config ? ctx->shared_config : 1;
  LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuCtxSetSharedMemConfig(CUsharedconfig config) {
  CURRENT(ctx);
  ctx->shared_config = config;
  LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) {
  CURRENT(ctx);
  (void)ctx;
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuCtxGetExecAffinity(CUexecAffinityParam *out, int type);
EXPORT CUresult cuCtxGetExecAffinity(CUexecAffinityParam *out, int type) {
  CURRENT(ctx);
  if (!out || type) LEAVE(CUDA_ERROR_INVALID_VALUE);
  if (!mps_client()) LEAVE(CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY);
  *out = (CUexecAffinityParam){.type = type, .param.smCount.val = ctx->sm_count};
  LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuCtxSynchronize(void) {
  CURRENT(ctx);
  CUresult result = capture_refuse_all(ctx);
  if (result == CUDA_SUCCESS) result = capture_unsafe();
  if (result != CUDA_SUCCESS) LEAVE(result);
  result = work_wait(ctx, SOFT_ALL_STREAMS, SOFT_FOREVER, work_spins(ctx));
  if (result == CUDA_SUCCESS) pools_trim(ctx);
  LEAVE(result);
}

/* ---- peers --------------------------------------------------------------- */

static CUresult peer(CUcontext handle, unsigned int flags, bool enable) {
  context *other;
  CURRENT(ctx);
  if (flags) LEAVE(CUDA_ERROR_INVALID_VALUE);
  CUresult result = checked(handle, &other);
  if (result != CUDA_SUCCESS) LEAVE(result);
  if (other->card == ctx->card) LEAVE(CUDA_ERROR_INVALID_DEVICE);
  uint32_t bit = 1u << other->device;
  if (enable && ctx->peers & bit) LEAVE(CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED);
  if (!enable && !(ctx->peers & bit)) LEAVE(CUDA_ERROR_PEER_ACCESS_NOT_ENABLED);
  ctx->peers ^= bit;
  LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuCtxEnablePeerAccess(CUcontext handle, unsigned int flags) { return peer(handle, flags, true); }
EXPORT CUresult cuCtxDisablePeerAccess(CUcontext handle) { return peer(handle, 0, false); }
