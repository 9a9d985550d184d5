/* Kernels, streams, events: results, order, times. On the virtual clock, so times are exact. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "harness.h"

static CUresult spin(CUfunction f, uint64_t ns, CUstream on) {
  CUdeviceptr none = 0;
  void *parameters[] = {&ns, &none};
  return CUDA(cuLaunchKernel)(f, 112, 1, 1, 1024, 1, 1, 0, on, parameters, NULL);
}

static float elapsed(CUevent from, CUevent to) {
  float ms = -1;
  CUDA(cuEventSynchronize)(to);
  CUDA(cuEventElapsedTime)(&ms, from, to);
  return ms;
}

static void results(void) {
  enum { N = 100000 };
  float *x = malloc(N * 4), *y = malloc(N * 4), *z = malloc(N * 4);
  CUdeviceptr a, b, c;
  uint64_t count = N;
  for (int i = 0; i < N; i++) {
    x[i] = (float)i;
    y[i] = (float)(2 * i);
  }
  CUDA(cuMemAlloc_v2)(&a, N * 4);
  CUDA(cuMemAlloc_v2)(&b, N * 4);
  CUDA(cuMemAlloc_v2)(&c, N * 4);
  CUDA(cuMemcpyHtoD_v2)(a, x, N * 4);
  CUDA(cuMemcpyHtoD_v2)(b, y, N * 4);
  void *add[] = {&a, &b, &c, &count};
  check_equal(CUDA(cuLaunchKernel)(kernel("carve_vecadd"), 100, 1, 1, 256, 1, 1, 0, NULL, add, NULL), CUDA_SUCCESS, "a sum of vectors");
  CUDA(cuMemcpyDtoH_v2)(z, c, N * 4);
  bool good = true;
  for (int i = 0; i < N; i++) good &= z[i] == (float)(3 * i);
  check(good, "is right");
  unsigned int value = 0xcafe;
  void *fill[] = {&c, &value, &count};
  CUDA(cuLaunchKernel)(kernel("carve_fill"), 100, 1, 1, 256, 1, 1, 0, NULL, fill, NULL);
  CUDA(cuMemcpyDtoH_v2)(z, c, N * 4);
  uint32_t last;
  memcpy(&last, &z[N - 1], 4);
  check_equal(last, 0xcafe, "a fill");
  uint64_t iterations = 3;
  void *turns[] = {&iterations, &c};
  CUDA(cuLaunchKernel)(kernel("carve_spin"), 1, 1, 1, 1, 1, 1, 0, NULL, turns, NULL);
  CUDA(cuMemcpyDtoH_v2)(&last, c, 4);
  uint32_t want = 1;
  for (int i = 0; i < 3; i++) want = want * 1664525u + 1013904223u;
  check_equal(last, want, "the spinning kernel computes what its text says");
  struct { uint64_t iterations; CUdeviceptr out; } packed = {4, c};
  size_t size = sizeof packed;
  void *extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, &packed, CU_LAUNCH_PARAM_BUFFER_SIZE, &size, CU_LAUNCH_PARAM_END};
  CUDA(cuLaunchKernel)(kernel("carve_spin"), 1, 1, 1, 1, 1, 1, 0, NULL, NULL, extra);
  CUDA(cuMemcpyDtoH_v2)(&last, c, 4);
  check_equal(last, want * 1664525u + 1013904223u, "arguments in one buffer");
  CUDA(cuMemFree_v2)(a);
  CUDA(cuMemFree_v2)(b);
  CUDA(cuMemFree_v2)(c);
  free(x);
  free(y);
  free(z);
}

static void times(void) {
  CUfunction f = kernel("carve_spin");
  CUevent start, middle, end;
  CUstream one, two;
  CUDA(cuEventCreate)(&start, 0);
  CUDA(cuEventCreate)(&middle, 0);
  CUDA(cuEventCreate)(&end, 0);
  CUDA(cuStreamCreate)(&one, CU_STREAM_NON_BLOCKING);
  CUDA(cuStreamCreate)(&two, CU_STREAM_NON_BLOCKING);

  CUDA(cuEventRecord)(start, one);
  for (int i = 0; i < 10; i++) spin(f, 3000000, one);
  CUDA(cuEventRecord)(middle, one);
  check_equal(CUDA(cuStreamQuery)(one), CUDA_ERROR_NOT_READY, "work that was just queued is not done");
  check_equal(CUDA(cuEventQuery)(middle), CUDA_ERROR_NOT_READY, "nor is the event after it");
  check(elapsed(start, middle) == 30.0f, "ten kernels of 3 ms follow each other");
  check_equal(CUDA(cuStreamQuery)(one), CUDA_SUCCESS, "after waiting it is done");

  /* full width: two streams share nothing */
  CUDA(cuEventRecord)(start, one);
  spin(f, 4000000, one);
  spin(f, 5000000, two);
  CUDA(cuEventRecord)(end, two);
  check(elapsed(start, end) == 9.0f, "wide kernels of two streams follow each other");

  /* a block each: side by side */
  uint64_t ns = 4000000;
  CUdeviceptr none = 0;
  void *parameters[] = {&ns, &none};
  CUDA(cuEventRecord)(start, one);
  CUDA(cuLaunchKernel)(f, 1, 1, 1, 32, 1, 1, 0, one, parameters, NULL);
  CUDA(cuLaunchKernel)(f, 1, 1, 1, 32, 1, 1, 0, two, parameters, NULL);
  CUDA(cuEventRecord)(middle, one);
  CUDA(cuEventRecord)(end, two);
  check(elapsed(start, end) == 4.0f && elapsed(start, middle) == 4.0f, "narrow kernels of two streams run side by side");

  /* blocks beyond what is resident come in waves: 56 SMs of an A30 hold two blocks of 1024 each */
  CUDA(cuEventRecord)(start, one);
  CUDA(cuLaunchKernel)(f, 113, 1, 1, 1024, 1, 1, 0, one, parameters, NULL);
  CUDA(cuEventRecord)(end, one);
  check(elapsed(start, end) == 8.0f, "113 blocks where 112 fit take two waves");

  /* a wait across streams */
  CUDA(cuEventRecord)(start, two);
  CUDA(cuLaunchKernel)(f, 1, 1, 1, 32, 1, 1, 0, one, parameters, NULL);
  CUDA(cuEventRecord)(middle, one);
  CUDA(cuStreamWaitEvent)(two, middle, 0);
  CUDA(cuLaunchKernel)(f, 1, 1, 1, 32, 1, 1, 0, two, parameters, NULL);
  CUDA(cuEventRecord)(end, two);
  check(elapsed(start, end) == 8.0f, "a stream that waits for an event goes on after it");

  /* the legacy stream waits for blocking ones, and they for it */
  CUstream blocking;
  CUDA(cuStreamCreate)(&blocking, CU_STREAM_DEFAULT);
  CUDA(cuEventRecord)(start, blocking);
  CUDA(cuLaunchKernel)(f, 1, 1, 1, 32, 1, 1, 0, blocking, parameters, NULL);
  CUDA(cuLaunchKernel)(f, 1, 1, 1, 32, 1, 1, 0, NULL, parameters, NULL);
  CUDA(cuLaunchKernel)(f, 1, 1, 1, 32, 1, 1, 0, blocking, parameters, NULL);
  CUDA(cuEventRecord)(end, blocking);
  check(elapsed(start, end) == 12.0f, "blocking streams and the legacy stream wait for each other");
  CUDA(cuEventRecord)(start, one);
  CUDA(cuLaunchKernel)(f, 1, 1, 1, 32, 1, 1, 0, one, parameters, NULL);
  CUDA(cuLaunchKernel)(f, 1, 1, 1, 32, 1, 1, 0, NULL, parameters, NULL);
  CUDA(cuEventRecord)(end, NULL);
  check(elapsed(start, end) == 4.0f, "streams that don't block don't");

  /* a queue has room for 1024: launching more waits, and loses nothing */
  CUDA(cuEventRecord)(start, one);
  bool ok = true;
  for (int i = 0; i < 3000; i++) ok &= spin(f, 1000, one) == CUDA_SUCCESS;
  CUDA(cuEventRecord)(end, one);
  check(ok, "3000 launches go through a queue of 1024");
  check(elapsed(start, end) == 3.0f, "and take their time");

  /* an event recorded long ago keeps its time while thousands of entries pass */
  CUDA(cuEventRecord)(start, one);
  spin(f, 1000000, one);
  CUDA(cuEventRecord)(middle, one);
  for (int i = 0; i < 2500; i++) spin(f, 1000, one);
  CUDA(cuStreamSynchronize)(one);
  check(elapsed(start, middle) == 1.0f, "an old event keeps its time");
  float ms;
  CUevent never;
  CUDA(cuEventCreate)(&never, 0);
  check_equal(CUDA(cuEventQuery)(never), CUDA_SUCCESS, "an event that was never recorded is no wait");
  check_equal(CUDA(cuEventElapsedTime)(&ms, start, never), CUDA_ERROR_INVALID_HANDLE, "and has no time");
  CUDA(cuStreamDestroy_v2)(two);
  check_equal(spin(f, 1, two), CUDA_ERROR_INVALID_HANDLE, "a destroyed stream takes no work");
}

static void refusals(void) {
  static const char unknown[] = ".version 6.0\n.target sm_50\n.address_size 64\n.visible .entry mystery(.param .u64 a)\n{\n ret;\n}\n";
  static const char altered[] = ".version 6.0\n.target sm_50\n.address_size 64\n.visible .entry carve_empty()\n{\n exit;\n}\n";
  static const char newer[] = ".version 9.9\n.target sm_50\n.address_size 64\n";
  static const char other_card[] = ".version 6.0\n.target sm_99\n.address_size 64\n";
  static const char broken[] = ".version 6.0\n.target sm_50\n.visible .entry half(.param .u64 a) {";
  static const unsigned char cubin[16] = {0x7f, 'E', 'L', 'F'};
  CUmodule module;
  CUfunction f;
  uint64_t argument = 1;
  void *parameters[] = {&argument};
  check_equal(CUDA(cuModuleLoadData)(&module, unknown), CUDA_SUCCESS, "an unknown kernel can be loaded");
  check_equal(CUDA(cuModuleGetFunction)(&f, module, "mystery"), CUDA_SUCCESS, "and found");
  check_equal(CUDA(cuLaunchKernel)(f, 1, 1, 1, 1, 1, 1, 0, NULL, parameters, NULL), CUDA_ERROR_NOT_SUPPORTED, "but not run");
  check_equal(CUDA(cuModuleGetFunction)(&f, module, "nothing"), CUDA_ERROR_NOT_FOUND, "what isn't in it isn't found");
  CUDA(cuModuleLoadData)(&module, altered);
  CUDA(cuModuleGetFunction)(&f, module, "carve_empty");
  check_equal(CUDA(cuLaunchKernel)(f, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL), CUDA_ERROR_NOT_SUPPORTED, "a known name with another text is not run");
  check_equal(CUDA(cuModuleLoadData)(&module, newer), CUDA_ERROR_UNSUPPORTED_PTX_VERSION, "PTX newer than the driver");
  check_equal(CUDA(cuModuleLoadData)(&module, other_card), CUDA_ERROR_NO_BINARY_FOR_GPU, "PTX for a newer card");
  check_equal(CUDA(cuModuleLoadData)(&module, broken), CUDA_ERROR_INVALID_PTX, "PTX that breaks off");
  check_equal(CUDA(cuModuleLoadData)(&module, cubin), CUDA_ERROR_NO_BINARY_FOR_GPU, "machine code");
  check_equal(CUDA(cuModuleLoadData)(&module, "hello"), CUDA_ERROR_INVALID_IMAGE, "no PTX at all");
  f = kernel("carve_spin");
  void *both[] = {&argument, &argument};
  check_equal(CUDA(cuLaunchKernel)(f, 0, 1, 1, 1, 1, 1, 0, NULL, both, NULL), CUDA_ERROR_INVALID_VALUE, "no blocks");
  check_equal(CUDA(cuLaunchKernel)(f, 1, 1, 1, 1025, 1, 1, 0, NULL, both, NULL), CUDA_ERROR_INVALID_VALUE, "too many threads");
  check_equal(CUDA(cuLaunchKernel)(f, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL), CUDA_ERROR_INVALID_VALUE, "no arguments");
  check_equal(CUDA(cuLaunchCooperativeKernel)(f, 10000, 1, 1, 1024, 1, 1, 0, NULL, both), CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE,
              "a cooperative launch must fit at once");
  CUdeviceptr counter = 0;
  size_t bytes = 0;
  CUDA(cuModuleLoadData)(&module, kernel_text);
  check(CUDA(cuModuleGetGlobal_v2)(&counter, &bytes, module, "carve_counter") == CUDA_SUCCESS && bytes == 32 && counter, "a module's global");
}

static void library(void) {
  CUlibrary lib;
  CUkernel k;
  CUfunction f;
  check_equal(CUDA(cuLibraryLoadData)(&lib, kernel_text, NULL, NULL, 0, NULL, NULL, 0), CUDA_SUCCESS, "a library");
  check_equal(CUDA(cuLibraryGetKernel)(&k, lib, "carve_empty"), CUDA_SUCCESS, "its kernel");
  check_equal(CUDA(cuLaunchKernel)((CUfunction)k, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL), CUDA_SUCCESS, "a kernel handle can be launched");
  check_equal(CUDA(cuKernelGetFunction)(&f, k), CUDA_SUCCESS, "and be a function");
  CUlaunchConfig config = {.gridDimX = 1, .gridDimY = 1, .gridDimZ = 1, .blockDimX = 1, .blockDimY = 1, .blockDimZ = 1};
  check_equal(CUDA(cuLaunchKernelEx)(&config, f, NULL, NULL), CUDA_SUCCESS, "launched in the extended way");
  CUDA(cuCtxSynchronize)();
  check_equal(CUDA(cuLibraryUnload)(lib), CUDA_SUCCESS, "unloaded");
  check_equal(CUDA(cuLaunchKernel)(f, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL), CUDA_ERROR_INVALID_HANDLE, "its functions are gone");
}

static void illegal(void) {
  CUfunction f = kernel("carve_fill");
  CUdeviceptr ok;
  unsigned int value = 1;
  uint64_t count = 10;
  CUdeviceptr a;
  CUDA(cuMemAlloc_v2)(&a, 32);
  void *parameters[] = {&a, &value, &count}; /* 40 bytes into 32 */
  check_equal(CUDA(cuLaunchKernel)(f, 1, 1, 1, 1, 1, 1, 0, NULL, parameters, NULL), CUDA_SUCCESS, "a kernel that writes past its memory is launched");
  check_equal(CUDA(cuCtxSynchronize)(), CUDA_ERROR_ILLEGAL_ADDRESS, "and found out at the next synchronisation");
  check_equal(CUDA(cuMemAlloc_v2)(&ok, 32), CUDA_ERROR_ILLEGAL_ADDRESS, "the context stays broken");
}

/* Of the host's memory a kernel reaches what is page-locked. What it can't reach breaks its context, and no other. */
static void astray(void) {
  unsigned int value = 7, there[4] = {0}, zero[2] = {0};
  uint64_t count = 4;
  CUdeviceptr freed, ok;
  CUDA(cuMemAlloc_v2)(&freed, 64 * MIB);
  CUDA(cuMemFree_v2)(freed);
  CUdeviceptr wild[] = {0x10, (uintptr_t)there, freed + 48 * MIB, 1ull << 60};
  static const char *const names[] = {"next to zero", "on the host", "freed", "nowhere"};
  for (int i = 0; i < 4; i++) {
    CUcontext context, before = NULL;
    CUmodule module;
    CUfunction fill;
    CUDA(cuCtxGetCurrent)(&before);
    CUDA(cuCtxCreate_v2)(&context, 0, 0);
    CUDA(cuModuleLoadData)(&module, kernel_text);
    CUDA(cuModuleGetFunction)(&fill, module, "carve_fill");
    void *parameters[] = {&wild[i], &value, &count};
    check_equal(CUDA(cuLaunchKernel)(fill, 1, 1, 1, 1, 1, 1, 0, NULL, parameters, NULL), CUDA_SUCCESS, "a kernel that writes to an address %s is launched", names[i]);
    check(CUDA(cuCtxSynchronize)() == CUDA_ERROR_ILLEGAL_ADDRESS && CUDA(cuMemAlloc_v2)(&ok, 32) == CUDA_ERROR_ILLEGAL_ADDRESS &&
              CUDA(cuMemFree_v2)(4096) == CUDA_ERROR_ILLEGAL_ADDRESS && CUDA(cuLaunchKernel)(fill, 1, 1, 1, 1, 1, 1, 0, NULL, parameters, NULL) == CUDA_ERROR_ILLEGAL_ADDRESS,
          "its context is broken for good");
    check(CUDA(cuCtxDestroy_v2)(context) == CUDA_SUCCESS && CUDA(cuCtxSetCurrent)(before) == CUDA_SUCCESS && CUDA(cuCtxSynchronize)() == CUDA_SUCCESS, "and goes; another isn't");
  }
  check(there[0] == 0 && CUDA(cuMemsetD8_v2)((uintptr_t)zero, 1, sizeof zero) == CUDA_ERROR_INVALID_VALUE && zero[0] == 0, "nothing was written there; a fill of such memory is refused");
  CUDA(cuMemHostRegister_v2)(there, sizeof there, 0);
  CUdeviceptr locked = (uintptr_t)there;
  void *parameters[] = {&locked, &value, &count};
  check(CUDA(cuLaunchKernel)(kernel("carve_fill"), 1, 1, 1, 1, 1, 1, 0, NULL, parameters, NULL) == CUDA_SUCCESS && CUDA(cuCtxSynchronize)() == CUDA_SUCCESS && there[3] == 7, "once it is page-locked, a kernel reaches it");
  CUDA(cuMemHostUnregister)(there);
}

int main(void) {
  root_make("--card", "a30", "--seed", "3", "--clock", "virtual", NULL);
  check_equal(start_cuda(0), CUDA_SUCCESS, "start");
  results();
  times();
  refusals();
  library();
  astray();
  illegal();
  return finish();
}
