/* SPDX-License-Identifier: Apache-2.0 */
/*
 * spread.h: the cards on which an executable graph works.
 *
 * A node runs where its context is, whatever stream the graph is launched in, and what a node is updated to later runs
 * where it did before: drivers refuse anything else. So it is found out once, when the graph is made executable.
 */
#ifndef CARVE_SPREAD_H
#define CARVE_SPREAD_H

#include "contexts.h"
#include "driver.h"
#include "state.h"

/* A set of cards, a bit for each; and what only the launch tells: work on its stream's card, as far as is known. */
#define CARVE_SPREAD_HERE (1u << CARVE_MAX_CARDS)

/* Whether graphs can be on another card than their stream's at all. */
static inline bool carve_spread_possible(const struct carve_state *s) {
    uint64_t bank = __atomic_load_n(&s->limits->generation, __ATOMIC_ACQUIRE) & 1;
    return __atomic_load_n(&s->limits->banks[bank].card_count, __ATOMIC_RELAXED) > 1;
}

/* The cards of one node's work; none where it isn't the multiprocessors'. */
uint32_t carve_spread_of(const struct carve_driver *d, struct carve_state *s, CUgraphNode node, CUgraphNodeType type);

/* An executable graph was made. False where there is no memory to remember it. */
bool carve_spread_made(struct carve_state *s, CUgraphExec exec, uint32_t cards);
/* It is about to be destroyed, see carve_graph_gone: where its work was; 0: not known. */
uint32_t carve_spread_gone(struct carve_state *s, CUgraphExec exec);

uint32_t carve_spread_find_slow(struct carve_state *s, CUgraphExec exec);

/* Where its work is; 0: not known, which is its stream's card. */
static inline uint32_t carve_spread_find(struct carve_state *s, CUgraphExec exec) {
    return CARVE_LIKELY(__atomic_load_n(&s->spreads.count, __ATOMIC_ACQUIRE) == 0) ? 0 : carve_spread_find_slow(s, exec);
}

#endif
