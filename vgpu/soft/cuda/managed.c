#define _GNU_SOURCE
#include "managed.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "../state/ledger.h"
#include "../state/lock.h"
#include "shared.h"

enum { HOST = -1, NOWHERE = -2 };

typedef struct page {
  int8_t on;             /* card index, or HOST */
  int8_t preferred;      /* device ordinal, HOST or NOWHERE */
  int8_t prefetched;     /* likewise, where to last */
  bool read_mostly;      /* copies may be in both places: the host's look takes nothing off the card */
  uint32_t accessed_by;  /* a bit per device ordinal */
  struct page *older, *younger; /* on the same card, by last touch */
} page;

struct managed_pages {
  block *of;
  page *pages;
  struct managed_pages *next;
};

static struct managed_pages *all;
static uint64_t resident[SOFT_CARDS]; /* bytes that this process believes on each card */
static page *oldest[SOFT_CARDS], *youngest[SOFT_CARDS];

/* ---- the order of touches ------------------------------------------------- */

static void leave(page *p, uint32_t card) {
  if (p->older) p->older->younger = p->younger;
  else oldest[card] = p->younger;
  if (p->younger) p->younger->older = p->older;
  else youngest[card] = p->older;
  p->older = p->younger = NULL;
  p->on = HOST;
  resident[card] -= SOFT_PAGE_BYTES;
}

static void enter(page *p, uint32_t card, bool as_oldest) {
  page *older = as_oldest ? NULL : youngest[card], *younger = as_oldest ? oldest[card] : NULL;
  p->older = older;
  p->younger = younger;
  if (older) older->younger = p;
  else oldest[card] = p;
  if (younger) younger->older = p;
  else youngest[card] = p;
  p->on = (int8_t)card;
  resident[card] += SOFT_PAGE_BYTES;
}

/* ---- life ---------------------------------------------------------------- */

CUresult managed_open(block *b) {
  struct managed_pages *fresh = calloc(1, sizeof *fresh);
  page *pages = calloc(b->pages, sizeof *pages);
  if (!fresh || !pages) {
    free(fresh);
    free(pages);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  for (uint64_t i = 0; i < b->pages; i++) pages[i] = (page){.on = HOST, .preferred = NOWHERE, .prefetched = NOWHERE};
  *fresh = (struct managed_pages){.of = b, .pages = pages, .next = all};
  all = fresh;
  b->managed = fresh;
  return CUDA_SUCCESS;
}

static void off_card(page *p) {
  soft_region *region = &the_driver.region;
  if (p->on == HOST) return;
  uint32_t card = (uint32_t)p->on;
  leave(p, card);
  if (soft_lock(region, SOFT_PATIENCE_MS) != SOFT_OK) return;
  soft_ledger_move_out(region, card, SOFT_PAGE_BYTES);
  soft_unlock(region);
}

void managed_close(block *b) {
  struct managed_pages *gone = b->managed, **link = &all;
  if (!gone) return;
  for (int card = 0; card < SOFT_CARDS; card++)
    if (resident[card]) managed_settle((uint32_t)card); /* what others took off must not be given back again */
  for (uint64_t i = 0; i < b->pages; i++) off_card(&gone->pages[i]);
  while (*link && *link != gone) link = &(*link)->next;
  if (*link) *link = gone->next;
  free(gone->pages);
  free(gone);
  b->managed = NULL;
}

/* ---- what happened meanwhile --------------------------------------------- */

/* Whether the host has the page in its tables, which it lost when the page went to the card. */
static bool host_has(int tables, CUdeviceptr address) {
  enum { HOST_PAGE = 4096, ENTRIES = SOFT_PAGE_BYTES / HOST_PAGE };
  static uint64_t entries[ENTRIES]; /* under the process lock */
  off_t at = (off_t)(address / HOST_PAGE * sizeof entries[0]);
  if (pread(tables, entries, sizeof entries, at) != (ssize_t)sizeof entries) return false;
  for (int i = 0; i < ENTRIES; i++)
    if (entries[i] >> 63) return true;
  return false;
}

/* Others had need of the room: what they took were our oldest pages. */
static void settle_evicted(uint32_t card) {
  soft_region *region = &the_driver.region;
  uint64_t really = 0;
  if (soft_lock(region, SOFT_PATIENCE_MS) != SOFT_OK) return;
  if (soft_slot_mine(region)) really = soft_slot_at(region, region->me)->usage[card].managed_bytes;
  soft_unlock(region);
  while (resident[card] > really && oldest[card]) leave(oldest[card], card);
}

void managed_settle(uint32_t card) {
  if (!resident[card]) return;
  settle_evicted(card);
  int tables = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
  if (tables < 0) return;
  for (struct managed_pages *m = all; m; m = m->next)
    for (uint64_t i = 0; i < m->of->pages; i++) {
      page *p = &m->pages[i];
      if (p->on == (int)card && !p->read_mostly && host_has(tables, m->of->base + i * SOFT_PAGE_BYTES)) off_card(p);
    }
  close(tables);
}

/* ---- moving -------------------------------------------------------------- */

/* Brings a page to a card if there is room, or can be made. */
static void to_card(block *b, uint64_t index, uint32_t card) {
  soft_region *region = &the_driver.region;
  page *p = &b->managed->pages[index];
  if (p->on != (int)card) {
    off_card(p);
    if (soft_lock(region, SOFT_PATIENCE_MS) != SOFT_OK) return;
    soft_error error = soft_ledger_move_in(region, card, SOFT_PAGE_BYTES);
    soft_unlock(region);
    if (error != SOFT_OK) return;
    /* in before the look at what had to go for it, which may be ours too, but not the youngest */
    enter(p, card, false);
    settle_evicted(card);
    madvise((void *)(uintptr_t)(b->base + index * SOFT_PAGE_BYTES), SOFT_PAGE_BYTES, MADV_DONTNEED); /* of the host's view: the bytes stay */
  } else {
    leave(p, card);
    enter(p, card, false);
  }
}

typedef struct {
  block *in;
  uint64_t first, last; /* pages */
} extent;

static bool find(CUdeviceptr pointer, uint64_t bytes, extent *out) {
  allocation found;
  if (!bytes || !allocation_at(pointer, &found) || found.in->kind != BLOCK_MANAGED) return false;
  uint64_t offset = pointer - found.base;
  if (bytes > found.bytes - offset) return false;
  *out = (extent){found.in, offset / SOFT_PAGE_BYTES, (offset + bytes - 1) / SOFT_PAGE_BYTES};
  return true;
}

void managed_touch(uint32_t card, CUdeviceptr pointer, uint64_t bytes) {
  extent e;
  if (!all || card >= SOFT_CARDS || !find(pointer, bytes, &e)) return;
  managed_settle(card);
  for (uint64_t i = e.first; i <= e.last; i++)
    if (e.in->managed->pages[i].preferred != HOST || e.in->managed->pages[i].on == (int)card) to_card(e.in, i, card);
}

/* ---- prefetch, advice, discard -------------------------------------------- */

/* A place as the second forms name it: a device's ordinal or HOST; NOWHERE for one that isn't. */
static int place_of(CUmemLocation location) {
  switch (location.type) {
  case CU_MEM_LOCATION_TYPE_DEVICE: return location.id >= 0 && (uint32_t)location.id < the_driver.device_count ? location.id : NOWHERE;
  case CU_MEM_LOCATION_TYPE_HOST:
  case CU_MEM_LOCATION_TYPE_HOST_NUMA:
  case CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT: return HOST;
  default: return NOWHERE;
  }
}

static int place_of_device(CUdevice device) {
  return device == CU_DEVICE_CPU ? HOST : device >= 0 && (uint32_t)device < the_driver.device_count ? device : NOWHERE;
}

static CUresult prefetch(CUdeviceptr pointer, size_t bytes, int place) {
  extent e;
  if (place == NOWHERE) return CUDA_ERROR_INVALID_DEVICE;
  if (!find(pointer, bytes, &e)) return CUDA_ERROR_INVALID_VALUE;
  for (uint32_t card = 0; card < SOFT_CARDS; card++) managed_settle(card);
  for (uint64_t i = e.first; i <= e.last; i++) {
    page *p = &e.in->managed->pages[i];
    if (place == HOST) off_card(p);
    else to_card(e.in, i, the_driver.cards[place]);
    p->prefetched = (int8_t)place;
  }
  return CUDA_SUCCESS;
}

/* Prefetches happen at the call, an order that the streams allow. */
static CUresult prefetch_on(CUdeviceptr pointer, size_t bytes, int (*place)(const void *), const void *where, CUstream handle, bool per_thread) {
  context *ctx;
  stream *on;
  ENTER();
  CUresult result = context_current(&ctx);
  if (result == CUDA_SUCCESS) result = stream_resolve(ctx, handle, per_thread, &on);
  LEAVE(result == CUDA_SUCCESS ? prefetch(pointer, bytes, place(where)) : result);
}

static int by_device(const void *device) { return place_of_device(*(const CUdevice *)device); }
static int by_location(const void *location) { return place_of(*(const CUmemLocation *)location); }

EXPORT CUresult cuMemPrefetchAsync(CUdeviceptr p, size_t n, CUdevice device, CUstream on) { return prefetch_on(p, n, by_device, &device, on, false); }
EXPORT CUresult cuMemPrefetchAsync_ptsz(CUdeviceptr p, size_t n, CUdevice device, CUstream on) { return prefetch_on(p, n, by_device, &device, on, true); }
EXPORT CUresult cuMemPrefetchAsync_v2(CUdeviceptr p, size_t n, CUmemLocation location, unsigned int flags, CUstream on) {
  return flags ? CUDA_ERROR_INVALID_VALUE : prefetch_on(p, n, by_location, &location, on, false);
}
EXPORT CUresult cuMemPrefetchAsync_v2_ptsz(CUdeviceptr p, size_t n, CUmemLocation location, unsigned int flags, CUstream on) {
  return flags ? CUDA_ERROR_INVALID_VALUE : prefetch_on(p, n, by_location, &location, on, true);
}

static void first_to_go(page *p) {
  if (p->on == HOST) return;
  uint32_t card = (uint32_t)p->on;
  leave(p, card);
  enter(p, card, true);
}

typedef struct {
  CUdeviceptr *pointers;
  size_t *bytes;
  size_t count;
  CUmemLocation *locations;
  size_t *from; /* the location is in force from this range on */
  size_t location_count;
  bool discards, prefetches;
} batch;

static CUresult run_batch(const batch *b, unsigned long long flags, CUstream handle, bool per_thread) {
  context *ctx;
  stream *on;
  extent e;
  ENTER();
  CUresult result = context_current(&ctx);
  if (result == CUDA_SUCCESS) result = stream_resolve(ctx, handle, per_thread, &on);
  if (result != CUDA_SUCCESS) LEAVE(result);
  if (flags || !b->count || !b->pointers || !b->bytes) LEAVE(CUDA_ERROR_INVALID_VALUE);
  if (b->prefetches && (!b->location_count || b->location_count > b->count || !b->locations || !b->from || b->from[0])) LEAVE(CUDA_ERROR_INVALID_VALUE);
  for (size_t i = 0; i < b->count; i++)
    if (!find(b->pointers[i], b->bytes[i], &e)) LEAVE(CUDA_ERROR_INVALID_VALUE);
  for (size_t i = 0, l = 0; i < b->count && result == CUDA_SUCCESS; i++) {
    if (b->discards && find(b->pointers[i], b->bytes[i], &e))
      for (uint64_t p = e.first; p <= e.last; p++) first_to_go(&e.in->managed->pages[p]);
    if (!b->prefetches) continue;
    while (l + 1 < b->location_count && b->from[l + 1] <= i) l++;
    result = prefetch(b->pointers[i], b->bytes[i], place_of(b->locations[l]));
  }
  LEAVE(result);
}

#define BATCH_ARGUMENTS                                                                                                              \
  CUdeviceptr *pointers, size_t *bytes, size_t count, CUmemLocation *locations, size_t *from, size_t locationCount, unsigned long long flags, \
      CUstream on
#define BATCH(d, p) &(batch){pointers, bytes, count, locations, from, locationCount, d, p}

EXPORT CUresult cuMemPrefetchBatchAsync(BATCH_ARGUMENTS) { return run_batch(BATCH(false, true), flags, on, false); }
EXPORT CUresult cuMemPrefetchBatchAsync_ptsz(BATCH_ARGUMENTS) { return run_batch(BATCH(false, true), flags, on, true); }
EXPORT CUresult cuMemDiscardAndPrefetchBatchAsync(BATCH_ARGUMENTS) { return run_batch(BATCH(true, true), flags, on, false); }
EXPORT CUresult cuMemDiscardAndPrefetchBatchAsync_ptsz(BATCH_ARGUMENTS) { return run_batch(BATCH(true, true), flags, on, true); }
EXPORT CUresult cuMemDiscardBatchAsync(CUdeviceptr *pointers, size_t *bytes, size_t count, unsigned long long flags, CUstream on) {
  return run_batch(&(batch){pointers, bytes, count, NULL, NULL, 0, true, false}, flags, on, false);
}
EXPORT CUresult cuMemDiscardBatchAsync_ptsz(CUdeviceptr *pointers, size_t *bytes, size_t count, unsigned long long flags, CUstream on) {
  return run_batch(&(batch){pointers, bytes, count, NULL, NULL, 0, true, false}, flags, on, true);
}

static CUresult advise(CUdeviceptr pointer, size_t bytes, CUmem_advise advice, int place) {
  extent e;
  ENTER();
  if (advice < CU_MEM_ADVISE_SET_READ_MOSTLY || advice > CU_MEM_ADVISE_UNSET_ACCESSED_BY || !find(pointer, bytes, &e)) LEAVE(CUDA_ERROR_INVALID_VALUE);
  bool placed = advice == CU_MEM_ADVISE_SET_PREFERRED_LOCATION || advice >= CU_MEM_ADVISE_SET_ACCESSED_BY;
  if (placed && place == NOWHERE) LEAVE(CUDA_ERROR_INVALID_DEVICE);
  for (uint64_t i = e.first; i <= e.last; i++) {
    page *p = &e.in->managed->pages[i];
    switch (advice) {
    case CU_MEM_ADVISE_SET_READ_MOSTLY: p->read_mostly = true; break;
    case CU_MEM_ADVISE_UNSET_READ_MOSTLY: p->read_mostly = false; break;
    case CU_MEM_ADVISE_SET_PREFERRED_LOCATION: p->preferred = (int8_t)place; break;
    case CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION: p->preferred = NOWHERE; break;
    case CU_MEM_ADVISE_SET_ACCESSED_BY: p->accessed_by |= place >= 0 ? 1u << place : 0; break;
    default: p->accessed_by &= place >= 0 ? ~(1u << place) : ~0u;
    }
  }
  LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuMemAdvise(CUdeviceptr p, size_t n, CUmem_advise advice, CUdevice device) { return advise(p, n, advice, place_of_device(device)); }
EXPORT CUresult cuMemAdvise_v2(CUdeviceptr p, size_t n, CUmem_advise advice, CUmemLocation location) { return advise(p, n, advice, place_of(location)); }

/* ---- asking --------------------------------------------------------------- */

/* The place that all pages of a range agree on. */
static int agreed(const extent *e, bool preferred) {
  const page *pages = e->in->managed->pages;
  int place = preferred ? pages[e->first].preferred : pages[e->first].prefetched;
  for (uint64_t i = e->first; i <= e->last; i++)
    if ((preferred ? pages[i].preferred : pages[i].prefetched) != place) return NOWHERE;
  return place;
}

static int type_of(int place) {
  return place == HOST ? CU_MEM_LOCATION_TYPE_HOST : place == NOWHERE ? CU_MEM_LOCATION_TYPE_INVALID : CU_MEM_LOCATION_TYPE_DEVICE;
}

static CUresult range_attribute(int *out, size_t bytes, CUmem_range_attribute which, const extent *e) {
  const page *pages = e->in->managed->pages;
  if (!out || bytes < sizeof *out || bytes % sizeof *out) return CUDA_ERROR_INVALID_VALUE;
  if (which != CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY && bytes != sizeof *out) return CUDA_ERROR_INVALID_VALUE;
  switch (which) {
  case CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY:
    *out = 1;
    for (uint64_t i = e->first; i <= e->last; i++) *out &= pages[i].read_mostly;
    break;
  case CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION: *out = agreed(e, true); break;
  case CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION: *out = agreed(e, false); break;
  case CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY: {
    uint32_t devices = ~0u;
    size_t room = bytes / sizeof *out, found = 0;
    for (uint64_t i = e->first; i <= e->last; i++) devices &= pages[i].accessed_by;
    for (int device = 0; device < SOFT_CARDS; device++)
      if (devices >> device & 1 && found < room) out[found++] = device;
    while (found < room) out[found++] = CU_DEVICE_INVALID;
    break;
  }
  case CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_TYPE: *out = type_of(agreed(e, true)); break;
  case CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_TYPE: *out = type_of(agreed(e, false)); break;
  case CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_ID: *out = agreed(e, true) < 0 ? 0 : agreed(e, true); break;
  case CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_ID: *out = agreed(e, false) < 0 ? 0 : agreed(e, false); break;
  default: return CUDA_ERROR_INVALID_VALUE;
  }
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemRangeGetAttribute(void *data, size_t size, CUmem_range_attribute which, CUdeviceptr pointer, size_t bytes) {
  extent e;
  ENTER();
  if (!find(pointer, bytes, &e)) LEAVE(CUDA_ERROR_INVALID_VALUE);
  LEAVE(range_attribute(data, size, which, &e));
}

EXPORT CUresult cuMemRangeGetAttributes(void **data, size_t *sizes, CUmem_range_attribute *which, size_t count, CUdeviceptr pointer, size_t bytes) {
  extent e;
  ENTER();
  if (!data || !sizes || !which || !count || !find(pointer, bytes, &e)) LEAVE(CUDA_ERROR_INVALID_VALUE);
  CUresult result = CUDA_SUCCESS;
  for (size_t i = 0; i < count && result == CUDA_SUCCESS; i++) result = range_attribute(data[i], sizes[i], which[i], &e);
  LEAVE(result);
}

/* Which stream may touch what decides nothing here: all cards allow access from both sides at once. */
static CUresult attach(CUstream handle, CUdeviceptr pointer, size_t bytes, unsigned int flags, bool per_thread) {
  context *ctx;
  stream *on;
  allocation found;
  ENTER();
  CUresult result = context_current(&ctx);
  if (result == CUDA_SUCCESS) result = stream_resolve(ctx, handle, per_thread, &on);
  if (result != CUDA_SUCCESS) LEAVE(result);
  bool one = flags == CU_MEM_ATTACH_GLOBAL || flags == CU_MEM_ATTACH_HOST || flags == CU_MEM_ATTACH_SINGLE;
  if (!one || !allocation_at(pointer, &found) || found.in->kind != BLOCK_MANAGED) LEAVE(CUDA_ERROR_INVALID_VALUE);
  LEAVE(pointer == found.base && (!bytes || bytes == found.bytes) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
}

EXPORT CUresult cuStreamAttachMemAsync(CUstream on, CUdeviceptr p, size_t n, unsigned int flags) { return attach(on, p, n, flags, false); }
EXPORT CUresult cuStreamAttachMemAsync_ptsz(CUstream on, CUdeviceptr p, size_t n, unsigned int flags) { return attach(on, p, n, flags, true); }
