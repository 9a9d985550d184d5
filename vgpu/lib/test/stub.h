/* SPDX-License-Identifier: Apache-2.0 */
/* stub.h: what the parts of the stub driver share. */
#ifndef STUB_H
#define STUB_H

#include <stdbool.h>

#include "cuda_abi.h"
#include "stub_truth.h"

/* The books; NULL where none are kept. */
struct stub_truth *stub_books(void);
/* Takes bytes of a card, if it has them, and gives them back. */
bool stub_take(int card, uint64_t bytes);
void stub_give(int card, uint64_t bytes);
/* The card of a device; -1 where there is none. */
int stub_card(CUdevice device);
/* One thread at a time is in the driver. */
void stub_lock(void);
void stub_unlock(void);

#endif
