/* SPDX-License-Identifier: Apache-2.0 */
/*
 * graphs.h: memory that graphs allocate.
 *
 * A graph's allocations have their addresses when they are put into it, and memory from its first launch on: all
 * together, and from what the driver keeps for the graphs of the device, which is one reserve (reserves.h). What a
 * graph takes at most shows in those addresses, for what isn't needed at the same time has the same ones.
 */
#ifndef CARVE_GRAPHS_H
#define CARVE_GRAPHS_H

#include "driver.h"
#include "state.h"

/* An executable graph was made of a graph. False where it can't be followed for want of memory. */
bool carve_graph_made(const struct carve_driver *d, struct carve_state *s, CUgraphExec exec, CUgraph graph);

/* It is about to be destroyed: its handle may be another one's as soon as it is. False where nothing is known of it. */
bool carve_graph_gone(struct carve_state *s, CUgraphExec exec, struct carve_graph *gone);
/* It wasn't. */
void carve_graph_back(struct carve_state *s, const struct carve_graph *gone);

/* What graphs had on their cards may be gone. */
void carve_graphs_lost(struct carve_state *s);

/* Launches or uploads it, as call does, and charges what that takes. Graphs without memory of their own, in a process
 * that has no others, cost a load and a branch. */
typedef CUresult carve_graph_call(CUgraphExec exec, CUstream stream);
CUresult carve_graph_run(const struct carve_driver *d, CUgraphExec exec, CUstream stream, bool per_thread, carve_graph_call *call);

#endif
