#define _GNU_SOURCE
#include "events.h"

#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "clock.h"

void soft_event_post(soft_region *region, uint32_t card, uint64_t type, uint64_t data) {
  soft_header *header = &region->state->header;
  uint64_t seq = header->event_seq + 1;
  header->events[seq % SOFT_EVENTS] = (soft_event){.seq = seq, .type = type, .data = data, .real_ns = soft_real_ns(), .card = card};
  header->event_seq = seq;
  atomic_fetch_add(&header->event_futex, 1);
  syscall(SYS_futex, &header->event_futex, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

bool soft_event_next(soft_region *region, uint64_t *seq, const uint64_t *masks, soft_event *out) {
  const soft_header *header = &region->state->header;
  uint64_t newest = header->event_seq;
  if (newest < *seq) *seq = newest;
  if (newest - *seq > SOFT_EVENTS) *seq = newest - SOFT_EVENTS; /* too slow: the oldest are gone */
  while (*seq < newest) {
    const soft_event *event = &header->events[++*seq % SOFT_EVENTS];
    if (event->seq != *seq || event->card >= SOFT_CARDS || !(event->type & masks[event->card])) continue;
    *out = *event;
    return true;
  }
  return false;
}

uint32_t soft_event_word(const soft_region *region) { return atomic_load(&region->state->header.event_futex); }

void soft_event_sleep(soft_region *region, uint32_t word, uint64_t ns) {
  struct timespec limit = {(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)};
  syscall(SYS_futex, &region->state->header.event_futex, FUTEX_WAIT, word, &limit, NULL, 0);
}
