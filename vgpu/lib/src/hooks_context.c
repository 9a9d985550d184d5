/* SPDX-License-Identifier: Apache-2.0 */
/* Hooks of contexts: what the driver takes for a context counts inside the share. */
#include "contexts.h"
#include "reserves.h"

/* The frame of each hook that creates a context by call. */
#define CREATE(function, handle, device, primary, call)         \
    do {                                                        \
        const struct carve_driver *d = carve_driver();          \
        struct carve_opening opening;                           \
        if (d->function == NULL) {                              \
            return CUDA_ERROR_NOT_SUPPORTED;                    \
        }                                                       \
        if ((handle) == NULL) {                                 \
            return d->call; /* the driver has an answer */      \
        }                                                       \
        if (!carve_context_open(d, device, &opening)) {         \
            return CUDA_ERROR_OUT_OF_MEMORY;                    \
        }                                                       \
        CUresult result = d->call;                              \
        if (result != CUDA_SUCCESS) {                           \
            carve_context_abort(&opening);                      \
        } else {                                                \
            carve_context_opened(&opening, *(handle), primary); \
        }                                                       \
        return result;                                          \
    } while (0)

CARVE_EXPORT CUresult cuCtxCreate(CUcontext *context, unsigned int flags, CUdevice device) {
    CREATE(cuCtxCreate, context, device, false, cuCtxCreate(context, flags, device));
}

CARVE_EXPORT CUresult cuCtxCreate_v2(CUcontext *context, unsigned int flags, CUdevice device) {
    CREATE(cuCtxCreate_v2, context, device, false, cuCtxCreate_v2(context, flags, device));
}

CARVE_EXPORT CUresult cuCtxCreate_v3(CUcontext *context, CUexecAffinityParam *params, int count, unsigned int flags,
                                     CUdevice device) {
    CREATE(cuCtxCreate_v3, context, device, false, cuCtxCreate_v3(context, params, count, flags, device));
}

CARVE_EXPORT CUresult cuCtxCreate_v4(CUcontext *context, CUctxCreateParams *params, unsigned int flags, CUdevice device) {
    CREATE(cuCtxCreate_v4, context, device, false, cuCtxCreate_v4(context, params, flags, device));
}

CARVE_EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    const struct carve_driver *d = carve_driver();
    struct carve_state *s = carve_state();
    if (s != NULL && d->cuDevicePrimaryCtxRetain != NULL && carve_primary_known(s, device)) {
        return d->cuDevicePrimaryCtxRetain(context, device); /* one more user of what is charged already */
    }
    CREATE(cuDevicePrimaryCtxRetain, context, device, true, cuDevicePrimaryCtxRetain(context, device));
}

static CUresult destroy(CUresult (*call)(CUcontext), CUcontext context) {
    struct carve_state *s = carve_state();
    struct carve_context closing;
    if (call == NULL) {
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    bool known = s != NULL && carve_context_close(s, context, &closing);
    CUresult result = call(context);
    if (known && result == CUDA_SUCCESS) {
        carve_context_closed(s, &closing);
    } else if (known) {
        carve_context_restore(s, &closing);
    }
    carve_reserves_follow(carve_driver());
    return result;
}

CARVE_EXPORT CUresult cuCtxDestroy(CUcontext context) { return destroy(carve_driver()->cuCtxDestroy, context); }

CARVE_EXPORT CUresult cuCtxDestroy_v2(CUcontext context) { return destroy(carve_driver()->cuCtxDestroy_v2, context); }

static CUresult release(CUresult (*call)(CUdevice), CUdevice device, bool reset) {
    if (call == NULL) {
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    CUresult result = call(device);
    struct carve_state *s = carve_state();
    if (s != NULL && result == CUDA_SUCCESS) {
        carve_primary_released(carve_driver(), s, device, reset);
        carve_reserves_follow(carve_driver());
    }
    return result;
}

CARVE_EXPORT CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
    return release(carve_driver()->cuDevicePrimaryCtxRelease, device, false);
}

CARVE_EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    return release(carve_driver()->cuDevicePrimaryCtxRelease_v2, device, false);
}

CARVE_EXPORT CUresult cuDevicePrimaryCtxReset(CUdevice device) {
    return release(carve_driver()->cuDevicePrimaryCtxReset, device, true);
}

CARVE_EXPORT CUresult cuDevicePrimaryCtxReset_v2(CUdevice device) {
    return release(carve_driver()->cuDevicePrimaryCtxReset_v2, device, true);
}
