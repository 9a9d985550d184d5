/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The shipped front over the software GPU: what the ledger charges is, after each single call, what the driver
 * says that the process uses. Two cards: the first A100-80, the second A30.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "soft_box.h"
#include "tap.h"

static void exact_limits(void) {
    struct api a = start(8000, 16000, CARVE_LIMITS_SELF_VISIBLE);
    CUcontext c[2];
    for (int card = 0; card < 2; card++) {
        uint64_t limit = (card == 0 ? 8000 : 16000) * MIB;
        size_t total = 0;
        CUdeviceptr p = 77;
        check(a.cuCtxCreate_v2(&c[card], 0, card) == CUDA_SUCCESS, "a context on card %d", card);
        uint64_t context = truth(card, getpid());
        struct info first = info(&a);
        check(context > 50 * MIB && first.total == limit && first.free == limit - context, "first free is %zu MiB less the context's %zu", limit / MIB, context / MIB);
        check(a.cuDeviceTotalMem_v2(&total, card) == CUDA_SUCCESS && total == limit, "so says cuDeviceTotalMem");
        check(a.cuMemAlloc_v2(&p, first.free + MIB) == CUDA_ERROR_OUT_OF_MEMORY && p == 77 && truth(card, getpid()) == context, "one MiB over is refused, nothing changes");
        check(a.cuMemAlloc_v2(&p, first.free / (2 * MIB) * (2 * MIB)) == CUDA_SUCCESS && truth(card, getpid()) <= limit && info(&a).free < 2 * MIB, "all that is free, in whole pages, is had");
        check(a.cuMemFree_v2(p) == CUDA_SUCCESS && info(&a).free == first.free, "and given back");
    }
    check(a.cuCtxDestroy_v2(c[0]) == CUDA_SUCCESS && a.cuCtxDestroy_v2(c[1]) == CUDA_SUCCESS && box_used(0) == 0 && box_used(1) == 0, "destroyed, nothing is charged");
}

/* Random calls; the ledger and the driver agree after every one. Managed memory lives on the host there, and is
 * charged by policy, so it is left out. */
static void agrees_with_the_driver(void) {
    struct api a = start(3000, 3000, CARVE_LIMITS_SELF_VISIBLE);
    enum { LIVE = 400 };
    static CUdeviceptr p[2][LIVE];
    CUcontext c[2] = {NULL, NULL};
    unsigned seed = 7, disagree = 0, refused = 0, had = 0, strange = 0;
    for (int i = 0; i < 12000; i++) {
        int card = rand_r(&seed) % 2, at = rand_r(&seed) % LIVE;
        if (c[card] == NULL) {
            strange += a.cuCtxCreate_v2(&c[card], 0, card) != CUDA_SUCCESS;
            memset(p[card], 0, sizeof p[card]);
        }
        a.cuCtxSetCurrent(c[card]);
        unsigned what = (unsigned)rand_r(&seed) % 1000;
        if (what == 0) {
            strange += a.cuCtxDestroy_v2(c[card]) != CUDA_SUCCESS;
            c[card] = NULL;
        } else if (p[card][at] != 0) {
            strange += a.cuMemFree_v2(p[card][at]) != CUDA_SUCCESS;
            p[card][at] = 0;
        } else {
            CUresult result;
            size_t pitch;
            if (what < 500) {
                result = a.cuMemAlloc_v2(&p[card][at], 1 + (unsigned)rand_r(&seed) % 60000);
            } else if (what < 900) {
                result = a.cuMemAlloc_v2(&p[card][at], 1 + (uint64_t)(unsigned)rand_r(&seed) % (60 * MIB));
            } else {
                result = a.cuMemAllocPitch_v2(&p[card][at], &pitch, 1 + (unsigned)rand_r(&seed) % 5000, 1 + (unsigned)rand_r(&seed) % 3000, 8);
            }
            had += result == CUDA_SUCCESS;
            refused += result == CUDA_ERROR_OUT_OF_MEMORY;
            strange += result != CUDA_SUCCESS && result != CUDA_ERROR_OUT_OF_MEMORY;
            p[card][at] = result == CUDA_SUCCESS ? p[card][at] : 0;
        }
        if (box_used((unsigned)card) != truth(card, getpid())) {
            if (disagree++ == 0) {
                printf("# call %d: %zu charged, %zu on the card\n", i, box_used((unsigned)card), truth(card, getpid()));
            }
        }
    }
    check(disagree == 0, "after each of 12000 calls the ledger has what the driver has (%u times not)", disagree);
    check(had > 3000 && refused > 100 && strange == 0, "%u grants, %u refusals, %u strange answers", had, refused, strange);
}

/* The same for memory that the program maps itself: random handles, mappings, second handles, in any order. */
static void virtual_memory(void) {
    struct api a = start(3000, 3000, CARVE_LIMITS_SELF_VISIBLE);
#define CALL(name) ((__typeof__(name) *)dlsym(a.handle, #name))
    enum { HANDLES = 60, SPACE = 400 };
    struct { CUmemGenericAllocationHandle name; uint64_t pages; int uses; } h[HANDLES] = {0};
    int mapped[SPACE] = {0}; /* pages of the mapping that starts there; -1: within one */
    CUdeviceptr space;
    CUcontext c;
    unsigned seed = 11, disagree = 0, refused = 0, had = 0, strange = 0, unmapped = 0, retained = 0;
    a.cuCtxCreate_v2(&c, 0, 0);
    uint64_t context = truth(0, getpid());
    strange += CALL(cuMemAddressReserve)(&space, SPACE * 2 * MIB, 0, 0, 0) != CUDA_SUCCESS;
    for (int i = 0; i < 12000; i++) {
        int k = rand_r(&seed) % HANDLES, at = rand_r(&seed) % SPACE;
        unsigned what = (unsigned)rand_r(&seed) % 10;
        while (what >= 8 && at < SPACE - 1 && mapped[at] <= 0) {
            at++;
        }
        if (what < 4 && h[k].uses == 0) {
            CUmemAllocationProp property = {.type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
            h[k].pages = 1 + (unsigned)rand_r(&seed) % 60;
            CUresult result = CALL(cuMemCreate)(&h[k].name, h[k].pages * 2 * MIB, &property, 0);
            h[k].uses = result == CUDA_SUCCESS;
            had += result == CUDA_SUCCESS;
            refused += result == CUDA_ERROR_OUT_OF_MEMORY;
            strange += result != CUDA_SUCCESS && result != CUDA_ERROR_OUT_OF_MEMORY;
        } else if (what < 6 && h[k].uses > 0) {
            strange += CALL(cuMemRelease)(h[k].name) != CUDA_SUCCESS;
            h[k].uses--;
        } else if (what < 8 && h[k].uses > 0) {
            /* Part of the block, anywhere that is free. */
            int pages = 1 + rand_r(&seed) % (h[k].pages < 6 ? (int)h[k].pages : 6), room = 0;
            while (room < pages && at + room < SPACE && mapped[at + room] == 0) {
                room++;
            }
            if (room == pages) {
                strange += CALL(cuMemMap)(space + (uint64_t)at * 2 * MIB, (uint64_t)pages * 2 * MIB, 0, h[k].name, 0) != CUDA_SUCCESS;
                mapped[at] = pages;
                for (int j = 1; j < pages; j++) {
                    mapped[at + j] = -1;
                }
            }
        } else if (what == 8 && mapped[at] > 0) {
            /* One mapping, and the next one too if it starts right behind. */
            int pages = mapped[at];
            pages += at + pages < SPACE && mapped[at + pages] > 0 ? mapped[at + pages] : 0;
            strange += CALL(cuMemUnmap)(space + (uint64_t)at * 2 * MIB, (uint64_t)pages * 2 * MIB) != CUDA_SUCCESS;
            memset(&mapped[at], 0, (size_t)pages * sizeof mapped[0]);
            unmapped++;
        } else if (what == 9 && mapped[at] != 0) {
            CUmemGenericAllocationHandle name;
            strange += CALL(cuMemRetainAllocationHandle)(&name, (void *)(uintptr_t)(space + (uint64_t)at * 2 * MIB)) != CUDA_SUCCESS;
            int owner = 0;
            while (owner < HANDLES && (h[owner].uses == 0 || h[owner].name != name)) {
                owner++;
            }
            if (owner < HANDLES) {
                h[owner].uses++;
                retained++;
            } else {
                strange += CALL(cuMemRelease)(name) != CUDA_SUCCESS; /* of a block that was held by its mappings alone */
            }
        }
        if (box_used(0) != truth(0, getpid()) && disagree++ == 0) {
            printf("# call %d: %zu charged, %zu on the card\n", i, box_used(0), truth(0, getpid()));
        }
    }
    check(disagree == 0, "memory that a program maps itself: after each of 12000 calls the ledger has what the driver has (%u times not)", disagree);
    check(had > 500 && refused > 20 && unmapped > 100 && retained > 50 && strange == 0, "%u blocks, %u refusals, %u unmapped, %u second handles, %u strange answers", had, refused, unmapped, retained, strange);
    check(CALL(cuMemRelease)(12345) == CUDA_ERROR_INVALID_VALUE && CALL(cuMemUnmap)(space, 1) == CUDA_ERROR_INVALID_VALUE && box_used(0) == truth(0, getpid()), "nonsense is the driver's to refuse");
    for (int k = 0; k < HANDLES; k++) {
        for (; h[k].uses > 0; h[k].uses--) {
            CALL(cuMemRelease)(h[k].name);
        }
    }
    for (int at = 0; at < SPACE; at++) {
        if (mapped[at] > 0) {
            CALL(cuMemUnmap)(space + (uint64_t)at * 2 * MIB, (uint64_t)mapped[at] * 2 * MIB);
        }
    }
    check(box_used(0) == context && truth(0, getpid()) == context && box_usage()->lines[0][0].allocations == 0, "released and unmapped, all of it is back");
    CUmemAllocationProp host = {.type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {CU_MEM_LOCATION_TYPE_HOST_NUMA, 0}};
    CUmemGenericAllocationHandle name;
    check(CALL(cuMemCreate)(&name, 2 * MIB, &host, 0) == CUDA_SUCCESS && box_used(0) == context && CALL(cuMemRelease)(name) == CUDA_SUCCESS && box_used(0) == context, "memory of the host isn't charged");
#undef CALL
}

/* Two threads that meet at one handle, or at one address: whichever the driver takes first, what it holds afterwards
 * is charged. One thread maps while the other releases the handle, or unmaps what stood at the address. */
static struct {
    __typeof__(cuMemMap) *map;
    CUdeviceptr at;
    CUmemGenericAllocationHandle handle;
    CUresult result;
    int turn; /* 1: the mapper's; 2: it is done; 3: it ends */
    bool again; /* try until it is mapped, or until the other is done */
    int other_done;
} meeting;

static void *map_there(void *unused) {
    unsigned seed = 5;
    for (;;) {
        int turn;
        while ((turn = __atomic_load_n(&meeting.turn, __ATOMIC_ACQUIRE)) != 1) {
            if (turn == 3) {
                return unused;
            }
        }
        for (int spin = rand_r(&seed) % 200; spin > 0; spin--) {
            __asm__ volatile("");
        }
        int last;
        do {
            last = !meeting.again || __atomic_load_n(&meeting.other_done, __ATOMIC_ACQUIRE);
            meeting.result = meeting.map(meeting.at, 2 * MIB, 0, meeting.handle, 0);
        } while (meeting.result != CUDA_SUCCESS && !last);
        __atomic_store_n(&meeting.turn, 2, __ATOMIC_RELEASE);
    }
}

static void meet(bool unmap) {
    struct api a = start(3000, 3000, CARVE_LIMITS_SELF_VISIBLE);
#define CALL(name) ((__typeof__(name) *)dlsym(a.handle, #name))
    __typeof__(cuMemCreate) *make = CALL(cuMemCreate);
    __typeof__(cuMemRelease) *release = CALL(cuMemRelease);
    __typeof__(cuMemUnmap) *take_away = CALL(cuMemUnmap);
    enum { ROUNDS = 8000 };
    CUmemAllocationProp property = {.type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
    CUmemGenericAllocationHandle first = 0;
    CUcontext c;
    pthread_t mapper;
    unsigned strange = 0, leaked = 0, mapped = 0, seed = 3;
    strange += a.cuCtxCreate_v2(&c, 0, 0) != CUDA_SUCCESS;
    strange += CALL(cuMemAddressReserve)(&meeting.at, 2 * MIB, 0, 0, 0) != CUDA_SUCCESS;
    strange += unmap && make(&first, 2 * MIB, &property, 0) != CUDA_SUCCESS;
    uint64_t before = box_used(0);
    meeting.map = CALL(cuMemMap);
    meeting.again = unmap;
    meeting.turn = 0;
    strange += pthread_create(&mapper, NULL, map_there, NULL) != 0;
    for (int i = 0; i < ROUNDS && strange == 0; i++) {
        strange += make(&meeting.handle, 2 * MIB, &property, 0) != CUDA_SUCCESS;
        strange += unmap && meeting.map(meeting.at, 2 * MIB, 0, first, 0) != CUDA_SUCCESS;
        meeting.other_done = 0;
        __atomic_store_n(&meeting.turn, 1, __ATOMIC_RELEASE);
        for (int spin = rand_r(&seed) % 3000; spin > 0; spin--) { /* the other wins about as often */
            __asm__ volatile("");
        }
        strange += (unmap ? take_away(meeting.at, 2 * MIB) : release(meeting.handle)) != CUDA_SUCCESS;
        __atomic_store_n(&meeting.other_done, 1, __ATOMIC_RELEASE);
        while (__atomic_load_n(&meeting.turn, __ATOMIC_ACQUIRE) != 2) {
        }
        strange += unmap && release(meeting.handle) != CUDA_SUCCESS;
        leaked += truth(0, getpid()) != box_used(0);
        if (meeting.result == CUDA_SUCCESS) {
            mapped++;
            strange += take_away(meeting.at, 2 * MIB) != CUDA_SUCCESS;
        }
        strange += truth(0, getpid()) != before;
    }
    __atomic_store_n(&meeting.turn, 3, __ATOMIC_RELEASE);
    pthread_join(mapper, NULL);
    check(leaked == 0, "mapped while another thread %s: the driver holds no page that isn't charged (%u times it does)", unmap ? "unmaps what stood there" : "releases the handle", leaked);
    check(mapped > 0 && strange == 0 && box_used(0) == before && truth(0, getpid()) == before, "%u of %d were mapped, %u strange answers, all is back", mapped, ROUNDS, strange);
#undef CALL
}
static void meet_a_release(void) { meet(false); }
static void meet_an_unmap(void) { meet(true); }

static struct api shared_api;
static CUcontext shared_context;
static void *stress(void *argument) {
    unsigned seed = (unsigned)(uintptr_t)argument;
    CUdeviceptr p[32] = {0};
    shared_api.cuCtxSetCurrent(shared_context);
    for (int i = 0; i < 3000; i++) {
        int at = rand_r(&seed) % 32;
        if (p[at] != 0) {
            shared_api.cuMemFree_v2(p[at]);
            p[at] = 0;
        } else if (shared_api.cuMemAlloc_v2(&p[at], 1 + (unsigned)rand_r(&seed) % (rand_r(&seed) % 2 == 0 ? 40u << 20 : 3000u)) != CUDA_SUCCESS) {
            p[at] = 0;
        }
    }
    for (int i = 0; i < 32; i++) {
        if (p[i] != 0) {
            shared_api.cuMemFree_v2(p[i]);
        }
    }
    return NULL;
}

static void threads(void) {
    shared_api = start(1000, 1000, CARVE_LIMITS_SELF_VISIBLE);
    pthread_t t[6];
    shared_api.cuDevicePrimaryCtxRetain(&shared_context, 0);
    for (int i = 0; i < 6; i++) {
        pthread_create(&t[i], NULL, stress, (void *)(uintptr_t)(i + 1));
    }
    for (int i = 0; i < 6; i++) {
        pthread_join(t[i], NULL);
    }
    check(box_used(0) == truth(0, getpid()) && box_pending(0) == 0, "after six threads ledger and driver agree");
    check(shared_api.cuDevicePrimaryCtxRelease_v2(0) == CUDA_SUCCESS && box_used(0) == 0 && truth(0, getpid()) == 0, "and both have nothing when the context is gone");
}

/* Threads that retain and release the primary context, all at once, and leave what they allocate to it. */
enum { ROUNDS = 1500, USERS = 4 };
static unsigned failed;
static void *use_primary(void *argument) {
    for (int i = 0; i < ROUNDS; i++) {
        CUcontext c;
        CUdeviceptr p;
        if (shared_api.cuDevicePrimaryCtxRetain(&c, 0) != CUDA_SUCCESS) {
            __atomic_add_fetch(&failed, 1, __ATOMIC_RELAXED);
            continue;
        }
        shared_api.cuCtxSetCurrent(c);
        for (int n = (int)(uintptr_t)argument % 2; n > 0; n--) {
            (void)shared_api.cuMemAlloc_v2(&p, 4 << 20);
        }
        shared_api.cuCtxSetCurrent(NULL);
        (void)shared_api.cuDevicePrimaryCtxRelease_v2(0);
    }
    return NULL;
}

static bool nothing_left(void) {
    const struct carve_usage_line *line = &box_usage()->lines[0][0];
    return truth(0, getpid()) == 0 && box_used(0) == 0 && box_pending(0) == 0 && line->allocations == 0 && line->context_bytes == 0;
}

static void primary_by_threads(void) {
    shared_api = start(20000, 1000, CARVE_LIMITS_SELF_VISIBLE);
    pthread_t t[USERS];
    for (int i = 0; i < USERS; i++) {
        pthread_create(&t[i], NULL, use_primary, (void *)(uintptr_t)(i + 1));
    }
    for (int i = 0; i < USERS; i++) {
        pthread_join(t[i], NULL);
    }
    check(failed == 0 && nothing_left(), "the primary context used by %d threads in %d rounds: %u refusals; %zu MiB and %lu allocations are left of it", USERS, ROUNDS, failed, box_used(0) / MIB,
          (unsigned long)box_usage()->lines[0][0].allocations);
}

/* The same on purpose: another thread comes just between what the driver does and what is made of it. It is given the
 * time to get through, which it has to wait for; if it needs longer than that, it comes later and nothing is shown. */
static pthread_t other;
static unsigned other_done, came;
static void *retain_and_allocate(void *argument) {
    CUcontext c;
    CUdeviceptr p;
    bool good = shared_api.cuDevicePrimaryCtxRetain(&c, 0) == CUDA_SUCCESS && shared_api.cuCtxSetCurrent(c) == CUDA_SUCCESS && shared_api.cuMemAlloc_v2(&p, 100 * MIB) == CUDA_SUCCESS &&
                shared_api.cuCtxSetCurrent(NULL) == CUDA_SUCCESS;
    __atomic_add_fetch(&failed, !good, __ATOMIC_RELAXED);
    __atomic_store_n(&other_done, 1, __ATOMIC_RELEASE);
    return argument;
}

static void *release(void *argument) {
    __atomic_add_fetch(&failed, shared_api.cuDevicePrimaryCtxRelease_v2(0) != CUDA_SUCCESS, __ATOMIC_RELAXED);
    __atomic_store_n(&other_done, 1, __ATOMIC_RELEASE);
    return argument;
}

static void *(*meanwhile)(void *);
static void interrupt(int number) {
    (void)number;
    came++;
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, NULL);
    pthread_create(&other, NULL, meanwhile, NULL);
    for (int i = 0; i < 500 && __atomic_load_n(&other_done, __ATOMIC_ACQUIRE) == 0; i++) {
        usleep(1000);
    }
}

static void primary_interrupted(void) {
    void (*arm)(const char *, unsigned, int) = (void (*)(const char *, unsigned, int))dlsym(dlopen("libcuda.so.1", RTLD_NOW), "carve_test_arm");
    static const struct { const char *step, *what; void *(*meanwhile)(void *); } cases[] = {
        {"primary-released", "retained anew just when it is gone", retain_and_allocate},
        {"primary-asked", "released by its last user just before it is retained", release},
    };
    shared_api = start(2000, 1000, CARVE_LIMITS_SELF_VISIBLE);
    signal(SIGUSR1, interrupt);
    for (int i = 0; i < 2; i++) {
        CUcontext c;
        CUdeviceptr p;
        bool last = cases[i].meanwhile == retain_and_allocate;
        other_done = came = failed = 0;
        meanwhile = cases[i].meanwhile;
        bool good = shared_api.cuDevicePrimaryCtxRetain(&c, 0) == CUDA_SUCCESS && shared_api.cuCtxSetCurrent(c) == CUDA_SUCCESS && shared_api.cuMemAlloc_v2(&p, 200 * MIB) == CUDA_SUCCESS;
        shared_api.cuCtxSetCurrent(NULL);
        arm(cases[i].step, 0, SIGUSR1);
        good = good && (last ? shared_api.cuDevicePrimaryCtxRelease_v2(0) : shared_api.cuDevicePrimaryCtxRetain(&c, 0)) == CUDA_SUCCESS;
        pthread_join(other, NULL);
        check(good && came == 1 && failed == 0 && box_used(0) == truth(0, getpid()), "%s: %zu MiB charged, %zu on the card", cases[i].what, box_used(0) / MIB, truth(0, getpid()) / MIB);
        check(shared_api.cuDevicePrimaryCtxRelease_v2(0) == CUDA_SUCCESS && nothing_left(), "and nothing once that is released (%zu MiB)", box_used(0) / MIB);
    }
}

#define HERE(name) ((__typeof__(name) *)dlsym(shared_api.handle, #name))

/* A thread that stays in the driver while it lets go of memory that is mapped, as one does that waits for work. Others
 * get on, after a while. */
static sem_t entered, go_on;
static void stay(int number) {
    (void)number;
    sem_post(&entered);
    while (sem_wait(&go_on) != 0) {
    }
}

static CUmemGenericAllocationHandle physical(void) {
    CUmemAllocationProp p = {.type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
    CUmemGenericAllocationHandle handle = 0;
    return HERE(cuMemCreate)(&handle, 20 * MIB, &p, 0) == CUDA_SUCCESS ? handle : 0;
}

static void *let_go(void *handle) {
    sigset_t one;
    sigemptyset(&one);
    sigaddset(&one, SIGUSR1);
    pthread_sigmask(SIG_UNBLOCK, &one, NULL);
    __atomic_add_fetch(&failed, HERE(cuMemRelease)((CUmemGenericAllocationHandle)(uintptr_t)handle) != CUDA_SUCCESS, __ATOMIC_RELAXED);
    return NULL;
}

static void virtual_stays(void) {
    void (*arm)(const char *, unsigned, int) = (void (*)(const char *, unsigned, int))dlsym(dlopen("libcuda.so.1", RTLD_NOW), "carve_test_arm");
    CUcontext c;
    pthread_t thread;
    sigset_t one;
    shared_api = start(2000, 1000, CARVE_LIMITS_SELF_VISIBLE);
    failed = shared_api.cuDevicePrimaryCtxRetain(&c, 0) != CUDA_SUCCESS;
    uint64_t bare = box_used(0);
    CUmemGenericAllocationHandle first = physical(), second;
    sem_init(&entered, 0, 0);
    sem_init(&go_on, 0, 0);
    signal(SIGUSR1, stay);
    sigemptyset(&one);
    sigaddset(&one, SIGUSR1);
    pthread_sigmask(SIG_BLOCK, &one, NULL);
    arm("release-asked", 0, SIGUSR1);
    pthread_create(&thread, NULL, let_go, (void *)(uintptr_t)first);
    while (sem_wait(&entered) != 0) {
    }
    alarm(120); /* without end it would be */
    second = physical();
    bool got_on = second != 0 && HERE(cuMemRelease)(second) == CUDA_SUCCESS && box_used(0) == bare + 20 * MIB;
    alarm(0);
    sem_post(&go_on);
    pthread_join(thread, NULL);
    check(first != 0 && got_on, "while a thread stays in a release another has memory of the kind, and lets go of it");
    check(failed == 0 && box_used(0) == bare && truth(0, getpid()) == bare, "and what the first let go of goes when it is through (%zu MiB)", box_used(0) / MIB);
}

/* Threads that want the primary context at the same moment, in a share with room for one. */
static pthread_barrier_t gate;
static void *want_primary(void *argument) {
    for (int i = 0; i < 300; i++) {
        CUcontext c;
        pthread_barrier_wait(&gate);
        bool had = shared_api.cuDevicePrimaryCtxRetain(&c, 0) == CUDA_SUCCESS;
        __atomic_add_fetch(&failed, !had, __ATOMIC_RELAXED);
        pthread_barrier_wait(&gate);
        if (had) {
            (void)shared_api.cuDevicePrimaryCtxRelease_v2(0);
        }
    }
    return argument;
}

static void room_for_one(void) {
    shared_api = start(800, 1000, CARVE_LIMITS_SELF_VISIBLE);
    box_context(0, 420 * MIB);
    pthread_t t[USERS];
    pthread_barrier_init(&gate, NULL, USERS);
    for (int i = 0; i < USERS; i++) {
        pthread_create(&t[i], NULL, want_primary, NULL);
    }
    for (int i = 0; i < USERS; i++) {
        pthread_join(t[i], NULL);
    }
    check(failed == 0 && box_refusals(0) == 0 && box_used(0) == 0 && truth(0, getpid()) == 0, "%d threads that want the primary context at once have it, where there is room for one (%u times not)", USERS, failed);
}

/* A thread with the least stack that there is makes the context, which the front measures by NVML. */
static void *with_small_stack(void *argument) {
    CUcontext c;
    CUdeviceptr p;
    size_t free_bytes, total;
    unsigned *good = argument;
    *good += shared_api.cuDevicePrimaryCtxRetain(&c, 0) == CUDA_SUCCESS;
    *good += shared_api.cuCtxSetCurrent(c) == CUDA_SUCCESS;
    *good += shared_api.cuMemAlloc_v2(&p, 4096) == CUDA_SUCCESS;
    *good += shared_api.cuMemAllocAsync(&p, 4096, NULL) == CUDA_SUCCESS;
    *good += shared_api.cuMemGetInfo_v2(&free_bytes, &total) == CUDA_SUCCESS;
    return NULL;
}

static int make_small_share(void *unused) {
    (void)unused;
    make_share(8000, 8000, CARVE_LIMITS_SELF_VISIBLE);
    return 0;
}

__attribute__((unused)) static void small_stacks(void) {
    pthread_attr_t attributes;
    pthread_t thread;
    unsigned good = 0;
    /* Nothing else in this process has loaded or started NVML. */
    check(in_child(make_small_share, NULL) == 0, "a share");
    shared_api = api_load("libcuda.so.1");
    check(shared_api.cuInit(0) == CUDA_SUCCESS && pthread_attr_init(&attributes) == 0 && pthread_attr_setstacksize(&attributes, 16384) == 0 &&
              pthread_create(&thread, &attributes, with_small_stack, &good) == 0 && pthread_join(thread, NULL) == 0,
          "a thread with a stack of 16 KiB");
    box_open();
    find_truth(&shared_api);
    check(good == 5 && box_used(0) != 0 && box_used(0) == truth(0, getpid()), "has the context, as measured, and memory in it (%u of 5; %zu MiB charged)", good, box_used(0) / MIB);
}

static void processes(void) {
    struct api a = start(2000, 2000, CARVE_LIMITS_SELF_VISIBLE);
    int ready[2], stay[2];
    char byte;
    if (pipe(ready) != 0 || pipe(stay) != 0) {
        exit(2);
    }
    pid_t pid = fork();
    if (pid == 0) {
        /* The driver can't be used in a child of a process that started it; a new program can. */
        char to[16], from[16];
        snprintf(to, sizeof to, "%d", ready[1]);
        snprintf(from, sizeof from, "%d", stay[0]);
        execl("/proc/self/exe", "soft_test", "hold", to, from, (char *)NULL);
        _exit(98);
    }
    check(read(ready[0], &byte, 1) == 1, "a second process holds 700 MiB");
    CUcontext c;
    CUdeviceptr p;
    a.cuCtxCreate_v2(&c, 0, 0);
    uint64_t own = truth(0, getpid()), theirs = truth(0, pid);
    check(theirs > 700 * MIB && info(&a).free == 2000 * MIB - own - theirs, "free is the limit less what both have, contexts included");
    check(a.cuMemAlloc_v2(&p, info(&a).free + 2 * MIB) == CUDA_ERROR_OUT_OF_MEMORY && a.cuMemAlloc_v2(&p, info(&a).free) == CUDA_SUCCESS, "and is what can be had");
    int slot = box_slot_of(pid);
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    check(a.cuMemFree_v2(p) == CUDA_SUCCESS && info(&a).free == 2000 * MIB - own - theirs && slot >= 0, "killed, it stays charged");
    box_reclaim((unsigned)slot);
    check(info(&a).free == 2000 * MIB - own, "until it is reclaimed");
}

static int hold(int to, int from) {
    struct api a = api_start("libcuda.so.1");
    CUdeviceptr p;
    char byte;
    if (a.cuMemAlloc_v2(&p, 700 * MIB) != CUDA_SUCCESS || write(to, "", 1) != 1) {
        return 1;
    }
    return read(from, &byte, 1) == 0;
}

static void shown_by_nvml(void) {
    struct api a = start(8000, 16000, CARVE_LIMITS_SELF_VISIBLE);
    CUcontext c;
    a.cuCtxCreate_v2(&c, 0, 1);
    void *nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    for (int card = 0; card < 2; card++) {
        nvmlMemory_t m = {0};
        nvmlProcessInfo_t list[8];
        unsigned int count = 8;
        check(((__typeof__(nvmlDeviceGetMemoryInfo) *)dlsym(nvml, "nvmlDeviceGetMemoryInfo"))(real_cards[card], &m) == NVML_SUCCESS &&
                  m.total == (card == 0 ? 8000 : 16000) * MIB && m.used == truth(card, getpid()),
              "NVML shows the share of card %d", card);
        check(((__typeof__(nvmlDeviceGetComputeRunningProcesses_v3) *)dlsym(nvml, "nvmlDeviceGetComputeRunningProcesses_v3"))(real_cards[card], &count, list) == NVML_SUCCESS &&
                  count == (unsigned)card,
              "and %d process there", card);
    }
#ifndef UNDER_SANITIZER /* which a program without it can't load */
    char line[256];
    int found = 0;
    FILE *smi = popen("/usr/lib/carve/nvidia-smi", "r");
    while (smi != NULL && fgets(line, sizeof line, smi) != NULL) {
        found += strstr(line, "8000MiB") != NULL || strstr(line, "16000MiB") != NULL;
    }
    check(smi != NULL && pclose(smi) == 0 && found == 2, "so does nvidia-smi");
#endif
}

#ifndef UNDER_SANITIZER /* whose runtime can't be loaded twice */
/* A second front in the process, in a namespace of its own: what the process has isn't its context's alone. */
static void two_fronts(void) {
    CUcontext first, second;
    CUdeviceptr p;
    struct api a = start(3000, 3000, CARVE_LIMITS_SELF_VISIBLE);
    box_context(0, 420 * MIB);
    void *other = dlmopen(LM_ID_NEWLM, "libcuda.so.1", RTLD_NOW);
    check(other != NULL && a.cuCtxCreate_v2(&first, 0, 0) == CUDA_SUCCESS && a.cuMemAlloc_v2(&p, 300 * MIB) == CUDA_SUCCESS && box_used(0) == truth(0, getpid()), "one front has a context and a block");
    check(((__typeof__(cuInit) *)dlsym(other, "cuInit"))(0) == CUDA_SUCCESS && ((__typeof__(cuCtxCreate_v2) *)dlsym(other, "cuCtxCreate_v2"))(&second, 0, 0) == CUDA_SUCCESS, "another one a context");
    check(box_used(0) == truth(0, getpid()), "which is charged with what it takes (%zu of %zu)", (size_t)box_used(0), (size_t)truth(0, getpid()));
    check(((__typeof__(cuMemAlloc_v2) *)dlsym(other, "cuMemAlloc_v2"))(&p, 100 * MIB) == CUDA_SUCCESS && box_used(0) == truth(0, getpid()), "and what is had there");
}
#endif

static int run(void *scenario) {
    ((void (*)(void))scenario)();
    return 0;
}

int main(int argc, char **argv) {
    if (argc == 4 && strcmp(argv[1], "hold") == 0) {
        return hold(atoi(argv[2]), atoi(argv[3]));
    }
    if (argc == 2 && strcmp(argv[1], "steps") == 0) {
        check(in_child(run, (void *)primary_interrupted) == 0, "the primary context, interrupted: ran to its end");
        check(in_child(run, (void *)virtual_stays) == 0, "a release that stays: ran to its end");
        return tap_done();
    }
    if (argc == 2 && strcmp(argv[1], "threads") == 0) {
        check(in_child(run, (void *)threads) == 0, "threads: ran to its end");
        check(in_child(run, (void *)primary_by_threads) == 0, "the primary context by threads: ran to its end");
        return tap_done();
    }
    check(in_child(run, (void *)exact_limits) == 0, "exact limits: ran to its end");
    check(in_child(run, (void *)agrees_with_the_driver) == 0, "agrees with the driver: ran to its end");
    check(in_child(run, (void *)virtual_memory) == 0, "virtual memory: ran to its end");
    check(in_child(run, (void *)meet_a_release) == 0, "mapped and released at once: ran to its end");
    check(in_child(run, (void *)meet_an_unmap) == 0, "mapped and unmapped at once: ran to its end");
    check(in_child(run, (void *)threads) == 0, "threads: ran to its end");
    check(in_child(run, (void *)primary_by_threads) == 0, "the primary context by threads: ran to its end");
    check(in_child(run, (void *)room_for_one) == 0, "room for one: ran to its end");
#ifndef UNDER_SANITIZER /* whose frames are larger */
    check(in_child(run, (void *)small_stacks) == 0, "small stacks: ran to its end");
    check(in_child(run, (void *)two_fronts) == 0, "two fronts: ran to its end");
#endif
    check(in_child(run, (void *)processes) == 0, "processes: ran to its end");
    check(in_child(run, (void *)shown_by_nvml) == 0, "shown by NVML: ran to its end");
    return tap_done();
}
