/* SPDX-License-Identifier: Apache-2.0 */
/* The tables of blocks and pages against a plain list, over random puts and takes. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "pointers.h"
#include "tap.h"

enum { ADDRESSES = 3000, CONTEXTS = 3, CARDS = 2 };

static struct carve_state state;
static struct carve_usage *usage;

/* The plain list: what is at each address, if anything. Half of the addresses are of pieces, 8 in a page. */
static struct carve_pointer blocks[ADDRESSES];
static bool there[ADDRESSES];

static uint64_t address_of(int i) {
    const uint64_t base = 0x700000000000u;
    return i % 2 == 0 ? base + ((uint64_t)i << CARVE_PAGE_SHIFT) : base + ((uint64_t)(i / 16 * 16 + 1) << CARVE_PAGE_SHIFT) + (uint64_t)(i % 16) * 65536;
}

static int pieces_in_page(int i) {
    int n = 0;
    for (int j = i / 16 * 16; j < i / 16 * 16 + 16 && j < ADDRESSES; j++) {
        n += j % 2 == 1 && there[j];
    }
    return n;
}

static struct carve_pointer make(int i, unsigned seed) {
    /* All pieces of a page are of one context and card, as the driver has it. */
    unsigned owner = i % 2 == 1 ? (unsigned)i / 16 : seed;
    return (struct carve_pointer){
        .address = address_of(i),
        .units = i % 2 == 1 ? 128 : (1 + seed % 5) * CARVE_PAGE_UNITS,
        .context = 1 + owner % CONTEXTS,
        .card = (uint8_t)(owner % CARDS),
        .kind = i % 2 == 1 ? CARVE_KIND_PIECE : seed % 7 == 0 ? CARVE_KIND_MANAGED : CARVE_KIND_WHOLE,
    };
}

static bool same(const struct carve_pointer *a, const struct carve_pointer *b) {
    return a->address == b->address && a->units == b->units && a->context == b->context && a->card == b->card && a->kind == b->kind;
}

static unsigned wrong;
static void expect(bool good) { wrong += !good; }

static bool counts_right(void) {
    for (unsigned c = 0; c < CARDS; c++) {
        uint64_t live = 0, managed = 0;
        for (int i = 0; i < ADDRESSES; i++) {
            live += there[i] && blocks[i].card == c;
            managed += there[i] && blocks[i].card == c && blocks[i].kind == CARVE_KIND_MANAGED ? blocks[i].units : 0;
        }
        if (usage->lines[c][0].allocations != live || usage->lines[c][0].managed_bytes != carve_units_bytes(managed)) {
            return false;
        }
    }
    return true;
}

int main(int argc, char **argv) {
    unsigned seed = argc > 1 ? (unsigned)atoi(argv[1]) : 1;
    usage = calloc(1, sizeof *usage);
    state.usage = usage;
    struct carve_pointer got;
    struct carve_put put;
    bool last;
    uint32_t cursor = 0;
    check(usage != NULL && !carve_pointers_take(&state, 1, &got) && !carve_pointers_take_of(&state, 1, &got, &last, &cursor), "an empty table knows nothing");
    check(!carve_pointers_put(&state, &(struct carve_pointer){.address = 0, .units = 1}, &put), "no block is at address 0");
    for (int n = 0; n < 400000; n++) {
        int i = rand_r(&seed) % ADDRESSES;
        unsigned what = (unsigned)rand_r(&seed) % 1000;
        if (what < (n / 40000 % 2 == 0 ? 600u : 400u)) {
            struct carve_pointer block = make(i, (unsigned)rand_r(&seed));
            /* Twice at one address: the driver gave it anew, the first must be gone. */
            bool stale = there[i], first = i % 2 == 1 && pieces_in_page(i) - stale == 0;
            expect(carve_pointers_put(&state, &block, &put));
            expect(stale ? same(&put.stale, &blocks[i]) : put.stale.address == 0);
            expect(put.first_of_page == first && put.stale_last == (stale && first));
            blocks[i] = block;
            there[i] = true;
        } else if (what < 999) {
            bool known = carve_pointers_take(&state, address_of(i), &got);
            expect(known == there[i]);
            if (known && what % 8 == 0) {
                /* The driver didn't free it. */
                expect(same(&got, &blocks[i]) && carve_pointers_restore(&state, &got));
                continue;
            }
            there[i] = false;
            if (known) {
                last = carve_pointers_gone(&state, &got);
                expect(same(&got, &blocks[i]) && last == (i % 2 == 1 && pieces_in_page(i) == 0));
            }
        } else {
            /* A context goes with all that is in it. */
            uint32_t context = 1 + (unsigned)rand_r(&seed) % CONTEXTS;
            int taken = 0, had = 0;
            for (int j = 0; j < ADDRESSES; j++) {
                had += there[j] && blocks[j].context == context;
            }
            cursor = 0;
            while (carve_pointers_take_of(&state, context, &got, &last, &cursor)) {
                int j = 0;
                while (address_of(j) != got.address) {
                    j++;
                }
                expect(there[j] && same(&got, &blocks[j]));
                there[j] = false;
                expect(last == (j % 2 == 1 && pieces_in_page(j) == 0));
                taken++;
            }
            expect(taken == had);
        }
        if (n % 20000 == 0) {
            expect(counts_right());
        }
    }
    check(wrong == 0, "400000 puts and takes agree with a plain list (%u don't)", wrong);
    check(counts_right(), "so do the counts in the usage file");
    int pages = 0;
    for (int i = 1; i < ADDRESSES; i += 16) {
        pages += pieces_in_page(i) > 0;
    }
    check(state.pointers.page_count == (uint32_t)pages, "and the number of pages");
    while (carve_pointers_take_of(&state, 1, &got, &last, &cursor) || carve_pointers_take_of(&state, 2, &got, &last, &cursor) ||
           carve_pointers_take_of(&state, 3, &got, &last, &cursor)) {
    }
    check(state.pointers.count == 0 && state.pointers.page_count == 0, "taken, nothing is left");

    struct carve_pointer piece = {.address = 0x700000000000u, .units = 4000, .context = 1, .kind = CARVE_KIND_PIECE};
    check(carve_pointers_put(&state, &piece, &put) && carve_pointers_room(&state, 0, 1, 96) && !carve_pointers_room(&state, 0, 1, 97), "a page with 4000 units in it has room for 96");
    check(!carve_pointers_room(&state, 0, 2, 1) && !carve_pointers_room(&state, 1, 1, 1), "not for another context, not on another card");
    /* 4000 units from the start; taken in pieces of 100 with every second one given back there is no larger hole. */
    carve_pointers_take(&state, piece.address, &got);
    carve_pointers_gone(&state, &got);
    for (unsigned n = 0; n < 40; n++) {
        piece = (struct carve_pointer){.address = 0x700000000000u + n * 100 * CARVE_UNIT_BYTES, .units = 100, .context = 1, .kind = CARVE_KIND_PIECE};
        carve_pointers_put(&state, &piece, &put);
    }
    for (unsigned n = 0; n < 40; n += 2) {
        carve_pointers_take(&state, 0x700000000000u + n * 100 * CARVE_UNIT_BYTES, &got);
        if (n == 0) {
            check(!carve_pointers_room(&state, 0, 1, 100) && carve_pointers_room(&state, 0, 1, 96), "while a piece is being freed its place isn't free");
        }
        carve_pointers_gone(&state, &got);
    }
    check(carve_pointers_room(&state, 0, 1, 100) && !carve_pointers_room(&state, 0, 1, 101), "room is what is free in one place");
    /* Against a plain list of units, over random pieces of two pages. */
    enum { PAGES = 2, MOST = 400 };
    static uint16_t owner[PAGES * CARVE_PAGE_UNITS]; /* the piece that has it, counted from 1 */
    static struct carve_pointer pieces[MOST];
    unsigned differ = 0, full = 0;
    seed = 5;
    for (unsigned n = 1; n < 40; n += 2) {
        carve_pointers_take(&state, 0x700000000000u + n * 100 * CARVE_UNIT_BYTES, &got);
        carve_pointers_gone(&state, &got);
    }
    check(state.pointers.page_count == 0 && !carve_pointers_room(&state, 0, 1, 1), "without pages there is none");
    for (unsigned i = 0; i < 20000; i++) {
        unsigned at = (unsigned)rand_r(&seed) % MOST, small = (unsigned)rand_r(&seed) % 3;
        if (pieces[at].units != 0) {
            carve_pointers_take(&state, pieces[at].address, &got);
            carve_pointers_gone(&state, &got);
            for (unsigned u = 0; u < PAGES * CARVE_PAGE_UNITS; u++) {
                owner[u] = owner[u] == at + 1 ? 0 : owner[u];
            }
            pieces[at].units = 0;
            continue;
        }
        unsigned units = 1 + (unsigned)rand_r(&seed) % (small == 0 ? 3 : small == 1 ? 64 : 500), from = (unsigned)rand_r(&seed) % (PAGES * CARVE_PAGE_UNITS), run = 0;
        while (run < units && from + run < PAGES * CARVE_PAGE_UNITS && owner[from + run] == 0) {
            run++;
        }
        if (run == units && from / CARVE_PAGE_UNITS == (from + units - 1) / CARVE_PAGE_UNITS) {
            pieces[at] = (struct carve_pointer){.address = 0x700000000000u + (uint64_t)from * CARVE_UNIT_BYTES, .units = units, .context = 1, .kind = CARVE_KIND_PIECE};
            carve_pointers_put(&state, &pieces[at], &put);
            for (unsigned u = from; u < from + units; u++) {
                owner[u] = (uint16_t)(at + 1);
            }
        }
        unsigned largest = 0;
        for (unsigned page = 0; page < PAGES; page++) {
            unsigned here = 0, taken = 0, best = 0;
            for (unsigned u = page * CARVE_PAGE_UNITS; u < (page + 1) * CARVE_PAGE_UNITS; u++) {
                here = owner[u] != 0 ? 0 : here + 1;
                taken += owner[u] != 0;
                best = here > best ? here : best;
            }
            largest = taken != 0 && best > largest ? best : largest;
        }
        full += largest < 600;
        differ += (largest != 0 && !carve_pointers_room(&state, 0, 1, largest)) || carve_pointers_room(&state, 0, 1, largest + 1);
    }
    check(differ == 0 && full > 1000, "over 20000 random pieces the largest hole is that of a plain list (%u times not; %u times it was small)", differ, full);
    return tap_done();
}
