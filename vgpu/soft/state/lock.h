/*
 * lock.h - the lock of the shared state, and who is alive.
 *
 * A POSIX robust mutex won't do here: its list pointers live in memory that
 * tenants write, and following them would let a tenant crash an agent. So the
 * lock is one word, the owner's slot number, and a waiter that has waited for
 * a while asks the kernel whether that owner still lives. The kernel knows by
 * a record lock that each process holds on its slot's byte of the file
 * "alive": such a lock ends with the process however it ends, is not
 * inherited by fork, and F_GETLK names its owner by the pid that the asking
 * process's own PID namespace gives it.
 */
#ifndef SOFT_LOCK_H
#define SOFT_LOCK_H

#include "region.h"

/* Takes a slot for this library instance in this process. After fork the child
 * must forget the parent's slot (me = SOFT_NO_INDEX) and claim its own. */
soft_error soft_slot_claim(soft_region *region, uint32_t kind);

/* Gives an observer's slot back. Memory held in it must be gone before. */
void soft_slot_release(soft_region *region);

/* True while our slot is ours. A process that closed all its descriptors has
 * lost it: for the kernel driver that is the same as having exited. */
bool soft_slot_mine(const soft_region *region);

/*
 * Takes the lock for our slot. Fails with SOFT_ELOCK after patience_ms: only a
 * stopped or hostile owner can keep it so long. When the former owner died
 * with it, the derived sums are recounted first.
 */
soft_error soft_lock(soft_region *region, unsigned patience_ms);
void soft_unlock(soft_region *region);
enum { SOFT_PATIENCE_MS = 10000 };

/* Whether the owner of a slot is alive. *host_pid gets its pid as seen from
 * here, 0 when it is not visible from this PID namespace. */
bool soft_slot_alive(const soft_region *region, uint32_t index, uint32_t *host_pid);

#endif
