/* SPDX-License-Identifier: Apache-2.0 */
/*
 * reserves.h: memory that the driver takes and gives back as it sees fit, and tells by a figure: pools of
 * stream-ordered memory, and the memory of graphs.
 *
 * What is charged for a reserve is that figure, read after each call that may have changed it. A call that may let it
 * grow holds room for that first; a reserve shrinks at synchronisation, which therefore is hooked, and where somebody
 * needs the room. One lock keeps reading the figure and charging it together. It isn't held in any call that may wait
 * for work on a stream, or for another process: that work may wait for a thread which needs the lock.
 *
 * At any moment a reserve has no more on the card than what is charged for it together with what the threads hold who are
 * with the driver for it (carve_reserve.flight); all of that was admitted.
 * - A thread that asks the driver holds the most that the call can take. When it is back it charges no more than it held:
 *   what the figure has grown by beyond that others have taken, whose hold is still there. Who isn't with the driver may
 *   only lower the charge while others are.
 * - A call that counts on what is there (steady) holds nothing. While there is one the charge isn't lowered, and others
 *   hold what it takes anew if they get what it counts on, beside their own; none begins while others are with the driver.
 * - A call that is made though nothing can be held, since the reserve has room for it, has the reserve for itself: from
 *   before it asks until what it took all the same is given back, nobody else asks the driver for memory of it, and what is
 *   charged stays. So its own growth shows, and nobody gets a part of it. That growth alone, for that moment, isn't covered.
 */
#ifndef CARVE_RESERVES_H
#define CARVE_RESERVES_H

#include "driver.h"
#include "leaving.h"
#include "ledger.h"
#include "state.h"

/* Whether this process has any. */
static inline bool carve_reserves_any(struct carve_state *s) {
    return CARVE_UNLIKELY(__atomic_load_n(&s->reserves.count, __ATOMIC_ACQUIRE) != 0);
}

/* Reads all figures of a card anew, and charges them; of all cards where card is -1. */
void carve_reserves_settle(const struct carve_driver *d, struct carve_state *s, int card);

/* What every hook that frees or waits does after the driver did. */
static inline void carve_reserves_follow(const struct carve_driver *d) {
    struct carve_state *s = __atomic_load_n(&carve_state_now, __ATOMIC_ACQUIRE);
    if (CARVE_UNLIKELY(s != NULL && (carve_reserves_any(s) || carve_leaving_any(s))) && (s = carve_state()) != NULL) {
        if (carve_leaving_any(s)) {
            carve_leaving_look(d, s);
        }
        if (carve_reserves_any(s)) {
            carve_reserves_settle(d, s, -1);
        }
    }
}

/* Charges units on a card as carve_admit does. What doesn't fit is weighed again after reserves of the card were
 * trimmed, as the driver does it before it refuses. Without patience no other process is waited for, and no refusal
 * counted. */
bool carve_obtain_slowly(const struct carve_driver *d, struct carve_state *s, unsigned card, uint32_t units, uint64_t asked_bytes, bool patient);

static inline bool carve_obtain(const struct carve_driver *d, struct carve_state *s, unsigned card, uint32_t units, uint64_t asked_bytes) {
    return CARVE_LIKELY(carve_try(s, card, units)) || carve_obtain_slowly(d, s, card, units, asked_bytes, true);
}

/* A call that may let a reserve grow. */
struct carve_growth {
    uint64_t bytes; /* asked for */
    /* Asks the driver. */
    CUresult (*make)(const struct carve_driver *d, struct carve_growth *growth);
    /* Gives back what was made, which took more than there was room for, and waits until it is. NULL: it can't be. */
    void (*undo)(const struct carve_driver *d, struct carve_growth *growth);
    /* Whether the call takes no memory now, since its stream is being captured. */
    bool (*captured)(const struct carve_driver *d, const struct carve_growth *growth);
    /* The driver has answered; the lock is held. NULL: nothing to do. */
    void (*over)(struct carve_state *s, struct carve_growth *growth);
    uint64_t most_bytes; /* the most that the reserve can grow by; 0: by bytes, in steps of a pool */
    bool in_one;         /* and all of that is one piece of memory */
    /* Nothing is expected to be taken, since the reserve has it. Whoever sets it has counted the call in the reserve's
     * counting, and most_bytes in its counted, under the lock under which that was seen; carve_reserve_grow counts it
     * out. */
    bool steady;
    /* what make and undo work on */
    CUdeviceptr *pointer;
    CUmemoryPool pool;
    CUgraphExec graph;
    CUstream stream;
    bool per_thread;
};

/* The reserve of a pool, or of the graphs of a device (pool NULL); on the list from then on if add. Its number, to be
 * used in the next call, or -1: it isn't on the list, or there is no place for it. */
int carve_reserve_find(const struct carve_driver *d, struct carve_state *s, CUmemoryPool pool, CUdevice device, bool add);

/* Makes the call and charges what it took. CUDA_ERROR_OUT_OF_MEMORY, and nothing changed, where there is no room. */
CUresult carve_reserve_grow(const struct carve_driver *d, struct carve_state *s, int reserve, struct carve_growth *growth);

/* A pool that the program destroys. Its handle stays the driver's until nothing of it is in use any more, and is
 * charged until then; the driver, too, keeps the memory so long. */
CUresult carve_reserve_destroy(const struct carve_driver *d, struct carve_state *s, CUmemoryPool pool);

/* Whether that was done. */
bool carve_reserve_destroyed(struct carve_state *s, CUmemoryPool pool);

#endif
