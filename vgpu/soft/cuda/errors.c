/* errors.c - names and texts of results, versions, and what is exported but not modelled. */
#include <string.h>

#include "driver.h"
#include "personality.h"
#include "unmodelled.h"

typedef struct { CUresult code; const char *name, *text; } row;

#define ROW(name, text) {name, #name, text}
static const row rows[] = {
    ROW(CUDA_SUCCESS, "no error"),
    ROW(CUDA_ERROR_INVALID_VALUE, "invalid argument"),
    ROW(CUDA_ERROR_OUT_OF_MEMORY, "out of memory"),
    ROW(CUDA_ERROR_NOT_INITIALIZED, "initialization error"),
    ROW(CUDA_ERROR_DEINITIALIZED, "driver is shutting down"),
    ROW(CUDA_ERROR_PROFILER_DISABLED, "profiler is disabled"),
    ROW(CUDA_ERROR_PROFILER_NOT_INITIALIZED, "profiler is not initialized"),
    ROW(CUDA_ERROR_PROFILER_ALREADY_STARTED, "profiler runs already"),
    ROW(CUDA_ERROR_PROFILER_ALREADY_STOPPED, "profiler is stopped already"),
    ROW(CUDA_ERROR_STUB_LIBRARY, "the library is a stub"),
    ROW(CUDA_ERROR_DEVICE_UNAVAILABLE, "device is busy or unavailable"),
    ROW(CUDA_ERROR_NO_DEVICE, "no device is detected"),
    ROW(CUDA_ERROR_INVALID_DEVICE, "invalid device ordinal"),
    ROW(CUDA_ERROR_DEVICE_NOT_LICENSED, "device has no licence"),
    ROW(CUDA_ERROR_INVALID_IMAGE, "kernel image is invalid"),
    ROW(CUDA_ERROR_INVALID_CONTEXT, "invalid device context"),
    ROW(CUDA_ERROR_CONTEXT_ALREADY_CURRENT, "context is current already"),
    ROW(CUDA_ERROR_MAP_FAILED, "mapping failed"),
    ROW(CUDA_ERROR_UNMAP_FAILED, "unmapping failed"),
    ROW(CUDA_ERROR_ARRAY_IS_MAPPED, "array is mapped"),
    ROW(CUDA_ERROR_ALREADY_MAPPED, "resource is mapped already"),
    ROW(CUDA_ERROR_NO_BINARY_FOR_GPU, "no kernel image for this device"),
    ROW(CUDA_ERROR_ALREADY_ACQUIRED, "resource is acquired already"),
    ROW(CUDA_ERROR_NOT_MAPPED, "resource is not mapped"),
    ROW(CUDA_ERROR_NOT_MAPPED_AS_ARRAY, "resource is not mapped as an array"),
    ROW(CUDA_ERROR_NOT_MAPPED_AS_POINTER, "resource is not mapped as a pointer"),
    ROW(CUDA_ERROR_ECC_UNCORRECTABLE, "uncorrectable memory error"),
    ROW(CUDA_ERROR_UNSUPPORTED_LIMIT, "limit is not supported"),
    ROW(CUDA_ERROR_CONTEXT_ALREADY_IN_USE, "device is in use by another thread"),
    ROW(CUDA_ERROR_PEER_ACCESS_UNSUPPORTED, "peer access is not supported between these devices"),
    ROW(CUDA_ERROR_INVALID_PTX, "PTX compilation failed"),
    ROW(CUDA_ERROR_INVALID_GRAPHICS_CONTEXT, "invalid graphics context"),
    ROW(CUDA_ERROR_NVLINK_UNCORRECTABLE, "uncorrectable NVLink error"),
    ROW(CUDA_ERROR_JIT_COMPILER_NOT_FOUND, "PTX compiler library not found"),
    ROW(CUDA_ERROR_UNSUPPORTED_PTX_VERSION, "the PTX is of a newer version than the driver"),
    ROW(CUDA_ERROR_JIT_COMPILATION_DISABLED, "PTX compilation is disabled"),
    ROW(CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY, "execution affinity is not supported"),
    ROW(CUDA_ERROR_UNSUPPORTED_DEVSIDE_SYNC, "synchronisation on the device is not supported"),
    ROW(CUDA_ERROR_INVALID_SOURCE, "kernel source is invalid"),
    ROW(CUDA_ERROR_FILE_NOT_FOUND, "file not found"),
    ROW(CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND, "shared object symbol not found"),
    ROW(CUDA_ERROR_SHARED_OBJECT_INIT_FAILED, "shared object could not be initialized"),
    ROW(CUDA_ERROR_OPERATING_SYSTEM, "operating system call failed"),
    ROW(CUDA_ERROR_INVALID_HANDLE, "invalid resource handle"),
    ROW(CUDA_ERROR_ILLEGAL_STATE, "operation not possible in this state"),
    ROW(CUDA_ERROR_LOSSY_QUERY, "query would lose information"),
    ROW(CUDA_ERROR_NOT_FOUND, "named symbol not found"),
    ROW(CUDA_ERROR_NOT_READY, "device not ready"),
    ROW(CUDA_ERROR_ILLEGAL_ADDRESS, "illegal memory access"),
    ROW(CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, "too many resources requested for launch"),
    ROW(CUDA_ERROR_LAUNCH_TIMEOUT, "the launch timed out"),
    ROW(CUDA_ERROR_LAUNCH_INCOMPATIBLE_TEXTURING, "incompatible texturing mode"),
    ROW(CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED, "peer access is enabled already"),
    ROW(CUDA_ERROR_PEER_ACCESS_NOT_ENABLED, "peer access is not enabled"),
    ROW(CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE, "primary context is active"),
    ROW(CUDA_ERROR_CONTEXT_IS_DESTROYED, "context is destroyed"),
    ROW(CUDA_ERROR_ASSERT, "assertion failed on the device"),
    ROW(CUDA_ERROR_TOO_MANY_PEERS, "too many peers"),
    ROW(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, "host memory is registered already"),
    ROW(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, "host memory is not registered"),
    ROW(CUDA_ERROR_HARDWARE_STACK_ERROR, "hardware stack error"),
    ROW(CUDA_ERROR_ILLEGAL_INSTRUCTION, "illegal instruction"),
    ROW(CUDA_ERROR_MISALIGNED_ADDRESS, "misaligned address"),
    ROW(CUDA_ERROR_INVALID_ADDRESS_SPACE, "invalid address space"),
    ROW(CUDA_ERROR_INVALID_PC, "invalid program counter"),
    ROW(CUDA_ERROR_LAUNCH_FAILED, "launch failed"),
    ROW(CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE, "too many blocks in cooperative launch"),
    ROW(CUDA_ERROR_NOT_PERMITTED, "operation not permitted"),
    ROW(CUDA_ERROR_NOT_SUPPORTED, "operation not supported"),
    ROW(CUDA_ERROR_SYSTEM_NOT_READY, "system is not ready"),
    ROW(CUDA_ERROR_SYSTEM_DRIVER_MISMATCH, "display driver and CUDA driver do not match"),
    ROW(CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE, "forward compatibility is not supported on this device"),
    ROW(CUDA_ERROR_MPS_CONNECTION_FAILED, "MPS connection failed"),
    ROW(CUDA_ERROR_MPS_RPC_FAILURE, "MPS call failed"),
    ROW(CUDA_ERROR_MPS_SERVER_NOT_READY, "MPS server is not ready"),
    ROW(CUDA_ERROR_MPS_MAX_CLIENTS_REACHED, "too many MPS clients"),
    ROW(CUDA_ERROR_MPS_MAX_CONNECTIONS_REACHED, "too many MPS connections"),
    ROW(CUDA_ERROR_MPS_CLIENT_TERMINATED, "MPS client was terminated"),
    ROW(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "not permitted while the stream captures"),
    ROW(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "an earlier error ended the capture"),
    ROW(CUDA_ERROR_STREAM_CAPTURE_MERGE, "would merge two captures"),
    ROW(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, "capture was not begun in this stream"),
    ROW(CUDA_ERROR_STREAM_CAPTURE_UNJOINED, "capture has work that was not joined"),
    ROW(CUDA_ERROR_STREAM_CAPTURE_ISOLATION, "would depend on work outside of the capture"),
    ROW(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, "would depend on a capture implicitly"),
    ROW(CUDA_ERROR_CAPTURED_EVENT, "event was recorded in a capture"),
    ROW(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD, "capture belongs to another thread"),
    ROW(CUDA_ERROR_TIMEOUT, "wait timed out"),
    ROW(CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE, "graph can't be updated so"),
    ROW(CUDA_ERROR_EXTERNAL_DEVICE, "error of an external device"),
    ROW(CUDA_ERROR_INVALID_CLUSTER_SIZE, "invalid cluster size"),
    ROW(CUDA_ERROR_FUNCTION_NOT_LOADED, "function is not loaded"),
    ROW(CUDA_ERROR_INVALID_RESOURCE_TYPE, "invalid resource type"),
    ROW(CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION, "invalid resource configuration"),
    ROW(CUDA_ERROR_UNKNOWN, "unknown error"),
};

static const row *row_of(CUresult code) {
  for (unsigned int i = 0; i < sizeof rows / sizeof rows[0]; i++)
    if (rows[i].code == code) return &rows[i];
  return NULL;
}

EXPORT CUresult cuGetErrorName(CUresult error, const char **name) {
  const row *at = row_of(error);
  if (!name) return CUDA_ERROR_INVALID_VALUE;
  *name = at ? at->name : NULL;
  return at ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuGetErrorString(CUresult error, const char **text) {
  const row *at = row_of(error);
  if (!text) return CUDA_ERROR_INVALID_VALUE;
  *text = at ? at->text : NULL;
  return at ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuDriverGetVersion(int *version) {
  if (!version) return CUDA_ERROR_INVALID_VALUE;
  *version = soft_cuda_version;
  return CUDA_SUCCESS;
}

/* The driver's private tables; none is offered. */
EXPORT CUresult cuGetExportTable(const void **table, const CUuuid *id) {
  if (!table || !id) return CUDA_ERROR_INVALID_VALUE;
  *table = NULL;
  return CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuProfilerStart(void) {
  ENTER();
  LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuProfilerStop(void) {
  ENTER();
  LEAVE(CUDA_SUCCESS);
}

CUresult soft_unmodelled(const char *symbol) {
  soft_state *state = the_driver.region.state;
  if (the_driver.initialised && state) {
    /* a count for whoever wonders what a program wanted; a torn name does no harm */
    __atomic_fetch_add(&state->header.unmodelled_calls, 1, __ATOMIC_RELAXED);
    strncpy(state->header.unmodelled_last, symbol, sizeof state->header.unmodelled_last - 1);
  }
  return the_driver.initialised ? CUDA_ERROR_NOT_SUPPORTED : CUDA_ERROR_NOT_INITIALIZED;
}
