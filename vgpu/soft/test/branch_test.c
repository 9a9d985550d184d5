/* Which driver branch has what of shared, managed and accounted memory, and what it answers. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "harness.h"

static const struct { const char *symbol; int since; } symbols[] = {
    {"cuArrayGetMemoryRequirements", 535}, {"cuIpcOpenMemHandle_v2", 535}, {"cuMemPoolImportPointer", 535}, {"cuImportExternalMemory", 535},
    {"cuMulticastCreate", 535},            {"cuMemPrefetchAsync_v2", 535}, {"cuMemAdvise_v2", 535},         {"cuMemRangeGetAttributes", 535},
    {"cuMemPrefetchBatchAsync", 580},      {"cuMemDiscardBatchAsync", 580}, {"cuMemDiscardAndPrefetchBatchAsync", 580},
    {"cuMemGetDefaultMemPool", 580},       {"cuMemGetMemPool", 580},       {"cuMemSetMemPool", 580},
};

/* A root of each branch: what it exports answers, and what it doesn't is not there. */
static void branch(child *self, void *version) {
  int number = atoi(version);
  void *library = cuda_library();
  for (unsigned int i = 0; i < sizeof symbols / sizeof symbols[0]; i++)
    check((dlsym(library, symbols[i].symbol) != NULL) == (number >= symbols[i].since), "%s in %d", symbols[i].symbol, number);
  check_equal(start_cuda(0), CUDA_SUCCESS, "start %d", number);
  uint64_t before = cuda_free_bytes();
  CUdeviceptr p;
  size_t bytes = 4 * MIB;
  CUDA(cuMemAllocManaged)(&p, bytes, CU_MEM_ATTACH_GLOBAL);
  if (number >= 580) {
    CUmemLocation card = {CU_MEM_LOCATION_TYPE_DEVICE, 0}, host = {CU_MEM_LOCATION_TYPE_HOST, 0};
    CUmemoryPool by_place = NULL, by_device = NULL;
    size_t from = 0;
    check_equal(CUDA(cuMemPrefetchBatchAsync)(&p, &bytes, 1, &card, &from, 1, 0, NULL), CUDA_SUCCESS, "a batch goes to the card");
    check_equal(before - cuda_free_bytes(), 4 * MIB, "all of it");
    check_equal(CUDA(cuMemDiscardBatchAsync)(&p, &bytes, 1, 0, NULL), CUDA_SUCCESS, "is discarded");
    check_equal(CUDA(cuMemDiscardAndPrefetchBatchAsync)(&p, &bytes, 1, &host, &from, 1, 0, NULL), CUDA_SUCCESS, "and goes back");
    check_equal(cuda_free_bytes(), before, "all of it");
    check_equal(CUDA(cuMemPrefetchBatchAsync)(&p, &bytes, 1, &card, &from, 2, 0, NULL), CUDA_ERROR_INVALID_VALUE, "no more places than ranges");
    CUDA(cuMemGetDefaultMemPool)(&by_place, &card, CU_MEM_ALLOCATION_TYPE_PINNED);
    CUDA(cuDeviceGetDefaultMemPool)(&by_device, 0);
    check(by_place && by_place == by_device, "a pool by its place is the device's own");
    check_equal(CUDA(cuMemGetMemPool)(&by_place, &host, CU_MEM_ALLOCATION_TYPE_PINNED), CUDA_ERROR_NOT_SUPPORTED, "the host has none");
  }
  CUDA(cuMemFree_v2)(p);
  /* the newest form that a program of CUDA 13 would be given */
  void *found = NULL;
  CUdriverProcAddressQueryResult status;
  CUDA(cuGetProcAddress_v2)("cuMemPrefetchAsync", &found, 13000, 0, &status);
  check(found == dlsym(library, "cuMemPrefetchAsync_v2"), "asked for cuMemPrefetchAsync, %d gives the second form", number);
  tell(self, 1);
}

/* ---- accounting ------------------------------------------------------------ */

static void busy(child *self, void *unused) {
  CUdeviceptr none = 0;
  uint64_t ns = 250000000;
  void *parameters[] = {&ns, &none};
  (void)unused;
  start_cuda(0);
  CUDA(cuLaunchKernel)(kernel("carve_spin"), 1, 1, 1, 32, 1, 1, 0, NULL, parameters, NULL);
  CUDA(cuCtxSynchronize)();
  tell(self, 1);
  ask(self);
}

/* The second form says how much time the card gave, finer than whole percents of a life. */
static void accounting(child *self, void *version) {
  int number = atoi(version);
  check((dlsym(nvml_library(), "nvmlDeviceGetAccountingStats_v2") != NULL) == (number >= 580), "accounting in sums in %d", number);
  if (number >= 580) {
    nvmlDevice_t device;
    nvmlAccountingStats_v2_t stats = {0};
    NVML(nvmlInit_v2)();
    NVML(nvmlDeviceGetHandleByIndex_v2)(0, &device);
    check_equal(NVML(nvmlDeviceGetAccountingStats_v2)(device, &stats), NVML_ERROR_NOT_SUPPORTED, "needs accounting switched on");
    NVML(nvmlDeviceSetAccountingMode)(device, NVML_FEATURE_ENABLED);
    child c = child_start(busy, NULL);
    ask(&c);
    stats.pid = (unsigned int)c.pid;
    check_equal(NVML(nvmlDeviceGetAccountingStats_v2)(device, &stats), NVML_SUCCESS, "then it says what a process used");
    check(stats.isRunning && stats.maxMemoryUsage > 100 * MIB, "while it runs");
    check_equal(stats.sumGpuUtil, 15000 - 1, "a quarter of a second is one and a half samples of a hundred percent");
    child_kill(&c);
    nvmlAccountingStats_t whole;
    used_bytes(0);
    check_equal(NVML(nvmlDeviceGetAccountingStats_v2)(device, &stats), NVML_SUCCESS, "and afterwards");
    check(!stats.isRunning && stats.sumGpuUtil == 15000 - 1, "the same");
    NVML(nvmlDeviceGetAccountingStats)(device, stats.pid, &whole);
    check(whole.maxMemoryUsage == stats.maxMemoryUsage && whole.gpuUtilization == stats.gpuUtilization, "the first form agrees");
    stats.pid = 1;
    check_equal(NVML(nvmlDeviceGetAccountingStats_v2)(device, &stats), NVML_ERROR_NOT_FOUND, "of a process that had no card it says nothing");
  }
  tell(self, 1);
}


static void in_a_root(const char *driver, const char *cards, child_body body) {
  fflush(stdout);
  pid_t pid = fork();
  if (pid == 0) {
    root_make("--card", cards, "--seed", "5", "--driver", driver, "--free-delay", "0", NULL);
    child c = child_start(body, (void *)(uintptr_t)driver);
    check_equal(ask(&c), 1, "all was looked at");
    child_end(&c);
    fflush(stdout);
    root_remove();
    _exit(0);
  }
  int status = 1;
  check(waitpid(pid, &status, 0) == pid && status == 0, "%s with %s came to its end", driver, cards);
}

int main(void) {
  static const char *const drivers[] = {"535.104.05", "550.90.07", "570.124.06", "580.65.06"};
  for (int i = 0; i < 4; i++) {
    in_a_root(drivers[i], "t4", branch);
    in_a_root(drivers[i], "t4", accounting);
  }
  return finish();
}
