/* SPDX-License-Identifier: Apache-2.0 */
/*
 * compute_test: the share of a card's compute that a process alone on it gets, over the software GPU on its virtual
 * clock, so that each figure is the same each time. The agent divides nothing here: terms are the limits file's.
 */
#define _GNU_SOURCE
#include <math.h>
#include <signal.h>
#include <string.h>
#include <sys/time.h>
#include <unistd.h>

#include "compute_box.h"
#include "cuda_abi_graph.h"
#include "tap.h"

struct load {
    const char *name;
    uint64_t kernel_ns[3];
    unsigned kernels, streams;
    bool sync_each; /* waits for each launch */
    unsigned rare;  /* one launch in so many takes the second time, of one function */
    bool changes;   /* after a second all do */
    bool grows;     /* and are wider from then on */
    bool capture;   /* of a stream that nothing is launched in, all the time */
    double within;  /* points; 0: 2 */
    bool elsewhere; /* the current context is on another card than the stream */
};

static const struct load loads[] = {
    {.name = "kernels of 20 us", .kernel_ns = {20000}, .kernels = 1, .streams = 1},
    {.name = "kernels of 200 us, mixed with 30 us", .kernel_ns = {200000, 30000}, .kernels = 2, .streams = 1},
    {.name = "kernels of 1 ms, each waited for", .kernel_ns = {1000000}, .kernels = 1, .streams = 1, .sync_each = true},
    {.name = "kernels of 20 ms", .kernel_ns = {20000000}, .kernels = 1, .streams = 1},
    {.name = "kernels of 0.1, 1 and 5 ms on four streams", .kernel_ns = {100000, 1000000, 5000000}, .kernels = 3, .streams = 4},
};

enum { LOADS = sizeof loads / sizeof loads[0] };

/* Other programs than those of which the mean error is reported. */
static const struct load odd[] = {
    {.name = "one function, one launch in 256 takes 20 ms instead of 2 us", .kernel_ns = {2000, 20000000}, .kernels = 1, .streams = 1, .rare = 256},
    {.name = "one function, one launch in 64 takes 1 ms instead of 2 us", .kernel_ns = {2000, 1000000}, .kernels = 1, .streams = 1, .rare = 64},
    /* Too short to be looked at each: what is paid too little the driver's word on it corrects, see vgpu/compute/loop. */
    {.name = "one function, one launch in two takes 95 us instead of 5", .kernel_ns = {5000, 95000}, .kernels = 1, .streams = 1, .rare = 2, .within = 4},
    {.name = "one function that takes 2 us, then 2 ms", .kernel_ns = {2000, 2000000}, .kernels = 1, .streams = 1, .changes = true},
    {.name = "one function, launched small for 2 us, then large for 40 ms", .kernel_ns = {2000, 40000000}, .kernels = 1, .streams = 1, .changes = true, .grows = true},
    {.name = "kernels of 0.1 ms beside a capture that lasts", .kernel_ns = {100000}, .kernels = 1, .streams = 1, .capture = true},
    {.name = "kernels of 30 ms beside a capture that lasts", .kernel_ns = {30000000}, .kernels = 1, .streams = 1, .capture = true},
    {.name = "kernels of 1 ms on another card than the current context's", .kernel_ns = {1000000}, .kernels = 1, .streams = 1, .elsewhere = true},
};
enum { ODD = sizeof odd / sizeof odd[0] };

/* As many blocks of 1024 threads as the card has room for at once: kernels of that width follow one another. */
static unsigned as_wide_as(const struct api *api, CUdevice card) {
    int processors = 0, threads = 0;
    CUDA(cuDeviceGetAttribute)(&processors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, card);
    CUDA(cuDeviceGetAttribute)(&threads, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, card);
    return (unsigned)(processors * (threads / 1024));
}

static void alone(const struct load *load, unsigned percent) {
    struct api a = with_share(percent * 10000), *api = &a;
    CUcontext context;
    CUmodule module;
    CUfunction functions[3];
    CUstream streams[4] = {NULL};
    CUdeviceptr none = 0;
    bool good = a.cuCtxCreate_v2(&context, 0, 0) == CUDA_SUCCESS;
    for (unsigned i = 0; i < load->kernels; i++) {
        good &= CUDA(cuModuleLoadData)(&module, kernel_text) == CUDA_SUCCESS && CUDA(cuModuleGetFunction)(&functions[i], module, "carve_spin") == CUDA_SUCCESS;
    }
    for (unsigned i = 0; i < load->streams && load->streams > 1; i++) {
        good &= CUDA(cuStreamCreate)(&streams[i], CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS;
    }
    CUstream captured = NULL;
    if (load->capture) {
        good &= CUDA(cuStreamCreate)(&captured, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS && CUDA(cuStreamBeginCapture_v2)(captured, CU_STREAM_CAPTURE_MODE_RELAXED) == CUDA_SUCCESS;
    }
    CUcontext other;
    if (load->elsewhere) { /* which makes that one current */
        good &= CUDA(cuStreamCreate)(&streams[0], CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS && a.cuCtxCreate_v2(&other, 0, 1) == CUDA_SUCCESS;
    }
    check(good, "%s, %u %%: set up", load->name, percent);
    __typeof__(cuLaunchKernel) *launch = CUDA(cuLaunchKernel);
    unsigned blocks = as_wide_as(api, 0);
    uint64_t begin = clock_ns(), from = 0, work = 0, now;
    unsigned seed = percent;
    for (unsigned n = 0; good && (now = clock_ns()) < begin + 8000 * MS; n++) {
        if (from == 0 && now >= begin + 3000 * MS) {
            from = now;
            work = 0;
        }
        unsigned k = n % load->kernels, grid = blocks, function = k;
        if (load->rare != 0) { /* one function */
            k = (unsigned)rand_r(&seed) % load->rare == 0;
            function = 0;
        } else if (load->changes) {
            k = now > begin + 1000 * MS;
            function = 0;
            grid = load->grows && k == 0 ? 1 : blocks;
        }
        uint64_t ns = load->kernel_ns[k] * (700 + (uint64_t)rand_r(&seed) % 600) / 1000;
        void *parameters[] = {&ns, &none};
        good = launch(functions[function], grid, 1, 1, 1024, 1, 1, 0, streams[n % load->streams], parameters, NULL) == CUDA_SUCCESS;
        work += ns;
        if (load->sync_each) {
            good &= CUDA(cuCtxSynchronize)() == CUDA_SUCCESS;
        }
    }
    double got = 100.0 * (double)work / (double)(clock_ns() - from), error = fabs(got - percent);
    check(good && error <= (load->within != 0 ? load->within : 2), "%s: %.2f of %u %%", load->name, got, percent);
    if (load->capture) {
        CUgraph graph;
        check(CUDA(cuStreamEndCapture)(captured, &graph) == CUDA_SUCCESS, "the capture isn't disturbed");
    }
    if (load->elsewhere) {
        struct carve_usage_line *there = &box_usage()->lines[0][0], *here = &box_usage()->lines[1][0];
        check(there->charged_ns != 0 && here->charged_ns == 0, "the stream's card is paid, not the current context's");
        check(CUDA(cuCtxSetCurrent)(context) == CUDA_SUCCESS, "and left");
    }
    check(CUDA(cuCtxSynchronize)() == CUDA_SUCCESS && a.cuCtxDestroy_v2(context) == CUDA_SUCCESS, "and all is well at the end");
}

/* Graphs are charged by what they cost, launches that the driver refuses aren't charged. */
static void graphs(void) {
    struct api a = with_share(500000), *api = &a;
    CUcontext context;
    CUmodule module;
    CUfunction spin = NULL;
    CUstream stream = NULL, other = NULL;
    CUgraph graph = NULL;
    CUgraphExec exec = NULL;
    CUdeviceptr none = 0;
    uint64_t ns = 500000;
    void *parameters[] = {&ns, &none};
    struct carve_usage_line *line = &box_usage()->lines[0][0];
    __typeof__(cuLaunchKernel) *launch = CUDA(cuLaunchKernel);
    unsigned blocks = as_wide_as(api, 0);
    check(a.cuCtxCreate_v2(&context, 0, 0) == CUDA_SUCCESS && CUDA(cuModuleLoadData)(&module, kernel_text) == CUDA_SUCCESS &&
              CUDA(cuModuleGetFunction)(&spin, module, "carve_spin") == CUDA_SUCCESS && CUDA(cuStreamCreate)(&stream, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS &&
              CUDA(cuStreamCreate)(&other, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS,
          "graphs: set up");
    check(launch(spin, 0, 1, 1, 1, 1, 1, 0, stream, parameters, NULL) != CUDA_SUCCESS && line->committed_ns == 0 && line->since_ns == 0, "a launch that the driver refuses leaves no trace");
    check(launch(spin, blocks, 1, 1, 1024, 1, 1, 0, other, parameters, NULL) == CUDA_SUCCESS, "work on another stream");
    bool good = true;
    CUDA_KERNEL_NODE_PARAMS_v2 node = {.func = spin, .gridDimX = blocks, .gridDimY = 1, .gridDimZ = 1, .blockDimX = 1024, .blockDimY = 1, .blockDimZ = 1, .kernelParams = parameters};
    CUgraphNode last = NULL;
    check(CUDA(cuGraphCreate)(&graph, 0) == CUDA_SUCCESS, "a graph");
    for (int i = 0; i < 4; i++) {
        CUgraphNode next;
        good &= CUDA(cuGraphAddKernelNode_v2)(&next, graph, &last, i > 0, &node) == CUDA_SUCCESS;
        last = next;
    }
    check(good && CUDA(cuGraphInstantiateWithFlags)(&exec, graph, 0) == CUDA_SUCCESS, "of four kernels is made executable");
    uint64_t begin;
    CUDA(cuCtxSynchronize)();
    uint64_t from = 0, work = 0, now;
    for (begin = clock_ns(); good && (now = clock_ns()) < begin + 6000 * MS;) {
        if (from == 0 && now >= begin + 1000 * MS) {
            from = now;
            work = 0;
        }
        good = CUDA(cuGraphLaunch)(exec, stream) == CUDA_SUCCESS;
        work += 4 * ns;
    }
    double got = 100.0 * (double)work / (double)(clock_ns() - from);
    check(good && fabs(got - 50) <= 2, "a graph of four kernels: %.2f of 50 %%", got);
    CUDA(cuCtxSynchronize)();
    check(line->since_ns == 0 && line->charged_ns > 2500 * MS, "when all is done nothing is out");
    check(a.cuCtxDestroy_v2(context) == CUDA_SUCCESS, "and all is well at the end");
}

static void drop(int signal_number) { (void)signal_number; }

/* The same with a signal every fifth of a millisecond, which ends every sleep. */
static void under_signals(int flags) {
    struct sigaction act = {.sa_handler = drop, .sa_flags = flags};
    struct itimerval often = {{0, 200}, {0, 200}};
    sigaction(SIGALRM, &act, NULL);
    setitimer(ITIMER_REAL, &often, NULL);
    alone(&loads[1], 50);
}

/* A launch that others are put behind may wait for what the program does after them: here for a value that it writes.
 * The launches go on, and so does the program. */
static void waits_for_the_program(void) {
    struct api a = with_share(500000), *api = &a;
    CUcontext context = NULL;
    CUmodule module = NULL;
    CUfunction spin = NULL;
    CUstream stream = NULL, other = NULL;
    CUdeviceptr flag = 0, none = 0;
    void *host = NULL;
    uint64_t ns = 1000000;
    void *parameters[] = {&ns, &none};
    __typeof__(cuLaunchKernel) *launch = CUDA(cuLaunchKernel);
    unsigned blocks = as_wide_as(api, 0);
    check(a.cuCtxCreate_v2(&context, 0, 0) == CUDA_SUCCESS && CUDA(cuModuleLoadData)(&module, kernel_text) == CUDA_SUCCESS &&
              CUDA(cuModuleGetFunction)(&spin, module, "carve_spin") == CUDA_SUCCESS && CUDA(cuStreamCreate)(&stream, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS &&
              CUDA(cuStreamCreate)(&other, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS && CUDA(cuMemHostAlloc)(&host, 4, 2) == CUDA_SUCCESS && CUDA(cuMemHostGetDevicePointer_v2)(&flag, host, 0) == CUDA_SUCCESS,
          "values: set up");
    *(uint32_t *)host = 0;
    uint64_t begin = clock_ns();
    bool good = CUDA(cuStreamWaitValue32_v2)(stream, flag, 1, CU_STREAM_WAIT_VALUE_EQ) == CUDA_SUCCESS;
    for (int i = 0; i < 40 && good; i++) {
        good = launch(spin, blocks, 1, 1, 1024, 1, 1, 0, i % 4 == 3 ? other : stream, parameters, NULL) == CUDA_SUCCESS;
    }
    double took = (double)(clock_ns() - begin) / 1e9;
    check(good && took < 60, "launches behind a value that the program writes after them return (%.1f s)", took);
    __atomic_store_n((uint32_t *)host, 1, __ATOMIC_SEQ_CST);
    check(CUDA(cuCtxSynchronize)() == CUDA_SUCCESS, "and are done once it is written");
    struct carve_usage_line *line = &box_usage()->lines[0][0];
    check(line->since_ns == 0 && line->charged_ns > 30 * MS && line->charged_ns < 4000 * MS, "and paid (%.1f ms)", (double)line->charged_ns / 1e6);
}

/* A launch on two cards at once waits for the share of each, and each pays. */
static void several_cards(bool first) {
    struct api a = with_share(first ? 300000 : 500000), *api = &a;
    CUcontext contexts[2] = {NULL};
    CUmodule module = NULL;
    CUstream streams[2] = {NULL};
    CUdeviceptr none = 0;
    uint64_t ns = 1000000, begin, now, from = 0, work = 0;
    void *parameters[] = {&ns, &none};
    CUDA_LAUNCH_PARAMS list[2];
    bool good = true;
    unsigned widths[2] = {as_wide_as(api, 0), as_wide_as(api, 1)}, both = widths[0] < widths[1] ? widths[0] : widths[1];
    for (int bank = 0; bank < 2; bank++) {
        box_limits()->banks[bank].cards[1].compute_ppm = first ? 500000 : 300000;
        box_limits()->banks[bank].cards[1].flags = CARVE_CARD_COMPUTE_FIXED;
    }
    box_flags(CARVE_LIMITS_SELF_VISIBLE);
    for (int i = 1; i >= 0; i--) {
        good &= CUDA(cuCtxCreate_v2)(&contexts[i], 0, i) == CUDA_SUCCESS && CUDA(cuModuleLoadData)(&module, kernel_text) == CUDA_SUCCESS &&
                CUDA(cuStreamCreate)(&streams[i], CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS;
        list[i] = (CUDA_LAUNCH_PARAMS){.gridDimX = both, .gridDimY = 1, .gridDimZ = 1, .blockDimX = 1024, .blockDimY = 1, .blockDimZ = 1, .hStream = streams[i], .kernelParams = parameters};
        good &= CUDA(cuModuleGetFunction)(&list[i].function, module, "carve_spin") == CUDA_SUCCESS;
    }
    check(good, "two cards: set up");
    struct carve_usage_line *lines[2] = {&box_usage()->lines[0][0], &box_usage()->lines[1][0]};
    CUDA_LAUNCH_PARAMS twice[2] = {list[0], list[0]};
    check(CUDA(cuLaunchCooperativeKernelMultiDevice)(twice, 2, 0) != CUDA_SUCCESS && lines[0]->committed_ns == 0 && lines[0]->since_ns == 0, "one that the driver refuses leaves no trace");
    __typeof__(cuLaunchCooperativeKernelMultiDevice) *launch = CUDA(cuLaunchCooperativeKernelMultiDevice);
    for (begin = clock_ns(); good && (now = clock_ns()) < begin + 6000 * MS;) {
        if (from == 0 && now >= begin + 1000 * MS) {
            from = now;
            work = 0;
        }
        good = launch(list, 2, 0) == CUDA_SUCCESS;
        work += ns;
    }
    double got = 100.0 * (double)work / (double)(clock_ns() - from);
    check(good && fabs(got - 30) <= 2, "launches on two cards, with 30 %% of the %s and 50 of the other: %.2f of 30 %%", first ? "first" : "second", got);
    for (int i = 0; i < 2; i++) {
        good &= CUDA(cuCtxSetCurrent)(contexts[i]) == CUDA_SUCCESS && CUDA(cuCtxSynchronize)() == CUDA_SUCCESS;
    }
    double paid[2] = {(double)lines[0]->charged_ns / 1e6, (double)lines[1]->charged_ns / 1e6};
    check(good && paid[0] > 1500 && paid[1] > 1500 && lines[0]->since_ns == 0 && lines[1]->since_ns == 0, "each is paid (%.0f and %.0f ms)", paid[0], paid[1]);
    check(fabs(paid[0] - paid[1]) < 0.1 * paid[0], "and neither for the time in which the other was waited for");
}

/* What a graph does is paid by the card where its nodes' contexts are, whatever stream it is launched in. */
static void graphs_of_others(void) {
    struct api a = with_share(300000), *api = &a;
    CUcontext contexts[2] = {NULL};
    CUmodule module = NULL;
    CUfunction spins[2] = {NULL};
    CUstream stream = NULL, there = NULL;
    CUevent events[2] = {NULL};
    CUdeviceptr none = 0, far = 0;
    uint64_t ns = 1000000;
    void *parameters[] = {&ns, &none};
    bool good = true;
    unsigned widths[2] = {as_wide_as(api, 0), as_wide_as(api, 1)};
    for (int bank = 0; bank < 2; bank++) {
        box_limits()->banks[bank].cards[1].compute_ppm = 200000;
        box_limits()->banks[bank].cards[1].flags = CARVE_CARD_COMPUTE_FIXED;
    }
    box_flags(CARVE_LIMITS_SELF_VISIBLE);
    for (int i = 1; i >= 0; i--) {
        good &= CUDA(cuCtxCreate_v2)(&contexts[i], 0, i) == CUDA_SUCCESS && CUDA(cuModuleLoadData)(&module, kernel_text) == CUDA_SUCCESS &&
                CUDA(cuModuleGetFunction)(&spins[i], module, "carve_spin") == CUDA_SUCCESS && CUDA(cuStreamCreate)(i == 0 ? &stream : &there, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS &&
                CUDA(cuEventCreate)(&events[i], 2) == CUDA_SUCCESS && (i == 0 || a.cuMemAlloc_v2(&far, 16 * MIB) == CUDA_SUCCESS);
    }
    check(good, "graphs on other cards: set up");
    struct carve_usage_line *lines[2] = {&box_usage()->lines[0][0], &box_usage()->lines[1][0]};
    enum { CAPTURED, SETS, CHILD, UPDATED, BOTH, KINDS };
    static const char *const what[KINDS] = {"a captured kernel", "memory that is set", "a kernel in a graph in it", "a kernel that is updated", "kernels on both"};
    CUDA_KERNEL_NODE_PARAMS_v2 kernels[2];
    for (int i = 0; i < 2; i++) {
        kernels[i] = (CUDA_KERNEL_NODE_PARAMS_v2){.func = spins[i], .gridDimX = widths[i], .gridDimY = 1, .gridDimZ = 1, .blockDimX = 1024, .blockDimY = 1, .blockDimZ = 1, .kernelParams = parameters};
    }
    for (int kind = 0; kind < KINDS && good; kind++) {
        CUgraph graph = NULL, inner = NULL;
        CUgraphExec exec = NULL;
        CUgraphNode node = NULL, other = NULL;
        if (kind == CAPTURED) {
            good = CUDA(cuStreamBeginCapture_v2)(stream, CU_STREAM_CAPTURE_MODE_RELAXED) == CUDA_SUCCESS && CUDA(cuEventRecord)(events[0], stream) == CUDA_SUCCESS &&
                   CUDA(cuCtxSetCurrent)(contexts[1]) == CUDA_SUCCESS && CUDA(cuStreamWaitEvent)(there, events[0], 0) == CUDA_SUCCESS &&
                   CUDA(cuLaunchKernel)(spins[1], widths[1], 1, 1, 1024, 1, 1, 0, there, parameters, NULL) == CUDA_SUCCESS && CUDA(cuEventRecord)(events[1], there) == CUDA_SUCCESS &&
                   CUDA(cuCtxSetCurrent)(contexts[0]) == CUDA_SUCCESS && CUDA(cuStreamWaitEvent)(stream, events[1], 0) == CUDA_SUCCESS && CUDA(cuStreamEndCapture)(stream, &graph) == CUDA_SUCCESS;
        } else {
            CUDA_MEMSET_NODE_PARAMS fill = {.dst = far, .value = 7, .elementSize = 4, .width = 4 * MIB, .height = 1};
            good = CUDA(cuGraphCreate)(&graph, 0) == CUDA_SUCCESS && CUDA(cuGraphCreate)(&inner, 0) == CUDA_SUCCESS;
            if (kind == SETS) {
                good &= CUDA(cuGraphAddMemsetNode)(&node, graph, NULL, 0, &fill, contexts[1]) == CUDA_SUCCESS;
            } else {
                good &= CUDA(cuGraphAddKernelNode_v2)(&node, kind == CHILD ? inner : graph, NULL, 0, &kernels[1]) == CUDA_SUCCESS;
            }
            if (kind == CHILD) {
                good &= CUDA(cuGraphAddChildGraphNode)(&node, graph, NULL, 0, inner) == CUDA_SUCCESS;
            } else if (kind == BOTH) {
                good &= CUDA(cuGraphAddKernelNode_v2)(&other, graph, NULL, 0, &kernels[0]) == CUDA_SUCCESS;
            }
        }
        good = good && CUDA(cuGraphInstantiateWithFlags)(&exec, graph, 0) == CUDA_SUCCESS;
        if (kind == UPDATED && good) {
            ns = 3000000;
            good = CUDA(cuGraphExecKernelNodeSetParams_v2)(exec, node, &kernels[1]) == CUDA_SUCCESS;
        }
        uint64_t begin = clock_ns(), from = 0, now, paid[2] = {lines[0]->charged_ns, lines[1]->charged_ns}, busy[2] = {0, 0};
        if (kind == SETS) { /* which takes the software GPU no time */
            good = good && CUDA(cuGraphLaunch)(exec, stream) == CUDA_SUCCESS;
            check(good && lines[0]->since_ns == 0 && lines[1]->since_ns != 0 && CUDA(cuStreamSynchronize)(stream) == CUDA_SUCCESS, "memory that is set is paid by its card");
            continue;
        }
        while (good && (now = clock_ns()) < begin + 5000 * MS) {
            if (from == 0 && now >= begin + 1000 * MS) {
                from = now;
                good = busy_ns(1, (unsigned)getpid(), &busy[0]) == 0;
            }
            good &= CUDA(cuGraphLaunch)(exec, stream) == CUDA_SUCCESS;
        }
        good &= busy_ns(1, (unsigned)getpid(), &busy[1]) == 0;
        double got = 100.0 * (double)(busy[1] - busy[0]) / (double)(clock_ns() - from);
        check(good && fabs(got - 20) <= 2, "%s on another card than the stream's: %.2f of 20 %% of that one", what[kind], got);
        good &= CUDA(cuStreamSynchronize)(stream) == CUDA_SUCCESS;
        check(lines[1]->charged_ns > paid[1] && (lines[0]->charged_ns > paid[0]) == (kind == BOTH) && lines[0]->since_ns == 0 && lines[1]->since_ns == 0, "and paid where it ran (%.2f and %.2f ms)", (double)(lines[0]->charged_ns - paid[0]) / 1e6, (double)(lines[1]->charged_ns - paid[1]) / 1e6);
        good &= CUDA(cuGraphExecDestroy)(exec) == CUDA_SUCCESS && CUDA(cuGraphDestroy)(graph) == CUDA_SUCCESS && (inner == NULL || CUDA(cuGraphDestroy)(inner) == CUDA_SUCCESS);
    }
    check(good && CUDA(cuCtxSetCurrent)(contexts[1]) == CUDA_SUCCESS && a.cuCtxDestroy_v2(contexts[0]) == CUDA_SUCCESS && CUDA(cuCtxSynchronize)() == CUDA_SUCCESS, "and all is well at the end");
    check(CUDA(cuLaunchKernel)(spins[1], widths[1], 1, 1, 1024, 1, 1, 0, there, parameters, NULL) == CUDA_SUCCESS && CUDA(cuStreamSynchronize)(there) == CUDA_SUCCESS, "after the stream's context went, too");
}

/* What is set and copied within a card is paid like a launch: here behind a value that the program writes later, so
 * that it is out. Copies from and to the host aren't the multiprocessors'. */
static void copies(void) {
    struct api a = with_share(500000), *api = &a;
    CUcontext context = NULL;
    CUstream stream = NULL;
    CUdeviceptr flag = 0, from = 0, to = 0;
    void *host = NULL, *bytes = NULL;
    const uint64_t size = 256 * MIB;
    bool good = a.cuCtxCreate_v2(&context, 0, 0) == CUDA_SUCCESS && CUDA(cuStreamCreate)(&stream, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS &&
                CUDA(cuMemHostAlloc)(&host, 4, 2) == CUDA_SUCCESS && CUDA(cuMemHostGetDevicePointer_v2)(&flag, host, 0) == CUDA_SUCCESS &&
                CUDA(cuMemHostAlloc)(&bytes, size, 0) == CUDA_SUCCESS && a.cuMemAlloc_v2(&from, size) == CUDA_SUCCESS && a.cuMemAlloc_v2(&to, size) == CUDA_SUCCESS;
    check(good, "copies: set up");
    struct carve_usage_line *line = &box_usage()->lines[0][0];
    CUDA_MEMCPY2D box = {.srcMemoryType = CU_MEMORYTYPE_DEVICE, .srcDevice = from, .srcPitch = 4096, .dstMemoryType = CU_MEMORYTYPE_UNIFIED, .dstDevice = to, .dstPitch = 4096, .WidthInBytes = 4096, .Height = size / 4096};
    CUDA_MEMCPY2D out = box;
    out.dstMemoryType = CU_MEMORYTYPE_HOST;
    out.dstHost = bytes;
    CUcontext other = NULL;
    CUdeviceptr far = 0;
    good = good && a.cuCtxCreate_v2(&other, 0, 1) == CUDA_SUCCESS && a.cuMemAlloc_v2(&far, size) == CUDA_SUCCESS && CUDA(cuCtxSetCurrent)(context) == CUDA_SUCCESS;
    CUDA_MEMCPY2D across = box;
    across.dstDevice = far;
    for (int k = 0; k < 12 && good; k++) {
        enum { PAID = 5 };
        static const char *const what[] = {"memory that is set", "a copy within the card", "one that doesn't say so", "one of a box", "one between contexts of the card", "one to the host", "one from the host", "one to the host that doesn't say so", "a box to the host", "one to another card", "one between contexts of two", "a box to another card"};
        *(volatile uint32_t *)host = 0;
        good = CUDA(cuStreamWaitValue32_v2)(stream, flag, 1, CU_STREAM_WAIT_VALUE_EQ) == CUDA_SUCCESS;
        CUresult result = k == 0   ? CUDA(cuMemsetD32Async)(from, 7, size / 4, stream)
                          : k == 1 ? CUDA(cuMemcpyDtoDAsync_v2)(to, from, size, stream)
                          : k == 2 ? CUDA(cuMemcpyAsync)(to, from, size, stream)
                          : k == 3 ? CUDA(cuMemcpy2DAsync_v2)(&box, stream)
                          : k == 4 ? CUDA(cuMemcpyPeerAsync)(to, context, from, context, size, stream)
                          : k == 5 ? CUDA(cuMemcpyDtoHAsync_v2)(bytes, from, size, stream)
                          : k == 6 ? CUDA(cuMemcpyHtoDAsync_v2)(to, bytes, size, stream)
                          : k == 7 ? CUDA(cuMemcpyAsync)((CUdeviceptr)(uintptr_t)bytes, from, size, stream)
                          : k == 8 ? CUDA(cuMemcpy2DAsync_v2)(&out, stream)
                          : k == 9 ? CUDA(cuMemcpyDtoDAsync_v2)(far, from, size, stream)
                          : k == 10 ? CUDA(cuMemcpyPeerAsync)(far, other, from, context, size, stream)
                                    : CUDA(cuMemcpy2DAsync_v2)(&across, stream);
        bool is_out = line->since_ns != 0;
        check(result == CUDA_SUCCESS && is_out == (k < PAID), "%s %s (%d)", what[k], k < PAID ? "is to be paid for" : "isn't", result);
        __atomic_store_n((uint32_t *)host, 1, __ATOMIC_SEQ_CST);
        good &= CUDA(cuCtxSynchronize)() == CUDA_SUCCESS;
        check(good && line->since_ns == 0, "and done");
    }
    /* Sizes of which nothing is known yet are guessed by their bytes. */
    uint64_t before = clock_ns();
    for (int i = 0; i < 64 && good; i++) {
        good = CUDA(cuMemsetD8Async)(from, 1, (size_t)1 << (i % 20), stream) == CUDA_SUCCESS;
    }
    check(good && clock_ns() - before < 10 * MS, "small ones of many sizes aren't held back (%.1f ms)", (double)(clock_ns() - before) / 1e6);
    check(CUDA(cuCtxSynchronize)() == CUDA_SUCCESS, "and all is well at the end");
}

/* A context for each job, that goes with what it did: waited for by nothing that the front sees, or not at all. */
static void contexts_that_go(void) {
    struct api a = with_share(200000), *api = &a;
    CUdeviceptr none = 0;
    uint64_t ns = 50 * MS, busy[2] = {0, 0};
    void *parameters[] = {&ns, &none};
    int (*sleep_until)(uint64_t) = (int (*)(uint64_t))dlsym(dlopen(DRIVER_AT, RTLD_NOW | RTLD_NOLOAD), "softgpu_sleep_until_ns");
    enum { ASKED, RESET, LEFT, WAYS };
    static const char *const what[WAYS] = {"waited for by asking", "asked for and reset", "not waited for"};
    unsigned blocks = as_wide_as(api, 0);
    for (int way = 0; way < WAYS; way++) {
        bool good = true;
        uint64_t begin = clock_ns(), paid = box_usage()->lines[0][0].charged_ns;
        while (good && clock_ns() < begin + 20000 * MS) {
            CUcontext context = NULL;
            CUmodule module = NULL;
            CUfunction spin = NULL;
            CUstream stream = NULL;
            good = (way == RESET ? CUDA(cuDevicePrimaryCtxRetain)(&context, 0) == CUDA_SUCCESS && CUDA(cuCtxSetCurrent)(context) == CUDA_SUCCESS : a.cuCtxCreate_v2(&context, 0, 0) == CUDA_SUCCESS) &&
                   CUDA(cuModuleLoadData)(&module, kernel_text) == CUDA_SUCCESS && CUDA(cuModuleGetFunction)(&spin, module, "carve_spin") == CUDA_SUCCESS && CUDA(cuStreamCreate)(&stream, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS &&
                   CUDA(cuLaunchKernel)(spin, blocks, 1, 1, 1024, 1, 1, 0, stream, parameters, NULL) == CUDA_SUCCESS;
            while (good && way != LEFT && CUDA(cuStreamQuery)(stream) == CUDA_ERROR_NOT_READY) {
                sleep_until(clock_ns() + MS);
            }
            if (way == LEFT) {
                sleep_until(clock_ns() + 20 * MS);
            }
            good &= (way == RESET ? CUDA(cuDevicePrimaryCtxReset_v2)(0) : a.cuCtxDestroy_v2(context)) == CUDA_SUCCESS;
        }
        busy[0] = busy[1];
        good &= busy_ns(0, (unsigned)getpid(), &busy[1]) == 0;
        double had = (double)(busy[1] - busy[0]) / 1e6, charged = (double)(box_usage()->lines[0][0].charged_ns - paid) / 1e6;
        check(good && fabs(100 * had / ((double)(clock_ns() - begin) / 1e6) - 20) <= 1, "a context for each job, %s: %.2f of 20 %%", what[way], 100 * had / ((double)(clock_ns() - begin) / 1e6));
        check(fabs(charged - had) <= 0.02 * had, "and paid (%.0f of %.0f ms)", charged, had);
    }
}

/* One function, launched alike, that takes next to nothing and then long: for a second nothing ends of what is looked at,
 * since that is one launch in 32. What goes ahead until that shows is paid back. */
static void warms_up(void) {
    struct api a = with_share(200000), *api = &a;
    CUcontext context;
    CUmodule module;
    CUfunction spin = NULL;
    CUdeviceptr none = 0;
    uint64_t ns = 2000, work = 0;
    void *parameters[] = {&ns, &none};
    bool good = a.cuCtxCreate_v2(&context, 0, 0) == CUDA_SUCCESS && CUDA(cuModuleLoadData)(&module, kernel_text) == CUDA_SUCCESS && CUDA(cuModuleGetFunction)(&spin, module, "carve_spin") == CUDA_SUCCESS;
    unsigned blocks = as_wide_as(api, 0);
    uint64_t begin = clock_ns(), last = 0;
    for (unsigned n = 0; good && clock_ns() < begin + 90000 * MS; n++) {
        ns = n < 200 ? 2000 : 80 * MS;
        good = CUDA(cuLaunchKernel)(spin, blocks, 1, 1, 1024, 1, 1, 0, NULL, parameters, NULL) == CUDA_SUCCESS;
        work += ns;
        last = ns;
    }
    double got = 100.0 * (double)(work - last) / (double)(clock_ns() - begin);
    check(good && fabs(got - 20) <= 1, "2 us in 200 launches, then 80 ms: %.2f of 20 %%", got);
    CUDA(cuCtxSynchronize)();
    struct carve_usage_line *line = &box_usage()->lines[0][0];
    check(line->since_ns == 0 && fabs((double)line->charged_ns - (double)work) < 0.02 * (double)work, "and all is paid (%.2f of %.2f s)", (double)line->charged_ns / 1e9, (double)work / 1e9);
}

/* Each case is a process of its own, since a process has one state. What it got, or less than nothing. */
static double in_process(const char *program, unsigned load, unsigned percent) {
    char command[256], line[512];
    double got = -1;
    snprintf(command, sizeof command, "%s %u %u", program, load, percent);
    FILE *pipe = popen(command, "r");
    while (pipe != NULL && fgets(line, sizeof line, pipe) != NULL) {
        const char *figure = strstr(line, ": ");
        fputs(line, stderr);
        if (figure != NULL && strstr(line, " of ") != NULL) {
            got = atof(figure + 2);
        }
    }
    return pipe != NULL && pclose(pipe) == 0 ? got : -1;
}

/* compute_test: all; graphs, signals, values, copies, two-cards, two,other, others-graphs, jobs, warms-up: those; LOAD PERCENT: that case; bench: what the errors are. */
int main(int argc, char **argv) {
    static const unsigned percents[] = {30, 50, 80};
    bool bench = argc == 2 && strcmp(argv[1], "bench") == 0;
    double sum = 0, worst = 0;
    unsigned count = 0;
    if (argc > 2) {
        int load = atoi(argv[1]);
        alone(load < LOADS ? &loads[load] : &odd[load - LOADS], (unsigned)atoi(argv[2]));
        return tap_done();
    }
    if (argc == 2 && !bench) {
        switch (argv[1][0]) {
        case 's':
            under_signals(strcmp(argv[1], "signals") == 0 ? 0 : SA_RESTART);
            break;
        case 'c':
            copies();
            break;
        case 'j':
            contexts_that_go();
            break;
        case 'w':
            warms_up();
            break;
        case 'o':
            graphs_of_others();
            break;
        case 't':
            several_cards(argv[1][3] == '-');
            break;
        case 'v':
            waits_for_the_program();
            break;
        default:
            graphs();
        }
        return tap_done();
    }
    for (unsigned i = 0; i < LOADS; i++) {
        for (unsigned p = 0; p < 3; p++) {
            double got = in_process(argv[0], i, percents[p]), error = fabs(got - percents[p]);
            sum += error;
            worst = error > worst ? error : worst;
            count++;
            if (!bench) {
                check(got >= 0, "%s at %u %%", loads[i].name, percents[p]);
            } else if (got < 0) {
                return 1;
            }
        }
    }
    if (bench) {
        printf("share_error_mean_points %.2f points\nshare_error_max_points %.2f points\n", sum / count, worst);
        return 0;
    }
    for (unsigned i = 0; i < ODD; i++) {
        check(in_process(argv[0], LOADS + i, i % 2 == 0 ? 20 : 60) >= 0, "%s", odd[i].name);
    }
    static const char *const others[] = {"graphs", "signals", "signals-that-restart", "values", "copies", "two-cards", "two,other", "others-graphs", "jobs", "warms-up"};
    for (int i = 0; i < 10; i++) {
        char itself[256];
        snprintf(itself, sizeof itself, "%s %s >&2", argv[0], others[i]);
        check(system(itself) == 0, "%s", others[i]);
    }
    return tap_done();
}
