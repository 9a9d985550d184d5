/* models.h - the card models that softgpu can make, as data. */
#ifndef SOFT_MODELS_H
#define SOFT_MODELS_H

#include "state.h"

typedef struct {
  const char *key;
  const char *name;
  uint32_t pci_device_id;      /* device << 16 | vendor, as NVML gives it */
  uint32_t architecture, cc_major, cc_minor, brand;
  uint32_t sm_count, cores_per_sm, threads_per_sm;
  uint32_t shared_per_sm_kib, shared_per_block_kib;
  uint32_t sm_clock_mhz, sm_base_mhz, mem_clock_mhz;
  uint32_t bus_width_bits, l2_kib;
  uint32_t power_limit_w, power_idle_w, pcie_generation;
  uint32_t ecc, mig_capable;
  uint32_t link_count, link_version; /* NVLinks, all to switches */
  uint32_t total_mib;          /* NVML's total */
  uint32_t reserved_mib;       /* kept by the driver; CUDA's total is the rest */
  uint32_t context_mib;        /* first context of a process */
} soft_model;

/* NULL for a name that is no model. */
const soft_model *soft_model_find(const char *key);
const soft_model *soft_model_at(unsigned index); /* NULL past the end */

#endif
