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

enum { CU_DEV_RESOURCE_TYPE_SM = 1 };
enum { CU_GREEN_CTX_DEFAULT_STREAM = 1 };
enum { CU_DEV_SM_RESOURCE_SPLIT_IGNORE_SM_COSCHEDULING = 1, CU_DEV_SM_RESOURCE_SPLIT_MAX_POTENTIAL_CLUSTER_SIZE = 2 };

/* As CUDA 12.4 has it, 144 bytes; what is ours in it comes from the driver and goes back to it. */
typedef struct CUdevResource_st {
  int type;
  struct { uint32_t mark, card, first; } own;
  unsigned char padding[92 - 12];
  union {
    struct { unsigned int smCount; } sm;
    unsigned char room[48];
  };
} CUdevResource;
_Static_assert(sizeof(CUdevResource) == 144, "CUdevResource");

typedef struct CUdevResourceDesc_st *CUdevResourceDesc;

CUresult cuDeviceGetDevResource(CUdevice device, CUdevResource *out, int type);
CUresult cuCtxGetDevResource(CUcontext context, CUdevResource *out, int type);
CUresult cuGreenCtxGetDevResource(CUgreenCtx green, CUdevResource *out, int type);
CUresult cuDevSmResourceSplitByCount(CUdevResource *groups, unsigned int *count, const CUdevResource *from, CUdevResource *rest, unsigned int flags,
                                     unsigned int least);
CUresult cuDevResourceGenerateDesc(CUdevResourceDesc *out, CUdevResource *resources, unsigned int count);
CUresult cuGreenCtxRecordEvent(CUgreenCtx green, CUevent event);
CUresult cuGreenCtxWaitEvent(CUgreenCtx green, CUevent event);
CUresult cuGreenCtxStreamCreate(CUstream *out, CUgreenCtx green, unsigned int flags, int priority);
CUresult cuStreamGetGreenCtx(CUstream handle, CUgreenCtx *out);

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
