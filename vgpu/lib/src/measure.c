/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "measure.h"

#include <dlfcn.h>
#include <errno.h>

#include "limits.h"
#include "nvml_abi.h"
#include "uuid.h"

enum { MOST_PROCESSES = 256 };

/* What one of NVML's lists of processes has of this one. */
static bool read_list(void *nvml, nvmlDevice_t device, const char *newest, const char *older, uint64_t *bytes) {
    __typeof__(nvmlDeviceGetComputeRunningProcesses_v3) *processes = (__typeof__(nvmlDeviceGetComputeRunningProcesses_v3) *)dlsym(nvml, newest);
    if (processes == NULL) {
        /* The same layout, before R510. */
        processes = (__typeof__(nvmlDeviceGetComputeRunningProcesses_v3) *)dlsym(nvml, older);
    }
    nvmlProcessInfo_t *lines = carve_map_private(MOST_PROCESSES * sizeof *lines);
    unsigned int count = MOST_PROCESSES;
    bool found = false;
    if (lines == NULL) {
        return false;
    }
    if (processes != NULL && processes(device, &count, lines) == NVML_SUCCESS && count <= MOST_PROCESSES) {
        uint32_t pid = carve_pid();
        for (unsigned int i = 0; i < count && !found; i++) {
            found = lines[i].pid == pid && lines[i].usedGpuMemory != NVML_VALUE_NOT_AVAILABLE;
            *bytes = found ? lines[i].usedGpuMemory : *bytes;
        }
    }
    carve_unmap(lines, MOST_PROCESSES * sizeof *lines);
    return found;
}

static bool read_own_line(void *nvml, const uint8_t uuid[16], uint64_t *bytes) {
    __typeof__(nvmlDeviceGetHandleByUUID) *handle_by_uuid =
        (__typeof__(nvmlDeviceGetHandleByUUID) *)dlsym(nvml, "nvmlDeviceGetHandleByUUID");
    char text[CARVE_UUID_TEXT];
    nvmlDevice_t device;
    carve_uuid_write(uuid, text);
    if (handle_by_uuid == NULL || handle_by_uuid(text, &device) != NVML_SUCCESS) {
        return false;
    }
    /* Clients of an MPS server have a list of their own. */
    return read_list(nvml, device, "nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses_v2", bytes) ||
           read_list(nvml, device, "nvmlDeviceGetMPSComputeRunningProcesses_v3", "nvmlDeviceGetMPSComputeRunningProcesses_v2", bytes);
}

/* Kept from the first look on: a program may have shut itself in by the next. */
static void *loaded;

/* By name first, so that the front is loaded before the real library: a program that asks for it by name later gets
 * the first on the loader's list that is called so. Two threads that come here at once get the same. */
static void *load(void) {
    void *nvml = __atomic_load_n(&loaded, __ATOMIC_ACQUIRE);
    if (nvml == NULL && dlopen("libnvidia-ml.so.1", RTLD_LAZY | RTLD_LOCAL) != NULL) {
        nvml = dlopen(CARVE_NVML_AT, RTLD_LAZY | RTLD_LOCAL | RTLD_NOLOAD);
        __atomic_store_n(&loaded, nvml, __ATOMIC_RELEASE);
    }
    return nvml;
}

static void prepare(void *unused) {
    (void)unused;
    (void)load();
}

/* Both on a stack of their own: what the loader and NVML need of one nobody knows. */

void carve_measure_prepare(void) {
    int saved = errno;
    (void)carve_on_own_stack(prepare, NULL);
    errno = saved;
}

struct question {
    const uint8_t *uuid;
    uint64_t bytes;
    bool found;
};

static void ask(void *argument) {
    struct question *q = argument;
    void *nvml = load();
    if (nvml == NULL) {
        return;
    }
    __typeof__(nvmlInit_v2) *init = (__typeof__(nvmlInit_v2) *)dlsym(nvml, "nvmlInit_v2");
    __typeof__(nvmlShutdown) *shutdown = (__typeof__(nvmlShutdown) *)dlsym(nvml, "nvmlShutdown");
    /* Init and shutdown are counted by NVML, so a program that uses it itself isn't disturbed. */
    if (init != NULL && shutdown != NULL && init() == NVML_SUCCESS) {
        q->found = read_own_line(nvml, q->uuid, &q->bytes);
        (void)shutdown();
    }
}

bool carve_measure(const uint8_t uuid[16], uint32_t *units) {
    int saved = errno;
    struct question q = {.uuid = uuid};
    bool found = carve_on_own_stack(ask, &q) && q.found;
    *units = found ? carve_units_up(q.bytes) : *units;
    errno = saved;
    return found;
}
