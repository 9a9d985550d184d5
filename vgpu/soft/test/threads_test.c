/* Many threads in one process: memory, launches, events, contexts, and NVML beside them. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "harness.h"

enum { THREADS = 8, ROUNDS = 300 };

static CUcontext shared_context;
static CUfunction spin;
static _Atomic int errors;

static void expect(CUresult result) {
  if (result != CUDA_SUCCESS) atomic_fetch_add(&errors, 1);
}

static void *memory_worker(void *argument) {
  unsigned int seed = (unsigned int)(uintptr_t)argument;
  CUdeviceptr held[32] = {0};
  unsigned char mark[32] = {0}, back;
  expect(CUDA(cuCtxSetCurrent)(shared_context));
  for (int i = 0; i < ROUNDS; i++) {
    seed = seed * 1103515245u + 12345u;
    unsigned int at = seed >> 16 & 31;
    if (held[at]) {
      expect(CUDA(cuMemcpyDtoH_v2)(&back, held[at], 1));
      if (back != mark[at]) atomic_fetch_add(&errors, 1);
      expect(CUDA(cuMemFree_v2)(held[at]));
      held[at] = 0;
    } else {
      expect(CUDA(cuMemAlloc_v2)(&held[at], seed % 3 ? 1 + (seed >> 8) % 5000 : 1 + (seed >> 8) % (8 * MIB)));
      mark[at] = (unsigned char)seed;
      expect(CUDA(cuMemsetD8_v2)(held[at], mark[at], 1));
    }
  }
  for (int i = 0; i < 32; i++)
    if (held[i]) expect(CUDA(cuMemFree_v2)(held[i]));
  return NULL;
}

static void *launch_worker(void *argument) {
  CUstream on;
  CUevent start, end;
  uint64_t ns = 20000;
  CUdeviceptr none = 0;
  void *parameters[] = {&ns, &none};
  float ms;
  (void)argument;
  expect(CUDA(cuCtxSetCurrent)(shared_context));
  expect(CUDA(cuStreamCreate)(&on, CU_STREAM_NON_BLOCKING));
  expect(CUDA(cuEventCreate)(&start, 0));
  expect(CUDA(cuEventCreate)(&end, 0));
  for (int i = 0; i < ROUNDS / 10; i++) {
    expect(CUDA(cuEventRecord)(start, on));
    for (int k = 0; k < 5; k++) expect(CUDA(cuLaunchKernel)(spin, 1, 1, 1, 32, 1, 1, 0, on, parameters, NULL));
    expect(CUDA(cuEventRecord)(end, on));
    expect(CUDA(cuEventSynchronize)(end));
    expect(CUDA(cuEventElapsedTime)(&ms, start, end));
    if (ms < 0.0999f) atomic_fetch_add(&errors, 1);
  }
  expect(CUDA(cuEventDestroy_v2)(start));
  expect(CUDA(cuEventDestroy_v2)(end));
  expect(CUDA(cuStreamDestroy_v2)(on));
  return NULL;
}

static void *context_worker(void *argument) {
  CUcontext own;
  CUdeviceptr pointer;
  (void)argument;
  for (int i = 0; i < ROUNDS / 10; i++) {
    expect(CUDA(cuCtxCreate_v2)(&own, 0, 1));
    expect(CUDA(cuMemAlloc_v2)(&pointer, 3 * MIB));
    expect(CUDA(cuCtxDestroy_v2)(own));
  }
  return NULL;
}

static void *looker(void *argument) {
  nvmlDevice_t device;
  nvmlMemory_t memory;
  nvmlProcessInfo_t rows[4];
  (void)argument;
  for (int i = 0; i < ROUNDS; i++) {
    unsigned int count = 4;
    if (NVML(nvmlDeviceGetHandleByIndex_v2)(0, &device) != NVML_SUCCESS || NVML(nvmlDeviceGetMemoryInfo)(device, &memory) != NVML_SUCCESS ||
        NVML(nvmlDeviceGetComputeRunningProcesses_v3)(device, &count, rows) != NVML_SUCCESS || count != 1)
      atomic_fetch_add(&errors, 1);
  }
  return NULL;
}

int main(void) {
  pthread_t threads[4 * THREADS];
  void *(*const bodies[])(void *) = {memory_worker, launch_worker, context_worker, looker};
  root_make("--card", "a100-80x2", "--seed", "11", NULL);
  check_equal(start_cuda(0), CUDA_SUCCESS, "start");
  check_equal(NVML(nvmlInit_v2)(), NVML_SUCCESS, "NVML in the same process");
  CUDA(cuCtxGetCurrent)(&shared_context);
  spin = kernel("carve_spin");
  uint64_t before = cuda_free_bytes();
  for (int i = 0; i < 4 * THREADS; i++)
    if (pthread_create(&threads[i], NULL, bodies[i % 4], (void *)(uintptr_t)(i + 1)) != 0) return 1;
  for (int i = 0; i < 4 * THREADS; i++) pthread_join(threads[i], NULL);
  check_equal(errors, 0, "%d threads at once: no call failed, no byte was lost", 4 * THREADS);
  check_equal(cuda_free_bytes(), before, "and all memory is back");
  check_equal(used_bytes(1), 0, "on the other card too");
  return finish();
}
