/*
 * capture.h - streams that make a graph of what is put into them.
 *
 * A capture is one graph that grows, and the streams that belong to it: the
 * one that it began in, and those that waited for an event recorded in it. A
 * call that would have to know when captured work is done, or that would tie
 * it to work outside, is refused, and the capture is invalid from then on.
 */
#ifndef SOFT_CAPTURE_H
#define SOFT_CAPTURE_H

#include "graph.h"

typedef struct capture capture;

/* Puts an operation into the graph that a stream captures; takes over op. */
CUresult capture_add(stream *on, operation *op);
/* The graph that a stream captures, or NULL. */
CUgraph capture_graph(const stream *on);

/* Nodes that come next in a stream come after these. */
const CUgraphNode *capture_after(const stream *on, size_t *count);
void capture_moved(stream *on, CUgraphNode node);

/* A call that a capturing stream can't take: makes it invalid. */
CUresult capture_refuse(stream *on);
/* The same for all captures of a context; SUCCESS when there is none. */
CUresult capture_refuse_all(const context *ctx);
/* Before an event is looked at or waited for by the host. */
CUresult capture_event_usable(CUevent handle);

CUresult capture_record(stream *on, CUevent handle, bool external);
/* *taken: the wait is part of a capture, or refused for one. */
CUresult capture_wait(stream *on, CUevent handle, bool external, bool *taken);

/* A stream or event is about to go. */
void capture_forget_stream(stream *on);
void capture_forget_event(CUevent handle);

#endif
