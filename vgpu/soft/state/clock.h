/*
 * clock.h - the one door for time and for waiting.
 *
 * The state's clock is either the machine's monotonic one, or a virtual one
 * that all processes of a driver root share. The virtual clock stands still
 * while any member computes; when all members wait, it jumps to the next thing
 * that happens, a sleep that ends or a kernel that does. So a run gives the
 * same figures each time, however slow the machine is.
 *
 * Members are threads: a process joins with one when it initialises CUDA on a
 * virtual root, and with more by soft_clock_join. These functions take the
 * lock themselves, unless said otherwise.
 */
#ifndef SOFT_CLOCK_H
#define SOFT_CLOCK_H

#include "region.h"

/* The machine's monotonic clock. */
uint64_t soft_real_ns(void);
void soft_real_sleep_ns(uint64_t ns);

/* The state's clock; needs no lock. */
uint64_t soft_now(const soft_region *region);

/* The same moment in wall time, nanoseconds since the epoch. */
uint64_t soft_wall_ns(const soft_region *region, uint64_t now_ns);

soft_error soft_sleep_until(soft_region *region, uint64_t until_ns);

/*
 * Waits until the queue's entries of a stream (or SOFT_ALL_STREAMS) up to seq
 * are done. spin: the caller would rather burn a processor than be late.
 * SOFT_ELOST when the card or our slot is gone.
 */
soft_error soft_wait_queue(soft_region *region, uint32_t queue, uint32_t stream, uint64_t seq, bool spin);

/* Virtual clock: waits until a gate of our queues is reached, or some milliseconds of real time have passed. */
soft_error soft_wait_gates(soft_region *region);

/* After a gate was opened: tells those whose wait is over by that. */
soft_error soft_clock_nudge(soft_region *region);

soft_error soft_clock_join(soft_region *region);
soft_error soft_clock_leave(soft_region *region);

#endif
