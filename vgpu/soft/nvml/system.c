/* system.c - versions, result texts, process names. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "library.h"

EXPORT const char *nvmlErrorString(nvmlReturn_t result) {
  static const char *const texts[] = {
      [NVML_SUCCESS] = "Success",
      [NVML_ERROR_UNINITIALIZED] = "Uninitialized",
      [NVML_ERROR_INVALID_ARGUMENT] = "Invalid Argument",
      [NVML_ERROR_NOT_SUPPORTED] = "Not Supported",
      [NVML_ERROR_NO_PERMISSION] = "Insufficient Permissions",
      [NVML_ERROR_ALREADY_INITIALIZED] = "Already Initialized",
      [NVML_ERROR_NOT_FOUND] = "Not Found",
      [NVML_ERROR_INSUFFICIENT_SIZE] = "Insufficient Size",
      [NVML_ERROR_INSUFFICIENT_POWER] = "Insufficient External Power",
      [NVML_ERROR_DRIVER_NOT_LOADED] = "Driver Not Loaded",
      [NVML_ERROR_TIMEOUT] = "Timeout",
      [NVML_ERROR_IRQ_ISSUE] = "Interrupt Request Issue",
      [NVML_ERROR_LIBRARY_NOT_FOUND] = "NVML Shared Library Not Found",
      [NVML_ERROR_FUNCTION_NOT_FOUND] = "Function Not Found",
      [NVML_ERROR_CORRUPTED_INFOROM] = "Corrupted infoROM",
      [NVML_ERROR_GPU_IS_LOST] = "GPU is lost",
      [NVML_ERROR_RESET_REQUIRED] = "GPU requires reset",
      [NVML_ERROR_OPERATING_SYSTEM] = "GPU access blocked by the operating system",
      [NVML_ERROR_LIB_RM_VERSION_MISMATCH] = "Driver/library version mismatch",
      [NVML_ERROR_IN_USE] = "In use by another client",
      [NVML_ERROR_MEMORY] = "Insufficient Memory",
      [NVML_ERROR_NO_DATA] = "No data",
      [NVML_ERROR_VGPU_ECC_NOT_SUPPORTED] = "vGPU ECC not supported",
      [NVML_ERROR_INSUFFICIENT_RESOURCES] = "Insufficient Resources",
      [NVML_ERROR_FREQ_NOT_SUPPORTED] = "Invalid Frequency",
      [NVML_ERROR_ARGUMENT_VERSION_MISMATCH] = "Argument version mismatch",
      [NVML_ERROR_DEPRECATED] = "Deprecated",
      [NVML_ERROR_NOT_READY] = "Not ready",
      [NVML_ERROR_GPU_NOT_FOUND] = "No supported GPUs were found",
      [NVML_ERROR_INVALID_STATE] = "Invalid state",
  };
  if (result < 0 || (size_t)result >= sizeof texts / sizeof texts[0] || !texts[result]) return "Unknown Error";
  return texts[result];
}

static nvmlReturn_t version_text(char *out, unsigned int length, const char *from, size_t size, const char *call) {
  char text[64];
  nvmlReturn_t result = nvml_ready(call);
  if (result != NVML_SUCCESS) return result;
  soft_text(text, sizeof text, from, size);
  return nvml_text(out, length, text);
}

EXPORT nvmlReturn_t nvmlSystemGetDriverVersion(char *out, unsigned int length) {
  if (!nvml_region.state) return NVML_ERROR_UNINITIALIZED;
  return version_text(out, length, nvml_region.state->header.driver_version, 32, __func__);
}

EXPORT nvmlReturn_t nvmlSystemGetNVMLVersion(char *out, unsigned int length) {
  if (!nvml_region.state) return NVML_ERROR_UNINITIALIZED;
  return version_text(out, length, nvml_region.state->header.nvml_version, 32, __func__);
}

EXPORT nvmlReturn_t nvmlSystemGetDriverBranch(nvmlSystemDriverBranchInfo_v1_t *branch, unsigned int length) {
  char text[16];
  nvmlReturn_t result = nvml_ready(__func__);
  if (result != NVML_SUCCESS) return result;
  if (!branch) return NVML_ERROR_INVALID_ARGUMENT;
  if (branch->version != NVML_ABI_STRUCT_VERSION(nvmlSystemDriverBranchInfo_v1_t, 1)) return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
  snprintf(text, sizeof text, "r%u_00", nvml_region.state->header.driver_branch % 10000);
  return nvml_text(branch->branch, length < sizeof branch->branch ? length : sizeof branch->branch, text);
}

static nvmlReturn_t cuda_version(int *out, const char *call) {
  nvmlReturn_t result = nvml_ready(call);
  if (result != NVML_SUCCESS) return result;
  if (!out) return NVML_ERROR_INVALID_ARGUMENT;
  *out = (int)nvml_region.state->header.cuda_version;
  return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *out) { return cuda_version(out, __func__); }
EXPORT nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *out) { return cuda_version(out, __func__); }

EXPORT nvmlReturn_t nvmlSystemGetProcessName(unsigned int pid, char *name, unsigned int length) {
  char path[64], text[1024];
  nvmlReturn_t result = nvml_ready(__func__);
  if (result != NVML_SUCCESS) return result;
  if (!name || !length) return NVML_ERROR_INVALID_ARGUMENT;
  snprintf(path, sizeof path, "/proc/%u/cmdline", pid);
  int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return NVML_ERROR_NOT_FOUND;
  ssize_t n = read(fd, text, sizeof text - 1);
  close(fd);
  if (n <= 0) return NVML_ERROR_NOT_FOUND;
  text[n] = 0; /* the first word: arguments are parted by zeros */
  soft_text(name, length, text, sizeof text);
  return NVML_SUCCESS;
}
