/* SPDX-License-Identifier: Apache-2.0 */
/* linked.c: a program that names libcuda.so.1 as needed, as most do that aren't static. Quiet; 0 if all is well. */
#include "cuda_abi.h"

int main(void) {
    CUcontext context;
    CUdeviceptr p;
    size_t free_bytes = 0, total = 0;
    int version = 0;
    if (cuInit(0) != CUDA_SUCCESS || cuDriverGetVersion(&version) != CUDA_SUCCESS || version == 0) {
        return 1;
    }
    if (cuCtxCreate_v2(&context, 0, 0) != CUDA_SUCCESS || cuMemGetInfo_v2(&free_bytes, &total) != CUDA_SUCCESS) {
        return 2;
    }
    if (total != (size_t)1000 << 20 || cuMemAlloc_v2(&p, free_bytes + ((size_t)1 << 20)) != CUDA_ERROR_OUT_OF_MEMORY) {
        return 3;
    }
    return cuMemAlloc_v2(&p, free_bytes / 2) == CUDA_SUCCESS && cuMemFree_v2(p) == CUDA_SUCCESS ? 0 : 4;
}
