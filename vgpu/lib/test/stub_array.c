/* SPDX-License-Identifier: Apache-2.0 */
/* stub_array.c: arrays of float of the stub driver, in whole pages. It can't make any that get their memory later. */
#include <stdlib.h>

#include "stub.h"

struct CUarray_st {
    int card;
    uint64_t bytes;
};

CUresult cuArray3DCreate_v2(CUarray *array, const CUDA_ARRAY3D_DESCRIPTOR *a) {
    CUdevice device;
    CUresult result = cuCtxGetDevice(&device);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    if (array == NULL || a == NULL || a->Width == 0 || a->Format != CU_AD_FORMAT_FLOAT || a->Flags != 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    uint64_t bytes = a->Width * (a->Height ? a->Height : 1) * (a->Depth ? a->Depth : 1) * a->NumChannels * 4;
    CUarray made = malloc(sizeof *made);
    *made = (struct CUarray_st){stub_card(device), (bytes + (2 << 20) - 1) >> 21 << 21};
    if (!stub_take(made->card, made->bytes)) {
        free(made);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *array = made;
    return CUDA_SUCCESS;
}

CUresult cuArrayDestroy(CUarray array) {
    if (array == NULL) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    stub_give(array->card, array->bytes);
    free(array);
    return CUDA_SUCCESS;
}
