/*
 * library.h - what the parts of the software NVML share.
 *
 * NVML runs in agents that are not tenants, so it treats the shared state as
 * foreign: the file is checked before each call, the lock is waited for with
 * a bound, and every index is checked (state/region.h).
 *
 * An entry point that asks about a card is BEGIN ... END: BEGIN leaves the
 * state locked, the cards' history computed up to now, and the dead buried.
 */
#ifndef SOFT_NVML_H
#define SOFT_NVML_H

#include "../../lib/include/nvml_abi.h"
#include "../state/clock.h"
#include "../state/ledger.h"
#include "../state/lock.h"
#include "../state/region.h"
#include "../state/sched.h"

#define EXPORT __attribute__((visibility("default")))

extern soft_region nvml_region;

/* Checks handle and library, waits as scripted, locks. card and its index are set on success. */
nvmlReturn_t nvml_begin(nvmlDevice_t device, const char *call, soft_card **card, uint32_t *index);
/* The same without a card: initialised and sound, not locked. */
nvmlReturn_t nvml_ready(const char *call);
nvmlReturn_t nvml_lock(void);
nvmlReturn_t nvml_end(nvmlReturn_t result);

#define BEGIN(device)                                                        \
  soft_card *card;                                                           \
  uint32_t index;                                                            \
  nvmlReturn_t begun = nvml_begin(device, __func__, &card, &index);          \
  if (begun != NVML_SUCCESS) return begun;                                   \
  (void)index
#define END(result) return nvml_end(result)

/* Copies a text that the caller has length bytes for: INSUFFICIENT_SIZE when it does not fit. */
nvmlReturn_t nvml_text(char *out, unsigned int length, const char *text);

uint32_t nvml_count(void);
nvmlDevice_t nvml_handle(uint32_t card);      /* of a card's index, NULL when it can't be reached */
int nvml_card_of(nvmlDevice_t device);        /* -1 for no handle of ours */
uint32_t nvml_position(uint32_t card);        /* NVML index of a card */

/* Whole percent of the last sample period with work, and the number of the sample period now. */
unsigned int nvml_busy_percent(const soft_card *card);

/* Pid of a slot's process as seen from here; 0 when it is gone or not visible. */
uint32_t nvml_pid_of(uint32_t slot);

#endif
