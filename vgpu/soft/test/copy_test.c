/* Bytes: copies, fills, and each kind of memory keep what was written. */
#define _GNU_SOURCE
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "harness.h"

static uint32_t noise = 12345;
static void scramble(unsigned char *at, size_t n) {
  for (size_t i = 0; i < n; i++) at[i] = (unsigned char)((noise = noise * 1664525u + 1013904223u) >> 24);
}

static void linear(void) {
  enum { N = 5 * 1024 * 1024 + 123 };
  unsigned char *in = malloc(N), *out = calloc(1, N);
  CUdeviceptr a, b;
  scramble(in, N);
  CUDA(cuMemAlloc_v2)(&a, N);
  CUDA(cuMemAlloc_v2)(&b, N);
  check_equal(CUDA(cuMemcpyHtoD_v2)(a, in, N), CUDA_SUCCESS, "host to device");
  check_equal(CUDA(cuMemcpyDtoD_v2)(b, a, N), CUDA_SUCCESS, "device to device");
  check_equal(CUDA(cuMemcpyDtoH_v2)(out, b, N), CUDA_SUCCESS, "device to host");
  check(memcmp(in, out, N) == 0, "bytes come back as they went");
  memset(out, 0, N);
  check_equal(CUDA(cuMemcpy)((CUdeviceptr)(uintptr_t)out, a + 77, 1000), CUDA_SUCCESS, "unified copy from inside");
  check(memcmp(in + 77, out, 1000) == 0, "takes the right bytes");
  check_equal(CUDA(cuMemcpyHtoD_v2)(a + 1, in, N), CUDA_ERROR_INVALID_VALUE, "a copy past the end is refused");
  check_equal(CUDA(cuMemcpyDtoH_v2)(out, a + N, 1), CUDA_ERROR_INVALID_VALUE, "so is one that starts there");
  check_equal(CUDA(cuMemcpyHtoD_v2)((CUdeviceptr)(uintptr_t)out, in, 16), CUDA_ERROR_INVALID_VALUE, "host memory is no device memory");
  CUDA(cuMemFree_v2)(a);
  check_equal(CUDA(cuMemcpyDtoH_v2)(out, a, 1), CUDA_ERROR_INVALID_VALUE, "nor is freed memory");
  CUDA(cuMemFree_v2)(b);
  free(in);
  free(out);
}

static void fills(void) {
  enum { N = 3 * 1024 * 1024 };
  uint32_t *out = malloc(N);
  CUdeviceptr a;
  bool good = true;
  CUDA(cuMemAlloc_v2)(&a, N);
  CUDA(cuMemsetD32_v2)(a, 0xdeadbeef, N / 4);
  CUDA(cuMemcpyDtoH_v2)(out, a, N);
  for (size_t i = 0; i < N / 4; i++) good &= out[i] == 0xdeadbeef;
  check(good, "a fill of words");
  CUDA(cuMemsetD8_v2)(a + 3, 0, N - 7);
  CUDA(cuMemcpyDtoH_v2)(out, a, N);
  const unsigned char *bytes = (const unsigned char *)out;
  good = bytes[2] == 0xad && bytes[3] == 0 && bytes[N / 2] == 0 && bytes[N - 5] == 0 && bytes[N - 4] == 0xef;
  check(good, "zeroing a large range leaves its neighbours");
  CUDA(cuMemsetD2D16_v2)(a, 1024, 0x1234, 100, 5);
  CUDA(cuMemcpyDtoH_v2)(out, a, 8192);
  const uint16_t *words = (const uint16_t *)out;
  check(words[0] == 0x1234 && words[99] == 0x1234 && words[100] == 0 && words[512] == 0x1234 && words[512 * 4 + 99] == 0x1234 && words[512 * 5] == 0,
        "a fill of a box");
  check_equal(CUDA(cuMemsetD32_v2)(a + 2, 1, 1), CUDA_ERROR_INVALID_VALUE, "words must be aligned");
  CUDA(cuMemFree_v2)(a);
  free(out);
}

static void boxes(void) {
  unsigned char in[64 * 20], out[64 * 20] = {0};
  CUdeviceptr a;
  size_t pitch;
  scramble(in, sizeof in);
  CUDA(cuMemAllocPitch_v2)(&a, &pitch, 50, 20, 4);
  CUDA_MEMCPY2D up = {.srcMemoryType = CU_MEMORYTYPE_HOST, .srcHost = in, .srcPitch = 64, .srcXInBytes = 3, .srcY = 2,
                      .dstMemoryType = CU_MEMORYTYPE_DEVICE, .dstDevice = a, .dstPitch = pitch, .dstXInBytes = 5, .dstY = 1,
                      .WidthInBytes = 40, .Height = 10};
  check_equal(CUDA(cuMemcpy2D_v2)(&up), CUDA_SUCCESS, "a box goes up");
  CUDA_MEMCPY2D down = {.srcMemoryType = CU_MEMORYTYPE_DEVICE, .srcDevice = a, .srcPitch = pitch, .srcXInBytes = 5, .srcY = 1,
                        .dstMemoryType = CU_MEMORYTYPE_HOST, .dstHost = out, .dstPitch = 64, .dstXInBytes = 3, .dstY = 2,
                        .WidthInBytes = 40, .Height = 10};
  check_equal(CUDA(cuMemcpy2D_v2)(&down), CUDA_SUCCESS, "and comes down");
  bool good = true;
  for (int y = 0; y < 20; y++)
    for (int x = 0; x < 64; x++) good &= out[y * 64 + x] == (y >= 2 && y < 12 && x >= 3 && x < 43 ? in[y * 64 + x] : 0);
  check(good, "the same box, nothing beside it");
  down.Height = 30;
  check_equal(CUDA(cuMemcpy2D_v2)(&down), CUDA_ERROR_INVALID_VALUE, "a box that leaves its memory is refused");
  CUDA(cuMemFree_v2)(a);
}

static void kinds(void) {
  CUdeviceptr managed, pooled, second;
  CUdeviceptr_v1 low = 0;
  uint64_t before = cuda_free_bytes(), value = 0x1122334455667788ull, back = 0;
  check_equal(CUDA(cuMemAllocManaged)(&managed, 100 * GIB, CU_MEM_ATTACH_GLOBAL), CUDA_SUCCESS, "managed memory may be larger than the card");
  check_equal(cuda_free_bytes(), before, "and takes nothing of it until it is used there");
  *(volatile uint64_t *)(uintptr_t)(managed + 50 * GIB) = value;
  CUDA(cuMemcpyDtoH_v2)(&back, managed + 50 * GIB, 8);
  check_equal(back, value, "the host writes it directly");
  check_equal(CUDA(cuMemFree_v2)(managed), CUDA_SUCCESS, "it is freed");

  check_equal(CUDA(cuMemAllocAsync)(&pooled, 1000, NULL), CUDA_SUCCESS, "memory from a pool");
  check_equal(before - cuda_free_bytes(), 32 * MIB, "the pool reserves 32 MiB");
  CUDA(cuMemAllocAsync)(&second, 20 * MIB, NULL);
  check_equal(before - cuda_free_bytes(), 32 * MIB, "and serves the next from it");
  CUDA(cuMemcpyHtoD_v2)(pooled, &value, 8);
  back = 0;
  CUDA(cuMemcpyDtoH_v2)(&back, pooled, 8);
  check_equal(back, value, "it keeps bytes");
  CUmemoryPool pool;
  cuuint64_t used = 0, reserved = 0;
  CUDA(cuDeviceGetDefaultMemPool)(&pool, 0);
  CUDA(cuMemPoolGetAttribute)(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, &used);
  CUDA(cuMemPoolGetAttribute)(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &reserved);
  check(used == 1024 + 20 * MIB && reserved == 32 * MIB, "the pool says what it uses and reserves");
  CUDA(cuMemFreeAsync)(second, NULL);
  CUDA(cuMemFree_v2)(pooled);
  check_equal(before - cuda_free_bytes(), 32 * MIB, "freed memory stays reserved");
  CUDA(cuStreamSynchronize)(NULL);
  check_equal(cuda_free_bytes(), before, "until the next synchronisation");

  check_equal(CUDA(cuMemAlloc)(&low, 4096), CUDA_SUCCESS, "the 32-bit entry allocates");
  CUDA(cuMemcpyHtoD)(low, &value, 8);
  back = 0;
  CUDA(cuMemcpyDtoH)(&back, low, 8);
  check(back == value && low, "below 4 GiB, with bytes");
  check_equal(CUDA(cuMemFree)(low), CUDA_SUCCESS, "and frees");
}

static void virtual_memory(void) {
  CUmemAllocationProp property = {.type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
  CUmemAccessDesc access = {.location = property.location, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  CUmemGenericAllocationHandle handle;
  CUdeviceptr range;
  size_t grain = 0;
  uint64_t before = cuda_free_bytes(), value = 0xabcdef, back = 0;
  CUDA(cuMemGetAllocationGranularity)(&grain, &property, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
  check_equal(grain, 2 * MIB, "the granularity");
  check_equal(CUDA(cuMemCreate)(&handle, 3 * MIB, &property, 0), CUDA_ERROR_INVALID_VALUE, "sizes are multiples of it");
  check_equal(CUDA(cuMemCreate)(&handle, 6 * MIB, &property, 0), CUDA_SUCCESS, "a handle");
  check_equal(before - cuda_free_bytes(), 6 * MIB, "is charged from its creation");
  check_equal(CUDA(cuMemAddressReserve)(&range, 16 * MIB, 0, 0, 0), CUDA_SUCCESS, "a range of addresses costs nothing");
  check_equal(before - cuda_free_bytes(), 6 * MIB, "as said");
  CUDA(cuMemMap)(range, 6 * MIB, 0, handle, 0);
  check_equal(CUDA(cuMemcpyHtoD_v2)(range, &value, 8), CUDA_ERROR_INVALID_VALUE, "mapped memory needs access first");
  CUDA(cuMemSetAccess)(range, 6 * MIB, &access, 1);
  CUDA(cuMemMap)(range + 8 * MIB, 6 * MIB, 0, handle, 0);
  CUDA(cuMemSetAccess)(range + 8 * MIB, 6 * MIB, &access, 1);
  CUDA(cuMemcpyHtoD_v2)(range + 4 * MIB, &value, 8);
  CUDA(cuMemcpyDtoH_v2)(&back, range + 12 * MIB, 8);
  check_equal(back, value, "two maps of one handle show the same bytes");
  check_equal(CUDA(cuMemcpyDtoH_v2)(&back, range + 6 * MIB, 8), CUDA_ERROR_INVALID_VALUE, "a hole between maps shows nothing");
  check_equal(CUDA(cuMemAddressFree)(range, 16 * MIB), CUDA_ERROR_INVALID_VALUE, "a mapped range is not freed");
  CUDA(cuMemRelease)(handle);
  check_equal(before - cuda_free_bytes(), 6 * MIB, "a released handle is charged while mapped");
  CUDA(cuMemUnmap)(range, 6 * MIB);
  check_equal(before - cuda_free_bytes(), 6 * MIB, "by any map");
  CUDA(cuMemUnmap)(range + 8 * MIB, 6 * MIB);
  check_equal(cuda_free_bytes(), before, "and goes with the last");
  check_equal(CUDA(cuMemAddressFree)(range, 16 * MIB), CUDA_SUCCESS, "then the range is freed");
}

static void pointers(void) {
  CUdeviceptr a, base = 0;
  size_t bytes = 0;
  void *host;
  unsigned int type = 0;
  CUDA(cuMemAlloc_v2)(&a, 5000);
  check_equal(CUDA(cuMemGetAddressRange_v2)(&base, &bytes, a + 4999), CUDA_SUCCESS, "an address inside is known");
  check(base == a && bytes == 5000, "with its allocation");
  check_equal(CUDA(cuMemGetAddressRange_v2)(&base, &bytes, a + 5000), CUDA_ERROR_NOT_FOUND, "one past the end is not");
  CUDA(cuMemHostAlloc)(&host, 100, 0);
  CUDA(cuPointerGetAttribute)(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, a);
  check_equal(type, CU_MEMORYTYPE_DEVICE, "device memory is device memory");
  CUDA(cuPointerGetAttribute)(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, (CUdeviceptr)(uintptr_t)host);
  check_equal(type, CU_MEMORYTYPE_HOST, "page-locked memory is the host's");
  check_equal(CUDA(cuPointerGetAttribute)(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, (CUdeviceptr)(uintptr_t)&type), CUDA_ERROR_INVALID_VALUE,
              "other memory is not known");
  CUDA(cuMemFreeHost)(host);
  /* a device address is none of the processor's */
  pid_t pid = fork();
  if (pid == 0) {
    signal(SIGSEGV, SIG_DFL);
    *(volatile char *)(uintptr_t)a = 1;
    _exit(0);
  }
  int status;
  waitpid(pid, &status, 0);
  check(!(WIFEXITED(status) && WEXITSTATUS(status) == 0), "the processor can't follow a device address");
  CUDA(cuMemFree_v2)(a);
}

int main(void) {
  root_make("--card", "a30", "--seed", "2", NULL);
  check_equal(start_cuda(0), CUDA_SUCCESS, "start");
  uint64_t before = cuda_free_bytes();
  linear();
  fills();
  boxes();
  kinds();
  virtual_memory();
  pointers();
  check_equal(cuda_free_bytes(), before, "at the end all memory is back");
  return finish();
}
