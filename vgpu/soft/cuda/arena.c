#define _GNU_SOURCE
#include "arena.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "../state/ledger.h"
#include "../state/lock.h"
#include "managed.h"
#include "shared.h"

#ifndef MAP_FIXED_NOREPLACE
#define MAP_FIXED_NOREPLACE 0x100000
#endif

enum { LOW_BYTES = 1 << 30 };

static arena card_arenas[SOFT_CARDS];
static arena low_arenas[SOFT_CARDS];
static arena managed_arena;

/* ---- ranges -------------------------------------------------------------- */

static void *reserve(uint64_t bytes, int protection) {
  uint64_t want = bytes + SOFT_PAGE_BYTES;
  char *at = mmap(NULL, want, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) return NULL;
  uint64_t skip = (SOFT_PAGE_BYTES - (uintptr_t)at % SOFT_PAGE_BYTES) % SOFT_PAGE_BYTES;
  if (skip) munmap(at, skip);
  munmap(at + skip + bytes, want - bytes - skip);
  return at + skip;
}

static void *reserve_low(void) {
  for (uint64_t at = 0x20000000; at < 0xC0000000ull; at += 0x4000000) {
    void *got = mmap((void *)(uintptr_t)at, LOW_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
    if (got == (void *)(uintptr_t)at) return got;
    if (got != MAP_FAILED) munmap(got, LOW_BYTES); /* an old kernel took the address for a wish */
  }
  return NULL;
}

/* Managed memory: a view for the processor and one for us, so that its page table tells what it touched (managed.c). */
static char *reserve_twice(uint64_t bytes, char **second) {
  int file = (int)syscall(SYS_memfd_create, "softgpu managed", 1u /* close on exec */);
  char *first = file >= 0 && ftruncate(file, (off_t)bytes) == 0 ? reserve(bytes, PROT_NONE) : NULL;
  *second = first ? reserve(bytes, PROT_NONE) : NULL;
  bool good = *second != NULL;
  for (int i = 0; i < 2 && good; i++) {
    char *at = i ? *second : first;
    good = mmap(at, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE | MAP_FIXED, file, 0) == at;
    madvise(at, bytes, MADV_DONTFORK); /* a child has no CUDA, and none of this */
  }
  if (file >= 0) close(file);
  if (good) return first;
  if (first) munmap(first, bytes);
  if (*second) munmap(*second, bytes);
  *second = NULL;
  return NULL;
}

static CUresult arena_open(arena *a, uint64_t bytes, bool low, bool shared_with_host) {
  if (a->base) return CUDA_SUCCESS;
  char *backing = NULL;
  char *device = shared_with_host ? reserve_twice(bytes, &backing) : low ? reserve_low() : reserve(bytes, PROT_NONE);
  if (!device) return CUDA_ERROR_OPERATING_SYSTEM;
  if (!backing) backing = reserve(bytes, PROT_READ | PROT_WRITE);
  uint64_t pages = bytes / SOFT_PAGE_BYTES;
  uint64_t words = (pages + 63) / 64;
  block **blocks = mmap(NULL, pages * sizeof *blocks, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  uint64_t *taken = calloc(words, sizeof *taken);
  if (!backing || blocks == MAP_FAILED || !taken) {
    munmap(device, bytes);
    if (backing) munmap(backing, bytes);
    if (blocks != MAP_FAILED) munmap(blocks, pages * sizeof *blocks);
    free(taken);
    return CUDA_ERROR_OPERATING_SYSTEM;
  }
  *a = (arena){.base = (uintptr_t)device, .bytes = bytes, .backing = backing, .page_count = pages, .taken = taken, .blocks = blocks};
  return CUDA_SUCCESS;
}

static CUresult card_arena(uint32_t card, bool low, arena **out) {
  arena *a = low ? &low_arenas[card] : &card_arenas[card];
  uint64_t capacity = soft_card_capacity(soft_card_at(&the_driver.region, card));
  uint64_t bytes = (capacity / SOFT_PAGE_BYTES + 1) * 4 * SOFT_PAGE_BYTES; /* room for holes between live blocks */
  *out = a;
  return arena_open(a, low ? LOW_BYTES : bytes, low, false);
}

static arena *arena_of(CUdeviceptr pointer) {
  for (uint32_t i = 0; i < SOFT_CARDS; i++) {
    if (pointer - card_arenas[i].base < card_arenas[i].bytes) return &card_arenas[i];
    if (pointer - low_arenas[i].base < low_arenas[i].bytes) return &low_arenas[i];
  }
  return pointer - managed_arena.base < managed_arena.bytes ? &managed_arena : NULL;
}

/* ---- charging ------------------------------------------------------------ */

static CUresult charge(uint32_t card, uint64_t bytes) {
  soft_region *region = &the_driver.region;
  managed_settle(card);
  soft_error error = soft_lock(region, SOFT_PATIENCE_MS);
  if (error != SOFT_OK) return driver_from(error);
  error = soft_ledger_charge(region, card, bytes);
  soft_unlock(region);
  return driver_from(error);
}

static void discharge(uint32_t card, uint64_t bytes) {
  soft_region *region = &the_driver.region;
  if (soft_lock(region, SOFT_PATIENCE_MS) != SOFT_OK) return;
  soft_ledger_release(region, card, bytes);
  soft_unlock(region);
}

/* ---- pages of an arena --------------------------------------------------- */

static bool taken(const arena *a, uint64_t page) { return a->taken[page / 64] >> (page % 64) & 1; }

static bool find_run(arena *a, uint64_t from, uint64_t to, uint64_t count, uint64_t *out) {
  uint64_t run = 0;
  for (uint64_t page = from; page < to;) {
    if (page % 64 == 0 && a->taken[page / 64] == ~0ull) {
      run = 0;
      page += 64;
      continue;
    }
    if (page % 64 == 0 && !a->taken[page / 64] && page + 64 <= to && run + 64 < count) {
      run += 64;
      page += 64;
      continue;
    }
    run = taken(a, page) ? 0 : run + 1;
    page++;
    if (run == count) {
      *out = page - count;
      return true;
    }
  }
  return false;
}

static block *block_new(arena *a, block_kind kind, uint64_t bytes, uint64_t pages) {
  uint64_t first;
  if (!pages || pages > a->page_count) return NULL;
  if (!find_run(a, a->cursor, a->page_count, pages, &first) && !find_run(a, 0, a->page_count, pages, &first)) return NULL;
  block *fresh = calloc(1, sizeof *fresh);
  if (!fresh) return NULL;
  for (uint64_t page = first; page < first + pages; page++) {
    a->taken[page / 64] |= 1ull << (page % 64);
    a->blocks[page] = fresh;
  }
  a->cursor = first + pages < a->page_count ? first + pages : 0;
  fresh->kind = kind;
  fresh->in = a;
  fresh->base = a->base + first * SOFT_PAGE_BYTES;
  fresh->bytes = bytes;
  fresh->pages = pages;
  return fresh;
}

static char *backing_of(const block *b) { return b->in->backing + (b->base - b->in->base); }

/* Managed memory's bytes are a file's. */
static int forgetting(const block *b) { return b->kind == BLOCK_MANAGED ? MADV_REMOVE : MADV_DONTNEED; }

static void block_delete(block *b) {
  arena *a = b->in;
  uint64_t first = (b->base - a->base) / SOFT_PAGE_BYTES;
  managed_close(b);
  if (b->shared) {
    mmap(backing_of(b), b->pages * SOFT_PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    shared_give(b->shared);
    free(b->shared);
    b->written = false;
  }
  for (uint64_t page = first; page < first + b->pages; page++) {
    a->taken[page / 64] &= ~(1ull << (page % 64));
    a->blocks[page] = NULL;
  }
  /* what was written goes back to the machine; managed memory may have been written by the host */
  if (b->written || b->kind == BLOCK_MANAGED) madvise(a->backing + first * SOFT_PAGE_BYTES, b->pages * SOFT_PAGE_BYTES, forgetting(b));
  if (a->cursor > first) a->cursor = first;
  free(b->piece_taken);
  free(b->piece_bytes);
  free(b);
}

static void adopt(context *ctx, block *b) {
  b->owner = ctx;
  b->next = ctx->blocks;
  if (ctx->blocks) ctx->blocks->previous = b;
  ctx->blocks = b;
}

static void disown(block *b) {
  context *ctx = b->owner;
  if (!ctx) return;
  if (b->previous) b->previous->next = b->next;
  else ctx->blocks = b->next;
  if (b->next) b->next->previous = b->previous;
  if (b->listed) {
    block **link = &ctx->open_chunks;
    while (*link && *link != b) link = &(*link)->next_open;
    if (*link) *link = b->next_open;
  }
}

block *pages_take(uint32_t card, uint64_t bytes) {
  arena *a;
  if (card_arena(card, false, &a) != CUDA_SUCCESS) return NULL;
  return block_new(a, BLOCK_PAGES, bytes, (bytes + SOFT_PAGE_BYTES - 1) / SOFT_PAGE_BYTES);
}

void pages_give(block *from) { block_delete(from); }

CUresult block_share(block *b) {
  enum { PIECE = 4096 };
  static const char nothing[PIECE];
  uint64_t bytes = b->pages * SOFT_PAGE_BYTES;
  int card = -1;
  for (int i = 0; i < SOFT_CARDS && card < 0; i++)
    if (b->in == &card_arenas[i] || b->in == &low_arenas[i]) card = i;
  if (b->shared) return CUDA_SUCCESS;
  if (card < 0 || !(b->shared = calloc(1, sizeof *b->shared))) return CUDA_ERROR_OUT_OF_MEMORY;
  CUresult result = shared_make(SOFT_OBJECT_MEMORY, (uint32_t)card, bytes, b->shared);
  char *view = result == CUDA_SUCCESS ? mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, the_driver.region.shared_fd,
                                             (off_t)b->shared->offset)
                                      : MAP_FAILED;
  if (view == MAP_FAILED) {
    /* giving the object up would take the block's charge with it */
    if (result == CUDA_SUCCESS && charge((uint32_t)card, bytes) == CUDA_SUCCESS) shared_give(b->shared);
    free(b->shared);
    b->shared = NULL;
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  const char *from = backing_of(b);
  for (uint64_t at = 0; b->written && at < bytes; at += PIECE)
    if (memcmp(from + at, nothing, PIECE) != 0) memcpy(view + at, from + at, PIECE);
  if (mremap(view, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, backing_of(b)) == MAP_FAILED) {
    munmap(view, bytes);
    if (charge((uint32_t)card, bytes) == CUDA_SUCCESS) shared_give(b->shared);
    free(b->shared);
    b->shared = NULL;
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  return CUDA_SUCCESS;
}

/* ---- pieces of a chunk --------------------------------------------------- */

static bool piece_taken(const block *chunk, uint32_t piece) { return chunk->piece_taken[piece / 64] >> (piece % 64) & 1; }

static bool piece_run(const block *chunk, uint32_t count, uint32_t *out) {
  uint32_t run = 0;
  for (uint32_t piece = chunk->lowest; piece < CHUNK_PIECES;) {
    if (piece % 64 == 0 && chunk->piece_taken[piece / 64] == ~0ull) {
      run = 0;
      piece += 64;
      continue;
    }
    run = piece_taken(chunk, piece) ? 0 : run + 1;
    piece++;
    if (run == count) {
      *out = piece - count;
      return true;
    }
  }
  return false;
}

static CUdeviceptr piece_take(block *chunk, uint32_t first, uint32_t count, uint32_t bytes) {
  for (uint32_t piece = first; piece < first + count; piece++) chunk->piece_taken[piece / 64] |= 1ull << (piece % 64);
  if (first == chunk->lowest) chunk->lowest = first + count;
  chunk->piece_bytes[first] = bytes;
  chunk->live++;
  return chunk->base + first * SOFT_PIECE_BYTES;
}

static uint32_t pieces_of(uint64_t bytes) { return (uint32_t)((bytes + SOFT_PIECE_BYTES - 1) / SOFT_PIECE_BYTES); }

static CUresult allocate_small(context *ctx, arena *a, uint64_t bytes, bool opaque, CUdeviceptr *out) {
  uint32_t count = pieces_of(bytes), first;
  for (block **link = &ctx->open_chunks; *link;) {
    block *chunk = *link;
    if (chunk->in == a && chunk->opaque == opaque && piece_run(chunk, count, &first)) {
      *out = piece_take(chunk, first, count, (uint32_t)bytes);
      return CUDA_SUCCESS;
    }
    if (chunk->opaque == opaque && chunk->lowest >= CHUNK_PIECES) { /* full: come back to it when something is freed */
      *link = chunk->next_open;
      chunk->listed = false;
    } else {
      link = &chunk->next_open;
    }
  }
  CUresult result = charge(ctx->card, SOFT_PAGE_BYTES);
  if (result != CUDA_SUCCESS) return result;
  block *chunk = block_new(a, BLOCK_CHUNK, SOFT_PAGE_BYTES, 1);
  if (chunk) {
    chunk->piece_taken = calloc(CHUNK_PIECES / 64, sizeof *chunk->piece_taken);
    chunk->piece_bytes = calloc(CHUNK_PIECES, sizeof *chunk->piece_bytes);
  }
  if (!chunk || !chunk->piece_taken || !chunk->piece_bytes) {
    if (chunk) block_delete(chunk);
    discharge(ctx->card, SOFT_PAGE_BYTES);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  adopt(ctx, chunk);
  chunk->opaque = opaque;
  chunk->listed = true;
  chunk->next_open = ctx->open_chunks;
  ctx->open_chunks = chunk;
  *out = piece_take(chunk, 0, count, (uint32_t)bytes);
  return CUDA_SUCCESS;
}

/* ---- allocations --------------------------------------------------------- */

static CUresult allocate(context *ctx, uint64_t bytes, bool low, bool opaque, CUdeviceptr *out) {
  arena *a;
  if (!bytes) return CUDA_ERROR_INVALID_VALUE;
  CUresult result = card_arena(ctx->card, low, &a);
  if (result != CUDA_SUCCESS) return result;
  if (bytes <= SMALL_LIMIT_BYTES) return allocate_small(ctx, a, bytes, opaque, out);
  if (bytes > UINT64_MAX - SOFT_PAGE_BYTES) return CUDA_ERROR_OUT_OF_MEMORY;
  uint64_t pages = (bytes + SOFT_PAGE_BYTES - 1) / SOFT_PAGE_BYTES;
  result = charge(ctx->card, pages * SOFT_PAGE_BYTES);
  if (result != CUDA_SUCCESS) return result;
  block *fresh = block_new(a, BLOCK_PAGES, bytes, pages);
  if (!fresh) {
    discharge(ctx->card, pages * SOFT_PAGE_BYTES);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  adopt(ctx, fresh);
  fresh->opaque = opaque;
  *out = fresh->base;
  return CUDA_SUCCESS;
}

CUresult memory_allocate(context *ctx, uint64_t bytes, bool low, CUdeviceptr *out) { return allocate(ctx, bytes, low, false, out); }
CUresult opaque_allocate(context *ctx, uint64_t bytes, CUdeviceptr *out) { return allocate(ctx, bytes, false, true, out); }

CUresult memory_allocate_managed(context *ctx, uint64_t bytes, CUdeviceptr *out) {
  if (!bytes) return CUDA_ERROR_INVALID_VALUE;
  CUresult result = arena_open(&managed_arena, 1ull << 40, false, true);
  if (result != CUDA_SUCCESS) return result;
  if (bytes > managed_arena.bytes) return CUDA_ERROR_OUT_OF_MEMORY;
  block *fresh = block_new(&managed_arena, BLOCK_MANAGED, bytes, (bytes + SOFT_PAGE_BYTES - 1) / SOFT_PAGE_BYTES);
  if (!fresh) return CUDA_ERROR_OUT_OF_MEMORY;
  result = managed_open(fresh);
  if (result != CUDA_SUCCESS) {
    block_delete(fresh);
    return result;
  }
  adopt(ctx, fresh);
  *out = fresh->base;
  return CUDA_SUCCESS;
}

static void delete_charged(block *b) {
  if (b->kind != BLOCK_MANAGED && b->owner && !b->shared) discharge(b->owner->card, b->pages * SOFT_PAGE_BYTES);
  disown(b);
  block_delete(b);
}

static block *block_at(CUdeviceptr pointer) {
  arena *a = arena_of(pointer);
  return a ? a->blocks[(pointer - a->base) / SOFT_PAGE_BYTES] : NULL;
}

static CUresult give(block *b, CUdeviceptr pointer) {
  if (b->kind != BLOCK_CHUNK) {
    if (pointer != b->base) return CUDA_ERROR_INVALID_VALUE;
    delete_charged(b);
    return CUDA_SUCCESS;
  }
  uint64_t offset = pointer - b->base;
  uint32_t first = (uint32_t)(offset / SOFT_PIECE_BYTES);
  if (offset % SOFT_PIECE_BYTES || !b->piece_bytes[first]) return CUDA_ERROR_INVALID_VALUE;
  uint32_t count = pieces_of(b->piece_bytes[first]);
  for (uint32_t piece = first; piece < first + count; piece++) b->piece_taken[piece / 64] &= ~(1ull << (piece % 64));
  b->piece_bytes[first] = 0;
  if (first < b->lowest) b->lowest = first;
  if (--b->live == 0) {
    delete_charged(b);
  } else if (!b->listed) {
    b->listed = true;
    b->next_open = b->owner->open_chunks;
    b->owner->open_chunks = b;
  }
  return CUDA_SUCCESS;
}

CUresult memory_free(CUdeviceptr pointer) {
  bool in_pool = false;
  CUresult result = pool_free(pointer, &in_pool);
  if (!in_pool) result = graph_memory_free(pointer, &in_pool);
  if (in_pool) return result;
  if (is_import_address(pointer)) {
    result = import_close(pointer, IMPORT_POOL);
    return result == CUDA_SUCCESS ? result : import_close(pointer, IMPORT_EXTERNAL);
  }
  block *b = block_at(pointer);
  return b && b->owner && !b->opaque ? give(b, pointer) : CUDA_ERROR_INVALID_VALUE;
}

void opaque_free(CUdeviceptr pointer) {
  block *b = block_at(pointer);
  if (b && b->opaque) (void)give(b, pointer);
}

void memory_drop(context *ctx) {
  while (ctx->blocks) delete_charged(ctx->blocks);
}

/* ---- looking up ---------------------------------------------------------- */

bool allocation_at(CUdeviceptr pointer, allocation *out) {
  block *b = block_at(pointer);
  if (!b) return import_allocation_at(pointer, out);
  if (!b->owner) return pool_allocation_at(pointer, out) || graph_memory_at(pointer, out);
  if (b->kind != BLOCK_CHUNK) {
    *out = (allocation){b, b->base, b->bytes};
    return pointer - b->base < b->bytes;
  }
  uint32_t piece = (uint32_t)((pointer - b->base) / SOFT_PIECE_BYTES);
  if (!piece_taken(b, piece)) return false;
  while (piece && !b->piece_bytes[piece]) piece--;
  *out = (allocation){b, b->base + piece * SOFT_PIECE_BYTES, b->piece_bytes[piece]};
  return pointer - out->base < out->bytes;
}

bool is_device_address(CUdeviceptr pointer) {
  void *view;
  return arena_of(pointer) || is_import_address(pointer) || vmm_host_view(pointer, 1, &view) >= 0;
}

void *memory_host_view(CUdeviceptr pointer, uint64_t bytes, bool write) {
  allocation found;
  void *mapped;
  arena *a = arena_of(pointer);
  if (!a) {
    if (is_import_address(pointer)) return import_host_view(pointer, bytes);
    int there = vmm_host_view(pointer, bytes, &mapped);
    if (there >= 0) return there ? mapped : NULL;
    return pointer ? (void *)(uintptr_t)pointer : NULL;
  }
  if (!allocation_at(pointer, &found) || bytes > found.bytes - (pointer - found.base)) return NULL;
  if (write) found.in->written = true;
  return a->backing + (pointer - a->base);
}

void *memory_card_view(CUdeviceptr pointer, uint64_t bytes, bool write) {
  return is_device_address(pointer) || page_locked(pointer, bytes) ? memory_host_view(pointer, bytes, write) : NULL;
}

bool memory_zero(CUdeviceptr pointer, uint64_t bytes) {
  enum { WORTH_IT = 1 << 20, HOST_PAGE = 4096 };
  const block *b = block_at(pointer);
  if (bytes < WORTH_IT || !b || b->shared) return false; /* giving pages of a file back would not zero them */
  char *view = memory_host_view(pointer, bytes, true);
  if (!view) return false;
  char *first = (char *)(((uintptr_t)view + HOST_PAGE - 1) / HOST_PAGE * HOST_PAGE);
  char *last = (char *)(((uintptr_t)view + bytes) / HOST_PAGE * HOST_PAGE);
  if (madvise(first, (size_t)(last - first), forgetting(b)) != 0) return false;
  memset(view, 0, (size_t)(first - view));
  memset(last, 0, (size_t)(view + bytes - last));
  return true;
}
