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

/* at, if given, is a step of its beginning at which it is stopped. */
static void act(int from, int to, const char *at) {
    struct api a = api_load("libcuda.so.1");
    void (*arm)(const char *, unsigned, int) = (void (*)(const char *, unsigned, int))dlsym(a.handle, "carve_test_arm");
    unsigned (*met)(const char *) = (unsigned (*)(const char *))dlsym(a.handle, "carve_test_met");
    if (arm != NULL && at != NULL) {
        arm(at, 0, SIGSTOP);
    }
    if (arm == NULL || met == NULL) {
        _exit(9);
    }
    CUcontext context;
    a.cuInit(0);
    a.cuCtxCreate_v2(&context, 0, 0);
    size_t free_bytes, total_bytes;
    unsigned before;
    static char step[8][32];
    unsigned armed = 0;
    CUdeviceptr held = 0;
    struct order o;
    CUresult result = CUDA_SUCCESS;
    if (write(to, &result, sizeof result) != sizeof result) {
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
        case 'g': /* what is free, in MiB */
            a.cuMemGetInfo_v2(&free_bytes, &total_bytes);
            result = (CUresult)(free_bytes / MIB);
            break;
        case 's': /* at how many slots of others it looks for that */
            before = met("summing");
            a.cuMemGetInfo_v2(&free_bytes, &total_bytes);
            result = (CUresult)(met("summing") - before);
            break;
        case 'x': /* gives all of it back, and ends */
            a.cuCtxDestroy_v2(context);
            _exit(0);
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

/* Without waiting for it. */
static struct puppet begin(const char *at) {
    struct puppet p;
    int there[2], back[2];
    if (pipe(there) != 0 || pipe(back) != 0) {
        exit(2);
    }
    p.pid = fork();
    if (p.pid == 0) {
        close(there[1]);
        close(back[0]);
        act(there[0], back[1], at);
    }
    close(there[0]);
    close(back[1]);
    p.to = there[1];
    p.from = back[0];
    return p;
}

static void is_there(struct puppet *p) {
    bool there_now = answer(p, 10000) == CUDA_SUCCESS;
    check(there_now, "a process is there, in slot %d", box_slot_of(p->pid));
}

static struct puppet lead(void) {
    struct puppet p = begin(NULL);
    is_there(&p);
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

static int free_mib(struct puppet *p) {
    tell(p, (struct order){.what = 'g'});
    return (int)answer(p, 10000);
}

static int slots_looked_at(struct puppet *p) {
    tell(p, (struct order){.what = 's'});
    return (int)answer(p, 10000);
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

/* Ends it as the node does: what it held is taken off its slot. */
static void bury(struct puppet *p) {
    int slot = box_slot_of(p->pid);
    dismiss(p);
    box_reclaim((unsigned)slot);
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

/* ---- the high water ---- */

enum { STAFF = 40 };

/* What a container costs for processes that it once had goes with them, in the processes of that time, too. */
static void high_water_falls(void) {
    printf("# the high water falls behind processes that are gone\n");
    start(STAFF + 2, 600);
    struct puppet old = lead(), staff[STAFF];
    for (unsigned i = 0; i < STAFF; i++) {
        staff[i] = lead();
    }
    check(slots_looked_at(&old) == STAFF && box_usage()->high_water == STAFF + 1, "one looks at all the others");
    for (unsigned i = 0; i < STAFF; i++) {
        bury(&staff[i]);
    }
    check(slots_looked_at(&old) == 0 && box_usage()->high_water == 1, "when they are gone, at none (high water %u)", box_usage()->high_water);
    struct puppet next = lead();
    check(slots_looked_at(&old) == 1 && slots_looked_at(&next) == 1 && box_slot_of(next.pid) == 1, "then at the next one");
    dismiss(&next), dismiss(&old);
}

/* Others take the slots at the end while a process, which found these free, is about to lower the high water below
 * them. With two of them it ends where it was. */
static void lowered_beside_claims(unsigned count) {
    printf("# %u slots that are taken while the high water is lowered\n", count);
    start(2 + count, 600);
    struct puppet l = lead(), y = lead(), gone[2], next[2];
    for (unsigned i = 0; i < count; i++) {
        gone[i] = lead();
    }
    for (unsigned i = 0; i < count; i++) {
        bury(&gone[i]);
    }
    arm(&l, "lowering", 0, SIGSTOP);
    tell(&l, (struct order){.what = 'g'});
    check(stopped(&l) && box_usage()->high_water == 2 + count, "one found free slots at the end");
    for (unsigned i = 0; i < count; i++) {
        next[i] = lead();
        check(box_slot_of(next[i].pid) == 2 + (int)i, "another process takes one");
    }
    check(allocate(&next[0], 300) == CUDA_SUCCESS, "the first of them has 300");
    go_on(&l);
    check((int)answer(&l, 10000) == 300, "the one that lowers sees these");
    check(box_usage()->high_water == 2 + count && free_mib(&y) == 300, "so do others (high water %u)", box_usage()->high_water);
    check(allocate(&y, 400) == CUDA_ERROR_OUT_OF_MEMORY && allocate(&y, 300) == CUDA_SUCCESS, "who get what is left, and no more");
    for (unsigned i = 0; i < count; i++) {
        dismiss(&next[i]);
    }
    dismiss(&l), dismiss(&y);
}

/* A process is stopped while it takes a slot, and the high water lowered meanwhile. */
static void claimed_beside_lowering(const char *step, unsigned lowest) {
    printf("# the high water is lowered while a process takes a slot, and is stopped at %s\n", step);
    start(3, 600);
    struct puppet l = lead(), y = lead(), d = lead(), e = lead();
    bury(&d), bury(&e);
    struct puppet p = begin(step);
    check(stopped(&p) && free_mib(&l) == 620 && box_usage()->high_water == lowest, "it is lowered to %u", box_usage()->high_water);
    go_on(&p);
    is_there(&p);
    check(box_slot_of(p.pid) == 2 && box_usage()->high_water == 3 && allocate(&p, 300) == CUDA_SUCCESS, "it has its slot, and 300");
    check(free_mib(&l) == 300 && free_mib(&y) == 300, "the others see these");
    check(allocate(&y, 400) == CUDA_ERROR_OUT_OF_MEMORY && allocate(&l, 300) == CUDA_SUCCESS, "and get what is left");
    dismiss(&l), dismiss(&y), dismiss(&p);
}

/* A pid is given to another process just when one takes the slot of the one that had it, as the last resort. */
static void inherited_twice(void) {
    printf("# a slot whose owner is gone is taken by two\n");
    start(3, 600);
    struct puppet d = lead();
    tell(&d, (struct order){.what = 'x'});
    waitpid(d.pid, NULL, 0);
    struct carve_usage *usage = box_usage();
    for (unsigned i = 1; i < CARVE_MAX_SLOTS; i++) {
        usage->processes[i].state_pid = CARVE_STATE_PID(CARVE_SLOT_LIVE, 1);
        usage->lines[0][i].charge = CARVE_CHARGE(1, 0);
    }
    uint64_t word = usage->processes[0].state_pid;
    struct puppet p = begin("inherit");
    check(stopped(&p), "one found that its owner is gone");
    usage->processes[0].start_ticks++; /* what is left of it, had a process of that pid taken it */
    usage->processes[700].state_pid = CARVE_STATE_PID(CARVE_SLOT_DEAD, 1);
    usage->lines[0][700].charge = 0;
    go_on(&p);
    is_there(&p);
    check(box_slot_of(p.pid) == 700 && usage->processes[0].state_pid == word, "it takes another one, and leaves this as it was");
    close(d.to), close(d.from);
    dismiss(&p);
}

int main(void) {
    alarm(600); /* one that isn't stopped where it should be is waited for */
    high_water_falls();
    lowered_beside_claims(1);
    lowered_beside_claims(2);
    claimed_beside_lowering("claim", 2);
    claimed_beside_lowering("claimed", 3);
    claimed_beside_lowering("counted", 3);
    inherited_twice();
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
