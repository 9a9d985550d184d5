/* SPDX-License-Identifier: Apache-2.0 */
/* Hooks of physical memory that a program maps itself. */
#include "contexts.h"
#include "ledger.h"
#include "pointers.h"
#include "virtual.h"

CARVE_EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *property,
                                  unsigned long long flags) {
    const struct carve_driver *d = carve_driver();
    if (d->cuMemCreate == NULL) {
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    if (handle == NULL || property == NULL || bytes == 0 || property->location.type != CU_MEM_LOCATION_TYPE_DEVICE) {
        return d->cuMemCreate(handle, bytes, property, flags); /* nonsense, or memory of the host */
    }
    struct carve_state *s = carve_state();
    int card = s == NULL ? -1 : carve_device_card(d, s, property->location.id);
    if (card < 0) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    carve_contexts_follow(s);
    uint32_t units = carve_page_units(bytes);
    if (!carve_admit(s, (unsigned)card, units, bytes)) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    CUmemGenericAllocationHandle made = 0;
    struct carve_gone stale;
    CUresult result = d->cuMemCreate(&made, bytes, property, flags);
    if (result == CUDA_SUCCESS && !carve_virtual_create(s, made, (unsigned)card, units, &stale)) {
        if (d->cuMemRelease != NULL) {
            (void)d->cuMemRelease(made);
        }
        result = CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (result != CUDA_SUCCESS) {
        carve_release(s, (unsigned)card, units);
        return result;
    }
    if (stale.units != 0) {
        carve_release(s, stale.card, stale.units);
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
    struct carve_released released = {.known = false};
    if (s != NULL) {
        released = carve_virtual_release(s, handle);
    }
    CUresult result = d->cuMemRelease(handle);
    if (released.known && result != CUDA_SUCCESS) {
        carve_virtual_restore(s, &released);
    } else if (released.known && released.gone.units != 0) {
        carve_release(s, released.gone.card, released.gone.units);
    }
    return result;
}

CARVE_EXPORT CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address) {
    const struct carve_driver *d = carve_driver();
    if (d->cuMemRetainAllocationHandle == NULL) {
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    CUresult result = d->cuMemRetainAllocationHandle(handle, address);
    struct carve_state *s = carve_state();
    if (result == CUDA_SUCCESS && s != NULL) {
        carve_virtual_retained(s, *handle, (uintptr_t)address);
    }
    return result;
}

CARVE_EXPORT CUresult cuMemMap(CUdeviceptr pointer, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                               unsigned long long flags) {
    const struct carve_driver *d = carve_driver();
    if (d->cuMemMap == NULL) {
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    CUresult result = d->cuMemMap(pointer, bytes, offset, handle, flags);
    struct carve_state *s = carve_state();
    if (result == CUDA_SUCCESS && s != NULL) {
        carve_virtual_mapped(s, pointer, bytes, handle);
    }
    return result;
}

CARVE_EXPORT CUresult cuMemUnmap(CUdeviceptr pointer, size_t bytes) {
    const struct carve_driver *d = carve_driver();
    if (d->cuMemUnmap == NULL) {
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    CUresult result = d->cuMemUnmap(pointer, bytes);
    struct carve_state *s = carve_state();
    uint64_t next = pointer;
    struct carve_gone gone;
    while (result == CUDA_SUCCESS && s != NULL && carve_virtual_unmapped(s, &next, pointer + bytes, &gone)) {
        if (gone.units != 0) {
            carve_release(s, gone.card, gone.units);
        }
    }
    return result;
}
