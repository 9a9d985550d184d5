/* SPDX-License-Identifier: Apache-2.0 */
/* stub_launch.c: launches, events and captures of the stub driver, which do nothing, at once. */
#include "cuda_hooks.h"
#include "stub.h"

#define LAUNCH(name, ...) \
    CUresult name(__VA_ARGS__) { (void)f; return CUDA_SUCCESS; }
#define GRID CUfunction f, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx, unsigned int by, unsigned int bz, unsigned int shared, CUstream s, void **p
#pragma GCC diagnostic ignored "-Wunused-parameter"
LAUNCH(cuLaunchKernel, GRID, void **e)
LAUNCH(cuLaunchKernel_ptsz, GRID, void **e)
LAUNCH(cuLaunchKernelEx, const CUlaunchConfig *c, CUfunction f, void **p, void **e)
LAUNCH(cuLaunchKernelEx_ptsz, const CUlaunchConfig *c, CUfunction f, void **p, void **e)
LAUNCH(cuLaunchCooperativeKernel, GRID)
LAUNCH(cuLaunchCooperativeKernel_ptsz, GRID)
LAUNCH(cuLaunch, CUfunction f)
LAUNCH(cuLaunchGrid, CUfunction f, int w, int h)
LAUNCH(cuLaunchGridAsync, CUfunction f, int w, int h, CUstream s)
LAUNCH(cuGraphLaunch, CUgraphExec f, CUstream s)
LAUNCH(cuGraphLaunch_ptsz, CUgraphExec f, CUstream s)
LAUNCH(cuStreamBeginCapture, CUstream f)
LAUNCH(cuStreamBeginCapture_ptsz, CUstream f)
LAUNCH(cuStreamBeginCapture_v2, CUstream f, CUstreamCaptureMode m)
LAUNCH(cuStreamBeginCapture_v2_ptsz, CUstream f, CUstreamCaptureMode m)
LAUNCH(cuStreamBeginCaptureToGraph, CUstream f, CUgraph g, const CUgraphNode *n, const CUgraphEdgeData *e, size_t c, CUstreamCaptureMode m)
LAUNCH(cuStreamBeginCaptureToGraph_ptsz, CUstream f, CUgraph g, const CUgraphNode *n, const CUgraphEdgeData *e, size_t c, CUstreamCaptureMode m)
LAUNCH(cuStreamEndCapture, CUstream f, CUgraph *g)
LAUNCH(cuStreamEndCapture_ptsz, CUstream f, CUgraph *g)
LAUNCH(cuStreamDestroy, CUstream f)
LAUNCH(cuStreamDestroy_v2, CUstream f)
LAUNCH(cuEventRecord, CUevent f, CUstream s)
LAUNCH(cuEventRecord_ptsz, CUevent f, CUstream s)
LAUNCH(cuEventQuery, CUevent f)
LAUNCH(cuEventDestroy_v2, CUevent f)

CUresult cuLaunchCooperativeKernelMultiDevice(CUDA_LAUNCH_PARAMS *list, unsigned int count, unsigned int flags) { return CUDA_SUCCESS; }

#define X(name, release, parameters, ...) CUresult name parameters { return CUDA_SUCCESS; }
CARVE_HOOKS_COPY(X)
#undef X

CUresult cuEventCreate(CUevent *event, unsigned int flags) {
    static char one;
    *event = (CUevent)&one;
    return CUDA_SUCCESS;
}

CUresult cuEventElapsedTime(float *milliseconds, CUevent start, CUevent end) {
    static float at; /* each event a tenth of a microsecond after the one before */
    *milliseconds = at += 0.0001f;
    return CUDA_SUCCESS;
}
