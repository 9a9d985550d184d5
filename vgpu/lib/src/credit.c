/* SPDX-License-Identifier: Apache-2.0 */
#include "credit.h"

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

/* ------------------------------------------------------------------------------------------ pace */

static uint64_t word(const uint64_t *at) { return __atomic_load_n(at, __ATOMIC_RELAXED); }

int64_t carve_pace_at(const struct carve_pace *pace, uint64_t at) {
    uint64_t count = __atomic_load_n(&pace->count, __ATOMIC_ACQUIRE);
    if (count == 0) {
        return (int64_t)at;
    }
    const struct carve_pace_point *next = &pace->points[(count - 1) % CARVE_PACE_POINTS];
    uint64_t next_at = word(&next->at), next_value = word(&next->value);
    if (at >= next_at) {
        uint64_t n = __atomic_load_n(&pace->contexts, __ATOMIC_RELAXED), after = at - next_at;
        uint64_t shared = after < CARVE_PACE_STALE_NS ? after : CARVE_PACE_STALE_NS;
        return (int64_t)(next_value + shared / (n > 1 ? n : 1) + (after - shared));
    }
    /* The oldest few may be written over at this moment. */
    uint64_t room = count < CARVE_PACE_POINTS ? count : CARVE_PACE_POINTS - 16;
    for (uint64_t back = 2; back <= room; back++) {
        const struct carve_pace_point *point = &pace->points[(count - back) % CARVE_PACE_POINTS];
        uint64_t point_at = word(&point->at), value = word(&point->value);
        if (point_at <= at) {
            uint64_t span = next_at - point_at, gain = next_value - value;
            return (int64_t)(value + (span ? (uint64_t)((double)gain * (double)(at - point_at) / (double)span) : 0));
        }
        next_at = point_at;
        next_value = value;
    }
    return (int64_t)next_value - (int64_t)(next_at - at);
}

/* What a process that had the card's attention from begin to end has to pay. */
static int64_t price(const struct carve_pace *pace, uint64_t begin, uint64_t end) {
    int64_t raw = (int64_t)(end - begin);
    int64_t n = (int64_t)__atomic_load_n(&pace->most, __ATOMIC_RELAXED);
    int64_t paid = (int64_t)((uint64_t)carve_pace_at(pace, end) - (uint64_t)carve_pace_at(pace, begin));
    return least(most(paid, raw / (most(n, 1) + 1)), raw);
}

/* ---------------------------------------------------------------------------------------- credit */

static int64_t estimate(const struct carve_cost *cost) {
    return cost->samples != 0 || cost->estimate_ns != 0 ? cost->estimate_ns : CARVE_COST_UNSEEN_NS;
}

/* What is saved up stays within a cap, or a long wait would be followed by a long time without any limit; but
 * a launch that costs more than the cap must be possible. */
static void refill(struct carve_credit *credit, uint32_t share_ppm, int64_t needed, uint64_t now) {
    /* Short kernels run out for a moment even where a program launches them as fast as it can. */
    bool demanding = credit->demanding || (now >= credit->refilled_at && now - credit->refilled_at <= CARVE_CREDIT_GAP_NS);
    int64_t cap = most(demanding ? CARVE_CREDIT_MOST_NS : CARVE_CREDIT_IDLE_NS, needed);
    if (credit->refilled_at == 0) {
        credit->refilled_at = now;
        credit->credit_ns = CARVE_CREDIT_IDLE_NS;
    }
    if (now > credit->refilled_at) {
        uint64_t passed = now - credit->refilled_at;
        if (passed > 1000000000000ull) {
            passed = 1000000000000ull; /* a quarter of an hour fills any cap, and the product below fits */
        }
        credit->credit_ns += (int64_t)(passed * share_ppm / 1000000u);
        credit->refilled_at = now;
    }
    credit->credit_ns = least(credit->credit_ns, cap);
}

static void correct(struct carve_credit *credit, const struct carve_terms *terms, uint64_t now) {
    int64_t amount = terms->correction - credit->correction;
    if (amount == 0) {
        return;
    }
    credit->correction = terms->correction;
    credit->credit_ns += amount;
    /* What was borrowed was nobody's: a refund for it would be credit to hold others off with. */
    if (amount > 0 && credit->borrowed_at != 0 && now - credit->borrowed_at < 2 * terms->truth_ns) {
        credit->credit_ns = least(credit->credit_ns, CARVE_CREDIT_REFUND_NS);
    }
}

static void fit_sweep(const struct carve_credit *credit, struct carve_cost *cost) {
    if (cost->sweep != credit->sweep) {
        cost->sweep = credit->sweep;
        cost->open = 0;
        cost->open_ns = 0;
    }
}

/* From a half to one and a half, in 256ths: programs repeat themselves, and one launch in a fixed number would be the
 * same one each time. */
static uint32_t draw(struct carve_credit *credit) {
    uint32_t x = credit->random != 0 ? credit->random : 2463534242u;
    x ^= x << 13;
    x ^= x >> 17;
    x ^= x << 5;
    credit->random = x;
    return 128 + (x >> 24);
}

static bool to_be_sampled(const struct carve_credit *credit, struct carve_cost *cost, int64_t est) {
    if (cost->wild != 0) {
        cost->wild--;
        return true;
    }
    return cost->samples < CARVE_COST_KNOWN || est > CARVE_COST_SHORT_NS || cost->open + 1 >= cost->next ||
           cost->open_ns + est > cost->next_ns || credit->tail + 1 >= credit->sweep_at;
}

static void issue(struct carve_credit *credit, struct carve_cost *cost, uint64_t now, struct carve_ticket *ticket) {
    int64_t est = estimate(cost);
    fit_sweep(credit, cost);
    if (credit->outstanding == 0 && credit->tail == 0) {
        credit->began = now;
    }
    credit->committed_ns += est;
    credit->out++;
    *ticket = (struct carve_ticket){.launches = cost->open + 1, .out = cost->open + 1, .estimate_ns = est, .committed_ns = cost->open_ns + est};
    /* Launches that no ticket stands for, of functions that aren't launched any more, would stay unpaid; and of many
     * functions in turn hundreds could be out before one of them is looked at. */
    bool sweep = credit->tail != cost->open && ((credit->outstanding == credit->late && credit->tail_ns - cost->open_ns > CARVE_CREDIT_TAIL_NS) ||
                                                credit->tail + 1 >= credit->sweep_at);
    ticket->sampled = to_be_sampled(credit, cost, est) || sweep;
    if (!ticket->sampled) {
        cost->open++;
        cost->open_ns += est;
        credit->tail++;
        credit->tail_ns += est;
        return;
    }
    uint32_t drawn = draw(credit);
    cost->next = CARVE_COST_EVERY * drawn / 256;
    cost->next_ns = CARVE_COST_OPEN_NS * drawn / 256;
    credit->sweep_at = credit->stuck != 0 ? 0 : CARVE_COST_EVERY * drawn / 256;
    credit->tail -= cost->open;
    credit->tail_ns -= cost->open_ns;
    cost->open = 0;
    cost->open_ns = 0;
    if (sweep) {
        ticket->swept_ns = credit->tail_ns;
        ticket->committed_ns += credit->tail_ns;
        ticket->out += credit->tail;
        credit->tail = 0;
        credit->tail_ns = 0;
        credit->sweep++;
        cost->sweep = credit->sweep;
    }
    ticket->unseen = cost->samples == 0 && cost->estimate_ns == 0;
    credit->unseen += ticket->unseen;
    if (credit->outstanding++ == 0) {
        credit->since = now;
    }
}

enum carve_verdict carve_credit_ask(struct carve_credit *credit, struct carve_cost *cost, const struct carve_terms *terms,
                                    uint64_t now, struct carve_ticket *ticket, uint64_t *until) {
    int64_t est = estimate(cost);
    correct(credit, terms, now);
    refill(credit, terms->share_ppm, est, now);
    credit->demanding = true;
    credit->waiting = true;
    if (terms->gate == CARVE_SHUT) {
        if (credit->outstanding != credit->late) {
            return CARVE_WAIT_DONE; /* so that the agent sees when the card is free of us */
        }
        *until = now + (uint64_t)CARVE_CREDIT_SLEEP_LEAST_NS;
        return CARVE_WAIT_GATE;
    }
    if (terms->borrow) {
        credit->borrowed_at = now;
        credit->credit_ns = most(credit->credit_ns, -CARVE_CREDIT_BORROW_NS);
    }
    int64_t short_of = credit->committed_ns - credit->credit_ns;
    if (terms->owes_to > now) {
        short_of = most(short_of, (int64_t)((terms->owes_to - now) / 1000000u * terms->share_ppm) + 1);
    }
    if (short_of > 0 && terms->gate != CARVE_TURN && !terms->borrow) {
        /* What is out will be paid when it is done, and the agent counts us as busy until then. */
        if (credit->outstanding != credit->late) {
            return CARVE_WAIT_DONE;
        }
        int64_t sleep = (int64_t)((uint64_t)least(short_of, 1000000000000ll) * 1000000u / terms->share_ppm);
        sleep = most(sleep, CARVE_CREDIT_SLEEP_LEAST_NS);
        sleep = least(sleep, terms->elastic ? CARVE_CREDIT_SLEEP_ELASTIC_NS : CARVE_CREDIT_SLEEP_MOST_NS);
        *until = now + (uint64_t)sleep;
        return CARVE_SLEEP;
    }
    uint32_t out = carve_credit_out(cost, terms->beside);
    if (credit->stuck != 0 && out > CARVE_CREDIT_OUT_STUCK) {
        out = CARVE_CREDIT_OUT_STUCK;
    }
    if ((credit->committed_ns + est > terms->ahead_ns || credit->out >= out) && credit->outstanding != credit->late) {
        return CARVE_WAIT_DONE;
    }
    credit->waiting = false;
    issue(credit, cost, now, ticket);
    return CARVE_GO;
}

static void pay_nothing(struct carve_credit *credit, const struct carve_ticket *ticket) {
    credit->late -= ticket->late;
    credit->stuck -= ticket->stuck;
    credit->unseen -= ticket->unseen;
    if (--credit->outstanding == 0) {
        credit->since = 0;
    }
}

void carve_credit_refused(struct carve_credit *credit, struct carve_cost *cost, const struct carve_ticket *ticket) {
    if (ticket->late) {
        pay_nothing(credit, ticket); /* all that it held was given back */
        return;
    }
    credit->committed_ns -= ticket->estimate_ns;
    fit_sweep(credit, cost);
    if (!ticket->sampled) {
        /* Unless a ticket took it over in between. */
        if (cost->open != 0) {
            cost->open--;
            cost->open_ns -= ticket->estimate_ns;
            credit->out--;
            credit->tail--;
            credit->tail_ns -= ticket->estimate_ns;
        } else {
            credit->committed_ns += ticket->estimate_ns;
        }
        return;
    }
    cost->open += ticket->launches - 1;
    credit->tail += ticket->launches - 1;
    credit->out -= ticket->out - (ticket->launches - 1);
    cost->open_ns += ticket->committed_ns - ticket->swept_ns - ticket->estimate_ns;
    credit->tail_ns += ticket->committed_ns - ticket->swept_ns - ticket->estimate_ns;
    /* What was swept has no function any more: it is paid now. */
    credit->committed_ns -= ticket->swept_ns;
    credit->credit_ns -= ticket->swept_ns;
    credit->charged_ns += ticket->swept_ns;
    credit->unseen -= ticket->unseen;
    if (--credit->outstanding == 0) {
        credit->since = 0;
    }
}

/* One launch that took much longer than others of its function so far has more like it, which samples would miss. */
static void suspect(struct carve_cost *cost, int64_t took, bool beside) {
    if (cost->samples == CARVE_COST_KNOWN && took > 8 * cost->estimate_ns && took > (beside ? CARVE_COST_WILD_BESIDE_NS : CARVE_COST_WILD_ALONE_NS)) {
        cost->wild = CARVE_COST_WILD;
    }
}

static void learn(struct carve_cost *cost, int64_t paid) {
    if (cost->samples < CARVE_COST_KNOWN) {
        cost->estimate_ns += (paid - cost->estimate_ns) / (int64_t)(cost->samples + 1);
        cost->samples++;
    } else {
        cost->estimate_ns += (paid - cost->estimate_ns) / 8;
    }
}

/* end: of the work, as far as it is known. */
static void pay(struct carve_credit *credit, const struct carve_ticket *ticket, int64_t all, uint32_t share_ppm, uint64_t end) {
    credit->credit_ns -= all;
    credit->charged_ns += all;
    credit->committed_ns -= ticket->committed_ns;
    credit->out -= ticket->out;
    credit->late -= ticket->late;
    credit->stuck -= ticket->stuck;
    credit->unseen -= ticket->unseen;
    if (--credit->outstanding != 0) {
        credit->since = credit->since > credit->last_end ? credit->since : credit->last_end;
        return;
    }
    credit->since = 0;
    if (!credit->waiting) {
        refill(credit, share_ppm, 0, end); /* as one that had work, up to there */
        credit->demanding = false;
    }
}

/* What is paid for launches that took the card from begin to end, less what others paid for already. */
static int64_t worth(struct carve_credit *credit, const struct carve_ticket *ticket, uint64_t begin, uint64_t end, const struct carve_pace *pace) {
    uint64_t from = begin > credit->last_end ? begin : credit->last_end;
    int64_t all = ticket->swept_ns;
    if (end > from) {
        all += price(pace, from, end) * (int64_t)ticket->launches;
    }
    if (end > credit->last_end) {
        /* Short launches on several streams run side by side: all that were done since the last look can't have
         * had the card for longer than that was ago, times without any work aside. */
        uint64_t idle_to = credit->began > credit->last_end ? credit->began : credit->last_end;
        int64_t passed = end > idle_to ? price(pace, idle_to, end) : 0;
        if (credit->since > idle_to && credit->since < end) {
            passed = least(passed, price(pace, credit->since, end) + ticket->committed_ns);
        }
        credit->unpaid_ns = least(credit->unpaid_ns + most(passed, 0), most(CARVE_CREDIT_UNPAID_NS, all));
        credit->last_end = end;
    }
    all = least(all, credit->unpaid_ns);
    credit->unpaid_ns -= all;
    return all;
}

void carve_credit_done(struct carve_credit *credit, struct carve_cost *cost, const struct carve_ticket *ticket,
                       uint32_t share_ppm, uint64_t begin, uint64_t end, const struct carve_pace *pace, uint64_t now) {
    int64_t all = worth(credit, ticket, begin, end, pace);
    suspect(cost, end > begin ? price(pace, begin, end) : 0, __atomic_load_n(&pace->most, __ATOMIC_RELAXED) > 1);
    learn(cost, (most(all - ticket->swept_ns, 0) + ticket->paid_ns) / (int64_t)ticket->launches);
    pay(credit, ticket, all, share_ppm, credit->last_end < now ? credit->last_end : now);
}

void carve_credit_guess(struct carve_credit *credit, const struct carve_ticket *ticket, uint32_t share_ppm, uint64_t now) {
    pay(credit, ticket, ticket->committed_ns, share_ppm, now);
}

void carve_credit_cut(struct carve_credit *credit, const struct carve_ticket *ticket, uint32_t share_ppm, uint64_t begin, const struct carve_pace *pace, uint64_t now) {
    pay(credit, ticket, worth(credit, ticket, begin, now, pace), share_ppm, now);
}

void carve_credit_late(struct carve_credit *credit, struct carve_ticket *ticket, uint64_t begun, const struct carve_pace *pace, uint64_t now) {
    int64_t all = ticket->swept_ns;
    if (begun != 0) {
        all = worth(credit, ticket, begun, now, pace);
    }
    credit->credit_ns -= all;
    credit->charged_ns += all;
    credit->committed_ns -= ticket->committed_ns;
    credit->late += !ticket->late;
    credit->stuck += (begun == 0) - ticket->stuck;
    if (credit->stuck != 0) {
        credit->sweep_at = 0; /* each that is launched now is looked at */
    }
    ticket->paid_ns += all - ticket->swept_ns;
    credit->out -= ticket->out;
    ticket->swept_ns = ticket->committed_ns = 0;
    ticket->out = 0;
    ticket->late = true;
    credit->unseen -= ticket->unseen;
    ticket->unseen = false;
    ticket->stuck = begun == 0;
}
