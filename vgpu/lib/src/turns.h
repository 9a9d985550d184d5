/* SPDX-License-Identifier: Apache-2.0 */
/*
 * turns.h: one thread of this process at a time asks the driver for something of a kind, from before it is asked until
 * its answer is written down, so that both see the same order.
 *
 * No lock is held meanwhile, and nothing that other processes see. A turn lies in memory that a forked child finds
 * wiped, so it finds it free.
 */
#ifndef CARVE_TURNS_H
#define CARVE_TURNS_H

#include "sys.h"

/* The driver may wait for work in a call, and that for a thread which wants the turn; or the thread that has it ended
 * within the call. So whoever has waited for so long for one and the same call takes the turn from it. */
#define CARVE_TURN_WAIT_NS 10000000000ull

/* Zeroed: free. */
struct carve_turn {
    carve_lock_t lock;
    uint32_t uses;    /* how often its holder has it */
    uint64_t holder;  /* 0: nobody */
    uint64_t serial;  /* grows with each that takes it */
};

/* A thread that has the turn gets it again, as in a callback of the driver. */
void carve_turn_take(struct carve_turn *turn);
/* The same without waiting; false where another thread has it. */
bool carve_turn_try(struct carve_turn *turn);
void carve_turn_end(struct carve_turn *turn);

#endif
