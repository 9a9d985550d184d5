/* launch.c - launches: checked, done on the bytes at once, and queued for the time they take. */
#include <string.h>

#include "green.h"
#include "operation.h"

/* Arguments one after the other, each at its own alignment, as the extra form packs them. */
static CUresult gather(const ptx_entry *entry, void **parameters, void **extra, kernel_arguments *out) {
  const char *packed = NULL;
  size_t packed_bytes = 0, offset = 0;
  memset(out, 0, sizeof *out);
  if (parameters && extra) return CUDA_ERROR_INVALID_VALUE;
  for (int i = 0; extra && extra[i] != CU_LAUNCH_PARAM_END; i += 2) {
    if (extra[i] == CU_LAUNCH_PARAM_BUFFER_POINTER) packed = extra[i + 1];
    else if (extra[i] == CU_LAUNCH_PARAM_BUFFER_SIZE) packed_bytes = *(size_t *)extra[i + 1];
    else return CUDA_ERROR_INVALID_VALUE;
  }
  if (entry->parameter_count && !parameters && !packed) return CUDA_ERROR_INVALID_VALUE;
  for (uint32_t i = 0; i < entry->parameter_count; i++) {
    size_t bytes = entry->parameter_bytes[i];
    if (bytes > sizeof out->value[0]) return CUDA_ERROR_NOT_SUPPORTED;
    offset = (offset + bytes - 1) / bytes * bytes;
    if (parameters) {
      if (!parameters[i]) return CUDA_ERROR_INVALID_VALUE;
      memcpy(&out->value[i], parameters[i], bytes);
    } else {
      if (offset + bytes > packed_bytes) return CUDA_ERROR_INVALID_VALUE;
      memcpy(&out->value[i], packed + offset, bytes);
    }
    offset += bytes;
  }
  return CUDA_SUCCESS;
}

static CUresult check(const kernel_work *s, const struct CUfunc_st *function) {
  for (int i = 0; i < 3; i++)
    if (!s->grid[i] || !s->block[i]) return CUDA_ERROR_INVALID_VALUE;
  if (s->grid[0] > 0x7fffffffu || s->grid[1] > 65535 || s->grid[2] > 65535) return CUDA_ERROR_INVALID_VALUE;
  if (s->block[0] > 1024 || s->block[1] > 1024 || s->block[2] > 64) return CUDA_ERROR_INVALID_VALUE;
  if ((uint64_t)s->block[0] * s->block[1] * s->block[2] > 1024) return CUDA_ERROR_INVALID_VALUE;
  unsigned int shared = function->dynamic_shared ? (unsigned int)function->dynamic_shared : 49152;
  return s->shared_bytes > shared ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult kernel_prepare(context *ctx, CUfunction handle, void **parameters, void **extra, kernel_work *work) {
  struct CUfunc_st *function;
  CUresult result = function_resolve(ctx, handle, &function);
  if (result == CUDA_SUCCESS && function->of->owner != ctx) result = CUDA_ERROR_INVALID_HANDLE;
  if (result == CUDA_SUCCESS) result = check(work, function);
  if (result == CUDA_SUCCESS && !function->known) result = CUDA_ERROR_NOT_SUPPORTED;
  if (result == CUDA_SUCCESS) result = gather(function->entry, parameters, extra, &work->arguments);
  if (result != CUDA_SUCCESS) return result;
  work->handle = handle;
  work->known = function->known; /* the function may be unloaded before it runs */
  work->parameter_count = function->entry->parameter_count;
  return CUDA_SUCCESS;
}

static kernel_grid grid_of(const context *ctx, const kernel_work *work) {
  uint64_t blocks = (uint64_t)work->grid[0] * work->grid[1] * work->grid[2];
  return (kernel_grid){.threads = blocks * work->block[0] * work->block[1] * work->block[2], .card = context_card(ctx)};
}

CUresult kernel_entry(const stream *on, const context *ctx, const kernel_work *work, soft_entry *entry) {
  kernel_grid grid = grid_of(ctx, work);
  uint64_t blocks = (uint64_t)work->grid[0] * work->grid[1] * work->grid[2];
  /* streams of a green context have its part */
  uint64_t sms = on->green && on->green->name.home == ctx ? on->green->sm_count : ctx->sm_count, all = grid.card->facts.sm_count;
  uint64_t resident = (uint64_t)blocks_per_sm(grid.card, work->block[0] * work->block[1] * work->block[2], work->shared_bytes) * sms;
  if (!resident) resident = 1;
  if (work->cooperative && blocks > resident) return CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE;
  uint64_t waves = (blocks + resident - 1) / resident;
  /* of the whole card; rounded down, so that parts never make more than the whole */
  uint64_t width = (blocks < resident ? blocks : resident) * 1000000 * sms / (resident * all);
  unsigned __int128 length = (unsigned __int128)work->known->duration_ns(&work->arguments, &grid) * waves;
  *entry = (soft_entry){.kind = SOFT_ENTRY_KERNEL,
                        .width_ppm = width ? (uint32_t)width : 1,
                        .part = on->green ? on->green->number : 0,
                        .part_ppm = (uint32_t)(sms * 1000000 / all),
                        .left_ns = length > UINT64_MAX / 4 ? UINT64_MAX / 4 : (uint64_t)length};
  return CUDA_SUCCESS;
}

CUresult kernel_run(context *ctx, const kernel_work *work) {
  kernel_grid grid = grid_of(ctx, work);
  return work->known->run(&work->arguments, &grid);
}

static CUresult launch(CUfunction handle, const kernel_work *shape, CUstream stream_handle, void **parameters, void **extra, bool per_thread) {
  context *ctx;
  stream *on;
  operation op = {.type = CU_GRAPH_NODE_TYPE_KERNEL, .kernel = *shape};
  ENTER();
  CUresult result = context_current(&ctx);
  if (result == CUDA_SUCCESS) result = stream_for_work(ctx, stream_handle, per_thread, &on);
  if (result != CUDA_SUCCESS) LEAVE(result);
  op.ctx = on->owner;
  result = kernel_prepare(op.ctx, handle, parameters, extra, &op.kernel);
  LEAVE(result == CUDA_SUCCESS ? operation_submit(on, &op) : result);
}

#define SHAPE(coop) \
  {.grid = {gridX, gridY, gridZ}, .block = {blockX, blockY, blockZ}, .shared_bytes = sharedBytes, .cooperative = coop}

EXPORT CUresult cuLaunchKernel(CUfunction function, unsigned int gridX, unsigned int gridY, unsigned int gridZ, unsigned int blockX,
                               unsigned int blockY, unsigned int blockZ, unsigned int sharedBytes, CUstream on, void **parameters,
                               void **extra) {
  kernel_work s = SHAPE(false);
  return launch(function, &s, on, parameters, extra, false);
}

EXPORT CUresult cuLaunchKernel_ptsz(CUfunction function, unsigned int gridX, unsigned int gridY, unsigned int gridZ, unsigned int blockX,
                                    unsigned int blockY, unsigned int blockZ, unsigned int sharedBytes, CUstream on, void **parameters,
                                    void **extra) {
  kernel_work s = SHAPE(false);
  return launch(function, &s, on, parameters, extra, true);
}

EXPORT CUresult cuLaunchCooperativeKernel(CUfunction function, unsigned int gridX, unsigned int gridY, unsigned int gridZ,
                                          unsigned int blockX, unsigned int blockY, unsigned int blockZ, unsigned int sharedBytes,
                                          CUstream on, void **parameters) {
  kernel_work s = SHAPE(true);
  return launch(function, &s, on, parameters, NULL, false);
}

EXPORT CUresult cuLaunchCooperativeKernel_ptsz(CUfunction function, unsigned int gridX, unsigned int gridY, unsigned int gridZ,
                                               unsigned int blockX, unsigned int blockY, unsigned int blockZ, unsigned int sharedBytes,
                                               CUstream on, void **parameters) {
  kernel_work s = SHAPE(true);
  return launch(function, &s, on, parameters, NULL, true);
}

static CUresult launch_ex(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra, bool per_thread) {
  if (!config || (config->numAttrs && !config->attrs)) return CUDA_ERROR_INVALID_VALUE;
  kernel_work s = {.grid = {config->gridDimX, config->gridDimY, config->gridDimZ},
                   .block = {config->blockDimX, config->blockDimY, config->blockDimZ},
                   .shared_bytes = config->sharedMemBytes};
  for (unsigned int i = 0; i < config->numAttrs; i++) {
    if (config->attrs[i].id == CU_LAUNCH_ATTRIBUTE_COOPERATIVE) s.cooperative = config->attrs[i].value.cooperative != 0;
    else if (config->attrs[i].id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) return CUDA_ERROR_NOT_SUPPORTED;
  }
  return launch(function, &s, config->hStream, parameters, extra, per_thread);
}

EXPORT CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) {
  return launch_ex(config, function, parameters, extra, false);
}
EXPORT CUresult cuLaunchKernelEx_ptsz(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) {
  return launch_ex(config, function, parameters, extra, true);
}

/* ---- on several cards at once -------------------------------------------- */

enum { NO_PRE_SYNC = 1, NO_POST_SYNC = 2 };

/* What comes next in each of the streams comes after what all of them have. */
static CUresult join(const CUDA_LAUNCH_PARAMS *list, unsigned int count) {
  uint32_t queues[SOFT_CARDS];
  uint64_t seqs[SOFT_CARDS];
  CUresult result = CUDA_SUCCESS;
  for (unsigned int i = 0; i < count && result == CUDA_SUCCESS; i++)
    result = work_submit(list[i].hStream->owner, list[i].hStream, (soft_entry){.kind = SOFT_ENTRY_EVENT}, &queues[i], &seqs[i]);
  for (unsigned int i = 0; i < count; i++)
    for (unsigned int j = 0; j < count && result == CUDA_SUCCESS; j++)
      if (i != j) result = work_submit(list[i].hStream->owner, list[i].hStream, (soft_entry){.kind = SOFT_ENTRY_WAIT, .wait_queue = queues[j], .wait_seq = seqs[j]}, NULL, NULL);
  return result;
}

static bool same_shape(const CUDA_LAUNCH_PARAMS *a, const CUDA_LAUNCH_PARAMS *b) {
  return a->gridDimX == b->gridDimX && a->gridDimY == b->gridDimY && a->gridDimZ == b->gridDimZ && a->blockDimX == b->blockDimX &&
         a->blockDimY == b->blockDimY && a->blockDimZ == b->blockDimZ && a->sharedMemBytes == b->sharedMemBytes;
}

/*
 * One launch a card, of one kernel and shape, in streams that were made for it.
 * All are looked at before any is queued.
 */
static CUresult several(const CUDA_LAUNCH_PARAMS *list, unsigned int count, operation *ops) {
  uint32_t cards = 0;
  for (unsigned int i = 0; i < count; i++) {
    const CUDA_LAUNCH_PARAMS *p = &list[i];
    soft_entry entry;
    if (!p->hStream || !same_shape(p, &list[0])) return CUDA_ERROR_INVALID_VALUE;
    if (!handle_is(p->hStream, HANDLE_STREAM)) return CUDA_ERROR_INVALID_HANDLE;
    if (cards >> p->hStream->owner->card & 1) return CUDA_ERROR_INVALID_DEVICE;
    cards |= 1u << p->hStream->owner->card;
    if (stream_capturing(p->hStream)) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    ops[i] = (operation){.type = CU_GRAPH_NODE_TYPE_KERNEL,
                         .ctx = p->hStream->owner,
                         .kernel = {.grid = {p->gridDimX, p->gridDimY, p->gridDimZ},
                                    .block = {p->blockDimX, p->blockDimY, p->blockDimZ},
                                    .shared_bytes = p->sharedMemBytes,
                                    .cooperative = true}};
    CUresult result = context_lost(p->hStream->owner);
    if (result == CUDA_SUCCESS) result = kernel_prepare(p->hStream->owner, p->function, p->kernelParams, NULL, &ops[i].kernel);
    if (result == CUDA_SUCCESS) result = kernel_entry(p->hStream, p->hStream->owner, &ops[i].kernel, &entry);
    if (result == CUDA_SUCCESS && ops[i].kernel.known != ops[0].kernel.known) result = CUDA_ERROR_INVALID_VALUE;
    if (result != CUDA_SUCCESS) return result;
  }
  return CUDA_SUCCESS;
}

EXPORT CUresult cuLaunchCooperativeKernelMultiDevice(CUDA_LAUNCH_PARAMS *list, unsigned int count, unsigned int flags) {
  operation ops[SOFT_CARDS];
  context *ctx;
  ENTER();
  CUresult result = context_current(&ctx);
  if (result == CUDA_SUCCESS && (!list || !count || count > the_driver.device_count || flags > (NO_PRE_SYNC | NO_POST_SYNC))) result = CUDA_ERROR_INVALID_VALUE;
  if (result == CUDA_SUCCESS) result = several(list, count, ops);
  if (result == CUDA_SUCCESS && !(flags & NO_PRE_SYNC)) result = join(list, count);
  for (unsigned int i = 0; i < count && result == CUDA_SUCCESS; i++) result = operation_submit(list[i].hStream, &ops[i]);
  if (result == CUDA_SUCCESS && !(flags & NO_POST_SYNC)) result = join(list, count);
  LEAVE(result);
}
