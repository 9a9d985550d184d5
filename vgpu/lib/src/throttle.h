/* SPDX-License-Identifier: Apache-2.0 */
/*
 * throttle.h: launches by the share of the card that this process has.
 *
 * A launch asks credit.h whether it may go, and waits until it may. Some launches are put between two events of our
 * own, so that it is known afterwards what they cost; whoever comes next, or has waited for the card, looks whether
 * they are done. There is no thread of our own: a process in which nobody calls the driver is followed by the agent,
 * from what it published last.
 *
 * What is captured isn't launched, and has no events of ours. While any stream of the process is being captured, events
 * are recorded and asked for by threads in relaxed capture mode; where the driver has no such mode they aren't recorded.
 * Whatever the driver does with a call, other threads go on: no lock is held over one. What never ends isn't waited for
 * for ever. Fails open: what can't be measured is paid by its estimate, and where the agent divides no compute nothing
 * is looked at.
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
    const void *key;
    uint32_t cost;
    int flight; /* -1: it isn't sampled */
    unsigned card;
    CUstream stream;
    bool per_thread;
    bool elsewhere; /* the stream isn't the current context's */
};

static inline bool carve_compute_divided(const struct carve_state *s) {
    return CARVE_UNLIKELY(s->compute != NULL && __atomic_load_n(&s->limits->compute, __ATOMIC_RELAXED) != 0);
}

/* Waits until the launch may go. key names what is launched: a function, an executable graph, a size of copies.
 * guess_ns: what it takes as long as nothing is known of it; 0: CARVE_COST_UNSEEN_NS. per_thread: stream 0 is the
 * thread's own. later: the caller has others to wait for, which isn't this card's time; carve_launch_take_off comes
 * right before the launch then, with the stream's context being current. */
void carve_launch_wait(const struct carve_driver *d, struct carve_state *s, const void *key, uint64_t guess_ns, CUstream stream, bool per_thread, bool later, struct carve_launch *launch);
void carve_launch_take_off(const struct carve_driver *d, struct carve_state *s, const struct carve_launch *launch);
/* The same for what works on a set of cards, see spread.h: a launch for each of those on which it has to be paid, which
 * end with carve_launch_over. Returns how many these are. */
unsigned carve_launch_wait_on(const struct carve_driver *d, struct carve_state *s, const void *key, uint32_t cards, CUstream stream, bool per_thread, struct carve_launch list[CARVE_MAX_CARDS]);
void carve_launch_over(const struct carve_driver *d, struct carve_state *s, struct carve_launch *launch, CUresult result);

/* A function's launches cost by their size: a key for steps of half an octave. What it costs by its arguments isn't
 * known beforehand, see suspect() in credit.c. */
static inline const void *carve_launch_key(const void *function, uint64_t threads) {
    unsigned octave = 63u - (unsigned)__builtin_clzll(threads | 2);
    uint64_t step = octave * 2 + ((threads >> (octave - 1)) & 1);
    return (const void *)((uintptr_t)function ^ (uintptr_t)(step << 56)); /* where addresses have nothing */
}

/* threads: of the launch in all; 0 where that says nothing. */
static inline void carve_launch_begin(const struct carve_driver *d, struct carve_state *s, const void *what, uint64_t threads, CUstream stream, bool per_thread, struct carve_launch *launch) {
    launch->throttle = NULL;
    if (s != NULL && carve_compute_divided(s)) {
        carve_launch_wait(d, s, carve_launch_key(what, threads), 0, stream, per_thread, false, launch);
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

/* A context is about to go, with its events, which stand around launches on other cards, too: between hold and let_go
 * nobody asks the driver for events; what is done by then is paid before. Once it is gone, and before let_go, it is forgotten. held is of the cards on which
 * something was launched. */
uint32_t carve_throttles_hold(const struct carve_driver *d, struct carve_state *s);
void carve_throttles_let_go(struct carve_state *s, uint32_t held);
void carve_throttles_forget(const struct carve_driver *d, struct carve_state *s, uint32_t context);

/* Captures of streams. The count goes up before one begins, so that no event of ours comes after. */
void carve_capture_begins(struct carve_state *s);
void carve_capture_begun(const struct carve_driver *d, struct carve_state *s, CUstream stream, bool begun);
/* The stream's has ended; false where it began none. */
bool carve_capture_ended(struct carve_state *s, CUstream stream);
/* A context is gone, with its streams. */
void carve_captures_forget(struct carve_state *s, uint32_t context);

#endif
