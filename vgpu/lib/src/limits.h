/* SPDX-License-Identifier: Apache-2.0 */
/* limits.h: reading the limits file, mapped or as a copy. */
#ifndef CARVE_LIMITS_H
#define CARVE_LIMITS_H

#include <stdbool.h>

#include "carve_region.h"

/* Copies the bank in force; false where the file is not a valid one. Never waits: it gives up after a few
 * tries if the writer changes generations faster than it can copy. */
bool carve_limits_take(const struct carve_limits *limits, struct carve_limits_bank *bank);

/* The card with that UUID, or -1. */
int carve_limits_find(const struct carve_limits_bank *bank, const uint8_t uuid[16]);

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
