/* SPDX-License-Identifier: Apache-2.0 */
/*
 * heaps.h: memory that a context sets aside because a program raised a limit (cuCtxSetLimit): stacks, the FIFO of
 * printf, the heap of malloc.
 *
 * What they take as a context begins is in its cost. What is charged is what a limit takes beyond that: a
 * stack for each thread that the card can have resident, FIFO and heap as large as they are said to be, or more where
 * the driver is seen to take more. A heap that the driver makes later, with the first module,
 * is charged from the moment when it is asked for, so that it has its room.
 */
#ifndef CARVE_HEAPS_H
#define CARVE_HEAPS_H

#include "contexts.h"
#include "driver.h"
#include "state.h"

/* Sets a limit that may take memory in the context that is current, and charges it. CUDA_ERROR_OUT_OF_MEMORY, and
 * nothing changed, where there is no room. */
CUresult carve_heap_set(const struct carve_driver *d, struct carve_state *s, const struct carve_place *place, CUlimit limit, size_t value);

#endif
