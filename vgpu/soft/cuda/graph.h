/*
 * graph.h - graphs, their nodes, and what becomes of them when instantiated.
 *
 * A graph is nodes (operations) and the edges between them. Instantiated it is
 * a list in an order that the edges allow, laid out in lanes: chains that one
 * stream each can carry. The first lane is the stream that it is launched into;
 * the others are streams that only the driver knows. So a launch queues just
 * what its operations would have, launched alone, and waits where edges cross
 * lanes.
 */
#ifndef SOFT_GRAPH_H
#define SOFT_GRAPH_H

#include "operation.h"

typedef struct graph_memory graph_memory;
typedef struct graph_allocation graph_allocation;

typedef struct { CUgraphNode *list; size_t count, room; } node_list;

struct CUgraphNode_st {
  CUgraph in;
  uint64_t id;              /* of this node, never used again */
  uint64_t original;        /* id of the one that it is a clone of */
  operation op;
  node_list needs, needed_by;
  void *parameters[PTX_PARAMETERS];
  CUlaunchAttributeValue window; /* access policy, kept for whoever asks */
  bool has_window;
  uint32_t place;           /* scratch of whoever walks the graph */
  uint64_t seen;            /* by node_after */
  CUgraphNode next, previous;
};

struct CUgraph_st {
  CUgraphNode first, last;  /* in the order that they were made in */
  size_t count;
  CUgraphNode inside;       /* the child graph node that owns this graph */
  uint64_t id, original;
  graph_memory *memory;     /* of its allocation nodes */
  bool has_memory_nodes;
  struct capture *capture;  /* that goes on in it */
  struct held_object *objects;
};

typedef struct {
  uint64_t id;              /* of the node in the graph; 0: an entry or exit of a child */
  operation op;
  uint32_t *needs, need_count;
  uint32_t lane;
  uint32_t span;            /* child graph: so many entries after this one are of it */
  bool enabled, leaf;
  CUlaunchAttributeValue window;
  bool has_window;
} exec_node;

struct CUgraphExec_st {
  exec_node *nodes;
  uint32_t count;
  uint32_t lane_count;
  uint32_t *lane_stream;    /* number of each lane's own stream */
  context **lane_ctx;       /* where it runs, NULL: where it is launched */
  cuuint64_t flags;
  graph_memory *memory;
  bool launched;
  uint32_t last_queue, last_stream; /* of the latest launch */
  uint64_t last_seq;
  unsigned int busy;        /* launches that wait for room in a queue */
  bool doomed;
  struct held_object *objects;
};

/* ---- graph.c ---- */
CUresult graph_checked(CUgraph graph);
CUresult node_checked(CUgraphNode node, CUgraphNodeType type);
CUgraph graph_new(void);
void graph_free(CUgraph graph);
/* Takes over op, also when it fails. */
CUresult node_add(CUgraph graph, const CUgraphNode *on, size_t count, operation *op, CUgraphNode *out);
CUresult graph_clone(CUgraph from, CUgraph *out);
/* to can't be done before from. */
bool node_after(CUgraphNode to, CUgraphNode from);
CUresult edge_add(CUgraphNode from, CUgraphNode to);

/* ---- node.c: parameters as they come in from the program ---- */
CUresult kernel_operation(const CUDA_KERNEL_NODE_PARAMS_v2 *params, operation *op);
CUresult copy_operation(const CUDA_MEMCPY3D *copy, CUcontext ctx, operation *op);
CUresult fill_operation(const CUDA_MEMSET_NODE_PARAMS *fill, CUcontext ctx, operation *op);
CUresult host_operation(const CUDA_HOST_NODE_PARAMS *params, operation *op);
CUresult event_operation(CUgraphNodeType type, CUevent event, operation *op);
CUresult values_operation(const CUDA_BATCH_MEM_OP_NODE_PARAMS *params, operation *op);
CUresult free_operation(CUdeviceptr pointer, operation *op);
CUresult operation_of(CUgraphNodeParams *params, operation *op);
/* May an operation take the place of another (nothing that a graph can't change)? */
CUresult replaceable(const operation *old, const operation *fresh);
/* A pool allocation as a node: its address is known at once. */
CUresult node_add_allocation(CUgraph graph, const CUgraphNode *on, size_t count, CUDA_MEM_ALLOC_NODE_PARAMS *params, CUgraphNode *out);
/* Writes what a node does, for cuGraphDebugDotPrint. */
const char *node_type_name(CUgraphNodeType type);

/* ---- exec.c ---- */
/* The order and lanes of a graph. *bad gets the node that it fails at. */
CUresult exec_build(CUgraph graph, CUgraphExec exec, CUgraphNode *bad);
void exec_clear(CUgraphExec exec);
/* A graph that does what exec does. */
CUresult exec_to_graph(CUgraphExec exec, CUgraph *out);
exec_node *exec_node_of(CUgraphExec exec, CUgraphNode node);

/* ---- graph_memory.c ---- */
CUresult graph_memory_allocate(CUgraph graph, const CUgraphNode *on, size_t count, const CUDA_MEM_ALLOC_NODE_PARAMS *params,
                               graph_allocation **out);
void graph_memory_params(const graph_allocation *a, CUDA_MEM_ALLOC_NODE_PARAMS *params);
CUdeviceptr graph_memory_pointer(const graph_allocation *a);
/* The node that frees a is known: what comes after it may have its place. */
CUresult graph_memory_freed_by(CUdeviceptr pointer, CUgraphNode node);
/* References of graphs and executable graphs. */
void graph_memory_hold(graph_memory *m, bool by_exec);
void graph_memory_let_go(graph_memory *m, bool by_exec);
bool graph_memory_instantiated(const graph_memory *m);
/* Gives all of an executable graph's memory its place on the card. */
CUresult graph_memory_bind(CUgraphExec exec, uint32_t stream_number);
/* A launch passes an allocation node; a free, in the order of submission. */
CUresult graph_memory_begin(graph_allocation *a);
bool graph_memory_live(const graph_memory *m);
void graph_memory_free_all(graph_memory *m);
bool graph_memory_end(CUdeviceptr pointer);
/* ---- object.c: user objects ---- */
CUresult objects_copy(struct held_object *from, struct held_object **to);
void objects_drop(struct held_object **all);
/* Calls destructors that are due. Releases the process lock meanwhile. */
void objects_finish(void);

#endif
