/* SPDX-License-Identifier: Apache-2.0 */
#include "state.h"

#include "limits.h"

struct carve_state *carve_state_now;

/* Puts a new block in the place of old: none, at first; or the parent's, in a child whose kernel doesn't
 * wipe on fork, which leaves that one alone, locks held and all. */
static struct carve_state *new_block(struct carve_state *old) {
    bool wiped;
    struct carve_state *s = carve_map_wiped(sizeof *s, &wiped);
    if (s == NULL) {
        return NULL;
    }
    s->owner_pid = wiped ? 0 : carve_pid();
    if (__atomic_compare_exchange_n(&carve_state_now, &old, s, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
        return s;
    }
    carve_unmap(s, sizeof *s);
    return old; /* another thread's, which was first */
}

static bool usage_valid(const struct carve_usage *usage) {
    return usage->magic == CARVE_USAGE_MAGIC && usage->abi == CARVE_ABI && usage->size == CARVE_USAGE_SIZE &&
           usage->slot_count == CARVE_MAX_SLOTS && usage->card_count == CARVE_MAX_CARDS;
}

/* The limits file with the pages behind the first, which an agent that knows nothing of them didn't write. */
static const struct carve_limits *map_limits(size_t *bytes) {
    *bytes = CARVE_COMPUTE_AT + CARVE_MAX_CARDS * sizeof(struct carve_compute_card);
    const struct carve_limits *limits = carve_map_file(CARVE_LIMITS_AT, *bytes, false);
    if (limits == NULL) {
        *bytes = sizeof *limits;
        limits = carve_map_file(CARVE_LIMITS_AT, *bytes, false);
    }
    return limits;
}

static bool map_files(struct carve_state *s) {
    struct carve_limits_facts facts;
    size_t bytes;
    const struct carve_limits *limits = map_limits(&bytes);
    if (limits == NULL) {
        return false;
    }
    struct carve_usage *usage = NULL;
    if (carve_limits_facts(limits, &facts)) {
        usage = carve_map_file(CARVE_USAGE_AT, sizeof *usage, true);
    }
    if (usage != NULL && !usage_valid(usage)) {
        carve_unmap(usage, sizeof *usage);
        usage = NULL;
    }
    if (usage == NULL) {
        carve_unmap((void *)limits, bytes);
        return false;
    }
    s->compute = bytes > CARVE_COMPUTE_AT ? (const struct carve_compute_card *)((const uint8_t *)limits + CARVE_COMPUTE_AT) : NULL;
    s->self = carve_self();
    s->limits = limits;
    s->usage = usage;
    s->good_generation = facts.generation;
    s->seen_generation = facts.generation;
    return true;
}

struct carve_state *carve_state_slow(void) {
    struct carve_state *s = __atomic_load_n(&carve_state_now, __ATOMIC_ACQUIRE);
    if (s == NULL || (s->owner_pid != 0 && s->owner_pid != carve_pid())) {
        s = new_block(s);
        if (s == NULL) {
            return NULL;
        }
    }
    if (__atomic_load_n(&s->ready, __ATOMIC_ACQUIRE) != 0) {
        return s;
    }
    carve_lock(&s->attach_lock);
    if (s->ready == 0 && map_files(s)) {
        __atomic_store_n(&s->ready, s->owner_pid == 0 ? CARVE_READY_WIPED : CARVE_READY_BY_PID, __ATOMIC_RELEASE);
    }
    bool ready = s->ready != 0;
    carve_unlock(&s->attach_lock);
    return ready ? s : NULL;
}

bool carve_limits_good(struct carve_state *s, uint64_t generation) {
    struct carve_limits_facts facts;
    if (!carve_limits_facts(s->limits, &facts)) {
        return false;
    }
    __atomic_store_n(&s->good_generation, facts.generation, __ATOMIC_RELEASE);
    return facts.generation == generation;
}

/* ------------------------------------------------------------------------------------------- slots */

/* Whether no card line of the slot holds a charge. Looks only at cards that the limits name: reading a page
 * of the sparse file for the first time makes it. */
static bool uncharged(struct carve_state *s, uint32_t slot, uint32_t cards) {
    for (uint32_t c = 0; c < cards; c++) {
        if (__atomic_load_n(&s->usage->lines[c][slot].charge, __ATOMIC_ACQUIRE) != 0) {
            return false;
        }
    }
    return true;
}

static bool same_process(const struct carve_process *p, uint64_t word, const struct carve_identity *self) {
    return CARVE_PID(word) == self->pid && p->start_ticks == self->start_ticks &&
           p->pid_namespace == self->pid_namespace;
}

bool carve_owner_gone(struct carve_state *s, uint32_t slot) {
    struct carve_process *p = &s->usage->processes[slot];
    uint64_t word = __atomic_load_n(&p->state_pid, __ATOMIC_ACQUIRE);
    switch (CARVE_STATE(word)) {
    case CARVE_SLOT_DYING:
    case CARVE_SLOT_DEAD:
        return true;
    case CARVE_SLOT_LIVE:
        break;
    default:
        return false; /* while it is being claimed, the fields may still be a former owner's */
    }
    uint64_t mine = s->self.pid_namespace;
    if (mine == 0 || p->pid_namespace == 0) {
        /* One of the two has no /proc, so the pid may be of another namespace. Good enough to wait for the agent, who
         * finds out, and not to say that it is dead. */
        return carve_process_gone(CARVE_PID(word), p->start_ticks);
    }
    /* A pid of another namespace means nothing here. */
    if (p->pid_namespace != mine || !carve_process_gone(CARVE_PID(word), p->start_ticks)) {
        return false;
    }
    (void)__atomic_compare_exchange_n(&p->state_pid, &word, CARVE_STATE_PID(CARVE_SLOT_DYING, CARVE_PID(word)), false,
                                      __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
    return true;
}

void carve_mark_gone(struct carve_state *s) {
    uint32_t high = carve_high_water(s), cards = s->limits->banks[__atomic_load_n(&s->limits->generation, __ATOMIC_ACQUIRE) & 1].card_count;
    for (uint32_t i = 0; i < high; i++) {
        bool works = false;
        for (uint32_t c = 0; c < cards && c < CARVE_MAX_CARDS && !works; c++) {
            const struct carve_usage_line *line = &s->usage->lines[c][i];
            works = __atomic_load_n(&line->since_ns, __ATOMIC_RELAXED) != 0 || (__atomic_load_n(&line->committed_ns, __ATOMIC_RELAXED) & CARVE_COMPUTE_WAITING) != 0;
        }
        if (works) {
            (void)carve_owner_gone(s, i);
        }
    }
}

/* Takes a slot as it was seen, if nobody was faster. */
static bool try_claim(struct carve_state *s, uint32_t slot, uint64_t seen, const struct carve_identity *self) {
    return __atomic_compare_exchange_n(&s->usage->processes[slot].state_pid, &seen,
                                       CARVE_STATE_PID(CARVE_SLOT_CLAIMING, self->pid), false, __ATOMIC_ACQ_REL,
                                       __ATOMIC_ACQUIRE);
}

/* Takes a slot whose owner is gone and that holds nothing. */
static bool inherit(struct carve_state *s, uint32_t slot, uint64_t word, uint32_t cards, const struct carve_identity *self) {
    struct carve_process *p = &s->usage->processes[slot];
    uint64_t start_ticks = p->start_ticks;
    if (!uncharged(s, slot, cards) || self->pid_namespace == 0 || p->pid_namespace != self->pid_namespace ||
        !carve_process_gone(CARVE_PID(word), start_ticks)) {
        return false;
    }
    CARVE_STEP("inherit");
    if (!try_claim(s, slot, word, self)) {
        return false;
    }
    if (p->start_ticks == start_ticks && uncharged(s, slot, cards)) {
        return true;
    }
    /* The pid was given to another process meanwhile, and that took this very slot: it never looks at the word. */
    __atomic_store_n(&p->state_pid, word, __ATOMIC_RELEASE);
    return false;
}

/* Whether nobody has a slot, and nothing is charged to it. */
static bool vacant(struct carve_state *s, uint32_t slot, uint32_t cards) {
    uint32_t state = CARVE_STATE(__atomic_load_n(&s->usage->processes[slot].state_pid, __ATOMIC_ACQUIRE));
    return (state == CARVE_SLOT_FREE || state == CARVE_SLOT_DEAD) && uncharged(s, slot, cards);
}

/* A free slot, or one whose owner is gone and that holds no charge; CARVE_MAX_SLOTS where there is none. */
static uint32_t claim(struct carve_state *s, uint32_t cards, const struct carve_identity *self) {
    for (int pass = 0; pass < 2; pass++) {
        for (uint32_t i = 0; i < CARVE_MAX_SLOTS; i++) {
            uint64_t word = __atomic_load_n(&s->usage->processes[i].state_pid, __ATOMIC_ACQUIRE);
            bool taken;
            switch (CARVE_STATE(word)) {
            case CARVE_SLOT_FREE:
                taken = try_claim(s, i, word, self);
                break;
            case CARVE_SLOT_DEAD:
                taken = uncharged(s, i, cards) && try_claim(s, i, word, self);
                break;
            case CARVE_SLOT_LIVE:
            case CARVE_SLOT_DYING:
                /* Asking about a process costs a system call or two: only once nothing else is left. */
                taken = pass == 1 && inherit(s, i, word, cards, self);
                break;
            default:
                taken = false; /* being claimed, or scribbled over */
                break;
            }
            if (taken) {
                return i;
            }
        }
    }
    return CARVE_MAX_SLOTS;
}

/* Counts a slot that was taken, and raises the high water where it lies above. */
static void count_claim(struct carve_state *s, uint32_t high) {
    uint64_t there = __atomic_load_n(&s->usage->mark, __ATOMIC_ACQUIRE), next;
    do {
        uint32_t now = CARVE_MARK_HIGH(there);
        next = CARVE_MARK(now < high ? high : now, CARVE_MARK_CLAIMS(there) + 1);
    } while (!__atomic_compare_exchange_n(&s->usage->mark, &there, next, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE));
}

uint32_t carve_high_water_slow(struct carve_state *s, uint64_t there, uint64_t mine) {
    struct carve_limits_facts facts;
    uint32_t high = CARVE_MARK_HIGH(there), seen = CARVE_MARK_HIGH(mine);
    if (high > CARVE_MAX_SLOTS) {
        high = CARVE_MAX_SLOTS;
    }
    if (__atomic_load_n(&s->slot_taken, __ATOMIC_ACQUIRE) != 0 && high <= s->slot) {
        count_claim(s, s->slot + 1); /* scribbled over: others look at this slot by it */
        high = s->slot + 1;
    }
    if (high < seen) {
        if (CARVE_MARK_CLAIMS(there) == CARVE_MARK_CLAIMS(mine) || !carve_limits_facts(s->limits, &facts)) {
            return seen; /* nobody lowers it without counting that */
        }
        while (seen > high && vacant(s, seen - 1, facts.card_count)) {
            seen--;
        }
        high = seen;
    }
    (void)__atomic_compare_exchange_n(&s->mark, &mine, CARVE_MARK(high, CARVE_MARK_CLAIMS(there)), false, __ATOMIC_RELAXED,
                                      __ATOMIC_RELAXED);
    return high;
}

static void lower_high_water(struct carve_state *s, uint32_t cards) {
    uint64_t there = __atomic_load_n(&s->usage->mark, __ATOMIC_ACQUIRE);
    uint32_t high = CARVE_MARK_HIGH(there), left = high;
    if (high >= CARVE_MAX_SLOTS) {
        return; /* see carve_region.h */
    }
    while (left > 0 && vacant(s, left - 1, cards)) {
        left--;
    }
    CARVE_STEP("lowering");
    if (left < high) {
        /* Once: whoever took a slot meanwhile lowers it in his turn. */
        (void)__atomic_compare_exchange_n(&s->usage->mark, &there, CARVE_MARK(left, CARVE_MARK_CLAIMS(there) + 1), false,
                                          __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
    }
}

void carve_lower_high_water(struct carve_state *s, unsigned card) {
    struct carve_limits_facts facts;
    uint32_t high = carve_high_water(s);
    if (high == 0 || high >= CARVE_MAX_SLOTS) {
        return;
    }
    uint32_t state = CARVE_STATE(__atomic_load_n(&s->usage->processes[high - 1].state_pid, __ATOMIC_ACQUIRE));
    if ((state == CARVE_SLOT_FREE || state == CARVE_SLOT_DEAD) &&
        __atomic_load_n(&s->usage->lines[card][high - 1].charge, __ATOMIC_ACQUIRE) == 0 && carve_limits_facts(s->limits, &facts)) {
        lower_high_water(s, facts.card_count);
    }
}

/* What ran in this process before exec is gone, and so is its memory, soon: the agent takes it off. */
static void mark_predecessors(struct carve_state *s, const struct carve_identity *self) {
    if (self->image == 0 || self->start_ticks == 0) {
        return;
    }
    uint32_t high = carve_high_water(s);
    for (uint32_t i = 0; i < high; i++) {
        struct carve_process *p = &s->usage->processes[i];
        uint64_t word = __atomic_load_n(&p->state_pid, __ATOMIC_ACQUIRE);
        if (CARVE_STATE(word) == CARVE_SLOT_LIVE && same_process(p, word, self) && p->image != self->image) {
            (void)__atomic_compare_exchange_n(&p->state_pid, &word, CARVE_STATE_PID(CARVE_SLOT_DYING, self->pid), false,
                                              __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
        }
    }
}

bool carve_slot_slow(struct carve_state *s) {
    struct carve_limits_facts facts;
    if (!carve_limits_facts(s->limits, &facts)) {
        return false;
    }
    carve_lock(&s->attach_lock);
    if (s->slot_taken == 0) {
        const struct carve_identity self = s->self;
        CARVE_STEP("claim");
        uint32_t slot = claim(s, facts.card_count, &self);
        CARVE_STEP("claimed");
        if (slot < CARVE_MAX_SLOTS) {
            for (uint32_t c = 0; c < facts.card_count; c++) {
                /* What a former owner left; its charge is zero. */
                s->usage->lines[c][slot] = (struct carve_usage_line){0};
            }
            struct carve_process *p = &s->usage->processes[slot];
            p->start_ticks = self.start_ticks;
            p->pid_namespace = self.pid_namespace;
            p->image = self.image;
            p->library_abi = CARVE_ABI;
            /* Before the first charge, so that whoever sums up after it looks at this slot too. */
            count_claim(s, slot + 1);
            CARVE_STEP("counted");
            __atomic_store_n(&p->state_pid, CARVE_STATE_PID(CARVE_SLOT_LIVE, self.pid), __ATOMIC_RELEASE);
            mark_predecessors(s, &self);
            s->slot = slot;
            __atomic_store_n(&s->slot_taken, 1, __ATOMIC_RELEASE);
            lower_high_water(s, facts.card_count);
            CARVE_STEP("attached");
        }
    }
    bool taken = s->slot_taken != 0;
    carve_unlock(&s->attach_lock);
    return taken;
}

bool carve_slot_beside(struct carve_state *s, unsigned card) {
    uint32_t high = carve_high_water(s);
    for (uint32_t i = 0; i < high; i++) {
        const struct carve_process *p = &s->usage->processes[i];
        uint64_t word = __atomic_load_n(&p->state_pid, __ATOMIC_ACQUIRE);
        if (i != s->slot && CARVE_STATE(word) != CARVE_SLOT_FREE && same_process(p, word, &s->self) &&
            __atomic_load_n(&s->usage->lines[card][i].charge, __ATOMIC_ACQUIRE) != 0) {
            return true;
        }
    }
    return false;
}
