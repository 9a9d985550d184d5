/*
 * node.h - what the two MPS programs of the software GPU share: finding the
 * state of the driver root that they lie in, and the cards they are for.
 */
#ifndef SOFT_CMD_MPS_NODE_H
#define SOFT_CMD_MPS_NODE_H

#include "../../state/region.h"

typedef struct {
  soft_region region;
  char directory[4096];         /* of this program */
  uint32_t count;               /* cards, as CUDA numbers them here */
  uint32_t cards[SOFT_CARDS];
} mps_node;

/* Opens the state and finds the cards that the environment leaves. NULL, or what is wrong. */
const char *mps_node_open(mps_node *node);
/* Bit per card of the state. */
uint32_t mps_node_cards(const mps_node *node);
/* The card that "0" or "GPU-..." means here, SOFT_NO_INDEX for none. */
uint32_t mps_node_card(const mps_node *node, const char *text);

#endif
