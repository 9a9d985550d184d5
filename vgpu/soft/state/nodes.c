#define _GNU_SOURCE
#include "nodes.h"

#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

static int open_node(const soft_region *region, const char *name) {
  char path[640];
  snprintf(path, sizeof path, "%s/dev/%s", region->device_prefix, name);
  return open(path, O_RDWR | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
}

int soft_nodes_open(const soft_region *region, soft_nodes *nodes) {
  char name[24];
  int reached = 0;
  for (int i = 0; i < SOFT_CARDS; i++) nodes->cards[i] = -1;
  nodes->control = open_node(region, "nvidiactl");
  if (nodes->control < 0) return -1;
  for (uint32_t i = 0; i < soft_card_count(region); i++) {
    snprintf(name, sizeof name, "nvidia%u", soft_card_at(region, i)->facts.minor);
    nodes->cards[i] = open_node(region, name);
    if (nodes->cards[i] >= 0) reached++;
  }
  return reached;
}

void soft_nodes_close(soft_nodes *nodes) {
  for (int i = 0; i < SOFT_CARDS; i++)
    if (nodes->cards[i] >= 0) close(nodes->cards[i]);
  if (nodes->control >= 0) close(nodes->control);
  for (int i = 0; i < SOFT_CARDS; i++) nodes->cards[i] = -1;
  nodes->control = -1;
}
