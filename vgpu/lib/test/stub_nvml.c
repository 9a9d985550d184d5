/* SPDX-License-Identifier: Apache-2.0 */
/* stub_nvml.c: an NVML over the stub driver's books. It lists the processes of all containers. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "nvml_abi.h"
#include "nvml_hooks.h"
#include "stub_truth.h"

static struct stub_truth *truth;
static int users;
static char devices[STUB_DEVICES];

nvmlReturn_t nvmlInit_v2(void) {
    int fd = open(STUB_TRUTH_AT, O_RDWR | O_CLOEXEC);
    if (fd < 0) {
        return NVML_ERROR_DRIVER_NOT_LOADED;
    }
    void *at = mmap(NULL, sizeof *truth, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    truth = at == MAP_FAILED ? NULL : at;
    users += truth != NULL;
    return truth == NULL ? NVML_ERROR_UNKNOWN : NVML_SUCCESS;
}
nvmlReturn_t nvmlShutdown(void) { return users == 0 ? NVML_ERROR_UNINITIALIZED : (users--, NVML_SUCCESS); }

static int index_of(nvmlDevice_t device) {
    long i = (char *)device - devices;
    return users > 0 && i >= 0 && i < (long)truth->devices ? (int)i : -1;
}

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *count) {
    *count = users > 0 ? truth->devices : 0;
    return users > 0 ? NVML_SUCCESS : NVML_ERROR_UNINITIALIZED;
}
nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device) {
    if (users == 0 || index >= truth->devices) {
        return users == 0 ? NVML_ERROR_UNINITIALIZED : NVML_ERROR_INVALID_ARGUMENT;
    }
    *device = (nvmlDevice_t)&devices[index];
    return NVML_SUCCESS;
}
nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned int length) {
    int i = index_of(device);
    if (i < 0 || length < 41) {
        return NVML_ERROR_INVALID_ARGUMENT;
    }
    char *at = uuid + sprintf(uuid, "GPU-");
    for (int b = 0; b < 16; b++) {
        at += sprintf(at, "%s%02x", b == 4 || b == 6 || b == 8 || b == 10 ? "-" : "", truth->uuid[i][b]);
    }
    return NVML_SUCCESS;
}
nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device) {
    char text[80];
    for (unsigned i = 0; users > 0 && i < truth->devices; i++) {
        *device = (nvmlDevice_t)&devices[i];
        if (nvmlDeviceGetUUID(*device, text, sizeof text) == NVML_SUCCESS && strcmp(text, uuid) == 0) {
            return NVML_SUCCESS;
        }
    }
    return NVML_ERROR_NOT_FOUND;
}
nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, int sensor, unsigned int *degrees) {
    *degrees = 40;
    return sensor == 0 && index_of(device) >= 0 ? NVML_SUCCESS : NVML_ERROR_INVALID_ARGUMENT;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory) {
    int i = index_of(device);
    if (i < 0 || memory == NULL) {
        return NVML_ERROR_INVALID_ARGUMENT;
    }
    *memory = (nvmlMemory_t){truth->total_bytes, truth->total_bytes - truth->used[i], truth->used[i]};
    return NVML_SUCCESS;
}
nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory) {
    int i = index_of(device);
    if (i < 0 || memory == NULL) {
        return NVML_ERROR_INVALID_ARGUMENT;
    }
    if (memory->version != NVML_MEMORY_V2_VERSION) {
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    }
    memory->total = truth->total_bytes;
    memory->reserved = 600ull << 20;
    memory->used = truth->used[i];
    memory->free = truth->total_bytes - memory->used - memory->reserved;
    return NVML_SUCCESS;
}

/* The books have memory by pid modulo their length; a test has fewer processes than that, and small pids don't
 * matter to it. Pids of a namespace of one's own are below it, too. */
static nvmlReturn_t list(nvmlDevice_t device, unsigned int *count, void *infos, int version) {
    int card = index_of(device);
    unsigned int n = 0;
    if (card < 0 || count == NULL || (infos == NULL && *count != 0)) {
        return NVML_ERROR_INVALID_ARGUMENT;
    }
    for (unsigned int p = 0; p < STUB_PROCESSES; p++) {
        /* Of those with this place the one that is nearest to this process. */
        unsigned int here = (unsigned int)getpid(), pid = here / STUB_PROCESSES * STUB_PROCESSES + p;
        if (pid + STUB_PROCESSES / 2 < here) {
            pid += STUB_PROCESSES;
        } else if (pid >= here + STUB_PROCESSES / 2 && pid >= STUB_PROCESSES) {
            pid -= STUB_PROCESSES;
        }
        if (truth->by_process[p][card] != 0) {
            if (infos != NULL && n < *count && version == 1) {
                ((nvmlProcessInfo_v1_t *)infos)[n] = (nvmlProcessInfo_v1_t){pid, truth->by_process[p][card]};
            } else if (infos != NULL && n < *count) {
                ((nvmlProcessInfo_v2_t *)infos)[n] = (nvmlProcessInfo_v2_t){pid, truth->by_process[p][card], NVML_NO_INSTANCE_ID, NVML_NO_INSTANCE_ID};
            }
            n++;
        }
    }
    nvmlReturn_t result = n > (infos == NULL ? 0 : *count) ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
    *count = n;
    return result;
}

#define LIST(name, type, version) \
    nvmlReturn_t name(nvmlDevice_t device, unsigned int *count, type *infos) { return list(device, count, infos, version); }
LIST(nvmlDeviceGetComputeRunningProcesses, nvmlProcessInfo_v1_t, 1)
LIST(nvmlDeviceGetComputeRunningProcesses_v2, nvmlProcessInfo_v2_t, 2)
LIST(nvmlDeviceGetComputeRunningProcesses_v3, nvmlProcessInfo_t, 2)
LIST(nvmlDeviceGetGraphicsRunningProcesses, nvmlProcessInfo_v1_t, 1)
LIST(nvmlDeviceGetGraphicsRunningProcesses_v2, nvmlProcessInfo_v2_t, 2)
LIST(nvmlDeviceGetGraphicsRunningProcesses_v3, nvmlProcessInfo_t, 2)
LIST(nvmlDeviceGetMPSComputeRunningProcesses, nvmlProcessInfo_v1_t, 1)
LIST(nvmlDeviceGetMPSComputeRunningProcesses_v2, nvmlProcessInfo_v2_t, 2)
/* There is no nvmlDeviceGetMPSComputeRunningProcesses_v3: the front has a hook that this driver lacks. */

/* Everybody in the books was at work. */
static unsigned int at_work(int card, unsigned int *pids) {
    nvmlProcessInfo_t infos[STUB_PROCESSES];
    unsigned int n = STUB_PROCESSES;
    (void)list((nvmlDevice_t)&devices[card], &n, infos, 2);
    for (unsigned int i = 0; i < n; i++) {
        pids[i] = infos[i].pid;
    }
    return n;
}
nvmlReturn_t nvmlDeviceGetProcessUtilization(nvmlDevice_t device, nvmlProcessUtilizationSample_t *samples, unsigned int *count, unsigned long long since) {
    unsigned int pids[STUB_PROCESSES], room;
    (void)since;
    if (index_of(device) < 0 || count == NULL) {
        return NVML_ERROR_INVALID_ARGUMENT;
    }
    room = *count;
    *count = at_work(index_of(device), pids);
    if (samples == NULL || room < *count) {
        return NVML_ERROR_INSUFFICIENT_SIZE;
    }
    for (unsigned int i = 0; i < *count; i++) {
        samples[i] = (nvmlProcessUtilizationSample_t){.pid = pids[i], .smUtil = 10 + i};
    }
    return *count == 0 ? NVML_ERROR_NOT_FOUND : NVML_SUCCESS;
}
nvmlReturn_t nvmlDeviceGetProcessesUtilizationInfo(nvmlDevice_t device, nvmlProcessesUtilizationInfo_v1_t *info) {
    nvmlProcessUtilizationSample_t samples[STUB_PROCESSES];
    unsigned int room = info->processSamplesCount;
    info->processSamplesCount = STUB_PROCESSES;
    nvmlReturn_t result = nvmlDeviceGetProcessUtilization(device, samples, &info->processSamplesCount, 0);
    if (result == NVML_SUCCESS && room < info->processSamplesCount) {
        return NVML_ERROR_INSUFFICIENT_SIZE;
    }
    for (unsigned int i = 0; result == NVML_SUCCESS && i < info->processSamplesCount; i++) {
        info->procUtilArray[i] = (nvmlProcessUtilizationInfo_v1_t){.pid = samples[i].pid, .smUtil = samples[i].smUtil};
    }
    return result;
}
nvmlReturn_t nvmlDeviceGetRunningProcessDetailList(nvmlDevice_t device, nvmlProcessDetailList_v1_t *details) {
    unsigned int pids[STUB_PROCESSES];
    if (index_of(device) < 0 || details->version != NVML_ABI_STRUCT_VERSION(nvmlProcessDetailList_v1_t, 1)) {
        return index_of(device) < 0 ? NVML_ERROR_INVALID_ARGUMENT : NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    }
    details->numProcArrayEntries = at_work(index_of(device), pids);
    return details->numProcArrayEntries == 0 ? NVML_SUCCESS : NVML_ERROR_INSUFFICIENT_SIZE;
}
