/*
 * managed.h - where managed memory is: on the host or on a card, by pages of 2 MiB.
 *
 * A page comes to a card when a kernel or a fill touches it there, or by
 * prefetch, and costs the card 2 MiB from then on; it goes back when it is
 * prefetched to the host, when the host touches it, or when the card is full
 * and somebody wants memory: then the pages go that were touched longest ago,
 * of whatever process. What doesn't get on the card is used from the host, so
 * a touch never fails. Copies use pages where they are.
 *
 * That the host touched a page is learnt from its page table, at this
 * process's next call that asks for memory or figures: nothing is told of it
 * at the moment. So between the touch and that call the card is still charged.
 *
 * All under the process lock; what needs the state's lock takes it.
 */
#ifndef SOFT_MANAGED_H
#define SOFT_MANAGED_H

#include "arena.h"

struct managed_pages;

/* For arena.c: a block comes and goes. */
CUresult managed_open(block *b);
void managed_close(block *b);

/* A kernel or a fill on a card uses [pointer, pointer+bytes); memory of other kinds is left alone. */
void managed_touch(uint32_t card, CUdeviceptr pointer, uint64_t bytes);

/* Notices what the host touched and what others took off the card. */
void managed_settle(uint32_t card);

#endif
