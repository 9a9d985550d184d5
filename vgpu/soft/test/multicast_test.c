/* Multicast objects, and which driver branch has what of shared and managed memory. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "harness.h"

static void objects(child *self, void *unused) {
  CUmulticastObjectProp property = {.numDevices = 2, .size = 8 * MIB};
  CUmemAllocationProp memory = {.type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
  CUmemGenericAllocationHandle object, first, second;
  CUdeviceptr range;
  CUcontext other;
  size_t grain = 0;
  int can = 0;
  uint64_t word = 1;
  (void)unused;
  check_equal(start_cuda(0), CUDA_SUCCESS, "start");
  CUDA(cuDevicePrimaryCtxRetain)(&other, 1);
  uint64_t before = cuda_free_bytes();
  CUDA(cuDeviceGetAttribute)(&can, CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED, 0);
  check_equal(can, 1, "cards behind switches can multicast");
  CUDA(cuMulticastGetGranularity)(&grain, &property, CU_MULTICAST_GRANULARITY_MINIMUM);
  check_equal(grain, 2 * MIB, "in steps of 2 MiB");
  property.size = 3 * MIB;
  check_equal(CUDA(cuMulticastCreate)(&object, &property), CUDA_ERROR_INVALID_VALUE, "and in no others");
  property.size = 8 * MIB;
  property.handleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  check_equal(CUDA(cuMulticastCreate)(&object, &property), CUDA_ERROR_NOT_SUPPORTED, "an object isn't given to others");
  property.handleTypes = 0;
  check_equal(CUDA(cuMulticastCreate)(&object, &property), CUDA_SUCCESS, "an object for two devices");
  check_equal(cuda_free_bytes(), before, "costs nothing");
  CUDA(cuMemCreate)(&first, 4 * MIB, &memory, 0);
  memory.location.id = 1;
  CUDA(cuMemCreate)(&second, 4 * MIB, &memory, 0);
  check_equal(CUDA(cuMulticastBindMem)(object, 0, first, 0, 4 * MIB, 0), CUDA_ERROR_INVALID_VALUE, "memory of a device that wasn't added isn't bound");
  check_equal(CUDA(cuMulticastAddDevice)(object, 0), CUDA_SUCCESS, "one device is added");
  check_equal(CUDA(cuMulticastAddDevice)(object, 0), CUDA_ERROR_INVALID_VALUE, "once");
  check_equal(CUDA(cuMulticastBindMem)(object, 0, first, 0, 4 * MIB, 0), CUDA_ERROR_NOT_READY, "before all are there nothing is bound");
  check_equal(CUDA(cuMulticastAddDevice)(object, 1), CUDA_SUCCESS, "the other");
  check_equal(CUDA(cuMulticastBindMem)(object, 0, first, 0, 4 * MIB, 0), CUDA_SUCCESS, "memory of the first");
  check_equal(CUDA(cuMulticastBindMem)(object, 2 * MIB, first, 0, 2 * MIB, 0), CUDA_ERROR_INVALID_VALUE, "not twice in one place");
  check_equal(CUDA(cuMulticastBindMem)(object, 0, second, 0, 6 * MIB, 0), CUDA_ERROR_INVALID_VALUE, "not more than there is");
  check_equal(CUDA(cuMulticastBindMem)(object, 0, second, 0, 4 * MIB, 0), CUDA_SUCCESS, "memory of the other");
  CUDA(cuMemRelease)(first);
  check_equal(before - cuda_free_bytes(), 4 * MIB, "released memory is charged while it is bound");
  CUDA(cuMemAddressReserve)(&range, 8 * MIB, 0, 0, 0);
  check_equal(CUDA(cuMemMap)(range, 8 * MIB, 0, object, 0), CUDA_SUCCESS, "an object is mapped");
  check_equal(CUDA(cuMemcpyHtoD_v2)(range, &word, 8), CUDA_ERROR_INVALID_VALUE, "and shows no bytes");
  check_equal(CUDA(cuMemUnmap)(range, 8 * MIB), CUDA_SUCCESS, "and unmapped");
  check_equal(CUDA(cuMulticastUnbind)(object, 0, 0, 2 * MIB), CUDA_ERROR_INVALID_VALUE, "bindings end as they began");
  check_equal(CUDA(cuMulticastUnbind)(object, 0, 0, 4 * MIB), CUDA_SUCCESS, "this one does");
  check_equal(cuda_free_bytes(), before, "and its memory is free");
  CUDA(cuMemRelease)(second);
  CUDA(cuCtxPushCurrent_v2)(other);
  uint64_t there = cuda_free_bytes();
  check_equal(CUDA(cuMemRelease)(object), CUDA_SUCCESS, "the object is released");
  check_equal(cuda_free_bytes() - there, 4 * MIB, "and lets go of what is still bound");
  check_equal(CUDA(cuMulticastAddDevice)(object, 0), CUDA_ERROR_INVALID_VALUE, "it is no more");
  tell(self, 1);
}

static void without(child *self, void *unused) {
  CUmulticastObjectProp property = {.numDevices = 1, .size = 8 * MIB};
  CUmemGenericAllocationHandle object;
  int can = 9;
  (void)unused;
  start_cuda(0);
  CUDA(cuDeviceGetAttribute)(&can, CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED, 0);
  check_equal(can, 0, "a card without NVLink can't");
  check_equal(CUDA(cuMulticastCreate)(&object, &property), CUDA_ERROR_NOT_SUPPORTED, "and says so");
  tell(self, 1);
}

/* ---- branches ------------------------------------------------------------- */

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

static void in_a_root(const char *driver, const char *cards, child_body body) {
  fflush(stdout);
  pid_t pid = fork();
  if (pid == 0) {
    root_make("--card", cards, "--seed", "5", "--driver", driver, NULL);
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
  in_a_root("550.90.07", "h100x2", objects);
  in_a_root("550.90.07", "4090", without);
  static const char *const drivers[] = {"535.104.05", "550.90.07", "570.124.06", "580.65.06"};
  for (int i = 0; i < 4; i++) in_a_root(drivers[i], "t4", branch);
  return finish();
}
