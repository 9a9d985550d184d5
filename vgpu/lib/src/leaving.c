/* SPDX-License-Identifier: Apache-2.0 */
#include "leaving.h"

#include "contexts.h"

/* Calls of ours mustn't end a capture that another thread has open: see flights.c. */
static CUstreamCaptureMode relax(const struct carve_driver *d, CUstreamCaptureMode mode) {
    if (d->cuThreadExchangeStreamCaptureMode != NULL) {
        (void)d->cuThreadExchangeStreamCaptureMode(&mode);
    }
    return mode;
}

static bool can_ask(const struct carve_driver *d, bool per_thread) {
    return d->cuEventCreate != NULL && d->cuEventQuery != NULL && d->cuEventDestroy_v2 != NULL &&
           (per_thread ? d->cuEventRecord_ptsz != NULL : d->cuEventRecord != NULL);
}

/* An event behind what the stream has by now; NULL where there can't be one. */
static CUevent mark(const struct carve_driver *d, CUstream stream, bool per_thread) {
    __typeof__(cuStreamGetCtx) *ask = per_thread ? d->cuStreamGetCtx_ptsz : d->cuStreamGetCtx;
    CUcontext of = NULL;
    CUevent event = NULL;
    bool named = stream != NULL && stream != CU_STREAM_LEGACY && stream != CU_STREAM_PER_THREAD;
    /* Events go with streams of their own context. */
    bool pushed = named && ask != NULL && d->cuCtxPushCurrent_v2 != NULL && d->cuCtxPopCurrent_v2 != NULL && ask(stream, &of) == CUDA_SUCCESS &&
                  d->cuCtxPushCurrent_v2(of) == CUDA_SUCCESS;
    if (d->cuEventCreate(&event, CU_EVENT_DISABLE_TIMING) != CUDA_SUCCESS) {
        event = NULL;
    } else if ((per_thread ? d->cuEventRecord_ptsz(event, stream) : d->cuEventRecord(event, stream)) != CUDA_SUCCESS) {
        (void)d->cuEventDestroy_v2(event);
        event = NULL;
    }
    if (pushed) {
        (void)d->cuCtxPopCurrent_v2(&of);
    }
    return event;
}

/* Whether what is before the event is done; also where its context, and so the memory, is gone past this library. */
static bool passed(const struct carve_driver *d, CUevent event) {
    CUresult result = event == NULL ? CUDA_ERROR_NOT_READY : d->cuEventQuery(event);
    return result == CUDA_SUCCESS || result == CUDA_ERROR_INVALID_HANDLE || result == CUDA_ERROR_CONTEXT_IS_DESTROYED;
}

static void gone(struct carve_state *s, const struct carve_pointer *block) { carve_block_gone(s, block, carve_pointers_gone(s, block)); }

/* ---- the list; its lock is held ---- */

static bool append(struct carve_leaving *l, struct carve_leaver one) {
    if (l->count == l->room) {
        uint32_t room = l->room == 0 ? 128 : 2 * l->room;
        struct carve_leaver *more = room > 1u << 24 ? NULL : carve_map_private(room * sizeof *more);
        if (more == NULL) {
            return false;
        }
        for (uint32_t i = 0; i < l->count; i++) {
            more[i] = l->list[i];
        }
        if (l->list != NULL) {
            carve_unmap(l->list, l->room * sizeof *more);
        }
        l->list = more;
        l->room = room;
    }
    l->list[l->count] = one;
    __atomic_store_n(&l->count, l->count + 1, __ATOMIC_RELEASE);
    return true;
}

static struct carve_leaver take(struct carve_leaving *l, uint32_t i) {
    struct carve_leaver one = l->list[i];
    l->list[i] = l->list[l->count - 1];
    __atomic_store_n(&l->count, l->count - 1, __ATOMIC_RELEASE);
    return one;
}

/* ---- */

void carve_leaving_add(const struct carve_driver *d, struct carve_state *s, const struct carve_pointer *block, CUstream stream, bool per_thread) {
    struct carve_leaver one = {.block = *block};
    CUstreamCaptureMode mode = relax(d, CU_STREAM_CAPTURE_MODE_RELAXED);
    one.event = can_ask(d, per_thread) ? mark(d, stream, per_thread) : NULL;
    CARVE_STEP("leaving");
    bool over = passed(d, one.event);
    if (over && one.event != NULL) {
        (void)d->cuEventDestroy_v2(one.event);
    }
    (void)relax(d, mode);
    if (over) {
        gone(s, block);
        return;
    }
    carve_lock(&s->leaving.lock);
    (void)append(&s->leaving, one); /* without memory for that it stays charged, as without an event until the context goes */
    carve_unlock(&s->leaving.lock);
}

void carve_leaving_look(const struct carve_driver *d, struct carve_state *s) {
    struct carve_leaving *l = &s->leaving;
    CUstreamCaptureMode mode = relax(d, CU_STREAM_CAPTURE_MODE_RELAXED);
    carve_lock(&l->lock);
    for (uint32_t i = 0; i < l->count;) {
        if (!passed(d, l->list[i].event)) {
            i++;
            continue;
        }
        struct carve_leaver one = take(l, i);
        carve_unlock(&l->lock); /* giving back a page may have to wait */
        (void)d->cuEventDestroy_v2(one.event);
        gone(s, &one.block);
        carve_lock(&l->lock);
    }
    carve_unlock(&l->lock);
    (void)relax(d, mode);
}

void carve_leaving_forget(struct carve_state *s, uint32_t context) {
    struct carve_leaving *l = &s->leaving;
    if (context == 0 || !carve_leaving_any(s)) {
        return;
    }
    carve_lock(&l->lock);
    for (uint32_t i = 0; i < l->count;) {
        if (l->list[i].block.context == context) {
            struct carve_leaver one = take(l, i); /* an event of the same context went with it */
            carve_unlock(&l->lock);
            gone(s, &one.block);
            carve_lock(&l->lock);
        } else {
            i++;
        }
    }
    carve_unlock(&l->lock);
}
