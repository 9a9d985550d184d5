/* SPDX-License-Identifier: Apache-2.0 */
/*
 * arrays.h: how much memory arrays take.
 *
 * Their sizes are the driver's: it tells them of an array that gets its memory later, and such a one can be made for
 * the asking. Their places it doesn't show. So pages of small arrays are counted as if they were filled first fit,
 * newest page first; a driver that does it otherwise holds a page more or less now and then.
 */
#ifndef CARVE_ARRAYS_H
#define CARVE_ARRAYS_H

#include "driver.h"
#include "pointers.h"
#include "state.h"

/* What an array, or a mipmapped one (levels not 0), takes in the current context, in bytes. */
uint64_t carve_array_bytes(const struct carve_driver *d, CUdevice device, const CUDA_ARRAY3D_DESCRIPTOR *descriptor, unsigned int levels);

/* Charges an array and fills in kind, units and place of block, whose card and context are given. False where it
 * doesn't fit. */
bool carve_array_charge(const struct carve_driver *d, struct carve_state *s, struct carve_pointer *block, uint64_t bytes);

/* Gives back a small array, and its page with the last of it. */
void carve_array_give(struct carve_state *s, const struct carve_pointer *block);

#endif
