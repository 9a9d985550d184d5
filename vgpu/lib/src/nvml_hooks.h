/* SPDX-License-Identifier: Apache-2.0 */
/*
 * nvml_hooks.h: every function of NVML that the front answers itself, once; see cuda_hooks.h.
 *
 *   X(name, release, what it does)
 */
#ifndef CARVE_NVML_HOOKS_H
#define CARVE_NVML_HOOKS_H

#define CARVE_NVML_HOOKS(X)                                                              \
    X(nvmlDeviceGetMemoryInfo, "1.0", "show the share")                                  \
    X(nvmlDeviceGetMemoryInfo_v2, "R510", "show the share")                              \
    X(nvmlDeviceGetComputeRunningProcesses, "3.0", "list the container's processes")     \
    X(nvmlDeviceGetComputeRunningProcesses_v2, "R470", "list the container's processes") \
    X(nvmlDeviceGetComputeRunningProcesses_v3, "R510", "list the container's processes") \
    X(nvmlDeviceGetGraphicsRunningProcesses, "3.0", "list none of other containers")     \
    X(nvmlDeviceGetGraphicsRunningProcesses_v2, "R470", "list none of other containers") \
    X(nvmlDeviceGetGraphicsRunningProcesses_v3, "R510", "list none of other containers") \
    X(nvmlDeviceGetMPSComputeRunningProcesses, "R450", "list none of other containers")  \
    X(nvmlDeviceGetMPSComputeRunningProcesses_v2, "R470", "list none of other containers") \
    X(nvmlDeviceGetMPSComputeRunningProcesses_v3, "R510", "list none of other containers") \
    X(nvmlDeviceGetRunningProcessDetailList, "R535", "list the container's processes")   \
    X(nvmlDeviceGetProcessUtilization, "R375", "leave out processes of other containers") \
    X(nvmlDeviceGetProcessesUtilizationInfo, "R545", "leave out processes of other containers")

/* Functions that the front calls and doesn't hook. */
#define CARVE_NVML_CALLS(X) X(nvmlDeviceGetUUID)

#endif
