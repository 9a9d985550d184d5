/* SPDX-License-Identifier: Apache-2.0 */
/* Green contexts over the software GPU, whose driver has them from branch 550 on. */
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>

#include "soft_box.h"
#include "tap.h"

#define CALL(name) ((__typeof__(name) *)dlsym(a.handle, #name))

static struct api a;

static bool agrees(void) { return box_used(0) == truth(0, getpid()) && box_pending(0) == 0; }

static CUgreenCtx green_of(const CUdevResource *part) {
    CUdevResourceDesc desc = NULL;
    CUgreenCtx green = NULL;
    CUdevResource copy = *part;
    return CALL(cuDevResourceGenerateDesc)(&desc, &copy, 1) == CUDA_SUCCESS && CALL(cuGreenCtxCreate)(&green, desc, 0, CU_GREEN_CTX_DEFAULT_STREAM) == CUDA_SUCCESS ? green : NULL;
}

/* Another thread comes just between what the driver does and what is made of it. It is given the time to get through,
 * which it has to wait for; if it needs longer than that, it comes later and nothing is shown. */
static pthread_t other;
static unsigned other_done, failed;
static void *retain_and_allocate(void *argument) {
    CUcontext c;
    CUdeviceptr p;
    failed += a.cuDevicePrimaryCtxRetain(&c, 0) != CUDA_SUCCESS || a.cuCtxSetCurrent(c) != CUDA_SUCCESS || a.cuMemAlloc_v2(&p, 100 * MIB) != CUDA_SUCCESS || a.cuCtxSetCurrent(NULL) != CUDA_SUCCESS;
    __atomic_store_n(&other_done, 1, __ATOMIC_RELEASE);
    return argument;
}

static void interrupt(int number) {
    (void)number;
    pthread_create(&other, NULL, retain_and_allocate, NULL);
    for (int i = 0; i < 500 && __atomic_load_n(&other_done, __ATOMIC_ACQUIRE) == 0; i++) {
        usleep(1000);
    }
}

/* A green context that is the only use of the primary one goes, which another thread makes anew at that moment. */
static void interrupted(const CUdevResource *part, bool named) {
    void (*arm)(const char *, unsigned, int) = (void (*)(const char *, unsigned, int))dlsym(a.handle, "carve_test_arm");
    CUcontext name = NULL;
    CUdeviceptr p;
    CUgreenCtx green = green_of(part);
    bool good = green != NULL;
    other_done = failed = 0;
    other = 0;
    if (named) {
        good = good && CALL(cuCtxFromGreenCtx)(&name, green) == CUDA_SUCCESS && a.cuCtxSetCurrent(name) == CUDA_SUCCESS && a.cuMemAlloc_v2(&p, 200 * MIB) == CUDA_SUCCESS && a.cuCtxSetCurrent(NULL) == CUDA_SUCCESS;
    }
    arm("green-gone", 0, SIGUSR1);
    good = good && CALL(cuGreenCtxDestroy)(green) == CUDA_SUCCESS && other != 0;
    pthread_join(other, NULL);
    check(good && failed == 0 && agrees(), "a primary context made anew just when it went with %s: %zu MiB charged, %zu on the card", named ? "a green one that was used" : "a green one", box_used(0) / MIB, truth(0, getpid()) / MIB);
    check(a.cuDevicePrimaryCtxRelease_v2(0) == CUDA_SUCCESS && box_used(0) == 0 && agrees(), "and nothing is left once that is released (%zu MiB)", box_used(0) / MIB);
}

int main(int argc, char **argv) {
    CUdevResource all, parts[2];
    CUcontext names[2] = {NULL}, primary = NULL;
    CUgreenCtx greens[2];
    CUdeviceptr first = 0, second = 0, p = 0;
    unsigned count = 2;
    a = start(1000, 1000, CARVE_LIMITS_SELF_VISIBLE);
    check(CALL(cuDeviceGetDevResource)(0, &all, CU_DEV_RESOURCE_TYPE_SM) == CUDA_SUCCESS &&
              CALL(cuDevSmResourceSplitByCount)(parts, &count, &all, NULL, 0, all.sm.smCount / 2) == CUDA_SUCCESS && count == 2,
          "a card is split");
    if (argc == 2 && strcmp(argv[1], "steps") == 0) {
        signal(SIGUSR1, interrupt);
        interrupted(&parts[0], true);
        interrupted(&parts[0], false);
        return tap_done();
    }
    greens[0] = green_of(&parts[0]);
    uint64_t bare = box_used(0);
    check(greens[0] != NULL && bare > 100 * MIB && agrees(), "a green context is charged as the driver does (%zu MiB)", (size_t)(bare / MIB));
    greens[1] = green_of(&parts[1]);
    check(greens[1] != NULL && box_used(0) == bare && agrees(), "a second one costs nothing more");
    check(CALL(cuCtxFromGreenCtx)(&names[0], greens[0]) == CUDA_SUCCESS && CALL(cuCtxFromGreenCtx)(&names[1], greens[1]) == CUDA_SUCCESS, "both have names");
    check(a.cuCtxSetCurrent(names[0]) == CUDA_SUCCESS && a.cuMemAlloc_v2(&first, 100 * MIB) == CUDA_SUCCESS && box_used(0) == bare + 100 * MIB && agrees(), "memory is charged in one");
    check(a.cuCtxSetCurrent(names[1]) == CUDA_SUCCESS && a.cuMemAlloc_v2(&second, 100 * MIB) == CUDA_SUCCESS && box_used(0) == bare + 200 * MIB && agrees(), "and in the other");
    check(info(&a).free == 1000 * MIB - bare - 200 * MIB && info(&a).total == 1000 * MIB, "which sees what is left");
    check(a.cuMemAlloc_v2(&p, info(&a).free + 2 * MIB) == CUDA_ERROR_OUT_OF_MEMORY && agrees(), "and gets no more");
    check(CALL(cuGreenCtxDestroy)(greens[0]) == CUDA_SUCCESS && box_used(0) == bare + 200 * MIB && agrees(), "memory outlives the one that it was had in");
    check(a.cuMemFree_v2(first) == CUDA_SUCCESS && box_used(0) == bare + 100 * MIB && agrees(), "until it is freed");
    check(CALL(cuDevicePrimaryCtxRetain)(&primary, 0) == CUDA_SUCCESS && CALL(cuGreenCtxDestroy)(greens[1]) == CUDA_SUCCESS && box_used(0) == bare + 100 * MIB && agrees(), "the primary context stays while it is in use");
    check(CALL(cuDevicePrimaryCtxRelease_v2)(0) == CUDA_SUCCESS && box_used(0) == 0 && agrees(), "and takes all along in the end (%zu MiB)", (size_t)(box_used(0) / MIB));
    greens[0] = green_of(&parts[0]);
    check(greens[0] != NULL && box_used(0) == bare && CALL(cuGreenCtxDestroy)(greens[0]) == CUDA_SUCCESS && box_used(0) == 0 && agrees(), "a green context that is the only use goes with it");
    return tap_done();
}
