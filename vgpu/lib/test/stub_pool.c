/* SPDX-License-Identifier: Apache-2.0 */
/*
 * stub_pool.c: pools of the stub driver. A pool reserves in steps of 32 MiB, has no holes (the real one moves pages to
 * where they are needed), and gives back at synchronisation what is above its threshold.
 */
#include <string.h>

#include "stub.h"

enum { POOLS = 64, LIVE = 1 << 14 };
static const uint64_t step = 32u << 20, first = 0x600000000000u, apart = 1ull << 28;

struct CUmemPoolHandle_st {
    bool live, standard;
    int device;
    uint64_t used, reserved, threshold;
};
static struct CUmemPoolHandle_st pools[POOLS];
static CUmemoryPool current[STUB_DEVICES];
static struct { CUmemoryPool of; uint64_t bytes; } live[LIVE];
static uint32_t free_hint;

static uint64_t in_steps(uint64_t bytes) { return (bytes + step - 1) / step * step; }

static bool capturing(void) { return stub_books() != NULL && stub_books()->capturing != 0; }

static CUmemoryPool new_pool(int device, bool standard) {
    for (int i = 0; i < POOLS; i++) {
        if (!pools[i].live) {
            pools[i] = (struct CUmemPoolHandle_st){.live = true, .standard = standard, .device = device};
            return &pools[i];
        }
    }
    return NULL;
}

static CUmemoryPool standard_pool(int device) {
    for (int i = 0; i < POOLS; i++) {
        if (pools[i].live && pools[i].standard && pools[i].device == device) {
            return &pools[i];
        }
    }
    return new_pool(device, true);
}

static void trim(CUmemoryPool p, uint64_t keep) {
    uint64_t least = in_steps(p->used) > in_steps(keep) ? in_steps(p->used) : in_steps(keep);
    if (keep != UINT64_MAX && p->reserved > least) {
        stub_give(stub_card(p->device), p->reserved - least);
        p->reserved = least;
    }
}

static CUresult allocate(CUdeviceptr *out, uint64_t bytes, CUmemoryPool p) {
    if (out == NULL || bytes == 0 || p == NULL || !p->live) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    stub_lock();
    uint64_t rounded = (bytes + 511) / 512 * 512, more = p->used + rounded > p->reserved ? in_steps(p->used + rounded - p->reserved) : 0;
    struct stub_truth *books = stub_books();
    if (books != NULL && books->in_holes != 0) {
        books->in_holes--;
        more = in_steps(rounded); /* what is idle is in pieces that are too small */
    }
    if (capturing()) {
        rounded = more = 0;
    }
    uint32_t at = free_hint;
    while (at < LIVE && live[at].of != NULL) {
        at++;
    }
    if (at == LIVE || !stub_take(stub_card(p->device), more)) {
        stub_unlock();
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    p->reserved += more;
    p->used += rounded;
    live[at].of = p;
    live[at].bytes = rounded;
    free_hint = at + 1;
    *out = first + at * apart;
    stub_unlock();
    return CUDA_SUCCESS;
}

/* Also what cuMemFree is told to free; false where the address is none of these. */
bool stub_pool_free(uint64_t address, CUresult *result);
bool stub_pool_free(uint64_t address, CUresult *result) {
    uint64_t at = (address - first) / apart;
    if (address < first || at >= LIVE) {
        return false;
    }
    stub_lock();
    *result = live[at].of == NULL || (address - first) % apart != 0 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
    if (*result == CUDA_SUCCESS) {
        live[at].of->used -= live[at].bytes;
        live[at].of = NULL;
        free_hint = at < free_hint ? (uint32_t)at : free_hint;
    }
    stub_unlock();
    return true;
}

static CUresult synchronize(void) {
    stub_lock();
    for (int i = 0; i < POOLS; i++) {
        if (pools[i].live) {
            trim(&pools[i], pools[i].threshold);
        }
    }
    stub_unlock();
    return CUDA_SUCCESS;
}

CUresult cuStreamSynchronize(CUstream stream) { (void)stream; return synchronize(); }
CUresult cuStreamSynchronize_ptsz(CUstream stream) { (void)stream; return synchronize(); }
CUresult cuEventSynchronize(CUevent event) { (void)event; return synchronize(); }
CUresult cuCtxSynchronize(void) { return synchronize(); }
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
    (void)stream;
    *status = capturing() ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
    return CUDA_SUCCESS;
}
CUresult cuStreamIsCapturing_ptsz(CUstream stream, CUstreamCaptureStatus *status) { return cuStreamIsCapturing(stream, status); }

CUresult cuDeviceGetDefaultMemPool(CUmemoryPool *pool, CUdevice device) {
    if (stub_card(device) < 0) {
        return CUDA_ERROR_INVALID_DEVICE;
    }
    stub_lock();
    *pool = standard_pool(device);
    stub_unlock();
    return CUDA_SUCCESS;
}
CUresult cuDeviceGetMemPool(CUmemoryPool *pool, CUdevice device) {
    CUresult result = cuDeviceGetDefaultMemPool(pool, device);
    if (result == CUDA_SUCCESS && current[device] != NULL) {
        *pool = current[device];
    }
    return result;
}
CUresult cuDeviceSetMemPool(CUdevice device, CUmemoryPool pool) {
    if (stub_card(device) < 0 || pool == NULL || !pool->live || pool->device != device) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    current[device] = pool;
    return CUDA_SUCCESS;
}

CUresult cuMemAllocFromPoolAsync(CUdeviceptr *pointer, size_t bytes, CUmemoryPool pool, CUstream stream) {
    (void)stream;
    return allocate(pointer, bytes, pool);
}
CUresult cuMemAllocFromPoolAsync_ptsz(CUdeviceptr *pointer, size_t bytes, CUmemoryPool pool, CUstream stream) {
    return cuMemAllocFromPoolAsync(pointer, bytes, pool, stream);
}
CUresult cuMemAllocAsync(CUdeviceptr *pointer, size_t bytes, CUstream stream) {
    CUdevice device;
    CUmemoryPool pool;
    CUresult result = cuCtxGetDevice(&device);
    (void)stream;
    if (result == CUDA_SUCCESS) {
        result = cuDeviceGetMemPool(&pool, device);
    }
    return result == CUDA_SUCCESS ? allocate(pointer, bytes, pool) : result;
}
CUresult cuMemAllocAsync_ptsz(CUdeviceptr *pointer, size_t bytes, CUstream stream) { return cuMemAllocAsync(pointer, bytes, stream); }
CUresult cuMemFreeAsync(CUdeviceptr pointer, CUstream stream) { (void)stream; return cuMemFree_v2(pointer); }
CUresult cuMemFreeAsync_ptsz(CUdeviceptr pointer, CUstream stream) { return cuMemFreeAsync(pointer, stream); }

CUresult cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *properties) {
    if (pool == NULL || properties == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (stub_card(properties->location.id) < 0) {
        return CUDA_ERROR_INVALID_DEVICE;
    }
    stub_lock();
    *pool = new_pool(properties->location.id, false);
    stub_unlock();
    return *pool == NULL ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}
CUresult cuMemPoolDestroy(CUmemoryPool pool) {
    if (pool == NULL || !pool->live || pool->standard) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    stub_lock();
    pool->used = 0;
    trim(pool, 0);
    pool->live = false;
    for (int i = 0; i < STUB_DEVICES; i++) {
        current[i] = current[i] == pool ? NULL : current[i];
    }
    stub_unlock();
    return CUDA_SUCCESS;
}
CUresult cuMemPoolTrimTo(CUmemoryPool pool, size_t keep) {
    if (pool == NULL || !pool->live) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    stub_lock();
    trim(pool, keep);
    stub_unlock();
    return CUDA_SUCCESS;
}
CUresult cuMemPoolSetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute, void *value) {
    if (attribute == CU_MEMPOOL_ATTR_RELEASE_THRESHOLD) {
        memcpy(&pool->threshold, value, sizeof pool->threshold);
    }
    return CUDA_SUCCESS;
}
CUresult cuMemPoolGetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute, void *value) {
    const uint64_t *figure = attribute == CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT ? &pool->reserved
                             : attribute == CU_MEMPOOL_ATTR_USED_MEM_CURRENT   ? &pool->used
                                                                               : &pool->threshold;
    if (!pool->live) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    memcpy(value, figure, sizeof *figure);
    return CUDA_SUCCESS;
}

/* Gives back what pools of a device have, with its last context. */
void stub_pools_drop(int device);
void stub_pools_drop(int device) {
    for (int i = 0; i < POOLS; i++) {
        if (pools[i].live && pools[i].device == device) {
            pools[i].used = 0;
            trim(&pools[i], 0);
        }
    }
    for (int i = 0; i < LIVE; i++) {
        live[i].of = live[i].of != NULL && live[i].of->device == device ? NULL : live[i].of;
    }
    free_hint = 0;
}
