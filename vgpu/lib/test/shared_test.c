/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory that processes share, over the software GPU: whoever made it is charged, whoever opens it lists it. One
 * process makes memory of each kind and hands it to another, which is a program of its own.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sys/wait.h>

#include "soft_box.h"
#include "tap.h"

#define CALL(name) ((__typeof__(name) *)dlsym(a.handle, #name))

enum { LINEAR_MIB = 100, MAPPED_MIB = 40, POOL_MIB = 50 };

/* What goes through the pipe; descriptors are inherited. */
struct parcel {
    CUipcMemHandle linear;
    CUmemPoolPtrExportData pointer;
    int mapped, external, pool;
};

static struct api a;

static const struct carve_usage_line *own_line(void) {
    int slot = box_slot_of(getpid());
    return slot < 0 ? NULL : &box_usage()->lines[0][slot];
}

static uint64_t own_used(void) { return (uint64_t)CARVE_CHARGE_USED(own_line()->charge) << CARVE_UNIT_SHIFT; }

static int open_all(int from, int to) {
    struct parcel in;
    CUcontext context;
    CUdeviceptr p, again, space;
    CUmemGenericAllocationHandle handle;
    CUmemoryPool pool;
    CUexternalMemory external;
    char byte = 0;
    a = api_load("libcuda.so.1");
    if (read(from, &in, sizeof in) != sizeof in || a.cuInit(0) != CUDA_SUCCESS || a.cuCtxCreate_v2(&context, 0, 0) != CUDA_SUCCESS) {
        return 1;
    }
    find_truth(&a);
    box_remap();
    const struct carve_usage_line *line = own_line();
    uint64_t bare = truth(0, getpid());
    check(own_used() == bare && line->imported_bytes == 0, "another process has a context and no more");
    check(CALL(cuIpcOpenMemHandle_v2)(&p, in.linear, 1) == CUDA_SUCCESS && line->imported_bytes == LINEAR_MIB * MIB && own_used() == bare && truth(0, getpid()) == bare, "memory that it opens by an IPC handle is listed and not charged");
    check(CALL(cuIpcOpenMemHandle_v2)(&again, in.linear, 1) == CUDA_SUCCESS && again == p && line->imported_bytes == LINEAR_MIB * MIB, "opened again, it is listed once");
    check(CALL(cuIpcCloseMemHandle)(p) == CUDA_SUCCESS && line->imported_bytes == LINEAR_MIB * MIB && CALL(cuIpcCloseMemHandle)(p) == CUDA_SUCCESS && line->imported_bytes == 0, "until it is closed as often");
    check(CALL(cuIpcCloseMemHandle)(p) != CUDA_SUCCESS && a.cuMemFree_v2(p) != CUDA_SUCCESS && line->imported_bytes == 0, "closed, it is nothing any more");
    check(CALL(cuMemImportFromShareableHandle)(&handle, (void *)(uintptr_t)in.mapped, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) == CUDA_SUCCESS &&
              CALL(cuMemAddressReserve)(&space, MAPPED_MIB * MIB, 0, 0, 0) == CUDA_SUCCESS && CALL(cuMemMap)(space, MAPPED_MIB * MIB, 0, handle, 0) == CUDA_SUCCESS &&
              line->imported_bytes == MAPPED_MIB * MIB && own_used() == bare && truth(0, getpid()) == bare,
          "so is what it maps of a shareable handle");
    check(CALL(cuMemRelease)(handle) == CUDA_SUCCESS && line->imported_bytes == MAPPED_MIB * MIB && CALL(cuMemUnmap)(space, MAPPED_MIB * MIB) == CUDA_SUCCESS && line->imported_bytes == 0 && line->allocations == 0, "until it is unmapped");
    check(CALL(cuMemPoolImportFromShareableHandle)(&pool, (void *)(uintptr_t)in.pool, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0) == CUDA_SUCCESS &&
              CALL(cuMemPoolImportPointer)(&p, pool, &in.pointer) == CUDA_SUCCESS && line->imported_bytes == POOL_MIB * MIB && own_used() == bare,
          "and a pointer of a shared pool");
    check(CALL(cuMemFreeAsync)(p, NULL) == CUDA_SUCCESS && CALL(cuCtxSynchronize)() == CUDA_SUCCESS && line->imported_bytes == 0 && own_used() == bare, "until it is freed");
    CUDA_EXTERNAL_MEMORY_HANDLE_DESC description = {.type = CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD, .handle.fd = in.external, .size = MAPPED_MIB * MIB};
    check(CALL(cuImportExternalMemory)(&external, &description) == CUDA_SUCCESS && line->imported_bytes == MAPPED_MIB * MIB && own_used() == bare, "and external memory");
    check(CALL(cuDestroyExternalMemory)(external) == CUDA_SUCCESS && line->imported_bytes == 0, "until that is destroyed");
    check(CALL(cuIpcOpenMemHandle_v2)(&p, in.linear, 1) == CUDA_SUCCESS && a.cuCtxDestroy_v2(context) == CUDA_SUCCESS && line->imported_bytes == 0 && own_used() == 0, "what is open goes with its context");
    return write(to, &byte, 1) != 1;
}

static int inheritable(int fd) {
    fcntl(fd, F_SETFD, 0);
    return fd;
}

static void share(void) {
    struct parcel out;
    CUcontext context;
    CUdeviceptr linear, pooled;
    CUmemGenericAllocationHandle handle;
    CUmemoryPool pool;
    CUmemAllocationProp property = {.type = CU_MEM_ALLOCATION_TYPE_PINNED, .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
    CUmemPoolProps properties = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED, .handleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
    int there[2], back[2], status;
    char byte;
    a = start(3000, 3000, CARVE_LIMITS_SELF_VISIBLE);
    a.cuCtxCreate_v2(&context, 0, 0);
    uint64_t bare = truth(0, getpid());
    check(a.cuMemAlloc_v2(&linear, LINEAR_MIB * MIB) == CUDA_SUCCESS && CALL(cuIpcGetMemHandle)(&out.linear, linear) == CUDA_SUCCESS &&
              CALL(cuMemCreate)(&handle, MAPPED_MIB * MIB, &property, 0) == CUDA_SUCCESS &&
              CALL(cuMemExportToShareableHandle)(&out.mapped, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0) == CUDA_SUCCESS &&
              CALL(cuMemExportToShareableHandle)(&out.external, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0) == CUDA_SUCCESS &&
              CALL(cuMemPoolCreate)(&pool, &properties) == CUDA_SUCCESS && CALL(cuMemAllocFromPoolAsync)(&pooled, POOL_MIB * MIB, pool, NULL) == CUDA_SUCCESS &&
              CALL(cuMemPoolExportToShareableHandle)(&out.pool, pool, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0) == CUDA_SUCCESS &&
              CALL(cuMemPoolExportPointer)(&out.pointer, pooled) == CUDA_SUCCESS,
          "a process makes memory of each kind to be shared");
    check(box_used(0) == truth(0, getpid()) && box_used(0) >= bare + (LINEAR_MIB + MAPPED_MIB + POOL_MIB) * MIB, "and is charged");
    uint64_t all = box_used(0);
    if (pipe(there) != 0 || pipe(back) != 0) {
        exit(2);
    }
    inheritable(out.mapped), inheritable(out.external), inheritable(out.pool);
    pid_t pid = fork();
    if (pid == 0) {
        char from[16], to[16];
        snprintf(from, sizeof from, "%d", there[0]);
        snprintf(to, sizeof to, "%d", back[1]);
        execl("/proc/self/exe", "shared_test", "open", from, to, (char *)NULL);
        _exit(98);
    }
    close(back[1]);
    if (write(there[1], &out, sizeof out) != sizeof out) {
        exit(2);
    }
    check(read(back[0], &byte, 1) == 1 && waitpid(pid, &status, 0) == pid && status == 0, "the other process opened all of it");
    check(truth(0, getpid()) == all && own_used() == all, "meanwhile nothing changed for its maker");
    close(out.mapped), close(out.external), close(out.pool);
    check(a.cuMemFree_v2(linear) == CUDA_SUCCESS && CALL(cuMemRelease)(handle) == CUDA_SUCCESS && CALL(cuMemFreeAsync)(pooled, NULL) == CUDA_SUCCESS && CALL(cuMemPoolDestroy)(pool) == CUDA_SUCCESS, "it gives all of it back");
    CALL(cuCtxSynchronize)();
    check(own_used() == bare && truth(0, getpid()) == bare, "and is charged for its context alone (%zu, %zu)", own_used(), truth(0, getpid()));
}

static uint64_t on_card(void) {
    nvmlMemory_v2_t m = {.version = NVML_MEMORY_V2_VERSION};
    return REAL(nvmlDeviceGetMemoryInfo_v2)(real_cards[0], &m) == NVML_SUCCESS ? m.used : UINT64_MAX;
}

/* Closed descriptors are noticed when somebody looks, within moments. */
static bool card_has(uint64_t bytes) {
    for (int i = 0; i < 10000 && on_card() != bytes; i++) {
        usleep(1000);
    }
    return on_card() == bytes;
}

/* Memory of which nothing but descriptors is left, or that comes back by one. */
static void descriptors(void) {
    CUcontext context;
    CUmemGenericAllocationHandle handle[4] = {0}, again = 0, q = 7;
    CUdeviceptr space = 0, p = 0;
    int fd[4] = {-1, -1, -1, -1};
    CUmemAllocationProp property = {.type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}, .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR};
    a = start(1300, 1300, CARVE_LIMITS_SELF_VISIBLE);
    check(card_has(0) && a.cuCtxCreate_v2(&context, 0, 0) == CUDA_SUCCESS, "a context is all that a card has");
    uint64_t bare = box_used(0);
    for (int i = 0; i < 2; i++) {
        check(CALL(cuMemCreate)(&handle[i], 400 * MIB, &property, 0) == CUDA_SUCCESS && CALL(cuMemExportToShareableHandle)(&fd[i], handle[i], CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0) == CUDA_SUCCESS && CALL(cuMemRelease)(handle[i]) == CUDA_SUCCESS,
              "a block of which a descriptor is left");
        check(box_used(0) == bare + (uint64_t)(i + 1) * 400 * MIB && card_has(box_used(0)), "is charged as the card has it");
    }
    check(CALL(cuMemCreate)(&q, 400 * MIB, &property, 0) == CUDA_ERROR_OUT_OF_MEMORY && q == 7, "nobody gets its place");
    check(CALL(cuMemImportFromShareableHandle)(&again, (void *)(intptr_t)fd[0], CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) == CUDA_SUCCESS && box_used(0) == bare + 800 * MIB, "a handle that is had of it is one more of the same");
    close(fd[0]);
    check(CALL(cuMemAddressReserve)(&space, 400 * MIB, 0, 0, 0) == CUDA_SUCCESS && CALL(cuMemMap)(space, 400 * MIB, 0, again, 0) == CUDA_SUCCESS && CALL(cuMemRelease)(again) == CUDA_SUCCESS && own_line()->imported_bytes == 0, "it is mapped, and no import");
    check(info(&a).free == 1300 * MIB - bare - 800 * MIB && card_has(bare + 800 * MIB), "and charged");
    check(CALL(cuMemUnmap)(space, 400 * MIB) == CUDA_SUCCESS && box_used(0) == bare + 400 * MIB && card_has(box_used(0)), "unmapped, it is gone");
    close(fd[1]);
    check(card_has(bare) && info(&a).free == 1300 * MIB - bare && box_used(0) == bare, "so is the other when its descriptor is closed");
    /* The usual way: sent to somebody and closed. */
    check(CALL(cuMemCreate)(&handle[0], 400 * MIB, &property, 0) == CUDA_SUCCESS && CALL(cuMemExportToShareableHandle)(&fd[0], handle[0], CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0) == CUDA_SUCCESS && close(fd[0]) == 0, "a block with a descriptor that is closed");
    check(CALL(cuMemExportToShareableHandle)(&fd[1], handle[0], CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0) == CUDA_SUCCESS && fd[1] == fd[0], "and one that has its number");
    check(CALL(cuMemRelease)(handle[0]) == CUDA_SUCCESS && box_used(0) == bare + 400 * MIB && card_has(box_used(0)), "is there as long as that is open");
    check(dup2(0, fd[1]) == fd[1] && a.cuMemAlloc_v2(&p, 800 * MIB) == CUDA_SUCCESS && box_used(0) == bare + 800 * MIB && card_has(box_used(0)), "and not when another file is");
    check(a.cuMemFree_v2(p) == CUDA_SUCCESS, "freed");
    for (int i = 0; i < 200; i++) { /* places on the list are used again */
        for (int k = 0; k < 3; k++) {
            if (CALL(cuMemCreate)(&handle[k], 2 * MIB, &property, 0) != CUDA_SUCCESS || CALL(cuMemExportToShareableHandle)(&fd[k], handle[k], CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0) != CUDA_SUCCESS) {
                exit(4);
            }
        }
        for (int k = 0; k < 3; k++) {
            i % 2 == 0 ? (void)CALL(cuMemRelease)(handle[k]) : (void)close(fd[k]);
        }
        for (int k = 0; k < 3; k++) {
            i % 2 == 0 ? (void)close(fd[k]) : (void)CALL(cuMemRelease)(handle[k]);
        }
    }
    check(info(&a).free == 1300 * MIB - bare && box_used(0) == bare && card_has(bare), "six hundred of them leave nothing behind");
}

static int run(void *scenario) {
    ((void (*)(void))scenario)();
    return 0;
}

int main(int argc, char **argv) {
    if (argc == 4 && strcmp(argv[1], "open") == 0) {
        int result = open_all(atoi(argv[2]), atoi(argv[3]));
        return tap_done() != 0 || result != 0;
    }
    check(in_child(run, (void *)share) == 0, "shared memory: ran to its end");
    if (dlsym(dlopen("libcuda.so.1", RTLD_NOW), "softgpu_clock_ns") != NULL) { /* by the card's figure, which others may change */
        check(in_child(run, (void *)descriptors) == 0, "descriptors: ran to its end");
    }
    return tap_done();
}
