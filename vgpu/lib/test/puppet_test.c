/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Interleavings that chance brings about once in a year, made on purpose: processes that are led by the parent,
 * request by request, and stopped between two steps of one. On the test build of the front, over the stub driver.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "box.h"
#include "tap.h"

enum { CONTEXT_MIB = 20 };

struct puppet { pid_t pid; int to, from; };
struct order { char what; char step[32]; unsigned after; int signal_number; uint64_t bytes; };

static void act(int from, int to) {
    struct api a = api_start("libcuda.so.1");
    void (*arm)(const char *, unsigned, int) = (void (*)(const char *, unsigned, int))dlsym(a.handle, "carve_test_arm");
    static char step[8][32];
    unsigned armed = 0;
    CUdeviceptr held = 0;
    struct order o;
    CUresult result = CUDA_SUCCESS;
    if (arm == NULL || write(to, &result, sizeof result) != sizeof result) {
        _exit(9);
    }
    while (read(from, &o, sizeof o) == sizeof o) {
        switch (o.what) {
        case 'm': /* arm a step, for the next request */
            memcpy(step[armed % 8], o.step, sizeof step[0]);
            arm(step[armed++ % 8], o.after, o.signal_number);
            continue;
        case 'a':
            result = a.cuMemAlloc_v2(&held, o.bytes);
            break;
        case 'p': /* from the pool */
            result = a.cuMemAllocAsync(&held, o.bytes, NULL);
            break;
        default:
            result = a.cuMemFree_v2(held);
        }
        if (write(to, &result, sizeof result) != sizeof result) {
            break;
        }
    }
    _exit(0);
}

static CUresult answer(struct puppet *p, int milliseconds) {
    struct pollfd fd = {.fd = p->from, .events = POLLIN};
    CUresult result = -1;
    if (poll(&fd, 1, milliseconds) == 1 && read(p->from, &result, sizeof result) != sizeof result) {
        result = -2;
    }
    return result;
}

static struct puppet lead(void) {
    struct puppet p;
    int there[2], back[2];
    if (pipe(there) != 0 || pipe(back) != 0) {
        exit(2);
    }
    p.pid = fork();
    if (p.pid == 0) {
        close(there[1]);
        close(back[0]);
        act(there[0], back[1]);
    }
    close(there[0]);
    close(back[1]);
    p.to = there[1];
    p.from = back[0];
    bool there_now = answer(&p, 10000) == CUDA_SUCCESS;
    check(there_now, "a process is there, in slot %d", box_slot_of(p.pid));
    return p;
}

static void tell(struct puppet *p, struct order o) {
    if (write(p->to, &o, sizeof o) != sizeof o) {
        exit(2);
    }
}

static void arm(struct puppet *p, const char *step, unsigned after, int signal_number) {
    struct order o = {.what = 'm', .after = after, .signal_number = signal_number};
    strncpy(o.step, step, sizeof o.step - 1);
    tell(p, o);
}

static void ask(struct puppet *p, uint64_t mib) { tell(p, (struct order){.what = 'a', .bytes = mib * MIB}); }

static void ask_pool(struct puppet *p, uint64_t mib) { tell(p, (struct order){.what = 'p', .bytes = mib * MIB}); }

static CUresult allocate(struct puppet *p, uint64_t mib) {
    ask(p, mib);
    return answer(p, 10000);
}

static CUresult release(struct puppet *p) {
    tell(p, (struct order){.what = 'f'});
    return answer(p, 10000);
}

static bool stopped(struct puppet *p) {
    int status;
    return waitpid(p->pid, &status, WUNTRACED) == p->pid && WIFSTOPPED(status);
}

static void go_on(struct puppet *p) { kill(p->pid, SIGCONT); }

static void dismiss(struct puppet *p) {
    close(p->to);
    close(p->from);
    kill(p->pid, SIGKILL);
    waitpid(p->pid, NULL, 0);
}

static double milliseconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec / 1e6;
}

static void start(unsigned puppets, uint64_t room_mib) {
    uint64_t limit = (room_mib + CONTEXT_MIB * puppets) * MIB;
    box_make(1, &limit, CONTEXT_MIB * MIB);
    (void)box_truth(1, 100000 * MIB, CONTEXT_MIB * MIB);
}

/* Two requests of 400 stand in one another's way; one of 200 fits beside either. It must be had. */
static void fits_beside_either(void) {
    printf("# a request that fits beside either of two that exclude each other\n");
    start(3, 600);
    struct puppet a = lead(), b = lead(), c = lead();
    arm(&a, "fits", 0, SIGSTOP);
    arm(&a, "pending", 0, SIGSTOP);
    ask(&a, 400);
    check(stopped(&a), "the first is stopped when it has seen that 400 fit");
    arm(&b, "pending", 0, SIGSTOP);
    ask(&b, 400);
    check(stopped(&b), "the second has published 400");
    go_on(&a);
    check(stopped(&a) && box_pending(0) == 800 * MIB, "so has the first");
    ask(&c, 200);
    usleep(5000);
    check(answer(&c, 0) == -1, "the third waits");
    go_on(&b);
    go_on(&a);
    CUresult ra = answer(&a, 10000), rb = answer(&b, 10000), rc = answer(&c, 10000);
    check((ra == CUDA_SUCCESS) + (rb == CUDA_SUCCESS) == 1 && ra + rb == CUDA_ERROR_OUT_OF_MEMORY, "one of the two gets it (%d, %d)", ra, rb);
    check(rc == CUDA_SUCCESS, "and the third its 200 (%d)", rc);
    check(box_used(0) == (600 + 3 * CONTEXT_MIB) * MIB && box_pending(0) == 0, "all is taken, nothing pending");
    dismiss(&a), dismiss(&b), dismiss(&c);
}

/* One block that is freed in one slot and taken in another while a third process sums up must not count twice. */
static void block_that_moves(void) {
    printf("# a block that moves to another process while a third sums up\n");
    start(3, 600);
    struct puppet y = lead(), a = lead(), b = lead();
    check(allocate(&a, 300) == CUDA_SUCCESS && allocate(&b, 300) == CUDA_SUCCESS, "all is taken");
    arm(&y, "summing", 1, SIGSTOP); /* at the end of the first, quick sum of the two others */
    arm(&y, "summing", 0, SIGSTOP); /* behind the first of them in the next sum */
    ask(&y, 300);
    check(stopped(&y) && release(&b) == CUDA_SUCCESS, "a third finds no room; then 300 are given back");
    go_on(&y);
    check(stopped(&y) && release(&a) == CUDA_SUCCESS && allocate(&b, 300) == CUDA_SUCCESS, "the other 300 move to the slot that it looks at next");
    go_on(&y);
    check(answer(&y, 10000) == CUDA_SUCCESS, "it gets what was free all the time");
    dismiss(&y), dismiss(&a), dismiss(&b);
}

/* The same where the third process has waited for long, since a request stands in its way: what it sees last may be
 * as mixed as what it sees first, above all where it was stopped itself. */
static void block_that_moves_late(bool pending) {
    printf("# a block that moves while a third process, which has waited for long, sums up; it ends %s\n", pending ? "pending" : "in use");
    start(3, 600);
    struct puppet y = lead(), a = lead(), b = lead();
    check(allocate(&a, 300) == CUDA_SUCCESS, "one has 300");
    arm(&b, "pending", 0, SIGSTOP);
    ask(&b, 300);
    check(stopped(&b), "another has published 300");
    arm(&y, "summing", 20, SIGSTOP); /* behind the first of the two, when it has looked some times */
    ask(&y, 300);
    check(stopped(&y), "a third waits for that, and is stopped between the two");
    go_on(&b);
    check(answer(&b, 10000) == CUDA_SUCCESS && release(&b) == CUDA_SUCCESS && release(&a) == CUDA_SUCCESS, "all is given back");
    if (pending) {
        arm(&b, "pending", 0, SIGSTOP);
        ask(&b, 300);
        check(stopped(&b), "then the other has published 300 anew");
    } else {
        check(allocate(&b, 300) == CUDA_SUCCESS, "then the other has 300 anew");
    }
    usleep(60000); /* longer than one waits for requests of others */
    go_on(&y);
    check(answer(&y, 10000) == CUDA_SUCCESS, "it gets what was free");
    dismiss(&y), dismiss(&a), dismiss(&b);
}

/* What a request of a pool holds for it to grow, others wait for: it may not be taken in the end. */
static void held_for_a_pool(void) {
    printf("# a request that waits for what is held for a pool\n");
    start(2, 64);
    struct puppet a = lead(), b = lead();
    ask_pool(&a, 20);
    check(answer(&a, 10000) == CUDA_SUCCESS && box_used(0) == (32 + 2 * CONTEXT_MIB) * MIB, "a pool has 32, of which 12 are idle");
    arm(&a, "reserve-held", 0, SIGSTOP);
    ask_pool(&a, 10);
    check(stopped(&a) && box_pending(0) == 32 * MIB, "10 more are asked of it, and 32 held");
    ask(&b, 32);
    usleep(5000);
    check(answer(&b, 0) == -1, "another process that needs those waits");
    go_on(&a);
    check(answer(&a, 10000) == CUDA_SUCCESS && answer(&b, 10000) == CUDA_SUCCESS, "both are served");
    check(box_used(0) == (64 + 2 * CONTEXT_MIB) * MIB && box_pending(0) == 0, "all is taken");
    dismiss(&a), dismiss(&b);
}

/* Whoever stands in the way and doesn't move, stopped or dead, costs others a bounded wait. */
static void stands_in_the_way(int signal_number, const char *step, bool pool) {
    printf("# a process that is %s at %s\n", signal_number == SIGSTOP ? "stopped" : "killed", step);
    start(2, 608);
    struct puppet a = lead(), b = lead();
    arm(&b, step, 0, signal_number);
    if (pool) {
        ask_pool(&b, 415); /* which takes 416 of the card */
    } else {
        ask(&b, 416);
    }
    if (signal_number == SIGSTOP) {
        check(stopped(&b), "it has published 416");
    } else {
        waitpid(b.pid, NULL, 0);
        check(box_pending(0) == 416 * MIB, "it has published 416");
    }
    double before = milliseconds();
    CUresult result = allocate(&a, 300);
    double took = milliseconds() - before;
    check(result == CUDA_ERROR_OUT_OF_MEMORY && took < 5000, "a request that needs the room is refused after a while (%.0f ms)", took);
    check(allocate(&a, 192) == CUDA_SUCCESS && release(&a) == CUDA_SUCCESS, "one that fits beside it is had");
    if (signal_number == SIGSTOP) {
        go_on(&b);
        check(answer(&b, 10000) == CUDA_SUCCESS, "going on, it gets what it asked for");
    } else {
        for (unsigned i = 0; i < 2; i++) {
            if (CARVE_PID(box_usage()->processes[i].state_pid) == (uint32_t)b.pid) {
                box_reclaim(i);
            }
        }
        check(allocate(&a, 608) == CUDA_SUCCESS, "reclaimed, its room is had");
    }
    dismiss(&a), dismiss(&b);
}

int main(void) {
    fits_beside_either();
    block_that_moves();
    block_that_moves_late(true);
    block_that_moves_late(false);
    held_for_a_pool();
    stands_in_the_way(SIGSTOP, "pending", false);
    stands_in_the_way(SIGKILL, "pending", false);
    stands_in_the_way(SIGSTOP, "reserve-held", true);
    stands_in_the_way(SIGKILL, "reserve-held", true);
    stands_in_the_way(SIGKILL, "reserve-done", true);
    return tap_done();
}
