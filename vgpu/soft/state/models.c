#include "models.h"

#include <stddef.h>
#include <string.h>

#include "../../lib/include/nvml_abi.h"

/*
 * Totals are what NVML reports for the product. Reserved is total less what
 * CUDA reports on it, rounded to 2 MiB. Context costs are of the order seen
 * with R550 and lazy loading; they differ by driver and are settable
 * (softgpu set ROOT context=...).
 */
static const soft_model models[] = {
    {.key = "a100-80", .name = "NVIDIA A100-SXM4-80GB", .pci_device_id = 0x20B210DE, .architecture = NVML_DEVICE_ARCH_AMPERE,
     .cc_major = 8, .cc_minor = 0, .brand = NVML_BRAND_NVIDIA, .sm_count = 108, .cores_per_sm = 64, .threads_per_sm = 2048,
     .shared_per_sm_kib = 164, .shared_per_block_kib = 163, .sm_clock_mhz = 1410, .sm_base_mhz = 1275, .mem_clock_mhz = 1593,
     .bus_width_bits = 5120, .l2_kib = 40960, .power_limit_w = 400, .power_idle_w = 62, .pcie_generation = 4, .ecc = 1,
     .mig_capable = 1, .link_count = 12, .link_version = 3, .total_mib = 81920, .reserved_mib = 870, .context_mib = 420},
    {.key = "a30", .name = "NVIDIA A30", .pci_device_id = 0x20B710DE, .architecture = NVML_DEVICE_ARCH_AMPERE,
     .cc_major = 8, .cc_minor = 0, .brand = NVML_BRAND_NVIDIA, .sm_count = 56, .cores_per_sm = 64, .threads_per_sm = 2048,
     .shared_per_sm_kib = 164, .shared_per_block_kib = 163, .sm_clock_mhz = 1440, .sm_base_mhz = 930, .mem_clock_mhz = 1215,
     .bus_width_bits = 3072, .l2_kib = 24576, .power_limit_w = 165, .power_idle_w = 30, .pcie_generation = 4, .ecc = 1,
     .mig_capable = 1, .total_mib = 24576, .reserved_mib = 512, .context_mib = 380},
    {.key = "h100", .name = "NVIDIA H100 80GB HBM3", .pci_device_id = 0x233010DE, .architecture = NVML_DEVICE_ARCH_HOPPER,
     .cc_major = 9, .cc_minor = 0, .brand = NVML_BRAND_NVIDIA, .sm_count = 132, .cores_per_sm = 128, .threads_per_sm = 2048,
     .shared_per_sm_kib = 228, .shared_per_block_kib = 227, .sm_clock_mhz = 1980, .sm_base_mhz = 1590, .mem_clock_mhz = 2619,
     .bus_width_bits = 5120, .l2_kib = 51200, .power_limit_w = 700, .power_idle_w = 70, .pcie_generation = 5, .ecc = 1,
     .mig_capable = 1, .link_count = 18, .link_version = 4, .total_mib = 81559, .reserved_mib = 551, .context_mib = 520},
    {.key = "h200", .name = "NVIDIA H200", .pci_device_id = 0x233510DE, .architecture = NVML_DEVICE_ARCH_HOPPER,
     .cc_major = 9, .cc_minor = 0, .brand = NVML_BRAND_NVIDIA, .sm_count = 132, .cores_per_sm = 128, .threads_per_sm = 2048,
     .shared_per_sm_kib = 228, .shared_per_block_kib = 227, .sm_clock_mhz = 1980, .sm_base_mhz = 1590, .mem_clock_mhz = 3201,
     .bus_width_bits = 6144, .l2_kib = 51200, .power_limit_w = 700, .power_idle_w = 75, .pcie_generation = 5, .ecc = 1,
     .mig_capable = 1, .link_count = 18, .link_version = 4, .total_mib = 143771, .reserved_mib = 699, .context_mib = 520},
    {.key = "b200", .name = "NVIDIA B200", .pci_device_id = 0x290110DE, .architecture = NVML_DEVICE_ARCH_BLACKWELL,
     .cc_major = 10, .cc_minor = 0, .brand = NVML_BRAND_NVIDIA, .sm_count = 148, .cores_per_sm = 128, .threads_per_sm = 2048,
     .shared_per_sm_kib = 228, .shared_per_block_kib = 227, .sm_clock_mhz = 1965, .sm_base_mhz = 1700, .mem_clock_mhz = 3996,
     .bus_width_bits = 7680, .l2_kib = 129024, .power_limit_w = 1000, .power_idle_w = 140, .pcie_generation = 5, .ecc = 1,
     .mig_capable = 1, .link_count = 18, .link_version = 5, .total_mib = 183359, .reserved_mib = 729, .context_mib = 620},
    {.key = "rtxpro6000", .name = "NVIDIA RTX PRO 6000 Blackwell Server Edition", .pci_device_id = 0x2BB510DE,
     .architecture = NVML_DEVICE_ARCH_BLACKWELL, .cc_major = 12, .cc_minor = 0, .brand = NVML_BRAND_NVIDIA, .sm_count = 188,
     .cores_per_sm = 128, .threads_per_sm = 1536, .shared_per_sm_kib = 100, .shared_per_block_kib = 99, .sm_clock_mhz = 2430,
     .sm_base_mhz = 1590, .mem_clock_mhz = 12481, .bus_width_bits = 512, .l2_kib = 131072, .power_limit_w = 600,
     .power_idle_w = 35, .pcie_generation = 5, .ecc = 1, .mig_capable = 1, .total_mib = 97887, .reserved_mib = 639, .context_mib = 480},
    {.key = "l20", .name = "NVIDIA L20", .pci_device_id = 0x26BA10DE, .architecture = NVML_DEVICE_ARCH_ADA,
     .cc_major = 8, .cc_minor = 9, .brand = NVML_BRAND_NVIDIA, .sm_count = 92, .cores_per_sm = 128, .threads_per_sm = 1536,
     .shared_per_sm_kib = 100, .shared_per_block_kib = 99, .sm_clock_mhz = 2520, .sm_base_mhz = 1440, .mem_clock_mhz = 9001,
     .bus_width_bits = 384, .l2_kib = 98304, .power_limit_w = 275, .power_idle_w = 35, .pcie_generation = 4, .ecc = 1,
     .total_mib = 46068, .reserved_mib = 602, .context_mib = 400},
    {.key = "4090", .name = "NVIDIA GeForce RTX 4090", .pci_device_id = 0x268410DE, .architecture = NVML_DEVICE_ARCH_ADA,
     .cc_major = 8, .cc_minor = 9, .brand = NVML_BRAND_GEFORCE_RTX, .sm_count = 128, .cores_per_sm = 128, .threads_per_sm = 1536,
     .shared_per_sm_kib = 100, .shared_per_block_kib = 99, .sm_clock_mhz = 3105, .sm_base_mhz = 2235, .mem_clock_mhz = 10501,
     .bus_width_bits = 384, .l2_kib = 73728, .power_limit_w = 450, .power_idle_w = 20, .pcie_generation = 4,
     .total_mib = 24564, .reserved_mib = 348, .context_mib = 390},
    {.key = "t4", .name = "Tesla T4", .pci_device_id = 0x1EB810DE, .architecture = NVML_DEVICE_ARCH_TURING,
     .cc_major = 7, .cc_minor = 5, .brand = NVML_BRAND_NVIDIA, .sm_count = 40, .cores_per_sm = 64, .threads_per_sm = 1024,
     .shared_per_sm_kib = 64, .shared_per_block_kib = 64, .sm_clock_mhz = 1590, .sm_base_mhz = 585, .mem_clock_mhz = 5001,
     .bus_width_bits = 256, .l2_kib = 4096, .power_limit_w = 70, .power_idle_w = 9, .pcie_generation = 3, .ecc = 1,
     .total_mib = 15360, .reserved_mib = 430, .context_mib = 104},
};

const soft_model *soft_model_at(unsigned index) { return index < sizeof models / sizeof models[0] ? &models[index] : NULL; }

const soft_model *soft_model_find(const char *key) {
  for (unsigned i = 0; i < sizeof models / sizeof models[0]; i++)
    if (strcmp(models[i].key, key) == 0) return &models[i];
  return NULL;
}
