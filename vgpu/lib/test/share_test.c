/* SPDX-License-Identifier: Apache-2.0 */
/* The share of a card as one process sees it: limits, figures, refusals, contexts, resizes. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "box.h"
#include "tap.h"

enum { TOTAL_MIB = 81920, CONTEXT_MIB = 418 };

static struct stub_truth *truth;

static void fresh(unsigned cards, uint64_t limit_mib, uint64_t context_mib) {
    uint64_t limits[STUB_DEVICES];
    for (unsigned i = 0; i < STUB_DEVICES; i++) {
        limits[i] = (limit_mib + 1000 * i) * MIB;
    }
    box_make(cards, limits, context_mib * MIB);
    truth = box_truth(cards, TOTAL_MIB * MIB, CONTEXT_MIB * MIB);
}

struct info { size_t free, total; };
static struct info info(const struct api *a) {
    struct info i = {1, 1};
    if (a->cuMemGetInfo_v2(&i.free, &i.total) != CUDA_SUCCESS) {
        i.free = i.total = 3;
    }
    return i;
}

/* Each scenario runs in a process of its own, since a process keeps its slot. */
#define SCENARIO(name) static void name(void)
static int run_scenario(void *scenario) {
    ((void (*)(void))scenario)();
    return 0;
}

SCENARIO(exact_limit) {
    static const uint64_t pods[] = {8000, 16000};
    for (int i = 0; i < 2; i++) {
        uint64_t limit = pods[i];
        fresh(1, limit, CONTEXT_MIB);
        pid_t pid = fork();
        if (pid != 0) {
            int status;
            waitpid(pid, &status, 0);
            check(status == 0, "a share of %d MiB was tried out", (int)limit);
            continue;
        }
        struct api a = api_start("libcuda.so.1");
        struct info first = info(&a);
        size_t device_total = 0;
        a.cuDeviceTotalMem_v2(&device_total, 0);
        check(first.total == limit * MIB && device_total == limit * MIB, "total is the limit, %zu MiB", first.total / MIB);
        check(first.free == (limit - CONTEXT_MIB) * MIB, "the first free figure is the limit less the context, %zu MiB", first.free / MIB);
        CUdeviceptr p = 77;
        uint64_t calls = truth->calls, used = box_used(0);
        check(a.cuMemAlloc_v2(&p, first.free + MIB) == CUDA_ERROR_OUT_OF_MEMORY && p == 77 && truth->calls == calls &&
                  box_used(0) == used && box_pending(0) == 0 && info(&a).free == first.free,
              "one MiB over free is refused with error 2, and nothing else changes");
        check(box_refusals(0) == 1, "and counted");
        check(a.cuMemAlloc_v2(&p, first.free) == CUDA_SUCCESS && p != 77, "exactly free is had");
        check(info(&a).free == 0 && truth->used[0] == limit * MIB, "and then nothing is left");
        CUdeviceptr q = 78;
        check(a.cuMemAlloc_v2(&q, 1) == CUDA_ERROR_OUT_OF_MEMORY && q == 78, "not one byte");
        check(a.cuMemFree_v2(p) == CUDA_SUCCESS && info(&a).free == first.free, "freed, all is back");
        /* In steps of 1000 MiB until refused: what is had is what fits. */
        int had = 0;
        while (had < 100 && a.cuMemAlloc_v2(&q, 1000 * MIB) == CUDA_SUCCESS) {
            had++;
        }
        check(had == (int)((limit - CONTEXT_MIB) / 1000), "%d times 1000 MiB fit", had);
        check(truth->peak[0] <= limit * MIB, "the card never held more than the limit");
        _exit(0);
    }
}

SCENARIO(rounding) {
    fresh(1, 1000, CONTEXT_MIB);
    struct api a = api_start("libcuda.so.1");
    size_t start = info(&a).free;
    CUdeviceptr p[5000], big;
    check(a.cuMemAlloc_v2(&p[0], 1) == CUDA_SUCCESS && start - info(&a).free == 2 * MIB, "the first byte takes a page of 2 MiB");
    for (int i = 1; i < 4096; i++) {
        a.cuMemAlloc_v2(&p[i], 512);
    }
    check(start - info(&a).free == 2 * MIB, "4096 pieces of 512 bytes fit in it");
    check(a.cuMemAlloc_v2(&p[4096], 512) == CUDA_SUCCESS && start - info(&a).free == 4 * MIB, "the next one takes a second page");
    for (int i = 0; i < 4096; i += 2) {
        a.cuMemFree_v2(p[i]);
    }
    check(start - info(&a).free == 4 * MIB, "a page with a piece left in it stays taken");
    for (int i = 1; i < 4096; i += 2) {
        a.cuMemFree_v2(p[i]);
    }
    check(start - info(&a).free == 2 * MIB && truth->used[0] == (CONTEXT_MIB + 2) * MIB, "the last piece gives it back");
    a.cuMemFree_v2(p[4096]);
    check(a.cuMemAlloc_v2(&big, MIB + 1) == CUDA_SUCCESS && start - info(&a).free == 2 * MIB, "above 1 MiB a block has pages of its own");
    a.cuMemFree_v2(big);
    check(info(&a).free == start && truth->used[0] == CONTEXT_MIB * MIB, "all is given back");

    /* At the limit, a piece that has room in a page at hand is not refused; one that needs a page is. */
    check(a.cuMemAlloc_v2(&p[0], 512) == CUDA_SUCCESS && a.cuMemAlloc_v2(&big, info(&a).free) == CUDA_SUCCESS && info(&a).free == 0, "full");
    uint64_t peak = truth->peak[0];
    check(a.cuMemAlloc_v2(&p[1], 512) == CUDA_SUCCESS, "a piece that fits in a page at hand is had though nothing is free");
    int had = 0;
    while (had < 5000 && a.cuMemAlloc_v2(&p[2], 512 * 1024) == CUDA_SUCCESS) {
        had++;
    }
    check(had == 3, "until the page is full (%d more of 512 KiB)", had);
    check(truth->used[0] == 1000 * MIB && truth->peak[0] == peak && box_used(0) == 1000 * MIB, "and the card never holds more than the limit");
}

SCENARIO(pitch_and_managed) {
    fresh(1, 1000, CONTEXT_MIB);
    struct api a = api_start("libcuda.so.1");
    size_t start = info(&a).free, pitch = 0;
    CUdeviceptr p, untouched = 5;
    check(a.cuMemAllocPitch_v2(&p, &pitch, 1000, 10000, 4) == CUDA_SUCCESS && pitch == 1024 && start - info(&a).free == 10 * MIB,
          "pitched memory is charged by its pitch");
    check(a.cuMemFree_v2(p) == CUDA_SUCCESS && info(&a).free == start, "and given back");
    check(a.cuMemAllocPitch_v2(&p, &pitch, 1000, 10000, 16) == CUDA_SUCCESS && pitch == 4096 && start - info(&a).free == 40 * MIB,
          "a pitch that the driver makes wider is charged as it is");
    check(truth->used[0] == (CONTEXT_MIB + 40) * MIB, "as the card has it");
    a.cuMemFree_v2(p);
    /* The guess of 400 MiB fits, the real pitch needs 1600. */
    size_t before = pitch;
    check(a.cuMemAllocPitch_v2(&untouched, &pitch, 1024, 400 * 1024, 16) == CUDA_ERROR_OUT_OF_MEMORY && untouched == 5 && pitch == before,
          "and refused when that doesn't fit");
    check(info(&a).free == start && truth->used[0] == CONTEXT_MIB * MIB, "with nothing left behind");
    check(a.cuMemAllocPitch_v2(&untouched, &pitch, SIZE_MAX, SIZE_MAX, 4) == CUDA_ERROR_INVALID_VALUE && untouched == 5 && pitch == before && info(&a).free == start,
          "sizes that overflow are the driver's to refuse");

    check(a.cuMemAllocManaged(&p, 100 * MIB, CU_MEM_ATTACH_GLOBAL) == CUDA_SUCCESS && start - info(&a).free == 100 * MIB,
          "managed memory is charged in full");
    check(box_usage()->lines[0][0].managed_bytes == 100 * MIB, "and shown as such");
    check(a.cuMemAllocManaged(&untouched, start, CU_MEM_ATTACH_GLOBAL) == CUDA_ERROR_OUT_OF_MEMORY && untouched == 5, "and refused over the limit");
    check(a.cuMemAllocManaged(&untouched, MIB, 0) == CUDA_ERROR_INVALID_VALUE && start - info(&a).free == 100 * MIB, "the driver's own refusal comes through");
    check(a.cuMemFree_v2(p) == CUDA_SUCCESS && info(&a).free == start && box_usage()->lines[0][0].managed_bytes == 0, "and given back");
}

SCENARIO(drivers_answers) {
    fresh(1, 1000, CONTEXT_MIB);
    struct api a = api_load("libcuda.so.1");
    CUdeviceptr p = 5;
    size_t f = 6, t = 7;
    a.cuInit(0);
    check(a.cuMemAlloc_v2(&p, MIB) == CUDA_ERROR_INVALID_CONTEXT && p == 5, "without a context the driver says so");
    check(a.cuMemGetInfo_v2(&f, &t) == CUDA_ERROR_INVALID_CONTEXT && f == 6 && t == 7, "for figures too");
    a = api_start("libcuda.so.1");
    size_t start = info(&a).free;
    check(a.cuMemAlloc_v2(&p, 0) == CUDA_ERROR_INVALID_VALUE && a.cuMemAlloc_v2(NULL, MIB) == CUDA_ERROR_INVALID_VALUE, "nonsense is the driver's to refuse");
    check(a.cuMemFree_v2(0) == CUDA_SUCCESS && a.cuMemFree_v2(12345) == CUDA_ERROR_INVALID_VALUE, "unknown pointers go to the driver");
    check(a.cuMemAlloc_v2(&p, MIB) == CUDA_SUCCESS && a.cuMemFree_v2(p) == CUDA_SUCCESS && a.cuMemFree_v2(p) == CUDA_ERROR_INVALID_VALUE, "a double free is the driver's to refuse");
    check(info(&a).free == start && box_used(0) == CONTEXT_MIB * MIB, "and charges nothing");
    truth->refuse_next = 1;
    p = 5;
    check(a.cuMemAlloc_v2(&p, 100 * MIB) == CUDA_ERROR_OUT_OF_MEMORY && p == 5 && info(&a).free == start, "what the driver refuses isn't charged");
    /* Freed with another context current that the driver doesn't take: it stays charged. */
    check(a.cuMemAlloc_v2(&p, 100 * MIB) == CUDA_SUCCESS, "had");
    CUcontext mine;
    a.cuCtxGetCurrent(&mine);
    a.cuCtxSetCurrent(NULL);
    check(a.cuMemFree_v2(p) == CUDA_ERROR_INVALID_CONTEXT, "a free that the driver refuses");
    a.cuCtxSetCurrent(mine);
    check(start - info(&a).free == 100 * MIB, "leaves the block charged");
    check(a.cuMemFree_v2(p) == CUDA_SUCCESS && info(&a).free == start, "until it is freed");
    unsigned int f32, t32;
    check(a.cuMemGetInfo(&f32, &t32) == CUDA_SUCCESS && t32 == 1000 * MIB && f32 == start, "the old form shows the share too");
}

SCENARIO(contexts) {
    fresh(1, 2000, CONTEXT_MIB);
    struct api a = api_load("libcuda.so.1");
    CUcontext c = NULL, d = NULL, e = (CUcontext)8;
    CUdeviceptr p;
    a.cuInit(0);
    check(a.cuCtxCreate_v2(&c, 0, 0) == CUDA_SUCCESS && box_used(0) == CONTEXT_MIB * MIB, "a context is charged");
    check(box_usage()->lines[0][0].context_bytes == CONTEXT_MIB * MIB, "and shown as such");
    for (int i = 0; i < 3000; i++) {
        if (a.cuMemAlloc_v2(&p, i % 3 == 0 ? 3 * MIB : 100) != CUDA_SUCCESS) {
            break;
        }
    }
    check(a.cuCtxDestroy_v2(c) == CUDA_SUCCESS && box_used(0) == 0 && box_usage()->lines[0][0].allocations == 0,
          "destroyed, it gives back all that was in it");
    check(truth->used[0] == 0 && box_usage()->lines[0][0].context_bytes == 0, "as the driver does");
    check(a.cuCtxDestroy_v2(c) == CUDA_ERROR_INVALID_CONTEXT && box_used(0) == 0, "destroyed twice, nothing more");

    check(a.cuDevicePrimaryCtxRetain(&c, 0) == CUDA_SUCCESS && a.cuDevicePrimaryCtxRetain(&d, 0) == CUDA_SUCCESS && c == d && box_used(0) == CONTEXT_MIB * MIB,
          "the primary context is charged once for all its users");
    a.cuCtxSetCurrent(c);
    check(a.cuMemAlloc_v2(&p, 10 * MIB) == CUDA_SUCCESS && a.cuDevicePrimaryCtxRelease_v2(0) == CUDA_SUCCESS && box_used(0) == (CONTEXT_MIB + 10) * MIB,
          "it stays while one is left");
    check(a.cuDevicePrimaryCtxRelease_v2(0) == CUDA_SUCCESS && box_used(0) == 0, "and goes with the last, with what was in it");
    check(a.cuDevicePrimaryCtxRelease_v2(0) == CUDA_ERROR_INVALID_CONTEXT, "one release too many is the driver's to refuse");
    a.cuDevicePrimaryCtxRetain(&c, 0);
    a.cuCtxSetCurrent(c);
    a.cuMemAlloc_v2(&p, 10 * MIB);
    check(a.cuDevicePrimaryCtxReset_v2(0) == CUDA_SUCCESS && box_used(0) == 0 && truth->used[0] == 0, "a reset gives back all");

    /* Two contexts; what is in one stays when the other goes. */
    check(a.cuCtxCreate_v2(&c, 0, 0) == CUDA_SUCCESS && a.cuMemAlloc_v2(&p, 20 * MIB) == CUDA_SUCCESS && a.cuCtxCreate_v2(&d, 0, 0) == CUDA_SUCCESS &&
              a.cuMemAlloc_v2(&p, 30 * MIB) == CUDA_SUCCESS && box_used(0) == (2 * CONTEXT_MIB + 50) * MIB,
          "two contexts are charged twice");
    check(a.cuCtxDestroy_v2(c) == CUDA_SUCCESS && box_used(0) == (CONTEXT_MIB + 30) * MIB, "and given back one by one");
    a.cuCtxDestroy_v2(d);

    fresh(1, CONTEXT_MIB - 1, CONTEXT_MIB);
    /* This process still has the old files; a new one sees the new. */
    pid_t pid = fork();
    if (pid == 0) {
        a.cuCtxSetCurrent(NULL);
        CUresult result = a.cuCtxCreate_v2(&e, 0, 0);
        _exit(result == CUDA_ERROR_OUT_OF_MEMORY && e == (CUcontext)8 && box_used(0) == 0 ? 0 : 1);
    }
    int status;
    waitpid(pid, &status, 0);
    check(status == 0, "a context that doesn't fit is refused with error 2");
}

SCENARIO(context_cost_is_learnt) {
    fresh(1, 2000, 0);
    struct api a = api_start("libcuda.so.1");
    check(info(&a).free == (2000 - 512) * MIB, "a context of unknown cost is charged by a guess of 512 MiB");
    box_context(0, 300 * MIB);
    check(info(&a).free == 1700 * MIB && box_usage()->lines[0][0].context_bytes == 300 * MIB, "until the agent has learnt what it costs");
    box_context(0, 700 * MIB);
    CUdeviceptr p;
    check(a.cuMemAlloc_v2(&p, 1301 * MIB) == CUDA_ERROR_OUT_OF_MEMORY && a.cuMemAlloc_v2(&p, 1300 * MIB) == CUDA_SUCCESS, "in either direction");
    box_context(0, 702 * MIB);
    check(info(&a).free == 0 && box_used(0) == 2002 * MIB, "also when that is more than fits: it is taken already");
}

SCENARIO(resize) {
    fresh(1, 1000, CONTEXT_MIB);
    struct api a = api_start("libcuda.so.1");
    CUdeviceptr p, q;
    check(a.cuMemAlloc_v2(&p, 500 * MIB) == CUDA_SUCCESS && a.cuMemAlloc_v2(&q, 500 * MIB) == CUDA_ERROR_OUT_OF_MEMORY, "at 1000 MiB a second 500 MiB is refused");
    box_limit(0, 2000 * MIB);
    check(info(&a).total == 2000 * MIB && a.cuMemAlloc_v2(&q, 500 * MIB) == CUDA_SUCCESS, "at 2000 it is had, with no restart");
    box_limit(0, 600 * MIB);
    check(info(&a).total == 600 * MIB && info(&a).free == 0, "below what is used, free is 0 and not less");
    CUdeviceptr r = 5;
    check(a.cuMemAlloc_v2(&r, 1) == CUDA_ERROR_OUT_OF_MEMORY && r == 5, "nothing more is had");
    check(a.cuMemFree_v2(p) == CUDA_SUCCESS && a.cuMemFree_v2(q) == CUDA_SUCCESS && info(&a).free == (600 - CONTEXT_MIB) * MIB, "and what there is can be freed");
    box_residual(0, 50 * MIB);
    check(info(&a).free == (550 - CONTEXT_MIB) * MIB, "what the agent found used beside counts");
    check(a.cuMemAlloc_v2(&p, info(&a).free + MIB) == CUDA_ERROR_OUT_OF_MEMORY && a.cuMemAlloc_v2(&p, info(&a).free) == CUDA_SUCCESS, "for requests too");
    box_residual(0, UINT64_MAX);
    check(info(&a).free == 0 && a.cuMemAlloc_v2(&r, 1) == CUDA_ERROR_OUT_OF_MEMORY, "whatever the figure");
    for (int i = 0; i < 10000; i++) {
        box_limit(0, (600 + i % 7) * MIB);
    }
    check(info(&a).total == (600 + 9999 % 7) * MIB, "after ten thousand resizes the last counts");
}

SCENARIO(cards_by_uuid) {
    fresh(4, 1000, CONTEXT_MIB);
    setenv("CUDA_VISIBLE_DEVICES", "2,0", 1);
    struct api a = api_load("libcuda.so.1");
    int count = 0;
    CUcontext c0, c1;
    size_t total = 0;
    CUdeviceptr p;
    a.cuInit(0);
    a.cuDeviceGetCount(&count);
    check(count == 2 && a.cuDeviceTotalMem_v2(&total, 0) == CUDA_SUCCESS && total == 3000 * MIB, "device 0 of \"2,0\" has the share of card 2");
    check(a.cuDeviceTotalMem_v2(&total, 1) == CUDA_SUCCESS && total == 1000 * MIB, "device 1 that of card 0");
    check(a.cuDeviceTotalMem_v2(&total, 2) == CUDA_ERROR_INVALID_DEVICE, "and there is no device 2");
    a.cuCtxCreate_v2(&c0, 0, 0);
    a.cuCtxCreate_v2(&c1, 0, 1);
    check(info(&a).total == 1000 * MIB && a.cuMemAlloc_v2(&p, 500 * MIB) == CUDA_SUCCESS && a.cuMemAlloc_v2(&p, 500 * MIB) == CUDA_ERROR_OUT_OF_MEMORY,
          "requests go by the card of the current context");
    a.cuCtxSetCurrent(c0);
    check(info(&a).total == 3000 * MIB && a.cuMemAlloc_v2(&p, 2000 * MIB) == CUDA_SUCCESS, "after a switch by the other's");
    check(box_used(0) == (CONTEXT_MIB + 500) * MIB && box_used(1) == 0 && box_used(2) == (CONTEXT_MIB + 2000) * MIB && box_used(3) == 0,
          "and are charged there");
}

SCENARIO(card_without_a_share) {
    fresh(2, 1000, CONTEXT_MIB);
    struct api a = api_load("libcuda.so.1");
    truth->uuid[1][0] ^= 1;
    CUcontext c = NULL;
    size_t total = 9;
    a.cuInit(0);
    check(a.cuCtxCreate_v2(&c, 0, 1) == CUDA_ERROR_OUT_OF_MEMORY && c == NULL, "a card that the limits don't name can't be used");
    check(a.cuDeviceTotalMem_v2(&total, 1) == CUDA_SUCCESS && total == 0, "and shows no memory");
    check(a.cuCtxCreate_v2(&c, 0, 0) == CUDA_SUCCESS, "the other one can");
    /* A context there that came past the front, as green contexts do. */
    void *driver = dlopen(DRIVER_AT, RTLD_NOW | RTLD_NOLOAD);
    CUdeviceptr p = 5;
    check(((__typeof__(cuCtxCreate_v2) *)dlsym(driver, "cuCtxCreate_v2"))(&c, 0, 1) == CUDA_SUCCESS && a.cuMemAlloc_v2(&p, 1) == CUDA_ERROR_OUT_OF_MEMORY && p == 5 && info(&a).total == 0,
          "nothing can be had there, whoever made the context");
    check(((__typeof__(cuCtxCreate_v2) *)dlsym(driver, "cuCtxCreate_v2"))(&c, 0, 0) == CUDA_SUCCESS && a.cuMemAlloc_v2(&p, 100 * MIB) == CUDA_SUCCESS &&
              box_used(0) == (CONTEXT_MIB + 100) * MIB && a.cuMemFree_v2(p) == CUDA_SUCCESS && box_used(0) == CONTEXT_MIB * MIB,
          "in one on a card with a share, memory is charged as ever");
}

static CUresult start_with(void (*damage)(void)) {
    fresh(1, 1000, CONTEXT_MIB);
    damage();
    struct api a = api_load("libcuda.so.1");
    CUcontext c;
    CUdeviceptr p;
    size_t f, t;
    a.cuInit(0);
    CUresult result = a.cuCtxCreate_v2(&c, 0, 0);
    if (result == CUDA_SUCCESS) {
        return CUDA_SUCCESS;
    }
    check(a.cuMemAlloc_v2(&p, 1) == CUDA_ERROR_OUT_OF_MEMORY, "  an allocation too");
    check(a.cuMemGetInfo_v2(&f, &t) == CUDA_ERROR_OPERATING_SYSTEM && a.cuDeviceTotalMem_v2(&t, 0) == CUDA_ERROR_OPERATING_SYSTEM, "  figures are an operating system error");
    check(a.cuMemFree_v2(0) == CUDA_SUCCESS && truth->used[0] == 0, "  what gives back works");
    return result;
}
static void no_limits(void) { unlink(CARVE_LIMITS_PATH); }
static void no_usage(void) { unlink(CARVE_USAGE_PATH); }
static void short_limits(void) { if (truncate(CARVE_LIMITS_PATH, 4095) != 0) _exit(99); }
static void short_usage(void) { if (truncate(CARVE_USAGE_PATH, CARVE_USAGE_SIZE - 1) != 0) _exit(99); }
static void other_abi(void) { box_limits()->abi = 2; }
static void bad_checksum(void) { box_limits()->banks[1].cards[0].limit_bytes++; }
static void bad_generation(void) { box_limits()->generation = 2; }
static void no_cards(void) { box_limits()->banks[1].card_count = 0; }
static void link_usage(void) {
    if (rename(CARVE_USAGE_PATH, CARVE_USAGE_PATH ".real") != 0 || symlink(CARVE_USAGE_PATH ".real", CARVE_USAGE_PATH) != 0) _exit(99);
}
static void usage_header(void) { box_usage()->magic = 0; }
static void nothing(void) {}

struct damage { const char *name; void (*make)(void); };
static const struct damage damages[] = {
    {"no limits file", no_limits}, {"no usage file", no_usage}, {"a truncated limits file", short_limits},
    {"a truncated usage file", short_usage}, {"limits of another version", other_abi}, {"limits with a wrong checksum", bad_checksum},
    {"limits whose generation has no bank", bad_generation}, {"limits without cards", no_cards}, {"a link in the place of usage", link_usage},
    {"a usage file with no header", usage_header},
};
static const struct damage *damage_now;
SCENARIO(closed_without_files) {
    check(start_with(damage_now->make) == CUDA_ERROR_OUT_OF_MEMORY, "with %s a context is refused", damage_now->name);
}
SCENARIO(open_with_files) { check(start_with(nothing) == CUDA_SUCCESS, "with whole files it is had"); }

SCENARIO(limits_damaged_later) {
    fresh(1, 1000, CONTEXT_MIB);
    struct api a = api_start("libcuda.so.1");
    CUdeviceptr p, q = 5;
    size_t f, t;
    a.cuMemAlloc_v2(&p, 10 * MIB);
    box_limits()->generation += 2; /* a bank of another generation is in force now */
    check(a.cuMemAlloc_v2(&q, 10 * MIB) == CUDA_ERROR_OUT_OF_MEMORY && q == 5, "limits that are damaged later refuse what comes");
    check(a.cuMemGetInfo_v2(&f, &t) == CUDA_ERROR_OPERATING_SYSTEM, "give no figures");
    check(a.cuMemFree_v2(p) == CUDA_SUCCESS, "and let free what there is");
    box_limits()->generation -= 2;
    check(a.cuMemAlloc_v2(&q, 10 * MIB) == CUDA_SUCCESS, "mended, they serve again");
}

SCENARIO(pools) {
    fresh(1, CONTEXT_MIB + 100, CONTEXT_MIB);
    struct api a = api_start("libcuda.so.1");
    CUdeviceptr p, q, r = 5;
    check(a.cuMemAllocAsync(&p, 70 * MIB, NULL) == CUDA_SUCCESS && box_used(0) == (CONTEXT_MIB + 96) * MIB, "a pool takes three steps for 70 MiB");
    check(a.cuMemAllocAsync(&q, 20 * MIB, NULL) == CUDA_SUCCESS && box_used(0) == (CONTEXT_MIB + 96) * MIB, "20 more are had of them though nothing else is free");
    a.cuMemFreeAsync(q, NULL);
    truth->capturing = 1;
    check(a.cuMemAllocAsync(&q, 90 * MIB, NULL) == CUDA_SUCCESS && box_used(0) == (CONTEXT_MIB + 96) * MIB && box_pending(0) == 0, "what is captured takes nothing yet, and isn't refused");
    truth->capturing = 0;
    truth->in_holes = 1;
    check(a.cuMemAllocAsync(&r, 20 * MIB, NULL) == CUDA_ERROR_OUT_OF_MEMORY && r == 5, "where the pool grew for want of a hole, though it can't, it is refused");
    check(box_used(0) == (CONTEXT_MIB + 96) * MIB && truth->used[0] == box_used(0) && box_pending(0) == 0, "and what it grew by is given back");
    truth->refuse_next = 1;
    check(a.cuMemAllocAsync(&r, 90 * MIB, NULL) == CUDA_ERROR_OUT_OF_MEMORY && box_used(0) == truth->used[0] && box_pending(0) == 0, "nor is anything left of what the driver refuses");
    truth->refuse_next = 0;
    box_limits()->generation += 2;
    check(a.cuMemAllocAsync(&r, MIB, NULL) == CUDA_ERROR_OUT_OF_MEMORY && r == 5, "without limits nothing is had, though the pool has it");
    check(a.cuMemFreeAsync(p, NULL) == CUDA_SUCCESS && a.cuStreamSynchronize(NULL) == CUDA_SUCCESS, "what there is can be freed");
    box_limits()->generation -= 2;
    check(a.cuMemFreeAsync(q, NULL) == CUDA_SUCCESS && a.cuStreamSynchronize(NULL) == CUDA_SUCCESS && box_used(0) == truth->used[0], "and ledger and card agree");
    /* A child starts anew, pools and all. */
    check(a.cuMemAllocAsync(&p, 32 * MIB, NULL) == CUDA_SUCCESS, "a pool is in use");
    uint64_t before = box_used(0);
    pid_t pid = fork();
    if (pid == 0) {
        a.cuStreamSynchronize(NULL);
        _exit(box_used(0) == before ? 0 : 1);
    }
    int status = -1;
    check(waitpid(pid, &status, 0) == pid && status == 0, "a forked child has no part in it");
}

SCENARIO(managed_by_policy) {
    fresh(1, 1000, CONTEXT_MIB);
    struct api a = api_start("libcuda.so.1");
    struct carve_usage_line *line = &box_usage()->lines[0][0];
    CUdeviceptr p, q = 5;
    uint64_t bare = box_used(0);
    box_card_flags(0, CARVE_CARD_MANAGED_FORBID | CARVE_CARD_MANAGED_COUNT);
    check(a.cuMemAllocManaged(&q, MIB, 1) == CUDA_ERROR_NOT_SUPPORTED && q == 5, "where it is forbidden there is no managed memory");
    box_card_flags(0, CARVE_CARD_MANAGED_COUNT);
    check(a.cuMemAllocManaged(&p, 5000 * MIB, 1) == CUDA_SUCCESS && box_used(0) == bare && line->uncharged_bytes == 5000 * MIB && line->managed_bytes == 0, "where it is counted it may be larger than the share, and shows");
    check(a.cuMemFree_v2(p) == CUDA_SUCCESS && box_used(0) == bare && line->uncharged_bytes == 0 && line->allocations == 0, "until it is freed");
    check(a.cuMemAlloc_v2(&q, 5000 * MIB) == CUDA_ERROR_OUT_OF_MEMORY && q == 5, "other memory is refused as ever");
    uint64_t refusals = line->refusals;
    box_card_flags(0, CARVE_CARD_OVERSELL);
    check(a.cuMemAlloc_v2(&p, 100 * MIB) == CUDA_SUCCESS && box_used(0) == bare + 100 * MIB && line->uncharged_bytes == 0, "in a share that may be oversold, what fits is charged");
    check(a.cuMemAlloc_v2(&q, 5000 * MIB) == CUDA_SUCCESS && box_used(0) == bare + 100 * MIB && line->uncharged_bytes == 5000 * MIB && truth->used[0] == box_used(0), "and what doesn't is managed memory, which shows");
    check(line->refusals == refusals, "which is no refusal");
    check(a.cuMemFree_v2(q) == CUDA_SUCCESS && a.cuMemFree_v2(p) == CUDA_SUCCESS && box_used(0) == bare && line->uncharged_bytes == 0, "freed, all is back");
    check(a.cuMemAlloc_v2(&p, info(&a).free) == CUDA_SUCCESS && a.cuMemAlloc_v2(&q, 1) == CUDA_SUCCESS && line->uncharged_bytes == 2 * MIB, "so it is with a byte beyond a full share");
    a.cuMemFree_v2(q);
    box_limits()->generation += 2;
    q = 5;
    check(a.cuMemAlloc_v2(&q, MIB) == CUDA_ERROR_OUT_OF_MEMORY && q == 5, "without limits nothing is oversold");
    box_limits()->generation -= 2;
    CUcontext c;
    a.cuCtxGetCurrent(&c);
    check(a.cuMemAlloc_v2(&q, 500 * MIB) == CUDA_SUCCESS && a.cuCtxDestroy_v2(c) == CUDA_SUCCESS && box_used(0) == 0 && line->uncharged_bytes == 0, "it goes with its context");
}

SCENARIO(uses_of_contexts) {
    fresh(1, 1000, CONTEXT_MIB);
    struct api a = api_start("libcuda.so.1");
    CUcontext first, again;
    CUdeviceptr p;
    CUgreenCtx green = NULL, other = NULL;
    a.cuCtxGetCurrent(&first);
    __typeof__(cuCtxDetach) *detach = (__typeof__(cuCtxDetach) *)dlsym(a.handle, "cuCtxDetach");
    check(((__typeof__(cuCtxAttach) *)dlsym(a.handle, "cuCtxAttach"))(&again, 0) == CUDA_SUCCESS && again == first && a.cuMemAlloc_v2(&p, 10 * MIB) == CUDA_SUCCESS, "a context is used once more");
    check(detach(first) == CUDA_SUCCESS && box_used(0) == (CONTEXT_MIB + 10) * MIB, "detached once, it stays");
    check(detach(first) == CUDA_SUCCESS && box_used(0) == 0 && truth->used[0] == 0, "detached from its last use, it is gone, and what was in it");
    check(detach(first) == CUDA_ERROR_INVALID_CONTEXT && box_used(0) == 0, "which can't be twice");
    __typeof__(cuGreenCtxCreate) *create = (__typeof__(cuGreenCtxCreate) *)dlsym(a.handle, "cuGreenCtxCreate");
    __typeof__(cuGreenCtxDestroy) *destroy = (__typeof__(cuGreenCtxDestroy) *)dlsym(a.handle, "cuGreenCtxDestroy");
    __typeof__(cuCtxFromGreenCtx) *name = (__typeof__(cuCtxFromGreenCtx) *)dlsym(a.handle, "cuCtxFromGreenCtx");
    check(create(&green, NULL, 0, 0) == CUDA_SUCCESS && box_used(0) == CONTEXT_MIB * MIB && create(&other, NULL, 0, 0) == CUDA_SUCCESS && box_used(0) == CONTEXT_MIB * MIB, "green contexts are charged as the primary one, once");
    check(name(&again, green) == CUDA_SUCCESS && a.cuCtxSetCurrent(again) == CUDA_SUCCESS && a.cuMemAlloc_v2(&p, 10 * MIB) == CUDA_SUCCESS && info(&a).free == (1000 - CONTEXT_MIB - 10) * MIB, "in one of them memory is charged as ever");
    check(a.cuMemAlloc_v2(&p, 1000 * MIB) == CUDA_ERROR_OUT_OF_MEMORY, "and refused");
    check(destroy(green) == CUDA_SUCCESS && box_used(0) == (CONTEXT_MIB + 10) * MIB, "it goes, and the primary one stays with what was allocated");
    check(destroy(other) == CUDA_SUCCESS && box_used(0) == 0 && truth->used[0] == 0, "the last one takes it all along");
}

/* A driver that can't be asked for the sizes of arrays. */
SCENARIO(arrays) {
    fresh(1, CONTEXT_MIB + 100, CONTEXT_MIB);
    struct api a = api_start("libcuda.so.1");
    __typeof__(cuArray3DCreate_v2) *create = (__typeof__(cuArray3DCreate_v2) *)dlsym(a.handle, "cuArray3DCreate_v2");
    __typeof__(cuArrayDestroy) *destroy = (__typeof__(cuArrayDestroy) *)dlsym(a.handle, "cuArrayDestroy");
    CUDA_ARRAY3D_DESCRIPTOR big = {.Width = 4096, .Height = 1024, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 4}, small = {.Width = 64, .Height = 64, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 1};
    CUarray p, q = (CUarray)5, few[40];
    check(create(&p, &big) == CUDA_SUCCESS && box_used(0) == (CONTEXT_MIB + 64) * MIB && truth->used[0] == box_used(0), "an array of 4096 x 1024 x 4 floats takes 64 MiB");
    check(create(&q, &big) == CUDA_ERROR_OUT_OF_MEMORY && q == (CUarray)5 && truth->used[0] == (CONTEXT_MIB + 64) * MIB, "a second one is refused");
    check(destroy(p) == CUDA_SUCCESS && box_used(0) == CONTEXT_MIB * MIB, "destroyed, it is back");
    for (int i = 0; i < 40; i++) {
        create(&few[i], &small);
    }
    check(box_used(0) == (CONTEXT_MIB + 4) * MIB, "40 small ones of 64 KiB take two pages");
    for (int i = 0; i < 40; i++) {
        destroy(few[i]);
    }
    check(box_used(0) == CONTEXT_MIB * MIB && box_usage()->lines[0][0].allocations == 0, "which go with the last of them");
    truth->refuse_next = 1;
    check(create(&p, &big) == CUDA_ERROR_OUT_OF_MEMORY && box_used(0) == CONTEXT_MIB * MIB, "what the driver refuses isn't charged");
    big.Flags = CUDA_ARRAY3D_SPARSE;
    check(create(&p, &big) == CUDA_ERROR_INVALID_VALUE && destroy(NULL) == CUDA_ERROR_INVALID_HANDLE && create(NULL, &big) == CUDA_ERROR_INVALID_VALUE, "nonsense is the driver's to refuse");
}

static struct api shared_api;
static void *stress(void *argument) {
    CUcontext ctx = argument;
    unsigned seed = (unsigned)(uintptr_t)&ctx;
    CUdeviceptr p[64] = {0};
    shared_api.cuCtxSetCurrent(ctx);
    for (int i = 0; i < 20000; i++) {
        int at = (int)(rand_r(&seed) % 64);
        if (p[at] != 0) {
            shared_api.cuMemFree_v2(p[at]);
            p[at] = 0;
        } else if (shared_api.cuMemAlloc_v2(&p[at], 1 + (unsigned)rand_r(&seed) % (rand_r(&seed) % 3 == 0 ? 8u << 20 : 4000u)) != CUDA_SUCCESS) {
            p[at] = 0;
        }
    }
    for (int i = 0; i < 64; i++) {
        if (p[i] != 0) {
            shared_api.cuMemFree_v2(p[i]);
        }
    }
    return NULL;
}

SCENARIO(threads) {
    fresh(1, CONTEXT_MIB + 120, CONTEXT_MIB);
    shared_api = api_start("libcuda.so.1");
    CUcontext ctx;
    pthread_t t[8];
    shared_api.cuCtxGetCurrent(&ctx);
    for (int i = 0; i < 8; i++) {
        pthread_create(&t[i], NULL, stress, ctx);
    }
    for (int i = 0; i < 8; i++) {
        pthread_join(t[i], NULL);
    }
    check(box_used(0) == CONTEXT_MIB * MIB && box_pending(0) == 0 && truth->used[0] == CONTEXT_MIB * MIB, "eight threads leave nothing behind");
    check(box_usage()->lines[0][0].allocations == 0, "and no block");
    check(truth->peak[0] <= (CONTEXT_MIB + 120) * MIB && truth->peak[0] > (CONTEXT_MIB + 100) * MIB, "and the card never held more than the limit (%d MiB)", (int)(truth->peak[0] / MIB));
}

/* ---- processes ---- */

static int child_status(pid_t pid) {
    int status = -1;
    waitpid(pid, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 100 + WTERMSIG(status);
}

SCENARIO(forked_children) {
    fresh(1, 1000, CONTEXT_MIB);
    struct api a = api_start("libcuda.so.1");
    CUdeviceptr p, q;
    a.cuMemAlloc_v2(&p, 100 * MIB);
    for (int raw = 0; raw < 2; raw++) {
        uint64_t before = box_used(0);
        pid_t pid = raw ? (pid_t)syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0) : fork();
        if (pid == 0) {
            /* It neither gives back what its parent has nor inherits it. */
            int good = a.cuMemFree_v2(p) == CUDA_SUCCESS && box_used(0) == before && a.cuMemAlloc_v2(&q, 50 * MIB) == CUDA_SUCCESS &&
                       box_used(0) == before + 50 * MIB && box_slot_of((pid_t)syscall(SYS_getpid)) == 1 + raw;
            _exit(good ? 0 : 1);
        }
        check(child_status(pid) == 0, "a child made by %s is a process of its own", raw ? "raw clone" : "fork");
    }
    check(info(&a).free == (1000 - CONTEXT_MIB - 100 - 100) * MIB, "what it had stays charged until the agent has seen it dead");
    CUdeviceptr r = 5;
    check(a.cuMemAlloc_v2(&r, 450 * MIB) == CUDA_ERROR_OUT_OF_MEMORY && r == 5, "a request that needs it is refused");
    check(CARVE_STATE(box_usage()->processes[1].state_pid) == CARVE_SLOT_DYING, "and marks the slot");
    box_reclaim(1);
    box_reclaim(2);
    check(a.cuMemAlloc_v2(&r, 450 * MIB) == CUDA_SUCCESS, "reclaimed, it is had");
}

SCENARIO(waits_for_the_agent) {
    fresh(1, 1000, CONTEXT_MIB);
    pid_t dead = fork();
    if (dead == 0) {
        struct api b = api_start("libcuda.so.1");
        CUdeviceptr p;
        _exit(b.cuMemAlloc_v2(&p, 100 * MIB));
    }
    check(child_status(dead) == 0, "a process dies with a context and memory");
    pid_t agent = fork();
    if (agent == 0) {
        usleep(200000);
        box_reclaim(0);
        _exit(0);
    }
    struct api a = api_start("libcuda.so.1");
    CUdeviceptr p;
    check(a.cuMemAlloc_v2(&p, 500 * MIB) == CUDA_SUCCESS, "its successor gets the room once the agent has reclaimed it, without an error in between");
    child_status(agent);
}

static void *holds_on(void *unused) {
    (void)unused;
    struct api a = api_start("libcuda.so.1");
    CUdeviceptr p;
    if (a.cuMemAlloc_v2(&p, 500 * MIB) != CUDA_SUCCESS) {
        _exit(1);
    }
    for (;;) {
        pause();
    }
    return NULL;
}

/* Neither a process whose first thread has left, nor one that is stopped, is gone; a zombie is. */
SCENARIO(who_is_gone) {
    fresh(1, 1000, CONTEXT_MIB / 4);
    truth->context_bytes = CONTEXT_MIB / 4 * MIB;
    pid_t pid = fork();
    if (pid == 0) {
        pthread_t t;
        pthread_create(&t, NULL, holds_on, NULL);
        pthread_exit(NULL);
    }
    while (truth->used[0] < 600 * MIB) {
        usleep(1000);
    }
    struct api a = api_start("libcuda.so.1");
    CUdeviceptr p;
    check(a.cuMemAlloc_v2(&p, 400 * MIB) == CUDA_ERROR_OUT_OF_MEMORY && CARVE_STATE(box_usage()->processes[0].state_pid) == CARVE_SLOT_LIVE,
          "a process goes on without its first thread, and is not taken for dead");
    kill(pid, SIGSTOP);
    check(a.cuMemAlloc_v2(&p, 400 * MIB) == CUDA_ERROR_OUT_OF_MEMORY && CARVE_STATE(box_usage()->processes[0].state_pid) == CARVE_SLOT_LIVE, "nor is it when stopped");
    kill(pid, SIGKILL);
    siginfo_t dead;
    waitid(P_PID, (id_t)pid, &dead, WEXITED | WNOWAIT);
    check(a.cuMemAlloc_v2(&p, 400 * MIB) == CUDA_ERROR_OUT_OF_MEMORY && CARVE_STATE(box_usage()->processes[0].state_pid) == CARVE_SLOT_DYING,
          "killed, it is, though its parent hasn't looked yet");
    waitpid(pid, NULL, 0);
}

SCENARIO(exec_leaves_its_charge) {
    fresh(1, 2000, CONTEXT_MIB);
    pid_t pid = fork();
    if (pid == 0) {
        struct api a = api_start("libcuda.so.1");
        (void)a;
        execl("/proc/self/exe", "share_test", "after-exec", (char *)NULL);
        _exit(98);
    }
    check(child_status(pid) == 0, "a program that follows by exec takes a slot of its own");
    check(CARVE_STATE(box_usage()->processes[0].state_pid) == CARVE_SLOT_DYING, "and marks the one of the program before");
    check(box_used(0) == 2 * CONTEXT_MIB * MIB, "which stays charged");
}

SCENARIO(slots_run_out) {
    fresh(1, 100000, 1);
    truth->context_bytes = MIB;
    for (unsigned i = 0; i < CARVE_MAX_SLOTS; i++) {
        box_usage()->processes[i].state_pid = CARVE_STATE_PID(CARVE_SLOT_LIVE, 1);
        box_usage()->lines[0][i].charge = CARVE_CHARGE(1, 0);
    }
    box_usage()->high_water = CARVE_MAX_SLOTS;
    struct api a = api_load("libcuda.so.1");
    CUcontext c = NULL;
    a.cuInit(0);
    check(a.cuCtxCreate_v2(&c, 0, 0) == CUDA_ERROR_OUT_OF_MEMORY, "with all slots taken a process is refused");
    box_usage()->processes[700].state_pid = CARVE_STATE_PID(CARVE_SLOT_DEAD, 1);
    check(a.cuCtxCreate_v2(&c, 0, 0) == CUDA_ERROR_OUT_OF_MEMORY, "also with a dead one that is charged still");
    box_usage()->lines[0][700].charge = 0;
    check(a.cuCtxCreate_v2(&c, 0, 0) == CUDA_SUCCESS && box_slot_of(getpid()) == 700, "once that is reclaimed, it gets in");
}

int main(int argc, char **argv) {
    if (argc > 1 && strcmp(argv[1], "after-exec") == 0) {
        struct api a = api_start("libcuda.so.1");
        return a.handle == NULL;
    }
    static const struct { const char *name; void (*run)(void); } scenarios[] = {
        {"exact limit", exact_limit}, {"rounding", rounding}, {"pitch and managed", pitch_and_managed},
        {"the driver's answers", drivers_answers}, {"contexts", contexts}, {"context cost is learnt", context_cost_is_learnt},
        {"resize", resize}, {"cards by UUID", cards_by_uuid}, {"a card without a share", card_without_a_share},
        {"limits damaged later", limits_damaged_later}, {"managed by policy", managed_by_policy}, {"uses of contexts", uses_of_contexts}, {"pools", pools}, {"arrays", arrays}, {"threads", threads}, {"forked children", forked_children},
        {"waits for the agent", waits_for_the_agent}, {"who is gone", who_is_gone}, {"exec leaves its charge", exec_leaves_its_charge}, {"slots run out", slots_run_out},
        {"open with files", open_with_files},
    };
    for (size_t i = 0; i < sizeof scenarios / sizeof scenarios[0]; i++) {
        if (argc > 1 && strcmp(argv[1], scenarios[i].name) != 0) {
            continue;
        }
        printf("# %s\n", scenarios[i].name);
        check(in_child(run_scenario, (void *)scenarios[i].run) == 0, "%s: ran to its end", scenarios[i].name);
    }
    for (size_t i = 0; argc == 1 && i < sizeof damages / sizeof damages[0]; i++) {
        damage_now = &damages[i];
        printf("# closed with %s\n", damages[i].name);
        check(in_child(run_scenario, (void *)closed_without_files) == 0, "closed with %s: ran to its end", damages[i].name);
    }
    return tap_done();
}
