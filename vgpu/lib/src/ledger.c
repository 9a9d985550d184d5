/* SPDX-License-Identifier: Apache-2.0 */
#include "ledger.h"

#include "limits.h"

/* The total over all slots, at one instant or about then. */
struct sum {
    uint64_t used;
    uint64_t pending;
};

uint32_t carve_limit(struct carve_state *s, unsigned card) {
    for (int tries = 0; tries < 64; tries++) {
        uint64_t generation = __atomic_load_n(&s->limits->generation, __ATOMIC_ACQUIRE);
        if (CARVE_UNLIKELY(generation != __atomic_load_n(&s->good_generation, __ATOMIC_ACQUIRE))) {
            if (!carve_limits_good(s, generation)) {
                continue;
            }
        }
        const struct carve_limits_bank *bank = &s->limits->banks[generation & 1];
        uint32_t count = __atomic_load_n(&bank->card_count, __ATOMIC_RELAXED);
        uint64_t limit = __atomic_load_n(&bank->cards[card].limit_bytes, __ATOMIC_RELAXED);
        __atomic_thread_fence(__ATOMIC_ACQUIRE);
        if (CARVE_LIKELY(__atomic_load_n(&s->limits->generation, __ATOMIC_RELAXED) == generation)) {
            return card < count ? carve_units_down(limit) : 0;
        }
    }
    return 0;
}

uint32_t carve_card_flags(struct carve_state *s, unsigned card) {
    struct carve_limits_facts facts;
    struct carve_limits_card about;
    return carve_limits_card(s->limits, card, &facts, &about) ? about.flags : 0;
}

bool carve_limits_readable(struct carve_state *s) {
    struct carve_limits_facts facts;
    return carve_limits_facts(s->limits, &facts);
}

static uint64_t residual(struct carve_state *s, unsigned card) {
    return carve_units_up(__atomic_load_n(&s->limits->live[card].residual_bytes, __ATOMIC_RELAXED));
}

static inline void add(struct sum *sum, uint64_t charge) {
    sum->used += CARVE_CHARGE_USED(charge);
    sum->pending += CARVE_CHARGE_PENDING(charge);
}

/* What the other processes have. */
static inline struct sum sum_others(struct carve_state *s, unsigned card) {
    struct sum sum = {0, 0};
    const struct carve_usage_line *lines = s->usage->lines[card];
    uint32_t high = carve_high_water(s);
    uint32_t own = s->slot_taken ? s->slot : CARVE_MAX_SLOTS;
    for (uint32_t i = 0; i < high; i++) {
        if (i != own) {
            add(&sum, __atomic_load_n(&lines[i].charge, __ATOMIC_ACQUIRE));
            CARVE_STEP("summing");
        }
    }
    return sum;
}

/* The same, true at one instant: two passes that found the same, see carve_region.h. False where others
 * change too fast for that. */
static bool sum_others_exactly(struct carve_state *s, unsigned card, struct sum *sum) {
    static const struct sum none;
    const struct carve_usage_line *lines = s->usage->lines[card];
    uint32_t high = carve_high_water(s);
    uint32_t own = s->slot_taken ? s->slot : CARVE_MAX_SLOTS;
    /* A pass is compared with the next by its totals and a hash that no two different readings share by
     * chance; so it needs no memory of its own for 1024 slots. */
    uint64_t before = 0, after = 0;
    *sum = none;
    for (uint32_t i = 0; i < high; i++) {
        if (i != own) {
            uint64_t sequence = __atomic_load_n(&lines[i].sequence, __ATOMIC_ACQUIRE);
            uint64_t charge = __atomic_load_n(&lines[i].charge, __ATOMIC_ACQUIRE);
            add(sum, charge);
            before = (before ^ charge) * 0x9e3779b97f4a7c15u + sequence;
            before ^= before >> 29;
        }
    }
    for (uint32_t i = 0; i < high; i++) {
        if (i != own) {
            uint64_t charge = __atomic_load_n(&lines[i].charge, __ATOMIC_ACQUIRE);
            uint64_t sequence = __atomic_load_n(&lines[i].sequence, __ATOMIC_ACQUIRE);
            after = (after ^ charge) * 0x9e3779b97f4a7c15u + sequence;
            after ^= after >> 29;
        }
    }
    return before == after && high == carve_high_water(s);
}

/* Whether a process with a lower slot has a request pending. */
static bool lower_pending(struct carve_state *s, unsigned card) {
    const struct carve_usage_line *lines = s->usage->lines[card];
    for (uint32_t i = 0; i < s->slot; i++) {
        if (CARVE_CHARGE_PENDING(__atomic_load_n(&lines[i].charge, __ATOMIC_ACQUIRE)) != 0) {
            return true;
        }
    }
    return false;
}

/* What is charged to processes that are gone. */
static uint64_t dead_units(struct carve_state *s, unsigned card) {
    uint64_t units = 0;
    uint32_t high = carve_high_water(s);
    for (uint32_t i = 0; i < high; i++) {
        uint64_t charge = __atomic_load_n(&s->usage->lines[card][i].charge, __ATOMIC_ACQUIRE);
        if (i != s->slot && charge != 0 && carve_owner_gone(s, i)) {
            units += (uint64_t)CARVE_CHARGE_USED(charge) + CARVE_CHARGE_PENDING(charge);
        }
    }
    return units;
}

/* ---- the own account; its lock is held ---- */

static inline void publish(struct carve_state *s, unsigned card, struct carve_account *a) {
    uint64_t charge = CARVE_CHARGE(a->used, a->pending);
    __atomic_store_n(&a->charge, charge, __ATOMIC_RELAXED);
    __atomic_store_n(&s->usage->lines[card][s->slot].charge, charge, __ATOMIC_RELEASE);
}

/* Around each decrease, see carve_region.h. */
static inline void publish_less(struct carve_state *s, unsigned card, struct carve_account *a) {
    struct carve_usage_line *line = &s->usage->lines[card][s->slot];
    __atomic_store_n(&line->sequence, a->sequence + 1, __ATOMIC_RELEASE);
    publish(s, card, a);
    a->sequence += 2;
    __atomic_store_n(&line->sequence, a->sequence, __ATOMIC_RELEASE);
}

/* Others must see it before this process looks at them. */
static inline void publish_pending(struct carve_state *s, unsigned card, struct carve_account *a, uint32_t units) {
    a->pending += units;
#if defined(__x86_64__)
    /* An exchange orders all that comes after it, for less than a store and a fence cost. */
    __atomic_store_n(&a->charge, CARVE_CHARGE(a->used, a->pending), __ATOMIC_RELAXED);
    (void)__atomic_exchange_n(&s->usage->lines[card][s->slot].charge, CARVE_CHARGE(a->used, a->pending), __ATOMIC_SEQ_CST);
#else
    publish(s, card, a);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
#endif
}

static inline void withdraw(struct carve_state *s, unsigned card, struct carve_account *a, uint32_t units) {
    a->pending -= units;
    publish_less(s, card, a);
}

static inline void note_peak(struct carve_state *s, unsigned card, struct carve_account *a) {
    if (a->used > a->peak) {
        a->peak = a->used;
        __atomic_store_n(&s->usage->lines[card][s->slot].peak_bytes, carve_units_bytes(a->peak), __ATOMIC_RELAXED);
    }
}

static inline void commit(struct carve_state *s, unsigned card, struct carve_account *a, uint32_t units) {
    a->pending -= units;
    a->used += units;
    publish(s, card, a);
    note_peak(s, card, a);
}

static void refuse(struct carve_state *s, unsigned card, struct carve_account *a, uint64_t asked_bytes) {
    struct carve_usage_line *line = &s->usage->lines[card][s->slot];
    a->refusals++;
    a->last_refused_bytes = asked_bytes;
    __atomic_store_n(&line->last_refused_bytes, a->last_refused_bytes, __ATOMIC_RELAXED);
    __atomic_store_n(&line->refusals, a->refusals, __ATOMIC_RELAXED);
}

static inline uint64_t own(const struct carve_account *a) { return (uint64_t)a->used + a->pending; }

static inline uint64_t all(const struct carve_account *a, struct sum others) {
    return own(a) + others.used + others.pending;
}

/* ---- admission ---- */

/* Whether waiting for the agent to take charges off dead processes can help, and may go on. */
static bool wait_for_dead(struct carve_state *s, unsigned card, uint64_t over, uint64_t *deadline) {
    uint64_t now = carve_now();
    if (*deadline == 0) {
        if (now < __atomic_load_n(&s->no_wait_until, __ATOMIC_RELAXED)) {
            return false;
        }
        *deadline = now + CARVE_DEAD_WAIT_NS;
    }
    if (dead_units(s, card) < over) {
        return false;
    }
    if (now >= *deadline) {
        /* Nobody takes them off at present; the next requests needn't find that out each for itself. */
        __atomic_store_n(&s->no_wait_until, now + CARVE_DEAD_RETRY_NS, __ATOMIC_RELAXED);
        return false;
    }
    carve_sleep(1000000);
    return true;
}

/* The request met others'. One thread of the process at a time comes here. */
static bool admit_slowly(struct carve_state *s, unsigned card, uint32_t units, uint64_t asked_bytes) {
    struct carve_account *a = &s->accounts[card];
    uint64_t pending_deadline = carve_now() + CARVE_PENDING_WAIT_NS, dead_deadline = 0;
    unsigned round = 0, mixed = 0;
    bool published = false;
    carve_lock(&a->lock);
    for (;;) {
        uint64_t limit = carve_limit(s, card), rest = residual(s, card);
        struct sum others = sum_others(s, card);
        bool late = round != 0 && carve_now() >= pending_deadline;
        if (published) {
            if (all(a, others) + rest <= limit) {
                commit(s, card, a, units);
                carve_unlock(&a->lock);
                return true;
            }
            if (late || own(a) + others.used + rest > limit || lower_pending(s, card)) {
                withdraw(s, card, a, units);
                published = false;
            }
        } else if (all(a, others) + rest + units <= limit) {
            publish_pending(s, card, a, units);
            CARVE_STEP("slow-pending");
            published = true;
            continue; /* and weigh again at once */
        } else if (own(a) + rest + units > limit) {
            break; /* whatever the others do */
        } else if (own(a) + others.used + rest + units > limit) {
            /* Too much is in use. Be sure of that: the sum may have counted one block in two places. */
            bool exact = sum_others_exactly(s, card, &others);
            uint64_t total = own(a) + others.used + rest + units;
            if (total > limit && (exact || (late && ++mixed >= CARVE_MIXED_LOOKS))) {
                carve_unlock(&a->lock);
                bool again = wait_for_dead(s, card, total - limit, &dead_deadline);
                carve_lock(&a->lock);
                if (!again) {
                    break;
                }
                pending_deadline = carve_now() + CARVE_PENDING_WAIT_NS;
                continue;
            }
        } else if (late) {
            /* Requests of others stand in the way, of processes that are stopped or dead. Be sure of that, too: this
             * one may be late because it was stopped itself, and have seen next to nothing. */
            bool exact = sum_others_exactly(s, card, &others);
            if (all(a, others) + rest + units > limit && (exact || ++mixed >= CARVE_MIXED_LOOKS)) {
                break;
            }
        }
        /* Not under the lock: other threads may free meanwhile. */
        carve_unlock(&a->lock);
        carve_back_off(&round);
        carve_lock(&a->lock);
    }
    refuse(s, card, a, asked_bytes);
    carve_unlock(&a->lock);
    return false;
}

static inline void count(uint32_t *counter) { __atomic_store_n(counter, *counter + 1, __ATOMIC_RELEASE); }

/* keep: what fits becomes used, else it stays pending. */
static inline bool weigh(struct carve_state *s, unsigned card, uint32_t units, bool keep, bool page) {
    if (CARVE_UNLIKELY(!carve_slot(s))) {
        return false;
    }
    struct carve_account *a = &s->accounts[card];
    bool fits = false;
    carve_lock(&a->lock);
    uint64_t limit = carve_limit(s, card), rest = residual(s, card);
    if (CARVE_LIKELY(all(a, sum_others(s, card)) + rest + units <= limit)) {
        CARVE_STEP("fits");
        publish_pending(s, card, a, units);
        CARVE_STEP("pending");
        /* The limit anew: whoever lowers it stores it, then reads the charges. So either the lower one is met
         * here, or this request is met there. */
        fits = all(a, sum_others(s, card)) + rest <= carve_limit(s, card);
        CARVE_STEP("weighed");
        if (CARVE_UNLIKELY(!fits)) {
            withdraw(s, card, a, units);
        } else if (keep) {
            if (page) {
                count(&a->pieces_begun);
            }
            commit(s, card, a, units);
            CARVE_STEP("committed");
        }
    }
    carve_unlock(&a->lock);
    return fits;
}

bool carve_try(struct carve_state *s, unsigned card, uint32_t units) { return weigh(s, card, units, true, false); }

bool carve_try_page(struct carve_state *s, unsigned card) { return weigh(s, card, CARVE_PAGE_UNITS, true, true); }

bool carve_hold(struct carve_state *s, unsigned card, uint32_t units) { return weigh(s, card, units, false, false); }

/* Units within what a charge can hold. */
static uint32_t within(const struct carve_account *a, int64_t units) {
    uint32_t room = UINT32_MAX - a->used - a->pending;
    return units < (int64_t)room ? (uint32_t)units : room;
}

void carve_keep(struct carve_state *s, unsigned card, uint32_t held, int64_t units) {
    struct carve_account *a = &s->accounts[card];
    carve_lock(&a->lock);
    a->pending -= held;
    if (units < 0) {
        a->used -= (uint64_t)-units < a->used ? (uint32_t)-units : a->used;
    } else {
        a->used += within(a, units);
    }
    publish_less(s, card, a); /* in one store: nobody sees it counted twice, or not at all */
    note_peak(s, card, a);
    carve_unlock(&a->lock);
}

bool carve_admit(struct carve_state *s, unsigned card, uint32_t units, uint64_t asked_bytes) {
    if (CARVE_LIKELY(carve_try(s, card, units))) {
        return true;
    }
    if (CARVE_UNLIKELY(!carve_slot(s))) {
        return false;
    }
    carve_lock(&s->accounts[card].slow);
    bool admitted = admit_slowly(s, card, units, asked_bytes);
    carve_unlock(&s->accounts[card].slow);
    return admitted;
}

static inline void release(struct carve_state *s, unsigned card, uint32_t units, bool over) {
    struct carve_account *a = &s->accounts[card];
    carve_lock(&a->lock);
    a->used -= units < a->used ? units : a->used;
    publish_less(s, card, a);
    if (over) {
        count(&a->pieces_over);
    }
    carve_unlock(&a->lock);
}

void carve_release(struct carve_state *s, unsigned card, uint32_t units) { release(s, card, units, false); }

static void count_locked(struct carve_account *a, uint32_t *counter) {
    carve_lock(&a->lock);
    count(counter);
    carve_unlock(&a->lock);
}

void carve_page_begun(struct carve_state *s, unsigned card) { count_locked(&s->accounts[card], &s->accounts[card].pieces_begun); }

void carve_page_refused(struct carve_state *s, unsigned card) { count_locked(&s->accounts[card], &s->accounts[card].pieces_over); }

void carve_serial_begin(struct carve_state *s, unsigned card) {
    carve_lock(&s->accounts[card].slow);
    __atomic_store_n(&s->accounts[card].serial, 1, __ATOMIC_SEQ_CST);
}

void carve_serial_end(struct carve_state *s, unsigned card) {
    __atomic_store_n(&s->accounts[card].serial, 0, __ATOMIC_SEQ_CST);
    carve_unlock(&s->accounts[card].slow);
}

static inline void release_page(struct carve_state *s, unsigned card, bool over) {
    struct carve_account *a = &s->accounts[card];
    if (CARVE_LIKELY(__atomic_load_n(&a->serial, __ATOMIC_SEQ_CST) == 0)) {
        release(s, card, CARVE_PAGE_UNITS, over);
        return;
    }
    carve_lock(&a->slow);
    release(s, card, CARVE_PAGE_UNITS, over);
    carve_unlock(&a->slow);
}

void carve_release_page(struct carve_state *s, unsigned card) { release_page(s, card, false); }

void carve_page_over(struct carve_state *s, unsigned card) { release_page(s, card, true); }

void carve_correct(struct carve_state *s, unsigned card, int64_t units) {
    struct carve_account *a = &s->accounts[card];
    if (units < 0) {
        carve_release(s, card, units < -(int64_t)UINT32_MAX ? UINT32_MAX : (uint32_t)-units);
    } else if (units > 0) {
        carve_lock(&a->lock);
        uint32_t more = within(a, units);
        a->pending += more;
        commit(s, card, a, more);
        carve_unlock(&a->lock);
    }
}

void carve_note_context(struct carve_state *s, unsigned card, int64_t units) {
    struct carve_account *a = &s->accounts[card];
    carve_lock(&a->lock);
    a->context += (uint64_t)units;
    __atomic_store_n(&s->usage->lines[card][s->slot].context_bytes, carve_units_bytes(a->context), __ATOMIC_RELAXED);
    carve_unlock(&a->lock);
}

uint64_t carve_charged(struct carve_state *s, unsigned card) {
    carve_lower_high_water(s, card);
    struct sum sum = sum_others(s, card);
    add(&sum, __atomic_load_n(&s->accounts[card].charge, __ATOMIC_RELAXED));
    return sum.used + sum.pending + residual(s, card);
}

uint32_t carve_room(struct carve_state *s, unsigned card) {
    uint64_t limit = carve_limit(s, card), charged = carve_charged(s, card);
    return charged < limit ? (uint32_t)(limit - charged) : 0;
}
