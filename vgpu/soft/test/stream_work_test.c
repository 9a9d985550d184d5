/* What ties streams to the host and to values in memory, launches of CUDA 2, and occupancy. On the virtual clock. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "harness.h"

static CUfunction spin_function;

static uint64_t clock_ns(void) { return ((uint64_t (*)(void))entry(cuda_library(), "softgpu_clock_ns"))(); }

static CUresult spin(uint64_t ns, CUstream on) {
  CUdeviceptr none = 0;
  void *parameters[] = {&ns, &none};
  return CUDA(cuLaunchKernel)(spin_function, 1, 1, 1, 32, 1, 1, 0, on, parameters, NULL);
}

static CUstream stream_new(unsigned int flags) {
  CUstream on = NULL;
  CUDA(cuStreamCreate)(&on, flags);
  return on;
}

/* ---- functions of the host ----------------------------------------------- */

typedef struct {
  unsigned int calls, order;
  uint64_t at_ns;
  CUresult status, permitted;
  CUstream stream;
  pthread_t thread;
} visit;

static unsigned int visits;

static void look(void *data) {
  visit *v = data;
  v->calls++;
  v->order = ++visits;
  v->at_ns = clock_ns();
  v->permitted = CUDA(cuCtxSynchronize)();
  v->thread = pthread_self();
}

static void called_back(CUstream stream, CUresult status, void *data) {
  visit *v = data;
  look(data);
  v->stream = stream;
  v->status = status;
}

static void host_functions(void) {
  CUstream on = stream_new(CU_STREAM_NON_BLOCKING), other = stream_new(CU_STREAM_NON_BLOCKING);
  visit a = {0}, b = {0}, c = {.status = 99};
  CUevent before, after;
  float ms = 0;
  CUDA(cuEventCreate)(&before, 0);
  CUDA(cuEventCreate)(&after, 0);
  uint64_t from = clock_ns();
  CUDA(cuEventRecord)(before, on);
  spin(2000000, on);
  check_equal(CUDA(cuLaunchHostFunc)(on, look, &a), CUDA_SUCCESS, "a host function");
  spin(3000000, on);
  check_equal(CUDA(cuStreamAddCallback)(on, called_back, &c, 0), CUDA_SUCCESS, "and a callback");
  CUDA(cuEventRecord)(after, on);
  check_equal(CUDA(cuLaunchHostFunc)(other, look, &b), CUDA_SUCCESS, "one in another stream");
  check_equal(CUDA(cuStreamSynchronize)(other), CUDA_SUCCESS, "which is waited for");
  check(b.calls == 1 && a.calls == 0, "doesn't wait for the first");
  check_equal(b.at_ns, from, "it has nothing to wait for");
  CUDA(cuEventSynchronize)(after);
  CUDA(cuEventElapsedTime)(&ms, before, after);
  check(ms == 5.0f, "kernels take the time that they take without them");
  check(a.calls == 1 && a.at_ns == from + 2000000, "each is called once, when what is before it is through");
  check(c.calls == 1 && c.at_ns == from + 5000000 && c.status == CUDA_SUCCESS && c.stream == on, "the callback is told stream and status");
  check(a.order < c.order && !pthread_equal(a.thread, pthread_self()), "in order, in a thread of the driver's");
  check(a.permitted == CUDA_ERROR_NOT_PERMITTED && c.permitted == CUDA_ERROR_NOT_PERMITTED, "they may make no calls");
  check_equal(CUDA(cuLaunchHostFunc)(on, NULL, NULL), CUDA_ERROR_INVALID_VALUE, "a function is needed");
  check_equal(CUDA(cuStreamAddCallback)(on, called_back, &c, 1), CUDA_ERROR_INVALID_VALUE, "and no flags");

  /* captured or not */
  CUgraph graph = NULL;
  size_t count = 0;
  CUDA(cuStreamBeginCapture_v2)(on, CU_STREAM_CAPTURE_MODE_RELAXED);
  check_equal(CUDA(cuLaunchHostFunc)(on, look, &a), CUDA_SUCCESS, "a host function is captured");
  CUDA(cuStreamEndCapture)(on, &graph);
  CUDA(cuGraphGetNodes)(graph, NULL, &count);
  check(count == 1 && a.calls == 1, "as a node, and not called");
  CUDA(cuGraphDestroy)(graph);
  CUDA(cuStreamBeginCapture_v2)(on, CU_STREAM_CAPTURE_MODE_RELAXED);
  check_equal(CUDA(cuStreamAddCallback)(on, called_back, &c, 0), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "a callback can't be");
  CUDA(cuStreamEndCapture)(on, &graph);

  /* the legacy stream waits for those of blocking streams */
  CUstream blocking = stream_new(CU_STREAM_DEFAULT);
  spin(1000000, blocking);
  a.calls = 0;
  CUDA(cuLaunchHostFunc)(blocking, look, &a);
  CUDA(cuStreamSynchronize)(NULL);
  check_equal(a.calls, 1, "the legacy stream waits for a blocking stream's function");

  /* freed behind a function: what is queued before still has its memory */
  CUdeviceptr p;
  unsigned int word = 0;
  CUDA(cuMemAllocAsync)(&p, 4096, on);
  spin(1000000, on);
  CUDA(cuLaunchHostFunc)(on, look, &a);
  CUDA(cuMemsetD32Async)(p, 5, 4, on);
  CUDA(cuMemcpyDtoHAsync_v2)(&word, p, 4, on);
  check_equal(CUDA(cuMemFreeAsync)(p, on), CUDA_SUCCESS, "memory freed behind a function");
  CUDA(cuStreamSynchronize)(on);
  check_equal(word, 5, "served what came before the free");
  check_equal(CUDA(cuMemFreeAsync)(p, on), CUDA_ERROR_INVALID_VALUE, "and is gone");
}

/* ---- values -------------------------------------------------------------- */

static void values(void) {
  CUstream on = stream_new(CU_STREAM_NON_BLOCKING), other = stream_new(CU_STREAM_NON_BLOCKING);
  CUdeviceptr p;
  unsigned int word = 0;
  CUDA(cuMemAlloc_v2)(&p, 64);
  CUDA(cuMemsetD32_v2)(p, 0, 16);
  uint64_t from = clock_ns();
  check_equal(CUDA(cuStreamWaitValue32_v2)(on, p, 3, CU_STREAM_WAIT_VALUE_EQ), CUDA_SUCCESS, "a stream waits for a value");
  spin(1000000, on);
  check_equal(CUDA(cuStreamQuery)(on), CUDA_ERROR_NOT_READY, "that isn't there");
  spin(4000000, other);
  check_equal(CUDA(cuStreamWriteValue32_v2)(other, p, 3, 0), CUDA_SUCCESS, "another one writes it");
  check_equal(CUDA(cuStreamSynchronize)(on), CUDA_SUCCESS, "it goes on");
  check_equal(clock_ns() - from, 5000000, "when that one had come so far");
  CUDA(cuMemcpyDtoH_v2)(&word, p, 4);
  check_equal(word, 3, "the value is in memory");

  static const struct {
    uint64_t is, want;
    unsigned int how;
    bool met;
  } cases[] = {{5, 5, CU_STREAM_WAIT_VALUE_GEQ, true},  {4, 5, CU_STREAM_WAIT_VALUE_GEQ, false}, {1ull << 63, (1ull << 63) - 1, CU_STREAM_WAIT_VALUE_GEQ, true},
               {6, 9, CU_STREAM_WAIT_VALUE_AND, false}, {12, 9, CU_STREAM_WAIT_VALUE_AND, true}, {~0ull, 0, CU_STREAM_WAIT_VALUE_NOR, false},
               {1, 2, CU_STREAM_WAIT_VALUE_NOR, true},  {7, 8, CU_STREAM_WAIT_VALUE_EQ, false}};
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    CUDA(cuMemcpyHtoD_v2)(p + 8, &cases[i].is, 8);
    CUDA(cuStreamWaitValue64_v2)(on, p + 8, cases[i].want, cases[i].how);
    CUDA(cuStreamWriteValue64)(on, p + 16, i + 1, 0);
    spin(1000, other);
    CUDA(cuStreamSynchronize)(other);
    check_equal(CUDA(cuStreamQuery)(on), cases[i].met ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY, "comparison %zu", i);
    if (cases[i].met) continue;
    uint64_t enough = cases[i].how == CU_STREAM_WAIT_VALUE_NOR ? 0 : cases[i].how == CU_STREAM_WAIT_VALUE_AND ? 1 : cases[i].want;
    CUDA(cuMemcpyHtoD_v2)(p + 8, &enough, 8);
    check_equal(CUDA(cuStreamSynchronize)(on), CUDA_SUCCESS, "a copy from the host lets it go on");
  }

  /* memory of the host, written by the host */
  volatile unsigned int *flag;
  void *page;
  CUDA(cuMemHostAlloc)(&page, 64, CU_MEMHOSTALLOC_DEVICEMAP);
  flag = page;
  *flag = 0;
  CUDA(cuStreamWaitValue32)(on, (CUdeviceptr)(uintptr_t)page, 1, CU_STREAM_WAIT_VALUE_GEQ);
  CUDA(cuStreamWriteValue32)(on, (CUdeviceptr)(uintptr_t)page + 4, 9, 0);
  check(CUDA(cuStreamQuery)(on) == CUDA_ERROR_NOT_READY && flag[1] == 0, "a stream waits for the host");
  *flag = 1;
  check_equal(CUDA(cuStreamSynchronize)(on), CUDA_SUCCESS, "which says go on");
  check_equal(flag[1], 9, "and is answered");

  CUstreamBatchMemOpParams list[3] = {{.value = {.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32, .address = p, .value = 3, .flags = CU_STREAM_WAIT_VALUE_EQ}},
                                      {.value = {.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32, .address = p, .value = 4}},
                                      {.value = {.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32, .address = p + 4, .value = 5}}};
  check_equal(CUDA(cuStreamBatchMemOp_v2)(on, 3, list, 0), CUDA_SUCCESS, "several in one call");
  CUDA(cuStreamSynchronize)(on);
  unsigned int two[2];
  CUDA(cuMemcpyDtoH_v2)(two, p, 8);
  check(two[0] == 4 && two[1] == 5, "one after the other");
  check_equal(CUDA(cuStreamWaitValue32_v2)(on, p + 2, 1, 0), CUDA_ERROR_INVALID_VALUE, "an address must fit the width");
  list[0].operation = 77;
  check_equal(CUDA(cuStreamBatchMemOp)(on, 1, list, 0), CUDA_ERROR_INVALID_VALUE, "no such operation");
}

/* Entries that are done take no room, though an earlier one isn't. */
static void behind_a_value(void) {
  enum { MANY = 3000 };
  CUstream on = stream_new(CU_STREAM_NON_BLOCKING), other = stream_new(CU_STREAM_NON_BLOCKING), third = stream_new(CU_STREAM_NON_BLOCKING);
  CUevent inside, last;
  CUdeviceptr p;
  float ms = 0;
  bool good = true;
  CUDA(cuEventCreate)(&inside, 0);
  CUDA(cuEventCreate)(&last, 0);
  CUDA(cuMemAlloc_v2)(&p, 64);
  CUDA(cuMemsetD32_v2)(p, 0, 16);
  uint64_t from = clock_ns();
  CUDA(cuStreamWaitValue32_v2)(on, p, 3, CU_STREAM_WAIT_VALUE_EQ);
  CUDA(cuEventRecord)(inside, on);
  spin(2000000, on);
  CUDA(cuEventRecord)(last, on);
  CUDA(cuStreamWaitEvent)(third, last, 0);
  spin(1000000, third);
  for (int i = 0; i < MANY; i++) {
    CUevent each;
    good &= CUDA(cuEventCreate)(&each, 0) == CUDA_SUCCESS && CUDA(cuEventRecord)(each, other) == CUDA_SUCCESS && CUDA(cuEventDestroy_v2)(each) == CUDA_SUCCESS;
    if (i % 100 == 0) spin(10000, other);
  }
  check(good, "%d events are recorded behind a stream that waits for a value", MANY);
  check(CUDA(cuEventQuery)(inside) == CUDA_ERROR_NOT_READY && CUDA(cuStreamQuery)(on) == CUDA_ERROR_NOT_READY, "which waits on");
  check(CUDA(cuEventQuery)(last) == CUDA_ERROR_NOT_READY && CUDA(cuStreamQuery)(third) == CUDA_ERROR_NOT_READY, "as does who waits for it");
  CUDA(cuStreamSynchronize)(other);
  uint64_t so_far = clock_ns() - from;
  check_equal(so_far, MANY / 100 * 10000, "the others have their time");
  check_equal(CUDA(cuStreamWriteValue32_v2)(other, p, 3, 0), CUDA_SUCCESS, "one writes the value");
  check_equal(CUDA(cuStreamSynchronize)(third), CUDA_SUCCESS, "then all goes on");
  check_equal(clock_ns() - from, so_far + 3000000, "in order");
  check(CUDA(cuEventElapsedTime)(&ms, inside, last) == CUDA_SUCCESS && ms == 2.0f, "events that were put aside have their times (%.3f ms)", (double)ms);
  CUDA(cuCtxSynchronize)();
  /* kernels behind a value fill the queue: then a launch waits, and goes on when there is room */
  CUDA(cuMemsetD32_v2)(p, 0, 16);
  CUDA(cuStreamWaitValue32_v2)(on, p, 3, CU_STREAM_WAIT_VALUE_EQ);
  for (int i = 0; i < 600; i++) spin(1000, on);
  from = clock_ns();
  for (int i = 0; i < MANY; i++) spin(1000, other);
  check_equal(clock_ns() - from, (MANY - 423) * 1000ull, "a launch waits for room, and has it as others end");
  CUDA(cuStreamWriteValue32_v2)(other, p, 3, 0);
  CUDA(cuCtxSynchronize)();
  check_equal(clock_ns() - from, MANY * 1000ull + 600 * 1000ull, "and all are done");
}

/* ---- CUDA 2 -------------------------------------------------------------- */

static void grids(void) {
  CUdeviceptr p;
  uint64_t turns = 3;
  unsigned int got = 0, want = 1;
  CUfunction f = kernel("carve_spin");
  CUDA(cuMemAlloc_v2)(&p, 4);
  check_equal(CUDA(cuLaunchGrid)(f, 1, 1), CUDA_ERROR_INVALID_VALUE, "without a shape there is no launch");
  check_equal(CUDA(cuFuncSetBlockShape)(f, 32, 1, 1), CUDA_SUCCESS, "a shape");
  CUDA(cuFuncSetSharedSize)(f, 0);
  check_equal(CUDA(cuParamSetv)(f, 0, &turns, 8), CUDA_SUCCESS, "arguments by size,");
  CUDA(cuParamSeti)(f, 8, (unsigned int)p);
  CUDA(cuParamSeti)(f, 12, (unsigned int)(p >> 32));
  check_equal(CUDA(cuParamSetSize)(f, 16), CUDA_SUCCESS, "and in all");
  check_equal(CUDA(cuParamSetf)(f, 4093, 1.0f), CUDA_ERROR_INVALID_VALUE, "there is an end to them");
  check_equal(CUDA(cuLaunchGrid)(f, 2, 2), CUDA_SUCCESS, "launched");
  CUDA(cuMemcpyDtoH_v2)(&got, p, 4);
  for (int i = 0; i < 3; i++) want = want * 1664525u + 1013904223u;
  check_equal(got, want, "it does what it does");
  turns = 4;
  CUDA(cuParamSetv)(f, 0, &turns, 8);
  CUstream on = stream_new(0);
  check_equal(CUDA(cuLaunchGridAsync)(f, 1, 1, on), CUDA_SUCCESS, "into a stream");
  CUDA(cuStreamSynchronize)(on);
  CUDA(cuMemcpyDtoH_v2)(&got, p, 4);
  check_equal(got, want * 1664525u + 1013904223u, "too");
  check_equal(CUDA(cuLaunch)(f), CUDA_SUCCESS, "or as one block");
  size_t offset = 9, bytes = 0;
  check(CUDA(cuFuncGetParamInfo)(f, 1, &offset, &bytes) == CUDA_SUCCESS && offset == 8 && bytes == 8, "where an argument lies");
  check_equal(CUDA(cuFuncGetParamInfo)(f, 2, &offset, &bytes), CUDA_ERROR_INVALID_VALUE, "and how many there are");
}

/* ---- occupancy ----------------------------------------------------------- */

static size_t shared_of(int threads) { return (size_t)threads * 100; }

static void occupancy(void) {
  int blocks = 0, grid = 0, block = 0;
  size_t bytes = 0;
  CUfunction f = kernel("carve_spin");
  CUDA(cuOccupancyMaxActiveBlocksPerMultiprocessor)(&blocks, f, 256, 0);
  check_equal(blocks, 8, "2048 threads of an A30's multiprocessor are eight blocks of 256");
  CUDA(cuOccupancyMaxActiveBlocksPerMultiprocessor)(&blocks, f, 256, 40 * 1024);
  check_equal(blocks, 4, "with 40 KiB each there is shared memory for four");
  CUDA(cuOccupancyMaxPotentialBlockSize)(&grid, &block, f, NULL, 0, 0);
  check(block == 1024 && grid == 112, "the block size that fills the card");
  CUDA(cuOccupancyMaxPotentialBlockSize)(&grid, &block, f, NULL, 0, 100);
  check(block <= 100 && grid == 56 * (2048 / ((block + 31) / 32 * 32)), "with a limit (%d threads)", block);
  CUDA(cuOccupancyMaxPotentialBlockSizeWithFlags)(&grid, &block, f, shared_of, 0, 0, 0);
  check(block > 0 && shared_of(block) <= 163 * 1024, "with shared memory that grows with the block (%d threads)", block);
  check_equal(CUDA(cuOccupancyAvailableDynamicSMemPerBlock)(&bytes, f, 2, 256), CUDA_SUCCESS, "what shared memory is left");
  check(bytes > 64 * 1024 && bytes <= 82 * 1024, "for two blocks (%zu bytes)", bytes);

  /* residency counts in time */
  CUDA(cuCtxSynchronize)();
  CUstream on = stream_new(CU_STREAM_NON_BLOCKING);
  uint64_t ns = 1000000, from = clock_ns();
  CUdeviceptr none = 0;
  void *parameters[] = {&ns, &none};
  CUDA(cuFuncSetAttribute)(f, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 100 * 1024);
  CUDA(cuLaunchKernel)(f, 112, 1, 1, 256, 1, 1, 100 * 1024, on, parameters, NULL);
  CUDA(cuStreamSynchronize)(on);
  check_equal(clock_ns() - from, 2000000, "blocks that fill a multiprocessor's shared memory come in waves");
}

/* Memory of cuMemAlloc that is freed in a stream: the card has it until the stream is there. */
static void freed_in_stream(void) {
  CUstream on = stream_new(CU_STREAM_NON_BLOCKING), other = stream_new(CU_STREAM_NON_BLOCKING);
  CUdeviceptr p = 0, q = 0;
  uint64_t before = cuda_free_bytes();
  check_equal(CUDA(cuMemAlloc_v2)(&p, 100 * MIB), CUDA_SUCCESS, "a block");
  spin(5000000, on);
  check_equal(CUDA(cuMemFreeAsync)(p, on), CUDA_SUCCESS, "is freed behind a kernel");
  check_equal(cuda_free_bytes(), before - 100 * MIB, "and is there as long as that runs");
  check_equal(CUDA(cuMemFreeAsync)(p, on), CUDA_ERROR_INVALID_VALUE, "it can't be freed again");
  check_equal(CUDA(cuStreamSynchronize)(other), CUDA_SUCCESS, "another stream is waited for");
  check_equal(cuda_free_bytes(), before - 100 * MIB, "which doesn't matter");
  check_equal(CUDA(cuMemAlloc_v2)(&q, before - 50 * MIB), CUDA_ERROR_OUT_OF_MEMORY, "nobody gets its place");
  check_equal(CUDA(cuStreamSynchronize)(on), CUDA_SUCCESS, "its own is");
  check_equal(cuda_free_bytes(), before, "it is free");
  check_equal(CUDA(cuMemAlloc_v2)(&p, 100 * MIB), CUDA_SUCCESS, "a block");
  check_equal(CUDA(cuMemFreeAsync)(p, on), CUDA_SUCCESS, "that is freed in a stream with nothing in it");
  check_equal(cuda_free_bytes(), before, "is free at once");
  check_equal(CUDA(cuMemAlloc_v2)(&p, 100 * MIB), CUDA_SUCCESS, "a block");
  spin(5000000, on);
  check_equal(CUDA(cuMemFreeAsync)(p, on), CUDA_SUCCESS, "that is freed behind a kernel");
  check_equal(CUDA(cuMemFree_v2)(p), CUDA_ERROR_INVALID_VALUE, "can't be freed otherwise");
  check_equal(cuda_free_bytes(), before, "and is free");
}

int main(void) {
  root_make("--card", "a30", "--seed", "3", "--clock", "virtual", NULL);
  check_equal(start_cuda(0), CUDA_SUCCESS, "start");
  spin_function = kernel("carve_spin");
  host_functions();
  values();
  behind_a_value();
  freed_in_stream();
  grids();
  occupancy();
  return finish();
}
