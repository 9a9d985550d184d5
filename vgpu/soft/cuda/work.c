/* work.c - this process's end of its queues: submitting, collecting, waiting. */
#include "../state/clock.h"
#include "../state/lock.h"
#include "../state/sched.h"
#include "deferred.h"
#include "driver.h"

static soft_entry *entry_at(soft_queue *queue, uint64_t seq) { return &queue->entries[seq & (SOFT_DEPTH - 1)]; }

bool work_spins(const context *ctx) {
  unsigned int how = ctx->flags & CU_CTX_SCHED_MASK;
  return how == CU_CTX_SCHED_AUTO || how == CU_CTX_SCHED_SPIN;
}

static soft_queue *own_queue(const context *ctx, uint32_t *index) {
  const soft_slot *slot = soft_slot_at(&the_driver.region, the_driver.region.me);
  *index = slot ? slot->usage[ctx->card].queue : SOFT_NO_INDEX;
  return soft_queue_at(&the_driver.region, *index);
}

static void deliver(const soft_entry *entry, uint64_t seq) {
  event *to = (event *)(uintptr_t)entry->cookie;
  if (entry->kind != SOFT_ENTRY_EVENT || !to || !handle_is(to, HANDLE_EVENT) || !to->pending || to->seq != seq) return;
  to->time_ns = entry->end_ns;
  to->pending = false;
}

/* Under both locks: hands the times of finished records to their events and makes room. */
static void collect(soft_queue *queue) {
  for (; queue->tail < queue->scan; queue->tail++) deliver(entry_at(queue, queue->tail), queue->tail);
  /* records on other streams may be done while an older kernel still runs */
  for (uint64_t seq = queue->scan; queue->mixed && seq < queue->head; seq++)
    if (entry_at(queue, seq)->flags & SOFT_ENTRY_DONE) deliver(entry_at(queue, seq), seq);
  uint32_t kept = 0;
  for (uint32_t i = 0; i < queue->parked_count && i < SOFT_DEPTH; i++) {
    const soft_parked *aside = &queue->parked[i];
    if (aside->entry.flags & SOFT_ENTRY_DONE) deliver(&aside->entry, aside->seq);
    else queue->parked[kept++] = *aside;
  }
  queue->parked_count = kept;
}

void work_collect(context *ctx) {
  soft_region *region = &the_driver.region;
  uint32_t index;
  if (!own_queue(ctx, &index)) return;
  if (soft_lock(region, SOFT_PATIENCE_MS) != SOFT_OK) return;
  soft_queue *queue = own_queue(ctx, &index);
  soft_sched_advance_card(region, ctx->card, soft_now(region));
  if (queue) collect(queue);
  soft_unlock(region);
  deferred_run();
}

CUresult work_submit(context *ctx, const stream *on, soft_entry entry, uint32_t *out_queue, uint64_t *out_seq) {
  soft_region *region = &the_driver.region;
  for (;;) {
    soft_error error = soft_lock(region, SOFT_PATIENCE_MS);
    if (error != SOFT_OK) return driver_from(error);
    uint32_t index = soft_sched_queue(region, ctx->card);
    soft_queue *queue = soft_queue_at(region, index);
    if (!queue) {
      soft_unlock(region);
      return CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES;
    }
    uint64_t now = soft_now(region);
    soft_sched_advance_card(region, ctx->card, now);
    collect(queue);
    bool room = soft_sched_make_room(queue);
    collect(queue); /* what was behind one that made way */
    if (room) {
      entry.stream = on->number;
      entry.flags = on->number != SOFT_LEGACY_STREAM && !(on->flags & CU_STREAM_NON_BLOCKING) ? SOFT_ENTRY_BLOCKING : 0;
      entry.submit_ns = now;
      if (soft_sched_idle(queue)) {
        queue->stream = entry.stream;
        queue->mixed = 0;
      } else if (queue->stream != entry.stream) {
        queue->mixed = 1;
      }
      *entry_at(queue, queue->head) = entry;
      if (out_queue) *out_queue = index;
      if (out_seq) *out_seq = queue->head;
      queue->head++;
      soft_sched_activate(region, index);
      soft_slot_at(region, region->me)->seen_real_ns = soft_real_ns();
      soft_unlock(region);
      return CUDA_SUCCESS;
    }
    soft_unlock(region);
    driver_pause();
    error = soft_wait_queue(region, index, SOFT_FOR_ROOM, 0, work_spins(ctx));
    driver_resume();
    if (error != SOFT_OK) return driver_from(error);
    if (ctx->destroyed) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    CUresult lost = mps_lost();
    if (lost != CUDA_SUCCESS) return lost;
  }
}

CUresult work_wait(context *ctx, uint32_t stream_number, uint64_t seq, bool spin) {
  soft_region *region = &the_driver.region;
  uint32_t index;
  soft_queue *queue = own_queue(ctx, &index);
  if (!queue) return CUDA_SUCCESS;
  soft_error error = soft_lock(region, SOFT_PATIENCE_MS);
  if (error != SOFT_OK) return driver_from(error);
  soft_sched_advance_card(region, ctx->card, soft_now(region));
  collect(queue);
  if (seq == SOFT_FOREVER) seq = queue->head ? queue->head - 1 : 0;
  bool done = queue->head == 0 || soft_sched_done(region, index, stream_number, seq);
  soft_unlock(region);
  deferred_run();
  if (done) return context_lost(ctx);
  driver_pause();
  error = soft_wait_queue(region, index, stream_number, seq, spin);
  driver_resume();
  if (error != SOFT_OK) return driver_from(error);
  if (ctx->destroyed) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
  work_collect(ctx);
  return context_lost(ctx);
}

CUresult work_query(context *ctx, uint32_t stream_number) {
  soft_region *region = &the_driver.region;
  uint32_t index;
  soft_queue *queue = own_queue(ctx, &index);
  if (!queue) return CUDA_SUCCESS;
  soft_error error = soft_lock(region, SOFT_PATIENCE_MS);
  if (error != SOFT_OK) return driver_from(error);
  soft_sched_advance_card(region, ctx->card, soft_now(region));
  collect(queue);
  CUresult result = CUDA_SUCCESS;
  for (uint64_t i = 0, aside = queue->parked_count; i < aside + queue->head - queue->scan && result == CUDA_SUCCESS; i++) {
    const soft_entry *entry = i < aside ? &queue->parked[i].entry : entry_at(queue, queue->scan + i - aside);
    bool concerns = entry->stream == stream_number || (stream_number == SOFT_LEGACY_STREAM && entry->flags & SOFT_ENTRY_BLOCKING);
    if (concerns && !(entry->flags & SOFT_ENTRY_DONE)) result = CUDA_ERROR_NOT_READY;
  }
  soft_unlock(region);
  deferred_run();
  return result == CUDA_SUCCESS ? context_lost(ctx) : result;
}

CUresult work_wait_stream(context *ctx, const stream *on) {
  uint32_t index;
  soft_queue *queue = own_queue(ctx, &index);
  if (!queue) return CUDA_SUCCESS;
  soft_error error = soft_lock(&the_driver.region, SOFT_PATIENCE_MS);
  if (error != SOFT_OK) return driver_from(error);
  bool idle = soft_sched_idle(queue);
  soft_unlock(&the_driver.region);
  if (idle) {
    deferred_run();
    return ctx->sticky;
  }
  if (on->number != SOFT_LEGACY_STREAM) return work_wait(ctx, on->number, SOFT_FOREVER, work_spins(ctx));
  /* the legacy stream waits for the blocking ones: so does a mark on it */
  uint64_t seq;
  CUresult result = work_submit(ctx, on, (soft_entry){.kind = SOFT_ENTRY_EVENT}, NULL, &seq);
  return result == CUDA_SUCCESS ? work_wait(ctx, SOFT_LEGACY_STREAM, seq, work_spins(ctx)) : result;
}
