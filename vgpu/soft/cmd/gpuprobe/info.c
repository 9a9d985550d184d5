/* info.c - what a program sees of each card. */
#include <string.h>

#include "probe.h"

static void nvml_fields(const char *uuid) {
  nvmlDevice_t device;
  nvmlMemory_t v1 = {0};
  nvmlMemory_v2_t v2 = {.version = NVML_MEMORY_V2_VERSION};
  unsigned int processes = 0;
  nvmlReturn_t found = nvml.nvmlDeviceGetHandleByUUID(uuid, &device);
  field_signed("nvmlResult", found);
  if (found != NVML_SUCCESS) return;
  if (nvml.nvmlDeviceGetMemoryInfo(device, &v1) == NVML_SUCCESS) {
    field_number("nvmlTotalBytes", v1.total);
    field_number("nvmlUsedBytes", v1.used);
    field_number("nvmlFreeBytes", v1.free);
  }
  if (nvml.nvmlDeviceGetMemoryInfo_v2 && nvml.nvmlDeviceGetMemoryInfo_v2(device, &v2) == NVML_SUCCESS) {
    field_number("nvml2TotalBytes", v2.total);
    field_number("nvml2ReservedBytes", v2.reserved);
    field_number("nvml2UsedBytes", v2.used);
    field_number("nvml2FreeBytes", v2.free);
  }
  if (nvml.nvmlDeviceGetComputeRunningProcesses_v3) {
    nvmlReturn_t listed = nvml.nvmlDeviceGetComputeRunningProcesses_v3(device, &processes, NULL);
    if (listed == NVML_SUCCESS || listed == NVML_ERROR_INSUFFICIENT_SIZE) field_number("nvmlProcesses", processes);
  }
}

static int card(int ordinal, bool with_nvml) {
  CUdevice device;
  CUcontext context;
  CUuuid uuid;
  char name[96] = "", text[41], bus[32] = "";
  size_t left = 0, total = 0, whole = 0;
  int processors = 0;

  CUresult result = cuda.cuDeviceGet(&device, ordinal);
  if (result == CUDA_SUCCESS) result = cuda.cuDeviceGetUuid(&uuid, device);
  if (result == CUDA_SUCCESS) result = cuda.cuDeviceGetName(name, sizeof name, device);
  if (result == CUDA_SUCCESS) result = cuda.cuDeviceGetPCIBusId(bus, sizeof bus, device);
  if (result == CUDA_SUCCESS) result = cuda.cuDeviceTotalMem_v2(&whole, device);
  if (result != CUDA_SUCCESS) return refused("card", result);
  uuid_text(&uuid, text);
  result = cuda.cuDevicePrimaryCtxRetain(&context, device);
  if (result == CUDA_SUCCESS) result = cuda.cuCtxSetCurrent(context);
  if (result == CUDA_SUCCESS) result = cuda.cuMemGetInfo_v2(&left, &total);
  line("card");
  field_result(result);
  field_signed("device", ordinal);
  field_text("uuid", text);
  field_text("name", name);
  field_text("pci", bus);
  field_number("cudaFreeBytes", left);
  field_number("cudaTotalBytes", total);
  field_number("deviceTotalBytes", whole);
  if (cuda.cuDeviceGetAttribute(&processors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device) == CUDA_SUCCESS)
    field_number("multiprocessors", (uint64_t)processors);
  if (with_nvml) nvml_fields(text);
  line_end();
  return result == CUDA_SUCCESS ? PROBE_OK : PROBE_REFUSED;
}

int probe_info(int argc, char **argv) {
  int count = 0, version = 0, code;
  (void)argv;
  if (argc) return usage("info takes no arguments");
  code = open_cuda();
  if (code != PROBE_OK) return code;
  bool with_nvml = open_nvml() == PROBE_OK;
  CUresult result = cuda.cuDeviceGetCount(&count);
  if (result != CUDA_SUCCESS) return refused("cuDeviceGetCount", result);
  cuda.cuDriverGetVersion(&version);
  line("driver");
  field_bool("ok", true);
  field_signed("cudaVersion", version);
  field_signed("devices", count);
  if (with_nvml) {
    char driver[96] = "";
    unsigned int cards = 0;
    if (nvml.nvmlSystemGetDriverVersion(driver, sizeof driver) == NVML_SUCCESS) field_text("driver", driver);
    if (nvml.nvmlDeviceGetCount_v2(&cards) == NVML_SUCCESS) field_number("nvmlCards", cards);
  }
  line_end();
  for (int i = 0; i < count; i++) {
    int one = card(i, with_nvml);
    if (one != PROBE_OK) code = one;
  }
  return code == PROBE_OK && !with_nvml ? PROBE_REFUSED : code;
}
