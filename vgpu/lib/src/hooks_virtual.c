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
    struct carve_gone bound;
    while (CARVE_UNLIKELY(gone.object != 0) && carve_virtual_unbound_all(s, gone.object, &bound)) {
        give_back(s, bound); /* memory, which has nothing bound to it */
    }
}

/* Asks the driver for what isn't charged, since it is taken to refuse it. One that doesn't gets it back. */
static CUresult create_uncharged(const struct carve_driver *d, size_t bytes, const CUmemAllocationProp *property, unsigned long long flags) {
    CUmemGenericAllocationHandle made = 0;
    CUresult result = d->cuMemCreate(&made, bytes, property, flags);
    if (result == CUDA_SUCCESS) {
        if (d->cuMemRelease != NULL) {
            (void)d->cuMemRelease(made);
        }
        result = CUDA_ERROR_OUT_OF_MEMORY;
    }
    return result;
}

/* No driver takes this, whatever room there is: sizes are multiples of its granularity, of 64 KiB at least. */
static bool absurd(size_t bytes, const CUmemAllocationProp *property, unsigned long long flags) {
    return flags != 0 || property->type != CU_MEM_ALLOCATION_TYPE_PINNED || bytes % 65536 != 0;
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
        return carve_device_denied(d, own.location.id) ? create_uncharged(d, bytes, &own, flags) : carve_told(d, own.location.id, CUDA_ERROR_OUT_OF_MEMORY);
    }
    carve_contexts_follow(s);
    uint32_t units = carve_page_units(bytes);
    if (!carve_obtain(d, s, (unsigned)card, units, bytes)) {
        return absurd(bytes, &own, flags) ? create_uncharged(d, bytes, &own, flags) : carve_told(d, own.location.id, CUDA_ERROR_OUT_OF_MEMORY);
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
    CARVE_STEP("release-asked");
    CUresult result = d->cuMemRelease(handle);
    if (result == CUDA_SUCCESS) {
        gone = carve_virtual_release(s, handle);
    }
    give_back(s, gone);
    carve_virtual_look(s); /* the descriptors of it may be closed */
    carve_virtual_turn_end(s);
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
    carve_virtual_look(s);
    carve_virtual_turn_end(s);
    return result;
}

/* Whoever has the descriptor has the memory, also if it is this process. */
CARVE_EXPORT CUresult cuMemExportToShareableHandle(void *shareable, CUmemGenericAllocationHandle handle, int type, unsigned long long flags) {
    const struct carve_driver *d = carve_driver();
    if (d->cuMemExportToShareableHandle == NULL) {
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    struct carve_state *s = carve_state();
    if (s == NULL || shareable == NULL || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || !carve_virtual_turn(s, true)) {
        return d->cuMemExportToShareableHandle(shareable, handle, type, flags);
    }
    int descriptor = -1;
    struct carve_gone stale = {0};
    CUresult result = d->cuMemExportToShareableHandle(&descriptor, handle, type, flags);
    if (result == CUDA_SUCCESS && descriptor >= 0) {
        stale = carve_virtual_exported(s, handle, descriptor);
    }
    give_back(s, stale);
    carve_virtual_turn_end(s);
    if (result == CUDA_SUCCESS) {
        *(int *)shareable = descriptor;
    }
    return result;
}

/* ---- multicast objects ---- */

CARVE_EXPORT CUresult cuMulticastCreate(CUmemGenericAllocationHandle *handle, const CUmulticastObjectProp *property) {
    const struct carve_driver *d = carve_driver();
    if (d->cuMulticastCreate == NULL) {
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    struct carve_state *s = carve_state();
    if (s == NULL || handle == NULL) {
        return d->cuMulticastCreate(handle, property);
    }
    if (!carve_slot(s) || !carve_virtual_turn(s, true)) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    CUmemGenericAllocationHandle made = 0;
    CUresult result = d->cuMulticastCreate(&made, property);
    if (result == CUDA_SUCCESS && !carve_virtual_object(s, made)) {
        if (d->cuMemRelease != NULL) {
            (void)d->cuMemRelease(made);
        }
        result = CUDA_ERROR_OUT_OF_MEMORY;
    }
    carve_virtual_turn_end(s);
    if (result == CUDA_SUCCESS) {
        *handle = made;
    }
    return result;
}

/* What is bound is held before the driver is asked, and without the turn: it may wait for devices that other processes
 * have yet to add. device is -1 where it is the memory's own. */
struct binding {
    const struct carve_driver *d;
    struct carve_state *s; /* NULL: nothing is followed */
    uint32_t block;        /* 0: it isn't known */
    unsigned card;
};

static struct binding begin_bind(CUmemGenericAllocationHandle memory, CUdeviceptr address, CUdevice device) {
    struct binding b = {.d = carve_driver(), .s = carve_state()};
    if (b.s == NULL || !carve_virtual_turn(b.s, false)) {
        b.s = NULL;
        return b;
    }
    b.block = carve_virtual_bind(b.s, memory, address);
    carve_virtual_turn_end(b.s);
    if (b.block != 0) {
        int card = device < 0 ? (int)carve_virtual_card(b.s, b.block) : carve_device_card(b.d, b.s, device);
        b.card = card < 0 ? CARVE_MAX_CARDS : (unsigned)card;
    }
    return b;
}

static CUresult end_bind(const struct binding *b, CUresult result, CUmemGenericAllocationHandle object, size_t offset, size_t bytes, CUdevice device) {
    struct carve_gone stale = {0};
    if (b->s == NULL || b->block == 0) {
        return result;
    }
    bool turn = result == CUDA_SUCCESS && carve_virtual_turn(b->s, true);
    if (turn && carve_virtual_bound(b->s, b->block, object, b->card, offset, &stale)) {
        give_back(b->s, stale);
        carve_virtual_turn_end(b->s);
        return result;
    }
    if (turn) {
        carve_virtual_turn_end(b->s);
    }
    if (result == CUDA_SUCCESS) {
        /* Without memory to remember it. */
        if (b->d->cuMulticastUnbind != NULL) {
            (void)b->d->cuMulticastUnbind(object, device, offset, bytes);
        }
        result = CUDA_ERROR_OUT_OF_MEMORY;
    }
    give_back(b->s, carve_virtual_let_go(b->s, b->block));
    return result;
}

/* The device of a card, for the one call that needs it. */
static CUdevice device_of(const struct binding *b) {
    for (CUdevice i = 0; b->s != NULL && b->block != 0 && i < CARVE_MAX_DEVICES; i++) {
        if (carve_device_card(b->d, b->s, i) == (int)b->card) {
            return i;
        }
    }
    return -1;
}

CARVE_EXPORT CUresult cuMulticastBindMem(CUmemGenericAllocationHandle object, size_t offset, CUmemGenericAllocationHandle memory, size_t memoryOffset,
                                         size_t bytes, unsigned long long flags) {
    const struct carve_driver *d = carve_driver();
    if (d->cuMulticastBindMem == NULL) {
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    struct binding b = begin_bind(memory, 0, -1);
    return end_bind(&b, d->cuMulticastBindMem(object, offset, memory, memoryOffset, bytes, flags), object, offset, bytes, device_of(&b));
}

CARVE_EXPORT CUresult cuMulticastBindMem_v2(CUmemGenericAllocationHandle object, CUdevice device, size_t offset, CUmemGenericAllocationHandle memory,
                                            size_t memoryOffset, size_t bytes, unsigned long long flags) {
    const struct carve_driver *d = carve_driver();
    if (d->cuMulticastBindMem_v2 == NULL) {
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    struct binding b = begin_bind(memory, 0, device);
    return end_bind(&b, d->cuMulticastBindMem_v2(object, device, offset, memory, memoryOffset, bytes, flags), object, offset, bytes, device);
}

CARVE_EXPORT CUresult cuMulticastBindAddr(CUmemGenericAllocationHandle object, size_t offset, CUdeviceptr pointer, size_t bytes, unsigned long long flags) {
    const struct carve_driver *d = carve_driver();
    if (d->cuMulticastBindAddr == NULL) {
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    struct binding b = begin_bind(0, pointer, -1);
    return end_bind(&b, d->cuMulticastBindAddr(object, offset, pointer, bytes, flags), object, offset, bytes, device_of(&b));
}

CARVE_EXPORT CUresult cuMulticastBindAddr_v2(CUmemGenericAllocationHandle object, CUdevice device, size_t offset, CUdeviceptr pointer, size_t bytes,
                                             unsigned long long flags) {
    const struct carve_driver *d = carve_driver();
    if (d->cuMulticastBindAddr_v2 == NULL) {
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    struct binding b = begin_bind(0, pointer, device);
    return end_bind(&b, d->cuMulticastBindAddr_v2(object, device, offset, pointer, bytes, flags), object, offset, bytes, device);
}

CARVE_EXPORT CUresult cuMulticastUnbind(CUmemGenericAllocationHandle object, CUdevice device, size_t offset, size_t bytes) {
    const struct carve_driver *d = carve_driver();
    if (d->cuMulticastUnbind == NULL) {
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    struct carve_state *s = carve_state();
    int card = s == NULL ? -1 : carve_device_card(d, s, device);
    if (card < 0 || !carve_virtual_turn(s, false)) {
        return d->cuMulticastUnbind(object, device, offset, bytes); /* nothing is known of it */
    }
    CUresult result = d->cuMulticastUnbind(object, device, offset, bytes);
    if (result == CUDA_SUCCESS) {
        give_back(s, carve_virtual_unbound(s, object, (unsigned)card, offset));
    }
    carve_virtual_turn_end(s);
    return result;
}
