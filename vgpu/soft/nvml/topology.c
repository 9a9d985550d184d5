/*
 * topology.c - where cards sit: NUMA nodes, bridges, NVLinks, PCIe.
 *
 * Cards come in pairs behind a bridge; pairs of one NUMA node share a host
 * bridge; the rest is the link between sockets. NVLinks are in the state.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "library.h"

/* ---- NUMA ---------------------------------------------------------------- */

EXPORT nvmlReturn_t nvmlDeviceGetNumaNodeId(nvmlDevice_t device, unsigned int *node) {
  BEGIN(device);
  END(node ? NVML_ERROR_NOT_SUPPORTED : NVML_ERROR_INVALID_ARGUMENT); /* of the card's own memory: coherent systems only */
}

static uint32_t numa_nodes(void) {
  uint32_t most = 0;
  for (uint32_t i = 0; i < soft_card_count(&nvml_region); i++) {
    uint32_t node = soft_card_at(&nvml_region, i)->facts.numa_node;
    if (node > most && node < 64) most = node;
  }
  return most + 1;
}

/* The machine's processors, dealt out evenly to the NUMA nodes that the cards name. */
static nvmlReturn_t processors(const soft_card *card, unsigned int words, unsigned long *set) {
  if (!set || !words) return NVML_ERROR_INVALID_ARGUMENT;
  long all = sysconf(_SC_NPROCESSORS_CONF);
  uint32_t nodes = numa_nodes(), node = card->facts.numa_node;
  if (all < 1) all = 1;
  memset(set, 0, words * sizeof *set);
  long first = all * (long)(node % nodes) / (long)nodes, last = all * (long)(node % nodes + 1) / (long)nodes;
  if (last == first) last = first + 1;
  for (long cpu = first; cpu < last && cpu < (long)(words * 64); cpu++) set[cpu / 64] |= 1ul << (cpu % 64);
  return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetCpuAffinity(nvmlDevice_t device, unsigned int words, unsigned long *set) {
  BEGIN(device);
  END(processors(card, words, set));
}

EXPORT nvmlReturn_t nvmlDeviceGetCpuAffinityWithinScope(nvmlDevice_t device, unsigned int words, unsigned long *set, unsigned int scope) {
  BEGIN(device);
  END(scope > 1 ? NVML_ERROR_INVALID_ARGUMENT : processors(card, words, set));
}

EXPORT nvmlReturn_t nvmlDeviceGetMemoryAffinity(nvmlDevice_t device, unsigned int words, unsigned long *set, unsigned int scope) {
  BEGIN(device);
  if (!set || !words || scope > 1) END(NVML_ERROR_INVALID_ARGUMENT);
  memset(set, 0, words * sizeof *set);
  uint32_t node = card->facts.numa_node % 64;
  if (node < words * 64) set[node / 64] = 1ul << (node % 64);
  END(NVML_SUCCESS);
}

/* ---- between cards ------------------------------------------------------- */

static int level(uint32_t a, uint32_t b) {
  const soft_card *first = soft_card_at(&nvml_region, a), *second = soft_card_at(&nvml_region, b);
  if (!first || !second) return NVML_TOPOLOGY_SYSTEM;
  if (a == b) return NVML_TOPOLOGY_INTERNAL;
  if (first->facts.numa_node != second->facts.numa_node) return NVML_TOPOLOGY_SYSTEM;
  return a / 2 == b / 2 ? NVML_TOPOLOGY_SINGLE : NVML_TOPOLOGY_NODE;
}

EXPORT nvmlReturn_t nvmlDeviceGetTopologyCommonAncestor(nvmlDevice_t first, nvmlDevice_t second, int *out) {
  BEGIN(first);
  int other = nvml_card_of(second);
  if (!out || other < 0) END(NVML_ERROR_INVALID_ARGUMENT);
  *out = level(index, (uint32_t)other);
  END(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetTopologyNearestGpus(nvmlDevice_t device, int wanted, unsigned int *count, nvmlDevice_t *out) {
  BEGIN(device);
  if (!count || (*count && !out)) END(NVML_ERROR_INVALID_ARGUMENT);
  unsigned int room = *count, found = 0;
  for (uint32_t i = 0; i < soft_card_count(&nvml_region); i++) {
    nvmlDevice_t handle = nvml_handle(i);
    if (!handle || i == index || level(index, i) != wanted) continue;
    if (found < room) out[found] = handle;
    found++;
  }
  *count = room && found > room ? room : found;
  END(NVML_SUCCESS);
}

/* Cards whose NUMA node has this processor. */
EXPORT nvmlReturn_t nvmlSystemGetTopologyGpuSet(unsigned int cpu, unsigned int *count, nvmlDevice_t *out) {
  nvmlReturn_t result = nvml_ready(__func__);
  if (result != NVML_SUCCESS) return result;
  if (!count || (*count && !out)) return NVML_ERROR_INVALID_ARGUMENT;
  unsigned int room = *count, found = 0;
  for (uint32_t i = 0; i < soft_card_count(&nvml_region); i++) {
    unsigned long set[16] = {0};
    nvmlDevice_t handle = nvml_handle(i);
    if (!handle || cpu >= 16 * 64 || processors(soft_card_at(&nvml_region, i), 16, set) != NVML_SUCCESS) continue;
    if (!(set[cpu / 64] >> (cpu % 64) & 1)) continue;
    if (found < room) out[found] = handle;
    found++;
  }
  *count = room && found > room ? room : found;
  return NVML_SUCCESS;
}

static bool linked(uint32_t a, uint32_t b) {
  const soft_card_facts *first = &soft_card_at(&nvml_region, a)->facts, *second = &soft_card_at(&nvml_region, b)->facts;
  for (uint32_t i = 0; i < SOFT_LINKS && i < first->link_count; i++) {
    if (first->link_kind[i] == SOFT_LINK_CARD && first->link_peer[i] == b) return true;
    if (first->link_kind[i] != SOFT_LINK_SWITCH) continue;
    for (uint32_t j = 0; j < SOFT_LINKS && j < second->link_count; j++)
      if (second->link_kind[j] == SOFT_LINK_SWITCH) return true;
  }
  return false;
}

EXPORT nvmlReturn_t nvmlDeviceGetP2PStatus(nvmlDevice_t first, nvmlDevice_t second, int capability, int *status) {
  BEGIN(first);
  int other = nvml_card_of(second);
  if (!status || other < 0 || capability < 0 || capability > NVML_P2P_CAPS_INDEX_PCI) END(NVML_ERROR_INVALID_ARGUMENT);
  bool ok = true;
  if (capability == NVML_P2P_CAPS_INDEX_NVLINK || capability == NVML_P2P_CAPS_INDEX_ATOMICS) ok = linked(index, (uint32_t)other);
  *status = ok ? NVML_P2P_STATUS_OK : NVML_P2P_STATUS_NOT_SUPPORTED;
  END(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceOnSameBoard(nvmlDevice_t first, nvmlDevice_t second, int *same) {
  BEGIN(first);
  int other = nvml_card_of(second);
  if (!same || other < 0) END(NVML_ERROR_INVALID_ARGUMENT);
  *same = (uint32_t)other == index;
  END(NVML_SUCCESS);
}

/* ---- NVLink -------------------------------------------------------------- */

static nvmlReturn_t link_ok(const soft_card *card, unsigned int link) {
  if (link >= SOFT_LINKS) return NVML_ERROR_INVALID_ARGUMENT;
  return link < card->facts.link_count ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}

EXPORT nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t device, unsigned int link, nvmlEnableState_t *active) {
  BEGIN(device);
  nvmlReturn_t result = link_ok(card, link);
  if (result != NVML_SUCCESS) END(result);
  if (!active) END(NVML_ERROR_INVALID_ARGUMENT);
  *active = card->facts.link_kind[link] != SOFT_LINK_NONE;
  END(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetNvLinkVersion(nvmlDevice_t device, unsigned int link, unsigned int *version) {
  BEGIN(device);
  nvmlReturn_t result = link_ok(card, link);
  if (result != NVML_SUCCESS) END(result);
  if (!version) END(NVML_ERROR_INVALID_ARGUMENT);
  *version = card->facts.link_version;
  END(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetNvLinkCapability(nvmlDevice_t device, unsigned int link, int capability, unsigned int *out) {
  BEGIN(device);
  nvmlReturn_t result = link_ok(card, link);
  if (result != NVML_SUCCESS) END(result);
  if (!out || capability < 0 || capability > NVML_NVLINK_CAP_VALID) END(NVML_ERROR_INVALID_ARGUMENT);
  *out = capability != NVML_NVLINK_CAP_SLI_BRIDGE;
  END(NVML_SUCCESS);
}

/* What the far end of a link is on the bus: a card, or one of the switches. */
static nvmlReturn_t far_end(const soft_card *card, unsigned int link, soft_card_facts *out) {
  nvmlReturn_t result = link_ok(card, link);
  if (result != NVML_SUCCESS) return result;
  if (card->facts.link_kind[link] == SOFT_LINK_CARD) {
    const soft_card *peer = soft_card_at(&nvml_region, card->facts.link_peer[link]);
    if (!peer) return NVML_ERROR_UNKNOWN;
    *out = peer->facts;
    return NVML_SUCCESS;
  }
  if (card->facts.link_kind[link] != SOFT_LINK_SWITCH) return NVML_ERROR_NOT_SUPPORTED;
  *out = (soft_card_facts){.pci_bus = 0xC4u + card->facts.link_peer[link] % 8, .pci_device_id = 0x22A310DE};
  return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo_v2(nvmlDevice_t device, unsigned int link, nvmlPciInfo_t *out) {
  soft_card_facts far;
  BEGIN(device);
  nvmlReturn_t result = far_end(card, link, &far);
  if (result != NVML_SUCCESS) END(result);
  if (!out) END(NVML_ERROR_INVALID_ARGUMENT);
  *out = (nvmlPciInfo_t){.domain = far.pci_domain, .bus = far.pci_bus, .device = far.pci_device, .pciDeviceId = far.pci_device_id};
  snprintf(out->busIdLegacy, sizeof out->busIdLegacy, "%04X:%02X:%02X.0", far.pci_domain, far.pci_bus & 0xff, far.pci_device & 0xff);
  snprintf(out->busId, sizeof out->busId, "%08X:%02X:%02X.0", far.pci_domain, far.pci_bus & 0xff, far.pci_device & 0xff);
  END(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo(nvmlDevice_t device, unsigned int link, nvmlPciInfo_v2_t *out) {
  soft_card_facts far;
  BEGIN(device);
  nvmlReturn_t result = far_end(card, link, &far);
  if (result != NVML_SUCCESS) END(result);
  if (!out) END(NVML_ERROR_INVALID_ARGUMENT);
  *out = (nvmlPciInfo_v2_t){.domain = far.pci_domain, .bus = far.pci_bus, .device = far.pci_device, .pciDeviceId = far.pci_device_id};
  snprintf(out->busId, sizeof out->busId, "%04X:%02X:%02X.0", far.pci_domain, far.pci_bus & 0xff, far.pci_device & 0xff);
  END(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetNvLinkRemoteDeviceType(nvmlDevice_t device, unsigned int link, int *type) {
  BEGIN(device);
  nvmlReturn_t result = link_ok(card, link);
  if (result != NVML_SUCCESS) END(result);
  if (!type) END(NVML_ERROR_INVALID_ARGUMENT);
  *type = card->facts.link_kind[link] == SOFT_LINK_CARD     ? NVML_NVLINK_DEVICE_TYPE_GPU
          : card->facts.link_kind[link] == SOFT_LINK_SWITCH ? NVML_NVLINK_DEVICE_TYPE_SWITCH
                                                            : NVML_NVLINK_DEVICE_TYPE_UNKNOWN;
  END(NVML_SUCCESS);
}

/* ---- PCIe ---------------------------------------------------------------- */

#define VALUE(name, value)                                           \
  EXPORT nvmlReturn_t name(nvmlDevice_t device, unsigned int *out) { \
    BEGIN(device);                                                   \
    if (!out) END(NVML_ERROR_INVALID_ARGUMENT);                      \
    *out = value;                                                    \
    END(NVML_SUCCESS);                                               \
  }

VALUE(nvmlDeviceGetMaxPcieLinkGeneration, card->facts.pcie_generation)
VALUE(nvmlDeviceGetMaxPcieLinkWidth, 16)
VALUE(nvmlDeviceGetCurrPcieLinkGeneration, nvml_busy_percent(card) ? card->facts.pcie_generation : 1)
VALUE(nvmlDeviceGetCurrPcieLinkWidth, 16)
VALUE(nvmlDeviceGetPcieReplayCounter, 0)

EXPORT nvmlReturn_t nvmlDeviceGetPcieThroughput(nvmlDevice_t device, int counter, unsigned int *out) {
  BEGIN(device);
  if (!out || counter < 0 || counter > 1) END(NVML_ERROR_INVALID_ARGUMENT);
  *out = nvml_busy_percent(card) * 1000;
  END(NVML_SUCCESS);
}
