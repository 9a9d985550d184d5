/* update.c - changing what an executable graph does, without making it anew. */
#include <stdlib.h>
#include <string.h>

#include "graph.h"

static CUresult find(CUgraphExec exec, CUgraphNode node, exec_node **out) {
  if (!handle_is(exec, HANDLE_EXEC)) return CUDA_ERROR_INVALID_VALUE;
  CUresult result = node_checked(node, -1);
  if (result != CUDA_SUCCESS) return result;
  *out = exec_node_of(exec, node);
  return *out ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static void replace(exec_node *at, operation *fresh) {
  if (at->op.type == CU_GRAPH_NODE_TYPE_KERNEL) { /* attributes are the node's */
    fresh->kernel.cooperative = at->op.kernel.cooperative;
    fresh->kernel.priority = at->op.kernel.priority;
  }
  operation_clear(&at->op);
  at->op = *fresh;
}

static CUresult set(exec_node *at, CUresult made, operation *fresh) {
  if (made != CUDA_SUCCESS) return made;
  made = replaceable(&at->op, fresh);
  if (made == CUDA_SUCCESS) {
    replace(at, fresh);
    return CUDA_SUCCESS;
  }
  if (fresh->type == CU_GRAPH_NODE_TYPE_GRAPH) graph_free(fresh->child);
  operation_clear(fresh);
  return made;
}

#define SET(what)                             \
  exec_node *at;                              \
  operation op;                               \
  ENTER();                                    \
  CUresult result = find(exec, node, &at);    \
  LEAVE(result == CUDA_SUCCESS ? set(at, (what), &op) : result)

EXPORT CUresult cuGraphExecKernelNodeSetParams(CUgraphExec exec, CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS_v1 *params) {
  CUDA_KERNEL_NODE_PARAMS_v2 p = {0};
  if (params) memcpy(&p, params, sizeof *params);
  SET(kernel_operation(&p, &op));
}
EXPORT CUresult cuGraphExecKernelNodeSetParams_v2(CUgraphExec exec, CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS_v2 *params) {
  SET(kernel_operation(params, &op));
}
EXPORT CUresult cuGraphExecMemcpyNodeSetParams(CUgraphExec exec, CUgraphNode node, const CUDA_MEMCPY3D *copy, CUcontext ctx) {
  SET(copy_operation(copy, ctx, &op));
}
EXPORT CUresult cuGraphExecMemsetNodeSetParams(CUgraphExec exec, CUgraphNode node, const CUDA_MEMSET_NODE_PARAMS *fill, CUcontext ctx) {
  SET(fill_operation(fill, ctx, &op));
}
EXPORT CUresult cuGraphExecHostNodeSetParams(CUgraphExec exec, CUgraphNode node, const CUDA_HOST_NODE_PARAMS *params) {
  SET(host_operation(params, &op));
}
EXPORT CUresult cuGraphExecEventRecordNodeSetEvent(CUgraphExec exec, CUgraphNode node, CUevent e) {
  SET(event_operation(CU_GRAPH_NODE_TYPE_EVENT_RECORD, e, &op));
}
EXPORT CUresult cuGraphExecEventWaitNodeSetEvent(CUgraphExec exec, CUgraphNode node, CUevent e) {
  SET(event_operation(CU_GRAPH_NODE_TYPE_WAIT_EVENT, e, &op));
}
EXPORT CUresult cuGraphExecBatchMemOpNodeSetParams(CUgraphExec exec, CUgraphNode node, const CUDA_BATCH_MEM_OP_NODE_PARAMS *params) {
  SET(values_operation(params, &op));
}

/* ---- whole graphs -------------------------------------------------------- */

/* Why a kernel, copy or fill can't take the place of what is there. */
static CUgraphExecUpdateResult why(const operation *old, const operation *fresh) {
  if (old->type != fresh->type) return CU_GRAPH_EXEC_UPDATE_ERROR_NODE_TYPE_CHANGED;
  switch (replaceable(old, fresh)) {
  case CUDA_SUCCESS: return CU_GRAPH_EXEC_UPDATE_SUCCESS;
  case CUDA_ERROR_NOT_SUPPORTED: return CU_GRAPH_EXEC_UPDATE_ERROR_NOT_SUPPORTED;
  default:
    return old->type == CU_GRAPH_NODE_TYPE_KERNEL ? CU_GRAPH_EXEC_UPDATE_ERROR_UNSUPPORTED_FUNCTION_CHANGE
                                                  : CU_GRAPH_EXEC_UPDATE_ERROR_PARAMETERS_CHANGED;
  }
}

static CUgraphNode node_with(CUgraph graph, uint64_t id) {
  for (CUgraphNode n = graph->first; n; n = n->next) {
    if (n->id == id) return n;
    CUgraphNode inner = n->op.type == CU_GRAPH_NODE_TYPE_GRAPH ? node_with(n->op.child, id) : NULL;
    if (inner) return inner;
  }
  return NULL;
}

/* Compares count entries of exec from at on with those of fresh; both have their needs relative to their start. */
static CUgraphExecUpdateResult compare(CUgraphExec exec, uint32_t at, CUgraphExec fresh, uint32_t from, uint32_t count, uint64_t *id,
                                       uint64_t *from_id) {
  for (uint32_t i = 0; i < count; i++) {
    const exec_node *old = &exec->nodes[at + i], *new = &fresh->nodes[from + i];
    *id = new->id;
    *from_id = 0;
    if (old->op.type != new->op.type || old->span != new->span) return CU_GRAPH_EXEC_UPDATE_ERROR_NODE_TYPE_CHANGED;
    if (i && old->need_count != new->need_count) return CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED;
    for (uint32_t k = 0; i && k < old->need_count; k++) {
      if (old->needs[k] - at == new->needs[k] - from) continue;
      *from_id = fresh->nodes[new->needs[k]].id;
      return CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED;
    }
    CUgraphExecUpdateResult change = why(&old->op, &new->op);
    if (change != CU_GRAPH_EXEC_UPDATE_SUCCESS) return change;
  }
  return CU_GRAPH_EXEC_UPDATE_SUCCESS;
}

static void take_over(CUgraphExec exec, uint32_t at, CUgraphExec fresh, uint32_t from, uint32_t count) {
  for (uint32_t i = 0; i < count; i++) {
    exec_node *old = &exec->nodes[at + i], *new = &fresh->nodes[from + i];
    operation op = new->op;
    new->op = old->op; /* cleared with fresh */
    old->op = op;
  }
}

static CUresult update(CUgraphExec exec, CUgraph graph, CUgraphExecUpdateResultInfo *info) {
  uint64_t id = 0, from_id = 0;
  struct CUgraphExec_st fresh = {0};
  CUgraphNode bad;
  *info = (CUgraphExecUpdateResultInfo){.result = CU_GRAPH_EXEC_UPDATE_ERROR};
  if (!handle_is(exec, HANDLE_EXEC) || graph_checked(graph) != CUDA_SUCCESS || graph->capture) return CUDA_ERROR_INVALID_VALUE;
  CUresult result = exec_build(graph, &fresh, &bad);
  if (result != CUDA_SUCCESS) {
    exec_clear(&fresh);
    info->errorNode = bad;
    return bad ? CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE : result;
  }
  if (fresh.count != exec->count) info->result = CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED;
  else if (fresh.count && fresh.nodes[0].need_count != exec->nodes[0].need_count) info->result = CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED;
  else info->result = compare(exec, 0, &fresh, 0, fresh.count, &id, &from_id);
  if (info->result == CU_GRAPH_EXEC_UPDATE_SUCCESS) {
    take_over(exec, 0, &fresh, 0, fresh.count);
  } else {
    info->errorNode = id ? node_with(graph, id) : NULL;
    info->errorFromNode = from_id ? node_with(graph, from_id) : NULL;
    result = CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE;
  }
  exec_clear(&fresh);
  return result;
}

EXPORT CUresult cuGraphExecUpdate_v2(CUgraphExec exec, CUgraph graph, CUgraphExecUpdateResultInfo *info) {
  CUgraphExecUpdateResultInfo unused;
  ENTER();
  LEAVE(update(exec, graph, info ? info : &unused));
}

EXPORT CUresult cuGraphExecUpdate(CUgraphExec exec, CUgraph graph, CUgraphNode *bad, CUgraphExecUpdateResult *why_not) {
  CUgraphExecUpdateResultInfo info;
  ENTER();
  CUresult result = update(exec, graph, &info);
  if (bad) *bad = info.errorNode;
  if (why_not) *why_not = info.result;
  LEAVE(result);
}

static CUresult set_child(CUgraphExec exec, CUgraphNode node, CUgraph child) {
  exec_node *at;
  uint64_t id, from_id;
  struct CUgraphExec_st fresh = {0};
  CUgraphNode bad;
  CUresult result = find(exec, node, &at);
  if (result == CUDA_SUCCESS && node->op.type != CU_GRAPH_NODE_TYPE_GRAPH) result = CUDA_ERROR_INVALID_VALUE;
  if (result == CUDA_SUCCESS) result = graph_checked(child);
  if (result != CUDA_SUCCESS) return result;
  /* as the child of an empty graph it has an entry and an exit, too */
  CUgraph around = graph_new();
  operation op = {.type = CU_GRAPH_NODE_TYPE_GRAPH};
  result = around ? graph_clone(child, &op.child) : CUDA_ERROR_OUT_OF_MEMORY;
  if (result == CUDA_SUCCESS) result = node_add(around, NULL, 0, &op, &bad);
  if (result == CUDA_SUCCESS) result = exec_build(around, &fresh, &bad);
  uint32_t start = (uint32_t)(at - exec->nodes);
  if (result == CUDA_SUCCESS && fresh.nodes[0].span != at->span) result = CUDA_ERROR_INVALID_VALUE;
  if (result == CUDA_SUCCESS && compare(exec, start, &fresh, 0, at->span + 1, &id, &from_id) != CU_GRAPH_EXEC_UPDATE_SUCCESS)
    result = CUDA_ERROR_INVALID_VALUE;
  if (result == CUDA_SUCCESS) take_over(exec, start, &fresh, 0, at->span + 1);
  exec_clear(&fresh);
  if (around) graph_free(around);
  return result;
}

EXPORT CUresult cuGraphExecChildGraphNodeSetParams(CUgraphExec exec, CUgraphNode node, CUgraph child) {
  ENTER();
  LEAVE(set_child(exec, node, child));
}

EXPORT CUresult cuGraphExecNodeSetParams(CUgraphExec exec, CUgraphNode node, CUgraphNodeParams *params) {
  if (params && params->type == CU_GRAPH_NODE_TYPE_GRAPH) return cuGraphExecChildGraphNodeSetParams(exec, node, params->graph.graph);
  SET(operation_of(params, &op));
}

/* ---- switching nodes off ------------------------------------------------- */

static CUresult switchable(CUgraphExec exec, CUgraphNode node, exec_node **at) {
  CUresult result = find(exec, node, at);
  if (result != CUDA_SUCCESS) return result;
  CUgraphNodeType type = (*at)->op.type;
  return type == CU_GRAPH_NODE_TYPE_KERNEL || type == CU_GRAPH_NODE_TYPE_MEMCPY || type == CU_GRAPH_NODE_TYPE_MEMSET ? CUDA_SUCCESS
                                                                                                                    : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuGraphNodeGetEnabled(CUgraphExec exec, CUgraphNode node, unsigned int *enabled) {
  exec_node *at;
  ENTER();
  CUresult result = switchable(exec, node, &at);
  if (result != CUDA_SUCCESS || !enabled) LEAVE(CUDA_ERROR_INVALID_VALUE);
  *enabled = at->enabled;
  LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuGraphNodeSetEnabled(CUgraphExec exec, CUgraphNode node, unsigned int enabled) {
  exec_node *at;
  ENTER();
  CUresult result = switchable(exec, node, &at);
  if (result != CUDA_SUCCESS) LEAVE(result);
  at->enabled = enabled != 0;
  LEAVE(CUDA_SUCCESS);
}
