/* SPDX-License-Identifier: Apache-2.0 */
/* Memory of graphs over the software GPU: what is charged is what the driver says that the process has. */
#define _GNU_SOURCE
#include "soft_box.h"
#include "tap.h"

#define CALL(name) ((__typeof__(name) *)dlsym(a.handle, #name))

static struct api a;
static CUcontext context;
static CUstream stream;
static uint64_t bare;

static void open_share(uint64_t mib) {
    a = start(mib, mib, CARVE_LIMITS_SELF_VISIBLE);
    if (a.cuCtxCreate_v2(&context, 0, 0) != CUDA_SUCCESS || CALL(cuStreamCreate)(&stream, CU_STREAM_NON_BLOCKING) != CUDA_SUCCESS) {
        exit(3);
    }
    bare = truth(0, getpid());
}

/* An allocation behind a node, or behind none. */
static CUgraphNode allocation(CUgraph graph, CUgraphNode after, uint64_t bytes, CUdeviceptr *pointer) {
    CUDA_MEM_ALLOC_NODE_PARAMS params = {
        .poolProps = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}}, .bytesize = bytes};
    CUgraphNode node = NULL;
    if (CALL(cuGraphAddMemAllocNode)(&node, graph, after == NULL ? NULL : &after, after != NULL, &params) != CUDA_SUCCESS) {
        return NULL;
    }
    *pointer = params.dptr;
    return node;
}

static CUgraphNode release(CUgraph graph, CUgraphNode after, CUdeviceptr pointer) {
    CUgraphNode node = NULL;
    return CALL(cuGraphAddMemFreeNode)(&node, graph, &after, 1, pointer) == CUDA_SUCCESS ? node : NULL;
}

static void takes(CUgraph graph, uint64_t bytes) {
    CUdeviceptr p = 0;
    CUgraphNode node = allocation(graph, NULL, bytes, &p);
    release(graph, node, p);
}

/* Allocations and frees one after the other, some of which take the place of others. */
static CUgraph some_graph(unsigned *seed) {
    CUgraph graph;
    CUgraphNode last = NULL;
    CUdeviceptr open[8];
    int count = 0;
    if (CALL(cuGraphCreate)(&graph, 0) != CUDA_SUCCESS) {
        return NULL;
    }
    for (int i = rand_r(seed) % 12; i >= 0; i--) {
        CUdeviceptr p;
        if (count < 8 && (count == 0 || rand_r(seed) % 2 == 0)) {
            CUgraphNode node = allocation(graph, last, 1 + (uint64_t)(unsigned)rand_r(seed) % (rand_r(seed) % 3 == 0 ? 90 * MIB : 9 * MIB), &p);
            open[count] = p;
            count += node != NULL;
            last = node != NULL ? node : last;
        } else {
            CUgraphNode node = release(graph, last, open[--count]);
            last = node != NULL ? node : last;
        }
    }
    while (count > 0) {
        last = release(graph, last, open[--count]);
    }
    return graph;
}

static void agrees_with_the_driver(void) {
    enum { GRAPHS = 10 };
    struct { CUgraph graph; CUgraphExec exec; } g[GRAPHS] = {{NULL, NULL}};
    CUdeviceptr p[10] = {0};
    unsigned seed = 23, disagree = 0, over = 0, had = 0, refused = 0, strange = 0, made = 0;
    open_share(750);
    for (int i = 0; i < 8000; i++) {
        int k = rand_r(&seed) % GRAPHS, at = rand_r(&seed) % 10;
        unsigned what = (unsigned)rand_r(&seed) % 100;
        CUstream on = rand_r(&seed) % 2 == 0 ? NULL : stream;
        CUresult result = CUDA_SUCCESS;
        if (g[k].exec == NULL) {
            g[k].graph = some_graph(&seed);
            CUDA_GRAPH_INSTANTIATE_PARAMS params = {.flags = what % 3 == 0 ? CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD : 0, .hUploadStream = on};
            result = what < 30   ? CALL(cuGraphInstantiateWithFlags)(&g[k].exec, g[k].graph, 0)
                     : what < 60 ? CALL(cuGraphInstantiate_v2)(&g[k].exec, g[k].graph, NULL, NULL, 0)
                                 : CALL(cuGraphInstantiateWithParams)(&g[k].exec, g[k].graph, &params);
            made += result == CUDA_SUCCESS;
            strange += result != CUDA_SUCCESS && (g[k].exec != NULL || params.result_out != CUDA_GRAPH_INSTANTIATE_ERROR || what < 60);
            if (result != CUDA_SUCCESS) {
                refused += result == CUDA_ERROR_OUT_OF_MEMORY;
                CALL(cuGraphDestroy)(g[k].graph);
                result = CUDA_SUCCESS;
            }
        } else if (what < 50) {
            result = what % 2 == 0 ? CALL(cuGraphLaunch)(g[k].exec, on) : CALL(cuGraphLaunch_ptsz)(g[k].exec, on);
            had += result == CUDA_SUCCESS;
        } else if (what < 60) {
            result = what % 2 == 0 ? CALL(cuGraphUpload)(g[k].exec, on) : CALL(cuGraphUpload_ptsz)(g[k].exec, on);
            had += result == CUDA_SUCCESS;
        } else if (what < 70) {
            strange += (what % 2 == 0 ? CALL(cuCtxSynchronize)() : CALL(cuStreamSynchronize)(on)) != CUDA_SUCCESS;
        } else if (what < 74) {
            strange += CALL(cuDeviceGraphMemTrim)(0) != CUDA_SUCCESS;
        } else if (what < 80) {
            strange += CALL(cuGraphExecDestroy)(g[k].exec) != CUDA_SUCCESS || CALL(cuGraphDestroy)(g[k].graph) != CUDA_SUCCESS;
            g[k].exec = NULL;
        } else if (p[at] != 0) {
            strange += a.cuMemFree_v2(p[at]) != CUDA_SUCCESS;
            p[at] = 0;
        } else {
            CUresult other = a.cuMemAlloc_v2(&p[at], (1 + (uint64_t)(unsigned)rand_r(&seed) % 60) * MIB);
            strange += other != CUDA_SUCCESS && other != CUDA_ERROR_OUT_OF_MEMORY;
        }
        refused += result == CUDA_ERROR_OUT_OF_MEMORY;
        if (result != CUDA_SUCCESS && result != CUDA_ERROR_OUT_OF_MEMORY && strange++ == 0) {
            printf("# call %d (%u): error %d\n", i, what, result);
        }
        uint64_t on_card = truth(0, getpid());
        if (box_used(0) != on_card && disagree++ == 0) {
            printf("# call %d (%u): %zu charged, %zu on the card\n", i, what, box_used(0), on_card);
        }
        over += on_card > 750 * MIB;
    }
    check(disagree == 0 && box_pending(0) == 0, "after each of 8000 calls the ledger has what the driver has (%u times not)", disagree);
    check(over == 0, "the card never held more than the limit (%u times it did)", over);
    check(had > 500 && refused > 50 && made > 200 && strange == 0, "%u launches and uploads, %u refusals, %u graphs, %u strange answers", had, refused, made, strange);
    for (int k = 0; k < GRAPHS; k++) {
        if (g[k].exec != NULL) {
            CALL(cuGraphExecDestroy)(g[k].exec);
            CALL(cuGraphDestroy)(g[k].graph);
        }
    }
    for (int i = 0; i < 10; i++) {
        if (p[i] != 0) {
            a.cuMemFree_v2(p[i]);
        }
    }
    CALL(cuCtxSynchronize)();
    CALL(cuDeviceGraphMemTrim)(0);
    check(box_used(0) == bare && truth(0, getpid()) == bare, "destroyed and trimmed, all of it is back");
}

static void at_the_limit(void) {
    CUgraph first, second, big;
    CUgraphExec one = NULL, two = NULL, three = NULL;
    CUdeviceptr q;
    open_share(1000);
    uint64_t room = 1000 * MIB - bare;
    CALL(cuGraphCreate)(&first, 0), CALL(cuGraphCreate)(&second, 0), CALL(cuGraphCreate)(&big, 0);
    takes(first, 300 * MIB);
    takes(second, 300 * MIB);
    takes(big, room + MIB);
    check(CALL(cuGraphInstantiateWithFlags)(&one, first, 0) == CUDA_SUCCESS && CALL(cuGraphInstantiateWithFlags)(&two, second, 0) == CUDA_SUCCESS &&
              CALL(cuGraphInstantiateWithFlags)(&three, big, 0) == CUDA_SUCCESS && box_used(0) == bare,
          "three graphs are made, and take nothing yet");
    check(CALL(cuGraphLaunch)(three, stream) == CUDA_ERROR_OUT_OF_MEMORY && box_used(0) == bare && truth(0, getpid()) == bare, "one that is too large is refused, and takes nothing");
    check(CALL(cuGraphLaunch)(one, stream) == CUDA_SUCCESS && box_used(0) == bare + 300 * MIB && truth(0, getpid()) == box_used(0), "one that fits takes its memory");
    CALL(cuStreamSynchronize)(stream);
    check(CALL(cuGraphLaunch)(two, stream) == CUDA_SUCCESS && truth(0, getpid()) == box_used(0) && box_used(0) <= 1000 * MIB, "another one has the same after it");
    CALL(cuStreamSynchronize)(stream);
    check(a.cuMemAlloc_v2(&q, room) == CUDA_SUCCESS && box_used(0) == 1000 * MIB && truth(0, getpid()) == box_used(0), "what graphs have idle is given back where it is needed");
    check(CALL(cuGraphLaunch)(one, stream) == CUDA_ERROR_OUT_OF_MEMORY && box_used(0) == 1000 * MIB, "and then isn't there for them");
    a.cuMemFree_v2(q);
    unsigned had = 0;
    for (int i = 0; i < 200; i++) {
        had += CALL(cuGraphLaunch)(i % 3 == 0 ? two : one, stream) == CUDA_SUCCESS;
        CALL(cuStreamSynchronize)(stream);
    }
    check(had == 200 && box_used(0) == truth(0, getpid()), "freed, it is, for one after the other");
    uint64_t rest = info(&a).free;
    check(a.cuMemAlloc_v2(&q, rest / (2 * MIB) * (2 * MIB)) == CUDA_SUCCESS && CALL(cuGraphLaunch)(one, stream) == CUDA_SUCCESS && CALL(cuGraphLaunch)(one, stream) == CUDA_SUCCESS, "with nothing left, one that has its memory is launched again and again");
    CALL(cuStreamSynchronize)(stream);
    check(CALL(cuDeviceGraphMemTrim)(0) == CUDA_SUCCESS && box_used(0) == truth(0, getpid()), "trimmed, ledger and card agree");
}

static void context_gone(void) {
    CUgraph graph;
    CUgraphExec exec;
    open_share(1000);
    CALL(cuGraphCreate)(&graph, 0);
    takes(graph, 300 * MIB);
    check(CALL(cuGraphInstantiateWithFlags)(&exec, graph, 0) == CUDA_SUCCESS && CALL(cuGraphUpload)(exec, stream) == CUDA_SUCCESS && box_used(0) == truth(0, getpid()) && box_used(0) == bare + 300 * MIB, "uploaded, a graph has its memory");
    check(CALL(cuStreamSynchronize)(stream) == CUDA_SUCCESS && a.cuCtxDestroy_v2(context) == CUDA_SUCCESS && box_used(0) == 0 && truth(0, getpid()) == 0, "which goes with the last context");
}

/* What a share of 1000 MiB has left is taken, so that nothing more can be had. */
static CUdeviceptr all_of_it(void) {
    CUdeviceptr p = 0;
    check(a.cuMemAlloc_v2(&p, info(&a).free / (2 * MIB) * (2 * MIB)) == CUDA_SUCCESS, "all that is left of the share is taken");
    return p;
}

static bool over(void) { return truth(0, getpid()) > 1000 * MIB; }

/* A graph that is captured by being launched has taken no memory yet. */
static void launched_into_a_capture(void) {
    CUgraph graph = NULL, captured = NULL;
    CUgraphExec exec;
    CUstream other;
    open_share(1000);
    CALL(cuGraphCreate)(&graph, 0), CALL(cuStreamCreate)(&other, CU_STREAM_NON_BLOCKING);
    takes(graph, 100 * MIB);
    CALL(cuGraphInstantiateWithFlags)(&exec, graph, 0);
    /* Drivers differ in whether a graph with allocations can be part of another one. */
    check(CALL(cuStreamBeginCapture_v2)(other, CU_STREAM_CAPTURE_MODE_RELAXED) == CUDA_SUCCESS, "a capture");
    CUresult launched = CALL(cuGraphLaunch)(exec, other), ended = CALL(cuStreamEndCapture)(other, &captured);
    (void)ended;
    check(launched != CUDA_ERROR_OUT_OF_MEMORY && box_used(0) == bare && truth(0, getpid()) == bare, "a launch that is captured takes nothing (%d)", launched);
    CUdeviceptr p = all_of_it();
    check(CALL(cuGraphLaunch)(exec, stream) == CUDA_ERROR_OUT_OF_MEMORY && !over() && box_used(0) == truth(0, getpid()), "so the first real one is refused where there is no room");
    a.cuMemFree_v2(p);
    check(CALL(cuGraphLaunch)(exec, stream) == CUDA_SUCCESS && CALL(cuStreamSynchronize)(stream) == CUDA_SUCCESS && box_used(0) == truth(0, getpid()) && box_used(0) >= bare + 100 * MIB, "with room it is had");
}

/* The memory of graphs goes with the last context of the card, whatever is launched after it. */
static void after_its_context(void) {
    CUgraph graph;
    CUgraphExec exec;
    open_share(1000);
    CALL(cuGraphCreate)(&graph, 0);
    takes(graph, 100 * MIB);
    check(CALL(cuGraphInstantiateWithFlags)(&exec, graph, 0) == CUDA_SUCCESS && CALL(cuGraphLaunch)(exec, stream) == CUDA_SUCCESS && CALL(cuStreamSynchronize)(stream) == CUDA_SUCCESS, "a graph has its memory");
    check(a.cuCtxDestroy_v2(context) == CUDA_SUCCESS && a.cuCtxCreate_v2(&context, 0, 0) == CUDA_SUCCESS && CALL(cuStreamCreate)(&stream, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS && truth(0, getpid()) == bare, "which goes with the context");
    CUdeviceptr p = all_of_it();
    check(CALL(cuGraphLaunch)(exec, stream) == CUDA_ERROR_OUT_OF_MEMORY && !over() && box_used(0) == truth(0, getpid()), "and isn't there in the next one");
    a.cuMemFree_v2(p);
    check(CALL(cuGraphLaunch)(exec, stream) == CUDA_SUCCESS && box_used(0) == truth(0, getpid()), "unless it has room");
}

static CUgraphExec undying;
static CUresult answer;
static void destroy_it(void *unused) {
    (void)unused;
    answer = CALL(cuGraphExecDestroy)(undying); /* which no host function may */
}

/* A graph that the driver doesn't destroy is followed on. */
static void not_destroyed(void) {
    CUgraph graph;
    open_share(1000);
    CALL(cuGraphCreate)(&graph, 0);
    takes(graph, 100 * MIB);
    CALL(cuGraphInstantiateWithFlags)(&undying, graph, 0);
    check(CALL(cuLaunchHostFunc)(stream, destroy_it, NULL) == CUDA_SUCCESS && CALL(cuStreamSynchronize)(stream) == CUDA_SUCCESS && answer == CUDA_ERROR_NOT_PERMITTED, "a host function can't destroy a graph");
    CUdeviceptr p = all_of_it();
    check(CALL(cuGraphLaunch)(undying, stream) == CUDA_ERROR_OUT_OF_MEMORY && !over() && box_used(0) == truth(0, getpid()), "which takes no memory that there isn't");
    a.cuMemFree_v2(p);
    check(CALL(cuGraphLaunch)(undying, stream) == CUDA_SUCCESS && box_used(0) == truth(0, getpid()) && CALL(cuGraphExecDestroy)(undying) == CUDA_SUCCESS, "it is launched, and destroyed");
}

/* What a stream that is captured allocates is the graph's: nothing of a pool, and nothing before the launch. */
static void captured_allocations(void) {
    CUgraph graph = NULL;
    CUgraphExec exec;
    CUdeviceptr one = 0, two = 0, kept = 0, plain = 0;
    CUmemoryPool pool = NULL;
    CUmemPoolProps properties = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
    open_share(1000);
    CALL(cuMemPoolCreate)(&pool, &properties);
    CUdeviceptr p = all_of_it();
    uint64_t full = box_used(0), refusals = box_refusals(0);
    check(CALL(cuStreamBeginCapture_v2)(stream, CU_STREAM_CAPTURE_MODE_RELAXED) == CUDA_SUCCESS && a.cuMemAllocAsync(&one, 100 * MIB, stream) == CUDA_SUCCESS &&
              CALL(cuMemAllocAsync_ptsz)(&two, 40 * MIB, stream) == CUDA_SUCCESS && CALL(cuMemAllocFromPoolAsync)(&kept, 64 * MIB, pool, stream) == CUDA_SUCCESS,
          "with nothing left, allocations are captured");
    check(box_used(0) == full && truth(0, getpid()) == full && box_pending(0) == 0 && box_refusals(0) == refusals, "and take nothing");
    check(a.cuMemFreeAsync(one, stream) == CUDA_SUCCESS && a.cuMemFreeAsync(two, stream) == CUDA_SUCCESS && CALL(cuStreamEndCapture)(stream, &graph) == CUDA_SUCCESS && box_used(0) == full, "two of them are freed in the graph");
    check(CALL(cuGraphInstantiateWithFlags)(&exec, graph, 0) == CUDA_SUCCESS && CALL(cuGraphLaunch)(exec, stream) == CUDA_ERROR_OUT_OF_MEMORY && truth(0, getpid()) == full && box_used(0) == full, "its launch is refused where there is no room");
    a.cuMemFree_v2(p);
    check(CALL(cuGraphLaunch)(exec, stream) == CUDA_SUCCESS && CALL(cuStreamSynchronize)(stream) == CUDA_SUCCESS && box_used(0) == truth(0, getpid()) && box_used(0) >= bare + 164 * MIB, "with room it takes what the driver says");
    check(CALL(cuGraphLaunch)(exec, stream) != CUDA_SUCCESS && box_used(0) == truth(0, getpid()), "it can't be launched again while a block of it is in use");
    check(a.cuMemAllocAsync(&plain, 10 * MIB, stream) == CUDA_SUCCESS && box_used(0) == truth(0, getpid()) && a.cuMemFreeAsync(plain, stream) == CUDA_SUCCESS, "beside it pools are as ever");
    check(a.cuMemFreeAsync(kept, stream) == CUDA_SUCCESS && CALL(cuStreamSynchronize)(stream) == CUDA_SUCCESS && box_used(0) == truth(0, getpid()), "the block is freed outside");
    check(CALL(cuGraphLaunch)(exec, stream) == CUDA_SUCCESS && CALL(cuStreamSynchronize)(stream) == CUDA_SUCCESS && a.cuMemFree_v2(kept) == CUDA_SUCCESS && box_used(0) == truth(0, getpid()), "then it can, and the block is freed the other way");
    check(CALL(cuGraphExecDestroy)(exec) == CUDA_SUCCESS && CALL(cuDeviceGraphMemTrim)(0) == CUDA_SUCCESS && CALL(cuMemPoolDestroy)(pool) == CUDA_SUCCESS && CALL(cuCtxSynchronize)() == CUDA_SUCCESS && box_used(0) == truth(0, getpid()) && box_used(0) == bare, "trimmed, all of it is back");

    /* Allocations beside captures, in any order. */
    CUstream streams[2] = {stream, NULL};
    CUdeviceptr live[20] = {0}, inside[2][8];
    int counts[2] = {0, 0};
    bool open[2] = {false, false};
    unsigned seed = 31, disagree = 0, over_limit = 0, strange = 0, graphs = 0, refused = 0;
    CALL(cuStreamCreate)(&streams[1], CU_STREAM_NON_BLOCKING);
    for (int i = 0; i < 3000; i++) {
        int k = rand_r(&seed) % 2, at = rand_r(&seed) % 20;
        CUresult result = CUDA_SUCCESS;
        if (!open[k] && rand_r(&seed) % 4 == 0) {
            result = CALL(cuStreamBeginCapture_v2)(streams[k], CU_STREAM_CAPTURE_MODE_RELAXED);
            open[k] = result == CUDA_SUCCESS;
            counts[k] = 0;
        } else if (open[k] && counts[k] < 8 && rand_r(&seed) % 2 == 0) {
            result = a.cuMemAllocAsync(&inside[k][counts[k]], 1 + (uint64_t)(unsigned)rand_r(&seed) % (120 * MIB), streams[k]);
            counts[k] += result == CUDA_SUCCESS;
            strange += result == CUDA_ERROR_OUT_OF_MEMORY;
        } else if (open[k]) {
            while (counts[k] > 0) {
                strange += a.cuMemFreeAsync(inside[k][--counts[k]], streams[k]) != CUDA_SUCCESS;
            }
            strange += CALL(cuStreamEndCapture)(streams[k], &graph) != CUDA_SUCCESS;
            open[k] = false;
            if (CALL(cuGraphInstantiateWithFlags)(&exec, graph, 0) == CUDA_SUCCESS) {
                graphs++;
                result = CALL(cuGraphLaunch)(exec, streams[k]);
                strange += CALL(cuStreamSynchronize)(streams[k]) != CUDA_SUCCESS || CALL(cuGraphExecDestroy)(exec) != CUDA_SUCCESS;
            }
            strange += CALL(cuGraphDestroy)(graph) != CUDA_SUCCESS;
        } else if (live[at] == 0) {
            result = a.cuMemAllocAsync(&live[at], 1 + (uint64_t)(unsigned)rand_r(&seed) % (60 * MIB), streams[k]);
            live[at] = result == CUDA_SUCCESS ? live[at] : 0;
        } else {
            result = a.cuMemFreeAsync(live[at], streams[k]);
            live[at] = 0;
        }
        refused += result == CUDA_ERROR_OUT_OF_MEMORY;
        if (result != CUDA_SUCCESS && result != CUDA_ERROR_OUT_OF_MEMORY && strange++ == 0) {
            printf("# call %d: error %d\n", i, result);
        }
        if (box_used(0) != truth(0, getpid()) && disagree++ == 0) {
            printf("# call %d: %zu charged, %zu on the card\n", i, box_used(0), truth(0, getpid()));
        }
        over_limit += over();
    }
    check(disagree == 0 && over_limit == 0, "beside captures the ledger has what the driver has after each of 3000 calls (%u times not), and never more than the share (%u times)", disagree, over_limit);
    check(graphs > 50 && refused > 5 && strange == 0, "%u graphs captured, %u refusals, %u strange answers", graphs, refused, strange);
}

/* Graphs with memory within graphs, however deep, take it as their own (CUDA 12.9 on). */
static void nested(void) {
    open_share(1000);
    __typeof__(cuGraphAddNode_v2) *add = CALL(cuGraphAddNode_v2);
    unsigned had = 0, refused = 0, over_limit = 0, disagree = 0, made = 0;
    for (int depth = 0; depth < 40 && add != NULL; depth += 13) {
        for (int turn = 0; turn < 2; turn++) { /* two of that depth, of which one fits */
            CUDA_MEM_ALLOC_NODE_PARAMS block = {.poolProps = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}}, .bytesize = (turn == 0 ? 500 : 900) * MIB};
            CUgraph graph = NULL;
            CUgraphNode node = NULL, end = NULL;
            CUgraphExec exec = NULL;
            bool good = CALL(cuGraphCreate)(&graph, 0) == CUDA_SUCCESS && CALL(cuGraphAddMemAllocNode)(&node, graph, NULL, 0, &block) == CUDA_SUCCESS &&
                        CALL(cuGraphAddMemFreeNode)(&end, graph, &node, 1, block.dptr) == CUDA_SUCCESS;
            for (int i = 0; good && i < depth; i++) {
                CUgraph outer = NULL;
                CUgraphNodeParams params;
                memset(&params, 0, sizeof params);
                params.type = CU_GRAPH_NODE_TYPE_GRAPH;
                params.graph.graph = graph;
                params.graph.ownership = 1; /* moved into the other */
                good = CALL(cuGraphCreate)(&outer, 0) == CUDA_SUCCESS && add(&node, outer, NULL, NULL, 0, &params) == CUDA_SUCCESS;
                graph = outer;
            }
            if (!good || CALL(cuGraphInstantiateWithFlags)(&exec, graph, 0) != CUDA_SUCCESS) {
                continue; /* a driver that has none of this */
            }
            made++;
            CUstream own;
            CUresult result = CALL(cuStreamCreate)(&own, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS ? CALL(cuGraphLaunch)(exec, own) : CUDA_ERROR_UNKNOWN;
            had += result == CUDA_SUCCESS;
            refused += result == CUDA_ERROR_OUT_OF_MEMORY;
            (void)CALL(cuStreamSynchronize)(own);
            over_limit += over();
            disagree += box_used(0) != truth(0, getpid());
        }
    }
    check(over_limit == 0 && disagree == 0 && had == made / 2 && refused == had && (made == 8 || add == NULL || made == 2), "%u nested graphs with memory: %u launched, %u refused, never more than the share (%u times it was, %u times the ledger was wrong)", made, had, refused, over_limit, disagree);
}

static int run(void *scenario) {
    ((void (*)(void))scenario)();
    return 0;
}

int main(void) {
    check(in_child(run, (void *)agrees_with_the_driver) == 0, "graphs: ran to its end");
    check(in_child(run, (void *)at_the_limit) == 0, "graphs at the limit: ran to its end");
    check(in_child(run, (void *)context_gone) == 0, "context gone: ran to its end");
    check(in_child(run, (void *)launched_into_a_capture) == 0, "launched into a capture: ran to its end");
    check(in_child(run, (void *)after_its_context) == 0, "after its context: ran to its end");
    check(in_child(run, (void *)not_destroyed) == 0, "not destroyed: ran to its end");
    check(in_child(run, (void *)nested) == 0, "nested: ran to its end");
    check(in_child(run, (void *)captured_allocations) == 0, "captured allocations: ran to its end");
    return tap_done();
}
