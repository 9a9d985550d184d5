/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "driver.h"

#include <dlfcn.h>
#include <errno.h>

struct carve_driver carve_driver_found;

/* Looks for the driver's functions at the first hooked call. This library depends on the driver by the very
 * path, so it is loaded already, in this library's own namespace; the handle finds what it exports and never
 * this library, which depends on it and not the other way round.
 *
 * Two threads that come here at once both look and store the same values. No lock: the loader has one of its
 * own, which a constructor that calls in here holds already. */
const struct carve_driver *carve_driver_find(void) {
    struct carve_driver *d = &carve_driver_found;
    int saved = errno;
    void *handle = dlopen(CARVE_DRIVER_AT, RTLD_LAZY | RTLD_NOLOAD);
    if (handle == NULL) {
        handle = dlopen(CARVE_DRIVER_AT, RTLD_LAZY | RTLD_LOCAL);
    }
    if (handle == NULL) {
        errno = saved;
        return d; /* with nothing in it: each hook answers for a function that isn't there */
    }
#define FIND(name) __atomic_store_n(&d->name, (__typeof__(name) *)dlsym(handle, #name), __ATOMIC_RELAXED);
#define X(name, ...) FIND(name)
    CARVE_CUDA_HOOKS(X)
#undef X
#define X(name) FIND(name)
    CARVE_CUDA_CALLS(X)
#undef X
    __atomic_store_n(&d->ready, 1, __ATOMIC_RELEASE);
    errno = saved;
    return d;
}
