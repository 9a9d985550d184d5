/* SPDX-License-Identifier: Apache-2.0 */
/*
 * virtual.h: physical memory that a program maps itself (cuMemCreate and its kin).
 *
 * It is charged from its creation until no handle and no mapping of it is left, and no multicast object has it bound,
 * which is when the driver gives it back. One block can have several handles and be mapped in several places.
 *
 * A descriptor that the program was given of a block (cuMemExportToShareableHandle) keeps it, too, as long as it is open
 * by that number. What becomes of it otherwise, once it is sent to somebody or doubled, nobody hears.
 *
 * A multicast object has no memory. It goes with its last handle and mapping, and then lets go of all that is bound to
 * it.
 */
#ifndef CARVE_VIRTUAL_H
#define CARVE_VIRTUAL_H

#include "state.h"

/* What goes back when a handle or a mapping was the last of its block. */
struct carve_gone {
    uint32_t units; /* 0: others are left, or the block isn't known */
    uint32_t object; /* not 0: it was an object to which memory is bound: see carve_virtual_unbound_all */
    uint8_t card;
};

/* Takes the turn to ask the driver for any of these. One thread has it, from before the driver is asked until its
 * answer is written down, so that both see the same order: else a mapping that the driver makes just before a release
 * would be looked up just after it, and not be found. A thread that has it gets it again, as in a callback of the
 * driver, and nobody waits for it without end: see turns.h. No lock is held meanwhile, and nobody who has the turn waits
 * for another process. With room there is also memory for whatever is written down then. False, and no turn, where
 * there is none. */
bool carve_virtual_turn(struct carve_state *s, bool room);
void carve_virtual_turn_end(struct carve_state *s);

/* A new block with one handle. False, and nothing changed, where there is no memory to remember it. A block that
 * had this handle before must have gone past this library; it comes back in *stale. */
bool carve_virtual_create(struct carve_state *s, uint64_t handle, unsigned card, uint32_t units, struct carve_gone *stale);

/* A handle of memory that others made, and are charged for. */
void carve_virtual_imported(struct carve_state *s, uint64_t handle, unsigned card);

/* A descriptor of a block was made. What was known by its number must have been closed, and is what comes back. */
struct carve_gone carve_virtual_exported(struct carve_state *s, uint64_t handle, int descriptor);
/* A handle that was had of a descriptor: false unless that is one of this process' own. */
bool carve_virtual_own(struct carve_state *s, uint64_t handle, int descriptor);
/* Gives back blocks whose last descriptor was closed. */
void carve_virtual_look_slowly(struct carve_state *s);
static inline void carve_virtual_look(struct carve_state *s) {
    if (CARVE_UNLIKELY(__atomic_load_n(&s->virtual.kept, __ATOMIC_ACQUIRE) != 0)) {
        carve_virtual_look_slowly(s);
    }
}

/* A handle was released. */
struct carve_gone carve_virtual_release(struct carve_state *s, uint64_t handle);

/* One more handle of what is mapped at address, perhaps with a value that was there before. */
void carve_virtual_retained(struct carve_state *s, uint64_t handle, uint64_t address);

/* A mapping was made. What was mapped there before must have gone past this library, and is what comes back. */
struct carve_gone carve_virtual_mapped(struct carve_state *s, uint64_t address, uint64_t bytes, uint64_t handle);

/* A range was unmapped: gives, one by one, the blocks that went with it. *next starts at address; false at the
 * end of the range. */
bool carve_virtual_unmapped(struct carve_state *s, uint64_t *next, uint64_t end, struct carve_gone *gone);

/* A multicast object was made, with one handle. False where there is no memory to remember it. */
bool carve_virtual_object(struct carve_state *s, uint64_t handle);

/* Memory that is about to be bound to an object: by its handle, or by an address where it is mapped (handle 0). It is
 * held from now on, whatever else becomes of it. 0: it isn't known. */
uint32_t carve_virtual_bind(struct carve_state *s, uint64_t handle, uint64_t address);
/* The card of what is held. */
unsigned carve_virtual_card(struct carve_state *s, uint32_t block);
/* It was bound; what was bound there before must have gone past this library, and is what comes back. An object that
 * isn't known is from then on. False where there is no memory to remember it: then it is held still. */
bool carve_virtual_bound(struct carve_state *s, uint32_t block, uint64_t object, unsigned card, uint64_t offset, struct carve_gone *stale);
/* It wasn't, or nobody could remember it. */
struct carve_gone carve_virtual_let_go(struct carve_state *s, uint32_t block);
/* A binding ended. */
struct carve_gone carve_virtual_unbound(struct carve_state *s, uint64_t object, unsigned card, uint64_t offset);
/* An object has gone: gives, one by one, what was bound to it; false when nothing is left. */
bool carve_virtual_unbound_all(struct carve_state *s, uint32_t object, struct carve_gone *gone);

#endif
