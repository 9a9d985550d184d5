/* SPDX-License-Identifier: Apache-2.0 */
/* Hooks of contexts: what the driver takes for a context counts inside the share. */
#include "contexts.h"
#include "heaps.h"
#include "throttle.h"
#include "reserves.h"
#include "start.h"

static void end_turn(struct carve_turn *turn) {
    if (turn != NULL) {
        carve_turn_end(turn);
    }
}

static bool refused(void) { return CARVE_UNLIKELY(__atomic_load_n(&carve_start_refused, __ATOMIC_RELAXED) != 0); }

/* Of what can't be had the driver is asked where it says no to the device itself. One that creates it all the same
 * gets it back. */
static bool denied(const struct carve_driver *d, CUdevice device) { return CARVE_UNLIKELY(carve_device_denied(d, device)); }

static void undo_context(const struct carve_driver *d, CUcontext context) {
    if (d->cuCtxDestroy_v2 != NULL) {
        (void)d->cuCtxDestroy_v2(context);
    }
}

static void undo_retain(const struct carve_driver *d, CUdevice device) {
    (void)(d->cuDevicePrimaryCtxRelease_v2 != NULL ? d->cuDevicePrimaryCtxRelease_v2(device) : d->cuDevicePrimaryCtxRelease(device));
}

/* What no driver takes, whatever room there is: it is asked for the code by which it says so. One that takes it all the
 * same gets it back. These look at what the driver would look at next, and ask for nothing that stays. */
#define KNOWN_FLAGS 0xffu /* of contexts, up to CUDA 13; of the three lowest bits at most one is set */

static bool absurd_flags(unsigned int flags) { return (flags & ~KNOWN_FLAGS) != 0 || (flags & 7) == 3; }

static bool absurd_affinity(const struct carve_driver *d, const CUexecAffinityParam *params, int count, CUdevice device) {
    int supported = 0;
    if (count == 0) {
        return false;
    }
    return count < 0 || params == NULL || count > 1 || params->type != 0 || params->param.smCount.val == 0 || d->cuDeviceGetExecAffinitySupport == NULL ||
           d->cuDeviceGetExecAffinitySupport(&supported, 0, device) != CUDA_SUCCESS || supported == 0;
}

/* Contexts that share the card with an interface for graphics need one that is there. */
static bool absurd_params(const struct carve_driver *d, const CUctxCreateParams *params, CUdevice device) {
    int vulkan = 0;
    if (params == NULL) {
        return false;
    }
    bool graphics = d->cuDeviceGetAttribute != NULL && d->cuDeviceGetAttribute(&vulkan, CU_DEVICE_ATTRIBUTE_VULKAN_CIG_SUPPORTED, device) == CUDA_SUCCESS && vulkan != 0;
    return (params->cigParams != NULL && !graphics) || absurd_affinity(d, params->execAffinityParams, params->numExecAffinityParams, device);
}

static bool no_gl(const struct carve_driver *d) {
    enum { ALL_DEVICES = 1 };
    unsigned int count = 0;
    CUdevice device;
    return d->cuGLGetDevices_v2 == NULL || d->cuGLGetDevices_v2(&count, &device, 1, ALL_DEVICES) != CUDA_SUCCESS;
}

static bool no_vdpau(const struct carve_driver *d, uint32_t vdpau, void *find) {
    CUdevice device;
    return find == NULL || d->cuVDPAUGetDevice == NULL || d->cuVDPAUGetDevice(&device, vdpau, find) != CUDA_SUCCESS;
}

/* The frame of each hook that creates a context by call. absurd is looked at where there is no room. */
#define CREATE(function, handle, device, primary, absurd, call)  \
    do {                                                        \
        const struct carve_driver *d = carve_driver();          \
        struct carve_opening opening;                           \
        if (d->function == NULL) {                              \
            return CUDA_ERROR_NOT_SUPPORTED;                    \
        }                                                       \
        if ((handle) == NULL) {                                 \
            return d->call; /* the driver has an answer */      \
        }                                                       \
        if (refused()) {                                        \
            return CUDA_ERROR_MPS_CONNECTION_FAILED;            \
        }                                                       \
        bool had = carve_context_open(d, device, &opening);     \
        if (!had && !denied(d, device) && !(absurd)) {          \
            return carve_told(d, device, CUDA_ERROR_OUT_OF_MEMORY); \
        }                                                       \
        CUresult result = d->call;                              \
        if (!had && result == CUDA_SUCCESS) {                   \
            if (primary) {                                      \
                undo_retain(d, device);                         \
            } else {                                            \
                undo_context(d, *(handle));                     \
            }                                                   \
            return CUDA_ERROR_OUT_OF_MEMORY;                    \
        }                                                       \
        if (result != CUDA_SUCCESS) {                           \
            carve_context_abort(&opening);                      \
        } else {                                                \
            carve_context_opened(&opening, *(handle), primary); \
        }                                                       \
        return result;                                          \
    } while (0)

CARVE_EXPORT CUresult cuCtxCreate(CUcontext *context, unsigned int flags, CUdevice device) {
    CREATE(cuCtxCreate, context, device, false, absurd_flags(flags), cuCtxCreate(context, flags, device));
}

CARVE_EXPORT CUresult cuCtxCreate_v2(CUcontext *context, unsigned int flags, CUdevice device) {
    CREATE(cuCtxCreate_v2, context, device, false, absurd_flags(flags), cuCtxCreate_v2(context, flags, device));
}

CARVE_EXPORT CUresult cuCtxCreate_v3(CUcontext *context, CUexecAffinityParam *params, int count, unsigned int flags,
                                     CUdevice device) {
    CREATE(cuCtxCreate_v3, context, device, false, absurd_flags(flags) || absurd_affinity(d, params, count, device),
           cuCtxCreate_v3(context, params, count, flags, device));
}

CARVE_EXPORT CUresult cuCtxCreate_v4(CUcontext *context, CUctxCreateParams *params, unsigned int flags, CUdevice device) {
    CREATE(cuCtxCreate_v4, context, device, false, absurd_flags(flags) || absurd_params(d, params, device),
           cuCtxCreate_v4(context, params, flags, device));
}

static CUresult retain(CUcontext *context, CUdevice device) {
    CREATE(cuDevicePrimaryCtxRetain, context, device, true, false, cuDevicePrimaryCtxRetain(context, device));
}

CARVE_EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    const struct carve_driver *d = carve_driver();
    struct carve_state *s = carve_state();
    if (s == NULL || d->cuDevicePrimaryCtxRetain == NULL) {
        return retain(context, device);
    }
    struct carve_turn *turn = carve_primary_turn(s, device);
    /* One that is known has one more user of what is charged already. */
    bool known = carve_primary_known(s, device);
    CARVE_STEP("primary-asked");
    CUresult result = known ? d->cuDevicePrimaryCtxRetain(context, device) : retain(context, device);
    end_turn(turn);
    return result;
}

static CUresult destroy(CUresult (*call)(CUcontext), CUcontext context) {
    struct carve_state *s = carve_state();
    struct carve_context closing;
    CUdevice device;
    if (call == NULL) {
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    /* Drivers refuse that; while it is off the list nobody may make it anew. */
    struct carve_turn *turn = s != NULL && carve_is_primary(s, context, &device) ? carve_primary_turn(s, device) : NULL;
    bool known = s != NULL && carve_context_close(s, context, &closing);
    uint32_t held = known ? carve_throttles_hold(carve_driver(), s) : 0;
    CUresult result = call(context);
    if (held != 0 && result == CUDA_SUCCESS) {
        carve_throttles_forget(carve_driver(), s, closing.id);
    }
    if (held != 0) {
        carve_throttles_let_go(s, held);
    }
    if (known && result == CUDA_SUCCESS) {
        carve_captures_forget(s, closing.id);
        carve_context_closed(s, &closing);
    } else if (known) {
        carve_context_restore(s, &closing);
    }
    end_turn(turn);
    carve_reserves_follow(carve_driver());
    return result;
}

/* A use of a context that is known already. */
CARVE_EXPORT CUresult cuCtxAttach(CUcontext *context, unsigned int flags) {
    const struct carve_driver *d = carve_driver();
    if (d->cuCtxAttach == NULL) {
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    CUresult result = d->cuCtxAttach(context, flags);
    struct carve_state *s = carve_state();
    if (result == CUDA_SUCCESS && s != NULL && context != NULL) {
        carve_context_attached(s, *context);
    }
    return result;
}

/* Destroys it with the last use. */
CARVE_EXPORT CUresult cuCtxDetach(CUcontext context) {
    const struct carve_driver *d = carve_driver();
    struct carve_state *s = carve_state();
    if (d->cuCtxDetach == NULL || s == NULL || !carve_context_detach(s, context)) {
        return destroy(d->cuCtxDetach, context);
    }
    CUresult result = d->cuCtxDetach(context);
    if (result != CUDA_SUCCESS) {
        carve_context_attached(s, context);
    }
    return result;
}

CARVE_EXPORT CUresult cuGLCtxCreate(CUcontext *context, unsigned int flags, CUdevice device) {
    CREATE(cuGLCtxCreate, context, device, false, absurd_flags(flags) || no_gl(d), cuGLCtxCreate(context, flags, device));
}

CARVE_EXPORT CUresult cuGLCtxCreate_v2(CUcontext *context, unsigned int flags, CUdevice device) {
    CREATE(cuGLCtxCreate_v2, context, device, false, absurd_flags(flags) || no_gl(d), cuGLCtxCreate_v2(context, flags, device));
}

CARVE_EXPORT CUresult cuVDPAUCtxCreate(CUcontext *context, unsigned int flags, CUdevice device, uint32_t vdpau, void *find) {
    CREATE(cuVDPAUCtxCreate, context, device, false, absurd_flags(flags) || no_vdpau(d, vdpau, find),
           cuVDPAUCtxCreate(context, flags, device, vdpau, find));
}

CARVE_EXPORT CUresult cuVDPAUCtxCreate_v2(CUcontext *context, unsigned int flags, CUdevice device, uint32_t vdpau, void *find) {
    CREATE(cuVDPAUCtxCreate_v2, context, device, false, absurd_flags(flags) || no_vdpau(d, vdpau, find),
           cuVDPAUCtxCreate_v2(context, flags, device, vdpau, find));
}

CARVE_EXPORT CUresult cuCtxSetLimit(CUlimit limit, size_t value) {
    const struct carve_driver *d = carve_driver();
    struct carve_place place;
    if (d->cuCtxSetLimit == NULL) {
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    if (limit < 0 || limit >= CARVE_HEAPS) {
        return d->cuCtxSetLimit(limit, value); /* none of which it is known what it takes */
    }
    struct carve_state *s = carve_state();
    if (s == NULL) {
        return carve_without_files(d, CUDA_ERROR_OUT_OF_MEMORY);
    }
    carve_contexts_follow(s);
    switch (carve_current(d, s, &place)) {
    case CARVE_HERE:
        return carve_told(d, -1, carve_heap_set(d, s, &place, limit, value));
    case CARVE_FOREIGN:
        return carve_told(d, -1, CUDA_ERROR_OUT_OF_MEMORY);
    default:
        return d->cuCtxSetLimit(limit, value); /* it has an answer to that */
    }
}

/* ---- green contexts ---- */

/* What parts were described is noted, of the latest: so nonsense is told from a part for which there is no room. */
CARVE_EXPORT CUresult cuDevResourceGenerateDesc(CUdevResourceDesc *part, CUdevResource *resources, unsigned int count) {
    const struct carve_driver *d = carve_driver();
    struct carve_state *s = carve_state();
    if (d->cuDevResourceGenerateDesc == NULL) {
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    CUresult result = d->cuDevResourceGenerateDesc(part, resources, count);
    if (result == CUDA_SUCCESS && s != NULL && part != NULL) {
        uint32_t at = __atomic_fetch_add(&s->parts_made, 1, __ATOMIC_RELAXED) % CARVE_MAX_PARTS;
        __atomic_store_n(&s->parts[at], *part, __ATOMIC_RELAXED);
    }
    return result;
}

static bool known_part(struct carve_state *s, const void *part) {
    bool known = s == NULL || __atomic_load_n(&s->parts_made, __ATOMIC_RELAXED) > CARVE_MAX_PARTS; /* or it can't be told */
    for (uint32_t i = 0; !known && part != NULL && i < CARVE_MAX_PARTS; i++) {
        known = __atomic_load_n(&s->parts[i], __ATOMIC_RELAXED) == part;
    }
    return known && part != NULL;
}

static CUresult create_green(const struct carve_driver *d, struct carve_state *s, CUgreenCtx *green, void *resources, CUdevice device, unsigned int flags) {
    struct carve_opening opening;
    CUcontext primary = NULL;
    if (s != NULL && carve_primary_known(s, device)) {
        return d->cuGreenCtxCreate(green, resources, device, flags); /* part of what is charged already */
    }
    if (refused()) {
        return CUDA_ERROR_MPS_CONNECTION_FAILED;
    }
    bool had = carve_context_open(d, device, &opening);
    if (!had && !denied(d, device) && flags == CU_GREEN_CTX_DEFAULT_STREAM && known_part(s, resources)) {
        return carve_told(d, device, CUDA_ERROR_OUT_OF_MEMORY);
    }
    CUresult result = d->cuGreenCtxCreate(green, resources, device, flags);
    if (!had && result == CUDA_SUCCESS) {
        if (d->cuGreenCtxDestroy != NULL) {
            (void)d->cuGreenCtxDestroy(*green);
        }
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (result != CUDA_SUCCESS) {
        carve_context_abort(&opening);
        return result;
    }
    /* The primary context, which the driver made for it, by its name. */
    if (d->cuDevicePrimaryCtxRetain != NULL && d->cuDevicePrimaryCtxRetain(&primary, device) == CUDA_SUCCESS) {
        carve_context_opened(&opening, primary, true);
        undo_retain(d, device);
    }
    return result; /* without a name it stays charged until the process ends */
}

CARVE_EXPORT CUresult cuGreenCtxCreate(CUgreenCtx *green, void *resources, CUdevice device, unsigned int flags) {
    const struct carve_driver *d = carve_driver();
    struct carve_state *s = carve_state();
    if (d->cuGreenCtxCreate == NULL) {
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    if (green == NULL) {
        return d->cuGreenCtxCreate(green, resources, device, flags); /* it has an answer to that */
    }
    struct carve_turn *turn = s != NULL ? carve_primary_turn(s, device) : NULL;
    CUresult result = create_green(d, s, green, resources, device, flags);
    end_turn(turn);
    return result;
}

CARVE_EXPORT CUresult cuCtxFromGreenCtx(CUcontext *context, CUgreenCtx green) {
    const struct carve_driver *d = carve_driver();
    struct carve_state *s = carve_state();
    CUcontext before = NULL;
    CUdevice device = -1;
    if (d->cuCtxFromGreenCtx == NULL) {
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    CUresult result = d->cuCtxFromGreenCtx(context, green);
    if (result != CUDA_SUCCESS || s == NULL || d->cuCtxPushCurrent_v2 == NULL || d->cuCtxPopCurrent_v2 == NULL) {
        return result;
    }
    /* Its device is told of the current one only. */
    if (d->cuCtxPushCurrent_v2(*context) == CUDA_SUCCESS) {
        bool told = d->cuCtxGetDevice != NULL && d->cuCtxGetDevice(&device) == CUDA_SUCCESS;
        (void)d->cuCtxPopCurrent_v2(&before);
        if (told) {
            carve_green_named(s, green, *context, device);
        }
    }
    return result;
}

CARVE_EXPORT CUresult cuGreenCtxDestroy(CUgreenCtx green) {
    const struct carve_driver *d = carve_driver();
    if (d->cuGreenCtxDestroy == NULL) {
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    struct carve_state *s = carve_state();
    if (s == NULL || green == NULL) {
        return d->cuGreenCtxDestroy(green);
    }
    /* Else a primary one that another thread makes anew meanwhile would be taken for the one that went with it. */
    struct carve_green_turns had;
    carve_green_turns(s, green, &had);
    uint32_t held = carve_throttles_hold(d, s); /* a primary context may go along */
    CUresult result = d->cuGreenCtxDestroy(green);
    CARVE_STEP("green-gone");
    if (result == CUDA_SUCCESS) {
        carve_green_gone(d, s, green, &had);
    }
    if (held != 0) {
        carve_throttles_let_go(s, held);
    }
    carve_green_turns_end(&had);
    if (result == CUDA_SUCCESS) {
        carve_reserves_follow(d);
    }
    return result;
}

CARVE_EXPORT CUresult cuCtxDestroy(CUcontext context) { return destroy(carve_driver()->cuCtxDestroy, context); }

CARVE_EXPORT CUresult cuCtxDestroy_v2(CUcontext context) { return destroy(carve_driver()->cuCtxDestroy_v2, context); }

static CUresult release(CUresult (*call)(CUdevice), CUdevice device, bool reset) {
    if (call == NULL) {
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    /* Whether this is the last use, with which the context goes, shows afterwards only. */
    struct carve_state *s = carve_state();
    struct carve_turn *turn = s != NULL ? carve_primary_turn(s, device) : NULL;
    uint32_t held = s != NULL ? carve_throttles_hold(carve_driver(), s) : 0;
    CUresult result = call(device);
    CARVE_STEP("primary-released");
    bool released = s != NULL && result == CUDA_SUCCESS;
    if (released) {
        carve_primary_released(carve_driver(), s, device, reset);
    }
    if (held != 0) {
        carve_throttles_let_go(s, held);
    }
    end_turn(turn);
    if (released) {
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
