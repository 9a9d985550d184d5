/* SPDX-License-Identifier: Apache-2.0 */
/* Hooks of arrays and mipmapped arrays: charge first, then ask the driver, give back if it says no. */
#include "arrays.h"
#include "contexts.h"
#include "ledger.h"

/* A request in the terms of the newest form, and the form in which the driver is asked. */
struct request {
    CUresult (*make)(const struct carve_driver *d, const struct request *r, void **handle);
    CUresult (*drop)(const struct carve_driver *d, void *handle);
    CUDA_ARRAY3D_DESCRIPTOR all;
    unsigned int levels; /* 0: not mipmapped */
    unsigned int asked;  /* levels as the program gave them: drivers may take 0 for 1 */
};

/* Descriptions that no driver takes are its own to refuse. */
static bool absurd(const CUDA_ARRAY3D_DESCRIPTOR *a) {
    return a->Width == 0 || a->Width > 1u << 20 || a->Height > 1u << 20 || a->Depth > 1u << 16 || a->NumChannels == 0 || a->NumChannels > 4;
}

/* Asks the driver for what isn't charged, since it is taken to refuse it. One that doesn't gets it back. */
static CUresult make_uncharged(const struct carve_driver *d, const struct request *r) {
    void *made = NULL;
    CUresult result = r->make(d, r, &made);
    if (result == CUDA_SUCCESS) {
        (void)r->drop(d, made);
        result = CUDA_ERROR_OUT_OF_MEMORY;
    }
    return result;
}

static CUresult create(const struct carve_driver *d, const struct request *r, void **out) {
    struct carve_state *s = carve_state();
    struct carve_place place;
    /* Memory of these comes later, by mapping what cuMemCreate was charged for. A driver without deferred mapping may
     * not look at its flag. */
    unsigned int later = CUDA_ARRAY3D_SPARSE | (d->cuArrayGetMemoryRequirements != NULL ? CUDA_ARRAY3D_DEFERRED_MAPPING : 0u);
    bool empty = (r->all.Flags & later) != 0;
    if (s == NULL) {
        return carve_without_files(d, CUDA_ERROR_OUT_OF_MEMORY);
    }
    carve_contexts_follow(s);
    enum carve_where where = carve_current(d, s, &place);
    if (where == CARVE_FOREIGN) {
        return carve_told(d, -1, CUDA_ERROR_OUT_OF_MEMORY);
    }
    if (where == CARVE_NOWHERE || absurd(&r->all)) {
        return make_uncharged(d, r);
    }
    if (empty) {
        return r->make(d, r, out);
    }
    struct carve_pointer block = {.context = place.context, .card = (uint8_t)place.card};
    struct carve_put put;
    void *made = NULL;
    if (!carve_array_charge(d, s, &block, carve_array_bytes(d, place.device, &r->all, r->levels))) {
        return carve_told(d, place.device, CUDA_ERROR_OUT_OF_MEMORY);
    }
    CARVE_STEP("alloc-charged");
    CUresult result = r->make(d, r, &made);
    CARVE_STEP("alloc-done");
    if (result != CUDA_SUCCESS) {
        carve_block_gone(s, &block, false);
        return result;
    }
    block.address = carve_handle_key(made);
    if (!carve_pointers_put(s, &block, &put)) {
        (void)r->drop(d, made);
        carve_block_gone(s, &block, false);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (put.stale.address != 0) {
        carve_block_gone(s, &put.stale, put.stale_last);
    }
    *out = made;
    return CUDA_SUCCESS;
}

static CUresult destroy(const struct carve_driver *d, CUresult (*drop)(const struct carve_driver *, void *), void *handle) {
    struct carve_state *s = carve_state();
    struct carve_pointer block;
    if (s == NULL || handle == NULL || !carve_pointers_take(s, carve_handle_key(handle), &block)) {
        return drop(d, handle); /* without memory of its own, or part of another: a level, a plane */
    }
    CUresult result = drop(d, handle);
    if (result == CUDA_SUCCESS) {
        carve_block_gone(s, &block, false);
    } else {
        (void)carve_pointers_restore(s, &block);
    }
    return result;
}

/* ---- the driver's forms ---- */

static CUresult drop_array(const struct carve_driver *d, void *handle) {
    return d->cuArrayDestroy == NULL ? CUDA_ERROR_NOT_SUPPORTED : d->cuArrayDestroy((CUarray)handle);
}

static CUresult drop_mipmapped(const struct carve_driver *d, void *handle) {
    return d->cuMipmappedArrayDestroy == NULL ? CUDA_ERROR_NOT_SUPPORTED : d->cuMipmappedArrayDestroy((CUmipmappedArray)handle);
}

static CUresult make_v1(const struct carve_driver *d, const struct request *r, void **handle) {
    CUDA_ARRAY_DESCRIPTOR_v1 narrow = {(unsigned int)r->all.Width, (unsigned int)r->all.Height, r->all.Format, r->all.NumChannels};
    return d->cuArrayCreate((CUarray *)handle, &narrow);
}

static CUresult make_v2(const struct carve_driver *d, const struct request *r, void **handle) {
    CUDA_ARRAY_DESCRIPTOR flat = {r->all.Width, r->all.Height, r->all.Format, r->all.NumChannels};
    return d->cuArrayCreate_v2((CUarray *)handle, &flat);
}

static CUresult make_3d_v1(const struct carve_driver *d, const struct request *r, void **handle) {
    CUDA_ARRAY3D_DESCRIPTOR_v1 narrow = {(unsigned int)r->all.Width, (unsigned int)r->all.Height, (unsigned int)r->all.Depth,
                                         r->all.Format, r->all.NumChannels, r->all.Flags};
    return d->cuArray3DCreate((CUarray *)handle, &narrow);
}

static CUresult make_3d_v2(const struct carve_driver *d, const struct request *r, void **handle) {
    return d->cuArray3DCreate_v2((CUarray *)handle, &r->all);
}

static CUresult make_mipmapped(const struct carve_driver *d, const struct request *r, void **handle) {
    return d->cuMipmappedArrayCreate((CUmipmappedArray *)handle, &r->all, r->asked);
}

/* ---- hooks ---- */

/* What is judged and what the driver gets are one copy of the description: another thread may write over it. */
#define CREATE(function, call, array, descriptor, making, dropping, count, ...)                                   \
    const struct carve_driver *d = carve_driver();                                                                \
    if (d->function == NULL) {                                                                                    \
        return CUDA_ERROR_NOT_SUPPORTED;                                                                          \
    }                                                                                                             \
    if ((array) == NULL || (descriptor) == NULL) {                                                                \
        return d->call;                                                                                           \
    }                                                                                                             \
    struct request r = {.make = making, .drop = dropping, .levels = count, .asked = count, .all = {__VA_ARGS__}}; \
    __asm__ volatile("" : "+m"(r));                                                                               \
    r.levels = (making) == make_mipmapped && r.levels == 0 ? 1 : r.levels;                                         \
    void *made = NULL;                                                                                            \
    CUresult result = create(d, &r, &made);                                                                       \
    if (result == CUDA_SUCCESS) {                                                                                 \
        *(array) = made;                                                                                          \
    }                                                                                                             \
    return result

CARVE_EXPORT CUresult cuArrayCreate(CUarray *array, const CUDA_ARRAY_DESCRIPTOR_v1 *a) {
    CREATE(cuArrayCreate, cuArrayCreate(array, a), array, a, make_v1, drop_array, 0,
           a->Width, a->Height, 0, a->Format, a->NumChannels, 0);
}

CARVE_EXPORT CUresult cuArrayCreate_v2(CUarray *array, const CUDA_ARRAY_DESCRIPTOR *a) {
    CREATE(cuArrayCreate_v2, cuArrayCreate_v2(array, a), array, a, make_v2, drop_array, 0,
           a->Width, a->Height, 0, a->Format, a->NumChannels, 0);
}

CARVE_EXPORT CUresult cuArray3DCreate(CUarray *array, const CUDA_ARRAY3D_DESCRIPTOR_v1 *a) {
    CREATE(cuArray3DCreate, cuArray3DCreate(array, a), array, a, make_3d_v1, drop_array, 0,
           a->Width, a->Height, a->Depth, a->Format, a->NumChannels, a->Flags);
}

CARVE_EXPORT CUresult cuArray3DCreate_v2(CUarray *array, const CUDA_ARRAY3D_DESCRIPTOR *a) {
    CREATE(cuArray3DCreate_v2, cuArray3DCreate_v2(array, a), array, a, make_3d_v2, drop_array, 0,
           a->Width, a->Height, a->Depth, a->Format, a->NumChannels, a->Flags);
}

CARVE_EXPORT CUresult cuMipmappedArrayCreate(CUmipmappedArray *array, const CUDA_ARRAY3D_DESCRIPTOR *a, unsigned int levels) {
    CREATE(cuMipmappedArrayCreate, cuMipmappedArrayCreate(array, a, levels), array, a, make_mipmapped, drop_mipmapped, levels,
           a->Width, a->Height, a->Depth, a->Format, a->NumChannels, a->Flags);
}

CARVE_EXPORT CUresult cuArrayDestroy(CUarray array) { return destroy(carve_driver(), drop_array, array); }

CARVE_EXPORT CUresult cuMipmappedArrayDestroy(CUmipmappedArray array) { return destroy(carve_driver(), drop_mipmapped, array); }
