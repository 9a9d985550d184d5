/* SPDX-License-Identifier: Apache-2.0 */
/* What contexts set aside for stacks, printf and malloc, over the software GPU: what is charged is what the driver says
 * that the process has. */
#define _GNU_SOURCE
#include <pthread.h>

#include "soft_box.h"
#include "tap.h"

#define CALL(name) ((__typeof__(name) *)dlsym(a.handle, #name))

static struct api a;

/* A module with one global, which with the first one of a context makes its heap. */
static const char module_text[] = ".version 6.0\n.target sm_60\n.address_size 64\n.visible .entry nothing()\n{\nret;\n}\n";

static size_t limit_of(CUlimit which) {
    size_t value = 0;
    CALL(cuCtxGetLimit)(&value, which);
    return value;
}

static bool agrees(int card) { return box_used((unsigned)card) == truth(card, getpid()) && box_pending((unsigned)card) == 0; }

static void exact(void) {
    a = start(3000, 3000, CARVE_LIMITS_SELF_VISIBLE);
    CUcontext c, other;
    CUmodule module;
    CUdeviceptr p;
    a.cuCtxCreate_v2(&c, 0, 0);
    uint64_t bare = truth(0, getpid()), refusals = box_refusals(0);
    check(CALL(cuCtxSetLimit)(CU_LIMIT_STACK_SIZE, 4096) == CUDA_SUCCESS && truth(0, getpid()) > bare + 600 * MIB && agrees(0), "larger stacks are charged as the driver takes them");
    check(box_usage()->lines[0][0].context_bytes == bare, "and are no part of what a context costs");
    check(CALL(cuCtxSetLimit)(CU_LIMIT_STACK_SIZE, 16385) == CUDA_ERROR_OUT_OF_MEMORY && limit_of(CU_LIMIT_STACK_SIZE) == 4096 && agrees(0), "beyond the share they are refused, and nothing changes");
    check(box_refusals(0) == refusals + 1, "which counts");
    check(CALL(cuCtxSetLimit)(CU_LIMIT_STACK_SIZE, 1 << 30) == CUDA_ERROR_INVALID_VALUE && CALL(cuCtxSetLimit)(CU_LIMIT_STACK_SIZE, SIZE_MAX) == CUDA_ERROR_INVALID_VALUE && limit_of(CU_LIMIT_STACK_SIZE) == 4096 && agrees(0),
          "such as no thread can have are the driver's to refuse");
    check(CALL(cuCtxSetLimit)(CU_LIMIT_STACK_SIZE, 512 << 10) == CUDA_ERROR_OUT_OF_MEMORY && limit_of(CU_LIMIT_STACK_SIZE) == 4096 && agrees(0), "and the largest of all the share's");
    check(CALL(cuCtxSetLimit)(CU_LIMIT_STACK_SIZE, 100) == CUDA_SUCCESS && truth(0, getpid()) == bare && agrees(0), "smaller ones give back");
    check(CALL(cuCtxSetLimit)(CU_LIMIT_PRINTF_FIFO_SIZE, 101 * MIB) == CUDA_SUCCESS && truth(0, getpid()) == bare + 94 * MIB && agrees(0), "a FIFO is charged as it is taken");
    check(CALL(cuCtxSetLimit)(CU_LIMIT_MALLOC_HEAP_SIZE, 1008 * MIB) == CUDA_SUCCESS && truth(0, getpid()) == bare + 94 * MIB && box_used(0) == bare + 1094 * MIB, "a heap is charged though it will be made later");
    check(a.cuMemAlloc_v2(&p, info(&a).free + 2 * MIB) == CUDA_ERROR_OUT_OF_MEMORY && a.cuMemAlloc_v2(&p, info(&a).free) == CUDA_SUCCESS, "with all else of the share in use");
    check(CALL(cuModuleLoadData)(&module, module_text) == CUDA_SUCCESS && agrees(0), "it has its room when it is made");
    a.cuMemFree_v2(p);
    check(CALL(cuCtxSetLimit)(CU_LIMIT_MALLOC_HEAP_SIZE, 508 * MIB) == CUDA_SUCCESS && truth(0, getpid()) == bare + 594 * MIB && agrees(0), "from then on it shrinks at once");
    check(CALL(cuCtxSetLimit)(CU_LIMIT_MALLOC_HEAP_SIZE, 5000 * MIB) == CUDA_ERROR_OUT_OF_MEMORY && limit_of(CU_LIMIT_MALLOC_HEAP_SIZE) == 508 * MIB && agrees(0), "and grows no further than the share");
    check(CALL(cuCtxSetLimit)(CU_LIMIT_MAX_L2_FETCH_GRANULARITY, 64) == CUDA_SUCCESS && CALL(cuCtxSetLimit)((CUlimit)99, 1) == CUDA_ERROR_UNSUPPORTED_LIMIT && agrees(0), "other limits are the driver's");
    a.cuCtxCreate_v2(&other, 0, 1);
    check(CALL(cuCtxSetLimit)(CU_LIMIT_STACK_SIZE, 2048) == CUDA_SUCCESS && agrees(1) && agrees(0), "on another card it is charged there");
    check(a.cuCtxDestroy_v2(other) == CUDA_SUCCESS && box_used(1) == 0 && truth(1, getpid()) == 0, "it goes with its context");
    check(a.cuCtxDestroy_v2(c) == CUDA_SUCCESS && box_used(0) == 0 && truth(0, getpid()) == 0, "so do stacks, FIFO and heap");
    check(CALL(cuCtxSetLimit)(CU_LIMIT_STACK_SIZE, 2048) == CUDA_ERROR_INVALID_CONTEXT, "without a context the driver refuses");

    a.cuDevicePrimaryCtxRetain(&c, 0);
    a.cuCtxSetCurrent(c);
    check(CALL(cuCtxSetLimit)(CU_LIMIT_STACK_SIZE, 4096) == CUDA_SUCCESS && agrees(0), "of a primary context");
    check(a.cuDevicePrimaryCtxReset_v2(0) == CUDA_SUCCESS && agrees(0), "it goes when that is reset");
    a.cuDevicePrimaryCtxRelease_v2(0);
    check(agrees(0), "once");
}

/* Where the driver can't be asked what this process has, arithmetic is never below it. */
static void by_arithmetic(void) {
    a = start(3000, 3000, 0);
    CUcontext c;
    unsigned seed = 3, less = 0, strange = 0;
    a.cuCtxCreate_v2(&c, 0, 0);
    uint64_t bare = box_used(0), cost = truth(0, getpid());
    for (int i = 0; i < 300; i++) {
        static const struct { CUlimit limit; unsigned step, most; } some[] = {{CU_LIMIT_STACK_SIZE, 37, 200}, {CU_LIMIT_PRINTF_FIFO_SIZE, 700001, 900}, {CU_LIMIT_MALLOC_HEAP_SIZE, 1200007, 900}};
        unsigned k = (unsigned)rand_r(&seed) % 3;
        CUresult result = CALL(cuCtxSetLimit)(some[k].limit, (size_t)some[k].step * ((unsigned)rand_r(&seed) % some[k].most));
        strange += result != CUDA_SUCCESS && result != CUDA_ERROR_OUT_OF_MEMORY;
        less += box_used(0) - bare < truth(0, getpid()) - cost || box_pending(0) != 0;
    }
    check(less == 0 && strange == 0, "by arithmetic at least what the driver takes is charged (%u times not, %u strange answers)", less, strange);
}

/* Random limits and other memory; the ledger and the driver agree after every call. */
static void agrees_with_the_driver(void) {
    enum { LIVE = 30 };
    a = start(2500, 2500, CARVE_LIMITS_SELF_VISIBLE);
    CUcontext c[3] = {NULL, NULL, NULL};
    CUdeviceptr p[3][LIVE];
    CUmodule module;
    unsigned seed = 19, disagree = 0, had = 0, refused = 0, strange = 0;
    for (int i = 0; i < 600; i++) {
        int k = rand_r(&seed) % 3, card = k == 2, at = rand_r(&seed) % LIVE;
        if (c[k] == NULL) {
            if (a.cuCtxCreate_v2(&c[k], 0, card) != CUDA_SUCCESS) {
                c[k] = NULL;
                continue;
            }
            memset(p[k], 0, sizeof p[k]);
            /* Two contexts are charged more than the driver takes for them: leave one at a time on a card. */
            if (k != 2 && c[1 - k] != NULL) {
                strange += a.cuCtxDestroy_v2(c[1 - k]) != CUDA_SUCCESS;
                c[1 - k] = NULL;
                strange += a.cuCtxDestroy_v2(c[k]) != CUDA_SUCCESS || a.cuCtxCreate_v2(&c[k], 0, card) != CUDA_SUCCESS;
            }
            strange += CALL(cuModuleLoadData)(&module, module_text) != CUDA_SUCCESS;
        }
        a.cuCtxSetCurrent(c[k]);
        CUresult result;
        switch (rand_r(&seed) % 8) {
        case 0:
        case 1:
            result = CALL(cuCtxSetLimit)(CU_LIMIT_STACK_SIZE, (unsigned)rand_r(&seed) % 12000);
            break;
        case 2:
            result = CALL(cuCtxSetLimit)(CU_LIMIT_PRINTF_FIFO_SIZE, (unsigned)rand_r(&seed) % (900u << 20));
            break;
        case 3:
            result = CALL(cuCtxSetLimit)(CU_LIMIT_MALLOC_HEAP_SIZE, (unsigned)rand_r(&seed) % (900u << 20));
            break;
        case 4:
            result = CUDA_SUCCESS;
            if (rand_r(&seed) % 6 == 0) {
                result = a.cuCtxDestroy_v2(c[k]);
                c[k] = NULL;
            }
            break;
        default:
            if (p[k][at] != 0) {
                result = a.cuMemFree_v2(p[k][at]);
                p[k][at] = 0;
            } else {
                result = a.cuMemAlloc_v2(&p[k][at], 1 + (uint64_t)(unsigned)rand_r(&seed) % (200 * MIB));
            }
        }
        had += result == CUDA_SUCCESS;
        refused += result == CUDA_ERROR_OUT_OF_MEMORY;
        strange += result != CUDA_SUCCESS && result != CUDA_ERROR_OUT_OF_MEMORY;
        if (!agrees(card) && disagree++ == 0) {
            printf("# call %d: %zu charged, %zu on the card\n", i, box_used((unsigned)card), truth(card, getpid()));
        }
    }
    check(disagree == 0, "after each of 600 calls the ledger has what the driver has (%u times not)", disagree);
    check(had > 200 && refused > 20 && strange == 0, "%u grants, %u refusals, %u strange answers", had, refused, strange);
}

static CUcontext common;
static int stop;
static void *set_and_set(void *argument) {
    unsigned seed = (unsigned)(uintptr_t)argument;
    a.cuCtxSetCurrent(common);
    for (int i = 0; i < 100; i++) {
        CALL(cuCtxSetLimit)((CUlimit)(rand_r(&seed) % 3), 1000u + (unsigned)rand_r(&seed) % 8000u);
    }
    return NULL;
}

static void *take_and_give(void *unused) {
    unsigned seed = 5;
    CUdeviceptr p;
    a.cuCtxSetCurrent(common);
    while (!__atomic_load_n(&stop, __ATOMIC_ACQUIRE)) {
        if (a.cuMemAlloc_v2(&p, (unsigned)rand_r(&seed) % (100u << 20) + 1) == CUDA_SUCCESS) {
            a.cuMemFree_v2(p);
        }
    }
    return unused;
}

static void *over(void *argument) {
    unsigned *times = argument;
    while (!__atomic_load_n(&stop, __ATOMIC_ACQUIRE)) {
        *times += truth(0, getpid()) > 2500 * MIB;
    }
    return NULL;
}

/* Several threads set limits of one context: the last one that is in force is what is charged in the end. Beside one
 * that takes other memory, and gives it back, it may be more than the driver has; at no time does the driver have more
 * than the share. */
static void threads(bool others) {
    a = start(2500, 2500, CARVE_LIMITS_SELF_VISIBLE);
    pthread_t t[3], watch, busy;
    CUmodule module;
    unsigned times = 0;
    stop = 0;
    a.cuCtxCreate_v2(&common, 0, 0);
    CALL(cuModuleLoadData)(&module, module_text);
    pthread_create(&watch, NULL, over, &times);
    if (others) {
        pthread_create(&busy, NULL, take_and_give, NULL);
    }
    for (int i = 0; i < 3; i++) {
        pthread_create(&t[i], NULL, set_and_set, (void *)(uintptr_t)(i + 1));
    }
    for (int i = 0; i < 3; i++) {
        pthread_join(t[i], NULL);
    }
    __atomic_store_n(&stop, 1, __ATOMIC_RELEASE);
    pthread_join(watch, NULL);
    if (others) {
        pthread_join(busy, NULL);
    }
    check(times == 0, "never more than the share (%u times)", times);
    if (others) {
        check(box_pending(0) == 0 && box_used(0) >= truth(0, getpid()), "in the end what the driver has is charged: %zu of %zu", box_used(0), truth(0, getpid()));
    } else {
        check(agrees(0), "in the end what the driver has is charged: %zu of %zu", box_used(0), truth(0, getpid()));
    }
    check(a.cuCtxDestroy_v2(common) == CUDA_SUCCESS && box_used(0) == 0 && truth(0, getpid()) == 0, "and all of it goes with the context");
}
static void threads_alone(void) { threads(false); }
static void threads_beside(void) { threads(true); }

/* Without limits that can be read nothing is set that takes memory. */
static void without_limits(void) {
    a = start(2500, 2500, CARVE_LIMITS_SELF_VISIBLE);
    CUcontext c;
    a.cuCtxCreate_v2(&c, 0, 0);
    box_limits()->generation += 2;
    uint64_t bare = truth(0, getpid());
    check(CALL(cuCtxSetLimit)(CU_LIMIT_STACK_SIZE, 4096) == CUDA_ERROR_OUT_OF_MEMORY && truth(0, getpid()) == bare && limit_of(CU_LIMIT_STACK_SIZE) == 1024, "without limits larger stacks are refused");
    check(CALL(cuCtxSetLimit)(CU_LIMIT_STACK_SIZE, 512) == CUDA_SUCCESS, "smaller ones aren't");
    box_limits()->generation -= 2;
    check(CALL(cuCtxSetLimit)(CU_LIMIT_STACK_SIZE, 4096) == CUDA_SUCCESS && agrees(0), "with them they are had");
}

static int run(void *scenario) {
    ((void (*)(void))scenario)();
    return 0;
}

/* A driver that takes a tenth more for stacks than arithmetic says. */
static void takes_more(void) {
    a = start(3000, 3000, CARVE_LIMITS_SELF_VISIBLE);
    CUcontext c;
    CUdeviceptr p;
    a.cuCtxCreate_v2(&c, 0, 0);
    uint64_t bare = truth(0, getpid());
    check(CALL(cuCtxSetLimit)(CU_LIMIT_STACK_SIZE, 4096) == CUDA_SUCCESS && truth(0, getpid()) > bare + 700 * MIB && agrees(0), "what it took is charged");
    check(a.cuMemAlloc_v2(&p, info(&a).free / (2 * MIB) * (2 * MIB) - 700 * MIB) == CUDA_SUCCESS, "with 700 MiB left");
    check(CALL(cuCtxSetLimit)(CU_LIMIT_STACK_SIZE, 4096 + 3072) == CUDA_ERROR_OUT_OF_MEMORY && limit_of(CU_LIMIT_STACK_SIZE) == 4096 && agrees(0), "where arithmetic fits and it doesn't, the limit is as before");
    check(CALL(cuCtxSetLimit)(CU_LIMIT_STACK_SIZE, 2048) == CUDA_SUCCESS && agrees(0), "what it gives back, or doesn't, is charged");
    check(a.cuCtxDestroy_v2(c) == CUDA_SUCCESS && box_used(0) == 0 && truth(0, getpid()) == 0, "all of it");
}

int main(int argc, char **argv) {
    if (argc > 1 && strcmp(argv[1], "more") == 0) {
        check(in_child(run, (void *)takes_more) == 0, "takes more: ran to its end");
        return tap_done();
    }
    check(in_child(run, (void *)exact) == 0, "exact: ran to its end");
    check(in_child(run, (void *)by_arithmetic) == 0, "by arithmetic: ran to its end");
    check(in_child(run, (void *)agrees_with_the_driver) == 0, "agrees with the driver: ran to its end");
    check(in_child(run, (void *)threads_alone) == 0, "threads: ran to its end");
    check(in_child(run, (void *)threads_beside) == 0, "threads beside another: ran to its end");
    check(in_child(run, (void *)without_limits) == 0, "without limits: ran to its end");
    return tap_done();
}
