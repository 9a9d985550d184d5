/*
 * vmm.c - address ranges, physical handles, and the maps between them.
 *
 * A handle is charged from creation until it is released and nothing maps it
 * any more, in this process and, for one that was made to be shared, in all
 * others. Its bytes live in a file, so two maps of one handle show the same.
 */
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "../state/ledger.h"
#include "../state/lock.h"
#include "shared.h"
#include "vmm.h"

typedef struct mapping {
  uint64_t base, bytes;
  uint64_t offset; /* in the handle */
  physical *of;
  bool readable, writable;
  struct mapping *next;
} mapping;

typedef struct reservation {
  uint64_t base, bytes;
  char *backing;
  mapping *maps; /* by address */
  struct reservation *next;
} reservation;

static physical *physicals;
static reservation *reservations;
static CUmemGenericAllocationHandle last_name = 0x100000;

static reservation *reservation_at(uint64_t address) {
  for (reservation *r = reservations; r; r = r->next)
    if (address - r->base < r->bytes) return r;
  return NULL;
}

physical *physical_named(CUmemGenericAllocationHandle name) {
  for (physical *p = physicals; p; p = p->next)
    if (p->name == name && p->references) return p;
  return NULL;
}

physical *physical_at(CUdeviceptr pointer, uint64_t *offset) {
  reservation *r = reservation_at(pointer);
  for (mapping *m = r ? r->maps : NULL; m; m = m->next) {
    if (pointer - m->base >= m->bytes) continue;
    *offset = m->offset + (pointer - m->base);
    return m->of;
  }
  return NULL;
}

void physical_let_go(physical *p) {
  if (p->references || p->maps || p->binds) return;
  for (physical **link = &physicals; *link; link = &(*link)->next)
    if (*link == p) {
      *link = p->next;
      break;
    }
  soft_region *region = &the_driver.region;
  if (p->multicast) {
    multicast_delete(p->multicast);
  } else if (p->shared.there) {
    shared_give(&p->shared); /* and the charge, when nobody else holds it */
  } else {
    if (p->property.location.type == CU_MEM_LOCATION_TYPE_DEVICE && soft_lock(region, SOFT_PATIENCE_MS) == SOFT_OK) {
      soft_ledger_release(region, p->card, p->bytes);
      soft_unlock(region);
    }
    close(p->file);
  }
  free(p);
}

/* ---- address ranges ------------------------------------------------------ */

EXPORT CUresult cuMemAddressReserve(CUdeviceptr *pointer, size_t bytes, size_t alignment, CUdeviceptr address, unsigned long long flags) {
  (void)address; /* a wish that need not be met */
  ENTER();
  if (!pointer || !bytes || bytes % SOFT_PAGE_BYTES || flags || (alignment & (alignment - 1))) LEAVE(CUDA_ERROR_INVALID_VALUE);
  if (alignment < SOFT_PAGE_BYTES) alignment = SOFT_PAGE_BYTES;
  reservation *fresh = calloc(1, sizeof *fresh);
  if (!fresh) LEAVE(CUDA_ERROR_OUT_OF_MEMORY);
  size_t want = bytes + alignment;
  char *range = want > bytes ? mmap(NULL, want, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0) : MAP_FAILED;
  char *backing = range != MAP_FAILED ? mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0) : MAP_FAILED;
  if (backing == MAP_FAILED) {
    if (range != MAP_FAILED) munmap(range, want);
    free(fresh);
    LEAVE(CUDA_ERROR_OUT_OF_MEMORY);
  }
  size_t skip = (alignment - (uintptr_t)range % alignment) % alignment;
  if (skip) munmap(range, skip);
  if (want - bytes - skip) munmap(range + skip + bytes, want - bytes - skip);
  *fresh = (reservation){.base = (uintptr_t)(range + skip), .bytes = bytes, .backing = backing, .next = reservations};
  reservations = fresh;
  *pointer = fresh->base;
  LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuMemAddressFree(CUdeviceptr pointer, size_t bytes) {
  ENTER();
  for (reservation **link = &reservations; *link; link = &(*link)->next) {
    reservation *gone = *link;
    if (gone->base != pointer) continue;
    if (gone->bytes != bytes || gone->maps) LEAVE(CUDA_ERROR_INVALID_VALUE);
    *link = gone->next;
    munmap((void *)(uintptr_t)gone->base, bytes);
    munmap(gone->backing, bytes);
    free(gone);
    LEAVE(CUDA_SUCCESS);
  }
  LEAVE(CUDA_ERROR_INVALID_VALUE);
}

/* ---- handles ------------------------------------------------------------- */

static CUresult usable(const CUmemAllocationProp *property) {
  if (!property || property->type != CU_MEM_ALLOCATION_TYPE_PINNED) return CUDA_ERROR_INVALID_VALUE;
  if (property->location.type == CU_MEM_LOCATION_TYPE_HOST_NUMA || property->location.type == CU_MEM_LOCATION_TYPE_HOST) return CUDA_SUCCESS;
  if (property->location.type != CU_MEM_LOCATION_TYPE_DEVICE) return CUDA_ERROR_INVALID_VALUE;
  return property->location.id < 0 || (uint32_t)property->location.id >= the_driver.device_count ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}

EXPORT CUresult cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *property, int option) {
  ENTER();
  CUresult result = usable(property);
  if (result != CUDA_SUCCESS) LEAVE(result);
  if (!granularity || option < 0 || option > CU_MEM_ALLOC_GRANULARITY_RECOMMENDED) LEAVE(CUDA_ERROR_INVALID_VALUE);
  *granularity = SOFT_PAGE_BYTES;
  LEAVE(CUDA_SUCCESS);
}

static bool on_device(const physical *p) { return p->property.location.type == CU_MEM_LOCATION_TYPE_DEVICE; }

static CUresult charge(const physical *p) {
  soft_region *region = &the_driver.region;
  soft_error error = soft_lock(region, SOFT_PATIENCE_MS);
  if (error != SOFT_OK) return driver_from(error);
  error = soft_ledger_charge(region, p->card, p->bytes);
  soft_unlock(region);
  return driver_from(error);
}

static void discharge(const physical *p) {
  if (soft_lock(&the_driver.region, SOFT_PATIENCE_MS) != SOFT_OK) return;
  soft_ledger_release(&the_driver.region, p->card, p->bytes);
  soft_unlock(&the_driver.region);
}

/* Where the bytes are: a range of the file that all share, or a file of its own. */
static CUresult back(physical *p) {
  if (p->property.requestedHandleTypes) {
    CUresult result = shared_make(SOFT_OBJECT_MEMORY, on_device(p) ? p->card : SOFT_NO_INDEX, p->bytes, &p->shared);
    p->file = the_driver.region.shared_fd;
    p->file_offset = p->shared.offset;
    return result;
  }
  p->file = (int)syscall(SYS_memfd_create, "softgpu", 1u /* close on exec */);
  if (p->file >= 0 && ftruncate(p->file, (off_t)p->bytes) == 0) return CUDA_SUCCESS;
  if (p->file >= 0) close(p->file);
  return CUDA_ERROR_OUT_OF_MEMORY;
}

static void enlist(physical *p, CUmemGenericAllocationHandle *out) {
  p->name = ++last_name;
  p->references = 1;
  p->next = physicals;
  physicals = p;
  *out = p->name;
}

bool physical_for_multicast(struct multicast *object, uint64_t bytes, CUmemGenericAllocationHandle *out) {
  physical *fresh = calloc(1, sizeof *fresh);
  if (!fresh) return false;
  *fresh = (physical){.property = {.type = CU_MEM_ALLOCATION_TYPE_PINNED}, .bytes = bytes, .file = -1, .multicast = object};
  enlist(fresh, out);
  return true;
}

EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *property, unsigned long long flags) {
  ENTER();
  CUresult result = usable(property);
  if (result != CUDA_SUCCESS) LEAVE(result);
  if (!handle || !bytes || bytes % SOFT_PAGE_BYTES || flags) LEAVE(CUDA_ERROR_INVALID_VALUE);
  if (property->requestedHandleTypes & ~CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) LEAVE(CUDA_ERROR_NOT_SUPPORTED);
  physical *fresh = calloc(1, sizeof *fresh);
  if (!fresh) LEAVE(CUDA_ERROR_OUT_OF_MEMORY);
  *fresh = (physical){.property = *property, .bytes = bytes};
  if (on_device(fresh)) {
    fresh->card = the_driver.cards[property->location.id];
    result = charge(fresh);
  }
  if (result == CUDA_SUCCESS) {
    result = back(fresh);
    if (result != CUDA_SUCCESS && on_device(fresh)) discharge(fresh);
  }
  if (result != CUDA_SUCCESS) {
    free(fresh);
    LEAVE(result);
  }
  enlist(fresh, handle);
  LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  ENTER();
  physical *p = physical_named(handle);
  if (!p) LEAVE(CUDA_ERROR_INVALID_VALUE);
  p->references--;
  physical_let_go(p);
  LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address) {
  ENTER();
  reservation *r = reservation_at((uintptr_t)address);
  for (mapping *m = r ? r->maps : NULL; m && handle; m = m->next) {
    if ((uintptr_t)address - m->base >= m->bytes) continue;
    m->of->references++;
    *handle = m->of->name;
    LEAVE(CUDA_SUCCESS);
  }
  LEAVE(CUDA_ERROR_INVALID_VALUE);
}

EXPORT CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *property, CUmemGenericAllocationHandle handle) {
  ENTER();
  physical *p = physical_named(handle);
  if (!p || !property) LEAVE(CUDA_ERROR_INVALID_VALUE);
  *property = p->property;
  LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuMemExportToShareableHandle(void *shareable, CUmemGenericAllocationHandle handle, int type, unsigned long long flags) {
  ENTER();
  physical *p = physical_named(handle);
  if (!p || !shareable || flags || !(type & p->property.requestedHandleTypes) || type & (type - 1)) LEAVE(CUDA_ERROR_INVALID_VALUE);
  LEAVE(shared_export(&p->shared, (int *)shareable));
}

/* The descriptor stays the caller's own. */
EXPORT CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *shareable, int type) {
  ENTER();
  if (type == CU_MEM_HANDLE_TYPE_FABRIC) LEAVE(CUDA_ERROR_NOT_SUPPORTED);
  if (!handle || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) LEAVE(CUDA_ERROR_INVALID_VALUE);
  physical *fresh = calloc(1, sizeof *fresh);
  if (!fresh) LEAVE(CUDA_ERROR_OUT_OF_MEMORY);
  CUresult result = shared_take_descriptor(SOFT_OBJECT_MEMORY, (int)(intptr_t)shareable, &fresh->shared);
  if (result != CUDA_SUCCESS) {
    free(fresh);
    LEAVE(result);
  }
  bool device = fresh->shared.card != SOFT_NO_INDEX;
  fresh->property = (CUmemAllocationProp){.type = CU_MEM_ALLOCATION_TYPE_PINNED, .requestedHandleTypes = type,
                                          .location = {device ? CU_MEM_LOCATION_TYPE_DEVICE : CU_MEM_LOCATION_TYPE_HOST_NUMA,
                                                       device ? shared_device(fresh->shared.card) : 0}};
  fresh->card = device ? fresh->shared.card : 0;
  fresh->bytes = fresh->shared.bytes;
  fresh->file = the_driver.region.shared_fd;
  fresh->file_offset = fresh->shared.offset;
  enlist(fresh, handle);
  LEAVE(CUDA_SUCCESS);
}

/* ---- maps ---------------------------------------------------------------- */

EXPORT CUresult cuMemMap(CUdeviceptr pointer, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags) {
  ENTER();
  physical *p = physical_named(handle);
  reservation *r = reservation_at(pointer);
  if (!p || !r || !bytes || flags || (pointer | bytes | offset) % SOFT_PAGE_BYTES) LEAVE(CUDA_ERROR_INVALID_VALUE);
  if (offset > p->bytes || bytes > p->bytes - offset || bytes > r->bytes - (pointer - r->base)) LEAVE(CUDA_ERROR_INVALID_VALUE);
  mapping **link = &r->maps;
  while (*link && (*link)->base + (*link)->bytes <= pointer) link = &(*link)->next;
  if (*link && (*link)->base < pointer + bytes) LEAVE(CUDA_ERROR_INVALID_VALUE);
  mapping *fresh = calloc(1, sizeof *fresh);
  if (!fresh) LEAVE(CUDA_ERROR_OUT_OF_MEMORY);
  void *at = r->backing + (pointer - r->base);
  if (!p->multicast)
    at = mmap(at, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, p->file, (off_t)(p->file_offset + offset));
  if (at == MAP_FAILED) {
    free(fresh);
    LEAVE(CUDA_ERROR_OUT_OF_MEMORY);
  }
  *fresh = (mapping){.base = pointer, .bytes = bytes, .offset = offset, .of = p, .next = *link};
  *link = fresh;
  p->maps++;
  LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuMemUnmap(CUdeviceptr pointer, size_t bytes) {
  ENTER();
  reservation *r = reservation_at(pointer);
  if (!r || !bytes || bytes > r->bytes - (pointer - r->base)) LEAVE(CUDA_ERROR_INVALID_VALUE);
  /* whole maps only, and all of the range */
  uint64_t covered = 0;
  for (mapping *m = r->maps; m; m = m->next)
    if (m->base >= pointer && m->base + m->bytes <= pointer + bytes) covered += m->bytes;
  if (covered != bytes) LEAVE(CUDA_ERROR_INVALID_VALUE);
  for (mapping **link = &r->maps; *link;) {
    mapping *gone = *link;
    if (gone->base < pointer || gone->base + gone->bytes > pointer + bytes) {
      link = &gone->next;
      continue;
    }
    mmap(r->backing + (gone->base - r->base), gone->bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    *link = gone->next;
    gone->of->maps--;
    physical_let_go(gone->of);
    free(gone);
  }
  LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuMemSetAccess(CUdeviceptr pointer, size_t bytes, const CUmemAccessDesc *access, size_t count) {
  ENTER();
  reservation *r = reservation_at(pointer);
  if (!r || !access || !count || !bytes || bytes > r->bytes - (pointer - r->base)) LEAVE(CUDA_ERROR_INVALID_VALUE);
  uint64_t covered = 0;
  for (mapping *m = r->maps; m; m = m->next)
    if (m->base >= pointer && m->base + m->bytes <= pointer + bytes) covered += m->bytes;
  if (covered != bytes) LEAVE(CUDA_ERROR_INVALID_VALUE);
  for (size_t i = 0; i < count; i++) {
    int flags = access[i].flags;
    if (flags != CU_MEM_ACCESS_FLAGS_PROT_NONE && flags != CU_MEM_ACCESS_FLAGS_PROT_READ && flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
      LEAVE(CUDA_ERROR_INVALID_VALUE);
    for (mapping *m = r->maps; m; m = m->next) {
      if (m->base < pointer || m->base + m->bytes > pointer + bytes || m->of->multicast) continue;
      m->readable = flags & CU_MEM_ACCESS_FLAGS_PROT_READ;
      m->writable = flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    }
  }
  LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuMemGetAccess(unsigned long long *flags, const CUmemLocation *location, CUdeviceptr pointer) {
  ENTER();
  reservation *r = reservation_at(pointer);
  if (!flags || !location || !r) LEAVE(CUDA_ERROR_INVALID_VALUE);
  for (mapping *m = r->maps; m; m = m->next) {
    if (pointer - m->base >= m->bytes) continue;
    *flags = m->writable ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : m->readable ? CU_MEM_ACCESS_FLAGS_PROT_READ : CU_MEM_ACCESS_FLAGS_PROT_NONE;
    LEAVE(CUDA_SUCCESS);
  }
  LEAVE(CUDA_ERROR_INVALID_VALUE);
}

int vmm_host_view(CUdeviceptr pointer, uint64_t bytes, void **out) {
  reservation *r = reservation_at(pointer);
  if (!r) return -1;
  uint64_t at = pointer, left = bytes;
  for (mapping *m = r->maps; m && left; m = m->next) {
    if (at - m->base >= m->bytes) continue;
    if (!m->readable) return 0;
    uint64_t here = m->bytes - (at - m->base);
    uint64_t taken = here < left ? here : left;
    at += taken;
    left -= taken;
  }
  *out = r->backing + (pointer - r->base);
  return left == 0;
}
