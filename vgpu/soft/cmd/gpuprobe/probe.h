/*
 * probe.h - what the subcommands of gpuprobe share.
 *
 * gpuprobe is a small CUDA program for pods and tests. It links neither
 * libcuda nor NVML and opens both by name, as programs with a static CUDA
 * runtime do, so it sees whatever the loader gives a container.
 *
 * Each step prints one JSON line on stdout. Exit status: 0 all went well, 1
 * something was refused (the line has CUDA's error), 2 wrong usage.
 */
#ifndef PROBE_H
#define PROBE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../../../lib/include/cuda_abi.h"
#include "../../../lib/include/nvml_abi.h"

enum { PROBE_OK = 0, PROBE_REFUSED = 1, PROBE_USAGE = 2 };

/* Entry points that the probe calls; NULL where the library lacks one. */
#define PROBE_CUDA(F)                                                                                                                      \
  F(cuInit) F(cuDriverGetVersion) F(cuGetErrorName) F(cuDeviceGet) F(cuDeviceGetCount) F(cuDeviceGetName) F(cuDeviceGetUuid) F(cuDeviceGetAttribute) \
  F(cuDeviceTotalMem_v2) F(cuDeviceGetPCIBusId) F(cuDevicePrimaryCtxRetain) F(cuDevicePrimaryCtxRelease_v2) F(cuCtxSetCurrent)             \
  F(cuCtxSynchronize) F(cuMemGetInfo_v2) F(cuMemAlloc_v2) F(cuMemAlloc) F(cuMemAllocPitch_v2) F(cuMemAllocManaged) F(cuMemFree_v2)         \
  F(cuArray3DCreate_v2) F(cuArrayDestroy)                                                                                                  \
  F(cuMemAllocAsync) F(cuMemFreeAsync) F(cuMemCreate) F(cuMemRelease) F(cuMemMap) F(cuMemUnmap) F(cuMemAddressReserve) F(cuMemAddressFree) \
  F(cuMemSetAccess) F(cuMemGetAllocationGranularity) F(cuMemsetD8_v2) F(cuMemcpyHtoD_v2) F(cuMemcpyDtoH_v2) F(cuModuleLoadData)            \
  F(cuModuleGetFunction) F(cuLaunchKernel) F(cuStreamCreate) F(cuStreamSynchronize) F(cuStreamDestroy_v2) F(cuEventCreate)                 \
  F(cuEventRecord) F(cuEventSynchronize) F(cuEventElapsedTime) F(cuEventDestroy_v2) F(cuStreamBeginCapture_v2) F(cuStreamEndCapture)       \
  F(cuGetProcAddress) F(cuGetProcAddress_v2)
#define PROBE_NVML(F)                                                                                                                      \
  F(nvmlInit_v2) F(nvmlShutdown) F(nvmlErrorString) F(nvmlDeviceGetCount_v2) F(nvmlDeviceGetHandleByIndex_v2) F(nvmlDeviceGetHandleByUUID) \
  F(nvmlDeviceGetUUID) F(nvmlDeviceGetName) F(nvmlDeviceGetMemoryInfo) F(nvmlDeviceGetMemoryInfo_v2)                                       \
  F(nvmlDeviceGetComputeRunningProcesses_v3) F(nvmlDeviceGetUtilizationRates) F(nvmlSystemGetDriverVersion)

#define PROBE_MEMBER(name) __typeof__(name) *name;
typedef struct {
  void *handle;
  PROBE_CUDA(PROBE_MEMBER)
} cuda_calls;
typedef struct {
  void *handle;
  PROBE_NVML(PROBE_MEMBER)
} nvml_calls;
#undef PROBE_MEMBER

extern cuda_calls cuda;
extern nvml_calls nvml;

/* Opens libcuda and initialises it. Prints a line and says so when it can't. */
int open_cuda(void);
/* The same for NVML. */
int open_nvml(void);
/* open_cuda, then the primary context of a device, made current. */
int open_device(int device);

/* One JSON line: begin, fields, end. */
void line(const char *step);
void field_text(const char *name, const char *value);
void field_number(const char *name, uint64_t value);
void field_signed(const char *name, int64_t value);
void field_real(const char *name, double value);
void field_bool(const char *name, bool value);
void field_result(CUresult result); /* ok, and error and errorName when it isn't */
void line_end(void);
/* A line with a refusal. Gives PROBE_REFUSED. */
int refused(const char *step, CUresult result);
int usage(const char *format, ...) __attribute__((format(printf, 1, 2)));

void uuid_text(const CUuuid *uuid, char out[41]);
uint64_t wall_ns(void);
void nap_ns(uint64_t ns);

/* The conformance kernels' text. */
extern const char probe_kernel_text[];
int spin_function(CUfunction *out);
/* Iterations of carve_spin that last so long on the current device in a launch of that shape (calibrated; 1 ns each on a
 * software GPU). The shape matters: threads that share a processor share its time. */
int spin_iterations(CUfunction spin, unsigned int blocks, unsigned int threads, uint64_t ns, uint64_t *out);
/* Blocks of 1024 threads that fill the device: kernels of other streams wait. */
unsigned int card_width(int device);

/* ---- a share, seen from inside (share.c) ---- */

typedef struct {
  bool process_known;           /* NVML lists this process under its own pid */
  uint64_t process_bytes;       /* what the driver says that it has on the card */
  uint64_t card_bytes;          /* in use on the whole card */
  bool charged_known;           /* there is a share */
  uint64_t charged_bytes;       /* what its line of the usage file says */
} figures;

/* Finds the driver's own NVML, past carve's front, and this process' line of the usage file. After open_device. */
int open_figures(int device);
figures figures_now(void);
/* The driver's library behind carve's front; NULL where there is no front. */
void *driver_behind(const char *library);

/* ---- the clock (clock.c) ---- */

/* Before any of the others, with CUDA loaded. */
void find_clock(void);
bool on_soft_clock(void);
uint64_t now_ns(void);
void sleep_until(uint64_t until);
/* What this process waits for from here on isn't time on the software GPU. */
void leave_clock(void);

/* ---- the ways to get memory (alloc.c) ---- */

typedef enum { BY_ALLOC, BY_PITCH, BY_MANAGED, BY_ASYNC, BY_VMM, BY_LEGACY, BY_ARRAY, WAYS } way;

typedef struct {
  CUdeviceptr pointer;
  CUmemGenericAllocationHandle handle;
  CUarray array;
  size_t bytes; /* granted, as far as the call says */
  way by;
} piece;

const char *way_name(way by);
CUresult take_piece(way by, uint64_t bytes, int device, piece *out);
CUresult give_piece(const piece *p);

/* Options common to subcommands: takes --NAME VALUE out of argv. NULL when absent. */
const char *take_option(int *argc, char **argv, const char *name);
bool take_flag(int *argc, char **argv, const char *name);

int probe_info(int argc, char **argv);
int probe_alloc(int argc, char **argv);
int probe_charges(int argc, char **argv);
int probe_refusals(int argc, char **argv);
int probe_costs(int argc, char **argv);
int probe_slices(int argc, char **argv);
int probe_fill(int argc, char **argv);
int probe_launch(int argc, char **argv);
int probe_load(int argc, char **argv);
int probe_chain(int argc, char **argv);
int probe_race(int argc, char **argv);
int probe_paths(int argc, char **argv);
int probe_symbols(int argc, char **argv);
int probe_serve(int argc, char **argv);

#endif
