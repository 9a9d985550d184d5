/* Graphs: their shape, what they do, how long they take, and the memory that they allocate. On the virtual clock. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "harness.h"

static CUfunction spin_function, fill_function;

static CUgraphNode spin_node(CUgraph graph, const CUgraphNode *on, size_t count, uint64_t ns, unsigned int blocks) {
  CUgraphNode node = NULL;
  CUdeviceptr none = 0;
  void *parameters[] = {&ns, &none};
  CUDA_KERNEL_NODE_PARAMS_v2 p = {.func = spin_function, .gridDimX = blocks, .gridDimY = 1, .gridDimZ = 1, .blockDimX = 1024, .blockDimY = 1,
                                  .blockDimZ = 1, .kernelParams = parameters};
  CUresult result = CUDA(cuGraphAddKernelNode_v2)(&node, graph, on, count, &p);
  if (result != CUDA_SUCCESS) check_equal(result, CUDA_SUCCESS, "a kernel node is added");
  return node;
}

static CUgraphNode fill_node(CUgraph graph, const CUgraphNode *on, size_t count, CUdeviceptr words, unsigned int value, uint64_t length) {
  CUgraphNode node = NULL;
  void *parameters[] = {&words, &value, &length};
  CUDA_KERNEL_NODE_PARAMS_v1 p = {.func = fill_function, .gridDimX = 1, .gridDimY = 1, .gridDimZ = 1, .blockDimX = 32, .blockDimY = 1,
                                  .blockDimZ = 1, .kernelParams = parameters};
  check_equal(CUDA(cuGraphAddKernelNode)(&node, graph, on, count, &p), CUDA_SUCCESS, "a kernel that fills is added");
  return node;
}

static CUDA_MEMCPY3D line(CUmemorytype to_type, void *to, CUmemorytype from_type, void *from, size_t bytes) {
  return (CUDA_MEMCPY3D){.srcMemoryType = from_type, .srcHost = from, .srcDevice = (uintptr_t)from, .dstMemoryType = to_type, .dstHost = to,
                         .dstDevice = (uintptr_t)to, .WidthInBytes = bytes, .Height = 1, .Depth = 1};
}

static CUcontext current(void) {
  CUcontext ctx = NULL;
  CUDA(cuCtxGetCurrent)(&ctx);
  return ctx;
}

static CUgraph graph_new(void) {
  CUgraph graph = NULL;
  CUDA(cuGraphCreate)(&graph, 0);
  return graph;
}

static CUgraphExec ready(CUgraph graph) {
  CUgraphExec exec = NULL;
  check_equal(CUDA(cuGraphInstantiateWithFlags)(&exec, graph, 0), CUDA_SUCCESS, "instantiated");
  return exec;
}

/* Milliseconds that a launch takes in a stream. */
static float launch_ms(CUgraphExec exec, CUstream on) {
  static CUevent from, to;
  float ms = -1;
  if (!from) {
    CUDA(cuEventCreate)(&from, 0);
    CUDA(cuEventCreate)(&to, 0);
  }
  CUDA(cuEventRecord)(from, on);
  CUresult result = CUDA(cuGraphLaunch)(exec, on);
  if (result != CUDA_SUCCESS) check_equal(result, CUDA_SUCCESS, "launched");
  CUDA(cuEventRecord)(to, on);
  CUDA(cuEventSynchronize)(to);
  CUDA(cuEventElapsedTime)(&ms, from, to);
  return ms;
}

/* ---- shape --------------------------------------------------------------- */

static void shape(void) {
  CUgraph graph = graph_new(), clone;
  CUgraphNode a, b, c, d, got[8], from[8], to[8], found;
  size_t count = 0;
  CUgraphNodeType type;
  check_equal(CUDA(cuGraphCreate)(&graph, 1), CUDA_ERROR_INVALID_VALUE, "flags that there aren't");
  check_equal(CUDA(cuGraphAddEmptyNode)(&a, graph, NULL, 0), CUDA_SUCCESS, "an empty node");
  b = spin_node(graph, &a, 1, 1000, 1);
  c = spin_node(graph, &a, 1, 1000, 1);
  CUgraphNode both[] = {b, c};
  d = spin_node(graph, both, 2, 1000, 1);
  CUDA(cuGraphGetNodes)(graph, NULL, &count);
  check_equal(count, 4, "so many nodes");
  CUDA(cuGraphGetNodes)(graph, got, &count);
  check(got[0] == a && got[1] == b && got[2] == c && got[3] == d, "in the order that they were made in");
  count = 8;
  CUDA(cuGraphGetRootNodes)(graph, got, &count);
  check(count == 1 && got[0] == a && !got[1], "one root, and nothing behind it in the list");
  CUDA(cuGraphGetEdges)(graph, NULL, NULL, &count);
  check_equal(count, 4, "so many edges");
  CUDA(cuGraphGetEdges)(graph, from, to, &count);
  check(from[0] == a && to[0] == b && from[3] == c && to[3] == d, "these");
  count = 8;
  CUDA(cuGraphNodeGetDependencies)(d, got, &count);
  check(count == 2 && got[0] == b && got[1] == c, "what a node needs");
  count = 1;
  CUDA(cuGraphNodeGetDependentNodes)(a, got, &count);
  check(count == 1 && got[0] == b, "what needs it, as far as there is room");
  CUDA(cuGraphNodeGetType)(d, &type);
  check_equal(type, CU_GRAPH_NODE_TYPE_KERNEL, "a node's type");

  check_equal(CUDA(cuGraphAddDependencies)(graph, &a, &d, 1), CUDA_SUCCESS, "an edge more");
  check_equal(CUDA(cuGraphAddDependencies)(graph, &a, &d, 1), CUDA_ERROR_INVALID_VALUE, "not twice");
  check_equal(CUDA(cuGraphAddDependencies)(graph, &a, &a, 1), CUDA_ERROR_INVALID_VALUE, "nor to itself");
  check_equal(CUDA(cuGraphRemoveDependencies)(graph, &a, &d, 1), CUDA_SUCCESS, "and off again");
  check_equal(CUDA(cuGraphRemoveDependencies)(graph, &a, &d, 1), CUDA_ERROR_INVALID_VALUE, "once");
  CUgraphNode twice[] = {a, a};
  check_equal(CUDA(cuGraphAddEmptyNode)(&found, graph, twice, 2), CUDA_ERROR_INVALID_VALUE, "a node can't need another twice");
  CUgraph other = graph_new();
  check_equal(CUDA(cuGraphAddEmptyNode)(&found, other, &a, 1), CUDA_ERROR_INVALID_VALUE, "nor one of another graph");

  check_equal(CUDA(cuGraphClone)(&clone, graph), CUDA_SUCCESS, "a clone");
  check(CUDA(cuGraphNodeFindInClone)(&found, d, clone) == CUDA_SUCCESS && found != d, "has a node for each");
  check_equal(CUDA(cuGraphNodeFindInClone)(&found, d, other), CUDA_ERROR_INVALID_VALUE, "only a clone has");
  CUgraphExec exec;
  CUgraphNode bad;
  CUDA(cuGraphAddDependencies)(clone, &found, &found, 0);
  CUDA(cuGraphNodeFindInClone)(&found, d, clone);
  CUDA(cuGraphNodeFindInClone)(&got[0], a, clone);
  CUDA(cuGraphAddDependencies)(clone, &found, &got[0], 1);
  check_equal(CUDA(cuGraphInstantiate_v2)(&exec, clone, &bad, NULL, 0), CUDA_ERROR_INVALID_VALUE, "a circle can't be instantiated");
  check(bad != NULL, "and one of its nodes is named");
  CUDA_GRAPH_INSTANTIATE_PARAMS how = {0};
  CUDA(cuGraphInstantiateWithParams)(&exec, clone, &how);
  check_equal(how.result_out, CUDA_GRAPH_INSTANTIATE_INVALID_STRUCTURE, "nor in the last form, which says why");

  check_equal(CUDA(cuGraphDestroyNode)(b), CUDA_SUCCESS, "a node is taken out");
  check_equal(CUDA(cuGraphNodeGetType)(b, &type), CUDA_ERROR_INVALID_VALUE, "and is gone");
  CUDA(cuGraphGetEdges)(graph, NULL, NULL, &count);
  check_equal(count, 2, "with its edges");
  check(CUDA(cuGraphDestroy)(graph) == CUDA_SUCCESS && CUDA(cuGraphDestroy)(graph) == CUDA_ERROR_INVALID_VALUE, "a graph is destroyed once");
  check_equal(CUDA(cuGraphNodeGetType)(d, &type), CUDA_ERROR_INVALID_VALUE, "with its nodes");
  CUDA(cuGraphDestroy)(clone);
  CUDA(cuGraphDestroy)(other);

  /* a thousand diamonds, one after the other: a walk that tries all ways would never end */
  graph = graph_new();
  CUDA(cuGraphAddEmptyNode)(&a, graph, NULL, 0);
  for (int i = 0; i < 1000; i++) {
    CUDA(cuGraphAddEmptyNode)(&b, graph, &a, 1);
    CUDA(cuGraphAddEmptyNode)(&c, graph, &a, 1);
    CUgraphNode pair[] = {b, c};
    CUDA(cuGraphAddEmptyNode)(&a, graph, pair, 2);
  }
  exec = ready(graph);
  check(launch_ms(exec, NULL) == 0.0f, "empty nodes take no time, however many");
  CUDA(cuGraphExecDestroy)(exec);
  CUDA(cuGraphDestroy)(graph);
}

/* ---- times --------------------------------------------------------------- */

static void times(void) {
  CUstream on, other;
  CUDA(cuStreamCreate)(&on, CU_STREAM_NON_BLOCKING);
  CUDA(cuStreamCreate)(&other, CU_STREAM_NON_BLOCKING);

  CUgraph chain = graph_new();
  CUgraphNode at = NULL;
  for (int i = 0; i < 10; i++) at = spin_node(chain, &at, at != NULL, 3000000, 112);
  CUgraphExec exec = ready(chain);
  check(launch_ms(exec, on) == 30.0f, "a chain of ten kernels of 3 ms takes what they do alone");

  CUgraph wide = graph_new();
  CUgraphNode root = spin_node(wide, NULL, 0, 1000000, 1), branch[3];
  for (int i = 0; i < 3; i++) branch[i] = spin_node(wide, &root, 1, 2000000 + 1000000 * (uint64_t)i, 1);
  spin_node(wide, branch, 3, 1000000, 1);
  CUgraphExec fan = ready(wide);
  check(launch_ms(fan, on) == 6.0f, "narrow branches run side by side, and the join waits for the longest");
  check(launch_ms(fan, NULL) == 6.0f, "also in the legacy stream");

  CUgraph full = graph_new();
  root = spin_node(full, NULL, 0, 1000000, 112);
  for (int i = 0; i < 3; i++) branch[i] = spin_node(full, &root, 1, 2000000, 112);
  CUgraphExec crowd = ready(full);
  check(launch_ms(crowd, on) == 7.0f, "wide ones one after the other");

  /* before and after in the stream */
  uint64_t ns = 4000000;
  CUdeviceptr none = 0;
  void *parameters[] = {&ns, &none};
  CUevent from, to;
  float ms = 0;
  CUDA(cuEventCreate)(&from, 0);
  CUDA(cuEventCreate)(&to, 0);
  CUDA(cuEventRecord)(from, on);
  CUDA(cuLaunchKernel)(spin_function, 1, 1, 1, 32, 1, 1, 0, on, parameters, NULL);
  CUDA(cuGraphLaunch)(fan, on);
  CUDA(cuLaunchKernel)(spin_function, 1, 1, 1, 32, 1, 1, 0, on, parameters, NULL);
  CUDA(cuEventRecord)(to, on);
  CUDA(cuEventSynchronize)(to);
  CUDA(cuEventElapsedTime)(&ms, from, to);
  check(ms == 14.0f, "a graph starts after what is before it, and is waited for");

  CUDA(cuEventRecord)(from, on);
  CUDA(cuGraphLaunch)(fan, on);
  CUDA(cuGraphLaunch)(fan, other);
  CUDA(cuEventRecord)(to, other);
  CUDA(cuEventSynchronize)(to);
  CUDA(cuEventElapsedTime)(&ms, from, to);
  check(ms == 12.0f, "a graph doesn't run beside itself, whatever the streams");
  CUgraphExec second = ready(wide);
  CUDA(cuEventRecord)(from, on);
  CUDA(cuGraphLaunch)(fan, on);
  CUDA(cuGraphLaunch)(second, other);
  CUDA(cuEventRecord)(to, other);
  CUDA(cuEventSynchronize)(to);
  CUDA(cuEventElapsedTime)(&ms, from, to);
  check(ms == 6.0f, "but beside another one made of the same nodes");

  /* the legacy stream and blocking streams, with the graph's inner streams between them */
  CUstream blocking;
  CUDA(cuStreamCreate)(&blocking, CU_STREAM_DEFAULT);
  CUDA(cuEventRecord)(from, blocking);
  CUDA(cuGraphLaunch)(fan, blocking);
  CUDA(cuLaunchKernel)(spin_function, 1, 1, 1, 32, 1, 1, 0, NULL, parameters, NULL);
  CUDA(cuGraphLaunch)(second, blocking);
  CUDA(cuEventRecord)(to, blocking);
  CUDA(cuEventSynchronize)(to);
  CUDA(cuEventElapsedTime)(&ms, from, to);
  check(ms == 16.0f, "the legacy stream waits for all of a graph, and a graph for the legacy stream");

  /* more than a queue holds */
  CUgraph large = graph_new();
  root = spin_node(large, NULL, 0, 1000, 112);
  at = root;
  for (int i = 0; i < 1499; i++) at = spin_node(large, &at, 1, 1000, 112);
  CUgraphNode narrow[100];
  for (int i = 0; i < 100; i++) narrow[i] = spin_node(large, &root, 1, 100000, 1);
  spin_node(large, narrow, 100, 1000, 112);
  CUgraphExec heavy = ready(large);
  ms = launch_ms(heavy, on);
  check(ms >= 1.6f && ms < 1.9f, "1602 nodes, a hundred of them side by side, go through (%.3f ms)", (double)ms);
  check_equal(CUDA(cuStreamQuery)(on), CUDA_SUCCESS, "and leave nothing");

  CUDA(cuGraphDestroy)(chain);
  CUDA(cuGraphDestroy)(wide);
  check(launch_ms(fan, on) == 6.0f, "what was instantiated outlives its graph");
  CUDA(cuGraphLaunch)(fan, on);
  check_equal(CUDA(cuGraphExecDestroy)(fan), CUDA_SUCCESS, "and is destroyed in flight");
  CUDA(cuCtxSynchronize)();
  check_equal(CUDA(cuGraphLaunch)(fan, on), CUDA_ERROR_INVALID_VALUE, "then it is gone");
  check_equal(CUDA(cuGraphLaunch)(crowd, (CUstream)(uintptr_t)0x123450), CUDA_ERROR_INVALID_HANDLE, "no such stream");
}

/* ---- two cards ----------------------------------------------------------- */

static void cards(void) {
  CUcontext first = current(), second;
  CUDA(cuDevicePrimaryCtxRetain)(&second, 1);
  CUDA(cuCtxSetCurrent)(second);
  CUfunction there = kernel("carve_spin");
  CUDA(cuCtxSetCurrent)(first);
  CUgraph graph = graph_new();
  uint64_t ns = 5000000;
  CUdeviceptr none = 0;
  void *parameters[] = {&ns, &none};
  CUgraphNode a = spin_node(graph, NULL, 0, 2000000, 112), b;
  CUDA_KERNEL_NODE_PARAMS_v2 p = {.func = there, .gridDimX = 112, .gridDimY = 1, .gridDimZ = 1, .blockDimX = 1024, .blockDimY = 1, .blockDimZ = 1,
                                  .kernelParams = parameters};
  check_equal(CUDA(cuGraphAddKernelNode_v2)(&b, graph, &a, 1, &p), CUDA_SUCCESS, "a kernel of another card's");
  spin_node(graph, &a, 1, 4000000, 112);
  spin_node(graph, &b, 1, 1000000, 112);
  CUgraphExec exec = ready(graph);
  CUstream on;
  CUDA(cuStreamCreate)(&on, CU_STREAM_NON_BLOCKING);
  check(launch_ms(exec, on) == 8.0f, "cards work side by side, and wait for each other where edges say so");
  CUDA(cuGraphExecDestroy)(exec);
  CUDA(cuGraphDestroy)(graph);
  CUDA(cuDevicePrimaryCtxRelease_v2)(1);
}

/* ---- what nodes do ------------------------------------------------------- */

typedef struct {
  unsigned int *words;
  unsigned int seen, calls;
  uint64_t at_ns;
  CUresult permitted;
} visit;

static uint64_t clock_ns(void) { return ((uint64_t (*)(void))entry(cuda_library(), "softgpu_clock_ns"))(); }

static void look(void *data) {
  visit *v = data;
  CUdeviceptr pointer;
  v->calls++;
  v->seen = v->words[0];
  v->at_ns = clock_ns();
  v->permitted = CUDA(cuMemAlloc_v2)(&pointer, 100);
  v->words[0] = 77; /* for what comes after */
}

static void work(void) {
  enum { WORDS = 1000 };
  static unsigned int host[WORDS];
  CUdeviceptr a, b;
  CUstream on;
  visit v = {.words = host};
  CUDA(cuStreamCreate)(&on, CU_STREAM_NON_BLOCKING);
  CUDA(cuMemAlloc_v2)(&a, WORDS * 4);
  CUDA(cuMemAlloc_v2)(&b, WORDS * 4);
  CUgraph graph = graph_new();
  CUgraphNode clear, fill, down, visitor, up, wait;
  CUDA_MEMSET_NODE_PARAMS zero = {.dst = a, .elementSize = 4, .width = WORDS, .height = 1, .value = 5};
  check_equal(CUDA(cuGraphAddMemsetNode)(&clear, graph, NULL, 0, &zero, current()), CUDA_SUCCESS, "a fill");
  fill = fill_node(graph, &clear, 1, a, 6, WORDS / 2);
  wait = spin_node(graph, &fill, 1, 2000000, 1);
  CUDA_MEMCPY3D c = line(CU_MEMORYTYPE_HOST, host, CU_MEMORYTYPE_DEVICE, (void *)(uintptr_t)a, WORDS * 4);
  check_equal(CUDA(cuGraphAddMemcpyNode)(&down, graph, &wait, 1, &c, current()), CUDA_SUCCESS, "a copy down");
  CUDA_HOST_NODE_PARAMS h = {look, &v};
  check_equal(CUDA(cuGraphAddHostNode)(&visitor, graph, &down, 1, &h), CUDA_SUCCESS, "a host function");
  c = line(CU_MEMORYTYPE_DEVICE, (void *)(uintptr_t)b, CU_MEMORYTYPE_HOST, host, WORDS * 4);
  check_equal(CUDA(cuGraphAddMemcpyNode)(&up, graph, &visitor, 1, &c, current()), CUDA_SUCCESS, "and back up");
  spin_node(graph, &up, 1, 1000000, 1);
  CUgraphExec exec = ready(graph);
  uint64_t before = clock_ns();
  CUDA(cuGraphLaunch)(exec, on);
  check_equal(CUDA(cuStreamQuery)(on), CUDA_ERROR_NOT_READY, "the launch doesn't wait for the host function");
  check_equal(CUDA(cuStreamSynchronize)(on), CUDA_SUCCESS, "who waits for the stream waits for it too");
  check_equal(v.calls, 1, "it was called once");
  check_equal(v.seen, 6, "and saw what the copy before it brought");
  check(v.at_ns - before > 2001000 && v.at_ns - before < 2001100, "when the kernels before it were through");
  check_equal(clock_ns() - v.at_ns, 1000000, "the kernel after it came after it");
  check_equal(v.permitted, CUDA_ERROR_NOT_PERMITTED, "it may make no calls");
  unsigned int back[2] = {0};
  CUDA(cuMemcpyDtoH_v2)(back, b, 8);
  check(back[0] == 77 && back[1] == 6, "the copy after it took what it left");

  /* again, and twice at once */
  host[0] = 0;
  CUDA(cuGraphLaunch)(exec, on);
  CUDA(cuGraphLaunch)(exec, on);
  CUDA(cuCtxSynchronize)();
  check_equal(v.calls, 3, "each launch calls it");
  CUDA(cuMemcpyDtoH_v2)(back, b, 8);
  check(back[0] == 77, "with the bytes in order");

  /* events inside */
  CUevent mark, before_it, after;
  float ms = 0;
  CUDA(cuEventCreate)(&mark, 0);
  CUDA(cuEventCreate)(&before_it, 0);
  CUDA(cuEventCreate)(&after, 0);
  CUgraph timed = graph_new();
  CUgraphNode n1 = spin_node(timed, NULL, 0, 2000000, 1), n2;
  check_equal(CUDA(cuGraphAddEventRecordNode)(&n2, timed, &n1, 1, mark), CUDA_SUCCESS, "an event is recorded inside");
  spin_node(timed, &n2, 1, 3000000, 1);
  CUgraphExec with_event = ready(timed);
  CUDA(cuEventRecord)(before_it, on);
  CUDA(cuGraphLaunch)(with_event, on);
  CUDA(cuEventRecord)(after, on);
  CUDA(cuEventSynchronize)(mark);
  CUDA(cuEventElapsedTime)(&ms, before_it, mark);
  check(ms == 2.0f, "at its moment");
  check_equal(CUDA(cuEventQuery)(after), CUDA_ERROR_NOT_READY, "with the rest still to come");
  CUDA(cuEventSynchronize)(after);

  CUgraph waiting = graph_new();
  check_equal(CUDA(cuGraphAddEventWaitNode)(&n1, waiting, NULL, 0, mark), CUDA_SUCCESS, "and waited for inside");
  spin_node(waiting, &n1, 1, 1000000, 1);
  CUgraphExec waiter = ready(waiting);
  CUstream other;
  CUDA(cuStreamCreate)(&other, CU_STREAM_NON_BLOCKING);
  CUDA(cuEventRecord)(before_it, on);
  CUDA(cuGraphLaunch)(with_event, on);
  CUDA(cuGraphLaunch)(waiter, other);
  CUDA(cuEventRecord)(after, other);
  CUDA(cuEventSynchronize)(after);
  CUDA(cuEventElapsedTime)(&ms, before_it, after);
  check(ms == 3.0f, "by a graph in another stream");

  /* a graph in a graph */
  CUgraph outer = graph_new(), inner;
  CUgraphNode child;
  n1 = spin_node(outer, NULL, 0, 1000000, 1);
  check_equal(CUDA(cuGraphAddChildGraphNode)(&child, outer, &n1, 1, timed), CUDA_SUCCESS, "a child graph");
  spin_node(outer, &child, 1, 1000000, 1);
  CUDA(cuGraphChildGraphNodeGetGraph)(child, &inner);
  check(inner != timed && CUDA(cuGraphDestroy)(inner) == CUDA_ERROR_INVALID_VALUE, "is a copy that its node owns");
  CUgraphExec nested = ready(outer);
  check(launch_ms(nested, on) == 7.0f, "and takes its time between what is before and after");
  CUgraph empty = graph_new(), around = graph_new();
  n1 = spin_node(around, NULL, 0, 1000000, 1);
  CUDA(cuGraphAddChildGraphNode)(&child, around, &n1, 1, empty);
  spin_node(around, &child, 1, 1000000, 1);
  CUgraphExec hollow = ready(around);
  check(launch_ms(hollow, on) == 2.0f, "an empty one takes none");

  /* a batch of memory operations */
  CUstreamBatchMemOpParams list[2] = {{.value = {.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32, .address = a, .value = 9}},
                                      {.value = {.operation = CU_STREAM_MEM_OP_WRITE_VALUE_64, .address = a + 8, .value = 10}}};
  CUDA_BATCH_MEM_OP_NODE_PARAMS batch = {.ctx = current(), .count = 2, .paramArray = list};
  CUgraph values = graph_new();
  check_equal(CUDA(cuGraphAddBatchMemOpNode)(&n1, values, NULL, 0, &batch), CUDA_SUCCESS, "a batch of memory operations");
  CUgraphExec writer = ready(values);
  memset(list, 0, sizeof list);
  CUDA(cuGraphLaunch)(writer, on);
  CUDA(cuStreamSynchronize)(on);
  unsigned int words[4];
  CUDA(cuMemcpyDtoH_v2)(words, a, 16);
  check(words[0] == 9 && words[2] == 10 && words[3] == 0, "writes what it says, from a list of its own");
}

/* ---- changes ------------------------------------------------------------- */

static void changes(void) {
  CUstream on;
  CUDA(cuStreamCreate)(&on, CU_STREAM_NON_BLOCKING);
  CUgraph graph = graph_new();
  CUgraphNode a = spin_node(graph, NULL, 0, 1000000, 112), b = spin_node(graph, &a, 1, 2000000, 112);
  CUgraphExec exec = ready(graph);
  CUDA_KERNEL_NODE_PARAMS_v2 p;
  check_equal(CUDA(cuGraphKernelNodeGetParams_v2)(b, &p), CUDA_SUCCESS, "a kernel node's parameters");
  check(p.func == spin_function && p.gridDimX == 112 && p.ctx == current() && *(uint64_t *)p.kernelParams[0] == 2000000, "are what went in");
  uint64_t ns = 7000000;
  CUdeviceptr none = 0;
  void *parameters[] = {&ns, &none};
  p.kernelParams = parameters;
  p.gridDimX = 1;
  check_equal(CUDA(cuGraphExecKernelNodeSetParams_v2)(exec, b, &p), CUDA_SUCCESS, "changed in what is instantiated");
  ns = 1;
  check(launch_ms(exec, on) == 8.0f, "they count from the next launch on");
  CUDA(cuGraphKernelNodeGetParams_v2)(b, &p);
  check(*(uint64_t *)p.kernelParams[0] == 2000000, "the graph itself stays");
  ns = 4000000;
  p.kernelParams = parameters;
  check_equal(CUDA(cuGraphKernelNodeSetParams_v2)(b, &p), CUDA_SUCCESS, "changed in the graph");
  CUDA(cuGraphKernelNodeGetParams_v2)(b, &p);
  check(launch_ms(exec, on) == 8.0f && *(uint64_t *)p.kernelParams[0] == 4000000, "what is instantiated stays");
  CUgraphExecUpdateResultInfo info;
  check_equal(CUDA(cuGraphExecUpdate_v2)(exec, graph, &info), CUDA_SUCCESS, "the graph as a whole is taken over");
  check(launch_ms(exec, on) == 5.0f, "with all that changed");

  CUgraph same = graph_new(), longer = graph_new(), shaped = graph_new(), typed = graph_new();
  CUgraphNode x = spin_node(same, NULL, 0, 2000000, 1);
  spin_node(same, &x, 1, 2000000, 1);
  check(CUDA(cuGraphExecUpdate_v2)(exec, same, &info) == CUDA_SUCCESS && launch_ms(exec, on) == 4.0f, "another graph of the same shape, too");
  x = spin_node(longer, NULL, 0, 1000000, 1);
  x = spin_node(longer, &x, 1, 1000000, 1);
  spin_node(longer, &x, 1, 1000000, 1);
  check_equal(CUDA(cuGraphExecUpdate_v2)(exec, longer, &info), CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE, "a longer one isn't");
  check_equal(info.result, CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED, "for its shape");
  spin_node(shaped, NULL, 0, 9000000, 1);
  x = spin_node(shaped, NULL, 0, 9000000, 1);
  CUgraphNode wrong = NULL;
  CUgraphExecUpdateResult why = 0;
  check_equal(CUDA(cuGraphExecUpdate)(exec, shaped, &wrong, &why), CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE, "nor one without the edge");
  check(why == CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED && wrong == x, "and the node is named");
  x = spin_node(typed, NULL, 0, 9000000, 1);
  CUgraphNode odd;
  CUDA(cuGraphAddEmptyNode)(&odd, typed, &x, 1);
  CUDA(cuGraphExecUpdate_v2)(exec, typed, &info);
  check(info.result == CU_GRAPH_EXEC_UPDATE_ERROR_NODE_TYPE_CHANGED && info.errorNode == odd, "nor one with another kind of node");
  check(launch_ms(exec, on) == 4.0f, "a refused update changes nothing");
  check_equal(CUDA(cuGraphExecKernelNodeSetParams_v2)(exec, odd, &p), CUDA_ERROR_INVALID_VALUE, "a node of another graph isn't in it");

  unsigned int enabled = 9;
  check_equal(CUDA(cuGraphNodeSetEnabled)(exec, b, 0), CUDA_SUCCESS, "a node is switched off");
  CUDA(cuGraphNodeGetEnabled)(exec, b, &enabled);
  check(!enabled && launch_ms(exec, on) == 2.0f, "and left out");
  CUDA(cuGraphNodeSetEnabled)(exec, b, 1);
  check(launch_ms(exec, on) == 4.0f, "and on again");

  CUgraph outer = graph_new();
  CUgraphNode child;
  CUDA(cuGraphAddChildGraphNode)(&child, outer, NULL, 0, same);
  CUgraphExec nested = ready(outer);
  check(launch_ms(nested, on) == 4.0f, "a child graph");
  CUgraph slower = graph_new();
  x = spin_node(slower, NULL, 0, 3000000, 1);
  spin_node(slower, &x, 1, 3000000, 1);
  check_equal(CUDA(cuGraphExecChildGraphNodeSetParams)(nested, child, slower), CUDA_SUCCESS, "is changed for another");
  check(launch_ms(nested, on) == 6.0f, "of the same shape");
  check_equal(CUDA(cuGraphExecChildGraphNodeSetParams)(nested, child, longer), CUDA_ERROR_INVALID_VALUE, "not of another");

  CUlaunchAttributeValue value = {.cooperative = 1};
  check_equal(CUDA(cuGraphKernelNodeSetAttribute)(a, CU_LAUNCH_ATTRIBUTE_COOPERATIVE, &value), CUDA_SUCCESS, "an attribute of a kernel node");
  CUDA(cuGraphKernelNodeCopyAttributes)(b, a);
  memset(&value, 0, sizeof value);
  CUDA(cuGraphKernelNodeGetAttribute)(b, CU_LAUNCH_ATTRIBUTE_COOPERATIVE, &value);
  check_equal(value.cooperative, 1, "copied to another one");

  CUDA_HOST_NODE_PARAMS h = {NULL, NULL};
  CUgraphNode none_node;
  check_equal(CUDA(cuGraphAddHostNode)(&none_node, graph, NULL, 0, &h), CUDA_ERROR_INVALID_VALUE, "a host node needs a function");
  CUgraphNodeParams any = {.type = CU_GRAPH_NODE_TYPE_KERNEL, .kernel = {.func = spin_function, .gridDimX = 1, .gridDimY = 1, .gridDimZ = 1,
                           .blockDimX = 1, .blockDimY = 1, .blockDimZ = 1, .kernelParams = parameters}};
  check_equal(CUDA(cuGraphAddNode)(&none_node, graph, &b, 1, &any), CUDA_SUCCESS, "nodes of any kind by one call");
  CUgraphEdgeData edge = {.type = 1};
  check_equal(CUDA(cuGraphAddNode_v2)(&none_node, graph, &b, &edge, 1, &any), CUDA_ERROR_NOT_SUPPORTED, "edges of kernels that start early aren't modelled");
  any.type = CU_GRAPH_NODE_TYPE_CONDITIONAL;
  check_equal(CUDA(cuGraphAddNode)(&none_node, graph, NULL, 0, &any), CUDA_ERROR_NOT_SUPPORTED, "nor are conditional nodes");
}

/* ---- memory -------------------------------------------------------------- */

static cuuint64_t graph_bytes(CUgraphMem_attribute which) {
  cuuint64_t value = 12345;
  check_equal(CUDA(cuDeviceGetGraphMemAttribute)(0, which, &value), CUDA_SUCCESS, "asked");
  return value;
}

static CUgraphNode alloc_node(CUgraph graph, const CUgraphNode *on, size_t count, size_t bytes, CUdeviceptr *out) {
  CUgraphNode node = NULL;
  CUDA_MEM_ALLOC_NODE_PARAMS p = {.poolProps = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}}, .bytesize = bytes};
  check_equal(CUDA(cuGraphAddMemAllocNode)(&node, graph, on, count, &p), CUDA_SUCCESS, "an allocation of %zu MiB is a node", bytes >> 20);
  *out = p.dptr;
  return node;
}

static void memory(void) {
  CUstream on, other;
  CUdeviceptr p, q, r;
  CUgraphNode a, f, k, second;
  CUDA(cuStreamCreate)(&on, CU_STREAM_NON_BLOCKING);
  CUDA(cuStreamCreate)(&other, CU_STREAM_NON_BLOCKING);
  uint64_t before = cuda_free_bytes();

  CUgraph graph = graph_new(), copy;
  a = alloc_node(graph, NULL, 0, 100 * MIB, &p);
  k = fill_node(graph, &a, 1, p, 3, 100 * MIB / 4);
  check_equal(CUDA(cuGraphAddMemFreeNode)(&f, graph, &k, 1, p), CUDA_SUCCESS, "and freed in the graph");
  check_equal(CUDA(cuGraphAddMemFreeNode)(&second, graph, &k, 1, p), CUDA_ERROR_INVALID_VALUE, "once");
  check_equal(CUDA(cuGraphAddMemFreeNode)(&second, graph, &k, 1, 0x1234500), CUDA_ERROR_INVALID_VALUE, "and nothing that isn't one");
  second = alloc_node(graph, &f, 1, 90 * MIB, &q);
  check(q == p, "what comes after the free may have its address");
  CUDA(cuGraphAddMemFreeNode)(&k, graph, &second, 1, q);
  check_equal(cuda_free_bytes(), before, "nodes cost the card nothing");
  check_equal(CUDA(cuGraphClone)(&copy, graph), CUDA_ERROR_NOT_SUPPORTED, "such a graph can't be cloned");
  check_equal(CUDA(cuGraphDestroyNode)(f), CUDA_ERROR_NOT_SUPPORTED, "nor its nodes taken out");
  CUgraphExec exec = ready(graph), twice;
  check_equal(CUDA(cuGraphInstantiateWithFlags)(&twice, graph, 0), CUDA_ERROR_INVALID_VALUE, "nor is it instantiated twice");
  check_equal(cuda_free_bytes(), before, "instantiating costs nothing either");
  check_equal(CUDA(cuGraphUpload)(exec, on), CUDA_SUCCESS, "its upload");
  check_equal(before - cuda_free_bytes(), 100 * MIB, "takes what is needed at once");
  check_equal(graph_bytes(CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT), 100 * MIB, "reserved");
  check_equal(graph_bytes(CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT), 100 * MIB, "and in use");
  for (int i = 0; i < 3; i++) check_equal(CUDA(cuGraphLaunch)(exec, on), CUDA_SUCCESS, "launched again and again");
  CUDA(cuStreamSynchronize)(on);
  check_equal(before - cuda_free_bytes(), 100 * MIB, "it takes no more");

  /* a second graph of the same size, in the same stream and beside it */
  CUgraph next = graph_new();
  a = alloc_node(next, NULL, 0, 60 * MIB, &r);
  k = spin_node(next, &a, 1, 5000000, 1);
  CUDA(cuGraphAddMemFreeNode)(&f, next, &k, 1, r);
  CUgraphExec beside = ready(next);
  CUDA(cuGraphLaunch)(beside, on);
  check_equal(before - cuda_free_bytes(), 100 * MIB, "graphs that follow each other share");
  CUDA(cuGraphLaunch)(exec, other);
  check_equal(before - cuda_free_bytes(), 200 * MIB, "graphs that may run at once don't");
  CUDA(cuCtxSynchronize)();
  check_equal(CUDA(cuDeviceGraphMemTrim)(0), CUDA_SUCCESS, "trimmed");
  check_equal(cuda_free_bytes(), before, "all that is not in use is back");
  check_equal(graph_bytes(CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT), 0, "and not reserved any more");
  check_equal(graph_bytes(CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH), 200 * MIB, "the high mark knows");
  cuuint64_t zero = 0, one = 1;
  check_equal(CUDA(cuDeviceSetGraphMemAttribute)(0, CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH, &one), CUDA_ERROR_INVALID_VALUE, "it can't be set");
  CUDA(cuDeviceSetGraphMemAttribute)(0, CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH, &zero);
  check_equal(graph_bytes(CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH), 0, "but cleared");
  check_equal(CUDA(cuGraphLaunch)(beside, on), CUDA_SUCCESS, "a graph that was trimmed is launched");
  CUDA(cuStreamSynchronize)(on);
  check_equal(before - cuda_free_bytes(), 60 * MIB, "and takes it again");
  CUDA(cuGraphExecDestroy)(beside);
  check_equal(graph_bytes(CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT), 0, "destroyed, it uses nothing");
  check_equal(before - cuda_free_bytes(), 60 * MIB, "but what was reserved stays until it is trimmed");
  CUDA(cuGraphExecDestroy)(exec);
  CUDA(cuGraphDestroy)(next);
  CUDA(cuGraphDestroy)(graph);
  CUDA(cuDeviceGraphMemTrim)(0);
  check_equal(cuda_free_bytes(), before, "then it is back");

  /* an allocation that outlives the graph */
  graph = graph_new();
  a = alloc_node(graph, NULL, 0, 10 * MIB, &p);
  fill_node(graph, &a, 1, p, 0xabc, 4);
  CUgraphExec leaves = ready(graph);
  unsigned int word = 0;
  check_equal(CUDA(cuMemcpyDtoH_v2)(&word, p, 4), CUDA_ERROR_INVALID_VALUE, "before the launch there is nothing at its address");
  CUDA(cuGraphLaunch)(leaves, on);
  CUDA(cuStreamSynchronize)(on);
  check(CUDA(cuMemcpyDtoH_v2)(&word, p, 4) == CUDA_SUCCESS && word == 0xabc, "after it what the graph wrote");
  check_equal(before - cuda_free_bytes(), 32 * MIB, "in a piece of 32 MiB");
  check_equal(CUDA(cuGraphLaunch)(leaves, on), CUDA_ERROR_INVALID_VALUE, "while it lives the graph can't be launched again");
  CUDA(cuDeviceGraphMemTrim)(0);
  check_equal(before - cuda_free_bytes(), 32 * MIB, "nor its memory trimmed");
  check_equal(CUDA(cuMemFreeAsync)(p, on), CUDA_SUCCESS, "freed like any memory");
  check_equal(CUDA(cuMemFreeAsync)(p, on), CUDA_ERROR_INVALID_VALUE, "once");
  check_equal(CUDA(cuGraphLaunch)(leaves, on), CUDA_SUCCESS, "it can");
  check_equal(CUDA(cuMemFree_v2)(p), CUDA_SUCCESS, "or so");
  CUDA(cuGraphExecDestroy)(leaves);
  CUgraphExec automatic;
  CUDA(cuGraphInstantiateWithFlags)(&automatic, graph, CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH);
  for (int i = 0; i < 3; i++) check_equal(CUDA(cuGraphLaunch)(automatic, on), CUDA_SUCCESS, "freed by itself at the next launch");
  CUDA(cuStreamSynchronize)(on);
  check_equal(before - cuda_free_bytes(), 32 * MIB, "without growing");
  cuuint64_t flags = 0;
  CUDA(cuGraphExecGetFlags)(automatic, &flags);
  check_equal(flags, CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH, "the flags are kept");
  CUDA(cuGraphExecDestroy)(automatic);
  CUDA(cuGraphDestroy)(graph);
  CUDA(cuDeviceGraphMemTrim)(0);
  check(CUDA(cuMemcpyDtoH_v2)(&word, p, 4) == CUDA_SUCCESS && before - cuda_free_bytes() == 32 * MIB, "the last one outlives graph and all");
  CUDA(cuMemFree_v2)(p);
  CUDA(cuDeviceGraphMemTrim)(0);
  check_equal(cuda_free_bytes(), before, "until it is freed and trimmed");

  /* more than the card has: refused at the launch, and nothing changed */
  graph = graph_new();
  a = alloc_node(graph, NULL, 0, before - 100 * MIB, &p);
  alloc_node(graph, &a, 1, 300 * MIB, &q);
  CUgraphExec huge = ready(graph);
  check_equal(CUDA(cuGraphLaunch)(huge, on), CUDA_ERROR_OUT_OF_MEMORY, "a graph that doesn't fit is refused at its launch");
  CUDA(cuDeviceGraphMemTrim)(0);
  check_equal(cuda_free_bytes(), before, "and holds nothing");
  CUDA(cuGraphExecDestroy)(huge);
  CUDA(cuGraphDestroy)(graph);
}

/* ---- user objects -------------------------------------------------------- */

static void count_up(void *data) { ++*(int *)data; }

static void objects(void) {
  int ended = 0;
  CUuserObject object;
  CUgraph graph = graph_new(), clone;
  CUgraphExec exec;
  check_equal(CUDA(cuUserObjectCreate)(&object, &ended, count_up, 1, CU_USER_OBJECT_NO_DESTRUCTOR_SYNC), CUDA_SUCCESS, "a user object");
  check_equal(CUDA(cuGraphRetainUserObject)(graph, object, 1, CU_GRAPH_USER_OBJECT_MOVE), CUDA_SUCCESS, "given to a graph");
  CUDA(cuGraphClone)(&clone, graph);
  CUDA(cuGraphInstantiateWithFlags)(&exec, graph, 0);
  CUDA(cuGraphDestroy)(graph);
  CUDA(cuGraphDestroy)(clone);
  check_equal(ended, 0, "lives as long as something that was made of it");
  CUDA(cuGraphExecDestroy)(exec);
  check_equal(ended, 1, "and ends once");
  check_equal(CUDA(cuUserObjectRelease)(object, 1), CUDA_ERROR_INVALID_VALUE, "then it is gone");
}

/* ---- in real time -------------------------------------------------------- */

static void note_time(void *data) { *(uint64_t *)data = real_ns(); }

/* Order is all that real time can be held to. */
static void in_real_time(child *self, void *unused) {
  enum { LAUNCHES = 50 };
  static uint64_t called[LAUNCHES];
  (void)unused;
  root_make("--card", "a30", "--seed", "3", NULL);
  CUresult result = start_cuda(0);
  spin_function = kernel("carve_spin");
  CUstream on;
  CUDA(cuStreamCreate)(&on, CU_STREAM_NON_BLOCKING);
  CUgraph graph = graph_new();
  CUgraphNode spin = spin_node(graph, NULL, 0, 300000, 1), visitor;
  CUDA_HOST_NODE_PARAMS h = {note_time, &called[0]};
  CUDA(cuGraphAddHostNode)(&visitor, graph, &spin, 1, &h);
  spin_node(graph, &visitor, 1, 300000, 1);
  CUgraphExec exec = ready(graph);
  uint64_t from = real_ns();
  for (int i = 0; i < LAUNCHES && result == CUDA_SUCCESS; i++) {
    h.userData = &called[i];
    CUDA(cuGraphExecHostNodeSetParams)(exec, visitor, &h);
    result = CUDA(cuGraphLaunch)(exec, on);
  }
  tell(self, (uint64_t)result);
  tell(self, (uint64_t)CUDA(cuStreamSynchronize)(on));
  uint64_t to = real_ns(), least = from;
  bool good = true;
  for (int i = 0; i < LAUNCHES; i++) {
    good &= called[i] >= least + 300000 && called[i] + 300000 <= to;
    least = called[i] + 300000; /* the kernel after it */
  }
  tell(self, good);
  root_remove();
}

int main(void) {
  child c = child_start(in_real_time, NULL);
  check_equal(ask(&c), CUDA_SUCCESS, "in real time: launched");
  check_equal(ask(&c), CUDA_SUCCESS, "and over");
  check_equal(ask(&c), 1, "each function was called between its kernels, in order");
  child_end(&c);
  root_make("--card", "a30x2", "--seed", "3", "--clock", "virtual", NULL);
  check_equal(start_cuda(0), CUDA_SUCCESS, "start");
  spin_function = kernel("carve_spin");
  fill_function = kernel("carve_fill");
  shape();
  times();
  cards();
  work();
  changes();
  memory();
  objects();
  return finish();
}
