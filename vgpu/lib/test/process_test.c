/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What processes do that share a container: many of them, at once, in namespaces, with few rights and low limits,
 * started in whatever way, in threads that are cancelled. Over the stub driver, which keeps the books. Cases share-15
 * and vgpu-14 (no environment), vgpu-9 (what a second process sees), vgpu-17 (nobody's process is ended), vgpu-19 (pids).
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "box.h"
#include "tap.h"

enum { CONTEXT_MIB = 20 };

static struct stub_truth *truth;

static void fresh(uint64_t limit_mib) {
    uint64_t limit = limit_mib * MIB;
    box_make(1, &limit, CONTEXT_MIB * MIB);
    truth = box_truth(1, 10000000 * MIB, CONTEXT_MIB * MIB);
}

static int status_of(pid_t pid) {
    int status = -1;
    waitpid(pid, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 100 + WTERMSIG(status);
}

/* Children that wait at a gate, do their work, and hold what they have until they are dismissed. */
struct crowd { unsigned count; int gate[2], done[2], stay[2]; };

static void gather(struct crowd *c, unsigned count, int (*work)(const struct api *, unsigned)) {
    *c = (struct crowd){.count = count};
    if (pipe(c->gate) != 0 || pipe(c->done) != 0 || pipe(c->stay) != 0) {
        exit(2);
    }
    for (unsigned i = 0; i < count; i++) {
        pid_t pid = fork();
        if (pid < 0) {
            perror("fork");
            exit(2);
        }
        if (pid == 0) {
            char byte;
            close(c->gate[1]);
            close(c->stay[1]);
            if (read(c->gate[0], &byte, 1) != 0) {
                _exit(1);
            }
            struct api a = api_load("libcuda.so.1");
            byte = (char)work(&a, i);
            if (write(c->done[1], &byte, 1) != 1 || read(c->stay[0], &byte, 1) != 0) {
                _exit(1);
            }
            _exit(0);
        }
    }
    close(c->done[1]);
    close(c->gate[1]); /* all at once */
}

/* How many said each answer. */
static unsigned answers(struct crowd *c, int wanted) {
    unsigned found = 0;
    for (unsigned i = 0; i < c->count; i++) {
        char byte = 99;
        if (read(c->done[0], &byte, 1) != 1) {
            return 0;
        }
        found += byte == wanted;
    }
    return found;
}

static void dismiss(struct crowd *c) {
    close(c->stay[1]);
    for (unsigned i = 0; i < c->count; i++) {
        wait(NULL);
    }
    close(c->gate[0]), close(c->done[0]), close(c->stay[0]);
}

static void reclaim_all(void) {
    for (unsigned i = 0; i < CARVE_MAX_SLOTS; i++) {
        if (box_usage()->lines[0][i].charge != 0) {
            box_reclaim(i);
        }
    }
}

static int take_a_page(const struct api *a, unsigned i) {
    CUcontext c;
    CUdeviceptr p;
    (void)i;
    return a->cuInit(0) != CUDA_SUCCESS || a->cuCtxCreate_v2(&c, 0, 0) != CUDA_SUCCESS || a->cuMemAlloc_v2(&p, 2 * MIB) != CUDA_SUCCESS;
}

/* ---- many ---- */

#ifdef UNDER_SANITIZER /* with which each takes ten times the memory */
enum { ALL = 200, OTHERS = 800 };
#else
enum { ALL = 1000, OTHERS = 0 };
#endif

static void thousand(void) {
    enum { EACH = CONTEXT_MIB + 2 };
    struct crowd c, more;
    fresh((uint64_t)ALL * EACH + 30 * EACH + 1);
    for (int i = 0; i < OTHERS; i++) { /* somebody's, with next to nothing */
        box_usage()->processes[i].state_pid = CARVE_STATE_PID(CARVE_SLOT_LIVE, 1);
        box_usage()->lines[0][i].charge = CARVE_CHARGE(1, 0);
    }
    gather(&c, ALL, take_a_page);
    check(answers(&c, 0) == ALL, "%d processes at once each get a context and a page", ALL);
    check(truth->used[0] == (uint64_t)ALL * EACH * MIB && box_used(0) == truth->used[0] + OTHERS * CARVE_UNIT_BYTES && box_pending(0) == 0, "and all of it is charged");
    gather(&more, 50, take_a_page);
    unsigned had = answers(&more, 0);
    check(had == 24, "of fifty more %u get the 24 slots that are left, the others are refused", had);
    check(truth->peak[0] <= (uint64_t)(ALL + 30) * EACH * MIB + MIB, "and the card never held more than the limit");
    dismiss(&more);
    dismiss(&c);
    reclaim_all();
    check(box_used(0) == 0, "reclaimed, nothing is charged");
    gather(&c, 200, take_a_page);
    check(answers(&c, 0) == 200, "two hundred that come after them get theirs");
    dismiss(&c);
}

/* Room for half of those that come at once: that half gets it, whoever they are. */
static void half_of_200(void) {
    struct crowd c;
    fresh(100 * (CONTEXT_MIB + 2));
    gather(&c, 200, take_a_page);
    unsigned had = answers(&c, 0);
    check(truth->peak[0] <= (uint64_t)100 * (CONTEXT_MIB + 2) * MIB, "two hundred at a limit for one hundred: the card never held more");
    check(had >= 92 && had <= 100, "and as many as fit get what they ask for (%u)", had); /* 2200 MiB: 110 contexts without a page is the most that others can take */
    dismiss(&c);
}

/* ---- namespaces ---- */

/* In a PID namespace of its own, so that several have the same pid. */
static int in_pid_namespace(const struct api *a, unsigned i) {
    (void)i;
    return take_a_page(a, 0) != 0 || syscall(SYS_getpid) != 1;
}

static void pid_namespaces(void) {
    enum { SPACES = 8 };
    int done[2], stay[2];
    pid_t spaces[SPACES];
    fresh(1000);
    if (pipe(done) != 0 || pipe(stay) != 0) {
        exit(2);
    }
    for (int i = 0; i < SPACES; i++) {
        spaces[i] = fork();
        if (spaces[i] == 0) {
            close(stay[1]);
            if (unshare(CLONE_NEWPID) != 0) {
                _exit(errno == EPERM ? 77 : 1);
            }
            pid_t first = fork();
            if (first == 0) {
                prctl(PR_SET_PDEATHSIG, SIGKILL);
                struct api a = api_load("libcuda.so.1");
                char byte = (char)in_pid_namespace(&a, 0);
                if (write(done[1], &byte, 1) != 1) {
                    _exit(1);
                }
                _exit(read(stay[0], &byte, 1) != 0);
            }
            int status;
            waitpid(first, &status, 0);
            _exit(status != 0);
        }
    }
    unsigned good = 0;
    close(done[1]);
    for (int i = 0; i < SPACES; i++) {
        char byte = 99;
        good += read(done[0], &byte, 1) == 1 && byte == 0;
    }
    check(good == SPACES && box_used(0) == (uint64_t)SPACES * (CONTEXT_MIB + 2) * MIB, "first processes of %d PID namespaces have a slot each, though all are pid 1", SPACES);
    /* Somebody who has no room looks for the dead among them, and finds none. */
    struct api a = api_start("libcuda.so.1");
    CUdeviceptr p;
    unsigned live = 0;
    check(a.cuMemAlloc_v2(&p, 900 * MIB) == CUDA_ERROR_OUT_OF_MEMORY, "what doesn't fit beside them is refused");
    for (unsigned i = 0; i < CARVE_MAX_SLOTS; i++) {
        live += CARVE_STATE(box_usage()->processes[i].state_pid) == CARVE_SLOT_LIVE;
    }
    check(live == SPACES + 1, "and nobody is taken for dead by the pid of another namespace (%u)", live);
    close(stay[1]);
    for (int i = 0; i < SPACES; i++) {
        status_of(spaces[i]);
    }
}

/* Field 22 of its stat file, as in a slot. */
static uint64_t start_of(pid_t pid) {
    char path[40], text[1024];
    snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    FILE *f = fopen(path, "re");
    size_t n = f == NULL ? 0 : fread(text, 1, sizeof text - 1, f);
    if (f != NULL) {
        fclose(f);
    }
    text[n] = 0;
    char *at = strrchr(text, ')');
    for (int field = 2; at != NULL && field < 22; field++) {
        at = strchr(at + 1, ' ');
    }
    return at == NULL ? 0 : strtoull(at, NULL, 10);
}

/* A process in a PID namespace of its own, that has the /proc of the one outside: whoever is number 1 there isn't it. */
static void another_proc(void) {
    fresh(1000);
    pid_t outer = fork();
    if (outer == 0) {
        int go[2], stay[2];
        char byte = 0;
        if (pipe(go) != 0 || pipe(stay) != 0 || unshare(CLONE_NEWPID) != 0) {
            _exit(errno == EPERM ? 77 : 1);
        }
        pid_t first = fork();
        if (first == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            struct api a = api_start("libcuda.so.1");
            CUdeviceptr p;
            byte = a.cuMemAlloc_v2(&p, 500 * MIB) != CUDA_SUCCESS;
            _exit(write(go[1], &byte, 1) != 1 || read(stay[0], &byte, 1) < 0);
        }
        if (read(go[0], &byte, 1) != 1 || byte != 0 || box_usage()->processes[0].start_ticks != start_of(first)) {
            _exit(2);
        }
        pid_t second = fork();
        if (second == 0) {
            struct api a = api_start("libcuda.so.1");
            CUdeviceptr p;
            _exit(a.cuMemAlloc_v2(&p, 900 * MIB) != CUDA_ERROR_OUT_OF_MEMORY || box_usage()->processes[1].pid_namespace != box_usage()->processes[0].pid_namespace);
        }
        if (status_of(second) != 0) {
            _exit(3);
        }
        kill(first, SIGKILL);
        status_of(first);
        _exit(CARVE_STATE(box_usage()->processes[0].state_pid) == CARVE_SLOT_LIVE ? 0 : 4);
    }
    int status = status_of(outer);
    check(status == 0 || status == 77, "with another namespace's /proc a process knows when it began, and isn't taken for dead (%d)", status);
}

static void no_proc(void) {
    int go[2], stay[2];
    char byte = 9;
    fresh(1000);
    if (pipe(go) != 0 || pipe(stay) != 0) {
        exit(2);
    }
    pid_t pid = fork();
    if (pid == 0) {
        close(stay[1]);
        if (unshare(CLONE_NEWNS) != 0 || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0) {
            _exit(1);
        }
        while (umount2("/proc", MNT_DETACH) == 0) {
        }
        struct api a = api_start("libcuda.so.1");
        CUdeviceptr p;
        byte = a.cuMemAlloc_v2(&p, 500 * MIB) != CUDA_SUCCESS || box_usage()->processes[0].start_ticks != 0;
        _exit(write(go[1], &byte, 1) != 1 || read(stay[0], &byte, 1) < 0);
    }
    close(go[1]), close(stay[0]);
    check(read(go[0], &byte, 1) == 1 && byte == 0, "a process without /proc has a share");
    struct api a = api_start("libcuda.so.1");
    CUdeviceptr p;
    check(a.cuMemAlloc_v2(&p, 900 * MIB) == CUDA_ERROR_OUT_OF_MEMORY && CARVE_STATE(box_usage()->processes[0].state_pid) == CARVE_SLOT_LIVE,
          "and isn't taken for dead");
    close(stay[1]);
    status_of(pid);
    pid_t agent = fork();
    if (agent == 0) {
        usleep(200000);
        int marked = CARVE_STATE(box_usage()->processes[0].state_pid) != CARVE_SLOT_LIVE;
        box_reclaim(0);
        _exit(marked);
    }
    check(a.cuMemAlloc_v2(&p, 900 * MIB) == CUDA_SUCCESS, "ended, it is waited for until the agent has taken its charge off");
    check(status_of(agent) == 0, "and was marked by nobody meanwhile");
}

/* A user namespace can be made by a process with one thread only, and makes it somebody else. */
static void user_namespace(void) {
    fresh(1000);
    struct api a = api_start("libcuda.so.1");
    CUdeviceptr p, q;
    check(a.cuMemAlloc_v2(&p, 100 * MIB) == CUDA_SUCCESS, "a process works");
    int made = unshare(CLONE_NEWUSER);
    check(made == 0 || errno == EPERM || errno == ENOSPC, "it has one thread still: it may unshare its user namespace (%s)", made == 0 ? "done" : strerror(errno));
    check(a.cuMemAlloc_v2(&q, 100 * MIB) == CUDA_SUCCESS && a.cuMemFree_v2(p) == CUDA_SUCCESS && box_used(0) == (CONTEXT_MIB + 100) * MIB, "and goes on there");
    /* One that begins there. */
    pid_t pid = fork();
    if (pid == 0) {
        _exit(take_a_page(&a, 0));
    }
    check(status_of(pid) == 0, "a child that starts there works, too");
}

/* ---- limits ---- */

static void no_more_processes(void) {
    fresh(1000);
    struct rlimit none = {1, 1};
    chmod(CARVE_USAGE_PATH, 0666);
    chmod(STUB_TRUTH_AT, 0666);
    bool somebody = setgroups(0, NULL) == 0 && setresuid(65534, 65534, 65534) == 0; /* root has no such limit */
    check(setrlimit(RLIMIT_NPROC, &none) == 0, "a process may have no other%s", somebody ? ", as nobody" : "");
    struct api a = api_start("libcuda.so.1");
    CUdeviceptr p;
    check(a.cuMemAlloc_v2(&p, 100 * MIB) == CUDA_SUCCESS && a.cuMemAlloc_v2(&p, 1000 * MIB) == CUDA_ERROR_OUT_OF_MEMORY, "it needs none for its share");
    pid_t pid = fork();
    if (pid == 0) {
        _exit(0);
    }
    if (somebody) {
        check(pid < 0 && errno == EAGAIN, "where the limit is real");
    }
    if (pid > 0) {
        waitpid(pid, NULL, 0);
    }
}

/* No descriptor is free at the first call: it is refused, and works once there is one. */
static void no_descriptors(void) {
    fresh(1000);
    struct api a = api_load("libcuda.so.1");
    struct rlimit old, few;
    CUcontext c;
    CUdeviceptr p;
    getrlimit(RLIMIT_NOFILE, &old);
    int next = open("/dev/null", O_RDONLY);
    few = (struct rlimit){(rlim_t)next, old.rlim_max};
    close(next);
    check(setrlimit(RLIMIT_NOFILE, &few) == 0 && a.cuInit(0) == CUDA_SUCCESS && a.cuCtxCreate_v2(&c, 0, 0) == CUDA_ERROR_OUT_OF_MEMORY, "without a descriptor for its files a process is refused");
    setrlimit(RLIMIT_NOFILE, &old);
    check(a.cuCtxCreate_v2(&c, 0, 0) == CUDA_SUCCESS && a.cuMemAlloc_v2(&p, MIB) == CUDA_SUCCESS, "and isn't once there is one");
    setrlimit(RLIMIT_NOFILE, &few);
    check(a.cuMemAlloc_v2(&p, 100 * MIB) == CUDA_SUCCESS && a.cuMemFree_v2(p) == CUDA_SUCCESS, "one that has its files needs none");
    setrlimit(RLIMIT_NOFILE, &old);
}

/* ---- threads ---- */

static struct api shared;
static void *cancelled_within(void *argument) {
    CUcontext c;
    (void)argument;
    pthread_cancel(pthread_self()); /* which waits for a point at which it may */
    shared.cuCtxCreate_v2(&c, 0, 0);
    pthread_testcancel();
    return NULL;
}

static void cancelled(void) {
    fresh(1000);
    shared = api_load("libcuda.so.1");
    pthread_t t;
    void *result;
    CUcontext c;
    CUdeviceptr p;
    shared.cuInit(0);
    check(pthread_create(&t, NULL, cancelled_within, NULL) == 0 && pthread_join(t, &result) == 0 && result == PTHREAD_CANCELED, "a thread is cancelled with its first call");
    alarm(20); /* a lock that it left behind would hold us for ever */
    check(shared.cuCtxCreate_v2(&c, 0, 0) == CUDA_SUCCESS && shared.cuMemAlloc_v2(&p, MIB) == CUDA_SUCCESS, "it leaves no lock behind");
    check(box_used(0) == (2 * CONTEXT_MIB + 2) * MIB, "and its call was done to its end");
    alarm(0);
}

static void *goes_on(void *argument) {
    CUdeviceptr p;
    int *to = argument;
    usleep(20000); /* the first thread is gone by then, or a moment later: no matter */
    char byte = shared.cuCtxSetCurrent(NULL) != CUDA_SUCCESS || take_a_page(&shared, 0) != 0 || shared.cuMemAlloc_v2(&p, 10 * MIB) != CUDA_SUCCESS;
    if (write(*to, &byte, 1) != 1) {
        _exit(1);
    }
    return NULL; /* the last thread: the process ends */
}

static void main_exits(void) {
    int done[2];
    char byte = 9;
    fresh(1000);
    if (pipe(done) != 0) {
        exit(2);
    }
    pid_t pid = fork();
    if (pid == 0) {
        pthread_t t;
        shared = api_start("libcuda.so.1");
        pthread_create(&t, NULL, goes_on, &done[1]);
        pthread_exit(NULL);
    }
    close(done[1]);
    check(read(done[0], &byte, 1) == 1 && byte == 0, "a process whose main has left by pthread_exit goes on");
    check(status_of(pid) == 0, "and ends with its last thread");
}

/* ---- how a program starts ---- */

/* As a static runtime does: nothing but one function by name, all others by that. */
static int by_proc_address(void) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    __typeof__(cuGetProcAddress_v2) *get = library == NULL ? NULL : (__typeof__(cuGetProcAddress_v2) *)dlsym(library, "cuGetProcAddress_v2");
    CUdriverProcAddressQueryResult found;
    CUcontext c;
    CUdeviceptr p;
    size_t f, t;
    bool good = get != NULL;
#define GET(name, version)                                  \
    void *name##_at = NULL;                                 \
    good = good && get(#name, &name##_at, version, 0, &found) == CUDA_SUCCESS && name##_at != NULL
    GET(cuInit, 12000);
    GET(cuCtxCreate, 3020);
    GET(cuMemGetInfo, 12000);
    GET(cuMemAlloc, 12000);
    GET(cuMemFree, 12000);
    GET(cuLaunchKernel, 12000);
    GET(cuGetProcAddress, 12000);
    good = good && ((__typeof__(cuInit) *)cuInit_at)(0) == CUDA_SUCCESS && ((__typeof__(cuCtxCreate_v2) *)cuCtxCreate_at)(&c, 0, 0) == CUDA_SUCCESS &&
           ((__typeof__(cuMemGetInfo_v2) *)cuMemGetInfo_at)(&f, &t) == CUDA_SUCCESS && t == 1000 * MIB &&
           ((__typeof__(cuMemAlloc_v2) *)cuMemAlloc_at)(&p, f + MIB) == CUDA_ERROR_OUT_OF_MEMORY && ((__typeof__(cuMemAlloc_v2) *)cuMemAlloc_at)(&p, f) == CUDA_SUCCESS &&
           ((__typeof__(cuMemFree_v2) *)cuMemFree_at)(p) == CUDA_SUCCESS && cuGetProcAddress_at == (void *)get;
    return good ? 0 : 1;
}

static int run_linked(const char *path, char *const environment[]) {
    pid_t pid = fork();
    if (pid == 0) {
        execve(path, (char *const[]){(char *)path, NULL}, environment);
        _exit(99);
    }
    return status_of(pid);
}

static void ways_to_start(const char *linked) {
    fresh(1000);
    pid_t pid = fork();
    if (pid == 0) {
        _exit(by_proc_address());
    }
    check(status_of(pid) == 0, "a program that finds all by cuGetProcAddress, as a static runtime does, is limited");
    fresh(1000);
    check(run_linked(linked, (char *const[]){"LD_BIND_NOW=1", NULL}) == 0, "so is one whose symbols are all bound at its start");
#ifndef UNDER_SANITIZER /* whose runtime wants to be loaded first, and looks at the environment */
    fresh(1000);
    check(run_linked(linked, (char *const[]){"LD_BIND_NOW=1", "LD_PRELOAD=libcuda.so.1", NULL}) == 0, "and one that has the library loaded before");
    static const char setuid_copy[] = "/usr/lib/carve/setuid-linked";
    char command[600];
    fresh(1000);
    chmod(CARVE_USAGE_PATH, 0666);
    snprintf(command, sizeof command, "cp %s %s && chown 0:0 %s && chmod 4755 %s", linked, setuid_copy, setuid_copy, setuid_copy);
    if (system(command) != 0) {
        check(false, "%s", command);
        return;
    }
    pid = fork();
    if (pid == 0) {
        if (setgroups(0, NULL) != 0 || setresuid(65534, 65534, 65534) != 0) {
            _exit(77);
        }
        execve(setuid_copy, (char *const[]){(char *)setuid_copy, NULL}, (char *const[]){"LD_LIBRARY_PATH=/nowhere", "LD_PRELOAD=/nowhere.so", NULL});
        _exit(99);
    }
    int status = status_of(pid);
    check(status == 0 || status == 77, "a setuid program, for which the loader forgets its environment, is limited%s", status == 77 ? " (not tried: there is one user here)" : "");
    unlink(setuid_copy);
#endif
}

/* Opened, closed and opened again while others use it. */
static void *opens_and_closes(void *unused) {
    for (int i = 0; i < 300; i++) {
        void *handle = dlopen(i % 2 == 0 ? "libcuda.so.1" : "libcuda.so", RTLD_NOW);
        CUdeviceptr p;
        __typeof__(cuMemAlloc_v2) *allocate = handle == NULL ? NULL : (__typeof__(cuMemAlloc_v2) *)dlsym(handle, "cuMemAlloc_v2");
        if (allocate == NULL || allocate != shared.cuMemAlloc_v2 || allocate(&p, 2 * MIB) != CUDA_SUCCESS || shared.cuMemFree_v2(p) != CUDA_SUCCESS) {
            return (void *)1;
        }
        dlclose(handle);
    }
    return unused;
}

static void *with_context(void *context) {
    shared.cuCtxSetCurrent(context);
    return opens_and_closes(NULL);
}

static void reopened(void) {
    fresh(1000);
    shared = api_start("libcuda.so.1");
    CUcontext c;
    pthread_t t[4];
    unsigned wrong = 0;
    shared.cuCtxGetCurrent(&c);
    for (int i = 0; i < 4; i++) {
        pthread_create(&t[i], NULL, with_context, c);
    }
    for (int i = 0; i < 4; i++) {
        void *result;
        pthread_join(t[i], &result);
        wrong += result != NULL;
    }
    for (int i = 0; i < 10; i++) {
        dlclose(shared.handle);
    }
    CUdeviceptr p;
    void *again = dlopen("libcuda.so.1", RTLD_NOW);
    check(wrong == 0 && dlsym(again, "cuMemAlloc_v2") == (void *)shared.cuMemAlloc_v2 && shared.cuMemAlloc_v2(&p, 2 * MIB) == CUDA_SUCCESS && box_used(0) == (CONTEXT_MIB + 2) * MIB,
          "opened and closed by four threads it is one library, with what it knows");
}

/* ---- clocks ---- */

/* This program's own, which the library's calls come to. The time of day jumps by years with each look. */
static unsigned asked_day, asked_other;
int clock_gettime(clockid_t clock, struct timespec *t) {
    if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE || clock == CLOCK_TAI) {
        asked_day++;
        *t = (struct timespec){.tv_sec = asked_day % 2 == 0 ? 100 : 4000000000, .tv_nsec = 0};
        return 0;
    }
    asked_other++;
    return (int)syscall(SYS_clock_gettime, clock, t);
}

static void clocks(void) {
    fresh(1000);
    pid_t dead = fork();
    if (dead == 0) {
        struct api b = api_start("libcuda.so.1");
        CUdeviceptr p;
        _exit(b.cuMemAlloc_v2(&p, 500 * MIB) != CUDA_SUCCESS);
    }
    check(status_of(dead) == 0, "a process dies with memory");
    struct api a = api_start("libcuda.so.1");
    CUdeviceptr p;
    pid_t agent = fork();
    if (agent == 0) {
        usleep(100000);
        box_reclaim(0);
        _exit(0);
    }
    unsigned before = asked_other;
    check(a.cuMemAlloc_v2(&p, 900 * MIB) == CUDA_SUCCESS, "another waits for it, and gets it");
    check(asked_other > before && asked_day == 0, "by the clock that doesn't jump (%u looks), and none at the time of day (%u)", asked_other - before, asked_day);
    status_of(agent);
}

static int run(void *scenario) {
    ((void (*)(void))scenario)();
    return 0;
}

int main(int argc, char **argv) {
    static const struct { const char *name; void (*run)(void); } scenarios[] = {
        {"a thousand", thousand}, {"two hundred", half_of_200}, {"PID namespaces", pid_namespaces}, {"another /proc", another_proc}, {"no /proc", no_proc}, {"a user namespace", user_namespace}, {"no more processes", no_more_processes},
        {"no descriptors", no_descriptors}, {"cancelled", cancelled}, {"main exits", main_exits}, {"reopened", reopened}, {"clocks", clocks},
    };
    bool one = argc > 1 && argv[1][0] != '/';
    for (size_t i = 0; i < sizeof scenarios / sizeof scenarios[0]; i++) {
        if (one && strcmp(argv[1], scenarios[i].name) != 0) {
            continue;
        }
        printf("# %s\n", scenarios[i].name);
        check(in_child(run, (void *)scenarios[i].run) == 0, "%s: ran to its end", scenarios[i].name);
    }
    if (argc > 1 && !one) {
        ways_to_start(argv[1]);
    }
    return tap_done();
}
