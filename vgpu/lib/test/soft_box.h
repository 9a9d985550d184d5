/* SPDX-License-Identifier: Apache-2.0 */
/* soft_box.h: a share of a driver's first two cards, or of the one that there is, and what it says that a process has
 * there. */
#ifndef SOFT_BOX_H
#define SOFT_BOX_H

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "box.h"
#include "nvml_abi.h"

static void *real_nvml;
static nvmlDevice_t real_cards[2];

#define REAL(name) ((__typeof__(name) *)dlsym(real_nvml, #name))

/* The real NVML behind the front. */
__attribute__((unused)) static void find_truth(const struct api *a) {
    CUuuid uuid;
    dlopen("libnvidia-ml.so.1", RTLD_NOW);
    real_nvml = dlopen("/usr/lib/carve/driver/libnvidia-ml.so.1", RTLD_NOW | RTLD_NOLOAD);
    REAL(nvmlInit_v2)();
    for (int i = 0; i < 2; i++) {
        if (((__typeof__(cuDeviceGetUuid_v2) *)dlsym(a->handle, "cuDeviceGetUuid_v2"))(&uuid, i) != CUDA_SUCCESS) {
            continue;
        }
        for (unsigned n = 0; n < 16; n++) { /* the driver's order may be another one */
            nvmlDevice_t device;
            char text[96], mine[96], *at = mine + sprintf(mine, "GPU-");
            if (REAL(nvmlDeviceGetHandleByIndex_v2)(n, &device) != NVML_SUCCESS) {
                break;
            }
            REAL(nvmlDeviceGetUUID)(device, text, sizeof text);
            for (int b = 0; b < 16; b++) {
                at += sprintf(at, "%s%02x", b == 4 || b == 6 || b == 8 || b == 10 ? "-" : "", uuid.bytes[b]);
            }
            if (strcmp(text, mine) == 0) {
                real_cards[i] = device;
            }
        }
    }
}

/* What the driver says that a process of this namespace has on a card. */
__attribute__((unused)) static uint64_t truth(int card, pid_t pid) {
    nvmlProcessInfo_t list[64];
    unsigned int count = 64;
    if (REAL(nvmlDeviceGetComputeRunningProcesses_v3)(real_cards[card], &count, list) != NVML_SUCCESS) {
        return UINT64_MAX;
    }
    for (unsigned int i = 0; i < count; i++) {
        if (list[i].pid == (unsigned)pid) {
            return list[i].usedGpuMemory;
        }
    }
    return 0;
}

/* Limits in the order of the driver's cards, by the UUIDs that it gives. They must be there before the front's cuInit,
 * which looks for them, as in a container. */
__attribute__((unused)) static void make_share(uint64_t first_mib, uint64_t second_mib, uint32_t flags) {
    uint64_t limits[2] = {first_mib * MIB, second_mib * MIB};
    (void)dlopen("libcuda.so.1", RTLD_NOW); /* the front, with the driver behind it */
    void *driver = dlopen(DRIVER_AT, RTLD_NOW | RTLD_NOLOAD);
    if (driver == NULL || ((__typeof__(cuInit) *)dlsym(driver, "cuInit"))(0) != CUDA_SUCCESS) {
        fprintf(stderr, "the driver's cuInit failed\n");
        exit(3);
    }
    box_make(2, limits, 0);
    for (unsigned i = 0; i < 2; i++) {
        CUuuid uuid;
        if (((__typeof__(cuDeviceGetUuid_v2) *)dlsym(driver, "cuDeviceGetUuid_v2"))(&uuid, (int)i) != CUDA_SUCCESS) {
            break;
        }
        memcpy(box_limits()->banks[1].cards[i].uuid, uuid.bytes, 16);
        memcpy(box_limits()->banks[0].cards[i].uuid, uuid.bytes, 16);
    }
    box_flags(flags); /* also closes the bank anew */
}

__attribute__((unused)) static struct api start_in_share(void) {
    struct api a = api_load("libcuda.so.1");
    if (a.cuInit(0) != CUDA_SUCCESS) {
        fprintf(stderr, "cuInit failed\n");
        exit(3);
    }
    find_truth(&a);
    return a;
}

__attribute__((unused)) static struct api start(uint64_t first_mib, uint64_t second_mib, uint32_t flags) {
    make_share(first_mib, second_mib, flags);
    return start_in_share();
}

struct info { size_t free, total; };
__attribute__((unused)) static struct info info(const struct api *a) {
    struct info i = {1, 1};
    a->cuMemGetInfo_v2(&i.free, &i.total);
    return i;
}

#endif
