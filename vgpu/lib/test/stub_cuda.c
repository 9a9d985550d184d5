/* SPDX-License-Identifier: Apache-2.0 */
/*
 * stub_cuda.c: a driver that does next to nothing, for the benchmarks, and for tests that kill processes at
 * every step and then look at what the cards really held. It rounds as the real one does. Without a truth
 * file it keeps no books, so that what it costs is as little as can be.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "cuda_abi.h"
#include "cuda_hooks.h"
#include "stub.h"

enum { PAGE_SHIFT = 21, PAGES = 1 << 21, CONTEXTS = 64, MANAGED = 1, PIECES = 2 };

struct CUctx_st {
    CUdevice device;
    bool live;
    bool primary;
    int users;
    CUcontext stands_for; /* a green context's: the primary one */
};

static const uint64_t base = 0x700000000000u;
static struct stub_truth *truth;
static CUdevice visible[STUB_DEVICES];
static int device_count;
static struct CUctx_st contexts[CONTEXTS];
static __thread CUcontext current, pushed;

static uint32_t lock_word;
static uint32_t next_page = 1;
static uint32_t free_pages, free_list[1 << 16];
/* by page: its block's length in pages, context and kind, or how many pieces live in it */
static uint32_t block_pages[PAGES];
static uint8_t block_kind[PAGES], block_context[PAGES];
static uint32_t pieces[PAGES];
/* pages that are cut in pieces: which units are taken, and the length of the piece that starts there */
static struct cut { uint32_t page; uint64_t taken[64]; uint16_t length[4096]; } cuts[2048];
static uint32_t cut_count;

static void lock(void) {
    while (__atomic_exchange_n(&lock_word, 1, __ATOMIC_ACQUIRE) != 0) {
        __asm__ volatile("" ::: "memory");
    }
}
static void unlock(void) { __atomic_store_n(&lock_word, 0, __ATOMIC_RELEASE); }
void stub_lock(void) { lock(); }
void stub_unlock(void) { unlock(); }
struct stub_truth *stub_books(void) { return truth; }
int stub_card(CUdevice device) { return device >= 0 && device < device_count ? visible[device] : -1; }
bool stub_pool_free(uint64_t address, CUresult *result);
void stub_pools_drop(int device);

/* ---- the books ---- */

static bool take(int card, uint64_t bytes) {
    if (truth == NULL || bytes == 0) {
        return true;
    }
    __atomic_fetch_add(&truth->calls, 1, __ATOMIC_RELAXED);
    uint64_t left = __atomic_load_n(&truth->refuse_next, __ATOMIC_RELAXED);
    while (left != 0) {
        if (__atomic_compare_exchange_n(&truth->refuse_next, &left, left - 1, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
            return false;
        }
    }
    uint64_t now = __atomic_add_fetch(&truth->used[card], bytes, __ATOMIC_SEQ_CST);
    if (now > truth->total_bytes) {
        __atomic_sub_fetch(&truth->used[card], bytes, __ATOMIC_SEQ_CST);
        return false;
    }
    __atomic_add_fetch(&truth->by_process[getpid() % STUB_PROCESSES][card], bytes, __ATOMIC_SEQ_CST);
    uint64_t peak = __atomic_load_n(&truth->peak[card], __ATOMIC_SEQ_CST);
    while (now > peak && !__atomic_compare_exchange_n(&truth->peak[card], &peak, now, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
    }
    return true;
}

static void give(int card, uint64_t bytes) {
    if (truth != NULL && bytes != 0) {
        __atomic_fetch_add(&truth->calls, 1, __ATOMIC_RELAXED);
        __atomic_sub_fetch(&truth->used[card], bytes, __ATOMIC_SEQ_CST);
        __atomic_sub_fetch(&truth->by_process[getpid() % STUB_PROCESSES][card], bytes, __ATOMIC_SEQ_CST);
    }
}

bool stub_take(int card, uint64_t bytes) { return take(card, bytes); }
void stub_give(int card, uint64_t bytes) { give(card, bytes); }

/* ---- start ---- */

CUresult cuInit(unsigned int flags) {
    (void)flags;
    if (device_count != 0) {
        return CUDA_SUCCESS;
    }
    int fd = open(STUB_TRUTH_AT, O_RDWR | O_CLOEXEC);
    if (fd >= 0) {
        void *at = mmap(NULL, sizeof *truth, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        truth = at == MAP_FAILED ? NULL : at;
        close(fd);
    }
    int all = truth == NULL ? 1 : (int)truth->devices;
    const char *wanted = getenv("CUDA_VISIBLE_DEVICES");
    for (int i = 0; wanted == NULL && i < all; i++) {
        visible[device_count++] = i;
    }
    while (wanted != NULL && *wanted != '\0' && device_count < all) {
        visible[device_count++] = (int)strtol(wanted, (char **)&wanted, 10);
        wanted += *wanted == ',';
    }
    return CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int *version) { *version = 12040; return CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int *count) { *count = device_count; return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    *device = ordinal;
    return ordinal >= 0 && ordinal < device_count ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}
CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) {
    if (device < 0 || device >= device_count) {
        return CUDA_ERROR_INVALID_DEVICE;
    }
    memset(uuid, 0x11, sizeof *uuid);
    if (truth != NULL) {
        memcpy(uuid, truth->uuid[visible[device]], sizeof *uuid);
    }
    return CUDA_SUCCESS;
}
/* Whether a context can be held to some multiprocessors: under MPS only. */
CUresult cuDeviceGetExecAffinitySupport(int *supported, int type, CUdevice device) {
    if (stub_card(device) < 0) {
        return CUDA_ERROR_INVALID_DEVICE;
    }
    *supported = type == 0 && truth != NULL && truth->mps_client != 0;
    return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    if (stub_card(device) < 0 || attribute != CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT || truth == NULL || truth->multiprocessors == 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *value = (int)truth->multiprocessors;
    return CUDA_SUCCESS;
}
CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device) { return cuDeviceGetUuid_v2(uuid, device); }
CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device) {
    if (bytes == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *bytes = truth == NULL ? 1ull << 40 : truth->total_bytes;
    return device >= 0 && device < device_count ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}
CUresult cuDeviceTotalMem(unsigned int *bytes, CUdevice device) {
    size_t wide;
    CUresult result = cuDeviceTotalMem_v2(&wide, device);
    *bytes = wide > UINT32_MAX ? UINT32_MAX : (unsigned int)wide;
    return result;
}

/* ---- contexts ---- */

static bool others_on(CUcontext ctx) {
    for (int i = 0; i < CONTEXTS; i++) {
        if (&contexts[i] != ctx && contexts[i].live && contexts[i].device == ctx->device) {
            return true;
        }
    }
    return false;
}

static CUresult make(CUcontext *out, CUdevice device, bool primary) {
    if (device < 0 || device >= device_count) {
        return CUDA_ERROR_INVALID_DEVICE;
    }
    for (int i = 0; i < CONTEXTS; i++) {
        if (!contexts[i].live) {
            CUcontext ctx = &contexts[i];
            *ctx = (struct CUctx_st){.device = device, .primary = primary, .users = 1};
            if (truth != NULL && !others_on(ctx) && !take(visible[device], truth->context_bytes)) {
                return CUDA_ERROR_OUT_OF_MEMORY;
            }
            ctx->live = true;
            *out = ctx;
            return CUDA_SUCCESS;
        }
    }
    return CUDA_ERROR_OUT_OF_MEMORY;
}

static void drop(CUcontext ctx) {
    unsigned index = (unsigned)(ctx - contexts);
    for (uint32_t p = 1; p < next_page; p++) {
        if (block_context[p] == index && (block_pages[p] != 0 || pieces[p] != 0)) {
            give(visible[ctx->device], block_kind[p] == MANAGED ? 0 : (uint64_t)(pieces[p] != 0 ? 1 : block_pages[p]) << PAGE_SHIFT);
            block_pages[p] = pieces[p] = 0;
        }
    }
    for (uint32_t i = 0; i < cut_count; i++) {
        cuts[i].page = cuts[i].page != 0 && block_context[cuts[i].page] == index ? 0 : cuts[i].page;
    }
    ctx->live = false;
    if (!others_on(ctx)) {
        stub_pools_drop(ctx->device);
    }
    if (truth != NULL && !others_on(ctx)) {
        give(visible[ctx->device], truth->context_bytes);
    }
    current = current == ctx ? NULL : current;
}

CUresult cuCtxCreate_v2(CUcontext *context, unsigned int flags, CUdevice device) {
    (void)flags;
    CUresult result = context == NULL ? CUDA_ERROR_INVALID_VALUE : make(context, device, false);
    current = result == CUDA_SUCCESS ? *context : current;
    return result;
}
CUresult cuCtxCreate(CUcontext *context, unsigned int flags, CUdevice device) { return cuCtxCreate_v2(context, flags, device); }
CUresult cuCtxCreate_v3(CUcontext *context, CUexecAffinityParam *params, int count, unsigned int flags, CUdevice device) {
    (void)params, (void)count;
    return cuCtxCreate_v2(context, flags, device);
}
/* There is no cuCtxCreate_v4: the front has a hook that this driver lacks. */
CUresult cuCtxDestroy_v2(CUcontext context) {
    if (context == NULL || !context->live || context->primary) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    drop(context);
    return CUDA_SUCCESS;
}
CUresult cuCtxDestroy(CUcontext context) { return cuCtxDestroy_v2(context); }
CUresult cuCtxSetCurrent(CUcontext context) { current = context; return CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext *context) { *context = current; return CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice *device) {
    if (current == NULL) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    *device = current->device;
    return CUDA_SUCCESS;
}

static CUcontext primary_of(CUdevice device) {
    for (int i = 0; i < CONTEXTS; i++) {
        if (contexts[i].live && contexts[i].primary && contexts[i].device == device) {
            return &contexts[i];
        }
    }
    return NULL;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    CUcontext ctx = primary_of(device);
    if (ctx == NULL) {
        return make(context, device, true);
    }
    ctx->users++;
    *context = ctx;
    return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    CUcontext ctx = primary_of(device);
    if (ctx == NULL) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    if (--ctx->users == 0) {
        drop(ctx);
    }
    return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRelease(CUdevice device) { return cuDevicePrimaryCtxRelease_v2(device); }
CUresult cuDevicePrimaryCtxReset_v2(CUdevice device) {
    CUcontext ctx = primary_of(device);
    if (ctx != NULL) {
        drop(ctx);
    }
    return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxReset(CUdevice device) { return cuDevicePrimaryCtxReset_v2(device); }
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned int *flags, int *active) {
    *flags = 0;
    *active = primary_of(device) != NULL;
    return CUDA_SUCCESS;
}

CUresult cuCtxAttach(CUcontext *context, unsigned int flags) {
    (void)flags;
    if (current == NULL) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    current->users++;
    *context = current;
    return CUDA_SUCCESS;
}
CUresult cuCtxDetach(CUcontext context) {
    if (context == NULL || !context->live) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    if (--context->users == 0) {
        drop(context);
    }
    return CUDA_SUCCESS;
}
CUresult cuCtxPushCurrent_v2(CUcontext context) {
    pushed = current;
    current = context;
    return CUDA_SUCCESS;
}
CUresult cuCtxPopCurrent_v2(CUcontext *context) {
    *context = current;
    current = pushed;
    return CUDA_SUCCESS;
}

/* A green context is a use of the primary one, and a name for it. */
struct CUgreenCtx_st { struct CUctx_st name; };
static struct CUgreenCtx_st green_ones[8];
CUresult cuGreenCtxCreate(CUgreenCtx *green, void *resources, CUdevice device, unsigned int flags) {
    CUcontext primary;
    (void)resources, (void)flags;
    if (green == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    CUresult result = cuDevicePrimaryCtxRetain(&primary, device);
    for (int i = 0; result == CUDA_SUCCESS && i < 8; i++) {
        if (!green_ones[i].name.live) {
            green_ones[i].name = (struct CUctx_st){.device = device, .live = true, .stands_for = primary};
            *green = &green_ones[i];
            return CUDA_SUCCESS;
        }
    }
    return result;
}
CUresult cuCtxFromGreenCtx(CUcontext *context, CUgreenCtx green) {
    *context = &green->name;
    return CUDA_SUCCESS;
}
CUresult cuGreenCtxDestroy(CUgreenCtx green) {
    green->name.live = false;
    current = current == &green->name ? NULL : current;
    return cuDevicePrimaryCtxRelease_v2(green->name.device);
}

/* ---- memory ---- */

static bool unit_taken(const struct cut *c, uint32_t u) { return (c->taken[u / 64] >> (u % 64) & 1) != 0; }

/* Cuts a piece from the first hole that is large enough; its first unit, or -1. */
static int cut_piece(struct cut *c, uint32_t units) {
    uint32_t run = 0;
    for (uint32_t u = 0; u < 4096; u++) {
        if (u % 64 == 0 && c->taken[u / 64] == UINT64_MAX) {
            run = 0;
            u += 63;
            continue;
        }
        run = unit_taken(c, u) ? 0 : run + 1;
        if (run == units) {
            uint32_t first = u + 1 - units;
            for (uint32_t k = first; k <= u; k++) {
                c->taken[k / 64] |= (uint64_t)1 << (k % 64);
            }
            c->length[first] = (uint16_t)units;
            return (int)first;
        }
    }
    return -1;
}

static void mend_piece(uint32_t page, uint64_t address) {
    for (uint32_t i = 0; i < cut_count; i++) {
        if (cuts[i].page == page) {
            uint32_t first = (uint32_t)(address & ((1u << PAGE_SHIFT) - 1)) / 512;
            for (uint32_t k = first; k < first + cuts[i].length[first]; k++) {
                cuts[i].taken[k / 64] &= ~((uint64_t)1 << (k % 64));
            }
            if (pieces[page] == 0) {
                cuts[i].page = 0;
            }
            return;
        }
    }
}

static CUresult allocate(CUdeviceptr *out, uint64_t bytes, uint8_t kind) {
    if (out == NULL || bytes == 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (current == NULL) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    unsigned index = (unsigned)((current->stands_for != NULL ? current->stands_for : current) - contexts);
    int card = visible[current->device];
    lock();
    if (kind == PIECES && bytes <= 1 << 20) {
        uint32_t units = (uint32_t)((bytes + 511) / 512), i = 0;
        int first = -1;
        for (i = 0; i < cut_count; i++) {
            if (cuts[i].page != 0 && block_context[cuts[i].page] == index && (first = cut_piece(&cuts[i], units)) >= 0) {
                break;
            }
        }
        if (first < 0) {
            for (i = 0; i < cut_count && cuts[i].page != 0; i++) {
            }
            if (i == sizeof cuts / sizeof cuts[0] || !take(card, 1u << PAGE_SHIFT)) {
                unlock();
                return CUDA_ERROR_OUT_OF_MEMORY;
            }
            cut_count += i == cut_count;
            memset(cuts[i].taken, 0, sizeof cuts[i].taken);
            cuts[i].page = free_pages != 0 ? free_list[--free_pages] : next_page++;
            block_kind[cuts[i].page] = PIECES;
            block_context[cuts[i].page] = (uint8_t)index;
            first = cut_piece(&cuts[i], units);
        }
        pieces[cuts[i].page]++;
        *out = base + ((uint64_t)cuts[i].page << PAGE_SHIFT) + (uint64_t)first * 512;
    } else {
        uint64_t pages = (bytes + (1u << PAGE_SHIFT) - 1) >> PAGE_SHIFT;
        if (pages > PAGES / 2 || next_page + pages > PAGES || (kind != MANAGED && !take(card, pages << PAGE_SHIFT))) {
            unlock();
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
        uint32_t page = next_page;
        if (pages == 1 && free_pages != 0) {
            page = free_list[--free_pages];
        } else {
            next_page += (uint32_t)pages;
        }
        block_pages[page] = (uint32_t)pages;
        block_kind[page] = kind;
        block_context[page] = (uint8_t)index;
        *out = base + ((uint64_t)page << PAGE_SHIFT);
    }
    unlock();
    return CUDA_SUCCESS;
}

static CUresult release(uint64_t address) {
    uint64_t page = (address - base) >> PAGE_SHIFT;
    if (address == 0) {
        return CUDA_SUCCESS;
    }
    if (current == NULL) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    CUresult result;
    if (stub_pool_free(address, &result)) {
        return result;
    }
    lock();
    if (address < base || page >= next_page || (block_pages[page] == 0 && pieces[page] == 0)) {
        unlock();
        return CUDA_ERROR_INVALID_VALUE;
    }
    int card = visible[contexts[block_context[page]].device];
    uint64_t gone = block_pages[page];
    if (pieces[page] != 0) {
        gone = --pieces[page] == 0 ? 1 : 0;
        mend_piece((uint32_t)page, address);
    } else {
        block_pages[page] = 0;
    }
    if (gone > 1 && page + gone == next_page) {
        next_page = (uint32_t)page; /* enough for a program that holds a few blocks for a short time */
    } else if (gone == 1 && free_pages < sizeof free_list / sizeof free_list[0]) {
        free_list[free_pages++] = (uint32_t)page;
    }
    give(card, block_kind[page] == MANAGED ? 0 : gone << PAGE_SHIFT);
    unlock();
    return CUDA_SUCCESS;
}

CUresult cuMemAlloc_v2(CUdeviceptr *pointer, size_t bytes) { return allocate(pointer, bytes, PIECES); }
CUresult cuMemAllocManaged(CUdeviceptr *pointer, size_t bytes, unsigned int flags) {
    return flags == 0 ? CUDA_ERROR_INVALID_VALUE : allocate(pointer, bytes, MANAGED);
}
CUresult cuMemAllocPitch_v2(CUdeviceptr *pointer, size_t *pitch, size_t width, size_t height, unsigned int element) {
    /* Elements of 16 bytes get wider rows than others, so that the front's guess can be wrong. */
    size_t step = element == 16 ? 4096 : 512;
    *pitch = (width + step - 1) / step * step;
    return allocate(pointer, *pitch * height, PIECES);
}
CUresult cuMemFree_v2(CUdeviceptr pointer) { return release(pointer); }
CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes) {
    if (current == NULL) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    *total_bytes = truth == NULL ? 1ull << 40 : truth->total_bytes;
    *free_bytes = *total_bytes - (truth == NULL ? 0 : truth->used[visible[current->device]]);
    return CUDA_SUCCESS;
}
/* The first forms, with 32 bits, are there and refuse: no address of this driver fits in them. */
CUresult cuMemAlloc(CUdeviceptr_v1 *pointer, unsigned int bytes) { (void)pointer, (void)bytes; return CUDA_ERROR_NOT_SUPPORTED; }
CUresult cuMemAllocPitch(CUdeviceptr_v1 *p, unsigned int *pitch, unsigned int w, unsigned int h, unsigned int e) {
    (void)p, (void)pitch, (void)w, (void)h, (void)e;
    return CUDA_ERROR_NOT_SUPPORTED;
}
CUresult cuMemFree(CUdeviceptr_v1 pointer) { return release(pointer); }
CUresult cuMemGetInfo(unsigned int *free_bytes, unsigned int *total_bytes) {
    *free_bytes = *total_bytes = 7;
    return current == NULL ? CUDA_ERROR_INVALID_CONTEXT : CUDA_SUCCESS;
}

/* ---- the rest ---- */

CUresult cuGetProcAddress_v2(const char *symbol, void **function, int version, cuuint64_t flags, CUdriverProcAddressQueryResult *status);
CUresult cuGetProcAddress(const char *symbol, void **function, int version, cuuint64_t flags) {
    return cuGetProcAddress_v2(symbol, function, version, flags, NULL);
}

/* Nothing of this is here; the software GPU has it. */
CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *property, unsigned long long flags) {
    (void)handle, (void)bytes, (void)property, (void)flags;
    return CUDA_ERROR_NOT_SUPPORTED;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) { (void)handle; return CUDA_ERROR_NOT_SUPPORTED; }
CUresult cuMemExportToShareableHandle(void *shareable, CUmemGenericAllocationHandle handle, int type, unsigned long long flags) { (void)shareable, (void)handle, (void)type, (void)flags; return CUDA_ERROR_NOT_SUPPORTED; }
CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address) { (void)handle, (void)address; return CUDA_ERROR_NOT_SUPPORTED; }
CUresult cuMemMap(CUdeviceptr pointer, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags) {
    (void)pointer, (void)bytes, (void)offset, (void)handle, (void)flags;
    return CUDA_ERROR_NOT_SUPPORTED;
}
CUresult cuMemUnmap(CUdeviceptr pointer, size_t bytes) { (void)pointer, (void)bytes; return CUDA_ERROR_NOT_SUPPORTED; }

struct entry { const char *name; const char *release; void *function; };
#define ABSENT __attribute__((weak, visibility("hidden")))
extern CUresult cuCtxCreate_v4(CUcontext *, CUctxCreateParams *, unsigned int, CUdevice) ABSENT;
extern CUresult cuCtxSynchronize_v2(CUcontext) ABSENT;
extern CUresult cuGLCtxCreate(CUcontext *, unsigned int, CUdevice) ABSENT;
extern CUresult cuGLCtxCreate_v2(CUcontext *, unsigned int, CUdevice) ABSENT;
extern CUresult cuVDPAUCtxCreate(CUcontext *, unsigned int, CUdevice, uint32_t, void *) ABSENT;
extern CUresult cuVDPAUCtxCreate_v2(CUcontext *, unsigned int, CUdevice, uint32_t, void *) ABSENT;
extern CUresult cuMemPoolImportPointer(CUdeviceptr *, CUmemoryPool, CUmemPoolPtrExportData *) ABSENT;
extern CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *, void *, int) ABSENT;
extern CUresult cuImportExternalMemory(CUexternalMemory *, const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *) ABSENT;
extern CUresult cuDestroyExternalMemory(CUexternalMemory) ABSENT;
extern CUresult cuIpcOpenMemHandle(CUdeviceptr *, CUipcMemHandle, unsigned int) ABSENT;
extern CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *, CUipcMemHandle, unsigned int) ABSENT;
extern CUresult cuIpcCloseMemHandle(CUdeviceptr) ABSENT;
extern CUresult cuGraphInstantiate(CUgraphExec *, CUgraph, CUgraphNode *, char *, size_t) ABSENT;
extern CUresult cuGraphInstantiate_v2(CUgraphExec *, CUgraph, CUgraphNode *, char *, size_t) ABSENT;
extern CUresult cuGraphInstantiateWithFlags(CUgraphExec *, CUgraph, unsigned long long) ABSENT;
extern CUresult cuGraphInstantiateWithParams(CUgraphExec *, CUgraph, CUDA_GRAPH_INSTANTIATE_PARAMS *) ABSENT;
extern CUresult cuGraphInstantiateWithParams_ptsz(CUgraphExec *, CUgraph, CUDA_GRAPH_INSTANTIATE_PARAMS *) ABSENT;
extern CUresult cuDevResourceGenerateDesc(CUdevResourceDesc *, CUdevResource *, unsigned int) ABSENT;
extern CUresult cuGraphExecDestroy(CUgraphExec) ABSENT;
extern CUresult cuGraphLaunch(CUgraphExec, CUstream) ABSENT;
extern CUresult cuGraphLaunch_ptsz(CUgraphExec, CUstream) ABSENT;
extern CUresult cuGraphUpload(CUgraphExec, CUstream) ABSENT;
extern CUresult cuGraphUpload_ptsz(CUgraphExec, CUstream) ABSENT;
extern CUresult cuDeviceGraphMemTrim(CUdevice) ABSENT;
extern CUresult cuCtxSetLimit(CUlimit, size_t) ABSENT;
extern CUresult cuMulticastCreate(CUmemGenericAllocationHandle *, const CUmulticastObjectProp *) ABSENT;
extern CUresult cuMulticastBindMem(CUmemGenericAllocationHandle, size_t, CUmemGenericAllocationHandle, size_t, size_t, unsigned long long) ABSENT;
extern CUresult cuMulticastBindMem_v2(CUmemGenericAllocationHandle, CUdevice, size_t, CUmemGenericAllocationHandle, size_t, size_t, unsigned long long) ABSENT;
extern CUresult cuMulticastBindAddr(CUmemGenericAllocationHandle, size_t, CUdeviceptr, size_t, unsigned long long) ABSENT;
extern CUresult cuMulticastBindAddr_v2(CUmemGenericAllocationHandle, CUdevice, size_t, CUdeviceptr, size_t, unsigned long long) ABSENT;
extern CUresult cuMulticastUnbind(CUmemGenericAllocationHandle, CUdevice, size_t, size_t) ABSENT;
extern CUresult cuArrayCreate(CUarray *, const CUDA_ARRAY_DESCRIPTOR_v1 *) ABSENT;
extern CUresult cuArray3DCreate(CUarray *, const CUDA_ARRAY3D_DESCRIPTOR_v1 *) ABSENT;
extern CUresult cuArrayCreate_v2(CUarray *, const CUDA_ARRAY_DESCRIPTOR *) ABSENT;
extern CUresult cuMipmappedArrayCreate(CUmipmappedArray *, const CUDA_ARRAY3D_DESCRIPTOR *, unsigned int) ABSENT;
extern CUresult cuMipmappedArrayDestroy(CUmipmappedArray) ABSENT;
static const struct entry entries[] = {
#define X(name, release, ...) {#name, release, (void *)name},
    CARVE_CUDA_HOOKS(X)
#undef X
    {"cuCtxGetCurrent", "4.0", (void *)cuCtxGetCurrent},
};

static int number(const char *release) { return (int)(strtol(release, NULL, 10) * 1000 + strtol(strchr(release, '.') + 1, NULL, 10) * 10); }

/* The newest variant that the asked version has: NAME or NAME_v<digit>. */
CUresult cuGetProcAddress_v2(const char *symbol, void **function, int version, cuuint64_t flags, CUdriverProcAddressQueryResult *status) {
    int best = -1;
    (void)flags;
    *function = NULL;
    for (size_t i = 0; i < sizeof entries / sizeof entries[0]; i++) {
        size_t n = strlen(symbol);
        const char *rest = entries[i].name + n;
        int release = number(entries[i].release);
        if (entries[i].function != NULL && strncmp(entries[i].name, symbol, n) == 0 &&
            (*rest == '\0' || (rest[0] == '_' && rest[1] == 'v' && rest[3] == '\0')) && release <= version && release > best) {
            best = release;
            *function = entries[i].function;
        }
    }
    if (status != NULL) {
        *status = best < 0 ? CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND : CU_GET_PROC_ADDRESS_SUCCESS;
    }
    return best < 0 ? CUDA_ERROR_NOT_FOUND : CUDA_SUCCESS;
}
