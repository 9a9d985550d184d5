/* SPDX-License-Identifier: Apache-2.0 */
/* credit_test: the account of one process on one card, by itself. What it is for is tested in vgpu/compute/sim. */
#define _GNU_SOURCE
#include "../src/credit.h"

#include <string.h>

#include "tap.h"

#define MS 1000000

static struct carve_pace pace;
static struct carve_credit credit;
static struct carve_cost cost, other;
static struct carve_ticket ticket;
static uint64_t until;

static const struct carve_terms half = {.share_ppm = 500000, .truth_ns = 170 * MS, .ahead_ns = 8 * MS};

static void point(uint64_t at, uint64_t value) {
    pace.points[pace.count % CARVE_PACE_POINTS] = (struct carve_pace_point){at, value};
    pace.count++;
}

static void fresh(void) {
    memset(&credit, 0, sizeof credit);
    memset(&cost, 0, sizeof cost);
    memset(&other, 0, sizeof other);
    memset(&pace, 0, sizeof pace);
}

/* A function whose launches all take the same. */
static void learn(struct carve_cost *c, int64_t ns) {
    c->samples = CARVE_COST_KNOWN;
    c->estimate_ns = ns;
}

static void test_pace(void) {
    fresh();
    check(carve_pace_at(&pace, 77) == 77, "without an agent the pace is the clock's");
    point(1000, 500);
    point(2000, 1000);
    point(3000, 1250);
    pace.contexts = 4;
    check(carve_pace_at(&pace, 2000) == 1000 && carve_pace_at(&pace, 1500) == 750 && carve_pace_at(&pace, 2400) == 1100, "between points it is linear");
    check(carve_pace_at(&pace, 3400) == 1350, "behind the last it is 1/n");
    check(carve_pace_at(&pace, 3000 + CARVE_PACE_STALE_NS + 50) == 1250 + (int64_t)CARVE_PACE_STALE_NS / 4 + 50, "until the agent was silent for too long");
    check(carve_pace_at(&pace, 900) == 400, "before the first it is the clock's");
    for (uint64_t i = 0; i < 3000; i++) {
        point(4000 + i * 1000, 1500 + i * 250);
    }
    check(carve_pace_at(&pace, 4000 + 2500 * 1000 + 500) == 1500 + 2500 * 250 + 125, "it goes round");
    uint64_t oldest = 4000 + (3000 - CARVE_PACE_POINTS) * 1000;
    check(carve_pace_at(&pace, oldest) < 1500 + (3000 - CARVE_PACE_POINTS) * 250, "and what may be written over at this moment isn't read");
}

static void test_credit(void) {
    uint64_t now = 1000 * MS;
    fresh();
    learn(&cost, 1 * MS);
    check(carve_credit_ask(&credit, &cost, &half, now, &ticket, &until) == CARVE_GO && ticket.sampled && ticket.launches == 1, "who was idle may go, and long launches are looked at");
    check(credit.credit_ns == CARVE_CREDIT_IDLE_NS && credit.committed_ns == 1 * MS && credit.since == now, "the estimate is committed");
    carve_credit_done(&credit, &cost, &ticket, half.share_ppm, now, now + 3 * MS, &pace, now + 4 * MS);
    check(credit.charged_ns == 3 * MS && credit.committed_ns == 0 && credit.since == 0, "what it took is charged");
    check(credit.credit_ns == 20 * MS - 3 * MS + 3 * MS / 2 && credit.refilled_at == now + 3 * MS, "and the time up to its end brings credit by the share");
    check(cost.estimate_ns == 1 * MS + 2 * MS / 8, "the estimate follows");

    /* A launch that is held back. */
    fresh();
    learn(&cost, 30 * MS);
    carve_credit_ask(&credit, &cost, &half, now, &ticket, &until);
    check(credit.credit_ns == 20 * MS, "a launch may cost more than there is");
    carve_credit_done(&credit, &cost, &ticket, half.share_ppm, now, now + 30 * MS, &pace, now + 30 * MS);
    check(carve_credit_ask(&credit, &cost, &half, now + 30 * MS, &ticket, &until) == CARVE_GO, "20 + 15 - 30 is enough to go");
    carve_credit_done(&credit, &cost, &ticket, half.share_ppm, now + 30 * MS, now + 60 * MS, &pace, now + 60 * MS);
    check(carve_credit_ask(&credit, &cost, &half, now + 60 * MS, &ticket, &until) == CARVE_SLEEP && until == now + 80 * MS, "10 ms of debt at one half take 20 ms");
    check(carve_credit_ask(&credit, &cost, &half, now + 80 * MS, &ticket, &until) == CARVE_GO, "and not longer");
    check(carve_credit_ask(&credit, &cost, &half, now + 81 * MS, &ticket, &until) == CARVE_WAIT_DONE, "who has work out waits for that");

    /* Caps. */
    fresh();
    learn(&cost, 1 * MS);
    carve_credit_ask(&credit, &cost, &half, now, &ticket, &until);
    carve_credit_ask(&credit, &other, &half, now + 10000 * (uint64_t)MS, &ticket, &until);
    check(credit.credit_ns == CARVE_CREDIT_MOST_NS, "work that waits saves up 300 ms at most");
    for (int i = 0; i < 4; i++) {
        uint64_t gap = i == 0 ? 0 : i == 1 ? CARVE_CREDIT_GAP_NS : CARVE_CREDIT_GAP_NS + 1, late = i == 3 ? 1000 * (uint64_t)MS : 0;
        fresh();
        learn(&cost, 1 * MS);
        carve_credit_ask(&credit, &cost, &half, now, &ticket, &until);
        carve_credit_done(&credit, &cost, &ticket, half.share_ppm, now + 999 * (uint64_t)MS, now + 1000 * (uint64_t)MS, &pace, now + 1000 * (uint64_t)MS + late);
        carve_credit_ask(&credit, &cost, &half, now + 1000 * (uint64_t)MS + gap + late, &ticket, &until);
        check(credit.credit_ns == (i < 2 ? CARVE_CREDIT_MOST_NS : CARVE_CREDIT_IDLE_NS), "work that ran out for %d us%s is work %s", (int)(gap / 1000), i == 3 ? ", when it was seen a second later," : "", i < 2 ? "that waits" : "that didn't, and saves up 20 ms");
    }

    /* Unseen functions. */
    fresh();
    check(carve_credit_ask(&credit, &cost, &half, now, &ticket, &until) == CARVE_GO && credit.committed_ns == 4 * MS, "a function that never ran counts 4 ms");
    check(carve_credit_ask(&credit, &cost, &half, now, &ticket, &until) == CARVE_GO, "two fit in 8 ms of run-ahead");
    check(carve_credit_ask(&credit, &cost, &half, now, &ticket, &until) == CARVE_WAIT_DONE, "a third doesn't");

    /* Gates, borrowing, corrections. */
    fresh();
    learn(&cost, 1 * MS);
    struct carve_terms terms = half;
    terms.gate = CARVE_SHUT;
    check(carve_credit_ask(&credit, &cost, &terms, now, &ticket, &until) == CARVE_WAIT_GATE, "a gate that is shut holds back");
    terms.gate = CARVE_TURN;
    credit.credit_ns = -100 * MS;
    check(carve_credit_ask(&credit, &cost, &terms, now, &ticket, &until) == CARVE_GO, "a turn needs no credit");
    carve_credit_refused(&credit, &cost, &ticket);
    terms.gate = CARVE_BY_CREDIT;
    terms.borrow = terms.elastic = true;
    check(carve_credit_ask(&credit, &cost, &terms, now, &ticket, &until) == CARVE_GO && credit.credit_ns == -CARVE_CREDIT_BORROW_NS, "borrowing leaves 20 ms of debt");
    carve_credit_refused(&credit, &cost, &ticket);
    terms.borrow = false;
    terms.correction = 200 * MS;
    check(carve_credit_ask(&credit, &cost, &terms, now + 1, &ticket, &until) == CARVE_GO && credit.credit_ns == CARVE_CREDIT_REFUND_NS, "a refund after borrowing is cut");
    carve_credit_refused(&credit, &cost, &ticket);
    terms.correction = 100 * MS;
    check(carve_credit_ask(&credit, &cost, &terms, now + 2, &ticket, &until) == CARVE_SLEEP && until == now + 2 + CARVE_CREDIT_SLEEP_ELASTIC_NS && credit.credit_ns == -70 * MS, "corrections go both ways, and elastic shares look again soon");
}

static void test_price(void) {
    uint64_t now = 1000 * MS;
    fresh();
    learn(&cost, 1 * MS);
    point(now, 500 * MS);
    point(now + 10 * MS, 505 * MS);
    pace.contexts = pace.most = 2;
    carve_credit_ask(&credit, &cost, &half, now, &ticket, &until);
    carve_credit_done(&credit, &cost, &ticket, half.share_ppm, now, now + 10 * MS, &pace, now + 10 * MS);
    check(credit.charged_ns == 5 * MS, "beside one other, half the time is charged");
    carve_credit_ask(&credit, &cost, &half, now + 10 * MS, &ticket, &until);
    carve_credit_done(&credit, &cost, &ticket, half.share_ppm, now + 2 * MS, now + 10 * MS, &pace, now + 10 * MS);
    check(credit.charged_ns == 5 * MS && credit.committed_ns == 0, "time that was charged once isn't charged again");

    /* Short launches side by side: as many of 20 µs as go unseen, on eight streams, took 40 µs. */
    unsigned count = 1, least = 1000, most = 0, bad = 0;
    fresh();
    learn(&cost, 20000);
    carve_credit_ask(&credit, &cost, &half, now, &ticket, &until); /* the first is sampled */
    carve_credit_done(&credit, &cost, &ticket, half.share_ppm, now, now + 20000, &pace, now + 20000);
    now += 20000;
    int64_t charged = credit.charged_ns;
    while (carve_credit_ask(&credit, &cost, &half, now, &ticket, &until) == CARVE_GO && !ticket.sampled) {
        count++;
    }
    check(count >= CARVE_COST_OPEN_NS / 40000 && count <= CARVE_COST_OPEN_NS * 3 / 40000 + 1 && ticket.launches == count && ticket.out == count && credit.outstanding == 1, "the one behind some 200 µs of work stands for all (%u)", count);
    carve_credit_done(&credit, &cost, &ticket, half.share_ppm, now + 20000, now + 40000, &pace, now + 40000);
    check(credit.charged_ns - charged == 40000 && credit.committed_ns == 0 && credit.out == 0, "all of them are charged, but not more than has passed");
    /* Tiny ones: in no fixed distance, and never too many of which nothing is known. */
    fresh();
    learn(&cost, 10);
    count = 0;
    for (int n = 0; n < 10000; n++) {
        count++;
        bad += carve_credit_ask(&credit, &cost, &half, now, &ticket, &until) != CARVE_GO;
        if (ticket.sampled && n > 0) {
            least = count < least ? count : least;
            most = count > most ? count : most;
        }
        if (ticket.sampled) {
            count = 0;
            carve_credit_done(&credit, &cost, &ticket, half.share_ppm, now, now + 10, &pace, now + 10);
        }
    }
    check(bad == 0 && least == CARVE_COST_EVERY / 2 && most == CARVE_COST_EVERY * 3 / 2 - 1, "one in %u to %u is sampled", least, most);
}

/* Functions whose launches aren't all alike. */
static void test_wild(void) {
    uint64_t now = 1000 * MS;
    for (int beside = 0; beside < 2; beside++) {
        int64_t much = beside ? CARVE_COST_WILD_BESIDE_NS : CARVE_COST_WILD_ALONE_NS;
        for (int longer = 0; longer < 2; longer++) {
            fresh();
            learn(&cost, 2000);
            pace.most = 1 + (uint32_t)beside;
            carve_credit_ask(&credit, &cost, &half, now, &ticket, &until);
            /* beside one other half of it is paid */
            carve_credit_done(&credit, &cost, &ticket, half.share_ppm, now, now + (uint64_t)much + (uint64_t)longer, &pace, now + (uint64_t)much + 1);
            cost.estimate_ns = 2000;
            unsigned sampled = 0;
            for (int n = 0; n < CARVE_COST_WILD + 1000; n++) {
                if (carve_credit_ask(&credit, &cost, &half, now + 300 * MS, &ticket, &until) != CARVE_GO || !ticket.sampled) {
                    continue;
                }
                sampled++;
                carve_credit_done(&credit, &cost, &ticket, half.share_ppm, now + 300 * MS, now + 300 * MS, &pace, now + 300 * MS);
            }
            check(longer ? sampled >= CARVE_COST_WILD && sampled < CARVE_COST_WILD + 100 : sampled < 400, "after one that took %lld ns, %s, %u of %u are looked at", (long long)much + longer, beside ? "beside another" : "alone", sampled, CARVE_COST_WILD + 1000);
        }
    }
    /* Nobody knows of any whether it is done. */
    static struct carve_cost many[200];
    static struct carve_ticket tickets[1000];
    fresh();
    unsigned went = 0, samples = 0;
    for (int i = 0; i < 200; i++) {
        learn(&many[i], 1000);
    }
    while (went < 1000 && carve_credit_ask(&credit, &many[went % 200], &half, now, &ticket, &until) == CARVE_GO) {
        tickets[samples] = ticket;
        samples += ticket.sampled;
        went++;
    }
    check(went == CARVE_CREDIT_OUT && credit.out == went && samples >= 2, "of 200 functions in turn %u launches go ahead, %u of them looked at", went, samples);
    carve_credit_done(&credit, &many[0], &tickets[0], half.share_ppm, now, now + 1000, &pace, now + 1000);
    check(credit.out == went - tickets[0].out && carve_credit_ask(&credit, &many[0], &half, now, &ticket, &until) == CARVE_GO, "and more once one of those is done");
}

/* Whatever the order of launches, refusals and completions, when all is done nothing is committed but tails. */
static void test_random(void) {
    enum { FUNCTIONS = 40, OUT = 64 };
    static struct carve_cost costs[FUNCTIONS];
    struct {
        struct carve_ticket ticket;
        int function;
        uint64_t begin;
    } out[OUT];
    uint64_t random = 88172645463325252ull;
    bool negative = false, lost = false;
    for (int round = 0; round < 200; round++) {
        uint64_t now = 1000 * MS;
        int count = 0;
        fresh();
        memset(costs, 0, sizeof costs);
        for (int step = 0; step < 3000; step++) {
            random ^= random << 13, random ^= random >> 7, random ^= random << 17;
            int f = (int)(random % FUNCTIONS);
            now += random >> 40;
            if (count < OUT && random >> 32 & 1) {
                enum carve_verdict v = carve_credit_ask(&credit, &costs[f], &half, now, &ticket, &until);
                if (v == CARVE_GO && (random >> 33 & 15) == 0) {
                    carve_credit_refused(&credit, &costs[f], &ticket);
                } else if (v == CARVE_GO && ticket.sampled) {
                    out[count].ticket = ticket;
                    out[count].function = f;
                    out[count++].begin = now;
                }
                lost |= v == CARVE_WAIT_DONE && count == 0;
            } else if (count > 0) {
                int which = (int)(random >> 34) % count;
                uint64_t took = 1000 + (random >> 45) % (f < 4 ? 2000000 : 60000);
                carve_credit_done(&credit, &costs[out[which].function], &out[which].ticket, half.share_ppm, out[which].begin, out[which].begin + took, &pace, now + took);
                out[which] = out[--count];
            }
            negative |= credit.committed_ns < 0 || credit.tail_ns < 0 || credit.tail_ns > credit.committed_ns;
            negative |= credit.tail > credit.out || credit.out > CARVE_CREDIT_OUT;
            lost |= credit.outstanding != (uint32_t)count || (credit.since != 0) != (count != 0);
        }
        while (count-- > 0) {
            carve_credit_done(&credit, &costs[out[count].function], &out[count].ticket, half.share_ppm, out[count].begin, out[count].begin + 50000, &pace, now + 50000);
        }
        lost |= credit.committed_ns != credit.tail_ns || credit.out != credit.tail;
        /* Tails are swept before they keep anybody from working. */
        for (int n = 0; n < 100 && credit.tail_ns > 2 * CARVE_CREDIT_TAIL_NS; n++) {
            now += 400 * MS;
            if (carve_credit_ask(&credit, &costs[0], &half, now, &ticket, &until) == CARVE_GO && ticket.sampled) {
                carve_credit_done(&credit, &costs[0], &ticket, half.share_ppm, now, now + 50000, &pace, now + 50000);
            }
        }
        lost |= credit.tail_ns > 2 * CARVE_CREDIT_TAIL_NS;
    }
    check(!negative, "nothing committed ever goes below zero");
    check(!lost, "all that was committed is paid, and nobody waits for nothing");
}

int main(void) {
    test_pace();
    test_credit();
    test_price();
    test_wild();
    test_random();
    return tap_done();
}
