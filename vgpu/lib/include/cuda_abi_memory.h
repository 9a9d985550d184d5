/*
 * cuda_abi_memory.h - arrays, memory of other processes, multicast and managed
 * memory in the CUDA driver's binary interface.
 *
 * Included through cuda_abi.h, which says where this comes from. A comment
 * names the release that brought an entry point where it isn't plain.
 */
#ifndef CARVE_CUDA_ABI_MEMORY_H
#define CARVE_CUDA_ABI_MEMORY_H

#include "cuda_abi_types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- arrays -------------------------------------------------------------- */

/* Formats beyond those of cuda_abi_types.h. Blocks of 4x4 elements: BC. Planes: NV12. */
enum {
  CU_AD_FORMAT_BC1_UNORM = 0x91,
  CU_AD_FORMAT_BC1_UNORM_SRGB = 0x92,
  CU_AD_FORMAT_BC2_UNORM = 0x93,
  CU_AD_FORMAT_BC2_UNORM_SRGB = 0x94,
  CU_AD_FORMAT_BC3_UNORM = 0x95,
  CU_AD_FORMAT_BC3_UNORM_SRGB = 0x96,
  CU_AD_FORMAT_BC4_UNORM = 0x97,
  CU_AD_FORMAT_BC4_SNORM = 0x98,
  CU_AD_FORMAT_BC5_UNORM = 0x99,
  CU_AD_FORMAT_BC5_SNORM = 0x9a,
  CU_AD_FORMAT_BC6H_UF16 = 0x9b,
  CU_AD_FORMAT_BC6H_SF16 = 0x9c,
  CU_AD_FORMAT_BC7_UNORM = 0x9d,
  CU_AD_FORMAT_BC7_UNORM_SRGB = 0x9e,
  CU_AD_FORMAT_NV12 = 0xb0,
  CU_AD_FORMAT_UNORM_INT8X1 = 0xc0,
  CU_AD_FORMAT_UNORM_INT8X2 = 0xc1,
  CU_AD_FORMAT_UNORM_INT8X4 = 0xc2,
  CU_AD_FORMAT_UNORM_INT16X1 = 0xc3,
  CU_AD_FORMAT_UNORM_INT16X2 = 0xc4,
  CU_AD_FORMAT_UNORM_INT16X4 = 0xc5,
  CU_AD_FORMAT_SNORM_INT8X1 = 0xc6,
  CU_AD_FORMAT_SNORM_INT8X2 = 0xc7,
  CU_AD_FORMAT_SNORM_INT8X4 = 0xc8,
  CU_AD_FORMAT_SNORM_INT16X1 = 0xc9,
  CU_AD_FORMAT_SNORM_INT16X2 = 0xca,
  CU_AD_FORMAT_SNORM_INT16X4 = 0xcb
};
enum {
  CUDA_ARRAY3D_LAYERED = 0x01,
  CUDA_ARRAY3D_SURFACE_LDST = 0x02,
  CUDA_ARRAY3D_CUBEMAP = 0x04,
  CUDA_ARRAY3D_TEXTURE_GATHER = 0x08,
  CUDA_ARRAY3D_DEPTH_TEXTURE = 0x10,
  CUDA_ARRAY3D_COLOR_ATTACHMENT = 0x20,
  CUDA_ARRAY3D_SPARSE = 0x40,          /* 11.1 */
  CUDA_ARRAY3D_DEFERRED_MAPPING = 0x80 /* 11.6 */
};

/* The 32-bit forms of CUDA 2. */
typedef struct CUDA_ARRAY_DESCRIPTOR_v1_st {
  unsigned int Width, Height;
  CUarray_format Format;
  unsigned int NumChannels;
} CUDA_ARRAY_DESCRIPTOR_v1;
typedef struct CUDA_ARRAY3D_DESCRIPTOR_v1_st {
  unsigned int Width, Height, Depth;
  CUarray_format Format;
  unsigned int NumChannels;
  unsigned int Flags;
} CUDA_ARRAY3D_DESCRIPTOR_v1;
typedef struct CUDA_MEMCPY2D_v1_st {
  unsigned int srcXInBytes, srcY;
  CUmemorytype srcMemoryType;
  const void *srcHost;
  CUdeviceptr_v1 srcDevice;
  CUarray srcArray;
  unsigned int srcPitch;
  unsigned int dstXInBytes, dstY;
  CUmemorytype dstMemoryType;
  void *dstHost;
  CUdeviceptr_v1 dstDevice;
  CUarray dstArray;
  unsigned int dstPitch;
  unsigned int WidthInBytes, Height;
} CUDA_MEMCPY2D_v1;
typedef struct CUDA_MEMCPY3D_v1_st {
  unsigned int srcXInBytes, srcY, srcZ, srcLOD;
  CUmemorytype srcMemoryType;
  const void *srcHost;
  CUdeviceptr_v1 srcDevice;
  CUarray srcArray;
  void *reserved0;
  unsigned int srcPitch, srcHeight;
  unsigned int dstXInBytes, dstY, dstZ, dstLOD;
  CUmemorytype dstMemoryType;
  void *dstHost;
  CUdeviceptr_v1 dstDevice;
  CUarray dstArray;
  void *reserved1;
  unsigned int dstPitch, dstHeight;
  unsigned int WidthInBytes, Height, Depth;
} CUDA_MEMCPY3D_v1;

/* The same memory layout as CUDA_MEMCPY3D: contexts stand where that has reserved words. */
typedef struct CUDA_MEMCPY3D_PEER_st {
  size_t srcXInBytes, srcY, srcZ, srcLOD;
  CUmemorytype srcMemoryType;
  const void *srcHost;
  CUdeviceptr srcDevice;
  CUarray srcArray;
  CUcontext srcContext;
  size_t srcPitch, srcHeight;
  size_t dstXInBytes, dstY, dstZ, dstLOD;
  CUmemorytype dstMemoryType;
  void *dstHost;
  CUdeviceptr dstDevice;
  CUarray dstArray;
  CUcontext dstContext;
  size_t dstPitch, dstHeight;
  size_t WidthInBytes, Height, Depth;
} CUDA_MEMCPY3D_PEER;

typedef struct CUDA_ARRAY_MEMORY_REQUIREMENTS_st {
  size_t size, alignment;
  unsigned int reserved[4];
} CUDA_ARRAY_MEMORY_REQUIREMENTS;
typedef struct CUDA_ARRAY_SPARSE_PROPERTIES_st {
  struct { unsigned int width, height, depth; } tileExtent;
  unsigned int miptailFirstLevel;
  unsigned long long miptailSize;
  unsigned int flags;
  unsigned int reserved[4];
} CUDA_ARRAY_SPARSE_PROPERTIES;

CUresult cuArrayCreate(CUarray *array, const CUDA_ARRAY_DESCRIPTOR_v1 *descriptor);
CUresult cuArrayCreate_v2(CUarray *array, const CUDA_ARRAY_DESCRIPTOR *descriptor);
CUresult cuArray3DCreate(CUarray *array, const CUDA_ARRAY3D_DESCRIPTOR_v1 *descriptor);
CUresult cuArray3DCreate_v2(CUarray *array, const CUDA_ARRAY3D_DESCRIPTOR *descriptor);
CUresult cuArrayGetDescriptor(CUDA_ARRAY_DESCRIPTOR_v1 *descriptor, CUarray array);
CUresult cuArrayGetDescriptor_v2(CUDA_ARRAY_DESCRIPTOR *descriptor, CUarray array);
CUresult cuArray3DGetDescriptor(CUDA_ARRAY3D_DESCRIPTOR_v1 *descriptor, CUarray array);
CUresult cuArray3DGetDescriptor_v2(CUDA_ARRAY3D_DESCRIPTOR *descriptor, CUarray array);
CUresult cuArrayGetPlane(CUarray *plane, CUarray array, unsigned int index);                                          /* 11.2 */
CUresult cuArrayGetMemoryRequirements(CUDA_ARRAY_MEMORY_REQUIREMENTS *out, CUarray array, CUdevice device);           /* 11.6 */
CUresult cuArrayGetSparseProperties(CUDA_ARRAY_SPARSE_PROPERTIES *out, CUarray array);                                /* 11.1 */
CUresult cuArrayDestroy(CUarray array);
CUresult cuMipmappedArrayCreate(CUmipmappedArray *array, const CUDA_ARRAY3D_DESCRIPTOR *descriptor, unsigned int levels);
CUresult cuMipmappedArrayGetLevel(CUarray *level, CUmipmappedArray array, unsigned int index);
CUresult cuMipmappedArrayGetMemoryRequirements(CUDA_ARRAY_MEMORY_REQUIREMENTS *out, CUmipmappedArray array, CUdevice device);
CUresult cuMipmappedArrayGetSparseProperties(CUDA_ARRAY_SPARSE_PROPERTIES *out, CUmipmappedArray array);
CUresult cuMipmappedArrayDestroy(CUmipmappedArray array);

CUresult cuMemcpy2D(const CUDA_MEMCPY2D_v1 *copy);
CUresult cuMemcpy2DUnaligned(const CUDA_MEMCPY2D_v1 *copy);
CUresult cuMemcpy2DAsync(const CUDA_MEMCPY2D_v1 *copy, CUstream stream);
CUresult cuMemcpy3D(const CUDA_MEMCPY3D_v1 *copy);
CUresult cuMemcpy3DAsync(const CUDA_MEMCPY3D_v1 *copy, CUstream stream);
CUresult cuMemcpy3DPeer(const CUDA_MEMCPY3D_PEER *copy);
CUresult cuMemcpy3DPeer_ptds(const CUDA_MEMCPY3D_PEER *copy);
CUresult cuMemcpy3DPeerAsync(const CUDA_MEMCPY3D_PEER *copy, CUstream stream);
CUresult cuMemcpy3DPeerAsync_ptsz(const CUDA_MEMCPY3D_PEER *copy, CUstream stream);
CUresult cuMemcpyHtoA(CUarray destination, unsigned int offset, const void *source, unsigned int bytes);
CUresult cuMemcpyHtoA_v2(CUarray destination, size_t offset, const void *source, size_t bytes);
CUresult cuMemcpyHtoA_v2_ptds(CUarray destination, size_t offset, const void *source, size_t bytes);
CUresult cuMemcpyHtoAAsync(CUarray destination, unsigned int offset, const void *source, unsigned int bytes, CUstream stream);
CUresult cuMemcpyHtoAAsync_v2(CUarray destination, size_t offset, const void *source, size_t bytes, CUstream stream);
CUresult cuMemcpyHtoAAsync_v2_ptsz(CUarray destination, size_t offset, const void *source, size_t bytes, CUstream stream);
CUresult cuMemcpyAtoH(void *destination, CUarray source, unsigned int offset, unsigned int bytes);
CUresult cuMemcpyAtoH_v2(void *destination, CUarray source, size_t offset, size_t bytes);
CUresult cuMemcpyAtoH_v2_ptds(void *destination, CUarray source, size_t offset, size_t bytes);
CUresult cuMemcpyAtoHAsync(void *destination, CUarray source, unsigned int offset, unsigned int bytes, CUstream stream);
CUresult cuMemcpyAtoHAsync_v2(void *destination, CUarray source, size_t offset, size_t bytes, CUstream stream);
CUresult cuMemcpyAtoHAsync_v2_ptsz(void *destination, CUarray source, size_t offset, size_t bytes, CUstream stream);
CUresult cuMemcpyDtoA(CUarray destination, unsigned int offset, CUdeviceptr_v1 source, unsigned int bytes);
CUresult cuMemcpyDtoA_v2(CUarray destination, size_t offset, CUdeviceptr source, size_t bytes);
CUresult cuMemcpyDtoA_v2_ptds(CUarray destination, size_t offset, CUdeviceptr source, size_t bytes);
CUresult cuMemcpyAtoD(CUdeviceptr_v1 destination, CUarray source, unsigned int offset, unsigned int bytes);
CUresult cuMemcpyAtoD_v2(CUdeviceptr destination, CUarray source, size_t offset, size_t bytes);
CUresult cuMemcpyAtoD_v2_ptds(CUdeviceptr destination, CUarray source, size_t offset, size_t bytes);
CUresult cuMemcpyAtoA(CUarray destination, unsigned int to, CUarray source, unsigned int from, unsigned int bytes);
CUresult cuMemcpyAtoA_v2(CUarray destination, size_t to, CUarray source, size_t from, size_t bytes);
CUresult cuMemcpyAtoA_v2_ptds(CUarray destination, size_t to, CUarray source, size_t from, size_t bytes);

/* ---- memory and events of other processes -------------------------------- */

enum { CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS = 1 };
CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr pointer);
CUresult cuIpcOpenMemHandle(CUdeviceptr *pointer, CUipcMemHandle handle, unsigned int flags);
CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *pointer, CUipcMemHandle handle, unsigned int flags); /* 11.0 */
CUresult cuIpcCloseMemHandle(CUdeviceptr pointer);
CUresult cuIpcGetEventHandle(CUipcEventHandle *handle, CUevent event);
CUresult cuIpcOpenEventHandle(CUevent *event, CUipcEventHandle handle);

typedef struct CUmemPoolPtrExportData_st { unsigned char reserved[64]; } CUmemPoolPtrExportData;
CUresult cuMemPoolExportToShareableHandle(void *shareable, CUmemoryPool pool, int handleType, unsigned long long flags);
CUresult cuMemPoolImportFromShareableHandle(CUmemoryPool *pool, void *shareable, int handleType, unsigned long long flags);
CUresult cuMemPoolExportPointer(CUmemPoolPtrExportData *data, CUdeviceptr pointer);
CUresult cuMemPoolImportPointer(CUdeviceptr *pointer, CUmemoryPool pool, CUmemPoolPtrExportData *data);

enum { CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD = 1 };
enum { CUDA_EXTERNAL_MEMORY_DEDICATED = 1 };
typedef struct CUDA_EXTERNAL_MEMORY_HANDLE_DESC_st {
  int type;
  union {
    int fd;
    struct { void *handle; const void *name; } win32;
    const void *nvSciBufObject;
  } handle;
  unsigned long long size;
  unsigned int flags;
  unsigned int reserved[16];
} CUDA_EXTERNAL_MEMORY_HANDLE_DESC;
typedef struct CUDA_EXTERNAL_MEMORY_BUFFER_DESC_st {
  unsigned long long offset, size;
  unsigned int flags;
  unsigned int reserved[16];
} CUDA_EXTERNAL_MEMORY_BUFFER_DESC;
typedef struct CUDA_EXTERNAL_MEMORY_MIPMAPPED_ARRAY_DESC_st {
  unsigned long long offset;
  CUDA_ARRAY3D_DESCRIPTOR arrayDesc;
  unsigned int numLevels;
  unsigned int reserved[16];
} CUDA_EXTERNAL_MEMORY_MIPMAPPED_ARRAY_DESC;
CUresult cuImportExternalMemory(CUexternalMemory *memory, const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *description); /* 10.0 */
CUresult cuExternalMemoryGetMappedBuffer(CUdeviceptr *pointer, CUexternalMemory memory, const CUDA_EXTERNAL_MEMORY_BUFFER_DESC *description);
CUresult cuExternalMemoryGetMappedMipmappedArray(CUmipmappedArray *array, CUexternalMemory memory,
                                                 const CUDA_EXTERNAL_MEMORY_MIPMAPPED_ARRAY_DESC *description);
CUresult cuDestroyExternalMemory(CUexternalMemory memory);

/* ---- multicast, 12.1 ------------------------------------------------------ */

enum { CU_MULTICAST_GRANULARITY_MINIMUM = 0, CU_MULTICAST_GRANULARITY_RECOMMENDED = 1 };
typedef struct CUmulticastObjectProp_st {
  unsigned int numDevices;
  size_t size;
  unsigned long long handleTypes;
  unsigned long long flags;
} CUmulticastObjectProp;
CUresult cuMulticastCreate(CUmemGenericAllocationHandle *handle, const CUmulticastObjectProp *property);
CUresult cuMulticastAddDevice(CUmemGenericAllocationHandle handle, CUdevice device);
CUresult cuMulticastBindMem(CUmemGenericAllocationHandle handle, size_t offset, CUmemGenericAllocationHandle memory, size_t memoryOffset,
                            size_t bytes, unsigned long long flags);
CUresult cuMulticastBindAddr(CUmemGenericAllocationHandle handle, size_t offset, CUdeviceptr pointer, size_t bytes, unsigned long long flags);
CUresult cuMulticastUnbind(CUmemGenericAllocationHandle handle, CUdevice device, size_t offset, size_t bytes);
CUresult cuMulticastGetGranularity(size_t *granularity, const CUmulticastObjectProp *property, int option);

/* ---- managed memory ------------------------------------------------------- */

enum { CU_DEVICE_CPU = -1, CU_DEVICE_INVALID = -2 };
typedef int CUmem_advise;
enum {
  CU_MEM_ADVISE_SET_READ_MOSTLY = 1,
  CU_MEM_ADVISE_UNSET_READ_MOSTLY = 2,
  CU_MEM_ADVISE_SET_PREFERRED_LOCATION = 3,
  CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION = 4,
  CU_MEM_ADVISE_SET_ACCESSED_BY = 5,
  CU_MEM_ADVISE_UNSET_ACCESSED_BY = 6
};
typedef int CUmem_range_attribute;
enum {
  CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY = 1,
  CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION = 2,
  CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY = 3,
  CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION = 4,
  CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_TYPE = 5,     /* 12.2, with the next three */
  CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_ID = 6,
  CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_TYPE = 7,
  CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_ID = 8
};
CUresult cuMemPrefetchAsync(CUdeviceptr pointer, size_t bytes, CUdevice device, CUstream stream);
CUresult cuMemPrefetchAsync_ptsz(CUdeviceptr pointer, size_t bytes, CUdevice device, CUstream stream);
CUresult cuMemPrefetchAsync_v2(CUdeviceptr pointer, size_t bytes, CUmemLocation location, unsigned int flags, CUstream stream); /* 12.2 */
CUresult cuMemPrefetchAsync_v2_ptsz(CUdeviceptr pointer, size_t bytes, CUmemLocation location, unsigned int flags, CUstream stream);
CUresult cuMemPrefetchBatchAsync(CUdeviceptr *pointers, size_t *bytes, size_t count, CUmemLocation *locations, size_t *locationFrom,
                                 size_t locationCount, unsigned long long flags, CUstream stream); /* 13.0, as the next two */
CUresult cuMemPrefetchBatchAsync_ptsz(CUdeviceptr *pointers, size_t *bytes, size_t count, CUmemLocation *locations, size_t *locationFrom,
                                      size_t locationCount, unsigned long long flags, CUstream stream);
CUresult cuMemDiscardBatchAsync(CUdeviceptr *pointers, size_t *bytes, size_t count, unsigned long long flags, CUstream stream);
CUresult cuMemDiscardBatchAsync_ptsz(CUdeviceptr *pointers, size_t *bytes, size_t count, unsigned long long flags, CUstream stream);
CUresult cuMemDiscardAndPrefetchBatchAsync(CUdeviceptr *pointers, size_t *bytes, size_t count, CUmemLocation *locations, size_t *locationFrom,
                                           size_t locationCount, unsigned long long flags, CUstream stream);
CUresult cuMemDiscardAndPrefetchBatchAsync_ptsz(CUdeviceptr *pointers, size_t *bytes, size_t count, CUmemLocation *locations,
                                                size_t *locationFrom, size_t locationCount, unsigned long long flags, CUstream stream);
CUresult cuMemAdvise(CUdeviceptr pointer, size_t bytes, CUmem_advise advice, CUdevice device);
CUresult cuMemAdvise_v2(CUdeviceptr pointer, size_t bytes, CUmem_advise advice, CUmemLocation location); /* 12.2 */
CUresult cuMemRangeGetAttribute(void *data, size_t dataBytes, CUmem_range_attribute attribute, CUdeviceptr pointer, size_t bytes);
CUresult cuMemRangeGetAttributes(void **data, size_t *dataBytes, CUmem_range_attribute *attributes, size_t count, CUdeviceptr pointer,
                                 size_t bytes);
CUresult cuStreamAttachMemAsync(CUstream stream, CUdeviceptr pointer, size_t bytes, unsigned int flags);
CUresult cuStreamAttachMemAsync_ptsz(CUstream stream, CUdeviceptr pointer, size_t bytes, unsigned int flags);

/* limits of a context's processors, 11.4: under MPS only; type 0 */
CUresult cuDeviceGetExecAffinitySupport(int *supported, int type, CUdevice device);

/* pools by place, 13.0 */
CUresult cuMemGetDefaultMemPool(CUmemoryPool *pool, CUmemLocation *location, int allocationType);
CUresult cuMemGetMemPool(CUmemoryPool *pool, CUmemLocation *location, int allocationType);
CUresult cuMemSetMemPool(CUmemLocation *location, int allocationType, CUmemoryPool pool);

#if defined(__STDC_VERSION__) && __STDC_VERSION__ >= 201112L
_Static_assert(sizeof(CUDA_MEMCPY2D_v1) == 96, "CUDA_MEMCPY2D_v1");
_Static_assert(sizeof(CUDA_MEMCPY3D_v1) == 144, "CUDA_MEMCPY3D_v1");
_Static_assert(sizeof(CUDA_MEMCPY3D_PEER) == sizeof(CUDA_MEMCPY3D), "CUDA_MEMCPY3D_PEER");
_Static_assert(sizeof(CUDA_ARRAY3D_DESCRIPTOR_v1) == 24, "CUDA_ARRAY3D_DESCRIPTOR_v1");
_Static_assert(sizeof(CUDA_ARRAY_MEMORY_REQUIREMENTS) == 32, "CUDA_ARRAY_MEMORY_REQUIREMENTS");
_Static_assert(sizeof(CUDA_ARRAY_SPARSE_PROPERTIES) == 48, "CUDA_ARRAY_SPARSE_PROPERTIES");
_Static_assert(sizeof(CUDA_EXTERNAL_MEMORY_HANDLE_DESC) == 104, "CUDA_EXTERNAL_MEMORY_HANDLE_DESC");
_Static_assert(sizeof(CUDA_EXTERNAL_MEMORY_BUFFER_DESC) == 88, "CUDA_EXTERNAL_MEMORY_BUFFER_DESC");
_Static_assert(sizeof(CUDA_EXTERNAL_MEMORY_MIPMAPPED_ARRAY_DESC) == 120, "CUDA_EXTERNAL_MEMORY_MIPMAPPED_ARRAY_DESC");
_Static_assert(sizeof(CUmulticastObjectProp) == 32, "CUmulticastObjectProp");
#endif

#ifdef __cplusplus
}
#endif

#endif /* CARVE_CUDA_ABI_MEMORY_H */
