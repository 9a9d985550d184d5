/* SPDX-License-Identifier: Apache-2.0 */
/* What a container does to its own usage file harms nobody else, and as little as can be of its own. */
#define _GNU_SOURCE
#include <signal.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "box.h"
#include "tap.h"

enum { CONTEXT_MIB = 20, LIMIT_MIB = 1000 };

static struct stub_truth *truth;

static void fresh(void) {
    uint64_t limit = LIMIT_MIB * MIB;
    box_make(1, &limit, CONTEXT_MIB * MIB);
    truth = box_truth(1, 100000 * MIB, CONTEXT_MIB * MIB);
}

static size_t free_now(const struct api *a) {
    size_t f = 1, t = 1;
    a->cuMemGetInfo_v2(&f, &t);
    return f;
}

static void zeroed(void) {
    fresh();
    struct api a = api_start("libcuda.so.1");
    CUdeviceptr p, q;
    check(a.cuMemAlloc_v2(&p, 500 * MIB) == CUDA_SUCCESS, "500 of 1000 MiB are had");
    memset(box_usage(), 0, sizeof *box_usage());
    check(free_now(&a) == (LIMIT_MIB - CONTEXT_MIB - 500) * MIB, "zeroed, a process still knows what it has");
    check(a.cuMemAlloc_v2(&q, 600 * MIB) == CUDA_ERROR_OUT_OF_MEMORY, "and gets no more than its limit");
    check(a.cuMemAlloc_v2(&q, 100 * MIB) == CUDA_SUCCESS && box_used(0) == (CONTEXT_MIB + 600) * MIB, "its next request sets its line right");
    memset(box_usage(), 0, sizeof *box_usage());
    check(a.cuMemFree_v2(p) == CUDA_SUCCESS && a.cuMemFree_v2(q) == CUDA_SUCCESS && box_used(0) == CONTEXT_MIB * MIB && truth->used[0] == CONTEXT_MIB * MIB,
          "so does a free, and no count falls below zero");
}

static void filled_with_ones(void) {
    fresh();
    struct api a = api_start("libcuda.so.1");
    CUdeviceptr p, q = 5;
    a.cuMemAlloc_v2(&p, 500 * MIB);
    memset(box_usage(), 0xff, sizeof *box_usage());
    check(free_now(&a) == 0 && a.cuMemAlloc_v2(&q, MIB) == CUDA_ERROR_OUT_OF_MEMORY && q == 5, "filled with ones, nothing is free");
    check(a.cuMemFree_v2(p) == CUDA_SUCCESS, "what there is can be freed");
    for (unsigned i = 0; i < CARVE_MAX_SLOTS; i++) {
        box_usage()->lines[0][i].charge = 0;
    }
    box_usage()->high_water = 0;
    check(a.cuMemAlloc_v2(&q, 500 * MIB) == CUDA_SUCCESS && free_now(&a) == (LIMIT_MIB - CONTEXT_MIB - 500) * MIB, "cleaned, all is as it should be");
}

static void high_water_lowered(void) {
    fresh();
    pid_t pid = fork();
    if (pid == 0) {
        struct api b = api_start("libcuda.so.1");
        CUdeviceptr p;
        _exit(b.cuMemAlloc_v2(&p, 500 * MIB) != CUDA_SUCCESS);
    }
    int status;
    waitpid(pid, &status, 0);
    struct api a = api_start("libcuda.so.1");
    CUdeviceptr p;
    check(status == 0 && free_now(&a) == (LIMIT_MIB - 2 * CONTEXT_MIB - 500) * MIB, "a sibling holds 500");
    box_usage()->high_water = 0;
    check(free_now(&a) == (LIMIT_MIB - 2 * CONTEXT_MIB - 500) * MIB && a.cuMemAlloc_v2(&p, 700 * MIB) == CUDA_ERROR_OUT_OF_MEMORY, "a process that saw it doesn't forget it");
    box_usage()->mark = CARVE_MARK(0, 77);
    check(free_now(&a) == (LIMIT_MIB - 2 * CONTEXT_MIB - 500) * MIB && a.cuMemAlloc_v2(&p, 700 * MIB) == CUDA_ERROR_OUT_OF_MEMORY, "nor when it looks as if somebody had lowered it");
    check(box_usage()->high_water == 2, "and sets it right as far as its own slot");
    box_usage()->high_water = CARVE_MAX_SLOTS;
    check(free_now(&a) == (LIMIT_MIB - 2 * CONTEXT_MIB - 500) * MIB && box_usage()->high_water == CARVE_MAX_SLOTS, "as the agent mends it, it stays");
}

/* Another process writes noise all over, all the time. */
static void scribbled(void) {
    fresh();
    pid_t noise = fork();
    if (noise == 0) {
        unsigned seed = 1;
        for (;;) {
            ((uint8_t *)box_usage())[(unsigned)rand_r(&seed) % sizeof(struct carve_usage)] = (uint8_t)rand_r(&seed);
        }
    }
    unsigned answers = 0, strange = 0;
    pid_t pid = fork();
    if (pid == 0) {
        struct api a = api_load("libcuda.so.1");
        CUdeviceptr p[4] = {0};
        CUcontext c;
        a.cuInit(0);
        CUresult result = a.cuCtxCreate_v2(&c, 0, 0);
        strange += result != CUDA_SUCCESS && result != CUDA_ERROR_OUT_OF_MEMORY;
        for (int i = 0; i < 200000; i++) {
            if (p[i % 4] != 0) {
                strange += a.cuMemFree_v2(p[i % 4]) != CUDA_SUCCESS;
                p[i % 4] = 0;
            } else if (result == CUDA_SUCCESS && i % 16 == 0) {
                CUresult got = a.cuMemAlloc_v2(&p[i % 4], 10 * MIB);
                strange += got != CUDA_SUCCESS && got != CUDA_ERROR_OUT_OF_MEMORY;
                answers++;
            }
            (void)free_now(&a);
        }
        _exit(strange != 0);
    }
    int status = 0;
    waitpid(pid, &status, 0);
    kill(noise, SIGKILL);
    waitpid(noise, NULL, 0);
    check(status == 0, "beside noise all over the file a process goes on, with answers that make sense (status %d)", status);
    check(truth->peak[0] <= LIMIT_MIB * MIB, "and never gets more than its limit itself");
}

static void grown_and_unlinked(void) {
    fresh();
    struct api a = api_start("libcuda.so.1");
    CUdeviceptr p;
    check(truncate(CARVE_USAGE_PATH, 1 << 30) == 0 && a.cuMemAlloc_v2(&p, 100 * MIB) == CUDA_SUCCESS, "grown, nothing changes");
    pid_t pid = fork();
    if (pid == 0) {
        struct api b = api_start("libcuda.so.1");
        _exit(free_now(&b) != (LIMIT_MIB - 2 * CONTEXT_MIB - 100) * MIB);
    }
    int status;
    waitpid(pid, &status, 0);
    check(status == 0, "for a new process either");
    check(unlink(CARVE_USAGE_PATH) == 0 && a.cuMemFree_v2(p) == CUDA_SUCCESS && a.cuMemAlloc_v2(&p, 100 * MIB) == CUDA_SUCCESS, "unlinked, those that have it go on");
    pid = fork();
    if (pid == 0) {
        struct api b = api_load("libcuda.so.1");
        CUcontext c;
        b.cuInit(0);
        _exit(b.cuCtxCreate_v2(&c, 0, 0) != CUDA_ERROR_OUT_OF_MEMORY);
    }
    waitpid(pid, &status, 0);
    check(status == 0, "and new ones are refused");
}

/* The one thing that a process can't survive: the memory behind its mapping is gone. It is the doing of its own
 * container and ends only processes of that. */
static void truncated(void) {
    fresh();
    pid_t pid = fork();
    if (pid == 0) {
        struct api a = api_start("libcuda.so.1");
        CUdeviceptr p;
        if (truncate(CARVE_USAGE_PATH, 0) != 0) {
            _exit(9);
        }
        a.cuMemAlloc_v2(&p, MIB);
        _exit(0);
    }
    int status;
    waitpid(pid, &status, 0);
    check(WIFSIGNALED(status) && WTERMSIG(status) == SIGBUS, "truncated, a process that has it mapped ends at its next request");
    pid = fork();
    if (pid == 0) {
        struct api b = api_load("libcuda.so.1");
        CUcontext c;
        b.cuInit(0);
        _exit(b.cuCtxCreate_v2(&c, 0, 0) != CUDA_ERROR_OUT_OF_MEMORY);
    }
    waitpid(pid, &status, 0);
    check(status == 0, "and new ones are refused, until it is mended");
}

static int run(void *scenario) {
    ((void (*)(void))scenario)();
    return 0;
}

int main(void) {
    static const struct { const char *name; void (*run)(void); } scenarios[] = {
        {"zeroed", zeroed}, {"filled with ones", filled_with_ones}, {"high water lowered", high_water_lowered},
        {"scribbled", scribbled}, {"grown and unlinked", grown_and_unlinked}, {"truncated", truncated},
    };
    for (size_t i = 0; i < sizeof scenarios / sizeof scenarios[0]; i++) {
        printf("# %s\n", scenarios[i].name);
        check(in_child(run, (void *)scenarios[i].run) == 0, "%s: ran to its end", scenarios[i].name);
    }
    return tap_done();
}
