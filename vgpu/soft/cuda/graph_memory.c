/*
 * graph_memory.c - memory that graphs allocate and free.
 *
 * An allocation's address is known when its node is made and never changes. Its
 * place on the card is there from the first upload or launch: in pieces of at
 * least 32 MiB, which stay with the process until they are trimmed. Graphs that
 * don't run at the same time may have the same piece one after the other, so
 * what the card is charged is what the largest of them needs. Bytes are no
 * part of that: each address has bytes of its own here.
 */
#include <stdlib.h>
#include <string.h>

#include "../state/clock.h"
#include "../state/ledger.h"
#include "../state/lock.h"
#include "../state/sched.h"
#include "arena.h"
#include "graph.h"

#define SEGMENT_BYTES (32ull << 20)

typedef struct segment segment;

/* Memory of the card that is charged. */
typedef struct piece {
  uint32_t card;
  uint64_t bytes;
  segment *of;              /* that has it now */
  struct piece *next;
} piece;

/* Addresses of a graph. */
struct segment {
  block *memory;
  uint64_t bytes, used;
  graph_memory *in;
  piece *held;
  segment *next;
};

struct graph_allocation {
  graph_memory *in;
  segment *of;
  uint64_t offset, bytes, asked;
  uint64_t id;
  bool successor;           /* another one has its place after it */
  CUgraphNode freed_by;     /* in the graph of its own */
  bool freed_elsewhere;
  bool live;                /* in the order of submission */
  unsigned int mapped;      /* in the order of execution */
  CUDA_MEM_ALLOC_NODE_PARAMS params;
  graph_allocation *next;
};

struct graph_memory {
  uint32_t card;
  CUgraph graph;            /* NULL when that is gone */
  bool has_exec;
  CUgraphExec exec;         /* that last bound it */
  segment *segments;
  graph_allocation *allocations;
  graph_memory *next;
};

static graph_memory *memories;
static piece *pieces;
static uint64_t used_high[SOFT_CARDS], reserved_high[SOFT_CARDS];

/* ---- finding ------------------------------------------------------------- */

static graph_allocation *at_address(CUdeviceptr pointer, bool exactly) {
  graph_allocation *found = NULL;
  for (graph_memory *m = memories; m; m = m->next)
    for (graph_allocation *a = m->allocations; a; a = a->next) {
      CUdeviceptr base = a->of->memory->base + a->offset;
      if (exactly ? pointer != base : pointer - base >= a->bytes) continue;
      /* of several that have this place one after the other: the one that is there now */
      if (!found || a->mapped || (!found->mapped && !found->live && a->live)) found = a;
    }
  return found;
}

bool graph_memory_at(CUdeviceptr pointer, allocation *out) {
  graph_allocation *a = at_address(pointer, false);
  if (!a || !a->mapped) return false;
  *out = (allocation){a->of->memory, a->of->memory->base + a->offset, a->asked};
  return pointer - out->base < out->bytes;
}

CUdeviceptr graph_memory_pointer(const graph_allocation *a) { return a->of->memory->base + a->offset; }

void graph_memory_params(const graph_allocation *a, CUDA_MEM_ALLOC_NODE_PARAMS *params) { *params = a->params; }

/* ---- counting ------------------------------------------------------------ */

static uint64_t sum(uint32_t card, bool used) {
  uint64_t all = 0;
  for (piece *p = pieces; p; p = p->next)
    if (p->card == card && (!used || p->of)) all += p->bytes;
  return all;
}

static void note_high(uint32_t card) {
  uint64_t used = sum(card, true), reserved = sum(card, false);
  if (used > used_high[card]) used_high[card] = used;
  if (reserved > reserved_high[card]) reserved_high[card] = reserved;
}

static bool has_live(const segment *s) {
  for (const graph_allocation *a = s->in->allocations; a; a = a->next)
    if (a->of == s && (a->live || a->mapped)) return true;
  return false;
}

static bool running(const graph_memory *m) {
  if (!m->exec || !m->exec->launched) return false;
  soft_region *region = &the_driver.region;
  if (soft_lock(region, SOFT_PATIENCE_MS) != SOFT_OK) return true;
  soft_sched_advance(region, soft_now(region));
  bool done = soft_sched_done(region, m->exec->last_queue, m->exec->last_stream, m->exec->last_seq);
  soft_unlock(region);
  return !done;
}

/* ---- pieces -------------------------------------------------------------- */

static void give_back(piece *gone) {
  soft_region *region = &the_driver.region;
  for (piece **link = &pieces; *link; link = &(*link)->next)
    if (*link == gone) {
      *link = gone->next;
      break;
    }
  if (gone->of) gone->of->held = NULL;
  if (soft_lock(region, SOFT_PATIENCE_MS) == SOFT_OK) {
    soft_ledger_release(region, gone->card, gone->bytes);
    soft_unlock(region);
  }
  free(gone);
}

/* May s have this piece: nobody's, or one's that is neither alive nor at work beside it. */
static bool to_be_had(const piece *p, const segment *s, uint32_t stream_number) {
  if (p->card != s->in->card || p->bytes < s->bytes) return false;
  if (!p->of) return true;
  if (p->of->in == s->in || has_live(p->of)) return false;
  const graph_memory *other = p->of->in;
  return !running(other) || other->exec->last_stream == stream_number;
}

static CUresult find_piece(segment *s, uint32_t stream_number) {
  soft_region *region = &the_driver.region;
  piece *best = NULL;
  for (piece *p = pieces; p; p = p->next)
    if (to_be_had(p, s, stream_number) && (!best || p->bytes < best->bytes)) best = p;
  if (!best) {
    best = calloc(1, sizeof *best);
    soft_error error = best ? soft_lock(region, SOFT_PATIENCE_MS) : SOFT_EMEMORY;
    if (error == SOFT_OK) {
      error = soft_ledger_charge(region, s->in->card, s->bytes);
      soft_unlock(region);
    }
    if (error != SOFT_OK) {
      free(best);
      return driver_from(error);
    }
    *best = (piece){.card = s->in->card, .bytes = s->bytes, .next = pieces};
    pieces = best;
  }
  if (best->of) best->of->held = NULL;
  best->of = s;
  s->held = best;
  return CUDA_SUCCESS;
}

CUresult graph_memory_bind(CUgraphExec exec, uint32_t stream_number) {
  exec->memory->exec = exec;
  for (segment *s = exec->memory->segments; s; s = s->next) {
    if (s->held) continue;
    CUresult result = find_piece(s, stream_number);
    if (result != CUDA_SUCCESS) return result;
  }
  note_high(exec->memory->card);
  return CUDA_SUCCESS;
}

/* ---- addresses ----------------------------------------------------------- */

static segment *segment_with(graph_memory *m, uint64_t bytes) {
  for (segment *s = m->segments; s; s = s->next)
    if (s->bytes - s->used >= bytes) return s;
  segment *fresh = calloc(1, sizeof *fresh);
  uint64_t size = bytes <= SEGMENT_BYTES ? SEGMENT_BYTES : (bytes + SOFT_PAGE_BYTES - 1) / SOFT_PAGE_BYTES * SOFT_PAGE_BYTES;
  if (!fresh || !(fresh->memory = pages_take(m->card, size))) {
    free(fresh);
    return NULL;
  }
  fresh->bytes = size;
  fresh->in = m;
  fresh->next = m->segments;
  m->segments = fresh;
  return fresh;
}

/* An older allocation of the graph whose free comes before what is to be made. */
static graph_allocation *forerunner(graph_memory *m, const CUgraphNode *on, size_t count, uint64_t bytes) {
  for (graph_allocation *a = m->allocations; a; a = a->next) {
    if (a->successor || !a->freed_by || a->bytes < bytes) continue;
    for (size_t i = 0; i < count; i++)
      if (handle_is(on[i], HANDLE_NODE) && node_after(on[i], a->freed_by)) return a;
  }
  return NULL;
}

CUresult graph_memory_allocate(CUgraph graph, const CUgraphNode *on, size_t count, const CUDA_MEM_ALLOC_NODE_PARAMS *params,
                               graph_allocation **out) {
  const CUmemPoolProps *pool = &params->poolProps;
  if (pool->allocType != CU_MEM_ALLOCATION_TYPE_PINNED || pool->handleTypes || !params->bytesize) return CUDA_ERROR_INVALID_VALUE;
  if (pool->location.type != CU_MEM_LOCATION_TYPE_DEVICE) return CUDA_ERROR_NOT_SUPPORTED;
  if (pool->location.id < 0 || (uint32_t)pool->location.id >= the_driver.device_count) return CUDA_ERROR_INVALID_DEVICE;
  if (count && !on) return CUDA_ERROR_INVALID_VALUE;
  uint32_t card = the_driver.cards[pool->location.id];
  if (params->bytesize > soft_card_capacity(soft_card_at(&the_driver.region, card))) return CUDA_ERROR_OUT_OF_MEMORY;
  if (graph->memory && graph->memory->card != card) return CUDA_ERROR_NOT_SUPPORTED; /* one card a graph */
  graph_memory *m = graph->memory;
  graph_allocation *fresh = calloc(1, sizeof *fresh);
  if (!m && fresh) {
    m = calloc(1, sizeof *m);
    if (m) {
      *m = (graph_memory){.card = card, .graph = graph, .next = memories};
      memories = m;
      graph->memory = m;
    }
  }
  uint64_t bytes = (params->bytesize + SOFT_PIECE_BYTES - 1) / SOFT_PIECE_BYTES * SOFT_PIECE_BYTES;
  graph_allocation *before = m && fresh ? forerunner(m, on, count, bytes) : NULL;
  segment *of = before ? before->of : m && fresh ? segment_with(m, bytes) : NULL;
  if (!of) {
    free(fresh);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  *fresh = (graph_allocation){.in = m, .of = of, .offset = of->used, .bytes = bytes, .asked = params->bytesize, .params = *params, .next = m->allocations};
  if (before) {
    before->successor = true;
    fresh->offset = before->offset;
    fresh->bytes = before->bytes;
  } else {
    of->used += bytes;
  }
  fresh->params.accessDescs = NULL;
  fresh->params.accessDescCount = 0;
  fresh->params.dptr = of->memory->base + fresh->offset;
  m->allocations = fresh;
  *out = fresh;
  return CUDA_SUCCESS;
}

CUresult graph_memory_freed_by(CUdeviceptr pointer, CUgraphNode node) {
  graph_allocation *latest = NULL;
  for (graph_memory *m = memories; m; m = m->next)
    for (graph_allocation *a = m->allocations; a; a = a->next)
      if (!latest && graph_memory_pointer(a) == pointer) latest = a; /* lists have the newest first */
  if (!latest) return CUDA_ERROR_INVALID_VALUE;
  if (!node) return latest->freed_by ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
  if (latest->in->graph == node->in) latest->freed_by = node;
  else latest->freed_elsewhere = true;
  return CUDA_SUCCESS;
}

/* ---- life ---------------------------------------------------------------- */

static void collect(graph_memory *m) {
  if (m->graph || m->has_exec) return;
  for (segment *s = m->segments; s; s = s->next)
    if (has_live(s)) return; /* whoever frees the last one calls again */
  for (graph_memory **link = &memories; *link; link = &(*link)->next)
    if (*link == m) {
      *link = m->next;
      break;
    }
  while (m->segments) {
    segment *gone = m->segments;
    m->segments = gone->next;
    if (gone->held) gone->held->of = NULL;
    pages_give(gone->memory);
    free(gone);
  }
  while (m->allocations) {
    graph_allocation *gone = m->allocations;
    m->allocations = gone->next;
    free(gone);
  }
  free(m);
}

void graph_memory_hold(graph_memory *m, bool by_exec) {
  if (by_exec) m->has_exec = true;
}

void graph_memory_let_go(graph_memory *m, bool by_exec) {
  if (!by_exec) {
    m->graph = NULL;
    for (graph_allocation *a = m->allocations; a; a = a->next) a->successor = true; /* nothing more is added */
  } else {
    m->has_exec = false;
    m->exec = NULL;
    for (segment *s = m->segments; s; s = s->next)
      if (s->held && !has_live(s)) {
        s->held->of = NULL;
        s->held = NULL;
      }
  }
  collect(m);
}

bool graph_memory_instantiated(const graph_memory *m) { return m->has_exec; }

bool graph_memory_live(const graph_memory *m) {
  for (const graph_allocation *a = m->allocations; a; a = a->next)
    if (a->live) return true;
  return false;
}

CUresult graph_memory_begin(graph_allocation *a) {
  a->live = true;
  a->mapped++;
  a->of->memory->written = true;
  return CUDA_SUCCESS;
}

bool graph_memory_end(CUdeviceptr pointer) {
  graph_allocation *a = at_address(pointer, true);
  if (!a || !a->live) return false;
  a->live = false;
  return true;
}

void graph_memory_free_all(graph_memory *m) {
  for (graph_allocation *a = m->allocations; a; a = a->next) {
    if (!a->live) continue;
    a->live = false;
    if (a->mapped) a->mapped--;
  }
}

CUresult graph_memory_free(CUdeviceptr pointer, bool *found) {
  graph_allocation *a = at_address(pointer, false);
  *found = a != NULL;
  if (!a || !a->mapped || pointer != graph_memory_pointer(a)) return CUDA_ERROR_INVALID_VALUE;
  a->live = false;
  a->mapped--;
  collect(a->in);
  return CUDA_SUCCESS;
}

void graph_memory_drop(uint32_t card) {
  for (graph_memory *m = memories, *next; m; m = next) {
    next = m->next;
    if (m->card != card) continue;
    for (graph_allocation *a = m->allocations; a; a = a->next) {
      a->live = false;
      a->mapped = 0;
    }
    collect(m);
  }
  for (piece *p = pieces, *next; p; p = next) {
    next = p->next;
    if (p->card == card) give_back(p);
  }
}

/* ---- entry points -------------------------------------------------------- */

static CUresult card_of(CUdevice device, uint32_t *card) {
  if (device < 0 || (uint32_t)device >= the_driver.device_count) return CUDA_ERROR_INVALID_DEVICE;
  *card = the_driver.cards[device];
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGraphMemTrim(CUdevice device) {
  uint32_t card;
  ENTER();
  CUresult result = card_of(device, &card);
  for (piece *p = pieces, *next; result == CUDA_SUCCESS && p; p = next) {
    next = p->next;
    if (p->card == card && (!p->of || (!has_live(p->of) && !running(p->of->in)))) give_back(p);
  }
  LEAVE(result);
}

EXPORT CUresult cuDeviceGetGraphMemAttribute(CUdevice device, CUgraphMem_attribute which, void *value) {
  uint32_t card;
  ENTER();
  CUresult result = card_of(device, &card);
  if (result != CUDA_SUCCESS) LEAVE(result);
  if (!value) LEAVE(CUDA_ERROR_INVALID_VALUE);
  switch (which) {
  case CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT: *(cuuint64_t *)value = sum(card, true); break;
  case CU_GRAPH_MEM_ATTR_USED_MEM_HIGH: *(cuuint64_t *)value = used_high[card]; break;
  case CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT: *(cuuint64_t *)value = sum(card, false); break;
  case CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH: *(cuuint64_t *)value = reserved_high[card]; break;
  default: LEAVE(CUDA_ERROR_INVALID_VALUE);
  }
  LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuDeviceSetGraphMemAttribute(CUdevice device, CUgraphMem_attribute which, void *value) {
  uint32_t card;
  ENTER();
  CUresult result = card_of(device, &card);
  if (result != CUDA_SUCCESS) LEAVE(result);
  if (!value || *(cuuint64_t *)value) LEAVE(CUDA_ERROR_INVALID_VALUE); /* high marks can be cleared, nothing else */
  if (which == CU_GRAPH_MEM_ATTR_USED_MEM_HIGH) used_high[card] = sum(card, true);
  else if (which == CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH) reserved_high[card] = sum(card, false);
  else LEAVE(CUDA_ERROR_INVALID_VALUE);
  LEAVE(CUDA_SUCCESS);
}
