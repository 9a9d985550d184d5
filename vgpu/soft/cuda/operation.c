#include "operation.h"

#include <stdlib.h>
#include <string.h>

#include "arena.h"
#include "capture.h"
#include "deferred.h"

bool operation_copy(operation *to, const operation *from) {
  *to = *from;
  if (from->type != CU_GRAPH_NODE_TYPE_BATCH_MEM_OP || !from->values.count) return true;
  to->values.list = malloc(from->values.count * sizeof *to->values.list);
  if (!to->values.list) return false;
  memcpy(to->values.list, from->values.list, from->values.count * sizeof *to->values.list);
  return true;
}

void operation_clear(operation *op) {
  if (op->type == CU_GRAPH_NODE_TYPE_BATCH_MEM_OP) free(op->values.list);
  *op = (operation){.type = CU_GRAPH_NODE_TYPE_EMPTY};
}

static CUresult effect(const operation *op) {
  switch (op->type) {
  case CU_GRAPH_NODE_TYPE_KERNEL: return kernel_run(op->ctx, &op->kernel);
  case CU_GRAPH_NODE_TYPE_MEMCPY: return copy_run(&op->copy);
  case CU_GRAPH_NODE_TYPE_MEMSET: return fill_run(op->ctx->card, &op->fill);
  case CU_GRAPH_NODE_TYPE_MEM_FREE: return memory_free(op->pointer);
  default: return CUDA_SUCCESS;
  }
}

void operation_effect(const operation *op) {
  CUresult result = effect(op);
  /* as on a card, a fault comes back with a later call, and stays */
  if (result == CUDA_SUCCESS || op->type == CU_GRAPH_NODE_TYPE_MEM_FREE || op->ctx->sticky != CUDA_SUCCESS) return;
  op->ctx->sticky = CUDA_ERROR_ILLEGAL_ADDRESS;
  mps_fault(CUDA_ERROR_ILLEGAL_ADDRESS);
}

CUresult operation_issue(const stream *on, const operation *op, uint32_t *queue, uint64_t *seq) {
  soft_entry entry = {.kind = SOFT_ENTRY_EVENT};
  CUresult result;
  switch (op->type) {
  case CU_GRAPH_NODE_TYPE_KERNEL:
    result = kernel_entry(on, op->ctx, &op->kernel, &entry);
    return result == CUDA_SUCCESS ? deferred_effect(on, op, entry, queue, seq) : result;
  case CU_GRAPH_NODE_TYPE_MEMCPY:
  case CU_GRAPH_NODE_TYPE_MEMSET:
  case CU_GRAPH_NODE_TYPE_MEM_FREE: return deferred_any() ? deferred_effect(on, op, entry, queue, seq) : effect(op);
  case CU_GRAPH_NODE_TYPE_HOST:
  case CU_GRAPH_NODE_TYPE_BATCH_MEM_OP: return deferred_gate(on, op, queue, seq);
  case CU_GRAPH_NODE_TYPE_EVENT_RECORD: return handle_is(op->event, HANDLE_EVENT) ? event_record(on, op->event, queue, seq) : CUDA_ERROR_INVALID_HANDLE;
  case CU_GRAPH_NODE_TYPE_WAIT_EVENT: return handle_is(op->event, HANDLE_EVENT) ? event_wait(on, op->event, queue, seq) : CUDA_ERROR_INVALID_HANDLE;
  case CU_GRAPH_NODE_TYPE_EMPTY: return CUDA_SUCCESS;
  default: return CUDA_ERROR_NOT_SUPPORTED;
  }
}

CUresult operation_submit(stream *on, const operation *op) {
  operation copy;
  if (!stream_capturing(on)) return operation_issue(on, op, NULL, NULL);
  return operation_copy(&copy, op) ? capture_add(on, &copy) : CUDA_ERROR_OUT_OF_MEMORY;
}
