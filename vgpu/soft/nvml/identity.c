/* identity.c - what a card is. */
#include <stdio.h>
#include <string.h>

#include "library.h"

#define TEXT(name, field)                                                              \
  EXPORT nvmlReturn_t name(nvmlDevice_t device, char *out, unsigned int length) {      \
    char text[sizeof((soft_card *)0)->facts.field + 1];                                \
    BEGIN(device);                                                                     \
    soft_text(text, sizeof text, card->facts.field, sizeof card->facts.field);         \
    END(nvml_text(out, length, text));                                                 \
  }

TEXT(nvmlDeviceGetName, name)
TEXT(nvmlDeviceGetUUID, uuid)
TEXT(nvmlDeviceGetSerial, serial)
TEXT(nvmlDeviceGetBoardPartNumber, board_part)
TEXT(nvmlDeviceGetVbiosVersion, vbios)

#define NUMBER(name, type, value)                            \
  EXPORT nvmlReturn_t name(nvmlDevice_t device, type *out) { \
    BEGIN(device);                                           \
    if (!out) END(NVML_ERROR_INVALID_ARGUMENT);              \
    *out = (type)(value);                                    \
    END(NVML_SUCCESS);                                       \
  }

NUMBER(nvmlDeviceGetBrand, int, card->facts.brand)
NUMBER(nvmlDeviceGetMinorNumber, unsigned int, card->facts.minor)
NUMBER(nvmlDeviceGetBoardId, unsigned int, card->facts.pci_bus << 8 | card->facts.pci_device)
NUMBER(nvmlDeviceGetMultiGpuBoard, unsigned int, 0)
NUMBER(nvmlDeviceGetModuleId, unsigned int, index + 1)
NUMBER(nvmlDeviceGetArchitecture, unsigned int, card->facts.architecture)
NUMBER(nvmlDeviceGetNumGpuCores, unsigned int, card->facts.sm_count *card->facts.cores_per_sm)
NUMBER(nvmlDeviceGetMemoryBusWidth, unsigned int, card->facts.bus_width_bits)
NUMBER(nvmlDeviceGetBusType, unsigned int, NVML_BUS_TYPE_PCIE)

EXPORT nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor) {
  BEGIN(device);
  if (!major || !minor) END(NVML_ERROR_INVALID_ARGUMENT);
  *major = (int)card->facts.cc_major;
  *minor = (int)card->facts.cc_minor;
  END(NVML_SUCCESS);
}

/* Only cards in MIG mode have these. */
EXPORT nvmlReturn_t nvmlDeviceGetAttributes_v2(nvmlDevice_t device, nvmlDeviceAttributes_t *out) {
  BEGIN(device);
  END(out ? NVML_ERROR_NOT_SUPPORTED : NVML_ERROR_INVALID_ARGUMENT);
}

static void bus_id(const soft_card_facts *facts, char *out, size_t size, int domain_digits) {
  snprintf(out, size, "%0*X:%02X:%02X.0", domain_digits, facts->pci_domain, facts->pci_bus & 0xff, facts->pci_device & 0xff);
}

EXPORT nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *out) {
  BEGIN(device);
  if (!out) END(NVML_ERROR_INVALID_ARGUMENT);
  *out = (nvmlPciInfo_t){.domain = card->facts.pci_domain, .bus = card->facts.pci_bus, .device = card->facts.pci_device,
                         .pciDeviceId = card->facts.pci_device_id, .pciSubSystemId = card->facts.pci_subsystem_id};
  bus_id(&card->facts, out->busIdLegacy, sizeof out->busIdLegacy, 4);
  bus_id(&card->facts, out->busId, sizeof out->busId, 8);
  END(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetPciInfo_v2(nvmlDevice_t device, nvmlPciInfo_v2_t *out) {
  BEGIN(device);
  if (!out) END(NVML_ERROR_INVALID_ARGUMENT);
  *out = (nvmlPciInfo_v2_t){.domain = card->facts.pci_domain, .bus = card->facts.pci_bus, .device = card->facts.pci_device,
                            .pciDeviceId = card->facts.pci_device_id, .pciSubSystemId = card->facts.pci_subsystem_id};
  bus_id(&card->facts, out->busId, sizeof out->busId, 4);
  END(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetPciInfo(nvmlDevice_t device, nvmlPciInfo_v1_t *out) {
  BEGIN(device);
  if (!out) END(NVML_ERROR_INVALID_ARGUMENT);
  *out = (nvmlPciInfo_v1_t){.domain = card->facts.pci_domain, .bus = card->facts.pci_bus, .device = card->facts.pci_device,
                            .pciDeviceId = card->facts.pci_device_id};
  bus_id(&card->facts, out->busId, sizeof out->busId, 4);
  END(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetPciInfoExt(nvmlDevice_t device, nvmlPciInfoExt_v1_t *out) {
  BEGIN(device);
  if (!out) END(NVML_ERROR_INVALID_ARGUMENT);
  if (out->version != NVML_ABI_STRUCT_VERSION(nvmlPciInfoExt_v1_t, 1)) END(NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
  unsigned int version = out->version;
  *out = (nvmlPciInfoExt_v1_t){.version = version, .domain = card->facts.pci_domain, .bus = card->facts.pci_bus,
                               .device = card->facts.pci_device, .pciDeviceId = card->facts.pci_device_id,
                               .pciSubSystemId = card->facts.pci_subsystem_id, .baseClass = 3, .subClass = 2};
  bus_id(&card->facts, out->busId, sizeof out->busId, 8);
  END(NVML_SUCCESS);
}
