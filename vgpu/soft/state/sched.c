#define _GNU_SOURCE
#include "sched.h"

#include <string.h>

#include "clock.h"

enum { FULL_WIDTH = 1000000, MAX_RUNNING = 128, MAX_STREAMS = 256, MAX_DEPTH = 4, MAX_MEMBERS = 64, ROOM_NAP_NS = 1000000 };
/*
 * One call looks at so many queue entries at most; what is left is for the
 * next. Tenants write the queues, and must not keep an agent busy for ever.
 */
enum { MOST_LOOKS = 1 << 22 };
static uint64_t looks; /* under the lock */
static uint64_t ends;  /* entries that were finished, so that one can see whether some were */

/* What a queue's kernels may still take of the card. */
typedef struct {
  uint64_t limit;  /* of this queue */
  uint64_t others; /* taken by kernels of its party */
  bool closed;     /* nothing new: an earlier one waits for room */
  uint64_t *begun; /* counts the card's kernels */
} card_room;

typedef struct {
  uint32_t count;
  uint32_t at[MAX_RUNNING]; /* ring positions of running kernels */
  uint64_t least_left_ns;
  uint64_t width;
  uint64_t wait_until_ns;   /* a wait that is known to end then */
  bool undone;
  bool blocked;             /* a kernel can't begin for want of room */
} running_set;

/* What runs of all queues that have the card together. */
typedef struct {
  uint32_t count;
  uint32_t queues[MAX_MEMBERS];
  running_set sets[MAX_MEMBERS];
  uint32_t running;         /* kernels */
  uint64_t least_left_ns, wait_until_ns, width;
} party;

static void advance_card(soft_region *region, uint32_t index, uint64_t until, int depth);

/* ---- one queue ----------------------------------------------------------- */

static soft_entry *entry_at(soft_queue *queue, uint64_t seq) { return &queue->entries[seq & (SOFT_DEPTH - 1)]; }

/* Sequence numbers as tenants may have left them, made safe to walk over. */
static bool sound(soft_queue *queue) {
  if (queue->parked_count > SOFT_DEPTH) queue->parked_count = 0;
  if (queue->head - queue->tail <= SOFT_DEPTH && queue->scan - queue->tail <= queue->head - queue->tail) return true;
  queue->tail = queue->scan = queue->head;
  return false;
}

static bool parked_undone(const soft_queue *queue) {
  for (uint32_t i = 0; i < queue->parked_count && i < SOFT_DEPTH; i++)
    if (!(queue->parked[i].entry.flags & SOFT_ENTRY_DONE)) return true;
  return false;
}

static void move_scan(soft_queue *queue) {
  while (queue->scan < queue->head && (entry_at(queue, queue->scan)->flags & SOFT_ENTRY_DONE)) queue->scan++;
  if (queue->scan == queue->head && !parked_undone(queue)) queue->mixed = 0;
}

/* By position: the ring's places, then those aside. */
static soft_entry *placed(soft_queue *queue, uint32_t at) { return at < SOFT_DEPTH ? &queue->entries[at] : &queue->parked[(at - SOFT_DEPTH) % SOFT_DEPTH].entry; }

/*
 * Walks over what may be undone, in order: first what was put aside. Begin
 * with a walk of {0}; false at the end.
 */
typedef struct { uint64_t seq; uint32_t aside, at; bool in_ring; } walk;
static bool step(const soft_queue *queue, walk *w) {
  if (!w->in_ring && w->aside < queue->parked_count && w->aside < SOFT_DEPTH) {
    w->at = SOFT_DEPTH + w->aside++;
    return true;
  }
  w->seq = w->in_ring ? w->seq + 1 : queue->scan;
  w->in_ring = true;
  w->at = (uint32_t)(w->seq & (SOFT_DEPTH - 1));
  return w->seq < queue->head;
}

static void finish(soft_entry *entry, uint64_t now) {
  if (!(entry->flags & SOFT_ENTRY_STARTED)) entry->start_ns = now;
  entry->end_ns = now;
  entry->left_ns = 0;
  entry->flags |= SOFT_ENTRY_STARTED | SOFT_ENTRY_DONE;
  ends++;
}

/* A gate that was reached: its owner must look. */
static void reach(soft_region *region, const soft_queue *queue, soft_entry *entry, uint64_t now) {
  soft_slot *slot = soft_slot_at(region, queue->owner - 1);
  entry->flags |= SOFT_ENTRY_STARTED;
  entry->start_ns = now;
  if (slot) slot->gates_ready = 1;
}

/* When the entry that a wait is for is (or will be) done; SOFT_FOREVER unknown. */
static uint64_t wait_over(soft_region *region, const soft_entry *entry, uint32_t own_card, uint64_t until, int depth) {
  soft_queue *other = soft_queue_at(region, entry->wait_queue);
  if (!other || !other->owner || !sound(other)) return 0;
  if (other->card != own_card && depth < MAX_DEPTH) advance_card(region, other->card, until, depth + 1);
  /* one that was over long ago is overwritten; one that is over may still have ended later than this card's history reaches */
  const soft_entry *target = soft_sched_entry(other, entry->wait_seq);
  if (!target && (entry->wait_seq >= other->head || other->head - entry->wait_seq > SOFT_DEPTH)) return 0;
  if (!target) target = entry_at(other, entry->wait_seq);
  return target->flags & SOFT_ENTRY_DONE ? target->end_ns : SOFT_FOREVER;
}

/* Width of kernels that run already, wherever they stand. */
static uint64_t started_width(soft_queue *queue) {
  uint64_t width = 0;
  sound(queue);
  move_scan(queue);
  for (walk w = {0}; step(queue, &w);) {
    const soft_entry *entry = placed(queue, w.at);
    looks++;
    if (entry->kind != SOFT_ENTRY_GATE && (entry->flags & (SOFT_ENTRY_STARTED | SOFT_ENTRY_DONE)) == SOFT_ENTRY_STARTED)
      width += entry->width_ppm ? entry->width_ppm : 1;
    if (!queue->mixed) break; /* one stream: only the first can run */
  }
  return width;
}

/* Whether a part of the processors has room beside what runs on it. */
static bool part_fits(soft_queue *queue, const soft_entry *entry, uint64_t width) {
  uint64_t taken = 0;
  for (walk w = {0}; entry->part && step(queue, &w);) {
    const soft_entry *other = placed(queue, w.at);
    looks++;
    if (other->kind != SOFT_ENTRY_GATE && other->part == entry->part && (other->flags & (SOFT_ENTRY_STARTED | SOFT_ENTRY_DONE)) == SOFT_ENTRY_STARTED)
      taken += other->width_ppm ? other->width_ppm : 1;
  }
  return !taken || taken + width <= entry->part_ppm;
}

static bool fits(const card_room *room, uint64_t own, uint64_t width) {
  if (room->closed) return false;
  if (own && own + width > room->limit) return false;
  return !(own + room->others) || own + room->others + width <= FULL_WIDTH;
}

/*
 * Starts what can start at now and says what runs. Order of submission is
 * order of look: an entry may go when its stream has nothing undone before it,
 * when it is on the legacy stream and no blocking stream has, and when it is
 * on a blocking stream and the legacy one has nothing.
 */
static running_set start(soft_region *region, soft_queue *queue, uint64_t now, uint64_t until, int depth, const card_room *room) {
  running_set set = {.least_left_ns = SOFT_FOREVER, .wait_until_ns = SOFT_FOREVER};
  uint32_t streams[MAX_STREAMS], stream_count = 0;
  bool legacy_undone = false, blocking_undone = false;
  uint64_t own_width = started_width(queue);

  for (walk w = {0}; step(queue, &w);) {
    soft_entry *entry = placed(queue, w.at);
    looks++;
    if (entry->flags & SOFT_ENTRY_DONE) continue;
    bool legacy = entry->stream == SOFT_LEGACY_STREAM;
    bool ready = !(legacy ? blocking_undone : (entry->flags & SOFT_ENTRY_BLOCKING) && legacy_undone);
    if (entry->submit_ns > now) { /* history that is computed late: not there yet, nor is what follows */
      if (entry->submit_ns < set.wait_until_ns) set.wait_until_ns = entry->submit_ns;
      set.undone = true;
      break;
    }
    bool behind = false; /* its stream has something undone before it */
    for (uint32_t i = 0; !behind && i < stream_count; i++) behind = streams[i] == entry->stream;
    ready &= !behind;
    if (ready && entry->kind == SOFT_ENTRY_EVENT) {
      finish(entry, now);
      continue;
    }
    if (ready && entry->kind == SOFT_ENTRY_WAIT) {
      uint64_t over = wait_over(region, entry, queue->card, until, depth);
      if (over <= now) {
        finish(entry, now);
        continue;
      }
      if (over < set.wait_until_ns) set.wait_until_ns = over;
    } else if (ready && entry->kind == SOFT_ENTRY_GATE) {
      if (entry->flags & SOFT_ENTRY_RELEASED && entry->wait_seq <= now) {
        finish(entry, now);
        continue;
      }
      if (entry->flags & SOFT_ENTRY_RELEASED && entry->wait_seq < set.wait_until_ns) set.wait_until_ns = entry->wait_seq;
      if (!(entry->flags & SOFT_ENTRY_STARTED)) reach(region, queue, entry, now);
    } else if (ready) {
      uint64_t width = entry->width_ppm < FULL_WIDTH ? entry->width_ppm : FULL_WIDTH;
      if (!(entry->flags & SOFT_ENTRY_STARTED) && set.count < MAX_RUNNING) {
        if (fits(room, own_width, width) && part_fits(queue, entry, width)) {
          entry->flags |= SOFT_ENTRY_STARTED;
          entry->start_ns = now;
          queue->begun = ++*room->begun;
          own_width += width ? width : 1;
        } else if (!own_width) {
          set.blocked = true;
        }
      }
      if (entry->flags & SOFT_ENTRY_STARTED) {
        if (entry->left_ns == 0) {
          finish(entry, now);
          continue;
        }
        if (set.count < MAX_RUNNING) {
          set.at[set.count++] = w.at;
          set.width += width;
          if (entry->left_ns < set.least_left_ns) set.least_left_ns = entry->left_ns;
        }
      }
    }
    set.undone = true;
    if (!queue->mixed) break; /* one stream: whatever follows waits for this one */
    if (legacy) legacy_undone = true;
    else if (entry->flags & SOFT_ENTRY_BLOCKING) blocking_undone = true;
    if (behind) continue;
    if (stream_count == MAX_STREAMS) break;
    streams[stream_count++] = entry->stream;
  }
  move_scan(queue);
  return set;
}

static void run(soft_queue *queue, const running_set *set, uint64_t now, uint64_t step) {
  for (uint32_t i = 0; i < set->count; i++) {
    soft_entry *entry = placed(queue, set->at[i]);
    if (entry->left_ns > step) entry->left_ns -= step;
    else finish(entry, now + step);
  }
  move_scan(queue);
}

/* ---- one card ------------------------------------------------------------ */

static bool active(const soft_card *card, uint32_t queue) { return queue < SOFT_QUEUES && card->active[queue / 64] >> (queue % 64) & 1; }
static void deactivate(soft_card *card, uint32_t queue) { card->active[queue / 64] &= ~(1ull << (queue % 64)); }

void soft_sched_activate(soft_region *region, uint32_t queue) {
  soft_queue *at = soft_queue_at(region, queue);
  soft_card *card = at ? soft_card_at(region, at->card) : NULL;
  if (card) card->active[queue / 64] |= 1ull << (queue % 64);
}

/* Whether a queue has the card together with the party that has it now. */
static bool of_party(const soft_region *region, const soft_card *card, uint32_t queue) {
  if (queue == card->current) return true;
  return card->current_party && queue < SOFT_QUEUES && region->state->queues[queue].party == card->current_party;
}

static uint32_t next_active(const soft_card *card, uint32_t after) {
  uint32_t from = after < SOFT_QUEUES ? (after + 1) % SOFT_QUEUES : 0;
  for (uint32_t i = 0; i <= SOFT_QUEUES / 64; i++) {
    uint32_t word = (from / 64 + i) % (SOFT_QUEUES / 64);
    uint64_t bits = card->active[word];
    if (i == 0) bits &= ~0ull << (from % 64);
    if (i == SOFT_QUEUES / 64) bits &= (1ull << (from % 64)) - 1;
    if (bits) return word * 64 + (uint32_t)__builtin_ctzll(bits);
  }
  return SOFT_NO_INDEX;
}

/* Others have work, too. */
static bool contended(const soft_region *region, const soft_card *card) {
  for (uint32_t i = 0; i < SOFT_QUEUES / 64; i++)
    for (uint64_t bits = card->active[i]; bits; bits &= bits - 1)
      if (!of_party(region, card, i * 64 + (uint32_t)__builtin_ctzll(bits))) return true;
  return false;
}

static void note_busy(soft_bucket *buckets, uint32_t count, uint64_t from, uint64_t length) {
  uint64_t end = from + length;
  if (length > (uint64_t)count * SOFT_SAMPLE_NS) from = end - (uint64_t)count * SOFT_SAMPLE_NS;
  while (from < end) {
    uint64_t period = from / SOFT_SAMPLE_NS;
    uint64_t stop = (period + 1) * SOFT_SAMPLE_NS < end ? (period + 1) * SOFT_SAMPLE_NS : end;
    soft_bucket *bucket = &buckets[period % count];
    if (bucket->period != period) *bucket = (soft_bucket){.period = period};
    bucket->busy_ns += stop - from;
    from = stop;
  }
}

static void account(soft_region *region, soft_card *card, uint32_t index, const party *now, uint64_t step) {
  if (!now->width) return;
  card->busy_ns += step;
  card->work_ns += (uint64_t)((unsigned __int128)step * now->width / FULL_WIDTH);
  note_busy(card->buckets, SOFT_CARD_BUCKETS, card->sim_ns, step);
  for (uint32_t i = 0; i < now->count; i++) {
    soft_queue *queue = &region->state->queues[now->queues[i]];
    soft_slot *slot = soft_slot_at(region, queue->owner - 1);
    if (!now->sets[i].width) continue;
    note_busy(queue->buckets, SOFT_QUEUE_BUCKETS, card->sim_ns, step);
    if (slot) slot->usage[index].busy_ns += step;
  }
}

/* The active queues that have the card together with one of them, whose kernel began longest ago first. */
static void gather(const soft_region *region, const soft_card *card, uint32_t leader, party *out) {
  const soft_queue *queues = region->state->queues;
  uint32_t name = queues[leader].party;
  out->count = 0;
  for (uint32_t i = 0; i < SOFT_QUEUES / 64; i++)
    for (uint64_t bits = card->active[i]; bits && out->count < MAX_MEMBERS; bits &= bits - 1) {
      uint32_t queue = i * 64 + (uint32_t)__builtin_ctzll(bits), at = out->count;
      if (queue != leader && (!name || queues[queue].party != name || queues[queue].card != queues[leader].card || !queues[queue].owner)) continue;
      for (; at > 0 && queues[out->queues[at - 1]].begun > queues[queue].begun; at--) out->queues[at] = out->queues[at - 1];
      out->queues[at] = queue;
      out->count++;
    }
}

/*
 * Starts what can start of a party and says what runs. A kernel that finds no
 * room keeps later ones of others from beginning, or wide ones would wait for
 * ever behind narrow ones. What ends may be what another member waits for.
 */
static void start_party(soft_region *region, soft_card *card, uint32_t leader, uint64_t until, int depth, party *out) {
  uint64_t before, widths[MAX_MEMBERS];
  do {
    before = ends;
    uint64_t all = 0;
    bool closed = false;
    gather(region, card, leader, out);
    out->running = 0;
    out->width = 0;
    out->least_left_ns = out->wait_until_ns = SOFT_FOREVER;
    for (uint32_t i = 0; i < out->count; i++) all += widths[i] = started_width(&region->state->queues[out->queues[i]]);
    for (uint32_t i = 0; i < out->count; i++) {
      soft_queue *queue = &region->state->queues[out->queues[i]];
      uint64_t limit = queue->limit_ppm && queue->limit_ppm < FULL_WIDTH ? queue->limit_ppm : FULL_WIDTH;
      card_room room = {.limit = limit, .others = all - widths[i], .closed = closed, .begun = &card->begun};
      running_set *set = &out->sets[i];
      *set = start(region, queue, card->sim_ns, until, depth, &room);
      all = room.others + started_width(queue);
      closed |= set->blocked;
      out->running += set->count;
      out->width += set->width;
      if (set->least_left_ns < out->least_left_ns) out->least_left_ns = set->least_left_ns;
      if (set->wait_until_ns < out->wait_until_ns) out->wait_until_ns = set->wait_until_ns;
    }
  } while (out->count > 1 && ends != before && looks < MOST_LOOKS);
  for (uint32_t i = 0; i < out->count; i++)
    if (!out->sets[i].undone) deactivate(card, out->queues[i]);
}

/* Of a party, the active queue with the lowest number stands for it in the round. */
static bool leads(const soft_region *region, const soft_card *card, uint32_t queue) {
  const soft_queue *queues = region->state->queues;
  uint32_t name = queues[queue].party;
  for (uint32_t i = 0; name && i <= queue / 64; i++)
    for (uint64_t bits = card->active[i]; bits; bits &= bits - 1) {
      uint32_t other = i * 64 + (uint32_t)__builtin_ctzll(bits);
      if (other >= queue) break;
      if (queues[other].party == name && queues[other].card == queues[queue].card && queues[other].owner) return false;
    }
  return true;
}

/* An active queue of the party that has the card, when the one that stood for it has no more work. */
static uint32_t other_member(const soft_region *region, const soft_card *card) {
  for (uint32_t i = 0; card->current_party && i < SOFT_QUEUES / 64; i++)
    for (uint64_t bits = card->active[i]; bits; bits &= bits - 1) {
      uint32_t queue = i * 64 + (uint32_t)__builtin_ctzll(bits);
      if (of_party(region, card, queue)) return queue;
    }
  return SOFT_NO_INDEX;
}

static party parties[MAX_DEPTH + 1]; /* by depth, under the lock: too large for a small thread's stack */

/* Who has the card now, after all that takes no time has happened. running is 0 when nobody has work that can run. */
static const party *take_turn(soft_region *region, uint32_t index, uint64_t until, int depth) {
  soft_header *header = &region->state->header;
  soft_card *card = &header->cards[index];
  party *now = &parties[depth];
  uint64_t wait_until_ns = SOFT_FOREVER;

  uint32_t current = active(card, card->current) ? card->current : other_member(region, card);
  bool own = active(card, current) && region->state->queues[current].card == index && region->state->queues[current].owner;
  if (own && card->slice_left_ns) {
    start_party(region, card, current, until, depth, now);
    if (now->running) return now;
  }
  /* others first, from the next on; then the same again */
  uint32_t first = SOFT_NO_INDEX, candidate = card->current;
  for (uint32_t looked = 0; looked <= SOFT_QUEUES + 1; looked++) {
    candidate = next_active(card, candidate);
    bool last = candidate == SOFT_NO_INDEX || candidate == first;
    if (last) {
      if (!own || !active(card, current)) break;
      candidate = current;
    } else {
      if (first == SOFT_NO_INDEX) first = candidate;
      const soft_queue *queue = &region->state->queues[candidate];
      if (queue->card != index || !queue->owner) {
        deactivate(card, candidate);
        first = first == candidate ? SOFT_NO_INDEX : first;
        continue;
      }
      if (of_party(region, card, candidate)) continue;
      if (!leads(region, card, candidate)) continue;
    }
    start_party(region, card, candidate, until, depth, now);
    if (now->wait_until_ns < wait_until_ns) wait_until_ns = now->wait_until_ns;
    if (now->running) {
      if (!of_party(region, card, candidate)) {
        if (card->current != SOFT_NO_INDEX || card->current_party) card->switch_left_ns = header->switch_ns;
        card->switches++;
      }
      card->current = candidate;
      card->current_party = region->state->queues[candidate].party;
      card->slice_left_ns = header->quantum_ns ? header->quantum_ns : 1;
      return now;
    }
    if (last) break;
    if (!active(card, candidate)) first = first == candidate ? SOFT_NO_INDEX : first;
  }
  now->count = now->running = 0;
  now->wait_until_ns = wait_until_ns;
  return now;
}

static void advance_card(soft_region *region, uint32_t index, uint64_t until, int depth) {
  soft_header *header = &region->state->header;
  soft_card *card = soft_card_at(region, index);
  if (!card || card->sim_ns > until) return;
  if (card->lost) {
    card->sim_ns = until;
    return;
  }
  if (!depth) looks = 0;
  while (looks < MOST_LOOKS) {
    looks += 16;
    const party *now = take_turn(region, index, until, depth);
    uint64_t room = until - card->sim_ns;
    if (!room) return;
    if (card->switch_left_ns) {
      uint64_t taken = card->switch_left_ns < room ? card->switch_left_ns : room;
      card->switch_left_ns -= taken;
      card->sim_ns += taken;
      continue;
    }
    if (!now->running) {
      card->sim_ns = now->wait_until_ns < until ? now->wait_until_ns : until;
      continue;
    }
    bool shared = contended(region, card);
    uint64_t length = now->least_left_ns < room ? now->least_left_ns : room;
    if (shared && card->slice_left_ns < length) length = card->slice_left_ns;
    account(region, card, index, now, length);
    for (uint32_t i = 0; i < now->count; i++) run(&region->state->queues[now->queues[i]], &now->sets[i], card->sim_ns, length);
    card->sim_ns += length;
    if (shared) card->slice_left_ns -= length;
    else card->slice_left_ns = header->quantum_ns ? header->quantum_ns : 1;
  }
}

void soft_sched_advance(soft_region *region, uint64_t until_ns) {
  for (uint32_t c = 0; c < soft_card_count(region); c++) advance_card(region, c, until_ns, 0);
}

void soft_sched_advance_card(soft_region *region, uint32_t card, uint64_t until_ns) { advance_card(region, card, until_ns, 0); }

uint64_t soft_sched_next(soft_region *region, uint32_t index) {
  soft_card *card = soft_card_at(region, index);
  if (!card || card->lost) return SOFT_FOREVER;
  const party *now = take_turn(region, index, card->sim_ns, 0);
  if (!now->running) return now->wait_until_ns;
  if (card->switch_left_ns) return card->sim_ns + card->switch_left_ns;
  uint64_t length = now->least_left_ns;
  if (contended(region, card) && card->slice_left_ns < length) length = card->slice_left_ns;
  return card->sim_ns + length < card->sim_ns ? SOFT_FOREVER : card->sim_ns + length;
}

/* ---- questions ----------------------------------------------------------- */

static bool has_room(soft_queue *queue) {
  uint32_t undone = 0;
  if (!sound(queue) || (!queue->parked_count && queue->head - queue->scan < SOFT_DEPTH)) return true; /* what is done before scan only waits to be collected */
  for (walk w = {0}; step(queue, &w);) undone += !(placed(queue, w.at)->flags & SOFT_ENTRY_DONE);
  return undone < SOFT_DEPTH;
}

bool soft_sched_done(soft_region *region, uint32_t index, uint32_t stream, uint64_t seq) {
  soft_queue *queue = soft_queue_at(region, index);
  if (!queue || !sound(queue)) return true;
  if (stream == SOFT_FOR_ROOM) return has_room(queue);
  if (seq >= queue->head) {
    if (!queue->head) return true;
    seq = queue->head - 1;
  }
  for (uint64_t at = seq + 1; at > queue->scan; at--) {
    const soft_entry *entry = entry_at(queue, at - 1);
    if (stream != SOFT_ALL_STREAMS && entry->stream != stream) continue;
    if (!(entry->flags & SOFT_ENTRY_DONE)) return false;
    if (stream != SOFT_ALL_STREAMS) return true; /* a stream's entries end in order */
  }
  for (uint32_t i = 0; i < queue->parked_count; i++) {
    const soft_parked *aside = &queue->parked[i];
    if (aside->seq <= seq && (stream == SOFT_ALL_STREAMS || aside->entry.stream == stream) && !(aside->entry.flags & SOFT_ENTRY_DONE)) return false;
  }
  return true;
}

bool soft_sched_idle(soft_queue *queue) { return !sound(queue) || (queue->scan == queue->head && !parked_undone(queue)); }

soft_entry *soft_sched_entry(soft_queue *queue, uint64_t seq) {
  if (!sound(queue)) return NULL;
  if (seq >= queue->tail && seq < queue->head) return entry_at(queue, seq);
  for (uint32_t i = 0; i < queue->parked_count; i++)
    if (queue->parked[i].seq == seq) return &queue->parked[i].entry;
  return NULL;
}

bool soft_sched_make_room(soft_queue *queue) {
  if (!has_room(queue)) return false;
  /* some behind the oldest are done: it makes way for them */
  while (queue->head - queue->tail >= SOFT_DEPTH && queue->tail == queue->scan && queue->parked_count < SOFT_DEPTH) {
    queue->parked[queue->parked_count++] = (soft_parked){.seq = queue->scan, .entry = *entry_at(queue, queue->scan)};
    queue->tail = ++queue->scan;
    queue->mixed = 1;
    move_scan(queue);
  }
  return queue->head - queue->tail < SOFT_DEPTH;
}

uint64_t soft_sched_least(soft_region *region, uint32_t index, uint32_t stream, uint64_t seq) {
  soft_queue *queue = soft_queue_at(region, index);
  uint64_t sum = 0;
  if (!queue || soft_sched_idle(queue)) return 0;
  if (stream == SOFT_FOR_ROOM) {
    uint64_t least = ROOM_NAP_NS;
    for (walk w = {0}; step(queue, &w);) {
      const soft_entry *entry = placed(queue, w.at);
      bool runs = entry->kind == SOFT_ENTRY_KERNEL && (entry->flags & (SOFT_ENTRY_STARTED | SOFT_ENTRY_DONE)) == SOFT_ENTRY_STARTED;
      if (runs && entry->left_ns < least) least = entry->left_ns;
    }
    return least;
  }
  if (seq >= queue->head) seq = queue->head - 1;
  if (stream == SOFT_ALL_STREAMS) {
    /* the last one's stream is as good a bound as any */
    uint64_t at = seq;
    while (at > queue->scan && (entry_at(queue, at)->flags & SOFT_ENTRY_DONE)) at--;
    stream = entry_at(queue, at)->stream;
  }
  for (uint32_t i = 0; i < queue->parked_count; i++) {
    const soft_parked *aside = &queue->parked[i];
    if (aside->seq <= seq && aside->entry.stream == stream && !(aside->entry.flags & SOFT_ENTRY_DONE)) sum += aside->entry.left_ns;
  }
  for (uint64_t at = queue->scan; at <= seq; at++) {
    const soft_entry *entry = entry_at(queue, at);
    if (entry->stream == stream && !(entry->flags & SOFT_ENTRY_DONE)) sum += entry->left_ns;
  }
  return sum;
}

uint64_t soft_sched_card_busy(const soft_card *card, uint64_t now_ns) {
  uint64_t period = now_ns / SOFT_SAMPLE_NS;
  if (!period) return 0;
  const soft_bucket *bucket = &card->buckets[(period - 1) % SOFT_CARD_BUCKETS];
  if (bucket->period != period - 1) return 0;
  return bucket->busy_ns < SOFT_SAMPLE_NS ? bucket->busy_ns : SOFT_SAMPLE_NS;
}

uint64_t soft_sched_queue_busy(const soft_queue *queue, uint64_t period) {
  const soft_bucket *bucket = &queue->buckets[period % SOFT_QUEUE_BUCKETS];
  if (bucket->period != period) return 0;
  return bucket->busy_ns < SOFT_SAMPLE_NS ? bucket->busy_ns : SOFT_SAMPLE_NS;
}

/* ---- queues come and go -------------------------------------------------- */

static uint32_t limit_ppm(const soft_region *region, const soft_slot *slot, uint32_t card) {
  uint32_t part = slot->usage[card].sm_limit, all = soft_card_at(region, card)->facts.sm_count;
  return part && part < all ? (uint32_t)((uint64_t)part * FULL_WIDTH / all) : 0;
}

uint32_t soft_sched_queue(soft_region *region, uint32_t card) {
  soft_slot *slot = soft_slot_at(region, region->me);
  if (!slot || card >= soft_card_count(region)) return SOFT_NO_INDEX;
  uint32_t mine = slot->usage[card].queue;
  if (mine < SOFT_QUEUES && region->state->queues[mine].owner == region->me + 1) return mine;
  for (uint32_t i = 0; i < SOFT_QUEUES; i++) {
    soft_queue *queue = &region->state->queues[i];
    if (queue->owner) continue;
    queue->card = card;
    queue->head = queue->tail = queue->scan = 0;
    queue->parked_count = 0;
    queue->mixed = 0;
    queue->party = slot->mps.server;
    queue->limit_ppm = limit_ppm(region, slot, card);
    queue->begun = 0;
    memset(queue->buckets, 0, sizeof queue->buckets);
    queue->owner = region->me + 1;
    if (region->state->header.queues_high < i + 1) region->state->header.queues_high = i + 1;
    slot->usage[card].queue = i;
    return i;
  }
  return SOFT_NO_INDEX;
}

void soft_sched_drop_queue(soft_region *region, uint32_t index) {
  soft_queue *queue = soft_queue_at(region, index);
  if (!queue) return;
  soft_card *card = soft_card_at(region, queue->card);
  uint64_t now = soft_now(region);
  if (sound(queue))
    for (walk w = {0}; step(queue, &w);) {
      soft_entry *entry = placed(queue, w.at);
      if (!(entry->flags & SOFT_ENTRY_DONE)) finish(entry, now);
    }
  queue->scan = queue->head;
  queue->mixed = 0;
  if (!card) return;
  deactivate(card, index);
  if (card->current != index) return;
  if (card->current_party) { /* the others of it keep their turn */
    card->current = SOFT_NO_INDEX;
    return;
  }
  card->slice_left_ns = 0;
  card->switch_left_ns = 0;
}

void soft_sched_drop_slot(soft_region *region, uint32_t index) {
  soft_slot *slot = soft_slot_at(region, index);
  if (!slot) return;
  for (uint32_t c = 0; c < SOFT_CARDS; c++) {
    soft_queue *queue = soft_queue_at(region, slot->usage[c].queue);
    if (!queue || queue->owner != index + 1) continue;
    soft_sched_drop_queue(region, slot->usage[c].queue);
    queue->owner = 0;
    slot->usage[c].queue = SOFT_NO_INDEX;
  }
}

void soft_sched_repair(soft_region *region) {
  soft_header *header = &region->state->header;
  uint32_t high = header->queues_high <= SOFT_QUEUES ? header->queues_high : SOFT_QUEUES;
  for (uint32_t c = 0; c < SOFT_CARDS; c++) memset(header->cards[c].active, 0, sizeof header->cards[c].active);
  for (uint32_t i = 0; i < high; i++) {
    soft_queue *queue = &region->state->queues[i];
    if (!queue->owner) continue;
    soft_slot *slot = soft_slot_at(region, queue->owner - 1);
    if (!slot || queue->card >= SOFT_CARDS || slot->usage[queue->card].queue != i) {
      queue->owner = 0; /* its process died between taking it and noting so */
      continue;
    }
    sound(queue);
    if (!soft_sched_idle(queue)) {
      queue->mixed = 1;
      soft_sched_activate(region, i);
    }
  }
}
