/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cuda_hooks.h: every function of the driver that the front answers itself, once.
 *
 * The linker's version script, the look-up of the driver's own functions, the answers of cuGetProcAddress and
 * the tests are all made from this table. Names are as exported; their types are in cuda_abi.h.
 *
 *   X(name, release, what it does, what it does when the limits can't be read)
 *
 * The release is the CUDA version that brought the entry point. A hook that the installed driver doesn't have
 * answers CUDA_ERROR_NOT_SUPPORTED.
 */
#ifndef CARVE_CUDA_HOOKS_H
#define CARVE_CUDA_HOOKS_H

#define CARVE_CUDA_HOOKS(X)                                                                                  \
    X(cuMemAlloc, "2.0", "charge pages", "refuse")                                                           \
    X(cuMemAlloc_v2, "3.2", "charge pages", "refuse")                                                        \
    X(cuMemAllocPitch, "2.0", "charge pages of the real pitch", "refuse")                                    \
    X(cuMemAllocPitch_v2, "3.2", "charge pages of the real pitch", "refuse")                                 \
    X(cuMemAllocManaged, "6.0", "charge pages", "refuse")                                                    \
    X(cuMemFree, "2.0", "give back", "pass")                                                                 \
    X(cuMemFree_v2, "3.2", "give back", "pass")                                                              \
    X(cuMemCreate, "10.2", "charge pages", "refuse")                                                         \
    X(cuMemRelease, "10.2", "give back with the last handle and mapping", "pass")                            \
    X(cuMemRetainAllocationHandle, "11.0", "count the handle", "pass")                                       \
    X(cuMemMap, "10.2", "count the mapping", "pass")                                                         \
    X(cuMemUnmap, "10.2", "give back with the last handle and mapping", "pass")                              \
    X(cuCtxCreate, "2.0", "charge a context", "refuse")                                                      \
    X(cuCtxCreate_v2, "3.2", "charge a context", "refuse")                                                   \
    X(cuCtxCreate_v3, "11.4", "charge a context", "refuse")                                                  \
    X(cuCtxCreate_v4, "12.5", "charge a context", "refuse")                                                  \
    X(cuCtxDestroy, "2.0", "give back all of it", "pass")                                                    \
    X(cuCtxDestroy_v2, "4.0", "give back all of it", "pass")                                                 \
    X(cuDevicePrimaryCtxRetain, "7.0", "charge a context", "refuse")                                         \
    X(cuDevicePrimaryCtxRelease, "7.0", "give back all of it with the last one", "pass")                     \
    X(cuDevicePrimaryCtxRelease_v2, "11.0", "give back all of it with the last one", "pass")                 \
    X(cuDevicePrimaryCtxReset, "7.0", "give back all of it", "pass")                                         \
    X(cuDevicePrimaryCtxReset_v2, "11.0", "give back all of it", "pass")                                     \
    X(cuMemGetInfo, "2.0", "show the share", "operating system error")                                       \
    X(cuMemGetInfo_v2, "3.2", "show the share", "operating system error")                                    \
    X(cuDeviceTotalMem, "2.0", "show the share", "operating system error")                                   \
    X(cuDeviceTotalMem_v2, "3.2", "show the share", "operating system error")                                \
    X(cuGetProcAddress, "11.3", "hand out hooks for what is hooked", "the same")                             \
    X(cuGetProcAddress_v2, "12.0", "hand out hooks for what is hooked", "the same")

/* Functions that the front calls and doesn't hook. */
#define CARVE_CUDA_CALLS(X)        \
    X(cuCtxGetCurrent)             \
    X(cuCtxGetDevice)              \
    X(cuDeviceGetUuid)             \
    X(cuDeviceGetUuid_v2)          \
    X(cuDevicePrimaryCtxGetState)

#endif
