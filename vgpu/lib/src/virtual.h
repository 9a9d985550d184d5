/* SPDX-License-Identifier: Apache-2.0 */
/*
 * virtual.h: physical memory that a program maps itself (cuMemCreate and its kin).
 *
 * It is charged from its creation until no handle and no mapping of it is left, which is when the driver gives it
 * back. One block can have several handles and be mapped in several places.
 */
#ifndef CARVE_VIRTUAL_H
#define CARVE_VIRTUAL_H

#include "state.h"

/* What goes back when a handle or a mapping was the last of its block. */
struct carve_gone {
    uint32_t units; /* 0: others are left, or the block isn't known */
    uint8_t card;
};

/* A new block with one handle. False, and nothing changed, where there is no memory to remember it. A block that
 * had this handle before must have gone past this library; it comes back in *stale. */
bool carve_virtual_create(struct carve_state *s, uint64_t handle, unsigned card, uint32_t units, struct carve_gone *stale);

/* A handle that is about to be released is forgotten first, since the driver may give its value to another block
 * as soon as it is. */
struct carve_released {
    bool known;
    uint64_t handle;
    struct carve_gone gone;
    uint32_t block; /* which had others left */
};
struct carve_released carve_virtual_release(struct carve_state *s, uint64_t handle);
/* It wasn't released. */
void carve_virtual_restore(struct carve_state *s, const struct carve_released *released);

/* One more handle of what is mapped at address, perhaps with a value that was there before. */
void carve_virtual_retained(struct carve_state *s, uint64_t handle, uint64_t address);

/* A mapping was made. */
void carve_virtual_mapped(struct carve_state *s, uint64_t address, uint64_t bytes, uint64_t handle);

/* A range was unmapped: gives, one by one, the blocks that went with it. *next starts at address; false at the
 * end of the range. */
bool carve_virtual_unmapped(struct carve_state *s, uint64_t *next, uint64_t end, struct carve_gone *gone);

#endif
