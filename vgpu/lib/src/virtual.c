/* SPDX-License-Identifier: Apache-2.0 */
/* Blocks in an array, and one hash table of what leads to them: handles and mappings by address. It is the table of
 * pointers.c with another content, under the same lock. */
#include "virtual.h"

#include "ledger.h"
#include "pointers.h"

enum { FIRST_BITS = 7, NO_BLOCK = 0 };

/* Blocks are counted from 1. */
static struct carve_block *block_at(struct carve_state *s, uint32_t block) { return &s->virtual.blocks[block - 1]; }

static inline uint32_t home(const struct carve_virtual *v, uint64_t key, uint8_t kind) {
    return (uint32_t)(((key + kind) * 0x9e3779b97f4a7c15u) >> (64 - v->bits));
}

static inline uint32_t find(const struct carve_virtual *v, uint64_t key, uint8_t kind) {
    uint32_t mask = (1u << v->bits) - 1, i = home(v, key, kind);
    while (v->links[i].block != NO_BLOCK && (v->links[i].key != key || v->links[i].kind != kind)) {
        i = (i + 1) & mask;
    }
    return i;
}

static struct carve_link *known(struct carve_virtual *v, uint64_t key, uint8_t kind) {
    if (v->bits == 0) {
        return NULL;
    }
    struct carve_link *link = &v->links[find(v, key, kind)];
    return link->block == NO_BLOCK ? NULL : link;
}

static bool grow_links(struct carve_virtual *v) {
    struct carve_virtual bigger = {.bits = v->bits == 0 ? FIRST_BITS : v->bits + 1};
    bigger.links = bigger.bits > 31 ? NULL : carve_map_private(sizeof bigger.links[0] << bigger.bits);
    if (bigger.links == NULL) {
        return false;
    }
    if (v->bits != 0) {
        for (uint32_t i = 0; i < 1u << v->bits; i++) {
            if (v->links[i].block != NO_BLOCK) {
                bigger.links[find(&bigger, v->links[i].key, v->links[i].kind)] = v->links[i];
            }
        }
        carve_unmap(v->links, sizeof v->links[0] << v->bits);
    }
    v->links = bigger.links;
    v->bits = bigger.bits;
    return true;
}

/* Adds a link; its place is made if need be. */
static bool add_link(struct carve_virtual *v, struct carve_link link) {
    if ((v->bits == 0 || v->count >= 1u << (v->bits - 1)) && !grow_links(v)) {
        return false;
    }
    v->links[find(v, link.key, link.kind)] = link;
    v->count++;
    return true;
}

static void remove_link(struct carve_virtual *v, struct carve_link *link) {
    uint32_t mask = (1u << v->bits) - 1, i = (uint32_t)(link - v->links);
    for (uint32_t j = (i + 1) & mask; v->links[j].block != NO_BLOCK; j = (j + 1) & mask) {
        if (((j - home(v, v->links[j].key, v->links[j].kind)) & mask) >= ((j - i) & mask)) {
            v->links[i] = v->links[j];
            i = j;
        }
    }
    v->links[i].block = NO_BLOCK;
    v->count--;
}

static inline bool room_for(const struct carve_virtual *v, uint32_t links) {
    return v->bits != 0 && v->count + links <= 1u << (v->bits - 1);
}

bool carve_virtual_turn(struct carve_state *s, bool room) {
    struct carve_virtual *v = &s->virtual;
    carve_turn_take(&v->turn);
    carve_lock(&s->pointers.lock);
    bool good = !room || room_for(v, 1) || grow_links(v);
    carve_unlock(&s->pointers.lock);
    if (!good) {
        carve_turn_end(&v->turn);
    }
    return good;
}

void carve_virtual_turn_end(struct carve_state *s) { carve_turn_end(&s->virtual.turn); }

/* A free place for a block; NO_BLOCK where there is no memory for one. */
static uint32_t new_block(struct carve_state *s) {
    struct carve_virtual *v = &s->virtual;
    if (v->free_block != NO_BLOCK) {
        uint32_t block = v->free_block;
        v->free_block = block_at(s, block)->next_free;
        return block;
    }
    if (v->block_count == v->block_room) {
        uint32_t room = v->block_room == 0 ? 128 : 2 * v->block_room;
        struct carve_block *more = room > 1u << 30 ? NULL : carve_map_private(sizeof *more * room);
        if (more == NULL) {
            return NO_BLOCK;
        }
        for (uint32_t i = 0; i < v->block_count; i++) {
            more[i] = v->blocks[i];
        }
        if (v->blocks != NULL) {
            carve_unmap(v->blocks, sizeof *more * v->block_room);
        }
        v->blocks = more;
        v->block_room = room;
    }
    return ++v->block_count;
}

static void count(struct carve_state *s, unsigned card, int more) {
    s->pointers.blocks[card] += (uint64_t)(int64_t)more;
    __atomic_store_n(&s->usage->lines[card][s->slot].allocations, s->pointers.blocks[card], __ATOMIC_RELAXED);
}

static void free_block(struct carve_state *s, uint32_t block) {
    block_at(s, block)->next_free = s->virtual.free_block;
    s->virtual.free_block = block;
}

/* Whether nothing but descriptors is left of a block; around each change of its references. */
static bool kept(const struct carve_block *b) { return b->exports != 0 && b->exports == b->references; }

static void count_kept(struct carve_state *s, int more) {
    if (more != 0) {
        __atomic_store_n(&s->virtual.kept, s->virtual.kept + (uint32_t)more, __ATOMIC_RELEASE);
    }
}

static void refer(struct carve_state *s, uint32_t block) {
    struct carve_block *b = block_at(s, block);
    count_kept(s, -(int)kept(b));
    b->references++;
}

/* Takes one reference off a block, and the block away with the last. */
static struct carve_gone drop(struct carve_state *s, uint32_t block) {
    struct carve_block *b = block_at(s, block);
    bool before = kept(b);
    --b->references;
    count_kept(s, (int)kept(b) - (int)before);
    if (b->references != 0) {
        return (struct carve_gone){.card = b->card};
    }
    struct carve_gone gone = {.units = b->units, .card = b->card};
    if (!b->object) {
        count(s, gone.card, -1);
    }
    if (b->bindings != 0) {
        gone.object = block;
    } else {
        free_block(s, block);
    }
    return gone;
}

static bool create(struct carve_state *s, uint64_t handle, unsigned card, uint32_t units, bool object) {
    struct carve_virtual *v = &s->virtual;
    uint32_t block = new_block(s);
    if (block == NO_BLOCK) {
        return false;
    }
    *block_at(s, block) = (struct carve_block){.units = units, .references = 1, .card = (uint8_t)card, .object = object};
    if (!add_link(v, (struct carve_link){.key = handle, .uses = 1, .block = block, .kind = CARVE_LINK_HANDLE})) {
        free_block(s, block);
        return false;
    }
    if (!object) {
        count(s, card, 1);
    }
    return true;
}

bool carve_virtual_create(struct carve_state *s, uint64_t handle, unsigned card, uint32_t units, struct carve_gone *stale) {
    struct carve_virtual *v = &s->virtual;
    *stale = (struct carve_gone){0};
    carve_lock(&s->pointers.lock);
    struct carve_link *before = known(v, handle, CARVE_LINK_HANDLE);
    if (before != NULL) {
        /* All of its uses are one reference of the block. */
        uint32_t block = before->block;
        remove_link(v, before);
        *stale = drop(s, block);
    }
    bool created = create(s, handle, card, units, false);
    carve_unlock(&s->pointers.lock);
    return created;
}

struct carve_gone carve_virtual_release(struct carve_state *s, uint64_t handle) {
    struct carve_gone gone = {0};
    carve_lock(&s->pointers.lock);
    struct carve_link *link = known(&s->virtual, handle, CARVE_LINK_HANDLE);
    if (link != NULL && --link->uses == 0) {
        uint32_t block = link->block;
        remove_link(&s->virtual, link);
        gone = drop(s, block);
    }
    carve_unlock(&s->pointers.lock);
    return gone;
}

void carve_virtual_imported(struct carve_state *s, uint64_t handle, unsigned card) {
    if (!carve_slot(s)) {
        return;
    }
    carve_lock(&s->pointers.lock);
    struct carve_link *link = known(&s->virtual, handle, CARVE_LINK_HANDLE);
    if (link != NULL) {
        link->uses++;
    } else if (create(s, handle, card, 0, false)) {
        block_at(s, known(&s->virtual, handle, CARVE_LINK_HANDLE)->block)->imported = true;
    }
    carve_unlock(&s->pointers.lock);
}

/* ---- descriptors ---- */

static struct carve_gone closed(struct carve_state *s, struct carve_link *link) {
    uint32_t block = link->block;
    struct carve_block *b = block_at(s, block);
    remove_link(&s->virtual, link);
    count_kept(s, -(int)kept(b)); /* drop counts it anew */
    b->exports--;
    return drop(s, block);
}

struct carve_gone carve_virtual_exported(struct carve_state *s, uint64_t handle, int descriptor) {
    struct carve_virtual *v = &s->virtual;
    struct carve_gone stale = {0};
    uint64_t file = carve_file_at(descriptor);
    carve_lock(&s->pointers.lock);
    struct carve_link *before = known(v, (uint64_t)descriptor, CARVE_LINK_EXPORT);
    if (before != NULL) {
        stale = closed(s, before);
    }
    struct carve_link *link = known(v, handle, CARVE_LINK_HANDLE);
    uint32_t block = link == NULL ? NO_BLOCK : link->block;
    if (block != NO_BLOCK && block_at(s, block)->units != 0 && file != 0 &&
        add_link(v, (struct carve_link){.key = (uint64_t)descriptor, .bytes = file, .uses = 1, .block = block, .kind = CARVE_LINK_EXPORT})) {
        block_at(s, block)->references++;
        block_at(s, block)->exports++;
    }
    carve_unlock(&s->pointers.lock);
    return stale;
}

bool carve_virtual_own(struct carve_state *s, uint64_t handle, int descriptor) {
    struct carve_virtual *v = &s->virtual;
    uint64_t file = carve_file_at(descriptor);
    bool own = false;
    carve_lock(&s->pointers.lock);
    struct carve_link *link = known(v, (uint64_t)descriptor, CARVE_LINK_EXPORT);
    if (link != NULL && file != 0 && link->bytes == file) {
        uint32_t block = link->block;
        struct carve_link *before = known(v, handle, CARVE_LINK_HANDLE);
        if (before != NULL) {
            before->uses++;
            own = true;
        } else if (add_link(v, (struct carve_link){.key = handle, .uses = 1, .block = block, .kind = CARVE_LINK_HANDLE})) {
            refer(s, block);
            own = true;
        }
    }
    carve_unlock(&s->pointers.lock);
    return own;
}

void carve_virtual_look_slowly(struct carve_state *s) {
    struct carve_virtual *v = &s->virtual;
    uint64_t units[CARVE_MAX_CARDS] = {0};
    /* Not while another thread asks the driver: it may be about to have a handle of a descriptor. */
    if (!carve_turn_try(&v->turn)) {
        return;
    }
    carve_lock(&s->pointers.lock);
    for (uint32_t i = 0; v->bits != 0 && i < 1u << v->bits;) {
        struct carve_link *link = &v->links[i];
        if (link->block != NO_BLOCK && link->kind == CARVE_LINK_EXPORT && kept(block_at(s, link->block)) && carve_file_at((int)link->key) != link->bytes) {
            struct carve_gone gone = closed(s, link); /* moves another one here */
            units[gone.card] += gone.units;
        } else {
            i++;
        }
    }
    carve_unlock(&s->pointers.lock);
    carve_turn_end(&v->turn);
    for (unsigned c = 0; c < CARVE_MAX_CARDS; c++) {
        if (units[c] != 0) {
            carve_release(s, c, (uint32_t)units[c]);
        }
    }
}

/* What is mapped of memory that others made is listed: its size shows nowhere else. */
static void list_mapping(struct carve_state *s, uint32_t block, uint64_t bytes, int more) {
    const struct carve_block *b = block_at(s, block);
    if (b->imported) {
        uint64_t *sum = &s->pointers.imported_units[b->card];
        *sum += (uint64_t)((int64_t)carve_units_up(bytes) * more);
        __atomic_store_n(&s->usage->lines[b->card][s->slot].imported_bytes, carve_units_bytes(*sum), __ATOMIC_RELAXED);
    }
}

static struct carve_gone unmap(struct carve_state *s, struct carve_link *mapping) {
    uint32_t block = mapping->block;
    list_mapping(s, block, mapping->bytes, -1);
    remove_link(&s->virtual, mapping);
    return drop(s, block);
}

/* The mapping that holds an address, which need not be its first. */
static struct carve_link *mapping_around(struct carve_virtual *v, uint64_t address) {
    struct carve_link *link = known(v, address, CARVE_LINK_MAPPING);
    for (uint32_t i = 0; link == NULL && v->bits != 0 && i < 1u << v->bits; i++) {
        struct carve_link *other = &v->links[i];
        if (other->block != NO_BLOCK && other->kind == CARVE_LINK_MAPPING && address - other->key < other->bytes) {
            link = other;
        }
    }
    return link;
}

void carve_virtual_retained(struct carve_state *s, uint64_t handle, uint64_t address) {
    struct carve_virtual *v = &s->virtual;
    carve_lock(&s->pointers.lock);
    struct carve_link *mapping = mapping_around(v, address);
    if (mapping != NULL) {
        uint32_t block = mapping->block;
        struct carve_link *link = known(v, handle, CARVE_LINK_HANDLE);
        if (link != NULL) {
            link->uses++;
        } else if (add_link(v, (struct carve_link){.key = handle, .uses = 1, .block = block, .kind = CARVE_LINK_HANDLE})) {
            refer(s, block);
        }
    }
    carve_unlock(&s->pointers.lock);
}

struct carve_gone carve_virtual_mapped(struct carve_state *s, uint64_t address, uint64_t bytes, uint64_t handle) {
    struct carve_virtual *v = &s->virtual;
    struct carve_gone stale = {0};
    carve_lock(&s->pointers.lock);
    struct carve_link *before = known(v, address, CARVE_LINK_MAPPING);
    if (before != NULL) {
        stale = unmap(s, before);
    }
    struct carve_link *link = known(v, handle, CARVE_LINK_HANDLE);
    if (link != NULL) {
        uint32_t block = link->block;
        /* There is room: see carve_virtual_turn. */
        if (add_link(v, (struct carve_link){.key = address, .bytes = bytes, .block = block, .kind = CARVE_LINK_MAPPING})) {
            refer(s, block);
            list_mapping(s, block, bytes, 1);
        }
    }
    carve_unlock(&s->pointers.lock);
    return stale;
}

bool carve_virtual_unmapped(struct carve_state *s, uint64_t *next, uint64_t end, struct carve_gone *gone) {
    struct carve_virtual *v = &s->virtual;
    bool found = false;
    carve_lock(&s->pointers.lock);
    while (*next < end && !found) {
        struct carve_link *link = known(v, *next, CARVE_LINK_MAPPING);
        if (link == NULL) {
            *next += 1u << CARVE_PAGE_SHIFT; /* of a block that isn't known; no mapping is smaller than a page */
            continue;
        }
        *next += link->bytes;
        *gone = unmap(s, link);
        found = true;
    }
    carve_unlock(&s->pointers.lock);
    return found;
}

/* ---- multicast objects ---- */

bool carve_virtual_object(struct carve_state *s, uint64_t handle) {
    carve_lock(&s->pointers.lock);
    bool good = known(&s->virtual, handle, CARVE_LINK_HANDLE) != NULL || create(s, handle, 0, 0, true);
    carve_unlock(&s->pointers.lock);
    return good;
}

/* A place in an object, of one card; offsets are multiples of 64 KiB and more. */
static uint64_t place(uint32_t object, unsigned card, uint64_t offset) {
    return (uint64_t)object << 40 ^ (uint64_t)card << 34 ^ offset >> 16;
}

uint32_t carve_virtual_bind(struct carve_state *s, uint64_t handle, uint64_t address) {
    struct carve_virtual *v = &s->virtual;
    carve_lock(&s->pointers.lock);
    struct carve_link *link = handle != 0 ? known(v, handle, CARVE_LINK_HANDLE) : mapping_around(v, address);
    uint32_t block = link == NULL || block_at(s, link->block)->object ? NO_BLOCK : link->block;
    if (block != NO_BLOCK) {
        refer(s, block);
    }
    carve_unlock(&s->pointers.lock);
    return block;
}

unsigned carve_virtual_card(struct carve_state *s, uint32_t block) {
    carve_lock(&s->pointers.lock);
    unsigned card = block_at(s, block)->card;
    carve_unlock(&s->pointers.lock);
    return card;
}

struct carve_gone carve_virtual_let_go(struct carve_state *s, uint32_t block) {
    carve_lock(&s->pointers.lock);
    struct carve_gone gone = drop(s, block);
    carve_unlock(&s->pointers.lock);
    return gone;
}

/* Takes a binding off the list; what it held may go. */
static struct carve_gone unbind(struct carve_state *s, struct carve_link *binding) {
    uint32_t block = binding->block;
    block_at(s, (uint32_t)binding->bytes)->bindings--;
    remove_link(&s->virtual, binding);
    return drop(s, block);
}

bool carve_virtual_bound(struct carve_state *s, uint32_t block, uint64_t object, unsigned card, uint64_t offset, struct carve_gone *stale) {
    struct carve_virtual *v = &s->virtual;
    *stale = (struct carve_gone){0};
    carve_lock(&s->pointers.lock);
    bool good = known(v, object, CARVE_LINK_HANDLE) != NULL || create(s, object, 0, 0, true);
    if (good) {
        uint32_t to = known(v, object, CARVE_LINK_HANDLE)->block;
        struct carve_link *before = known(v, place(to, card, offset), CARVE_LINK_BINDING);
        if (before != NULL) {
            *stale = unbind(s, before);
        }
        good = add_link(v, (struct carve_link){.key = place(to, card, offset), .bytes = to, .uses = 1, .block = block, .kind = CARVE_LINK_BINDING});
        block_at(s, to)->bindings += good;
    }
    carve_unlock(&s->pointers.lock);
    return good;
}

struct carve_gone carve_virtual_unbound(struct carve_state *s, uint64_t object, unsigned card, uint64_t offset) {
    struct carve_virtual *v = &s->virtual;
    struct carve_gone gone = {0};
    carve_lock(&s->pointers.lock);
    struct carve_link *link = known(v, object, CARVE_LINK_HANDLE);
    struct carve_link *binding = link == NULL ? NULL : known(v, place(link->block, card, offset), CARVE_LINK_BINDING);
    if (binding != NULL) {
        gone = unbind(s, binding);
    }
    carve_unlock(&s->pointers.lock);
    return gone;
}

bool carve_virtual_unbound_all(struct carve_state *s, uint32_t object, struct carve_gone *gone) {
    struct carve_virtual *v = &s->virtual;
    bool found = false;
    carve_lock(&s->pointers.lock);
    for (uint32_t i = 0; !found && i < 1u << v->bits; i++) {
        if (v->links[i].block != NO_BLOCK && v->links[i].kind == CARVE_LINK_BINDING && v->links[i].bytes == object) {
            *gone = unbind(s, &v->links[i]);
            found = true;
        }
    }
    if (!found) {
        free_block(s, object);
    }
    carve_unlock(&s->pointers.lock);
    return found;
}
