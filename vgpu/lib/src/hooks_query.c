/* SPDX-License-Identifier: Apache-2.0 */
/* Hooks of questions: how much memory is there, and where is a function. */
#include "contexts.h"
#include "ledger.h"
#include "limits.h"
#include "reserves.h"
#include "virtual.h"

/* Free and total bytes of a card as its tenant sees it; false where the limits can't be read. */
static bool share(struct carve_state *s, unsigned card, uint64_t *free_bytes, uint64_t *total_bytes) {
    uint64_t limit = carve_limit(s, card);
    if (limit == 0 && !carve_limits_readable(s)) {
        return false;
    }
    uint64_t charged = carve_charged(s, card);
    *total_bytes = carve_units_bytes(limit);
    *free_bytes = carve_units_bytes(charged < limit ? limit - charged : 0);
    return true;
}

/* The share of the card that is current. The driver was asked and has no objection: to the arguments, to the context,
 * or by an error that it has for good. */
static CUresult current_share(const struct carve_driver *d, struct carve_state *s, uint64_t *free_bytes, uint64_t *total_bytes) {
    struct carve_place place;
    carve_contexts_follow(s);
    switch (carve_current(d, s, &place)) {
    case CARVE_HERE:
        if (carve_leaving_any(s)) {
            carve_leaving_look(d, s);
        }
        carve_virtual_look(s);
        if (carve_reserves_any(s)) {
            carve_reserves_settle(d, s, (int)place.card);
        }
        return share(s, place.card, free_bytes, total_bytes) ? CUDA_SUCCESS : CUDA_ERROR_OPERATING_SYSTEM;
    case CARVE_NOWHERE:
        return CUDA_ERROR_INVALID_CONTEXT;
    default:
        /* A card that the limits don't name: nothing can be had there. */
        *free_bytes = *total_bytes = 0;
        return CUDA_SUCCESS;
    }
}

static unsigned int in_32_bits(uint64_t bytes) { return bytes > UINT32_MAX ? UINT32_MAX : (unsigned int)bytes; }

/* The frame of both forms; the driver's own figures go nowhere. */
#define MEM_GET_INFO(function, type, fit)                                                          \
    const struct carve_driver *d = carve_driver();                                                 \
    struct carve_state *s = carve_state();                                                         \
    uint64_t free_now = 0, total = 0;                                                              \
    type drivers[2] = {0, 0};                                                                      \
    if (d->function == NULL) {                                                                     \
        return CUDA_ERROR_NOT_SUPPORTED;                                                           \
    }                                                                                              \
    if (s == NULL) {                                                                               \
        return carve_without_files(d, CUDA_ERROR_OPERATING_SYSTEM);                                \
    }                                                                                              \
    CUresult result = d->function(free_bytes == NULL ? NULL : &drivers[0], total_bytes == NULL ? NULL : &drivers[1]); \
    if (result == CUDA_SUCCESS) {                                                                  \
        result = current_share(d, s, &free_now, &total);                                           \
    }                                                                                              \
    if (result == CUDA_SUCCESS && free_bytes != NULL) {                                            \
        *free_bytes = fit(free_now);                                                               \
    }                                                                                              \
    if (result == CUDA_SUCCESS && total_bytes != NULL) {                                           \
        *total_bytes = fit(total);                                                                 \
    }                                                                                              \
    return result

CARVE_EXPORT CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes) { MEM_GET_INFO(cuMemGetInfo_v2, size_t, (size_t)); }

CARVE_EXPORT CUresult cuMemGetInfo(unsigned int *free_bytes, unsigned int *total_bytes) { MEM_GET_INFO(cuMemGetInfo, unsigned int, in_32_bits); }

/* The limit of a device after the driver has said that there is such a device, with its own figure. */
static CUresult device_share(const struct carve_driver *d, CUdevice device, uint64_t *total_bytes) {
    struct carve_state *s = carve_state();
    uint64_t free_now;
    if (s == NULL) {
        return CUDA_ERROR_OPERATING_SYSTEM;
    }
    int card = carve_device_card(d, s, device);
    if (card < 0) {
        *total_bytes = 0;
        return CUDA_SUCCESS;
    }
    return share(s, (unsigned)card, &free_now, total_bytes) ? CUDA_SUCCESS : CUDA_ERROR_OPERATING_SYSTEM;
}

CARVE_EXPORT CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device) {
    const struct carve_driver *d = carve_driver();
    uint64_t total;
    if (d->cuDeviceTotalMem_v2 == NULL) {
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    size_t drivers = 0;
    CUresult result = d->cuDeviceTotalMem_v2(bytes == NULL ? NULL : &drivers, device);
    if (result == CUDA_SUCCESS) {
        result = device_share(d, device, &total);
    }
    if (result == CUDA_SUCCESS && bytes != NULL) {
        *bytes = total;
    }
    return result;
}

CARVE_EXPORT CUresult cuDeviceTotalMem(unsigned int *bytes, CUdevice device) {
    const struct carve_driver *d = carve_driver();
    uint64_t total;
    if (d->cuDeviceTotalMem == NULL) {
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    unsigned int drivers = 0;
    CUresult result = d->cuDeviceTotalMem(bytes == NULL ? NULL : &drivers, device);
    if (result == CUDA_SUCCESS) {
        result = device_share(d, device, &total);
    }
    if (result == CUDA_SUCCESS && bytes != NULL) {
        *bytes = in_32_bits(total);
    }
    return result;
}

/* ---- cuGetProcAddress ---- */

/* The driver chooses the variant for name, version and flags; where it chose a function that is hooked, the
 * hook of that very variant takes its place. No two of its exports have one address. */
static void substitute(const struct carve_driver *d, void **function) {
    void *chosen = *function;
    if (chosen == NULL) {
        return;
    }
#define X(name, ...)                        \
    if (chosen == (void *)(d->name)) {      \
        *function = (void *)(name);         \
        return;                             \
    }
    CARVE_CUDA_HOOKS(X)
#undef X
}

CARVE_EXPORT CUresult cuGetProcAddress(const char *symbol, void **function, int version, cuuint64_t flags) {
    const struct carve_driver *d = carve_driver();
    if (d->cuGetProcAddress == NULL) {
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    CUresult result = d->cuGetProcAddress(symbol, function, version, flags);
    if (result == CUDA_SUCCESS && function != NULL) {
        substitute(d, function);
    }
    return result;
}

CARVE_EXPORT CUresult cuGetProcAddress_v2(const char *symbol, void **function, int version, cuuint64_t flags,
                                          CUdriverProcAddressQueryResult *status) {
    const struct carve_driver *d = carve_driver();
    CUresult result;
    if (d->cuGetProcAddress_v2 != NULL) {
        result = d->cuGetProcAddress_v2(symbol, function, version, flags, status);
    } else if (d->cuGetProcAddress != NULL) {
        result = d->cuGetProcAddress(symbol, function, version, flags);
        if (status != NULL && result == CUDA_SUCCESS) {
            *status = CU_GET_PROC_ADDRESS_SUCCESS;
        } else if (status != NULL && result == CUDA_ERROR_NOT_FOUND) {
            *status = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
        }
    } else {
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    if (result == CUDA_SUCCESS && function != NULL) {
        substitute(d, function);
    }
    return result;
}
