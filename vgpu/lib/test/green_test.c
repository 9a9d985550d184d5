/* SPDX-License-Identifier: Apache-2.0 */
/* Green contexts over the software GPU, whose driver has them from branch 550 on. */
#define _GNU_SOURCE
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

int main(void) {
    CUdevResource all, parts[2];
    CUcontext names[2] = {NULL}, primary = NULL;
    CUgreenCtx greens[2];
    CUdeviceptr first = 0, second = 0, p = 0;
    unsigned count = 2;
    a = start(1000, 1000, CARVE_LIMITS_SELF_VISIBLE);
    check(CALL(cuDeviceGetDevResource)(0, &all, CU_DEV_RESOURCE_TYPE_SM) == CUDA_SUCCESS &&
              CALL(cuDevSmResourceSplitByCount)(parts, &count, &all, NULL, 0, all.sm.smCount / 2) == CUDA_SUCCESS && count == 2,
          "a card is split");
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
