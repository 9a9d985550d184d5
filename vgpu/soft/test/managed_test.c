/* Managed memory: when it is on a card, what that costs, and what makes it leave. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "harness.h"

static uint64_t before; /* free bytes with nothing on the card but the context */
static uint64_t taken(void) { return before - cuda_free_bytes(); }

static CUdeviceptr managed(uint64_t bytes) {
  CUdeviceptr p = 0;
  check_equal(CUDA(cuMemAllocManaged)(&p, bytes, CU_MEM_ATTACH_GLOBAL), CUDA_SUCCESS, "managed memory of %llu MiB", (unsigned long long)(bytes / MIB));
  return p;
}

static CUfunction carve_fill(void) {
  static CUfunction f; /* loading it takes a page of the card */
  if (!f) f = kernel("carve_fill");
  return f;
}

static CUresult fill_on_card(CUdeviceptr p, uint64_t words, uint32_t value) {
  void *parameters[] = {&p, &value, &words};
  CUresult result = CUDA(cuLaunchKernel)(carve_fill(), 1, 1, 1, 256, 1, 1, 0, NULL, parameters, NULL);
  return result == CUDA_SUCCESS ? CUDA(cuCtxSynchronize)() : result;
}

static volatile uint32_t *host(CUdeviceptr p) { return (volatile uint32_t *)(uintptr_t)p; }

static void touches(void) {
  CUdeviceptr p = managed(20 * MIB);
  check_equal(taken(), 0, "costs nothing where it is made");
  host(p)[0] = 17;
  host(p)[3 * MIB / 4] = 18;
  check_equal(taken(), 0, "nor by the host's touch");
  check_equal(fill_on_card(p + 2 * MIB, 3, 5), CUDA_SUCCESS, "a kernel writes a few words");
  check_equal(taken(), 2 * MIB, "and brings one page to the card");
  check(host(p)[0] == 17, "what lies elsewhere is the host's");
  check_equal(taken(), 2 * MIB, "whose look there moves nothing");
  uint64_t word = 0;
  CUDA(cuMemcpyDtoH_v2)(&word, p + 2 * MIB, 8);
  check_equal(word, 0x0000000500000005ull, "a copy reads the page where it is");
  check_equal(taken(), 2 * MIB, "and leaves it there");
  check(host(p + 2 * MIB)[2] == 5 && host(p + 2 * MIB)[3 * MIB / 4 - 2 * MIB / 4] == 18, "the host sees what the kernel wrote, and its own");
  check_equal(taken(), 0, "which takes the page back");
  CUDA(cuMemsetD32_v2)(p, 9, 4 * MIB / 4);
  check_equal(taken(), 4 * MIB, "a fill is done on the card too");
  check(host(p)[MIB] == 0 || host(p)[MIB - 1] == 9, "with its bytes");
  check_equal(CUDA(cuMemFree_v2)(p), CUDA_SUCCESS, "it is freed");
  check_equal(taken(), 0, "from both places");
}

static void prefetches(void) {
  CUdeviceptr p = managed(GIB);
  CUmemLocation host_place = {CU_MEM_LOCATION_TYPE_HOST, 0}, card = {CU_MEM_LOCATION_TYPE_DEVICE, 0}, nowhere = {CU_MEM_LOCATION_TYPE_DEVICE, 9};
  int place = 77, kind = 77;
  check_equal(CUDA(cuMemPrefetchAsync)(p, GIB, 0, NULL), CUDA_SUCCESS, "a prefetch to the card");
  check_equal(taken(), GIB, "brings all of it");
  CUDA(cuMemRangeGetAttribute)(&place, sizeof place, CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION, p, GIB);
  check_equal(place, 0, "which can be asked");
  check_equal(CUDA(cuMemPrefetchAsync)(p, GIB / 2, CU_DEVICE_CPU, NULL), CUDA_SUCCESS, "a prefetch of one half to the host");
  check_equal(taken(), GIB / 2, "takes that back");
  CUDA(cuMemRangeGetAttribute)(&place, sizeof place, CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION, p, GIB);
  check_equal(place, CU_DEVICE_INVALID, "now the halves don't agree");
  check_equal(CUDA(cuMemPrefetchAsync_v2)(p, GIB, card, 0, NULL), CUDA_SUCCESS, "the second form");
  CUDA(cuMemRangeGetAttribute)(&kind, sizeof kind, CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_TYPE, p, GIB);
  check(taken() == GIB && kind == CU_MEM_LOCATION_TYPE_DEVICE, "does the same");
  CUDA(cuMemPrefetchAsync_v2)(p, GIB, host_place, 0, NULL);
  check_equal(taken(), 0, "both ways");
  check_equal(CUDA(cuMemPrefetchAsync_v2)(p, GIB, nowhere, 0, NULL), CUDA_ERROR_INVALID_DEVICE, "there must be such a card");
  check_equal(CUDA(cuMemPrefetchAsync)(p, GIB + 1, 0, NULL), CUDA_ERROR_INVALID_VALUE, "and so much memory");
  check_equal(CUDA(cuMemFree_v2)(p), CUDA_SUCCESS, "it is freed");
}

static void advice(void) {
  CUdeviceptr p = managed(8 * MIB);
  int values[4] = {9, 9, 9, 9};
  CUDA(cuMemAdvise)(p, 4 * MIB, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, CU_DEVICE_CPU);
  fill_on_card(p, 1, 1);
  check_equal(taken(), 0, "what prefers the host stays there when a kernel uses it");
  fill_on_card(p + 4 * MIB, 1, 1);
  check_equal(taken(), 2 * MIB, "the rest comes");
  CUDA(cuMemAdvise)(p + 4 * MIB, 4 * MIB, CU_MEM_ADVISE_SET_READ_MOSTLY, 0);
  check(host(p + 4 * MIB)[0] == 1 && taken() == 2 * MIB, "what is mostly read can be in both places");
  CUDA(cuMemAdvise)(p, 8 * MIB, CU_MEM_ADVISE_SET_ACCESSED_BY, 0);
  CUDA(cuMemRangeGetAttribute)(values, sizeof values, CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY, p, 8 * MIB);
  check(values[0] == 0 && values[1] == CU_DEVICE_INVALID && values[3] == CU_DEVICE_INVALID, "who has access is listed");
  CUDA(cuMemRangeGetAttribute)(values, 4, CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION, p, 4 * MIB);
  check_equal(values[0], CU_DEVICE_CPU, "as is what is preferred");
  CUDA(cuMemRangeGetAttribute)(values, 4, CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY, p, 8 * MIB);
  check_equal(values[0], 0, "of all pages");
  check_equal(CUDA(cuMemAdvise)(p, 8 * MIB, 7, 0), CUDA_ERROR_INVALID_VALUE, "there are six kinds of advice");
  check_equal(CUDA(cuMemAdvise)(p, 8 * MIB, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, 5), CUDA_ERROR_INVALID_DEVICE, "about cards that there are");
  CUDA(cuMemFree_v2)(p);
}

static void pressure(void) {
  uint64_t all = cuda_free_bytes();
  CUdeviceptr large = managed(all + 4 * GIB), linear, small;
  check_equal(CUDA(cuMemPrefetchAsync)(large, all + 4 * GIB, 0, NULL), CUDA_SUCCESS, "more than fits is asked to the card");
  check_equal(cuda_free_bytes(), all % (2 * MIB), "which is full then");
  check_equal(CUDA(cuMemAlloc_v2)(&linear, all / 2 / (2 * MIB) * 2 * MIB), CUDA_SUCCESS, "linear memory makes managed memory leave");
  check_equal(cuda_free_bytes(), all % (2 * MIB), "no more of it than needed");
  check_equal(CUDA(cuMemAlloc_v2)(&small, all), CUDA_ERROR_OUT_OF_MEMORY, "what doesn't fit beside linear memory is refused");
  check_equal(cuda_free_bytes(), all % (2 * MIB), "and makes nothing leave");
  CUDA(cuMemFree_v2)(linear);
  check_equal(cuda_free_bytes(), all / 2 / (2 * MIB) * 2 * MIB + all % (2 * MIB), "room that comes free stays free");
  CUDA(cuMemFree_v2)(large);
  check_equal(cuda_free_bytes(), all, "all is given back");
  check_equal(CUDA(cuMemAlloc_v2)(&linear, all), CUDA_SUCCESS, "a card full of linear memory");
  large = managed(4 * MIB);
  check_equal(fill_on_card(large, 1, 3), CUDA_SUCCESS, "lets kernels use managed memory from the host");
  check(host(large)[0] == 3 && cuda_free_bytes() == 0, "as said");
  CUDA(cuMemFree_v2)(large);
  CUDA(cuMemFree_v2)(linear);
}

static void alone(child *self, void *unused) {
  (void)unused;
  check_equal(start_cuda(0), CUDA_SUCCESS, "start");
  carve_fill();
  before = cuda_free_bytes();
  touches();
  prefetches();
  advice();
  pressure();
  check_equal(taken(), 0, "at the end all memory is back");
  tell(self, 1);
}

/* ---- two processes -------------------------------------------------------- */

static void keeper(child *self, void *unused) {
  CUdeviceptr p = 0;
  (void)unused;
  start_cuda(0);
  carve_fill();
  uint64_t some = cuda_free_bytes() / 2 / (2 * MIB) * 2 * MIB;
  CUDA(cuMemAllocManaged)(&p, some, CU_MEM_ATTACH_GLOBAL);
  CUDA(cuMemPrefetchAsync)(p, some, 0, NULL);
  fill_on_card(p + some - 4, 1, 123); /* the youngest page */
  tell(self, some);
  ask(self);
  uint64_t free_then = cuda_free_bytes();
  CUDA(cuMemPrefetchAsync)(p, 2 * MIB, 0, NULL); /* its oldest went: this one comes back, and another goes */
  tell(self, free_then);
  tell(self, cuda_free_bytes());
  uint32_t word = 0;
  CUDA(cuMemcpyDtoH_v2)(&word, p + some - 4, 4);
  tell(self, word);
  tell(self, (uint64_t)CUDA(cuMemFree_v2)(p));
  ask(self);
}

static void taker(child *self, void *bytes) {
  CUdeviceptr p;
  start_cuda(0);
  carve_fill();
  tell(self, cuda_free_bytes());
  tell(self, (uint64_t)CUDA(cuMemAlloc_v2)(&p, *(uint64_t *)bytes));
  ask(self);
}

/* What the card's own rows of NVML say of a process. */
static uint64_t row_of(pid_t pid) {
  static nvmlProcessInfo_t rows[16];
  unsigned int count = 16;
  nvmlDevice_t device;
  NVML(nvmlDeviceGetHandleByIndex_v2)(0, &device);
  if (NVML(nvmlDeviceGetComputeRunningProcesses_v3)(device, &count, rows) != NVML_SUCCESS) return UINT64_MAX;
  for (unsigned int i = 0; i < count; i++)
    if (rows[i].pid == (unsigned int)pid) return rows[i].usedGpuMemory;
  return 0;
}

static void between(void) {
  nvmlDevice_t device;
  nvmlMemory_v2_t memory = {.version = NVML_MEMORY_V2_VERSION};
  check_equal(NVML(nvmlInit_v2)(), NVML_SUCCESS, "NVML looks on");
  child a = child_start(keeper, NULL);
  uint64_t some = ask(&a);
  NVML(nvmlDeviceGetHandleByIndex_v2)(0, &device);
  NVML(nvmlDeviceGetMemoryInfo_v2)(device, &memory);
  uint64_t context = memory.used - some;
  check(memory.used > some, "managed memory on the card is in the card's figure");
  check_equal(row_of(a.pid), context, "and in no process's");
  uint64_t wanted = memory.free - context + 10 * MIB; /* one page more than five have to go: 10 MiB */
  child b = child_start(taker, &wanted);
  check_equal(ask(&b), memory.free - context, "another process sees it as taken");
  check_equal(ask(&b), CUDA_SUCCESS, "and gets its room when it needs it");
  NVML(nvmlDeviceGetMemoryInfo_v2)(device, &memory);
  check_equal(memory.used, 2 * context + wanted + some - 10 * MIB, "just so much");
  check_equal(row_of(b.pid), context + wanted, "its row shows what it has");
  tell(&a, 1);
  check_equal(ask(&a), memory.free, "the first finds it gone");
  check_equal(ask(&a), memory.free, "what it brings back takes another page's place");
  check_equal(ask(&a), 123, "its bytes are whole wherever they are");
  check_equal(ask(&a), CUDA_SUCCESS, "and freed");
  NVML(nvmlDeviceGetMemoryInfo_v2)(device, &memory);
  check_equal(memory.used, 2 * context + wanted, "from the card as far as it was there");
  child_kill(&a);
  child_kill(&b);
  check_equal(used_bytes(0), 0, "the dead hold nothing");
}

int main(void) {
  root_make("--card", "a30", "--seed", "2", "--free-delay", "0", NULL);
  child c = child_start(alone, NULL);
  check_equal(ask(&c), 1, "all was looked at");
  check_equal(child_end(&c), 0, "by a process that ended well");
  between();
  return finish();
}
