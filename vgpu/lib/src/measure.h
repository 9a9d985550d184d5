/* SPDX-License-Identifier: Apache-2.0 */
/* measure.h: what the driver says this process uses on a card. */
#ifndef CARVE_MEASURE_H
#define CARVE_MEASURE_H

#include "sys.h"

#ifndef CARVE_NVML_AT
#define CARVE_NVML_AT "/usr/lib/carve/driver/libnvidia-ml.so.1"
#endif

/* Loads NVML, which stays from then on. */
void carve_measure_prepare(void);

/* Reads this process' own line in the real NVML's process list of the card, in units rounded up. False where
 * NVML isn't there, can't be started or doesn't list this process under its own pid. It starts and stops NVML,
 * which can take tens of milliseconds: only for limits that say that it will be answered. */
bool carve_measure(const uint8_t uuid[16], uint32_t *units);

#endif
