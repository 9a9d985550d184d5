/* SPDX-License-Identifier: Apache-2.0 */
#include "limits.h"

#include <string.h>

enum { TRIES = 64 };

static uint64_t load(const uint64_t *word) { return __atomic_load_n(word, __ATOMIC_RELAXED); }

/* Whether the generation is still the one by which a bank was chosen, after it was read. */
static bool still(const struct carve_limits *limits, uint64_t generation) {
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    return __atomic_load_n(&limits->generation, __ATOMIC_RELAXED) == generation;
}

/* FNV-1a over a bank, as it is read word by word, its own checksum being zero. */
static uint64_t checksum(const struct carve_limits_bank *bank) {
    const uint64_t *words = (const uint64_t *)bank;
    uint64_t hash = 0xcbf29ce484222325u;
    for (size_t i = 0; i < sizeof *bank / sizeof *words; i++) {
        uint64_t word = i == offsetof(struct carve_limits_bank, checksum) / sizeof *words ? 0 : load(&words[i]);
        for (int shift = 0; shift < 64; shift += 8) {
            hash = (hash ^ (word >> shift & 0xff)) * 0x100000001b3u;
        }
    }
    return hash;
}

/* The bank in force, with what it says of no card; NULL: it isn't valid. It may change once this has returned. */
static const struct carve_limits_bank *in_force(const struct carve_limits *limits, struct carve_limits_facts *facts) {
    if (limits->magic != CARVE_LIMITS_MAGIC || limits->abi != CARVE_ABI || limits->size != CARVE_LIMITS_SIZE) {
        return NULL;
    }
    for (int tries = 0; tries < TRIES; tries++) {
        facts->generation = __atomic_load_n(&limits->generation, __ATOMIC_ACQUIRE);
        const struct carve_limits_bank *bank = &limits->banks[facts->generation & 1];
        facts->card_count = __atomic_load_n(&bank->card_count, __ATOMIC_RELAXED);
        facts->flags = __atomic_load_n(&bank->flags, __ATOMIC_RELAXED);
        bool good = facts->generation != 0 && load(&bank->generation) == facts->generation && load(&bank->checksum) == checksum(bank) &&
                    facts->card_count >= 1 && facts->card_count <= CARVE_MAX_CARDS;
        if (still(limits, facts->generation)) {
            return good ? bank : NULL;
        }
    }
    return NULL;
}

bool carve_limits_facts(const struct carve_limits *limits, struct carve_limits_facts *facts) { return in_force(limits, facts) != NULL; }

static void copy_card(const struct carve_limits_card *from, struct carve_limits_card *to) {
    uint64_t words[sizeof *to / sizeof(uint64_t)];
    for (size_t i = 0; i < sizeof words / sizeof words[0]; i++) {
        words[i] = load((const uint64_t *)from + i);
    }
    memcpy(to, words, sizeof *to);
}

bool carve_limits_card(const struct carve_limits *limits, unsigned card, struct carve_limits_facts *facts, struct carve_limits_card *about) {
    for (int tries = 0; tries < TRIES; tries++) {
        const struct carve_limits_bank *bank = in_force(limits, facts);
        if (bank == NULL || card >= facts->card_count) {
            return false;
        }
        copy_card(&bank->cards[card], about);
        if (still(limits, facts->generation)) {
            return true;
        }
    }
    return false;
}

int carve_limits_find(const struct carve_limits *limits, const uint8_t uuid[16]) {
    struct carve_limits_facts facts;
    struct carve_limits_card card;
    for (int tries = 0; tries < TRIES; tries++) {
        const struct carve_limits_bank *bank = in_force(limits, &facts);
        if (bank == NULL) {
            return -1;
        }
        int found = -1;
        for (uint32_t i = 0; i < facts.card_count && found < 0; i++) {
            copy_card(&bank->cards[i], &card);
            found = memcmp(card.uuid, uuid, 16) == 0 ? (int)i : -1;
        }
        if (still(limits, facts.generation)) {
            return found;
        }
    }
    return -1;
}
