/*
 * nodes.h - opening the device nodes, which is what gates a card.
 *
 * The real driver can't reach a card whose node it can't open, whatever else
 * it is told; so it is here. What was opened stays open.
 */
#ifndef SOFT_NODES_H
#define SOFT_NODES_H

#include "region.h"

typedef struct {
  int control;            /* descriptor of nvidiactl, -1 */
  int cards[SOFT_CARDS];  /* descriptor of the card's node, -1 not allowed */
} soft_nodes;

/* Opens nvidiactl and each card's node. Says how many cards can be reached; -1 without nvidiactl. */
int soft_nodes_open(const soft_region *region, soft_nodes *nodes);
void soft_nodes_close(soft_nodes *nodes);

#endif
