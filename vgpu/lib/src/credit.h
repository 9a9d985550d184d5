/* SPDX-License-Identifier: Apache-2.0 */
/*
 * credit.h: how much of a card this process may use now, in GPU time.
 *
 * Pure: no system call, no allocation, no lock, no clock of its own. Whoever calls holds a lock around one
 * carve_credit and all carve_costs of that card, and brings the time. All times are nanoseconds of one clock;
 * amounts are nanoseconds of the whole card.
 *
 * A process earns credit at its share of the time that passes, and pays for what the card did for it. What a
 * launch cost is known when it is done; until then its estimate is committed. What was done is paid by the
 * card's pace: where n processes took turns, an interval between two events holds the others' work, too, and
 * about one n-th of it was ours. The agent publishes the integral of 1/n for that, sees by the driver's own
 * figures what was paid too much or too little, and gives it back or takes it.
 */
#ifndef CARVE_CREDIT_H
#define CARVE_CREDIT_H

#include <stdbool.h>
#include <stdint.h>

#include "carve_region.h"

enum {
    CARVE_COST_KNOWN = 4,    /* samples after which an estimate is a moving average */
    CARVE_COST_EVERY = 32,   /* of short launches one in so many is looked at, on average */
    CARVE_COST_WILD = 4096,  /* launches each of which is looked at after one took much longer than the others */
    CARVE_CREDIT_OUT = 96,   /* launches of which nobody knows yet whether they are done, at most */
    CARVE_CREDIT_OUT_BESIDE = 512, /* beside others: while they have the card a program that launches as fast as the
                                      card works needs as many queued as it works off in its turn */
    CARVE_CREDIT_OUT_STUCK = 16, /* in a second, while one isn't waited for any more of which nobody knows whether it is
                                    on the card: behind it may be what takes the card for long, or nothing at all */
    CARVE_CREDIT_OUT_WILD = 16, /* where a launch of a function of which some take much longer would be another */
};

#define CARVE_COST_UNSEEN_NS 4000000ll      /* of a function that never ran: a low guess would let hundreds of long ones queue */
#define CARVE_COST_SHORT_NS 100000ll        /* up to here launches are sampled only */
#define CARVE_COST_OPEN_NS 200000ll         /* and so much of a function's work, by its estimate, goes by unseen, on average */
#define CARVE_COST_WILD_ALONE_NS 50000ll    /* much longer is more than eight times the estimate, and than this */
#define CARVE_COST_WILD_BESIDE_NS 4000000ll /* or this, where an event may be late by another's time on the card */
#define CARVE_CREDIT_MOST_NS 300000000ll    /* saved up while there is work that waits */
#define CARVE_CREDIT_IDLE_NS 20000000ll     /* saved up without any */
#define CARVE_CREDIT_GAP_NS 1000000u        /* without work for no longer than this is as with it */
#define CARVE_CREDIT_BORROW_NS 20000000ll   /* debt that borrowing leaves at most */
#define CARVE_CREDIT_REFUND_NS 30000000ll   /* credit after a refund for what was borrowed, at most */
#define CARVE_CREDIT_SLEEP_LEAST_NS 2000000ll
#define CARVE_CREDIT_SLEEP_MOST_NS 50000000ll
#define CARVE_CREDIT_SLEEP_ELASTIC_NS 2000000ll /* at most, for who may borrow any moment */
#define CARVE_CREDIT_TAIL_NS 1000000ll          /* unsampled work that may stay unpaid */
#define CARVE_CREDIT_UNPAID_NS 2000000ll        /* the card's time that later samples may be paid for */
#define CARVE_PACE_STALE_NS 100000000ull        /* without news for so long the pace is the clock's */

/* The pace at some time: between points linear, after the last at 1/n, before the first at 1. */
int64_t carve_pace_at(const struct carve_pace *pace, uint64_t at);

/* What the agent allows at this moment. */
enum carve_gate {
    CARVE_BY_CREDIT, /* fixed and elastic shares */
    CARVE_SHUT,      /* nothing may be launched */
    CARVE_TURN,      /* what is launched now is launched by the agent's leave, credit or not */
};

struct carve_terms {
    uint32_t share_ppm;    /* of the card, for this process, at this moment; 1 to 1,000,000 */
    uint32_t gate;         /* enum carve_gate */
    bool elastic;          /* may borrow at times */
    bool borrow;           /* may borrow now */
    bool beside;           /* others have work on the card */
    uint64_t owes_to;      /* the container owes until then, which holds this process off; 0: its own account says all */
    int64_t correction;    /* sum of all corrections since the start */
    uint64_t truth_ns;     /* how often the agent corrects */
    int64_t ahead_ns;      /* estimated work that may be on the card at once */
};

/* What is known of a function's cost on one card. Zeroed: never launched. */
struct carve_cost {
    int64_t estimate_ns; /* of one launch; a guess while there are no samples, or 0 */
    int64_t open_ns;     /* committed since the last sampled launch */
    int64_t next_ns;     /* with so much open a launch is sampled */
    uint32_t samples;    /* up to CARVE_COST_KNOWN */
    uint32_t open;       /* launches since the last sampled one */
    uint32_t next;       /* that many with this one, and it is sampled */
    uint32_t wild;       /* so many more are all sampled */
    uint32_t sweep;      /* open and open_ns are of that sweep, else both are 0 */
};

/* The account of one process on one card. Zeroed: new. */
struct carve_credit {
    int64_t credit_ns;
    int64_t committed_ns; /* estimates of what was launched and isn't paid */
    int64_t charged_ns;   /* all that was ever paid, corrections aside */
    int64_t tail_ns;      /* part of committed that no ticket holds */
    int64_t unpaid_ns;    /* time of the card up to last_end that nothing was paid for, within a bound */
    int64_t correction;   /* as applied */
    uint64_t refilled_at; /* 0: never */
    uint64_t last_end;    /* the card's work up to here is paid */
    uint64_t began;       /* when work was launched last while none was out */
    uint64_t since;       /* the oldest unpaid work can't have begun earlier; 0: none is out */
    uint64_t borrowed_at; /* 0: never */
    uint32_t outstanding; /* tickets */
    uint32_t late;        /* of them; see carve_credit_late */
    uint32_t stuck;       /* of these, that weren't seen to be on the card */
    uint32_t out;         /* launches of which it isn't known that they are done, late ones aside */
    uint32_t tail;        /* of them, that no ticket stands for */
    uint32_t unseen; /* tickets of functions that never ran, at CARVE_COST_UNSEEN_NS */
    uint32_t sweep;
    uint32_t sweep_at; /* that many in the tail with this one, and it stands for all */
    uint32_t random;
    bool waiting;   /* a launch is held back */
    bool demanding; /* was at the last look */
};

/* One launch. */
struct carve_ticket {
    bool sampled;         /* begin and end must be found out, and carve_credit_done called */
    bool late;            /* nobody waits for it */
    bool stuck;           /* and it wasn't seen to be on the card */
    bool unseen;          /* nothing was known of its function */
    uint32_t launches;    /* of its function, that it stands for */
    uint32_t out;         /* launches that it stands for, swept ones and all; 0: late */
    int64_t estimate_ns;  /* of this one */
    int64_t committed_ns; /* for all it stands for */
    int64_t swept_ns;     /* part of that: of other functions' launches */
    int64_t paid_ns;      /* before it was done, being late */
};

enum carve_verdict {
    CARVE_GO,        /* launch; the ticket is filled in */
    CARVE_SLEEP,     /* ask again at the time given */
    CARVE_WAIT_DONE, /* ask again when a sampled launch is done */
    CARVE_WAIT_GATE, /* ask again when the agent changes the gate, or at the time given */
};

/* May this launch go? */
enum carve_verdict carve_credit_ask(struct carve_credit *credit, struct carve_cost *cost, const struct carve_terms *terms,
                                    uint64_t now, struct carve_ticket *ticket, uint64_t *until);

static inline uint32_t carve_credit_out(const struct carve_cost *cost, bool beside) {
    return cost->wild != 0 ? CARVE_CREDIT_OUT_WILD : beside ? CARVE_CREDIT_OUT_BESIDE : CARVE_CREDIT_OUT;
}

/* The same for who has credit and launches what is short and known, without a look at the clock: true where the
 * launch may go and needn't be sampled; false says nothing. correction as in the terms; gate open, no loan. */
static inline bool carve_credit_quick(struct carve_credit *credit, struct carve_cost *cost, int64_t correction, int64_t ahead_ns, bool beside) {
    int64_t committed = credit->committed_ns + cost->estimate_ns;
    if (cost->samples < CARVE_COST_KNOWN || cost->estimate_ns > CARVE_COST_SHORT_NS || cost->open + 1 >= cost->next ||
        cost->open_ns + cost->estimate_ns > cost->next_ns || cost->wild != 0 ||
        cost->sweep != credit->sweep || credit->tail == 0 || credit->tail + 1 >= credit->sweep_at || credit->out >= carve_credit_out(cost, beside) ||
        credit->tail_ns > CARVE_CREDIT_TAIL_NS || committed > credit->credit_ns ||
        committed > ahead_ns || credit->correction != correction || !credit->demanding || credit->waiting) {
        return false;
    }
    cost->open++;
    cost->open_ns += cost->estimate_ns;
    credit->tail++;
    credit->out++;
    credit->tail_ns += cost->estimate_ns;
    credit->committed_ns = committed;
    return true;
}

/* The driver refused it: as if it had never been asked for. */
void carve_credit_refused(struct carve_credit *credit, struct carve_cost *cost, const struct carve_ticket *ticket);

/* A sampled launch isn't done though it was waited for for long: nobody waits for it any more, and its estimate holds
 * nobody off. begun: when it was launched, if it is on the card by now, which is paid for up to now; 0: it isn't. The
 * rest is paid when it is done, or when it is called again. */
void carve_credit_late(struct carve_credit *credit, struct carve_ticket *ticket, uint64_t begun, const struct carve_pace *pace, uint64_t now);

/* Of a sampled launch that had the card from begin on nothing more can be found out, since its context went by now: it
 * is paid for that time. */
void carve_credit_cut(struct carve_credit *credit, const struct carve_ticket *ticket, uint32_t share_ppm, uint64_t begin, const struct carve_pace *pace, uint64_t now);

/* A sampled launch of which nothing can be found out: it is paid by its estimate. */
void carve_credit_guess(struct carve_credit *credit, const struct carve_ticket *ticket, uint32_t share_ppm, uint64_t now);

/* A sampled launch ran from begin to end. What it stands for is paid. share_ppm as in the terms. */
void carve_credit_done(struct carve_credit *credit, struct carve_cost *cost, const struct carve_ticket *ticket,
                       uint32_t share_ppm, uint64_t begin, uint64_t end, const struct carve_pace *pace, uint64_t now);

#endif
