/*
 * ledger.h - who holds which memory of a card, and what happens when they die.
 *
 * All functions want the lock, except where a name says otherwise.
 */
#ifndef SOFT_LEDGER_H
#define SOFT_LEDGER_H

#include "region.h"

/* The driver's granularity: large memory comes in 2 MiB pages, small pieces of
 * 512 bytes are cut from such a page (cuda/arena.h). */
#define SOFT_PAGE_BYTES (2ull << 20)
#define SOFT_PIECE_BYTES 512ull

/* Bytes that can be had on a card (total without the driver's part), and what is left of it. */
uint64_t soft_card_capacity(const soft_card *card);
uint64_t soft_card_free(const soft_card *card);

/* Memory of our slot. SOFT_EMEMORY changes nothing. */
soft_error soft_ledger_charge(soft_region *region, uint32_t card, uint64_t bytes);
void soft_ledger_release(soft_region *region, uint32_t card, uint64_t bytes);

/*
 * Managed memory of our slot that comes to a card, and leaves it. Coming in, it
 * takes the place of other managed memory where nothing else is free, our own
 * first; SOFT_EMEMORY when there is none. soft_ledger_charge does so too.
 */
soft_error soft_ledger_move_in(soft_region *region, uint32_t card, uint64_t bytes);
void soft_ledger_move_out(soft_region *region, uint32_t card, uint64_t bytes);

/* Contexts of our slot: the first on a card costs the card's context_bytes, the last gives them back. */
soft_error soft_ledger_open_context(soft_region *region, uint32_t card);
void soft_ledger_close_context(soft_region *region, uint32_t card);
/* The same for the context of an MPS server, which is smaller. */
soft_error soft_ledger_open_server(soft_region *region, uint32_t card);

/*
 * Looks for processes that ended, and frees the memory of those that ended
 * free_delay ago. Without force at most once per millisecond.
 *
 * When a process ended is known exactly if it said so on its way out, else to
 * within the last look at it: a process that nobody has looked at for longer
 * than the delay counts as ended at that last look.
 */
void soft_ledger_sweep(soft_region *region, bool force);

/* Frees at once what the program had that ran in this process before exec. */
void soft_ledger_replaced(soft_region *region, uint32_t index);

/* The same for a library that has no slot yet, and so can't hold the lock in its own name. */
void soft_ledger_sweep_from_outside(soft_region *region);

/* Sets the derived sums right from the slots. */
void soft_ledger_recount(soft_region *region);

#endif
