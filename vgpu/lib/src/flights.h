/* SPDX-License-Identifier: Apache-2.0 */
/*
 * flights.h: sampled launches on their way, and the events between which they run. For throttle.c, which decides what
 * may be launched; here it is found out what that took.
 */
#ifndef CARVE_FLIGHTS_H
#define CARVE_FLIGHTS_H

#include "throttle.h"

enum {
    COSTS = 4096,   /* functions of one card whose cost is remembered; a power of two */
    FLIGHTS = 1024, /* sampled launches on the card at once */
    CLOCKS = 64,    /* contexts of one card whose events are compared with our clock */
    EVENTS = 64,    /* spare events of one context */
};

#define LATE_NS 1000000000ull /* nothing is waited for any longer than that, if nothing else ends meanwhile */

/*
 * A sampled launch, from before it is made until it is paid. It belongs to the thread that launches until recorded is
 * set, and from then on to whoever looks, who holds t->looking. A context that goes takes the events along: gone is
 * set, the launch is paid, and its owner only has to give the place back.
 */
struct flight {
    CUevent begin, end; /* NULL: it isn't measured */
    struct carve_ticket ticket;
    uint64_t launched_at;
    CUstream stream; /* or the thread whose own it is */
    const void *key;
    uint32_t cost;
    int8_t clock;
    bool recorded; /* both events are in the stream */
    bool begun;    /* it was seen to be on the card, after a while, or before its context went */
    bool gone;
    int16_t next, before; /* in the order of launch; next of the free list, too; -1: last */
};

/* One context's events, and when the first of them was on our clock. */
struct events {
    uint32_t context; /* carve_context.id; 0: free place */
    CUevent base;     /* NULL: none is done yet */
    uint64_t low, high; /* base was recorded between these two */
    uint32_t spare_count;
    CUevent spare[EVENTS];
};

/* The lock is never held over a call of the driver: one that blocks, as a full queue makes a launch or a record do,
 * must not keep other threads from work on which that queue may depend. */
struct carve_throttle {
    carve_lock_t lock;
    uint32_t owner; /* what is in terms that are ours */
    struct carve_credit credit;
    int64_t spent_ns;        /* of it, that the container's purse knows of */
    uint32_t container_ppm;  /* at the last look at the terms; 0: there is no purse */
    double stretch;          /* the time in which that earns a nanosecond */
    struct carve_purse *purse;
    bool begun;              /* with what the container had */
    bool loan;               /* it may owe, at the last look */
    bool looking;    /* a thread asks the driver for events */
    bool look_again; /* another wanted to meanwhile */
    uint32_t holds;  /* no look may begin: contexts are going */
    uint64_t held_at; /* when that began last */
    uint64_t moved_at; /* when something was done last, or launched while nothing was out */
    struct events clocks[CLOCKS];
    uint32_t lookups;
    const void *keys[COSTS];
    uint32_t used[COSTS]; /* lookups at that time */
    struct carve_cost costs[COSTS];
    int16_t first, last, free; /* flights */
    uint32_t flying;
    struct flight flights[FLIGHTS];
};

/* The software GPU may have a clock of its own, which its processes share. */
static inline uint64_t carve_throttle_now(const struct carve_driver *d) {
    return CARVE_UNLIKELY(d->softgpu_clock_ns != NULL) ? d->softgpu_clock_ns() : carve_now();
}

static inline const struct carve_compute_card *carve_throttle_card(const struct carve_state *s, unsigned card) { return &s->compute[card]; }

/* Events of a context that nobody needs at present are kept; false where there is no room for one more, which the
 * caller destroys, without the lock. */
bool carve_event_keep(struct events *e, CUevent event);
void carve_event_destroy(const struct carve_driver *d, CUevent event);
bool carve_event_record(const struct carve_driver *d, CUevent event, CUstream stream, bool per_thread);

/* Whether events may be recorded and asked for now. */
bool carve_can_measure(const struct carve_driver *d, const struct carve_state *s, bool per_thread);

/* The lock is held for all that follows. */

/* A place for a launch, at the end of the list. -1: there is none. */
int16_t carve_flight_place(struct carve_throttle *t, const struct carve_launch *l, uint64_t now);
void carve_flight_unlink(struct carve_throttle *t, int16_t at);
/* What is learnt of a launch whose function has lost its place in the table is nobody's. */
struct carve_cost *carve_flight_cost(struct carve_throttle *t, const struct flight *f, struct carve_cost *nobody);
/* Puts the first event before a launch whose flight is placed already. The lock is given up meanwhile. */
void carve_flight_take_off(const struct carve_driver *d, struct carve_throttle *t, uint32_t context, const struct carve_launch *l);
/* Pays for all that is done. The lock is given up meanwhile. begun: asks of what isn't whether it is on the card. */
void carve_flights_look(const struct carve_driver *d, struct carve_state *s, struct carve_throttle *t, unsigned card, uint32_t share, bool begun);
/* A launch waits for others, and for long nothing has ended: they may be waiting for what the program does after it,
 * or run until it does. So they aren't waited for any more. */
void carve_flights_give_up(struct carve_state *s, struct carve_throttle *t, unsigned card, uint64_t now);

#endif
