/* SPDX-License-Identifier: Apache-2.0 */
/*
 * throttle.h: launches by the share of the card that this process has.
 *
 * A launch asks credit.h whether it may go, and waits until it may. Some launches are put between two events of our
 * own, so that it is known afterwards what they cost; whoever comes next, or has waited for the card, looks whether
 * they are done. There is no thread of our own: a process in which nobody calls the driver is followed by the agent,
 * from what it published last.
 *
 * Events are recorded and asked for only while no stream of the process is being captured: what is launched
 * meanwhile is paid by its estimate. Fails open: what can't be measured is paid by its estimate, and where the
 * agent divides no compute nothing is looked at.
 */
#ifndef CARVE_THROTTLE_H
#define CARVE_THROTTLE_H

#include "contexts.h"
#include "credit.h"
#include "driver.h"
#include "state.h"

struct carve_throttle;

/* One launch, between begin and end. */
struct carve_launch {
    struct carve_throttle *throttle; /* NULL: nothing to do at the end */
    struct carve_ticket ticket;
    uint32_t cost;
    int flight; /* -1: not measured */
    unsigned card;
    CUstream stream;
    bool per_thread;
};

static inline bool carve_compute_divided(const struct carve_state *s) {
    return CARVE_UNLIKELY(s->compute != NULL && __atomic_load_n(&s->limits->compute, __ATOMIC_RELAXED) != 0);
}

/* Waits until the launch may go. key names what is launched: a function, an executable graph. per_thread: stream 0 is
 * the thread's own. */
void carve_launch_wait(const struct carve_driver *d, struct carve_state *s, const void *key, CUstream stream, bool per_thread, struct carve_launch *launch);
void carve_launch_over(const struct carve_driver *d, struct carve_state *s, struct carve_launch *launch, CUresult result);

static inline void carve_launch_begin(const struct carve_driver *d, struct carve_state *s, const void *key, CUstream stream, bool per_thread, struct carve_launch *launch) {
    launch->throttle = NULL;
    if (s != NULL && carve_compute_divided(s)) {
        carve_launch_wait(d, s, key, stream, per_thread, launch);
    }
}

static inline void carve_launch_end(const struct carve_driver *d, struct carve_state *s, struct carve_launch *launch, CUresult result) {
    if (CARVE_UNLIKELY(launch->throttle != NULL)) {
        carve_launch_over(d, s, launch, result);
    }
}

/* A thread has waited for the card: pays for what is done. */
void carve_throttle_look_slow(const struct carve_driver *d, struct carve_state *s);

static inline void carve_throttle_look(const struct carve_driver *d) {
    struct carve_state *s = __atomic_load_n(&carve_state_now, __ATOMIC_ACQUIRE);
    if (s != NULL && __atomic_load_n(&s->ready, __ATOMIC_ACQUIRE) != 0 && carve_compute_divided(s)) {
        carve_throttle_look_slow(d, s);
    }
}

/* A context is about to go, with its events. */
void carve_throttle_forget(const struct carve_driver *d, struct carve_state *s, unsigned card, uint32_t context);

/* A stream begins or ends to be captured. */
static inline void carve_capture_begins(struct carve_state *s) { __atomic_add_fetch(&s->captures, 1, __ATOMIC_SEQ_CST); }
static inline void carve_capture_ends(struct carve_state *s) {
    uint32_t n = __atomic_load_n(&s->captures, __ATOMIC_RELAXED);
    while (n != 0 && !__atomic_compare_exchange_n(&s->captures, &n, n - 1, false, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED)) {
    }
}

#endif
