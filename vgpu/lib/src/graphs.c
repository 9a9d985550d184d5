/* SPDX-License-Identifier: Apache-2.0 */
#include "graphs.h"

#include "pointers.h"
#include "reserves.h"
#include "spread.h"

#define SEGMENT_BYTES (32ull << 20) /* what the driver takes for allocations of a graph, at least */

/* ---- what a graph takes ---- */

struct range {
    uint64_t at, bytes;
};

struct ranges {
    struct range *list;
    size_t count, room;
    CUdevice device; /* of the first one; what a graph takes on others is charged once it is there */
    CUgraph *todo;   /* graphs in graphs, as deep as they go: threads may have next to no stack */
    size_t todo_count, todo_room;
    uint32_t cards; /* see spread.h */
    bool failed;
};

static void add_graph(struct ranges *r, CUgraph graph) {
    if (r->todo_count == r->todo_room) {
        size_t room = r->todo_room == 0 ? 512 : 2 * r->todo_room;
        CUgraph *more = carve_map_private(room * sizeof *more);
        if (more == NULL) {
            r->failed = true;
            return;
        }
        for (size_t i = 0; i < r->todo_count; i++) {
            more[i] = r->todo[i];
        }
        if (r->todo != NULL) {
            carve_unmap(r->todo, r->todo_room * sizeof *more);
        }
        r->todo = more;
        r->todo_room = room;
    }
    r->todo[r->todo_count++] = graph;
}

static void add_range(struct ranges *r, uint64_t at, uint64_t bytes) {
    if (r->count == r->room) {
        size_t room = r->room == 0 ? 256 : 2 * r->room;
        struct range *more = carve_map_private(room * sizeof *more);
        if (more == NULL) {
            r->failed = true;
            return;
        }
        for (size_t i = 0; i < r->count; i++) {
            more[i] = r->list[i];
        }
        if (r->list != NULL) {
            carve_unmap(r->list, r->room * sizeof *more);
        }
        r->list = more;
        r->room = room;
    }
    r->list[r->count++] = (struct range){at, bytes};
}

static void gather(const struct carve_driver *d, struct carve_state *s, CUgraph graph, struct ranges *r) {
    size_t count = 0;
    if (d->cuGraphGetNodes(graph, NULL, &count) != CUDA_SUCCESS || count == 0) {
        return;
    }
    size_t bytes = count * sizeof(CUgraphNode);
    CUgraphNode *nodes = carve_map_private(bytes);
    if (nodes == NULL) {
        r->failed = true;
        return;
    }
    if (d->cuGraphGetNodes(graph, nodes, &count) != CUDA_SUCCESS) {
        count = 0;
    }
    for (size_t i = 0; i < count && !r->failed; i++) {
        CUgraphNodeType type = -1;
        CUDA_MEM_ALLOC_NODE_PARAMS params = {.bytesize = 0};
        CUgraph child;
        (void)d->cuGraphNodeGetType(nodes[i], &type);
        if (carve_spread_possible(s)) {
            r->cards |= carve_spread_of(d, s, nodes[i], type);
        }
        if (type == CU_GRAPH_NODE_TYPE_MEM_ALLOC && d->cuGraphMemAllocNodeGetParams != NULL && d->cuGraphMemAllocNodeGetParams(nodes[i], &params) == CUDA_SUCCESS &&
            params.poolProps.location.type == CU_MEM_LOCATION_TYPE_DEVICE) {
            r->device = r->count == 0 ? params.poolProps.location.id : r->device;
            if (params.poolProps.location.id == r->device) {
                add_range(r, params.dptr, params.bytesize);
            } else {
                (void)carve_reserve_find(d, s, NULL, params.poolProps.location.id, true);
            }
        } else if (type == CU_GRAPH_NODE_TYPE_GRAPH && d->cuGraphChildGraphNodeGetGraph != NULL &&
                   d->cuGraphChildGraphNodeGetGraph(nodes[i], &child) == CUDA_SUCCESS) {
            add_graph(r, child);
        }
    }
    carve_unmap(nodes, bytes);
}

static void sort(struct range *list, size_t count) {
    size_t gap = 1;
    while (gap < count / 3) {
        gap = 3 * gap + 1;
    }
    for (; gap > 0; gap /= 3) {
        for (size_t i = gap; i < count; i++) {
            struct range one = list[i];
            size_t j = i;
            for (; j >= gap && list[j - gap].at > one.at; j -= gap) {
                list[j] = list[j - gap];
            }
            list[j] = one;
        }
    }
}

static uint64_t in_pages(uint64_t bytes) { return carve_units_bytes(carve_page_units(bytes)); }

/* Segments, each with what lies in it by its addresses, and how many. */
static uint64_t footprint(struct ranges *r, size_t *segments) {
    uint64_t end = 0, total = 0;
    *segments = 0;
    sort(r->list, r->count);
    for (size_t i = 0; i < r->count; i++) {
        uint64_t at = r->list[i].at, behind = at + r->list[i].bytes;
        uint64_t more = at >= end ? (r->list[i].bytes <= SEGMENT_BYTES ? SEGMENT_BYTES : in_pages(r->list[i].bytes))
                                  : behind > end ? in_pages(behind - end) : 0;
        *segments += at >= end;
        end = at >= end ? at + more : end + more;
        total += more;
    }
    return total;
}

/* ---- the list; the lock of reserves is held ---- */

static struct carve_graph *find(struct carve_graphs *g, CUgraphExec exec) {
    for (uint32_t i = 0; i < g->count; i++) {
        if (g->list[i].exec == exec) {
            return &g->list[i];
        }
    }
    return NULL;
}

static bool add(struct carve_graphs *g, struct carve_graph graph) {
    if (g->count == g->room) {
        uint32_t room = g->room == 0 ? 64 : 2 * g->room;
        struct carve_graph *more = carve_map_private(room * sizeof *more);
        if (more == NULL) {
            return false;
        }
        for (uint32_t i = 0; i < g->count; i++) {
            more[i] = g->list[i];
        }
        if (g->list != NULL) {
            carve_unmap(g->list, g->room * sizeof *more);
        }
        g->list = more;
        g->room = room;
    }
    g->list[g->count] = graph;
    __atomic_store_n(&g->count, g->count + 1, __ATOMIC_RELEASE);
    return true;
}

bool carve_graph_made(const struct carve_driver *d, struct carve_state *s, CUgraphExec exec, CUgraph graph) {
    struct ranges r = {.device = -1};
    if (d->cuGraphGetNodes == NULL || d->cuGraphNodeGetType == NULL || (d->cuGraphMemAllocNodeGetParams == NULL && !carve_spread_possible(s))) {
        return true; /* a driver whose graphs have no memory */
    }
    for (gather(d, s, graph, &r); r.todo_count != 0 && !r.failed;) {
        gather(d, s, r.todo[--r.todo_count], &r);
    }
    if (r.todo != NULL) {
        carve_unmap(r.todo, r.todo_room * sizeof r.todo[0]);
    }
    bool good = !r.failed && (!carve_spread_possible(s) || carve_spread_made(s, exec, r.cards));
    if (good && r.count != 0) {
        int reserve = carve_reserve_find(d, s, NULL, r.device, true);
        size_t segments;
        struct carve_graph one = {.exec = exec, .most_bytes = footprint(&r, &segments), .generation = UINT64_MAX, .reserve = reserve};
        one.in_one = segments == 1;
        carve_lock(&s->reserves.lock);
        struct carve_graph *before = find(&s->graphs, exec);
        if (before != NULL) {
            *before = one;
        }
        good = reserve >= 0 && (before != NULL || add(&s->graphs, one));
        carve_unlock(&s->reserves.lock);
    }
    if (r.list != NULL) {
        carve_unmap(r.list, r.room * sizeof r.list[0]);
    }
    return good;
}

bool carve_graph_gone(struct carve_state *s, CUgraphExec exec, struct carve_graph *gone) {
    struct carve_graphs *g = &s->graphs;
    carve_lock(&s->reserves.lock);
    struct carve_graph *one = find(g, exec);
    if (one != NULL) {
        *gone = *one;
        *one = g->list[g->count - 1];
        __atomic_store_n(&g->count, g->count - 1, __ATOMIC_RELEASE);
        g->last = g->last == exec ? NULL : g->last;
    }
    carve_unlock(&s->reserves.lock);
    return one != NULL;
}

void carve_graph_back(struct carve_state *s, const struct carve_graph *gone) {
    carve_lock(&s->reserves.lock);
    if (find(&s->graphs, gone->exec) == NULL) {
        (void)add(&s->graphs, *gone); /* there was room for it */
    }
    carve_unlock(&s->reserves.lock);
}

void carve_graphs_lost(struct carve_state *s) {
    if (CARVE_UNLIKELY(__atomic_load_n(&s->graphs.count, __ATOMIC_ACQUIRE) != 0)) {
        carve_lock(&s->reserves.lock);
        s->graphs.generation++;
        s->graphs.last = NULL;
        carve_unlock(&s->reserves.lock);
    }
}

/* ---- launches ---- */

struct run {
    struct carve_growth growth;
    carve_graph_call *call;
    uint64_t generation; /* when it was asked for */
    bool ran;
};

static bool captured(const struct carve_driver *d, const struct carve_growth *g) {
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    __typeof__(cuStreamIsCapturing) *ask = g->per_thread ? d->cuStreamIsCapturing_ptsz : d->cuStreamIsCapturing;
    return ask != NULL && (ask(g->stream, &status) != CUDA_SUCCESS || status != CU_STREAM_CAPTURE_STATUS_NONE);
}

static CUresult make(const struct carve_driver *d, struct carve_growth *growth) {
    struct run *run = (struct run *)growth;
    CUresult result = run->call(growth->graph, growth->stream);
    run->ran = result == CUDA_SUCCESS && !captured(d, growth); /* else it has become part of another graph, and took nothing */
    return result;
}

/* Under the lock, and together with the charge: whoever counts on its memory from now on finds that in force. */
static void over(struct carve_state *s, struct carve_growth *growth) {
    const struct run *run = (const struct run *)growth;
    struct carve_graphs *g = &s->graphs;
    if (!run->ran) {
        return;
    }
    if (g->generation != run->generation) {
        /* Others ran at the same time. Which of them the driver served last, and who has what, nobody knows. */
        g->generation++;
        g->last = NULL;
        return;
    }
    struct carve_graph *one = find(g, growth->graph);
    g->generation += g->last != growth->graph;
    g->last = growth->graph;
    if (one != NULL) {
        one->generation = g->generation;
    }
}

CUresult carve_graph_run(const struct carve_driver *d, CUgraphExec exec, CUstream stream, bool per_thread, carve_graph_call *call) {
    struct carve_state *s = __atomic_load_n(&carve_state_now, __ATOMIC_ACQUIRE);
    if (CARVE_LIKELY(s == NULL || __atomic_load_n(&s->graphs.count, __ATOMIC_ACQUIRE) == 0)) {
        return call(exec, stream);
    }
    s = carve_state();
    if (s == NULL) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    struct run run = {.call = call, .growth = {.make = make, .over = over, .captured = captured, .graph = exec, .stream = stream, .per_thread = per_thread}};
    carve_lock(&s->reserves.lock);
    struct carve_graph *one = find(&s->graphs, exec);
    int reserve = one != NULL ? one->reserve : -1;
    if (one != NULL) {
        run.growth.bytes = run.growth.most_bytes = one->most_bytes;
        run.growth.in_one = one->in_one;
        /* It has its memory still if none other was launched since, nor is at this moment, and none was trimmed. */
        struct carve_reserve *r = &s->reserves.list[reserve];
        run.growth.steady = one->generation == s->graphs.generation && r->flight == 0;
        run.generation = s->graphs.generation;
        r->counting += run.growth.steady;
        r->counted += run.growth.steady ? carve_page_units(one->most_bytes) : 0;
    }
    carve_unlock(&s->reserves.lock);
    return reserve < 0 ? call(exec, stream) : carve_reserve_grow(d, s, reserve, &run.growth);
}
