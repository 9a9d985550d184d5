/* SPDX-License-Identifier: Apache-2.0 */
/* driver.h: the real driver's functions. */
#ifndef CARVE_DRIVER_H
#define CARVE_DRIVER_H

#include "cuda_abi.h"
#include "cuda_hooks.h"
#include "sys.h"

#ifndef CARVE_DRIVER_AT
#define CARVE_DRIVER_AT "/usr/lib/carve/driver/libcuda.so.1"
#endif

/* Exported from this library, everything else being hidden. */
#define CARVE_EXPORT __attribute__((visibility("default")))

/* The hooks' prototypes. Where cuda_abi.h declares the function too, the two must agree. */
#define X(name, release, parameters, ...) CARVE_EXPORT CUresult name parameters;
CARVE_CUDA_HOOKS(X)
#undef X

/* The software GPU's own clock, which no real driver has. */
uint64_t softgpu_clock_ns(void);
int softgpu_sleep_until_ns(uint64_t until);

struct carve_driver {
    uint32_t ready;
#define X(name, release, parameters, ...) CUresult(*name) parameters;
    CARVE_CUDA_HOOKS(X)
#undef X
#define X(name) __typeof__(name) *name;
    CARVE_CUDA_CALLS(X)
#undef X
};

extern struct carve_driver carve_driver_found;
const struct carve_driver *carve_driver_find(void);

/* The driver's own functions; each is NULL where the installed driver doesn't have it. */
static inline const struct carve_driver *carve_driver(void) {
    if (CARVE_LIKELY(__atomic_load_n(&carve_driver_found.ready, __ATOMIC_ACQUIRE) != 0)) {
        return &carve_driver_found;
    }
    return carve_driver_find();
}

#endif
