/* SPDX-License-Identifier: Apache-2.0 */
/*
 * leaving.h: blocks that the program freed in a stream, and that the driver frees when the stream comes to it.
 *
 * What cuMemAlloc and its kin gave may be given to cuMemFreeAsync. Until the stream is there the memory is taken, and so it
 * stays charged: an event that is recorded behind the free tells when it is gone. Looked at when a stream was waited
 * for, when somebody asks how much is free, and before anything is refused.
 */
#ifndef CARVE_LEAVING_H
#define CARVE_LEAVING_H

#include "driver.h"
#include "pointers.h"
#include "state.h"

/* Whether this process has any. */
static inline bool carve_leaving_any(struct carve_state *s) {
    return CARVE_UNLIKELY(__atomic_load_n(&s->leaving.count, __ATOMIC_ACQUIRE) != 0);
}

/* The driver took the block, which carve_pointers_take gave, to free it in the stream. */
void carve_leaving_add(const struct carve_driver *d, struct carve_state *s, const struct carve_pointer *block, CUstream stream, bool per_thread);

/* Gives back the charge of those that are gone. */
void carve_leaving_look(const struct carve_driver *d, struct carve_state *s);

/* The driver gave back what the context had. */
void carve_leaving_forget(struct carve_state *s, uint32_t context);

#endif
