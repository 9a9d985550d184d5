/*
 * sched.h - what the cards compute when: time slicing, queues, completions.
 *
 * A card's history is computed, not run: a call that wants to know asks for
 * the history up to now, and that is a function of what was submitted and
 * when. A card gives its time to one process after the other, round robin, a
 * quantum each, as hardware does without MPS; a process that is alone keeps
 * the card. Within a process kernels of different streams run side by side as
 * long as their widths fit; kernels of one stream follow each other. Running
 * work is stopped at the end of a quantum and goes on with the next.
 *
 * All functions want the lock.
 */
#ifndef SOFT_SCHED_H
#define SOFT_SCHED_H

#include "region.h"

/* Brings every card up to until (of the state's clock). */
void soft_sched_advance(soft_region *region, uint64_t until_ns);
void soft_sched_advance_card(soft_region *region, uint32_t card, uint64_t until_ns);

/* Time of the next change on a card, SOFT_FOREVER when nothing is under way. */
uint64_t soft_sched_next(soft_region *region, uint32_t card);

/* Marks a queue as having work. */
void soft_sched_activate(soft_region *region, uint32_t queue);

/* Entries of the stream (or all) up to seq, inclusive, are done. */
bool soft_sched_done(soft_region *region, uint32_t queue, uint32_t stream, uint64_t seq);

/* Least time that the stream's entries up to seq still need, were the queue alone on its card. */
uint64_t soft_sched_least(soft_region *region, uint32_t queue, uint32_t stream, uint64_t seq);

/* Nothing of a queue is undone. */
bool soft_sched_idle(soft_queue *queue);
/* The entry of that number, wherever it stands; NULL when it was collected. */
soft_entry *soft_sched_entry(soft_queue *queue, uint64_t seq);
/*
 * For the owner, who has collected: room for one more entry. Entries that are
 * done take none, even behind one that isn't, which is put aside then. False
 * when as many are undone as fit: SOFT_FOR_ROOM in place of a stream waits for that.
 */
bool soft_sched_make_room(soft_queue *queue);

/* Takes a queue of our slot on a card, or SOFT_NO_INDEX. */
uint32_t soft_sched_queue(soft_region *region, uint32_t card);

/* Drops all work of a slot, queues included. */
void soft_sched_drop_slot(soft_region *region, uint32_t slot);

/* Drops the undone entries of one queue. */
void soft_sched_drop_queue(soft_region *region, uint32_t queue);

/* After a process died with the lock: makes the card's lists consistent. */
void soft_sched_repair(soft_region *region);

/* Busy time of the last whole sample period before now, 0..SOFT_SAMPLE_NS. */
uint64_t soft_sched_card_busy(const soft_card *card, uint64_t now_ns);
uint64_t soft_sched_queue_busy(const soft_queue *queue, uint64_t period);

#endif
