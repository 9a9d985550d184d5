/* SPDX-License-Identifier: Apache-2.0 */
/* Hooks of launches: each waits until the process' share of the card allows it. See throttle.h. */
#include "throttle.h"

/* What is launched goes to the driver as it is; key names it, stream is where. */
#define LAUNCH(function, key, stream, per_thread, ...)                 \
    const struct carve_driver *d = carve_driver();                     \
    struct carve_state *s = carve_state();                             \
    struct carve_launch launch;                                        \
    if (CARVE_UNLIKELY(d->function == NULL)) {                         \
        return CUDA_ERROR_NOT_SUPPORTED;                               \
    }                                                                  \
    carve_launch_begin(d, s, (const void *)(key), stream, per_thread, &launch); \
    CUresult result = d->function(__VA_ARGS__);                        \
    carve_launch_end(d, s, &launch, result);                           \
    return result

CARVE_EXPORT CUresult cuLaunchKernel(CUfunction function, unsigned int gridX, unsigned int gridY, unsigned int gridZ, unsigned int blockX,
                                     unsigned int blockY, unsigned int blockZ, unsigned int sharedBytes, CUstream stream, void **parameters,
                                     void **extra) {
    LAUNCH(cuLaunchKernel, function, stream, false, function, gridX, gridY, gridZ, blockX, blockY, blockZ, sharedBytes, stream, parameters, extra);
}

CARVE_EXPORT CUresult cuLaunchKernel_ptsz(CUfunction function, unsigned int gridX, unsigned int gridY, unsigned int gridZ, unsigned int blockX,
                                          unsigned int blockY, unsigned int blockZ, unsigned int sharedBytes, CUstream stream, void **parameters,
                                          void **extra) {
    LAUNCH(cuLaunchKernel_ptsz, function, stream, true, function, gridX, gridY, gridZ, blockX, blockY, blockZ, sharedBytes, stream, parameters, extra);
}

CARVE_EXPORT CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) {
    LAUNCH(cuLaunchKernelEx, function, config != NULL ? config->hStream : NULL, false, config, function, parameters, extra);
}

CARVE_EXPORT CUresult cuLaunchKernelEx_ptsz(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) {
    LAUNCH(cuLaunchKernelEx_ptsz, function, config != NULL ? config->hStream : NULL, true, config, function, parameters, extra);
}

CARVE_EXPORT CUresult cuLaunchCooperativeKernel(CUfunction function, unsigned int gridX, unsigned int gridY, unsigned int gridZ,
                                                unsigned int blockX, unsigned int blockY, unsigned int blockZ, unsigned int sharedBytes,
                                                CUstream stream, void **parameters) {
    LAUNCH(cuLaunchCooperativeKernel, function, stream, false, function, gridX, gridY, gridZ, blockX, blockY, blockZ, sharedBytes, stream, parameters);
}

CARVE_EXPORT CUresult cuLaunchCooperativeKernel_ptsz(CUfunction function, unsigned int gridX, unsigned int gridY, unsigned int gridZ,
                                                     unsigned int blockX, unsigned int blockY, unsigned int blockZ, unsigned int sharedBytes,
                                                     CUstream stream, void **parameters) {
    LAUNCH(cuLaunchCooperativeKernel_ptsz, function, stream, true, function, gridX, gridY, gridZ, blockX, blockY, blockZ, sharedBytes, stream, parameters);
}

CARVE_EXPORT CUresult cuLaunch(CUfunction function) { LAUNCH(cuLaunch, function, NULL, false, function); }

CARVE_EXPORT CUresult cuLaunchGrid(CUfunction function, int width, int height) {
    LAUNCH(cuLaunchGrid, function, NULL, false, function, width, height);
}

CARVE_EXPORT CUresult cuLaunchGridAsync(CUfunction function, int width, int height, CUstream stream) {
    LAUNCH(cuLaunchGridAsync, function, stream, false, function, width, height, stream);
}

/* ---- captures, which our events must not disturb ---- */

/* The count goes up first: no event of ours may come after the beginning. */
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
    if (s != NULL && result != CUDA_SUCCESS) {     \
        carve_capture_ends(s);                     \
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

#define END_CAPTURE(function, ...)                                                \
    const struct carve_driver *d = carve_driver();                                \
    struct carve_state *s = carve_state();                                        \
    if (CARVE_UNLIKELY(d->function == NULL)) {                                    \
        return CUDA_ERROR_NOT_SUPPORTED;                                          \
    }                                                                             \
    CUresult result = d->function(__VA_ARGS__);                                   \
    /* An end that is refused for the wrong thread or stream ends nothing; an invalidated capture has ended. */ \
    if (s != NULL && (result == CUDA_SUCCESS || result == CUDA_ERROR_STREAM_CAPTURE_INVALIDATED)) { \
        carve_capture_ends(s);                                                    \
    }                                                                             \
    return result

CARVE_EXPORT CUresult cuStreamEndCapture(CUstream stream, CUgraph *graph) { END_CAPTURE(cuStreamEndCapture, stream, graph); }
CARVE_EXPORT CUresult cuStreamEndCapture_ptsz(CUstream stream, CUgraph *graph) { END_CAPTURE(cuStreamEndCapture_ptsz, stream, graph); }
