/* hostmem.c - page-locked host memory, and what a pointer is. Host and device address are the same. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "arena.h"

typedef struct range {
  uintptr_t base;
  size_t bytes;
  unsigned int flags;
  bool registered;
  context *owner;
  struct range *next;
} range;

static range *ranges;

static range *range_at(uintptr_t address) {
  for (range *r = ranges; r; r = r->next)
    if (address - r->base < r->bytes) return r;
  return NULL;
}

bool page_locked(CUdeviceptr pointer, uint64_t bytes) {
  const range *r = range_at((uintptr_t)pointer);
  return r && bytes <= r->bytes - (pointer - r->base);
}

static CUresult remember(context *ctx, void *base, size_t bytes, unsigned int flags, bool registered) {
  range *fresh = malloc(sizeof *fresh);
  if (!fresh) return CUDA_ERROR_OUT_OF_MEMORY;
  *fresh = (range){(uintptr_t)base, bytes, flags, registered, ctx, ranges};
  ranges = fresh;
  return CUDA_SUCCESS;
}

static size_t whole_pages(size_t bytes) { return (bytes + 4095) & ~(size_t)4095; }

static CUresult forget(void *base, bool registered) {
  for (range **link = &ranges; *link; link = &(*link)->next) {
    range *gone = *link;
    if (gone->base != (uintptr_t)base || gone->registered != registered) continue;
    *link = gone->next;
    if (!registered) munmap(base, whole_pages(gone->bytes));
    free(gone);
    return CUDA_SUCCESS;
  }
  return registered ? CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED : CUDA_ERROR_INVALID_VALUE;
}

#define CURRENT(ctx)                        \
  context *ctx;                             \
  ENTER();                                  \
  CUresult current = context_current(&ctx); \
  if (current != CUDA_SUCCESS) LEAVE(current)

static CUresult allocate(void **host, size_t bytes, unsigned int flags) {
  CURRENT(ctx);
  SAFE();
  if (!host || !bytes || flags > 7 || whole_pages(bytes) < bytes) LEAVE(CUDA_ERROR_INVALID_VALUE);
  void *at = mmap(NULL, whole_pages(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) LEAVE(CUDA_ERROR_OUT_OF_MEMORY);
  CUresult result = remember(ctx, at, bytes, flags, false);
  if (result == CUDA_SUCCESS) *host = at;
  else munmap(at, whole_pages(bytes));
  LEAVE(result);
}

EXPORT CUresult cuMemAllocHost(void **host, unsigned int bytes) { return allocate(host, bytes, 0); }
EXPORT CUresult cuMemAllocHost_v2(void **host, size_t bytes) { return allocate(host, bytes, 0); }
EXPORT CUresult cuMemHostAlloc(void **host, size_t bytes, unsigned int flags) { return allocate(host, bytes, flags); }

EXPORT CUresult cuMemFreeHost(void *host) {
  CURRENT(ctx);
  SAFE();
  (void)ctx;
  LEAVE(forget(host, false));
}

static CUresult enlist(void *host, size_t bytes, unsigned int flags) {
  CURRENT(ctx);
  SAFE();
  if (!host || !bytes || flags > 15) LEAVE(CUDA_ERROR_INVALID_VALUE);
  if (range_at((uintptr_t)host) || range_at((uintptr_t)host + bytes - 1)) LEAVE(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
  LEAVE(remember(ctx, host, bytes, flags, true));
}

EXPORT CUresult cuMemHostRegister(void *host, size_t bytes, unsigned int flags) { return enlist(host, bytes, flags); }
EXPORT CUresult cuMemHostRegister_v2(void *host, size_t bytes, unsigned int flags) { return enlist(host, bytes, flags); }

EXPORT CUresult cuMemHostUnregister(void *host) {
  CURRENT(ctx);
  (void)ctx;
  SAFE();
  LEAVE(forget(host, true));
}

EXPORT CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *pointer, void *host, unsigned int flags) {
  CURRENT(ctx);
  (void)ctx;
  if (!pointer || flags || !range_at((uintptr_t)host)) LEAVE(CUDA_ERROR_INVALID_VALUE);
  *pointer = (uintptr_t)host;
  LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuMemHostGetDevicePointer(CUdeviceptr_v1 *pointer, void *host, unsigned int flags) {
  (void)pointer;
  (void)host;
  (void)flags;
  ENTER();
  LEAVE(CUDA_ERROR_NOT_SUPPORTED); /* host memory lies above what 32 bits reach */
}

EXPORT CUresult cuMemHostGetFlags(unsigned int *flags, void *host) {
  CURRENT(ctx);
  (void)ctx;
  range *at = range_at((uintptr_t)host);
  if (!flags || !at) LEAVE(CUDA_ERROR_INVALID_VALUE);
  *flags = at->flags;
  LEAVE(CUDA_SUCCESS);
}

/* ---- attributes ---------------------------------------------------------- */

typedef struct {
  bool known, device, managed, ipc;
  context *owner;
  uint64_t base, bytes;
} place;

static place find(CUdeviceptr pointer) {
  allocation found;
  place at = {.known = false};
  range *host = range_at((uintptr_t)pointer);
  if (host) return (place){.known = true, .owner = host->owner, .base = host->base, .bytes = host->bytes};
  if (!allocation_at(pointer, &found)) return at;
  return (place){.known = true, .device = true, .managed = found.in->kind == BLOCK_MANAGED,
                 .ipc = (found.in->kind == BLOCK_PAGES || found.in->kind == BLOCK_CHUNK) && found.in->owner && !found.in->opaque,
                 .owner = found.in->owner, .base = found.base, .bytes = found.bytes};
}

static CUresult attribute(const place *at, CUdeviceptr pointer, CUpointer_attribute which, void *out) {
  switch (which) {
  case CU_POINTER_ATTRIBUTE_CONTEXT: *(CUcontext *)out = at->owner; break;
  case CU_POINTER_ATTRIBUTE_MEMORY_TYPE: *(unsigned int *)out = at->device ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST; break;
  case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *(CUdeviceptr *)out = pointer; break;
  case CU_POINTER_ATTRIBUTE_HOST_POINTER:
    if (at->device && !at->managed) return CUDA_ERROR_INVALID_VALUE;
    *(void **)out = (void *)(uintptr_t)pointer;
    break;
  case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS: *(unsigned int *)out = 0; break;
  case CU_POINTER_ATTRIBUTE_BUFFER_ID: *(unsigned long long *)out = at->base; break;
  case CU_POINTER_ATTRIBUTE_IS_MANAGED: *(unsigned int *)out = at->managed; break;
  case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int *)out = at->owner ? at->owner->device : 0; break;
  case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: *(unsigned int *)out = at->ipc; break;
  case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: *(CUdeviceptr *)out = at->base; break;
  case CU_POINTER_ATTRIBUTE_RANGE_SIZE: *(size_t *)out = at->bytes; break;
  case CU_POINTER_ATTRIBUTE_MAPPED: *(unsigned int *)out = 1; break;
  case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES: *(unsigned long long *)out = 0; break;
  case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE: *(unsigned int *)out = 0; break;
  case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS: *(unsigned int *)out = CU_MEM_ACCESS_FLAGS_PROT_READWRITE; break;
  case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE: *(CUmemoryPool *)out = NULL; break;
  default: return CUDA_ERROR_INVALID_VALUE;
  }
  return CUDA_SUCCESS;
}

EXPORT CUresult cuPointerGetAttribute(void *out, CUpointer_attribute which, CUdeviceptr pointer) {
  ENTER();
  place at = find(pointer);
  if (!out || !at.known) LEAVE(CUDA_ERROR_INVALID_VALUE);
  LEAVE(attribute(&at, pointer, which, out));
}

/* Unlike the single form, an unknown pointer is no error here: its values are zero. */
EXPORT CUresult cuPointerGetAttributes(unsigned int count, CUpointer_attribute *which, void **values, CUdeviceptr pointer) {
  ENTER();
  if (!count || !which || !values) LEAVE(CUDA_ERROR_INVALID_VALUE);
  place at = find(pointer);
  for (unsigned int i = 0; i < count; i++) {
    if (!values[i]) LEAVE(CUDA_ERROR_INVALID_VALUE);
    if (at.known && attribute(&at, pointer, which[i], values[i]) == CUDA_SUCCESS) continue;
    bool wide = which[i] == CU_POINTER_ATTRIBUTE_CONTEXT || which[i] == CU_POINTER_ATTRIBUTE_DEVICE_POINTER ||
                which[i] == CU_POINTER_ATTRIBUTE_HOST_POINTER || which[i] == CU_POINTER_ATTRIBUTE_BUFFER_ID ||
                which[i] == CU_POINTER_ATTRIBUTE_RANGE_START_ADDR || which[i] == CU_POINTER_ATTRIBUTE_RANGE_SIZE ||
                which[i] == CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES || which[i] == CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE;
    memset(values[i], 0, wide ? 8 : 4);
    if (which[i] == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL) *(int *)values[i] = -2;
  }
  LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuPointerSetAttribute(const void *value, CUpointer_attribute which, CUdeviceptr pointer) {
  ENTER();
  place at = find(pointer);
  if (!value || !at.known || which != CU_POINTER_ATTRIBUTE_SYNC_MEMOPS) LEAVE(CUDA_ERROR_INVALID_VALUE);
  LEAVE(CUDA_SUCCESS);
}
