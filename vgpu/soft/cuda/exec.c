/* exec.c - graphs made executable: their order, their lanes, and launching them. */
#include <stdlib.h>
#include <string.h>

#include "../state/lock.h"
#include "../state/sched.h"
#include "capture.h"
#include "deferred.h"

/* ---- a graph as a list --------------------------------------------------- */

/* All nodes of a graph and of the graphs in it, with an entry and an exit for each child. */
static size_t entries_of(CUgraph graph) {
  size_t count = graph->count;
  for (CUgraphNode n = graph->first; n; n = n->next)
    if (n->op.type == CU_GRAPH_NODE_TYPE_GRAPH) count += 1 + entries_of(n->op.child);
  return count;
}

static exec_node *entry_new(CUgraphExec exec, size_t needs) {
  exec_node *entry = &exec->nodes[exec->count];
  *entry = (exec_node){.op = {.type = CU_GRAPH_NODE_TYPE_EMPTY}, .enabled = true, .leaf = true};
  entry->needs = malloc((needs + 1) * sizeof *entry->needs);
  if (!entry->needs) return NULL;
  exec->count++;
  return entry;
}

static void need(CUgraphExec exec, exec_node *entry, uint32_t on) {
  entry->needs[entry->need_count++] = on;
  exec->nodes[on].leaf = false;
}

/*
 * Appends a graph's nodes in an order that its edges allow, those that were
 * made first first. start: what all must come after, or SOFT_NO_INDEX. Each
 * node's place is left where what comes after it has to look.
 */
static CUresult append(CUgraph graph, CUgraphExec exec, uint32_t start, CUgraphNode *bad) {
  size_t done = 0;
  for (CUgraphNode n = graph->first; n; n = n->next) n->place = SOFT_NO_INDEX;
  while (done < graph->count) {
    size_t before = done;
    for (CUgraphNode n = graph->first; n; n = n->next) {
      bool ready = n->place == SOFT_NO_INDEX;
      for (size_t i = 0; ready && i < n->needs.count; i++) ready = n->needs.list[i]->place != SOFT_NO_INDEX;
      if (!ready) continue;
      *bad = n;
      exec_node *entry = entry_new(exec, n->needs.count + 1);
      if (!entry) return CUDA_ERROR_OUT_OF_MEMORY;
      uint32_t at = exec->count - 1;
      entry->id = n->id;
      entry->window = n->window;
      entry->has_window = n->has_window;
      for (size_t i = 0; i < n->needs.count; i++) need(exec, entry, n->needs.list[i]->place);
      if (!n->needs.count && start != SOFT_NO_INDEX) need(exec, entry, start);
      if (n->op.type == CU_GRAPH_NODE_TYPE_GRAPH) {
        CUresult result = append(n->op.child, exec, at, bad);
        if (result != CUDA_SUCCESS) return result;
        uint32_t end = exec->count;
        exec_node *exit = entry_new(exec, end - at);
        if (!exit) return CUDA_ERROR_OUT_OF_MEMORY;
        for (uint32_t i = at; i < end; i++)
          if (exec->nodes[i].leaf) need(exec, exit, i);
        exec->nodes[at].span = end - at;
        at = end;
      } else if (!operation_copy(&entry->op, &n->op)) {
        return CUDA_ERROR_OUT_OF_MEMORY;
      }
      n->place = at;
      done++;
    }
    if (done == before) { /* a circle */
      for (CUgraphNode n = graph->first; n; n = n->next)
        if (n->place == SOFT_NO_INDEX) *bad = n;
      return CUDA_ERROR_INVALID_VALUE;
    }
  }
  return CUDA_SUCCESS;
}

/* ---- lanes --------------------------------------------------------------- */

static context *place_of(const operation *op) {
  switch (op->type) {
  case CU_GRAPH_NODE_TYPE_KERNEL:
  case CU_GRAPH_NODE_TYPE_MEMCPY:
  case CU_GRAPH_NODE_TYPE_MEMSET:
  case CU_GRAPH_NODE_TYPE_BATCH_MEM_OP:
  case CU_GRAPH_NODE_TYPE_EVENT_RECORD: return op->ctx;
  default: return NULL; /* wherever it comes by */
  }
}

static CUresult lay_out(CUgraphExec exec) {
  uint32_t *tail = malloc((exec->count + 1) * sizeof *tail);
  exec->lane_ctx = calloc(exec->count + 1, sizeof *exec->lane_ctx);
  exec->lane_stream = calloc(exec->count + 1, sizeof *exec->lane_stream);
  if (!tail || !exec->lane_ctx || !exec->lane_stream) {
    free(tail);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  for (uint32_t i = 0; i < exec->count; i++) {
    exec_node *node = &exec->nodes[i];
    context *here = place_of(&node->op);
    uint32_t lane = SOFT_NO_INDEX;
    for (uint32_t k = 0; k < node->need_count && lane == SOFT_NO_INDEX; k++) {
      uint32_t candidate = exec->nodes[node->needs[k]].lane;
      if (tail[candidate] != node->needs[k]) continue;
      if (here && exec->lane_ctx[candidate] && exec->lane_ctx[candidate]->card != here->card) continue;
      lane = candidate;
    }
    if (lane == SOFT_NO_INDEX) {
      lane = exec->lane_count++;
      exec->lane_stream[lane] = the_driver.next_stream++;
    }
    if (here && !exec->lane_ctx[lane]) exec->lane_ctx[lane] = here;
    node->lane = lane;
    tail[lane] = i;
  }
  free(tail);
  return CUDA_SUCCESS;
}

CUresult exec_build(CUgraph graph, CUgraphExec exec, CUgraphNode *bad) {
  *bad = NULL;
  exec->nodes = calloc(entries_of(graph) + 1, sizeof *exec->nodes);
  if (!exec->nodes) return CUDA_ERROR_OUT_OF_MEMORY;
  CUresult result = append(graph, exec, SOFT_NO_INDEX, bad);
  if (result == CUDA_SUCCESS) *bad = NULL;
  return result == CUDA_SUCCESS ? lay_out(exec) : result;
}

void exec_clear(CUgraphExec exec) {
  for (uint32_t i = 0; i < exec->count; i++) {
    operation_clear(&exec->nodes[i].op);
    free(exec->nodes[i].needs);
  }
  free(exec->nodes);
  free(exec->lane_ctx);
  free(exec->lane_stream);
  exec->nodes = NULL;
  exec->lane_ctx = NULL;
  exec->lane_stream = NULL;
  exec->count = exec->lane_count = 0;
}

exec_node *exec_node_of(CUgraphExec exec, CUgraphNode node) {
  for (uint32_t i = 0; i < exec->count; i++)
    if (exec->nodes[i].id == node->id) return &exec->nodes[i];
  return NULL;
}

CUresult exec_to_graph(CUgraphExec exec, CUgraph *out) {
  CUgraph graph = graph_new();
  CUgraphNode *made = calloc(exec->count + 1, sizeof(CUgraphNode));
  CUresult result = graph && made ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
  if (exec->memory) result = CUDA_ERROR_NOT_SUPPORTED; /* as a child graph with allocations is */
  for (uint32_t i = 0; i < exec->count && result == CUDA_SUCCESS; i++) {
    const exec_node *node = &exec->nodes[i];
    operation op;
    if (!operation_copy(&op, &node->op)) result = CUDA_ERROR_OUT_OF_MEMORY;
    else result = node_add(graph, NULL, 0, &op, &made[i]);
    for (uint32_t k = 0; k < node->need_count && result == CUDA_SUCCESS; k++) result = edge_add(made[node->needs[k]], made[i]);
  }
  free(made);
  if (result == CUDA_SUCCESS) *out = graph;
  else if (graph) graph_free(graph);
  return result;
}

/* ---- making and ending --------------------------------------------------- */

static void exec_free(CUgraphExec exec) {
  exec_clear(exec);
  if (exec->memory) graph_memory_let_go(exec->memory, true);
  objects_drop(&exec->objects);
  free(exec);
}

static CUresult buildable(CUgraph graph) {
  CUresult result = graph_checked(graph);
  if (result == CUDA_SUCCESS && graph->capture) result = CUDA_ERROR_ILLEGAL_STATE;
  if (result == CUDA_SUCCESS && graph->memory && graph_memory_instantiated(graph->memory)) result = CUDA_ERROR_INVALID_VALUE;
  return result;
}

static CUresult instantiate(CUgraphExec *out, CUgraph graph, cuuint64_t flags, CUgraphNode *bad) {
  *bad = NULL;
  CUresult result = buildable(graph);
  if (result == CUDA_SUCCESS && (!out || flags & ~(cuuint64_t)15)) result = CUDA_ERROR_INVALID_VALUE;
  if (result == CUDA_SUCCESS && flags & CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH && flags & CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH)
    result = CUDA_ERROR_INVALID_VALUE;
  if (result != CUDA_SUCCESS) return result;
  CUgraphExec exec = calloc(1, sizeof *exec);
  if (!exec || !handle_add(exec, HANDLE_EXEC)) {
    free(exec);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  exec->flags = flags & ~(cuuint64_t)CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD;
  result = objects_copy(graph->objects, &exec->objects);
  if (result == CUDA_SUCCESS) result = exec_build(graph, exec, bad);
  if (result != CUDA_SUCCESS) {
    handle_remove(exec);
    exec_free(exec);
    return result;
  }
  exec->memory = graph->memory;
  if (exec->memory) graph_memory_hold(exec->memory, true);
  *out = exec;
  return CUDA_SUCCESS;
}

static CUresult first_form(CUgraphExec *out, CUgraph graph, CUgraphNode *bad, char *log, size_t bytes) {
  CUgraphNode at;
  ENTER();
  CUresult result = instantiate(out, graph, 0, &at);
  if (bad) *bad = at;
  if (log && bytes) log[0] = 0;
  LEAVE(result);
}

EXPORT CUresult cuGraphInstantiate(CUgraphExec *out, CUgraph graph, CUgraphNode *bad, char *log, size_t bytes) {
  return first_form(out, graph, bad, log, bytes);
}
EXPORT CUresult cuGraphInstantiate_v2(CUgraphExec *out, CUgraph graph, CUgraphNode *bad, char *log, size_t bytes) {
  return first_form(out, graph, bad, log, bytes);
}
EXPORT CUresult cuGraphInstantiateWithFlags(CUgraphExec *out, CUgraph graph, unsigned long long flags) {
  CUgraphNode at;
  ENTER();
  LEAVE(instantiate(out, graph, flags, &at));
}

EXPORT CUresult cuGraphExecDestroy(CUgraphExec exec) {
  ENTER();
  if (!handle_is(exec, HANDLE_EXEC)) LEAVE(CUDA_ERROR_INVALID_VALUE);
  handle_remove(exec);
  exec->doomed = true;
  if (!exec->busy) exec_free(exec);
  objects_finish();
  LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuGraphExecGetFlags(CUgraphExec exec, cuuint64_t *flags) {
  ENTER();
  if (!handle_is(exec, HANDLE_EXEC) || !flags) LEAVE(CUDA_ERROR_INVALID_VALUE);
  *flags = exec->flags;
  LEAVE(CUDA_SUCCESS);
}

/* ---- launching ----------------------------------------------------------- */

typedef struct {
  stream on;
  bool begun, has_end;
  uint32_t queue;
  uint64_t seq;          /* latest entry */
} lane;

typedef struct {
  CUgraphExec exec;
  lane *lanes;
  lane mark;             /* where the launching stream stood */
  bool *has_end;         /* of each node, */
  uint32_t *queue;
  uint64_t *seq;
} launching;

static CUresult wait_for(lane *at, uint32_t queue, uint64_t seq) {
  soft_entry wait = {.kind = SOFT_ENTRY_WAIT, .wait_queue = queue, .wait_seq = seq};
  CUresult result = work_submit(at->on.owner, &at->on, wait, &at->queue, &at->seq);
  if (result == CUDA_SUCCESS) at->has_end = true;
  return result;
}

static CUresult launch_node(launching *l, uint32_t i) {
  const exec_node *node = &l->exec->nodes[i];
  lane *at = &l->lanes[node->lane];
  CUresult result = CUDA_SUCCESS;
  if (!at->begun && l->mark.has_end) result = wait_for(at, l->mark.queue, l->mark.seq);
  at->begun = true;
  for (uint32_t k = 0; k < node->need_count && result == CUDA_SUCCESS; k++) {
    uint32_t on = node->needs[k];
    if (l->exec->nodes[on].lane != node->lane && l->has_end[on]) result = wait_for(at, l->queue[on], l->seq[on]);
  }
  if (result == CUDA_SUCCESS && node->enabled) {
    uint64_t seq = UINT64_MAX;
    uint32_t queue = at->queue;
    operation op = node->op; /* a list of values stays exec's, which busy keeps */
    if (!op.ctx) op.ctx = at->on.owner;
    if (op.type == CU_GRAPH_NODE_TYPE_MEM_ALLOC) result = graph_memory_begin(op.allocation);
    else if (op.type == CU_GRAPH_NODE_TYPE_MEM_FREE && !graph_memory_end(op.pointer)) result = CUDA_ERROR_INVALID_VALUE;
    else result = operation_issue(&at->on, &op, &queue, &seq);
    if (result == CUDA_SUCCESS && seq != UINT64_MAX) {
      at->queue = queue;
      at->seq = seq;
      at->has_end = true;
    }
  }
  l->has_end[i] = at->has_end;
  l->queue[i] = at->queue;
  l->seq[i] = at->seq;
  return result;
}

static CUresult run(launching *l, const stream *on) {
  CUgraphExec exec = l->exec;
  lane *own = NULL; /* the launching stream's own */
  lane ahead = {.on = *on};
  CUresult result = CUDA_SUCCESS;
  /* launches of one graph follow each other, wherever they are put */
  if (exec->launched && exec->last_stream != on->number) result = wait_for(&ahead, exec->last_queue, exec->last_seq);
  for (uint32_t i = 0; i < exec->lane_count; i++) {
    context *ctx = exec->lane_ctx[i] ? exec->lane_ctx[i] : on->owner;
    if (!own && ctx->card == on->owner->card) {
      own = &l->lanes[i];
      own->on = *on;
      own->begun = true;
    } else {
      l->lanes[i].on = (stream){.owner = ctx, .green = ctx == on->owner ? on->green : NULL, .number = exec->lane_stream[i], .flags = CU_STREAM_NON_BLOCKING};
    }
  }
  if (result == CUDA_SUCCESS && (exec->lane_count > 1 || !own)) {
    l->mark = ahead;
    result = work_submit(on->owner, on, (soft_entry){.kind = SOFT_ENTRY_EVENT}, &l->mark.queue, &l->mark.seq);
    l->mark.has_end = result == CUDA_SUCCESS;
    if (own) *own = (lane){.on = *on, .begun = true, .has_end = l->mark.has_end, .queue = l->mark.queue, .seq = l->mark.seq};
  }
  uint32_t reached = 0;
  for (; reached < exec->count && result == CUDA_SUCCESS; reached++) result = launch_node(l, reached);
  /* what comes next in the stream comes after all of it */
  lane *end = own ? own : &ahead;
  for (uint32_t i = 0; i < reached; i++) {
    if (&l->lanes[exec->nodes[i].lane] == own || !exec->nodes[i].leaf || !l->has_end[i]) continue;
    CUresult joined = wait_for(end, l->queue[i], l->seq[i]);
    if (result == CUDA_SUCCESS) result = joined;
  }
  if (end->has_end) {
    exec->launched = true;
    exec->last_stream = on->number;
    exec->last_queue = end->queue;
    exec->last_seq = end->seq;
  }
  return result;
}

/* A launch that is captured is a child graph. */
static CUresult capture_launch(CUgraphExec exec, stream *on) {
  operation op = {.type = CU_GRAPH_NODE_TYPE_GRAPH};
  CUresult result = exec_to_graph(exec, &op.child);
  return result == CUDA_SUCCESS ? capture_add(on, &op) : result;
}

static CUresult launch(CUgraphExec exec, stream *on) {
  if (stream_capturing(on)) return capture_launch(exec, on);
  if (exec->memory) {
    if (exec->flags & CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH) graph_memory_free_all(exec->memory);
    if (graph_memory_live(exec->memory)) return CUDA_ERROR_INVALID_VALUE;
    CUresult result = graph_memory_bind(exec, on->number);
    if (result != CUDA_SUCCESS) return result;
  }
  for (uint32_t i = 0; i < exec->lane_count; i++)
    if (exec->lane_ctx[i] && exec->lane_ctx[i]->destroyed) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
  launching l = {.exec = exec,
                 .lanes = calloc(exec->lane_count + 1, sizeof *l.lanes),
                 .has_end = calloc(exec->count + 1, sizeof *l.has_end),
                 .queue = calloc(exec->count + 1, sizeof *l.queue),
                 .seq = calloc(exec->count + 1, sizeof *l.seq)};
  CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
  exec->busy++;
  if (l.lanes && l.has_end && l.queue && l.seq) result = run(&l, on);
  if (--exec->busy == 0 && exec->doomed) exec_free(exec);
  free(l.lanes);
  free(l.has_end);
  free(l.queue);
  free(l.seq);
  return result;
}

typedef CUresult (*stream_action)(CUgraphExec exec, stream *on);

static CUresult in_stream(CUgraphExec exec, CUstream handle, bool per_thread, stream_action action) {
  context *ctx;
  stream *on;
  ENTER();
  CUresult result = context_current(&ctx);
  if (result == CUDA_SUCCESS) result = stream_for_work(ctx, handle, per_thread, &on);
  if (result == CUDA_SUCCESS && !handle_is(exec, HANDLE_EXEC)) result = CUDA_ERROR_INVALID_VALUE;
  if (result != CUDA_SUCCESS) LEAVE(result);
  LEAVE(action(exec, on));
}

EXPORT CUresult cuGraphLaunch(CUgraphExec exec, CUstream on) { return in_stream(exec, on, false, launch); }
EXPORT CUresult cuGraphLaunch_ptsz(CUgraphExec exec, CUstream on) { return in_stream(exec, on, true, launch); }

static CUresult upload(CUgraphExec exec, stream *on) { return exec->memory ? graph_memory_bind(exec, on->number) : CUDA_SUCCESS; }

EXPORT CUresult cuGraphUpload(CUgraphExec exec, CUstream on) { return in_stream(exec, on, false, upload); }
EXPORT CUresult cuGraphUpload_ptsz(CUgraphExec exec, CUstream on) { return in_stream(exec, on, true, upload); }

static CUresult last_form(CUgraphExec *out, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *params, bool per_thread) {
  CUgraphNode bad;
  ENTER();
  if (!params) LEAVE(CUDA_ERROR_INVALID_VALUE);
  CUresult result = instantiate(out, graph, params->flags, &bad);
  params->hErrNode_out = bad;
  params->result_out = result == CUDA_SUCCESS ? CUDA_GRAPH_INSTANTIATE_SUCCESS
                       : bad                  ? CUDA_GRAPH_INSTANTIATE_INVALID_STRUCTURE
                                              : CUDA_GRAPH_INSTANTIATE_ERROR;
  if (result != CUDA_SUCCESS || !(params->flags & CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD)) LEAVE(result);
  driver_leave(CUDA_SUCCESS);
  result = in_stream(*out, params->hUploadStream, per_thread, upload);
  if (result != CUDA_SUCCESS) {
    params->result_out = CUDA_GRAPH_INSTANTIATE_ERROR;
    cuGraphExecDestroy(*out);
  }
  return result;
}

EXPORT CUresult cuGraphInstantiateWithParams(CUgraphExec *out, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *params) {
  return last_form(out, graph, params, false);
}
EXPORT CUresult cuGraphInstantiateWithParams_ptsz(CUgraphExec *out, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *params) {
  return last_form(out, graph, params, true);
}
