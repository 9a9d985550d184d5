/* launch.c - kernels with a duration. */
#include <string.h>

#include "../units.h"
#include "probe.h"

__asm__(".section .rodata\n"
        ".globl probe_kernel_text\n"
        "probe_kernel_text:\n"
        ".incbin \"" SOFT_KERNEL_FILE "\"\n"
        ".byte 0\n"
        ".previous\n");

int spin_function(CUfunction *out) {
  CUmodule module;
  CUresult result = cuda.cuModuleLoadData(&module, probe_kernel_text);
  if (result == CUDA_SUCCESS) result = cuda.cuModuleGetFunction(out, module, "carve_spin");
  return result == CUDA_SUCCESS ? PROBE_OK : refused("module", result);
}

static CUresult timed_spin(CUfunction spin, unsigned int blocks, unsigned int threads, uint64_t iterations, float *ms) {
  CUdeviceptr none = 0;
  void *parameters[] = {&iterations, &none};
  CUevent start, end;
  CUresult result = cuda.cuEventCreate(&start, CU_EVENT_DEFAULT);
  if (result != CUDA_SUCCESS) return result;
  result = cuda.cuEventCreate(&end, CU_EVENT_DEFAULT);
  if (result == CUDA_SUCCESS) result = cuda.cuEventRecord(start, NULL);
  if (result == CUDA_SUCCESS) result = cuda.cuLaunchKernel(spin, blocks, 1, 1, threads, 1, 1, 0, NULL, parameters, NULL);
  if (result == CUDA_SUCCESS) result = cuda.cuEventRecord(end, NULL);
  if (result == CUDA_SUCCESS) result = cuda.cuEventSynchronize(end);
  if (result == CUDA_SUCCESS) result = cuda.cuEventElapsedTime(ms, start, end);
  cuda.cuEventDestroy_v2(start);
  cuda.cuEventDestroy_v2(end);
  return result;
}

/* The shortest of three runs of two lengths: their difference has no launch cost in it. */
int spin_iterations(CUfunction spin, unsigned int blocks, unsigned int threads, uint64_t ns, uint64_t *out) {
  enum { SHORT = 20000, LONG = 120000 };
  float best_short = 1e9f, best_long = 1e9f, ms;
  for (int i = 0; i < 3; i++) {
    CUresult result = timed_spin(spin, blocks, threads, SHORT, &ms);
    if (result != CUDA_SUCCESS) return refused("calibrate", result);
    if (ms < best_short) best_short = ms;
    result = timed_spin(spin, blocks, threads, LONG, &ms);
    if (result != CUDA_SUCCESS) return refused("calibrate", result);
    if (ms < best_long) best_long = ms;
  }
  double per_iteration_ns = ((double)best_long - (double)best_short) * 1e6 / (LONG - SHORT);
  if (per_iteration_ns < 0.01) per_iteration_ns = 0.01;
  *out = (uint64_t)((double)ns / per_iteration_ns + 0.5);
  return PROBE_OK;
}

unsigned int card_width(int device) {
  int processors = 0, threads = 0;
  if (!cuda.cuDeviceGetAttribute || cuda.cuDeviceGetAttribute(&processors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device) != CUDA_SUCCESS ||
      cuda.cuDeviceGetAttribute(&threads, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, device) != CUDA_SUCCESS || processors < 1 || threads < 1024)
    return 1;
  return (unsigned int)(processors * (threads / 1024));
}

int probe_launch(int argc, char **argv) {
  enum { MOST_STREAMS = 32 };
  uint64_t count = 10, duration_ns = 1000000, streams = 1, blocks = 1, device = 0, iterations;
  CUfunction spin;
  CUstream on[MOST_STREAMS];
  CUevent start, end;
  float ms = 0;
  const char *option;

  if ((option = take_option(&argc, argv, "--count")) && !units_number(option, &count)) return usage("--count can't be %s", option);
  if ((option = take_option(&argc, argv, "--duration")) && !units_nanoseconds(option, &duration_ns)) return usage("--duration can't be %s", option);
  if ((option = take_option(&argc, argv, "--streams")) && (!units_number(option, &streams) || !streams || streams > MOST_STREAMS))
    return usage("--streams can't be %s", option);
  if ((option = take_option(&argc, argv, "--blocks")) && (!units_number(option, &blocks) || !blocks || blocks > 65535))
    return usage("--blocks can't be %s", option);
  if ((option = take_option(&argc, argv, "--device")) && (!units_number(option, &device) || device > 64)) return usage("--device can't be %s", option);
  if (argc) return usage("launch takes no %s", argv[0]);

  int code = open_device((int)device);
  if (code == PROBE_OK) code = spin_function(&spin);
  if (code == PROBE_OK) code = spin_iterations(spin, (unsigned int)blocks, 32, duration_ns, &iterations);
  if (code != PROBE_OK) return code;
  CUresult result = CUDA_SUCCESS;
  for (uint64_t i = 0; i < streams && result == CUDA_SUCCESS; i++) result = cuda.cuStreamCreate(&on[i], CU_STREAM_DEFAULT);
  if (result == CUDA_SUCCESS) result = cuda.cuEventCreate(&start, CU_EVENT_DEFAULT);
  if (result == CUDA_SUCCESS) result = cuda.cuEventCreate(&end, CU_EVENT_DEFAULT);
  if (result != CUDA_SUCCESS) return refused("launch", result);

  CUdeviceptr none = 0;
  void *parameters[] = {&iterations, &none};
  uint64_t began = wall_ns();
  result = cuda.cuEventRecord(start, NULL); /* the legacy stream: before and after all others */
  for (uint64_t i = 0; i < count && result == CUDA_SUCCESS; i++)
    result = cuda.cuLaunchKernel(spin, (unsigned int)blocks, 1, 1, 32, 1, 1, 0, on[i % streams], parameters, NULL);
  uint64_t queued = wall_ns();
  if (result == CUDA_SUCCESS) result = cuda.cuEventRecord(end, NULL);
  if (result == CUDA_SUCCESS) result = cuda.cuEventSynchronize(end);
  uint64_t ended = wall_ns();
  if (result == CUDA_SUCCESS) result = cuda.cuEventElapsedTime(&ms, start, end);
  line("launch");
  field_result(result);
  field_number("count", count);
  field_number("durationNanoseconds", duration_ns);
  field_number("iterations", iterations);
  field_number("streams", streams);
  field_real("cardMilliseconds", ms);
  field_real("queueMilliseconds", (double)(queued - began) / 1e6);
  field_real("wallMilliseconds", (double)(ended - began) / 1e6);
  line_end();
  return result == CUDA_SUCCESS ? PROBE_OK : PROBE_REFUSED;
}
