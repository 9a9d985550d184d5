/*
 * shared.h - this process's hold on objects that others can hold too, and the
 * mappings of such memory that didn't come from cuMemMap.
 *
 * All under the process lock; what needs the state's lock takes it.
 */
#ifndef SOFT_SHARED_H
#define SOFT_SHARED_H

#include "arena.h"

/* One hold. The rest is a copy of what the object said when it was taken. */
struct shared_ref {
  bool there;
  uint32_t index, card;
  uint64_t generation, bytes, offset;
};

/* A new object of memory that is charged already (or of the host: card SOFT_NO_INDEX), a pool or an event. */
CUresult shared_make(uint32_t kind, uint32_t card, uint64_t bytes, shared_ref *out);
/* One more hold on an object that a handle names: INVALID_HANDLE when it is gone. */
CUresult shared_take(uint32_t kind, uint32_t index, uint64_t generation, shared_ref *out);
CUresult shared_take_descriptor(uint32_t kind, int descriptor, shared_ref *out);
void shared_give(shared_ref *ref);
/* A descriptor for another process. */
CUresult shared_export(const shared_ref *ref, int *descriptor);
/* This process has the object already. */
bool shared_here(uint32_t index, uint64_t generation);
/* Ordinal of a card in this process, -1 when it isn't visible here. */
int shared_device(uint32_t card);

typedef enum { IMPORT_IPC, IMPORT_POOL, IMPORT_EXTERNAL, IMPORT_ARRAY } import_way;

/* Maps bytes of an object from offset on. Takes over the hold on success. key: a pool, or nothing. */
CUresult import_map(context *ctx, shared_ref *of, import_way way, const void *key, uint64_t offset, uint64_t bytes, CUdeviceptr *out);
/* One more opening of what is mapped in the same way already; false: it isn't. */
bool import_again(const context *ctx, import_way way, uint32_t index, uint64_t generation, uint64_t offset, CUdeviceptr *out);
/* Ends one opening, at the very address that was given. */
CUresult import_close(CUdeviceptr pointer, import_way way);
/* Whether an object is mapped here, in whatever way. */
bool import_any(uint32_t index, uint64_t generation);
bool import_pool_used(const void *key);
void imports_drop(context *ctx);

#endif
