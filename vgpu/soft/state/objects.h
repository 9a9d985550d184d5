/*
 * objects.h - memory, pools and events that more than one process can hold.
 *
 * An object that holds memory has a range of the file ROOT/softgpu/shared, so
 * that all who map it see the same bytes. It lives while a process holds it or
 * a descriptor of it is open anywhere: such a descriptor is an opening of that
 * file with a lock on the object's byte, and the kernel drops the lock with
 * the last copy of the descriptor, in whatever process that is.
 *
 * A card is charged once, and one process pays: who made the object, and when
 * that one lets go or dies, another holder (as NVIDIA's kernel driver passes a
 * memory's ownership on along its list of duplicates). While only descriptors
 * are left the card counts the memory and no process does.
 *
 * All functions want the lock.
 */
#ifndef SOFT_OBJECTS_H
#define SOFT_OBJECTS_H

#include "region.h"

/*
 * A new object that our slot holds, and pays for when it has bytes on a card:
 * the caller has charged them already. card: SOFT_NO_INDEX for memory of the
 * host. NULL when the table or the file is full; then nothing has changed.
 */
soft_object *soft_object_new(soft_region *region, uint32_t kind, uint32_t card, uint64_t bytes);

/* The object of a number and generation as a handle has them; NULL for one that is no more, or never was. */
soft_object *soft_object_at(const soft_region *region, uint32_t index, uint64_t generation);
uint32_t soft_object_index(const soft_region *region, const soft_object *object);

/* Our slot holds it from now on; holding twice is holding once. */
void soft_object_hold(soft_region *region, soft_object *object);
bool soft_object_held(const soft_region *region, const soft_object *object);
/* Our slot lets go. Frees it, and its memory on the card, when nobody is left. */
void soft_object_drop(soft_region *region, soft_object *object);

/* A descriptor that keeps the object, close-on-exec; -1 and errno when that fails. */
int soft_object_export(const soft_region *region, const soft_object *object);
/* The object behind such a descriptor; NULL for any other. */
soft_object *soft_object_of(const soft_region *region, int descriptor);

/* What a dead slot holds passes on. Before its charge is taken off. */
void soft_objects_bury(soft_region *region, uint32_t slot);
/* Frees what only descriptors held that are closed now. */
void soft_objects_sweep(soft_region *region);
/* Adds what no process pays for to sums by card; drops holders that don't live. */
void soft_objects_recount(soft_region *region, uint64_t used[SOFT_CARDS]);

/* For a look from outside: bounded, NULL for a free entry or past the end. */
const soft_object *soft_object_seen(const soft_region *region, uint32_t index);
uint32_t soft_objects_high(const soft_region *region);

#endif
