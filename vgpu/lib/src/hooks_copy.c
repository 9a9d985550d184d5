/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Hooks of copies within a card, and of memory that is set: the multiprocessors do that, or it takes the memory's whole
 * bandwidth from them, so it is paid like a launch, by what it takes. If a card's copy engines did it all the same, the
 * driver's word on what the process used gives that back.
 *
 * Copies from and to the host and between cards are the copy engines', at the pace of the bus: they aren't charged, and
 * their time between two events says nothing of the card's. So from some size on it is asked which card memory is on,
 * also where a call says that both ends are on one, or on two. Nor are those of the first functions, with addresses of 32
 * bits, and batches, of which each copy would have to be looked at.
 */
#include "throttle.h"

/* Of this size on it is asked where memory is. Less takes no time that matters: it is charged where a call says that it
 * is on a card, else not. */
#define ASK_FROM_BYTES (64u << 10)
/* The least that any card of today copies in a nanosecond: a first guess of what one takes. */
#define BYTES_A_NS 100u

enum what { SET, COPY, WHATS };
enum { OCTAVES = 64, STEPS = 4 };

/* What is copied or set in one go costs by its size: names for steps of a quarter of an octave. */
static const char names[WHATS][OCTAVES * STEPS];

static const void *name_of(enum what what, uint64_t bytes) {
    unsigned octave = 63u - (unsigned)__builtin_clzll(bytes | STEPS);
    return &names[what][octave * STEPS + ((bytes >> (octave - 2)) & (STEPS - 1))];
}

static inline void begin(const struct carve_driver *d, struct carve_state *s, enum what what, uint64_t bytes, CUstream stream, bool per_thread, struct carve_launch *launch) {
    launch->throttle = NULL;
    if (s != NULL && bytes != 0 && carve_compute_divided(s)) {
        carve_launch_wait(d, s, name_of(what, bytes), bytes / BYTES_A_NS + 1, stream, per_thread, false, launch);
    }
}

/* Bytes that are counted only where compute is divided. */
#define WORK(function, what, bytes, stream, per_thread, ...)                                          \
    const struct carve_driver *d = carve_driver();                                                    \
    struct carve_state *s = carve_state();                                                            \
    struct carve_launch launch;                                                                       \
    if (CARVE_UNLIKELY(d->function == NULL)) {                                                        \
        return CUDA_ERROR_NOT_SUPPORTED;                                                              \
    }                                                                                                 \
    begin(d, s, what, s != NULL && carve_compute_divided(s) ? (bytes) : 0, stream, per_thread, &launch); \
    CUresult result = d->function(__VA_ARGS__);                                                       \
    carve_launch_end(d, s, &launch, result);                                                          \
    return result

/* ---- memory that is set ---- */

#define SETS(bits, type)                                                                                                     \
    CARVE_EXPORT CUresult cuMemsetD##bits##_v2(CUdeviceptr pointer, type value, size_t count) {                               \
        WORK(cuMemsetD##bits##_v2, SET, (uint64_t)count * sizeof value, NULL, false, pointer, value, count);                 \
    }                                                                                                                        \
    CARVE_EXPORT CUresult cuMemsetD##bits##_v2_ptds(CUdeviceptr pointer, type value, size_t count) {                          \
        WORK(cuMemsetD##bits##_v2_ptds, SET, (uint64_t)count * sizeof value, NULL, true, pointer, value, count);             \
    }                                                                                                                        \
    CARVE_EXPORT CUresult cuMemsetD##bits##Async(CUdeviceptr pointer, type value, size_t count, CUstream stream) {            \
        WORK(cuMemsetD##bits##Async, SET, (uint64_t)count * sizeof value, stream, false, pointer, value, count, stream);     \
    }                                                                                                                        \
    CARVE_EXPORT CUresult cuMemsetD##bits##Async_ptsz(CUdeviceptr pointer, type value, size_t count, CUstream stream) {       \
        WORK(cuMemsetD##bits##Async_ptsz, SET, (uint64_t)count * sizeof value, stream, true, pointer, value, count, stream); \
    }                                                                                                                        \
    CARVE_EXPORT CUresult cuMemsetD2D##bits##_v2(CUdeviceptr pointer, size_t pitch, type value, size_t width, size_t height) { \
        WORK(cuMemsetD2D##bits##_v2, SET, (uint64_t)width * height * sizeof value, NULL, false, pointer, pitch, value, width, height); \
    }                                                                                                                        \
    CARVE_EXPORT CUresult cuMemsetD2D##bits##_v2_ptds(CUdeviceptr pointer, size_t pitch, type value, size_t width, size_t height) { \
        WORK(cuMemsetD2D##bits##_v2_ptds, SET, (uint64_t)width * height * sizeof value, NULL, true, pointer, pitch, value, width, height); \
    }                                                                                                                        \
    CARVE_EXPORT CUresult cuMemsetD2D##bits##Async(CUdeviceptr pointer, size_t pitch, type value, size_t width, size_t height, CUstream stream) { \
        WORK(cuMemsetD2D##bits##Async, SET, (uint64_t)width * height * sizeof value, stream, false, pointer, pitch, value, width, height, stream); \
    }                                                                                                                        \
    CARVE_EXPORT CUresult cuMemsetD2D##bits##Async_ptsz(CUdeviceptr pointer, size_t pitch, type value, size_t width, size_t height, CUstream stream) { \
        WORK(cuMemsetD2D##bits##Async_ptsz, SET, (uint64_t)width * height * sizeof value, stream, true, pointer, pitch, value, width, height, stream); \
    }

SETS(8, unsigned char)
SETS(16, unsigned short)
SETS(32, unsigned int)

/* ---- copies that say that they are on cards ---- */

static bool on_card(const struct carve_driver *d, CUdeviceptr pointer) {
    CUmemorytype type = 0;
    return d->cuPointerGetAttribute != NULL && d->cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, pointer) == CUDA_SUCCESS && type == CU_MEMORYTYPE_DEVICE;
}

/* The card that memory is on, or less than nothing. */
static int device_of(const struct carve_driver *d, CUdeviceptr pointer) {
    int device = -1;
    return d->cuPointerGetAttribute(&device, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, pointer) == CUDA_SUCCESS ? device : -1;
}

static bool one_card(const struct carve_driver *d, CUdeviceptr to, CUdeviceptr from) {
    int card = d->cuPointerGetAttribute == NULL ? -1 : device_of(d, to);
    return card >= 0 && card == device_of(d, from);
}

/* The bytes if memory that is on cards is on one, else none. */
static uint64_t on_one(const struct carve_driver *d, CUdeviceptr to, CUdeviceptr from, uint64_t bytes) {
    return bytes < ASK_FROM_BYTES || one_card(d, to, from) ? bytes : 0;
}

/* The bytes if both are on one card, else none. */
static uint64_t within(const struct carve_driver *d, CUdeviceptr to, CUdeviceptr from, uint64_t bytes) {
    return bytes >= ASK_FROM_BYTES && on_card(d, to) && on_card(d, from) && one_card(d, to, from) ? bytes : 0;
}

CARVE_EXPORT CUresult cuMemcpyDtoD_v2(CUdeviceptr destination, CUdeviceptr source, size_t bytes) {
    WORK(cuMemcpyDtoD_v2, COPY, on_one(d, destination, source, bytes), NULL, false, destination, source, bytes);
}
CARVE_EXPORT CUresult cuMemcpyDtoD_v2_ptds(CUdeviceptr destination, CUdeviceptr source, size_t bytes) {
    WORK(cuMemcpyDtoD_v2_ptds, COPY, on_one(d, destination, source, bytes), NULL, true, destination, source, bytes);
}
CARVE_EXPORT CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr destination, CUdeviceptr source, size_t bytes, CUstream stream) {
    WORK(cuMemcpyDtoDAsync_v2, COPY, on_one(d, destination, source, bytes), stream, false, destination, source, bytes, stream);
}
CARVE_EXPORT CUresult cuMemcpyDtoDAsync_v2_ptsz(CUdeviceptr destination, CUdeviceptr source, size_t bytes, CUstream stream) {
    WORK(cuMemcpyDtoDAsync_v2_ptsz, COPY, on_one(d, destination, source, bytes), stream, true, destination, source, bytes, stream);
}
CARVE_EXPORT CUresult cuMemcpyDtoA_v2(CUarray destination, size_t offset, CUdeviceptr source, size_t bytes) {
    WORK(cuMemcpyDtoA_v2, COPY, bytes, NULL, false, destination, offset, source, bytes);
}
CARVE_EXPORT CUresult cuMemcpyDtoA_v2_ptds(CUarray destination, size_t offset, CUdeviceptr source, size_t bytes) {
    WORK(cuMemcpyDtoA_v2_ptds, COPY, bytes, NULL, true, destination, offset, source, bytes);
}
CARVE_EXPORT CUresult cuMemcpyAtoD_v2(CUdeviceptr destination, CUarray source, size_t offset, size_t bytes) {
    WORK(cuMemcpyAtoD_v2, COPY, bytes, NULL, false, destination, source, offset, bytes);
}
CARVE_EXPORT CUresult cuMemcpyAtoD_v2_ptds(CUdeviceptr destination, CUarray source, size_t offset, size_t bytes) {
    WORK(cuMemcpyAtoD_v2_ptds, COPY, bytes, NULL, true, destination, source, offset, bytes);
}
CARVE_EXPORT CUresult cuMemcpyAtoA_v2(CUarray destination, size_t to, CUarray source, size_t from, size_t bytes) {
    WORK(cuMemcpyAtoA_v2, COPY, bytes, NULL, false, destination, to, source, from, bytes);
}
CARVE_EXPORT CUresult cuMemcpyAtoA_v2_ptds(CUarray destination, size_t to, CUarray source, size_t from, size_t bytes) {
    WORK(cuMemcpyAtoA_v2_ptds, COPY, bytes, NULL, true, destination, to, source, from, bytes);
}

/* ---- copies of which that has to be found out ---- */

CARVE_EXPORT CUresult cuMemcpy(CUdeviceptr destination, CUdeviceptr source, size_t bytes) {
    WORK(cuMemcpy, COPY, within(d, destination, source, bytes), NULL, false, destination, source, bytes);
}
CARVE_EXPORT CUresult cuMemcpy_ptds(CUdeviceptr destination, CUdeviceptr source, size_t bytes) {
    WORK(cuMemcpy_ptds, COPY, within(d, destination, source, bytes), NULL, true, destination, source, bytes);
}
CARVE_EXPORT CUresult cuMemcpyAsync(CUdeviceptr destination, CUdeviceptr source, size_t bytes, CUstream stream) {
    WORK(cuMemcpyAsync, COPY, within(d, destination, source, bytes), stream, false, destination, source, bytes, stream);
}
CARVE_EXPORT CUresult cuMemcpyAsync_ptsz(CUdeviceptr destination, CUdeviceptr source, size_t bytes, CUstream stream) {
    WORK(cuMemcpyAsync_ptsz, COPY, within(d, destination, source, bytes), stream, true, destination, source, bytes, stream);
}

/* Whose contexts may be on one card. */
CARVE_EXPORT CUresult cuMemcpyPeer(CUdeviceptr destination, CUcontext there, CUdeviceptr source, CUcontext here, size_t bytes) {
    WORK(cuMemcpyPeer, COPY, within(d, destination, source, bytes), NULL, false, destination, there, source, here, bytes);
}
CARVE_EXPORT CUresult cuMemcpyPeer_ptds(CUdeviceptr destination, CUcontext there, CUdeviceptr source, CUcontext here, size_t bytes) {
    WORK(cuMemcpyPeer_ptds, COPY, within(d, destination, source, bytes), NULL, true, destination, there, source, here, bytes);
}
CARVE_EXPORT CUresult cuMemcpyPeerAsync(CUdeviceptr destination, CUcontext there, CUdeviceptr source, CUcontext here, size_t bytes, CUstream stream) {
    WORK(cuMemcpyPeerAsync, COPY, within(d, destination, source, bytes), stream, false, destination, there, source, here, bytes, stream);
}
CARVE_EXPORT CUresult cuMemcpyPeerAsync_ptsz(CUdeviceptr destination, CUcontext there, CUdeviceptr source, CUcontext here, size_t bytes, CUstream stream) {
    WORK(cuMemcpyPeerAsync_ptsz, COPY, within(d, destination, source, bytes), stream, true, destination, there, source, here, bytes, stream);
}

static bool is_pointer(CUmemorytype type) { return type == CU_MEMORYTYPE_DEVICE || type == CU_MEMORYTYPE_UNIFIED; }

/* One end of a copy of a box. Where one is an array both are taken to be on its card. */
static bool end_on_card(const struct carve_driver *d, CUmemorytype type, CUdeviceptr pointer) {
    return type == CU_MEMORYTYPE_DEVICE || type == CU_MEMORYTYPE_ARRAY || (type == CU_MEMORYTYPE_UNIFIED && on_card(d, pointer));
}

#define BOX(copy, bytes)                                                                                                  \
    ((copy) != NULL && (bytes) >= ASK_FROM_BYTES && end_on_card(d, (copy)->srcMemoryType, (copy)->srcDevice) &&           \
             end_on_card(d, (copy)->dstMemoryType, (copy)->dstDevice) &&                                                  \
             (!is_pointer((copy)->srcMemoryType) || !is_pointer((copy)->dstMemoryType) ||                                 \
              one_card(d, (copy)->dstDevice, (copy)->srcDevice))                                                          \
         ? (bytes)                                                                                                        \
         : 0)
#define FLAT(copy) BOX(copy, (uint64_t)(copy)->WidthInBytes * (copy)->Height)
#define DEEP(copy) BOX(copy, (uint64_t)(copy)->WidthInBytes * (copy)->Height * (copy)->Depth)

CARVE_EXPORT CUresult cuMemcpy2D_v2(const CUDA_MEMCPY2D *copy) { WORK(cuMemcpy2D_v2, COPY, FLAT(copy), NULL, false, copy); }
CARVE_EXPORT CUresult cuMemcpy2D_v2_ptds(const CUDA_MEMCPY2D *copy) { WORK(cuMemcpy2D_v2_ptds, COPY, FLAT(copy), NULL, true, copy); }
CARVE_EXPORT CUresult cuMemcpy2DUnaligned_v2(const CUDA_MEMCPY2D *copy) { WORK(cuMemcpy2DUnaligned_v2, COPY, FLAT(copy), NULL, false, copy); }
CARVE_EXPORT CUresult cuMemcpy2DUnaligned_v2_ptds(const CUDA_MEMCPY2D *copy) { WORK(cuMemcpy2DUnaligned_v2_ptds, COPY, FLAT(copy), NULL, true, copy); }
CARVE_EXPORT CUresult cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D *copy, CUstream stream) { WORK(cuMemcpy2DAsync_v2, COPY, FLAT(copy), stream, false, copy, stream); }
CARVE_EXPORT CUresult cuMemcpy2DAsync_v2_ptsz(const CUDA_MEMCPY2D *copy, CUstream stream) { WORK(cuMemcpy2DAsync_v2_ptsz, COPY, FLAT(copy), stream, true, copy, stream); }
CARVE_EXPORT CUresult cuMemcpy3D_v2(const CUDA_MEMCPY3D *copy) { WORK(cuMemcpy3D_v2, COPY, DEEP(copy), NULL, false, copy); }
CARVE_EXPORT CUresult cuMemcpy3D_v2_ptds(const CUDA_MEMCPY3D *copy) { WORK(cuMemcpy3D_v2_ptds, COPY, DEEP(copy), NULL, true, copy); }
CARVE_EXPORT CUresult cuMemcpy3DAsync_v2(const CUDA_MEMCPY3D *copy, CUstream stream) { WORK(cuMemcpy3DAsync_v2, COPY, DEEP(copy), stream, false, copy, stream); }
CARVE_EXPORT CUresult cuMemcpy3DAsync_v2_ptsz(const CUDA_MEMCPY3D *copy, CUstream stream) { WORK(cuMemcpy3DAsync_v2_ptsz, COPY, DEEP(copy), stream, true, copy, stream); }
