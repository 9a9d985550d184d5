/* SPDX-License-Identifier: Apache-2.0 */
/*
 * state.h: what this process knows, and its place in the usage file.
 *
 * Everything that a forked child must not inherit is in one block that the kernel zeroes on fork: the
 * child finds no locks held, no slot, no pointers, no contexts, and starts anew at its first hooked call.
 */
#ifndef CARVE_STATE_H
#define CARVE_STATE_H

#include "carve_region.h"
#include "cuda_abi.h"
#include "sys.h"
#include "turns.h"

/* The test build of the library looks elsewhere. A shipped build can't be told to. */
#ifndef CARVE_LIMITS_AT
#define CARVE_LIMITS_AT CARVE_LIMITS_PATH
#endif
#ifndef CARVE_USAGE_AT
#define CARVE_USAGE_AT CARVE_USAGE_PATH
#endif

enum {
    CARVE_MAX_DEVICES = 64,   /* ordinals of this process */
    CARVE_MAX_CONTEXTS = 512, /* of this process at one time; each costs the card some 100 MiB */
    CARVE_MAX_CAPTURES = 64,  /* that end with their stream or context, if the program doesn't end them */
    CARVE_MAX_PARTS = 64,     /* of cards, described for green contexts, that are told from nonsense */
    CARVE_MAX_RESERVES = 512, /* pools of this process at one time, and cards with memory of graphs */
};

/* This process' account on one card. It is what counts; the line in the usage file is a copy for others,
 * written after each change, so a line that was scribbled over is right again with the next change. Units
 * of CARVE_UNIT_BYTES. */
struct carve_account {
    carve_lock_t lock; /* around every field but slow */
    carve_lock_t slow; /* held by the one thread that waits for other processes, or counts on a hole */
    uint32_t serial;   /* it counts on a hole, see carve_serial_begin */
    uint32_t used;
    uint32_t pending;
    uint32_t peak;
    uint64_t charge; /* used and pending in one word, as in the usage file, to be read without the lock */
    uint64_t context; /* part of used */
    uint64_t refusals;
    uint64_t last_refused_bytes;
    uint64_t sequence;
    uint32_t pieces_begun, pieces_over; /* see carve_pieces_still */
} __attribute__((aligned(64)));

/* Limits that may take memory of the card, see heaps.h: those with lower numbers. */
enum { CARVE_HEAPS = 3 };

struct carve_heap {
    uint64_t first; /* the limit that the context had at first */
    uint32_t units; /* charged for what it takes beyond that */
    bool known;     /* first is */
    bool seen;      /* the driver was seen to take memory as it was set */
};

/* A context that this process created. */
struct carve_context {
    CUcontext handle; /* NULL: free place */
    uint32_t id;      /* never used again, unlike handles */
    int16_t card;
    bool primary;
    bool measured;  /* units is what the driver took; else an estimate */
    CUdevice device;
    uint32_t units;    /* charged for it */
    uint32_t attached; /* uses beyond the first, see cuCtxAttach */
    struct carve_heap heaps[CARVE_HEAPS];
    CUgreenCtx green;  /* it is another name of a part of the primary one, which is charged; else NULL */
};

/* A block of device memory that is charged, by its address. */
struct carve_pointer {
    uint64_t address; /* 0: free place */
    uint32_t units;   /* size, rounded as the driver does */
    uint32_t context; /* carve_context.id; 0: a context that this library doesn't know */
    uint8_t card;
    uint8_t kind;   /* CARVE_KIND_* */
    uint32_t place; /* of an array: see arrays.c; of a piece on its way out: 1 if that counts, see carve_pieces_still */
};

/* A page from which the driver cut pieces. It is what is charged for them. */
struct carve_page {
    uint64_t address; /* 0: free place */
    uint32_t context;
    uint16_t pieces; /* 1 to CARVE_PAGE_UNITS */
    uint16_t units;  /* sum of the pieces, likewise */
    uint8_t card;
    uint32_t map; /* which units are taken: see carve_page_map */
};

/* A bit for each unit of a page; of one that is free, the first word is the next free one. */
struct carve_page_map {
    uint64_t words[64];
};

/* The tables of both; see pointers.c. Each has 1 << bits places, or none where bits is 0. */
struct carve_pointers {
    carve_lock_t lock;
    uint32_t count;
    uint32_t bits;
    uint32_t page_count;
    uint32_t page_bits;
    struct carve_pointer *places;
    struct carve_page *pages;
    struct carve_page_map *maps;
    uint32_t map_count, map_room, free_map; /* counted from 1; 0: none */
    uint64_t blocks[CARVE_MAX_CARDS];        /* live ones */
    uint64_t managed_units[CARVE_MAX_CARDS]; /* sum of the managed ones */
    uint64_t uncharged_units[CARVE_MAX_CARDS];
    uint64_t imported_units[CARVE_MAX_CARDS];
    uint32_t pieces_begun[CARVE_MAX_CARDS], pieces_over[CARVE_MAX_CARDS]; /* see carve_pieces_still */
};

/* Physical memory that the program maps itself: see virtual.c. */
struct carve_block {
    uint32_t units;
    uint32_t references; /* handles and mappings; of memory also bindings to multicast objects */
    uint32_t bindings;   /* to it, of an object: it stays on the list until they are dropped */
    uint32_t exports;    /* of the references: descriptors that the program was given */
    uint32_t next_free;
    uint8_t card;
    bool imported; /* others made it; units are 0 */
    bool object;   /* no memory of its own, and not counted */
};

enum { CARVE_LINK_HANDLE = 1, CARVE_LINK_MAPPING = 2, CARVE_LINK_BINDING = 3, CARVE_LINK_EXPORT = 4 };

/* What leads to a block. */
struct carve_link {
    uint64_t key;   /* handle, first address of the mapping, place in the object, or descriptor */
    uint64_t bytes; /* of a mapping; of a binding its object; of a descriptor what file it is, see carve_file_at */
    uint32_t uses;  /* of a handle: releases that it takes */
    uint32_t block; /* 0: free place */
    uint8_t kind;   /* CARVE_LINK_* */
};

struct carve_virtual {
    struct carve_turn turn;
    uint32_t count; /* of links; there is room for 1 << bits, or none */
    uint32_t bits;
    struct carve_link *links;
    struct carve_block *blocks;
    uint32_t block_count;
    uint32_t block_room;
    uint32_t free_block;
    uint32_t kept; /* blocks of which nothing but descriptors is left */
};

/* A page that small arrays share: see arrays.c. */
struct carve_array_page {
    uint32_t taken; /* a bit for each slot */
    uint32_t context;
    uint32_t next;
    uint8_t lowest; /* slots below it are taken */
    uint8_t card;
    bool listed;    /* among those in which a hole is looked for */
};

/* A block that goes when its stream gets there: see leaving.h. */
struct carve_leaver {
    struct carve_pointer block;
    CUevent event; /* behind the free; NULL: there couldn't be one */
};

struct carve_leaving {
    carve_lock_t lock;
    uint32_t count, room;
    struct carve_leaver *list;
};

struct carve_arrays {
    carve_lock_t lock;
    uint32_t count, room; /* of pages */
    uint32_t open;        /* the first that is listed, counted from 1 */
    uint32_t free_page;
    struct carve_array_page *pages;
};

/* Memory that the driver tells by a figure: see reserves.h. */
struct carve_reserve {
    CUmemoryPool pool; /* NULL: what graphs of the device have */
    uint32_t units;    /* charged: the figure as it was read last */
    uint32_t flight;   /* held by threads that ask the driver at this moment */
    uint32_t inside;   /* those threads, and such as hold nothing */
    uint32_t asking;   /* threads on the way to the driver and back: the place is given to no other, free or not */
    uint32_t counting; /* of them such as hold nothing, since what they need is there: see carve_growth.steady */
    uint32_t counted;  /* what they need */
    CUdevice device;
    int8_t card;
    uint8_t kind;      /* CARVE_RESERVE_*; 0: free place */
    bool doomed;       /* destroyed by the program, but in use */
    bool claimed;      /* a thread has it for itself, or is about to: others wait before they ask the driver */
    uint8_t trials;    /* threads whose request may make it grow by what isn't held, or did: it isn't settled until that is undone */
};

enum { CARVE_RESERVE_POOL = 1, CARVE_RESERVE_GRAPHS = 2 };

struct carve_reserves {
    carve_lock_t lock; /* around everything, and calls of the driver that read a figure or lower it */
    uint32_t count;    /* on the list */
    uint32_t high;
    bool by_pages;     /* pools were seen to grow by pages, beyond their first step */
    struct carve_reserve list[CARVE_MAX_RESERVES];
};

/* An executable graph that has memory of its own: see graphs.h. */
struct carve_graph {
    CUgraphExec exec;
    uint64_t most_bytes; /* that it takes */
    bool in_one;         /* in one piece */
    uint64_t generation; /* in which it had it */
    int reserve;
};

struct carve_graphs { /* under the lock of reserves */
    uint32_t count, room;
    struct carve_graph *list;
    CUgraphExec last;    /* that was launched */
    uint64_t generation; /* grows when memory may have gone from one to another, or back to the card */
};

/* The cards that an executable graph works on: see spread.h. */
struct carve_spread {
    CUgraphExec exec; /* NULL: free place */
    uint32_t cards;
};

struct carve_spreads {
    carve_lock_t lock;
    uint32_t count;
    uint32_t bits; /* there is room for 1 << bits, or none */
    struct carve_spread *list;
};

/* A stream that is being captured: see throttle.h. */
struct carve_capture {
    CUstream stream;
    uint32_t context; /* carve_context.id; 0: not known */
    bool taken;
};

struct carve_state {
    uint32_t ready;     /* 0: nothing below is valid; else CARVE_READY_* */
    uint32_t owner_pid; /* whose state this is, where fork doesn't wipe it */
    carve_lock_t attach_lock;
    uint32_t slot_taken; /* slot is valid */
    uint32_t slot;
    uint64_t mark; /* the file's, with what this process goes by as high water: the file's may be scribbled over */

    struct carve_identity self; /* as the slot will have it: a program may shut itself in before it takes one */
    const struct carve_limits *limits;
    const struct carve_compute_card *compute; /* NULL: the limits file ends after its first page */
    struct carve_usage *usage;
    uint64_t good_generation; /* of limits, whose bank was checked; 0: none */
    uint64_t seen_generation; /* to which the charges of contexts were fitted */
    uint64_t no_wait_until;   /* waiting for the charge of dead siblings failed a moment ago */

    carve_lock_t devices_lock;
    int8_t device_card[CARVE_MAX_DEVICES]; /* 0: not looked up; card + 1; -1: not in the limits */

    carve_lock_t contexts_lock;
    uint32_t last_context_id;
    uint32_t contexts_high;
    uint32_t recent_context; /* index where the last look-up was answered */
    struct carve_turn primary_turns[CARVE_MAX_DEVICES]; /* of each device, to retain, release and reset its primary context */
    struct carve_context contexts[CARVE_MAX_CONTEXTS];

    struct carve_pointers pointers;
    struct carve_virtual virtual; /* under the lock of pointers */
    struct carve_reserves reserves;
    struct carve_graphs graphs;
    struct carve_spreads spreads;
    struct carve_arrays arrays;
    struct carve_leaving leaving;
    struct carve_account accounts[CARVE_MAX_CARDS];

    uint32_t heap_turn; /* a thread sets a limit of a context, see heaps.c */
    uint32_t parts_made;
    CUdevResourceDesc parts[CARVE_MAX_PARTS]; /* the latest */
    uint32_t captures; /* streams that are being captured */
    uint32_t captures_unlisted; /* of them, under the lock: those for which the list had no place */
    carve_lock_t captures_lock;
    struct carve_capture capture_list[CARVE_MAX_CAPTURES];
    struct carve_throttle *throttles[CARVE_MAX_CARDS]; /* see throttle.c; NULL: nothing was launched there */
};

enum {
    CARVE_READY_WIPED = 1,   /* a forked child finds all of it zero */
    CARVE_READY_BY_PID = 2,  /* the kernel can't do that: compare owner_pid each time */
};

/* The state of this process with both files mapped, or NULL where they can't be: then the caller refuses
 * what would need them. A later call tries again. cuInit is the first that asks for it, and from then on no file is
 * opened and no descriptor needed. */
struct carve_state *carve_state_slow(void);
extern struct carve_state *carve_state_now;

static inline struct carve_state *carve_state(void) {
    struct carve_state *s = __atomic_load_n(&carve_state_now, __ATOMIC_ACQUIRE);
    if (CARVE_LIKELY(s != NULL && __atomic_load_n(&s->ready, __ATOMIC_ACQUIRE) == CARVE_READY_WIPED)) {
        return s;
    }
    return carve_state_slow();
}

/* Takes a slot of the usage file unless this process has one; false where none is left. */
bool carve_slot_slow(struct carve_state *s);

static inline bool carve_slot(struct carve_state *s) {
    return CARVE_LIKELY(__atomic_load_n(&s->slot_taken, __ATOMIC_ACQUIRE) != 0) || carve_slot_slow(s);
}

/* Whether this very process has something charged on a card in another slot, too: by another front, which a second
 * dlmopen brought, or of what ran in it before exec and is being taken off. */
bool carve_slot_beside(struct carve_state *s, unsigned card);

/* The mark has changed, or isn't to be believed. */
uint32_t carve_high_water_slow(struct carve_state *s, uint64_t there, uint64_t mine);

/* No slot at or above it has an owner or a charge. Others raise it before their first charge, so whoever reads it
 * after he has published his own misses nobody who doesn't see that. */
static inline uint32_t carve_high_water(struct carve_state *s) {
    uint64_t there = __atomic_load_n(&s->usage->mark, __ATOMIC_ACQUIRE);
    uint64_t mine = __atomic_load_n(&s->mark, __ATOMIC_RELAXED);
    return CARVE_LIKELY(there == mine) ? CARVE_MARK_HIGH(mine) : carve_high_water_slow(s, there, mine);
}

/* Lowers it as far down as there is no owner and no charge, if that is so of the last slot and of that card. */
void carve_lower_high_water(struct carve_state *s, unsigned card);

/* Checks the generation of limits in force; false where the file is not valid. */
bool carve_limits_good(struct carve_state *s, uint64_t generation);

/* Whether the owner of a slot is gone, as far as this process can know. Marks the slot if that is sure. */
bool carve_owner_gone(struct carve_state *s, uint32_t slot);

/* Marks slots whose owners are gone though they say that they have work on a card, or wait for it: nobody takes that off
 * but the agent, which looks less often than a container may run one process after the other. */
void carve_mark_gone(struct carve_state *s);

#endif
