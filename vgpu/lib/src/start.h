/* SPDX-License-Identifier: Apache-2.0 */
/* start.h: what cuInit found out. */
#ifndef CARVE_START_H
#define CARVE_START_H

#include "driver.h"

/* 1 where this process must be a client of MPS and isn't, or has more of a card than its percentage. It gets no
 * context then. */
extern uint32_t carve_start_refused;

#endif
