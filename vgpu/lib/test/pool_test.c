/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Stream-ordered memory over the software GPU: what is charged is, after each single call, what the driver says that
 * the process has, and the card never holds more than the limit.
 */
#define _GNU_SOURCE
#include <pthread.h>

#include "soft_box.h"
#include "tap.h"

static struct api a;
static CUcontext context;
static uint64_t bare; /* what the context takes */

#define CALL(name) ((__typeof__(name) *)dlsym(a.handle, #name))

static void open_share(uint64_t mib) {
    a = start(mib, mib, CARVE_LIMITS_SELF_VISIBLE);
    if (a.cuCtxCreate_v2(&context, 0, 0) != CUDA_SUCCESS) {
        exit(3);
    }
    bare = truth(0, getpid());
}

static uint64_t attribute(CUmemoryPool pool, CUmemPool_attribute which) {
    cuuint64_t value = 0;
    return CALL(cuMemPoolGetAttribute)(pool, which, &value) == CUDA_SUCCESS ? value : UINT64_MAX;
}

static CUmemoryPool default_pool(void) {
    CUmemoryPool pool = NULL;
    CALL(cuDeviceGetDefaultMemPool)(&pool, 0);
    return pool;
}

static void keep_all(CUmemoryPool pool) {
    cuuint64_t all = UINT64_MAX;
    CALL(cuMemPoolSetAttribute)(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &all);
}

static CUmemoryPool new_pool(int device) {
    CUmemPoolProps properties = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {CU_MEM_LOCATION_TYPE_DEVICE, device}};
    CUmemoryPool pool = NULL;
    return CALL(cuMemPoolCreate)(&pool, &properties) == CUDA_SUCCESS ? pool : NULL;
}

/* Random calls of all kinds on a share that is too small for them. */
static void agrees_with_the_driver(void) {
    enum { LIVE = 200, POOLS = 4 };
    struct { CUdeviceptr at; bool pooled; } p[LIVE] = {{0}};
    CUmemoryPool pools[POOLS] = {NULL};
    CUstream stream = NULL;
    unsigned seed = 3, disagree = 0, over = 0, had = 0, refused = 0, strange = 0, changed = 0;
    open_share(2000);
    strange += CALL(cuStreamCreate)(&stream, CU_STREAM_NON_BLOCKING) != CUDA_SUCCESS;
    pools[0] = default_pool();
    for (int i = 0; i < 12000; i++) {
        int at = rand_r(&seed) % LIVE, k = rand_r(&seed) % POOLS;
        unsigned what = (unsigned)rand_r(&seed) % 100;
        CUstream on = rand_r(&seed) % 2 == 0 ? NULL : stream;
        uint64_t bytes = 1 + (uint64_t)(unsigned)rand_r(&seed) % (rand_r(&seed) % 4 == 0 ? 90 * MIB : 5 * MIB);
        CUresult result = CUDA_SUCCESS;
        if (what < 70 && p[at].at == 0) {
            bool pooled = true;
            if (what < 25) {
                result = CALL(cuMemAllocAsync)(&p[at].at, bytes, on);
            } else if (what < 40) {
                result = CALL(cuMemAllocAsync_ptsz)(&p[at].at, bytes, on);
            } else if (what < 50 && pools[k] != NULL) {
                result = CALL(cuMemAllocFromPoolAsync)(&p[at].at, bytes, pools[k], on);
            } else if (what < 60 && pools[k] != NULL) {
                result = CALL(cuMemAllocFromPoolAsync_ptsz)(&p[at].at, bytes, pools[k], on);
            } else {
                pooled = false;
                result = a.cuMemAlloc_v2(&p[at].at, bytes);
            }
            had += result == CUDA_SUCCESS;
            refused += result == CUDA_ERROR_OUT_OF_MEMORY;
            strange += result != CUDA_SUCCESS && result != CUDA_ERROR_OUT_OF_MEMORY;
            strange += result != CUDA_SUCCESS && p[at].at != 0;
            p[at].pooled = pooled;
        } else if (what < 70) {
            result = what % 3 == 0 ? a.cuMemFree_v2(p[at].at) : what % 3 == 1 ? CALL(cuMemFreeAsync)(p[at].at, on) : CALL(cuMemFreeAsync_ptsz)(p[at].at, on);
            strange += result != CUDA_SUCCESS;
            p[at].at = 0;
        } else if (what < 80) {
            strange += (what % 4 == 0   ? CALL(cuStreamSynchronize)(on)
                        : what % 4 == 1 ? CALL(cuStreamSynchronize_ptsz)(on)
                                        : CALL(cuCtxSynchronize)()) != CUDA_SUCCESS;
        } else if (what < 84 && pools[k] != NULL) {
            strange += CALL(cuMemPoolTrimTo)(pools[k], (unsigned)rand_r(&seed) % 200 * MIB) != CUDA_SUCCESS;
        } else if (what < 88 && pools[k] != NULL) {
            cuuint64_t keep = (unsigned)rand_r(&seed) % 300 * MIB;
            strange += CALL(cuMemPoolSetAttribute)(pools[k], CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &keep) != CUDA_SUCCESS;
        } else if (what < 92 && k > 0) {
            if (pools[k] == NULL) {
                pools[k] = new_pool(0);
                strange += pools[k] == NULL;
            } else {
                strange += CALL(cuMemPoolDestroy)(pools[k]) != CUDA_SUCCESS; /* perhaps in use */
                pools[k] = NULL;
            }
            changed++;
        } else if (what < 95 && pools[k] != NULL) {
            strange += CALL(cuDeviceSetMemPool)(0, pools[k]) != CUDA_SUCCESS;
        }
        uint64_t on_card = truth(0, getpid());
        if (box_used(0) != on_card && disagree++ == 0) {
            printf("# call %d (%u): %zu charged, %zu on the card\n", i, what, box_used(0), on_card);
        }
        over += on_card > 2000 * MIB;
    }
    check(disagree == 0 && box_pending(0) == 0, "after each of 12000 calls the ledger has what the driver has (%u times not)", disagree);
    check(over == 0, "the card never held more than the limit (%u times it did)", over);
    check(had > 1500 && refused > 50 && changed > 100 && strange == 0, "%u grants, %u refusals, %u pools made or destroyed, %u strange answers", had, refused, changed, strange);
    for (int i = 0; i < LIVE; i++) {
        if (p[i].at != 0) {
            a.cuMemFree_v2(p[i].at);
        }
    }
    CALL(cuCtxSynchronize)();
    for (int k = 0; k < POOLS; k++) {
        if (pools[k] != NULL) {
            CALL(cuMemPoolTrimTo)(pools[k], 0);
        }
    }
    check(box_used(0) == bare && truth(0, getpid()) == bare, "freed and trimmed, all of it is back");
}

/* Case vgpu-6: a loop of stream-ordered allocations and frees must not drift. */
static void does_not_drift(void) {
    CUdeviceptr p;
    unsigned strange = 0, moved = 0;
    open_share(1000);
    for (int i = 0; i < 20000; i++) {
        strange += CALL(cuMemAllocAsync)(&p, 20 * MIB, NULL) != CUDA_SUCCESS;
        strange += CALL(cuMemFreeAsync)(p, NULL) != CUDA_SUCCESS;
        moved += box_used(0) != bare + 32 * MIB;
    }
    check(strange == 0 && moved == 0, "20000 allocations and frees are charged one step of 32 MiB, all the time");
    CALL(cuCtxSynchronize)();
    check(box_used(0) == bare && info(&a).free == 1000 * MIB - bare, "which synchronisation gives back");
}

/* Case vgpu-7: pools of the program's own are counted, and pointers that aren't known are the driver's. */
static void whose_pointer(void) {
    CUdeviceptr p, q, r = 77;
    open_share(1000);
    int cards = 0;
    a.cuDeviceGetCount(&cards);
    CUmemoryPool pool = new_pool(0), other = cards > 1 ? new_pool(1) : NULL;
    CUcontext elsewhere;
    if (cards > 1) {
        a.cuCtxCreate_v2(&elsewhere, 0, 1);
    }
    uint64_t second = cards > 1 ? truth(1, getpid()) : 0;
    a.cuCtxSetCurrent(context);
    CUmemPoolProps host = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {CU_MEM_LOCATION_TYPE_HOST, 0}};
    CUmemoryPool hosts = NULL;
    check(CALL(cuMemAllocFromPoolAsync)(&p, 100 * MIB, pool, NULL) == CUDA_SUCCESS && box_used(0) == bare + 100 * MIB && info(&a).free == 1000 * MIB - bare - 100 * MIB, "memory of a pool of its own is charged");
    if (cards > 1) {
        check(CALL(cuMemAllocFromPoolAsync)(&q, 100 * MIB, other, NULL) == CUDA_SUCCESS && box_used(1) == truth(1, getpid()) && box_used(1) == second + 100 * MIB, "of a pool on another card, there");
        check(CALL(cuMemAllocFromPoolAsync)(&r, 1000 * MIB, other, NULL) == CUDA_ERROR_OUT_OF_MEMORY && r == 77, "and refused there");
        check(CALL(cuMemFreeAsync)(q, NULL) == CUDA_SUCCESS, "and freed");
    }
    check(a.cuMemFree_v2(p) == CUDA_SUCCESS, "cuMemFree frees what a pool gave");
    CALL(cuCtxSynchronize)();
    check(box_used(0) == bare && truth(0, getpid()) == bare, "and back");
    check(CALL(cuMemFreeAsync)(0x1234000, NULL) == CUDA_ERROR_INVALID_VALUE && a.cuMemFree_v2(0x1234000) == CUDA_ERROR_INVALID_VALUE, "nonsense is the driver's to refuse");
    check(a.cuMemAlloc_v2(&p, 10 * MIB) == CUDA_SUCCESS && CALL(cuMemFreeAsync)(p, NULL) == CUDA_SUCCESS && box_used(0) == bare, "cuMemFreeAsync frees what cuMemAlloc gave");
    CUresult result = CALL(cuMemPoolCreate)(&hosts, &host);
    check(box_used(0) == bare && (result != CUDA_SUCCESS || CALL(cuMemPoolDestroy)(hosts) == CUDA_SUCCESS), "a pool of the host is none of ours");
    check(CALL(cuMemPoolCreate)(NULL, NULL) == CUDA_ERROR_INVALID_VALUE && CALL(cuMemAllocAsync)(NULL, 5, NULL) == CUDA_ERROR_INVALID_VALUE && CALL(cuMemAllocAsync)(&p, 0, NULL) == CUDA_ERROR_INVALID_VALUE, "nor are arguments that are nonsense");
    check(CALL(cuMemPoolDestroy)(default_pool()) != CUDA_SUCCESS, "the default pool can't be destroyed");
    a.cuCtxSetCurrent(NULL);
    a.cuCtxSetCurrent(NULL); /* each takes one off the stack */
    check(CALL(cuMemAllocAsync)(&p, 5, NULL) == CUDA_ERROR_INVALID_CONTEXT, "nor allocated from without a context");
}

/* A device's default pool, of which nothing was had but by its name. */
static void default_by_name(void) {
    CUdeviceptr p, r = 77;
    open_share(1000);
    check(CALL(cuMemAllocFromPoolAsync)(&p, 100 * MIB, default_pool(), NULL) == CUDA_SUCCESS && box_used(0) == bare + 100 * MIB && truth(0, getpid()) == box_used(0), "the default pool is charged, too, when it is named");
    check(CALL(cuMemAllocFromPoolAsync)(&r, 1000 * MIB, default_pool(), NULL) == CUDA_ERROR_OUT_OF_MEMORY && r == 77, "and held to the limit");
}

/* At the limit: what the pool has is had, idle memory of pools makes room for others, and no more than that. */
static void at_the_limit(void) {
    CUdeviceptr p[100], q, r = 77;
    int had = 0;
    open_share(1000);
    keep_all(default_pool());
    while (had < 100 && CALL(cuMemAllocAsync)(&p[had], 10 * MIB, NULL) == CUDA_SUCCESS) {
        had++;
    }
    uint64_t full = truth(0, getpid()), left = 1000 * MIB - full;
    check(had > 30 && left < 32 * MIB && box_used(0) == full, "%d blocks of 10 MiB fit, and %zu MiB are left", had, left / MIB);
    check(CALL(cuMemAllocAsync)(&r, 33 * MIB, NULL) == CUDA_ERROR_OUT_OF_MEMORY && r == 77 && box_used(0) == full, "more isn't had");
    check(box_refusals(0) >= 2, "and the refusals are counted");
    CALL(cuMemFreeAsync)(p[0], NULL);
    check(CALL(cuMemAllocAsync)(&p[0], 10 * MIB, NULL) == CUDA_SUCCESS && truth(0, getpid()) == full, "what was freed in the pool is had again, though nothing else is free");
    for (int i = 0; i < had; i++) {
        CALL(cuMemFreeAsync)(p[i], NULL);
    }
    CALL(cuCtxSynchronize)();
    check(box_used(0) == full && attribute(default_pool(), CU_MEMPOOL_ATTR_USED_MEM_CURRENT) == 0, "freed, the pool keeps it all");
    unsigned grown = 0;
    for (int i = 0; i < 2000; i++) {
        CALL(cuMemAllocAsync)(&q, (1 + i % 30) * MIB, NULL);
        CALL(cuMemFreeAsync)(q, NULL);
        grown += attribute(default_pool(), CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT) < full - bare - 64 * MIB;
    }
    check(grown == 0 && truth(0, getpid()) == box_used(0), "a pool that lives at the limit isn't emptied for each block");
    check(a.cuMemAlloc_v2(&q, 300 * MIB) == CUDA_SUCCESS && box_used(0) == truth(0, getpid()) && box_used(0) <= 1000 * MIB, "a block outside of it gets room that the pool has idle");
    check(attribute(default_pool(), CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT) > 0, "of which no more than needed is taken");
    check(a.cuMemFree_v2(q) == CUDA_SUCCESS, "freed");
    CUmemoryPool pool = new_pool(0);
    check(CALL(cuMemAllocFromPoolAsync)(&q, 800 * MIB > 1000 * MIB - bare ? 400 * MIB : 800 * MIB - bare, pool, NULL) == CUDA_SUCCESS && box_used(0) == truth(0, getpid()), "so does another pool");
    CUmemAllocationProp property = {.type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
    CUmemGenericAllocationHandle handle;
    CALL(cuMemFreeAsync)(q, NULL);
    check(CALL(cuMemCreate)(&handle, 400 * MIB, &property, 0) == CUDA_SUCCESS && box_used(0) == truth(0, getpid()) && box_used(0) <= 1000 * MIB, "and memory that the program maps itself");
}

/* A pool of holes: what would fit but for them may make it grow; then it is given back, and refused. */
static void in_pieces(void) {
    enum { MOST = 400 };
    CUdeviceptr p[MOST], r = 77;
    int had = 0;
    open_share(1000);
    keep_all(default_pool());
    while (had < MOST && CALL(cuMemAllocAsync)(&p[had], 4 * MIB, NULL) == CUDA_SUCCESS) {
        had++;
    }
    for (int i = 0; i < had; i += 2) {
        CALL(cuMemFreeAsync)(p[i], NULL);
    }
    uint64_t full = truth(0, getpid());
    check(CALL(cuMemAllocAsync)(&r, 30 * MIB, NULL) == CUDA_ERROR_OUT_OF_MEMORY && r == 77, "a block that no hole takes is refused");
    check(truth(0, getpid()) == full && box_used(0) == full && full <= 1000 * MIB, "and the pool is what it was");
    check(CALL(cuMemAllocAsync)(&p[0], 4 * MIB, NULL) == CUDA_SUCCESS && truth(0, getpid()) == full, "one that fits in a hole is had");
}

/* A pool that is destroyed while memory of it is in use goes with the last of it. */
static void destroyed_in_use(void) {
    CUdeviceptr p, q;
    CUmemoryPool current;
    open_share(1000);
    CUmemoryPool pool = new_pool(0);
    CALL(cuDeviceSetMemPool)(0, pool);
    check(CALL(cuMemAllocAsync)(&p, 100 * MIB, NULL) == CUDA_SUCCESS && CALL(cuMemPoolDestroy)(pool) == CUDA_SUCCESS, "a pool in use is destroyed");
    check(box_used(0) == bare + 100 * MIB && truth(0, getpid()) == box_used(0), "and stays charged");
    check(CALL(cuMemAllocFromPoolAsync)(&q, MIB, pool, NULL) == CUDA_ERROR_INVALID_VALUE && CALL(cuMemPoolDestroy)(pool) == CUDA_ERROR_INVALID_VALUE &&
              CALL(cuMemPoolTrimTo)(pool, 0) == CUDA_ERROR_INVALID_VALUE && CALL(cuDeviceSetMemPool)(0, pool) == CUDA_ERROR_INVALID_VALUE,
          "nothing can be had of it any more");
    check(CALL(cuDeviceGetMemPool)(&current, 0) == CUDA_SUCCESS && current == default_pool(), "the device has its default pool back");
    CALL(cuMemFreeAsync)(p, NULL);
    CALL(cuStreamSynchronize)(NULL);
    check(box_used(0) == bare && truth(0, getpid()) == bare, "once its memory is freed, so is the pool");
}

/* The context goes, and what pools had for it. */
static void context_gone(void) {
    CUdeviceptr p;
    open_share(1000);
    keep_all(default_pool());
    check(CALL(cuMemAllocAsync)(&p, 100 * MIB, NULL) == CUDA_SUCCESS && box_used(0) == bare + 100 * MIB, "in use");
    check(a.cuCtxDestroy_v2(context) == CUDA_SUCCESS && box_used(0) == truth(0, getpid()) && box_used(0) == 0, "all is given back with the context");
    check(a.cuCtxCreate_v2(&context, 0, 0) == CUDA_SUCCESS && CALL(cuMemAllocAsync)(&p, 100 * MIB, NULL) == CUDA_SUCCESS && box_used(0) == truth(0, getpid()), "and had anew");
}

static void *stress(void *argument) {
    unsigned seed = (unsigned)(uintptr_t)argument;
    CUdeviceptr p[16] = {0};
    CUstream stream;
    a.cuCtxSetCurrent(context);
    CALL(cuStreamCreate)(&stream, CU_STREAM_NON_BLOCKING);
    for (int i = 0; i < 2000; i++) {
        int at = rand_r(&seed) % 16;
        if (p[at] != 0) {
            CALL(cuMemFreeAsync)(p[at], stream);
            p[at] = 0;
        } else if (CALL(cuMemAllocAsync)(&p[at], 1 + (unsigned)rand_r(&seed) % (20 * (unsigned)MIB), stream) != CUDA_SUCCESS) {
            p[at] = 0;
        }
        if (rand_r(&seed) % 50 == 0) {
            CALL(cuStreamSynchronize)(stream);
        }
    }
    for (int i = 0; i < 16; i++) {
        if (p[i] != 0) {
            CALL(cuMemFreeAsync)(p[i], stream);
        }
    }
    CALL(cuStreamSynchronize)(stream);
    return NULL;
}

static void threads(void) {
    pthread_t t[6];
    open_share(1000);
    for (int i = 0; i < 6; i++) {
        pthread_create(&t[i], NULL, stress, (void *)(uintptr_t)(i + 1));
    }
    for (int i = 0; i < 6; i++) {
        pthread_join(t[i], NULL);
    }
    CALL(cuCtxSynchronize)();
    check(box_used(0) == bare && truth(0, getpid()) == bare && box_pending(0) == 0, "after six threads ledger and driver have the context alone");
}

static int run(void *scenario) {
    ((void (*)(void))scenario)();
    return 0;
}

int main(int argc, char **argv) {
    static const struct { const char *name; void (*run)(void); } scenarios[] = {
        {"agrees with the driver", agrees_with_the_driver}, {"does not drift", does_not_drift}, {"whose pointer", whose_pointer}, {"default by name", default_by_name},
        {"at the limit", at_the_limit}, {"in pieces", in_pieces}, {"destroyed in use", destroyed_in_use}, {"context gone", context_gone}, {"threads", threads},
    };
    for (size_t i = 0; i < sizeof scenarios / sizeof scenarios[0]; i++) {
        if (argc > 1 && strcmp(argv[1], scenarios[i].name) != 0) {
            continue;
        }
        printf("# %s\n", scenarios[i].name);
        check(in_child(run, (void *)scenarios[i].run) == 0, "%s: ran to its end", scenarios[i].name);
    }
    return tap_done();
}
