#define _GNU_SOURCE
#include "node.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <unistd.h>

#include "../../cuda/driver.h"
#include "../../state/nodes.h"

/* Cuts that many names off a path's end. */
static bool climb(char *path, int names) {
  while (names--) {
    char *slash = strrchr(path, '/');
    if (!slash) return false;
    *slash = 0;
  }
  return true;
}

/* ROOT/usr/bin/PROGRAM, wherever the program was called from; without /proc as the kernel was told. */
static bool own_path(char *out, size_t size) {
  char link[PATH_MAX];
  ssize_t n = readlink("/proc/self/exe", link, sizeof link - 1);
  if (n > 0) link[n] = 0;
  else if (!getauxval(AT_EXECFN) || !realpath((const char *)getauxval(AT_EXECFN), link)) return false;
  return snprintf(out, size, "%s", link) < (int)size;
}

static soft_error open_state(mps_node *node) {
  char root[PATH_MAX], dir[PATH_MAX + 16];
  if (own_path(root, sizeof root)) {
    snprintf(node->directory, sizeof node->directory, "%s", root);
    climb(node->directory, 1);
    if (climb(root, 3)) {
      snprintf(dir, sizeof dir, "%s/softgpu", root);
      soft_error error = soft_region_open(&node->region, dir, root);
      if (error != SOFT_ENOSTATE) return error;
    }
  }
  return soft_region_open(&node->region, SOFT_CONTAINER_DIR, "");
}

const char *mps_node_open(mps_node *node) {
  driver as_driver = {.region = {0}};
  soft_nodes nodes;
  bool reachable[SOFT_CARDS] = {false};
  node->region.state = NULL;
  soft_error error = open_state(node);
  if (error != SOFT_OK) return soft_error_text(error);
  if (!soft_region_sound(&node->region)) return soft_error_text(SOFT_EBADSTATE);
  if (soft_nodes_open(&node->region, &nodes) <= 0) {
    soft_nodes_close(&nodes);
    return "no card can be opened";
  }
  for (uint32_t i = 0; i < soft_card_count(&node->region); i++) reachable[i] = nodes.cards[i] >= 0 && !soft_card_at(&node->region, i)->lost;
  soft_nodes_close(&nodes);
  as_driver.region = node->region;
  visible_devices(&as_driver, reachable, getenv("CUDA_VISIBLE_DEVICES"), getenv("CUDA_DEVICE_ORDER"));
  node->count = as_driver.device_count;
  memcpy(node->cards, as_driver.cards, sizeof node->cards);
  return node->count ? NULL : "the environment leaves no card";
}

uint32_t mps_node_cards(const mps_node *node) {
  uint32_t bits = 0;
  for (uint32_t i = 0; i < node->count; i++) bits |= 1u << node->cards[i];
  return bits;
}

uint32_t mps_node_card(const mps_node *node, const char *text) {
  char *end;
  if (strncmp(text, "GPU-", 4) == 0) {
    for (uint32_t i = 0; i < node->count; i++)
      if (strncmp(soft_card_at(&node->region, node->cards[i])->facts.uuid, text, strlen(text)) == 0) return node->cards[i];
    return SOFT_NO_INDEX;
  }
  unsigned long index = strtoul(text, &end, 10);
  return *text >= '0' && *text <= '9' && !*end && index < node->count ? node->cards[index] : SOFT_NO_INDEX;
}
