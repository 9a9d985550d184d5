/*
 * costs.c - what carve's library adds, in nanoseconds, to the driver behind it. Both are called in one process and one
 * context, turn and turn about, so that both meet the same clocks and caches; a figure is the median of the differences.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "probe.h"

enum { MOST_ROUNDS = 101 };

typedef struct {
  void *library;
  CUfunction empty;
  CUresult fault;
} subject;

/* Nanoseconds of one of so many calls. */
typedef double (*measurement)(subject *s, unsigned int calls);

#define FIND(name) __typeof__(name) *call_##name = (__typeof__(name) *)dlsym(s->library, #name)
#define TRY(call) do { CUresult r_ = (call); if (r_ != CUDA_SUCCESS) s->fault = r_; } while (0)

static double launches(subject *s, unsigned int calls) {
  FIND(cuLaunchKernel);
  cuda.cuCtxSynchronize(); /* no launch waits for room in the queue */
  uint64_t start = wall_ns();
  for (unsigned int i = 0; i < calls; i++) TRY(call_cuLaunchKernel(s->empty, 1, 1, 1, 32, 1, 1, 0, NULL, NULL, NULL));
  return (double)(wall_ns() - start) / calls;
}

static double unhooked(subject *s, unsigned int calls) {
  FIND(cuDriverGetVersion);
  int version;
  uint64_t start = wall_ns();
  for (unsigned int i = 0; i < calls; i++) TRY(call_cuDriverGetVersion(&version));
  return (double)(wall_ns() - start) / calls;
}

static double pairs_of(subject *s, unsigned int calls, size_t bytes) {
  FIND(cuMemAlloc_v2);
  FIND(cuMemFree_v2);
  CUdeviceptr p;
  uint64_t start = wall_ns();
  for (unsigned int i = 0; i < calls; i++) {
    TRY(call_cuMemAlloc_v2(&p, bytes));
    if (s->fault) break;
    TRY(call_cuMemFree_v2(p));
  }
  return (double)(wall_ns() - start) / calls;
}

static double large_pairs(subject *s, unsigned int calls) { return pairs_of(s, calls, 2 << 20); }
static double small_pairs(subject *s, unsigned int calls) { return pairs_of(s, calls, 4096); }

static double pool_pairs(subject *s, unsigned int calls) {
  FIND(cuMemAllocAsync);
  FIND(cuMemFreeAsync);
  CUdeviceptr p;
  if (!call_cuMemAllocAsync || !call_cuMemFreeAsync) {
    s->fault = CUDA_ERROR_NOT_SUPPORTED;
    return 0;
  }
  uint64_t start = wall_ns();
  for (unsigned int i = 0; i < calls; i++) {
    TRY(call_cuMemAllocAsync(&p, 4 << 20, NULL));
    if (s->fault) break;
    TRY(call_cuMemFreeAsync(p, NULL));
  }
  double took = (double)(wall_ns() - start) / calls;
  cuda.cuCtxSynchronize();
  return took;
}

static double questions(subject *s, unsigned int calls) {
  FIND(cuMemGetInfo_v2);
  size_t left, total;
  uint64_t start = wall_ns();
  for (unsigned int i = 0; i < calls; i++) TRY(call_cuMemGetInfo_v2(&left, &total));
  return (double)(wall_ns() - start) / calls;
}

static int by_value(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

static void compare(const char *what, measurement measure, unsigned int calls, unsigned int rounds, subject *front, subject *driver) {
  double differences[MOST_ROUNDS], alone[MOST_ROUNDS];
  /* A card with slow calls must not make this take long. */
  uint64_t end = wall_ns() + 4000000000ull;
  unsigned int n = 0;
  front->fault = driver->fault = CUDA_SUCCESS;
  measure(front, calls);
  measure(driver, calls);
  for (; n < rounds && (n < 5 || wall_ns() < end) && !front->fault && !driver->fault; n++) {
    double first = measure(n % 2 ? driver : front, calls), second = measure(n % 2 ? front : driver, calls);
    differences[n] = n % 2 ? second - first : first - second;
    alone[n] = n % 2 ? first : second;
  }
  qsort(differences, n, sizeof differences[0], by_value);
  qsort(alone, n, sizeof alone[0], by_value);
  line("cost");
  field_result(front->fault ? front->fault : driver->fault);
  field_text("what", what);
  if (n) {
    field_real("addedNanoseconds", differences[n / 2]);
    field_real("addedLowNanoseconds", differences[n / 4]);
    field_real("addedHighNanoseconds", differences[n * 3 / 4]);
    field_real("driverNanoseconds", alone[n / 2]);
  }
  field_number("rounds", n);
  field_number("callsEach", calls);
  line_end();
}

int probe_costs(int argc, char **argv) {
  CUmodule module;
  bool only_launches = take_flag(&argc, argv, "--launches");
  if (argc) return usage("costs takes no %s", argv[0]);
  int code = open_device(0);
  if (code != PROBE_OK) return code;
  subject front = {.library = cuda.handle}, driver = {.library = driver_behind("libcuda.so.1")};
  if (!driver.library) {
    line("costs");
    field_bool("ok", false);
    field_text("reason", "no library of carve's stands before the driver");
    line_end();
    return PROBE_REFUSED;
  }
  CUresult result = cuda.cuModuleLoadData(&module, probe_kernel_text);
  if (result == CUDA_SUCCESS) result = cuda.cuModuleGetFunction(&front.empty, module, "carve_empty");
  if (result != CUDA_SUCCESS) return refused("module", result);
  driver.empty = front.empty;
  compare("launch", launches, 200, 101, &front, &driver);
  if (only_launches) return PROBE_OK;
  compare("a call that isn't hooked", unhooked, 1000, 101, &front, &driver);
  compare("alloc and free of 2 MiB", large_pairs, 20, 101, &front, &driver);
  compare("alloc and free of 4 KiB", small_pairs, 50, 101, &front, &driver);
  compare("alloc and free of 4 MiB in a stream", pool_pairs, 50, 101, &front, &driver);
  compare("cuMemGetInfo", questions, 20, 101, &front, &driver);
  /* A program with many blocks: what is looked up grows. */
  unsigned int kept = 0;
  for (CUdeviceptr p; kept < 1000 && cuda.cuMemAlloc_v2(&p, 4096) == CUDA_SUCCESS; kept++) {
  }
  compare("alloc and free of 2 MiB beside 1000 blocks", large_pairs, 20, 101, &front, &driver);
  return PROBE_OK;
}
