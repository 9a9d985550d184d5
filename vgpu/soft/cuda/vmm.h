/* vmm.h - physical handles, for what else uses them (multicast.c). All under the process lock. */
#ifndef SOFT_VMM_H
#define SOFT_VMM_H

#include "shared.h"

typedef struct physical {
  CUmemGenericAllocationHandle name;
  CUmemAllocationProp property;
  uint32_t card;
  uint64_t bytes;
  int file;
  uint64_t file_offset;
  shared_ref shared;      /* made to be shared, or imported */
  unsigned int references, maps, binds;
  struct multicast *multicast; /* no memory at all, but what is bound to it */
  struct physical *next;
} physical;

/* The handle of a name that has not been released, NULL for any other. */
physical *physical_named(CUmemGenericAllocationHandle name);
/* The handle that is mapped at an address, and where in it. */
physical *physical_at(CUdeviceptr pointer, uint64_t *offset);
/* A handle for a multicast object, of which it becomes the owner. */
bool physical_for_multicast(struct multicast *object, uint64_t bytes, CUmemGenericAllocationHandle *out);
void multicast_delete(struct multicast *gone);
/* Cards of compute capability 9 or later behind switches. */
bool multicast_supported(uint32_t card);
/* Frees a handle that nothing refers to any more. */
void physical_let_go(physical *p);

#endif
