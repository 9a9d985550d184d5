/* SPDX-License-Identifier: Apache-2.0 */
#include "reserves.h"

#include "contexts.h"
#include "ledger.h"
#include "limits.h"

/* What a pool takes at once from the card, at least. Larger blocks are taken to be rounded to this too, until it was
 * seen that they are rounded to pages. */
#define STEP_UNITS (32u << (20 - CARVE_UNIT_SHIFT))

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
    while (i < list->high && list->list[i].kind != 0) {
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

static void trim(const struct carve_driver *d, const struct carve_reserve *r, uint64_t keep_units) {
    if (r->kind == CARVE_RESERVE_POOL && d->cuMemPoolTrimTo != NULL) {
        (void)d->cuMemPoolTrimTo(r->pool, carve_units_bytes(keep_units));
    } else if (r->kind == CARVE_RESERVE_GRAPHS && d->cuDeviceGraphMemTrim != NULL) {
        (void)d->cuDeviceGraphMemTrim(r->device);
    }
}

/* Charges the figure as it is now, in the place of what was charged before, held, and admitted for it. */
static void charge_figure(struct carve_state *s, struct carve_reserve *r, uint32_t now, uint32_t held, uint64_t admitted) {
    if (held != 0 || now != r->units || admitted != 0) {
        carve_keep(s, (unsigned)r->card, held, (int64_t)now - (int64_t)r->units - (int64_t)admitted);
        r->units = now;
    }
}

static void settle(const struct carve_driver *d, struct carve_state *s, struct carve_reserve *r) {
    if (CARVE_UNLIKELY(r->doomed)) {
        trim(d, r, 0);
    }
    charge_figure(s, r, figure(d, s, r), 0, 0);
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
            if (r->kind == 0 || r->card != (int)card || ((int)i == last) != (pass == 1) || r->units == 0) {
                continue;
            }
            uint32_t room = carve_room(s, card);
            if (room >= units) {
                return;
            }
            /* A pool keeps at least what it is told to, and gives back in steps. */
            uint32_t missing = units - room, keep = r->units > missing ? (r->units - missing) / STEP_UNITS * STEP_UNITS : 0;
            trim(d, r, keep);
            settle(d, s, r);
            if (r->kind != 0 && keep != 0 && carve_room(s, card) < units) {
                trim(d, r, 0); /* large blocks may be all that could be given back */
                settle(d, s, r);
            }
        }
    }
}

bool carve_obtain_slowly(const struct carve_driver *d, struct carve_state *s, unsigned card, uint32_t units, uint64_t asked_bytes, bool patient) {
    if (carve_reserves_any(s)) {
        carve_lock(&s->reserves.lock);
        settle_card(d, s, (int)card);
        bool had = carve_try(s, card, units);
        if (!had) {
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

/* The least and the most that the reserve takes for the request if it has to grow. */
static uint32_t most_units(const struct carve_growth *growth) {
    return growth->most_bytes != 0 ? carve_page_units(growth->most_bytes) : in_steps(growth->bytes);
}

static uint32_t least_units(const struct carve_reserves *list, const struct carve_growth *growth) {
    bool pages = growth->most_bytes == 0 && list->by_pages && growth->bytes > carve_units_bytes(STEP_UNITS);
    return pages ? carve_page_units(growth->bytes) : most_units(growth);
}

enum grown { GROWN, TOO_MUCH, NO_ROOM };

/* One try, under the lock. admitted is charged already for it, beside what is charged for the reserve. */
static enum grown grow(const struct carve_driver *d, struct carve_state *s, struct carve_reserve *r, struct carve_growth *growth,
                       uint64_t admitted, CUresult *result) {
    unsigned card = (unsigned)r->card;
    uint32_t most = most_units(growth), least = least_units(&s->reserves, growth), held = 0;
    bool captured = false;
    if (CARVE_LIKELY(admitted == 0) && CARVE_UNLIKELY((held = hold(s, card, most, most)) == 0)) {
        captured = growth->captured(d, growth);
        if (!captured && carve_limit(s, card) == 0) {
            return NO_ROOM; /* nothing is had without limits, not even what is idle */
        }
        if (!captured) {
            settle_card(d, s, (int)card);
            held = hold(s, card, most, least);
        }
        if (!captured && held == 0) {
            make_room(d, s, card, most, (int)(r - s->reserves.list));
            held = hold(s, card, most, least);
        }
        if (!captured && held == 0 && !fits_within(d, r, growth->bytes)) {
            return NO_ROOM;
        }
    }
    CARVE_STEP("reserve-held");
    *result = growth->make(d, growth);
    CARVE_STEP("reserve-done");
    uint32_t now = figure(d, s, r), before = r->units;
    uint64_t covered = held + admitted, more = now > before ? now - before : 0;
    if (CARVE_UNLIKELY(more % STEP_UNITS != 0 && r->kind == CARVE_RESERVE_POOL && !s->reserves.by_pages)) {
        s->reserves.by_pages = true;
    }
    bool fits = true;
    if (CARVE_UNLIKELY(more > covered && *result == CUDA_SUCCESS && growth->undo != NULL && !captured)) {
        fits = carve_try(s, card, (uint32_t)(more - covered));
        admitted += fits ? more - covered : 0;
    }
    charge_figure(s, r, now, held, admitted); /* also what doesn't fit, for the moment */
    CARVE_STEP("reserve-charged");
    return fits ? GROWN : TOO_MUCH;
}

CUresult carve_reserve_grow(const struct carve_driver *d, struct carve_state *s, int reserve, struct carve_growth *growth) {
    struct carve_reserves *list = &s->reserves;
    struct carve_reserve *r = &list->list[reserve];
    unsigned card = (unsigned)r->card;
    uint32_t admitted = 0;
    for (;;) {
        CUresult result = CUDA_ERROR_INVALID_VALUE;
        carve_lock(&list->lock);
        if (CARVE_UNLIKELY(r->kind == 0 || r->pool != growth->pool || r->doomed)) {
            carve_unlock(&list->lock); /* destroyed at this moment */
            if (admitted != 0) {
                carve_release(s, card, admitted);
            }
            return result;
        }
        uint32_t before = r->units;
        enum grown grown = grow(d, s, r, growth, admitted, &result);
        carve_unlock(&list->lock);
        if (CARVE_LIKELY(grown == GROWN)) {
            return result;
        }
        if (grown == TOO_MUCH) {
            growth->undo(d, growth);
            carve_lock(&list->lock);
            if (r->kind != 0 && r->pool == growth->pool) {
                trim(d, r, before);
                settle(d, s, r);
            }
            carve_unlock(&list->lock);
        }
        /* Once more, with patience for other processes, and for what dead ones had. */
        uint64_t bytes = growth->most_bytes != 0 ? growth->most_bytes : growth->bytes;
        if (admitted != 0 || !carve_admit(s, card, least_units(list, growth), bytes)) {
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
        admitted = least_units(list, growth);
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
        trim(d, r, 0);
        charge_figure(s, r, figure(d, s, r), 0, 0);
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
