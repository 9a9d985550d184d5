/* SPDX-License-Identifier: Apache-2.0 */
#include "spread.h"

/* ---- nodes ---- */

static uint32_t card_bit(const struct carve_driver *d, struct carve_state *s, CUdevice device) {
    int card = carve_device_card(d, s, device);
    return card >= 0 ? 1u << card : 0; /* on one that the limits don't name nothing is charged */
}

static uint32_t by_context(const struct carve_driver *d, struct carve_state *s, CUcontext context) {
    CUdevice device;
    CUcontext popped;
    if (context == NULL) {
        return CARVE_SPREAD_HERE;
    }
    if (carve_context_device(s, context, &device)) {
        return card_bit(d, s, device);
    }
    if (d->cuCtxPushCurrent_v2 == NULL || d->cuCtxPopCurrent_v2 == NULL || d->cuCtxGetDevice == NULL || d->cuCtxPushCurrent_v2(context) != CUDA_SUCCESS) {
        return CARVE_SPREAD_HERE;
    }
    bool known = d->cuCtxGetDevice(&device) == CUDA_SUCCESS;
    (void)d->cuCtxPopCurrent_v2(&popped);
    return known ? card_bit(d, s, device) : CARVE_SPREAD_HERE;
}

/* Where memory is; 0: on no card. */
static uint32_t by_pointer(const struct carve_driver *d, struct carve_state *s, CUdeviceptr pointer) {
    CUmemorytype type = 0;
    CUdevice device = -1;
    if (d->cuPointerGetAttribute == NULL) {
        return CARVE_SPREAD_HERE;
    }
    if (d->cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, pointer) != CUDA_SUCCESS || type != CU_MEMORYTYPE_DEVICE) {
        return 0;
    }
    return d->cuPointerGetAttribute(&device, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, pointer) == CUDA_SUCCESS ? card_bit(d, s, device) : CARVE_SPREAD_HERE;
}

static uint32_t by_end(const struct carve_driver *d, struct carve_state *s, CUmemorytype type, CUdeviceptr pointer) {
    switch (type) {
    case CU_MEMORYTYPE_DEVICE:
    case CU_MEMORYTYPE_UNIFIED:
        return by_pointer(d, s, pointer);
    case CU_MEMORYTYPE_ARRAY:
        return CARVE_SPREAD_HERE;
    default:
        return 0;
    }
}

/* As copies are charged that aren't a graph's: see hooks_copy.c. */
static uint32_t by_copy(const struct carve_driver *d, struct carve_state *s, const CUDA_MEMCPY3D *copy) {
    uint32_t from = by_end(d, s, copy->srcMemoryType, copy->srcDevice), to = by_end(d, s, copy->dstMemoryType, copy->dstDevice);
    if (from == CARVE_SPREAD_HERE || from == to) {
        return to;
    }
    return to == CARVE_SPREAD_HERE ? from : 0;
}

uint32_t carve_spread_of(const struct carve_driver *d, struct carve_state *s, CUgraphNode node, CUgraphNodeType type) {
    switch (type) {
    case CU_GRAPH_NODE_TYPE_KERNEL: {
        CUDA_KERNEL_NODE_PARAMS_v2 params = {.ctx = NULL};
        bool told = d->cuGraphKernelNodeGetParams_v2 != NULL && d->cuGraphKernelNodeGetParams_v2(node, &params) == CUDA_SUCCESS;
        return told ? by_context(d, s, params.ctx) : CARVE_SPREAD_HERE;
    }
    case CU_GRAPH_NODE_TYPE_MEMCPY: {
        CUDA_MEMCPY3D copy = {.srcXInBytes = 0};
        bool told = d->cuGraphMemcpyNodeGetParams != NULL && d->cuGraphMemcpyNodeGetParams(node, &copy) == CUDA_SUCCESS;
        return told ? by_copy(d, s, &copy) : CARVE_SPREAD_HERE;
    }
    case CU_GRAPH_NODE_TYPE_MEMSET: {
        CUDA_MEMSET_NODE_PARAMS fill = {.dst = 0};
        bool told = d->cuGraphMemsetNodeGetParams != NULL && d->cuGraphMemsetNodeGetParams(node, &fill) == CUDA_SUCCESS;
        return told ? by_pointer(d, s, fill.dst) : CARVE_SPREAD_HERE;
    }
    case CU_GRAPH_NODE_TYPE_HOST:
    case CU_GRAPH_NODE_TYPE_GRAPH: /* its own nodes are asked */
    case CU_GRAPH_NODE_TYPE_EMPTY:
    case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
    case CU_GRAPH_NODE_TYPE_MEM_ALLOC:
    case CU_GRAPH_NODE_TYPE_MEM_FREE:
    case CU_GRAPH_NODE_TYPE_BATCH_MEM_OP:
        return 0;
    default:
        return CARVE_SPREAD_HERE;
    }
}

/* ---- the table: 1 << bits places, at most half of them taken; its lock is held ---- */

static uint32_t home(const struct carve_spreads *t, CUgraphExec exec) {
    return (uint32_t)(((uint64_t)(uintptr_t)exec * 0x9e3779b97f4a7c15u) >> (64 - t->bits));
}

/* Where it is, or would be. */
static struct carve_spread *place_of(const struct carve_spreads *t, CUgraphExec exec) {
    uint32_t mask = (1u << t->bits) - 1, at = home(t, exec);
    while (t->list[at].exec != NULL && t->list[at].exec != exec) {
        at = (at + 1) & mask;
    }
    return &t->list[at];
}

static bool grow(struct carve_spreads *t) {
    struct carve_spreads more = {.bits = t->bits == 0 ? 8 : t->bits + 1};
    more.list = carve_map_private(sizeof *more.list << more.bits);
    if (more.list == NULL) {
        return false;
    }
    for (uint32_t i = 0; t->list != NULL && i < 1u << t->bits; i++) {
        if (t->list[i].exec != NULL) {
            *place_of(&more, t->list[i].exec) = t->list[i];
        }
    }
    if (t->list != NULL) {
        carve_unmap(t->list, sizeof *t->list << t->bits);
    }
    t->list = more.list;
    t->bits = more.bits;
    return true;
}

bool carve_spread_made(struct carve_state *s, CUgraphExec exec, uint32_t cards) {
    struct carve_spreads *t = &s->spreads;
    carve_lock(&t->lock);
    bool good = (t->list != NULL && 2 * (t->count + 1) <= 1u << t->bits) || grow(t);
    if (good) {
        struct carve_spread *one = place_of(t, exec);
        bool fresh = one->exec == NULL;
        *one = (struct carve_spread){exec, cards != 0 ? cards : CARVE_SPREAD_HERE};
        __atomic_store_n(&t->count, t->count + fresh, __ATOMIC_RELEASE);
    }
    carve_unlock(&t->lock);
    return good;
}

uint32_t carve_spread_gone(struct carve_state *s, CUgraphExec exec) {
    struct carve_spreads *t = &s->spreads;
    uint32_t cards = 0;
    carve_lock(&t->lock);
    struct carve_spread *one = t->list != NULL ? place_of(t, exec) : NULL;
    if (one != NULL && one->exec != NULL) {
        cards = one->cards;
        /* Those behind it that would be looked for from its place, or before, move up. */
        uint32_t mask = (1u << t->bits) - 1, hole = (uint32_t)(one - t->list);
        for (uint32_t at = (hole + 1) & mask; t->list[at].exec != NULL; at = (at + 1) & mask) {
            if (((at - home(t, t->list[at].exec)) & mask) >= ((at - hole) & mask)) {
                t->list[hole] = t->list[at];
                hole = at;
            }
        }
        t->list[hole] = (struct carve_spread){NULL, 0};
        __atomic_store_n(&t->count, t->count - 1, __ATOMIC_RELEASE);
    }
    carve_unlock(&t->lock);
    return cards;
}

uint32_t carve_spread_find_slow(struct carve_state *s, CUgraphExec exec) {
    struct carve_spreads *t = &s->spreads;
    carve_lock(&t->lock);
    uint32_t cards = t->list != NULL ? place_of(t, exec)->cards : 0;
    carve_unlock(&t->lock);
    return cards;
}
