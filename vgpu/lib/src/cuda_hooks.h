/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cuda_hooks.h: every function of the driver that the front answers itself, once.
 *
 * The linker's version script, the prototypes of the hooks, the look-up of the driver's own functions, the answers
 * of cuGetProcAddress, `make hooks` and the tests are all made from this table. Names are as exported.
 *
 *   X(name, release, parameters, what it does, rounding, what it does when the limits can't be read)
 *
 * The release is the CUDA version that brought the entry point; the oracle test compares it with what drivers
 * answer. A hook that the installed driver doesn't have answers CUDA_ERROR_NOT_SUPPORTED. Whoever needs some of the
 * columns takes the rest as "...".
 */
#ifndef CARVE_CUDA_HOOKS_H
#define CARVE_CUDA_HOOKS_H

#define CARVE_HOOKS_LINEAR(X) \
    X(cuMemAlloc, "2.0", (CUdeviceptr_v1 *pointer, unsigned int bytes), \
      "charge", "pages, pieces of 512 bytes up to 1 MiB", "refuse") \
    X(cuMemAlloc_v2, "3.2", (CUdeviceptr *pointer, size_t bytes), \
      "charge", "pages, pieces of 512 bytes up to 1 MiB", "refuse") \
    X(cuMemAllocPitch, "2.0", (CUdeviceptr_v1 *pointer, unsigned int *pitch, unsigned int widthBytes, unsigned int height, unsigned int elementBytes), \
      "charge", "the same, of the real pitch", "refuse") \
    X(cuMemAllocPitch_v2, "3.2", (CUdeviceptr *pointer, size_t *pitch, size_t widthBytes, size_t height, unsigned int elementBytes), \
      "charge", "the same, of the real pitch", "refuse") \
    X(cuMemAllocManaged, "6.0", (CUdeviceptr *pointer, size_t bytes, unsigned int flags), \
      "charge, or count, or refuse, by policy", "pages", "refuse") \
    X(cuMemFree, "2.0", (CUdeviceptr_v1 pointer), \
      "give back", "-", "pass") \
    X(cuMemFree_v2, "3.2", (CUdeviceptr pointer), \
      "give back", "-", "pass")

#define CARVE_HOOKS_VIRTUAL(X) \
    X(cuMemCreate, "10.2", (CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *property, unsigned long long flags), \
      "charge", "pages", "refuse") \
    X(cuMemRelease, "10.2", (CUmemGenericAllocationHandle handle), \
      "give back with the last handle and mapping", "-", "pass") \
    X(cuMemExportToShareableHandle, "10.2", (void *shareable, CUmemGenericAllocationHandle handle, int type, unsigned long long flags), \
      "keep while the descriptor is open", "-", "pass") \
    X(cuMemRetainAllocationHandle, "11.0", (CUmemGenericAllocationHandle *handle, void *address), \
      "count the handle", "-", "pass") \
    X(cuMemMap, "10.2", (CUdeviceptr pointer, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags), \
      "count the mapping", "-", "pass") \
    X(cuMemUnmap, "10.2", (CUdeviceptr pointer, size_t bytes), \
      "give back with the last handle and mapping", "-", "pass") \
    X(cuMulticastCreate, "12.1", (CUmemGenericAllocationHandle *handle, const CUmulticastObjectProp *property), \
      "follow what is bound to it", "-", "pass") \
    X(cuMulticastBindMem, "12.1", (CUmemGenericAllocationHandle object, size_t offset, CUmemGenericAllocationHandle memory, size_t memoryOffset, size_t bytes, unsigned long long flags), \
      "count the binding", "-", "pass") \
    X(cuMulticastBindMem_v2, "13.1", (CUmemGenericAllocationHandle object, CUdevice device, size_t offset, CUmemGenericAllocationHandle memory, size_t memoryOffset, size_t bytes, unsigned long long flags), \
      "count the binding", "-", "pass") \
    X(cuMulticastBindAddr, "12.1", (CUmemGenericAllocationHandle object, size_t offset, CUdeviceptr pointer, size_t bytes, unsigned long long flags), \
      "count the binding", "-", "pass") \
    X(cuMulticastBindAddr_v2, "13.1", (CUmemGenericAllocationHandle object, CUdevice device, size_t offset, CUdeviceptr pointer, size_t bytes, unsigned long long flags), \
      "count the binding", "-", "pass") \
    X(cuMulticastUnbind, "12.1", (CUmemGenericAllocationHandle object, CUdevice device, size_t offset, size_t bytes), \
      "give back with the last handle, mapping and binding", "-", "pass")

#define CARVE_HOOKS_POOL(X) \
    X(cuMemAllocAsync, "11.2", (CUdeviceptr *pointer, size_t bytes, CUstream stream), \
      "charge", "what the pool reserves", "refuse") \
    X(cuMemAllocAsync_ptsz, "11.2", (CUdeviceptr *pointer, size_t bytes, CUstream stream), \
      "charge", "what the pool reserves", "refuse") \
    X(cuMemAllocFromPoolAsync, "11.2", (CUdeviceptr *pointer, size_t bytes, CUmemoryPool pool, CUstream stream), \
      "charge", "what the pool reserves", "refuse") \
    X(cuMemAllocFromPoolAsync_ptsz, "11.2", (CUdeviceptr *pointer, size_t bytes, CUmemoryPool pool, CUstream stream), \
      "charge", "what the pool reserves", "refuse") \
    X(cuMemFreeAsync, "11.2", (CUdeviceptr pointer, CUstream stream), \
      "give back once the stream is there", "-", "pass") \
    X(cuMemFreeAsync_ptsz, "11.2", (CUdeviceptr pointer, CUstream stream), \
      "give back once the stream is there", "-", "pass") \
    X(cuMemPoolCreate, "11.2", (CUmemoryPool *pool, const CUmemPoolProps *properties), \
      "follow what the pool reserves", "-", "refuse") \
    X(cuMemPoolDestroy, "11.2", (CUmemoryPool pool), \
      "give back once nothing of it is in use", "-", "pass") \
    X(cuMemPoolTrimTo, "11.2", (CUmemoryPool pool, size_t keep), \
      "follow what the pool reserves", "-", "pass") \
    X(cuMemPoolSetAttribute, "11.2", (CUmemoryPool pool, CUmemPool_attribute attribute, void *value), \
      "follow what the pool reserves", "-", "pass") \
    X(cuDeviceSetMemPool, "11.2", (CUdevice device, CUmemoryPool pool), \
      "follow what the pool reserves", "-", "pass") \
    X(cuStreamSynchronize, "2.0", (CUstream stream), \
      "follow what pools give back", "-", "pass") \
    X(cuStreamSynchronize_ptsz, "7.0", (CUstream stream), \
      "follow what pools give back", "-", "pass") \
    X(cuEventSynchronize, "2.0", (CUevent event), \
      "follow what pools give back", "-", "pass") \
    X(cuCtxSynchronize, "2.0", (void), \
      "follow what pools give back", "-", "pass") \
    X(cuCtxSynchronize_v2, "13.0", (CUcontext context), \
      "follow what pools give back", "-", "pass")

#define CARVE_HOOKS_ARRAY(X) \
    X(cuArrayCreate, "2.0", (CUarray *array, const CUDA_ARRAY_DESCRIPTOR_v1 *descriptor), \
      "charge", "as the driver tells, in 64 KiB, above 1 MiB in pages", "refuse") \
    X(cuArrayCreate_v2, "3.2", (CUarray *array, const CUDA_ARRAY_DESCRIPTOR *descriptor), \
      "charge", "as the driver tells, in 64 KiB, above 1 MiB in pages", "refuse") \
    X(cuArray3DCreate, "2.0", (CUarray *array, const CUDA_ARRAY3D_DESCRIPTOR_v1 *descriptor), \
      "charge", "as the driver tells, in 64 KiB, above 1 MiB in pages", "refuse") \
    X(cuArray3DCreate_v2, "3.2", (CUarray *array, const CUDA_ARRAY3D_DESCRIPTOR *descriptor), \
      "charge", "as the driver tells, in 64 KiB, above 1 MiB in pages", "refuse") \
    X(cuArrayDestroy, "2.0", (CUarray array), \
      "give back", "-", "pass") \
    X(cuMipmappedArrayCreate, "5.0", \
      (CUmipmappedArray *array, const CUDA_ARRAY3D_DESCRIPTOR *descriptor, unsigned int levels), \
      "charge", "as the driver tells, in 64 KiB, above 1 MiB in pages", "refuse") \
    X(cuMipmappedArrayDestroy, "5.0", (CUmipmappedArray array), \
      "give back", "-", "pass")

#define CARVE_HOOKS_SHARED(X) \
    X(cuIpcOpenMemHandle, "4.1", (CUdeviceptr *pointer, CUipcMemHandle handle, unsigned int flags), \
      "list; whoever made it is charged", "-", "pass") \
    X(cuIpcOpenMemHandle_v2, "11.0", (CUdeviceptr *pointer, CUipcMemHandle handle, unsigned int flags), \
      "list; whoever made it is charged", "-", "pass") \
    X(cuIpcCloseMemHandle, "4.1", (CUdeviceptr pointer), \
      "take off the list", "-", "pass") \
    X(cuMemPoolImportPointer, "11.2", (CUdeviceptr *pointer, CUmemoryPool pool, CUmemPoolPtrExportData *data), \
      "list; whoever made it is charged", "-", "pass") \
    X(cuMemImportFromShareableHandle, "10.2", (CUmemGenericAllocationHandle *handle, void *shared, int type), \
      "list; whoever made it is charged", "-", "pass") \
    X(cuImportExternalMemory, "10.0", (CUexternalMemory *memory, const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *description), \
      "list; whoever made it is charged", "-", "pass") \
    X(cuDestroyExternalMemory, "10.0", (CUexternalMemory memory), \
      "take off the list", "-", "pass")

#define CARVE_HOOKS_GRAPH(X) \
    X(cuGraphInstantiate, "10.0", \
      (CUgraphExec *exec, CUgraph graph, CUgraphNode *error, char *log, size_t bytes), \
      "note what it will take", "-", "pass") \
    X(cuGraphInstantiate_v2, "11.0", \
      (CUgraphExec *exec, CUgraph graph, CUgraphNode *error, char *log, size_t bytes), \
      "note what it will take", "-", "pass") \
    X(cuGraphInstantiateWithFlags, "11.4", (CUgraphExec *exec, CUgraph graph, unsigned long long flags), \
      "note what it will take", "-", "pass") \
    X(cuGraphInstantiateWithParams, "12.0", \
      (CUgraphExec *exec, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *params), \
      "note what it will take", "-", "pass") \
    X(cuGraphInstantiateWithParams_ptsz, "12.0", \
      (CUgraphExec *exec, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *params), \
      "note what it will take", "-", "pass") \
    X(cuGraphExecDestroy, "10.0", (CUgraphExec exec), \
      "follow what graphs reserve", "-", "pass") \
    X(cuGraphLaunch, "10.0", (CUgraphExec exec, CUstream stream), \
      "charge", "what graphs reserve", "refuse") \
    X(cuGraphLaunch_ptsz, "10.0", (CUgraphExec exec, CUstream stream), \
      "charge", "what graphs reserve", "refuse") \
    X(cuGraphUpload, "11.1", (CUgraphExec exec, CUstream stream), \
      "charge", "what graphs reserve", "refuse") \
    X(cuGraphUpload_ptsz, "11.1", (CUgraphExec exec, CUstream stream), \
      "charge", "what graphs reserve", "refuse") \
    X(cuDeviceGraphMemTrim, "11.4", (CUdevice device), \
      "follow what graphs reserve", "-", "pass")

#define CARVE_HOOKS_CONTEXT(X) \
    X(cuCtxCreate, "2.0", (CUcontext *context, unsigned int flags, CUdevice device), \
      "charge", "a context", "refuse") \
    X(cuCtxCreate_v2, "3.2", (CUcontext *context, unsigned int flags, CUdevice device), \
      "charge", "a context", "refuse") \
    X(cuCtxCreate_v3, "11.4", (CUcontext *context, CUexecAffinityParam *params, int paramCount, unsigned int flags, CUdevice device), \
      "charge", "a context", "refuse") \
    X(cuCtxCreate_v4, "12.5", (CUcontext *context, CUctxCreateParams *params, unsigned int flags, CUdevice device), \
      "charge", "a context", "refuse") \
    X(cuCtxDestroy, "2.0", (CUcontext context), \
      "give back all in it", "-", "pass") \
    X(cuCtxDestroy_v2, "4.0", (CUcontext context), \
      "give back all in it", "-", "pass") \
    X(cuCtxAttach, "2.0", (CUcontext *context, unsigned int flags), \
      "count the use", "-", "pass") \
    X(cuCtxDetach, "2.0", (CUcontext context), \
      "give back all in it with the last user", "-", "pass") \
    X(cuCtxSetLimit, "3.1", (CUlimit limit, size_t value), \
      "charge what stacks, heap and the FIFO of printf take", "pages, or more as measured", "refuse") \
    X(cuGLCtxCreate, "2.0", (CUcontext *context, unsigned int flags, CUdevice device), \
      "charge", "a context", "refuse") \
    X(cuGLCtxCreate_v2, "3.2", (CUcontext *context, unsigned int flags, CUdevice device), \
      "charge", "a context", "refuse") \
    X(cuVDPAUCtxCreate, "3.1", \
      (CUcontext *context, unsigned int flags, CUdevice device, uint32_t vdpau, void *find), \
      "charge", "a context", "refuse") \
    X(cuVDPAUCtxCreate_v2, "3.2", \
      (CUcontext *context, unsigned int flags, CUdevice device, uint32_t vdpau, void *find), \
      "charge", "a context", "refuse") \
    X(cuDevResourceGenerateDesc, "12.4", (CUdevResourceDesc *out, CUdevResource *resources, unsigned int count), \
      "note the part", "-", "pass") \
    X(cuGreenCtxCreate, "12.4", (CUgreenCtx *green, void *resources, CUdevice device, unsigned int flags), \
      "charge the primary context, once", "a context", "refuse") \
    X(cuCtxFromGreenCtx, "12.4", (CUcontext *context, CUgreenCtx green), \
      "follow whose memory is whose", "-", "pass") \
    X(cuGreenCtxDestroy, "12.4", (CUgreenCtx green), \
      "give back all in it with the last user", "-", "pass") \
    X(cuDevicePrimaryCtxRetain, "7.0", (CUcontext *context, CUdevice device), \
      "charge", "a context", "refuse") \
    X(cuDevicePrimaryCtxRelease, "7.0", (CUdevice device), \
      "give back all in it with the last user", "-", "pass") \
    X(cuDevicePrimaryCtxRelease_v2, "11.0", (CUdevice device), \
      "give back all in it with the last user", "-", "pass") \
    X(cuDevicePrimaryCtxReset, "7.0", (CUdevice device), \
      "give back all in it", "-", "pass") \
    X(cuDevicePrimaryCtxReset_v2, "11.0", (CUdevice device), \
      "give back all in it", "-", "pass")

#define CARVE_HOOKS_START(X) \
    X(cuInit, "2.0", (unsigned int flags), \
      "check that it is a client of MPS where it must be one", "-", "pass")

#define CARVE_HOOKS_QUERY(X) \
    X(cuMemGetInfo, "2.0", (unsigned int *freeBytes, unsigned int *totalBytes), \
      "show the share", "-", "operating system error") \
    X(cuMemGetInfo_v2, "3.2", (size_t *freeBytes, size_t *totalBytes), \
      "show the share", "-", "operating system error") \
    X(cuDeviceTotalMem, "2.0", (unsigned int *bytes, CUdevice device), \
      "show the share", "-", "operating system error") \
    X(cuDeviceTotalMem_v2, "3.2", (size_t *bytes, CUdevice device), \
      "show the share", "-", "operating system error") \
    X(cuGetProcAddress, "11.3", (const char *symbol, void **function, int cudaVersion, cuuint64_t flags), \
      "hand out hooks for what is hooked", "-", "the same") \
    X(cuGetProcAddress_v2, "12.0", (const char *symbol, void **function, int cudaVersion, cuuint64_t flags, CUdriverProcAddressQueryResult *status), \
      "hand out hooks for what is hooked", "-", "the same")

#define CARVE_HOOKS_LAUNCH(X) \
    X(cuLaunchKernel, "4.0", (CUfunction function, unsigned int gridX, unsigned int gridY, unsigned int gridZ, unsigned int blockX, unsigned int blockY, unsigned int blockZ, unsigned int sharedBytes, CUstream stream, void **parameters, void **extra), \
      "wait for the share of compute", "-", "pass") \
    X(cuLaunchKernel_ptsz, "7.0", (CUfunction function, unsigned int gridX, unsigned int gridY, unsigned int gridZ, unsigned int blockX, unsigned int blockY, unsigned int blockZ, unsigned int sharedBytes, CUstream stream, void **parameters, void **extra), \
      "wait for the share of compute", "-", "pass") \
    X(cuLaunchKernelEx, "11.6", (const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra), \
      "wait for the share of compute", "-", "pass") \
    X(cuLaunchKernelEx_ptsz, "11.6", (const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra), \
      "wait for the share of compute", "-", "pass") \
    X(cuLaunchCooperativeKernel, "9.0", (CUfunction function, unsigned int gridX, unsigned int gridY, unsigned int gridZ, unsigned int blockX, unsigned int blockY, unsigned int blockZ, unsigned int sharedBytes, CUstream stream, void **parameters), \
      "wait for the share of compute", "-", "pass") \
    X(cuLaunchCooperativeKernel_ptsz, "9.0", (CUfunction function, unsigned int gridX, unsigned int gridY, unsigned int gridZ, unsigned int blockX, unsigned int blockY, unsigned int blockZ, unsigned int sharedBytes, CUstream stream, void **parameters), \
      "wait for the share of compute", "-", "pass") \
    X(cuLaunchCooperativeKernelMultiDevice, "9.0", (CUDA_LAUNCH_PARAMS *list, unsigned int count, unsigned int flags), \
      "wait for the share of compute, of each card", "-", "pass") \
    X(cuLaunch, "2.0", (CUfunction function), \
      "wait for the share of compute", "-", "pass") \
    X(cuLaunchGrid, "2.0", (CUfunction function, int width, int height), \
      "wait for the share of compute", "-", "pass") \
    X(cuLaunchGridAsync, "2.0", (CUfunction function, int width, int height, CUstream stream), \
      "wait for the share of compute", "-", "pass") \
    X(cuStreamBeginCapture, "10.0", (CUstream stream), \
      "keep own events away", "-", "pass") \
    X(cuStreamBeginCapture_ptsz, "10.0", (CUstream stream), \
      "keep own events away", "-", "pass") \
    X(cuStreamBeginCapture_v2, "10.1", (CUstream stream, CUstreamCaptureMode mode), \
      "keep own events away", "-", "pass") \
    X(cuStreamBeginCapture_v2_ptsz, "10.1", (CUstream stream, CUstreamCaptureMode mode), \
      "keep own events away", "-", "pass") \
    X(cuStreamBeginCaptureToGraph, "12.3", (CUstream stream, CUgraph graph, const CUgraphNode *after, const CUgraphEdgeData *edges, size_t count, CUstreamCaptureMode mode), \
      "keep own events away", "-", "pass") \
    X(cuStreamBeginCaptureToGraph_ptsz, "12.3", (CUstream stream, CUgraph graph, const CUgraphNode *after, const CUgraphEdgeData *edges, size_t count, CUstreamCaptureMode mode), \
      "keep own events away", "-", "pass") \
    X(cuStreamEndCapture, "10.0", (CUstream stream, CUgraph *graph), \
      "keep own events away", "-", "pass") \
    X(cuStreamEndCapture_ptsz, "10.0", (CUstream stream, CUgraph *graph), \
      "keep own events away", "-", "pass") \
    X(cuStreamDestroy, "2.0", (CUstream stream), \
      "keep own events away", "-", "pass") \
    X(cuStreamDestroy_v2, "4.0", (CUstream stream), \
      "keep own events away", "-", "pass")

/* What the multiprocessors do for copies: memory that is set, and copies within a card. */
#define CARVE_HOOKS_SET(X, bits, type) \
    X(cuMemsetD##bits##_v2, "3.2", (CUdeviceptr pointer, type value, size_t count), \
      "wait for the share of compute", "-", "pass") \
    X(cuMemsetD##bits##_v2_ptds, "7.0", (CUdeviceptr pointer, type value, size_t count), \
      "wait for the share of compute", "-", "pass") \
    X(cuMemsetD##bits##Async, "3.2", (CUdeviceptr pointer, type value, size_t count, CUstream stream), \
      "wait for the share of compute", "-", "pass") \
    X(cuMemsetD##bits##Async_ptsz, "7.0", (CUdeviceptr pointer, type value, size_t count, CUstream stream), \
      "wait for the share of compute", "-", "pass") \
    X(cuMemsetD2D##bits##_v2, "3.2", (CUdeviceptr pointer, size_t pitch, type value, size_t width, size_t height), \
      "wait for the share of compute", "-", "pass") \
    X(cuMemsetD2D##bits##_v2_ptds, "7.0", (CUdeviceptr pointer, size_t pitch, type value, size_t width, size_t height), \
      "wait for the share of compute", "-", "pass") \
    X(cuMemsetD2D##bits##Async, "3.2", (CUdeviceptr pointer, size_t pitch, type value, size_t width, size_t height, CUstream stream), \
      "wait for the share of compute", "-", "pass") \
    X(cuMemsetD2D##bits##Async_ptsz, "7.0", (CUdeviceptr pointer, size_t pitch, type value, size_t width, size_t height, CUstream stream), \
      "wait for the share of compute", "-", "pass")

#define CARVE_HOOKS_COPY(X) \
    CARVE_HOOKS_SET(X, 8, unsigned char) \
    CARVE_HOOKS_SET(X, 16, unsigned short) \
    CARVE_HOOKS_SET(X, 32, unsigned int) \
    X(cuMemcpyDtoD_v2, "3.2", (CUdeviceptr destination, CUdeviceptr source, size_t bytes), \
      "wait for the share of compute, within a card", "-", "pass") \
    X(cuMemcpyDtoD_v2_ptds, "7.0", (CUdeviceptr destination, CUdeviceptr source, size_t bytes), \
      "wait for the share of compute, within a card", "-", "pass") \
    X(cuMemcpyDtoDAsync_v2, "3.2", (CUdeviceptr destination, CUdeviceptr source, size_t bytes, CUstream stream), \
      "wait for the share of compute, within a card", "-", "pass") \
    X(cuMemcpyDtoDAsync_v2_ptsz, "7.0", (CUdeviceptr destination, CUdeviceptr source, size_t bytes, CUstream stream), \
      "wait for the share of compute, within a card", "-", "pass") \
    X(cuMemcpyDtoA_v2, "3.2", (CUarray destination, size_t offset, CUdeviceptr source, size_t bytes), \
      "wait for the share of compute", "-", "pass") \
    X(cuMemcpyDtoA_v2_ptds, "7.0", (CUarray destination, size_t offset, CUdeviceptr source, size_t bytes), \
      "wait for the share of compute", "-", "pass") \
    X(cuMemcpyAtoD_v2, "3.2", (CUdeviceptr destination, CUarray source, size_t offset, size_t bytes), \
      "wait for the share of compute", "-", "pass") \
    X(cuMemcpyAtoD_v2_ptds, "7.0", (CUdeviceptr destination, CUarray source, size_t offset, size_t bytes), \
      "wait for the share of compute", "-", "pass") \
    X(cuMemcpyAtoA_v2, "3.2", (CUarray destination, size_t to, CUarray source, size_t from, size_t bytes), \
      "wait for the share of compute", "-", "pass") \
    X(cuMemcpyAtoA_v2_ptds, "7.0", (CUarray destination, size_t to, CUarray source, size_t from, size_t bytes), \
      "wait for the share of compute", "-", "pass") \
    X(cuMemcpy, "4.0", (CUdeviceptr destination, CUdeviceptr source, size_t bytes), \
      "wait for the share of compute, within a card", "-", "pass") \
    X(cuMemcpy_ptds, "7.0", (CUdeviceptr destination, CUdeviceptr source, size_t bytes), \
      "wait for the share of compute, within a card", "-", "pass") \
    X(cuMemcpyAsync, "4.0", (CUdeviceptr destination, CUdeviceptr source, size_t bytes, CUstream stream), \
      "wait for the share of compute, within a card", "-", "pass") \
    X(cuMemcpyAsync_ptsz, "7.0", (CUdeviceptr destination, CUdeviceptr source, size_t bytes, CUstream stream), \
      "wait for the share of compute, within a card", "-", "pass") \
    X(cuMemcpyPeer, "4.0", (CUdeviceptr destination, CUcontext there, CUdeviceptr source, CUcontext here, size_t bytes), \
      "wait for the share of compute, within a card", "-", "pass") \
    X(cuMemcpyPeer_ptds, "7.0", (CUdeviceptr destination, CUcontext there, CUdeviceptr source, CUcontext here, size_t bytes), \
      "wait for the share of compute, within a card", "-", "pass") \
    X(cuMemcpyPeerAsync, "4.0", (CUdeviceptr destination, CUcontext there, CUdeviceptr source, CUcontext here, size_t bytes, CUstream stream), \
      "wait for the share of compute, within a card", "-", "pass") \
    X(cuMemcpyPeerAsync_ptsz, "7.0", (CUdeviceptr destination, CUcontext there, CUdeviceptr source, CUcontext here, size_t bytes, CUstream stream), \
      "wait for the share of compute, within a card", "-", "pass") \
    X(cuMemcpy2D_v2, "3.2", (const CUDA_MEMCPY2D *copy), \
      "wait for the share of compute, within a card", "-", "pass") \
    X(cuMemcpy2D_v2_ptds, "7.0", (const CUDA_MEMCPY2D *copy), \
      "wait for the share of compute, within a card", "-", "pass") \
    X(cuMemcpy2DUnaligned_v2, "3.2", (const CUDA_MEMCPY2D *copy), \
      "wait for the share of compute, within a card", "-", "pass") \
    X(cuMemcpy2DUnaligned_v2_ptds, "7.0", (const CUDA_MEMCPY2D *copy), \
      "wait for the share of compute, within a card", "-", "pass") \
    X(cuMemcpy2DAsync_v2, "3.2", (const CUDA_MEMCPY2D *copy, CUstream stream), \
      "wait for the share of compute, within a card", "-", "pass") \
    X(cuMemcpy2DAsync_v2_ptsz, "7.0", (const CUDA_MEMCPY2D *copy, CUstream stream), \
      "wait for the share of compute, within a card", "-", "pass") \
    X(cuMemcpy3D_v2, "3.2", (const CUDA_MEMCPY3D *copy), \
      "wait for the share of compute, within a card", "-", "pass") \
    X(cuMemcpy3D_v2_ptds, "7.0", (const CUDA_MEMCPY3D *copy), \
      "wait for the share of compute, within a card", "-", "pass") \
    X(cuMemcpy3DAsync_v2, "3.2", (const CUDA_MEMCPY3D *copy, CUstream stream), \
      "wait for the share of compute, within a card", "-", "pass") \
    X(cuMemcpy3DAsync_v2_ptsz, "7.0", (const CUDA_MEMCPY3D *copy, CUstream stream), \
      "wait for the share of compute, within a card", "-", "pass")

#define CARVE_CUDA_HOOKS(X) \
    CARVE_HOOKS_LINEAR(X)   \
    CARVE_HOOKS_LAUNCH(X)   \
    CARVE_HOOKS_COPY(X)     \
    CARVE_HOOKS_VIRTUAL(X)  \
    CARVE_HOOKS_POOL(X)     \
    CARVE_HOOKS_ARRAY(X)    \
    CARVE_HOOKS_SHARED(X)   \
    CARVE_HOOKS_GRAPH(X)    \
    CARVE_HOOKS_CONTEXT(X)  \
    CARVE_HOOKS_START(X)    \
    CARVE_HOOKS_QUERY(X)

/* Functions that the front calls and doesn't hook. */
#define CARVE_CUDA_CALLS(X)        \
    X(softgpu_clock_ns)            \
    X(softgpu_sleep_until_ns)      \
    X(cuThreadExchangeStreamCaptureMode) \
    X(cuEventCreate)               \
    X(cuEventDestroy_v2)           \
    X(cuEventElapsedTime)          \
    X(cuEventQuery)                \
    X(cuEventRecord)               \
    X(cuEventRecord_ptsz)          \
    X(cuArrayGetMemoryRequirements) \
    X(cuMipmappedArrayGetMemoryRequirements) \
    X(cuCtxGetCurrent)             \
    X(cuCtxGetDevice)              \
    X(cuCtxGetLimit)               \
    X(cuDeviceGet)                 \
    X(cuDeviceGetAttribute)        \
    X(cuDeviceGetCount)            \
    X(cuDeviceGetExecAffinitySupport) \
    X(cuGLGetDevices_v2)           \
    X(cuVDPAUGetDevice)            \
    X(cuCtxPopCurrent_v2)          \
    X(cuCtxPushCurrent_v2)         \
    X(cuDeviceGetUuid)             \
    X(cuDeviceGetUuid_v2)          \
    X(cuDeviceGetDefaultMemPool)   \
    X(cuDeviceGetMemPool)          \
    X(cuDevicePrimaryCtxGetState)  \
    X(cuMemGetAddressRange_v2)     \
    X(cuMemGetAllocationPropertiesFromHandle) \
    X(cuMemPoolGetAttribute)       \
    X(cuPointerGetAttribute)       \
    X(cuStreamGetCtx)              \
    X(cuStreamGetCtx_ptsz)         \
    X(cuStreamIsCapturing)         \
    X(cuStreamIsCapturing_ptsz)    \
    X(cuDeviceGetGraphMemAttribute) \
    X(cuGraphChildGraphNodeGetGraph) \
    X(cuGraphGetNodes)             \
    X(cuGraphKernelNodeGetParams_v2) \
    X(cuGraphMemcpyNodeGetParams)  \
    X(cuGraphMemsetNodeGetParams)  \
    X(cuGraphMemAllocNodeGetParams) \
    X(cuGraphNodeGetType)

#endif
