/* Green contexts: parts of a card's multiprocessors, their streams and times, on the virtual clock. */
#include <stdlib.h>
#include <string.h>

#include "harness.h"

#define MS 1000000ull

static CUfunction spin_function;

static uint64_t clock_ns(void) { return ((uint64_t (*)(void))entry(cuda_library(), "softgpu_clock_ns"))(); }

/* As many blocks as the whole card holds, a millisecond each. */
static CUresult spin(CUstream on) {
  uint64_t ns = MS;
  CUdeviceptr none = 0;
  void *parameters[] = {&ns, &none};
  return CUDA(cuLaunchKernel)(spin_function, 216, 1, 1, 1024, 1, 1, 0, on, parameters, NULL);
}

static CUdevResource whole(CUdevice device) {
  CUdevResource r;
  memset(&r, 0xee, sizeof r);
  check_equal(CUDA(cuDeviceGetDevResource)(device, &r, CU_DEV_RESOURCE_TYPE_SM), CUDA_SUCCESS, "a device tells its multiprocessors");
  return r;
}

static void parts(void) {
  CUdevResource all = whole(0), groups[8], rest;
  unsigned int count = 0;
  check_equal(all.sm.smCount, 108, "all of an A100");
  check_equal(CUDA(cuDeviceGetDevResource)(0, &all, 7), CUDA_ERROR_INVALID_RESOURCE_TYPE, "there is no other kind");
  check(CUDA(cuDevSmResourceSplitByCount)(NULL, &count, &all, NULL, 0, 0) == CUDA_SUCCESS && count == 27, "at least four each, so 27 parts");
  count = 8;
  check(CUDA(cuDevSmResourceSplitByCount)(groups, &count, &all, &rest, 0, 33) == CUDA_SUCCESS && count == 3, "parts of 33");
  check(groups[0].sm.smCount == 34 && groups[2].sm.smCount == 34 && rest.sm.smCount == 6, "are of 34, since they come in twos, and leave six");
  count = 1;
  check(CUDA(cuDevSmResourceSplitByCount)(groups, &count, &all, &rest, 0, 40) == CUDA_SUCCESS && count == 1 && rest.sm.smCount == 68, "one part leaves the rest");
  count = 8;
  check(CUDA(cuDevSmResourceSplitByCount)(groups, &count, &rest, NULL, 0, 34) == CUDA_SUCCESS && count == 2, "which can be split again");
  check_equal(CUDA(cuDevSmResourceSplitByCount)(groups, &count, &all, NULL, 0, 110), CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION, "more than there is isn't");
  memset(&rest, 0, sizeof rest);
  check_equal(CUDA(cuDevSmResourceSplitByCount)(groups, &count, &rest, NULL, 0, 4), CUDA_ERROR_INVALID_RESOURCE_TYPE, "nor nothing");
  all = whole(1);
  count = 8;
  check(CUDA(cuDevSmResourceSplitByCount)(groups, &count, &all, NULL, 0, 9) == CUDA_SUCCESS && groups[0].sm.smCount == 16, "on Hopper they come in eights");
  count = 8;
  CUDA(cuDevSmResourceSplitByCount)(groups, &count, &all, NULL, CU_DEV_SM_RESOURCE_SPLIT_IGNORE_SM_COSCHEDULING, 9);
  check_equal(groups[0].sm.smCount, 10, "or in twos, without clusters");
}

static CUgreenCtx green[2];
static CUcontext name[2];

static void contexts(void) {
  CUdevResource all = whole(0), groups[2], own;
  CUdevResourceDesc desc, both;
  CUcontext now = NULL;
  CUgreenCtx bad;
  unsigned int count = 2;
  CUDA(cuDevSmResourceSplitByCount)(groups, &count, &all, NULL, 0, 54);
  check_equal(CUDA(cuDevResourceGenerateDesc)(&both, groups, 2), CUDA_SUCCESS, "two parts side by side can be one");
  for (int i = 0; i < 2; i++) {
    check_equal(CUDA(cuDevResourceGenerateDesc)(&desc, &groups[i], 1), CUDA_SUCCESS, "a part is named");
    check_equal(CUDA(cuGreenCtxCreate)(&green[i], desc, 0, CU_GREEN_CTX_DEFAULT_STREAM), CUDA_SUCCESS, "a green context of it");
    check(CUDA(cuGreenCtxGetDevResource)(green[i], &own, CU_DEV_RESOURCE_TYPE_SM) == CUDA_SUCCESS && own.sm.smCount == 54, "has it");
    check_equal(CUDA(cuCtxFromGreenCtx)(&name[i], green[i]), CUDA_SUCCESS, "and a name as a context");
    check(CUDA(cuCtxGetDevResource)(name[i], &own, CU_DEV_RESOURCE_TYPE_SM) == CUDA_SUCCESS && own.sm.smCount == 54, "that has it, too");
  }
  check_equal(used_bytes(0), 420 * MIB, "all of them are uses of one primary context");
  check_equal(CUDA(cuGreenCtxCreate)(&bad, desc, 0, 0), CUDA_ERROR_INVALID_VALUE, "a default stream must be asked for");
  check_equal(CUDA(cuGreenCtxCreate)(&bad, desc, 1, 1), CUDA_ERROR_INVALID_DEVICE, "another card has other parts");
  check_equal(CUDA(cuGreenCtxCreate)(&bad, NULL, 0, 1), CUDA_ERROR_INVALID_VALUE, "no part is none");
  check(CUDA(cuCtxSetCurrent)(name[0]) == CUDA_SUCCESS && CUDA(cuCtxGetCurrent)(&now) == CUDA_SUCCESS && now == name[0], "it can be current");
  check_equal(CUDA(cuCtxDestroy_v2)(name[0]), CUDA_ERROR_INVALID_CONTEXT, "and isn't destroyed by that name");
}

static void times(void) {
  CUstream a, b, c, wide;
  CUgreenCtx of = NULL;
  CUcontext primary, ctx = NULL;
  CUDA(cuDevicePrimaryCtxRetain)(&primary, 0);
  spin_function = kernel("carve_spin");
  check_equal(CUDA(cuGreenCtxStreamCreate)(&a, green[0], CU_STREAM_NON_BLOCKING, 0), CUDA_SUCCESS, "a stream in each");
  CUDA(cuGreenCtxStreamCreate)(&b, green[1], CU_STREAM_NON_BLOCKING, 0);
  check_equal(CUDA(cuGreenCtxStreamCreate)(&c, green[0], CU_STREAM_DEFAULT, 0), CUDA_ERROR_INVALID_VALUE, "that must not block");
  CUDA(cuStreamCreate)(&c, CU_STREAM_NON_BLOCKING); /* the current one's */
  check(CUDA(cuStreamGetGreenCtx)(c, &of) == CUDA_SUCCESS && of == green[0], "streams are the current one's");
  check(CUDA(cuStreamGetCtx)(c, &ctx) == CUDA_SUCCESS && ctx == name[0], "and say so");
  CUDA(cuCtxSetCurrent)(primary);
  CUDA(cuStreamCreate)(&wide, CU_STREAM_NON_BLOCKING);
  check(CUDA(cuStreamGetGreenCtx)(wide, &of) == CUDA_SUCCESS && of == NULL, "others are no green one's");
  uint64_t from = clock_ns();
  spin(wide);
  CUDA(cuCtxSynchronize)();
  check_equal(clock_ns() - from, MS, "on the whole card it takes its time");
  from = clock_ns();
  spin(a);
  CUDA(cuStreamSynchronize)(a);
  check_equal(clock_ns() - from, 2 * MS, "on half of it twice that");
  from = clock_ns();
  spin(a);
  spin(b);
  CUDA(cuCtxSynchronize)();
  check_equal(clock_ns() - from, 2 * MS, "two halves work at once");
  from = clock_ns();
  spin(a);
  spin(c);
  CUDA(cuCtxSynchronize)();
  check_equal(clock_ns() - from, 4 * MS, "two streams of one half one after the other");
  from = clock_ns();
  spin(a);
  spin(wide);
  CUDA(cuCtxSynchronize)();
  check_equal(clock_ns() - from, 3 * MS, "and what needs the whole card waits");

  CUevent event;
  CUDA(cuEventCreate)(&event, 0);
  from = clock_ns();
  spin(a);
  spin(c);
  check_equal(CUDA(cuGreenCtxRecordEvent)(green[0], event), CUDA_SUCCESS, "an event for all streams of one");
  check_equal(CUDA(cuGreenCtxWaitEvent)(green[1], event), CUDA_SUCCESS, "and a wait for it in another");
  spin(b);
  CUDA(cuStreamSynchronize)(b);
  check_equal(clock_ns() - from, 6 * MS, "keep the order");
  CUDA(cuCtxSetCurrent)(name[1]);
  from = clock_ns();
  spin(NULL);
  CUDA(cuStreamSynchronize)(NULL);
  check_equal(clock_ns() - from, 2 * MS, "the default stream is the current one's");
}

static void ends(void) {
  CUdeviceptr p;
  CUstream none;
  uint64_t before = used_bytes(0);
  CUDA(cuCtxSetCurrent)(name[0]);
  check_equal(CUDA(cuMemAlloc_v2)(&p, 10 * MIB), CUDA_SUCCESS, "memory is had in one");
  check_equal(CUDA(cuGreenCtxDestroy)(green[0]), CUDA_SUCCESS, "which goes");
  check_equal(CUDA(cuGreenCtxDestroy)(green[0]), CUDA_ERROR_INVALID_HANDLE, "once");
  check_equal(used_bytes(0), before + 10 * MIB, "but the memory, which is the primary context's");
  check_equal(CUDA(cuMemAlloc_v2)(&p, MIB), CUDA_ERROR_CONTEXT_IS_DESTROYED, "a thread that has it current is told");
  check_equal(CUDA(cuGreenCtxStreamCreate)(&none, green[0], CU_STREAM_NON_BLOCKING, 0), CUDA_ERROR_INVALID_HANDLE, "it has no streams any more");
  CUDA(cuCtxSetCurrent)(name[1]);
  check_equal(spin(NULL), CUDA_SUCCESS, "the other one works on");
  CUDA(cuGreenCtxDestroy)(green[1]);
  CUDA(cuDevicePrimaryCtxRelease_v2)(0);
  check_equal(used_bytes(0), 0, "with the last use of the primary one all goes");
}

static void early(void) {
  CUcontext primary;
  CUdevResource all = whole(0);
  CUdevResourceDesc desc;
  CUgreenCtx late;
  CUDA(cuDevResourceGenerateDesc)(&desc, &all, 1);
  CUDA(cuGreenCtxCreate)(&late, desc, 0, 1);
  CUDA(cuDevicePrimaryCtxRetain)(&primary, 0);
  CUDA(cuDevicePrimaryCtxReset_v2)(0);
  check_equal(CUDA(cuGreenCtxDestroy)(late), CUDA_ERROR_INVALID_HANDLE, "a reset primary context takes its parts along");
  check_equal(used_bytes(0), 0, "and leaves nothing");
}

int main(void) {
  root_make("--card", "a100-80", "--card", "h100", "--seed", "5", "--clock", "virtual", "--switch", "0", "--driver", "570.86.10", NULL);
  setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID", 1);
  CUDA(cuInit)(0);
  parts();
  contexts();
  times();
  ends();
  early();
  return finish();
}
