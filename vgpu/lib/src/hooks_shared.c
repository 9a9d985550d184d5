/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Hooks of memory that others made: whoever made it is charged for it, whoever opens it only lists it. None of them
 * refuses anything, also where the limits can't be read: nothing is taken of the card.
 */
#include "contexts.h"
#include "pointers.h"
#include "virtual.h"

/* Lists bytes under an address, or under the key of a handle. */
static void list(const struct carve_driver *d, uint64_t key, uint64_t bytes) {
    struct carve_state *s = carve_state();
    struct carve_place place;
    if (s != NULL && carve_current(d, s, &place) == CARVE_HERE && carve_slot(s)) {
        const struct carve_pointer block = {.address = key, .units = carve_units_up(bytes), .context = place.context,
                                            .card = (uint8_t)place.card, .kind = CARVE_KIND_IMPORTED};
        carve_pointers_import(s, &block);
    }
}

static void unlist(uint64_t key) {
    struct carve_state *s = carve_state();
    if (s != NULL) {
        carve_pointers_export(s, key);
    }
}

/* How much is open at an address: as much as the driver says that there is. */
static void list_range(const struct carve_driver *d, CUdeviceptr address) {
    CUdeviceptr start;
    size_t bytes = 0;
    if (d->cuMemGetAddressRange_v2 != NULL && d->cuMemGetAddressRange_v2(&start, &bytes, address) == CUDA_SUCCESS) {
        list(d, address, bytes);
    }
}

/* The frame of calls that give an address. */
#define OPEN(function, pointer, ...)               \
    const struct carve_driver *d = carve_driver(); \
    if (d->function == NULL) {                     \
        return CUDA_ERROR_NOT_SUPPORTED;           \
    }                                              \
    CUresult result = d->function(__VA_ARGS__);    \
    if (result == CUDA_SUCCESS) {                  \
        list_range(d, *(pointer));                 \
    }                                              \
    return result

CARVE_EXPORT CUresult cuIpcOpenMemHandle(CUdeviceptr *pointer, CUipcMemHandle handle, unsigned int flags) {
    OPEN(cuIpcOpenMemHandle, pointer, pointer, handle, flags);
}

CARVE_EXPORT CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *pointer, CUipcMemHandle handle, unsigned int flags) {
    OPEN(cuIpcOpenMemHandle_v2, pointer, pointer, handle, flags);
}

CARVE_EXPORT CUresult cuIpcCloseMemHandle(CUdeviceptr pointer) {
    const struct carve_driver *d = carve_driver();
    if (d->cuIpcCloseMemHandle == NULL) {
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    CUresult result = d->cuIpcCloseMemHandle(pointer);
    if (result == CUDA_SUCCESS) {
        unlist(pointer);
    }
    return result;
}

/* It is freed by cuMemFree or cuMemFreeAsync, which take it off the list. */
CARVE_EXPORT CUresult cuMemPoolImportPointer(CUdeviceptr *pointer, CUmemoryPool pool, CUmemPoolPtrExportData *data) {
    OPEN(cuMemPoolImportPointer, pointer, pointer, pool, data);
}

CARVE_EXPORT CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *shared, int type) {
    const struct carve_driver *d = carve_driver();
    if (d->cuMemImportFromShareableHandle == NULL) {
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    struct carve_state *s = carve_state();
    if (s == NULL || handle == NULL || !carve_virtual_turn(s, true)) {
        return d->cuMemImportFromShareableHandle(handle, shared, type);
    }
    CUmemGenericAllocationHandle imported = 0;
    CUmemAllocationProp property = {.type = 0};
    CUresult result = d->cuMemImportFromShareableHandle(&imported, shared, type);
    if (result == CUDA_SUCCESS && type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR && carve_virtual_own(s, imported, (int)(intptr_t)shared)) {
        /* one more handle of what this process made, and pays for */
    } else if (result == CUDA_SUCCESS && d->cuMemGetAllocationPropertiesFromHandle != NULL &&
        d->cuMemGetAllocationPropertiesFromHandle(&property, imported) == CUDA_SUCCESS && property.location.type == CU_MEM_LOCATION_TYPE_DEVICE) {
        int card = carve_device_card(d, s, property.location.id);
        if (card >= 0) {
            carve_virtual_imported(s, imported, (unsigned)card);
        }
    }
    carve_virtual_turn_end(s);
    if (result == CUDA_SUCCESS) {
        *handle = imported;
    }
    return result;
}

CARVE_EXPORT CUresult cuImportExternalMemory(CUexternalMemory *memory, const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *description) {
    const struct carve_driver *d = carve_driver();
    if (d->cuImportExternalMemory == NULL) {
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    uint64_t bytes = description == NULL ? 0 : description->size;
    CUresult result = d->cuImportExternalMemory(memory, description);
    if (result == CUDA_SUCCESS) {
        list(d, carve_handle_key(*memory), bytes);
    }
    return result;
}

CARVE_EXPORT CUresult cuDestroyExternalMemory(CUexternalMemory memory) {
    const struct carve_driver *d = carve_driver();
    if (d->cuDestroyExternalMemory == NULL) {
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    CUresult result = d->cuDestroyExternalMemory(memory);
    if (result == CUDA_SUCCESS) {
        unlist(carve_handle_key(memory));
    }
    return result;
}
