/* SPDX-License-Identifier: Apache-2.0 */
/*
 * robust_test: the path of a launch, over the software GPU on the clock of the machine, on the test build of the front.
 * Processes are killed and stopped at each of its named points, exit while they wait, or are rained on by signals;
 * threads launch while others capture and while contexts go. Nobody else waits for any of them, and nothing is left out:
 * cases vgpu-1 and vgpu-2.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "compute_box.h"
#include "cuda_abi_graph.h"
#include "tap.h"

static const char *const steps[] = {
    "compute-wait-credit", "compute-wait-launch", "compute-recording", "compute-launched", "compute-publishing", "compute-landing",
};
enum { STEPS = sizeof steps / sizeof steps[0], WORK = 60, PATIENCE_S = 60 };

/* What processes tell one another. */
static struct talk { uint64_t launches[4]; uint32_t stop; } *talk;

static void nap(void) { usleep(1000); }

static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

/* A process in the container, with a context, a stream and a kernel. */
struct worker { struct api a; CUcontext context; CUfunction spin; CUstream stream; __typeof__(cuLaunchKernel) *launch; };

static bool begin_work(struct worker *w) {
    struct api *api = &w->a;
    CUmodule module;
    w->a = api_load("libcuda.so.1");
    w->launch = CUDA(cuLaunchKernel);
    return w->a.cuInit(0) == CUDA_SUCCESS && w->a.cuCtxCreate_v2(&w->context, 0, 0) == CUDA_SUCCESS && CUDA(cuModuleLoadData)(&module, kernel_text) == CUDA_SUCCESS &&
           CUDA(cuModuleGetFunction)(&w->spin, module, "carve_spin") == CUDA_SUCCESS && CUDA(cuStreamCreate)(&w->stream, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS;
}

static CUresult spin_for(const struct worker *w, CUstream stream, uint64_t ns) {
    CUdeviceptr none = 0;
    void *parameters[] = {&ns, &none};
    return w->launch(w->spin, 216, 1, 1, 1024, 1, 1, 0, stream, parameters, NULL);
}

/* The files, made by a process of its own: this one must not start the driver, since it forks. */
static int make_files(void *ppm) {
    (void)with_share((uint32_t)(uintptr_t)ppm);
    return 0;
}

static bool files(uint32_t ppm) {
    box_forget();
    bool good = in_child(make_files, (void *)(uintptr_t)ppm) == 0;
    box_open();
    memset(talk, 0, sizeof *talk);
    return good;
}

/* ---- killed and stopped ---- */

static int launches_until_stopped(void *which) {
    struct worker w;
    if (!begin_work(&w)) {
        return 3;
    }
    while (__atomic_load_n(&talk->stop, __ATOMIC_SEQ_CST) == 0) {
        if (spin_for(&w, w.stream, 500000) != CUDA_SUCCESS) {
            return 4;
        }
        __atomic_add_fetch(&talk->launches[(uintptr_t)which], 1, __ATOMIC_SEQ_CST);
    }
    return 0;
}

/* Kernels that are long and short, in bursts, so that it waits in every way there is. */
static int victim(const char *step, unsigned after, int signal_number) {
    struct worker w;
    if (!begin_work(&w)) {
        return 3;
    }
    void (*arm)(const char *, unsigned, int) = (void (*)(const char *, unsigned, int))dlsym(w.a.handle, "carve_test_arm");
    if (arm == NULL) {
        return 9;
    }
    struct api *api = &w.a;
    arm(step, after, signal_number);
    for (int i = 0; i < WORK; i++) {
        if (spin_for(&w, w.stream, i % 10 == 9 ? 40000000 : i % 3 == 0 ? 20000 : 4000000) != CUDA_SUCCESS) {
            return 4;
        }
        if (i % 10 == 9 && CUDA(cuStreamSynchronize)(w.stream) != CUDA_SUCCESS) { /* in debt, with nothing out */
            return 5;
        }
        __atomic_add_fetch(&talk->launches[1], 1, __ATOMIC_SEQ_CST);
    }
    return CUDA(cuStreamSynchronize)(w.stream) != CUDA_SUCCESS;
}

static pid_t run_child(int (*work)(void *), void *argument) {
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        _exit(work(argument));
    }
    return pid;
}

static bool goes_on(unsigned who, uint64_t by) {
    uint64_t from = __atomic_load_n(&talk->launches[who], __ATOMIC_SEQ_CST);
    for (double end = seconds() + PATIENCE_S; seconds() < end; nap()) {
        if (__atomic_load_n(&talk->launches[who], __ATOMIC_SEQ_CST) >= from + by) {
            return true;
        }
    }
    return false;
}

static int reaped(pid_t pid) {
    int status = -1;
    waitpid(pid, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 100 + WTERMSIG(status);
}

static void at_each_step(int signal_number) {
    if (!check(files(400000), "a share of 40 %%")) {
        return;
    }
    pid_t neighbour = run_child(launches_until_stopped, (void *)0);
    check(goes_on(0, 5), "a process launches");
    for (unsigned i = 0; i < STEPS; i++) {
        fflush(stdout);
        pid_t pid = fork();
        if (pid == 0) {
            _exit(victim(steps[i], 1, signal_number));
        }
        int status = 0;
        bool met = waitpid(pid, &status, WUNTRACED) == pid;
        met = met && (signal_number == SIGSTOP ? WIFSTOPPED(status) : WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
        check(met, "another one of the container is %s at %s (status %d)", signal_number == SIGSTOP ? "stopped" : "killed", steps[i], status);
        check(goes_on(0, 20), "the first goes on beside it");
        pid_t third = run_child(launches_until_stopped, (void *)2);
        check(goes_on(2, 5), "so does one that begins only now");
        __atomic_store_n(&talk->stop, 1, __ATOMIC_SEQ_CST);
        check(reaped(third) == 0 && reaped(neighbour) == 0, "both end as they should");
        __atomic_store_n(&talk->stop, 0, __ATOMIC_SEQ_CST);
        neighbour = run_child(launches_until_stopped, (void *)0);
        if (signal_number == SIGSTOP) {
            kill(pid, SIGCONT);
            check(reaped(pid) == 0, "continued, it comes to its end");
        }
        for (unsigned slot = 0; slot < CARVE_MAX_SLOTS; slot++) {
            uint64_t word = box_usage()->processes[slot].state_pid;
            if (CARVE_PID(word) != 0 && CARVE_PID(word) != (uint32_t)neighbour && kill((pid_t)CARVE_PID(word), 0) != 0) {
                box_reclaim(slot);
            }
        }
    }
    __atomic_store_n(&talk->stop, 1, __ATOMIC_SEQ_CST);
    check(reaped(neighbour) == 0, "the first comes to its end");
}

static void killed(void) { at_each_step(SIGKILL); }
static void stopped(void) { at_each_step(SIGSTOP); }

/* ---- ends while it waits ---- */

static struct worker shared;
static void *waits_for_credit(void *unused) {
    shared.a.cuCtxSetCurrent(shared.context);
    for (int i = 0; i < 1000; i++) {
        spin_for(&shared, shared.stream, 100000000);
        __atomic_add_fetch(&talk->launches[0], 1, __ATOMIC_SEQ_CST);
    }
    return unused;
}

static int exits_while_it_waits(void *how) {
    pthread_t t;
    if (!begin_work(&shared) || pthread_create(&t, NULL, waits_for_credit, NULL) != 0) {
        return 3;
    }
    while (__atomic_load_n(&talk->launches[0], __ATOMIC_SEQ_CST) < 2) {
        nap();
    }
    for (int i = 0; i < 50; i++) { /* it waits by now: a hundredth of the card earns 1 ms in all this time */
        nap();
    }
    switch ((uintptr_t)how) {
    case 0:
        exit(0);
    case 1:
        _exit(0);
    case 2:
        execl("/bin/true", "true", (char *)NULL);
        return 98;
    case 3: /* a thread that is cancelled leaves at its own next point, with its launch made */
        pthread_cancel(t);
        return 0;
    default:
        return raise(SIGTERM);
    }
}

static void ends_while_it_waits(void) {
    static const char *const ways[] = {"exit", "_exit", "exec", "a cancelled thread and return", "a signal"};
    for (uintptr_t how = 0; how < 5; how++) {
        files(10000);
        double before = seconds();
        int status = in_child(exits_while_it_waits, (void *)how);
        check((status == 0 || status == -SIGTERM) && seconds() - before < 20, "a process ends by %s while a thread of it waits for its share (status %d)", ways[how], status);
    }
}

/* ---- signals ---- */

static volatile sig_atomic_t rained;
static void drop(int signal_number) { rained += signal_number != 0; }

static int rained_on(void *flags) {
    struct worker w;
    struct sigaction act = {.sa_handler = drop, .sa_flags = (int)(intptr_t)flags};
    struct itimerval often = {{0, 300}, {0, 300}};
    if (!begin_work(&w)) {
        return 3;
    }
    struct api *api = &w.a;
    sigaction(SIGALRM, &act, NULL);
    setitimer(ITIMER_REAL, &often, NULL);
    for (int i = 0; i < WORK; i++) {
        CUdeviceptr p;
        errno = 77;
        if (spin_for(&w, w.stream, i % 4 == 0 ? 20000 : 3000000) != CUDA_SUCCESS || w.a.cuMemAlloc_v2(&p, 4 * MIB) != CUDA_SUCCESS || w.a.cuMemFree_v2(p) != CUDA_SUCCESS) {
            return 4;
        }
        if (i % 8 == 7 && CUDA(cuStreamSynchronize)(w.stream) != CUDA_SUCCESS) {
            return 5;
        }
    }
    return rained > 100 ? 0 : 6;
}

static void signals(void) {
    files(400000);
    check(in_child(rained_on, (void *)(intptr_t)SA_RESTART) == 0, "thousands of signals that restart calls change nothing");
    check(in_child(rained_on, NULL) == 0, "nor do such that don't");
}

/* ---- threads, captures, contexts ---- */

static uint32_t faults, captured_ones;
static void wrong(CUresult result, const char *what) {
    if (result != CUDA_SUCCESS && __atomic_fetch_add(&faults, 1, __ATOMIC_SEQ_CST) == 0) {
        printf("# %s: %d\n", what, result);
    }
}

static void *launching(void *argument) {
    struct api *api = &shared.a;
    unsigned seed = (unsigned)(uintptr_t)argument;
    CUstream stream;
    wrong(shared.a.cuCtxSetCurrent(shared.context), "set current");
    /* Making and ending streams is no business of a capture, as asking after them is. */
    wrong(CUDA(cuStreamCreate)(&stream, CU_STREAM_NON_BLOCKING), "a stream");
    while (__atomic_load_n(&talk->stop, __ATOMIC_SEQ_CST) == 0) {
        wrong(spin_for(&shared, stream, 1000 + (unsigned)rand_r(&seed) % 400000), "launch");
        __atomic_add_fetch(&talk->launches[0], 1, __ATOMIC_SEQ_CST);
    }
    return NULL;
}

static void *capturing(void *argument) {
    struct api *api = &shared.a;
    CUstreamCaptureMode mode = (CUstreamCaptureMode)(uintptr_t)argument;
    CUstream stream;
    wrong(shared.a.cuCtxSetCurrent(shared.context), "set current");
    wrong(CUDA(cuStreamCreate)(&stream, CU_STREAM_NON_BLOCKING), "a stream");
    for (int i = 0; i < 60; i++) {
        CUgraph graph = NULL;
        CUgraphExec exec = NULL;
        wrong(CUDA(cuStreamBeginCapture_v2)(stream, mode), "begin a capture");
        for (int k = 0; k < 5; k++) {
            wrong(spin_for(&shared, stream, 20000), "launch into a capture");
        }
        wrong(CUDA(cuStreamEndCapture)(stream, &graph), "end a capture");
        wrong(CUDA(cuGraphInstantiateWithFlags)(&exec, graph, 0), "instantiate");
        wrong(CUDA(cuGraphLaunch)(exec, stream), "launch a graph");
        __atomic_add_fetch(&captured_ones, 1, __ATOMIC_SEQ_CST);
    }
    return NULL;
}

static int threads_and_captures(void *unused) {
    pthread_t launchers[4], capturers[3];
    (void)unused;
    if (!begin_work(&shared)) {
        return 3;
    }
    for (uintptr_t i = 0; i < 4; i++) {
        pthread_create(&launchers[i], NULL, launching, (void *)(i + 1));
    }
    for (uintptr_t i = 0; i < 3; i++) {
        pthread_create(&capturers[i], NULL, capturing, (void *)(uintptr_t)(i % 3)); /* global, of the thread, relaxed */
    }
    for (int i = 0; i < 3; i++) {
        pthread_join(capturers[i], NULL);
    }
    uint64_t beside = __atomic_load_n(&talk->launches[0], __ATOMIC_SEQ_CST);
    bool measured = goes_on(0, 20);
    __atomic_store_n(&talk->stop, 1, __ATOMIC_SEQ_CST);
    for (int i = 0; i < 4; i++) {
        pthread_join(launchers[i], NULL);
    }
    struct api *api = &shared.a;
    CUDA(cuCtxSynchronize)();
    const struct carve_usage_line *line = &box_usage()->lines[0][box_slot_of(getpid())];
    check(faults == 0 && captured_ones == 180 && beside > 0, "%u captures while four threads launched (%llu launches): none was disturbed (%u faults)", captured_ones, (unsigned long long)beside, faults);
    check(measured && line->since_ns == 0 && (line->committed_ns & CARVE_COMPUTE_WAITING) == 0, "when all is done nothing is out (%llu, %llx)", (unsigned long long)line->since_ns, (unsigned long long)line->committed_ns);

    /* Captures that come to no good end. */
    CUstream stream, other;
    CUgraph graph;
    CUevent event;
    CUDA(cuStreamCreate)(&stream, CU_STREAM_NON_BLOCKING);
    CUDA(cuStreamCreate)(&other, CU_STREAM_NON_BLOCKING);
    CUDA(cuEventCreate)(&event, 0);
    CUDA(cuStreamBeginCapture_v2)(stream, CU_STREAM_CAPTURE_MODE_RELAXED);
    CUDA(cuEventRecord)(event, stream);
    CUDA(cuStreamWaitEvent)(other, event, 0);
    spin_for(&shared, other, 1000);
    check(CUDA(cuStreamEndCapture)(other, &graph) == CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, "a capture isn't ended in a stream that joined it");
    check(CUDA(cuStreamEndCapture)(stream, &graph) != CUDA_SUCCESS, "one that isn't joined ends without a graph");
    CUDA(cuStreamBeginCapture_v2)(stream, CU_STREAM_CAPTURE_MODE_RELAXED);
    check(CUDA(cuStreamDestroy_v2)(stream) == CUDA_SUCCESS, "one goes with its stream");
    uint64_t charged = line->charged_ns;
    CUmodule module;
    struct worker w = shared; /* with a function that wasn't seen yet, of 3 ms: not what that is taken for */
    CUDA(cuModuleLoadData)(&module, kernel_text);
    CUDA(cuModuleGetFunction)(&w.spin, module, "carve_spin");
    for (int i = 0; i < 6; i++) {
        spin_for(&w, w.stream, 3000000);
    }
    CUDA(cuCtxSynchronize)();
    uint64_t paid = line->charged_ns - charged;
    check(paid > 12000000 && line->since_ns == 0, "after all of them launches are measured again (%.1f ms)", (double)paid / 1e6);
    return 0;
}

/* More captures at once than the front has places for: what is launched into any of them isn't disturbed, and once all
 * have ended launches are measured as before. */
static int many_captures(void *unused) {
    enum { MANY = 80, LAUNCHES = 3 };
    CUstream streams[MANY];
    CUgraph graph;
    unsigned wrong_ones = 0, nodes = 0;
    struct worker w;
    (void)unused;
    if (!begin_work(&w)) {
        return 3;
    }
    struct api *api = &w.a;
    for (int i = 0; i < MANY; i++) {
        wrong_ones += CUDA(cuStreamCreate)(&streams[i], CU_STREAM_NON_BLOCKING) != CUDA_SUCCESS || CUDA(cuStreamBeginCapture_v2)(streams[i], CU_STREAM_CAPTURE_MODE_RELAXED) != CUDA_SUCCESS;
    }
    for (int pass = 0; pass < 2; pass++) { /* first those that have places end, then the others get launches */
        for (int i = pass * 64; i < (pass == 0 ? 64 : MANY); i++) {
            size_t count = 0;
            for (int k = 0; k < LAUNCHES; k++) {
                wrong_ones += spin_for(&w, streams[i], 40000000) != CUDA_SUCCESS;
            }
            wrong_ones += CUDA(cuStreamEndCapture)(streams[i], &graph) != CUDA_SUCCESS || CUDA(cuGraphGetNodes)(graph, NULL, &count) != CUDA_SUCCESS;
            nodes += (unsigned)count;
        }
    }
    check(wrong_ones == 0 && nodes == MANY * LAUNCHES, "of %d captures at once none is disturbed (%u faults, %u nodes)", (int)MANY, wrong_ones, nodes);
    const struct carve_usage_line *line = &box_usage()->lines[0][box_slot_of(getpid())];
    check(line->charged_ns == 0, "what was launched into them isn't charged");
    wrong_ones = CUDA(cuStreamEndCapture)(streams[0], &graph) == CUDA_SUCCESS; /* none is open there: changes nothing */
    for (int i = 0; i < 4; i++) {
        wrong_ones += spin_for(&w, w.stream, 3000000) != CUDA_SUCCESS || CUDA(cuStreamSynchronize)(w.stream) != CUDA_SUCCESS;
    }
    check(wrong_ones == 0 && line->charged_ns >= 11000000, "and work after them is, as measured (%llu us)", (unsigned long long)line->charged_ns / 1000);
    return 0;
}

static void captures(void) {
    files(900000);
    check(in_child(threads_and_captures, NULL) == 0, "threads and captures: ran to its end");
    files(900000);
    check(in_child(many_captures, NULL) == 0, "many captures: ran to its end");
}

/* Each thread has a stream of its own, of the same name: what runs for long in one keeps none of the others. */
static void *in_own_stream(void *argument) {
    struct api *api = &shared.a;
    uint64_t ns = (uintptr_t)argument;
    CUdeviceptr none = 0;
    void *parameters[] = {&ns, &none};
    shared.a.cuCtxSetCurrent(shared.context);
    for (int i = 0; i < (ns > 1000000000 ? 1 : 300); i++) {
        wrong(CUDA(cuLaunchKernel_ptsz)(shared.spin, 1, 1, 1, 1, 1, 1, 0, i % 2 == 0 ? NULL : CU_STREAM_PER_THREAD, parameters, NULL), "launch");
        __atomic_add_fetch(&talk->launches[ns > 1000000000], 1, __ATOMIC_SEQ_CST);
    }
    while (ns > 1000000000) { /* or another thread might be called as this one */
        nap();
    }
    return NULL;
}

static int own_streams(void *unused) {
    pthread_t t;
    (void)unused;
    if (!begin_work(&shared)) {
        return 3;
    }
    pthread_create(&t, NULL, in_own_stream, (void *)(uintptr_t)60000000000);
    while (__atomic_load_n(&talk->launches[1], __ATOMIC_SEQ_CST) == 0) {
        nap();
    }
    double before = seconds();
    pthread_create(&t, NULL, in_own_stream, (void *)(uintptr_t)200000);
    pthread_join(t, NULL);
    double took = seconds() - before;
    check(faults == 0 && took < 4, "beside a kernel that lasts a minute in one thread's stream another thread launches in its own (%.1f s)", took);
    return 0;
}

/* Launches into a context of its own, which goes, again and again. */
static void *contexts_come_and_go(void *argument) {
    struct api *api = &shared.a;
    for (int i = 0; i < 25; i++) {
        CUcontext mine;
        CUmodule module;
        struct worker w = shared;
        if ((uintptr_t)argument == 0) {
            wrong(shared.a.cuCtxCreate_v2(&mine, 0, 0), "a context");
        } else {
            wrong(shared.a.cuDevicePrimaryCtxRetain(&mine, (CUdevice)(uintptr_t)argument - 1), "a primary context");
            wrong(shared.a.cuCtxSetCurrent(mine), "set current");
        }
        wrong(CUDA(cuModuleLoadData)(&module, kernel_text), "module");
        wrong(CUDA(cuModuleGetFunction)(&w.spin, module, "carve_spin"), "function");
        for (int k = 0; k < 4; k++) {
            wrong(spin_for(&w, NULL, 300000), "launch");
        }
        wrong((uintptr_t)argument == 0 ? shared.a.cuCtxDestroy_v2(mine) : shared.a.cuDevicePrimaryCtxRelease_v2((CUdevice)(uintptr_t)argument - 1), "the end of a context");
        shared.a.cuCtxSetCurrent(NULL);
        __atomic_add_fetch(&talk->launches[1], 1, __ATOMIC_SEQ_CST);
    }
    return NULL;
}

static void *synchronizing(void *unused) {
    struct api *api = &shared.a;
    shared.a.cuCtxSetCurrent(shared.context);
    while (__atomic_load_n(&talk->stop, __ATOMIC_SEQ_CST) == 0) {
        wrong(CUDA(cuStreamSynchronize)(shared.stream), "synchronize");
    }
    return unused;
}

/* The program's own mistake: one thread destroys the context that another launches into. */
static void *into_what_goes(void *context) {
    shared.a.cuCtxSetCurrent(context);
    for (int i = 0; i < 200 && spin_for(&shared, NULL, 200000) == CUDA_SUCCESS; i++) {
        __atomic_add_fetch(&talk->launches[3], 1, __ATOMIC_SEQ_CST);
    }
    return NULL;
}

static int threads_and_contexts(void *unused) {
    pthread_t t[6];
    (void)unused;
    if (!begin_work(&shared)) {
        return 3;
    }
    pthread_create(&t[0], NULL, launching, (void *)1);
    pthread_create(&t[1], NULL, synchronizing, NULL);
    pthread_create(&t[2], NULL, contexts_come_and_go, (void *)0);
    pthread_create(&t[3], NULL, contexts_come_and_go, (void *)1);
    pthread_create(&t[4], NULL, contexts_come_and_go, (void *)2);
    for (int i = 2; i < 5; i++) {
        pthread_join(t[i], NULL);
    }
    __atomic_store_n(&talk->stop, 1, __ATOMIC_SEQ_CST);
    pthread_join(t[0], NULL);
    pthread_join(t[1], NULL);
    struct api *api = &shared.a;
    CUDA(cuCtxSynchronize)();
    int slot = box_slot_of(getpid());
    const struct carve_usage_line *line = &box_usage()->lines[0][slot];
    check(faults == 0 && talk->launches[1] == 75, "contexts come and go under way, primary ones too, while others launch and wait (%u faults)", faults);
    check(line->since_ns == 0, "and nothing is left out");
    CUmodule module;
    struct worker keep = shared;
    for (int i = 0; i < 10; i++) {
        CUcontext goes;
        shared.a.cuCtxCreate_v2(&goes, 0, 0);
        CUDA(cuModuleLoadData)(&module, kernel_text);
        CUDA(cuModuleGetFunction)(&shared.spin, module, "carve_spin");
        shared.a.cuCtxSetCurrent(keep.context);
        uint64_t from = __atomic_load_n(&talk->launches[3], __ATOMIC_SEQ_CST);
        pthread_create(&t[0], NULL, into_what_goes, goes);
        while (__atomic_load_n(&talk->launches[3], __ATOMIC_SEQ_CST) < from + (unsigned)i) {
            nap();
        }
        shared.a.cuCtxDestroy_v2(goes);
        pthread_join(t[0], NULL);
    }
    shared = keep;
    shared.a.cuCtxSetCurrent(keep.context);
    for (int i = 0; i < 40; i++) {
        wrong(spin_for(&shared, shared.stream, 1000000), "launch");
    }
    CUDA(cuCtxSynchronize)();
    check(faults == 0 && line->since_ns == 0, "a context that goes under a launch into it takes nothing else along");
    return 0;
}

static void contexts(void) {
    files(900000);
    check(in_child(own_streams, NULL) == 0, "own streams: ran to its end");
    files(900000);
    check(in_child(threads_and_contexts, NULL) == 0, "threads and contexts: ran to its end");
}

/* ---- the file ---- */

static void scribbled(void) {
    files(400000);
    pid_t worker = run_child(launches_until_stopped, (void *)0);
    check(goes_on(0, 5), "a process launches");
    pid_t noise = fork();
    if (noise == 0) {
        unsigned seed = 1;
        for (;;) {
            uint8_t *line = (uint8_t *)&box_usage()->lines[0][(unsigned)rand_r(&seed) % 4];
            line[(unsigned)rand_r(&seed) % 128] = (uint8_t)rand_r(&seed);
        }
    }
    check(goes_on(0, 200), "beside noise in its line of the usage file it goes on");
    kill(noise, SIGKILL);
    reaped(noise);
    __atomic_store_n(&talk->stop, 1, __ATOMIC_SEQ_CST);
    check(reaped(worker) == 0, "and comes to its end");
    __atomic_store_n(&talk->stop, 0, __ATOMIC_SEQ_CST);
    memset(&box_usage()->lines[0], 0, 4 * sizeof box_usage()->lines[0][0]);
    worker = run_child(launches_until_stopped, (void *)0);
    check(goes_on(0, 5) && truncate(CARVE_USAGE_PATH, 4096) == 0, "the file is cut short while a process launches");
    check(reaped(worker) == 100 + SIGBUS, "which ends that process");
}

static int run(void *scenario) {
    ((void (*)(void))scenario)();
    return 0;
}

int main(int argc, char **argv) {
    static const struct { const char *name; void (*run)(void); bool threads; } scenarios[] = {
        {"killed", killed, false}, {"stopped", stopped, false}, {"ends while it waits", ends_while_it_waits, false}, {"signals", signals, false},
        {"captures", captures, true}, {"contexts", contexts, true}, {"scribbled", scribbled, false},
    };
    talk = mmap(NULL, sizeof *talk, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (talk == MAP_FAILED) {
        return 2;
    }
    for (size_t i = 0; i < sizeof scenarios / sizeof scenarios[0]; i++) {
        if (argc > 1 && strcmp(argv[1], scenarios[i].name) != 0 && !(strcmp(argv[1], "threads") == 0 && scenarios[i].threads)) {
            continue;
        }
        printf("# %s\n", scenarios[i].name);
        check(in_child(run, (void *)scenarios[i].run) == 0, "%s: ran to its end", scenarios[i].name);
    }
    return tap_done();
}
