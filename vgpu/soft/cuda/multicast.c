/*
 * multicast.c - multicast objects: which memory of which cards is bound to them.
 *
 * An object costs no memory of a card. What is bound stays, and stays charged,
 * until it is unbound or the object goes, however often it is released before.
 * Objects can't be given to other processes here, so all devices are added by
 * one; binding before they all are there, which would wait for others, is
 * refused. Mapping an object works, but shows no bytes: no kernel here could
 * write to all cards through it.
 */
#include <stdlib.h>

#include "../state/ledger.h"
#include "vmm.h"

enum { RECOMMENDED_BYTES = 512 << 20 };

typedef struct bound {
  physical *memory;
  uint64_t offset, bytes;
  struct bound *next;
} bound;

struct multicast {
  unsigned int wanted;
  uint32_t cards;  /* a bit per card */
  bound *bounds;
};

bool multicast_supported(uint32_t card) {
  const soft_card_facts *facts = &soft_card_at(&the_driver.region, card)->facts;
  return facts->cc_major >= 9 && facts->link_count && facts->link_kind[0] == SOFT_LINK_SWITCH;
}

static bool any_supports(void) {
  for (uint32_t i = 0; i < the_driver.device_count; i++)
    if (multicast_supported(the_driver.cards[i])) return true;
  return false;
}

static CUresult usable(const CUmulticastObjectProp *property) {
  if (!any_supports()) return CUDA_ERROR_NOT_SUPPORTED;
  if (!property || !property->numDevices || property->flags) return CUDA_ERROR_INVALID_VALUE;
  return property->handleTypes ? CUDA_ERROR_NOT_SUPPORTED : CUDA_SUCCESS;
}

static physical *object_named(CUmemGenericAllocationHandle handle) {
  physical *p = physical_named(handle);
  return p && p->multicast ? p : NULL;
}

static void unbind(bound **link) {
  bound *gone = *link;
  *link = gone->next;
  gone->memory->binds--;
  physical_let_go(gone->memory);
  free(gone);
}

void multicast_delete(struct multicast *gone) {
  while (gone->bounds) unbind(&gone->bounds);
  free(gone);
}

EXPORT CUresult cuMulticastGetGranularity(size_t *granularity, const CUmulticastObjectProp *property, int option) {
  ENTER();
  CUresult result = usable(property);
  if (result != CUDA_SUCCESS) LEAVE(result);
  if (!granularity || option < 0 || option > CU_MULTICAST_GRANULARITY_RECOMMENDED) LEAVE(CUDA_ERROR_INVALID_VALUE);
  *granularity = option == CU_MULTICAST_GRANULARITY_MINIMUM ? SOFT_PAGE_BYTES : RECOMMENDED_BYTES;
  LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuMulticastCreate(CUmemGenericAllocationHandle *handle, const CUmulticastObjectProp *property) {
  ENTER();
  CUresult result = usable(property);
  if (result != CUDA_SUCCESS) LEAVE(result);
  if (!handle || !property->size || property->size % SOFT_PAGE_BYTES) LEAVE(CUDA_ERROR_INVALID_VALUE);
  struct multicast *fresh = calloc(1, sizeof *fresh);
  if (!fresh) LEAVE(CUDA_ERROR_OUT_OF_MEMORY);
  fresh->wanted = property->numDevices;
  if (!physical_for_multicast(fresh, property->size, handle)) {
    free(fresh);
    LEAVE(CUDA_ERROR_OUT_OF_MEMORY);
  }
  LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuMulticastAddDevice(CUmemGenericAllocationHandle handle, CUdevice device) {
  ENTER();
  physical *p = object_named(handle);
  if (!p) LEAVE(CUDA_ERROR_INVALID_VALUE);
  if (device < 0 || (uint32_t)device >= the_driver.device_count) LEAVE(CUDA_ERROR_INVALID_DEVICE);
  uint32_t card = the_driver.cards[device];
  if (!multicast_supported(card)) LEAVE(CUDA_ERROR_NOT_SUPPORTED);
  if (p->multicast->cards >> card & 1 || (unsigned int)__builtin_popcount(p->multicast->cards) >= p->multicast->wanted) LEAVE(CUDA_ERROR_INVALID_VALUE);
  p->multicast->cards |= 1u << card;
  LEAVE(CUDA_SUCCESS);
}

static CUresult bind(physical *object, size_t offset, physical *memory, size_t memory_offset, size_t bytes, unsigned long long flags) {
  if (!object || !memory || memory->multicast || flags || !bytes || (offset | memory_offset | bytes) % SOFT_PAGE_BYTES) return CUDA_ERROR_INVALID_VALUE;
  struct multicast *m = object->multicast;
  if (offset > object->bytes || bytes > object->bytes - offset || memory_offset > memory->bytes || bytes > memory->bytes - memory_offset)
    return CUDA_ERROR_INVALID_VALUE;
  if (memory->property.location.type != CU_MEM_LOCATION_TYPE_DEVICE || !(m->cards >> memory->card & 1)) return CUDA_ERROR_INVALID_VALUE;
  if ((unsigned int)__builtin_popcount(m->cards) < m->wanted) return CUDA_ERROR_NOT_READY;
  for (const bound *b = m->bounds; b; b = b->next)
    if (b->memory->card == memory->card && offset < b->offset + b->bytes && b->offset < offset + bytes) return CUDA_ERROR_INVALID_VALUE;
  bound *fresh = malloc(sizeof *fresh);
  if (!fresh) return CUDA_ERROR_OUT_OF_MEMORY;
  *fresh = (bound){memory, offset, bytes, m->bounds};
  m->bounds = fresh;
  memory->binds++;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMulticastBindMem(CUmemGenericAllocationHandle handle, size_t offset, CUmemGenericAllocationHandle memory, size_t from, size_t bytes,
                                   unsigned long long flags) {
  ENTER();
  LEAVE(bind(object_named(handle), offset, physical_named(memory), from, bytes, flags));
}

EXPORT CUresult cuMulticastBindAddr(CUmemGenericAllocationHandle handle, size_t offset, CUdeviceptr pointer, size_t bytes, unsigned long long flags) {
  uint64_t from = 0;
  ENTER();
  physical *memory = physical_at(pointer, &from);
  LEAVE(bind(object_named(handle), offset, memory, from, bytes, flags));
}

EXPORT CUresult cuMulticastUnbind(CUmemGenericAllocationHandle handle, CUdevice device, size_t offset, size_t bytes) {
  ENTER();
  physical *p = object_named(handle);
  if (!p || !bytes) LEAVE(CUDA_ERROR_INVALID_VALUE);
  if (device < 0 || (uint32_t)device >= the_driver.device_count) LEAVE(CUDA_ERROR_INVALID_DEVICE);
  for (bound **link = &p->multicast->bounds; *link; link = &(*link)->next) {
    if ((*link)->memory->card != the_driver.cards[device] || (*link)->offset != offset || (*link)->bytes != bytes) continue;
    unbind(link);
    LEAVE(CUDA_SUCCESS);
  }
  LEAVE(CUDA_ERROR_INVALID_VALUE); /* whole bindings only */
}
