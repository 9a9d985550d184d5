/* SPDX-License-Identifier: Apache-2.0 */
/* limits.h: reading the limits file, mapped or as a copy. */
#ifndef CARVE_LIMITS_H
#define CARVE_LIMITS_H

#include <stdbool.h>

#include "carve_region.h"

/* All of these look at the bank in force, and say no where the file is not a valid one. They never wait: they give up
 * after a few tries if the writer changes generations faster than they can read. They copy no bank: a thread of the
 * program may have next to no stack. */

/* What a bank says of no card. */
struct carve_limits_facts {
    uint64_t generation;
    uint32_t card_count;
    uint32_t flags; /* CARVE_LIMITS_* */
};
bool carve_limits_facts(const struct carve_limits *limits, struct carve_limits_facts *facts);

/* What it says of a card; false also where it doesn't have so many. */
bool carve_limits_card(const struct carve_limits *limits, unsigned card, struct carve_limits_facts *facts, struct carve_limits_card *about);

/* The card with that UUID, or -1. */
int carve_limits_find(const struct carve_limits *limits, const uint8_t uuid[16]);

/* The driver's page: see pointers.h. */
#define CARVE_PAGE_SHIFT 21
#define CARVE_PAGE_UNITS (1u << (CARVE_PAGE_SHIFT - CARVE_UNIT_SHIFT))

/* Bytes in whole units, downwards for what one may use and upwards for what is used. Saturates. */
static inline uint32_t carve_units_down(uint64_t bytes) {
    uint64_t units = bytes >> CARVE_UNIT_SHIFT;
    return units > UINT32_MAX ? UINT32_MAX : (uint32_t)units;
}

static inline uint32_t carve_units_up(uint64_t bytes) {
    uint64_t units = (bytes >> CARVE_UNIT_SHIFT) + ((bytes & (CARVE_UNIT_BYTES - 1)) != 0);
    return units > UINT32_MAX ? UINT32_MAX : (uint32_t)units;
}

static inline uint64_t carve_units_bytes(uint64_t units) { return units << CARVE_UNIT_SHIFT; }

#endif
