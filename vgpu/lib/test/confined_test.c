/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Programs that have next to nothing: that shut themselves in once they have started the driver, and threads with the
 * least stack that there is. Over the stub driver, which keeps the books.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
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

/* What needs a file is opened by cuInit: a program may shut itself in before its first context, and has all that it
 * would have bare. */
static void in_an_empty_root(void) {
    if (mkdir("/tmp/carve-empty-root", 0755) != 0 && errno != EEXIST) {
        exit(2);
    }
    check(chroot("/tmp/carve-empty-root") == 0 && chdir("/") == 0, "in an empty root");
}

static void without_descriptors(void) {
    const struct rlimit none = {0, 0};
    check(setrlimit(RLIMIT_NOFILE, &none) == 0, "without descriptors");
}

/* Calls by which files are found out about fail; the program's own output goes on. */
static void by_a_filter(void) {
    static const int denied[] = {SYS_openat, SYS_readlinkat, SYS_pread64, SYS_statx, SYS_newfstatat,
#ifdef SYS_open
                                 SYS_open, SYS_readlink, SYS_stat,
#endif
    };
    enum { COUNT = sizeof denied / sizeof denied[0] };
    struct sock_filter filter[COUNT + 3];
    unsigned n = 0;
    filter[n++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
    for (unsigned i = 0; i < COUNT; i++, n++) {
        filter[n] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (unsigned)denied[i], (unsigned char)(COUNT - i), 0);
    }
    filter[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    filter[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS);
    struct sock_fprog program = {(unsigned short)n, filter};
    check(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0, "killed by any call that opens or looks up a file");
}

static void shut_in(void (*shut)(void), uint32_t flags) {
    fresh(1000);
    box_flags(flags);
    uint64_t start = 0;
    CUcontext c, primary;
    CUdeviceptr p;
    size_t free_bytes, total;
    struct api a = api_load("libcuda.so.1");
    check(a.cuInit(0) == CUDA_SUCCESS && box_slot_of(getpid()) < 0 && box_usage()->high_water == 0, "cuInit takes no slot");
    shut();
    CUresult made = a.cuCtxCreate_v2(&c, 0, 0), retained = a.cuDevicePrimaryCtxRetain(&primary, 0), had = a.cuMemAlloc_v2(&p, 100 * MIB), told = a.cuMemGetInfo_v2(&free_bytes, &total);
    check(made == CUDA_SUCCESS && retained == CUDA_SUCCESS && had == CUDA_SUCCESS && told == CUDA_SUCCESS, "it has its contexts (%d, %d), its memory (%d) and the figures (%d)", made, retained, had, told);
    int slot = box_slot_of(getpid());
    start = slot < 0 ? 0 : box_usage()->processes[slot].start_ticks;
    check(total == 1000 * MIB && slot >= 0 && start != 0 && box_usage()->processes[slot].pid_namespace != 0 && box_used(0) >= truth->used[0],
          "and is charged (%zu MiB of %zu on the card), under a name by which others know it (slot %d)", box_used(0) / MIB, truth->used[0] / MIB, slot);
    check(a.cuMemAlloc_v2(&p, 1000 * MIB) == CUDA_ERROR_OUT_OF_MEMORY && a.cuMemAlloc_v2(&p, free_bytes) == CUDA_SUCCESS, "up to its limit");
}

static void shut_in_by_chroot(void) { shut_in(in_an_empty_root, 0); }
static void shut_in_by_descriptors(void) { shut_in(without_descriptors, CARVE_LIMITS_SELF_VISIBLE); }
#ifdef UNDER_SANITIZER /* which looks at files itself */
static void shut_in_by_filter(void) { (void)by_a_filter; }
#else
static void shut_in_by_filter(void) { shut_in(by_a_filter, 0); }
#endif

/* A thread with the least stack that there is. */
static CUresult small_result[6];
static void *with_small_stack(void *argument) {
    const struct api *a = argument;
    CUcontext c;
    CUdeviceptr p;
    size_t free_bytes, total;
    small_result[0] = a->cuInit(0);
    small_result[1] = a->cuDevicePrimaryCtxRetain(&c, 0);
    small_result[2] = a->cuCtxSetCurrent(c);
    small_result[3] = a->cuMemAlloc_v2(&p, 4096);
    small_result[4] = a->cuMemGetInfo_v2(&free_bytes, &total);
    small_result[5] = a->cuDevicePrimaryCtxRelease_v2(0);
    return NULL;
}

__attribute__((unused)) static void small_stacks(void) {
    fresh(1000);
    box_flags(CARVE_LIMITS_SELF_VISIBLE);
    pthread_attr_t attributes;
    pthread_t thread;
    struct api a = api_load("libcuda.so.1");
    pthread_attr_init(&attributes);
    check(pthread_attr_setstacksize(&attributes, 16384) == 0 && pthread_create(&thread, &attributes, with_small_stack, &a) == 0 && pthread_join(thread, NULL) == 0, "a thread with a stack of 16 KiB");
    int good = 0;
    for (int i = 0; i < 6; i++) {
        good += small_result[i] == CUDA_SUCCESS;
    }
    check(good == 6, "starts the driver, has a context and memory and lets go of them (%d of 6)", good);
}

static int run(void *scenario) {
    ((void (*)(void))scenario)();
    return 0;
}

int main(void) {
    static const struct { const char *name; void (*run)(void); } scenarios[] = {
        {"shut in by chroot", shut_in_by_chroot}, {"shut in without descriptors", shut_in_by_descriptors}, {"shut in by a filter", shut_in_by_filter},
#ifndef UNDER_SANITIZER /* whose frames are larger */
        {"small stacks", small_stacks},
#endif
    };
    for (size_t i = 0; i < sizeof scenarios / sizeof scenarios[0]; i++) {
        printf("# %s\n", scenarios[i].name);
        check(in_child(run, (void *)scenarios[i].run) == 0, "%s: ran to its end", scenarios[i].name);
    }
    return tap_done();
}
