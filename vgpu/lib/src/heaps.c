/* SPDX-License-Identifier: Apache-2.0 */
#include "heaps.h"

#include "ledger.h"
#include "limits.h"
#include "measure.h"
#include "reserves.h"

/* ---- how much ---- */

/* For how many there is one each: stacks for all threads that can be resident. 0: not told. */
static uint64_t many(const struct carve_driver *d, CUdevice device, CUlimit limit) {
    int processors = 0, threads = 0;
    switch (limit) {
    case CU_LIMIT_STACK_SIZE:
        if (d->cuDeviceGetAttribute == NULL ||
            d->cuDeviceGetAttribute(&processors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device) != CUDA_SUCCESS ||
            d->cuDeviceGetAttribute(&threads, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, device) != CUDA_SUCCESS ||
            processors < 0 || threads < 0) {
            return 0;
        }
        return (uint64_t)processors * (uint64_t)threads;
    default:
        return 1;
    }
}

enum { STACK_STEP = 16 };

/* All that a limit takes, in whole pages. */
static uint32_t all_of(uint64_t many, CUlimit limit, uint64_t value) {
    if (limit == CU_LIMIT_STACK_SIZE && value <= UINT32_MAX) {
        value = (value + STACK_STEP - 1) / STACK_STEP * STACK_STEP;
    }
    return many == 0 || value == 0 ? 0 : value > UINT64_MAX / many ? UINT32_MAX : carve_page_units(value * many);
}

/* What it takes beyond the one that the context had at first. */
static uint32_t expected(uint64_t many, CUlimit limit, uint64_t first, uint64_t value) {
    uint32_t all = all_of(many, limit, value), had = all_of(many, limit, first);
    return all > had ? all - had : 0;
}

/* ---- measuring ---- */

/* What the driver says that this process has on the card, beside what is charged to it. */
struct look {
    bool good;
    uint32_t there, used, pending;
    uint64_t sequence;
};

static struct look look(const struct carve_driver *d, struct carve_state *s, unsigned card) {
    struct carve_limits_facts facts;
    struct carve_limits_card about;
    struct carve_account *a = &s->accounts[card];
    struct look l = {0};
    carve_reserves_follow(d); /* pools may give back what nobody has noticed yet */
    l.good = carve_limits_card(s->limits, card, &facts, &about) && (facts.flags & CARVE_LIMITS_SELF_VISIBLE) != 0 &&
             carve_measure(about.uuid, &l.there);
    carve_lock(&a->lock);
    l.used = a->used;
    l.pending = a->pending;
    l.sequence = a->sequence;
    carve_unlock(&a->lock);
    return l;
}

/* Whether nothing else was charged between two looks, or given back. What another thread has charged and is asking the
 * driver for just then doesn't show: so what was measured never makes less of a charge than arithmetic. */
static bool undisturbed(const struct look *before, const struct look *after) {
    return before->good && after->good && before->used == after->used && before->pending == after->pending &&
           before->sequence == after->sequence;
}

/* ---- turns ---- */

/* One thread sets a limit at a time, from before the driver is asked until its answer is charged. The driver may wait
 * for work meanwhile, and that for whoever wants the turn; so nobody waits for it without end. */
#define TURN_WAIT_NS 1000000000ull

static bool take_turn(struct carve_state *s) {
    uint64_t deadline = carve_now() + TURN_WAIT_NS;
    unsigned round = 0;
    while (__atomic_exchange_n(&s->heap_turn, 1, __ATOMIC_ACQUIRE) != 0) {
        if (carve_now() >= deadline) {
            return false;
        }
        carve_back_off(&round);
    }
    return true;
}

static void end_turn(struct carve_state *s) { __atomic_store_n(&s->heap_turn, 0, __ATOMIC_RELEASE); }

/* ---- setting ---- */

/* The context, while the lock is held; NULL: it is gone. Green ones are other names of the primary one. */
static struct carve_context *find(struct carve_state *s, uint32_t id) {
    for (uint32_t i = 0; i < s->contexts_high; i++) {
        struct carve_context *c = &s->contexts[i];
        if (c->handle != NULL && c->id == id && c->green == NULL) {
            return c;
        }
    }
    return NULL;
}

/* A call on its way. */
struct setting {
    const struct carve_driver *d;
    struct carve_state *s;
    unsigned card;
    uint32_t context;
    CUlimit limit;
    size_t before;
    uint64_t many;
    struct carve_heap heap; /* as it was */
    uint32_t held, admitted;
};

/* Notes what the limit was at first, before it is set for the first time. */
static bool begin(struct setting *set) {
    carve_lock(&set->s->contexts_lock);
    struct carve_context *c = find(set->s, set->context);
    if (c != NULL) {
        struct carve_heap *h = &c->heaps[set->limit];
        h->first = h->known ? h->first : set->before;
        h->known = true;
        set->heap = *h;
    }
    carve_unlock(&set->s->contexts_lock);
    return c != NULL;
}

/* Charges units for the limit in the place of what was charged before, held and admitted. */
static void settle(struct setting *set, uint32_t units) {
    struct carve_state *s = set->s;
    carve_lock(&s->contexts_lock);
    struct carve_context *c = find(s, set->context);
    int64_t more = -(int64_t)set->admitted;
    if (c != NULL) { /* else it is gone, and its memory with it */
        struct carve_heap *h = &c->heaps[set->limit];
        more += (int64_t)units - (int64_t)h->units;
        h->units = units;
        h->seen = h->seen || set->heap.seen;
    }
    carve_keep(s, set->card, set->held, more);
    carve_unlock(&s->contexts_lock);
}

/* What is charged after an undisturbed call: what arithmetic says, or what the driver took or didn't give back, if that
 * is more and not out of all proportion. */
static uint32_t measured(struct setting *set, const struct look *before, const struct look *after, uint32_t by_arithmetic) {
    int64_t was = set->heap.units, taken = (int64_t)after->there - (int64_t)before->there;
    int64_t most = (int64_t)by_arithmetic + by_arithmetic / 4 + CARVE_PAGE_UNITS;
    set->heap.seen = set->heap.seen || taken != 0;
    if (!set->heap.seen || was + taken > (was > most ? was : most)) {
        return by_arithmetic; /* it is made later, or something else was */
    }
    return was + taken > (int64_t)by_arithmetic ? (uint32_t)(was + taken) : by_arithmetic;
}

/* A stack beyond what a thread can have on any card: no driver takes that. One that does sets it back. */
#define MOST_STACK_BYTES (512u << 10)

static CUresult refuse(const struct setting *set, size_t value) {
    if (set->limit != CU_LIMIT_STACK_SIZE || value <= MOST_STACK_BYTES) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    CUresult result = set->d->cuCtxSetLimit(set->limit, value);
    if (result == CUDA_SUCCESS) {
        (void)set->d->cuCtxSetLimit(set->limit, set->before);
        result = CUDA_ERROR_OUT_OF_MEMORY;
    }
    return result;
}

static CUresult set_limit(struct setting *set, size_t value, bool alone) {
    const struct carve_driver *d = set->d;
    uint32_t now = expected(set->many, set->limit, set->heap.first, value);
    /* Without the turn nobody knows what another thread makes of the charge meanwhile. */
    uint32_t covered = alone ? set->heap.units : 0, more = now > covered ? now - covered : 0;
    if (more != 0 && !carve_hold(set->s, set->card, more)) {
        if (!carve_obtain_slowly(d, set->s, set->card, more, carve_units_bytes(more), true)) {
            return refuse(set, value);
        }
        set->admitted = more;
    } else {
        set->held = more;
    }
    struct look first = look(d, set->s, set->card);
    CARVE_STEP("heap-held");
    CUresult result = d->cuCtxSetLimit(set->limit, value);
    if (result != CUDA_SUCCESS) {
        carve_keep(set->s, set->card, set->held, -(int64_t)set->admitted);
        return result;
    }
    struct look last = look(d, set->s, set->card);
    uint32_t units = alone && undisturbed(&first, &last) ? measured(set, &first, &last, now) : now;
    uint32_t beyond = units > covered + more ? units - covered - more : 0;
    if (alone && beyond != 0) {
        if (!carve_try(set->s, set->card, beyond)) {
            /* It took more than anybody could know, and than there is room for. What it doesn't give back is charged. */
            (void)d->cuCtxSetLimit(set->limit, set->before);
            struct look undone = look(d, set->s, set->card);
            int64_t stays = undisturbed(&first, &undone) ? (int64_t)undone.there - (int64_t)first.there : 0;
            int64_t most = (int64_t)units - (int64_t)set->heap.units;
            settle(set, set->heap.units + (uint32_t)(stays <= 0 ? 0 : stays < most ? stays : most));
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
        set->admitted += beyond;
    }
    settle(set, units);
    return result;
}

CUresult carve_heap_set(const struct carve_driver *d, struct carve_state *s, const struct carve_place *place, CUlimit limit, size_t value) {
    struct setting set = {.d = d, .s = s, .card = place->card, .context = place->context, .limit = limit, .many = many(d, place->device, limit)};
    if (d->cuCtxGetLimit == NULL || !carve_slot(s)) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    bool alone = take_turn(s);
    CUresult result = d->cuCtxGetLimit(&set.before, limit);
    if (result == CUDA_SUCCESS) {
        /* In a context that isn't known it is the residual's. */
        result = begin(&set) ? set_limit(&set, value, alone) : d->cuCtxSetLimit(limit, value);
    }
    if (alone) {
        end_turn(s);
    }
    return result;
}
