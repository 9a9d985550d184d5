/* Multicast objects: what they keep charged, and where there are none. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
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
  return finish();
}
