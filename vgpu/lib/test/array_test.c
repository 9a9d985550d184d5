/* SPDX-License-Identifier: Apache-2.0 */
/* Arrays over the software GPU: what is charged is, after each call, what the driver says that the process has. */
#define _GNU_SOURCE
#include "soft_box.h"
#include "tap.h"

#define CALL(name) ((__typeof__(name) *)dlsym(a.handle, #name))

static struct api a;
static CUcontext context;
static uint64_t bare;

static void open_share(uint64_t mib) {
    a = start(mib, mib, CARVE_LIMITS_SELF_VISIBLE);
    if (a.cuCtxCreate_v2(&context, 0, 0) != CUDA_SUCCESS) {
        exit(3);
    }
    bare = truth(0, getpid());
}

static unsigned up_to(unsigned *seed, unsigned most) { return 1 + (unsigned)rand_r(seed) % most; }

/* Any description that the driver may take, and some that it won't. */
static CUDA_ARRAY3D_DESCRIPTOR some_array(unsigned *seed) {
    static const CUarray_format formats[] = {CU_AD_FORMAT_UNSIGNED_INT8, CU_AD_FORMAT_HALF, CU_AD_FORMAT_FLOAT, CU_AD_FORMAT_SIGNED_INT16,
                                             CU_AD_FORMAT_BC1_UNORM, CU_AD_FORMAT_BC7_UNORM, CU_AD_FORMAT_NV12, CU_AD_FORMAT_UNORM_INT8X4, CU_AD_FORMAT_SNORM_INT16X2};
    CUDA_ARRAY3D_DESCRIPTOR r = {.Format = formats[rand_r(seed) % 9], .NumChannels = 1u << (unsigned)rand_r(seed) % 3};
    unsigned side = rand_r(seed) % 3 == 0 ? 3000 : 200;
    r.Width = up_to(seed, side);
    switch (rand_r(seed) % 5) {
    case 0:
        break;
    case 1:
        r.Height = up_to(seed, 60), r.Depth = up_to(seed, 60);
        break;
    case 2:
        r.Height = up_to(seed, side), r.Depth = up_to(seed, 8), r.Flags = CUDA_ARRAY3D_LAYERED;
        break;
    case 3:
        r.Height = r.Width, r.Depth = 6, r.Flags = CUDA_ARRAY3D_CUBEMAP;
        break;
    default:
        r.Height = up_to(seed, side);
    }
    switch (r.Format) {
    case CU_AD_FORMAT_NV12:
        r.NumChannels = 3, r.Width = (r.Width + 1) / 2 * 2, r.Height = (r.Height + 2) / 2 * 2, r.Depth = 0, r.Flags = 0;
        break;
    case CU_AD_FORMAT_BC1_UNORM:
    case CU_AD_FORMAT_BC7_UNORM:
        r.NumChannels = 4, r.Width = (r.Width + 3) / 4 * 4, r.Height = r.Flags == CUDA_ARRAY3D_CUBEMAP ? r.Width : (r.Height + 4) / 4 * 4;
        break;
    case CU_AD_FORMAT_UNORM_INT8X4:
        r.NumChannels = 4;
        break;
    case CU_AD_FORMAT_SNORM_INT16X2:
        r.NumChannels = 2;
        break;
    default:
        break;
    }
    return r;
}

static void agrees_with_the_driver(bool beside_others) {
    enum { LIVE = 300 };
    static struct { void *at; enum { NONE, ARRAY, MIPMAPPED, LINEAR } kind; } p[LIVE];
    unsigned seed = 19, disagree = 0, over = 0, had = 0, refused = 0, invalid = 0, strange = 0;
    open_share(1300);
    for (int i = 0; i < 12000; i++) {
        int at = rand_r(&seed) % LIVE;
        unsigned what = (unsigned)rand_r(&seed) % 100;
        CUDA_ARRAY3D_DESCRIPTOR d = some_array(&seed);
        if (p[at].kind == ARRAY) {
            strange += CALL(cuArrayDestroy)(p[at].at) != CUDA_SUCCESS;
            p[at].kind = NONE;
        } else if (p[at].kind == MIPMAPPED) {
            CUarray level;
            strange += CALL(cuMipmappedArrayGetLevel)(&level, p[at].at, 0) != CUDA_SUCCESS || CALL(cuArrayDestroy)(level) == CUDA_SUCCESS;
            strange += CALL(cuMipmappedArrayDestroy)(p[at].at) != CUDA_SUCCESS;
            p[at].kind = NONE;
        } else if (p[at].kind == LINEAR) {
            strange += a.cuMemFree_v2((CUdeviceptr)(uintptr_t)p[at].at) != CUDA_SUCCESS;
            p[at].kind = NONE;
        } else {
            CUresult result;
            void *made = &seed;
            int kind = ARRAY;
            if (beside_others && what < 30) {
                CUdeviceptr linear = (CUdeviceptr)(uintptr_t)&seed;
                result = a.cuMemAlloc_v2(&linear, up_to(&seed, what < 20 ? 100000 : 9 << 20));
                made = (void *)(uintptr_t)linear;
                kind = LINEAR;
            } else if (what < 50) {
                result = CALL(cuArray3DCreate_v2)((CUarray *)&made, &d);
            } else if (what < 60) {
                CUDA_ARRAY_DESCRIPTOR flat = {d.Width, d.Height, d.Format, d.NumChannels};
                result = CALL(cuArrayCreate_v2)((CUarray *)&made, &flat);
            } else if (what < 65) {
                CUDA_ARRAY_DESCRIPTOR_v1 flat = {(unsigned)d.Width, (unsigned)d.Height, d.Format, d.NumChannels};
                result = CALL(cuArrayCreate)((CUarray *)&made, &flat);
            } else if (what < 70) {
                CUDA_ARRAY3D_DESCRIPTOR_v1 narrow = {(unsigned)d.Width, (unsigned)d.Height, (unsigned)d.Depth, d.Format, d.NumChannels, d.Flags};
                result = CALL(cuArray3DCreate)((CUarray *)&made, &narrow);
            } else if (what < 75) {
                d.Flags |= CUDA_ARRAY3D_DEFERRED_MAPPING;
                result = CALL(cuArray3DCreate_v2)((CUarray *)&made, &d);
            } else {
                result = CALL(cuMipmappedArrayCreate)((CUmipmappedArray *)&made, &d, up_to(&seed, 12));
                kind = MIPMAPPED;
            }
            had += result == CUDA_SUCCESS;
            refused += result == CUDA_ERROR_OUT_OF_MEMORY;
            invalid += result == CUDA_ERROR_INVALID_VALUE;
            strange += result != CUDA_SUCCESS && (made != &seed || (result != CUDA_ERROR_OUT_OF_MEMORY && result != CUDA_ERROR_INVALID_VALUE));
            p[at].kind = result == CUDA_SUCCESS ? kind : NONE;
            p[at].at = made;
        }
        uint64_t on_card = truth(0, getpid());
        if (box_used(0) != on_card && disagree++ == 0) {
            printf("# call %d (%u): %zu charged, %zu on the card\n", i, what, box_used(0), on_card);
        }
        over += on_card > 1300 * MIB;
    }
    check(disagree == 0 && box_pending(0) == 0, "after each of 12000 calls the ledger has what the driver has (%u times not)", disagree);
    check(over == 0, "the card never held more than the limit (%u times it did)", over);
    check(had > 3000 && refused > 50 && invalid > 50 && strange == 0, "%u grants, %u refusals, %u invalid, %u strange answers", had, refused, invalid, strange);
    check(a.cuCtxDestroy_v2(context) == CUDA_SUCCESS && box_used(0) == 0 && truth(0, getpid()) == 0 && box_usage()->lines[0][0].allocations == 0, "all of it goes with the context");
}
static void alone(void) { agrees_with_the_driver(false); }
static void beside_others(void) { agrees_with_the_driver(true); }

static int run(void *scenario) {
    ((void (*)(void))scenario)();
    return 0;
}

int main(void) {
    check(in_child(run, (void *)alone) == 0, "arrays: ran to its end");
    check(in_child(run, (void *)beside_others) == 0, "arrays beside other memory: ran to its end");
    return tap_done();
}
