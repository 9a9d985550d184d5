/* SPDX-License-Identifier: Apache-2.0 */
/* pointers.h: which address of device memory was charged with how much. */
#ifndef CARVE_POINTERS_H
#define CARVE_POINTERS_H

#include "limits.h"
#include "state.h"

/* How the driver rounds linear memory: pages of 2 MiB, and up to 1 MiB pieces in steps of 512 bytes that are
 * cut from such a page, which is given back when its last piece is. Which page a piece is in can be told
 * from its address, so pages are counted as they really are, whatever way the driver fills them. */
#define CARVE_PIECE_MAX_BYTES (1u << 20)

enum {
    CARVE_KIND_WHOLE = 0,   /* pages of its own */
    CARVE_KIND_PIECE = 1,   /* part of a page */
    CARVE_KIND_MANAGED = 2, /* pages that the driver may move between host and card */
    CARVE_KIND_ARRAY = 3,   /* a small array: part of a page whose address isn't shown */
    CARVE_KIND_COUNTED = 4, /* managed memory that is counted and not charged */
    CARVE_KIND_IMPORTED = 5, /* of another process, or from elsewhere: counted apart; its place is how often it is open */
};

/* What has a handle and no address is known by this, which no address of device memory is. */
static inline uint64_t carve_handle_key(const void *handle) {
    return (uint64_t)(uintptr_t)handle << CARVE_UNIT_SHIFT | (uint64_t)1 << 63;
}

/* Bytes in whole pages, in units; saturates. */
static inline uint32_t carve_page_units(uint64_t bytes) {
    uint64_t pages = (bytes >> CARVE_PAGE_SHIFT) + ((bytes & ((1u << CARVE_PAGE_SHIFT) - 1)) != 0);
    return pages > UINT32_MAX / CARVE_PAGE_UNITS ? UINT32_MAX : (uint32_t)pages * CARVE_PAGE_UNITS;
}

struct carve_put {
    bool first_of_page;         /* the block is a piece, and the first in its page */
    bool stale_last;            /* stale was the last piece in its page */
    struct carve_pointer stale; /* what was known at the address; it must have been freed past this library */
};

/* Remembers a block. False, and nothing changed, where there is no memory for that. */
bool carve_pointers_put(struct carve_state *s, const struct carve_pointer *block, struct carve_put *put);

/* A block that is about to be freed is forgotten first, since the driver may give its address to another thread as
 * soon as it is; its page counts it until it is gone. False where the address isn't known. */
bool carve_pointers_take(struct carve_state *s, uint64_t address, struct carve_pointer *block);
/* The same by a thread that frees it at once: the beginning of what counts, see carve_pieces_still. */
bool carve_pointers_take_now(struct carve_state *s, uint64_t address, struct carve_pointer *block);
/* It is gone; says whether it was the last piece of its page. */
bool carve_pointers_gone(struct carve_state *s, const struct carve_pointer *block);
/* It wasn't freed. False where there is no memory to remember it. */
bool carve_pointers_restore(struct carve_state *s, const struct carve_pointer *block);

/* Memory of another process was opened, perhaps once more; or closed, perhaps for the last time. */
void carve_pointers_import(struct carve_state *s, const struct carve_pointer *block);
void carve_pointers_export(struct carve_state *s, uint64_t address);

/* Forgets a block of that context and gives it; false where none is left. *cursor starts at 0. */
bool carve_pointers_take_of(struct carve_state *s, uint32_t context, struct carve_pointer *block, bool *last,
                            uint32_t *cursor);

/* Whether no thread is between two steps of a call that makes or frees a piece, at one instant. Until it is through, a
 * page may be charged that isn't needed any more, or in which others have room though nobody knows it yet: no small
 * request is refused before. Such calls are counted as they begin and as they end, under the locks that they take anyway:
 *   made:  a page charged (account)   put, the first of it (here), or it isn't needed (account)
 *   freed: taken (here)               gone, not the last of its page (here), or that is given back (account)
 * *begun is how many have begun. */
bool carve_pieces_still(const struct carve_state *s, unsigned card, uint32_t *begun);

/* Whether a page at hand, of that context, has a hole of so many units. The place of a block that is
 * just being freed counts as taken. Looks at all pages: only for requests that don't fit otherwise. After some dozens of pages whose holes are all too small it says yes without being sure. */
bool carve_pointers_room(struct carve_state *s, unsigned card, uint32_t context, uint32_t units);

#endif
