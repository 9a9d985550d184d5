/* alloc.c - allocating in each way, and until it is refused. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../units.h"
#include "probe.h"

const char *way_name(way by) {
  static const char *const names[] = {"cuMemAlloc", "cuMemAllocPitch", "cuMemAllocManaged", "cuMemAllocAsync", "cuMemCreate", "cuMemAlloc (32 bit)",
                                      "cuArray3DCreate"};
  return names[by];
}

static CUresult take_vmm(uint64_t bytes, int device, piece *out) {
  CUmemAllocationProp property = {.type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {CU_MEM_LOCATION_TYPE_DEVICE, device}};
  CUmemAccessDesc access = {.location = property.location, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  size_t grain = 0;
  if (!cuda.cuMemCreate || !cuda.cuMemMap || !cuda.cuMemAddressReserve || !cuda.cuMemSetAccess) return CUDA_ERROR_NOT_SUPPORTED;
  CUresult result = cuda.cuMemGetAllocationGranularity(&grain, &property, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
  if (result != CUDA_SUCCESS) return result;
  out->bytes = (bytes + grain - 1) / grain * grain;
  result = cuda.cuMemCreate(&out->handle, out->bytes, &property, 0);
  if (result != CUDA_SUCCESS) return result;
  result = cuda.cuMemAddressReserve(&out->pointer, out->bytes, 0, 0, 0);
  if (result == CUDA_SUCCESS) {
    result = cuda.cuMemMap(out->pointer, out->bytes, 0, out->handle, 0);
    if (result == CUDA_SUCCESS) result = cuda.cuMemSetAccess(out->pointer, out->bytes, &access, 1);
    if (result != CUDA_SUCCESS) cuda.cuMemAddressFree(out->pointer, out->bytes);
  }
  if (result != CUDA_SUCCESS) cuda.cuMemRelease(out->handle);
  return result;
}

CUresult take_piece(way by, uint64_t bytes, int device, piece *out) {
  CUresult result;
  *out = (piece){.by = by, .bytes = bytes};
  switch (by) {
  case BY_PITCH: {
    /* rows of 1000 bytes: the pitch shows what the driver adds */
    size_t pitch = 0, rows = (bytes + 999) / 1000;
    result = cuda.cuMemAllocPitch_v2(&out->pointer, &pitch, 1000, rows, 4);
    out->bytes = pitch * rows;
    return result;
  }
  case BY_MANAGED: return cuda.cuMemAllocManaged(&out->pointer, bytes, CU_MEM_ATTACH_GLOBAL);
  case BY_ASYNC:
    if (!cuda.cuMemAllocAsync) return CUDA_ERROR_NOT_SUPPORTED;
    result = cuda.cuMemAllocAsync(&out->pointer, bytes, NULL);
    return result == CUDA_SUCCESS ? cuda.cuStreamSynchronize(NULL) : result;
  case BY_VMM: return take_vmm(bytes, device, out);
  case BY_LEGACY: {
    CUdeviceptr_v1 low = 0;
    if (!cuda.cuMemAlloc || bytes > UINT32_MAX) return CUDA_ERROR_NOT_SUPPORTED;
    result = cuda.cuMemAlloc(&low, (unsigned int)bytes);
    out->pointer = low;
    return result;
  }
  case BY_ARRAY: {
    /* rows of 64 KiB, or of 2 MiB when there would be too many */
    size_t row = bytes > 1ull << 32 ? 2 << 20 : 64 << 10;
    CUDA_ARRAY3D_DESCRIPTOR d = {.Width = row / 16, .Height = (bytes + row - 1) / row, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 4};
    out->bytes = row * d.Height;
    return cuda.cuArray3DCreate_v2(&out->array, &d);
  }
  case BY_ALLOC:
  case WAYS: break;
  }
  return cuda.cuMemAlloc_v2(&out->pointer, bytes);
}

CUresult give_piece(const piece *p) {
  if (p->by == BY_ASYNC) {
    CUresult result = cuda.cuMemFreeAsync(p->pointer, NULL);
    return result == CUDA_SUCCESS ? cuda.cuStreamSynchronize(NULL) : result;
  }
  if (p->by == BY_ARRAY) return cuda.cuArrayDestroy(p->array);
  if (p->by != BY_VMM) return cuda.cuMemFree_v2(p->pointer);
  CUresult result = cuda.cuMemUnmap(p->pointer, p->bytes);
  if (result == CUDA_SUCCESS) result = cuda.cuMemRelease(p->handle);
  return result == CUDA_SUCCESS ? cuda.cuMemAddressFree(p->pointer, p->bytes) : result;
}

static void memory_fields(void) {
  size_t left = 0, total = 0;
  CUresult result = cuda.cuMemGetInfo_v2(&left, &total);
  if (result != CUDA_SUCCESS) return;
  field_number("freeBytes", left);
  field_number("totalBytes", total);
}

/* --hold alone waits for the end of stdin, with a time for that long. Takes both out of argv. */
static bool take_hold(int *argc, char **argv, uint64_t *ns) {
  *ns = 0;
  for (int i = 0; i < *argc; i++) {
    if (strcmp(argv[i], "--hold") != 0) continue;
    bool timed = i + 1 < *argc && argv[i + 1][0] != '-' && units_nanoseconds(argv[i + 1], ns) && *ns;
    int gone = timed ? 2 : 1;
    memmove(argv + i, argv + i + gone, (size_t)(*argc - i - gone) * sizeof *argv);
    *argc -= gone;
    return true;
  }
  return false;
}

static void hold(uint64_t ns) {
  char sink[256];
  line("hold");
  field_bool("ok", true);
  memory_fields();
  line_end();
  if (ns) nap_ns(ns);
  else while (read(0, sink, sizeof sink) > 0) {
  }
}

static bool device_option(int *argc, char **argv, int *device) {
  uint64_t number = 0;
  const char *text = take_option(argc, argv, "--device");
  if (text && (!units_number(text, &number) || number > 64)) return false;
  *device = (int)number;
  return true;
}

int probe_alloc(int argc, char **argv) {
  static const struct { const char *flag; way by; } ways[] = {
      {"--pitch", BY_PITCH}, {"--managed", BY_MANAGED}, {"--async", BY_ASYNC}, {"--vmm", BY_VMM}, {"--legacy", BY_LEGACY},
      {"--array", BY_ARRAY}};
  uint64_t hold_ns, free_after_ns = 0, bytes;
  int device, code;
  way by = BY_ALLOC;

  bool holds = take_hold(&argc, argv, &hold_ns);
  const char *free_after = take_option(&argc, argv, "--free-after");
  bool touch = take_flag(&argc, argv, "--touch");
  for (unsigned i = 0; i < sizeof ways / sizeof ways[0]; i++)
    if (take_flag(&argc, argv, ways[i].flag)) by = ways[i].by;
  if (!device_option(&argc, argv, &device)) return usage("--device needs a number");
  if (free_after && !units_nanoseconds(free_after, &free_after_ns)) return usage("--free-after can't be %s", free_after);
  if (!argc) return usage("alloc needs sizes");
  for (int i = 0; i < argc; i++)
    if (!units_bytes(argv[i], &bytes)) return usage("%s is no size", argv[i]);

  code = open_device(device);
  if (code != PROBE_OK) return code;
  piece *pieces = calloc((size_t)argc, sizeof *pieces);
  int held = 0;
  if (!pieces) return PROBE_REFUSED;
  for (int i = 0; i < argc; i++) {
    units_bytes(argv[i], &bytes);
    CUresult result = take_piece(by, bytes, device, &pieces[held]);
    CUresult touched = CUDA_SUCCESS;
    if (result == CUDA_SUCCESS && touch && by != BY_ARRAY) touched = cuda.cuMemsetD8_v2(pieces[held].pointer, 0x5a, bytes);
    line("alloc");
    field_result(result != CUDA_SUCCESS ? result : touched);
    field_text("call", way_name(by));
    field_number("askedBytes", bytes);
    if (result == CUDA_SUCCESS) {
      field_number("grantedBytes", pieces[held].bytes);
      field_number("pointer", pieces[held].pointer);
    }
    memory_fields();
    line_end();
    if (result == CUDA_SUCCESS) held++;
    else code = PROBE_REFUSED;
  }
  if (holds) hold(hold_ns);
  if (free_after) nap_ns(free_after_ns);
  if (free_after || !holds) {
    for (int i = 0; i < held; i++) {
      CUresult result = give_piece(&pieces[i]);
      if (result != CUDA_SUCCESS) code = refused("free", result);
    }
    line("freed");
    field_bool("ok", true);
    memory_fields();
    line_end();
  }
  free(pieces);
  return code;
}

int probe_fill(int argc, char **argv) {
  uint64_t hold_ns, step = 1ull << 30, least = 2ull << 20, granted = 0, count = 0;
  int device;
  piece one;

  bool holds = take_hold(&argc, argv, &hold_ns);
  const char *step_text = take_option(&argc, argv, "--step"), *least_text = take_option(&argc, argv, "--least");
  if (!device_option(&argc, argv, &device)) return usage("--device needs a number");
  if (step_text && (!units_bytes(step_text, &step) || !step)) return usage("--step can't be %s", step_text);
  if (least_text && (!units_bytes(least_text, &least) || !least)) return usage("--least can't be %s", least_text);
  if (argc) return usage("fill takes no %s", argv[0]);
  int code = open_device(device);
  if (code != PROBE_OK) return code;
  CUresult result = CUDA_SUCCESS;
  if (least > step) least = step;
  for (uint64_t size = step; size >= least; size /= 2)
    while ((result = take_piece(BY_ALLOC, size, device, &one)) == CUDA_SUCCESS) {
      granted += size;
      count++;
    }
  line("fill");
  field_result(result);
  field_number("grantedBytes", granted);
  field_number("allocations", count);
  memory_fields();
  line_end();
  if (holds) hold(hold_ns);
  /* being refused is what fill is for; any other end is not */
  return result == CUDA_ERROR_OUT_OF_MEMORY ? PROBE_OK : PROBE_REFUSED;
}
