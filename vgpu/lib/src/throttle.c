/* SPDX-License-Identifier: Apache-2.0 */
#include "throttle.h"

enum {
    COSTS = 4096,   /* functions of one card whose cost is remembered; a power of two */
    FLIGHTS = 1024, /* measured launches on the card at once */
    CLOCKS = 8,     /* contexts of one card whose events are compared with our clock */
    EVENTS = 64,    /* spare events of one context */
    LANES = 8,      /* streams that are looked at beside one another */
};

#define LONGEST_WAIT_NS 50000000ull /* at a time; then the terms are looked at again */
#define CAPTURE_WAIT_NS 100000000ull
#define HEARTBEAT_LASTS_NS 100000000ull
#define BASE_LASTS_MS 8000.0f /* a float of milliseconds is good to a microsecond up to here */

/* A launch between two events. */
struct flight {
    CUevent begin, end;
    struct carve_ticket ticket;
    uint64_t launched_at;
    CUstream stream;
    uint32_t cost;
    int8_t clock;
    bool recorded; /* both events are in the stream */
    bool waited;   /* a thread waits for end */
    int16_t next;  /* in the order of launch, or of the free list; -1: last */
};

/* One context's events, and when the first of them was on our clock. */
struct events {
    uint32_t context; /* carve_context.id; 0: free place */
    CUcontext handle;
    CUevent base;
    uint64_t low, high; /* base was recorded between these two */
    uint32_t spare_count;
    CUevent spare[EVENTS];
};

struct carve_throttle {
    carve_lock_t lock;
    uint32_t owner; /* what is in terms that are ours */
    struct carve_credit credit;
    struct events clocks[CLOCKS];
    const void *keys[COSTS];
    struct carve_cost costs[COSTS];
    int16_t first, last, free; /* flights */
    uint32_t flying;
    struct flight flights[FLIGHTS];
};

/* -------------------------------------------------------------------------------------------- time */

/* The software GPU may have a clock of its own, which its processes share. */
static uint64_t now_ns(const struct carve_driver *d) {
    return CARVE_UNLIKELY(d->softgpu_clock_ns != NULL) ? d->softgpu_clock_ns() : carve_now();
}

static void sleep_until(const struct carve_driver *d, uint64_t until, uint64_t now) {
    if (until <= now) {
        return;
    }
    if (until - now > LONGEST_WAIT_NS) {
        until = now + LONGEST_WAIT_NS;
    }
    if (CARVE_UNLIKELY(d->softgpu_sleep_until_ns != NULL)) {
        (void)d->softgpu_sleep_until_ns(until);
    } else {
        carve_sleep(until - now);
    }
}

/* ------------------------------------------------------------------------------------------- terms */

static const struct carve_compute_card *card_of(const struct carve_state *s, unsigned card) { return &s->compute[card]; }

/* False where the card isn't divided for this process. */
static bool read_terms(const struct carve_state *s, unsigned card, const struct carve_throttle *t, uint64_t now, struct carve_terms *terms) {
    const struct carve_compute_card *c = card_of(s, card);
    const struct carve_compute_terms *mine = &c->terms[s->slot];
    const struct carve_limits_card *limits = &s->limits->banks[__atomic_load_n(&s->limits->generation, __ATOMIC_ACQUIRE) & 1].cards[card];
    uint32_t granted = __atomic_load_n(&limits->compute_ppm, __ATOMIC_RELAXED);
    if (granted == 0 || granted > 1000000) {
        return false;
    }
    uint32_t flags = __atomic_load_n(&mine->flags, __ATOMIC_ACQUIRE), share = 0;
    int64_t correction = t->credit.correction;
    uint64_t heartbeat = __atomic_load_n(&c->heartbeat_ns, __ATOMIC_RELAXED);
    if ((flags & CARVE_TERMS_OWNER) == t->owner) {
        share = __atomic_load_n(&mine->share_ppm, __ATOMIC_RELAXED);
        correction = __atomic_load_n(&mine->correction_ns, __ATOMIC_RELAXED);
    } else {
        flags = 0;
    }
    /* Nobody keeps a gate shut, or lends, but an agent that looks. */
    if (now > heartbeat && now - heartbeat > HEARTBEAT_LASTS_NS) {
        flags = 0;
    }
    uint64_t ahead = __atomic_load_n(&c->ahead_ns, __ATOMIC_RELAXED);
    *terms = (struct carve_terms){
        .share_ppm = share == 0 || share > 1000000 ? granted : share,
        .gate = flags & CARVE_TERMS_GATE,
        .elastic = (__atomic_load_n(&limits->flags, __ATOMIC_RELAXED) & CARVE_CARD_COMPUTE_FIXED) == 0,
        .borrow = (flags & CARVE_TERMS_BORROW) != 0,
        .correction = correction,
        .truth_ns = __atomic_load_n(&c->truth_ns, __ATOMIC_RELAXED),
        .ahead_ns = ahead == 0 || ahead > 1000000000u ? 8000000 : (int64_t)ahead,
    };
    return true;
}

/* The usual case, in few instructions: the agent gives nothing but the share, and there is credit. */
static bool quick(const struct carve_state *s, unsigned card, struct carve_throttle *t, uint32_t cost, struct carve_ticket *ticket) {
    const struct carve_compute_card *c = card_of(s, card);
    const struct carve_compute_terms *mine = &c->terms[s->slot];
    uint64_t ahead = __atomic_load_n(&c->ahead_ns, __ATOMIC_RELAXED);
    if (__atomic_load_n(&mine->flags, __ATOMIC_ACQUIRE) != t->owner) {
        return false;
    }
    if (!carve_credit_quick(&t->credit, &t->costs[cost], __atomic_load_n(&mine->correction_ns, __ATOMIC_RELAXED), ahead == 0 || ahead > 1000000000u ? 8000000 : (int64_t)ahead)) {
        return false;
    }
    ticket->sampled = false;
    ticket->estimate_ns = t->costs[cost].estimate_ns;
    return true;
}

static void publish(const struct carve_state *s, unsigned card, const struct carve_credit *c) {
    struct carve_usage_line *line = &s->usage->lines[card][s->slot];
    uint64_t sequence = line->compute_sequence | 1;
    __atomic_store_n(&line->compute_sequence, sequence, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_RELEASE);
    __atomic_store_n(&line->charged_ns, (uint64_t)c->charged_ns, __ATOMIC_RELAXED);
    __atomic_store_n(&line->since_ns, c->since, __ATOMIC_RELAXED);
    __atomic_store_n(&line->committed_ns, (uint64_t)c->committed_ns | (c->waiting ? CARVE_COMPUTE_WAITING : 0), __ATOMIC_RELAXED);
    __atomic_store_n(&line->credit_ns, c->credit_ns, __ATOMIC_RELAXED);
    __atomic_store_n(&line->credit_at_ns, c->refilled_at, __ATOMIC_RELAXED);
    __atomic_store_n(&line->compute_sequence, sequence + 1, __ATOMIC_RELEASE);
}

/* ------------------------------------------------------------------------------------------- costs */

/* Where the cost of a key is. Once the table is full a new key takes the place of an old one: its cost is learnt
 * anew, and what is open of it is swept. */
static uint32_t cost_of(struct carve_throttle *t, const void *key) {
    uint32_t at = (uint32_t)(((uint64_t)(uintptr_t)key * 0x9e3779b97f4a7c15u) >> 52) % COSTS;
    for (uint32_t i = 0; i < 16; i++) {
        uint32_t place = (at + i) % COSTS;
        if (t->keys[place] == key) {
            return place;
        }
        if (t->keys[place] == NULL) {
            t->keys[place] = key;
            return place;
        }
    }
    t->keys[at] = key;
    t->costs[at].samples = 0;
    return at;
}

/* ------------------------------------------------------------------------------------------ events */

static struct events *events_of(struct carve_throttle *t, uint32_t context, CUcontext handle) {
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
        unused->handle = handle;
    }
    return unused;
}

static CUevent take_event(const struct carve_driver *d, struct events *e) {
    CUevent event = NULL;
    if (e->spare_count > 0) {
        return e->spare[--e->spare_count];
    }
    return d->cuEventCreate(&event, CU_EVENT_BLOCKING_SYNC) == CUDA_SUCCESS ? event : NULL;
}

static void give_event(const struct carve_driver *d, struct events *e, CUevent event) {
    if (event == NULL) {
        return;
    }
    if (e->spare_count < EVENTS) {
        e->spare[e->spare_count++] = event;
    } else if (d->cuEventDestroy_v2 != NULL) {
        (void)d->cuEventDestroy_v2(event);
    }
}

static bool record(const struct carve_driver *d, CUevent event, CUstream stream, bool per_thread) {
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

/* What this library needs of the driver to measure. */
static bool can_measure(const struct carve_driver *d, const struct carve_state *s, bool per_thread) {
    return __atomic_load_n(&s->captures, __ATOMIC_SEQ_CST) == 0 && d->cuEventCreate != NULL && d->cuEventQuery != NULL &&
           d->cuEventElapsedTime != NULL && d->cuEventSynchronize != NULL && (per_thread ? d->cuEventRecord_ptsz != NULL : d->cuEventRecord != NULL);
}

/* How long after its context's first event another happened, in milliseconds. Narrows down when that first one was:
 * this one surely happened between two moments. */
static bool place_event(const struct carve_driver *d, struct events *e, CUevent event, uint64_t after, uint64_t before, float *elapsed) {
    if (d->cuEventElapsedTime(elapsed, e->base, event) != CUDA_SUCCESS || *elapsed < 0) {
        return false;
    }
    uint64_t later = (uint64_t)((double)*elapsed * 1e6);
    if (after > later && after - later > e->low) {
        e->low = after - later;
    }
    if (before - later < e->high) {
        e->high = before - later;
    }
    if (e->low > e->high) {
        e->high = e->low; /* the two clocks drift apart by millionths */
    }
    return true;
}

/* ----------------------------------------------------------------------------------------- flights */

static void unlink_flight(struct carve_throttle *t, int16_t before, int16_t at) {
    int16_t next = t->flights[at].next;
    if (before < 0) {
        t->first = next;
    } else {
        t->flights[before].next = next;
    }
    if (t->last == at) {
        t->last = before;
    }
    t->flights[at].next = t->free;
    t->free = at;
    t->flying--;
}

/* Pays for one that is done. */
static void land(const struct carve_driver *d, struct carve_state *s, struct carve_throttle *t, unsigned card, uint32_t share, struct flight *f, uint64_t now) {
    struct events *e = &t->clocks[f->clock];
    float first, elapsed;
    if (place_event(d, e, f->begin, f->launched_at, now, &first) && place_event(d, e, f->end, f->launched_at, now, &elapsed) && first <= elapsed) {
        uint64_t begin = e->high + (uint64_t)((double)first * 1e6), end = e->high + (uint64_t)((double)elapsed * 1e6);
        carve_credit_done(&t->credit, &t->costs[f->cost], &f->ticket, share, begin, end, &card_of(s, card)->pace, now);
        if (elapsed > BASE_LASTS_MS) {
            CUevent old = e->base;
            uint64_t later = (uint64_t)((double)elapsed * 1e6);
            e->base = f->end;
            e->low += later - later / 10000; /* a tenth of a millisecond in a second for drift */
            e->high += later;
            f->end = old;
        }
    } else {
        carve_credit_guess(&t->credit, &f->ticket, share, now);
    }
    give_event(d, e, f->begin);
    give_event(d, e, f->end);
}

/* Pays for all that is done: in each stream up to the first that isn't. */
static void look(const struct carve_driver *d, struct carve_state *s, struct carve_throttle *t, unsigned card, uint32_t share, uint64_t now) {
    CUstream under_way[LANES];
    int lanes = 0;
    int16_t before = -1;
    if (t->flying == 0) {
        return;
    }
    CUstreamCaptureMode mode = relax(d, CU_STREAM_CAPTURE_MODE_RELAXED);
    for (int16_t at = t->first; at >= 0 && lanes < LANES;) {
        struct flight *f = &t->flights[at];
        int16_t next = f->next;
        bool skip = !f->recorded || f->waited;
        for (int i = 0; i < lanes && !skip; i++) {
            skip = under_way[i] == f->stream;
        }
        if (!skip && d->cuEventQuery(f->end) == CUDA_ERROR_NOT_READY) {
            under_way[lanes++] = f->stream;
            skip = true;
        }
        if (skip) {
            before = at;
        } else {
            land(d, s, t, card, share, f, now);
            unlink_flight(t, before, at);
        }
        at = next;
    }
    (void)relax(d, mode);
}

static void fly(struct carve_throttle *t, int16_t at) {
    t->flights[at].next = -1;
    if (t->flying++ == 0) {
        t->first = at;
    } else {
        t->flights[t->last].next = at;
    }
    t->last = at;
}

/* Takes events for a launch and records the first. -1 where it can't be measured. */
static int take_off(const struct carve_driver *d, struct carve_throttle *t, const struct carve_place *place, struct carve_launch *l, uint64_t now) {
    CUcontext handle = NULL;
    if (place->context == 0 || t->free < 0 || d->cuCtxGetCurrent(&handle) != CUDA_SUCCESS) {
        return -1;
    }
    struct events *e = events_of(t, place->context, handle);
    if (e == NULL) {
        return -1;
    }
    if (e->base == NULL) {
        CUevent base = take_event(d, e);
        if (base == NULL || !record(d, base, l->stream, l->per_thread)) {
            give_event(d, e, base);
            return -1;
        }
        e->base = base;
        e->low = now;
        e->high = UINT64_MAX / 2;
    }
    CUevent begin = take_event(d, e), end = take_event(d, e);
    if (begin == NULL || end == NULL || !record(d, begin, l->stream, l->per_thread)) {
        give_event(d, e, begin);
        give_event(d, e, end);
        return -1;
    }
    int16_t at = t->free;
    t->free = t->flights[at].next;
    t->flights[at] = (struct flight){.begin = begin, .end = end, .ticket = l->ticket, .launched_at = now, .stream = l->stream, .cost = l->cost, .clock = (int8_t)(e - t->clocks)};
    fly(t, at);
    return at;
}

/* ---------------------------------------------------------------------------------------- launches */

static struct carve_throttle *throttle_of(struct carve_state *s, unsigned card) {
    struct carve_throttle *t = __atomic_load_n(&s->throttles[card], __ATOMIC_ACQUIRE);
    if (t != NULL) {
        return t;
    }
    t = carve_map_private(sizeof *t);
    if (t == NULL) {
        return NULL;
    }
    const struct carve_process *self = &s->usage->processes[s->slot];
    t->owner = carve_terms_owner(CARVE_PID(self->state_pid), self->start_ticks, self->image);
    t->first = t->last = -1;
    for (int16_t i = 0; i < FLIGHTS; i++) {
        t->flights[i].next = i + 1 < FLIGHTS ? (int16_t)(i + 1) : -1;
    }
    struct carve_throttle *other = NULL;
    if (!__atomic_compare_exchange_n(&s->throttles[card], &other, t, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
        carve_unmap(t, sizeof *t);
        return other;
    }
    return t;
}

/* Waits for the launch that was made first. The lock is held, and given up meanwhile. */
static void wait_for_one(const struct carve_driver *d, struct carve_throttle *t, uint64_t now) {
    for (int16_t at = t->flying == 0 ? -1 : t->first; at >= 0; at = t->flights[at].next) {
        struct flight *f = &t->flights[at];
        if (!f->recorded || f->waited) {
            continue;
        }
        f->waited = true;
        carve_unlock(&t->lock);
        CUstreamCaptureMode mode = relax(d, CU_STREAM_CAPTURE_MODE_RELAXED);
        (void)d->cuEventSynchronize(f->end);
        (void)relax(d, mode);
        carve_lock(&t->lock);
        f->waited = false;
        return;
    }
    /* Another thread waits for it, or hasn't launched it yet. */
    carve_unlock(&t->lock);
    sleep_until(d, now + 100000, now);
    carve_lock(&t->lock);
}

static bool captured(const struct carve_driver *d, const struct carve_state *s, CUstream stream, bool per_thread) {
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    if (CARVE_LIKELY(__atomic_load_n(&s->captures, __ATOMIC_SEQ_CST) == 0)) {
        return false;
    }
    __typeof__(d->cuStreamIsCapturing) ask = per_thread ? d->cuStreamIsCapturing_ptsz : d->cuStreamIsCapturing;
    return ask != NULL && ask(stream, &status) == CUDA_SUCCESS && status != CU_STREAM_CAPTURE_STATUS_NONE;
}

void carve_launch_wait(const struct carve_driver *d, struct carve_state *s, const void *key, CUstream stream, bool per_thread, struct carve_launch *l) {
    struct carve_place place;
    struct carve_terms terms;
    struct carve_throttle *t;
    if (captured(d, s, stream, per_thread) || carve_current(d, s, &place) != CARVE_HERE || !carve_slot(s)) {
        return;
    }
    if ((t = throttle_of(s, place.card)) == NULL) {
        return;
    }
    carve_lock(&t->lock);
    l->throttle = t;
    l->cost = cost_of(t, key);
    l->flight = -1;
    l->card = place.card;
    l->stream = stream;
    l->per_thread = per_thread;
    if (quick(s, place.card, t, l->cost, &l->ticket)) {
        carve_unlock(&t->lock);
        return;
    }
    uint64_t now = now_ns(d), capture_since = 0;
    if (!read_terms(s, place.card, t, now, &terms)) {
        l->throttle = NULL;
        carve_unlock(&t->lock);
        return;
    }
    for (;;) {
        uint64_t until = 0;
        enum carve_verdict verdict = carve_credit_ask(&t->credit, &t->costs[l->cost], &terms, now, &l->ticket, &until);
        if (verdict == CARVE_GO) {
            break;
        }
        publish(s, place.card, &t->credit);
        bool measure = can_measure(d, s, false);
        if (!measure) {
            /* Somebody captures, and must not be disturbed: nothing can be waited for, nor for ever. */
            capture_since = capture_since == 0 ? now : capture_since;
            if (now - capture_since > CAPTURE_WAIT_NS) {
                l->throttle = NULL;
                t->credit.waiting = false;
                carve_unlock(&t->lock);
                return;
            }
            until = now + 1000000;
        }
        if (measure && verdict == CARVE_WAIT_DONE) {
            wait_for_one(d, t, now);
        } else {
            carve_unlock(&t->lock);
            sleep_until(d, until, now);
            carve_lock(&t->lock);
        }
        now = now_ns(d);
        if (!read_terms(s, place.card, t, now, &terms)) {
            l->throttle = NULL; /* a resize took the limit off */
            t->credit.waiting = false;
            carve_unlock(&t->lock);
            return;
        }
        if (can_measure(d, s, false)) {
            look(d, s, t, place.card, terms.share_ppm, now);
        }
    }
    if (l->ticket.sampled) {
        if (can_measure(d, s, per_thread)) {
            look(d, s, t, place.card, terms.share_ppm, now);
            CUstreamCaptureMode mode = relax(d, CU_STREAM_CAPTURE_MODE_RELAXED);
            l->flight = take_off(d, t, &place, l, now);
            (void)relax(d, mode);
        }
        publish(s, place.card, &t->credit);
    }
    carve_unlock(&t->lock);
}

void carve_launch_over(const struct carve_driver *d, struct carve_state *s, struct carve_launch *l, CUresult result) {
    struct carve_throttle *t = l->throttle;
    if (CARVE_LIKELY(!l->ticket.sampled && result == CUDA_SUCCESS)) {
        return;
    }
    carve_lock(&t->lock);
    struct flight *f = l->flight >= 0 ? &t->flights[l->flight] : NULL;
    if (result == CUDA_SUCCESS && f != NULL && record(d, f->end, l->stream, l->per_thread)) {
        f->recorded = true;
        carve_unlock(&t->lock);
        return;
    }
    if (f != NULL) {
        int16_t before = -1;
        for (int16_t at = t->first; at >= 0 && at != l->flight; at = t->flights[at].next) {
            before = at;
        }
        give_event(d, &t->clocks[f->clock], f->begin);
        give_event(d, &t->clocks[f->clock], f->end);
        unlink_flight(t, before, (int16_t)l->flight);
    }
    if (result != CUDA_SUCCESS) {
        carve_credit_refused(&t->credit, &t->costs[l->cost], &l->ticket);
    } else {
        struct carve_terms terms = {.share_ppm = 1000000};
        uint64_t now = now_ns(d);
        (void)read_terms(s, l->card, t, now, &terms);
        carve_credit_guess(&t->credit, &l->ticket, terms.share_ppm, now);
    }
    publish(s, l->card, &t->credit);
    carve_unlock(&t->lock);
}

void carve_throttle_look_slow(const struct carve_driver *d, struct carve_state *s) {
    struct carve_terms terms;
    if (!can_measure(d, s, false)) {
        return;
    }
    for (unsigned card = 0; card < CARVE_MAX_CARDS; card++) {
        struct carve_throttle *t = __atomic_load_n(&s->throttles[card], __ATOMIC_ACQUIRE);
        if (t == NULL || __atomic_load_n(&t->flying, __ATOMIC_RELAXED) == 0) {
            continue;
        }
        uint64_t now = now_ns(d);
        carve_lock(&t->lock);
        if (read_terms(s, card, t, now, &terms)) {
            look(d, s, t, card, terms.share_ppm, now);
            publish(s, card, &t->credit);
        }
        carve_unlock(&t->lock);
    }
}

void carve_throttle_forget(const struct carve_driver *d, struct carve_state *s, unsigned card, uint32_t context) {
    struct carve_throttle *t = __atomic_load_n(&s->throttles[card], __ATOMIC_ACQUIRE);
    if (t == NULL || context == 0) {
        return;
    }
    carve_lock(&t->lock);
    for (int i = 0; i < CLOCKS; i++) {
        struct events *e = &t->clocks[i];
        if (e->context != context) {
            continue;
        }
        int16_t before = -1;
        for (int16_t at = t->flying == 0 ? -1 : t->first; at >= 0;) {
            int16_t next = t->flights[at].next;
            if (t->flights[at].clock == i) {
                carve_credit_guess(&t->credit, &t->flights[at].ticket, 1000000, now_ns(d));
                unlink_flight(t, before, at);
            } else {
                before = at;
            }
            at = next;
        }
        *e = (struct events){0}; /* the events go with their context */
    }
    publish(s, card, &t->credit);
    carve_unlock(&t->lock);
}
