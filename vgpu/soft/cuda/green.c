/* green.c - green contexts, and the parts of cards that they are made of. */
#include "green.h"

#include "capture.h"

#include <stdlib.h>
#include <string.h>

enum { MARK = 0x53475243 };

/* What is ours in a CUdevResource: it comes from here and goes back to here. */
typedef struct { uint32_t mark, card, first; } own_part;
_Static_assert(sizeof(CUdevResource) == 144, "CUdevResource as CUDA 12.4 has it");

static own_part own(const CUdevResource *r) {
  own_part p;
  memcpy(&p, r->internal, sizeof p);
  return p;
}

struct CUdevResourceDesc_st {
  uint32_t card, first, sm_count;
  struct CUdevResourceDesc_st *next;
};

static CUdevResourceDesc descs; /* never freed, as there is no call for it */
static CUgreenCtx greens;
static uint32_t next_number = 1;

static void fill(CUdevResource *out, uint32_t card, uint32_t first, uint32_t count) {
  memset(out, 0, sizeof *out);
  out->type = CU_DEV_RESOURCE_TYPE_SM;
  memcpy(out->internal, &(own_part){MARK, card, first}, sizeof(own_part));
  out->sm.smCount = count;
}

static bool known(const CUdevResource *r) {
  if (!r || r->type != CU_DEV_RESOURCE_TYPE_SM || own(r).mark != MARK || own(r).card >= soft_card_count(&the_driver.region) || !r->sm.smCount) return false;
  uint32_t all = card_multiprocessors(own(r).card);
  return own(r).first < all && r->sm.smCount <= all - own(r).first;
}

static CUgreenCtx found(CUgreenCtx green) {
  for (CUgreenCtx at = greens; at; at = at->next)
    if (at == green) return at->name.destroyed ? NULL : at;
  return NULL;
}

CUgreenCtx green_current(void) {
  context *ctx = context_peek();
  return ctx && ctx->home ? found((CUgreenCtx)ctx) : NULL;
}

/* ---- parts --------------------------------------------------------------- */

EXPORT CUresult cuDeviceGetDevResource(CUdevice device, CUdevResource *out, int type) {
  ENTER();
  if (device < 0 || (uint32_t)device >= the_driver.device_count) LEAVE(CUDA_ERROR_INVALID_DEVICE);
  if (!out) LEAVE(CUDA_ERROR_INVALID_VALUE);
  if (type != CU_DEV_RESOURCE_TYPE_SM) LEAVE(CUDA_ERROR_INVALID_RESOURCE_TYPE);
  uint32_t card = the_driver.cards[device];
  fill(out, card, 0, card_multiprocessors(card));
  LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuCtxGetDevResource(CUcontext handle, CUdevResource *out, int type) {
  ENTER();
  if (!handle_is(handle, HANDLE_CONTEXT)) LEAVE(CUDA_ERROR_INVALID_CONTEXT);
  if (handle->destroyed) LEAVE(CUDA_ERROR_CONTEXT_IS_DESTROYED);
  if (!out) LEAVE(CUDA_ERROR_INVALID_VALUE);
  if (type != CU_DEV_RESOURCE_TYPE_SM) LEAVE(CUDA_ERROR_INVALID_RESOURCE_TYPE);
  CUgreenCtx green = handle->home ? (CUgreenCtx)handle : NULL;
  fill(out, handle->card, green ? green->first : 0, handle->sm_count);
  LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuGreenCtxGetDevResource(CUgreenCtx handle, CUdevResource *out, int type) {
  ENTER();
  CUgreenCtx green = found(handle);
  if (!green) LEAVE(CUDA_ERROR_INVALID_HANDLE);
  if (!out) LEAVE(CUDA_ERROR_INVALID_VALUE);
  if (type != CU_DEV_RESOURCE_TYPE_SM) LEAVE(CUDA_ERROR_INVALID_RESOURCE_TYPE);
  fill(out, green->name.card, green->first, green->sm_count);
  LEAVE(CUDA_SUCCESS);
}

/* What a part must be a multiple of, and at least be, by compute capability. */
static void steps(uint32_t card, unsigned int flags, unsigned int *step, unsigned int *least) {
  uint32_t major = soft_card_at(&the_driver.region, card)->facts.cc_major;
  *step = major >= 9 && !(flags & CU_DEV_SM_RESOURCE_SPLIT_IGNORE_SM_COSCHEDULING) ? 8 : major >= 7 ? 2 : 1;
  *least = major >= 9 ? *step : major == 8 ? 4 : *step;
}

EXPORT CUresult cuDevSmResourceSplitByCount(CUdevResource *groups, unsigned int *count, const CUdevResource *from, CUdevResource *rest, unsigned int flags,
                                            unsigned int minimum) {
  unsigned int step, least;
  ENTER();
  if (!count || !known(from) || flags > 3) LEAVE(from && from->type != CU_DEV_RESOURCE_TYPE_SM ? CUDA_ERROR_INVALID_RESOURCE_TYPE : CUDA_ERROR_INVALID_VALUE);
  steps(own(from).card, flags, &step, &least);
  unsigned int each = minimum < least ? least : minimum;
  each = (each + step - 1) / step * step;
  unsigned int whole = from->sm.smCount / each;
  if (!whole) LEAVE(CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION);
  if (!groups) {
    *count = whole;
    LEAVE(CUDA_SUCCESS);
  }
  CUdevResource source = *from; /* may be one of the results */
  if (*count > whole) *count = whole;
  for (unsigned int i = 0; i < *count; i++) fill(&groups[i], own(&source).card, own(&source).first + i * each, each);
  unsigned int left = source.sm.smCount - *count * each;
  if (rest && left) fill(rest, own(&source).card, own(&source).first + *count * each, left);
  else if (rest) memset(rest, 0, sizeof *rest);
  LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuDevResourceGenerateDesc(CUdevResourceDesc *out, CUdevResource *resources, unsigned int count) {
  ENTER();
  if (!out || !resources || !count) LEAVE(CUDA_ERROR_INVALID_VALUE);
  uint32_t sum = 0;
  for (unsigned int i = 0; i < count; i++) {
    if (!known(&resources[i])) LEAVE(CUDA_ERROR_INVALID_RESOURCE_TYPE);
    /* several must lie beside each other */
    if (own(&resources[i]).card != own(&resources[0]).card || own(&resources[i]).first != own(&resources[0]).first + sum) LEAVE(CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION);
    sum += resources[i].sm.smCount;
  }
  CUdevResourceDesc fresh = calloc(1, sizeof *fresh);
  if (!fresh) LEAVE(CUDA_ERROR_OUT_OF_MEMORY);
  *fresh = (struct CUdevResourceDesc_st){.card = own(&resources[0]).card, .first = own(&resources[0]).first, .sm_count = sum, .next = descs};
  descs = fresh;
  *out = fresh;
  LEAVE(CUDA_SUCCESS);
}

/* ---- contexts ------------------------------------------------------------ */

static CUresult make(CUgreenCtx *out, CUdevResourceDesc desc, context *primary) {
  CUgreenCtx fresh = calloc(1, sizeof *fresh);
  if (!fresh || !handle_add(&fresh->name, HANDLE_CONTEXT)) {
    free(fresh);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  fresh->name = (context){.device = primary->device,
                          .card = primary->card,
                          .home = primary,
                          .sm_count = desc->sm_count,
                          .flags = primary->flags,
                          .api_version = primary->api_version,
                          .id = the_driver.next_id++};
  fresh->first = desc->first;
  fresh->sm_count = desc->sm_count;
  fresh->number = next_number++;
  fresh->own = (stream){.owner = primary, .number = the_driver.next_stream++, .flags = CU_STREAM_NON_BLOCKING, .green = fresh};
  fresh->next = greens;
  greens = fresh;
  *out = fresh;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuGreenCtxCreate(CUgreenCtx *out, void *resources, CUdevice device, unsigned int flags) {
  CUcontext primary = NULL;
  CUdevResourceDesc desc = NULL;
  ENTER();
  for (CUdevResourceDesc at = descs; at && !desc; at = at->next)
    if (at == resources) desc = at;
  if (!out || !desc || flags != CU_GREEN_CTX_DEFAULT_STREAM) LEAVE(CUDA_ERROR_INVALID_VALUE);
  if (device < 0 || (uint32_t)device >= the_driver.device_count || the_driver.cards[device] != desc->card) LEAVE(CUDA_ERROR_INVALID_DEVICE);
  driver_leave(CUDA_SUCCESS);
  CUresult result = cuDevicePrimaryCtxRetain(&primary, device);
  if (result != CUDA_SUCCESS) return result;
  ENTER();
  result = make(out, desc, primary);
  driver_leave(CUDA_SUCCESS);
  if (result != CUDA_SUCCESS) cuDevicePrimaryCtxRelease_v2(device);
  return result;
}

/* The structure stays, since threads may have it current, and streams name it. */
static void end(CUgreenCtx green) {
  green->name.destroyed = true;
  capture_forget_stream(&green->own);
  streams_drop_green(green->name.home, green);
}

EXPORT CUresult cuGreenCtxDestroy(CUgreenCtx handle) {
  ENTER();
  CUgreenCtx green = found(handle);
  if (!green) LEAVE(CUDA_ERROR_INVALID_HANDLE);
  CUdevice device = green->name.device;
  end(green);
  driver_leave(CUDA_SUCCESS);
  return cuDevicePrimaryCtxRelease_v2(device);
}

void greens_drop(context *primary) {
  for (CUgreenCtx at = greens; at; at = at->next)
    if (at->name.home == primary && !at->name.destroyed) end(at);
}

EXPORT CUresult cuCtxFromGreenCtx(CUcontext *out, CUgreenCtx handle) {
  ENTER();
  CUgreenCtx green = found(handle);
  if (!out) LEAVE(CUDA_ERROR_INVALID_VALUE);
  if (!green) LEAVE(CUDA_ERROR_INVALID_HANDLE);
  *out = &green->name;
  LEAVE(CUDA_SUCCESS);
}

/* ---- streams and events --------------------------------------------------- */

EXPORT CUresult cuGreenCtxStreamCreate(CUstream *out, CUgreenCtx handle, unsigned int flags, int priority) {
  ENTER();
  CUgreenCtx green = found(handle);
  if (!green) LEAVE(CUDA_ERROR_INVALID_HANDLE);
  if (!out || flags != CU_STREAM_NON_BLOCKING) LEAVE(CUDA_ERROR_INVALID_VALUE);
  LEAVE(stream_make(green->name.home, green, flags, priority, out));
}

EXPORT CUresult cuStreamGetGreenCtx(CUstream handle, CUgreenCtx *out) {
  context *ctx;
  stream *on;
  ENTER();
  CUresult result = context_current(&ctx);
  if (result == CUDA_SUCCESS) result = stream_resolve(ctx, handle, false, &on);
  if (result == CUDA_SUCCESS && !out) result = CUDA_ERROR_INVALID_VALUE;
  if (result == CUDA_SUCCESS) *out = on->green;
  LEAVE(result);
}

/* A record on the default stream, behind what all others have now. */
EXPORT CUresult cuGreenCtxRecordEvent(CUgreenCtx handle, CUevent event) {
  uint32_t queue;
  uint64_t seq;
  ENTER();
  CUgreenCtx green = found(handle);
  if (!green || !handle_is(event, HANDLE_EVENT)) LEAVE(CUDA_ERROR_INVALID_HANDLE);
  CUresult result = context_lost(green->name.home);
  for (stream *at = green->name.home->streams; at && result == CUDA_SUCCESS; at = at->next) {
    if (at->green != green) continue;
    if (stream_capturing(at)) LEAVE(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    result = work_submit(green->name.home, at, (soft_entry){.kind = SOFT_ENTRY_EVENT}, &queue, &seq);
    soft_entry wait = {.kind = SOFT_ENTRY_WAIT, .wait_queue = queue, .wait_seq = seq};
    if (result == CUDA_SUCCESS) result = work_submit(green->name.home, &green->own, wait, NULL, NULL);
  }
  LEAVE(result == CUDA_SUCCESS ? event_record(&green->own, event, NULL, NULL) : result);
}

EXPORT CUresult cuGreenCtxWaitEvent(CUgreenCtx handle, CUevent event) {
  ENTER();
  CUgreenCtx green = found(handle);
  if (!green || !handle_is(event, HANDLE_EVENT)) LEAVE(CUDA_ERROR_INVALID_HANDLE);
  CUresult result = context_lost(green->name.home);
  if (result == CUDA_SUCCESS) result = event_wait(&green->own, event, NULL, NULL);
  for (stream *at = green->name.home->streams; at && result == CUDA_SUCCESS; at = at->next) {
    if (at->green != green) continue;
    result = stream_capturing(at) ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : event_wait(at, event, NULL, NULL);
  }
  LEAVE(result);
}
