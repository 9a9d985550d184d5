/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The front of NVML: what a card has and who uses it, as the container is meant to see it.
 *
 * It maps nothing and takes no slot: asking is rare, and a tool that only looks must not fail because a
 * process of the container scribbled over the usage file. Numbers out of that file are bounded and shown to
 * the container alone.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>

#include "limits.h"
#include "measure.h"
#include "nvml_abi.h"
#include "nvml_hooks.h"
#include "state.h"
#include "uuid.h"

#define CARVE_EXPORT __attribute__((visibility("default")))

struct nvml {
    uint32_t ready;
#define X(name, release, does) __typeof__(name) *name;
    CARVE_NVML_HOOKS(X)
#undef X
#define X(name) __typeof__(name) *name;
    CARVE_NVML_CALLS(X)
#undef X
};

static struct nvml found;

/* As carve_driver_find, see there. */
static const struct nvml *real_nvml(void) {
    if (__atomic_load_n(&found.ready, __ATOMIC_ACQUIRE) != 0) {
        return &found;
    }
    int saved = errno;
    void *handle = dlopen(CARVE_NVML_AT, RTLD_LAZY | RTLD_NOLOAD);
    if (handle == NULL) {
        handle = dlopen(CARVE_NVML_AT, RTLD_LAZY | RTLD_LOCAL);
    }
    errno = saved;
    if (handle == NULL) {
        return &found;
    }
#define FIND(name) __atomic_store_n(&found.name, (__typeof__(name) *)dlsym(handle, #name), __ATOMIC_RELAXED);
#define X(name, release, does) FIND(name)
    CARVE_NVML_HOOKS(X)
#undef X
#define X(name) FIND(name)
    CARVE_NVML_CALLS(X)
#undef X
    __atomic_store_n(&found.ready, 1, __ATOMIC_RELEASE);
    return &found;
}

/* ---- the share ---- */

enum about {
    ABOUT_SHARE,      /* the view was filled in */
    ABOUT_NO_SHARE,   /* a card that the limits don't name */
    ABOUT_UNREADABLE, /* the limits can't be read */
};

struct view {
    uint32_t card;
    uint64_t limit_bytes;
    uint64_t residual_bytes;
};

/* A valid copy of the limits file; NULL: there is none to be had. Not on the stack, of which the program's thread may
 * have next to nothing. */
static struct carve_limits *read_limits(void) {
    struct carve_limits_facts facts;
    struct carve_limits *limits = carve_map_private(sizeof *limits);
    /* A copy read while the agent was writing has a wrong checksum or generation: read it again. */
    for (int tries = 0; limits != NULL && tries < 16 && carve_read_file(CARVE_LIMITS_AT, limits, sizeof *limits, 0) == (long)sizeof *limits; tries++) {
        if (carve_limits_facts(limits, &facts)) {
            return limits;
        }
    }
    if (limits != NULL) {
        carve_unmap(limits, sizeof *limits);
    }
    return NULL;
}

static enum about look_at(const struct nvml *n, const struct carve_limits *limits, nvmlDevice_t device, struct view *view) {
    struct carve_limits_facts facts;
    struct carve_limits_card about;
    char text[NVML_DEVICE_UUID_V2_BUFFER_SIZE];
    uint8_t uuid[16];
    if (n->nvmlDeviceGetUUID == NULL || n->nvmlDeviceGetUUID(device, text, sizeof text) != NVML_SUCCESS ||
        !carve_uuid_read(text, uuid)) {
        return ABOUT_NO_SHARE;
    }
    int card = carve_limits_find(limits, uuid);
    if (card < 0 || !carve_limits_card(limits, (unsigned)card, &facts, &about)) {
        return ABOUT_NO_SHARE;
    }
    view->card = (uint32_t)card;
    view->limit_bytes = carve_units_bytes(carve_units_down(about.limit_bytes));
    view->residual_bytes = limits->live[card].residual_bytes;
    return ABOUT_SHARE;
}

static enum about look(const struct nvml *n, nvmlDevice_t device, struct view *view) {
    struct carve_limits *limits = read_limits();
    if (limits == NULL) {
        return ABOUT_UNREADABLE;
    }
    enum about about = look_at(n, limits, device, view);
    carve_unmap(limits, sizeof *limits);
    return about;
}

enum { TWICE = 32 }; /* processes of which it is known that they are on the list */

/* Calls visit for each slot that holds a charge on the card. */
struct visitor {
    uint64_t charged_bytes;
    uint64_t pid_namespace; /* of the caller; lines of others aren't listed */
    unsigned int room;      /* lines that fit */
    unsigned int count;     /* lines that there are */
    void (*put)(void *lines, unsigned int at, unsigned int pid, uint64_t bytes);
    void *lines;
    struct { uint64_t bytes; unsigned int pid; } seen[TWICE];
};

/* Lists a process, once: where another program followed in it by exec, it has two slots for a while. */
static void list(struct visitor *v, unsigned int pid, uint64_t bytes) {
    unsigned int at = 0;
    while (at < v->count && at < TWICE && v->seen[at].pid != pid) {
        at++;
    }
    bool again = at < v->count && at < TWICE;
    at = again ? at : v->count++;
    if (again) {
        bytes += v->seen[at].bytes;
    }
    if (at < TWICE) {
        v->seen[at].pid = pid;
        v->seen[at].bytes = bytes;
    }
    if (at < v->room) {
        v->put(v->lines, at, pid, bytes);
    }
}

static uint32_t high_water(void) {
    uint32_t high = 0;
    long n = carve_read_file(CARVE_USAGE_AT, &high, sizeof high, offsetof(struct carve_usage, high_water));
    return n != (long)sizeof high || high > CARVE_MAX_SLOTS ? CARVE_MAX_SLOTS : high;
}

static void visit(struct visitor *v, uint32_t card) {
    enum { AT_ONCE = 8 };
    struct carve_usage_line lines[AT_ONCE];
    struct carve_process process;
    uint32_t high = high_water();
    for (uint32_t first = 0; first < high; first += AT_ONCE) {
        uint64_t at = offsetof(struct carve_usage, lines) + ((uint64_t)card * CARVE_MAX_SLOTS + first) * sizeof lines[0];
        long n = carve_read_file(CARVE_USAGE_AT, lines, sizeof lines, at);
        for (uint32_t i = 0; n > 0 && i < (uint32_t)n / sizeof lines[0] && first + i < high; i++) {
            uint64_t used = CARVE_CHARGE_USED(lines[i].charge), pending = CARVE_CHARGE_PENDING(lines[i].charge);
            v->charged_bytes += carve_units_bytes(used + pending);
            if (used == 0 || v->put == NULL ||
                carve_read_file(CARVE_USAGE_AT, &process, sizeof process,
                                offsetof(struct carve_usage, processes) + (uint64_t)(first + i) * sizeof process) !=
                    (long)sizeof process ||
                process.pid_namespace != v->pid_namespace || CARVE_STATE(process.state_pid) != CARVE_SLOT_LIVE ||
                carve_process_gone(CARVE_PID(process.state_pid), process.start_ticks)) {
                continue; /* one that has ended is charged until the agent takes its slot off, but is no process any more */
            }
            list(v, CARVE_PID(process.state_pid), carve_units_bytes(used));
        }
    }
}

/* ---- memory ---- */

/* Used and total bytes; false where the driver's own figures stand. */
static nvmlReturn_t memory(const struct nvml *n, nvmlDevice_t device, bool *share, uint64_t *used, uint64_t *total) {
    struct view view;
    struct visitor v = {0};
    *share = false;
    switch (look(n, device, &view)) {
    case ABOUT_NO_SHARE:
        return NVML_SUCCESS;
    case ABOUT_UNREADABLE:
        return NVML_ERROR_UNKNOWN;
    default:
        break;
    }
    visit(&v, view.card);
    *total = view.limit_bytes;
    *used = v.charged_bytes + view.residual_bytes;
    if (*used < view.residual_bytes || *used > *total) {
        *used = *total;
    }
    *share = true;
    return NVML_SUCCESS;
}

CARVE_EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *info) {
    const struct nvml *n = real_nvml();
    uint64_t used, total;
    bool share;
    if (n->nvmlDeviceGetMemoryInfo == NULL) {
        return NVML_ERROR_FUNCTION_NOT_FOUND;
    }
    /* The driver first: it knows what is wrong with the arguments, or with the card. */
    nvmlReturn_t result = n->nvmlDeviceGetMemoryInfo(device, info);
    if (result == NVML_SUCCESS) {
        result = memory(n, device, &share, &used, &total);
    }
    if (result == NVML_SUCCESS && share) {
        info->total = total;
        info->used = used;
        info->free = total - used;
    }
    return result;
}

CARVE_EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *info) {
    const struct nvml *n = real_nvml();
    uint64_t used, total;
    bool share;
    if (n->nvmlDeviceGetMemoryInfo_v2 == NULL) {
        return NVML_ERROR_FUNCTION_NOT_FOUND;
    }
    nvmlReturn_t result = n->nvmlDeviceGetMemoryInfo_v2(device, info);
    if (result == NVML_SUCCESS) {
        result = memory(n, device, &share, &used, &total);
    }
    if (result == NVML_SUCCESS && share) {
        info->total = total;
        info->reserved = 0;
        info->used = used;
        info->free = total - used;
    }
    return result;
}

/* ---- processes ---- */

static void put_v1(void *lines, unsigned int at, unsigned int pid, uint64_t bytes) {
    ((nvmlProcessInfo_v1_t *)lines)[at] = (nvmlProcessInfo_v1_t){pid, bytes};
}

static void put_v2(void *lines, unsigned int at, unsigned int pid, uint64_t bytes) {
    ((nvmlProcessInfo_v2_t *)lines)[at] = (nvmlProcessInfo_v2_t){pid, bytes, NVML_NO_INSTANCE_ID, NVML_NO_INSTANCE_ID};
}

/* The container's own processes on the card, under the pids that they have for the caller. The driver's list
 * isn't used: in a container it holds pids of the node, or nothing. */
static nvmlReturn_t own_processes(const struct nvml *n, nvmlDevice_t device, unsigned int *count, void *lines,
                                  void (*put)(void *, unsigned int, unsigned int, uint64_t)) {
    struct view view;
    struct visitor v = {.room = lines == NULL ? 0 : *count, .put = put, .lines = lines};
    switch (look(n, device, &view)) {
    case ABOUT_SHARE:
        v.pid_namespace = carve_self().pid_namespace;
        visit(&v, view.card);
        break;
    case ABOUT_UNREADABLE:
        return NVML_ERROR_UNKNOWN;
    default:
        break;
    }
    *count = v.count;
    return v.count > v.room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

/* Asks the driver for the number alone: for its opinion on device and count, and on a list that isn't there. */
#define DRIVERS_OPINION(function, device, count)                                    \
    const struct nvml *n = real_nvml();                                             \
    unsigned int drivers = (count) == NULL || lines != NULL ? 0 : *(count);         \
    if (n->function == NULL) {                                                      \
        return NVML_ERROR_FUNCTION_NOT_FOUND;                                       \
    }                                                                               \
    nvmlReturn_t result = n->function(device, (count) == NULL ? NULL : &drivers, NULL); \
    if (result != NVML_SUCCESS && result != NVML_ERROR_INSUFFICIENT_SIZE) {         \
        return result;                                                              \
    }                                                                               \
    if ((count) == NULL) {                                                          \
        return NVML_ERROR_INVALID_ARGUMENT;                                         \
    }

#define COMPUTE(function, type, put)                                                                         \
    CARVE_EXPORT nvmlReturn_t function(nvmlDevice_t device, unsigned int *count, type *lines) {              \
        DRIVERS_OPINION(function, device, count)                                                             \
        return own_processes(n, device, count, lines, put);                                                  \
    }

COMPUTE(nvmlDeviceGetComputeRunningProcesses, nvmlProcessInfo_v1_t, put_v1)
COMPUTE(nvmlDeviceGetComputeRunningProcesses_v2, nvmlProcessInfo_v2_t, put_v2)
COMPUTE(nvmlDeviceGetComputeRunningProcesses_v3, nvmlProcessInfo_t, put_v2)

/* Only compute is shared: what draws on the card, or runs there by way of MPS, is none of the container's. */
#define NONE(function, type)                                                                    \
    CARVE_EXPORT nvmlReturn_t function(nvmlDevice_t device, unsigned int *count, type *lines) { \
        DRIVERS_OPINION(function, device, count)                                                \
        (void)lines;                                                                            \
        *count = 0;                                                                             \
        return NVML_SUCCESS;                                                                    \
    }

NONE(nvmlDeviceGetGraphicsRunningProcesses, nvmlProcessInfo_v1_t)
NONE(nvmlDeviceGetGraphicsRunningProcesses_v2, nvmlProcessInfo_v2_t)
NONE(nvmlDeviceGetGraphicsRunningProcesses_v3, nvmlProcessInfo_t)
NONE(nvmlDeviceGetMPSComputeRunningProcesses, nvmlProcessInfo_v1_t)
NONE(nvmlDeviceGetMPSComputeRunningProcesses_v2, nvmlProcessInfo_v2_t)
NONE(nvmlDeviceGetMPSComputeRunningProcesses_v3, nvmlProcessInfo_t)

static void put_detail(void *lines, unsigned int at, unsigned int pid, uint64_t bytes) {
    ((nvmlProcessDetail_v1_t *)lines)[at] = (nvmlProcessDetail_v1_t){pid, bytes, NVML_NO_INSTANCE_ID, NVML_NO_INSTANCE_ID, 0};
}

CARVE_EXPORT nvmlReturn_t nvmlDeviceGetRunningProcessDetailList(nvmlDevice_t device, nvmlProcessDetailList_v1_t *list) {
    const struct nvml *n = real_nvml();
    if (n->nvmlDeviceGetRunningProcessDetailList == NULL) {
        return NVML_ERROR_FUNCTION_NOT_FOUND;
    }
    if (list == NULL) {
        return n->nvmlDeviceGetRunningProcessDetailList(device, list);
    }
    /* For its opinion, and not for what it would list. */
    nvmlProcessDetailList_v1_t drivers = {.version = list->version, .mode = list->mode};
    nvmlReturn_t result = n->nvmlDeviceGetRunningProcessDetailList(device, &drivers);
    if (result != NVML_SUCCESS && result != NVML_ERROR_INSUFFICIENT_SIZE) {
        return result;
    }
    if (list->mode != 0) { /* graphics, MPS */
        list->numProcArrayEntries = 0;
        return NVML_SUCCESS;
    }
    return own_processes(n, device, &list->numProcArrayEntries, list->procArray, put_detail);
}

/* ---- utilization of processes ---- */

static void put_pid(void *pids, unsigned int at, unsigned int pid, uint64_t bytes) {
    (void)bytes;
    ((unsigned int *)pids)[at] = pid;
}

/* Whose samples are shown. */
struct own_pids {
    unsigned int count;
    unsigned int pids[CARVE_MAX_SLOTS];
};

/* Not on the stack, as above; NULL, and why in *result. */
static struct own_pids *find_own(const struct nvml *n, nvmlDevice_t device, nvmlReturn_t *result) {
    struct own_pids *own = carve_map_private(sizeof *own);
    if (own == NULL) {
        *result = NVML_ERROR_UNKNOWN;
        return NULL;
    }
    own->count = CARVE_MAX_SLOTS;
    *result = own_processes(n, device, &own->count, own->pids, put_pid);
    if (*result != NVML_SUCCESS) {
        carve_unmap(own, sizeof *own);
        return NULL;
    }
    return own;
}

static bool is_own(const struct own_pids *own, unsigned int pid) {
    for (unsigned int i = 0; i < own->count; i++) {
        if (own->pids[i] == pid) {
            return true;
        }
    }
    return false;
}

CARVE_EXPORT nvmlReturn_t nvmlDeviceGetProcessUtilization(nvmlDevice_t device, nvmlProcessUtilizationSample_t *samples,
                                                          unsigned int *count, unsigned long long since) {
    const struct nvml *n = real_nvml();
    if (n->nvmlDeviceGetProcessUtilization == NULL) {
        return NVML_ERROR_FUNCTION_NOT_FOUND;
    }
    nvmlReturn_t result = n->nvmlDeviceGetProcessUtilization(device, samples, count, since);
    if (result != NVML_SUCCESS || samples == NULL) {
        return result; /* how much room is needed: for all of the card, which is enough */
    }
    struct own_pids *own = find_own(n, device, &result);
    unsigned int kept = 0;
    for (unsigned int i = 0; result == NVML_SUCCESS && i < *count; i++) {
        if (is_own(own, samples[i].pid)) {
            samples[kept++] = samples[i];
        }
    }
    if (own != NULL) {
        carve_unmap(own, sizeof *own);
    }
    *count = kept;
    return result == NVML_SUCCESS && kept == 0 ? NVML_ERROR_NOT_FOUND : result;
}

CARVE_EXPORT nvmlReturn_t nvmlDeviceGetProcessesUtilizationInfo(nvmlDevice_t device, nvmlProcessesUtilizationInfo_v1_t *info) {
    const struct nvml *n = real_nvml();
    if (n->nvmlDeviceGetProcessesUtilizationInfo == NULL) {
        return NVML_ERROR_FUNCTION_NOT_FOUND;
    }
    nvmlReturn_t result = n->nvmlDeviceGetProcessesUtilizationInfo(device, info);
    if (result != NVML_SUCCESS || info->procUtilArray == NULL) {
        return result;
    }
    struct own_pids *own = find_own(n, device, &result);
    unsigned int kept = 0;
    for (unsigned int i = 0; result == NVML_SUCCESS && i < info->processSamplesCount; i++) {
        if (is_own(own, info->procUtilArray[i].pid)) {
            info->procUtilArray[kept++] = info->procUtilArray[i];
        }
    }
    if (own != NULL) {
        carve_unmap(own, sizeof *own);
    }
    info->processSamplesCount = kept;
    return result == NVML_SUCCESS && kept == 0 ? NVML_ERROR_NOT_FOUND : result;
}
