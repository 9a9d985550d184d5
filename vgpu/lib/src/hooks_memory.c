/* SPDX-License-Identifier: Apache-2.0 */
/* Hooks of linear memory: charge first, then ask the driver, give back if it says no. */
#include "contexts.h"
#include "ledger.h"
#include "pointers.h"

typedef CUresult (*free_call)(const struct carve_driver *d, uint64_t address);

static CUresult free_v1(const struct carve_driver *d, uint64_t address) {
    return d->cuMemFree == NULL ? CUDA_ERROR_NOT_SUPPORTED : d->cuMemFree((CUdeviceptr_v1)address);
}

static CUresult free_v2(const struct carve_driver *d, uint64_t address) {
    return d->cuMemFree_v2 == NULL ? CUDA_ERROR_NOT_SUPPORTED : d->cuMemFree_v2(address);
}

/* A request on its way: where it goes and what is charged for it so far. */
struct request {
    struct carve_state *s;
    struct carve_pointer block; /* all but the address */
    uint32_t charged;
    uint64_t asked_bytes;
};

enum begun { BEGUN, PASS, REFUSED };

/* Fills in where a request of the calling thread goes. */
static inline enum begun begin(const struct carve_driver *d, struct request *r) {
    r->s = carve_state();
    r->charged = 0;
    if (CARVE_UNLIKELY(r->s == NULL)) {
        return REFUSED;
    }
    carve_contexts_follow(r->s);
    struct carve_place place;
    switch (carve_current(d, r->s, &place)) {
    case CARVE_HERE:
        r->block.card = (uint8_t)place.card;
        r->block.context = place.context;
        return BEGUN;
    case CARVE_NOWHERE:
        return PASS; /* no driver allocates without a context: it has its own error for that */
    default:
        return REFUSED;
    }
}

/* Charges a block before the driver is asked for it. */
static inline bool charge(struct request *r, uint64_t bytes, uint8_t kind) {
    r->asked_bytes = bytes;
    r->block.kind = kind;
    if (kind == CARVE_KIND_WHOLE && bytes <= CARVE_PIECE_MAX_BYTES) {
        /* A page, in case that the driver takes a new one for it. Where there is no room for a page but one at
         * hand may have a hole, the driver is asked: what it did shows in the address. */
        r->block.kind = CARVE_KIND_PIECE;
        r->block.units = carve_units_up(bytes);
        r->charged = CARVE_PAGE_UNITS;
        if (CARVE_LIKELY(carve_try(r->s, r->block.card, CARVE_PAGE_UNITS))) {
            return true;
        }
        if (carve_pointers_room(r->s, r->block.card, r->block.context, r->block.units)) {
            r->charged = 0;
            return true;
        }
    } else {
        r->block.units = carve_page_units(bytes);
        r->charged = r->block.units;
    }
    if (CARVE_UNLIKELY(!carve_admit(r->s, r->block.card, r->charged, bytes))) {
        r->charged = 0;
        return false;
    }
    return true;
}

static void cancel(struct request *r) {
    if (r->charged != 0) {
        carve_release(r->s, r->block.card, r->charged);
        r->charged = 0;
    }
}

/* The driver gave the block: keeps it with its charge, or gives it back where the charge turned out not to
 * cover what the driver took. */
static inline bool keep(const struct carve_driver *d, struct request *r, uint64_t address, free_call give_back) {
    struct carve_put put;
    r->block.address = address;
    if (CARVE_UNLIKELY(!carve_pointers_put(r->s, &r->block, &put))) {
        (void)give_back(d, address);
        cancel(r);
        return false;
    }
    if (CARVE_UNLIKELY(put.stale.address != 0)) {
        carve_block_gone(r->s, &put.stale, put.stale_last);
    }
    if (r->block.kind != CARVE_KIND_PIECE) {
        return true;
    }
    if (!put.first_of_page) {
        cancel(r);
        return true;
    }
    if (CARVE_LIKELY(r->charged != 0) || carve_admit(r->s, r->block.card, CARVE_PAGE_UNITS, r->asked_bytes)) {
        return true;
    }
    struct carve_pointer block;
    bool last;
    if (carve_pointers_take(r->s, address, &block, &last)) {
        (void)give_back(d, address);
        /* Another thread has had a piece of the same new page meanwhile, so the page stays taken, and is
         * charged though it doesn't fit. */
        if (!last) {
            carve_correct(r->s, block.card, CARVE_PAGE_UNITS);
        }
    }
    return false;
}

CARVE_EXPORT CUresult cuMemAlloc_v2(CUdeviceptr *pointer, size_t bytes) {
    const struct carve_driver *d = carve_driver();
    struct request r;
    if (CARVE_UNLIKELY(d->cuMemAlloc_v2 == NULL)) {
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    enum begun begun = begin(d, &r);
    if (CARVE_UNLIKELY(begun == PASS || pointer == NULL || bytes == 0)) {
        return d->cuMemAlloc_v2(pointer, bytes);
    }
    if (CARVE_UNLIKELY(begun == REFUSED || !charge(&r, bytes, CARVE_KIND_WHOLE))) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    CARVE_STEP("alloc-charged");
    CUdeviceptr address = 0;
    CUresult result = d->cuMemAlloc_v2(&address, bytes);
    CARVE_STEP("alloc-done");
    if (CARVE_UNLIKELY(result != CUDA_SUCCESS)) {
        cancel(&r);
        return result;
    }
    if (CARVE_UNLIKELY(!keep(d, &r, address, free_v2))) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *pointer = address;
    return CUDA_SUCCESS;
}

CARVE_EXPORT CUresult cuMemAlloc(CUdeviceptr_v1 *pointer, unsigned int bytes) {
    const struct carve_driver *d = carve_driver();
    struct request r;
    if (d->cuMemAlloc == NULL) {
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    enum begun begun = begin(d, &r);
    if (begun == PASS || pointer == NULL || bytes == 0) {
        return d->cuMemAlloc(pointer, bytes);
    }
    if (begun == REFUSED || !charge(&r, bytes, CARVE_KIND_WHOLE)) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    CUdeviceptr_v1 address = 0;
    CUresult result = d->cuMemAlloc(&address, bytes);
    if (result != CUDA_SUCCESS) {
        cancel(&r);
        return result;
    }
    if (!keep(d, &r, address, free_v1)) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *pointer = address;
    return CUDA_SUCCESS;
}

/* ---- pitch ---- */

/* The driver chooses the pitch; today's cards align it to 512 bytes. The request is charged for that pitch and
 * corrected once the real one is known. */
static uint64_t pitched_bytes(uint64_t pitch, uint64_t height) {
    uint64_t bytes;
    return __builtin_mul_overflow(pitch, height, &bytes) ? UINT64_MAX : bytes;
}

static uint64_t expected_bytes(uint64_t width, uint64_t height) {
    return width > UINT64_MAX - 511 ? UINT64_MAX : pitched_bytes((width + 511) & ~(uint64_t)511, height);
}

/* Fits the charge to the real pitch; false where the larger size doesn't fit. */
static bool recharge(struct request *r, uint64_t expected, uint64_t real) {
    if (real == expected) {
        return true;
    }
    cancel(r);
    return charge(r, real, CARVE_KIND_WHOLE);
}

CARVE_EXPORT CUresult cuMemAllocPitch_v2(CUdeviceptr *pointer, size_t *pitch, size_t width, size_t height,
                                         unsigned int element) {
    const struct carve_driver *d = carve_driver();
    struct request r;
    if (d->cuMemAllocPitch_v2 == NULL) {
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    enum begun begun = begin(d, &r);
    if (begun == PASS || pointer == NULL || pitch == NULL || width == 0 || height == 0) {
        return d->cuMemAllocPitch_v2(pointer, pitch, width, height, element);
    }
    uint64_t expected = expected_bytes(width, height);
    if (begun == REFUSED || !charge(&r, expected, CARVE_KIND_WHOLE)) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    CUdeviceptr address = 0;
    size_t real_pitch = 0;
    CUresult result = d->cuMemAllocPitch_v2(&address, &real_pitch, width, height, element);
    if (result != CUDA_SUCCESS) {
        cancel(&r);
        return result;
    }
    if (!recharge(&r, expected, pitched_bytes(real_pitch, height))) {
        (void)free_v2(d, address);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (!keep(d, &r, address, free_v2)) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *pointer = address;
    *pitch = real_pitch;
    return CUDA_SUCCESS;
}

CARVE_EXPORT CUresult cuMemAllocPitch(CUdeviceptr_v1 *pointer, unsigned int *pitch, unsigned int width,
                                      unsigned int height, unsigned int element) {
    const struct carve_driver *d = carve_driver();
    struct request r;
    if (d->cuMemAllocPitch == NULL) {
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    enum begun begun = begin(d, &r);
    if (begun == PASS || pointer == NULL || pitch == NULL || width == 0 || height == 0) {
        return d->cuMemAllocPitch(pointer, pitch, width, height, element);
    }
    uint64_t expected = expected_bytes(width, height);
    if (begun == REFUSED || !charge(&r, expected, CARVE_KIND_WHOLE)) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    CUdeviceptr_v1 address = 0;
    unsigned int real_pitch = 0;
    CUresult result = d->cuMemAllocPitch(&address, &real_pitch, width, height, element);
    if (result != CUDA_SUCCESS) {
        cancel(&r);
        return result;
    }
    if (!recharge(&r, expected, pitched_bytes(real_pitch, height))) {
        (void)free_v1(d, address);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (!keep(d, &r, address, free_v1)) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *pointer = address;
    *pitch = real_pitch;
    return CUDA_SUCCESS;
}

/* ---- managed ---- */

/* Charged in full though the driver may keep part of it on the host: all of it can be on the card at once. */
CARVE_EXPORT CUresult cuMemAllocManaged(CUdeviceptr *pointer, size_t bytes, unsigned int flags) {
    const struct carve_driver *d = carve_driver();
    struct request r;
    if (d->cuMemAllocManaged == NULL) {
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    enum begun begun = begin(d, &r);
    if (begun == PASS || pointer == NULL || bytes == 0) {
        return d->cuMemAllocManaged(pointer, bytes, flags);
    }
    if (begun == REFUSED || !charge(&r, bytes, CARVE_KIND_MANAGED)) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    CUdeviceptr address = 0;
    CUresult result = d->cuMemAllocManaged(&address, bytes, flags);
    if (result != CUDA_SUCCESS) {
        cancel(&r);
        return result;
    }
    if (!keep(d, &r, address, free_v2)) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *pointer = address;
    return CUDA_SUCCESS;
}

/* ---- free ---- */

/* The block is forgotten before the driver frees it, for at that moment another thread may be given the same
 * address; its charge is given back after, for until then the memory is taken. */
static inline CUresult free_block(const struct carve_driver *d, uint64_t address, free_call call) {
    struct carve_state *s = carve_state();
    struct carve_pointer block;
    bool last;
    if (CARVE_UNLIKELY(s == NULL || !carve_pointers_take(s, address, &block, &last))) {
        return call(d, address); /* not charged here: memory of pools, of other processes, nonsense */
    }
    CARVE_STEP("free-forgotten");
    CUresult result = call(d, address);
    CARVE_STEP("free-done");
    if (CARVE_LIKELY(result == CUDA_SUCCESS)) {
        carve_block_gone(s, &block, last);
        CARVE_STEP("free-given-back");
        return result;
    }
    struct carve_put put;
    if (!carve_pointers_put(s, &block, &put)) {
        return result; /* no memory to remember it: it stays charged */
    }
    if (put.stale.address != 0) {
        carve_block_gone(s, &put.stale, put.stale_last);
    }
    return result;
}

CARVE_EXPORT CUresult cuMemFree_v2(CUdeviceptr pointer) { return free_block(carve_driver(), pointer, free_v2); }

CARVE_EXPORT CUresult cuMemFree(CUdeviceptr_v1 pointer) { return free_block(carve_driver(), pointer, free_v1); }
