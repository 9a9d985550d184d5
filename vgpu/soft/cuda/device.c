/* device.c - finding cards and asking what they are. */
#include <stdio.h>
#include <string.h>

#include "../state/ledger.h"
#include "vmm.h"

static CUresult facts_of(CUdevice device, const soft_card **out) {
  if (device < 0 || (uint32_t)device >= the_driver.device_count) return CUDA_ERROR_INVALID_DEVICE;
  *out = soft_card_at(&the_driver.region, the_driver.cards[device]);
  return *out ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

#define CARD(card, device)                    \
  const soft_card *card;                      \
  ENTER();                                    \
  CUresult found = facts_of(device, &card);   \
  if (found != CUDA_SUCCESS) LEAVE(found)

EXPORT CUresult cuDeviceGet(CUdevice *device, int ordinal) {
  ENTER();
  if (!device) LEAVE(CUDA_ERROR_INVALID_VALUE);
  if (ordinal < 0 || (uint32_t)ordinal >= the_driver.device_count) LEAVE(CUDA_ERROR_INVALID_DEVICE);
  *device = ordinal;
  LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuDeviceGetCount(int *count) {
  ENTER();
  if (!count) LEAVE(CUDA_ERROR_INVALID_VALUE);
  *count = (int)the_driver.device_count;
  LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuDeviceGetName(char *name, int length, CUdevice device) {
  CARD(card, device);
  if (!name || length <= 0) LEAVE(CUDA_ERROR_INVALID_VALUE);
  soft_text(name, (size_t)length, card->facts.name, sizeof card->facts.name);
  LEAVE(CUDA_SUCCESS);
}

static CUresult uuid(CUuuid *out, CUdevice device) {
  CARD(card, device);
  if (!out) LEAVE(CUDA_ERROR_INVALID_VALUE);
  memcpy(out->bytes, card->facts.uuid_bytes, sizeof out->bytes);
  LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuDeviceGetUuid(CUuuid *out, CUdevice device) { return uuid(out, device); }
EXPORT CUresult cuDeviceGetUuid_v2(CUuuid *out, CUdevice device) { return uuid(out, device); }

EXPORT CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device) {
  CARD(card, device);
  if (!bytes) LEAVE(CUDA_ERROR_INVALID_VALUE);
  *bytes = soft_card_capacity(card);
  LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuDeviceTotalMem(unsigned int *bytes, CUdevice device) {
  CARD(card, device);
  if (!bytes) LEAVE(CUDA_ERROR_INVALID_VALUE);
  uint64_t total = soft_card_capacity(card);
  *bytes = total < UINT32_MAX ? (unsigned int)total : UINT32_MAX;
  LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuDeviceComputeCapability(int *major, int *minor, CUdevice device) {
  CARD(card, device);
  if (!major || !minor) LEAVE(CUDA_ERROR_INVALID_VALUE);
  *major = (int)card->facts.cc_major;
  *minor = (int)card->facts.cc_minor;
  LEAVE(CUDA_SUCCESS);
}

/* What textures and surfaces may measure (array.c refuses more), by number from MAXIMUM_TEXTURE1D_WIDTH on. */
static int texture_limit(int which) {
  static const struct { int first, last, value; } limits[] = {
      {21, 22, 131072}, {23, 23, 65536}, {24, 26, 16384}, {27, 28, 32768}, {29, 29, 2048},  {42, 42, 32768}, {43, 43, 2048},
      {45, 46, 32768},  {47, 48, 8192},  {49, 49, 32768}, {52, 53, 32768}, {54, 54, 2046},  {55, 55, 32768}, {56, 56, 131072},
      {57, 57, 65536},  {58, 60, 16384}, {61, 61, 32768}, {62, 62, 2048},  {63, 64, 32768}, {65, 65, 2048},  {66, 67, 32768},
      {68, 68, 2046},   {69, 69, 1 << 28}, {70, 70, 131072}, {71, 71, 65000}, {72, 72, 2097120}, {73, 74, 32768}, {77, 77, 32768}};
  for (size_t i = 0; i < sizeof limits / sizeof limits[0]; i++)
    if (which >= limits[i].first && which <= limits[i].last) return limits[i].value;
  return 0;
}

enum { COOPERATIVE_MULTI_DEVICE_LAUNCH = 96 };

static bool attribute(const soft_card *card, CUdevice_attribute which, int *out) {
  const soft_card_facts *facts = &card->facts;
  switch (which) {
  case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
  case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X:
  case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y: *out = 1024; break;
  case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z: *out = 64; break;
  case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X: *out = 2147483647; break;
  case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y:
  case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z: *out = 65535; break;
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: *out = 49152; break;
  case CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY: *out = 65536; break;
  case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *out = 32; break;
  case CU_DEVICE_ATTRIBUTE_MAX_PITCH: *out = 2147483647; break;
  case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK:
  case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR: *out = 65536; break;
  case CU_DEVICE_ATTRIBUTE_CLOCK_RATE: *out = (int)facts->sm_clock_mhz * 1000; break;
  case CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT:
  case CU_DEVICE_ATTRIBUTE_SURFACE_ALIGNMENT: *out = 512; break;
  case CU_DEVICE_ATTRIBUTE_TEXTURE_PITCH_ALIGNMENT: *out = 32; break;
  case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *out = (int)card_multiprocessors((uint32_t)(card - the_driver.region.state->header.cards)); break;
  case CU_DEVICE_ATTRIBUTE_COMPUTE_MODE: *out = (int)card->compute_mode; break;
  case CU_DEVICE_ATTRIBUTE_ECC_ENABLED: *out = (int)facts->ecc; break;
  case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID: *out = (int)facts->pci_bus; break;
  case CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID: *out = (int)facts->pci_device; break;
  case CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID: *out = (int)facts->pci_domain; break;
  case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: *out = (int)facts->mem_clock_mhz * 1000; break;
  case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: *out = (int)facts->bus_width_bits; break;
  case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: *out = (int)facts->l2_kib * 1024; break;
  case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: *out = (int)facts->threads_per_sm; break;
  case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT: *out = 3; break;
  case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *out = (int)facts->cc_major; break;
  case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *out = (int)facts->cc_minor; break;
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: *out = (int)facts->shared_per_sm_kib * 1024; break;
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *out = (int)facts->shared_per_block_kib * 1024; break;
  case CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK: *out = facts->cc_major >= 8 ? 1024 : 0; break;
  case CU_DEVICE_ATTRIBUTE_SINGLE_TO_DOUBLE_PRECISION_PERF_RATIO: *out = facts->cc_minor ? 32 : 2; break;
  case CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR: *out = facts->threads_per_sm >= 2048 ? 32 : facts->threads_per_sm >= 1536 ? 24 : 16; break;
  case CU_DEVICE_ATTRIBUTE_NUMA_ID: *out = -1; break;
  case CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID: *out = (int)facts->numa_node; break;
  case CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH: *out = facts->cc_major >= 9; break;
  case CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES: *out = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR; break;
  case CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED: *out = multicast_supported((uint32_t)(card - the_driver.region.state->header.cards)); break;
  case CU_DEVICE_ATTRIBUTE_MPS_ENABLED: *out = mps_client(); break;
  case CU_DEVICE_ATTRIBUTE_GPU_OVERLAP:
  case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
  case CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED:
  case CU_DEVICE_ATTRIBUTE_DEFERRED_MAPPING_CUDA_ARRAY_SUPPORTED:
  case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
  case CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS:
  case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
  case CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED:
  case CU_DEVICE_ATTRIBUTE_GLOBAL_L1_CACHE_SUPPORTED:
  case CU_DEVICE_ATTRIBUTE_LOCAL_L1_CACHE_SUPPORTED:
  case CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY:
  case CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS:
  case CU_DEVICE_ATTRIBUTE_COMPUTE_PREEMPTION_SUPPORTED:
  case CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM:
  case CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH:
  case COOPERATIVE_MULTI_DEVICE_LAUNCH:
  case CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED:
  case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
  case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED: *out = 1; break;
  default:
    /* numbers in between that this model says no to: 0, as a driver does for what a card can't */
    if (which < 1 || which > 150) return false;
    *out = texture_limit(which);
  }
  return true;
}

EXPORT CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute which, CUdevice device) {
  CARD(card, device);
  if (!value || !attribute(card, which, value)) LEAVE(CUDA_ERROR_INVALID_VALUE);
  LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuDeviceGetProperties(CUdevprop *properties, CUdevice device) {
  CARD(card, device);
  if (!properties) LEAVE(CUDA_ERROR_INVALID_VALUE);
  *properties = (CUdevprop){.maxThreadsPerBlock = 1024,
                            .maxThreadsDim = {1024, 1024, 64},
                            .maxGridSize = {2147483647, 65535, 65535},
                            .sharedMemPerBlock = 49152,
                            .totalConstantMemory = 65536,
                            .SIMDWidth = 32,
                            .memPitch = 2147483647,
                            .regsPerBlock = 65536,
                            .clockRate = (int)card->facts.sm_clock_mhz * 1000,
                            .textureAlign = 512};
  LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuDeviceGetPCIBusId(char *id, int length, CUdevice device) {
  CARD(card, device);
  char text[32];
  if (!id || length <= 0) LEAVE(CUDA_ERROR_INVALID_VALUE);
  snprintf(text, sizeof text, "%04x:%02x:%02x.0", card->facts.pci_domain, card->facts.pci_bus, card->facts.pci_device);
  soft_text(id, (size_t)length, text, sizeof text);
  LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuDeviceGetByPCIBusId(CUdevice *device, const char *id) {
  unsigned int domain = 0, bus, slot;
  ENTER();
  if (!device || !id) LEAVE(CUDA_ERROR_INVALID_VALUE);
  if (sscanf(id, "%x:%x:%x", &domain, &bus, &slot) != 3) {
    domain = 0;
    if (sscanf(id, "%x:%x", &bus, &slot) != 2) LEAVE(CUDA_ERROR_INVALID_VALUE);
  }
  for (uint32_t i = 0; i < the_driver.device_count; i++) {
    const soft_card_facts *facts = &soft_card_at(&the_driver.region, the_driver.cards[i])->facts;
    if (facts->pci_domain != domain || facts->pci_bus != bus || facts->pci_device != slot) continue;
    *device = (CUdevice)i;
    LEAVE(CUDA_SUCCESS);
  }
  LEAVE(CUDA_ERROR_INVALID_DEVICE);
}

EXPORT CUresult cuDeviceGetLuid(char *luid, unsigned int *mask, CUdevice device) {
  (void)luid;
  (void)mask;
  CARD(card, device);
  (void)card;
  LEAVE(CUDA_ERROR_NOT_SUPPORTED); /* Windows only */
}

/* Cards reach each other over NVLink or a common bridge; all of this node do. */
EXPORT CUresult cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice other) {
  const soft_card *second;
  CARD(card, device);
  (void)card;
  CUresult result = facts_of(other, &second);
  if (result != CUDA_SUCCESS) LEAVE(result);
  if (!can) LEAVE(CUDA_ERROR_INVALID_VALUE);
  *can = device != other;
  LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuDeviceGetP2PAttribute(int *value, CUdevice_P2PAttribute which, CUdevice device, CUdevice other) {
  const soft_card *second;
  CARD(card, device);
  CUresult result = facts_of(other, &second);
  if (result != CUDA_SUCCESS) LEAVE(result);
  if (!value || device == other) LEAVE(device == other ? CUDA_ERROR_INVALID_DEVICE : CUDA_ERROR_INVALID_VALUE);
  bool linked = card->facts.link_count && second->facts.link_count;
  switch (which) {
  case CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK: *value = linked ? 0 : 1; break;
  case CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED:
  case CU_DEVICE_P2P_ATTRIBUTE_CUDA_ARRAY_ACCESS_SUPPORTED: *value = 1; break;
  case CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED: *value = linked; break;
  default: LEAVE(CUDA_ERROR_INVALID_VALUE);
  }
  LEAVE(CUDA_SUCCESS);
}

/* Processors of a context can be limited by clients of MPS only. */
EXPORT CUresult cuDeviceGetExecAffinitySupport(int *supported, int type, CUdevice device) {
  CARD(card, device);
  if (!supported || type) LEAVE(CUDA_ERROR_INVALID_VALUE);
  (void)card;
  *supported = mps_client();
  LEAVE(CUDA_SUCCESS);
}
