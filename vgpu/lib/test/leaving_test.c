/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory that cuMemAlloc gave and that is freed in a stream, over the software GPU: it is charged until the stream has
 * come to it.
 */
#define _GNU_SOURCE
#include <pthread.h>

#include "soft_box.h"
#include "tap.h"

#define CALL(name) ((__typeof__(name) *)dlsym(a.handle, #name))

static struct api a;
static CUcontext context;
static uint64_t bare; /* what the context takes */

static void open_share(uint64_t mib) {
    a = start(mib, mib, CARVE_LIMITS_SELF_VISIBLE);
    if (a.cuCtxCreate_v2(&context, 0, 0) != CUDA_SUCCESS) {
        exit(3);
    }
    bare = truth(0, getpid());
}

static uint32_t gate;

static void wait_at_the_gate(void *unused) {
    (void)unused;
    while (__atomic_load_n(&gate, __ATOMIC_ACQUIRE) == 0) {
        usleep(200);
    }
}

/* Freed in a stream that stands: until it goes on the card has it. */
static void freed_when_the_stream_comes_to_it(void) {
    CUdeviceptr p[3], small, q = 77;
    CUstream stream = NULL, other = NULL;
    open_share(1000);
    check(CALL(cuStreamCreate)(&stream, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS && CALL(cuStreamCreate)(&other, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS, "two streams");
    for (int round = 0; round < 3; round++) {
        __atomic_store_n(&gate, 0, __ATOMIC_RELEASE);
        check(a.cuMemAlloc_v2(&p[0], 400 * MIB) == CUDA_SUCCESS && a.cuMemAlloc_v2(&small, 4096) == CUDA_SUCCESS && CALL(cuLaunchHostFunc)(stream, wait_at_the_gate, NULL) == CUDA_SUCCESS, "a block, a piece, and a stream that stands");
        check((round == 1 ? CALL(cuMemFreeAsync_ptsz)(p[0], stream) : CALL(cuMemFreeAsync)(p[0], stream)) == CUDA_SUCCESS && CALL(cuMemFreeAsync)(small, stream) == CUDA_SUCCESS, "which are to be freed there");
        check(truth(0, getpid()) == bare + 402 * MIB && box_used(0) == bare + 402 * MIB && info(&a).free == 1000 * MIB - bare - 402 * MIB, "are charged as long as the card has them");
        check(a.cuMemAlloc_v2(&q, 400 * MIB) == CUDA_ERROR_OUT_OF_MEMORY && CALL(cuMemAllocAsync)(&q, 400 * MIB, other) == CUDA_ERROR_OUT_OF_MEMORY && q == 77, "nobody gets their place");
        check(CALL(cuStreamSynchronize)(other) == CUDA_SUCCESS && box_used(0) == truth(0, getpid()) && box_used(0) == bare + 402 * MIB, "another stream that is waited for doesn't matter");
        if (round == 2) {
            __atomic_store_n(&gate, 1, __ATOMIC_RELEASE); /* a context with a stream that stands doesn't go */
            check(a.cuCtxDestroy_v2(context) == CUDA_SUCCESS && box_used(0) == 0 && truth(0, getpid()) == 0, "and with the context all goes");
            return;
        }
        __atomic_store_n(&gate, 1, __ATOMIC_RELEASE);
        if (round == 0) {
            check(CALL(cuStreamSynchronize)(stream) == CUDA_SUCCESS && box_used(0) == bare && truth(0, getpid()) == bare, "the stream waited for, they are gone");
        } else {
            while (CALL(cuStreamQuery)(stream) != CUDA_SUCCESS) {
                usleep(200);
            }
        }
        check(a.cuMemAlloc_v2(&q, 400 * MIB) == CUDA_SUCCESS && box_used(0) == bare + 400 * MIB && truth(0, getpid()) == box_used(0), "then their place is to be had");
        check(a.cuMemFree_v2(q) == CUDA_SUCCESS && box_used(0) == bare, "and back");
        q = 77;
    }
}

/* In a stream of another context than the current one. */
static void in_another_context(void) {
    CUcontext second;
    CUstream stream = NULL;
    CUdeviceptr p, q = 77;
    open_share(1400);
    check(CALL(cuStreamCreate)(&stream, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS && a.cuCtxCreate_v2(&second, 0, 0) == CUDA_SUCCESS, "two contexts");
    uint64_t both = box_used(0), on_card = truth(0, getpid()); /* a second one is charged as much as the first */
    gate = 0;
    check(a.cuMemAlloc_v2(&p, 400 * MIB) == CUDA_SUCCESS && CALL(cuLaunchHostFunc)(stream, wait_at_the_gate, NULL) == CUDA_SUCCESS && CALL(cuMemFreeAsync)(p, stream) == CUDA_SUCCESS, "a block of one is freed in a stream of the other");
    check(truth(0, getpid()) == on_card + 400 * MIB && box_used(0) == both + 400 * MIB && a.cuMemAlloc_v2(&q, 400 * MIB) == CUDA_ERROR_OUT_OF_MEMORY, "and charged");
    __atomic_store_n(&gate, 1, __ATOMIC_RELEASE);
    check(CALL(cuStreamSynchronize)(stream) == CUDA_SUCCESS && box_used(0) == both && truth(0, getpid()) == on_card, "until the stream was waited for");
}

/* ---- threads ---- */

enum { THREADS = 6, ROUNDS = 150 };
static uint32_t done;
static uint64_t strange, granted;

static void step_aside(void *unused) {
    (void)unused;
    usleep(50);
}

static void *taker(void *argument) {
    unsigned seed = (unsigned)(uintptr_t)argument;
    CUstream stream = NULL;
    a.cuCtxSetCurrent(context);
    CALL(cuStreamCreate)(&stream, CU_STREAM_NON_BLOCKING);
    for (int i = 0; i < ROUNDS; i++) {
        CUdeviceptr p = 0;
        uint64_t bytes = rand_r(&seed) % 3 == 0 ? 1 + (uint64_t)(unsigned)rand_r(&seed) % MIB : (unsigned)rand_r(&seed) % 250 * MIB + 1;
        CUresult result = a.cuMemAlloc_v2(&p, bytes);
        if (result == CUDA_SUCCESS) {
            bool bad = rand_r(&seed) % 2 == 0 && CALL(cuLaunchHostFunc)(stream, step_aside, NULL) != CUDA_SUCCESS;
            bad |= (rand_r(&seed) % 8 == 0 ? a.cuMemFree_v2(p) : CALL(cuMemFreeAsync)(p, stream)) != CUDA_SUCCESS;
            bad |= rand_r(&seed) % 4 == 0 && CALL(cuStreamSynchronize)(stream) != CUDA_SUCCESS;
            __atomic_add_fetch(bad ? &strange : &granted, 1, __ATOMIC_SEQ_CST);
        } else if (result != CUDA_ERROR_OUT_OF_MEMORY) {
            __atomic_add_fetch(&strange, 1, __ATOMIC_SEQ_CST);
        }
    }
    CALL(cuStreamSynchronize)(stream);
    __atomic_add_fetch(&done, 1, __ATOMIC_SEQ_CST);
    return NULL;
}

static void threads(void) {
    pthread_t t[THREADS];
    uint64_t most = 0;
    open_share(1000);
    for (int i = 0; i < THREADS; i++) {
        pthread_create(&t[i], NULL, taker, (void *)(uintptr_t)(i + 1));
    }
    while (__atomic_load_n(&done, __ATOMIC_ACQUIRE) != THREADS) {
        uint64_t on_card = truth(0, getpid());
        most = on_card > most ? on_card : most;
    }
    for (int i = 0; i < THREADS; i++) {
        pthread_join(t[i], NULL);
    }
    check(most <= 1000 * MIB && strange == 0 && granted > 0, "six threads: at most %zu of 1000 MiB, %zu blocks, %zu strange answers", (size_t)(most / MIB), (size_t)granted, (size_t)strange);
    check(CALL(cuCtxSynchronize)() == CUDA_SUCCESS && box_used(0) == bare && truth(0, getpid()) == bare && box_pending(0) == 0, "and all of it is back");
}

static int run(void *scenario) {
    ((void (*)(void))scenario)();
    return 0;
}

int main(void) {
    check(in_child(run, (void *)freed_when_the_stream_comes_to_it) == 0, "freed when the stream comes to it: ran to its end");
    check(in_child(run, (void *)in_another_context) == 0, "in another context: ran to its end");
    check(in_child(run, (void *)threads) == 0, "threads: ran to its end");
    return tap_done();
}
