/* Stream capture: what becomes a node, what is refused in which mode, and what that does to the capture. */
#define _GNU_SOURCE
#include <pthread.h>
#include <string.h>

#include "harness.h"

static CUfunction spin_function, fill_function;
static CUstream on, other; /* streams that don't wait for the legacy one */

static CUresult spin(uint64_t ns, CUstream stream) {
  CUdeviceptr none = 0;
  void *parameters[] = {&ns, &none};
  return CUDA(cuLaunchKernel)(spin_function, 1, 1, 1, 32, 1, 1, 0, stream, parameters, NULL);
}

static CUresult fill(CUdeviceptr words, unsigned int value, uint64_t count, CUstream stream) {
  void *parameters[] = {&words, &value, &count};
  return CUDA(cuLaunchKernel)(fill_function, 1, 1, 1, 32, 1, 1, 0, stream, parameters, NULL);
}

static CUstreamCaptureStatus status(CUstream stream) {
  CUstreamCaptureStatus s = 9;
  CUDA(cuStreamIsCapturing)(stream, &s);
  return s;
}

static void begin(CUstreamCaptureMode mode) { check_equal(CUDA(cuStreamBeginCapture_v2)(on, mode), CUDA_SUCCESS, "capture begins"); }

/* Ends what was made invalid. */
static void end_invalid(const char *what) {
  CUgraph graph = (CUgraph)on;
  check_equal(status(on), CU_STREAM_CAPTURE_STATUS_INVALIDATED, "%s makes the capture invalid", what);
  check_equal(spin(1, on), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "which takes no more work");
  check(CUDA(cuStreamEndCapture)(on, &graph) == CUDA_ERROR_STREAM_CAPTURE_INVALIDATED && !graph, "and ends without a graph");
  check_equal(status(on), CU_STREAM_CAPTURE_STATUS_NONE, "then the stream is as before");
}

static void end_valid(const char *what) {
  CUgraph graph = NULL;
  check_equal(status(on), CU_STREAM_CAPTURE_STATUS_ACTIVE, "%s leaves the capture as it is", what);
  check_equal(CUDA(cuStreamEndCapture)(on, &graph), CUDA_SUCCESS, "and it ends well");
  CUDA(cuGraphDestroy)(graph);
}

static float launch_ms(CUgraph graph) {
  CUgraphExec exec;
  CUevent from, to;
  float ms = -1;
  CUDA(cuEventCreate)(&from, 0);
  CUDA(cuEventCreate)(&to, 0);
  check_equal(CUDA(cuGraphInstantiateWithFlags)(&exec, graph, 0), CUDA_SUCCESS, "instantiated");
  CUDA(cuEventRecord)(from, on);
  check_equal(CUDA(cuGraphLaunch)(exec, on), CUDA_SUCCESS, "launched");
  CUDA(cuEventRecord)(to, on);
  CUDA(cuEventSynchronize)(to);
  CUDA(cuEventElapsedTime)(&ms, from, to);
  CUDA(cuGraphExecDestroy)(exec);
  CUDA(cuEventDestroy_v2)(from);
  CUDA(cuEventDestroy_v2)(to);
  return ms;
}

static size_t count_of(CUgraph graph) {
  size_t count = 0;
  CUDA(cuGraphGetNodes)(graph, NULL, &count);
  return count;
}

/* ---- what is captured ---------------------------------------------------- */

static void what_is_captured(void) {
  static const CUgraphNodeType want[] = {CU_GRAPH_NODE_TYPE_MEMSET, CU_GRAPH_NODE_TYPE_KERNEL, CU_GRAPH_NODE_TYPE_MEMCPY, CU_GRAPH_NODE_TYPE_KERNEL};
  static unsigned int host[4];
  CUdeviceptr a;
  CUgraph graph;
  CUgraphNode nodes[8];
  CUDA(cuMemAlloc_v2)(&a, 16);
  CUDA(cuMemsetD32_v2)(a, 1, 4);
  check_equal(CUDA(cuStreamBeginCapture)(on), CUDA_SUCCESS, "capture in the first form");
  check_equal(status(on), CU_STREAM_CAPTURE_STATUS_ACTIVE, "is on");
  check_equal(CUDA(cuStreamBeginCapture_v2)(on, 0), CUDA_ERROR_ILLEGAL_STATE, "once");
  check_equal(CUDA(cuMemsetD32Async)(a, 7, 4, on), CUDA_SUCCESS, "a fill");
  check_equal(fill(a, 8, 2, on), CUDA_SUCCESS, "a kernel");
  check_equal(CUDA(cuMemcpyDtoHAsync_v2)(host, a, 16, on), CUDA_SUCCESS, "a copy");
  check_equal(spin(3000000, on), CUDA_SUCCESS, "and another kernel are taken");
  CUDA(cuStreamEndCapture)(on, &graph);
  size_t count = 8;
  CUDA(cuGraphGetNodes)(graph, nodes, &count);
  check_equal(count, 4, "each is a node");
  for (size_t i = 0; i < count; i++) {
    CUgraphNodeType type;
    CUgraphNode before = NULL;
    size_t one = 1;
    CUDA(cuGraphNodeGetType)(nodes[i], &type);
    CUDA(cuGraphNodeGetDependencies)(nodes[i], &before, &one);
    check(type == want[i] && (i ? before == nodes[i - 1] : one == 0), "node %zu is the one, after the one before it", i);
  }
  unsigned int now[4] = {0};
  CUDA(cuMemcpyDtoH_v2)(now, a, 16);
  check(now[0] == 1 && host[0] == 0, "and none was done");
  check(launch_ms(graph) >= 3.0f, "launched, it takes its time");
  check(host[0] == 8 && host[3] == 7, "and does its work");
  CUDA(cuGraphDestroy)(graph);

  /* a launch of a graph is a child graph; memory is the graph's */
  CUDA(cuStreamBeginCapture_v2)(on, CU_STREAM_CAPTURE_MODE_GLOBAL);
  spin(1000000, on);
  CUDA(cuStreamEndCapture)(on, &graph);
  CUgraphExec exec;
  CUDA(cuGraphInstantiateWithFlags)(&exec, graph, 0);
  CUgraph outer;
  CUdeviceptr p = 0, foreign;
  CUDA(cuMemAllocAsync)(&foreign, 100, on);
  uint64_t before = cuda_free_bytes();
  begin(CU_STREAM_CAPTURE_MODE_GLOBAL);
  check_equal(CUDA(cuGraphLaunch)(exec, on), CUDA_SUCCESS, "a graph's launch is captured");
  check(CUDA(cuMemAllocAsync)(&p, 40 * MIB, on) == CUDA_SUCCESS && p, "an allocation, with its address");
  fill(p, 5, 100, on);
  check_equal(CUDA(cuMemFreeAsync)(foreign, on), CUDA_ERROR_INVALID_VALUE, "memory from outside can't be freed in a capture");
  check_equal(CUDA(cuMemFreeAsync)(p, on), CUDA_SUCCESS, "its own can");
  check_equal(CUDA(cuStreamEndCapture)(on, &outer), CUDA_SUCCESS, "and ends");
  count = 8;
  CUDA(cuGraphGetNodes)(outer, nodes, &count);
  CUgraphNodeType first, second, last;
  CUDA(cuGraphNodeGetType)(nodes[0], &first);
  CUDA(cuGraphNodeGetType)(nodes[1], &second);
  CUDA(cuGraphNodeGetType)(nodes[3], &last);
  check(count == 4 && first == CU_GRAPH_NODE_TYPE_GRAPH && second == CU_GRAPH_NODE_TYPE_MEM_ALLOC && last == CU_GRAPH_NODE_TYPE_MEM_FREE,
        "a child graph, an allocation, a kernel, a free");
  check_equal(cuda_free_bytes(), before, "so far it costs nothing");
  check(launch_ms(outer) >= 1.0f, "it runs");
  check_equal(before - cuda_free_bytes(), 40 * MIB, "and reserves");
  CUDA(cuDeviceGraphMemTrim)(0);
  check_equal(cuda_free_bytes(), before, "until it is trimmed");
  CUDA(cuGraphDestroy)(outer);
  CUDA(cuGraphDestroy)(graph);
  CUDA(cuGraphExecDestroy)(exec);

  /* into a graph that there is */
  CUgraph grown;
  CUgraphNode root, from;
  CUDA(cuGraphCreate)(&grown, 0);
  CUDA(cuGraphAddEmptyNode)(&root, grown, NULL, 0);
  check_equal(CUDA(cuStreamBeginCaptureToGraph)(on, grown, &root, NULL, 1, CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_SUCCESS, "capture into a graph");
  spin(1000000, on);
  CUgraphExec early;
  check_equal(CUDA(cuGraphInstantiateWithFlags)(&early, grown, 0), CUDA_ERROR_ILLEGAL_STATE, "that can't be instantiated meanwhile");
  check(CUDA(cuStreamEndCapture)(on, &graph) == CUDA_SUCCESS && graph == grown, "it is the same at the end");
  count = 8;
  CUDA(cuGraphGetNodes)(grown, nodes, &count);
  size_t one = 1;
  CUDA(cuGraphNodeGetDependencies)(nodes[1], &from, &one);
  check(count == 2 && from == root, "with what was captured after what was named");
  CUDA(cuGraphDestroy)(grown);
  check_equal(CUDA(cuStreamBeginCapture_v2)(NULL, 0), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "the legacy stream can't be captured");
  check_equal(CUDA(cuStreamBeginCapture_v2)(on, 3), CUDA_ERROR_INVALID_VALUE, "no such mode");
  check_equal(CUDA(cuStreamEndCapture)(on, &graph), CUDA_ERROR_ILLEGAL_STATE, "nothing to end");
  check_equal(CUDA(cuStreamBeginCapture_v2)(CU_STREAM_PER_THREAD, 0), CUDA_SUCCESS, "a thread's own stream can");
  check_equal(spin(1000, CU_STREAM_PER_THREAD), CUDA_SUCCESS, "takes work");
  check(CUDA(cuStreamEndCapture_ptsz)(NULL, &graph) == CUDA_SUCCESS && count_of(graph) == 1, "and ends under its other name");
  CUDA(cuGraphDestroy)(graph);
}

/* ---- forks and joins ----------------------------------------------------- */

static void forks(void) {
  CUevent fork, join, outside, never;
  CUgraph graph = NULL, known;
  CUstreamCaptureStatus s;
  cuuint64_t id = 0, id_other = 0;
  const CUgraphNode *after;
  const CUgraphEdgeData *data;
  size_t count;
  CUDA(cuEventCreate)(&fork, CU_EVENT_DISABLE_TIMING);
  CUDA(cuEventCreate)(&join, CU_EVENT_DISABLE_TIMING);
  CUDA(cuEventCreate)(&outside, 0);
  CUDA(cuEventCreate)(&never, 0);

  begin(CU_STREAM_CAPTURE_MODE_GLOBAL);
  spin(1000000, on);
  CUDA(cuEventRecord)(fork, on);
  check_equal(CUDA(cuStreamWaitEvent)(other, fork, 0), CUDA_SUCCESS, "a stream that waits for a captured event");
  check_equal(status(other), CU_STREAM_CAPTURE_STATUS_ACTIVE, "joins the capture");
  CUDA(cuStreamGetCaptureInfo)(on, &s, &id);
  check_equal(CUDA(cuStreamGetCaptureInfo_v3)(other, &s, &id_other, &known, &after, &data, &count), CUDA_SUCCESS, "asked about");
  check(id == id_other && id && known && count == 1 && data[0].type == 0, "it is the same, and says what comes before");
  spin(3000000, other);
  spin(2000000, on);
  CUDA(cuEventRecord)(join, other);
  CUDA(cuStreamWaitEvent)(on, join, 0);
  CUDA(cuStreamGetCaptureInfo_v2)(on, &s, NULL, NULL, &after, &count);
  check_equal(count, 2, "after the join both come before");
  spin(1000000, on);
  check_equal(CUDA(cuStreamEndCapture)(other, &graph), CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, "it isn't ended in a stream that joined");
  end_invalid("that");
  check_equal(status(other), CU_STREAM_CAPTURE_STATUS_NONE, "in all of its streams");

  begin(CU_STREAM_CAPTURE_MODE_GLOBAL);
  spin(1000000, on);
  CUDA(cuEventRecord)(fork, on);
  CUDA(cuStreamWaitEvent)(other, fork, 0);
  spin(3000000, other);
  spin(2000000, on);
  CUDA(cuEventRecord)(join, other);
  CUDA(cuStreamWaitEvent)(on, join, 0);
  spin(1000000, on);
  check_equal(CUDA(cuStreamEndCapture)(on, &graph), CUDA_SUCCESS, "a fork that was joined");
  check(count_of(graph) == 4 && launch_ms(graph) == 5.0f, "runs side by side when it is launched");
  check_equal(status(other), CU_STREAM_CAPTURE_STATUS_NONE, "and the other stream is free");
  CUDA(cuGraphDestroy)(graph);
  check_equal(CUDA(cuEventQuery)(join), CUDA_ERROR_CAPTURED_EVENT, "an event recorded in a capture is none to ask about, even later");
  check_equal(CUDA(cuStreamWaitEvent)(other, join, 0), CUDA_ERROR_CAPTURED_EVENT, "nor to wait for");
  CUDA(cuEventRecord)(join, other);
  check_equal(CUDA(cuEventQuery)(join), CUDA_SUCCESS, "until it is recorded anew");

  begin(CU_STREAM_CAPTURE_MODE_GLOBAL);
  CUDA(cuEventRecord)(fork, on);
  CUDA(cuStreamWaitEvent)(other, fork, 0);
  spin(1000, other);
  check(CUDA(cuStreamEndCapture)(on, &graph) == CUDA_ERROR_STREAM_CAPTURE_UNJOINED && !graph, "a fork that wasn't joined is none");
  check_equal(status(other), CU_STREAM_CAPTURE_STATUS_NONE, "and is over all the same");

  CUDA(cuEventRecord)(outside, other);
  begin(CU_STREAM_CAPTURE_MODE_RELAXED);
  check_equal(CUDA(cuStreamWaitEvent)(on, outside, 0), CUDA_ERROR_STREAM_CAPTURE_ISOLATION, "waiting for what is outside");
  end_invalid("that");
  begin(CU_STREAM_CAPTURE_MODE_RELAXED);
  check_equal(CUDA(cuStreamWaitEvent)(on, outside, CU_EVENT_WAIT_EXTERNAL), CUDA_SUCCESS, "as an external event it is a node");
  check_equal(CUDA(cuEventRecordWithFlags)(never, on, CU_EVENT_RECORD_EXTERNAL), CUDA_SUCCESS, "so is an external record");
  CUDA(cuStreamEndCapture)(on, &graph);
  check_equal(count_of(graph), 2, "two nodes");
  CUDA(cuGraphDestroy)(graph);
  check_equal(CUDA(cuEventRecordWithFlags)(never, on, CU_EVENT_RECORD_EXTERNAL), CUDA_ERROR_INVALID_VALUE, "outside of a capture the flag means nothing");

  /* two captures stay two */
  begin(CU_STREAM_CAPTURE_MODE_RELAXED);
  CUDA(cuEventRecord)(fork, on);
  check_equal(CUDA(cuStreamBeginCapture_v2)(other, CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_SUCCESS, "a second capture");
  check_equal(CUDA(cuStreamWaitEvent)(other, fork, 0), CUDA_ERROR_STREAM_CAPTURE_MERGE, "can't be merged with the first");
  check_equal(CUDA(cuStreamEndCapture)(other, &graph), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "it is invalid");
  end_invalid("that");

  /* by hand */
  begin(CU_STREAM_CAPTURE_MODE_RELAXED);
  spin(1000000, on);
  CUDA(cuStreamGetCaptureInfo_v2)(on, &s, NULL, &known, &after, &count);
  CUgraphNode own, first = after[0];
  CUDA(cuGraphAddEmptyNode)(&own, known, &first, 1);
  check_equal(CUDA(cuStreamUpdateCaptureDependencies)(on, &own, 1, CU_STREAM_SET_CAPTURE_DEPENDENCIES), CUDA_SUCCESS, "nodes of one's own");
  spin(1000000, on);
  CUDA(cuStreamEndCapture)(on, &graph);
  count = 3;
  CUgraphNode nodes[3], before = NULL;
  CUDA(cuGraphGetNodes)(graph, nodes, &count);
  size_t one = 1;
  CUDA(cuGraphNodeGetDependencies)(nodes[2], &before, &one);
  check(count == 3 && before == own, "come between");
  CUDA(cuGraphDestroy)(graph);
  check_equal(CUDA(cuStreamUpdateCaptureDependencies)(on, &own, 1, 0), CUDA_ERROR_ILLEGAL_STATE, "not without a capture");

  /* a stream that goes in the middle */
  CUstream gone;
  CUDA(cuStreamCreate)(&gone, CU_STREAM_NON_BLOCKING);
  begin(CU_STREAM_CAPTURE_MODE_RELAXED);
  CUDA(cuEventRecord)(fork, on);
  CUDA(cuStreamWaitEvent)(gone, fork, 0);
  CUDA(cuStreamDestroy_v2)(gone);
  end_invalid("a stream that is destroyed");
  CUDA(cuStreamCreate)(&gone, CU_STREAM_NON_BLOCKING);
  CUDA(cuStreamBeginCapture_v2)(gone, CU_STREAM_CAPTURE_MODE_GLOBAL);
  CUDA(cuStreamDestroy_v2)(gone);
  CUdeviceptr p;
  check(CUDA(cuMemAlloc_v2)(&p, 100) == CUDA_SUCCESS && CUDA(cuMemFree_v2)(p) == CUDA_SUCCESS, "the stream that it began in takes the capture with it");
}

/* ---- what is forbidden --------------------------------------------------- */

typedef CUresult (*call)(void);

static CUresult allocate(void) {
  CUdeviceptr p;
  CUresult result = CUDA(cuMemAlloc_v2)(&p, 100);
  if (result == CUDA_SUCCESS) CUDA(cuMemFree_v2)(p);
  return result;
}
static CUresult page_lock(void) {
  void *p;
  CUresult result = CUDA(cuMemHostAlloc)(&p, 100, 0);
  if (result == CUDA_SUCCESS) CUDA(cuMemFreeHost)(p);
  return result;
}
static CUresult managed(void) {
  CUdeviceptr p;
  CUresult result = CUDA(cuMemAllocManaged)(&p, 100, CU_MEM_ATTACH_GLOBAL);
  if (result == CUDA_SUCCESS) CUDA(cuMemFree_v2)(p);
  return result;
}
static CUresult load(void) {
  CUmodule module;
  CUresult result = CUDA(cuModuleLoadData)(&module, kernel_text);
  if (result == CUDA_SUCCESS) CUDA(cuModuleUnload)(module);
  return result;
}
static CUevent idle_event;
static CUresult query_event(void) { return CUDA(cuEventQuery)(idle_event); }
static CUresult wait_event(void) { return CUDA(cuEventSynchronize)(idle_event); }
static CUresult query_other(void) { return CUDA(cuStreamQuery)(other); }
static CUresult wait_other(void) { return CUDA(cuStreamSynchronize)(other); }
static CUresult copy_now(void) {
  static unsigned int word;
  static CUdeviceptr at;
  if (!at) return CUDA(cuMemAlloc_v2)(&at, 4);
  return CUDA(cuMemcpyDtoH_v2)(&word, at, 4);
}

static const struct {
  const char *name;
  call make;
} unsafe[] = {{"cuMemAlloc", allocate},       {"cuMemHostAlloc", page_lock},     {"cuMemAllocManaged", managed},        {"cuModuleLoadData", load},
              {"cuEventQuery", query_event},  {"cuEventSynchronize", wait_event}, {"cuStreamQuery of another", query_other},
              {"cuStreamSynchronize of another", wait_other},                     {"cuMemcpyDtoH", copy_now}};

/* In a thread of its own: makes all the calls, in a mode, and says what came of them. */
typedef struct {
  CUstreamCaptureMode mode;
  CUcontext ctx;
  CUresult results[sizeof unsafe / sizeof unsafe[0]];
} visitor;

static void *visit(void *data) {
  visitor *v = data;
  CUstreamCaptureMode mode = v->mode;
  CUDA(cuCtxSetCurrent)(v->ctx);
  CUDA(cuThreadExchangeStreamCaptureMode)(&mode);
  for (size_t i = 0; i < sizeof unsafe / sizeof unsafe[0]; i++) v->results[i] = unsafe[i].make();
  return NULL;
}

static bool others_may(CUstreamCaptureMode mode) {
  pthread_t thread;
  visitor v = {.mode = mode};
  bool may = true, may_not = true;
  CUDA(cuCtxGetCurrent)(&v.ctx);
  if (pthread_create(&thread, NULL, visit, &v) != 0) return false;
  pthread_join(thread, NULL);
  for (size_t i = 0; i < sizeof unsafe / sizeof unsafe[0]; i++) {
    may &= v.results[i] == CUDA_SUCCESS;
    may_not &= v.results[i] == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  }
  check(may || may_not, "all or none of the unsafe calls go through in another thread");
  return may;
}

static void modes(void) {
  CUgraph graph;
  CUDA(cuEventCreate)(&idle_event, 0);
  CUDA(cuEventRecord)(idle_event, other);
  copy_now(); /* its memory */
  for (size_t i = 0; i < sizeof unsafe / sizeof unsafe[0]; i++) {
    begin(CU_STREAM_CAPTURE_MODE_GLOBAL);
    check_equal(unsafe[i].make(), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "%s in a global capture", unsafe[i].name);
    end_invalid(unsafe[i].name);
    begin(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
    check_equal(unsafe[i].make(), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "%s in a thread's capture", unsafe[i].name);
    end_invalid(unsafe[i].name);
    begin(CU_STREAM_CAPTURE_MODE_RELAXED);
    check_equal(unsafe[i].make(), CUDA_SUCCESS, "%s in a relaxed capture", unsafe[i].name);
    end_valid(unsafe[i].name);
    begin(CU_STREAM_CAPTURE_MODE_GLOBAL);
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    CUDA(cuThreadExchangeStreamCaptureMode)(&mode);
    check(mode == CU_STREAM_CAPTURE_MODE_GLOBAL && unsafe[i].make() == CUDA_SUCCESS, "%s by a thread that is relaxed", unsafe[i].name);
    CUDA(cuThreadExchangeStreamCaptureMode)(&mode);
    check_equal(mode, CU_STREAM_CAPTURE_MODE_RELAXED, "its mode is given back");
    end_valid(unsafe[i].name);
  }

  begin(CU_STREAM_CAPTURE_MODE_GLOBAL);
  check(others_may(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL), "a thread that minds its own captures only is free");
  check(others_may(CU_STREAM_CAPTURE_MODE_RELAXED), "so is a relaxed one");
  check_equal(status(on), CU_STREAM_CAPTURE_STATUS_ACTIVE, "and leaves the capture alone");
  check(!others_may(CU_STREAM_CAPTURE_MODE_GLOBAL), "one as threads are from the start isn't while a global capture is open");
  end_invalid("another thread's call");
  begin(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
  check(others_may(CU_STREAM_CAPTURE_MODE_GLOBAL), "other threads don't mind a capture that is a thread's own");
  end_valid("another thread's call");

  /* what conflicts in every mode */
  begin(CU_STREAM_CAPTURE_MODE_RELAXED);
  check_equal(CUDA(cuStreamSynchronize)(on), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "waiting for the captured stream");
  end_invalid("that");
  begin(CU_STREAM_CAPTURE_MODE_RELAXED);
  check_equal(CUDA(cuStreamQuery)(on), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "asking after it");
  end_invalid("that");
  begin(CU_STREAM_CAPTURE_MODE_RELAXED);
  check_equal(CUDA(cuCtxSynchronize)(), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "waiting for the whole context");
  end_invalid("that");
  CUevent captured;
  CUDA(cuEventCreate)(&captured, 0);
  begin(CU_STREAM_CAPTURE_MODE_RELAXED);
  CUDA(cuEventRecord)(captured, on);
  check_equal(CUDA(cuEventSynchronize)(captured), CUDA_ERROR_CAPTURED_EVENT, "waiting for a captured event");
  end_invalid("that");

  /* the thread that may end it */
  begin(CU_STREAM_CAPTURE_MODE_RELAXED);
  (void)graph;
  end_valid("nothing");
}

/* ---- the legacy stream --------------------------------------------------- */

static void legacy(void) {
  CUstream blocking;
  CUgraph graph = NULL;
  CUstreamCaptureStatus s;
  unsigned int word;
  CUdeviceptr p;
  CUDA(cuMemAlloc_v2)(&p, 4);
  CUDA(cuStreamCreate)(&blocking, CU_STREAM_DEFAULT);
  begin(CU_STREAM_CAPTURE_MODE_GLOBAL);
  check_equal(spin(1000, NULL), CUDA_SUCCESS, "the legacy stream has nothing to do with a stream that doesn't wait for it");
  end_valid("a launch there");
  for (int mode = 0; mode < 3; mode++) {
    CUDA(cuStreamBeginCapture_v2)(blocking, mode);
    check_equal(CUDA(cuStreamIsCapturing)(NULL, &s), CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, "with one that does it can't be asked about");
    CUDA(cuStreamIsCapturing)(blocking, &s);
    check_equal(s, CU_STREAM_CAPTURE_STATUS_ACTIVE, "which does no harm");
    check_equal(spin(1000, NULL), CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, "a launch into it would depend on the capture, mode %d", mode);
    check_equal(CUDA(cuStreamEndCapture)(blocking, &graph), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "and has made it invalid");
    CUDA(cuStreamBeginCapture_v2)(blocking, mode);
    check_equal(CUDA(cuMemcpyDtoH_v2)(&word, p, 4), CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, "so would a copy");
    CUDA(cuStreamEndCapture)(blocking, &graph);
    CUDA(cuStreamBeginCapture_v2)(blocking, mode);
    check_equal(CUDA(cuStreamSynchronize)(NULL), CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, "or a wait");
    CUDA(cuStreamEndCapture)(blocking, &graph);
  }
  check_equal(spin(1000, NULL), CUDA_SUCCESS, "afterwards all is as before");
  CUDA(cuCtxSynchronize)();
}

/* ---- another thread ------------------------------------------------------ */

static void *end_elsewhere(void *data) {
  CUgraph graph = NULL;
  CUcontext ctx = data;
  CUDA(cuCtxSetCurrent)(ctx);
  CUresult result = CUDA(cuStreamEndCapture)(on, &graph);
  if (result == CUDA_SUCCESS) CUDA(cuGraphDestroy)(graph);
  return (void *)(uintptr_t)result;
}

static CUresult ended_elsewhere(void) {
  pthread_t thread;
  void *result = NULL;
  CUcontext ctx;
  CUDA(cuCtxGetCurrent)(&ctx);
  if (pthread_create(&thread, NULL, end_elsewhere, ctx) != 0) return CUDA_ERROR_UNKNOWN;
  pthread_join(thread, &result);
  return (CUresult)(uintptr_t)result;
}

static void threads(void) {
  begin(CU_STREAM_CAPTURE_MODE_GLOBAL);
  check_equal(ended_elsewhere(), CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD, "a capture ends in the thread that began it");
  end_valid("that");
  begin(CU_STREAM_CAPTURE_MODE_RELAXED);
  check_equal(ended_elsewhere(), CUDA_SUCCESS, "a relaxed one in any");
}

int main(void) {
  root_make("--card", "a30", "--seed", "3", "--clock", "virtual", NULL);
  check_equal(start_cuda(0), CUDA_SUCCESS, "start");
  spin_function = kernel("carve_spin");
  fill_function = kernel("carve_fill");
  CUDA(cuStreamCreate)(&on, CU_STREAM_NON_BLOCKING);
  CUDA(cuStreamCreate)(&other, CU_STREAM_NON_BLOCKING);
  what_is_captured();
  forks();
  modes();
  legacy();
  threads();
  CUcontext ctx;
  CUDA(cuCtxCreate_v2)(&ctx, 0, 0);
  CUstream there;
  CUDA(cuStreamCreate)(&there, CU_STREAM_NON_BLOCKING);
  CUDA(cuStreamBeginCapture_v2)(there, CU_STREAM_CAPTURE_MODE_GLOBAL);
  check_equal(CUDA(cuCtxDestroy_v2)(ctx), CUDA_SUCCESS, "a context goes with what is captured in it");
  check_equal(allocate(), CUDA_SUCCESS, "and forbids nothing any more");
  return finish();
}
