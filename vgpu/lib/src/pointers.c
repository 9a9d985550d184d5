/* SPDX-License-Identifier: Apache-2.0 */
/* Two hash tables with linear probing, one of blocks and one of pages. Removal shifts what follows, so there
 * are no tombstones, and a program that allocates and frees for weeks finds its blocks as fast as on the
 * first day. */
#include "pointers.h"

enum { FIRST_BITS = 8 };

static inline uint32_t hash(uint64_t number, uint32_t bits) {
    return (uint32_t)((number * 0x9e3779b97f4a7c15u) >> (64 - bits));
}

/* The low bits of what is stored are zero. */
static inline uint32_t block_home(const struct carve_pointers *t, uint64_t address) {
    return hash(address >> CARVE_UNIT_SHIFT, t->bits);
}

static inline uint32_t page_home(const struct carve_pointers *t, uint64_t address) {
    return hash(address >> CARVE_PAGE_SHIFT, t->page_bits);
}

/* The place where it is, or the free one where it would be. */
static inline uint32_t find_block(const struct carve_pointers *t, uint64_t address) {
    uint32_t mask = (1u << t->bits) - 1, i = block_home(t, address);
    while (t->places[i].address != 0 && t->places[i].address != address) {
        i = (i + 1) & mask;
    }
    return i;
}

static inline uint32_t find_page(const struct carve_pointers *t, uint64_t address) {
    uint32_t mask = (1u << t->page_bits) - 1, i = page_home(t, address);
    while (t->pages[i].address != 0 && t->pages[i].address != address) {
        i = (i + 1) & mask;
    }
    return i;
}

static inline void count(uint32_t *counter) { __atomic_store_n(counter, *counter + 1, __ATOMIC_RELEASE); }

/* At most half full: probes stay short. */
static inline bool full(uint32_t count, uint32_t bits) { return bits == 0 || count >= 1u << (bits - 1); }

static bool grow_blocks(struct carve_pointers *t) {
    struct carve_pointers bigger = {.bits = t->bits == 0 ? FIRST_BITS : t->bits + 1};
    bigger.places = bigger.bits > 31 ? NULL : carve_map_private(sizeof bigger.places[0] << bigger.bits);
    if (bigger.places == NULL) {
        return false;
    }
    if (t->bits != 0) {
        for (uint32_t i = 0; i < 1u << t->bits; i++) {
            if (t->places[i].address != 0) {
                bigger.places[find_block(&bigger, t->places[i].address)] = t->places[i];
            }
        }
        carve_unmap(t->places, sizeof t->places[0] << t->bits);
    }
    t->places = bigger.places;
    t->bits = bigger.bits;
    return true;
}

static bool grow_pages(struct carve_pointers *t) {
    struct carve_pointers bigger = {.page_bits = t->page_bits == 0 ? FIRST_BITS : t->page_bits + 1};
    bigger.pages = bigger.page_bits > 31 ? NULL : carve_map_private(sizeof bigger.pages[0] << bigger.page_bits);
    if (bigger.pages == NULL) {
        return false;
    }
    if (t->page_bits != 0) {
        for (uint32_t i = 0; i < 1u << t->page_bits; i++) {
            if (t->pages[i].address != 0) {
                bigger.pages[find_page(&bigger, t->pages[i].address)] = t->pages[i];
            }
        }
        carve_unmap(t->pages, sizeof t->pages[0] << t->page_bits);
    }
    t->pages = bigger.pages;
    t->page_bits = bigger.page_bits;
    return true;
}

/* ---- maps of pages ---- */

_Static_assert(CARVE_PAGE_UNITS == 64 * 64, "a map has a bit for each unit of a page");

static inline struct carve_page_map *map_at(const struct carve_pointers *t, uint32_t map) { return &t->maps[map - 1]; }

/* Whether one more can be had; makes room for it. */
static bool map_to_be_had(struct carve_pointers *t) {
    if (t->free_map != 0 || t->map_count < t->map_room) {
        return true;
    }
    uint32_t room = t->map_room == 0 ? 128 : 2 * t->map_room;
    struct carve_page_map *more = room > 1u << 24 ? NULL : carve_map_private(sizeof *more * room);
    if (more == NULL) {
        return false;
    }
    for (uint32_t i = 0; i < t->map_count; i++) {
        more[i] = t->maps[i];
    }
    if (t->maps != NULL) {
        carve_unmap(t->maps, sizeof *more * t->map_room);
    }
    t->maps = more;
    t->map_room = room;
    return true;
}

static uint32_t new_map(struct carve_pointers *t) {
    uint32_t map = t->free_map;
    if (map == 0) {
        return ++t->map_count; /* zeroed, as it was mapped */
    }
    t->free_map = (uint32_t)map_at(t, map)->words[0];
    map_at(t, map)->words[0] = 0;
    return map;
}

/* All its bits are zero. */
static void free_map(struct carve_pointers *t, uint32_t map) {
    map_at(t, map)->words[0] = t->free_map;
    t->free_map = map;
}

static inline void mark(struct carve_page_map *map, const struct carve_pointer *block, bool taken) {
    uint32_t at = (uint32_t)(block->address >> CARVE_UNIT_SHIFT) % CARVE_PAGE_UNITS, end = at + block->units;
    for (end = end < CARVE_PAGE_UNITS ? end : CARVE_PAGE_UNITS; at < end;) {
        uint32_t bit = at % 64, count = end - at < 64 - bit ? end - at : 64 - bit;
        uint64_t bits = (count == 64 ? UINT64_MAX : ((uint64_t)1 << count) - 1) << bit;
        map->words[at / 64] = taken ? map->words[at / 64] | bits : map->words[at / 64] & ~bits;
        at += count;
    }
}

/* Whether so many units in a row are free. */
static bool has_hole(const struct carve_page_map *map, uint32_t units) {
    uint32_t run = 0;
    for (uint32_t i = 0; i < 64; i++) {
        uint64_t word = map->words[i];
        for (uint32_t left = 64; left != 0;) {
            uint32_t zeros = word == 0 ? left : (uint32_t)__builtin_ctzll(word);
            run += zeros < left ? zeros : left;
            if (run >= units) {
                return true;
            }
            if (zeros >= left) {
                break; /* goes on in the next word */
            }
            left -= zeros;
            word >>= zeros;
            uint32_t ones = word == UINT64_MAX ? 64 : (uint32_t)__builtin_ctzll(~word);
            run = 0;
            left -= ones < left ? ones : left;
            word = ones >= 64 ? 0 : word >> ones;
        }
    }
    return false;
}

/* Frees place i and moves back what was pushed behind it. */
static void remove_block(struct carve_pointers *t, uint32_t i) {
    uint32_t mask = (1u << t->bits) - 1;
    for (uint32_t j = (i + 1) & mask; t->places[j].address != 0; j = (j + 1) & mask) {
        if (((j - block_home(t, t->places[j].address)) & mask) >= ((j - i) & mask)) {
            t->places[i] = t->places[j];
            i = j;
        }
    }
    t->places[i].address = 0;
    t->count--;
}

static void remove_page(struct carve_pointers *t, uint32_t i) {
    uint32_t mask = (1u << t->page_bits) - 1;
    for (uint32_t j = (i + 1) & mask; t->pages[j].address != 0; j = (j + 1) & mask) {
        if (((j - page_home(t, t->pages[j].address)) & mask) >= ((j - i) & mask)) {
            t->pages[i] = t->pages[j];
            i = j;
        }
    }
    t->pages[i].address = 0;
    t->page_count--;
}

/* The page of a piece; no piece spans two. */
static inline uint64_t page_address(const struct carve_pointer *block) {
    return block->address >> CARVE_PAGE_SHIFT << CARVE_PAGE_SHIFT;
}

/* Counts a block, for those who read the usage file too. */
static inline void count_block(struct carve_state *s, const struct carve_pointer *block, int more) {
    struct carve_pointers *t = &s->pointers;
    struct carve_usage_line *line = &s->usage->lines[block->card][s->slot];
    t->blocks[block->card] += (uint64_t)(int64_t)more;
    __atomic_store_n(&line->allocations, t->blocks[block->card], __ATOMIC_RELAXED);
    if (CARVE_UNLIKELY(block->kind == CARVE_KIND_MANAGED || block->kind >= CARVE_KIND_COUNTED)) {
        uint64_t *sum = block->kind == CARVE_KIND_MANAGED   ? &t->managed_units[block->card]
                        : block->kind == CARVE_KIND_COUNTED ? &t->uncharged_units[block->card]
                                                            : &t->imported_units[block->card];
        uint64_t *shown = block->kind == CARVE_KIND_MANAGED   ? &line->managed_bytes
                          : block->kind == CARVE_KIND_COUNTED ? &line->uncharged_bytes
                                                              : &line->imported_bytes;
        *sum += (uint64_t)((int64_t)block->units * more);
        __atomic_store_n(shown, carve_units_bytes(*sum), __ATOMIC_RELAXED);
    }
}

/* Counts a piece in its page and says whether it is the first there. There is room for a page. */
static bool add_piece(struct carve_pointers *t, const struct carve_pointer *block) {
    struct carve_page *page = &t->pages[find_page(t, page_address(block))];
    bool first = page->address == 0;
    if (first) {
        *page = (struct carve_page){.address = page_address(block), .context = block->context, .card = block->card, .map = new_map(t)};
        t->page_count++;
    }
    page->pieces++;
    page->units = (uint16_t)(page->units + block->units);
    mark(map_at(t, page->map), block, true);
    return first;
}

/* Takes a piece from its page's count and says whether it was the last. */
static bool drop_piece(struct carve_pointers *t, const struct carve_pointer *block) {
    if (block->kind != CARVE_KIND_PIECE) {
        return false;
    }
    uint32_t i = find_page(t, page_address(block));
    t->pages[i].units = (uint16_t)(t->pages[i].units - block->units);
    mark(map_at(t, t->pages[i].map), block, false);
    if (--t->pages[i].pieces != 0) {
        return false;
    }
    free_map(t, t->pages[i].map);
    remove_page(t, i);
    return true;
}

/* Makes room for one more block, and for one more page where it is a piece. */
static bool make_room(struct carve_pointers *t, bool piece) {
    return (!full(t->count, t->bits) || grow_blocks(t)) && (!piece || ((!full(t->page_count, t->page_bits) || grow_pages(t)) && map_to_be_had(t)));
}

bool carve_pointers_put(struct carve_state *s, const struct carve_pointer *block, struct carve_put *put) {
    struct carve_pointers *t = &s->pointers;
    *put = (struct carve_put){0};
    carve_lock(&t->lock);
    bool piece = block->kind == CARVE_KIND_PIECE;
    if (CARVE_UNLIKELY(block->address >> CARVE_UNIT_SHIFT == 0 || !make_room(t, piece))) {
        carve_unlock(&t->lock);
        return false;
    }
    struct carve_pointer *place = &t->places[find_block(t, block->address)];
    if (CARVE_UNLIKELY(place->address != 0)) {
        put->stale = *place;
        put->stale.place = place->kind == CARVE_KIND_PIECE ? 0 : place->place;
        put->stale_last = drop_piece(t, place);
        count_block(s, place, -1);
    } else {
        t->count++;
    }
    *place = *block;
    count_block(s, block, 1);
    if (piece) {
        put->first_of_page = add_piece(t, block);
        if (put->first_of_page) {
            count(&t->pieces_over[block->card]);
        }
    }
    carve_unlock(&t->lock);
    return true;
}

static inline bool take(struct carve_state *s, uint64_t address, struct carve_pointer *block, bool now) {
    struct carve_pointers *t = &s->pointers;
    bool known = false;
    carve_lock(&t->lock);
    if (CARVE_LIKELY(t->count != 0 && address != 0)) {
        uint32_t i = find_block(t, address);
        if (CARVE_LIKELY(t->places[i].address != 0)) {
            *block = t->places[i];
            count_block(s, block, -1);
            remove_block(t, i);
            known = true;
            if (block->kind == CARVE_KIND_PIECE) {
                block->place = now;
            }
            if (now && block->kind == CARVE_KIND_PIECE) {
                count(&t->pieces_begun[block->card]);
            }
        }
    }
    carve_unlock(&t->lock);
    return known;
}

bool carve_pointers_take(struct carve_state *s, uint64_t address, struct carve_pointer *block) { return take(s, address, block, false); }

bool carve_pointers_take_now(struct carve_state *s, uint64_t address, struct carve_pointer *block) { return take(s, address, block, true); }

static inline uint32_t counted(const uint32_t *counter) { return __atomic_load_n(counter, __ATOMIC_ACQUIRE); }

bool carve_pieces_still(const struct carve_state *s, unsigned card, uint32_t *begun) {
    const struct carve_account *a = &s->accounts[card];
    const uint32_t *begun_here = &s->pointers.pieces_begun[card], *over_here = &s->pointers.pieces_over[card];
    for (;;) {
        uint32_t b = counted(&a->pieces_begun), c = counted(begun_here), d = counted(&a->pieces_over), e = counted(over_here);
        /* None of them goes back: twice the same is what they were at one instant. */
        if (b == counted(&a->pieces_begun) && c == counted(begun_here) && d == counted(&a->pieces_over) && e == counted(over_here)) {
            *begun = b + c;
            return b + c == d + e;
        }
        carve_pause();
    }
}

bool carve_pointers_gone(struct carve_state *s, const struct carve_pointer *block) {
    if (block->kind != CARVE_KIND_PIECE) {
        return false;
    }
    carve_lock(&s->pointers.lock);
    bool last = drop_piece(&s->pointers, block);
    if (!last && block->place != 0) {
        count(&s->pointers.pieces_over[block->card]);
    }
    carve_unlock(&s->pointers.lock);
    return last;
}

bool carve_pointers_restore(struct carve_state *s, const struct carve_pointer *block) {
    struct carve_pointers *t = &s->pointers;
    carve_lock(&t->lock);
    bool room = make_room(t, false);
    if (room) {
        struct carve_pointer *place = &t->places[find_block(t, block->address)];
        t->count += place->address == 0;
        *place = *block;
        count_block(s, block, 1);
        place->place = block->kind == CARVE_KIND_PIECE ? 0 : block->place;
    }
    if (block->kind == CARVE_KIND_PIECE && block->place != 0) {
        count(&t->pieces_over[block->card]);
    }
    carve_unlock(&t->lock);
    return room;
}

void carve_pointers_import(struct carve_state *s, const struct carve_pointer *block) {
    struct carve_pointers *t = &s->pointers;
    carve_lock(&t->lock);
    if (block->address >> CARVE_UNIT_SHIFT != 0 && make_room(t, false)) {
        struct carve_pointer *place = &t->places[find_block(t, block->address)];
        if (place->address == 0) {
            *place = *block;
            place->place = 1;
            t->count++;
            count_block(s, place, 1);
        } else if (place->kind == CARVE_KIND_IMPORTED) {
            place->place++;
        }
    }
    carve_unlock(&t->lock);
}

void carve_pointers_export(struct carve_state *s, uint64_t address) {
    struct carve_pointers *t = &s->pointers;
    carve_lock(&t->lock);
    if (t->count != 0 && address != 0) {
        uint32_t i = find_block(t, address);
        struct carve_pointer *place = &t->places[i];
        if (place->address != 0 && place->kind == CARVE_KIND_IMPORTED && --place->place == 0) {
            count_block(s, place, -1);
            remove_block(t, i);
        }
    }
    carve_unlock(&t->lock);
}

bool carve_pointers_take_of(struct carve_state *s, uint32_t context, struct carve_pointer *block, bool *last,
                            uint32_t *cursor) {
    struct carve_pointers *t = &s->pointers;
    bool found = false;
    carve_lock(&t->lock);
    uint32_t places = t->bits == 0 ? 0 : 1u << t->bits;
    /* Removal may move a block from behind the end to a place before the cursor, so being sure that there is
     * none left takes one full round without a hit. */
    for (uint32_t n = 0; n < places && !found; n++) {
        uint32_t i = (*cursor + n) & (places - 1);
        if (t->places[i].address != 0 && t->places[i].context == context) {
            *block = t->places[i];
            block->place = block->kind == CARVE_KIND_PIECE ? 0 : block->place;
            *last = drop_piece(t, block);
            count_block(s, block, -1);
            remove_block(t, i);
            *cursor = i;
            found = true;
        }
    }
    carve_unlock(&t->lock);
    return found;
}

bool carve_pointers_room(struct carve_state *s, unsigned card, uint32_t context, uint32_t units) {
    enum { MOST_PAGES = 64 };
    struct carve_pointers *t = &s->pointers;
    bool room = false;
    int looked = 0;
    carve_lock(&t->lock);
    for (uint32_t i = 0; t->page_bits != 0 && i < 1u << t->page_bits && !room; i++) {
        const struct carve_page *page = &t->pages[i];
        if (page->address != 0 && page->card == card && page->context == context && page->units + units <= CARVE_PAGE_UNITS) {
            room = looked++ == MOST_PAGES || has_hole(map_at(t, page->map), units);
        }
    }
    carve_unlock(&t->lock);
    return room;
}
