/* SPDX-License-Identifier: Apache-2.0 */
/* Hooks of executable graphs, for the memory that they allocate and the time that they take. */
#include "graphs.h"
#include "reserves.h"
#include "spread.h"
#include "throttle.h"

/* An executable graph that can't be followed isn't handed out. */
static CUresult made(const struct carve_driver *d, CUresult result, CUgraphExec *exec, CUgraph graph) {
    struct carve_state *s = result == CUDA_SUCCESS ? carve_state() : NULL;
    if (s == NULL || carve_graph_made(d, s, *exec, graph)) {
        return result;
    }
    (void)carve_spread_gone(s, *exec);
    (void)d->cuGraphExecDestroy(*exec);
    *exec = NULL;
    return CUDA_ERROR_OUT_OF_MEMORY;
}

#define INSTANTIATE(function, ...)                                \
    const struct carve_driver *d = carve_driver();                \
    if (d->function == NULL) {                                    \
        return CUDA_ERROR_NOT_SUPPORTED;                          \
    }                                                             \
    return made(d, d->function(__VA_ARGS__), exec, graph)

CARVE_EXPORT CUresult cuGraphInstantiate(CUgraphExec *exec, CUgraph graph, CUgraphNode *error, char *log, size_t bytes) {
    INSTANTIATE(cuGraphInstantiate, exec, graph, error, log, bytes);
}

CARVE_EXPORT CUresult cuGraphInstantiate_v2(CUgraphExec *exec, CUgraph graph, CUgraphNode *error, char *log, size_t bytes) {
    INSTANTIATE(cuGraphInstantiate_v2, exec, graph, error, log, bytes);
}

CARVE_EXPORT CUresult cuGraphInstantiateWithFlags(CUgraphExec *exec, CUgraph graph, unsigned long long flags) {
    INSTANTIATE(cuGraphInstantiateWithFlags, exec, graph, flags);
}

/* The upload that it may ask for takes memory: it comes after, as one that the program asks for itself. */
static CUresult instantiate(const struct carve_driver *d, CUgraphExec *exec, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *params, bool per_thread) {
    __typeof__(cuGraphInstantiateWithParams) *make = per_thread ? d->cuGraphInstantiateWithParams_ptsz : d->cuGraphInstantiateWithParams;
    carve_graph_call *upload = per_thread ? d->cuGraphUpload_ptsz : d->cuGraphUpload;
    if (make == NULL) {
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    if (exec == NULL || params == NULL || (params->flags & CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD) == 0 || upload == NULL) {
        return made(d, make(exec, graph, params), exec, graph);
    }
    params->flags &= ~(cuuint64_t)CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD;
    CUresult result = made(d, make(exec, graph, params), exec, graph);
    params->flags |= CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD;
    if (result == CUDA_SUCCESS) {
        result = carve_graph_run(d, *exec, params->hUploadStream, per_thread, upload);
        if (result != CUDA_SUCCESS) {
            (void)cuGraphExecDestroy(*exec);
            *exec = NULL;
            params->result_out = CUDA_GRAPH_INSTANTIATE_ERROR;
        }
    }
    return result;
}

CARVE_EXPORT CUresult cuGraphInstantiateWithParams(CUgraphExec *exec, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *params) {
    return instantiate(carve_driver(), exec, graph, params, false);
}

CARVE_EXPORT CUresult cuGraphInstantiateWithParams_ptsz(CUgraphExec *exec, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *params) {
    return instantiate(carve_driver(), exec, graph, params, true);
}

CARVE_EXPORT CUresult cuGraphExecDestroy(CUgraphExec exec) {
    const struct carve_driver *d = carve_driver();
    struct carve_state *s = __atomic_load_n(&carve_state_now, __ATOMIC_ACQUIRE);
    if (d->cuGraphExecDestroy == NULL) {
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    struct carve_graph gone;
    bool known = s != NULL && __atomic_load_n(&s->graphs.count, __ATOMIC_ACQUIRE) != 0 && (s = carve_state()) != NULL && carve_graph_gone(s, exec, &gone);
    struct carve_state *now = __atomic_load_n(&carve_state_now, __ATOMIC_ACQUIRE);
    bool spread = now != NULL && __atomic_load_n(&now->spreads.count, __ATOMIC_ACQUIRE) != 0 && (now = carve_state()) != NULL;
    uint32_t cards = spread ? carve_spread_gone(now, exec) : 0;
    CUresult result = d->cuGraphExecDestroy(exec);
    if (cards != 0 && result != CUDA_SUCCESS) {
        (void)carve_spread_made(now, exec, cards); /* there was room for it */
    }
    if (known && result != CUDA_SUCCESS) {
        carve_graph_back(s, &gone);
    }
    carve_reserves_follow(d);
    return result;
}

#define RUN(function, per_thread)                                              \
    const struct carve_driver *d = carve_driver();                             \
    if (CARVE_UNLIKELY(d->function == NULL)) {                                 \
        return CUDA_ERROR_NOT_SUPPORTED;                                       \
    }                                                                          \
    return carve_told(d, -1, carve_graph_run(d, exec, stream, per_thread, d->function))

/* One that works on several cards, or on another than its stream's, waits for the share of each, and pays on each as
 * long as it takes in all: what of that each had the driver's word on it tells. */
__attribute__((noinline)) static CUresult launch_spread(const struct carve_driver *d, struct carve_state *s, CUgraphExec exec, CUstream stream, bool per_thread, uint32_t cards, carve_graph_call *call) {
    struct carve_launch launches[CARVE_MAX_CARDS];
    unsigned count = carve_launch_wait_on(d, s, carve_launch_key(exec, 0), cards, stream, per_thread, launches);
    CUresult result = carve_told(d, -1, carve_graph_run(d, exec, stream, per_thread, call));
    for (unsigned i = 0; i < count; i++) {
        carve_launch_end(d, s, &launches[i], result);
    }
    return result;
}

/* A launch waits for the share of compute first. */
#define LAUNCH(function, per_thread)                                                 \
    const struct carve_driver *d = carve_driver();                                   \
    struct carve_launch launch;                                                      \
    if (CARVE_UNLIKELY(d->function == NULL)) {                                       \
        return CUDA_ERROR_NOT_SUPPORTED;                                             \
    }                                                                                \
    struct carve_state *s = carve_state();                                           \
    uint32_t cards = s != NULL && carve_compute_divided(s) ? carve_spread_find(s, exec) : 0; \
    if (CARVE_UNLIKELY(cards != 0 && cards != CARVE_SPREAD_HERE)) {                  \
        return launch_spread(d, s, exec, stream, per_thread, cards, d->function);    \
    }                                                                                \
    carve_launch_begin(d, s, exec, 0, stream, per_thread, &launch);                  \
    CUresult result = carve_told(d, -1, carve_graph_run(d, exec, stream, per_thread, d->function)); \
    carve_launch_end(d, s, &launch, result);                                         \
    return result

CARVE_EXPORT CUresult cuGraphLaunch(CUgraphExec exec, CUstream stream) { LAUNCH(cuGraphLaunch, false); }

CARVE_EXPORT CUresult cuGraphLaunch_ptsz(CUgraphExec exec, CUstream stream) { LAUNCH(cuGraphLaunch_ptsz, true); }

CARVE_EXPORT CUresult cuGraphUpload(CUgraphExec exec, CUstream stream) { RUN(cuGraphUpload, false); }

CARVE_EXPORT CUresult cuGraphUpload_ptsz(CUgraphExec exec, CUstream stream) { RUN(cuGraphUpload_ptsz, true); }

CARVE_EXPORT CUresult cuDeviceGraphMemTrim(CUdevice device) {
    const struct carve_driver *d = carve_driver();
    struct carve_state *s = carve_state();
    if (d->cuDeviceGraphMemTrim == NULL) {
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    if (s != NULL) {
        carve_lock(&s->reserves.lock);
        s->graphs.generation++;
        carve_unlock(&s->reserves.lock);
    }
    CUresult result = d->cuDeviceGraphMemTrim(device);
    carve_reserves_follow(d);
    return result;
}
