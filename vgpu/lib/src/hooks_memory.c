/* SPDX-License-Identifier: Apache-2.0 */
/* Hooks of linear memory: charge first, then ask the driver, give back if it says no. */
#include "contexts.h"
#include "ledger.h"
#include "pointers.h"
#include "reserves.h"

/* What is asked of the driver. The forms of one function differ in make and give_back only. */
struct call {
    CUresult (*make)(const struct carve_driver *d, const struct call *call, uint64_t *address, uint64_t *pitch);
    CUresult (*give_back)(const struct carve_driver *d, uint64_t address);
    uint8_t kind;   /* CARVE_KIND_MANAGED or _COUNTED, or CARVE_KIND_WHOLE which may become a piece */
    bool may_be_managed; /* beyond the limit it may become managed memory, where the share allows that */
    uint64_t bytes; /* for pitched memory what is expected */
    uint64_t width, height;
    unsigned int element, flags;
    bool absurd; /* no driver takes it, whatever room there is */
};

/* A request on its way: where it goes and what is charged for it so far. */
struct request {
    struct carve_state *s;
    struct carve_pointer block; /* all but the address */
    uint32_t charged;
    bool may_be_managed, beyond; /* the latter: it doesn't fit, and is to become managed memory */
    bool serial; /* the account's slow lock is held: no other thread counts on the same hole */
};

enum begun { BEGUN, PASS, REFUSED };

/* Fills in where a request of the calling thread goes. */
static inline enum begun begin(const struct carve_driver *d, struct request *r) {
    r->s = carve_state();
    r->charged = 0;
    r->serial = r->beyond = false;
    r->block.place = 0;
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

static inline void end_serial(struct request *r) {
    if (CARVE_UNLIKELY(r->serial)) {
        carve_serial_end(r->s, r->block.card);
        r->serial = false;
    }
}

static inline void cancel(struct request *r) {
    end_serial(r);
    if (r->charged != 0 && r->block.kind == CARVE_KIND_PIECE) {
        carve_page_over(r->s, r->block.card);
    } else if (r->charged != 0) {
        carve_release(r->s, r->block.card, r->charged);
    }
    r->charged = 0;
}

static bool obtain(const struct carve_driver *d, struct request *r, uint64_t bytes) {
    r->beyond = r->may_be_managed && (carve_card_flags(r->s, r->block.card) & CARVE_CARD_OVERSELL) != 0;
    return carve_obtain_slowly(d, r->s, r->block.card, r->charged, bytes, !r->beyond);
}

/* There is no room for a page: looks for a hole in one at hand, and for either again as long as other threads make or
 * free pieces. */
static bool charge_piece_slowly(const struct carve_driver *d, struct request *r, uint64_t bytes, bool sure) {
    uint64_t deadline = carve_now() + CARVE_PIECES_WAIT_NS;
    for (unsigned round = 0;;) {
        uint32_t before, after;
        bool still = carve_pieces_still(r->s, r->block.card, &before);
        if (carve_try_page(r->s, r->block.card)) {
            return true;
        }
        CARVE_STEP("piece-refused");
        if (!sure) {
            carve_serial_begin(r->s, r->block.card);
            r->serial = true;
            if (carve_pointers_room(r->s, r->block.card, r->block.context, r->block.units)) {
                r->charged = 0;
                return true;
            }
            end_serial(r);
        }
        if ((still && carve_pieces_still(r->s, r->block.card, &after) && before == after) || carve_now() >= deadline) {
            break;
        }
        CARVE_STEP("piece-waits");
        carve_back_off(&round);
    }
    carve_page_begun(r->s, r->block.card);
    if (obtain(d, r, bytes)) {
        return true;
    }
    carve_page_refused(r->s, r->block.card);
    return false;
}

/* Charges a block before the driver is asked for it. A piece may need a new page, or fit in a hole of one at hand;
 * which of the two shows only in the address that the driver gives. So a page is charged, and given back if it
 * wasn't needed. Where there is no room for a page but there is a hole, the driver is asked without a charge,
 * unless sure. */
static inline bool charge(const struct carve_driver *d, struct request *r, uint8_t kind, uint64_t bytes, bool sure) {
    r->block.kind = kind;
    if (CARVE_UNLIKELY(kind == CARVE_KIND_COUNTED)) {
        r->block.units = carve_page_units(bytes);
        r->charged = 0;
        return carve_slot(r->s);
    }
    if (kind == CARVE_KIND_WHOLE && bytes <= CARVE_PIECE_MAX_BYTES) {
        r->block.kind = CARVE_KIND_PIECE;
        r->block.units = carve_units_up(bytes);
        r->charged = CARVE_PAGE_UNITS;
        if (CARVE_LIKELY(carve_try_page(r->s, r->block.card)) || charge_piece_slowly(d, r, bytes, sure)) {
            return true;
        }
    } else {
        r->block.units = carve_page_units(bytes);
        r->charged = r->block.units;
        if (CARVE_LIKELY(carve_try(r->s, r->block.card, r->charged)) || obtain(d, r, bytes)) {
            return true;
        }
    }
    r->charged = 0;
    return false;
}

/* Fits the charge to what the driver made of a pitched request; false where the larger size doesn't fit. */
static bool recharge(const struct carve_driver *d, struct request *r, uint8_t kind, uint64_t bytes) {
    if (r->block.kind == CARVE_KIND_PIECE && bytes <= CARVE_PIECE_MAX_BYTES) {
        r->block.units = carve_units_up(bytes); /* a page covers it */
        return true;
    }
    cancel(r);
    return charge(d, r, kind, bytes, true);
}

/* Asks the driver for what isn't charged, since it is taken to refuse it. One that doesn't gets it back. */
static CUresult make_uncharged(const struct carve_driver *d, const struct call *call) {
    uint64_t made = 0, pitch;
    CUresult result = call->make(d, call, &made, &pitch);
    if (result == CUDA_SUCCESS) {
        (void)call->give_back(d, made);
        result = CUDA_ERROR_OUT_OF_MEMORY;
    }
    return result;
}

/* So often a request counts on a hole that others get. */
enum { MOST_HOLES = 64 };

enum kept { KEPT, NOT_KEPT, AGAIN };

/* The driver gave the block: keeps it with its charge. Otherwise gives it back: because there is no memory to
 * remember it, or because it took a page that isn't charged; then the request is made again, with a page. */
static inline enum kept keep(const struct carve_driver *d, const struct call *call, struct request *r, uint64_t address) {
    struct carve_put put;
    r->block.address = address;
    if (CARVE_UNLIKELY(!carve_pointers_put(r->s, &r->block, &put))) {
        (void)call->give_back(d, address);
        cancel(r);
        return NOT_KEPT;
    }
    if (CARVE_UNLIKELY(put.stale.address != 0)) {
        end_serial(r);
        carve_block_gone(r->s, &put.stale, put.stale_last);
    }
    if (r->block.kind != CARVE_KIND_PIECE) {
        return KEPT;
    }
    if (!put.first_of_page) {
        if (CARVE_LIKELY(r->charged != 0)) {
            carve_page_over(r->s, r->block.card);
        }
        end_serial(r);
        return KEPT;
    }
    if (CARVE_LIKELY(r->charged != 0) || carve_try_page(r->s, r->block.card)) {
        end_serial(r);
        return KEPT;
    }
    struct carve_pointer block;
    if (carve_pointers_take_now(r->s, address, &block)) {
        (void)call->give_back(d, address);
        /* If another thread has had a piece of the same new page meanwhile, the page stays taken, and is charged
         * though it doesn't fit. */
        if (!carve_pointers_gone(r->s, &block)) {
            carve_page_begun(r->s, block.card);
            carve_correct(r->s, block.card, CARVE_PAGE_UNITS);
        }
    }
    end_serial(r);
    return AGAIN;
}

static uint64_t pitched_bytes(uint64_t pitch, uint64_t height) {
    uint64_t bytes;
    return __builtin_mul_overflow(pitch, height, &bytes) ? UINT64_MAX : bytes;
}

static CUresult free_v2(const struct carve_driver *d, uint64_t address);
static CUresult make_managed(const struct carve_driver *d, const struct call *call, uint64_t *address, uint64_t *pitch);

/* A block that doesn't fit, in a share that may be oversold: managed memory, which is counted. */
static CUresult beyond(const struct carve_driver *d, struct request *r, uint64_t bytes, uint64_t *address) {
    const struct call call = {.make = make_managed, .give_back = free_v2, .bytes = bytes, .flags = CU_MEM_ATTACH_GLOBAL};
    uint64_t made = 0, pitch;
    if (d->cuMemAllocManaged == NULL || !charge(d, r, CARVE_KIND_COUNTED, bytes, true)) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    CUresult result = make_managed(d, &call, &made, &pitch);
    if (result != CUDA_SUCCESS) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (keep(d, &call, r, made) != KEPT) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *address = made;
    return CUDA_SUCCESS;
}

/* The frame of all hooks that allocate. PASS means that the driver is to be asked as it is. */
static inline CUresult allocate(const struct carve_driver *d, const struct call *call, uint64_t *address, uint64_t *pitch) {
    struct request r;
    enum begun begun = begin(d, &r);
    if (CARVE_UNLIKELY(begun == PASS)) {
        return call->make(d, call, address, pitch);
    }
    if (CARVE_UNLIKELY(begun == REFUSED)) {
        return r.s == NULL ? carve_without_files(d, CUDA_ERROR_OUT_OF_MEMORY) : carve_told(d, -1, CUDA_ERROR_OUT_OF_MEMORY);
    }
    r.may_be_managed = call->may_be_managed;
    for (int tries = 0;; tries++) {
        uint64_t made = 0, real_pitch = 0;
        if (CARVE_UNLIKELY(!charge(d, &r, call->kind, call->bytes, tries >= MOST_HOLES))) {
            return carve_told(d, -1, r.beyond ? beyond(d, &r, call->bytes, address) : call->absurd ? make_uncharged(d, call) : CUDA_ERROR_OUT_OF_MEMORY);
        }
        CARVE_STEP("alloc-charged");
        CUresult result = call->make(d, call, &made, &real_pitch);
        CARVE_STEP("alloc-done");
        if (CARVE_UNLIKELY(result != CUDA_SUCCESS)) {
            cancel(&r);
            return result;
        }
        if (call->height != 0) {
            uint64_t real = pitched_bytes(real_pitch, call->height);
            if (real != call->bytes && !recharge(d, &r, call->kind, real)) {
                (void)call->give_back(d, made);
                return CUDA_ERROR_OUT_OF_MEMORY;
            }
        }
        enum kept kept = keep(d, call, &r, made);
        if (CARVE_LIKELY(kept == KEPT)) {
            *address = made;
            *pitch = real_pitch;
            return CUDA_SUCCESS;
        }
        if (kept == NOT_KEPT) {
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
    }
}

/* ---- the driver's forms ---- */

static CUresult free_v1(const struct carve_driver *d, uint64_t address) {
    return d->cuMemFree == NULL ? CUDA_ERROR_NOT_SUPPORTED : d->cuMemFree((CUdeviceptr_v1)address);
}

static CUresult free_v2(const struct carve_driver *d, uint64_t address) {
    return d->cuMemFree_v2 == NULL ? CUDA_ERROR_NOT_SUPPORTED : d->cuMemFree_v2(address);
}

static CUresult make_v1(const struct carve_driver *d, const struct call *call, uint64_t *address, uint64_t *pitch) {
    CUdeviceptr_v1 made = 0;
    CUresult result = d->cuMemAlloc(&made, (unsigned int)call->bytes);
    (void)pitch;
    *address = made;
    return result;
}

static CUresult make_v2(const struct carve_driver *d, const struct call *call, uint64_t *address, uint64_t *pitch) {
    CUdeviceptr made = 0;
    CUresult result = d->cuMemAlloc_v2(&made, call->bytes);
    (void)pitch;
    *address = made;
    return result;
}

static CUresult make_managed(const struct carve_driver *d, const struct call *call, uint64_t *address, uint64_t *pitch) {
    CUdeviceptr made = 0;
    CUresult result = d->cuMemAllocManaged(&made, call->bytes, call->flags);
    (void)pitch;
    *address = made;
    return result;
}

static CUresult make_pitch_v1(const struct carve_driver *d, const struct call *call, uint64_t *address, uint64_t *pitch) {
    CUdeviceptr_v1 made = 0;
    unsigned int chosen = 0;
    CUresult result = d->cuMemAllocPitch(&made, &chosen, (unsigned int)call->width, (unsigned int)call->height, call->element);
    *address = made;
    *pitch = chosen;
    return result;
}

static CUresult make_pitch_v2(const struct carve_driver *d, const struct call *call, uint64_t *address, uint64_t *pitch) {
    CUdeviceptr made = 0;
    size_t chosen = 0;
    CUresult result = d->cuMemAllocPitch_v2(&made, &chosen, call->width, call->height, call->element);
    *address = made;
    *pitch = chosen;
    return result;
}

/* ---- hooks ---- */

/* Arguments that no driver takes are the driver's to refuse. */

CARVE_EXPORT CUresult cuMemAlloc_v2(CUdeviceptr *pointer, size_t bytes) {
    const struct carve_driver *d = carve_driver();
    if (CARVE_UNLIKELY(d->cuMemAlloc_v2 == NULL)) {
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    if (CARVE_UNLIKELY(pointer == NULL || bytes == 0)) {
        return d->cuMemAlloc_v2(pointer, bytes);
    }
    const struct call call = {.make = make_v2, .give_back = free_v2, .kind = CARVE_KIND_WHOLE, .may_be_managed = true, .bytes = bytes};
    uint64_t address, pitch;
    CUresult result = allocate(d, &call, &address, &pitch);
    if (CARVE_LIKELY(result == CUDA_SUCCESS)) {
        *pointer = address;
    }
    return result;
}

CARVE_EXPORT CUresult cuMemAlloc(CUdeviceptr_v1 *pointer, unsigned int bytes) {
    const struct carve_driver *d = carve_driver();
    if (d->cuMemAlloc == NULL) {
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    if (pointer == NULL || bytes == 0) {
        return d->cuMemAlloc(pointer, bytes);
    }
    const struct call call = {.make = make_v1, .give_back = free_v1, .kind = CARVE_KIND_WHOLE, .bytes = bytes};
    uint64_t address, pitch;
    CUresult result = allocate(d, &call, &address, &pitch);
    if (result == CUDA_SUCCESS) {
        *pointer = (CUdeviceptr_v1)address;
    }
    return result;
}

/* The driver chooses the pitch; today's cards align it to 512 bytes. The request is charged for that and corrected
 * once the real one is known. */
static uint64_t expected_bytes(uint64_t width, uint64_t height) {
    return width > UINT64_MAX - 511 ? UINT64_MAX : pitched_bytes((width + 511) & ~(uint64_t)511, height);
}

/* The largest pitch of any card is less than 2^31. */
static bool absurd_pitch(uint64_t width, unsigned int element) { return width > INT32_MAX || (element != 4 && element != 8 && element != 16); }

CARVE_EXPORT CUresult cuMemAllocPitch_v2(CUdeviceptr *pointer, size_t *pitch, size_t width, size_t height,
                                         unsigned int element) {
    const struct carve_driver *d = carve_driver();
    if (d->cuMemAllocPitch_v2 == NULL) {
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    if (pointer == NULL || pitch == NULL || width == 0 || height == 0) {
        return d->cuMemAllocPitch_v2(pointer, pitch, width, height, element);
    }
    const struct call call = {.make = make_pitch_v2, .give_back = free_v2, .kind = CARVE_KIND_WHOLE,
                              .bytes = expected_bytes(width, height), .width = width, .height = height, .element = element,
                              .absurd = absurd_pitch(width, element)};
    uint64_t address, chosen;
    CUresult result = allocate(d, &call, &address, &chosen);
    if (result == CUDA_SUCCESS) {
        *pointer = address;
        *pitch = chosen;
    }
    return result;
}

CARVE_EXPORT CUresult cuMemAllocPitch(CUdeviceptr_v1 *pointer, unsigned int *pitch, unsigned int width,
                                      unsigned int height, unsigned int element) {
    const struct carve_driver *d = carve_driver();
    if (d->cuMemAllocPitch == NULL) {
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    if (pointer == NULL || pitch == NULL || width == 0 || height == 0) {
        return d->cuMemAllocPitch(pointer, pitch, width, height, element);
    }
    const struct call call = {.make = make_pitch_v1, .give_back = free_v1, .kind = CARVE_KIND_WHOLE,
                              .bytes = expected_bytes(width, height), .width = width, .height = height, .element = element,
                              .absurd = absurd_pitch(width, element)};
    uint64_t address, chosen;
    CUresult result = allocate(d, &call, &address, &chosen);
    if (result == CUDA_SUCCESS) {
        *pointer = (CUdeviceptr_v1)address;
        *pitch = (unsigned int)chosen;
    }
    return result;
}

/* Charged in full though the driver may keep part of it on the host: all of it can be on the card at once. Unless the
 * share's policy is another one. */
CARVE_EXPORT CUresult cuMemAllocManaged(CUdeviceptr *pointer, size_t bytes, unsigned int flags) {
    const struct carve_driver *d = carve_driver();
    if (d->cuMemAllocManaged == NULL) {
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    if (pointer == NULL || bytes == 0) {
        return d->cuMemAllocManaged(pointer, bytes, flags);
    }
    uint8_t kind = CARVE_KIND_MANAGED;
    struct carve_state *s = carve_state();
    struct carve_place place;
    if (s != NULL && carve_current(d, s, &place) == CARVE_HERE) {
        uint32_t policy = carve_card_flags(s, place.card);
        if ((policy & CARVE_CARD_MANAGED_FORBID) != 0) {
            return CUDA_ERROR_NOT_SUPPORTED;
        }
        kind = (policy & CARVE_CARD_MANAGED_COUNT) != 0 ? CARVE_KIND_COUNTED : CARVE_KIND_MANAGED;
    }
    const struct call call = {.make = make_managed, .give_back = free_v2, .kind = kind, .bytes = bytes, .flags = flags,
                              .absurd = flags != CU_MEM_ATTACH_GLOBAL && flags != CU_MEM_ATTACH_HOST};
    uint64_t address, pitch;
    CUresult result = allocate(d, &call, &address, &pitch);
    if (result == CUDA_SUCCESS) {
        *pointer = address;
    }
    return result;
}

/* ---- free ---- */

/* The block is forgotten before the driver frees it, for at that moment another thread may be given the same
 * address; its charge is given back after, for until then the memory is taken. */
static inline CUresult free_block(const struct carve_driver *d, uint64_t address,
                                  CUresult (*call)(const struct carve_driver *, uint64_t)) {
    struct carve_state *s = carve_state();
    struct carve_pointer block;
    if (CARVE_UNLIKELY(s == NULL || !carve_pointers_take_now(s, address, &block))) {
        /* Not charged by address: memory of pools (cases vgpu-6, vgpu-7), of other processes, nonsense. */
        CUresult result = call(d, address);
        carve_reserves_follow(d);
        return result;
    }
    CARVE_STEP("free-forgotten");
    CUresult result = call(d, address);
    CARVE_STEP("free-done");
    if (CARVE_LIKELY(result == CUDA_SUCCESS)) {
        carve_block_gone(s, &block, carve_pointers_gone(s, &block));
        CARVE_STEP("free-given-back");
    } else {
        (void)carve_pointers_restore(s, &block); /* without memory for that it stays charged */
    }
    return result;
}

CARVE_EXPORT CUresult cuMemFree_v2(CUdeviceptr pointer) { return free_block(carve_driver(), pointer, free_v2); }

CARVE_EXPORT CUresult cuMemFree(CUdeviceptr_v1 pointer) { return free_block(carve_driver(), pointer, free_v1); }
