/*
 * slices.c - how long a card stays with one program before another one has its turn, and for how long it is away.
 *
 * Short kernels of one length run back to back, an event behind each. While another program has the card, one of them
 * takes longer: by the other's turn and two changes. What lies between two such kernels is this program's own turn.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../units.h"
#include "probe.h"

enum { BATCH = 256, MOST = 20000 };

static int by_value(const void *a, const void *b) {
  float x = *(const float *)a, y = *(const float *)b;
  return (x > y) - (x < y);
}

static void spread(const char *prefix, float *values, unsigned int n) {
  static const struct { const char *name; unsigned int percent; } at[] = {{"P10", 10}, {"P50", 50}, {"P90", 90}, {"Max", 100}};
  qsort(values, n, sizeof values[0], by_value);
  for (unsigned int i = 0; n && i < sizeof at / sizeof at[0]; i++) {
    char name[64];
    snprintf(name, sizeof name, "%s%sMicroseconds", prefix, at[i].name);
    unsigned int index = n * at[i].percent / 100;
    field_real(name, 1000.0 * (double)values[index < n ? index : n - 1]);
  }
}

int probe_slices(int argc, char **argv) {
  static float times[MOST], sorted[MOST], runs[MOST], gaps[MOST];
  static CUevent events[BATCH + 1];
  uint64_t length_ns = 1000000000, kernel_ns = 50000, device = 0, iterations;
  CUfunction spin;
  CUstream stream;
  const char *option;
  bool wait = take_flag(&argc, argv, "--wait");
  if ((option = take_option(&argc, argv, "--for")) && (!units_nanoseconds(option, &length_ns) || !length_ns)) return usage("--for can't be %s", option);
  if ((option = take_option(&argc, argv, "--kernel")) && (!units_nanoseconds(option, &kernel_ns) || !kernel_ns)) return usage("--kernel can't be %s", option);
  if ((option = take_option(&argc, argv, "--device")) && (!units_number(option, &device) || device > 64)) return usage("--device can't be %s", option);
  if (argc) return usage("slices takes no %s", argv[0]);
  int code = open_device((int)device);
  if (code == PROBE_OK) code = spin_function(&spin);
  unsigned int blocks = code == PROBE_OK ? card_width((int)device) : 1;
  if (code == PROBE_OK) code = spin_iterations(spin, blocks, 1024, kernel_ns, &iterations);
  if (code != PROBE_OK) return code;
  CUresult result = cuda.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING);
  for (unsigned int i = 0; i <= BATCH && result == CUDA_SUCCESS; i++) result = cuda.cuEventCreate(&events[i], CU_EVENT_DEFAULT);
  if (result != CUDA_SUCCESS) return refused("slices", result);
  line("ready");
  field_number("pid", (uint64_t)getpid());
  line_end();
  if (wait) {
    char text[64];
    if (!fgets(text, sizeof text, stdin)) return PROBE_OK;
  }
  CUdeviceptr none = 0;
  void *parameters[] = {&iterations, &none};
  unsigned int count = 0, starts[MOST / BATCH + 1], batches = 0;
  uint64_t began = wall_ns(), end = began + length_ns;
  while (result == CUDA_SUCCESS && wall_ns() < end && count + BATCH <= MOST) {
    result = cuda.cuEventRecord(events[0], stream);
    for (unsigned int i = 1; i <= BATCH && result == CUDA_SUCCESS; i++) {
      result = cuda.cuLaunchKernel(spin, blocks, 1, 1, 1024, 1, 1, 0, stream, parameters, NULL);
      if (result == CUDA_SUCCESS) result = cuda.cuEventRecord(events[i], stream);
    }
    if (result == CUDA_SUCCESS) result = cuda.cuStreamSynchronize(stream);
    starts[batches++] = count;
    for (unsigned int i = 0; i < BATCH && result == CUDA_SUCCESS; i++) result = cuda.cuEventElapsedTime(&times[count++], events[i], events[i + 1]);
  }
  double took = (double)(wall_ns() - began);
  if (result != CUDA_SUCCESS || !count) return refused("slices", result);
  memcpy(sorted, times, count * sizeof times[0]);
  qsort(sorted, count, sizeof sorted[0], by_value);
  /* The tenth part from below: more than half of all could be interrupted. */
  float usual = sorted[count / 10], threshold = usual * 1.5f + 0.05f, run = 0;
  unsigned int gap_count = 0, run_count = 0, next = 0;
  bool whole = false; /* the run began with a gap */
  for (unsigned int i = 0; i < count; i++) {
    if (next < batches && starts[next] == i) {
      next++; /* between batches the program itself was away */
      run = 0;
      whole = false;
    }
    if (times[i] <= threshold) {
      run += times[i];
      continue;
    }
    /* Where in the kernel it was interrupted isn't known: half of it counts to either side. */
    gaps[gap_count++] = times[i] - usual;
    if (whole) runs[run_count++] = run + usual;
    run = 0;
    whole = true;
  }
  line("slices");
  field_bool("ok", true);
  field_number("kernels", count);
  field_real("kernelMicroseconds", 1000.0 * (double)usual);
  field_number("interruptions", gap_count);
  spread("away", gaps, gap_count);
  field_number("wholeTurns", run_count);
  spread("turn", runs, run_count);
  field_real("gotPercent", 100.0 * (double)usual * 1e6 * count / took);
  line_end();
  return PROBE_OK;
}
