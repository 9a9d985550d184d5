/* SPDX-License-Identifier: Apache-2.0 */
/* contexts.h: which contexts this process has, on which card, and what each is charged with. */
#ifndef CARVE_CONTEXTS_H
#define CARVE_CONTEXTS_H

#include "driver.h"
#include "pointers.h"
#include "state.h"

/* Charged for a context whose cost on this card isn't known yet. What drivers take on today's cards is 100 to
 * 550 MiB before the first module is loaded; a guess that is too high is safe. */
#define CARVE_CONTEXT_GUESS_BYTES (512ull << 20)

/* The card of a device ordinal, by UUID; -1 where the limits don't name it. */
int carve_device_card(const struct carve_driver *d, struct carve_state *s, CUdevice device);

/* Whether the driver itself says no to a device: it hasn't started, as in a forked child, or there is none of that
 * number. Then it has an answer of its own to what is asked of it there, and gives nothing. */
bool carve_device_denied(const struct carve_driver *d, CUdevice device);

/* The answer to a request in the current context while the limits and usage files can't be had: the driver's, if it
 * hasn't started, else missing. */
CUresult carve_without_files(const struct carve_driver *d, CUresult missing);

/* What a request on a device is to be answered that is about to get result: a refusal of ours must not stand before an
 * error that the current context has for good, by which the driver would answer. The driver is asked for that only
 * then, by a question that waits for nothing and changes nothing. device: -1 stands for the current context's. */
CUresult carve_told_refusal(const struct carve_driver *d, CUdevice device);

static inline CUresult carve_told(const struct carve_driver *d, CUdevice device, CUresult result) {
    return CARVE_LIKELY(result != CUDA_ERROR_OUT_OF_MEMORY) ? result : carve_told_refusal(d, device);
}

enum carve_where {
    CARVE_HERE,    /* the place was filled in */
    CARVE_NOWHERE, /* no context is current: the driver has an answer to that */
    CARVE_FOREIGN, /* on a card that the limits don't name */
};

struct carve_place {
    CUdevice device;
    unsigned card;
    uint32_t context; /* carve_context.id, 0: a context that this process didn't create through the front */
};

/* Where the calling thread's requests go. */
enum carve_where carve_current(const struct carve_driver *d, struct carve_state *s, struct carve_place *place);

/* The device of a context on the list; false where it isn't on it. */
bool carve_context_device(struct carve_state *s, CUcontext handle, CUdevice *device);

/* Whether this process has a context on a card. */
bool carve_contexts_on(struct carve_state *s, unsigned card);

/* A context that is about to be created: charges it, or says no. */
struct carve_opening {
    struct carve_state *s;
    CUdevice device;
    unsigned card;
    uint32_t units; /* charged; 0: nothing */
    bool alone;     /* nothing else of this process is on the card */
};

bool carve_context_open(const struct carve_driver *d, CUdevice device, struct carve_opening *opening);
/* It wasn't created. */
void carve_context_abort(struct carve_opening *opening);
/* It was. */
void carve_context_opened(struct carve_opening *opening, CUcontext handle, bool primary);

/* The turn to retain, release or reset the primary context of a device. Whoever asks the driver for that has it: else
 * one that another thread makes anew meanwhile would be taken for the one that went, and each of those who make it at
 * once would be charged. NULL, and no turn: there is no such device. */
struct carve_turn *carve_primary_turn(struct carve_state *s, CUdevice device);

/* Whether the primary context of a device is on the list. */
bool carve_primary_known(struct carve_state *s, CUdevice device);

/* The device of which a context is the primary one; false where it isn't one. */
bool carve_is_primary(struct carve_state *s, CUcontext handle, CUdevice *device);

/* A context that is about to be destroyed is taken off the list first: its handle may be given to another as
 * soon as it is gone. */
bool carve_context_close(struct carve_state *s, CUcontext handle, struct carve_context *closing);
/* It wasn't destroyed. */
void carve_context_restore(struct carve_state *s, const struct carve_context *closing);
/* It was: gives back what was charged for it and for all in it. */
void carve_context_closed(struct carve_state *s, const struct carve_context *closing);

/* The primary context of a device was released or reset: if it is gone, gives back what was charged for it.
 * reset says that what was in it is gone in any case. The caller has the turn. */
void carve_primary_released(const struct carve_driver *d, struct carve_state *s, CUdevice device, bool reset);

/* One use more of a context, or one less; false where it was the last, or the context isn't on the list. */
void carve_context_attached(struct carve_state *s, CUcontext handle);
bool carve_context_detach(struct carve_state *s, CUcontext handle);

/* A green context: part of the primary one, which lives as long, and may be charged by it for the first time. What is
 * allocated in it is the primary one's. */
void carve_green_named(struct carve_state *s, CUgreenCtx green, CUcontext handle, CUdevice device);

/* The turns of the primary contexts of which a green one may be a part: of its device where that is known, else of all
 * that there are, always in one order. Its end may be that of a primary one: whoever asks the driver for that has them. */
struct carve_green_turns {
    uint32_t count;
    CUdevice devices[CARVE_MAX_CARDS];
    struct carve_turn *turns[CARVE_MAX_CARDS];
};
void carve_green_turns(struct carve_state *s, CUgreenCtx green, struct carve_green_turns *had);
void carve_green_turns_end(const struct carve_green_turns *had);
/* It was destroyed. The caller has the turns. */
void carve_green_gone(const struct carve_driver *d, struct carve_state *s, CUgreenCtx green, const struct carve_green_turns *had);

/* Fits the charges of contexts to what the agent has learnt since. Cheap where nothing is new. */
void carve_contexts_follow_slow(struct carve_state *s);

static inline void carve_contexts_follow(struct carve_state *s) {
    uint64_t generation = __atomic_load_n(&s->limits->generation, __ATOMIC_RELAXED);
    if (CARVE_UNLIKELY(generation != __atomic_load_n(&s->seen_generation, __ATOMIC_RELAXED))) {
        carve_contexts_follow_slow(s);
    }
}

/* Gives back the charge of a block that is gone; last: it was the last piece of its page. */
void carve_block_gone(struct carve_state *s, const struct carve_pointer *block, bool last);

#endif
