/* SPDX-License-Identifier: Apache-2.0 */
/* Hooks of stream-ordered memory: pools are charged by what they reserve, see reserves.h. */
#include "contexts.h"
#include "ledger.h"
#include "pointers.h"
#include "reserves.h"
#include "throttle.h"

/* ---- streams ---- */

/* A device's own streams belong to the context that is current. */
static bool is_default(CUstream stream) { return stream == NULL || stream == CU_STREAM_LEGACY || stream == CU_STREAM_PER_THREAD; }

/* The device on which a request of that stream goes. */
static enum carve_where device_of(const struct carve_driver *d, struct carve_state *s, CUstream stream, bool per_thread, CUdevice *device) {
    struct carve_place place;
    CUcontext context = NULL;
    __typeof__(cuStreamGetCtx) *ask = per_thread ? d->cuStreamGetCtx_ptsz : d->cuStreamGetCtx;
    if (!is_default(stream) && ask != NULL && ask(stream, &context) == CUDA_SUCCESS && carve_context_device(s, context, device)) {
        return carve_device_card(d, s, *device) < 0 ? CARVE_FOREIGN : CARVE_HERE;
    }
    enum carve_where where = carve_current(d, s, &place);
    *device = place.device;
    return where;
}

/* What a stream that is being captured is asked for becomes part of a graph, which takes memory when it is launched.
 * The question itself fails on the legacy stream while another is captured: so will the request. */
static bool captured(const struct carve_driver *d, const struct carve_growth *g) {
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    __typeof__(cuStreamIsCapturing) *ask = g->per_thread ? d->cuStreamIsCapturing_ptsz : d->cuStreamIsCapturing;
    return ask != NULL && (ask(g->stream, &status) != CUDA_SUCCESS || status != CU_STREAM_CAPTURE_STATUS_NONE);
}

static void undo(const struct carve_driver *d, struct carve_growth *g) {
    __typeof__(cuMemFreeAsync) *give_back = g->per_thread ? d->cuMemFreeAsync_ptsz : d->cuMemFreeAsync;
    __typeof__(cuStreamSynchronize) *wait = g->per_thread ? d->cuStreamSynchronize_ptsz : d->cuStreamSynchronize;
    if (give_back != NULL && give_back(*g->pointer, g->stream) == CUDA_SUCCESS && wait != NULL) {
        (void)wait(g->stream);
    }
}

/* ---- allocation ---- */

static CUresult make(const struct carve_driver *d, struct carve_growth *g) {
    return g->per_thread ? d->cuMemAllocAsync_ptsz(g->pointer, g->bytes, g->stream) : d->cuMemAllocAsync(g->pointer, g->bytes, g->stream);
}

static CUresult make_from_pool(const struct carve_driver *d, struct carve_growth *g) {
    return g->per_thread ? d->cuMemAllocFromPoolAsync_ptsz(g->pointer, g->bytes, g->pool, g->stream)
                         : d->cuMemAllocFromPoolAsync(g->pointer, g->bytes, g->pool, g->stream);
}

/* The device whose default pool this is; -1: none. Such a pool is nobody's to create, so it is met here first. */
static CUdevice device_of_default(const struct carve_driver *d, CUmemoryPool pool) {
    CUmemoryPool of = NULL;
    for (CUdevice i = 0; d->cuDeviceGetDefaultMemPool != NULL && i < CARVE_MAX_DEVICES; i++) {
        if (d->cuDeviceGetDefaultMemPool(&of, i) != CUDA_SUCCESS) {
            break;
        }
        if (of == pool) {
            return i;
        }
    }
    return -1;
}

/* named: from the pool that g names, else from the current one of the stream's device. */
static CUresult allocate(const struct carve_driver *d, struct carve_growth g, bool named) {
    CUdeviceptr made = 0, *out = g.pointer;
    CUdevice device = -1;
    if (g.pointer == NULL || g.bytes == 0) {
        return g.make(d, &g); /* the driver's to refuse */
    }
    struct carve_state *s = carve_state();
    if (s == NULL) {
        return carve_without_files(d, CUDA_ERROR_OUT_OF_MEMORY);
    }
    carve_contexts_follow(s);
    if (!named) {
        switch (device_of(d, s, g.stream, g.per_thread, &device)) {
        case CARVE_NOWHERE:
            return g.make(d, &g);
        case CARVE_FOREIGN:
            return carve_told(d, -1, CUDA_ERROR_OUT_OF_MEMORY);
        default:
            break;
        }
        if (d->cuDeviceGetMemPool == NULL || d->cuDeviceGetMemPool(&g.pool, device) != CUDA_SUCCESS) {
            return g.make(d, &g); /* a device without pools */
        }
    }
    int reserve = carve_reserve_find(d, s, g.pool, device, !named);
    if (reserve < 0 && named && g.pool != NULL && (device = device_of_default(d, g.pool)) >= 0) {
        reserve = carve_reserve_find(d, s, g.pool, device, true);
        named = reserve >= 0; /* without a place for it nothing may be had of it */
    }
    if (reserve < 0) {
        /* A pool of the host, or one that another process shares, from which nothing can be had; no place otherwise. */
        return named ? g.make(d, &g) : CUDA_ERROR_OUT_OF_MEMORY;
    }
    g.pointer = &made;
    CUresult result = carve_told(d, -1, carve_reserve_grow(d, s, reserve, &g));
    if (result == CUDA_SUCCESS) {
        *out = made;
    }
    return result;
}

#define ALLOCATE(function, named, ...)                                                             \
    const struct carve_driver *d = carve_driver();                                                 \
    if (d->function == NULL) {                                                                     \
        return CUDA_ERROR_NOT_SUPPORTED;                                                           \
    }                                                                                              \
    return allocate(d, (struct carve_growth){.bytes = bytes, .undo = undo, .captured = captured,   \
                                             .pointer = pointer, .stream = stream, __VA_ARGS__}, named)

CARVE_EXPORT CUresult cuMemAllocAsync(CUdeviceptr *pointer, size_t bytes, CUstream stream) {
    ALLOCATE(cuMemAllocAsync, false, .make = make);
}

CARVE_EXPORT CUresult cuMemAllocAsync_ptsz(CUdeviceptr *pointer, size_t bytes, CUstream stream) {
    ALLOCATE(cuMemAllocAsync_ptsz, false, .make = make, .per_thread = true);
}

CARVE_EXPORT CUresult cuMemAllocFromPoolAsync(CUdeviceptr *pointer, size_t bytes, CUmemoryPool pool, CUstream stream) {
    ALLOCATE(cuMemAllocFromPoolAsync, true, .make = make_from_pool, .pool = pool);
}

CARVE_EXPORT CUresult cuMemAllocFromPoolAsync_ptsz(CUdeviceptr *pointer, size_t bytes, CUmemoryPool pool, CUstream stream) {
    ALLOCATE(cuMemAllocFromPoolAsync_ptsz, true, .make = make_from_pool, .pool = pool, .per_thread = true);
}

/* ---- free ---- */

/* Memory of pools goes back to its pool, which stays as it is. What cuMemAlloc gave is the driver's again when the stream
 * gets there. */
static CUresult free_async(const struct carve_driver *d, CUdeviceptr pointer, CUstream stream, bool per_thread) {
    __typeof__(cuMemFreeAsync) *call = per_thread ? d->cuMemFreeAsync_ptsz : d->cuMemFreeAsync;
    struct carve_state *s = carve_state();
    struct carve_pointer block;
    if (call == NULL) {
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    if (s == NULL || !carve_pointers_take(s, pointer, &block)) {
        return call(pointer, stream);
    }
    CUresult result = call(pointer, stream);
    if (result == CUDA_SUCCESS) {
        carve_leaving_add(d, s, &block, stream, per_thread);
    } else {
        (void)carve_pointers_restore(s, &block);
    }
    return result;
}

CARVE_EXPORT CUresult cuMemFreeAsync(CUdeviceptr pointer, CUstream stream) {
    return free_async(carve_driver(), pointer, stream, false);
}

CARVE_EXPORT CUresult cuMemFreeAsync_ptsz(CUdeviceptr pointer, CUstream stream) {
    return free_async(carve_driver(), pointer, stream, true);
}

/* ---- pools ---- */

CARVE_EXPORT CUresult cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *properties) {
    const struct carve_driver *d = carve_driver();
    if (d->cuMemPoolCreate == NULL) {
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    if (pool == NULL || properties == NULL) {
        return d->cuMemPoolCreate(pool, properties);
    }
    /* One copy: see cuMemCreate. */
    CUmemPoolProps own = *properties;
    CUmemoryPool made = NULL;
    __asm__ volatile("" : "+m"(own));
    if (own.location.type != CU_MEM_LOCATION_TYPE_DEVICE) {
        return d->cuMemPoolCreate(pool, &own); /* of the host */
    }
    struct carve_state *s = carve_state();
    bool here = s != NULL && carve_device_card(d, s, own.location.id) >= 0;
    if (!here && !carve_device_denied(d, own.location.id)) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    CUresult result = d->cuMemPoolCreate(&made, &own); /* also of a device that it says no to itself */
    if (result != CUDA_SUCCESS) {
        return result;
    }
    if (!here || carve_reserve_find(d, s, made, own.location.id, true) < 0) {
        if (d->cuMemPoolDestroy != NULL) {
            (void)d->cuMemPoolDestroy(made);
        }
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *pool = made;
    return CUDA_SUCCESS;
}

CARVE_EXPORT CUresult cuMemPoolDestroy(CUmemoryPool pool) {
    const struct carve_driver *d = carve_driver();
    struct carve_state *s = carve_state();
    if (d->cuMemPoolDestroy == NULL) {
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    return s == NULL || !carve_reserves_any(s) ? d->cuMemPoolDestroy(pool) : carve_reserve_destroy(d, s, pool);
}

/* Of a pool that the program destroyed while it was in use, which the driver still has. */
static bool destroyed(CUmemoryPool pool) {
    struct carve_state *s = carve_state();
    return s != NULL && carve_reserves_any(s) && carve_reserve_destroyed(s, pool);
}

/* The frame of calls that may change what a pool reserves, downwards. */
#define CHANGE(function, ...)                      \
    const struct carve_driver *d = carve_driver(); \
    if (d->function == NULL) {                     \
        return CUDA_ERROR_NOT_SUPPORTED;           \
    }                                              \
    if (destroyed(pool)) {                         \
        return CUDA_ERROR_INVALID_VALUE;           \
    }                                              \
    CUresult result = d->function(__VA_ARGS__);    \
    carve_reserves_follow(d);                      \
    return result

CARVE_EXPORT CUresult cuMemPoolTrimTo(CUmemoryPool pool, size_t keep) { CHANGE(cuMemPoolTrimTo, pool, keep); }

CARVE_EXPORT CUresult cuMemPoolSetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute, void *value) {
    CHANGE(cuMemPoolSetAttribute, pool, attribute, value);
}

CARVE_EXPORT CUresult cuDeviceSetMemPool(CUdevice device, CUmemoryPool pool) { CHANGE(cuDeviceSetMemPool, device, pool); }

/* ---- synchronisation: the driver gives back what is above a pool's threshold ---- */

#define WAIT(function, ...)                        \
    const struct carve_driver *d = carve_driver(); \
    if (CARVE_UNLIKELY(d->function == NULL)) {     \
        return CUDA_ERROR_NOT_SUPPORTED;           \
    }                                              \
    CUresult result = d->function(__VA_ARGS__);    \
    carve_throttle_look(d);                        \
    carve_reserves_follow(d);                      \
    return result

CARVE_EXPORT CUresult cuStreamSynchronize(CUstream stream) { WAIT(cuStreamSynchronize, stream); }

CARVE_EXPORT CUresult cuStreamSynchronize_ptsz(CUstream stream) { WAIT(cuStreamSynchronize_ptsz, stream); }

CARVE_EXPORT CUresult cuEventSynchronize(CUevent event) { WAIT(cuEventSynchronize, event); }

CARVE_EXPORT CUresult cuCtxSynchronize(void) { WAIT(cuCtxSynchronize); }

CARVE_EXPORT CUresult cuCtxSynchronize_v2(CUcontext context) { WAIT(cuCtxSynchronize_v2, context); }
