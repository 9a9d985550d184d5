#define _GNU_SOURCE
#include "deferred.h"

#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "../state/clock.h"
#include "../state/lock.h"
#include "../state/sched.h"
#include "arena.h"

typedef struct deferred {
  struct deferred *next;
  operation op;
  uint32_t queue;
  uint64_t seq;
  unsigned int at;     /* BATCH_MEM_OP: the next of its list */
  bool gate, running;  /* running: the worker is in its function */
  bool reached, done;  /* as of the last look */
  bool released;
} deferred;

static deferred *first, **last = &first; /* in the order of their entries */
static deferred *frees;                  /* which nothing else has to wait for */
static unsigned int gates;

/* ---- the worker's bed ---------------------------------------------------- */

enum { SHORTEST_NAP_NS = 20000, LONGEST_NAP_NS = 2000000 };

static _Atomic uint32_t bell;
static bool worker_there, worker_joined;

static bool is_virtual(void) { return the_driver.region.state->header.clock_mode == SOFT_CLOCK_VIRTUAL; }

static void ring(void) {
  atomic_fetch_add(&bell, 1);
  syscall(SYS_futex, &bell, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}

static void sleep_on_bell(uint32_t heard, uint64_t ns) {
  struct timespec limit = {(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)};
  syscall(SYS_futex, &bell, FUTEX_WAIT_PRIVATE, heard, ns == SOFT_FOREVER ? NULL : &limit, NULL, 0);
}

/* ---- looking ------------------------------------------------------------- */

/* Under the state's lock. What is no longer ours, or was dropped, counts as done. */
static void look_at(deferred *d) {
  soft_queue *queue = soft_queue_at(&the_driver.region, d->queue);
  d->done = true;
  const soft_entry *entry = queue && queue->owner == the_driver.region.me + 1 ? soft_sched_entry(queue, d->seq) : NULL;
  if (!entry) return;
  d->done = entry->flags & SOFT_ENTRY_DONE;
  d->reached = entry->flags & SOFT_ENTRY_STARTED;
}

static bool look(bool worker) {
  soft_region *region = &the_driver.region;
  if (soft_lock(region, SOFT_PATIENCE_MS) != SOFT_OK) return false;
  soft_slot *slot = soft_slot_at(region, region->me);
  soft_sched_advance(region, soft_now(region));
  if (worker && slot) slot->gates_ready = 0;
  for (deferred *d = first; d; d = d->next) look_at(d);
  for (deferred *d = frees; d; d = d->next) look_at(d);
  soft_unlock(region);
  return true;
}

static void open_gate(deferred *d) {
  soft_region *region = &the_driver.region;
  d->released = true;
  if (soft_lock(region, SOFT_PATIENCE_MS) != SOFT_OK) return;
  soft_queue *queue = soft_queue_at(region, d->queue);
  uint64_t now = soft_now(region);
  soft_sched_advance(region, now);
  soft_entry *entry = queue && queue->owner == region->me + 1 ? soft_sched_entry(queue, d->seq) : NULL;
  if (entry && !(entry->flags & SOFT_ENTRY_DONE)) {
    entry->wait_seq = now;
    entry->flags |= SOFT_ENTRY_RELEASED;
    soft_sched_activate(region, d->queue);
    soft_sched_advance(region, now);
  }
  soft_unlock(region);
  soft_clock_nudge(region);
}

/* ---- values in memory ---------------------------------------------------- */

static bool met(const CUstreamBatchMemOpParams *p) {
  bool wide = p->operation == CU_STREAM_MEM_OP_WAIT_VALUE_64;
  void *at = memory_card_view(p->value.address, wide ? 8 : 4, false);
  if (!at) return true; /* its memory is gone: don't wedge */
  uint64_t is = wide ? __atomic_load_n((uint64_t *)at, __ATOMIC_ACQUIRE) : __atomic_load_n((uint32_t *)at, __ATOMIC_ACQUIRE);
  uint64_t want = wide ? p->value.value : (uint32_t)p->value.value;
  switch (p->value.flags & 3) {
  case CU_STREAM_WAIT_VALUE_GEQ: return wide ? (int64_t)(is - want) >= 0 : (int32_t)((uint32_t)is - (uint32_t)want) >= 0;
  case CU_STREAM_WAIT_VALUE_EQ: return is == want;
  case CU_STREAM_WAIT_VALUE_AND: return (is & want) != 0;
  default: return wide ? ~(is | want) != 0 : ~((uint32_t)is | (uint32_t)want) != 0;
  }
}

static void store(const CUstreamBatchMemOpParams *p) {
  bool wide = p->operation == CU_STREAM_MEM_OP_WRITE_VALUE_64;
  void *at = memory_card_view(p->value.address, wide ? 8 : 4, true);
  if (!at) return;
  if (wide) __atomic_store_n((uint64_t *)at, p->value.value, __ATOMIC_RELEASE);
  else __atomic_store_n((uint32_t *)at, (uint32_t)p->value.value, __ATOMIC_RELEASE);
}

/* Goes on in the list as far as it can; true at its end. */
static bool step_values(const operation *op, unsigned int *at) {
  for (; *at < op->values.count; ++*at) {
    const CUstreamBatchMemOpParams *p = &op->values.list[*at];
    if (p->operation == CU_STREAM_MEM_OP_WAIT_VALUE_32 || p->operation == CU_STREAM_MEM_OP_WAIT_VALUE_64) {
      if (!met(p)) return false;
    } else if (p->operation == CU_STREAM_MEM_OP_WRITE_VALUE_32 || p->operation == CU_STREAM_MEM_OP_WRITE_VALUE_64) {
      store(p);
    }
  }
  return true;
}

/* ---- running ------------------------------------------------------------- */

static bool run_once(void) {
  bool opened = false;
  for (deferred **link = &first; *link;) {
    deferred *d = *link;
    if (d->gate && !d->done && d->reached && !d->released && d->op.type == CU_GRAPH_NODE_TYPE_BATCH_MEM_OP && step_values(&d->op, &d->at)) {
      open_gate(d);
      opened = true;
    }
    if (!d->done || d->running) {
      link = &d->next;
      continue;
    }
    *link = d->next;
    if (last == &d->next) last = link;
    if (d->gate) gates--;
    else if (!d->op.ctx->destroyed) operation_effect(&d->op);
    operation_clear(&d->op);
    free(d);
  }
  return opened;
}

static void run_frees(void) {
  for (deferred **link = &frees; *link;) {
    deferred *d = *link;
    if (!d->done) {
      link = &d->next;
      continue;
    }
    *link = d->next;
    if (!d->op.ctx->destroyed) operation_effect(&d->op);
    operation_clear(&d->op);
    free(d);
  }
}

void deferred_run(void) {
  while (first && look(false) && run_once()) {
  }
  if (frees && look(false)) run_frees();
}

bool deferred_any(void) { return first != NULL; }

/* The next gate whose function is to be called. */
static deferred *due_function(void) {
  for (deferred *d = first; d; d = d->next)
    if (d->gate && d->reached && !d->done && !d->released && d->op.type == CU_GRAPH_NODE_TYPE_HOST) return d;
  return NULL;
}

static void call(deferred *d) {
  host_work host = d->op.host;
  CUresult status = d->op.ctx->sticky;
  d->running = true;
  driver_pause();
  driver_in_host_function = true;
  if (host.callback) host.callback(host.stream, status, host.data);
  else if (status == CUDA_SUCCESS) host.function(host.data); /* a broken context calls no more functions */
  driver_in_host_function = false;
  driver_resume();
  d->running = false;
  open_gate(d);
}

static uint64_t until_next(void) {
  soft_region *region = &the_driver.region;
  uint64_t least = LONGEST_NAP_NS;
  if (soft_lock(region, SOFT_PATIENCE_MS) != SOFT_OK) return least;
  for (deferred *d = first; d; d = d->next) {
    soft_queue *queue = soft_queue_at(region, d->queue);
    const soft_entry *entry = d->gate && queue ? soft_sched_entry(queue, d->seq) : NULL;
    if (!entry) continue;
    uint64_t here = soft_sched_least(region, d->queue, entry->stream, d->seq);
    if (here < least) least = here;
  }
  soft_unlock(region);
  return least < SHORTEST_NAP_NS ? SHORTEST_NAP_NS : least;
}

static void *worker(void *unused) {
  (void)unused;
  driver_resume();
  for (;;) {
    uint32_t heard = atomic_load(&bell);
    look(true);
    if (run_once()) continue; /* first the bytes that the function may look at */
    deferred *d = due_function();
    if (d) {
      call(d);
      continue;
    }
    if (!gates) {
      if (worker_joined) soft_clock_leave(&the_driver.region);
      worker_joined = false;
      driver_pause();
      sleep_on_bell(heard, SOFT_FOREVER);
    } else if (is_virtual()) {
      driver_pause();
      soft_wait_gates(&the_driver.region);
    } else {
      uint64_t nap = until_next();
      driver_pause();
      sleep_on_bell(heard, nap);
    }
    driver_resume();
  }
  return NULL;
}

static CUresult employ_worker(void) {
  pthread_t thread;
  sigset_t all, before;
  if (worker_there) return CUDA_SUCCESS;
  sigfillset(&all);
  sigprocmask(SIG_SETMASK, &all, &before); /* signals are for the program's own threads */
  worker_there = pthread_create(&thread, NULL, worker, NULL) == 0;
  sigprocmask(SIG_SETMASK, &before, NULL);
  return worker_there ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

/* ---- queueing ------------------------------------------------------------ */

static deferred *item_for(const operation *op) {
  deferred *fresh = calloc(1, sizeof *fresh);
  if (fresh && operation_copy(&fresh->op, op)) return fresh;
  free(fresh);
  return NULL;
}

static void append(deferred *d, uint32_t queue, uint64_t seq) {
  d->queue = queue;
  d->seq = seq;
  *last = d;
  last = &d->next;
}

CUresult deferred_effect(const stream *on, const operation *op, soft_entry entry, uint32_t *queue, uint64_t *seq) {
  uint32_t where;
  uint64_t number;
  CUresult result = work_submit(on->owner, on, entry, &where, &number);
  if (result != CUDA_SUCCESS) return result;
  if (queue) *queue = where;
  if (seq) *seq = number;
  deferred *d = first ? item_for(op) : NULL; /* without memory for that: now */
  if (d) append(d, where, number);
  else operation_effect(op);
  return CUDA_SUCCESS;
}

bool deferred_freed(CUdeviceptr pointer) {
  for (const deferred *d = frees; d; d = d->next)
    if (d->op.pointer == pointer) return true;
  return false;
}

CUresult deferred_free(const stream *on, const operation *op) {
  if (deferred_freed(op->pointer)) return CUDA_ERROR_INVALID_VALUE;
  deferred *d = item_for(op);
  if (!d) return CUDA_ERROR_OUT_OF_MEMORY;
  CUresult result = work_submit(on->owner, on, (soft_entry){.kind = SOFT_ENTRY_EVENT}, &d->queue, &d->seq);
  if (result != CUDA_SUCCESS) {
    operation_clear(&d->op);
    free(d);
    return result;
  }
  d->next = frees;
  frees = d;
  deferred_run();
  return CUDA_SUCCESS;
}

CUresult deferred_gate(const stream *on, const operation *op, uint32_t *queue, uint64_t *seq) {
  uint32_t where;
  uint64_t number;
  CUresult result = employ_worker();
  deferred *d = result == CUDA_SUCCESS ? item_for(op) : NULL;
  if (!d) return CUDA_ERROR_OUT_OF_MEMORY;
  d->gate = true;
  /* before the gate is there, so that the clock can't pass it while the worker is on its way */
  if (!worker_joined && is_virtual()) worker_joined = soft_clock_join(&the_driver.region) == SOFT_OK;
  gates++;
  result = work_submit(on->owner, on, (soft_entry){.kind = SOFT_ENTRY_GATE}, &where, &number);
  if (result == CUDA_SUCCESS) {
    append(d, where, number);
    if (queue) *queue = where;
    if (seq) *seq = number;
  } else {
    gates--;
    operation_clear(&d->op);
    free(d);
  }
  ring();
  soft_clock_nudge(&the_driver.region);
  return result;
}
