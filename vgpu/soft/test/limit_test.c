/* Limits of contexts: what stacks, printf and the heap of malloc take of the card. */
#define _GNU_SOURCE
#include <stdlib.h>

#include "harness.h"

enum { SMS = 56, THREADS = 2048 }; /* of an A30 */

static size_t limit(CUlimit which) {
  size_t value = 0;
  CUDA(cuCtxGetLimit)(&value, which);
  return value;
}

static void limits(child *self, void *unused) {
  CUmodule module, other;
  CUcontext context;
  CUdeviceptr rest;
  (void)unused;
  check_equal(start_cuda(0), CUDA_SUCCESS, "start");
  CUDA(cuCtxGetCurrent)(&context);
  uint64_t before = cuda_free_bytes();
  check(limit(CU_LIMIT_STACK_SIZE) == 1024 && limit(CU_LIMIT_MALLOC_HEAP_SIZE) == 8 * MIB, "limits at first");
  check_equal(CUDA(cuCtxSetLimit)(CU_LIMIT_STACK_SIZE, 4096), CUDA_SUCCESS, "larger stacks");
  check_equal(before - cuda_free_bytes(), 3072ull * SMS * THREADS, "one for each thread that can be resident, at once");
  check_equal(CUDA(cuCtxSetLimit)(CU_LIMIT_STACK_SIZE, 4097), CUDA_SUCCESS, "a byte more");
  check_equal(before - cuda_free_bytes(), (3088ull * SMS * THREADS + 2 * MIB - 1) / (2 * MIB) * (2 * MIB), "are 16, and whole pages");
  check_equal(CUDA(cuCtxSetLimit)(CU_LIMIT_STACK_SIZE, 1 << 20), CUDA_ERROR_INVALID_VALUE, "no kernel could use a MiB");
  check_equal(CUDA(cuCtxSetLimit)(CU_LIMIT_STACK_SIZE, 512 << 10), CUDA_ERROR_OUT_OF_MEMORY, "what the card doesn't have is refused");
  check(limit(CU_LIMIT_STACK_SIZE) == 4097 && before - cuda_free_bytes() < 400 * MIB, "and changes nothing");
  check_equal(CUDA(cuCtxSetLimit)(CU_LIMIT_STACK_SIZE, 512), CUDA_SUCCESS, "smaller ones than at first");
  check_equal(cuda_free_bytes(), before, "leave the context its cost");
  check_equal(CUDA(cuCtxSetLimit)(CU_LIMIT_PRINTF_FIFO_SIZE, 101 * MIB), CUDA_SUCCESS, "a FIFO of 101 MiB");
  check_equal(before - cuda_free_bytes(), 94 * MIB, "is 102, of which 8 were there");
  CUDA(cuCtxSetLimit)(CU_LIMIT_PRINTF_FIFO_SIZE, 1 * MIB);

  check_equal(CUDA(cuCtxSetLimit)(CU_LIMIT_MALLOC_HEAP_SIZE, 1008 * MIB), CUDA_SUCCESS, "a heap of 1008 MiB");
  check_equal(cuda_free_bytes(), before, "which is made later");
  CUDA(cuMemAlloc_v2)(&rest, before - 500 * MIB);
  check_equal(CUDA(cuModuleLoadData)(&module, kernel_text), CUDA_ERROR_SHARED_OBJECT_INIT_FAILED, "where it has no room no module is loaded");
  check_equal(cuda_free_bytes(), 500 * MIB, "and nothing is taken");
  CUDA(cuMemFree_v2)(rest);
  check_equal(CUDA(cuModuleLoadData)(&module, kernel_text), CUDA_SUCCESS, "with a module");
  check_equal(before - cuda_free_bytes(), 1000 * MIB + 2 * MIB, "it is made, beside a page of globals");
  CUDA(cuModuleLoadData)(&other, kernel_text);
  check_equal(before - cuda_free_bytes(), 1000 * MIB + 2 * MIB, "once");
  check_equal(CUDA(cuCtxSetLimit)(CU_LIMIT_MALLOC_HEAP_SIZE, 108 * MIB), CUDA_SUCCESS, "after that it changes");
  check_equal(before - cuda_free_bytes(), 100 * MIB + 2 * MIB, "at once");
  check_equal(CUDA(cuCtxSetLimit)(CU_LIMIT_MAX_L2_FETCH_GRANULARITY, 64), CUDA_SUCCESS, "other limits");
  check_equal(before - cuda_free_bytes(), 100 * MIB + 2 * MIB, "take nothing");
  CUDA(cuCtxSetLimit)(CU_LIMIT_STACK_SIZE, 2048);
  check_equal(CUDA(cuDevicePrimaryCtxRelease_v2)(0), CUDA_SUCCESS, "the context goes");
  tell(self, used_bytes(0));
}

int main(void) {
  root_make("--card", "a30", "--seed", "1", NULL);
  child one = child_start(limits, NULL);
  check_equal(ask(&one), 0, "and all of it with it");
  check_equal(child_end(&one), 0, "limits");
  return finish();
}
