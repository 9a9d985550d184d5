/* SPDX-License-Identifier: Apache-2.0 */
/* Memory that is bound to multicast objects, over two cards of the software GPU behind switches: what is charged is what
 * the driver says that the process has. */
#define _GNU_SOURCE
#include "soft_box.h"
#include "tap.h"

#define CALL(name) ((__typeof__(name) *)dlsym(a.handle, #name))

static struct api a;
static CUcontext contexts[2];
static uint64_t bare[2];

static void open_shares(uint64_t mib) {
    a = start(mib, mib, CARVE_LIMITS_SELF_VISIBLE);
    for (int i = 0; i < 2; i++) {
        if (a.cuCtxCreate_v2(&contexts[i], 0, i) != CUDA_SUCCESS) {
            exit(3);
        }
        bare[i] = truth(i, getpid());
    }
}

static bool agrees(void) { return box_used(0) == truth(0, getpid()) && box_used(1) == truth(1, getpid()); }

static CUmemGenericAllocationHandle memory_of(int device, uint64_t bytes, CUresult *result) {
    CUmemAllocationProp property = {.type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {CU_MEM_LOCATION_TYPE_DEVICE, device}};
    CUmemGenericAllocationHandle made = 0;
    *result = CALL(cuMemCreate)(&made, bytes, &property, 0);
    return *result == CUDA_SUCCESS ? made : 0;
}

static CUmemGenericAllocationHandle object_for(uint64_t bytes) {
    CUmulticastObjectProp property = {.numDevices = 2, .size = bytes};
    CUmemGenericAllocationHandle object = 0;
    if (CALL(cuMulticastCreate)(&object, &property) != CUDA_SUCCESS || CALL(cuMulticastAddDevice)(object, 0) != CUDA_SUCCESS ||
        CALL(cuMulticastAddDevice)(object, 1) != CUDA_SUCCESS) {
        return 0;
    }
    return object;
}

static void bindings_keep_memory(void) {
    CUresult result;
    CUdeviceptr range, where;
    open_shares(2000);
    uint64_t allocations = box_usage()->lines[0][0].allocations;
    CUmemGenericAllocationHandle object = object_for(64 * MIB), other = object_for(64 * MIB);
    check(object != 0 && other != 0 && agrees() && box_used(0) == bare[0] && box_usage()->lines[0][0].allocations == allocations, "objects cost nothing");
    CUmemGenericAllocationHandle first = memory_of(0, 64 * MIB, &result), second = memory_of(1, 32 * MIB, &result);
    check(CALL(cuMulticastBindMem)(object, 0, first, 0, 32 * MIB, 0) == CUDA_SUCCESS && CALL(cuMulticastBindMem)(object, 0, second, 0, 32 * MIB, 0) == CUDA_SUCCESS && agrees(), "memory of both cards is bound");
    check(CALL(cuMemRelease)(first) == CUDA_SUCCESS && CALL(cuMemRelease)(second) == CUDA_SUCCESS && agrees() && box_used(0) == bare[0] + 64 * MIB && box_used(1) == bare[1] + 32 * MIB, "released, it stays charged while it is bound");
    check(CALL(cuMulticastUnbind)(object, 0, 0, 16 * MIB) == CUDA_ERROR_INVALID_VALUE && agrees(), "a call that the driver refuses changes nothing");
    check(CALL(cuMulticastUnbind)(object, 0, 0, 32 * MIB) == CUDA_SUCCESS && agrees() && box_used(0) == bare[0], "it goes as it is unbound");
    first = memory_of(0, 64 * MIB, &result);
    check(CALL(cuMulticastBindMem)(object, 0, first, 0, 64 * MIB, 0) == CUDA_SUCCESS && CALL(cuMulticastBindMem)(other, 0, first, 0, 64 * MIB, 0) == CUDA_SUCCESS && CALL(cuMemRelease)(first) == CUDA_SUCCESS && agrees(), "memory is bound to two objects");
    CALL(cuMemAddressReserve)(&range, 64 * MIB, 0, 0, 0);
    check(CALL(cuMemMap)(range, 64 * MIB, 0, object, 0) == CUDA_SUCCESS && CALL(cuMemRelease)(object) == CUDA_SUCCESS && agrees() && box_used(1) == bare[1] + 32 * MIB, "an object lives while it is mapped, and so do its bindings");
    check(CALL(cuMemUnmap)(range, 64 * MIB) == CUDA_SUCCESS && agrees() && box_used(1) == bare[1] && box_used(0) == bare[0] + 64 * MIB, "it goes with its last mapping, and what it had alone goes with it");
    check(CALL(cuMemRelease)(other) == CUDA_SUCCESS && agrees() && box_used(0) == bare[0], "the rest with the other object");

    object = object_for(64 * MIB);
    first = memory_of(0, 64 * MIB, &result);
    CALL(cuMemAddressReserve)(&where, 64 * MIB, 0, 0, 0);
    check(CALL(cuMemMap)(where, 64 * MIB, 0, first, 0) == CUDA_SUCCESS && CALL(cuMemRelease)(first) == CUDA_SUCCESS && CALL(cuMulticastBindAddr)(object, 0, where + 8 * MIB, 32 * MIB, 0) == CUDA_SUCCESS && CALL(cuMemUnmap)(where, 64 * MIB) == CUDA_SUCCESS && agrees() && box_used(0) == bare[0] + 64 * MIB, "memory bound by its address stays, too");
    check(CALL(cuMulticastBindAddr)(object, 0, where, 32 * MIB, 0) == CUDA_ERROR_INVALID_VALUE && CALL(cuMulticastBindMem)(object, 0, 777, 0, 32 * MIB, 0) == CUDA_ERROR_INVALID_VALUE && CALL(cuMulticastBindMem)(777, 0, 778, 0, 32 * MIB, 0) == CUDA_ERROR_INVALID_VALUE && CALL(cuMulticastUnbind)(777, 0, 0, 32 * MIB) == CUDA_ERROR_INVALID_VALUE && agrees(), "nonsense is the driver's to refuse");
    first = memory_of(0, 2 * MIB, &result);
    check(CALL(cuMulticastBindMem)(object, 0, first, 0, 2 * MIB, 0) == CUDA_ERROR_INVALID_VALUE && CALL(cuMemRelease)(first) == CUDA_SUCCESS && agrees(), "what wasn't bound isn't kept");
    check(memory_of(0, 1960 * MIB - bare[0], &result) == 0 && result == CUDA_ERROR_OUT_OF_MEMORY, "what is bound counts against the share");
    check(CALL(cuMemRelease)(object) == CUDA_SUCCESS && agrees() && box_used(0) == bare[0] && box_usage()->lines[0][0].allocations == allocations, "released, all is back");
}

/* Random calls; the ledger and the driver agree after every one. */
static void agrees_with_the_driver(void) {
    enum { OBJECTS = 4, BLOCKS = 10, PAGES = 16 };
    struct { CUmemGenericAllocationHandle name; bool mapped; CUdeviceptr at; uint64_t bound[2][PAGES]; } o[OBJECTS];
    struct { CUmemGenericAllocationHandle name; int device; uint64_t pages; CUdeviceptr at; bool mapped; } m[BLOCKS];
    unsigned seed = 29, disagree = 0, bound = 0, unbound = 0, refused = 0, strange = 0;
    memset(o, 0, sizeof o);
    memset(m, 0, sizeof m);
    open_shares(1000);
    for (int i = 0; i < OBJECTS; i++) {
        strange += CALL(cuMemAddressReserve)(&o[i].at, PAGES * 2 * MIB, 0, 0, 0) != CUDA_SUCCESS;
    }
    for (int i = 0; i < BLOCKS; i++) {
        strange += CALL(cuMemAddressReserve)(&m[i].at, PAGES * 2 * MIB, 0, 0, 0) != CUDA_SUCCESS;
    }
    for (int i = 0; i < 8000; i++) {
        int k = rand_r(&seed) % OBJECTS, b = rand_r(&seed) % BLOCKS, page = rand_r(&seed) % PAGES;
        unsigned what = (unsigned)rand_r(&seed) % 100;
        CUresult result = CUDA_SUCCESS;
        if (o[k].name == 0 && !o[k].mapped) {
            o[k].name = object_for(PAGES * 2 * MIB);
            memset(o[k].bound, 0, sizeof o[k].bound);
            strange += o[k].name == 0;
        } else if (what < 20 && m[b].name == 0 && !m[b].mapped) {
            m[b].device = rand_r(&seed) % 2;
            m[b].pages = 1 + (uint64_t)rand_r(&seed) % PAGES;
            m[b].name = memory_of(m[b].device, m[b].pages * 2 * MIB, &result);
        } else if (what < 35 && m[b].name != 0) {
            result = CALL(cuMemRelease)(m[b].name);
            m[b].name = 0;
        } else if (what < 42 && m[b].name != 0 && !m[b].mapped) {
            result = CALL(cuMemMap)(m[b].at, m[b].pages * 2 * MIB, 0, m[b].name, 0);
            m[b].mapped = true;
        } else if (what < 49 && m[b].mapped) {
            result = CALL(cuMemUnmap)(m[b].at, m[b].pages * 2 * MIB);
            m[b].mapped = false;
        } else if (what < 70 && o[k].name != 0 && (m[b].name != 0 || m[b].mapped)) {
            /* Often where something is already, or beyond the end. */
            uint64_t pages = 1 + (uint64_t)rand_r(&seed) % m[b].pages;
            result = m[b].name == 0 || (what % 2 == 0 && m[b].mapped) ? CALL(cuMulticastBindAddr)(o[k].name, (uint64_t)page * 2 * MIB, m[b].at, pages * 2 * MIB, 0)
                                                                    : CALL(cuMulticastBindMem)(o[k].name, (uint64_t)page * 2 * MIB, m[b].name, 0, pages * 2 * MIB, 0);
            if (result == CUDA_SUCCESS) {
                o[k].bound[m[b].device][page] = pages;
                bound++;
            } else {
                strange += result != CUDA_ERROR_INVALID_VALUE;
                result = CUDA_SUCCESS;
            }
        } else if (what < 85 && o[k].name != 0) {
            int device = rand_r(&seed) % 2;
            uint64_t pages = o[k].bound[device][page];
            if (pages != 0) {
                result = CALL(cuMulticastUnbind)(o[k].name, device, (uint64_t)page * 2 * MIB, pages * 2 * MIB);
                o[k].bound[device][page] = 0;
                unbound++;
            }
        } else if (what < 88 && o[k].name != 0) {
            result = CALL(cuMemRelease)(o[k].name);
            o[k].name = 0;
        } else if (what < 92 && o[k].name != 0 && !o[k].mapped) {
            result = CALL(cuMemMap)(o[k].at, PAGES * 2 * MIB, 0, o[k].name, 0);
            o[k].mapped = true;
        } else if (what < 97 && o[k].mapped) {
            result = CALL(cuMemUnmap)(o[k].at, PAGES * 2 * MIB);
            o[k].mapped = false;
        }
        refused += result == CUDA_ERROR_OUT_OF_MEMORY;
        if (result != CUDA_SUCCESS && result != CUDA_ERROR_OUT_OF_MEMORY && strange++ == 0) {
            printf("# call %d (%u): error %d\n", i, what, result);
        }
        if (!agrees() && disagree++ == 0) {
            printf("# call %d (%u): %zu and %zu charged, %zu and %zu on the cards\n", i, what, box_used(0), box_used(1), truth(0, getpid()), truth(1, getpid()));
        }
    }
    check(disagree == 0, "after each of 8000 calls the ledger has what the driver has (%u times not)", disagree);
    check(bound > 300 && unbound > 50 && strange == 0, "%u bound, %u unbound, %u refusals, %u strange answers", bound, unbound, refused, strange);
    for (int i = 0; i < OBJECTS; i++) {
        if (o[i].name != 0) {
            CALL(cuMemRelease)(o[i].name);
        }
        if (o[i].mapped) {
            CALL(cuMemUnmap)(o[i].at, PAGES * 2 * MIB);
        }
    }
    for (int i = 0; i < BLOCKS; i++) {
        if (m[i].name != 0) {
            CALL(cuMemRelease)(m[i].name);
        }
        if (m[i].mapped) {
            CALL(cuMemUnmap)(m[i].at, m[i].pages * 2 * MIB);
        }
    }
    check(box_used(0) == bare[0] && box_used(1) == bare[1] && agrees(), "released, all of it is back");
}

static int run(void *scenario) {
    ((void (*)(void))scenario)();
    return 0;
}

int main(void) {
    check(in_child(run, (void *)bindings_keep_memory) == 0, "bindings: ran to its end");
    check(in_child(run, (void *)agrees_with_the_driver) == 0, "agrees with the driver: ran to its end");
    return tap_done();
}
