/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ledger.h: may this process have so much more of a card, and what does the container hold of it.
 *
 * The processes of a container share one limit without a lock between them. A request is first weighed
 * against what is charged to all; what doesn't fit is refused without a trace. What fits is published as
 * pending and weighed again, since others may have done the same at that moment, and then becomes used.
 * Whoever published last sees all the others, so they can't all get through when there is room for one
 * only. Where pending requests stand in one another's way the process with the lower slot goes first.
 */
#ifndef CARVE_LEDGER_H
#define CARVE_LEDGER_H

#include "state.h"

/* How long a request waits for other processes to make up their mind, and for the agent to take the charge
 * off processes that are dead: it looks about once a second, twice, and the driver frees late. */
#define CARVE_PENDING_WAIT_NS 50000000ull
/* How often one that has waited for so long looks again where others change while it does, before it takes what it
 * sees for true. */
#define CARVE_MIXED_LOOKS 200u
/* How long a small request looks again while other threads of the process make and free such blocks. */
#define CARVE_PIECES_WAIT_NS 500000000ull
#define CARVE_DEAD_WAIT_NS 3000000000ull
#define CARVE_DEAD_RETRY_NS 10000000000ull

/* Charges units on a card if they fit under its limit. asked_bytes is what is written beside a refusal. */
bool carve_admit(struct carve_state *s, unsigned card, uint32_t units, uint64_t asked_bytes);

/* The same without waiting for anybody, and without counting a refusal. */
bool carve_try(struct carve_state *s, unsigned card, uint32_t units);

/* The same for a page of which a piece is to be cut: the beginning of what counts, see carve_pieces_still. */
bool carve_try_page(struct carve_state *s, unsigned card);

/* The same for a request of which only the driver's answer shows how much it takes: it stays pending until then, so
 * that others wait for that instead of being refused for what isn't taken in the end. Nobody is waited for between
 * hold and keep. */
bool carve_hold(struct carve_state *s, unsigned card, uint32_t units);

/* The end of that: held units are pending no more, and what is charged grows, or shrinks, by units. */
void carve_keep(struct carve_state *s, unsigned card, uint32_t held, int64_t units);

/* Takes units back. */
void carve_release(struct carve_state *s, unsigned card, uint32_t units);

/* A small request that doesn't fit may be given to the driver without a charge where a page at hand has a hole for
 * it. One thread of the process does so at a time, between begin and end; meanwhile carve_release_page waits. So if
 * another thread took the hole, or freed what kept the page, and the driver took a new page for this one, that page
 * is covered by what the other has charged for until it is given back: the card never holds more than is charged.
 * carve_admit must not be called in between. */
void carve_serial_begin(struct carve_state *s, unsigned card);
void carve_serial_end(struct carve_state *s, unsigned card);

/* Takes back a page that pieces are cut from. The second where that is the end of what counts, see carve_pieces_still. */
void carve_release_page(struct carve_state *s, unsigned card);
void carve_page_over(struct carve_state *s, unsigned card);

/* The beginning, where a page is charged otherwise, and the end where it wasn't after all. */
void carve_page_begun(struct carve_state *s, unsigned card);
void carve_page_refused(struct carve_state *s, unsigned card);

/* Corrects a charge to what the driver really took: upwards without asking, for it is taken already. */
void carve_correct(struct carve_state *s, unsigned card, int64_t units);

/* What part of the charge is contexts, for those who read the file. */
void carve_note_context(struct carve_state *s, unsigned card, int64_t units);

/* Limit of a card in units; 0 where the limits file is not valid or doesn't name the card. */
uint32_t carve_limit(struct carve_state *s, unsigned card);

/* CARVE_CARD_* of a card; 0 where the limits file is not valid. Checks the whole bank. */
uint32_t carve_card_flags(struct carve_state *s, unsigned card);

/* Whether the limits file is valid at present. */
bool carve_limits_readable(struct carve_state *s);

/* What more could be had on a card at this moment, pending requests counted as taken. */
uint32_t carve_room(struct carve_state *s, unsigned card);

/* What the container has charged on a card, pending requests and the agent's residual included. */
uint64_t carve_charged(struct carve_state *s, unsigned card);

#endif
