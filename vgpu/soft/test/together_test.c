/* One kernel on several cards at once, on the virtual clock. */
#include "harness.h"

#define MS 1000000ull

static CUresult together(CUDA_LAUNCH_PARAMS *list, unsigned int count, unsigned int flags) {
  return CUDA(cuLaunchCooperativeKernelMultiDevice)(list, count, flags);
}

static uint64_t clock_ns(void) { return ((uint64_t (*)(void))entry(cuda_library(), "softgpu_clock_ns"))(); }

static CUcontext ctx[2];
static CUstream on[2];
static CUfunction spin_function[2];
static CUdeviceptr none;
static uint64_t turn_ns;
static void *parameters[] = {&turn_ns, &none};

static void spin(int card, uint64_t ns) {
  CUDA(cuCtxSetCurrent)(ctx[card]);
  turn_ns = ns;
  CUDA(cuLaunchKernel)(spin_function[card], 1, 1, 1, 32, 1, 1, 0, on[card], parameters, NULL);
}

/* When the streams are through, one after the other. */
static void times(uint64_t from, uint64_t *took) {
  for (int i = 0; i < 2; i++) {
    CUevent end;
    CUDA(cuCtxSetCurrent)(ctx[i]);
    CUDA(cuEventCreate)(&end, 0);
    CUDA(cuEventRecord)(end, on[i]);
    CUDA(cuEventSynchronize)(end);
    took[i] = clock_ns() - from;
  }
}

int main(void) {
  uint64_t took[2];
  root_make("--card", "a30x2", "--seed", "3", "--clock", "virtual", NULL);
  CUDA(cuInit)(0);
  CUDA_LAUNCH_PARAMS list[2] = {{0}};
  for (int i = 0; i < 2; i++) {
    CUDA(cuCtxCreate_v2)(&ctx[i], 0, i);
    spin_function[i] = kernel("carve_spin");
    CUDA(cuStreamCreate)(&on[i], CU_STREAM_NON_BLOCKING);
    list[i] = (CUDA_LAUNCH_PARAMS){.function = spin_function[i], .gridDimX = 4, .gridDimY = 1, .gridDimZ = 1, .blockDimX = 64, .blockDimY = 1, .blockDimZ = 1,
                                   .hStream = on[i], .kernelParams = parameters};
  }
  int can = 0;
  CUDA(cuDeviceGetAttribute)(&can, 96, 0);
  check_equal(can, 1, "cards say that they can");

  uint64_t from = clock_ns();
  spin(0, 3 * MS);
  turn_ns = 2 * MS;
  check_equal(together(list, 2, 0), CUDA_SUCCESS, "a kernel on both cards");
  spin(1, MS);
  times(from, took);
  check(took[0] == 5 * MS && took[1] == 6 * MS, "begins when both are ready, and what follows waits for both (%llu, %llu)", (unsigned long long)took[0], (unsigned long long)took[1]);

  from = clock_ns();
  spin(0, 3 * MS);
  turn_ns = 2 * MS;
  check_equal(together(list, 2, 3), CUDA_SUCCESS, "without waiting before and after");
  spin(1, MS);
  CUDA(cuStreamSynchronize)(on[1]);
  check_equal(clock_ns() - from, 3 * MS, "each begins when its own card is ready");
  CUDA(cuStreamSynchronize)(on[0]);
  check_equal(clock_ns() - from, 5 * MS, "and the other later");

  list[1].hStream = on[0];
  check_equal(together(list, 2, 0), CUDA_ERROR_INVALID_DEVICE, "on a card each");
  list[1].hStream = NULL;
  check_equal(together(list, 2, 0), CUDA_ERROR_INVALID_VALUE, "in streams that were made");
  list[1].hStream = on[1];
  list[1].function = spin_function[0];
  check_equal(together(list, 2, 0), CUDA_ERROR_INVALID_HANDLE, "with a function of each one's context");
  list[1].function = spin_function[1];
  list[1].blockDimX = 32;
  check_equal(together(list, 2, 0), CUDA_ERROR_INVALID_VALUE, "of one shape");
  list[1].blockDimX = 64;
  list[0].gridDimX = list[1].gridDimX = 56 * 32 + 1;
  check_equal(together(list, 2, 0), CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE, "all of whose blocks are there at once");
  check(together(list, 0, 0) == CUDA_ERROR_INVALID_VALUE && together(list, 3, 0) == CUDA_ERROR_INVALID_VALUE && together(list, 2, 4) == CUDA_ERROR_INVALID_VALUE, "one to as many as there are");
  check_equal(CUDA(cuCtxSynchronize)(), CUDA_SUCCESS, "nothing is broken by that");
  return finish();
}
