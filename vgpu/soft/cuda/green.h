/*
 * green.h - green contexts: parts of a card's multiprocessors (CUDA 12.4).
 *
 * A green context is a use of the primary one: memory, modules and events are
 * the primary's. Its own are its streams, whose kernels run on its part of the
 * multiprocessors. Its CUcontext is a name that threads can have current.
 */
#ifndef SOFT_GREEN_H
#define SOFT_GREEN_H

#include "driver.h"

struct CUgreenCtx_st {
  context name;               /* name.home is the primary one */
  uint32_t number, first, sm_count;
  stream own;                 /* the default stream of threads that have it current */
  CUgreenCtx next;
};

/* The green context whose name the calling thread has current, or NULL. */
CUgreenCtx green_current(void);
/* The primary context ended, and all parts of it with it. */
void greens_drop(context *primary);

#endif
