/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench.c: what the front adds, in CPU nanoseconds, over the driver that is behind it. Both are called in one
 * process, turn and turn about, so that both meet the same clock and caches; each figure is the median of the
 * differences. One line a figure on stdout, the rest on stderr.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "box.h"

enum { ROUNDS = 201, CALLS = 20000, KEPT = 10000 };

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC_RAW, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

typedef double (*measurement)(void *handle, size_t bytes);

/* The median over all rounds of the front's time less the driver's. */
static double added(void *front, void *driver, measurement measure, size_t bytes, double *bare) {
    double differences[ROUNDS], drivers[ROUNDS];
    for (int i = -10; i < ROUNDS; i++) {
        double first = measure(i % 2 == 0 ? front : driver, bytes), second = measure(i % 2 == 0 ? driver : front, bytes);
        if (i >= 0) {
            differences[i] = i % 2 == 0 ? first - second : second - first;
            drivers[i] = i % 2 == 0 ? second : first;
        }
    }
    qsort(differences, ROUNDS, sizeof differences[0], by_value);
    qsort(drivers, ROUNDS, sizeof drivers[0], by_value);
    *bare = drivers[ROUNDS / 2];
    return differences[ROUNDS / 2];
}

static double launches(void *handle, size_t bytes) {
    __typeof__(cuLaunchKernel) *launch = (__typeof__(cuLaunchKernel) *)dlsym(handle, "cuLaunchKernel");
    (void)bytes;
    double start = now();
    for (int i = 0; i < CALLS; i++) {
        launch(NULL, 1, 1, 1, 32, 1, 1, 0, NULL, NULL, NULL);
    }
    return (now() - start) / CALLS;
}

/* Memory that is set, as a copy within the card. */
static double sets(void *handle, size_t bytes) {
    __typeof__(cuMemsetD32Async) *set = (__typeof__(cuMemsetD32Async) *)dlsym(handle, "cuMemsetD32Async");
    double start = now();
    for (int i = 0; i < CALLS; i++) {
        set(0, 0, bytes / 4, NULL);
    }
    return (now() - start) / CALLS;
}

/* A function that isn't hooked, as a program finds it in a twin. */
static double calls(void *handle, size_t bytes) {
    __typeof__(cuDriverGetVersion) *call = (__typeof__(cuDriverGetVersion) *)dlsym(handle, "cuDriverGetVersion");
    int version;
    (void)bytes;
    double start = now();
    for (int i = 0; i < CALLS; i++) {
        call(&version);
    }
    return (now() - start) / CALLS;
}

static double pairs(void *handle, size_t bytes) {
    __typeof__(cuMemAlloc_v2) *allocate = (__typeof__(cuMemAlloc_v2) *)dlsym(handle, "cuMemAlloc_v2");
    __typeof__(cuMemFree_v2) *release = (__typeof__(cuMemFree_v2) *)dlsym(handle, "cuMemFree_v2");
    CUdeviceptr p;
    double start = now();
    for (int i = 0; i < CALLS; i++) {
        if (allocate(&p, bytes) != CUDA_SUCCESS || release(p) != CUDA_SUCCESS) {
            fprintf(stderr, "the driver refused\n");
            exit(1);
        }
    }
    return (now() - start) / CALLS;
}

static double pool_pairs(void *handle, size_t bytes) {
    __typeof__(cuMemAllocAsync) *allocate = (__typeof__(cuMemAllocAsync) *)dlsym(handle, "cuMemAllocAsync");
    __typeof__(cuMemFreeAsync) *release = (__typeof__(cuMemFreeAsync) *)dlsym(handle, "cuMemFreeAsync");
    CUdeviceptr p;
    double start = now();
    for (int i = 0; i < CALLS; i++) {
        if (allocate(&p, bytes, NULL) != CUDA_SUCCESS || release(p, NULL) != CUDA_SUCCESS) {
            fprintf(stderr, "the driver refused\n");
            exit(1);
        }
    }
    return (now() - start) / CALLS;
}

static double questions(void *handle, size_t bytes) {
    __typeof__(cuMemGetInfo_v2) *info = (__typeof__(cuMemGetInfo_v2) *)dlsym(handle, "cuMemGetInfo_v2");
    size_t f, t;
    (void)bytes;
    double start = now();
    for (int i = 0; i < CALLS; i++) {
        info(&f, &t);
    }
    return (now() - start) / CALLS;
}

/* A quota that a driver that does nothing can't use up, so that no launch is held back. */
static void divide_compute(void) {
    struct carve_limits *l = box_limits();
    for (int bank = 0; bank < 2; bank++) {
        l->banks[bank].cards[0].compute_ppm = 1000000;
    }
    box_flags(0);
    int file = open(CARVE_LIMITS_PATH, O_RDWR);
    struct carve_compute_card *card = mmap(NULL, sizeof *card, PROT_READ | PROT_WRITE, MAP_SHARED, file, CARVE_COMPUTE_AT);
    if (card == MAP_FAILED) {
        exit(1);
    }
    const struct carve_process *self = &box_usage()->processes[0];
    card->terms[0].share_ppm = 1000000;
    card->terms[0].flags = carve_terms_owner(CARVE_PID(self->state_pid), self->start_ticks, self->image);
    l->compute = 1;
}

int main(void) {
    uint64_t limit = 1ull << 40;
    double bare;
    box_make(1, &limit, 0);
    /* Before the front maps it: room for what the agent divides compute by. */
    if (truncate(CARVE_LIMITS_PATH, CARVE_COMPUTE_AT + CARVE_MAX_CARDS * sizeof(struct carve_compute_card)) != 0) {
        return 1;
    }
    struct api a = api_start("libcuda.so.1");
    void *driver = dlopen(DRIVER_AT, RTLD_NOW | RTLD_NOLOAD);
    if (driver == NULL || dlsym(driver, "cuMemAlloc_v2") == dlsym(a.handle, "cuMemAlloc_v2")) {
        fprintf(stderr, "the front is not in the driver's place\n");
        return 1;
    }
    double value = added(a.handle, driver, launches, 0, &bare);
    printf("launch_added_ns %.1f ns\n", value < 0 && value > -0.05 ? 0.0 : value); // no "-0.0"
    fprintf(stderr, "launch: driver alone %.1f ns\n", bare);
    double set = added(a.handle, driver, sets, 4096, &bare);
    divide_compute();
    value = added(a.handle, driver, launches, 0, &bare);
    printf("launch_quota_added_ns %.1f ns\n", value);
    fprintf(stderr, "cuMemsetD32Async of 4 KiB: driver alone %.1f ns, added %.1f ns, where compute is divided %.1f ns\n", bare, set, added(a.handle, driver, sets, 4096, &bare));
    box_limits()->compute = 0;
    value = added(a.handle, driver, calls, 0, &bare);
    printf("twin_call_added_ns %.1f ns\n", value < 0 && value > -0.05 ? 0.0 : value);
    fprintf(stderr, "a call that isn't hooked: driver alone %.1f ns\n", bare);
    value = added(a.handle, driver, pairs, 2 * MIB, &bare);
    printf("allocfree_ns_1 %.1f ns\n", value);
    fprintf(stderr, "alloc and free of 2 MiB: driver alone %.1f ns\n", bare);

    value = added(a.handle, driver, pairs, 4096, &bare);
    fprintf(stderr, "alloc and free of 4 KiB: driver alone %.1f ns, added %.1f ns\n", bare, value);
    for (int i = 0; i < KEPT; i++) {
        CUdeviceptr p;
        if (a.cuMemAlloc_v2(&p, 2 * MIB) != CUDA_SUCCESS) {
            return 1;
        }
    }
    value = added(a.handle, driver, pairs, 2 * MIB, &bare);
    printf("allocfree_ns_10k %.1f ns\n", value);
    fprintf(stderr, "alloc and free of 2 MiB, %d live: driver alone %.1f ns\n", KEPT, bare);
    value = added(a.handle, driver, questions, 0, &bare);
    printf("meminfo_ns %.1f ns\n", value);
    fprintf(stderr, "cuMemGetInfo: driver alone %.1f ns\n", bare);
    value = added(a.handle, driver, pool_pairs, 4 * MIB, &bare);
    fprintf(stderr, "cuMemAllocAsync and cuMemFreeAsync of 4 MiB: driver alone %.1f ns, added %.1f ns\n", bare, value);
    return 0;
}
