/* SPDX-License-Identifier: Apache-2.0 */
#include "reserves.h"

#include "contexts.h"
#include "ledger.h"
#include "limits.h"
#include "virtual.h"

/* What a pool takes at once from the card, at least. Larger blocks are taken to be rounded to this too, until it was
 * seen that they are rounded to pages. */
#define STEP_UNITS (32u << (20 - CARVE_UNIT_SHIFT))

/* How long a request waits for a thread that has the reserve for itself. That one gives memory back in the order of its
 * stream, whose work may wait for the thread that waits here. */
#define CLAIM_WAIT_NS 3000000000ull

/* ---- the list; its lock is held ---- */

static int look_up(struct carve_reserves *list, CUmemoryPool pool, CUdevice device) {
    for (uint32_t i = 0; i < list->high; i++) {
        const struct carve_reserve *r = &list->list[i];
        if (r->kind != 0 && r->pool == pool && (pool != NULL || r->device == device)) {
            return (int)i;
        }
    }
    return -1;
}

static int add(struct carve_state *s, struct carve_reserve reserve) {
    struct carve_reserves *list = &s->reserves;
    uint32_t i = 0;
    while (i < list->high && (list->list[i].kind != 0 || list->list[i].asking != 0)) {
        i++;
    }
    if (i == CARVE_MAX_RESERVES || !carve_slot(s)) {
        return -1;
    }
    list->list[i] = reserve;
    list->high += i == list->high;
    __atomic_store_n(&list->count, list->count + 1, __ATOMIC_RELEASE);
    return (int)i;
}

static void drop(struct carve_reserves *list, struct carve_reserve *r) {
    r->kind = 0;
    r->pool = NULL;
    __atomic_store_n(&list->count, list->count - 1, __ATOMIC_RELEASE);
}

/* ---- figures ---- */

/* What the driver says that the reserve has on the card. What it can't say stays as it was, unless this process has
 * no context there any more, and so nothing at all. */
static uint32_t figure(const struct carve_driver *d, struct carve_state *s, const struct carve_reserve *r) {
    cuuint64_t bytes = 0;
    CUresult result = CUDA_ERROR_NOT_SUPPORTED;
    if (r->kind == CARVE_RESERVE_POOL && d->cuMemPoolGetAttribute != NULL) {
        result = d->cuMemPoolGetAttribute(r->pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &bytes);
    } else if (r->kind == CARVE_RESERVE_GRAPHS && d->cuDeviceGetGraphMemAttribute != NULL) {
        result = d->cuDeviceGetGraphMemAttribute(r->device, CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT, &bytes);
    }
    if (result == CUDA_SUCCESS) {
        return carve_units_up(bytes);
    }
    return carve_contexts_on(s, (unsigned)r->card) ? r->units : 0;
}

static void trim(const struct carve_driver *d, struct carve_state *s, const struct carve_reserve *r, uint64_t keep_units) {
    if (r->kind == CARVE_RESERVE_POOL && d->cuMemPoolTrimTo != NULL) {
        (void)d->cuMemPoolTrimTo(r->pool, carve_units_bytes(keep_units));
    } else if (r->kind == CARVE_RESERVE_GRAPHS && d->cuDeviceGraphMemTrim != NULL) {
        s->graphs.generation++; /* what was launched last may have to take memory anew */
        (void)d->cuDeviceGraphMemTrim(r->device);
    }
}

/* Charges the figure as it is now, in the place of what was charged before, held, and admitted for it; extra is what was
 * taken beyond all that. What others have taken who are with the driver at this moment is left to them, who hold it. While
 * a call counts on what is there all of that stays charged: another one, or a trim, may have taken it in between, and then
 * the driver takes as much anew. */
static void charge_figure(struct carve_state *s, struct carve_reserve *r, uint32_t now, uint32_t held, uint64_t admitted, uint64_t extra) {
    uint64_t own = (uint64_t)r->units + held + admitted + extra;
    if (CARVE_UNLIKELY((r->inside != 0 && now > own) || (r->counting != 0 && now < own))) {
        now = own > UINT32_MAX ? UINT32_MAX : (uint32_t)own;
    }
    if (held != 0 || now != r->units || admitted != 0) {
        carve_keep(s, (unsigned)r->card, held, (int64_t)now - (int64_t)r->units - (int64_t)admitted);
        r->units = now;
    }
}

static void settle(const struct carve_driver *d, struct carve_state *s, struct carve_reserve *r) {
    if (CARVE_UNLIKELY(r->trials != 0)) {
        return;
    }
    if (CARVE_UNLIKELY(r->doomed)) {
        trim(d, s, r, 0);
    }
    charge_figure(s, r, figure(d, s, r), 0, 0, 0);
    if (CARVE_UNLIKELY(r->doomed && r->units == 0)) {
        (void)d->cuMemPoolDestroy(r->pool);
        drop(&s->reserves, r);
    }
}

static void settle_card(const struct carve_driver *d, struct carve_state *s, int card) {
    for (uint32_t i = 0; i < s->reserves.high; i++) {
        struct carve_reserve *r = &s->reserves.list[i];
        if (r->kind != 0 && (card < 0 || r->card == card)) {
            settle(d, s, r);
        }
    }
}

void carve_reserves_settle(const struct carve_driver *d, struct carve_state *s, int card) {
    carve_lock(&s->reserves.lock);
    settle_card(d, s, card);
    carve_unlock(&s->reserves.lock);
}

/* Trims until so many units can be had, or all are trimmed: the one that is to grow comes last, and no more is asked
 * back than is missing, so that a pool that lives at the limit isn't emptied and filled all the time. */
static void make_room(const struct carve_driver *d, struct carve_state *s, unsigned card, uint32_t units, int last) {
    for (int pass = 0; pass < 2; pass++) {
        for (uint32_t i = 0; i < s->reserves.high; i++) {
            struct carve_reserve *r = &s->reserves.list[i];
            if (r->kind == 0 || r->card != (int)card || ((int)i == last) != (pass == 1) || r->units == 0 || r->trials != 0 || r->counting != 0) {
                continue;
            }
            uint32_t room = carve_room(s, card);
            if (room >= units) {
                return;
            }
            /* A pool keeps at least what it is told to, and gives back in steps. */
            uint32_t missing = units - room, keep = r->units > missing ? (r->units - missing) / STEP_UNITS * STEP_UNITS : 0;
            trim(d, s, r, keep);
            settle(d, s, r);
            if (r->kind != 0 && keep != 0 && carve_room(s, card) < units) {
                trim(d, s, r, 0); /* large blocks may be all that could be given back */
                settle(d, s, r);
            }
        }
    }
}

/* ---- growing ---- */

int carve_reserve_find(const struct carve_driver *d, struct carve_state *s, CUmemoryPool pool, CUdevice device, bool wanted) {
    struct carve_reserves *list = &s->reserves;
    int card = wanted ? carve_device_card(d, s, device) : -1;
    carve_lock(&list->lock);
    int at = look_up(list, pool, device);
    if (CARVE_UNLIKELY(at < 0 && card >= 0)) {
        at = add(s, (struct carve_reserve){.pool = pool, .device = device, .card = (int8_t)card,
                                           .kind = pool != NULL ? CARVE_RESERVE_POOL : CARVE_RESERVE_GRAPHS});
        if (at >= 0) {
            settle(d, s, &list->list[at]); /* what it took before anybody looked */
        }
    }
    carve_unlock(&list->lock);
    return at;
}

static uint32_t in_steps(uint64_t bytes) {
    uint32_t pages = carve_page_units(bytes);
    uint64_t steps = ((uint64_t)pages + STEP_UNITS - 1) / STEP_UNITS * STEP_UNITS;
    return steps > UINT32_MAX ? UINT32_MAX : (uint32_t)steps;
}

/* Holds what the reserve may grow by: as much as it ever grew by for such a request, or the least that it can. */
static uint32_t hold(struct carve_state *s, unsigned card, uint32_t most, uint32_t least) {
    if (CARVE_LIKELY(carve_hold(s, card, most))) {
        return most;
    }
    return least < most && carve_hold(s, card, least) ? least : 0;
}

/* Whether the request can be served from what the pool has: then it is made though nothing more can be had. */
static bool fits_within(const struct carve_driver *d, const struct carve_reserve *r, uint64_t bytes) {
    cuuint64_t used = 0;
    return r->kind == CARVE_RESERVE_POOL && d->cuMemPoolGetAttribute != NULL &&
           d->cuMemPoolGetAttribute(r->pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, &used) == CUDA_SUCCESS &&
           (uint64_t)carve_units_up(used) + carve_units_up(bytes) <= r->units;
}

/* The least and the most that the reserve takes for the request if it has to grow. If the request gets what other calls
 * count on, these take as much anew. */
static uint32_t with_counted(const struct carve_reserve *r, const struct carve_growth *growth, uint32_t units) {
    if (CARVE_LIKELY(r->counted == 0)) {
        return units;
    }
    uint64_t most = growth->in_one && r->counted < units ? units : growth->in_one ? r->counted : (uint64_t)units + r->counted;
    return most > UINT32_MAX ? UINT32_MAX : (uint32_t)most;
}

static uint32_t most_units(const struct carve_reserve *r, const struct carve_growth *growth) {
    return with_counted(r, growth, growth->most_bytes != 0 ? carve_page_units(growth->most_bytes) : in_steps(growth->bytes));
}

static uint32_t least_units(const struct carve_reserves *list, const struct carve_reserve *r, const struct carve_growth *growth) {
    bool pages = growth->most_bytes == 0 && list->by_pages && growth->bytes > carve_units_bytes(STEP_UNITS);
    return pages ? with_counted(r, growth, carve_page_units(growth->bytes)) : most_units(r, growth);
}

/* Whether the request can still be made: the program may have destroyed the pool at this moment. */
static bool valid(const struct carve_reserve *r, const struct carve_growth *growth) {
    return r->kind != 0 && r->pool == growth->pool && !r->doomed;
}

static bool in_flight(const struct carve_reserves *list, unsigned card) {
    for (uint32_t i = 0; i < list->high; i++) {
        const struct carve_reserve *r = &list->list[i];
        if (r->card == (int)card && (r->flight != 0 || r->trials != 0 || r->counting != 0)) {
            return true;
        }
    }
    return false;
}

/* Waits until no other thread is under way with a reserve of the card: what it holds may not be taken in the end. The
 * lock is held, and let go meanwhile. Gives up after a while. */
static void wait_for_flights(struct carve_reserves *list, unsigned card) {
    uint64_t deadline = carve_now() + CARVE_PENDING_WAIT_NS;
    unsigned round = 0;
    while (in_flight(list, card) && carve_now() < deadline) {
        carve_unlock(&list->lock);
        carve_back_off(&round);
        carve_lock(&list->lock);
    }
}

bool carve_obtain_slowly(const struct carve_driver *d, struct carve_state *s, unsigned card, uint32_t units, uint64_t asked_bytes, bool patient) {
    if (carve_leaving_any(s)) {
        carve_leaving_look(d, s);
    }
    carve_virtual_look(s);
    if (carve_try(s, card, units)) {
        return true;
    }
    if (carve_reserves_any(s)) {
        carve_lock(&s->reserves.lock);
        settle_card(d, s, (int)card);
        bool had = carve_try(s, card, units);
        if (!had) {
            wait_for_flights(&s->reserves, card);
            settle_card(d, s, (int)card);
            make_room(d, s, card, units, -1);
            had = carve_try(s, card, units);
        }
        carve_unlock(&s->reserves.lock);
        if (had) {
            return true;
        }
    }
    return patient && carve_admit(s, card, units, asked_bytes);
}

enum way { HELD, ALONE, NO_ROOM, AGAIN };

/* Whether a thread has the reserve for itself. */
static bool taken(const struct carve_reserve *r) { return r->claimed || r->trials != 0; }

/* Waits until nobody has the reserve for itself; false where that takes too long. The lock is held, and let go meanwhile. */
static bool wait_for_claim(struct carve_reserves *list, const struct carve_reserve *r) {
    uint64_t deadline = 0;
    unsigned round = 0;
    while (taken(r)) {
        uint64_t now = carve_now();
        deadline = deadline == 0 ? now + CLAIM_WAIT_NS : deadline;
        if (now >= deadline) {
            return false;
        }
        CARVE_STEP("reserve-waits");
        carve_unlock(&list->lock);
        carve_back_off(&round);
        carve_lock(&list->lock);
    }
    return true;
}

/* Has the reserve for this thread alone once all others are back from the driver; false where that takes too long. */
static bool claim(struct carve_reserves *list, struct carve_reserve *r) {
    uint64_t deadline = carve_now() + CARVE_PENDING_WAIT_NS;
    unsigned round = 0;
    r->claimed = true;
    while ((r->inside != 0 || r->trials != 0) && carve_now() < deadline) {
        carve_unlock(&list->lock);
        carve_back_off(&round);
        carve_lock(&list->lock);
    }
    r->claimed = r->inside == 0 && r->trials == 0;
    return r->claimed;
}

/* The request doesn't fit as things are. Under the lock, which is let go meanwhile. */
static enum way hold_slowly(const struct carve_driver *d, struct carve_state *s, struct carve_reserve *r, const struct carve_growth *growth, uint32_t *held) {
    struct carve_reserves *list = &s->reserves;
    unsigned card = (unsigned)r->card;
    if (carve_limit(s, card) == 0) {
        return NO_ROOM; /* nothing is had without limits, not even what is idle */
    }
    settle_card(d, s, (int)card);
    if ((*held = hold(s, card, most_units(r, growth), least_units(list, r, growth))) != 0) {
        return HELD;
    }
    wait_for_flights(list, card);
    if (taken(r)) {
        return AGAIN;
    }
    settle_card(d, s, (int)card);
    make_room(d, s, card, most_units(r, growth), (int)(r - list->list));
    if ((*held = hold(s, card, most_units(r, growth), least_units(list, r, growth))) != 0) {
        return HELD;
    }
    if (!valid(r, growth) || r->kind != CARVE_RESERVE_POOL || !claim(list, r)) {
        return NO_ROOM;
    }
    settle_card(d, s, (int)card);
    if ((*held = hold(s, card, most_units(r, growth), least_units(list, r, growth))) == 0 && valid(r, growth) && fits_within(d, r, growth->bytes)) {
        r->trials++;
        return ALONE;
    }
    r->claimed = false;
    return *held != 0 ? HELD : NO_ROOM;
}

/* The driver has answered: charges what it took. False where that is more than there is room for; it is charged all
 * the same, for the moment. */
static bool account(const struct carve_driver *d, struct carve_state *s, struct carve_reserve *r, const struct carve_growth *growth,
                    uint32_t held, uint64_t admitted, bool may_undo) {
    uint32_t now = figure(d, s, r);
    uint64_t covered = (uint64_t)r->units + held + admitted + r->flight, extra = now > covered ? now - covered : 0;
    bool fits = true;
    if (CARVE_UNLIKELY(now > r->units && (now - r->units) % STEP_UNITS != 0 && r->kind == CARVE_RESERVE_POOL)) {
        s->reserves.by_pages = true;
    }
    if (CARVE_UNLIKELY(extra != 0 && may_undo && growth->undo != NULL)) {
        fits = carve_try(s, (unsigned)r->card, (uint32_t)extra);
        admitted += fits ? extra : 0;
        extra = fits ? 0 : extra;
    }
    charge_figure(s, r, now, held, admitted, extra);
    return fits;
}

/* Sees to it that the call may be made: with what it may take held, or with the reserve for itself. Under the lock, which
 * is let go meanwhile. */
static __attribute__((noinline)) enum way let_in(const struct carve_driver *d, struct carve_state *s, struct carve_reserve *r, const struct carve_growth *growth, uint32_t admitted, uint32_t *held) {
    struct carve_reserves *list = &s->reserves;
    unsigned card = (unsigned)r->card;
    *held = 0;
    for (;;) {
        if (CARVE_UNLIKELY(taken(r)) && !wait_for_claim(list, r)) {
            return NO_ROOM;
        }
        if (CARVE_UNLIKELY(growth->steady)) {
            return HELD;
        }
        if (CARVE_UNLIKELY(admitted != 0)) {
            if (r->counting != 0) {
                wait_for_flights(list, card);
            }
            if (taken(r)) {
                continue;
            }
            if (r->counted != 0 && !carve_hold(s, card, r->counted)) {
                return NO_ROOM;
            }
            *held = r->counted;
            return HELD;
        }
        uint32_t most = most_units(r, growth);
        if (carve_hold(s, card, most)) {
            *held = most;
            return HELD;
        }
        carve_unlock(&list->lock);
        if (carve_leaving_any(s)) {
            carve_leaving_look(d, s);
        }
        carve_virtual_look(s);
        bool captured = growth->captured(d, growth);
        carve_lock(&list->lock);
        enum way way = taken(r) ? AGAIN : captured ? HELD : hold_slowly(d, s, r, growth, held);
        if (way != AGAIN) {
            return way;
        }
    }
}

/* A call that counted on what is there is over, or isn't made. */
static void count_out(struct carve_reserve *r, const struct carve_growth *growth) {
    if (growth->steady) {
        r->counting--;
        r->counted -= carve_page_units(growth->most_bytes);
    }
}

CUresult carve_reserve_grow(const struct carve_driver *d, struct carve_state *s, int reserve, struct carve_growth *growth) {
    struct carve_reserves *list = &s->reserves;
    struct carve_reserve *r = &list->list[reserve];
    uint32_t admitted = 0;
    carve_lock(&list->lock);
    r->asking++; /* from here to the end the place is given to no other: if it is another's by now, that isn't valid */
    unsigned card = (unsigned)r->card;
    for (;;) {
        enum way way = HELD;
        uint32_t held = most_units(r, growth);
        if (CARVE_UNLIKELY(admitted != 0 || growth->steady || taken(r)) || CARVE_UNLIKELY(!carve_hold(s, card, held))) {
            way = let_in(d, s, r, growth, admitted, &held);
        }
        if (CARVE_LIKELY(way != NO_ROOM && valid(r, growth))) {
            uint32_t before = r->units, own = held + admitted;
            r->flight += own;
            r->inside++;
            carve_unlock(&list->lock);
            CARVE_STEP("reserve-held");
            CUresult result = growth->make(d, growth);
            CARVE_STEP("reserve-done");
            carve_lock(&list->lock);
            bool fits = true;
            r->flight -= own;
            r->inside--;
            count_out(r, growth);
            if (growth->over != NULL) {
                growth->over(s, growth);
            }
            if (CARVE_LIKELY(r->kind != 0 && r->pool == growth->pool)) { /* also if it was destroyed meanwhile, and is in use */
                fits = account(d, s, r, growth, held, admitted, result == CUDA_SUCCESS);
            } else {
                carve_keep(s, card, held, -(int64_t)admitted);
            }
            r->trials += !fits; /* until that is undone */
            if (CARVE_UNLIKELY(way == ALONE)) {
                r->claimed = false;
                r->trials--;
            }
            r->asking -= fits;
            carve_unlock(&list->lock);
            CARVE_STEP("reserve-charged");
            if (CARVE_LIKELY(fits)) {
                return result;
            }
            growth->undo(d, growth);
            carve_lock(&list->lock);
            r->trials--;
            trim(d, s, r, before);
            settle(d, s, r);
        } else {
            bool gone = !valid(r, growth);
            if (way == ALONE) {
                r->claimed = false;
                r->trials--;
            }
            if (held != 0 || admitted != 0) {
                carve_keep(s, card, held, -(int64_t)admitted);
            }
            if (gone) {
                count_out(r, growth);
                r->asking--;
                carve_unlock(&list->lock);
                return CUDA_ERROR_INVALID_VALUE;
            }
        }
        /* Once more, with patience for other processes, and for what dead ones had. */
        uint32_t least = least_units(list, r, growth);
        carve_unlock(&list->lock);
        bool refused = admitted != 0 || !carve_admit(s, card, least, growth->bytes);
        carve_lock(&list->lock);
        if (refused) {
            r->asking--;
            carve_unlock(&list->lock);
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
        admitted = least;
    }
}

/* ---- the end of a pool ---- */

CUresult carve_reserve_destroy(const struct carve_driver *d, struct carve_state *s, CUmemoryPool pool) {
    struct carve_reserves *list = &s->reserves;
    CUmemoryPool other = NULL;
    CUresult result = CUDA_SUCCESS;
    carve_lock(&list->lock);
    int at = pool == NULL ? -1 : look_up(list, pool, 0);
    struct carve_reserve *r = at < 0 ? NULL : &list->list[at];
    bool standard = r != NULL && d->cuDeviceGetDefaultMemPool != NULL &&
                    d->cuDeviceGetDefaultMemPool(&other, r->device) == CUDA_SUCCESS && other == pool;
    if (r == NULL || standard) {
        result = d->cuMemPoolDestroy(pool); /* not a pool on a card, or one that can't be destroyed: the driver's to say */
    } else if (r->doomed) {
        result = CUDA_ERROR_INVALID_VALUE;
    } else {
        CUmemoryPool current = NULL;
        if (d->cuDeviceGetMemPool != NULL && d->cuDeviceSetMemPool != NULL && other != NULL &&
            d->cuDeviceGetMemPool(&current, r->device) == CUDA_SUCCESS && current == pool) {
            (void)d->cuDeviceSetMemPool(r->device, other); /* as the driver does when it destroys it */
        }
        trim(d, s, r, 0);
        if (r->trials == 0) {
            charge_figure(s, r, figure(d, s, r), 0, 0, 0);
        }
        if (r->units != 0) {
            r->doomed = true;
        } else {
            result = d->cuMemPoolDestroy(pool);
            if (result == CUDA_SUCCESS) {
                drop(list, r);
            }
        }
    }
    carve_unlock(&list->lock);
    return result;
}

bool carve_reserve_destroyed(struct carve_state *s, CUmemoryPool pool) {
    carve_lock(&s->reserves.lock);
    int at = pool == NULL ? -1 : look_up(&s->reserves, pool, 0);
    bool doomed = at >= 0 && s->reserves.list[at].doomed;
    carve_unlock(&s->reserves.lock);
    return doomed;
}
