/*
 * arena.h - device addresses and the bytes behind them.
 *
 * A card's addresses are a reserved range that the processor can't touch, so a
 * program that follows a device pointer on the host dies as it would on a
 * real card. The bytes live at a fixed distance in a second range, reserved
 * without swap space: an 80 GiB card costs what is really written to it.
 *
 * Memory comes in blocks. A block is one allocation of whole 2 MiB pages, or a
 * chunk: one page cut into 512-byte pieces for allocations of up to 1 MiB.
 * A chunk belongs to one context and goes when its last piece does. This is
 * the rounding that the card is charged: whole pages.
 */
#ifndef SOFT_ARENA_H
#define SOFT_ARENA_H

#include "driver.h"

enum { CHUNK_PIECES = 4096, SMALL_LIMIT_BYTES = 1 << 20 };

typedef enum { BLOCK_PAGES, BLOCK_CHUNK, BLOCK_MANAGED, BLOCK_IMPORT } block_kind;

typedef struct shared_ref shared_ref; /* shared.h */

typedef struct arena {
  uint64_t base;      /* device addresses */
  uint64_t bytes;
  char *backing;      /* where the bytes are */
  uint64_t page_count, cursor;
  uint64_t *taken;    /* bit per page */
  block **blocks;     /* block of each page */
} arena;

struct block {
  block_kind kind;
  arena *in;
  context *owner;     /* NULL: the process's own, e.g. a pool's */
  uint64_t base;
  uint64_t bytes;     /* as asked for */
  uint64_t pages;
  bool written;
  shared_ref *shared; /* its bytes are an object's, which carries the charge too */
  struct managed_pages *managed; /* managed.h */
  bool opaque;        /* holds arrays: no program has an address in it */
  block *next, *previous;     /* of the context */
  uint32_t live;              /* chunk: pieces allocated */
  uint32_t lowest;            /* chunk: no free piece below */
  bool listed;                /* chunk: among the context's open ones */
  block *next_open;
  uint64_t *piece_taken;
  uint32_t *piece_bytes;      /* bytes of the allocation that starts here */
};

/* Linear memory of a context, charged to its card. low: addresses below 4 GiB. */
CUresult memory_allocate(context *ctx, uint64_t bytes, bool low, CUdeviceptr *out);
CUresult memory_free(CUdeviceptr pointer);
/* The same for arrays, whose pages are of another kind: no page holds both. */
CUresult opaque_allocate(context *ctx, uint64_t bytes, CUdeviceptr *out);
void opaque_free(CUdeviceptr pointer);
/* Managed memory: usable by the processor too, charged by what of it is on the card (managed.h). */
CUresult memory_allocate_managed(context *ctx, uint64_t bytes, CUdeviceptr *out);
/* Frees all of a context; the card's charge with it. */
void memory_drop(context *ctx);

/* Pages without an owner, not charged (pools charge their segments themselves). */
block *pages_take(uint32_t card, uint64_t bytes);
void pages_give(block *from);

/* Moves a block's bytes to where other processes can map them, and its charge to the object that they hold. */
CUresult block_share(block *b);

/* The allocation around an address. NULL: no device address of ours. */
typedef struct {
  block *in;
  uint64_t base, bytes;
} allocation;
bool allocation_at(CUdeviceptr pointer, allocation *out);

/* True for any address inside a range that belongs to the device side, mapped or not. */
bool is_device_address(CUdeviceptr pointer);

/*
 * The host side of [pointer, pointer+bytes). Device ranges must lie in one
 * allocation; other addresses are taken for host memory. NULL when not so.
 */
void *memory_host_view(CUdeviceptr pointer, uint64_t bytes, bool write);
/* The same for what a card reaches: of the host's memory what is page-locked. */
void *memory_card_view(CUdeviceptr pointer, uint64_t bytes, bool write);
/* hostmem.c: whether all of a range is page-locked. */
bool page_locked(CUdeviceptr pointer, uint64_t bytes);

/* Zeroes a large range by giving its pages back. False: too small or not such a range, so write zeros. */
bool memory_zero(CUdeviceptr pointer, uint64_t bytes);

/* shared.c: memory of other processes that is mapped here. */
bool is_import_address(CUdeviceptr pointer);
bool import_allocation_at(CUdeviceptr pointer, allocation *out);
void *import_host_view(CUdeviceptr pointer, uint64_t bytes);
/* vmm.c: the same for its mappings. -1 not there, 0 not mapped all along, 1 found. */
int vmm_host_view(CUdeviceptr pointer, uint64_t bytes, void **out);
/* pool.c: allocations inside a pool's segments. */
bool pool_allocation_at(CUdeviceptr pointer, allocation *out);
CUresult pool_free(CUdeviceptr pointer, bool *found);
/* graph_memory.c: the same for what graphs allocate */
bool graph_memory_at(CUdeviceptr pointer, allocation *out);
CUresult graph_memory_free(CUdeviceptr pointer, bool *found);

#endif
