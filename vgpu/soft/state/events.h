/* events.h - NVML's events: a short history in the state, and a word to sleep on. */
#ifndef SOFT_EVENTS_H
#define SOFT_EVENTS_H

#include "region.h"

/* Adds an event; wants the lock. */
void soft_event_post(soft_region *region, uint32_t card, uint64_t type, uint64_t data);

/* The first event after *seq that a card's mask wants; masks has SOFT_CARDS words.
 * Moves *seq. Wants the lock. */
bool soft_event_next(soft_region *region, uint64_t *seq, const uint64_t *masks, soft_event *out);

/* Sleeps until something was posted after the futex word had this value, or for ns. Without the lock. */
uint32_t soft_event_word(const soft_region *region);
void soft_event_sleep(soft_region *region, uint32_t word, uint64_t ns);

#endif
