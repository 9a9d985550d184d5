/* SPDX-License-Identifier: Apache-2.0 */
#include "flights.h"
#include "spread.h"

enum { PROBES = 16 }; /* places of a function in the table of costs */

#define LONGEST_WAIT_NS 50000000ull /* at a time; then the terms are looked at again */
#define LOOK_LEAST_NS 50000ull      /* between two looks at what is on the card, while a launch waits for that */
#define LOOK_MOST_NS 1000000ull
#define HEARTBEAT_LASTS_NS 100000000ull
#define UNSEEN_MOST_NS 1000000000ull      /* that a function is taken to cost before it ran */
#define PURSE_LONGEST_NS 3600000000000ull /* that a container can owe, or look back */
/* One without a share of its own keeps to what others left for so long: an agent that starts anew takes seconds, and
 * what a program that is let go queues meanwhile is on the card for longer. */
#define REST_LASTS_NS 10000000000ull

/* -------------------------------------------------------------------------------------------- time */

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

/* ------------------------------------------------------------------------------------------- purse */

/* What the container earns in some time, and in which time it earns an amount. */
static int64_t earned(const struct carve_throttle *t, uint64_t ns) { return (int64_t)(ns / 1000000u * t->container_ppm + ns % 1000000u * t->container_ppm / 1000000u); }
static int64_t earning(const struct carve_throttle *t, int64_t amount) { return (int64_t)((double)amount * t->stretch); }

/* Until when the container owes. Whoever writes nonsense into his own file is taken at his word up to an hour. */
static uint64_t owes_to(const struct carve_throttle *t, uint64_t now) {
    uint64_t to = __atomic_load_n(&t->purse->spent_to_ns, __ATOMIC_RELAXED);
    return to > now && to - now > PURSE_LONGEST_NS ? now : to;
}

/* A process begins with what the container has, not with credit of its own, or a container that runs one after the other
 * had that for each. As long as the container owes, it hasn't begun. */
static void begin_with_purse(struct carve_throttle *t, uint64_t now) {
    if (t->begun || t->container_ppm == 0) {
        t->begun = true;
        return;
    }
    uint64_t to = owes_to(t, now);
    if (t->loan) {
        uint64_t most = now + (uint64_t)earning(t, CARVE_CREDIT_BORROW_NS);
        to = to < most ? to : most;
    }
    int64_t has = to > now ? -earned(t, to - now) : earned(t, now - to < PURSE_LONGEST_NS ? now - to : PURSE_LONGEST_NS);
    t->credit.credit_ns = has < CARVE_CREDIT_IDLE_NS ? has : CARVE_CREDIT_IDLE_NS;
    t->credit.refilled_at = now | 1;
    t->begun = has >= 0 || t->loan;
}

/* What was borrowed is owed within a bound, as by the process that borrows. */
static void forgive(struct carve_throttle *t, uint64_t now) {
    uint64_t *purse = &t->purse->spent_to_ns, old = __atomic_load_n(purse, __ATOMIC_RELAXED);
    uint64_t most = now + (uint64_t)earning(t, CARVE_CREDIT_BORROW_NS);
    while (old > most && !__atomic_compare_exchange_n(purse, &old, most, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
}

/* What a function that never ran is taken to cost, where those before it took longer than functions do. */
static uint64_t unseen(const struct carve_throttle *t) {
    uint64_t first = __atomic_load_n(&t->purse->first_ns, __ATOMIC_RELAXED);
    return first <= (uint64_t)CARVE_COST_UNSEEN_NS ? 0 : first < UNSEEN_MOST_NS ? first : UNSEEN_MOST_NS;
}

/* What was paid, or is out, since the purse heard of it last. */
static void spend(struct carve_throttle *t, uint64_t now) {
    const struct carve_credit *c = &t->credit;
    int64_t spent = c->charged_ns + c->committed_ns - c->correction;
    /* Nobody holds more back for a function that never ran than such ones take; but it may end before that shows. */
    uint64_t first = __atomic_load_n(&t->purse->first_ns, __ATOMIC_RELAXED);
    if (c->unseen != 0 && first != 0 && first < (uint64_t)CARVE_COST_UNSEEN_NS) {
        spent -= (int64_t)c->unseen * (CARVE_COST_UNSEEN_NS - (int64_t)first);
    }
    int64_t more = spent - t->spent_ns;
    if (more == 0 || t->container_ppm == 0) {
        return;
    }
    t->spent_ns = spent;
    uint64_t *purse = &t->purse->spent_to_ns, old = __atomic_load_n(purse, __ATOMIC_RELAXED), fresh;
    uint64_t saved = (uint64_t)earning(t, c->demanding ? CARVE_CREDIT_MOST_NS : CARVE_CREDIT_IDLE_NS);
    uint64_t least = now > saved ? now - saved : 0, most = now + PURSE_LONGEST_NS;
    do {
        fresh = old > now + PURSE_LONGEST_NS ? now : old < least ? least : old;
        int64_t moved = (int64_t)fresh + earning(t, more);
        fresh = moved < (int64_t)least ? least : (uint64_t)moved > most ? most : (uint64_t)moved;
    } while (!__atomic_compare_exchange_n(purse, &old, fresh, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
}

/* ------------------------------------------------------------------------------------------- terms */

static bool others_work(const struct carve_compute_card *c) { return __atomic_load_n(&c->pace.most, __ATOMIC_RELAXED) > 1; }

/* False where the card isn't divided for this process. */
static bool read_terms(const struct carve_state *s, unsigned card, struct carve_throttle *t, uint64_t now, struct carve_terms *terms) {
    const struct carve_compute_card *c = carve_throttle_card(s, card);
    const struct carve_compute_terms *mine = &c->terms[s->slot];
    const struct carve_limits_card *limits = &s->limits->banks[__atomic_load_n(&s->limits->generation, __ATOMIC_ACQUIRE) & 1].cards[card];
    uint32_t granted = __atomic_load_n(&limits->compute_ppm, __ATOMIC_RELAXED);
    if (granted > 1000000) {
        return false;
    }
    bool rest = granted == 0;
    uint32_t flags = __atomic_load_n(&mine->flags, __ATOMIC_ACQUIRE), share = 0;
    int64_t correction = t->credit.correction;
    uint64_t heartbeat = __atomic_load_n(&c->heartbeat_ns, __ATOMIC_RELAXED);
    if ((flags & CARVE_TERMS_OWNER) == t->owner) {
        share = __atomic_load_n(&mine->share_ppm, __ATOMIC_RELAXED);
        correction = __atomic_load_n(&mine->correction_ns, __ATOMIC_RELAXED);
    } else {
        flags = 0;
    }
    uint64_t silent = now > heartbeat ? now - heartbeat : 0;
    uint64_t container = __atomic_load_n(&c->container_ppm, __ATOMIC_RELAXED);
    if (container == 0 || container > 1000000) {
        container = granted;
    }
    if (rest) {
        if (heartbeat == 0 || silent > REST_LASTS_NS) {
            return false; /* nobody has a share of this card, or no agent says what others leave */
        }
        granted = 1000000; /* until it has: a launch is paid, and no more than ahead_ns is on the card at once */
    }
    /* All that the container has, until the agent has seen this process. */
    bool own = share != 0 && share <= 1000000;
    if (!own) {
        share = container != 0 ? (uint32_t)container : granted;
    }
    if (CARVE_UNLIKELY(t->container_ppm != container)) {
        t->container_ppm = (uint32_t)container;
        t->stretch = 1e6 / (double)container;
    }
    /* Nobody keeps a gate shut, or lends, but an agent that looks. */
    if (silent > HEARTBEAT_LASTS_NS) {
        flags = 0;
    }
    uint64_t ahead = __atomic_load_n(&c->ahead_ns, __ATOMIC_RELAXED);
    *terms = (struct carve_terms){
        .share_ppm = share,
        .gate = flags & CARVE_TERMS_GATE,
        .elastic = rest || (__atomic_load_n(&limits->flags, __ATOMIC_RELAXED) & CARVE_CARD_COMPUTE_FIXED) == 0,
        .borrow = (flags & CARVE_TERMS_BORROW) != 0,
        .beside = others_work(c),
        .correction = correction,
        .truth_ns = __atomic_load_n(&c->truth_ns, __ATOMIC_RELAXED),
        .ahead_ns = ahead == 0 || ahead > 1000000000u ? 8000000 : (int64_t)ahead,
        .owes_to = own || container == 0 ? 0 : owes_to(t, now),
    };
    t->loan = terms->borrow || terms->gate == CARVE_TURN;
    return true;
}

/* The usual case, in few instructions: the agent gives nothing but the share, and there is credit. */
static bool quick(const struct carve_state *s, unsigned card, struct carve_throttle *t, uint32_t cost, struct carve_ticket *ticket) {
    const struct carve_compute_card *c = carve_throttle_card(s, card);
    const struct carve_compute_terms *mine = &c->terms[s->slot];
    uint64_t ahead = __atomic_load_n(&c->ahead_ns, __ATOMIC_RELAXED);
    if (__atomic_load_n(&mine->flags, __ATOMIC_ACQUIRE) != t->owner) {
        return false;
    }
    if (!carve_credit_quick(&t->credit, &t->costs[cost], __atomic_load_n(&mine->correction_ns, __ATOMIC_RELAXED), ahead == 0 || ahead > 1000000000u ? 8000000 : (int64_t)ahead, others_work(c))) {
        return false;
    }
    ticket->sampled = false;
    ticket->estimate_ns = t->costs[cost].estimate_ns;
    return true;
}

static void publish(const struct carve_state *s, unsigned card, struct carve_throttle *t, uint64_t now) {
    const struct carve_credit *c = &t->credit;
    struct carve_usage_line *line = &s->usage->lines[card][s->slot];
    uint64_t sequence = line->compute_sequence | 1;
    __atomic_store_n(&line->compute_sequence, sequence, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_RELEASE);
    CARVE_STEP("compute-publishing");
    __atomic_store_n(&line->charged_ns, (uint64_t)c->charged_ns, __ATOMIC_RELAXED);
    __atomic_store_n(&line->since_ns, c->since, __ATOMIC_RELAXED);
    __atomic_store_n(&line->committed_ns, (uint64_t)c->committed_ns | (c->waiting ? CARVE_COMPUTE_WAITING : 0), __ATOMIC_RELAXED);
    __atomic_store_n(&line->credit_ns, c->credit_ns, __ATOMIC_RELAXED);
    __atomic_store_n(&line->credit_at_ns, c->refilled_at, __ATOMIC_RELAXED);
    __atomic_store_n(&line->compute_sequence, sequence + 1, __ATOMIC_RELEASE);
    spend(t, now);
}

/* ------------------------------------------------------------------------------------------- costs */

/* Where the cost of a key is. Once its places are all taken the key takes that of the one that was asked for longest
 * ago: its cost is learnt anew, and what is open of the other is paid with the next sample there. */
static uint32_t cost_of(struct carve_throttle *t, const void *key, uint64_t guess_ns) {
    uint32_t at = (uint32_t)(((uint64_t)(uintptr_t)key * 0x9e3779b97f4a7c15u) >> 52) % COSTS, oldest = at, now = ++t->lookups;
    for (uint32_t i = 0; i < PROBES; i++) {
        uint32_t place = (at + i) % COSTS;
        if (CARVE_LIKELY(t->keys[place] == key)) {
            t->used[place] = now;
            return place;
        }
        if (t->keys[place] == NULL) {
            oldest = place;
            break;
        }
        if (now - t->used[place] > now - t->used[oldest]) {
            oldest = place;
        }
    }
    t->keys[oldest] = key;
    t->used[oldest] = now;
    t->costs[oldest].samples = 0;
    t->costs[oldest].wild = 0;
    t->costs[oldest].estimate_ns = (int64_t)(guess_ns != 0 ? guess_ns : unseen(t));
    return oldest;
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
    t->purse = &s->usage->purses[card];
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

/* When to look again at what is on the card. Work takes what it takes: the longer it was waited for already, the less
 * a late look matters. Not by a call that waits for an event: that couldn't be ended, see carve_flights_give_up. */
static uint64_t next_look(uint64_t since, uint64_t now) {
    uint64_t step = (now - since) / 16;
    return now + (step < LOOK_LEAST_NS ? LOOK_LEAST_NS : step > LOOK_MOST_NS ? LOOK_MOST_NS : step);
}

static bool captured(const struct carve_driver *d, const struct carve_state *s, CUstream stream, bool per_thread) {
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    if (CARVE_LIKELY(__atomic_load_n(&s->captures, __ATOMIC_SEQ_CST) == 0)) {
        return false;
    }
    __typeof__(d->cuStreamIsCapturing) ask = per_thread ? d->cuStreamIsCapturing_ptsz : d->cuStreamIsCapturing;
    return ask != NULL && ask(stream, &status) == CUDA_SUCCESS && status != CU_STREAM_CAPTURE_STATUS_NONE;
}

/* Where the launch goes: by its stream, whatever context is current. elsewhere: that context is current now, and the
 * caller has to leave it. */
static enum carve_where place_of(const struct carve_driver *d, struct carve_state *s, CUstream stream, struct carve_place *place, bool *elsewhere) {
    enum carve_where where = carve_current(d, s, place);
    CUcontext own = NULL, current = NULL;
    *elsewhere = false;
    /* A stream without a name of its own is the current context's, and so is any where there is one context only. */
    if (CARVE_LIKELY(stream == NULL || stream == CU_STREAM_LEGACY || stream == CU_STREAM_PER_THREAD || (where == CARVE_HERE && __atomic_load_n(&s->contexts_high, __ATOMIC_ACQUIRE) <= 1))) {
        return where;
    }
    if (d->cuStreamGetCtx == NULL || d->cuCtxPushCurrent_v2 == NULL || d->cuCtxPopCurrent_v2 == NULL || d->cuStreamGetCtx(stream, &own) != CUDA_SUCCESS || own == NULL ||
        (d->cuCtxGetCurrent(&current) == CUDA_SUCCESS && own == current) || d->cuCtxPushCurrent_v2(own) != CUDA_SUCCESS) {
        return where;
    }
    *elsewhere = true;
    return carve_current(d, s, place);
}

static void leave(const struct carve_driver *d, bool elsewhere) {
    CUcontext context;
    if (CARVE_UNLIKELY(elsewhere)) {
        (void)d->cuCtxPopCurrent_v2(&context);
    }
}

static void wait_there(const struct carve_driver *d, struct carve_state *s, const void *key, uint64_t guess_ns, const struct carve_place *place, bool later, struct carve_launch *l) {
    struct carve_terms terms;
    struct carve_throttle *t = throttle_of(s, place->card);
    if (t == NULL) {
        return;
    }
    carve_lock(&t->lock);
    l->throttle = t;
    l->key = key;
    l->cost = cost_of(t, key, guess_ns);
    l->flight = -1;
    l->card = place->card;
    if (quick(s, place->card, t, l->cost, &l->ticket)) {
        carve_unlock(&t->lock);
        return;
    }
    uint64_t now = carve_throttle_now(d), since = now;
    for (bool looked = false;; looked = true) {
        uint64_t until = 0;
        if (!read_terms(s, place->card, t, now, &terms)) {
            l->throttle = NULL; /* no limit, or a resize took it off */
            t->credit.waiting = false;
            carve_unlock(&t->lock);
            return;
        }
        if (CARVE_UNLIKELY(t->loan) && t->container_ppm != 0) {
            forgive(t, now);
        }
        if (CARVE_UNLIKELY(!t->begun)) {
            begin_with_purse(t, now);
        }
        enum carve_verdict verdict = carve_credit_ask(&t->credit, &t->costs[l->cost], &terms, now, &l->ticket, &until);
        if (verdict == CARVE_GO) {
            break;
        }
        publish(s, place->card, t, now);
        if (verdict == CARVE_WAIT_DONE) {
            until = next_look(since, now);
            if (now - since > LATE_NS && now - t->moved_at > LATE_NS) {
                carve_flights_give_up(s, t, place->card, now);
            }
        }
        if (looked || verdict != CARVE_WAIT_DONE) {
            carve_unlock(&t->lock);
            CARVE_STEP(verdict == CARVE_WAIT_DONE ? "compute-wait-launch" : "compute-wait-credit");
            sleep_until(d, until, now);
            carve_lock(&t->lock);
        }
        if (carve_can_measure(d, s, false)) {
            carve_flights_look(d, s, t, place->card, terms.share_ppm, false);
        }
        now = carve_throttle_now(d);
        l->cost = cost_of(t, key, guess_ns); /* others may have taken its place */
    }
    if (l->ticket.sampled) {
        l->flight = carve_flight_place(t, l, now);
        if (l->flight < 0) {
            carve_credit_guess(&t->credit, &l->ticket, terms.share_ppm, now);
            l->throttle = NULL;
        } else if (carve_can_measure(d, s, l->per_thread)) {
            carve_flights_look(d, s, t, place->card, terms.share_ppm, false);
            if (!later) {
                carve_flight_take_off(d, t, place->context, l);
            }
        }
        publish(s, place->card, t, now);
    }
    carve_unlock(&t->lock);
}

/* Of a launch that was let go before others were. */
static void take_off(const struct carve_driver *d, struct carve_state *s, uint32_t context, const struct carve_launch *l) {
    struct carve_throttle *t = l->throttle;
    if (t != NULL && l->ticket.sampled && l->flight >= 0 && carve_can_measure(d, s, l->per_thread)) {
        carve_lock(&t->lock);
        t->flights[l->flight].launched_at = carve_throttle_now(d);
        carve_flight_take_off(d, t, context, l);
        carve_unlock(&t->lock);
    }
}

void carve_launch_take_off(const struct carve_driver *d, struct carve_state *s, const struct carve_launch *l) {
    struct carve_place place;
    if (carve_current(d, s, &place) == CARVE_HERE) {
        take_off(d, s, place.context, l);
    }
}

void carve_launch_wait(const struct carve_driver *d, struct carve_state *s, const void *key, uint64_t guess_ns, CUstream stream, bool per_thread, bool later, struct carve_launch *l) {
    struct carve_place place;
    if (captured(d, s, stream, per_thread)) {
        return;
    }
    l->stream = stream;
    l->per_thread = per_thread;
    if (place_of(d, s, stream, &place, &l->elsewhere) == CARVE_HERE && carve_slot(s)) {
        wait_there(d, s, key, guess_ns, &place, later, l);
    }
    leave(d, l->elsewhere);
}

unsigned carve_launch_wait_on(const struct carve_driver *d, struct carve_state *s, const void *key, uint32_t cards, CUstream stream, bool per_thread, struct carve_launch list[CARVE_MAX_CARDS]) {
    struct carve_place place = {.card = 0};
    bool elsewhere;
    unsigned count = 0;
    if (captured(d, s, stream, per_thread)) {
        return 0;
    }
    enum carve_where where = place_of(d, s, stream, &place, &elsewhere);
    if ((cards & CARVE_SPREAD_HERE) != 0 && where == CARVE_HERE) {
        cards |= 1u << place.card;
    }
    if (where != CARVE_NOWHERE && carve_slot(s)) {
        /* In the same order by all, or two of them could wait for one another. */
        for (unsigned card = 0; card < CARVE_MAX_CARDS; card++) {
            if ((cards >> card & 1) != 0) {
                struct carve_launch *l = &list[count];
                *l = (struct carve_launch){.stream = stream, .per_thread = per_thread, .elsewhere = elsewhere};
                place.card = card;
                wait_there(d, s, key, 0, &place, true, l);
                count += l->throttle != NULL;
            }
        }
        for (unsigned i = 0; i < count; i++) {
            take_off(d, s, place.context, &list[i]);
        }
    }
    leave(d, elsewhere);
    return count;
}

void carve_launch_over(const struct carve_driver *d, struct carve_state *s, struct carve_launch *l, CUresult result) {
    struct carve_throttle *t = l->throttle;
    if (CARVE_LIKELY(!l->ticket.sampled && result == CUDA_SUCCESS)) {
        return;
    }
    struct flight *f = l->flight >= 0 ? &t->flights[l->flight] : NULL;
    if (CARVE_UNLIKELY(l->elsewhere)) {
        struct carve_place place;
        (void)place_of(d, s, l->stream, &place, &l->elsewhere);
    }
    /* The events are ours until recorded is set, unless their context went, at the program's own risk. */
    CARVE_STEP("compute-launched");
    bool recorded = result == CUDA_SUCCESS && f != NULL && f->end != NULL && carve_event_record(d, f->end, l->stream, l->per_thread);
    leave(d, l->elsewhere);
    carve_lock(&t->lock);
    if (f == NULL) {
        /* One that isn't sampled, and that the driver refused. Of a function that lost its place nothing is known. */
        if (t->keys[l->cost] == l->key) {
            carve_credit_refused(&t->credit, &t->costs[l->cost], &l->ticket);
        }
        publish(s, l->card, t, carve_throttle_now(d));
        carve_unlock(&t->lock);
        return;
    }
    if (recorded && !f->gone) {
        f->recorded = true;
        carve_unlock(&t->lock);
        return;
    }
    CUevent spare[2] = {NULL, NULL};
    if (!f->gone) {
        uint64_t now = carve_throttle_now(d);
        if (result != CUDA_SUCCESS) {
            struct carve_cost nobody, *cost = carve_flight_cost(t, f, &nobody);
            carve_credit_refused(&t->credit, cost, &f->ticket);
        } else {
            struct carve_terms terms = {.share_ppm = 1000000};
            (void)read_terms(s, l->card, t, now, &terms);
            carve_credit_guess(&t->credit, &f->ticket, terms.share_ppm, now);
        }
        if (f->clock >= 0) {
            struct events *e = &t->clocks[f->clock];
            spare[0] = carve_event_keep(e, f->begin) ? NULL : f->begin;
            spare[1] = carve_event_keep(e, f->end) ? NULL : f->end;
        }
        t->moved_at = now;
    }
    carve_flight_unlink(t, (int16_t)l->flight);
    publish(s, l->card, t, carve_throttle_now(d));
    carve_unlock(&t->lock);
    carve_event_destroy(d, spare[0]);
    carve_event_destroy(d, spare[1]);
}

static void look_everywhere(const struct carve_driver *d, struct carve_state *s, bool begun) {
    struct carve_terms terms;
    if (!carve_can_measure(d, s, false)) {
        return;
    }
    for (unsigned card = 0; card < CARVE_MAX_CARDS; card++) {
        struct carve_throttle *t = __atomic_load_n(&s->throttles[card], __ATOMIC_ACQUIRE);
        if (t == NULL || (__atomic_load_n(&t->flying, __ATOMIC_RELAXED) == 0 && __atomic_load_n(&t->credit.tail, __ATOMIC_RELAXED) == 0)) {
            continue;
        }
        uint64_t now = carve_throttle_now(d);
        carve_lock(&t->lock);
        if (read_terms(s, card, t, now, &terms)) {
            carve_flights_look(d, s, t, card, terms.share_ppm, begun);
            publish(s, card, t, now);
        }
        carve_unlock(&t->lock);
    }
}

void carve_throttle_look_slow(const struct carve_driver *d, struct carve_state *s) { look_everywhere(d, s, false); }

/* ---------------------------------------------------------------------------------------- contexts */

static bool hold(const struct carve_driver *d, struct carve_throttle *t) {
    unsigned round = 0;
    if (t == NULL) {
        return false;
    }
    uint64_t now = carve_throttle_now(d);
    carve_lock(&t->lock);
    t->holds++;
    t->held_at = now;
    while (t->looking) {
        carve_unlock(&t->lock);
        carve_back_off(&round);
        carve_lock(&t->lock);
    }
    carve_unlock(&t->lock);
    return true;
}

uint32_t carve_throttles_hold(const struct carve_driver *d, struct carve_state *s) {
    uint32_t held = 0;
    look_everywhere(d, s, true); /* nothing of it can be found out afterwards */
    for (unsigned card = 0; card < CARVE_MAX_CARDS; card++) {
        held |= (uint32_t)hold(d, __atomic_load_n(&s->throttles[card], __ATOMIC_ACQUIRE)) << card;
    }
    return held;
}

void carve_throttles_let_go(struct carve_state *s, uint32_t held) {
    for (unsigned card = 0; held >> card != 0; card++) {
        struct carve_throttle *t = (held >> card & 1) != 0 ? s->throttles[card] : NULL;
        if (t != NULL) {
            carve_lock(&t->lock);
            t->holds--;
            carve_unlock(&t->lock);
        }
    }
}

static void forget(const struct carve_driver *d, struct carve_state *s, unsigned card, uint32_t context) {
    struct carve_throttle *t = __atomic_load_n(&s->throttles[card], __ATOMIC_ACQUIRE);
    if (t == NULL) {
        return;
    }
    uint64_t now = carve_throttle_now(d);
    struct carve_terms terms = {.share_ppm = 1000000};
    carve_lock(&t->lock);
    (void)read_terms(s, card, t, now, &terms);
    for (int i = 0; i < CLOCKS; i++) {
        struct events *e = &t->clocks[i];
        if (e->context != context) {
            continue;
        }
        for (int16_t at = t->first; at >= 0;) {
            struct flight *f = &t->flights[at];
            int16_t next = f->next;
            if (f->clock == i && !f->gone) {
                /* The driver may have let it run to its end, or not have let it begin. */
                carve_credit_cut(&t->credit, &f->ticket, terms.share_ppm, f->begun ? f->launched_at : t->held_at, &carve_throttle_card(s, card)->pace, now);
                f->gone = true;
                t->moved_at = now;
                if (f->recorded) {
                    carve_flight_unlink(t, at);
                }
            }
            at = next;
        }
        *e = (struct events){0}; /* the events go with their context */
    }
    publish(s, card, t, now);
    carve_unlock(&t->lock);
}

void carve_throttles_forget(const struct carve_driver *d, struct carve_state *s, uint32_t context) {
    for (unsigned card = 0; card < CARVE_MAX_CARDS && context != 0; card++) {
        forget(d, s, card, context);
    }
}
