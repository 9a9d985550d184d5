/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Several processes of one container at one limit: whoever is killed or stopped at whatever step, the card never
 * holds more than the limit, and nobody is refused what some order of the requests would have given.
 *
 * Runs on the test build of the front, whose steps can be armed, over the stub driver, which keeps the books.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "box.h"
#include "tap.h"

enum { WORKERS = 4, CONTEXT_MIB = 20, MOST_INTERVALS = 1 << 16 };

static const char *const steps[] = {
    "claim", "claimed", "counted", "lowering", "attached", "pending", "weighed", "committed", "slow-pending",
    "alloc-charged", "alloc-done", "free-forgotten", "free-done", "free-given-back",
    "reserve-held", "reserve-done", "reserve-charged",
};
enum { STEPS = sizeof steps / sizeof steps[0] };

static uint64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* What the workers tell the parent. */
struct interval { uint64_t from, to; };
struct log {
    unsigned granted, refused, wrong;
    unsigned met[STEPS];
    unsigned held_count, refused_count;
    struct interval held[MOST_INTERVALS];
    struct interval refusals[MOST_INTERVALS];
};
static struct log *logs;

/* A full list ends the round: what isn't noted couldn't justify a refusal. */
static uint32_t *full;
static void note(struct interval *list, unsigned *count, uint64_t from, uint64_t to) {
    list[(*count)++] = (struct interval){from, to};
    if (*count == MOST_INTERVALS) {
        __atomic_store_n(full, 1, __ATOMIC_SEQ_CST);
    }
}

typedef void (*arm_function)(const char *, unsigned, int);
typedef unsigned (*met_function)(const char *);

static void count_steps(const struct api *a, struct log *log) {
    met_function met = (met_function)dlsym(a->handle, "carve_test_met");
    for (unsigned i = 0; met != NULL && i < STEPS; i++) {
        log->met[i] += met(steps[i]);
    }
}

static struct api arm_and_start(unsigned *seed, bool kills) {
    struct api a = api_load("libcuda.so.1");
    arm_function arm = (arm_function)dlsym(a.handle, "carve_test_arm");
    if (arm == NULL) {
        fprintf(stderr, "not the test build of the front\n");
        _exit(9);
    }
    unsigned what = (unsigned)rand_r(seed) % 4;
    if (kills && what != 0) {
        arm(steps[(unsigned)rand_r(seed) % STEPS], (unsigned)rand_r(seed) % 40, what == 1 ? SIGSTOP : SIGKILL);
    }
    CUcontext c;
    a.cuInit(0);
    if (a.cuCtxCreate_v2(&c, 0, 0) != CUDA_SUCCESS) {
        _exit(7); /* others hold all of it: a refusal like any other */
    }
    return a;
}

/* ---- no overrun ---- */

static void allocate_at_random(unsigned worker, unsigned seed, unsigned operations) {
    struct api a = arm_and_start(&seed, true);
    CUdeviceptr p[8] = {0};
    bool pooled = rand_r(&seed) % 2 == 0; /* half of them use the pool, too */
    for (unsigned i = 0; i < operations; i++) {
        unsigned at = (unsigned)rand_r(&seed) % 8;
        if (pooled && rand_r(&seed) % 16 == 0) {
            logs[worker].wrong += a.cuStreamSynchronize(NULL) != CUDA_SUCCESS;
        }
        if (p[at] != 0) {
            logs[worker].wrong += (at % 2 == 0 ? a.cuMemFree_v2(p[at]) : a.cuMemFreeAsync(p[at], NULL)) != CUDA_SUCCESS;
            p[at] = 0;
        } else {
            uint64_t bytes = (2 + (uint64_t)rand_r(&seed) % 300) * MIB;
            CUresult result = pooled && rand_r(&seed) % 2 == 0 ? a.cuMemAllocAsync(&p[at], bytes, NULL) : a.cuMemAlloc_v2(&p[at], bytes);
            logs[worker].granted += result == CUDA_SUCCESS;
            logs[worker].refused += result == CUDA_ERROR_OUT_OF_MEMORY;
            logs[worker].wrong += result != CUDA_SUCCESS && result != CUDA_ERROR_OUT_OF_MEMORY;
            p[at] = result == CUDA_SUCCESS ? p[at] : 0;
        }
    }
    count_steps(&a, &logs[worker]);
    _exit(0);
}

/* The agent's and the driver's part after a death. A process that was killed while it took its slot has none
 * that is live yet, or one that holds nothing. */
static void bury(struct stub_truth *truth, pid_t pid) {
    box_truth_bury(truth, pid);
    for (unsigned i = 0; i < CARVE_MAX_SLOTS; i++) {
        if (CARVE_PID(box_usage()->processes[i].state_pid) == (uint32_t)pid && box_usage()->lines[0][i].charge != 0) {
            box_reclaim(i);
        }
    }
}

/* For a bench: what the card held beyond the limit, and refusals that no order of the requests gives. */
static uint64_t overrun_bytes;
static unsigned false_refusals;

static void no_overrun(unsigned seconds) {
    uint64_t limit = 1000 * MIB, end = now() + seconds * 1000000000ull;
    unsigned seed = 1, deaths = 0, killed = 0;
    pid_t workers[WORKERS] = {0};
    box_make(1, &limit, CONTEXT_MIB * MIB);
    struct stub_truth *truth = box_truth(1, 100000 * MIB, CONTEXT_MIB * MIB);
    memset(logs, 0, WORKERS * sizeof *logs);
    while (now() < end) {
        for (unsigned w = 0; w < WORKERS; w++) {
            if (workers[w] == 0) {
                unsigned s = seed++ * 7919;
                workers[w] = fork();
                if (workers[w] == 0) {
                    allocate_at_random(w, s, 400);
                }
            }
        }
        int status;
        pid_t pid = waitpid(-1, &status, WNOHANG | WUNTRACED);
        for (unsigned w = 0; w < WORKERS && pid > 0; w++) {
            if (workers[w] == pid && WIFSTOPPED(status)) {
                usleep((useconds_t)(rand_r(&seed) % 60000)); /* others meet it stopped, also past their patience */
                kill(pid, SIGCONT);
            } else if (workers[w] == pid) {
                killed += WIFSIGNALED(status);
                deaths++;
                bury(truth, pid);
                workers[w] = 0;
            }
        }
        if (pid <= 0) {
            usleep(200);
        }
    }
    for (unsigned w = 0; w < WORKERS; w++) {
        int status = 0;
        while (workers[w] > 0 && waitpid(workers[w], &status, WUNTRACED) == workers[w]) {
            if (WIFSTOPPED(status)) {
                kill(workers[w], SIGCONT);
                continue;
            }
            bury(truth, workers[w]);
            workers[w] = 0;
        }
    }
    unsigned granted = 0, refused = 0, wrong = 0, unmet = 0;
    for (unsigned w = 0; w < WORKERS; w++) {
        granted += logs[w].granted;
        refused += logs[w].refused;
        wrong += logs[w].wrong;
    }
    for (unsigned i = 0; i < STEPS; i++) {
        unsigned times = 0;
        for (unsigned w = 0; w < WORKERS; w++) {
            times += logs[w].met[i];
        }
        if (times == 0) {
            printf("# step %s was never met\n", steps[i]);
            unmet++;
        }
    }
    printf("# %u processes, %u of them killed at a step, %u grants, %u refusals\n", deaths, killed, granted, refused);
    check(granted > 100 && refused > 100 && killed > 10, "four processes raced, some were killed");
    check(unmet == 0, "every step was met");
    check(wrong == 0, "every answer was a grant or error 2");
    check(truth->peak[0] <= limit && truth->peak[0] > limit * 9 / 10, "the card never held more than the limit (%u of %u MiB)",
          (unsigned)(truth->peak[0] / MIB), (unsigned)(limit / MIB));
    overrun_bytes = truth->peak[0] > limit ? truth->peak[0] - limit : 0;
    check(truth->used[0] == 0 && box_used(0) == 0 && box_pending(0) == 0, "nothing is left after the last one");
}

/* ---- no false refusal ---- */

/* Holds and gives back one size, again and again, and notes when it held and when it was refused. */
static void hold_and_release(unsigned worker, unsigned seed, uint64_t bytes, uint64_t end, bool notes, bool stops, bool pooled) {
    struct api a = arm_and_start(&seed, false);
    arm_function arm = (arm_function)dlsym(a.handle, "carve_test_arm");
    struct log *log = &logs[worker];
    CUdeviceptr p;
    while (now() < end && __atomic_load_n(full, __ATOMIC_SEQ_CST) == 0) {
        if (stops && rand_r(&seed) % 200 == 0) {
            arm(steps[5 + (unsigned)rand_r(&seed) % (STEPS - 5)], 0, SIGSTOP);
        }
        uint64_t from = now();
        CUresult result = pooled ? a.cuMemAllocAsync(&p, bytes, NULL) : a.cuMemAlloc_v2(&p, bytes);
        if (result == CUDA_SUCCESS) {
            for (int spin = rand_r(&seed) % 2000; spin > 0; spin--) {
                __asm__ volatile("");
            }
            if (pooled) {
                a.cuMemFreeAsync(p, NULL);
                a.cuStreamSynchronize(NULL); /* which gives it back to the card */
            } else {
                a.cuMemFree_v2(p);
            }
            if (notes) {
                note(log->held, &log->held_count, from, now());
            }
            log->granted++;
        } else {
            if (notes) {
                note(log->refusals, &log->refused_count, from, now());
            }
            log->refused++;
        }
        for (int spin = rand_r(&seed) % 2000; spin > 0; spin--) {
            __asm__ volatile("");
        }
    }
    _exit(0);
}

/* Asks for what can't be had, without a pause. */
static void ask_the_impossible(unsigned worker, uint64_t bytes, uint64_t end) {
    struct api a = api_start("libcuda.so.1");
    CUdeviceptr p;
    while (now() < end) {
        logs[worker].refused++;
        logs[worker].wrong += a.cuMemAlloc_v2(&p, bytes) != CUDA_ERROR_OUT_OF_MEMORY;
    }
    _exit(0);
}

static void start_box(uint64_t limit_mib, unsigned workers) {
    uint64_t limit = (limit_mib + CONTEXT_MIB * workers) * MIB;
    box_make(1, &limit, CONTEXT_MIB * MIB);
    (void)box_truth(1, 100000 * MIB, CONTEXT_MIB * MIB);
    memset(logs, 0, WORKERS * sizeof *logs);
    *full = 0;
}

static void wait_for_all(unsigned workers) {
    int status;
    while (workers > 0) {
        pid_t pid = waitpid(-1, &status, WUNTRACED);
        if (pid > 0 && WIFSTOPPED(status)) {
            usleep(3000);
            kill(pid, SIGCONT);
        } else if (pid > 0) {
            check(status == 0, "a worker ran to its end (status %d)", status);
            workers--;
        }
    }
}

static void impossible_sibling(unsigned seconds) {
    uint64_t end = now() + seconds * 1000000000ull;
    start_box(600, 4);
    for (unsigned w = 0; w < 4; w++) {
        if (fork() == 0) {
            if (w < 2) {
                hold_and_release(w, w + 1, 300 * MIB, end, false, false, false);
            }
            /* One size is over the limit by itself, the other by what its process has as a context. */
            ask_the_impossible(w, w == 2 ? 5000 * MIB : (600 + 3 * CONTEXT_MIB + 2) * MIB, end);
        }
    }
    wait_for_all(4);
    printf("# %u and %u grants beside %u impossible requests\n", logs[0].granted, logs[1].granted, logs[2].refused + logs[3].refused);
    check(logs[0].granted > 1000 && logs[1].granted > 1000 && logs[2].refused > 1000 && logs[3].refused > 1000, "two processes work beside two that ask for what can't be had");
    false_refusals += logs[0].refused + logs[1].refused;
    check(logs[0].refused == 0 && logs[1].refused == 0, "none of what fits is refused (%u and %u)", logs[0].refused, logs[1].refused);
    check(logs[2].wrong == 0 && logs[3].wrong == 0, "all of what can't be had is");
}

/* A refusal while there was no instant at which both of the others held the room, or were about to, is one that
 * no order of the requests gives. */
static bool justified(struct interval refusal, const struct log *x, const struct log *y) {
    for (unsigned i = 0; i < x->held_count; i++) {
        struct interval h = x->held[i];
        uint64_t from = h.from > refusal.from ? h.from : refusal.from, to = h.to < refusal.to ? h.to : refusal.to;
        if (h.from > refusal.to) {
            break;
        }
        if (from > to) {
            continue;
        }
        for (unsigned j = 0; j < y->held_count && y->held[j].from <= to; j++) {
            if (y->held[j].to >= from) {
                return true;
            }
        }
    }
    return false;
}

/* What there was around a refusal that nothing justifies: times from its begin, in microseconds. */
static void print_around(struct interval refusal, const struct log *of, char name) {
    for (unsigned i = 0; i < of->held_count; i++) {
        struct interval h = of->held[i];
        if (h.to + 1000000 >= refusal.from && h.from <= refusal.to + 1000000) {
            printf("#   %c held from %lld to %lld\n", name, (long long)(h.from - refusal.from) / 1000, (long long)(h.to - refusal.from) / 1000);
        }
    }
}

static void every_refusal_is_justified(unsigned seconds, bool stops, unsigned pooled) {
    uint64_t end = now() + seconds * 1000000000ull;
    unsigned unjustified = 0, refused = 0, granted = 0;
    start_box(640, 3);
    for (unsigned w = 0; w < 3; w++) {
        if (fork() == 0) {
            hold_and_release(w, w + 1 + 10 * stops, 320 * MIB, end, true, stops, w < pooled);
        }
    }
    wait_for_all(3);
    for (unsigned w = 0; w < 3; w++) {
        granted += logs[w].granted;
        refused += logs[w].refused;
        for (unsigned i = 0; i < logs[w].refused_count; i++) {
            struct interval refusal = logs[w].refusals[i];
            if (!justified(refusal, &logs[(w + 1) % 3], &logs[(w + 2) % 3])) {
                if (unjustified++ < 4) {
                    printf("# process %u was refused within %lld us:\n", w, (long long)(refusal.to - refusal.from) / 1000);
                    print_around(refusal, &logs[(w + 1) % 3], 'x');
                    print_around(refusal, &logs[(w + 2) % 3], 'y');
                }
            }
        }
    }
    printf("# %u grants, %u refusals\n", granted, refused);
    false_refusals += unjustified;
    check(granted > 300, "three processes share room for two%s%s", pooled > 0 ? ", two of them by a pool" : "", stops ? ", stopped now and then between the steps" : "");
    check(unjustified == 0, "each refusal has two others that held the room (%u have not)", unjustified);
}

int main(int argc, char **argv) {
    bool bench = argc > 1 && strcmp(argv[1], "bench") == 0;
    argc -= bench;
    argv += bench;
    unsigned seconds = argc > 1 ? (unsigned)atoi(argv[1]) : 4;
    logs = mmap(NULL, WORKERS * sizeof *logs, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    full = mmap(NULL, sizeof *full, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (logs == MAP_FAILED || full == MAP_FAILED) {
        return 2;
    }
    no_overrun(3 * seconds);
    impossible_sibling(seconds);
    every_refusal_is_justified(seconds, false, 0);
    every_refusal_is_justified(seconds, true, 0);
    every_refusal_is_justified(seconds, false, 2);
    every_refusal_is_justified(seconds, true, 2);
    if (bench) {
        printf("limit_overrun_bytes %llu B\nfalse_refusals %u refusals\n", (unsigned long long)overrun_bytes, false_refusals);
    }
    return tap_done();
}
