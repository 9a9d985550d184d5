/* SPDX-License-Identifier: Apache-2.0 */
#include "flights.h"

enum {
    LANES = 8,  /* streams that are known to be under way, at one look */
    ASKED = 64, /* events that the driver is asked for, at one look, and that aren't there yet */
    PASSES = 8, /* of one look, for those who wanted one meanwhile */
};

#define FIRST_MOST_NS 1000000000000ull /* more is nonsense */
#define BASE_LASTS_MS 8000.0f /* a float of milliseconds is good to a microsecond up to here */
#define BASE_LASTS_NS 8000000000ull

/* ------------------------------------------------------------------------------------------ events */

/* The events of a context; NULL where there is no place for it. */
static struct events *events_of(struct carve_throttle *t, uint32_t context) {
    struct events *unused = NULL;
    for (int i = 0; i < CLOCKS; i++) {
        if (t->clocks[i].context == context) {
            return &t->clocks[i];
        }
        if (unused == NULL && t->clocks[i].context == 0) {
            unused = &t->clocks[i];
        }
    }
    if (unused != NULL) {
        unused->context = context;
    }
    return unused;
}

/* Keeps an event for later; false where the caller has to destroy it, without the lock. */
bool carve_event_keep(struct events *e, CUevent event) {
    if (event == NULL || e->spare_count == EVENTS) {
        return event == NULL;
    }
    e->spare[e->spare_count++] = event;
    return true;
}

void carve_event_destroy(const struct carve_driver *d, CUevent event) {
    if (event != NULL && d->cuEventDestroy_v2 != NULL) {
        (void)d->cuEventDestroy_v2(event);
    }
}

bool carve_event_record(const struct carve_driver *d, CUevent event, CUstream stream, bool per_thread) {
    return (per_thread ? d->cuEventRecord_ptsz(event, stream) : d->cuEventRecord(event, stream)) == CUDA_SUCCESS;
}

/* Our calls must not end a capture that another thread begins at this very moment: the driver lets a thread in
 * relaxed mode do what global captures forbid to others. */
static CUstreamCaptureMode relax(const struct carve_driver *d, CUstreamCaptureMode mode) {
    if (d->cuThreadExchangeStreamCaptureMode != NULL) {
        (void)d->cuThreadExchangeStreamCaptureMode(&mode);
    }
    return mode;
}

static bool has_events(const struct carve_driver *d, bool per_thread) {
    return d->cuEventCreate != NULL && d->cuEventQuery != NULL && d->cuEventElapsedTime != NULL && (per_thread ? d->cuEventRecord_ptsz != NULL : d->cuEventRecord != NULL);
}

/* Events may be recorded, in a stream that isn't being captured, and asked for: captures of others don't mind either of
 * a thread in relaxed mode. Where one minds an event in the legacy stream, it minds the launch, too. */
bool carve_can_measure(const struct carve_driver *d, const struct carve_state *s, bool per_thread) {
    return (d->cuThreadExchangeStreamCaptureMode != NULL || __atomic_load_n(&s->captures, __ATOMIC_SEQ_CST) == 0) && has_events(d, per_thread);
}

/* An event happened elapsed milliseconds after its context's first one, and surely between two moments: narrows down
 * when that first one was. */
static void place_event(struct events *e, float elapsed, uint64_t after, uint64_t before) {
    uint64_t later = (uint64_t)((double)elapsed * 1e6);
    if (after > later && after - later > e->low) {
        e->low = after - later;
    }
    if (before > later && before - later < e->high) {
        e->high = before - later;
    }
    if (e->low > e->high) {
        e->high = e->low; /* the two clocks drift apart by millionths */
    }
}

/* ----------------------------------------------------------------------------------------- flights */

void carve_flight_unlink(struct carve_throttle *t, int16_t at) {
    struct flight *f = &t->flights[at];
    if (f->before < 0) {
        t->first = f->next;
    } else {
        t->flights[f->before].next = f->next;
    }
    if (f->next < 0) {
        t->last = f->before;
    } else {
        t->flights[f->next].before = f->before;
    }
    f->next = t->free;
    t->free = at;
    __atomic_store_n(&t->flying, t->flying - 1, __ATOMIC_RELAXED);
}

/* What tells streams apart: each thread has one of its own, of the same name in all. */
static CUstream stream_of(const struct carve_launch *l) {
    bool own = l->stream == CU_STREAM_PER_THREAD || (l->per_thread && l->stream == NULL);
    return own ? (CUstream)carve_thread() : l->stream;
}

/* A place for a launch, at the end of the list. -1: there is none. */
int16_t carve_flight_place(struct carve_throttle *t, const struct carve_launch *l, uint64_t now) {
    int16_t at = t->free;
    if (at < 0) {
        return -1;
    }
    struct flight *f = &t->flights[at];
    t->free = f->next;
    *f = (struct flight){.ticket = l->ticket, .launched_at = now, .stream = stream_of(l), .key = l->key, .cost = l->cost, .clock = -1, .next = -1, .before = t->last};
    if (t->last < 0) {
        t->first = at;
        t->moved_at = now;
    } else {
        t->flights[t->last].next = at;
    }
    t->last = at;
    __atomic_store_n(&t->flying, t->flying + 1, __ATOMIC_RELAXED);
    return at;
}

/* What is learnt of a launch whose function has lost its place in the table is nobody's. */
struct carve_cost *carve_flight_cost(struct carve_throttle *t, const struct flight *f, struct carve_cost *nobody) {
    *nobody = (struct carve_cost){0};
    return t->keys[f->cost] == f->key ? &t->costs[f->cost] : nobody;
}

/* When a flight was on the card, after its context's first event. */
struct times { float begin, end; };

/* Asks the driver. base is NULL where this flight's first event becomes the context's. */
static bool times_of(const struct carve_driver *d, CUevent base, const struct flight *f, struct times *out) {
    out->begin = 0;
    if (base != NULL && (d->cuEventElapsedTime(&out->begin, base, f->begin) != CUDA_SUCCESS || out->begin < 0)) {
        return false;
    }
    return d->cuEventElapsedTime(&out->end, base != NULL ? base : f->begin, f->end) == CUDA_SUCCESS && out->begin <= out->end;
}

/* Pays for one that is done, and takes it off. spare takes events for which there is no room. */
static void land(struct carve_state *s, struct carve_throttle *t, unsigned card, uint32_t share, int16_t at, const struct times *times, uint64_t now, CUevent spare[2]) {
    struct flight *f = &t->flights[at];
    struct events *e = &t->clocks[f->clock];
    struct carve_cost nobody, *cost = carve_flight_cost(t, f, &nobody);
    if (times == NULL) {
        carve_credit_guess(&t->credit, &f->ticket, share, now);
    } else {
        if (e->base == NULL) {
            e->base = f->begin;
            f->begin = NULL;
            e->low = 0;
            e->high = UINT64_MAX / 2;
        }
        place_event(e, times->begin, f->launched_at, now);
        place_event(e, times->end, f->launched_at, now);
        uint64_t begin = e->high + (uint64_t)((double)times->begin * 1e6), end = e->high + (uint64_t)((double)times->end * 1e6);
        bool first = cost->samples == 0;
        carve_credit_done(&t->credit, cost, &f->ticket, share, begin, end, &carve_throttle_card(s, card)->pace, now);
        if (first && cost->samples == 1 && cost != &nobody) {
            uint64_t *mean = &t->purse->first_ns, old = __atomic_load_n(mean, __ATOMIC_RELAXED), took = (uint64_t)(cost->estimate_ns > 0 ? cost->estimate_ns : 1);
            __atomic_store_n(mean, old == 0 || old > FIRST_MOST_NS ? took : (3 * old + took) / 4 + 1, __ATOMIC_RELAXED);
        }
        if (times->end > BASE_LASTS_MS) {
            CUevent old = e->base;
            uint64_t later = (uint64_t)((double)times->end * 1e6);
            e->base = f->end;
            e->low += later - later / 10000; /* a tenth of a millisecond in a second for drift */
            e->high += later;
            f->end = old;
        }
    }
    spare[0] = carve_event_keep(e, f->begin) ? NULL : f->begin;
    spare[1] = carve_event_keep(e, f->end) ? NULL : f->end;
    t->moved_at = now;
    carve_flight_unlink(t, at);
}

/* One pass over all that is out: in each stream up to the first that isn't done. t->looking is ours; the lock is held,
 * and given up for each question to the driver. */
static void pass(const struct carve_driver *d, struct carve_state *s, struct carve_throttle *t, unsigned card, uint32_t share, bool ask_begun) {
    CUstream under_way[LANES];
    int lanes = 0, asked = 0;
    for (int16_t at = t->first; at >= 0 && asked < ASKED && t->holds == 0;) {
        struct flight *f = &t->flights[at];
        bool skip = !f->recorded || f->gone;
        for (int i = 0; i < lanes && !skip; i++) {
            skip = under_way[i] == f->stream;
        }
        if (skip) {
            at = f->next;
            continue;
        }
        /* Nobody else takes this one off, or its context's first event: we are looking. */
        CUevent base = t->clocks[f->clock].base, spare[2] = {NULL, NULL};
        struct times times;
        carve_unlock(&t->lock);
        CUresult result = d->cuEventQuery(f->end);
        bool known = result == CUDA_SUCCESS && times_of(d, base, f, &times);
        uint64_t now = carve_throttle_now(d);
        bool begun = result == CUDA_ERROR_NOT_READY && (ask_begun || now - f->launched_at > LATE_NS / 2) && d->cuEventQuery(f->begin) == CUDA_SUCCESS;
        CARVE_STEP("compute-landing");
        carve_lock(&t->lock);
        int16_t next = f->next;
        if (result == CUDA_ERROR_NOT_READY) {
            f->begun = begun;
            asked++;
            if (lanes < LANES) {
                under_way[lanes++] = f->stream;
            }
        } else {
            land(s, t, card, share, at, known ? &times : NULL, now, spare);
            if (CARVE_UNLIKELY(spare[0] != NULL || spare[1] != NULL)) {
                carve_unlock(&t->lock);
                carve_event_destroy(d, spare[0]);
                carve_event_destroy(d, spare[1]);
                carve_lock(&t->lock);
            }
        }
        at = next;
    }
}

/* Pays for all that is done. The lock is held, and given up meanwhile. */
void carve_flights_look(const struct carve_driver *d, struct carve_state *s, struct carve_throttle *t, unsigned card, uint32_t share, bool begun) {
    if (t->flying == 0 || t->holds != 0) {
        return;
    }
    if (t->looking) {
        t->look_again = true;
        return;
    }
    t->looking = true;
    carve_unlock(&t->lock);
    CUstreamCaptureMode mode = relax(d, CU_STREAM_CAPTURE_MODE_RELAXED);
    carve_lock(&t->lock);
    /* Others that launch all the time would keep this thread here: whoever comes after the last pass looks himself. */
    int passes = 0;
    do {
        t->look_again = false;
        pass(d, s, t, card, share, begun);
    } while (t->look_again && t->holds == 0 && ++passes < PASSES);
    carve_unlock(&t->lock);
    (void)relax(d, mode);
    carve_lock(&t->lock);
    t->looking = false;
}

/* A launch waits for others, and for long nothing has ended: they may be waiting for what the program does after it,
 * or run until it does. So they aren't waited for any more. The lock is held. */
void carve_flights_give_up(struct carve_state *s, struct carve_throttle *t, unsigned card, uint64_t now) {
    for (int16_t at = t->first; at >= 0; at = t->flights[at].next) {
        struct flight *f = &t->flights[at];
        if (!f->gone && (!f->ticket.late || f->begun) && now - f->launched_at > LATE_NS) {
            carve_credit_late(&t->credit, &f->ticket, f->begun ? f->launched_at : 0, &carve_throttle_card(s, card)->pace, now);
        }
    }
}

/* An event of the context: a spare one, or a new one of the current context. The lock is held, and given up meanwhile. */
static CUevent take_event(const struct carve_driver *d, struct carve_throttle *t, struct events *e) {
    CUevent event = NULL;
    if (e->spare_count > 0) {
        return e->spare[--e->spare_count];
    }
    carve_unlock(&t->lock);
    if (d->cuEventCreate(&event, CU_EVENT_BLOCKING_SYNC) != CUDA_SUCCESS) {
        event = NULL;
    }
    carve_lock(&t->lock);
    return event;
}

/* Puts the first event before a launch whose flight is placed already. The lock is held, and given up meanwhile. */
void carve_flight_take_off(const struct carve_driver *d, struct carve_throttle *t, uint32_t context, const struct carve_launch *l) {
    struct flight *f = &t->flights[l->flight];
    struct events *e = context != 0 && t->holds == 0 ? events_of(t, context) : NULL;
    if (e == NULL) {
        return;
    }
    if (t->flying == 1 && e->base != NULL && f->launched_at > e->high && f->launched_at - e->high > BASE_LASTS_NS && e->spare_count < EVENTS) {
        (void)carve_event_keep(e, e->base); /* none is out that needs it */
        e->base = NULL;
    }
    f->clock = (int8_t)(e - t->clocks);
    CUevent begin = take_event(d, t, e), end = f->gone ? NULL : take_event(d, t, e);
    carve_unlock(&t->lock);
    CUstreamCaptureMode mode = relax(d, CU_STREAM_CAPTURE_MODE_RELAXED);
    bool good = begin != NULL && end != NULL && carve_event_record(d, begin, l->stream, l->per_thread);
    (void)relax(d, mode);
    CARVE_STEP("compute-recording");
    carve_lock(&t->lock);
    if (f->gone) {
        return; /* with its events */
    }
    if (good) {
        f->begin = begin;
        f->end = end;
        return;
    }
    f->clock = -1;
    begin = carve_event_keep(e, begin) ? NULL : begin;
    end = carve_event_keep(e, end) ? NULL : end;
    if (begin != NULL || end != NULL) {
        /* Others have brought theirs back meanwhile. */
        carve_unlock(&t->lock);
        carve_event_destroy(d, begin);
        carve_event_destroy(d, end);
        carve_lock(&t->lock);
    }
}
