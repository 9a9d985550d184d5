/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Calls of one thread between two steps of another one's: at a step of a call another thread makes its own, which comes
 * to its end, or waits, before the first goes on. With the front whose steps can be armed, over the software GPU.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>

#include "soft_box.h"
#include "tap.h"

#define CALL(name) ((__typeof__(name) *)dlsym(a.handle, #name))

static struct api a;
static CUcontext context;
static uint64_t bare;
static pthread_t thread;
static CUresult (*call)(void);
static const char *waits; /* the step at which a call that waits comes by */
static CUresult other = -1;
static uint32_t over;
static unsigned came;

static void *make_call(void *unused) {
    (void)unused;
    a.cuCtxSetCurrent(context);
    other = call();
    __atomic_store_n(&over, 1, __ATOMIC_RELEASE);
    return NULL;
}

static void interrupt(int number) {
    unsigned (*met)(const char *) = (unsigned (*)(const char *))dlsym(a.handle, "carve_test_met");
    unsigned before = met(waits);
    (void)number;
    came++;
    pthread_create(&thread, NULL, make_call, NULL);
    while (__atomic_load_n(&over, __ATOMIC_ACQUIRE) == 0 && met(waits) == before) {
        usleep(100);
    }
}

/* When this thread's next call comes to a step, another one makes a call. */
static void at(const char *step, CUresult (*make)(void), const char *wait) {
    call = make;
    waits = wait;
    signal(SIGUSR1, interrupt);
    ((void (*)(const char *, unsigned, int))dlsym(a.handle, "carve_test_arm"))(step, 0, SIGUSR1);
}

static void join(void) {
    if (came != 0) {
        pthread_join(thread, NULL);
    }
}

/* ---- small blocks ---- */

static CUdeviceptr small_block;
static uint64_t small_bytes;
static CUresult allocate_small(void) { return a.cuMemAlloc_v2(&small_block, small_bytes); }

/* Room for one page. */
static void open_share(uint64_t piece) {
    CUdeviceptr rest;
    small_bytes = piece;
    a = start(1000, 1000, CARVE_LIMITS_SELF_VISIBLE);
    if (a.cuCtxCreate_v2(&context, 0, 0) != CUDA_SUCCESS) {
        exit(3);
    }
    bare = truth(0, getpid());
    if (a.cuMemAlloc_v2(&rest, 998 * MIB - bare) != CUDA_SUCCESS) {
        exit(3);
    }
}

static void the_end(CUresult result) {
    join();
    check(came == 1 && result == CUDA_SUCCESS && other == CUDA_SUCCESS, "both are had (%d, %d)", result, other);
    check(box_used(0) == 1000 * MIB && truth(0, getpid()) == 1000 * MIB && box_pending(0) == 0, "and charged as the card has them");
}

/* The only piece of the page is freed: whoever comes before has a hole beside it, whoever comes after the whole page. */
static void freed_just_then(const char *step, uint64_t piece) {
    CUdeviceptr p;
    open_share(piece);
    check(a.cuMemAlloc_v2(&p, piece) == CUDA_SUCCESS && box_used(0) == 1000 * MIB, "a piece takes the last page");
    at(step, allocate_small, "piece-waits");
    CUresult result = a.cuMemFree_v2(p);
    the_end(result);
}
static void forgotten(void) { freed_just_then("free-forgotten", 4096); }
static void freed(void) { freed_just_then("free-done", 4096); }
static void given_back(void) { freed_just_then("page-gone", 4096); }
static void freed_half(void) { freed_just_then("free-done", MIB); }

/* The first piece of the page is made. */
static void made_just_then(const char *step) {
    CUdeviceptr p;
    open_share(4096);
    at(step, allocate_small, "piece-waits");
    CUresult result = a.cuMemAlloc_v2(&p, 4096);
    the_end(result);
}
static void charged(void) { made_just_then("alloc-charged"); }
static void made(void) { made_just_then("alloc-done"); }

/* Nobody frees anything: a request that can't be had doesn't wait. */
static void refused_at_once(void) {
    CUdeviceptr p[2], q = 7;
    unsigned (*met)(const char *);
    open_share(MIB);
    check(a.cuMemAlloc_v2(&p[0], MIB) == CUDA_SUCCESS && a.cuMemAlloc_v2(&p[1], MIB) == CUDA_SUCCESS, "two pieces fill the last page");
    met = (unsigned (*)(const char *))dlsym(a.handle, "carve_test_met");
    unsigned before = met("piece-waits");
    check(a.cuMemAlloc_v2(&q, 4096) == CUDA_ERROR_OUT_OF_MEMORY && q == 7 && met("piece-waits") == before, "a third one is refused without waiting");
    check(a.cuMemFree_v2(p[0]) == CUDA_SUCCESS && CALL(cuMemFreeAsync)(p[1], NULL) == CUDA_SUCCESS && a.cuMemAlloc_v2(&q, MIB) == CUDA_SUCCESS && a.cuMemAlloc_v2(&p[0], MIB) == CUDA_SUCCESS, "freed, their places are had again");
    CUresult result = a.cuMemAlloc_v2(&q, 4096);
    check(result == CUDA_ERROR_OUT_OF_MEMORY && met("piece-waits") == before, "and again a third one is refused without waiting (%d, %u)", result, met("piece-waits") - before);
    check(a.cuMemFree_v2(p[0]) == CUDA_SUCCESS && a.cuMemFree_v2(p[0]) != CUDA_SUCCESS, "what is freed twice is refused");
}

static int run(void *scenario) {
    ((void (*)(void))scenario)();
    return 0;
}

int main(void) {
    static const struct { const char *name; void (*run)(void); } scenarios[] = {
        {"a piece that is about to be freed", forgotten}, {"a piece that was just freed", freed}, {"a page that isn't given back yet", given_back}, {"one of half a page", freed_half},
        {"a piece that is charged", charged}, {"a piece that was just made", made}, {"refused at once", refused_at_once},
    };
    for (size_t i = 0; i < sizeof scenarios / sizeof scenarios[0]; i++) {
        printf("# %s\n", scenarios[i].name);
        check(in_child(run, (void *)scenarios[i].run) == 0, "%s: ran to its end", scenarios[i].name);
    }
    return tap_done();
}
