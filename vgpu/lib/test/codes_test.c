/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the driver says no to it says no to with a share, too, by the same code: codes_test FILE [MIB CONTEXT_MIB]
 * writes the answers to calls before cuInit, in a forked child, of devices that aren't there, and with arguments that
 * are nonsense, of every hook that takes a device or a description. Bare, and with a share where both numbers are
 * given; run.sh compares the two.
 */
#define _GNU_SOURCE
#include <stdarg.h>
#include <sys/wait.h>

#include "cuda_hooks.h"
#include "compute_box.h"
#include "tap.h"

static void *library;
static FILE *out;
static const char *phase;

enum { MOST = 512 };
static const char *asked[MOST];
static unsigned asked_count;

#define X(name, release, parameters, ...) typedef CUresult type_##name parameters;
CARVE_CUDA_HOOKS(X)
#undef X

/* Asks, and writes the answer down beside how it was asked. */
#define ASK(name, ...)                                                                                    \
    do {                                                                                                  \
        type_##name *call_ = (type_##name *)dlsym(library, #name);                                        \
        note(#name);                                                                                      \
        if (call_ == NULL) {                                                                              \
            fprintf(out, "%s: " #name ": absent\n", phase);                                               \
        } else {                                                                                          \
            fprintf(out, "%s: " #name "(" #__VA_ARGS__ "): %d\n", phase, (int)call_(__VA_ARGS__));        \
        }                                                                                                 \
    } while (0)

static void note(const char *name) {
    for (unsigned i = 0; i < asked_count; i++) {
        if (strcmp(asked[i], name) == 0) {
            return;
        }
    }
    asked[asked_count++] = name;
}

static const CUDA_ARRAY3D_DESCRIPTOR deep = {.Width = 64, .Height = 64, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 4};
static const CUDA_ARRAY3D_DESCRIPTOR_v1 deep32 = {.Width = 64, .Height = 64, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 4};
static const CUDA_ARRAY_DESCRIPTOR flat = {.Width = 64, .Height = 64, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 4};
static const CUDA_ARRAY_DESCRIPTOR_v1 flat32 = {.Width = 64, .Height = 64, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 4};

static CUcontext context;
static CUdeviceptr pointer;
static CUdeviceptr_v1 pointer32;
static size_t size, total;
static unsigned int size32, total32;
static CUmemGenericAllocationHandle block;
static CUmemoryPool pool;
static CUarray array;
static CUmipmappedArray mipmapped;
static CUgreenCtx green;
static CUgraph graph;
static CUgraphExec exec;
static CUexternalMemory external;

static CUmemAllocationProp memory_of(CUdevice device) {
    return (CUmemAllocationProp){.type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {CU_MEM_LOCATION_TYPE_DEVICE, device}};
}

/* All that takes a device. Nothing of it is had, or it is given back. */
static void with_device(CUdevice device) {
    CUmemAllocationProp memory = memory_of(device);
    CUmemPoolProps properties = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {CU_MEM_LOCATION_TYPE_DEVICE, device}};
    CUmulticastObjectProp object = {.numDevices = 2, .size = 2 << 20};
    ASK(cuCtxCreate, &context, 0, device);
    ASK(cuCtxCreate_v2, &context, 0, device);
    ASK(cuCtxCreate_v3, &context, NULL, 0, 0, device);
    ASK(cuCtxCreate_v4, &context, NULL, 0, device);
    ASK(cuCtxCreate_v2, NULL, 0, device);
    ASK(cuGLCtxCreate, &context, 0, device);
    ASK(cuGLCtxCreate_v2, &context, 0, device);
    ASK(cuVDPAUCtxCreate, &context, 0, device, 0, NULL);
    ASK(cuVDPAUCtxCreate_v2, &context, 0, device, 0, NULL);
    ASK(cuGreenCtxCreate, &green, NULL, device, 1);
    ASK(cuDevicePrimaryCtxRetain, &context, device);
    ASK(cuDevicePrimaryCtxRetain, NULL, device);
    ASK(cuDevicePrimaryCtxRelease, device);
    ASK(cuDevicePrimaryCtxRelease_v2, device);
    ASK(cuDevicePrimaryCtxReset, device);
    ASK(cuDevicePrimaryCtxReset_v2, device);
    ASK(cuDeviceTotalMem_v2, NULL, device);
    ASK(cuDeviceTotalMem_v2, &size, device);
    ASK(cuDeviceTotalMem, &size32, device);
    ASK(cuDeviceGraphMemTrim, device);
    ASK(cuDeviceSetMemPool, device, NULL);
    ASK(cuMemCreate, &block, 2 << 20, &memory, 0);
    ASK(cuMemCreate, NULL, 2 << 20, &memory, 0);
    ASK(cuMemPoolCreate, &pool, &properties);
    ASK(cuMulticastCreate, &block, &object);
    ASK(cuMulticastBindMem_v2, 77, device, 0, 78, 0, 2 << 20, 0);
    ASK(cuMulticastBindAddr_v2, 77, device, 0, 2 << 20, 2 << 20, 0);
    ASK(cuMulticastUnbind, 77, device, 0, 2 << 20);
}

/* All that takes a description, or goes where the current context is. */
static void with_description(void) {
    ASK(cuArrayCreate, &array, &flat32);
    ASK(cuArrayCreate_v2, &array, &flat);
    ASK(cuArray3DCreate, &array, &deep32);
    ASK(cuArray3DCreate_v2, &array, &deep);
    ASK(cuMipmappedArrayCreate, &mipmapped, &deep, 2);
    ASK(cuMipmappedArrayCreate, &mipmapped, &deep, 0);
    ASK(cuArray3DCreate_v2, &array, NULL);
    ASK(cuMemAlloc_v2, &pointer, 4096);
    ASK(cuMemAlloc_v2, &pointer, 0);
    ASK(cuMemAlloc, &pointer32, 4096);
    ASK(cuMemAllocManaged, &pointer, 4096, 1);
    ASK(cuMemAllocPitch_v2, &pointer, &size, 64, 64, 4);
    ASK(cuMemAllocPitch, &pointer32, &size32, 64, 64, 4);
    ASK(cuMemAllocAsync, &pointer, 4096, NULL);
    ASK(cuMemAllocAsync_ptsz, &pointer, 4096, NULL);
    ASK(cuMemAllocFromPoolAsync, &pointer, 4096, NULL, NULL);
    ASK(cuMemGetInfo_v2, &size, &total);
    ASK(cuMemGetInfo, &size32, &total32);
    ASK(cuCtxSetLimit, 0, 2048);
    ASK(cuCtxSetLimit, 99, 2048);
    ASK(cuMemFree_v2, 4096);
    ASK(cuMemFreeAsync, 4096, NULL);
    ASK(cuCtxDestroy_v2, NULL);
    ASK(cuStreamSynchronize, NULL);
    ASK(cuCtxSynchronize);
    ASK(cuMemPoolDestroy, NULL);
    ASK(cuMemPoolTrimTo, NULL, 0);
    ASK(cuMemRelease, 77);
    ASK(cuMemMap, 2 << 20, 2 << 20, 0, 77, 0);
    ASK(cuMemUnmap, 2 << 20, 2 << 20);
    ASK(cuLaunchKernel, NULL, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL);
    ASK(cuLaunchCooperativeKernelMultiDevice, NULL, 1, 0);
    ASK(cuGraphInstantiateWithFlags, &exec, NULL, 0);
    ASK(cuGraphInstantiateWithParams, &exec, NULL, NULL);
    ASK(cuGraphInstantiateWithParams_ptsz, &exec, NULL, NULL);
    ASK(cuGraphLaunch, NULL, NULL);
    ASK(cuStreamBeginCapture_v2, NULL, 0);
    ASK(cuStreamEndCapture, NULL, &graph);
    ASK(cuImportExternalMemory, &external, NULL);
}

/* With a context, in a share that is smaller than all of it: nonsense isn't a matter of room. */
static void nonsense(void) {
    static const size_t huge[] = {SIZE_MAX, (size_t)1 << 63, (size_t)1 << 50};
    for (int i = 0; i < 3; i++) {
        CUmemAllocationProp memory = memory_of(0);
        char name[64];
        snprintf(name, sizeof name, "of 2^%d bytes", i == 0 ? 64 : i == 1 ? 63 : 50);
        phase = name;
        ASK(cuMemAlloc_v2, &pointer, huge[i]);
        ASK(cuMemAllocPitch_v2, &pointer, &size, huge[i], 1, 4);
        ASK(cuMemAllocPitch_v2, &pointer, &size, huge[i], huge[i], 4);
        ASK(cuMemAllocManaged, &pointer, huge[i], 1);
        ASK(cuMemAllocManaged, &pointer, huge[i], 0);
        ASK(cuMemAllocAsync, &pointer, huge[i], NULL);
        ASK(cuMemCreate, &block, huge[i], &memory, 0);
        ASK(cuCtxSetLimit, 0, huge[i]);
    }
    phase = "beyond the share";
    size_t beyond = (size_t)1 << 37;
    CUmemAllocationProp memory = memory_of(0), other;
    ASK(cuMemAlloc_v2, &pointer, beyond);
    ASK(cuMemAllocPitch_v2, &pointer, &size, 1 << 20, 1 << 20, 4);
    ASK(cuMemAllocPitch_v2, &pointer, &size, 1 << 20, 1 << 20, 3);
    ASK(cuMemAllocManaged, &pointer, beyond, 0);
    ASK(cuMemAllocManaged, &pointer, beyond, 9);
    ASK(cuMemCreate, &block, beyond, &memory, 0);
    ASK(cuMemCreate, &block, beyond, &memory, 1);
    ASK(cuMemCreate, &block, beyond + 4096, &memory, 0);
    other = memory, other.type = 0;
    ASK(cuMemCreate, &block, beyond, &other, 0);
    other = memory, other.location.type = 9;
    ASK(cuMemCreate, &block, beyond, &other, 0);
    static const size_t sides[] = {0, (1 << 17) + 1, 1 << 20, (1 << 20) + 1, (size_t)1 << 31, (size_t)1 << 40};
    for (unsigned i = 0; i < sizeof sides / sizeof sides[0]; i++) {
        CUDA_ARRAY3D_DESCRIPTOR wide = deep, high = deep, thick = deep;
        char name[64];
        snprintf(name, sizeof name, "arrays of side %zu", sides[i]);
        phase = name;
        wide.Width = sides[i];
        high.Height = sides[i] == 0 ? 1 << 18 : sides[i];
        thick.Depth = sides[i] == 0 ? 1 << 18 : sides[i];
        ASK(cuArray3DCreate_v2, &array, &wide);
        ASK(cuArray3DCreate_v2, &array, &high);
        ASK(cuArray3DCreate_v2, &array, &thick);
        ASK(cuMipmappedArrayCreate, &mipmapped, &wide, 3);
        ASK(cuMipmappedArrayCreate, &mipmapped, &high, 3);
        ASK(cuMipmappedArrayCreate, &mipmapped, &thick, 3);
    }
    static const unsigned channels[] = {0, 3, 5, 1u << 31};
    for (unsigned i = 0; i < 4; i++) {
        CUDA_ARRAY3D_DESCRIPTOR odd = deep;
        char name[64];
        snprintf(name, sizeof name, "arrays of %u channels", channels[i]);
        phase = name;
        odd.NumChannels = channels[i];
        ASK(cuArray3DCreate_v2, &array, &odd);
        ASK(cuMipmappedArrayCreate, &mipmapped, &odd, 3);
    }
}

/* In a share with no room left, or a card that has some: what no driver takes, or none without graphics. */
static void contexts_of_nonsense(void) {
    static char noise[4096];
    CUexecAffinityParam part = {.param = {.smCount = {1}}}, none = {.param = {.smCount = {0}}}, odd = {.type = 9, .param = {.smCount = {1}}};
    CUctxCigParam cig = {.sharedDataType = 2, .sharedData = noise};
    CUctxCreateParams with_cig = {.cigParams = &cig}, with_part = {.execAffinityParams = &part, .numExecAffinityParams = 1};
    static const unsigned flags[] = {0x100, 0xffff0000u, 3, 0x80000000u};
    for (unsigned i = 0; i < sizeof flags / sizeof flags[0]; i++) {
        char name[64];
        snprintf(name, sizeof name, "%s, flags %x", "contexts", flags[i]);
        phase = name;
        ASK(cuCtxCreate, &context, flags[i], 0);
        ASK(cuCtxCreate_v2, &context, flags[i], 0);
        ASK(cuCtxCreate_v3, &context, NULL, 0, flags[i], 0);
        ASK(cuCtxCreate_v4, &context, NULL, flags[i], 0);
        ASK(cuGLCtxCreate_v2, &context, flags[i], 0);
        ASK(cuGreenCtxCreate, &green, noise, 0, flags[i]);
    }
    phase = "contexts of nonsense";
    ASK(cuCtxCreate_v3, &context, &part, 1, 0, 0);
    ASK(cuCtxCreate_v3, &context, &none, 1, 0, 0);
    ASK(cuCtxCreate_v3, &context, &odd, 1, 0, 0);
    ASK(cuCtxCreate_v3, &context, &part, 2, 0, 0);
    ASK(cuCtxCreate_v3, &context, &part, -1, 0, 0);
    ASK(cuCtxCreate_v3, &context, NULL, 1, 0, 0);
    ASK(cuCtxCreate_v4, &context, &with_part, 0, 0);
    ASK(cuCtxCreate_v4, &context, &with_cig, 0, 0);
    ASK(cuGLCtxCreate, &context, 0, 0);
    ASK(cuGLCtxCreate_v2, &context, 0, 0);
    ASK(cuVDPAUCtxCreate, &context, 0, 0, 7, NULL);
    ASK(cuVDPAUCtxCreate_v2, &context, 0, 0, 7, noise);
    ASK(cuGreenCtxCreate, &green, NULL, 0, 1);
    ASK(cuGreenCtxCreate, &green, noise, 0, 1);
    ASK(cuGreenCtxCreate, &green, noise, 0, 0);
}

/* A kernel goes astray: from then on the driver has one answer to all in that context, and a share that has no room, or
 * figures of its own, mustn't have another. */
static void after_a_fault(void) {
    CUmodule module = NULL;
    CUfunction fill = NULL;
    CUdeviceptr wild = 0x10;
    unsigned int value = 1;
    uint64_t count = 4;
    void *parameters[] = {&wild, &value, &count};
    phase = "a kernel that goes astray";
    CUresult loaded = ((__typeof__(cuModuleLoadData) *)dlsym(library, "cuModuleLoadData"))(&module, kernel_text);
    fprintf(out, "%s: %d %d\n", phase, loaded, ((__typeof__(cuModuleGetFunction) *)dlsym(library, "cuModuleGetFunction"))(&fill, module, "carve_fill"));
    ASK(cuLaunchKernel, fill, 1, 1, 1, 1, 1, 1, 0, NULL, parameters, NULL);
    ASK(cuCtxSynchronize);
    static const size_t sizes[] = {4096, (size_t)1 << 37};
    for (int i = 0; i < 2; i++) {
        phase = i == 0 ? "after it" : "after it, more than there is";
        CUDA_ARRAY3D_DESCRIPTOR large = deep;
        large.Width = large.Height = i == 0 ? 64 : 1 << 16;
        ASK(cuMemGetInfo_v2, &size, &total);
        ASK(cuMemGetInfo_v2, &size, NULL);
        ASK(cuMemGetInfo, &size32, &total32);
        ASK(cuMemAlloc_v2, &pointer, sizes[i]);
        ASK(cuMemAlloc, &pointer32, 1u << 31);
        ASK(cuMemAllocPitch_v2, &pointer, &size, sizes[i] >> 10, 1 << 10, 4);
        ASK(cuMemAllocManaged, &pointer, sizes[i], 1);
        ASK(cuMemAllocAsync, &pointer, sizes[i], NULL);
        ASK(cuArray3DCreate_v2, &array, &large);
        ASK(cuMipmappedArrayCreate, &mipmapped, &large, 3);
        ASK(cuCtxSetLimit, 0, i == 0 ? 2048 : 262144);
        ASK(cuMemFree_v2, 4096);
        ASK(cuStreamSynchronize, NULL);
    }
}

static int share_of(void *numbers) {
    const uint64_t *mib = numbers;
    make_share(mib[0], mib[0], CARVE_LIMITS_SELF_VISIBLE);
    for (unsigned card = 0; card < 2; card++) {
        box_context(card, mib[1] * MIB);
    }
    return 0;
}

static int in_fork(void *unused) {
    (void)unused;
    phase = "in a forked child";
    with_device(0);
    with_description();
    fflush(out);
    return 0;
}

static bool takes(const char *parameters) {
    static const char *const what[] = {"CUdevice ", "Prop", "DESC", "PARAMS", "descriptor", "description"};
    for (unsigned i = 0; i < sizeof what / sizeof what[0]; i++) {
        if (strstr(parameters, what[i]) != NULL) {
            return true;
        }
    }
    return false;
}

int main(int argc, char **argv) {
    out = argc > 1 ? fopen(argv[1], "w") : NULL;
    if (out == NULL) {
        return 2;
    }
    if (argc == 4) {
        uint64_t mib[2] = {(uint64_t)atoll(argv[2]), (uint64_t)atoll(argv[3])};
        check(in_child(share_of, mib) == 0, "a share of %s MiB", argv[2]);
    }
    library = dlopen("libcuda.so.1", RTLD_NOW);
    if (library == NULL) {
        fprintf(stderr, "%s\n", dlerror());
        return 2;
    }
    phase = "before cuInit";
    with_device(0);
    with_device(99);
    with_description();
    phase = "at the start";
    ASK(cuInit, 7);
    ASK(cuInit, 0);
    static const CUdevice devices[] = {-1, 2, 63, 64, 1000000};
    for (unsigned i = 0; i < sizeof devices / sizeof devices[0]; i++) {
        char name[64];
        snprintf(name, sizeof name, "device %d", (int)devices[i]);
        phase = name;
        with_device(devices[i]);
    }
    phase = "without a context";
    with_description();
    phase = "with one";
    ASK(cuCtxCreate_v2, &context, 0xffff0000u, 0);
    ASK(cuCtxCreate_v2, &context, 0, 0);
    nonsense();
    if (argc == 4) {
        box_open();
        box_limit(0, box_used(0));
    }
    contexts_of_nonsense();
    if (argc == 4) { /* which the driver grants, where there is room: only in a share that has none is it seen that it is refused */
        check(((type_cuCtxCreate_v2 *)dlsym(library, "cuCtxCreate_v2"))(&context, 0, 0) == CUDA_ERROR_OUT_OF_MEMORY, "a context for which there is no room is refused for that");
    }
    after_a_fault();
    if (argc == 4) {
        CUmemAllocationProp memory = memory_of(0);
        check(((type_cuMemCreate *)dlsym(library, "cuMemCreate"))(&block, 2 << 20, &memory, 0) == CUDA_ERROR_ILLEGAL_ADDRESS &&
                  ((type_cuCtxCreate_v2 *)dlsym(library, "cuCtxCreate_v2"))(&context, 0, 0) == CUDA_ERROR_ILLEGAL_ADDRESS,
              "what there is no room for anyway is refused by the fault's code");
        memory = memory_of(1);
        check(((type_cuMemCreate *)dlsym(library, "cuMemCreate"))(&block, (size_t)1 << 37, &memory, 0) == CUDA_ERROR_OUT_OF_MEMORY, "but not on another card");
    }
    fflush(out);
    check(in_child(in_fork, NULL) == 0, "a forked child came to its end");
    unsigned missing = 0;
#define X(name, release, parameters, ...)                        \
    if (takes(#parameters)) {                                    \
        unsigned i = 0;                                          \
        while (i < asked_count && strcmp(asked[i], #name) != 0) { \
            i++;                                                 \
        }                                                        \
        missing += i == asked_count;                             \
        if (i == asked_count) {                                  \
            printf("# " #name " isn't asked\n");                 \
        }                                                        \
    }
    CARVE_CUDA_HOOKS(X)
#undef X
    check(missing == 0, "every hook that takes a device or a description was asked (%u not)", missing);
    check(fclose(out) == 0, "the answers are written down");
    return tap_done();
}
