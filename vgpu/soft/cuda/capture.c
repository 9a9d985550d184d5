#include "capture.h"

#include <stdlib.h>
#include <string.h>

struct capture {
  uint64_t id;
  CUstreamCaptureMode mode;
  uint64_t thread;          /* that began it */
  stream *origin;
  stream *streams;          /* all that belong to it */
  CUgraph graph;
  bool own_graph;           /* made for it */
  bool invalid;
  CUgraphEdgeData *data;    /* zeros, as long as what the last question was told */
  struct capture *next;
};

static capture *captures;
static uint64_t last_id, last_thread;
static __thread uint64_t own_thread;
static __thread CUstreamCaptureMode own_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

static uint64_t this_thread(void) {
  if (!own_thread) own_thread = ++last_thread;
  return own_thread;
}

static capture *capture_with(uint64_t id) {
  for (capture *c = captures; c; c = c->next)
    if (c->id == id) return c;
  return NULL;
}

/* ---- nodes that come next ------------------------------------------------ */

static bool have(const stream *on, CUgraphNode node) {
  for (size_t i = 0; i < on->after_count; i++)
    if (on->after[i] == node) return true;
  return false;
}

static bool come_after(stream *on, const CUgraphNode *nodes, size_t count) {
  CUgraphNode *grown = realloc(on->after, (on->after_count + count + 1) * sizeof *grown);
  if (!grown) return false;
  on->after = grown;
  for (size_t i = 0; i < count; i++)
    if (!have(on, nodes[i])) on->after[on->after_count++] = nodes[i];
  return true;
}

const CUgraphNode *capture_after(const stream *on, size_t *count) {
  *count = on->after_count;
  return on->after;
}

void capture_moved(stream *on, CUgraphNode node) {
  on->after_count = 0;
  (void)come_after(on, &node, 1); /* there is room for one always */
}

/* ---- beginning and ending ------------------------------------------------ */

static void enter(capture *c, stream *on) {
  on->capture = c;
  on->after_count = 0;
  on->next_captured = c->streams;
  c->streams = on;
}

static void leave(stream *on) {
  for (stream **link = &on->capture->streams; *link; link = &(*link)->next_captured)
    if (*link == on) {
      *link = on->next_captured;
      break;
    }
  on->capture = NULL;
  free(on->after);
  on->after = NULL;
  on->after_count = 0;
}

static void end(capture *c, bool keep_graph) {
  while (c->streams) leave(c->streams);
  c->graph->capture = NULL;
  if (c->own_graph && !keep_graph) graph_free(c->graph);
  for (capture **link = &captures; *link; link = &(*link)->next)
    if (*link == c) {
      *link = c->next;
      break;
    }
  free(c->data);
  free(c);
}

static CUresult begin(CUstream handle, CUgraph graph, const CUgraphNode *on_nodes, size_t count, CUstreamCaptureMode mode, bool per_thread) {
  context *ctx;
  stream *on;
  ENTER();
  CUresult result = context_current(&ctx);
  if (result == CUDA_SUCCESS) result = stream_resolve(ctx, handle, per_thread, &on);
  if (result != CUDA_SUCCESS) LEAVE(result);
  if (mode < CU_STREAM_CAPTURE_MODE_GLOBAL || mode > CU_STREAM_CAPTURE_MODE_RELAXED) LEAVE(CUDA_ERROR_INVALID_VALUE);
  if (on->number == SOFT_LEGACY_STREAM) LEAVE(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  if (on->capture) LEAVE(CUDA_ERROR_ILLEGAL_STATE);
  if (graph && (graph_checked(graph) != CUDA_SUCCESS || graph->capture || graph->inside)) LEAVE(CUDA_ERROR_INVALID_VALUE);
  for (size_t i = 0; i < count; i++)
    if (!graph || !on_nodes || !handle_is(on_nodes[i], HANDLE_NODE) || on_nodes[i]->in != graph) LEAVE(CUDA_ERROR_INVALID_VALUE);
  capture *c = calloc(1, sizeof *c);
  CUgraph into = c ? graph ? graph : graph_new() : NULL;
  if (!into || !come_after(on, on_nodes, 0)) {
    if (into && !graph) graph_free(into);
    free(c);
    LEAVE(CUDA_ERROR_OUT_OF_MEMORY);
  }
  *c = (capture){.id = ++last_id, .mode = mode, .thread = this_thread(), .origin = on, .graph = into, .own_graph = !graph, .next = captures};
  captures = c;
  into->capture = c;
  enter(c, on);
  if (!come_after(on, on_nodes, count)) c->invalid = true;
  LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuStreamBeginCapture(CUstream on) { return begin(on, NULL, NULL, 0, CU_STREAM_CAPTURE_MODE_GLOBAL, false); }
EXPORT CUresult cuStreamBeginCapture_ptsz(CUstream on) { return begin(on, NULL, NULL, 0, CU_STREAM_CAPTURE_MODE_GLOBAL, true); }
EXPORT CUresult cuStreamBeginCapture_v2(CUstream on, CUstreamCaptureMode mode) { return begin(on, NULL, NULL, 0, mode, false); }
EXPORT CUresult cuStreamBeginCapture_v2_ptsz(CUstream on, CUstreamCaptureMode mode) { return begin(on, NULL, NULL, 0, mode, true); }

static CUresult begin_in(CUstream on, CUgraph graph, const CUgraphNode *nodes, const CUgraphEdgeData *data, size_t count, CUstreamCaptureMode mode,
                         bool per_thread) {
  static const CUgraphEdgeData none;
  if (!graph) return CUDA_ERROR_INVALID_VALUE;
  for (size_t i = 0; data && i < count; i++)
    if (memcmp(&data[i], &none, sizeof none) != 0) return CUDA_ERROR_NOT_SUPPORTED;
  return begin(on, graph, nodes, count, mode, per_thread);
}

EXPORT CUresult cuStreamBeginCaptureToGraph(CUstream on, CUgraph graph, const CUgraphNode *nodes, const CUgraphEdgeData *data, size_t count,
                                            CUstreamCaptureMode mode) {
  return begin_in(on, graph, nodes, data, count, mode, false);
}
EXPORT CUresult cuStreamBeginCaptureToGraph_ptsz(CUstream on, CUgraph graph, const CUgraphNode *nodes, const CUgraphEdgeData *data, size_t count,
                                                 CUstreamCaptureMode mode) {
  return begin_in(on, graph, nodes, data, count, mode, true);
}

/* All that other streams of the capture did comes before where its origin is now. */
static bool joined(const capture *c) {
  for (const stream *s = c->streams; s; s = s->next_captured) {
    if (s == c->origin) continue;
    for (size_t i = 0; i < s->after_count; i++) {
      bool before = false;
      for (size_t k = 0; k < c->origin->after_count && !before; k++) before = node_after(c->origin->after[k], s->after[i]);
      if (!before) return false;
    }
  }
  return true;
}

static CUresult finish(CUstream handle, CUgraph *out, bool per_thread) {
  context *ctx;
  stream *on;
  ENTER();
  CUresult result = context_current(&ctx);
  if (result == CUDA_SUCCESS) result = stream_resolve(ctx, handle, per_thread, &on);
  if (result != CUDA_SUCCESS) LEAVE(result);
  if (!out) LEAVE(CUDA_ERROR_INVALID_VALUE);
  capture *c = on->capture;
  if (!c) LEAVE(CUDA_ERROR_ILLEGAL_STATE);
  *out = NULL;
  if (c->origin != on) {
    c->invalid = true;
    LEAVE(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
  }
  if (c->mode != CU_STREAM_CAPTURE_MODE_RELAXED && c->thread != this_thread()) LEAVE(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
  result = c->invalid ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : joined(c) ? CUDA_SUCCESS : CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
  if (result == CUDA_SUCCESS) *out = c->graph;
  end(c, result == CUDA_SUCCESS);
  objects_finish();
  LEAVE(result);
}

EXPORT CUresult cuStreamEndCapture(CUstream on, CUgraph *graph) { return finish(on, graph, false); }
EXPORT CUresult cuStreamEndCapture_ptsz(CUstream on, CUgraph *graph) { return finish(on, graph, true); }

/* ---- what is put into captured streams ----------------------------------- */

CUgraph capture_graph(const stream *on) { return on->capture ? on->capture->graph : NULL; }

CUresult capture_add(stream *on, operation *op) {
  CUgraphNode node;
  CUresult result = node_add(on->capture->graph, on->after, on->after_count, op, &node);
  if (result != CUDA_SUCCESS) {
    on->capture->invalid = true;
    return result;
  }
  capture_moved(on, node);
  return CUDA_SUCCESS;
}

CUresult capture_record(stream *on, CUevent handle, bool external) {
  operation op = {.type = CU_GRAPH_NODE_TYPE_EVENT_RECORD, .ctx = handle->owner, .event = handle};
  if (external) return capture_add(on, &op);
  CUgraphNode *copy = malloc((on->after_count + 1) * sizeof *copy);
  if (!copy) return CUDA_ERROR_OUT_OF_MEMORY;
  if (on->after_count) memcpy(copy, on->after, on->after_count * sizeof *copy);
  capture_forget_event(handle);
  handle->captured_in = on->capture->id;
  handle->captured_after = copy;
  handle->captured_count = on->after_count;
  handle->pending = false;
  return CUDA_SUCCESS;
}

CUresult capture_wait(stream *on, CUevent handle, bool external, bool *taken) {
  *taken = true;
  if (external) {
    operation op = {.type = CU_GRAPH_NODE_TYPE_WAIT_EVENT, .event = handle};
    if (!on->capture) return CUDA_ERROR_INVALID_VALUE; /* the flag is for captures only */
    return capture_add(on, &op);
  }
  if (!handle->captured_in) {
    *taken = on->capture != NULL;
    if (!on->capture) return CUDA_SUCCESS;
    on->capture->invalid = true;
    return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
  }
  capture *of = capture_with(handle->captured_in);
  if (!of) return CUDA_ERROR_CAPTURED_EVENT; /* that capture is over */
  if (of->invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  if (on->capture && on->capture != of) {
    on->capture->invalid = of->invalid = true;
    return CUDA_ERROR_STREAM_CAPTURE_MERGE;
  }
  if (on->number == SOFT_LEGACY_STREAM) {
    of->invalid = true;
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  }
  if (!on->capture) enter(of, on);
  if (come_after(on, handle->captured_after, handle->captured_count)) return CUDA_SUCCESS;
  of->invalid = true;
  return CUDA_ERROR_OUT_OF_MEMORY;
}

void capture_forget_stream(stream *on) {
  capture *c = on->capture;
  if (!c) return;
  c->invalid = true;
  if (c->origin == on) end(c, false); /* nobody could end it any more */
  else leave(on);
}

void capture_forget_event(CUevent handle) {
  free(handle->captured_after);
  handle->captured_after = NULL;
  handle->captured_count = 0;
  handle->captured_in = 0;
}

/* ---- what is forbidden --------------------------------------------------- */

/* A capture that a stream of a context belongs to which waits for the legacy stream. */
static bool blocks(const capture *c, const context *ctx) {
  for (const stream *s = c->streams; s; s = s->next_captured)
    if (s->owner == ctx && !(s->flags & CU_STREAM_NON_BLOCKING)) return true;
  return false;
}

static CUresult legacy_usable(const context *ctx, bool invalidate) {
  CUresult result = CUDA_SUCCESS;
  for (capture *c = captures; c; c = c->next) {
    if (!blocks(c, ctx)) continue;
    if (invalidate) c->invalid = true;
    result = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
  }
  return result;
}

CUresult stream_for_work(context *ctx, CUstream handle, bool per_thread, stream **out) {
  CUresult result = stream_resolve(ctx, handle, per_thread, out);
  if (result != CUDA_SUCCESS || !captures) return result;
  if ((*out)->number == SOFT_LEGACY_STREAM) return legacy_usable((*out)->owner, true);
  return (*out)->capture && (*out)->capture->invalid ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS;
}

bool stream_capturing(const stream *on) { return on->capture != NULL; }

CUresult capture_unsafe(void) {
  CUresult result = CUDA_SUCCESS;
  if (!captures || own_mode == CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_SUCCESS;
  for (capture *c = captures; c; c = c->next) {
    bool own = c->thread == this_thread();
    bool forbids = own ? c->mode != CU_STREAM_CAPTURE_MODE_RELAXED
                       : c->mode == CU_STREAM_CAPTURE_MODE_GLOBAL && own_mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
    if (!forbids) continue;
    c->invalid = true;
    result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  }
  return result;
}

CUresult capture_refuse(stream *on) {
  on->capture->invalid = true;
  return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

CUresult capture_refuse_all(const context *ctx) {
  CUresult result = CUDA_SUCCESS;
  for (capture *c = captures; c; c = c->next)
    for (stream *s = c->streams; s; s = s->next_captured)
      if (s->owner == ctx) result = capture_refuse(s);
  return result;
}

CUresult capture_event_usable(CUevent handle) {
  if (!handle->captured_in) return capture_unsafe();
  capture *c = capture_with(handle->captured_in);
  if (c) c->invalid = true;
  return CUDA_ERROR_CAPTURED_EVENT;
}

EXPORT CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode) {
  ENTER();
  if (!mode || *mode < 0 || *mode > CU_STREAM_CAPTURE_MODE_RELAXED) LEAVE(CUDA_ERROR_INVALID_VALUE);
  CUstreamCaptureMode before = own_mode;
  own_mode = *mode;
  *mode = before;
  LEAVE(CUDA_SUCCESS);
}

/* ---- asking -------------------------------------------------------------- */

static CUresult info(CUstream handle, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph, const CUgraphNode **nodes,
                     const CUgraphEdgeData **data, size_t *count, bool per_thread) {
  context *ctx;
  stream *on;
  ENTER();
  CUresult result = context_current(&ctx);
  if (result == CUDA_SUCCESS) result = stream_resolve(ctx, handle, per_thread, &on);
  if (result == CUDA_SUCCESS && on->number == SOFT_LEGACY_STREAM) result = legacy_usable(on->owner, false);
  if (result != CUDA_SUCCESS) LEAVE(result);
  if (!status) LEAVE(CUDA_ERROR_INVALID_VALUE);
  capture *c = on->capture;
  *status = !c ? CU_STREAM_CAPTURE_STATUS_NONE : c->invalid ? CU_STREAM_CAPTURE_STATUS_INVALIDATED : CU_STREAM_CAPTURE_STATUS_ACTIVE;
  if (*status != CU_STREAM_CAPTURE_STATUS_ACTIVE) c = NULL;
  if (c && data) {
    free(c->data);
    c->data = calloc(on->after_count + 1, sizeof *c->data);
    if (!c->data) LEAVE(CUDA_ERROR_OUT_OF_MEMORY);
  }
  if (id) *id = c ? c->id : 0;
  if (graph) *graph = c ? c->graph : NULL;
  if (nodes) *nodes = c ? on->after : NULL;
  if (data) *data = c ? c->data : NULL;
  if (count) *count = c ? on->after_count : 0;
  LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuStreamIsCapturing(CUstream on, CUstreamCaptureStatus *out) { return info(on, out, NULL, NULL, NULL, NULL, NULL, false); }
EXPORT CUresult cuStreamIsCapturing_ptsz(CUstream on, CUstreamCaptureStatus *out) { return info(on, out, NULL, NULL, NULL, NULL, NULL, true); }
EXPORT CUresult cuStreamGetCaptureInfo(CUstream on, CUstreamCaptureStatus *out, cuuint64_t *id) {
  return info(on, out, id, NULL, NULL, NULL, NULL, false);
}
EXPORT CUresult cuStreamGetCaptureInfo_ptsz(CUstream on, CUstreamCaptureStatus *out, cuuint64_t *id) {
  return info(on, out, id, NULL, NULL, NULL, NULL, true);
}
EXPORT CUresult cuStreamGetCaptureInfo_v2(CUstream on, CUstreamCaptureStatus *out, cuuint64_t *id, CUgraph *graph, const CUgraphNode **nodes,
                                          size_t *count) {
  return info(on, out, id, graph, nodes, NULL, count, false);
}
EXPORT CUresult cuStreamGetCaptureInfo_v2_ptsz(CUstream on, CUstreamCaptureStatus *out, cuuint64_t *id, CUgraph *graph, const CUgraphNode **nodes,
                                               size_t *count) {
  return info(on, out, id, graph, nodes, NULL, count, true);
}
EXPORT CUresult cuStreamGetCaptureInfo_v3(CUstream on, CUstreamCaptureStatus *out, cuuint64_t *id, CUgraph *graph, const CUgraphNode **nodes,
                                          const CUgraphEdgeData **data, size_t *count) {
  return info(on, out, id, graph, nodes, data, count, false);
}
EXPORT CUresult cuStreamGetCaptureInfo_v3_ptsz(CUstream on, CUstreamCaptureStatus *out, cuuint64_t *id, CUgraph *graph, const CUgraphNode **nodes,
                                               const CUgraphEdgeData **data, size_t *count) {
  return info(on, out, id, graph, nodes, data, count, true);
}

static CUresult update(CUstream handle, CUgraphNode *nodes, const CUgraphEdgeData *data, size_t count, unsigned int flags, bool per_thread) {
  static const CUgraphEdgeData none;
  context *ctx;
  stream *on;
  ENTER();
  CUresult result = context_current(&ctx);
  if (result == CUDA_SUCCESS) result = stream_for_work(ctx, handle, per_thread, &on);
  if (result != CUDA_SUCCESS) LEAVE(result);
  if (!on->capture) LEAVE(CUDA_ERROR_ILLEGAL_STATE);
  if (flags > CU_STREAM_SET_CAPTURE_DEPENDENCIES || (count && !nodes)) LEAVE(CUDA_ERROR_INVALID_VALUE);
  for (size_t i = 0; i < count; i++) {
    if (!handle_is(nodes[i], HANDLE_NODE) || nodes[i]->in != on->capture->graph) LEAVE(CUDA_ERROR_INVALID_VALUE);
    if (data && memcmp(&data[i], &none, sizeof none) != 0) LEAVE(CUDA_ERROR_NOT_SUPPORTED);
  }
  size_t before = on->after_count;
  if (flags == CU_STREAM_SET_CAPTURE_DEPENDENCIES) on->after_count = 0;
  if (come_after(on, nodes, count)) LEAVE(CUDA_SUCCESS);
  on->after_count = before;
  LEAVE(CUDA_ERROR_OUT_OF_MEMORY);
}

EXPORT CUresult cuStreamUpdateCaptureDependencies(CUstream on, CUgraphNode *nodes, size_t count, unsigned int flags) {
  return update(on, nodes, NULL, count, flags, false);
}
EXPORT CUresult cuStreamUpdateCaptureDependencies_ptsz(CUstream on, CUgraphNode *nodes, size_t count, unsigned int flags) {
  return update(on, nodes, NULL, count, flags, true);
}
EXPORT CUresult cuStreamUpdateCaptureDependencies_v2(CUstream on, CUgraphNode *nodes, const CUgraphEdgeData *data, size_t count, unsigned int flags) {
  return update(on, nodes, data, count, flags, false);
}
EXPORT CUresult cuStreamUpdateCaptureDependencies_v2_ptsz(CUstream on, CUgraphNode *nodes, const CUgraphEdgeData *data, size_t count,
                                                          unsigned int flags) {
  return update(on, nodes, data, count, flags, true);
}
