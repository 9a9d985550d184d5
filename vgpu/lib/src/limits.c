/* SPDX-License-Identifier: Apache-2.0 */
#include "limits.h"

#include <string.h>

static uint64_t checksum(const struct carve_limits_bank *bank) {
    const uint8_t *bytes = (const uint8_t *)bank;
    const size_t skip = offsetof(struct carve_limits_bank, checksum);
    uint64_t hash = 0xcbf29ce484222325u;
    for (size_t i = 0; i < sizeof *bank; i++) {
        hash ^= i - skip < sizeof bank->checksum ? 0 : bytes[i];
        hash *= 0x100000001b3u;
    }
    return hash;
}

bool carve_limits_take(const struct carve_limits *limits, struct carve_limits_bank *bank) {
    if (limits->magic != CARVE_LIMITS_MAGIC || limits->abi != CARVE_ABI || limits->size != CARVE_LIMITS_SIZE) {
        return false;
    }
    for (int tries = 0; tries < 64; tries++) {
        uint64_t generation = __atomic_load_n(&limits->generation, __ATOMIC_ACQUIRE);
        const uint64_t *from = (const uint64_t *)&limits->banks[generation & 1];
        uint64_t words[sizeof *bank / sizeof(uint64_t)];
        for (size_t i = 0; i < sizeof words / sizeof words[0]; i++) {
            words[i] = __atomic_load_n(&from[i], __ATOMIC_RELAXED);
        }
        __atomic_thread_fence(__ATOMIC_ACQUIRE);
        if (__atomic_load_n(&limits->generation, __ATOMIC_RELAXED) != generation) {
            continue;
        }
        memcpy(bank, words, sizeof *bank);
        return generation != 0 && bank->generation == generation && bank->checksum == checksum(bank) &&
               bank->card_count >= 1 && bank->card_count <= CARVE_MAX_CARDS;
    }
    return false;
}

int carve_limits_find(const struct carve_limits_bank *bank, const uint8_t uuid[16]) {
    for (uint32_t i = 0; i < bank->card_count; i++) {
        if (memcmp(bank->cards[i].uuid, uuid, 16) == 0) {
            return (int)i;
        }
    }
    return -1;
}
