/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reserves, interrupted: at a step of one call others are made, as by another thread just then. With the front whose
 * steps can be armed, over the software GPU.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>

#include "soft_box.h"
#include "tap.h"

#define CALL(name) ((__typeof__(name) *)dlsym(a.handle, #name))

static struct api a;
static CUcontext context;
static CUstream stream;
static uint64_t bare;
static void (*meanwhile)(void);
static unsigned came;

static void interrupt(int number) {
    (void)number;
    void (*act)(void) = meanwhile;
    meanwhile = NULL;
    if (act != NULL) {
        came++;
        act();
    }
}

static void open_share(uint64_t mib) {
    a = start(mib, mib, CARVE_LIMITS_SELF_VISIBLE);
    if (a.cuCtxCreate_v2(&context, 0, 0) != CUDA_SUCCESS || CALL(cuStreamCreate)(&stream, CU_STREAM_NON_BLOCKING) != CUDA_SUCCESS) {
        exit(3);
    }
    bare = truth(0, getpid());
    signal(SIGUSR1, interrupt);
}

/* Calls act when the next call comes to a step. */
static void at(const char *step, void (*act)(void)) {
    meanwhile = act;
    ((void (*)(const char *, unsigned, int))dlsym(a.handle, "carve_test_arm"))(step, 0, SIGUSR1);
}

static CUmemoryPool pool, other;
static CUmemoryPool new_pool(void) {
    CUmemPoolProps properties = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
    CUmemoryPool made = NULL;
    return CALL(cuMemPoolCreate)(&made, &properties) == CUDA_SUCCESS ? made : NULL;
}

static void exchange(void) {
    CALL(cuMemPoolDestroy)(pool);
    other = new_pool();
}

/* A pool is destroyed while memory of it is asked for, and another one takes its place on the list. */
static void destroyed_meanwhile(void) {
    CUdeviceptr p = 7, q;
    open_share(1000);
    pool = new_pool();
    at("reserve-held", exchange);
    CUresult result = CALL(cuMemAllocFromPoolAsync)(&p, 100 * MIB, pool, stream);
    check(came == 1 && other != NULL && result == CUDA_ERROR_INVALID_VALUE && p == 7, "memory of a pool that is destroyed just then isn't had (%d)", result);
    check(box_used(0) == truth(0, getpid()) && box_pending(0) == 0, "and isn't charged");
    result = CALL(cuMemAllocFromPoolAsync)(&p, 10 * MIB, other, stream);
    check(result == CUDA_SUCCESS && a.cuMemAlloc_v2(&q, info(&a).free / (2 * MIB) * (2 * MIB)) == CUDA_SUCCESS && box_used(0) == truth(0, getpid()), "all that is left is taken");
    result = CALL(cuMemAllocFromPoolAsync)(&p, 16 * MIB, other, stream);
    check(result == CUDA_SUCCESS && box_used(0) == truth(0, getpid()), "but what the other pool has idle: nobody else counts on that (%d)", result);
    unsigned refused = 0;
    for (int i = 0; i < 20; i++) {
        refused += CALL(cuMemAllocFromPoolAsync)(&p, 64 * MIB, other, stream) == CUDA_ERROR_OUT_OF_MEMORY;
    }
    check(refused == 20 && box_used(0) == truth(0, getpid()) && truth(0, getpid()) <= 1000 * MIB, "and no more is had of it, however often it is asked for");
}

/* ---- graphs ---- */

static CUgraphExec one, two;
static CUstream aside;
static CUdeviceptr flag;
static uint32_t *told;
static CUdeviceptr rest;
static CUresult second;

static CUgraphExec graph_with(uint64_t bytes) {
    CUDA_MEM_ALLOC_NODE_PARAMS params = {
        .poolProps = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}}, .bytesize = bytes};
    CUgraph graph = NULL;
    CUgraphNode node = NULL, end = NULL;
    CUgraphExec made = NULL;
    bool good = CALL(cuGraphCreate)(&graph, 0) == CUDA_SUCCESS && CALL(cuGraphAddMemAllocNode)(&node, graph, NULL, 0, &params) == CUDA_SUCCESS &&
                CALL(cuGraphAddMemFreeNode)(&end, graph, &node, 1, params.dptr) == CUDA_SUCCESS && CALL(cuGraphInstantiateWithFlags)(&made, graph, 0) == CUDA_SUCCESS;
    return good ? made : NULL;
}

/* A graph that was launched and is done, another one that wasn't, and a stream that stands until it is told to go on. */
static void two_graphs(void) {
    void *host = NULL;
    open_share(1000);
    one = graph_with(200 * MIB);
    two = graph_with(200 * MIB);
    check(one != NULL && two != NULL && CALL(cuStreamCreate)(&aside, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS && CALL(cuMemHostAlloc)(&host, 4, 2) == CUDA_SUCCESS &&
              CALL(cuMemHostGetDevicePointer_v2)(&flag, host, 0) == CUDA_SUCCESS,
          "two graphs");
    told = host;
    *told = 0;
    check(CALL(cuGraphLaunch)(one, stream) == CUDA_SUCCESS && CALL(cuStreamSynchronize)(stream) == CUDA_SUCCESS && box_used(0) == bare + 200 * MIB, "one has run");
}

static void take_the_rest(void) {
    while (a.cuMemAlloc_v2(&rest, 20 * MIB) == CUDA_SUCCESS) {
    }
}

static void the_end(CUresult result) {
    uint64_t on_card = truth(0, getpid());
    check(came == 1 && on_card <= 1000 * MIB, "the card holds no more than the share (%d; %zu MiB)", result, (size_t)(on_card / MIB));
    __atomic_store_n(told, 1, __ATOMIC_SEQ_CST);
    check(CALL(cuCtxSynchronize)() == CUDA_SUCCESS && box_used(0) == truth(0, getpid()) && box_pending(0) == 0, "when all is done the ledger has what the driver has");
    CUdeviceptr p;
    uint64_t had = box_used(0);
    check(had > 980 * MIB || a.cuMemAlloc_v2(&p, 20 * MIB) == CUDA_SUCCESS, "and nothing is held for ever (%zu MiB)", (size_t)(had / MIB));
}

static void other_launches(void) {
    second = CALL(cuStreamWaitValue32_v2)(aside, flag, 1, CU_STREAM_WAIT_VALUE_EQ);
    if (second == CUDA_SUCCESS) {
        second = CALL(cuGraphLaunch)(two, aside);
    }
    take_the_rest();
}

/* A graph that is launched again has its memory, and holds none; just then another one is, which gets it. */
static void taken_over_meanwhile(void) {
    two_graphs();
    at("reserve-held", other_launches);
    CUresult result = CALL(cuGraphLaunch)(one, stream);
    check(result == CUDA_SUCCESS && second == CUDA_SUCCESS, "two graphs are launched at once, one of which had its memory (%d, %d)", result, second);
    the_end(result);
}

static void first_again(void) {
    /* Not more than there is, or the memory of graphs would be trimmed for it. */
    (void)a.cuMemAlloc_v2(&rest, info(&a).free / (2 * MIB) * (2 * MIB));
    second = CALL(cuGraphLaunch)(one, aside);
}

/* A graph has got another one's memory, as is known from the moment when it is charged. */
static void charged_in_between(void) {
    two_graphs();
    check(CALL(cuStreamWaitValue32_v2)(stream, flag, 1, CU_STREAM_WAIT_VALUE_EQ) == CUDA_SUCCESS, "a stream stands");
    at("reserve-charged", first_again);
    CUresult result = CALL(cuGraphLaunch)(two, stream);
    check(result == CUDA_SUCCESS && second == CUDA_ERROR_OUT_OF_MEMORY, "the one whose memory was taken over has none (%d, %d)", result, second);
    the_end(result);
}

static void trims(void) {
    second = CALL(cuDeviceGraphMemTrim)(0);
    take_the_rest();
}

static void trimmed_meanwhile(void) {
    two_graphs();
    at("reserve-held", trims);
    CUresult result = CALL(cuGraphLaunch)(one, stream);
    check(result == CUDA_SUCCESS && second == CUDA_SUCCESS, "a graph is launched while the memory of graphs is trimmed (%d, %d)", result, second);
    the_end(result);
}

/* A small graph gets the memory of a large one that is launched again just then, which takes as much anew. */
static void smaller_meanwhile(void) {
    two_graphs();
    two = graph_with(20 * MIB);
    at("reserve-held", other_launches);
    CUresult result = CALL(cuGraphLaunch)(one, stream);
    check(result == CUDA_SUCCESS, "a graph is launched again, and another one that is smaller (%d, %d)", result, second);
    the_end(result);
}

/* The large one is launched again while the small one is on its way. */
static void larger_again(void) {
    (void)a.cuMemAlloc_v2(&rest, (info(&a).free - 40 * MIB) / (2 * MIB) * (2 * MIB));
    second = CALL(cuGraphLaunch)(one, aside);
}

static void larger_meanwhile(void) {
    two_graphs();
    two = graph_with(20 * MIB);
    check(CALL(cuStreamWaitValue32_v2)(stream, flag, 1, CU_STREAM_WAIT_VALUE_EQ) == CUDA_SUCCESS, "a stream stands");
    at("reserve-done", larger_again);
    CUresult result = CALL(cuGraphLaunch)(two, stream);
    check(result == CUDA_SUCCESS, "a graph is launched, and one that had more memory again (%d, %d)", result, second);
    the_end(result);
}

/* ---- pools in pieces ---- */

static CUresult (*aside_call)(void);

static void *on_its_way(void *argument) {
    a.cuCtxSetCurrent(context);
    second = aside_call();
    __atomic_store_n((uint32_t *)argument, 1, __ATOMIC_RELEASE);
    return NULL;
}

/* Another thread makes its call, until that is done or waits for this one. */
static pthread_t other_thread;
static void other_thread_calls(void) {
    unsigned (*met)(const char *) = (unsigned (*)(const char *))dlsym(a.handle, "carve_test_met");
    static uint32_t over;
    over = 0;
    unsigned before = met("reserve-waits");
    pthread_create(&other_thread, NULL, on_its_way, &over);
    while (__atomic_load_n(&over, __ATOMIC_ACQUIRE) == 0 && met("reserve-waits") == before) {
        usleep(100);
    }
}

static CUresult small_block(void) { CUdeviceptr p; return CALL(cuMemAllocAsync)(&p, 20 * MIB, aside); }
static CUresult synchronization(void) { return CALL(cuStreamSynchronize)(aside); }

/* The pool has room for a block, but in pieces; while that shows, another thread makes a call. */
static void in_pieces(const char *step, CUresult (*call)(void)) {
    enum { MOST = 400 };
    CUdeviceptr p[MOST], r = 77;
    int had = 0;
    cuuint64_t all = UINT64_MAX;
    open_share(1000);
    CALL(cuDeviceGetDefaultMemPool)(&pool, 0);
    CALL(cuMemPoolSetAttribute)(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &all);
    check(CALL(cuStreamCreate)(&aside, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS, "a second stream");
    while (had < MOST && CALL(cuMemAllocAsync)(&p[had], 4 * MIB, stream) == CUDA_SUCCESS) {
        had++;
    }
    for (int i = 0; i < had; i += 2) {
        CALL(cuMemFreeAsync)(p[i], stream);
    }
    aside_call = call;
    at(step, other_thread_calls);
    CUresult result = CALL(cuMemAllocAsync)(&r, 30 * MIB, stream);
    if (came == 1) {
        pthread_join(other_thread, NULL);
    }
    meanwhile = NULL;
    uint64_t on_card = truth(0, getpid());
    check(result == CUDA_ERROR_OUT_OF_MEMORY && r == 77, "a block that no hole takes is refused (%d, %d)", result, second);
    check(on_card <= 1000 * MIB && box_used(0) == on_card && box_pending(0) == 0, "and the card holds no more than the share (%zu MiB)", (size_t)(on_card / MIB));
    check(CALL(cuMemAllocAsync)(&p[0], 4 * MIB, stream) == CUDA_SUCCESS && truth(0, getpid()) == on_card, "one that fits in a hole is had");
}

static void taken_before_undone(void) { in_pieces("reserve-charged", small_block); }
static void settled_before_charged(void) { in_pieces("reserve-done", synchronization); }
static void taken_before_charged(void) { in_pieces("reserve-done", small_block); }

/* ---- threads ---- */

enum { THREADS = 4 };
static uint32_t stop, done;
static uint64_t refused, strange, launches;

static void *launcher(void *argument) {
    CUgraphExec mine = argument == NULL ? one : two;
    CUstream own = NULL;
    a.cuCtxSetCurrent(context);
    CALL(cuStreamCreate)(&own, CU_STREAM_NON_BLOCKING);
    while (__atomic_load_n(&stop, __ATOMIC_ACQUIRE) == 0) {
        CUresult result = CALL(cuGraphLaunch)(mine, own);
        __atomic_add_fetch(result == CUDA_SUCCESS ? &launches : result == CUDA_ERROR_OUT_OF_MEMORY ? &refused : &strange, 1, __ATOMIC_SEQ_CST);
        if (result == CUDA_SUCCESS && CALL(cuStreamSynchronize)(own) != CUDA_SUCCESS) {
            __atomic_add_fetch(&strange, 1, __ATOMIC_SEQ_CST);
        }
    }
    __atomic_add_fetch(&done, 1, __ATOMIC_SEQ_CST);
    return NULL;
}

/* Memory by itself, and from pools that come and go. */
static void *taker(void *argument) {
    unsigned seed = argument == NULL ? 1 : 2;
    a.cuCtxSetCurrent(context);
    for (int i = 0; i < 300; i++) {
        CUdeviceptr p = 0;
        CUresult result = a.cuMemAlloc_v2(&p, (1 + (uint64_t)(unsigned)rand_r(&seed) % 450) * MIB);
        CUmemoryPool own = argument == NULL ? NULL : new_pool();
        CUdeviceptr q = 0;
        if (own != NULL) {
            CUresult more = CALL(cuMemAllocFromPoolAsync)(&q, (1 + (uint64_t)(unsigned)rand_r(&seed) % 60) * MIB, own, stream);
            if (more == CUDA_SUCCESS) {
                CALL(cuMemFreeAsync)(q, stream);
            }
            CALL(cuMemPoolDestroy)(own);
        }
        if (result == CUDA_SUCCESS) {
            a.cuMemFree_v2(p);
        }
        __atomic_add_fetch(result == CUDA_SUCCESS || result == CUDA_ERROR_OUT_OF_MEMORY ? &launches : &strange, 1, __ATOMIC_SEQ_CST);
    }
    __atomic_store_n(&stop, 1, __ATOMIC_RELEASE);
    __atomic_add_fetch(&done, 1, __ATOMIC_SEQ_CST);
    return NULL;
}

static void in_threads(void) {
    pthread_t threads[THREADS];
    uint64_t most = 0;
    two_graphs();
    pthread_create(&threads[0], NULL, launcher, NULL);
    pthread_create(&threads[1], NULL, launcher, &stop);
    pthread_create(&threads[2], NULL, taker, NULL);
    pthread_create(&threads[3], NULL, taker, &stop);
    while (__atomic_load_n(&done, __ATOMIC_ACQUIRE) != THREADS) {
        uint64_t on_card = truth(0, getpid());
        most = on_card > most ? on_card : most;
    }
    for (int i = 0; i < THREADS; i++) {
        pthread_join(threads[i], NULL);
    }
    check(most <= 1000 * MIB && strange == 0 && launches > 0, "graphs, pools and blocks in four threads: at most %zu of 1000 MiB, %zu went through, %zu were refused, %zu strange answers", (size_t)(most / MIB), (size_t)launches, (size_t)refused, (size_t)strange);
    check(CALL(cuCtxSynchronize)() == CUDA_SUCCESS && CALL(cuDeviceGraphMemTrim)(0) == CUDA_SUCCESS && box_used(0) == bare && truth(0, getpid()) == bare && box_pending(0) == 0, "and all of it is back");
}

static int run(void *scenario) {
    ((void (*)(void))scenario)();
    return 0;
}

/* threads: only those, with any front. */
int main(int argc, char **argv) {
    if (argc < 2 || strcmp(argv[1], "threads") != 0) {
        check(in_child(run, (void *)destroyed_meanwhile) == 0, "destroyed meanwhile: ran to its end");
        check(in_child(run, (void *)taken_over_meanwhile) == 0, "taken over meanwhile: ran to its end");
        check(in_child(run, (void *)charged_in_between) == 0, "charged in between: ran to its end");
        check(in_child(run, (void *)trimmed_meanwhile) == 0, "trimmed meanwhile: ran to its end");
        check(in_child(run, (void *)smaller_meanwhile) == 0, "smaller meanwhile: ran to its end");
        check(in_child(run, (void *)larger_meanwhile) == 0, "larger meanwhile: ran to its end");
        check(in_child(run, (void *)taken_before_undone) == 0, "taken before undone: ran to its end");
        check(in_child(run, (void *)taken_before_charged) == 0, "taken before charged: ran to its end");
        check(in_child(run, (void *)settled_before_charged) == 0, "settled before charged: ran to its end");
    }
    check(in_child(run, (void *)in_threads) == 0, "threads: ran to its end");
    return tap_done();
}
