/* SPDX-License-Identifier: Apache-2.0 */
#include "turns.h"

#include <errno.h>

static uint64_t me(void) { return (uintptr_t)&errno; /* each thread has its own */ }

void carve_turn_take(struct carve_turn *turn) {
    uint64_t serial = 0, deadline = 0;
    unsigned round = 0;
    carve_lock(&turn->lock);
    while (turn->holder != 0 && turn->holder != me()) {
        uint64_t now = carve_now();
        if (deadline == 0 || turn->serial != serial) {
            serial = turn->serial;
            deadline = now + CARVE_TURN_WAIT_NS;
        } else if (now >= deadline) {
            turn->holder = 0;
            break;
        }
        carve_unlock(&turn->lock);
        carve_back_off(&round);
        carve_lock(&turn->lock);
    }
    if (turn->holder == 0) {
        turn->holder = me();
        turn->uses = 0;
        turn->serial++;
    }
    turn->uses++;
    carve_unlock(&turn->lock);
}

bool carve_turn_try(struct carve_turn *turn) {
    carve_lock(&turn->lock);
    bool had = turn->holder == 0 || turn->holder == me();
    if (turn->holder == 0) {
        turn->holder = me();
        turn->uses = 0;
        turn->serial++;
    }
    turn->uses += had;
    carve_unlock(&turn->lock);
    return had;
}

void carve_turn_end(struct carve_turn *turn) {
    carve_lock(&turn->lock);
    /* Another's where it was taken over, and nobody's where a callback forked and this is the child. */
    if (turn->holder == me() && --turn->uses == 0) {
        turn->holder = 0;
    }
    carve_unlock(&turn->lock);
}
