/* calls.c - opening the libraries, the output lines, small things. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "../units.h"
#include "probe.h"

cuda_calls cuda;
nvml_calls nvml;

/* ---- lines --------------------------------------------------------------- */

void line(const char *step) {
  fputs("{\"step\":", stdout);
  json_text(stdout, step);
}

static void name_of(const char *name) {
  fputc(',', stdout);
  json_text(stdout, name);
  fputc(':', stdout);
}

void field_text(const char *name, const char *value) {
  name_of(name);
  json_text(stdout, value);
}

void field_number(const char *name, uint64_t value) {
  name_of(name);
  printf("%" PRIu64, value);
}

void field_signed(const char *name, int64_t value) {
  name_of(name);
  printf("%" PRId64, value);
}

void field_real(const char *name, double value) {
  name_of(name);
  printf("%.6f", value);
}

void field_bool(const char *name, bool value) {
  name_of(name);
  fputs(value ? "true" : "false", stdout);
}

void field_result(CUresult result) {
  const char *name = NULL;
  field_bool("ok", result == CUDA_SUCCESS);
  if (result == CUDA_SUCCESS) return;
  field_signed("error", result);
  if (cuda.cuGetErrorName && cuda.cuGetErrorName(result, &name) == CUDA_SUCCESS && name) field_text("errorName", name);
}

void line_end(void) {
  fputs("}\n", stdout);
  fflush(stdout);
}

int refused(const char *step, CUresult result) {
  line(step);
  field_result(result);
  line_end();
  return PROBE_REFUSED;
}

static int not_loaded(const char *step, const char *library) {
  const char *why = dlerror();
  line(step);
  field_bool("ok", false);
  field_text("library", library);
  field_text("reason", why ? why : "unknown");
  line_end();
  return PROBE_REFUSED;
}

/* ---- libraries ----------------------------------------------------------- */

static void *symbol(void *handle, const char *name) { return dlsym(handle, name); }

#define LOAD(name)                                   \
  do {                                               \
    void *found = symbol(calls->handle, #name);      \
    memcpy(&calls->name, &found, sizeof found);      \
  } while (0);

int open_cuda(void) {
  cuda_calls *calls = &cuda;
  if (calls->handle) return PROBE_OK;
  calls->handle = dlopen("libcuda.so.1", RTLD_NOW);
  if (!calls->handle) return not_loaded("load", "libcuda.so.1");
  PROBE_CUDA(LOAD)
  if (!cuda.cuInit) return not_loaded("load", "libcuda.so.1");
  CUresult result = cuda.cuInit(0);
  return result == CUDA_SUCCESS ? PROBE_OK : refused("cuInit", result);
}

int open_nvml(void) {
  nvml_calls *calls = &nvml;
  if (calls->handle) return PROBE_OK;
  calls->handle = dlopen("libnvidia-ml.so.1", RTLD_NOW);
  if (!calls->handle) return not_loaded("load", "libnvidia-ml.so.1");
  PROBE_NVML(LOAD)
  nvmlReturn_t result = nvml.nvmlInit_v2 ? nvml.nvmlInit_v2() : NVML_ERROR_FUNCTION_NOT_FOUND;
  if (result == NVML_SUCCESS) return PROBE_OK;
  line("nvmlInit");
  field_bool("ok", false);
  field_signed("nvmlError", result);
  if (nvml.nvmlErrorString) field_text("reason", nvml.nvmlErrorString(result));
  line_end();
  return PROBE_REFUSED;
}

int open_device(int device) {
  CUcontext context;
  CUdevice handle;
  int code = open_cuda();
  if (code != PROBE_OK) return code;
  CUresult result = cuda.cuDeviceGet(&handle, device);
  if (result != CUDA_SUCCESS) return refused("cuDeviceGet", result);
  result = cuda.cuDevicePrimaryCtxRetain(&context, handle);
  if (result != CUDA_SUCCESS) return refused("cuDevicePrimaryCtxRetain", result);
  result = cuda.cuCtxSetCurrent(context);
  return result == CUDA_SUCCESS ? PROBE_OK : refused("cuCtxSetCurrent", result);
}

/* ---- small things -------------------------------------------------------- */

void uuid_text(const CUuuid *uuid, char out[41]) {
  const unsigned char *b = uuid->bytes;
  snprintf(out, 41, "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7],
           b[8], b[9], b[10], b[11], b[12], b[13], b[14], b[15]);
}

uint64_t wall_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

void nap_ns(uint64_t ns) {
  struct timespec left = {(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)};
  while (nanosleep(&left, &left) != 0 && errno == EINTR) {
  }
}
