/* SPDX-License-Identifier: Apache-2.0 */
/* Hooks of launches: each waits until the process' share of the card allows it. See throttle.h. */
#include "throttle.h"

/* A size of launches, by their blocks. */
static inline uint64_t volume(unsigned int x, unsigned int y, unsigned int z) { return (uint64_t)x * y * z; }

static inline uint64_t configured(const CUlaunchConfig *c) {
    return c == NULL ? 0 : volume(c->gridDimX, c->gridDimY, c->gridDimZ) * volume(c->blockDimX, c->blockDimY, c->blockDimZ);
}

#define GRID (volume(gridX, gridY, gridZ) * volume(blockX, blockY, blockZ))

/* What is launched goes to the driver as it is; key and threads name it, stream is where. */
#define LAUNCH(function, key, threads, stream, per_thread, ...)        \
    const struct carve_driver *d = carve_driver();                     \
    struct carve_state *s = carve_state();                             \
    struct carve_launch launch;                                        \
    if (CARVE_UNLIKELY(d->function == NULL)) {                         \
        return CUDA_ERROR_NOT_SUPPORTED;                               \
    }                                                                  \
    carve_launch_begin(d, s, (const void *)(key), threads, stream, per_thread, &launch); \
    CUresult result = d->function(__VA_ARGS__);                        \
    carve_launch_end(d, s, &launch, result);                           \
    return result

CARVE_EXPORT CUresult cuLaunchKernel(CUfunction function, unsigned int gridX, unsigned int gridY, unsigned int gridZ, unsigned int blockX,
                                     unsigned int blockY, unsigned int blockZ, unsigned int sharedBytes, CUstream stream, void **parameters,
                                     void **extra) {
    LAUNCH(cuLaunchKernel, function, GRID, stream, false, function, gridX, gridY, gridZ, blockX, blockY, blockZ, sharedBytes, stream, parameters, extra);
}

CARVE_EXPORT CUresult cuLaunchKernel_ptsz(CUfunction function, unsigned int gridX, unsigned int gridY, unsigned int gridZ, unsigned int blockX,
                                          unsigned int blockY, unsigned int blockZ, unsigned int sharedBytes, CUstream stream, void **parameters,
                                          void **extra) {
    LAUNCH(cuLaunchKernel_ptsz, function, GRID, stream, true, function, gridX, gridY, gridZ, blockX, blockY, blockZ, sharedBytes, stream, parameters, extra);
}

CARVE_EXPORT CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) {
    LAUNCH(cuLaunchKernelEx, function, configured(config), config != NULL ? config->hStream : NULL, false, config, function, parameters, extra);
}

CARVE_EXPORT CUresult cuLaunchKernelEx_ptsz(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) {
    LAUNCH(cuLaunchKernelEx_ptsz, function, configured(config), config != NULL ? config->hStream : NULL, true, config, function, parameters, extra);
}

CARVE_EXPORT CUresult cuLaunchCooperativeKernel(CUfunction function, unsigned int gridX, unsigned int gridY, unsigned int gridZ,
                                                unsigned int blockX, unsigned int blockY, unsigned int blockZ, unsigned int sharedBytes,
                                                CUstream stream, void **parameters) {
    LAUNCH(cuLaunchCooperativeKernel, function, GRID, stream, false, function, gridX, gridY, gridZ, blockX, blockY, blockZ, sharedBytes, stream, parameters);
}

CARVE_EXPORT CUresult cuLaunchCooperativeKernel_ptsz(CUfunction function, unsigned int gridX, unsigned int gridY, unsigned int gridZ,
                                                     unsigned int blockX, unsigned int blockY, unsigned int blockZ, unsigned int sharedBytes,
                                                     CUstream stream, void **parameters) {
    LAUNCH(cuLaunchCooperativeKernel_ptsz, function, GRID, stream, true, function, gridX, gridY, gridZ, blockX, blockY, blockZ, sharedBytes, stream, parameters);
}

/* The context that is current while the stream's own has to be. False where it can't be. */
static bool enter(const struct carve_driver *d, CUstream stream) {
    CUcontext context = NULL;
    return d->cuStreamGetCtx != NULL && d->cuCtxPushCurrent_v2 != NULL && d->cuCtxPopCurrent_v2 != NULL &&
           d->cuStreamGetCtx(stream, &context) == CUDA_SUCCESS && d->cuCtxPushCurrent_v2(context) == CUDA_SUCCESS;
}

static void leave(const struct carve_driver *d) {
    CUcontext context;
    (void)d->cuCtxPopCurrent_v2(&context);
}

static CUdevice device_of(const struct carve_driver *d, CUstream stream) {
    CUdevice device = -1;
    if (enter(d, stream)) {
        if (d->cuCtxGetDevice(&device) != CUDA_SUCCESS) {
            device = -1;
        }
        leave(d);
    }
    return device;
}

/* One launch on each of several cards, which begin together: each card's share is waited for, in the same order by all
 * threads, or two of them could wait for one another. */
CARVE_EXPORT CUresult cuLaunchCooperativeKernelMultiDevice(CUDA_LAUNCH_PARAMS *list, unsigned int count, unsigned int flags) {
    const struct carve_driver *d = carve_driver();
    struct carve_state *s = carve_state();
    struct carve_launch launches[CARVE_MAX_CARDS];
    unsigned order[CARVE_MAX_CARDS];
    CUdevice devices[CARVE_MAX_CARDS];
    if (CARVE_UNLIKELY(d->cuLaunchCooperativeKernelMultiDevice == NULL)) {
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    if (s == NULL || !carve_compute_divided(s) || list == NULL || count > CARVE_MAX_CARDS) {
        return d->cuLaunchCooperativeKernelMultiDevice(list, count, flags);
    }
    for (unsigned i = 0; i < count; i++) {
        unsigned at = i;
        devices[i] = device_of(d, list[i].hStream);
        for (; at > 0 && devices[order[at - 1]] > devices[i]; at--) {
            order[at] = order[at - 1];
        }
        order[at] = i;
    }
    for (unsigned n = 0; n < count; n++) {
        unsigned i = order[n];
        launches[i].throttle = NULL;
        if (devices[i] >= 0 && enter(d, list[i].hStream)) {
            uint64_t threads = volume(list[i].gridDimX, list[i].gridDimY, list[i].gridDimZ) * volume(list[i].blockDimX, list[i].blockDimY, list[i].blockDimZ);
            carve_launch_wait(d, s, carve_launch_key(list[i].function, threads), 0, list[i].hStream, false, true, &launches[i]);
            leave(d);
        }
    }
    for (unsigned i = 0; i < count; i++) {
        if (launches[i].throttle != NULL && enter(d, list[i].hStream)) {
            carve_launch_take_off(d, s, &launches[i]);
            leave(d);
        }
    }
    CUresult result = d->cuLaunchCooperativeKernelMultiDevice(list, count, flags);
    for (unsigned i = 0; i < count; i++) {
        if (launches[i].throttle != NULL) {
            bool entered = enter(d, list[i].hStream);
            carve_launch_end(d, s, &launches[i], result);
            if (entered) {
                leave(d);
            }
        }
    }
    return result;
}

CARVE_EXPORT CUresult cuLaunch(CUfunction function) { LAUNCH(cuLaunch, function, 0, NULL, false, function); }

CARVE_EXPORT CUresult cuLaunchGrid(CUfunction function, int width, int height) {
    LAUNCH(cuLaunchGrid, function, volume((unsigned)width, (unsigned)height, 1), NULL, false, function, width, height);
}

CARVE_EXPORT CUresult cuLaunchGridAsync(CUfunction function, int width, int height, CUstream stream) {
    LAUNCH(cuLaunchGridAsync, function, volume((unsigned)width, (unsigned)height, 1), stream, false, function, width, height, stream);
}

/* ---- captures, which our events must not disturb ---- */

#define BEGIN_CAPTURE(function, ...)               \
    const struct carve_driver *d = carve_driver(); \
    struct carve_state *s = carve_state();         \
    if (CARVE_UNLIKELY(d->function == NULL)) {     \
        return CUDA_ERROR_NOT_SUPPORTED;           \
    }                                              \
    if (s != NULL) {                               \
        carve_capture_begins(s);                   \
    }                                              \
    CUresult result = d->function(__VA_ARGS__);    \
    if (s != NULL) {                               \
        carve_capture_begun(d, s, stream, result == CUDA_SUCCESS); \
    }                                              \
    return result

CARVE_EXPORT CUresult cuStreamBeginCapture(CUstream stream) { BEGIN_CAPTURE(cuStreamBeginCapture, stream); }
CARVE_EXPORT CUresult cuStreamBeginCapture_ptsz(CUstream stream) { BEGIN_CAPTURE(cuStreamBeginCapture_ptsz, stream); }
CARVE_EXPORT CUresult cuStreamBeginCapture_v2(CUstream stream, CUstreamCaptureMode mode) { BEGIN_CAPTURE(cuStreamBeginCapture_v2, stream, mode); }
CARVE_EXPORT CUresult cuStreamBeginCapture_v2_ptsz(CUstream stream, CUstreamCaptureMode mode) { BEGIN_CAPTURE(cuStreamBeginCapture_v2_ptsz, stream, mode); }
CARVE_EXPORT CUresult cuStreamBeginCaptureToGraph(CUstream stream, CUgraph graph, const CUgraphNode *after, const CUgraphEdgeData *edges, size_t count, CUstreamCaptureMode mode) {
    BEGIN_CAPTURE(cuStreamBeginCaptureToGraph, stream, graph, after, edges, count, mode);
}
CARVE_EXPORT CUresult cuStreamBeginCaptureToGraph_ptsz(CUstream stream, CUgraph graph, const CUgraphNode *after, const CUgraphEdgeData *edges, size_t count, CUstreamCaptureMode mode) {
    BEGIN_CAPTURE(cuStreamBeginCaptureToGraph_ptsz, stream, graph, after, edges, count, mode);
}

static void end_one(struct carve_state *s) { __atomic_sub_fetch(&s->captures, 1, __ATOMIC_SEQ_CST); }

/* Such that end with their stream or context stay counted, which costs a question with each launch. */
static void unlisted_ended(struct carve_state *s) {
    carve_lock(&s->captures_lock);
    if (s->captures_unlisted != 0) {
        s->captures_unlisted--;
        end_one(s);
    }
    carve_unlock(&s->captures_lock);
}

/* Whether an end that was asked for has ended a capture: with a graph or not, as one that isn't joined does, or not at
 * all, as in the wrong thread. */
static CUresult end_capture(__typeof__(cuStreamIsCapturing) *ask, __typeof__(cuStreamEndCapture) *end, CUstream stream, CUgraph *graph) {
    struct carve_state *s = carve_state();
    if (CARVE_UNLIKELY(end == NULL)) {
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    CUstreamCaptureStatus before = CU_STREAM_CAPTURE_STATUS_NONE, now = CU_STREAM_CAPTURE_STATUS_NONE;
    /* One for which the list had no place isn't told from none afterwards. */
    bool was = s != NULL && __atomic_load_n(&s->captures_unlisted, __ATOMIC_RELAXED) != 0 && ask != NULL &&
               ask(stream, &before) == CUDA_SUCCESS && before != CU_STREAM_CAPTURE_STATUS_NONE;
    CUresult result = end(stream, graph);
    bool ended = result == CUDA_SUCCESS || (ask != NULL && ask(stream, &now) == CUDA_SUCCESS && now == CU_STREAM_CAPTURE_STATUS_NONE);
    if (s != NULL && ended && !carve_capture_ended(s, stream) && was) {
        unlisted_ended(s);
    }
    return result;
}

CARVE_EXPORT CUresult cuStreamEndCapture(CUstream stream, CUgraph *graph) {
    const struct carve_driver *d = carve_driver();
    return end_capture(d->cuStreamIsCapturing, d->cuStreamEndCapture, stream, graph);
}

CARVE_EXPORT CUresult cuStreamEndCapture_ptsz(CUstream stream, CUgraph *graph) {
    const struct carve_driver *d = carve_driver();
    return end_capture(d->cuStreamIsCapturing_ptsz, d->cuStreamEndCapture_ptsz, stream, graph);
}

/* A stream's capture goes with it. */
static CUresult destroy_stream(CUresult (*call)(CUstream), CUstream stream) {
    struct carve_state *s = __atomic_load_n(&carve_state_now, __ATOMIC_ACQUIRE);
    if (call == NULL) {
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    if (CARVE_LIKELY(s == NULL || __atomic_load_n(&s->captures, __ATOMIC_SEQ_CST) == 0) || (s = carve_state()) == NULL) {
        return call(stream);
    }
    /* Before: its handle may be another one's as soon as it is gone. */
    bool captured = carve_capture_ended(s, stream);
    CUresult result = call(stream);
    if (captured && result != CUDA_SUCCESS) {
        carve_capture_begins(s);
        carve_capture_begun(carve_driver(), s, stream, true);
    }
    return result;
}

CARVE_EXPORT CUresult cuStreamDestroy(CUstream stream) { return destroy_stream(carve_driver()->cuStreamDestroy, stream); }
CARVE_EXPORT CUresult cuStreamDestroy_v2(CUstream stream) { return destroy_stream(carve_driver()->cuStreamDestroy_v2, stream); }

void carve_capture_begins(struct carve_state *s) { __atomic_add_fetch(&s->captures, 1, __ATOMIC_SEQ_CST); }

void carve_capture_begun(const struct carve_driver *d, struct carve_state *s, CUstream stream, bool begun) {
    struct carve_place place = {0};
    if (!begun) {
        end_one(s);
        return;
    }
    (void)carve_current(d, s, &place);
    carve_lock(&s->captures_lock);
    for (int i = 0; i < CARVE_MAX_CAPTURES; i++) {
        if (!s->capture_list[i].taken) {
            s->capture_list[i] = (struct carve_capture){.stream = stream, .context = place.context, .taken = true};
            carve_unlock(&s->captures_lock);
            return;
        }
    }
    s->captures_unlisted++; /* counted as long as it is open: nothing of ours may disturb it */
    carve_unlock(&s->captures_lock);
}

bool carve_capture_ended(struct carve_state *s, CUstream stream) {
    bool found = false;
    carve_lock(&s->captures_lock);
    for (int i = 0; i < CARVE_MAX_CAPTURES && !found; i++) {
        struct carve_capture *c = &s->capture_list[i];
        found = c->taken && c->stream == stream;
        if (found) {
            c->taken = false;
            end_one(s);
        }
    }
    carve_unlock(&s->captures_lock);
    return found;
}

void carve_captures_forget(struct carve_state *s, uint32_t context) {
    carve_lock(&s->captures_lock);
    for (int i = 0; i < CARVE_MAX_CAPTURES && context != 0; i++) {
        struct carve_capture *c = &s->capture_list[i];
        if (c->taken && c->context == context) {
            c->taken = false;
            end_one(s);
        }
    }
    carve_unlock(&s->captures_lock);
}
