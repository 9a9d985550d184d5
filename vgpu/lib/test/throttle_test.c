/* SPDX-License-Identifier: Apache-2.0 */
/*
 * throttle_test: launches against a driver that is made up here, call by call, with a clock that only moves when
 * somebody sleeps. So every wait has a length, one without an end is seen, and the driver can fail, block or lose
 * a context at whatever moment.
 */
#define _GNU_SOURCE
#include "../src/throttle.c"

#include <string.h>

#include "tap.h"

#define MS 1000000ull
#define SECOND (1000 * MS)

/* ---- the driver ---- */

enum { EVENTS_AT_MOST = 20000, STREAMS = 12, QUEUE = 4096, CONTEXTS = 20 };

struct CUevent_st { bool live, recorded, done; unsigned context; uint64_t at; };
static struct CUevent_st events[EVENTS_AT_MOST];

/* One stream: what is in it runs in its order, beside the others. */
static struct line {
    bool blocked; /* until the host lets it go */
    uint64_t free_at;
    unsigned head, tail;
    struct { uint64_t submitted, ns; struct CUevent_st *event; } queue[QUEUE];
} lines[STREAMS];

static uint64_t now_is;
static unsigned context_now, live_events, locked_calls, endless_waits, dead_events, records;
static unsigned fail_records, fail_elapsed, fail_create; /* so many next ones; or of a thousand */
static unsigned seed = 1;
static struct carve_throttle *watched;
static bool crowded;             /* other threads want to look all the time */
static unsigned asked, full_at;  /* questions; a record that fails while others bring events back */

/* Called by every function of the driver. */
static void enter_driver(void) { locked_calls += watched != NULL && watched->lock != 0; }

static bool fails(unsigned per_mille) { return per_mille != 0 && (unsigned)rand_r(&seed) % 1000 < per_mille; }

static void run_line(struct line *l) {
    while (l->head != l->tail && !l->blocked) {
        unsigned at = l->head % QUEUE;
        uint64_t begin = l->queue[at].submitted > l->free_at ? l->queue[at].submitted : l->free_at;
        if (begin + l->queue[at].ns > now_is) {
            return;
        }
        l->free_at = begin + l->queue[at].ns;
        if (l->queue[at].event != NULL) {
            l->queue[at].event->done = true;
            l->queue[at].event->at = l->free_at;
        }
        l->head++;
    }
}

static void run_all(void) {
    for (int i = 0; i < STREAMS; i++) {
        run_line(&lines[i]);
    }
}

static void submit(unsigned stream, uint64_t ns, struct CUevent_st *event) {
    struct line *l = &lines[stream];
    run_line(l);
    l->queue[l->tail % QUEUE].submitted = now_is;
    l->queue[l->tail % QUEUE].ns = ns;
    l->queue[l->tail++ % QUEUE].event = event;
    run_line(l);
}

static uint64_t fake_clock(void) { return now_is; }
static int fake_sleep(uint64_t until) {
    enter_driver();
    if (until > now_is) {
        now_is = until;
    }
    run_all();
    return 0;
}
static CUresult fake_create(CUevent *event, unsigned int flags) {
    enter_driver();
    (void)flags;
    for (unsigned i = 0; i < EVENTS_AT_MOST && !fails(fail_create); i++) {
        if (!events[i].live) {
            events[i] = (struct CUevent_st){.live = true, .context = context_now};
            *event = &events[i];
            live_events++;
            return CUDA_SUCCESS;
        }
    }
    return CUDA_ERROR_OUT_OF_MEMORY;
}
static bool alive(CUevent event) {
    enter_driver();
    dead_events += !event->live;
    return event->live;
}
static CUresult fake_destroy(CUevent event) {
    if (!alive(event)) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    event->live = false;
    live_events--;
    return CUDA_SUCCESS;
}
static CUresult fake_query(CUevent event) {
    run_all();
    asked++;
    if (crowded && asked < 100000) {
        watched->look_again = true;
    }
    return !alive(event) ? CUDA_ERROR_INVALID_HANDLE : event->done ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}
static void bring_back(void);
static CUresult fake_record(CUevent event, CUstream stream) {
    if (full_at != 0 && --full_at == 0) {
        bring_back();
        return CUDA_ERROR_INVALID_HANDLE;
    }
    if (!alive(event) || event->context != context_now || fails(fail_records)) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    event->recorded = true;
    event->done = false;
    records++;
    submit((unsigned)(uintptr_t)stream, 0, event);
    return CUDA_SUCCESS;
}
static CUresult fake_elapsed(float *milliseconds, CUevent start, CUevent end) {
    if (!alive(start) || !alive(end) || !start->done || !end->done || fails(fail_elapsed)) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    *milliseconds = (float)((double)(int64_t)(end->at - start->at) / 1e6);
    return CUDA_SUCCESS;
}
static CUresult fake_wait(CUevent event) {
    alive(event);
    for (int i = 0; i < 100 && !event->done; i++) {
        fake_sleep(now_is + SECOND);
    }
    endless_waits += !event->done;
    return CUDA_SUCCESS;
}

/* Other threads' launches have landed: there are as many spare events as are kept. */
static void bring_back(void) {
    struct events *e = &watched->clocks[0];
    while (e->spare_count < EVENTS) {
        fake_create(&e->spare[e->spare_count++], 0);
    }
}

static struct carve_driver driver = {
    .softgpu_clock_ns = fake_clock, .softgpu_sleep_until_ns = fake_sleep, .cuEventCreate = fake_create, .cuEventDestroy_v2 = fake_destroy,
    .cuEventQuery = fake_query, .cuEventRecord = fake_record, .cuEventElapsedTime = fake_elapsed, .cuEventSynchronize = fake_wait,
};

/* ---- the rest of the library ---- */

struct carve_state *carve_state_now;
static struct carve_limits limits;
static struct carve_compute_card cards[1];

enum carve_where carve_current(const struct carve_driver *d, struct carve_state *s, struct carve_place *place) {
    (void)d, (void)s;
    *place = (struct carve_place){0, 0, context_now};
    return CARVE_HERE;
}
bool carve_slot_slow(struct carve_state *s) { return s != NULL; }

static struct carve_state *fresh(uint32_t share_ppm) {
    static struct carve_state state;
    static struct carve_usage usage;
    if (state.throttles[0] != NULL) {
        carve_unmap(state.throttles[0], sizeof *state.throttles[0]);
    }
    memset(&state, 0, sizeof state);
    memset(&usage, 0, sizeof usage);
    memset(&limits, 0, sizeof limits);
    memset(cards, 0, sizeof cards);
    memset(events, 0, sizeof events);
    memset(lines, 0, sizeof lines);
    memset(usage.purses, 0, sizeof usage.purses);
    limits.compute = 1;
    limits.banks[0].cards[0].compute_ppm = share_ppm;
    limits.banks[0].cards[0].flags = CARVE_CARD_COMPUTE_FIXED;
    state.limits = &limits;
    state.usage = &usage;
    state.compute = cards;
    state.slot_taken = 1;
    now_is = 1000 * SECOND;
    context_now = 1;
    live_events = locked_calls = endless_waits = dead_events = fail_records = fail_elapsed = fail_create = 0;
    watched = NULL;
    return &state;
}

enum { THREADS = 1024 };

/* One launch of a function of so many nanoseconds; how long it was held back. */
static uint64_t launch(struct carve_state *s, uintptr_t function, unsigned stream, uint64_t ns, CUresult answer) {
    struct carve_launch l;
    uint64_t before = now_is;
    carve_launch_begin(&driver, s, (const void *)function, THREADS, (CUstream)(uintptr_t)stream, false, &l);
    watched = s->throttles[0];
    if (answer == CUDA_SUCCESS) {
        submit(stream, ns, NULL);
    }
    carve_launch_end(&driver, s, &l, answer);
    return now_is - before;
}

static void rest(struct carve_state *s, uint64_t ns) {
    fake_sleep(now_is + ns);
    carve_throttle_look_slow(&driver, s);
}

/* Nothing is out, and the account says so. */
static bool settled(const struct carve_state *s) {
    const struct carve_throttle *t = s->throttles[0];
    return t->flying == 0 && t->first == -1 && t->last == -1 && t->credit.outstanding == 0 && t->credit.late == 0 && t->credit.since == 0 &&
           t->credit.committed_ns == t->credit.tail_ns && t->lock == 0 && !t->looking && t->holds == 0;
}

/* ---- tests ---- */

static void shares(void) {
    struct carve_state *s = fresh(500000);
    uint64_t begin = now_is, work = 0;
    while (now_is < begin + 10 * SECOND) {
        launch(s, 1, 0, MS, CUDA_SUCCESS);
        work += MS;
    }
    check(work > 4900 * MS && work < 5100 * MS, "half of the card is half of it (%.1f %%)", (double)work / 1e8);
    check(locked_calls == 0, "no lock is held over a call of the driver (%u times it was)", locked_calls);
    rest(s, SECOND);
    check(settled(s) && live_events < 40, "when all is done nothing is out (%u events)", live_events);
}

/* Any of the driver's calls may fail at any time. */
static void failing(void) {
    struct carve_state *s = fresh(500000);
    fail_records = fail_elapsed = fail_create = 100;
    for (int i = 0; i < 60000; i++) {
        unsigned what = (unsigned)rand_r(&seed);
        launch(s, 1 + what % 50, what % STREAMS, 1000 + what % 400000, what % 16 == 0 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS);
    }
    fail_records = fail_elapsed = fail_create = 0;
    rest(s, 10 * SECOND);
    check(settled(s), "a driver whose calls fail now and then leaves nothing out");
    check(live_events <= EVENTS + 1, "nor any event behind, but spare ones (%u)", live_events);
    check(locked_calls == 0 && dead_events == 0, "no call is made under a lock, or with an event that is gone");
}

/* Threads that want to look don't keep the one that looks. */
static void crowd(void) {
    struct carve_state *s = fresh(500000);
    launch(s, 1, 0, MS, CUDA_SUCCESS);
    rest(s, SECOND);
    lines[0].blocked = true;
    for (unsigned i = 0; i < 3; i++) {
        launch(s, 1, 0, 1000, CUDA_SUCCESS);
    }
    asked = 0;
    crowded = true;
    carve_throttle_look_slow(&driver, s);
    crowded = false;
    check(asked > 0 && asked < 100, "a thread that looks comes back, however many others want to meanwhile (%u questions)", asked);
    lines[0].blocked = false;
    lines[0].free_at = now_is;
    rest(s, SECOND);
    check(settled(s), "and nothing is left");
}

/* Events that aren't needed after all find no room: others have brought theirs back. */
static void no_room_for_spares(void) {
    struct carve_state *s = fresh(500000);
    launch(s, 1, 0, MS, CUDA_SUCCESS);
    rest(s, SECOND);
    full_at = 1;
    launch(s, 2, 0, MS, CUDA_SUCCESS);
    rest(s, SECOND);
    check(full_at == 0 && settled(s) && live_events <= EVENTS + 1, "events for which there is no room are given back (%u of %d)", live_events, EVENTS + 1);
}

/* What is launched may wait for what the program does later. */
static void stuck(void) {
    struct carve_state *s = fresh(500000);
    uint64_t longest = 0, all = 0;
    for (int i = 0; i < 50; i++) { /* which makes functions known */
        launch(s, 1 + (unsigned)i % 5, 0, MS, CUDA_SUCCESS);
    }
    rest(s, SECOND);
    lines[0].blocked = true;
    for (int i = 0; i < 60; i++) {
        uint64_t took = launch(s, 1 + (unsigned)i % 5, (unsigned)i % 2, MS, CUDA_SUCCESS);
        longest = took > longest ? took : longest;
        all += took;
    }
    check(endless_waits == 0 && longest < 2 * SECOND && all < 20 * SECOND, "launches behind one that waits for the program go on after a while (%.1f s at most, %.1f in all)", (double)longest / 1e9, (double)all / 1e9);
    lines[0].blocked = false;
    lines[0].free_at = now_is;
    rest(s, 10 * SECOND);
    check(settled(s), "in the end all of it is done and paid");
    uint64_t begin = now_is, work = 0;
    while (now_is < begin + 5 * SECOND) {
        launch(s, 1, 0, MS, CUDA_SUCCESS);
        work += MS;
    }
    check(work > 2400 * MS && work < 2600 * MS, "and the share is as before (%.1f %%)", (double)work / 5e7);

    /* A kernel that runs until the program lets it end, beside others; more streams of such than are followed. */
    s = fresh(500000);
    for (unsigned i = 0; i < STREAMS - 1; i++) {
        launch(s, 100 + i, i, 3600 * SECOND, CUDA_SUCCESS);
    }
    begin = now_is;
    int made = 0;
    for (; made < 2000 && now_is < begin + 60 * SECOND; made++) {
        launch(s, 1, STREAMS - 1, 100000, CUDA_SUCCESS);
    }
    check(made == 2000, "beside kernels that don't end others go on (%d of 2000 in %.1f s)", made, (double)(now_is - begin) / 1e9);
    check(s->throttles[0]->credit.outstanding - s->throttles[0]->credit.late <= 4, "and are seen to be done");
}

/* A first launch that takes long isn't taken for one that waits: not many more are put behind it. */
static void long_ones(void) {
    struct carve_state *s = fresh(500000);
    uint64_t begin = now_is;
    int made = 0;
    for (; now_is < begin + 10 * SECOND; made++) {
        launch(s, 1, 0, 10 * SECOND, CUDA_SUCCESS);
    }
    check(made <= 12, "of kernels of 10 s not more than a few are launched before the first one is done (%d)", made);
    rest(s, 200 * SECOND);
    check(settled(s), "and all are paid");
    int64_t paid = s->throttles[0]->credit.charged_ns, took = made * 10 * (int64_t)SECOND;
    check(paid > took - (int64_t)SECOND && paid < took + (int64_t)SECOND, "as what they took (%.1f of %.1f s)", (double)paid / 1e9, (double)took / 1e9);
}

static void captures(void) {
    struct carve_state *s = fresh(500000);
    for (int i = 0; i < 100; i++) {
        launch(s, 1, 0, MS, CUDA_SUCCESS);
    }
    s->captures = 1;
    unsigned before = records;
    uint64_t begin = now_is, work = 0;
    while (now_is < begin + 10 * SECOND) {
        launch(s, 1, 0, MS, CUDA_SUCCESS);
        work += MS;
    }
    check(records == before, "while a capture is open no event is recorded");
    check(work < 5400 * MS && work > 4600 * MS, "and the share is kept, by estimates (%.1f %%)", (double)work / 1e8);
    s->captures = 0;
    rest(s, SECOND);
    check(settled(s), "afterwards nothing is out");
}

/* A context that goes while a thread launches into it, which is the program's fault: it stays one. */
static void contexts_that_go(void) {
    for (int moment = 0; moment < 3; moment++) {
        struct carve_state *s = fresh(500000);
        struct carve_launch l;
        for (int i = 0; i < 3; i++) {
            launch(s, 1, 0, 4 * MS, CUDA_SUCCESS);
        }
        carve_launch_begin(&driver, s, (const void *)1, 0, NULL, false, &l);
        uint32_t held = carve_throttles_hold(&driver, s);
        for (unsigned i = 0; i < EVENTS_AT_MOST; i++) {
            live_events -= events[i].live;
            events[i].live = false; /* the driver has taken it away */
        }
        unsigned before = dead_events;
        rest(s, SECOND);
        check(dead_events == before, "while a context goes nobody asks for its events");
        carve_throttles_forget(&driver, s, 1);
        carve_throttles_let_go(s, held);
        rest(s, SECOND);
        check(dead_events == before, "nor later");
        if (moment == 1) { /* another context's work in between takes whatever place is free */
            context_now = 2;
            launch(s, 1, 1, MS, CUDA_SUCCESS);
        }
        carve_launch_end(&driver, s, &l, moment == 2 ? CUDA_ERROR_CONTEXT_IS_DESTROYED : CUDA_SUCCESS);
        context_now = 2;
        for (int i = 0; i < 2000; i++) {
            launch(s, 1, 1, MS, CUDA_SUCCESS);
        }
        rest(s, SECOND);
        check(settled(s), "a context that goes while a launch is on its way leaves nothing out (%d)", moment);
    }
}

static void many_contexts(void) {
    struct carve_state *s = fresh(1000000);
    for (unsigned c = 1; c <= CONTEXTS; c++) {
        context_now = c;
        for (int i = 0; i < 8; i++) {
            launch(s, 1000 + c, 0, 10000, CUDA_SUCCESS);
            rest(s, 100000);
        }
    }
    unsigned known = 0;
    for (unsigned i = 0; i < COSTS; i++) {
        known += s->throttles[0]->keys[i] != NULL && s->throttles[0]->costs[i].samples == CARVE_COST_KNOWN && s->throttles[0]->costs[i].estimate_ns < 20000;
    }
    check(known == CONTEXTS, "in each of %d contexts launches are measured (%u)", CONTEXTS, known);
}

static uint32_t place_of_key(uintptr_t function) {
    return (uint32_t)(((uint64_t)(uintptr_t)carve_launch_key((const void *)function, THREADS) * 0x9e3779b97f4a7c15u) >> 52) % COSTS;
}

/* The table of costs is full of functions that nobody launches any more. */
static void full_table(void) {
    struct carve_state *s = fresh(1000000);
    uintptr_t key = 16;
    for (int i = 0; i < 20000; i++, key += 16) {
        launch(s, key, 0, 1000, CUDA_SUCCESS);
        if (i % 8 == 0) {
            rest(s, MS);
        }
    }
    struct carve_throttle *t = s->throttles[0];
    check(t->credit.committed_ns < 20 * (int64_t)MS, "after 20,000 functions nothing much is committed (%.1f ms)", (double)t->credit.committed_ns / 1e6);
    /* Two whose place would be the same. */
    uintptr_t pair[2] = {key, key};
    uint32_t place = place_of_key(key);
    do {
        pair[1] += 16;
    } while (place_of_key(pair[1]) != place);
    for (int i = 0; i < 40; i++) {
        launch(s, pair[i % 2], 0, 10000, CUDA_SUCCESS);
        rest(s, MS);
    }
    for (int i = 0; i < 2; i++) {
        const struct carve_cost *c = &t->costs[cost_of(t, carve_launch_key((const void *)pair[i], THREADS), 0)];
        check(c->samples == CARVE_COST_KNOWN && c->estimate_ns < 20000, "two functions that share a place are both known (%lld ns)", (long long)c->estimate_ns);
    }
    /* One loses its place while it is on the card: what it took is nobody's lesson. */
    launch(s, 7, 0, 50 * MS, CUDA_SUCCESS);
    uint32_t at = cost_of(t, (const void *)7, 0);
    t->keys[at] = (const void *)9;
    t->costs[at] = (struct carve_cost){.estimate_ns = 5000, .samples = CARVE_COST_KNOWN};
    rest(s, 100 * MS);
    check(t->costs[at].estimate_ns == 5000, "a function that has lost its place teaches nobody");
    rest(s, SECOND);
    check(settled(s), "and all is paid");
}

static void long_times(void) {
    struct carve_state *s = fresh(500000);
    static const uint64_t pauses[] = {60 * SECOND, 3600 * SECOND, 86400 * SECOND, 30 * 86400 * SECOND};
    for (int i = 0; i < 10; i++) {
        launch(s, 1, 0, MS, CUDA_SUCCESS);
    }
    for (unsigned i = 0; i < 4; i++) {
        for (int n = 0; n < 20; n++) {
            rest(s, pauses[i]);
            int64_t before = s->throttles[0]->credit.charged_ns;
            launch(s, 1, 0, MS, CUDA_SUCCESS);
            rest(s, 10 * MS);
            int64_t paid = s->throttles[0]->credit.charged_ns - before;
            if (paid < 900000 || paid > 1100000) {
                check(false, "after %llu s a kernel of 1 ms is paid as %.3f ms", (unsigned long long)(pauses[i] / SECOND), (double)paid / 1e6);
                return;
            }
        }
    }
    check(settled(s) && live_events < 20, "after pauses of up to a month a kernel of 1 ms is paid as one");
    s->throttles[0]->lookups = UINT32_MAX - 5;
    for (int i = 0; i < 20; i++) {
        launch(s, 1, 0, MS, CUDA_SUCCESS);
    }
    rest(s, SECOND);
    check(settled(s), "nor do counters that wrap around matter");
}

/* More launches out than there are places for. */
static void many_flights(void) {
    struct carve_state *s = fresh(1000000);
    struct carve_launch l[FLIGHTS + 200];
    cards[0].ahead_ns = 1000000000;
    for (int i = 0; i < FLIGHTS + 200; i++) {
        carve_launch_begin(&driver, s, (const void *)(uintptr_t)(1 + i % 100), 0, NULL, false, &l[i]);
        submit(0, 1000, NULL);
        s->throttles[0]->credit.credit_ns = 100 * SECOND; /* nobody is held back here */
    }
    for (int i = 0; i < FLIGHTS + 200; i++) {
        carve_launch_end(&driver, s, &l[(i * 7) % (FLIGHTS + 200)], i % 5 == 0 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS);
    }
    rest(s, SECOND);
    rest(s, SECOND);
    check(s->throttles[0]->flying == 0 && s->throttles[0]->credit.outstanding == 0, "with more launches at once than can be followed nothing is lost");
}

/* Without a share of its own a process has what an agent says that others leave, and is free without one. */
static void without_a_share(void) {
    struct carve_state *s = fresh(0);
    struct carve_terms terms;
    uint64_t held = 0;
    for (int i = 0; i < 20; i++) {
        held += launch(s, 1, 0, 10 * MS, CUDA_SUCCESS);
    }
    check(held == 0, "without a share, and without an agent, nothing is held back");
    rest(s, SECOND);
    struct carve_throttle *t = s->throttles[0];
    cards[0].terms[0] = (struct carve_compute_terms){.share_ppm = 100000, .flags = t->owner};
    bool good = true;
    uint64_t begin = now_is, work = 0;
    while (now_is < begin + 5 * SECOND) {
        cards[0].heartbeat_ns = now_is;
        launch(s, 1, 0, 10 * MS, CUDA_SUCCESS);
        work += 10 * MS;
    }
    double part = 100.0 * (double)work / (double)(now_is - begin);
    check(part > 9 && part < 12, "where others leave 10 %% it has %.1f", part);
    rest(s, SECOND);
    cards[0].terms[0].flags = carve_terms_owner(77, 1, 2);
    cards[0].heartbeat_ns = now_is;
    good &= read_terms(s, 0, t, now_is, &terms) && terms.share_ppm == 1000000;
    check(good, "what is said of another process isn't its own");
    unsigned out = 0;
    for (int i = 0; i < 100; i++) {
        cards[0].heartbeat_ns = now_is;
        launch(s, 1, 0, 10 * MS, CUDA_SUCCESS);
        unsigned queued = lines[0].tail - lines[0].head;
        out = queued > out ? queued : out;
    }
    check(out < 10, "until something is it has no more on the card than one with a share (%u)", out);
    rest(s, 10 * SECOND);
    cards[0].heartbeat_ns = now_is;
    cards[0].terms[0].flags = t->owner | CARVE_TERMS_BORROW;
    good = read_terms(s, 0, t, now_is, &terms) && terms.borrow && terms.elastic;
    now_is += 2 * HEARTBEAT_LASTS_NS;
    good &= read_terms(s, 0, t, now_is, &terms) && !terms.borrow && terms.share_ppm == 100000;
    now_is += REST_LASTS_NS;
    good &= !read_terms(s, 0, t, now_is, &terms);
    check(good, "after an agent that is silent it keeps to that for a while, and is free then");
    cards[0].heartbeat_ns = now_is;
    cards[0].terms[0].share_ppm = 1000001;
    check(read_terms(s, 0, t, now_is, &terms) && terms.share_ppm == 1000000, "a share that is none is none");
}

/* What an agent leaves that dies within an update, at each of its stores: see SetTerms in vgpu/region. */
static void half_written_terms(void) {
    struct carve_state *s = fresh(300000);
    launch(s, 1, 0, MS, CUDA_SUCCESS);
    struct carve_throttle *t = s->throttles[0];
    struct carve_compute_terms *mine = &cards[0].terms[0];
    uint32_t other = carve_terms_owner(77, 1, 2);
    struct carve_terms terms;
    bool good = true;
    for (int stores = 0; stores <= 4; stores++) {
        *mine = (struct carve_compute_terms){.correction_ns = 55 * SECOND, .share_ppm = 900000, .flags = other | CARVE_TERMS_BORROW | CARVE_GATE_CLOSED};
        cards[0].heartbeat_ns = now_is;
        if (stores > 0) {
            mine->flags = 0;
        }
        if (stores > 1) {
            mine->correction_ns = 5 * MS;
        }
        if (stores > 2) {
            mine->share_ppm = 200000;
        }
        if (stores > 3) {
            mine->flags = t->owner | CARVE_TERMS_BORROW;
        }
        good &= read_terms(s, 0, t, now_is, &terms);
        good &= stores < 4 ? terms.share_ppm == 300000 && terms.correction == t->credit.correction && !terms.borrow && terms.gate == CARVE_GATE_OPEN
                           : terms.share_ppm == 200000 && terms.correction == 5 * (int64_t)MS && terms.borrow;
    }
    check(good, "an agent that dies within an update leaves the share as granted, or the new terms whole");
    mine->flags = t->owner | CARVE_GATE_CLOSED;
    good = read_terms(s, 0, t, now_is, &terms) && terms.gate == CARVE_GATE_CLOSED;
    now_is += 2 * HEARTBEAT_LASTS_NS;
    good &= read_terms(s, 0, t, now_is, &terms) && terms.gate == CARVE_GATE_OPEN && terms.share_ppm == 200000;
    check(good, "one that is silent keeps no gate shut");
    /* Points of its pace written anew by one that starts, or half: time is never paid twice, or less than its part. */
    rest(s, SECOND);
    cards[0].pace.most = 4;
    for (int i = 0; i < 3000; i++) {
        cards[0].pace.points[cards[0].pace.count % CARVE_PACE_POINTS] = (struct carve_pace_point){now_is + (uint64_t)i * MS, i % 3 == 0 ? 0 : (uint64_t)i << 50};
        cards[0].pace.count++;
    }
    for (int i = 0; i < 300; i++) {
        int64_t before = t->credit.charged_ns;
        launch(s, 1, 0, MS, CUDA_SUCCESS);
        rest(s, 10 * MS);
        int64_t paid = t->credit.charged_ns - before;
        if (paid > (int64_t)MS * 11 / 10 || paid < (int64_t)MS / 5 - 10000) {
            printf("# launch %d was paid as %.3f ms\n", i, (double)paid / 1e6);
            good = false;
        }
    }
    check(good && settled(s), "whatever stands in the pace, a launch is paid by no more than it took and no less than its part of that");
}

int main(void) {
    shares();
    failing();
    crowd();
    no_room_for_spares();
    stuck();
    long_ones();
    captures();
    contexts_that_go();
    many_contexts();
    full_table();
    long_times();
    many_flights();
    half_written_terms();
    without_a_share();
    return tap_done();
}
