/* SPDX-License-Identifier: Apache-2.0 */
/* NVML as a container sees it, and the context's cost as a process learns it there. Over the stub driver. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "box.h"
#include "nvml_abi.h"
#include "nvml_hooks.h"
#include "tap.h"

enum { CONTEXT_MIB = 418 };

static struct stub_truth *truth;
static void *nvml;
#define CALL(name) ((__typeof__(name) *)dlsym(nvml, #name))

static void fresh(void) {
    uint64_t limits[2] = {8000 * MIB, 16000 * MIB};
    box_make(1, limits, CONTEXT_MIB * MIB);
    truth = box_truth(2, 81920 * MIB, CONTEXT_MIB * MIB);
}

/* A process with a context and 1000 MiB, for as long as the pipe is open. */
static pid_t worker(int *hold) {
    int ready[2], stay[2];
    char byte;
    if (pipe(ready) != 0 || pipe(stay) != 0) {
        exit(2);
    }
    pid_t pid = fork();
    if (pid == 0) {
        close(stay[1]);
        struct api a = api_start("libcuda.so.1");
        CUdeviceptr p;
        if (a.cuMemAlloc_v2(&p, 1000 * MIB) != CUDA_SUCCESS || write(ready[1], "", 1) != 1) {
            _exit(1);
        }
        _exit(read(stay[0], &byte, 1) != 0);
    }
    close(stay[0]);
    close(ready[1]);
    if (read(ready[0], &byte, 1) != 1) {
        exit(2);
    }
    close(ready[0]);
    *hold = stay[1];
    return pid;
}

static void figures(void) {
    nvmlDevice_t first, second;
    nvmlMemory_t m;
    nvmlMemory_v2_t m2 = {.version = NVML_MEMORY_V2_VERSION}, wrong = {.version = 1};
    nvmlProcessInfo_t list[4];
    nvmlProcessInfo_v1_t old[4];
    unsigned int count = 4, degrees = 0;
    int hold[2];
    fresh();
    nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    CALL(nvmlInit_v2)();
    CALL(nvmlDeviceGetHandleByIndex_v2)(0, &first);
    CALL(nvmlDeviceGetHandleByIndex_v2)(1, &second);
    check(CALL(nvmlDeviceGetMemoryInfo)(first, &m) == NVML_SUCCESS && m.total == 8000 * MIB && m.used == 0 && m.free == m.total, "an idle share: 8000 MiB, all free");
    pid_t a = worker(&hold[0]), b = worker(&hold[1]);
    const uint64_t each = (CONTEXT_MIB + 1000) * MIB;
    truth->by_process[0][0] = 500 * MIB; /* another container's, which NVML lists too */
    truth->used[0] += 500 * MIB;
    check(CALL(nvmlDeviceGetMemoryInfo)(first, &m) == NVML_SUCCESS && m.total == 8000 * MIB && m.used == 2 * each && m.free == m.total - m.used,
          "two processes: used is what the container uses, contexts included");
    check(CALL(nvmlDeviceGetMemoryInfo_v2)(first, &m2) == NVML_SUCCESS && m2.total == 8000 * MIB && m2.used == 2 * each && m2.free == m2.total - m2.used && m2.reserved == 0,
          "the second form says the same");
    check(CALL(nvmlDeviceGetMemoryInfo_v2)(first, &wrong) == NVML_ERROR_ARGUMENT_VERSION_MISMATCH && CALL(nvmlDeviceGetMemoryInfo)(NULL, &m) == NVML_ERROR_INVALID_ARGUMENT,
          "what is wrong with a call is NVML's to say");
    check(CALL(nvmlDeviceGetMemoryInfo)(second, &m) == NVML_SUCCESS && m.total == 81920 * MIB, "a card that the limits don't name is shown as it is");
    box_residual(0, 100 * MIB);
    check(CALL(nvmlDeviceGetMemoryInfo)(first, &m) == NVML_SUCCESS && m.used == 2 * each + 100 * MIB, "what the agent found used beside is used");
    box_residual(0, 0);
    check(CALL(nvmlDeviceGetComputeRunningProcesses_v3)(first, &count, list) == NVML_SUCCESS && count == 2 && list[0].pid == (unsigned)a && list[1].pid == (unsigned)b &&
              list[0].usedGpuMemory == each && list[0].gpuInstanceId == NVML_NO_INSTANCE_ID,
          "the list has the container's processes and no other");
    count = 4;
    check(CALL(nvmlDeviceGetComputeRunningProcesses)(first, &count, old) == NVML_SUCCESS && count == 2 && old[1].pid == (unsigned)b && old[1].usedGpuMemory == each, "the first form too");
    count = 1;
    check(CALL(nvmlDeviceGetComputeRunningProcesses_v3)(first, &count, list) == NVML_ERROR_INSUFFICIENT_SIZE && count == 2, "too little room says how much is needed");
    count = 0;
    check(CALL(nvmlDeviceGetComputeRunningProcesses_v3)(first, &count, NULL) == NVML_ERROR_INSUFFICIENT_SIZE && count == 2, "so does none");
    check(CALL(nvmlDeviceGetComputeRunningProcesses_v3)(first, NULL, list) == NVML_ERROR_INVALID_ARGUMENT, "no place for the number is NVML's to refuse");
    count = 4;
    check(CALL(nvmlDeviceGetComputeRunningProcesses_v3)(first, &count, NULL) == NVML_ERROR_INVALID_ARGUMENT && CALL(nvmlDeviceGetGraphicsRunningProcesses_v3)(first, &count, NULL) == NVML_ERROR_INVALID_ARGUMENT,
          "so is no list where there is to be room in it");
    count = 4;
    check(CALL(nvmlDeviceGetGraphicsRunningProcesses_v3)(first, &count, list) == NVML_SUCCESS && count == 0, "nobody draws");
    if (getenv("TWIN") != NULL) {
        check(CALL(nvmlDeviceGetMPSComputeRunningProcesses_v3) == NULL, "a hook that the driver lacks isn't there");
    } else {
        check(CALL(nvmlDeviceGetMPSComputeRunningProcesses_v3)(first, &count, list) == NVML_ERROR_FUNCTION_NOT_FOUND, "a hook that the driver lacks says so");
    }
    nvmlProcessUtilizationSample_t samples[8];
    nvmlProcessUtilizationInfo_v1_t more[8];
    nvmlProcessesUtilizationInfo_v1_t info = {.version = NVML_ABI_STRUCT_VERSION(nvmlProcessesUtilizationInfo_v1_t, 1), .processSamplesCount = 8, .procUtilArray = more};
    nvmlProcessDetail_v1_t details[8];
    nvmlProcessDetailList_v1_t detail = {.version = NVML_ABI_STRUCT_VERSION(nvmlProcessDetailList_v1_t, 1), .numProcArrayEntries = 8, .procArray = details};
    count = 8;
    check(CALL(nvmlDeviceGetProcessUtilization)(first, samples, &count, 0) == NVML_SUCCESS && count == 2 && samples[0].pid + samples[1].pid == (unsigned)(a + b) && samples[0].smUtil >= 10,
          "of three processes that were at work on the card the two of the container are shown");
    check(CALL(nvmlDeviceGetProcessesUtilizationInfo)(first, &info) == NVML_SUCCESS && info.processSamplesCount == 2 && more[0].pid + more[1].pid == (unsigned)(a + b), "the newer form shows the same");
    count = 0;
    check(CALL(nvmlDeviceGetProcessUtilization)(first, NULL, &count, 0) == NVML_ERROR_INSUFFICIENT_SIZE && count == 3, "the room that is asked for is enough");
    check(CALL(nvmlDeviceGetRunningProcessDetailList)(first, &detail) == NVML_SUCCESS && detail.numProcArrayEntries == 2 && details[0].pid == (unsigned)a && details[1].usedGpuMemory == each, "so does the list with details");
    detail.mode = 1;
    check(CALL(nvmlDeviceGetRunningProcessDetailList)(first, &detail) == NVML_SUCCESS && detail.numProcArrayEntries == 0, "in which nobody draws");
    detail.version = 1;
    check(CALL(nvmlDeviceGetRunningProcessDetailList)(first, &detail) == NVML_ERROR_ARGUMENT_VERSION_MISMATCH, "and whose version is NVML's to refuse");
    count = 8;
    check(CALL(nvmlDeviceGetProcessUtilization)(second, samples, &count, 0) == NVML_ERROR_NOT_FOUND, "on a card that the limits don't name nobody is shown at work");
    count = 4;
    check(CALL(nvmlDeviceGetTemperature)(first, 0, &degrees) == NVML_SUCCESS && degrees == 40, "what isn't hooked reaches NVML");
    /* One in a PID namespace of its own has a pid that means nothing here. */
    uint64_t namespace_now = box_usage()->processes[1].pid_namespace;
    box_usage()->processes[1].pid_namespace = namespace_now + 1;
    count = 4;
    check(CALL(nvmlDeviceGetComputeRunningProcesses_v3)(first, &count, list) == NVML_SUCCESS && count == 1 && list[0].pid == (unsigned)a, "one of another PID namespace isn't listed");
    check(CALL(nvmlDeviceGetMemoryInfo)(first, &m) == NVML_SUCCESS && m.used == 2 * each, "but counted");
    box_usage()->processes[1].pid_namespace = namespace_now;
    struct carve_process second_process = box_usage()->processes[1];
    box_usage()->processes[1] = box_usage()->processes[0]; /* as after an exec */
    box_usage()->processes[1].image ^= 1;
    count = 1;
    check(CALL(nvmlDeviceGetComputeRunningProcesses_v3)(first, &count, list) == NVML_SUCCESS && count == 1 && list[0].pid == (unsigned)a && list[0].usedGpuMemory == 2 * each, "one that has two slots, by exec, is listed once");
    box_usage()->processes[1] = second_process;
    kill(a, SIGKILL);
    waitpid(a, NULL, 0);
    count = 1;
    check(CALL(nvmlDeviceGetComputeRunningProcesses_v3)(first, &count, list) == NVML_SUCCESS && count == 1 && list[0].pid == (unsigned)b, "one that has ended isn't listed, and takes no room");
    check(CALL(nvmlDeviceGetMemoryInfo)(first, &m) == NVML_SUCCESS && m.used == 2 * each, "but counted until the agent takes it off");
    box_reclaim(0);
    close(hold[1]);
    waitpid(b, NULL, 0);
    box_reclaim(1);
    count = 4;
    check(CALL(nvmlDeviceGetMemoryInfo)(first, &m) == NVML_SUCCESS && m.used == 0 && CALL(nvmlDeviceGetComputeRunningProcesses_v3)(first, &count, list) == NVML_SUCCESS && count == 0, "gone and reclaimed: nothing is used, nobody listed");
    /* A file full of noise is the container's own; NVML must still answer within bounds. */
    memset(box_usage(), 0xff, sizeof *box_usage());
    check(CALL(nvmlDeviceGetMemoryInfo)(first, &m) == NVML_SUCCESS && m.used == m.total && m.free == 0, "a usage file of ones shows a full card");
    count = 4;
    check(CALL(nvmlDeviceGetComputeRunningProcesses_v3)(first, &count, list) == NVML_SUCCESS && count == 0, "and no process");
    if (truncate(CARVE_USAGE_PATH, 100) != 0) {
        exit(2);
    }
    check(CALL(nvmlDeviceGetMemoryInfo)(first, &m) == NVML_SUCCESS && m.used == 0, "one that was truncated shows none used");
    if (unlink(CARVE_LIMITS_PATH) != 0) {
        exit(2);
    }
    check(CALL(nvmlDeviceGetMemoryInfo)(first, &m) == NVML_ERROR_UNKNOWN && CALL(nvmlDeviceGetComputeRunningProcesses_v3)(first, &count, list) == NVML_ERROR_UNKNOWN, "without limits there are no figures");
}

static void one_front(void) {
    fresh();
    void *a = dlopen("libnvidia-ml.so.1", RTLD_NOW), *b = dlopen("libnvidia-ml.so", RTLD_NOW);
    char path[256];
    snprintf(path, sizeof path, "%s/libnvidia-ml.so.%s", getenv("LIBDIR"), getenv("DRIVER_VERSION"));
    check(a != NULL && a == b && a == dlopen(path, RTLD_NOW), "one front behind all names of NVML");
    void *real = dlopen("/usr/lib/carve/driver/libnvidia-ml.so.1", RTLD_NOW | RTLD_NOLOAD);
#define X(name, release, does) \
    check((getenv("TWIN") != NULL && dlsym(real, #name) == NULL && dlsym(a, #name) == NULL) ||                      \
              (dlsym(a, #name) != NULL && dlsym(a, #name) != dlsym(real, #name)), "%s is the front's", #name);
    CARVE_NVML_HOOKS(X)
#undef X
    check(dlsym(a, "nvmlInit_v2") == dlsym(real, "nvmlInit_v2"), "nvmlInit_v2 is NVML's");
}

/* The cost of a context that nobody told is read in NVML, exactly, where the limits say that it answers. */
static int measured(void *flags) {
    uint64_t limit = 8000 * MIB;
    box_make(1, &limit, 0);
    truth = box_truth(1, 81920 * MIB, CONTEXT_MIB * MIB);
    if (flags != NULL) {
        box_flags(CARVE_LIMITS_SELF_VISIBLE);
    }
    struct api a = api_start("libcuda.so.1");
    size_t f = 0, t = 0;
    a.cuMemGetInfo_v2(&f, &t);
    if (flags == NULL) {
        check(f == (8000 - 512) * MIB, "a context of unknown cost is charged by a guess where NVML doesn't list its process");
        return 0;
    }
    check(f == (8000 - CONTEXT_MIB) * MIB, "the first free figure is the limit less what the context really took");
    box_context(0, 500 * MIB);
    a.cuMemGetInfo_v2(&f, &t);
    check(f == (8000 - CONTEXT_MIB) * MIB, "what was measured stands against what was learnt");
    /* The order of loading: a program that asks for NVML by name must get the front. */
    void *named = dlopen("libnvidia-ml.so.1", RTLD_NOW), *real = dlopen("/usr/lib/carve/driver/libnvidia-ml.so.1", RTLD_NOW | RTLD_NOLOAD);
    check(named != NULL && real != NULL && named != real && dlsym(named, "nvmlDeviceGetMemoryInfo") != dlsym(real, "nvmlDeviceGetMemoryInfo"),
          "NVML by name is the front after a measurement");
    CUcontext ctx;
    a.cuCtxGetCurrent(&ctx);
    check(a.cuCtxDestroy_v2(ctx) == CUDA_SUCCESS && box_used(0) == 0, "what was measured is given back");
    return 0;
}

static int run(void *scenario) {
    ((void (*)(void))scenario)();
    return 0;
}

int main(void) {
    check(in_child(run, (void *)figures) == 0, "figures: ran to its end");
    check(in_child(run, (void *)one_front) == 0, "one front: ran to its end");
    check(in_child(measured, NULL) == 0, "guessed: ran to its end");
    check(in_child(measured, "yes") == 0, "measured: ran to its end");
    return tap_done();
}
