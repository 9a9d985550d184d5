/* SPDX-License-Identifier: Apache-2.0 */
/*
 * carve_region.h: the layout of the two files that a node and a container share.
 *
 *   limits  /usr/lib/carve/limits  written by the node agent only; the container sees it read-only.
 *   usage   /usr/lib/carve/usage   written by the processes of the container; nobody trusts it.
 *
 * This header is the single source of the layout. The Go package vgpu/region repeats the numbers and a
 * test there compiles this file and compares every offset. Both files are little endian; every field is
 * naturally aligned; what one process writes often lies on cache lines that no other process writes.
 *
 * A change of the meaning or the place of a field needs a new CARVE_ABI. Fields named reserved are
 * written as zero and ignored by readers, so they can be given a meaning within one ABI.
 */
#ifndef CARVE_REGION_H
#define CARVE_REGION_H

#include <stddef.h>
#include <stdint.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the limits and usage files are little endian"
#endif

#define CARVE_ABI 1u

#define CARVE_LIMITS_PATH "/usr/lib/carve/limits"
#define CARVE_USAGE_PATH "/usr/lib/carve/usage"

#define CARVE_MAX_CARDS 16u   /* cards that one container can hold */
#define CARVE_MAX_SLOTS 1024u /* processes of one container that use a card at the same time */

/* Charges are counted in units of 512 bytes, the finest grain in which the driver hands out device
 * memory, so that two of them fit in one word that changes in one step. 2^32 - 1 units are just under 2 TiB. */
#define CARVE_UNIT_SHIFT 9
#define CARVE_UNIT_BYTES 512u

/* ------------------------------------------------------------------------------------------ limits */

#define CARVE_LIMITS_MAGIC 0x4d494c4556524143ull /* the bytes "CARVELIM" */
#define CARVE_LIMITS_SIZE 4096u

/* carve_limits_card.flags */
#define CARVE_CARD_COMPUTE_FIXED 0x1u  /* compute_ppm is a hard cap; clear: a guarantee that may borrow */
/* Managed memory: charged in full where neither is set. */
#define CARVE_CARD_MANAGED_COUNT 0x2u  /* counted in uncharged_bytes and not charged */
#define CARVE_CARD_MANAGED_FORBID 0x4u /* refused */
/* What cuMemAlloc is asked for beyond the limit becomes managed memory, counted in uncharged_bytes. */
#define CARVE_CARD_OVERSELL 0x8u

/* carve_limits_bank.flags */
/* NVML inside this container lists the container's own processes under their own pids, so that a process
 * may find its own line there and learn exactly what the driver took for its contexts. */
#define CARVE_LIMITS_SELF_VISIBLE 0x1u

/* carve_limits_live.gate */
#define CARVE_GATE_OPEN 0u
#define CARVE_GATE_CLOSED 1u

/* One card of the container. A card keeps its index for the life of the file; cards may be added behind
 * the last one. */
struct carve_limits_card {
    uint8_t uuid[16];       /* as cuDeviceGetUuid_v2 gives it: a card's, or a MIG instance's */
    uint64_t limit_bytes;   /* device memory, contexts included */
    uint64_t context_bytes; /* what one context costs on this card with this driver, as learnt; 0: not known */
    uint32_t compute_ppm;   /* share of the card's compute in millionths; 0: none of its own, terms alone count */
    uint32_t flags;         /* CARVE_CARD_* */
    uint32_t priority;      /* 0 is the highest */
    /* 1 to 100: programs use the card as clients of MPS, which holds them to this part of its multiprocessors, and
     * not otherwise; compute_ppm is 0 then. 0: they aren't clients. A library that doesn't know the field leaves it
     * to MPS and to the card, which takes no process but its server. */
    uint32_t mps_percent;
    uint32_t multiprocessors; /* of the whole card; 0: not known */
    uint32_t reserved32;
    uint64_t reserved;
};

/* What a resize changes. There are two banks; generation & 1 names the one in force. The writer fills the
 * other bank and then stores generation + 1, so a reader never waits and a writer that dies half way
 * leaves the old limits in force. A reader takes a bank only if the generation did not change while it
 * read, bank.generation equals it, and the checksum is right. */
struct carve_limits_bank {
    uint64_t generation;
    uint64_t checksum; /* FNV-1a, 64 bits, over the bank's bytes with this field as zero */
    uint32_t card_count;
    uint32_t flags; /* CARVE_LIMITS_* */
    uint64_t reserved[5];
    struct carve_limits_card cards[CARVE_MAX_CARDS];
};

/* Words that the agent stores one by one while the container runs. */
struct carve_limits_live {
    uint64_t residual_bytes;    /* used on the card by this container beyond what its usage file says */
    uint64_t residual_sequence; /* grows by one with each publication of residual_bytes */
    uint32_t gate;              /* CARVE_GATE_* */
    uint32_t busy_contexts;     /* contexts with work outstanding on the card */
    uint32_t calibration_ppm;   /* scale of charged to true GPU time; 0: not known */
    uint32_t reserved32;
    uint64_t reserved[4];
};

struct carve_limits {
    uint64_t magic;
    uint32_t abi;
    uint32_t size;       /* CARVE_LIMITS_SIZE */
    uint64_t generation; /* starts at 1, grows by one with each update */
    uint64_t compute;    /* 1: the agent divides compute by what stands behind this page; 0: compute isn't limited */
    uint64_t reserved[4];
    struct carve_limits_bank banks[2];
    struct carve_limits_live live[CARVE_MAX_CARDS];
    uint8_t reserved_tail[832];
};

/* ----------------------------------------------------------------------------------------- compute */

/* How the agent divides a card's time; see vgpu/lib/src/credit.h. It stands behind the first page of the limits
 * file, one carve_compute_card for each card. All times are CLOCK_MONOTONIC in nanoseconds, which is the same in all
 * containers; amounts are nanoseconds of the whole card. A file that ends after its first page has none. */
#define CARVE_PACE_POINTS 1024u /* 2 s at the agent's shortest period; a power of two */
#define CARVE_COMPUTE_AT 4096u

/* The integral of 1/n over time, n being the processes with work on the card: what a process that worked all
 * the time got, were the turns fair. Written by one, read by many: the writer fills point[count % POINTS], then
 * stores count + 1. */
struct carve_pace_point {
    uint64_t at;
    uint64_t value;
};

struct carve_pace {
    uint64_t count;    /* points ever written; 0: nothing known, the pace is the clock's */
    uint32_t contexts; /* n since the last point */
    uint32_t most;     /* largest n of late: bounds how wrong a price can be */
    struct carve_pace_point points[CARVE_PACE_POINTS];
};

/* carve_compute_terms.flags */
#define CARVE_TERMS_GATE 0x3u     /* CARVE_GATE_OPEN: by credit; CARVE_GATE_CLOSED: nothing; CARVE_GATE_TURN */
#define CARVE_TERMS_BORROW 0x4u   /* it may go below its credit */
#define CARVE_TERMS_OWNER 0xffffff00u /* carve_terms_owner of the process that the terms are for */
#define CARVE_GATE_TURN 2u        /* what is launched is launched by the agent's leave, credit or not */

/* For one process, by its slot in the usage file. A slot goes from one process to another: terms that aren't this
 * process' own are nobody's, and what the limits file grants is in force. The agent stores flags as 0 first and last
 * as they are to be, so a process that finds itself in them finds the rest as meant for it. */
struct carve_compute_terms {
    int64_t correction_ns; /* sum of all corrections of its account */
    uint32_t share_ppm;    /* of the card, at this moment */
    uint32_t flags;        /* CARVE_TERMS_* */
};

/* Never 0. The three as in struct carve_process. */
static inline uint32_t carve_terms_owner(uint32_t pid, uint64_t start_ticks, uint64_t image) {
    uint64_t x = ((image << 32 ^ start_ticks) + pid) * 0x9e3779b97f4a7c15ull;
    return ((uint32_t)(x >> 40) | 1u) << 8;
}

struct carve_compute_card {
    uint64_t heartbeat_ns; /* when the agent looked last; 0: never */
    uint64_t truth_ns;     /* how often it corrects */
    uint64_t ahead_ns;     /* estimated work that a process may have on the card at once */
    uint64_t container_ppm; /* share of the card that all processes of the container have together, at this moment; 0: not known */
    uint64_t reserved[2];
    struct carve_pace pace;
    struct carve_compute_terms terms[CARVE_MAX_SLOTS];
    uint8_t reserved_tail[4032];
};

/* ------------------------------------------------------------------------------------------- usage */

#define CARVE_USAGE_MAGIC 0x4553554556524143ull /* the bytes "CARVEUSE" */
#define CARVE_USAGE_SIZE (4096u + CARVE_MAX_SLOTS * 128u + CARVE_MAX_CARDS * CARVE_MAX_SLOTS * 128u)

/* carve_process.state_pid: the state in the low half, the pid in the high half, so that a slot that was
 * taken a moment ago by a process that is dead by now can still be told whose it was. */
#define CARVE_SLOT_FREE 0u
#define CARVE_SLOT_CLAIMING 1u /* taken; the fields behind may not be written yet */
#define CARVE_SLOT_LIVE 2u
#define CARVE_SLOT_DYING 3u /* a sibling found the owner dead or replaced by exec; still charged */
#define CARVE_SLOT_DEAD 4u  /* the agent is sure; it zeroes the slot's card lines next */

/* One process. Slots never move. A slot can be taken if it is free, or if its owner is gone and none of
 * its card lines holds a charge. Only the agent takes a charge off a slot whose owner is gone. */
struct carve_process {
    uint64_t state_pid;     /* CARVE_SLOT_* | pid << 32, pid as in the process' own PID namespace */
    uint64_t start_ticks;   /* field 22 of /proc/self/stat; 0: not known */
    uint64_t pid_namespace; /* inode of /proc/self/ns/pid; 0: not known */
    uint64_t image;         /* differs between two programs that one process ran by exec; 0: not known */
    uint32_t library_abi;   /* CARVE_ABI of the library that owns the slot */
    uint32_t reserved32;
    uint64_t reserved[11];
};

/* What one process holds on one card. All fields are written by the owner alone.
 *
 * charge has the units that are charged in the high half (contexts and managed memory included), and the
 * units of requests that are being admitted at this moment in the low half; a request moves from one to
 * the other in one store.
 *
 * sequence grows before and after each decrease of charge. So when a reader reads (sequence, charge) of
 * every slot, and then (charge, sequence) of every slot, in that order each, and finds the same values,
 * nothing was taken back in between and the sum was true at one instant. */
struct carve_usage_line {
    uint64_t charge;
    uint64_t sequence;
    uint64_t context_bytes;      /* part of charge that is contexts */
    uint64_t managed_bytes;      /* part of charge that is managed memory */
    uint64_t allocations;        /* live ones */
    uint64_t refusals;           /* requests refused since the slot was taken */
    uint64_t last_refused_bytes; /* size of the latest of them */
    uint64_t peak_bytes;         /* largest charge since the slot was taken */
    uint64_t uncharged_bytes;    /* managed memory that policy leaves uncharged: see CARVE_CARD_MANAGED_COUNT, _OVERSELL */
    uint64_t imported_bytes;     /* memory of others that is open here; its owner is charged */

    /* Compute, nanoseconds. Odd while the words behind it are being written. */
    uint64_t compute_sequence;
    uint64_t charged_ns;   /* all GPU time that was paid since the slot was taken */
    uint64_t since_ns;     /* unpaid work ran after this; 0: none is out */
    uint64_t committed_ns; /* estimate of the unpaid work; with CARVE_COMPUTE_WAITING */
    int64_t credit_ns;     /* at credit_at_ns */
    uint64_t credit_at_ns;
};

#define CARVE_COMPUTE_WAITING (1ull << 63) /* a launch is held back */

/* What the processes of the container have of one card together, those that have ended and those to come. The container
 * earns GPU time at its share, and what it uses moves spent_to_ns: the time by which it has earned all that its
 * processes paid or have out. Later than now: it owes. What it saved up is the time since then, within a cap. Written by
 * all processes in one step each. */
struct carve_purse {
    uint64_t spent_to_ns;
    uint64_t first_ns; /* what functions took when they ran first, on average of late; 0: not known */
    uint64_t reserved[6];
};

/* Who takes a slot counts that in mark before the first charge, and raises high_water if need be. Who lowers
 * high_water reads mark, then looks at the slots, then exchanges mark if it is as it was: so either a slot that is
 * taken meanwhile is seen, or the exchange fails. It is never lowered from CARVE_MAX_SLOTS, where the agent puts it in
 * a file that it had to mend: slots that look free there may have owners. Libraries before this kept claims at 0 and
 * lowered nothing; all processes of a container have one library. */
struct carve_usage {
    uint64_t magic;
    uint32_t abi;
    uint32_t size;       /* CARVE_USAGE_SIZE */
    uint32_t slot_count; /* CARVE_MAX_SLOTS */
    uint32_t card_count; /* CARVE_MAX_CARDS */
    union {
        uint64_t mark; /* the two as one word: they change together */
        struct {
            uint32_t high_water; /* no slot at or above it has an owner or a charge; bounded by readers */
            uint32_t claims;     /* grows by one with each slot taken and each lowering of high_water */
        };
    };
    uint8_t reserved_page[32];
    struct carve_purse purses[CARVE_MAX_CARDS];
    uint8_t reserved_tail[3008];
    struct carve_process processes[CARVE_MAX_SLOTS];
    /* lines[card][slot]: a column per card, cards in the order of the limits file */
    struct carve_usage_line lines[CARVE_MAX_CARDS][CARVE_MAX_SLOTS];
};

#define CARVE_CHARGE(used_units, pending_units) (((uint64_t)(used_units) << 32) | (uint32_t)(pending_units))
#define CARVE_CHARGE_USED(charge) ((uint32_t)((charge) >> 32))
#define CARVE_CHARGE_PENDING(charge) ((uint32_t)(charge))
#define CARVE_STATE_PID(state, pid) (((uint64_t)(uint32_t)(pid) << 32) | (uint32_t)(state))
#define CARVE_MARK(high_water, claims) (((uint64_t)(uint32_t)(claims) << 32) | (uint32_t)(high_water))
#define CARVE_MARK_HIGH(mark) ((uint32_t)(mark))
#define CARVE_MARK_CLAIMS(mark) ((uint32_t)((mark) >> 32))
#define CARVE_STATE(state_pid) ((uint32_t)(state_pid))
#define CARVE_PID(state_pid) ((uint32_t)((state_pid) >> 32))

/* ------------------------------------------------------------------------------------------ checks */

#define CARVE_AT(type, field, offset) \
    _Static_assert(offsetof(struct type, field) == (offset), #type "." #field " moved")

_Static_assert(sizeof(struct carve_limits_card) == 64, "a card is one cache line");
CARVE_AT(carve_limits_card, limit_bytes, 16);
CARVE_AT(carve_limits_card, context_bytes, 24);
CARVE_AT(carve_limits_card, compute_ppm, 32);
CARVE_AT(carve_limits_card, flags, 36);
CARVE_AT(carve_limits_card, priority, 40);
CARVE_AT(carve_limits_card, mps_percent, 44);
CARVE_AT(carve_limits_card, multiprocessors, 48);

_Static_assert(sizeof(struct carve_limits_bank) == 1088, "a bank is 17 cache lines");
CARVE_AT(carve_limits_bank, checksum, 8);
CARVE_AT(carve_limits_bank, card_count, 16);
CARVE_AT(carve_limits_bank, flags, 20);
CARVE_AT(carve_limits_bank, cards, 64);

_Static_assert(sizeof(struct carve_limits_live) == 64, "the live words of a card are one cache line");
CARVE_AT(carve_limits_live, residual_sequence, 8);
CARVE_AT(carve_limits_live, gate, 16);
CARVE_AT(carve_limits_live, busy_contexts, 20);
CARVE_AT(carve_limits_live, calibration_ppm, 24);

_Static_assert(sizeof(struct carve_limits) == CARVE_LIMITS_SIZE, "the limits file is one page");
CARVE_AT(carve_limits, abi, 8);
CARVE_AT(carve_limits, size, 12);
CARVE_AT(carve_limits, generation, 16);
CARVE_AT(carve_limits, compute, 24);
CARVE_AT(carve_limits, banks, 64);
CARVE_AT(carve_limits, live, 2240);

_Static_assert(sizeof(struct carve_compute_card) == 9 * 4096, "a card's compute is nine pages");
CARVE_AT(carve_compute_card, truth_ns, 8);
CARVE_AT(carve_compute_card, ahead_ns, 16);
CARVE_AT(carve_compute_card, container_ppm, 24);
CARVE_AT(carve_compute_card, pace, 48);
CARVE_AT(carve_compute_card, terms, 16448);
CARVE_AT(carve_pace, contexts, 8);
CARVE_AT(carve_pace, most, 12);
CARVE_AT(carve_pace, points, 16);
CARVE_AT(carve_compute_terms, share_ppm, 8);
CARVE_AT(carve_compute_terms, flags, 12);

_Static_assert(sizeof(struct carve_process) == 128, "a process is two cache lines");
CARVE_AT(carve_process, start_ticks, 8);
CARVE_AT(carve_process, pid_namespace, 16);
CARVE_AT(carve_process, image, 24);
CARVE_AT(carve_process, library_abi, 32);

_Static_assert(sizeof(struct carve_usage_line) == 128, "a card line is two cache lines");
CARVE_AT(carve_usage_line, sequence, 8);
CARVE_AT(carve_usage_line, context_bytes, 16);
CARVE_AT(carve_usage_line, managed_bytes, 24);
CARVE_AT(carve_usage_line, allocations, 32);
CARVE_AT(carve_usage_line, refusals, 40);
CARVE_AT(carve_usage_line, last_refused_bytes, 48);
CARVE_AT(carve_usage_line, peak_bytes, 56);
CARVE_AT(carve_usage_line, uncharged_bytes, 64);
CARVE_AT(carve_usage_line, imported_bytes, 72);
CARVE_AT(carve_usage_line, compute_sequence, 80);
CARVE_AT(carve_usage_line, charged_ns, 88);
CARVE_AT(carve_usage_line, since_ns, 96);
CARVE_AT(carve_usage_line, committed_ns, 104);
CARVE_AT(carve_usage_line, credit_ns, 112);
CARVE_AT(carve_usage_line, credit_at_ns, 120);

_Static_assert(sizeof(struct carve_purse) == 64, "a purse is one cache line");
_Static_assert(sizeof(struct carve_usage) == CARVE_USAGE_SIZE, "the usage file's size");
CARVE_AT(carve_usage, abi, 8);
CARVE_AT(carve_usage, size, 12);
CARVE_AT(carve_usage, slot_count, 16);
CARVE_AT(carve_usage, card_count, 20);
CARVE_AT(carve_usage, mark, 24);
CARVE_AT(carve_usage, high_water, 24);
CARVE_AT(carve_usage, claims, 28);
CARVE_AT(carve_usage, purses, 64);
CARVE_AT(carve_usage, processes, 4096);
CARVE_AT(carve_usage, lines, 4096 + 128 * 1024);

#endif
