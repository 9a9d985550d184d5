/* SPDX-License-Identifier: Apache-2.0 */
/* Hooks of physical memory that a program maps itself. */
#include "contexts.h"
#include "ledger.h"
#include "pointers.h"
#include "reserves.h"
#include "virtual.h"

static void give_back(struct carve_state *s, struct carve_gone gone) {
    if (gone.units != 0) {
        carve_release(s, gone.card, gone.units);
    }
}

CARVE_EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *property,
                                  unsigned long long flags) {
    const struct carve_driver *d = carve_driver();
    if (d->cuMemCreate == NULL) {
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    if (handle == NULL || property == NULL || bytes == 0) {
        return d->cuMemCreate(handle, bytes, property, flags); /* nonsense */
    }
    /* What is judged and what the driver gets are one copy: another thread may write over the caller's meanwhile. */
    CUmemAllocationProp own = *property;
    __asm__ volatile("" : "+m"(own));
    if (own.location.type != CU_MEM_LOCATION_TYPE_DEVICE) {
        return d->cuMemCreate(handle, bytes, &own, flags); /* memory of the host */
    }
    struct carve_state *s = carve_state();
    int card = s == NULL ? -1 : carve_device_card(d, s, own.location.id);
    if (card < 0) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    carve_contexts_follow(s);
    uint32_t units = carve_page_units(bytes);
    if (!carve_obtain(d, s, (unsigned)card, units, bytes)) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    CUmemGenericAllocationHandle made = 0;
    struct carve_gone stale = {0};
    CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
    if (carve_virtual_turn(s, true)) {
        result = d->cuMemCreate(&made, bytes, &own, flags);
        if (result == CUDA_SUCCESS && !carve_virtual_create(s, made, (unsigned)card, units, &stale)) {
            if (d->cuMemRelease != NULL) {
                (void)d->cuMemRelease(made);
            }
            result = CUDA_ERROR_OUT_OF_MEMORY;
        }
        carve_virtual_turn_end(s);
    }
    give_back(s, stale);
    if (result != CUDA_SUCCESS) {
        carve_release(s, (unsigned)card, units);
        return result;
    }
    *handle = made;
    return CUDA_SUCCESS;
}

CARVE_EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    const struct carve_driver *d = carve_driver();
    if (d->cuMemRelease == NULL) {
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    struct carve_state *s = carve_state();
    if (s == NULL || !carve_virtual_turn(s, false)) {
        return d->cuMemRelease(handle); /* nothing is known of any */
    }
    struct carve_gone gone = {0};
    CUresult result = d->cuMemRelease(handle);
    if (result == CUDA_SUCCESS) {
        gone = carve_virtual_release(s, handle);
    }
    carve_virtual_turn_end(s);
    give_back(s, gone);
    return result;
}

CARVE_EXPORT CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address) {
    const struct carve_driver *d = carve_driver();
    if (d->cuMemRetainAllocationHandle == NULL) {
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    struct carve_state *s = carve_state();
    if (s == NULL || handle == NULL) {
        return d->cuMemRetainAllocationHandle(handle, address);
    }
    if (!carve_virtual_turn(s, true)) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    CUmemGenericAllocationHandle retained = 0;
    CUresult result = d->cuMemRetainAllocationHandle(&retained, address);
    if (result == CUDA_SUCCESS) {
        carve_virtual_retained(s, retained, (uintptr_t)address);
    }
    carve_virtual_turn_end(s);
    if (result == CUDA_SUCCESS) {
        *handle = retained;
    }
    return result;
}

CARVE_EXPORT CUresult cuMemMap(CUdeviceptr pointer, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                               unsigned long long flags) {
    const struct carve_driver *d = carve_driver();
    if (d->cuMemMap == NULL) {
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    struct carve_state *s = carve_state();
    if (s == NULL) {
        return d->cuMemMap(pointer, bytes, offset, handle, flags);
    }
    if (!carve_virtual_turn(s, true)) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    struct carve_gone stale = {0};
    CUresult result = d->cuMemMap(pointer, bytes, offset, handle, flags);
    if (result == CUDA_SUCCESS) {
        stale = carve_virtual_mapped(s, pointer, bytes, handle);
    }
    carve_virtual_turn_end(s);
    give_back(s, stale);
    return result;
}

CARVE_EXPORT CUresult cuMemUnmap(CUdeviceptr pointer, size_t bytes) {
    const struct carve_driver *d = carve_driver();
    if (d->cuMemUnmap == NULL) {
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    struct carve_state *s = carve_state();
    if (s == NULL || !carve_virtual_turn(s, false)) {
        return d->cuMemUnmap(pointer, bytes); /* nothing is known of any */
    }
    CUresult result = d->cuMemUnmap(pointer, bytes);
    uint64_t next = pointer;
    struct carve_gone gone;
    while (result == CUDA_SUCCESS && carve_virtual_unmapped(s, &next, pointer + bytes, &gone)) {
        give_back(s, gone); /* waits for nobody */
    }
    carve_virtual_turn_end(s);
    return result;
}
