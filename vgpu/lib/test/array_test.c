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

/* Whatever a description is, after the call the ledger has what the driver has, and a share that was full of arrays
 * before is full with as many after: what was refused left no place that nobody pays for. */
static unsigned fill(CUarray *list, unsigned most) {
    const CUDA_ARRAY3D_DESCRIPTOR one = {.Width = 256, .Height = 256, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 4}; /* 1 MiB */
    unsigned made = 0;
    while (made < most && CALL(cuArray3DCreate_v2)(&list[made], &one) == CUDA_SUCCESS) {
        made++;
    }
    return made;
}

static void nonsense(void) {
    enum { MOST = 2000, ODD = 1 << 20 };
    static CUarray list[MOST];
    static const CUDA_ARRAY3D_DESCRIPTOR odd[] = {
        {.Width = 64, .Height = 64, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 0},
        {.Width = 64, .Height = 64, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 3},
        {.Width = 64, .Height = 64, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 5},
        {.Width = 64, .Height = 64, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 1u << 31},
        {.Width = 64, .Height = 64, .Format = 0, .NumChannels = 1},
        {.Width = 64, .Height = 64, .Format = 0x7fffffff, .NumChannels = 1},
        {.Width = 0, .Height = 64, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 1},
        {.Width = ODD, .Height = ODD, .Depth = ODD, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 4}, /* 2^64 bytes */
        {.Width = ODD, .Height = ODD, .Depth = 1 << 16, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 4},
        {.Width = (size_t)1 << 60, .Height = 4, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 4},
        {.Width = 8, .Height = (size_t)1 << 60, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 4},
        {.Width = 8, .Height = 8, .Depth = 5, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 1, .Flags = CUDA_ARRAY3D_CUBEMAP},
        {.Width = 8, .Height = 8, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 1, .Flags = 1u << 30},
        {.Width = 3, .Height = 3, .Format = CU_AD_FORMAT_BC1_UNORM, .NumChannels = 1},
        {.Width = 3, .Height = 3, .Format = CU_AD_FORMAT_NV12, .NumChannels = 3},
    };
    unsigned disagree = 0, strange = 0, calls = 0, taken = 0;
    open_share(1000);
    unsigned before = fill(list, MOST);
    for (unsigned i = 0; i < before; i++) {
        strange += CALL(cuArrayDestroy)(list[i]) != CUDA_SUCCESS;
    }
    for (unsigned i = 0; i < 40 * sizeof odd / sizeof odd[0]; i++) {
        const CUDA_ARRAY3D_DESCRIPTOR *d = &odd[i % (sizeof odd / sizeof odd[0])];
        CUDA_ARRAY_DESCRIPTOR flat = {d->Width, d->Height, d->Format, d->NumChannels};
        CUDA_ARRAY_DESCRIPTOR_v1 flat32 = {(unsigned)d->Width, (unsigned)d->Height, d->Format, d->NumChannels};
        CUDA_ARRAY3D_DESCRIPTOR_v1 deep32 = {(unsigned)d->Width, (unsigned)d->Height, (unsigned)d->Depth, d->Format, d->NumChannels, d->Flags};
        static const unsigned levels[] = {0, 1, 3, 33, 1u << 31};
        for (unsigned form = 0; form < 9; form++, calls++) {
            void *made = NULL;
            CUresult result = form == 0   ? CALL(cuArray3DCreate_v2)((CUarray *)&made, d)
                              : form == 1 ? CALL(cuArray3DCreate)((CUarray *)&made, &deep32)
                              : form == 2 ? CALL(cuArrayCreate_v2)((CUarray *)&made, &flat)
                              : form == 3 ? CALL(cuArrayCreate)((CUarray *)&made, &flat32)
                                          : CALL(cuMipmappedArrayCreate)((CUmipmappedArray *)&made, d, levels[form - 4]);
            bool same = box_used(0) == truth(0, getpid());
            if (!same && disagree++ == 0) {
                printf("# description %u, form %u: %d, %zu charged, %zu on the card\n", i % 15, form, (int)result, box_used(0), truth(0, getpid()));
            }
            taken += result == CUDA_SUCCESS;
            strange += result == CUDA_SUCCESS && (form < 4 ? CALL(cuArrayDestroy)(made) : CALL(cuMipmappedArrayDestroy)(made)) != CUDA_SUCCESS;
            strange += result == CUDA_ERROR_OUT_OF_MEMORY && d->NumChannels == 0; /* there is nothing to be had for such a one */
        }
    }
    check(disagree == 0 && strange == 0 && box_pending(0) == 0, "after each of %u calls with odd descriptions the ledger has what the driver has (%u times not; %u were taken, %u strange answers)", calls, disagree, taken, strange);
    const CUDA_ARRAY3D_DESCRIPTOR none = {.Width = 64, .Height = 64, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 4};
    CUmipmappedArray mipmapped[1];
    for (unsigned i = 0; i < 2000; i++) { /* without levels: what a driver takes for one level is charged as that */
        disagree += CALL(cuMipmappedArrayCreate)(mipmapped, &none, 0) == CUDA_SUCCESS && box_used(0) != truth(0, getpid());
    }
    unsigned after = fill(list, MOST);
    check(disagree == 0 && after <= before && truth(0, getpid()) <= 1000 * MIB && box_used(0) == truth(0, getpid()),
          "%u arrays of 1 MiB before, %u after; %zu MiB on the card of 1000", before, after, truth(0, getpid()) / MIB);
}

static int run(void *scenario) {
    ((void (*)(void))scenario)();
    return 0;
}

int main(void) {
    check(in_child(run, (void *)alone) == 0, "arrays: ran to its end");
    check(in_child(run, (void *)beside_others) == 0, "arrays beside other memory: ran to its end");
    check(in_child(run, (void *)nonsense) == 0, "descriptions that no driver takes: ran to its end");
    return tap_done();
}
