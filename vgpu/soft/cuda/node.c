/* node.c - what nodes do: parameters in and out, and the cuGraphAdd family. */
#include <stdlib.h>
#include <string.h>

#include "arena.h"
#include "graph.h"

const char *node_type_name(CUgraphNodeType type) {
  static const char *const names[] = {"KERNEL", "MEMCPY", "MEMSET", "HOST", "GRAPH", "EMPTY", "EVENT_WAIT", "EVENT_RECORD",
                                      "EXT_SIGNAL", "EXT_WAIT", "MEM_ALLOC", "MEM_FREE", "BATCH_MEM_OP", "CONDITIONAL"};
  return type >= 0 && type < (int)(sizeof names / sizeof names[0]) ? names[type] : "?";
}

/* ---- parameters in ------------------------------------------------------- */

static CUresult context_named(CUcontext named, context **out) {
  if (!named) return context_current(out);
  if (!handle_is(named, HANDLE_CONTEXT)) return CUDA_ERROR_INVALID_VALUE;
  if (named->destroyed) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
  *out = named->home ? named->home : named;
  return CUDA_SUCCESS;
}

CUresult kernel_operation(const CUDA_KERNEL_NODE_PARAMS_v2 *params, operation *op) {
  context *ctx = NULL;
  if (!params || (!params->func && !params->kern) || (params->func && params->kern)) return CUDA_ERROR_INVALID_VALUE;
  CUfunction handle = params->func ? params->func : (CUfunction)params->kern;
  CUresult result = CUDA_SUCCESS;
  /* a function has its context; a kernel of a library takes the one that is named, or current */
  if (handle_is(handle, HANDLE_FUNCTION)) ctx = handle->of->owner;
  else result = context_named(params->ctx, &ctx);
  if (result != CUDA_SUCCESS) return result;
  *op = (operation){.type = CU_GRAPH_NODE_TYPE_KERNEL,
                    .ctx = ctx,
                    .kernel = {.grid = {params->gridDimX, params->gridDimY, params->gridDimZ},
                               .block = {params->blockDimX, params->blockDimY, params->blockDimZ},
                               .shared_bytes = params->sharedMemBytes}};
  return kernel_prepare(ctx, handle, params->kernelParams, params->extra, &op->kernel);
}

CUresult copy_operation(const CUDA_MEMCPY3D *copy, CUcontext named, operation *op) {
  context *ctx;
  CUresult result = context_named(named, &ctx);
  if (result == CUDA_SUCCESS && !copy) result = CUDA_ERROR_INVALID_VALUE;
  if (result == CUDA_SUCCESS) result = copy_check(copy);
  if (result == CUDA_SUCCESS) *op = (operation){.type = CU_GRAPH_NODE_TYPE_MEMCPY, .ctx = ctx, .copy = *copy};
  return result;
}

CUresult fill_operation(const CUDA_MEMSET_NODE_PARAMS *fill, CUcontext named, operation *op) {
  context *ctx;
  CUresult result = context_named(named, &ctx);
  if (result == CUDA_SUCCESS && (!fill || !fill->width || !fill->height)) result = CUDA_ERROR_INVALID_VALUE;
  if (result == CUDA_SUCCESS) result = fill_check(fill);
  if (result == CUDA_SUCCESS) *op = (operation){.type = CU_GRAPH_NODE_TYPE_MEMSET, .ctx = ctx, .fill = *fill};
  return result;
}

CUresult host_operation(const CUDA_HOST_NODE_PARAMS *params, operation *op) {
  if (!params || !params->fn) return CUDA_ERROR_INVALID_VALUE;
  *op = (operation){.type = CU_GRAPH_NODE_TYPE_HOST, .host = {.function = params->fn, .data = params->userData}};
  return CUDA_SUCCESS;
}

CUresult event_operation(CUgraphNodeType type, CUevent handle, operation *op) {
  if (!handle_is(handle, HANDLE_EVENT)) return CUDA_ERROR_INVALID_HANDLE;
  *op = (operation){.type = type, .ctx = type == CU_GRAPH_NODE_TYPE_EVENT_RECORD ? handle->owner : NULL, .event = handle};
  return CUDA_SUCCESS;
}

CUresult values_operation(const CUDA_BATCH_MEM_OP_NODE_PARAMS *params, operation *op) {
  context *ctx;
  if (!params || params->flags || !params->count || params->count > 256 || !params->paramArray) return CUDA_ERROR_INVALID_VALUE;
  CUresult result = context_named(params->ctx, &ctx);
  for (unsigned int i = 0; i < params->count && result == CUDA_SUCCESS; i++) {
    const CUstreamBatchMemOpParams *p = &params->paramArray[i];
    switch (p->operation) {
    case CU_STREAM_MEM_OP_WAIT_VALUE_32:
    case CU_STREAM_MEM_OP_WRITE_VALUE_32:
      if (!p->value.address || p->value.address % 4) result = CUDA_ERROR_INVALID_VALUE;
      break;
    case CU_STREAM_MEM_OP_WAIT_VALUE_64:
    case CU_STREAM_MEM_OP_WRITE_VALUE_64:
      if (!p->value.address || p->value.address % 8) result = CUDA_ERROR_INVALID_VALUE;
      break;
    case CU_STREAM_MEM_OP_BARRIER: break;
    case CU_STREAM_MEM_OP_FLUSH_REMOTE_WRITES: return CUDA_ERROR_NOT_SUPPORTED; /* what CAN_FLUSH_REMOTE_WRITES says */
    default: result = CUDA_ERROR_INVALID_VALUE;
    }
  }
  if (result != CUDA_SUCCESS) return result;
  operation mine = {.type = CU_GRAPH_NODE_TYPE_BATCH_MEM_OP, .ctx = ctx, .values = {params->count, params->flags, params->paramArray}};
  return operation_copy(op, &mine) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult free_operation(CUdeviceptr pointer, operation *op) {
  if (!pointer) return CUDA_ERROR_INVALID_VALUE;
  *op = (operation){.type = CU_GRAPH_NODE_TYPE_MEM_FREE, .pointer = pointer};
  return CUDA_SUCCESS;
}

static CUresult child_operation(CUgraph child, bool move, operation *op) {
  CUresult result = graph_checked(child);
  if (result != CUDA_SUCCESS) return result;
  *op = (operation){.type = CU_GRAPH_NODE_TYPE_GRAPH, .child = child};
  if (!move) return graph_clone(child, &op->child);
  return child->inside || child->capture ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult operation_of(CUgraphNodeParams *params, operation *op) {
  if (!params) return CUDA_ERROR_INVALID_VALUE;
  switch (params->type) {
  case CU_GRAPH_NODE_TYPE_KERNEL: return kernel_operation(&params->kernel, op);
  case CU_GRAPH_NODE_TYPE_MEMCPY: return copy_operation(&params->memcpy.copyParams, params->memcpy.copyCtx, op);
  case CU_GRAPH_NODE_TYPE_MEMSET: return fill_operation(&params->memset.fill, params->memset.ctx, op);
  case CU_GRAPH_NODE_TYPE_HOST: return host_operation(&params->host, op);
  case CU_GRAPH_NODE_TYPE_GRAPH: return child_operation(params->graph.graph, params->graph.ownership == CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE, op);
  case CU_GRAPH_NODE_TYPE_EMPTY: *op = (operation){.type = CU_GRAPH_NODE_TYPE_EMPTY}; return CUDA_SUCCESS;
  case CU_GRAPH_NODE_TYPE_WAIT_EVENT: return event_operation(params->type, params->eventWait.event, op);
  case CU_GRAPH_NODE_TYPE_EVENT_RECORD: return event_operation(params->type, params->eventRecord.event, op);
  case CU_GRAPH_NODE_TYPE_MEM_FREE: return free_operation(params->free.dptr, op);
  case CU_GRAPH_NODE_TYPE_BATCH_MEM_OP: return values_operation(&params->memOp, op);
  default: return CUDA_ERROR_NOT_SUPPORTED;
  }
}

CUresult replaceable(const operation *old, const operation *fresh) {
  if (old->type != fresh->type) return CUDA_ERROR_INVALID_VALUE;
  switch (old->type) {
  case CU_GRAPH_NODE_TYPE_KERNEL: return old->ctx == fresh->ctx ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
  case CU_GRAPH_NODE_TYPE_MEMCPY:
    return old->ctx == fresh->ctx && old->copy.srcMemoryType == fresh->copy.srcMemoryType && old->copy.dstMemoryType == fresh->copy.dstMemoryType
               ? CUDA_SUCCESS
               : CUDA_ERROR_INVALID_VALUE;
  case CU_GRAPH_NODE_TYPE_MEMSET: return old->ctx == fresh->ctx ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
  case CU_GRAPH_NODE_TYPE_MEM_ALLOC:
  case CU_GRAPH_NODE_TYPE_MEM_FREE: return CUDA_ERROR_NOT_SUPPORTED;
  case CU_GRAPH_NODE_TYPE_BATCH_MEM_OP: return old->values.count == fresh->values.count ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
  default: return CUDA_SUCCESS;
  }
}

/* ---- adding -------------------------------------------------------------- */

/* Calls made, operation or result, to be added to a graph. */
static CUresult add(CUgraphNode *out, CUgraph graph, const CUgraphNode *on, size_t count, CUresult made, operation *op) {
  CUgraphNode fresh;
  if (made != CUDA_SUCCESS) return made;
  if (!out) made = CUDA_ERROR_INVALID_VALUE;
  if (made == CUDA_SUCCESS && op->type == CU_GRAPH_NODE_TYPE_MEM_FREE && graph->inside) made = CUDA_ERROR_NOT_SUPPORTED;
  CUdeviceptr pointer = op->type == CU_GRAPH_NODE_TYPE_MEM_FREE ? op->pointer : 0;
  if (made == CUDA_SUCCESS && pointer) made = graph_memory_freed_by(pointer, NULL);
  if (made != CUDA_SUCCESS) {
    if (op->type == CU_GRAPH_NODE_TYPE_GRAPH && !op->child->inside) graph_free(op->child);
    operation_clear(op);
    return made;
  }
  made = node_add(graph, on, count, op, &fresh);
  if (made == CUDA_SUCCESS && pointer) made = graph_memory_freed_by(pointer, fresh);
  if (made == CUDA_SUCCESS) *out = fresh;
  return made;
}

#define ADD(graph, what)                                    \
  operation op;                                             \
  ENTER();                                                  \
  CUresult result = graph_checked(graph);                   \
  LEAVE(add(node, graph, on, count, result == CUDA_SUCCESS ? (what) : result, &op))

static CUDA_KERNEL_NODE_PARAMS_v2 wide(const CUDA_KERNEL_NODE_PARAMS_v1 *p) {
  CUDA_KERNEL_NODE_PARAMS_v2 out = {0};
  if (p) memcpy(&out, p, sizeof *p);
  return out;
}

EXPORT CUresult cuGraphAddKernelNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *on, size_t count,
                                     const CUDA_KERNEL_NODE_PARAMS_v1 *params) {
  CUDA_KERNEL_NODE_PARAMS_v2 p = wide(params);
  ADD(graph, kernel_operation(&p, &op));
}
EXPORT CUresult cuGraphAddKernelNode_v2(CUgraphNode *node, CUgraph graph, const CUgraphNode *on, size_t count,
                                        const CUDA_KERNEL_NODE_PARAMS_v2 *params) {
  ADD(graph, kernel_operation(params, &op));
}
EXPORT CUresult cuGraphAddMemcpyNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *on, size_t count, const CUDA_MEMCPY3D *copy, CUcontext ctx) {
  ADD(graph, copy_operation(copy, ctx, &op));
}
EXPORT CUresult cuGraphAddMemsetNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *on, size_t count, const CUDA_MEMSET_NODE_PARAMS *fill,
                                     CUcontext ctx) {
  ADD(graph, fill_operation(fill, ctx, &op));
}
EXPORT CUresult cuGraphAddHostNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *on, size_t count, const CUDA_HOST_NODE_PARAMS *params) {
  ADD(graph, host_operation(params, &op));
}
EXPORT CUresult cuGraphAddChildGraphNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *on, size_t count, CUgraph child) {
  ADD(graph, child_operation(child, false, &op));
}
EXPORT CUresult cuGraphAddEmptyNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *on, size_t count) {
  ADD(graph, (op = (operation){.type = CU_GRAPH_NODE_TYPE_EMPTY}, CUDA_SUCCESS));
}
EXPORT CUresult cuGraphAddEventRecordNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *on, size_t count, CUevent e) {
  ADD(graph, event_operation(CU_GRAPH_NODE_TYPE_EVENT_RECORD, e, &op));
}
EXPORT CUresult cuGraphAddEventWaitNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *on, size_t count, CUevent e) {
  ADD(graph, event_operation(CU_GRAPH_NODE_TYPE_WAIT_EVENT, e, &op));
}
EXPORT CUresult cuGraphAddMemFreeNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *on, size_t count, CUdeviceptr pointer) {
  ADD(graph, free_operation(pointer, &op));
}
EXPORT CUresult cuGraphAddBatchMemOpNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *on, size_t count,
                                         const CUDA_BATCH_MEM_OP_NODE_PARAMS *params) {
  ADD(graph, values_operation(params, &op));
}

CUresult node_add_allocation(CUgraph graph, const CUgraphNode *on, size_t count, CUDA_MEM_ALLOC_NODE_PARAMS *params, CUgraphNode *out) {
  graph_allocation *a;
  if (graph->inside) return CUDA_ERROR_NOT_SUPPORTED;
  CUresult result = graph_memory_allocate(graph, on, count, params, &a);
  if (result != CUDA_SUCCESS) return result;
  operation op = {.type = CU_GRAPH_NODE_TYPE_MEM_ALLOC, .allocation = a};
  result = node_add(graph, on, count, &op, out);
  if (result == CUDA_SUCCESS) params->dptr = graph_memory_pointer(a);
  return result;
}

EXPORT CUresult cuGraphAddMemAllocNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *on, size_t count, CUDA_MEM_ALLOC_NODE_PARAMS *params) {
  ENTER();
  CUresult result = graph_checked(graph);
  if (result == CUDA_SUCCESS && (!node || !params)) result = CUDA_ERROR_INVALID_VALUE;
  LEAVE(result == CUDA_SUCCESS ? node_add_allocation(graph, on, count, params, node) : result);
}

static CUresult add_any(CUgraphNode *node, CUgraph graph, const CUgraphNode *on, size_t count, CUgraphNodeParams *params) {
  if (params && params->type == CU_GRAPH_NODE_TYPE_MEM_ALLOC) return cuGraphAddMemAllocNode(node, graph, on, count, &params->alloc);
  ADD(graph, operation_of(params, &op));
}

EXPORT CUresult cuGraphAddNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *on, size_t count, CUgraphNodeParams *params) {
  return add_any(node, graph, on, count, params);
}

EXPORT CUresult cuGraphAddNode_v2(CUgraphNode *node, CUgraph graph, const CUgraphNode *on, const CUgraphEdgeData *data, size_t count,
                                  CUgraphNodeParams *params) {
  static const CUgraphEdgeData none;
  for (size_t i = 0; data && i < count; i++)
    if (memcmp(&data[i], &none, sizeof none) != 0) return CUDA_ERROR_NOT_SUPPORTED;
  return add_any(node, graph, on, count, params);
}

/* ---- parameters out, and changed ----------------------------------------- */

#define NODE(kind)                                        \
  ENTER();                                                \
  CUresult result = node_checked(node, kind);             \
  if (result != CUDA_SUCCESS) LEAVE(result)
#define GET(kind, out, what)                              \
  NODE(kind);                                             \
  if (!(out)) LEAVE(CUDA_ERROR_INVALID_VALUE);            \
  *(out) = (what);                                        \
  LEAVE(CUDA_SUCCESS)

static CUresult change(CUgraphNode node, CUresult made, operation *fresh) {
  if (made != CUDA_SUCCESS) return made;
  made = replaceable(&node->op, fresh);
  if (made == CUDA_SUCCESS && node->op.type == CU_GRAPH_NODE_TYPE_GRAPH) made = CUDA_ERROR_NOT_SUPPORTED;
  if (made != CUDA_SUCCESS) {
    if (fresh->type == CU_GRAPH_NODE_TYPE_GRAPH) graph_free(fresh->child);
    operation_clear(fresh);
    return made;
  }
  if (node->op.type == CU_GRAPH_NODE_TYPE_KERNEL) { /* attributes stay */
    fresh->kernel.cooperative = node->op.kernel.cooperative;
    fresh->kernel.priority = node->op.kernel.priority;
  }
  operation_clear(&node->op);
  node->op = *fresh;
  return CUDA_SUCCESS;
}

#define SET(kind, what) \
  operation op;         \
  NODE(kind);           \
  LEAVE(change(node, (what), &op))

static CUDA_KERNEL_NODE_PARAMS_v2 kernel_params(CUgraphNode node) {
  const kernel_work *k = &node->op.kernel;
  bool function = handle_is(k->handle, HANDLE_FUNCTION);
  for (uint32_t i = 0; i < k->parameter_count; i++) node->parameters[i] = &node->op.kernel.arguments.value[i];
  return (CUDA_KERNEL_NODE_PARAMS_v2){.func = function ? k->handle : NULL,
                                      .kern = function ? NULL : (CUkernel)k->handle,
                                      .gridDimX = k->grid[0], .gridDimY = k->grid[1], .gridDimZ = k->grid[2],
                                      .blockDimX = k->block[0], .blockDimY = k->block[1], .blockDimZ = k->block[2],
                                      .sharedMemBytes = k->shared_bytes,
                                      .kernelParams = k->parameter_count ? node->parameters : NULL,
                                      .ctx = node->op.ctx};
}

EXPORT CUresult cuGraphKernelNodeGetParams_v2(CUgraphNode node, CUDA_KERNEL_NODE_PARAMS_v2 *params) {
  GET(CU_GRAPH_NODE_TYPE_KERNEL, params, kernel_params(node));
}
EXPORT CUresult cuGraphKernelNodeGetParams(CUgraphNode node, CUDA_KERNEL_NODE_PARAMS_v1 *params) {
  struct CUfunc_st *function;
  NODE(CU_GRAPH_NODE_TYPE_KERNEL);
  if (!params) LEAVE(CUDA_ERROR_INVALID_VALUE);
  CUDA_KERNEL_NODE_PARAMS_v2 p = kernel_params(node);
  if (!p.func && function_resolve(node->op.ctx, node->op.kernel.handle, &function) == CUDA_SUCCESS) p.func = function;
  memcpy(params, &p, sizeof *params);
  LEAVE(CUDA_SUCCESS);
}
EXPORT CUresult cuGraphKernelNodeSetParams_v2(CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS_v2 *params) {
  SET(CU_GRAPH_NODE_TYPE_KERNEL, kernel_operation(params, &op));
}
EXPORT CUresult cuGraphKernelNodeSetParams(CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS_v1 *params) {
  CUDA_KERNEL_NODE_PARAMS_v2 p = wide(params);
  SET(CU_GRAPH_NODE_TYPE_KERNEL, kernel_operation(&p, &op));
}

EXPORT CUresult cuGraphMemcpyNodeGetParams(CUgraphNode node, CUDA_MEMCPY3D *copy) { GET(CU_GRAPH_NODE_TYPE_MEMCPY, copy, node->op.copy); }
EXPORT CUresult cuGraphMemcpyNodeSetParams(CUgraphNode node, const CUDA_MEMCPY3D *copy) {
  SET(CU_GRAPH_NODE_TYPE_MEMCPY, copy_operation(copy, node->op.ctx, &op));
}
EXPORT CUresult cuGraphMemsetNodeGetParams(CUgraphNode node, CUDA_MEMSET_NODE_PARAMS *fill) { GET(CU_GRAPH_NODE_TYPE_MEMSET, fill, node->op.fill); }
EXPORT CUresult cuGraphMemsetNodeSetParams(CUgraphNode node, const CUDA_MEMSET_NODE_PARAMS *fill) {
  SET(CU_GRAPH_NODE_TYPE_MEMSET, fill_operation(fill, node->op.ctx, &op));
}
EXPORT CUresult cuGraphHostNodeGetParams(CUgraphNode node, CUDA_HOST_NODE_PARAMS *params) {
  GET(CU_GRAPH_NODE_TYPE_HOST, params, ((CUDA_HOST_NODE_PARAMS){node->op.host.function, node->op.host.data}));
}
EXPORT CUresult cuGraphHostNodeSetParams(CUgraphNode node, const CUDA_HOST_NODE_PARAMS *params) {
  SET(CU_GRAPH_NODE_TYPE_HOST, host_operation(params, &op));
}
EXPORT CUresult cuGraphChildGraphNodeGetGraph(CUgraphNode node, CUgraph *graph) { GET(CU_GRAPH_NODE_TYPE_GRAPH, graph, node->op.child); }
EXPORT CUresult cuGraphEventRecordNodeGetEvent(CUgraphNode node, CUevent *out) { GET(CU_GRAPH_NODE_TYPE_EVENT_RECORD, out, node->op.event); }
EXPORT CUresult cuGraphEventRecordNodeSetEvent(CUgraphNode node, CUevent e) {
  SET(CU_GRAPH_NODE_TYPE_EVENT_RECORD, event_operation(CU_GRAPH_NODE_TYPE_EVENT_RECORD, e, &op));
}
EXPORT CUresult cuGraphEventWaitNodeGetEvent(CUgraphNode node, CUevent *out) { GET(CU_GRAPH_NODE_TYPE_WAIT_EVENT, out, node->op.event); }
EXPORT CUresult cuGraphEventWaitNodeSetEvent(CUgraphNode node, CUevent e) {
  SET(CU_GRAPH_NODE_TYPE_WAIT_EVENT, event_operation(CU_GRAPH_NODE_TYPE_WAIT_EVENT, e, &op));
}
EXPORT CUresult cuGraphMemFreeNodeGetParams(CUgraphNode node, CUdeviceptr *pointer) { GET(CU_GRAPH_NODE_TYPE_MEM_FREE, pointer, node->op.pointer); }
EXPORT CUresult cuGraphMemAllocNodeGetParams(CUgraphNode node, CUDA_MEM_ALLOC_NODE_PARAMS *params) {
  NODE(CU_GRAPH_NODE_TYPE_MEM_ALLOC);
  if (!params) LEAVE(CUDA_ERROR_INVALID_VALUE);
  graph_memory_params(node->op.allocation, params);
  LEAVE(CUDA_SUCCESS);
}
EXPORT CUresult cuGraphBatchMemOpNodeGetParams(CUgraphNode node, CUDA_BATCH_MEM_OP_NODE_PARAMS *params) {
  GET(CU_GRAPH_NODE_TYPE_BATCH_MEM_OP, params,
      ((CUDA_BATCH_MEM_OP_NODE_PARAMS){node->op.ctx, node->op.values.count, node->op.values.list, node->op.values.flags}));
}
EXPORT CUresult cuGraphBatchMemOpNodeSetParams(CUgraphNode node, const CUDA_BATCH_MEM_OP_NODE_PARAMS *params) {
  SET(CU_GRAPH_NODE_TYPE_BATCH_MEM_OP, values_operation(params, &op));
}
EXPORT CUresult cuGraphNodeSetParams(CUgraphNode node, CUgraphNodeParams *params) { SET(-1, operation_of(params, &op)); }

/* ---- attributes of kernel nodes ------------------------------------------ */

EXPORT CUresult cuGraphKernelNodeGetAttribute(CUgraphNode node, int attribute, CUlaunchAttributeValue *value) {
  NODE(CU_GRAPH_NODE_TYPE_KERNEL);
  if (!value) LEAVE(CUDA_ERROR_INVALID_VALUE);
  memset(value, 0, sizeof *value);
  if (attribute == CU_LAUNCH_ATTRIBUTE_COOPERATIVE) value->cooperative = node->op.kernel.cooperative;
  else if (attribute == CU_LAUNCH_ATTRIBUTE_PRIORITY) value->priority = node->op.kernel.priority;
  else if (attribute == CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW) *value = node->window;
  else LEAVE(CUDA_ERROR_INVALID_VALUE);
  LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuGraphKernelNodeSetAttribute(CUgraphNode node, int attribute, const CUlaunchAttributeValue *value) {
  NODE(CU_GRAPH_NODE_TYPE_KERNEL);
  if (!value) LEAVE(CUDA_ERROR_INVALID_VALUE);
  if (attribute == CU_LAUNCH_ATTRIBUTE_COOPERATIVE) {
    node->op.kernel.cooperative = value->cooperative != 0;
  } else if (attribute == CU_LAUNCH_ATTRIBUTE_PRIORITY) {
    node->op.kernel.priority = value->priority;
  } else if (attribute == CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW) {
    node->window = *value;
    node->has_window = true;
  } else {
    LEAVE(CUDA_ERROR_INVALID_VALUE);
  }
  LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuGraphKernelNodeCopyAttributes(CUgraphNode to, CUgraphNode from) {
  ENTER();
  CUresult result = node_checked(to, CU_GRAPH_NODE_TYPE_KERNEL);
  if (result == CUDA_SUCCESS) result = node_checked(from, CU_GRAPH_NODE_TYPE_KERNEL);
  if (result != CUDA_SUCCESS) LEAVE(result);
  to->op.kernel.cooperative = from->op.kernel.cooperative;
  to->op.kernel.priority = from->op.kernel.priority;
  to->window = from->window;
  to->has_window = from->has_window;
  LEAVE(CUDA_SUCCESS);
}
