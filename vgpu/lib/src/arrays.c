/* SPDX-License-Identifier: Apache-2.0 */
#include "arrays.h"

#include "ledger.h"
#include "limits.h"
#include "reserves.h"

/* Arrays are aligned to 64 KiB; up to 1 MiB several share a page. */
enum { SLOT_BYTES = 1 << 16, SLOTS = (1 << CARVE_PAGE_SHIFT) / SLOT_BYTES, MOST_BYTES = 1 << 20, FIRST_ROOM = 64, NONE = 0 };
#define SLOT_UNITS ((uint32_t)SLOT_BYTES >> CARVE_UNIT_SHIFT)

/* ---- sizes ---- */

/* How elements lie where the driver can't be asked: rows of 64 bytes, tiles of 8 to 128 rows and up to 32 slices, as
 * the cards of the last fifteen years have it. */
enum { ROW_BYTES = 64, LEAST_ROWS = 8, MOST_ROWS = 128, MOST_SLICES = 32, LEVEL_BYTES = 512 };

static uint64_t up(uint64_t value, uint64_t step) { return (value + step - 1) / step * step; }

static uint64_t tile(uint64_t count, uint64_t least, uint64_t most) {
    uint64_t size = least;
    while (size < count && size < most) {
        size *= 2;
    }
    return size;
}

/* Bytes of an element in one channel; 0: in blocks of 4x4. Formats that aren't known are taken for the widest. */
static unsigned int channel_bytes(CUarray_format format) {
    switch (format) {
    case CU_AD_FORMAT_UNSIGNED_INT8:
    case CU_AD_FORMAT_SIGNED_INT8:
    case CU_AD_FORMAT_NV12:
    case CU_AD_FORMAT_UNORM_INT8X1:
    case CU_AD_FORMAT_UNORM_INT8X2:
    case CU_AD_FORMAT_UNORM_INT8X4:
    case CU_AD_FORMAT_SNORM_INT8X1:
    case CU_AD_FORMAT_SNORM_INT8X2:
    case CU_AD_FORMAT_SNORM_INT8X4:
        return 1;
    case CU_AD_FORMAT_UNSIGNED_INT16:
    case CU_AD_FORMAT_SIGNED_INT16:
    case CU_AD_FORMAT_HALF:
    case CU_AD_FORMAT_UNORM_INT16X1:
    case CU_AD_FORMAT_UNORM_INT16X2:
    case CU_AD_FORMAT_UNORM_INT16X4:
    case CU_AD_FORMAT_SNORM_INT16X1:
    case CU_AD_FORMAT_SNORM_INT16X2:
    case CU_AD_FORMAT_SNORM_INT16X4:
        return 2;
    default:
        return format >= CU_AD_FORMAT_BC1_UNORM && format <= CU_AD_FORMAT_BC7_UNORM_SRGB ? 0 : 4;
    }
}

static unsigned int block_bytes(CUarray_format format) {
    bool narrow = format == CU_AD_FORMAT_BC1_UNORM || format == CU_AD_FORMAT_BC1_UNORM_SRGB || format == CU_AD_FORMAT_BC4_UNORM || format == CU_AD_FORMAT_BC4_SNORM;
    return narrow ? 8 : 16;
}

static bool in_layers(const CUDA_ARRAY3D_DESCRIPTOR *d) { return (d->Flags & (CUDA_ARRAY3D_LAYERED | CUDA_ARRAY3D_CUBEMAP)) != 0; }

static uint64_t level_bytes(const CUDA_ARRAY3D_DESCRIPTOR *d) {
    unsigned int one = channel_bytes(d->Format);
    uint64_t height = d->Height != 0 ? d->Height : 1, depth = d->Depth != 0 ? d->Depth : 1, row, rows;
    if (one == 0) {
        row = (d->Width + 3) / 4 * block_bytes(d->Format);
        rows = (height + 3) / 4;
    } else if (d->Format == CU_AD_FORMAT_NV12) {
        row = d->Width;
        rows = height + height / 2;
    } else {
        row = d->Width * one * (d->NumChannels < 4 ? d->NumChannels : 4);
        rows = height;
    }
    rows = rows > 1 ? up(rows, tile(rows, LEAST_ROWS, MOST_ROWS)) : 1;
    depth = in_layers(d) ? depth : up(depth, tile(depth, 1, MOST_SLICES));
    return up(up(row, ROW_BYTES) * rows * depth, LEVEL_BYTES);
}

static uint64_t expected_bytes(const CUDA_ARRAY3D_DESCRIPTOR *descriptor, unsigned int levels) {
    CUDA_ARRAY3D_DESCRIPTOR level = *descriptor;
    uint64_t bytes = 0;
    for (unsigned int i = 0; i == 0 || i < levels; i++) {
        bytes += level_bytes(&level);
        if (level.Width <= 1 && level.Height <= 1 && (in_layers(&level) || level.Depth <= 1)) {
            break;
        }
        level.Width = level.Width > 1 ? level.Width / 2 : level.Width;
        level.Height = level.Height > 1 ? level.Height / 2 : level.Height;
        level.Depth = level.Depth > 1 && !in_layers(&level) ? level.Depth / 2 : level.Depth;
    }
    return bytes;
}

/* Asks the driver, by an array like it that has no memory; 0 where it can't say. */
static uint64_t told_bytes(const struct carve_driver *d, CUdevice device, const CUDA_ARRAY3D_DESCRIPTOR *descriptor, unsigned int levels) {
    CUDA_ARRAY3D_DESCRIPTOR like = *descriptor;
    CUDA_ARRAY_MEMORY_REQUIREMENTS needs = {.size = 0};
    CUarray array;
    CUmipmappedArray mipmapped;
    like.Flags |= CUDA_ARRAY3D_DEFERRED_MAPPING;
    if (levels == 0 && d->cuArray3DCreate_v2 != NULL && d->cuArrayGetMemoryRequirements != NULL && d->cuArrayDestroy != NULL) {
        if (d->cuArray3DCreate_v2(&array, &like) == CUDA_SUCCESS) {
            needs.size = d->cuArrayGetMemoryRequirements(&needs, array, device) == CUDA_SUCCESS ? needs.size : 0;
            (void)d->cuArrayDestroy(array);
        }
    } else if (levels != 0 && d->cuMipmappedArrayCreate != NULL && d->cuMipmappedArrayGetMemoryRequirements != NULL && d->cuMipmappedArrayDestroy != NULL) {
        if (d->cuMipmappedArrayCreate(&mipmapped, &like, levels) == CUDA_SUCCESS) {
            needs.size = d->cuMipmappedArrayGetMemoryRequirements(&needs, mipmapped, device) == CUDA_SUCCESS ? needs.size : 0;
            (void)d->cuMipmappedArrayDestroy(mipmapped);
        }
    }
    return needs.size;
}

uint64_t carve_array_bytes(const struct carve_driver *d, CUdevice device, const CUDA_ARRAY3D_DESCRIPTOR *descriptor, unsigned int levels) {
    uint64_t told = told_bytes(d, device, descriptor, levels);
    return told != 0 ? told : expected_bytes(descriptor, levels);
}

/* ---- places ---- */

/* Pages are counted from 1. */
static struct carve_array_page *page_at(struct carve_arrays *a, uint32_t page) { return &a->pages[page - 1]; }

static bool hole(const struct carve_array_page *page, uint32_t slots, uint32_t *first) {
    uint32_t run = 0;
    for (uint32_t i = page->lowest; i < SLOTS; i++) {
        run = (page->taken >> i & 1) != 0 ? 0 : run + 1;
        if (run == slots) {
            *first = i + 1 - slots;
            return true;
        }
    }
    return false;
}

static void fill(struct carve_arrays *a, uint32_t number, uint32_t slots, uint32_t first, struct carve_pointer *block) {
    struct carve_array_page *page = page_at(a, number);
    page->taken |= (uint32_t)((((uint64_t)1 << slots) - 1) << first);
    page->lowest = first == page->lowest ? (uint8_t)(first + slots) : page->lowest;
    block->place = number * SLOTS + first;
}

/* Finds a place in the pages at hand. A page that is full is looked at again once something in it is given back. */
static bool fit(struct carve_arrays *a, uint32_t slots, struct carve_pointer *block) {
    uint32_t first;
    for (uint32_t *link = &a->open; *link != NONE;) {
        uint32_t number = *link;
        struct carve_array_page *page = page_at(a, number);
        if (page->context == block->context && page->card == block->card) {
            if (hole(page, slots, &first)) {
                fill(a, number, slots, first, block);
                return true;
            }
            if (page->lowest >= SLOTS) {
                *link = page->next;
                page->listed = false;
                continue;
            }
        }
        link = &page->next;
    }
    return false;
}

static bool add_page(struct carve_arrays *a, const struct carve_pointer *block) {
    uint32_t number = a->free_page;
    if (number != NONE) {
        a->free_page = page_at(a, number)->next;
    } else {
        if (a->count == a->room) {
            uint32_t room = a->room == 0 ? FIRST_ROOM : 2 * a->room;
            struct carve_array_page *more = room > 1u << 26 ? NULL : carve_map_private(sizeof *more * room);
            if (more == NULL) {
                return false;
            }
            for (uint32_t i = 0; i < a->count; i++) {
                more[i] = a->pages[i];
            }
            if (a->pages != NULL) {
                carve_unmap(a->pages, sizeof *more * a->room);
            }
            a->pages = more;
            a->room = room;
        }
        number = ++a->count;
    }
    *page_at(a, number) = (struct carve_array_page){.context = block->context, .card = block->card, .listed = true, .next = a->open};
    a->open = number;
    return true;
}

static void remove_page(struct carve_arrays *a, uint32_t number) {
    uint32_t *link = &a->open;
    while (*link != NONE && *link != number) {
        link = &page_at(a, *link)->next;
    }
    if (*link == number) {
        *link = page_at(a, number)->next;
    }
    page_at(a, number)->next = a->free_page;
    a->free_page = number;
}

static bool charge_small(const struct carve_driver *d, struct carve_state *s, struct carve_pointer *block, uint32_t slots, uint64_t bytes) {
    struct carve_arrays *a = &s->arrays;
    carve_lock(&a->lock);
    bool fits = fit(a, slots, block);
    carve_unlock(&a->lock);
    if (fits) {
        return true;
    }
    if (!carve_obtain(d, s, block->card, CARVE_PAGE_UNITS, bytes)) {
        return false;
    }
    carve_lock(&a->lock);
    /* Another thread may have made room meanwhile, where the driver will find it, too. */
    bool spare = fit(a, slots, block);
    if (!spare && add_page(a, block)) {
        uint32_t page = a->open;
        fits = fit(a, slots, block);
        if (CARVE_UNLIKELY(page_at(a, page)->taken == 0)) {
            remove_page(a, page); /* a page is listed only with something in it, for which it is charged */
        }
    }
    carve_unlock(&a->lock);
    if (spare || !fits) {
        carve_release(s, block->card, CARVE_PAGE_UNITS);
    }
    return spare || fits;
}

bool carve_array_charge(const struct carve_driver *d, struct carve_state *s, struct carve_pointer *block, uint64_t bytes) {
    if (bytes <= MOST_BYTES) {
        /* Nothing is without a place: what no bytes are known of is the driver's to refuse, or it takes some. */
        uint32_t slots = bytes == 0 ? 1 : (uint32_t)(up(bytes, SLOT_BYTES) / SLOT_BYTES);
        block->kind = CARVE_KIND_ARRAY;
        block->units = slots * SLOT_UNITS;
        return charge_small(d, s, block, slots, bytes);
    }
    block->kind = CARVE_KIND_WHOLE;
    block->units = carve_page_units(bytes);
    return carve_obtain(d, s, block->card, block->units, bytes);
}

void carve_array_give(struct carve_state *s, const struct carve_pointer *block) {
    struct carve_arrays *a = &s->arrays;
    uint32_t number = block->place / SLOTS, first = block->place % SLOTS, slots = block->units / SLOT_UNITS;
    carve_lock(&a->lock);
    struct carve_array_page *page = page_at(a, number);
    page->taken &= ~(uint32_t)((((uint64_t)1 << slots) - 1) << first);
    page->lowest = first < page->lowest ? (uint8_t)first : page->lowest;
    bool empty = page->taken == 0;
    if (empty) {
        remove_page(a, number);
    } else if (!page->listed) {
        page->listed = true;
        page->next = a->open;
        a->open = number;
    }
    carve_unlock(&a->lock);
    if (empty) {
        carve_release(s, block->card, CARVE_PAGE_UNITS);
    }
}
