/* Arrays and mipmapped arrays: what they cost, what they keep, what is refused. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "harness.h"

#define KIB 1024ull

static uint32_t noise = 99;
static void scramble(unsigned char *at, size_t n) {
  for (size_t i = 0; i < n; i++) at[i] = (unsigned char)((noise = noise * 1664525u + 1013904223u) >> 24);
}

/* ---- sizes --------------------------------------------------------------- */

typedef struct {
  const char *what;
  CUDA_ARRAY3D_DESCRIPTOR d;
  unsigned int levels; /* 0: no mipmapped array */
  uint64_t bytes;
} size_row;

/* The rule of cuda/array.h, worked out by hand. */
static const size_row sizes[] = {
    {"one element", {1, 0, 0, CU_AD_FORMAT_UNSIGNED_INT8, 1, 0}, 0, 64 * KIB},
    {"a line of 64 KiB", {65536, 0, 0, CU_AD_FORMAT_UNSIGNED_INT8, 1, 0}, 0, 64 * KIB},
    {"a line of one more", {65537, 0, 0, CU_AD_FORMAT_UNSIGNED_INT8, 1, 0}, 0, 128 * KIB},
    {"1024 x 1024 floats", {1024, 1024, 0, CU_AD_FORMAT_FLOAT, 1, 0}, 0, 4 * MIB},
    {"1024 x 1025 floats: rows to 128", {1024, 1025, 0, CU_AD_FORMAT_FLOAT, 1, 0}, 0, 4096 * 1152},
    {"1000 x 1000 four halves: rows of 8000 bytes", {1000, 1000, 0, CU_AD_FORMAT_HALF, 4, 0}, 0, 8000 * 1024},
    {"17 rows: 32 of them", {4096, 17, 0, CU_AD_FORMAT_UNSIGNED_INT16, 1, 0}, 0, 8192 * 32},
    {"a 3D array: 20 slices are 32", {100, 100, 20, CU_AD_FORMAT_UNSIGNED_INT32, 1, 0}, 0, 448 * 128 * 32},
    {"20 layers are 20", {100, 100, 20, CU_AD_FORMAT_UNSIGNED_INT32, 1, CUDA_ARRAY3D_LAYERED}, 0, 18 * 64 * KIB},
    {"a cube map", {64, 64, 6, CU_AD_FORMAT_UNSIGNED_INT8, 4, CUDA_ARRAY3D_CUBEMAP}, 0, 128 * KIB},
    {"blocks of 8 bytes", {1024, 1024, 0, CU_AD_FORMAT_BC1_UNORM, 4, 0}, 0, 512 * KIB},
    {"blocks of 16 bytes", {1024, 1024, 0, CU_AD_FORMAT_BC7_UNORM, 4, 0}, 0, MIB},
    {"two planes", {1920, 1080, 0, CU_AD_FORMAT_NV12, 3, 0}, 0, 3211264},
    {"all levels of 1024 x 1024 bytes", {1024, 1024, 0, CU_AD_FORMAT_UNSIGNED_INT8, 1, 0}, 32, 1441792},
    {"one level", {1024, 1024, 0, CU_AD_FORMAT_UNSIGNED_INT8, 1, 0}, 1, MIB},
};

static void what_they_cost(void) {
  uint64_t before = cuda_free_bytes();
  for (unsigned int i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
    const size_row *row = &sizes[i];
    CUDA_ARRAY3D_DESCRIPTOR later = row->d;
    CUDA_ARRAY_MEMORY_REQUIREMENTS need = {0};
    CUarray array = NULL;
    CUmipmappedArray levels = NULL;
    later.Flags |= CUDA_ARRAY3D_DEFERRED_MAPPING;
    if (row->levels) {
      CUDA(cuMipmappedArrayCreate)(&levels, &later, row->levels);
      CUDA(cuMipmappedArrayGetMemoryRequirements)(&need, levels, 0);
    } else {
      CUDA(cuArray3DCreate_v2)(&array, &later);
      CUDA(cuArrayGetMemoryRequirements)(&need, array, 0);
    }
    check_equal(need.size, row->bytes, "%s: so many bytes", row->what);
    check(need.alignment == 64 * KIB && cuda_free_bytes() == before, "and nothing yet for an array whose memory comes later");
    if (row->levels) CUDA(cuMipmappedArrayDestroy)(levels);
    else CUDA(cuArrayDestroy)(array);

    CUresult made = row->levels ? CUDA(cuMipmappedArrayCreate)(&levels, &row->d, row->levels) : CUDA(cuArray3DCreate_v2)(&array, &row->d);
    uint64_t pages = row->bytes <= MIB ? 2 * MIB : (row->bytes + 2 * MIB - 1) / (2 * MIB) * 2 * MIB;
    check_equal(made, CUDA_SUCCESS, "%s: made", row->what);
    check_equal(before - cuda_free_bytes(), pages, "and charged in whole pages");
    CUresult gone = row->levels ? CUDA(cuMipmappedArrayDestroy)(levels) : CUDA(cuArrayDestroy)(array);
    check(gone == CUDA_SUCCESS && cuda_free_bytes() == before, "and given back");
  }
}

static void pages_are_shared(void) {
  CUDA_ARRAY_DESCRIPTOR d = {256, 256, CU_AD_FORMAT_UNSIGNED_INT8, 1}; /* 64 KiB */
  CUarray all[33];
  CUdeviceptr linear;
  uint64_t before = cuda_free_bytes();
  CUDA(cuMemAlloc_v2)(&linear, 512);
  for (int i = 0; i < 32; i++) CUDA(cuArrayCreate_v2)(&all[i], &d);
  check_equal(before - cuda_free_bytes(), 4 * MIB, "32 arrays of 64 KiB share a page, linear memory has another");
  CUDA(cuArrayCreate_v2)(&all[32], &d);
  check_equal(before - cuda_free_bytes(), 6 * MIB, "the 33rd takes the next");
  CUDA(cuMemFree_v2)(linear);
  for (int i = 0; i < 33; i++) CUDA(cuArrayDestroy)(all[i]);
  check_equal(cuda_free_bytes(), before, "all is given back");
}

static void to_the_byte(void) {
  CUDA_ARRAY3D_DESCRIPTOR d = {16384, 16384, 0, CU_AD_FORMAT_FLOAT, 4, 0}; /* 4 GiB */
  CUarray array[64];
  CUdeviceptr rest;
  uint64_t before = cuda_free_bytes();
  int made = 0;
  while (made < 64 && CUDA(cuArray3DCreate_v2)(&array[made], &d) == CUDA_SUCCESS) made++;
  check_equal(made, before / (4 * GIB), "arrays fill the card");
  check_equal(CUDA(cuArray3DCreate_v2)(&array[63], &d), CUDA_ERROR_OUT_OF_MEMORY, "and then are refused");
  check_equal(cuda_free_bytes(), before - (uint64_t)made * 4 * GIB, "which changes nothing");
  check_equal(CUDA(cuMemAlloc_v2)(&rest, before % (4 * GIB)), CUDA_SUCCESS, "the rest can still be had");
  CUDA(cuMemFree_v2)(rest);
  while (made) CUDA(cuArrayDestroy)(array[--made]);
  check_equal(cuda_free_bytes(), before, "all is given back");
}

/* ---- bytes --------------------------------------------------------------- */

static void boxes(void) {
  enum { W = 200, H = 40, D = 5 };
  static unsigned char in[W * H * D], out[W * H * D];
  CUDA_ARRAY3D_DESCRIPTOR d = {W / 4, H, D, CU_AD_FORMAT_UNSIGNED_INT8, 4, 0};
  CUarray a, b;
  CUdeviceptr linear;
  CUDA(cuMemAlloc_v2)(&linear, sizeof in);
  CUDA(cuArray3DCreate_v2)(&a, &d);
  CUDA(cuArray3DCreate_v2)(&b, &d);
  scramble(in, sizeof in);
  CUDA_MEMCPY3D up = {.srcMemoryType = CU_MEMORYTYPE_HOST, .srcHost = in, .srcPitch = W, .srcHeight = H,
                      .dstMemoryType = CU_MEMORYTYPE_ARRAY, .dstArray = a, .WidthInBytes = W, .Height = H, .Depth = D};
  check_equal(CUDA(cuMemcpy3D_v2)(&up), CUDA_SUCCESS, "host to array");
  CUDA_MEMCPY3D over = {.srcMemoryType = CU_MEMORYTYPE_ARRAY, .srcArray = a, .dstMemoryType = CU_MEMORYTYPE_ARRAY, .dstArray = b,
                        .WidthInBytes = W, .Height = H, .Depth = D};
  check_equal(CUDA(cuMemcpy3DAsync_v2)(&over, NULL), CUDA_SUCCESS, "array to array");
  CUDA_MEMCPY3D across = {.srcMemoryType = CU_MEMORYTYPE_ARRAY, .srcArray = b, .dstMemoryType = CU_MEMORYTYPE_DEVICE, .dstDevice = linear,
                          .dstPitch = W, .dstHeight = H, .WidthInBytes = W, .Height = H, .Depth = D};
  check_equal(CUDA(cuMemcpy3D_v2)(&across), CUDA_SUCCESS, "array to device");
  CUDA(cuMemcpyDtoH_v2)(out, linear, sizeof out);
  check(memcmp(in, out, sizeof in) == 0, "bytes come back as they went");
  CUDA_MEMCPY2D part = {.srcMemoryType = CU_MEMORYTYPE_ARRAY, .srcArray = b, .srcXInBytes = 8, .srcY = 3,
                        .dstMemoryType = CU_MEMORYTYPE_HOST, .dstHost = out, .dstPitch = 16, .WidthInBytes = 16, .Height = 2};
  check_equal(CUDA(cuMemcpy2D_v2)(&part), CUDA_SUCCESS, "a part of the first slice");
  check(memcmp(out, in + 3 * W + 8, 16) == 0 && memcmp(out + 16, in + 4 * W + 8, 16) == 0, "is that part");
  part.srcXInBytes = W - 15;
  check_equal(CUDA(cuMemcpy2D_v2)(&part), CUDA_ERROR_INVALID_VALUE, "a row that leaves the array is refused");
  part.srcXInBytes = SIZE_MAX - 3;
  check_equal(CUDA(cuMemcpy2D_v2)(&part), CUDA_ERROR_INVALID_VALUE, "also where the sum runs over");
  part.srcXInBytes = 0;
  part.srcY = H - 1;
  check_equal(CUDA(cuMemcpy2D_v2)(&part), CUDA_ERROR_INVALID_VALUE, "so is one row too many");
  over.srcZ = 1;
  check_equal(CUDA(cuMemcpy3D_v2)(&over), CUDA_ERROR_INVALID_VALUE, "and one slice too many");
  part.srcArray = (CUarray)(uintptr_t)in;
  check_equal(CUDA(cuMemcpy2D_v2)(&part), CUDA_ERROR_INVALID_HANDLE, "what is no array is no array");
  CUDA(cuArrayDestroy)(a);
  part.srcArray = a;
  check_equal(CUDA(cuMemcpy2D_v2)(&part), CUDA_ERROR_INVALID_HANDLE, "nor is one that is gone");
  CUDA(cuArrayDestroy)(b);
  CUDA(cuMemFree_v2)(linear);
}

static void lines(void) {
  enum { N = 3000 };
  static unsigned char in[N], out[N];
  CUDA_ARRAY_DESCRIPTOR d = {N, 0, CU_AD_FORMAT_UNSIGNED_INT8, 1};
  CUarray a, b;
  CUdeviceptr linear;
  CUDA(cuMemAlloc_v2)(&linear, N);
  CUDA(cuArrayCreate_v2)(&a, &d);
  CUDA(cuArrayCreate_v2)(&b, &d);
  scramble(in, N);
  check_equal(CUDA(cuMemcpyHtoA_v2)(a, 0, in, N), CUDA_SUCCESS, "host to a line");
  check_equal(CUDA(cuMemcpyAtoA_v2)(b, 100, a, 0, N - 100), CUDA_SUCCESS, "line to line");
  check_equal(CUDA(cuMemcpyAtoD_v2)(linear, b, 100, N - 100), CUDA_SUCCESS, "line to device");
  check_equal(CUDA(cuMemcpyDtoA_v2)(b, 0, linear, 100), CUDA_SUCCESS, "device to line");
  check_equal(CUDA(cuMemcpyAtoH_v2)(out, b, 0, N), CUDA_SUCCESS, "line to host");
  check(memcmp(out, in, 100) == 0 && memcmp(out + 100, in, N - 100) == 0, "bytes are where they belong");
  check_equal(CUDA(cuMemcpyHtoA_v2)(a, 1, in, N), CUDA_ERROR_INVALID_VALUE, "past the end is refused");
  CUDA(cuArrayDestroy)(a);
  CUDA(cuArrayDestroy)(b);
  CUDA(cuMemFree_v2)(linear);
}

static void planes_and_levels(void) {
  static unsigned char in[64 * 48], out[64 * 48];
  CUDA_ARRAY3D_DESCRIPTOR d = {64, 32, 0, CU_AD_FORMAT_NV12, 3, 0}, seen;
  CUarray video, second, level, again;
  CUmipmappedArray levels;
  scramble(in, sizeof in);
  CUDA(cuArray3DCreate_v2)(&video, &d);
  CUDA_MEMCPY2D up = {.srcMemoryType = CU_MEMORYTYPE_HOST, .srcHost = in, .srcPitch = 64, .dstMemoryType = CU_MEMORYTYPE_ARRAY, .dstArray = video,
                      .WidthInBytes = 64, .Height = 48};
  CUDA(cuMemcpy2D_v2)(&up);
  check_equal(CUDA(cuArrayGetPlane)(&second, video, 1), CUDA_SUCCESS, "the second plane");
  CUDA(cuArray3DGetDescriptor_v2)(&seen, second);
  check(seen.Width == 32 && seen.Height == 16 && seen.NumChannels == 2, "is half as wide and high, in pairs");
  CUDA_MEMCPY2D down = {.srcMemoryType = CU_MEMORYTYPE_ARRAY, .srcArray = second, .dstMemoryType = CU_MEMORYTYPE_HOST, .dstHost = out,
                        .dstPitch = 64, .WidthInBytes = 64, .Height = 16};
  CUDA(cuMemcpy2D_v2)(&down);
  check(memcmp(out, in + 64 * 32, 64 * 16) == 0, "and shows the array's own bytes");
  check_equal(CUDA(cuArrayDestroy)(second), CUDA_ERROR_INVALID_HANDLE, "it isn't destroyed by itself");
  check_equal(CUDA(cuArrayGetPlane)(&level, video, 2), CUDA_ERROR_INVALID_VALUE, "there is no third");
  CUDA(cuArrayDestroy)(video);
  down.srcArray = second;
  check_equal(CUDA(cuMemcpy2D_v2)(&down), CUDA_ERROR_INVALID_HANDLE, "it goes with its array");

  d = (CUDA_ARRAY3D_DESCRIPTOR){64, 16, 0, CU_AD_FORMAT_UNSIGNED_INT8, 1, 0};
  check_equal(CUDA(cuMipmappedArrayCreate)(&levels, &d, 100), CUDA_SUCCESS, "a mipmapped array with all its levels");
  check_equal(CUDA(cuMipmappedArrayGetLevel)(&level, levels, 7), CUDA_ERROR_INVALID_VALUE, "which are seven");
  check_equal(CUDA(cuMipmappedArrayGetLevel)(&level, levels, 5), CUDA_SUCCESS, "the sixth");
  CUDA(cuArray3DGetDescriptor_v2)(&seen, level);
  check(seen.Width == 2 && seen.Height == 1, "is two by one");
  CUDA(cuMipmappedArrayGetLevel)(&again, levels, 5);
  check(again == level, "and always the same");
  for (unsigned int i = 0; i < 7; i++) { /* levels don't touch each other */
    CUDA(cuMipmappedArrayGetLevel)(&level, levels, i);
    CUDA(cuArray3DGetDescriptor_v2)(&seen, level);
    CUDA_MEMCPY2D fill = {.srcMemoryType = CU_MEMORYTYPE_HOST, .srcHost = in + i * 7, .srcPitch = 64, .dstMemoryType = CU_MEMORYTYPE_ARRAY,
                          .dstArray = level, .WidthInBytes = seen.Width, .Height = seen.Height};
    CUDA(cuMemcpy2D_v2)(&fill);
  }
  bool good = true;
  for (unsigned int i = 0; i < 7; i++) {
    CUDA(cuMipmappedArrayGetLevel)(&level, levels, i);
    CUDA(cuArray3DGetDescriptor_v2)(&seen, level);
    CUDA_MEMCPY2D read = {.srcMemoryType = CU_MEMORYTYPE_ARRAY, .srcArray = level, .dstMemoryType = CU_MEMORYTYPE_HOST, .dstHost = out,
                          .dstPitch = 64, .WidthInBytes = seen.Width, .Height = seen.Height};
    good &= CUDA(cuMemcpy2D_v2)(&read) == CUDA_SUCCESS;
    for (unsigned int y = 0; y < seen.Height; y++) good &= memcmp(out + y * 64, in + i * 7 + y * 64, seen.Width) == 0;
  }
  check(good, "each level keeps its bytes");
  check_equal(CUDA(cuArrayDestroy)(level), CUDA_ERROR_INVALID_HANDLE, "a level isn't destroyed by itself");
  check_equal(CUDA(cuMipmappedArrayDestroy)(levels), CUDA_SUCCESS, "the whole is");
  check_equal(CUDA(cuMipmappedArrayDestroy)(levels), CUDA_ERROR_INVALID_HANDLE, "once");
}

/* ---- refusals ------------------------------------------------------------ */

static void refusals(void) {
  static const struct { const char *what; CUDA_ARRAY3D_DESCRIPTOR d; CUresult want; } rows[] = {
      {"no width", {0, 1, 0, CU_AD_FORMAT_FLOAT, 1, 0}, CUDA_ERROR_INVALID_VALUE},
      {"three channels", {1, 1, 0, CU_AD_FORMAT_FLOAT, 3, 0}, CUDA_ERROR_INVALID_VALUE},
      {"a format that there isn't", {1, 1, 0, 0x77, 1, 0}, CUDA_ERROR_INVALID_VALUE},
      {"too wide", {131073, 1, 0, CU_AD_FORMAT_FLOAT, 1, 0}, CUDA_ERROR_INVALID_VALUE},
      {"too deep", {1, 1, 16385, CU_AD_FORMAT_FLOAT, 1, 0}, CUDA_ERROR_INVALID_VALUE},
      {"layers without any", {1, 1, 0, CU_AD_FORMAT_FLOAT, 1, CUDA_ARRAY3D_LAYERED}, CUDA_ERROR_INVALID_VALUE},
      {"too many layers", {1, 1, 2049, CU_AD_FORMAT_FLOAT, 1, CUDA_ARRAY3D_LAYERED}, CUDA_ERROR_INVALID_VALUE},
      {"a cube of five faces", {8, 8, 5, CU_AD_FORMAT_FLOAT, 1, CUDA_ARRAY3D_CUBEMAP}, CUDA_ERROR_INVALID_VALUE},
      {"a cube that is none", {8, 9, 6, CU_AD_FORMAT_FLOAT, 1, CUDA_ARRAY3D_CUBEMAP}, CUDA_ERROR_INVALID_VALUE},
      {"a gather in 3D layers", {8, 8, 6, CU_AD_FORMAT_FLOAT, 1, CUDA_ARRAY3D_TEXTURE_GATHER | CUDA_ARRAY3D_LAYERED}, CUDA_ERROR_INVALID_VALUE},
      {"half a block", {6, 8, 0, CU_AD_FORMAT_BC1_UNORM, 4, 0}, CUDA_ERROR_INVALID_VALUE},
      {"flags that there aren't", {8, 8, 0, CU_AD_FORMAT_FLOAT, 1, 0x4000}, CUDA_ERROR_INVALID_VALUE},
      {"sparse arrays", {8, 8, 0, CU_AD_FORMAT_FLOAT, 1, CUDA_ARRAY3D_SPARSE}, CUDA_ERROR_NOT_SUPPORTED},
  };
  CUarray array = NULL;
  uint64_t before = cuda_free_bytes();
  for (unsigned int i = 0; i < sizeof rows / sizeof rows[0]; i++) {
    check_equal(CUDA(cuArray3DCreate_v2)(&array, &rows[i].d), rows[i].want, "%s: refused", rows[i].what);
    check(!array && cuda_free_bytes() == before, "and nothing taken");
  }
  CUDA_ARRAY_DESCRIPTOR plain = {8, 8, CU_AD_FORMAT_FLOAT, 1};
  CUDA_ARRAY_MEMORY_REQUIREMENTS need;
  CUDA_ARRAY_SPARSE_PROPERTIES sparse;
  CUDA(cuArrayCreate_v2)(&array, &plain);
  check_equal(CUDA(cuArrayGetMemoryRequirements)(&need, array, 0), CUDA_ERROR_INVALID_VALUE, "sizes are told of deferred arrays only");
  check_equal(CUDA(cuArrayGetSparseProperties)(&sparse, array), CUDA_ERROR_INVALID_VALUE, "and sparse properties of sparse ones");
  CUDA(cuArrayDestroy)(array);
  check_equal(CUDA(cuArrayDestroy)(array), CUDA_ERROR_INVALID_HANDLE, "an array goes once");
}

/* ---- the 32-bit forms, contexts, death ----------------------------------- */

static void old_forms(void) {
  unsigned char in[64], out[64] = {0};
  CUDA_ARRAY_DESCRIPTOR_v1 d = {16, 4, CU_AD_FORMAT_UNSIGNED_INT8, 1}, seen = {0};
  CUarray a;
  scramble(in, sizeof in);
  check_equal(CUDA(cuArrayCreate)(&a, &d), CUDA_SUCCESS, "the 32-bit form makes arrays");
  CUDA(cuArrayGetDescriptor)(&seen, a);
  check(seen.Width == 16 && seen.Height == 4, "and describes them");
  CUDA_MEMCPY2D_v1 up = {.srcMemoryType = CU_MEMORYTYPE_HOST, .srcHost = in, .srcPitch = 16, .dstMemoryType = CU_MEMORYTYPE_ARRAY, .dstArray = a,
                         .WidthInBytes = 16, .Height = 4};
  CUDA_MEMCPY3D_v1 down = {.srcMemoryType = CU_MEMORYTYPE_ARRAY, .srcArray = a, .dstMemoryType = CU_MEMORYTYPE_HOST, .dstHost = out,
                           .dstPitch = 16, .dstHeight = 4, .WidthInBytes = 16, .Height = 4, .Depth = 1};
  check(CUDA(cuMemcpy2D)(&up) == CUDA_SUCCESS && CUDA(cuMemcpy3D)(&down) == CUDA_SUCCESS && memcmp(in, out, 64) == 0, "and copies");
  CUDA(cuArrayDestroy)(a);
}

static void contexts(void) {
  CUcontext ctx;
  CUarray a;
  CUmipmappedArray m;
  CUDA_ARRAY3D_DESCRIPTOR d = {4096, 4096, 0, CU_AD_FORMAT_FLOAT, 1, 0};
  uint64_t before = cuda_free_bytes();
  CUDA(cuCtxCreate_v2)(&ctx, 0, 0);
  CUDA(cuArray3DCreate_v2)(&a, &d);
  CUDA(cuMipmappedArrayCreate)(&m, &d, 3);
  CUDA(cuCtxDestroy_v2)(ctx);
  check_equal(cuda_free_bytes(), before, "arrays go with their context");
  check_equal(CUDA(cuArrayDestroy)(a), CUDA_ERROR_INVALID_HANDLE, "and their handles too");
}

static void holder(child *self, void *unused) {
  CUarray a;
  CUDA_ARRAY3D_DESCRIPTOR d = {16384, 16384, 0, CU_AD_FORMAT_FLOAT, 1, 0};
  (void)unused;
  start_cuda(0);
  tell(self, (uint64_t)CUDA(cuArray3DCreate_v2)(&a, &d));
  ask(self);
}

static void death(void) {
  run_tool("softgpu", "set", state_open()->device_prefix, "free-delay=0", NULL);
  uint64_t before = used_bytes(0);
  child c = child_start(holder, NULL);
  check_equal(ask(&c), CUDA_SUCCESS, "another process makes an array");
  check(used_bytes(0) > before + GIB, "which the card counts");
  child_kill(&c);
  check_equal(used_bytes(0), before, "until that process dies");
}

static void all(child *self, void *unused) {
  (void)unused;
  check_equal(start_cuda(0), CUDA_SUCCESS, "start");
  uint64_t before = cuda_free_bytes();
  what_they_cost();
  pages_are_shared();
  to_the_byte();
  boxes();
  lines();
  planes_and_levels();
  refusals();
  old_forms();
  contexts();
  check_equal(cuda_free_bytes(), before, "at the end all memory is back");
  tell(self, 1);
}

int main(void) {
  root_make("--card", "a30", "--seed", "2", NULL);
  child c = child_start(all, NULL);
  check_equal(ask(&c), 1, "all was looked at");
  check_equal(child_end(&c), 0, "by a process that ended well");
  death();
  return finish();
}
