/* SPDX-License-Identifier: Apache-2.0 */
#include "contexts.h"

#include <string.h>

#include "arrays.h"
#include "graphs.h"
#include "leaving.h"
#include "ledger.h"
#include "limits.h"
#include "measure.h"
#include "pointers.h"
#include "reserves.h"
#include "throttle.h"

/* ------------------------------------------------------------------------------------------- devices */

/* CUDA_ERROR_NOT_SUPPORTED: by none of the two forms. The second tells MIG instances of one card apart. */
static CUresult ask_uuid(const struct carve_driver *d, CUdevice device, CUuuid *uuid) {
    CUresult result = d->cuDeviceGetUuid_v2 != NULL ? d->cuDeviceGetUuid_v2(uuid, device) : CUDA_ERROR_NOT_SUPPORTED;
    return result != CUDA_SUCCESS && d->cuDeviceGetUuid != NULL ? d->cuDeviceGetUuid(uuid, device) : result;
}

static int look_up_device(const struct carve_driver *d, struct carve_state *s, CUdevice device) {
    CUuuid uuid;
    return ask_uuid(d, device, &uuid) == CUDA_SUCCESS ? carve_limits_find(s->limits, uuid.bytes) : -1;
}

bool carve_device_denied(const struct carve_driver *d, CUdevice device) {
    CUuuid uuid;
    CUresult result = ask_uuid(d, device, &uuid);
    return result == CUDA_ERROR_NOT_INITIALIZED || result == CUDA_ERROR_DEINITIALIZED || result == CUDA_ERROR_INVALID_DEVICE || result == CUDA_ERROR_INVALID_VALUE;
}

CUresult carve_without_files(const struct carve_driver *d, CUresult missing) {
    CUcontext handle = NULL;
    CUresult result = d->cuCtxGetCurrent != NULL ? d->cuCtxGetCurrent(&handle) : CUDA_ERROR_NOT_SUPPORTED;
    return result == CUDA_ERROR_NOT_INITIALIZED || result == CUDA_ERROR_DEINITIALIZED ? result : missing;
}

CUresult carve_told_refusal(const struct carve_driver *d, CUdevice device) {
    struct carve_state *s = __atomic_load_n(&carve_state_now, __ATOMIC_ACQUIRE);
    CUcontext handle = NULL;
    CUdevice on;
    size_t free_bytes, total_bytes;
    if (d->cuMemGetInfo_v2 == NULL || d->cuCtxGetCurrent == NULL || d->cuCtxGetCurrent(&handle) != CUDA_SUCCESS || handle == NULL ||
        (device >= 0 && s != NULL && carve_context_device(s, handle, &on) && on != device)) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    CUresult drivers = d->cuMemGetInfo_v2(&free_bytes, &total_bytes);
    return drivers != CUDA_SUCCESS ? drivers : CUDA_ERROR_OUT_OF_MEMORY;
}

int carve_device_card(const struct carve_driver *d, struct carve_state *s, CUdevice device) {
    if (device < 0) {
        return -1;
    }
    if (device >= CARVE_MAX_DEVICES) {
        return look_up_device(d, s, device);
    }
    int known = __atomic_load_n(&s->device_card[device], __ATOMIC_RELAXED);
    if (known > 0) {
        return known - 1;
    }
    /* A card that isn't in the limits is looked for each time: it may be added. */
    int card = look_up_device(d, s, device);
    if (card >= 0) {
        __atomic_store_n(&s->device_card[device], (int8_t)(card + 1), __ATOMIC_RELAXED);
    }
    return card;
}

/* -------------------------------------------------------------------------------------------- places */

enum carve_where carve_current(const struct carve_driver *d, struct carve_state *s, struct carve_place *place) {
    CUcontext handle = NULL;
    if (CARVE_UNLIKELY(d->cuCtxGetCurrent == NULL || d->cuCtxGetCurrent(&handle) != CUDA_SUCCESS || handle == NULL)) {
        return CARVE_NOWHERE;
    }
    /* Without the lock: an entry that changes meanwhile is of a context that is being destroyed while a
     * thread uses it, which no driver survives either. */
    uint32_t recent = __atomic_load_n(&s->recent_context, __ATOMIC_RELAXED);
    const struct carve_context *c = &s->contexts[recent];
    if (CARVE_UNLIKELY(__atomic_load_n(&c->handle, __ATOMIC_ACQUIRE) != handle)) {
        uint32_t high = __atomic_load_n(&s->contexts_high, __ATOMIC_ACQUIRE);
        uint32_t i = 0;
        while (i < high && __atomic_load_n(&s->contexts[i].handle, __ATOMIC_ACQUIRE) != handle) {
            i++;
        }
        if (i == high) {
            CUdevice device = -1;
            if (d->cuCtxGetDevice == NULL || d->cuCtxGetDevice(&device) != CUDA_SUCCESS) {
                return CARVE_NOWHERE;
            }
            int card = carve_device_card(d, s, device);
            if (card < 0) {
                return CARVE_FOREIGN;
            }
            *place = (struct carve_place){device, (unsigned)card, 0};
            return CARVE_HERE;
        }
        __atomic_store_n(&s->recent_context, i, __ATOMIC_RELAXED);
        c = &s->contexts[i];
    }
    *place = (struct carve_place){c->device, (unsigned)c->card, c->id};
    return CARVE_HERE;
}

/* ---------------------------------------------------------------------------------------- the list */

/* Puts a context on the list; the lock is held. */
static bool list_add(struct carve_state *s, struct carve_context context) {
    uint32_t i = 0;
    while (i < s->contexts_high && s->contexts[i].handle != NULL) {
        i++;
    }
    if (i == CARVE_MAX_CONTEXTS) {
        return false;
    }
    /* Threads that look for theirs compare the handle meanwhile: it comes last, and isn't touched before. */
    struct carve_context *c = &s->contexts[i];
    memcpy((char *)c + sizeof c->handle, (const char *)&context + sizeof context.handle, sizeof *c - sizeof c->handle);
    __atomic_store_n(&c->handle, context.handle, __ATOMIC_RELEASE);
    if (i == s->contexts_high) {
        __atomic_store_n(&s->contexts_high, i + 1, __ATOMIC_RELEASE);
    }
    return true;
}

static struct carve_context *list_find(struct carve_state *s, CUcontext handle) {
    for (uint32_t i = 0; handle != NULL && i < s->contexts_high; i++) {
        if (s->contexts[i].handle == handle) {
            return &s->contexts[i];
        }
    }
    return NULL;
}

static struct carve_context *list_find_primary(struct carve_state *s, CUdevice device) {
    for (uint32_t i = 0; i < s->contexts_high; i++) {
        if (s->contexts[i].handle != NULL && s->contexts[i].primary && s->contexts[i].device == device) {
            return &s->contexts[i];
        }
    }
    return NULL;
}

bool carve_context_device(struct carve_state *s, CUcontext handle, CUdevice *device) {
    carve_lock(&s->contexts_lock);
    const struct carve_context *c = list_find(s, handle);
    *device = c != NULL ? c->device : -1;
    carve_unlock(&s->contexts_lock);
    return c != NULL;
}

bool carve_contexts_on(struct carve_state *s, unsigned card) {
    bool found = false;
    carve_lock(&s->contexts_lock);
    for (uint32_t i = 0; i < s->contexts_high && !found; i++) {
        found = s->contexts[i].handle != NULL && s->contexts[i].card == (int)card;
    }
    carve_unlock(&s->contexts_lock);
    return found;
}

struct carve_turn *carve_primary_turn(struct carve_state *s, CUdevice device) {
    if (device < 0) {
        return NULL;
    }
    struct carve_turn *turn = &s->primary_turns[device % CARVE_MAX_DEVICES];
    carve_turn_take(turn);
    return turn;
}

bool carve_is_primary(struct carve_state *s, CUcontext handle, CUdevice *device) {
    carve_lock(&s->contexts_lock);
    const struct carve_context *c = list_find(s, handle);
    bool primary = c != NULL && c->primary;
    *device = primary ? c->device : -1;
    carve_unlock(&s->contexts_lock);
    return primary;
}

bool carve_primary_known(struct carve_state *s, CUdevice device) {
    carve_lock(&s->contexts_lock);
    bool known = list_find_primary(s, device) != NULL;
    carve_unlock(&s->contexts_lock);
    return known;
}

static void list_remove(struct carve_context *c) { __atomic_store_n(&c->handle, NULL, __ATOMIC_RELEASE); }

/* ---------------------------------------------------------------------------------------- opening */

static uint32_t expected_units(const struct carve_limits_card *card) {
    return carve_units_up(card->context_bytes != 0 ? card->context_bytes : CARVE_CONTEXT_GUESS_BYTES);
}

/* Whether this context is all that this process has charged on the card, by whatever front. Then nothing of it can change
 * on the card meanwhile, for without a context there is nothing to allocate in. */
static bool alone(struct carve_opening *opening) {
    struct carve_account *a = &opening->s->accounts[opening->card];
    carve_lock(&a->lock);
    bool yes = a->used == opening->units && a->pending == 0;
    carve_unlock(&a->lock);
    return yes && !carve_slot_beside(opening->s, opening->card);
}

bool carve_context_open(const struct carve_driver *d, CUdevice device, struct carve_opening *opening) {
    struct carve_limits_facts facts;
    struct carve_limits_card about;
    *opening = (struct carve_opening){.s = carve_state(), .device = device};
    struct carve_state *s = opening->s;
    int card = s != NULL ? carve_device_card(d, s, device) : -1;
    if (card < 0 || !carve_limits_card(s->limits, (unsigned)card, &facts, &about)) {
        return false;
    }
    opening->card = (unsigned)card;
    uint32_t units = expected_units(&about);
    if (!carve_obtain(d, s, opening->card, units, carve_units_bytes(units))) {
        return false;
    }
    opening->units = units;
    opening->alone = alone(opening);
    return true;
}

void carve_context_abort(struct carve_opening *opening) {
    if (opening->units != 0) {
        carve_release(opening->s, opening->card, opening->units);
        opening->units = 0;
    }
}

/* What the driver took for the context, where that can be told; else what was expected. */
static bool settle(struct carve_opening *opening) {
    struct carve_limits_facts facts;
    struct carve_limits_card about;
    uint32_t units;
    if (!opening->alone || !carve_limits_card(opening->s->limits, opening->card, &facts, &about) || (facts.flags & CARVE_LIMITS_SELF_VISIBLE) == 0 ||
        !carve_measure(about.uuid, &units) || !alone(opening)) {
        return false;
    }
    carve_correct(opening->s, opening->card, (int64_t)units - (int64_t)opening->units);
    opening->units = units;
    return true;
}

void carve_context_opened(struct carve_opening *opening, CUcontext handle, bool primary) {
    struct carve_state *s = opening->s;
    bool measured = settle(opening);
    carve_lock(&s->contexts_lock);
    if (primary && list_find_primary(s, opening->device) != NULL) {
        /* Another thread was first with the same primary context. */
        carve_unlock(&s->contexts_lock);
        carve_context_abort(opening);
        return;
    }
    struct carve_context context = {
        .handle = handle,
        .id = ++s->last_context_id,
        .card = (int16_t)opening->card,
        .primary = primary,
        .measured = measured,
        .device = opening->device,
        .units = opening->units,
    };
    /* A context for which there is no place on the list stays charged until the process ends. */
    (void)list_add(s, context);
    carve_unlock(&s->contexts_lock);
    carve_note_context(s, opening->card, opening->units);
}

/* ---------------------------------------------------------------------------------------- closing */

void carve_block_gone(struct carve_state *s, const struct carve_pointer *block, bool last) {
    if (last && block->place != 0) {
        CARVE_STEP("page-gone");
        carve_page_over(s, block->card);
    } else if (last) {
        carve_release_page(s, block->card);
    } else if (block->kind == CARVE_KIND_ARRAY) {
        carve_array_give(s, block);
    } else if (block->kind != CARVE_KIND_PIECE && block->kind < CARVE_KIND_COUNTED) {
        carve_release(s, block->card, block->units);
    }
}

static void drop_blocks(struct carve_state *s, uint32_t context) {
    struct carve_pointer block;
    bool last;
    uint32_t cursor = 0;
    carve_leaving_forget(s, context);
    while (context != 0 && carve_pointers_take_of(s, context, &block, &last, &cursor)) {
        carve_block_gone(s, &block, last);
    }
}

static void drop_heaps(struct carve_state *s, const struct carve_context *closing) {
    for (unsigned i = 0; i < CARVE_HEAPS; i++) {
        if (closing->heaps[i].units != 0) {
            carve_release(s, (unsigned)closing->card, closing->heaps[i].units);
        }
    }
}

static void drop_context(struct carve_state *s, const struct carve_context *closing) {
    drop_heaps(s, closing);
    carve_release(s, (unsigned)closing->card, closing->units);
    carve_note_context(s, (unsigned)closing->card, -(int64_t)closing->units);
}

bool carve_context_close(struct carve_state *s, CUcontext handle, struct carve_context *closing) {
    carve_lock(&s->contexts_lock);
    struct carve_context *c = list_find(s, handle);
    if (c != NULL) {
        *closing = *c;
        list_remove(c);
    }
    carve_unlock(&s->contexts_lock);
    return c != NULL;
}

void carve_context_restore(struct carve_state *s, const struct carve_context *closing) {
    carve_lock(&s->contexts_lock);
    (void)list_add(s, *closing);
    carve_unlock(&s->contexts_lock);
}

void carve_context_closed(struct carve_state *s, const struct carve_context *closing) {
    carve_graphs_lost(s);
    drop_blocks(s, closing->id);
    drop_context(s, closing);
}

void carve_primary_released(const struct carve_driver *d, struct carve_state *s, CUdevice device, bool reset) {
    struct carve_context closing = {0};
    bool gone = false;
    unsigned int flags = 0;
    int active = 1;
    /* A thread that retains it anew has to wait for the turn. */
    if (d->cuDevicePrimaryCtxGetState != NULL) {
        (void)d->cuDevicePrimaryCtxGetState(device, &flags, &active);
    }
    carve_lock(&s->contexts_lock);
    struct carve_context *c = list_find_primary(s, device);
    if (c != NULL) {
        closing = *c;
        gone = active == 0;
        if (gone) {
            list_remove(c);
        } else if (reset) {
            c->id = ++s->last_context_id; /* what is allocated from now on is not what was reset */
            for (unsigned i = 0; i < CARVE_HEAPS; i++) {
                c->heaps[i] = (struct carve_heap){0};
            }
        }
    }
    carve_unlock(&s->contexts_lock);
    if (c != NULL && (gone || reset)) {
        carve_throttles_forget(d, s, closing.id);
        carve_captures_forget(s, closing.id);
        carve_graphs_lost(s);
        drop_blocks(s, closing.id);
    }
    if (gone) {
        drop_context(s, &closing);
    } else if (c != NULL && reset) {
        drop_heaps(s, &closing);
    }
}

void carve_context_attached(struct carve_state *s, CUcontext handle) {
    carve_lock(&s->contexts_lock);
    struct carve_context *c = list_find(s, handle);
    if (c != NULL) {
        c->attached++;
    }
    carve_unlock(&s->contexts_lock);
}

bool carve_context_detach(struct carve_state *s, CUcontext handle) {
    carve_lock(&s->contexts_lock);
    struct carve_context *c = list_find(s, handle);
    bool more = c != NULL && (c->primary || c->attached != 0);
    if (more && c->attached != 0) {
        c->attached--;
    }
    carve_unlock(&s->contexts_lock);
    return more;
}

/* ---------------------------------------------------------------------------------------- green ones */

void carve_green_named(struct carve_state *s, CUgreenCtx green, CUcontext handle, CUdevice device) {
    carve_lock(&s->contexts_lock);
    const struct carve_context *primary = list_find_primary(s, device);
    if (primary != NULL && list_find(s, handle) == NULL) {
        struct carve_context context = *primary;
        context.handle = handle;
        context.primary = false;
        context.units = 0;
        for (unsigned i = 0; i < CARVE_HEAPS; i++) {
            context.heaps[i] = (struct carve_heap){0};
        }
        context.green = green;
        (void)list_add(s, context);
    }
    carve_unlock(&s->contexts_lock);
}

void carve_green_turns(struct carve_state *s, CUgreenCtx green, struct carve_green_turns *had) {
    had->count = 0;
    carve_lock(&s->contexts_lock);
    for (uint32_t i = 0; i < s->contexts_high; i++) {
        const struct carve_context *c = &s->contexts[i];
        if (c->handle == NULL || (!c->primary && c->green != green) || (!c->primary && green == NULL)) {
            continue;
        }
        if (!c->primary) {
            had->devices[0] = c->device;
            had->count = 1;
            break;
        }
        uint32_t at = had->count;
        if (at == CARVE_MAX_CARDS) {
            continue;
        }
        for (; at > 0 && had->devices[at - 1] > c->device; at--) {
            had->devices[at] = had->devices[at - 1];
        }
        had->devices[at] = c->device;
        had->count++;
    }
    carve_unlock(&s->contexts_lock);
    for (uint32_t i = 0; i < had->count; i++) {
        had->turns[i] = carve_primary_turn(s, had->devices[i]);
    }
}

void carve_green_turns_end(const struct carve_green_turns *had) {
    for (uint32_t i = had->count; i > 0; i--) {
        carve_turn_end(had->turns[i - 1]);
    }
}

void carve_green_gone(const struct carve_driver *d, struct carve_state *s, CUgreenCtx green, const struct carve_green_turns *had) {
    carve_lock(&s->contexts_lock);
    for (uint32_t i = 0; i < s->contexts_high; i++) {
        struct carve_context *c = &s->contexts[i];
        if (c->handle != NULL && c->green == green) {
            list_remove(c);
        }
    }
    carve_unlock(&s->contexts_lock);
    for (uint32_t i = 0; i < had->count; i++) {
        carve_primary_released(d, s, had->devices[i], false);
    }
}

/* ---------------------------------------------------------------------------------------- following */

void carve_contexts_follow_slow(struct carve_state *s) {
    struct carve_limits_facts facts, seen;
    struct carve_limits_card about;
    if (!carve_limits_facts(s->limits, &facts)) {
        return; /* requests are refused until it is valid again */
    }
    bool whole = true;
    carve_lock(&s->contexts_lock);
    for (uint32_t i = 0; i < s->contexts_high; i++) {
        struct carve_context *c = &s->contexts[i];
        if (c->handle == NULL || c->measured || c->green != NULL) {
            continue;
        }
        if (!carve_limits_card(s->limits, (unsigned)c->card, &seen, &about) || seen.generation != facts.generation) {
            whole = false; /* it is being changed: at the next call */
            break;
        }
        int64_t more = about.context_bytes == 0 ? 0 : (int64_t)expected_units(&about) - (int64_t)c->units;
        if (more != 0) {
            c->units = (uint32_t)((int64_t)c->units + more);
            carve_correct(s, (unsigned)c->card, more);
            carve_note_context(s, (unsigned)c->card, more);
        }
    }
    carve_unlock(&s->contexts_lock);
    if (whole) {
        __atomic_store_n(&s->seen_generation, facts.generation, __ATOMIC_RELAXED);
    }
}
