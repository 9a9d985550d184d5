/*
 * operation.h - what can be put into a stream, as a value.
 *
 * Each asynchronous entry point checks its arguments, makes an operation of
 * them and submits it. So one and the same thing is queued on the card,
 * becomes a node of a graph while its stream is captured, and is queued again
 * when that graph is launched.
 */
#ifndef SOFT_OPERATION_H
#define SOFT_OPERATION_H

#include "kernels.h"
#include "module.h"

typedef struct {
  CUfunction handle;          /* function or kernel, as the program named it */
  const kernel *known;
  unsigned int grid[3], block[3];
  unsigned int shared_bytes;
  bool cooperative;
  int priority;
  uint32_t parameter_count;
  kernel_arguments arguments;
} kernel_work;

typedef struct {
  CUhostFn function;
  CUstreamCallback callback;  /* in place of function */
  CUstream stream;            /* what the callback is told */
  void *data;
} host_work;

typedef struct operation {
  CUgraphNodeType type;
  context *ctx;
  union {
    kernel_work kernel;
    CUDA_MEMCPY3D copy;
    CUDA_MEMSET_NODE_PARAMS fill;
    host_work host;
    CUevent event;
    CUgraph child;
    struct graph_allocation *allocation; /* MEM_ALLOC */
    CUdeviceptr pointer;                 /* MEM_FREE */
    struct { unsigned int count, flags; CUstreamBatchMemOpParams *list; } values; /* the list is the operation's own */
  };
} operation;

/* A deep copy; false without memory. */
bool operation_copy(operation *to, const operation *from);
void operation_clear(operation *op);

/*
 * Puts an operation into a stream. op is copied where it must outlive the call.
 * *seq and *queue (both or none) get the entry that it is done with; without an
 * entry (it took place at once) they are left alone.
 */
CUresult operation_issue(const stream *on, const operation *op, uint32_t *queue, uint64_t *seq);

/* The same for a stream that may be in capture: then it becomes a node. */
CUresult operation_submit(stream *on, const operation *op);

/* What an operation does to the bytes. Under the process lock. */
void operation_effect(const operation *op);

/* ---- launch.c ---- */

/* Checks a launch and gathers its arguments. */
CUresult kernel_prepare(context *ctx, CUfunction handle, void **parameters, void **extra, kernel_work *work);
CUresult kernel_run(context *ctx, const kernel_work *work);
/* The entry of a launch on a card: its length and width. */
CUresult kernel_entry(const stream *on, const context *ctx, const kernel_work *work, soft_entry *entry);

/* occupancy.c: blocks of a launch that a multiprocessor holds at once, at least 1 */
unsigned int blocks_per_sm(const soft_card *card, unsigned int threads, size_t shared);

/* ---- copy.c, fill.c: the bytes. INVALID_VALUE changes nothing. ---- */
CUresult copy_check(const CUDA_MEMCPY3D *c);
CUresult copy_run(const CUDA_MEMCPY3D *c);
CUresult fill_check(const CUDA_MEMSET_NODE_PARAMS *f);
CUresult fill_run(uint32_t card, const CUDA_MEMSET_NODE_PARAMS *f);

#endif
