/* Memory: rounding, contexts, exact limits, death, and the lock's recovery. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../state/ledger.h"
#include "../state/lock.h"
#include "harness.h"

#define CONTEXT (420 * MIB)
#define CAPACITY ((81920ull - 870) * MIB)

/* ---- one process --------------------------------------------------------- */

/* Answers free bytes after each step of a list. */
static void steps(child *self, void *unused) {
  CUdeviceptr a = 0, b = 0, c = 0, d = 0;
  size_t pitch = 0, total = 0, left = 0;
  (void)unused;
  tell(self, (uint64_t)start_cuda(0));
  CUDA(cuMemGetInfo_v2)(&left, &total);
  tell(self, total);
  tell(self, left);
  CUDA(cuMemAlloc_v2)(&a, 1);
  tell(self, cuda_free_bytes());
  CUDA(cuMemAlloc_v2)(&b, 512);
  tell(self, b - a);
  tell(self, cuda_free_bytes());
  CUDA(cuMemAlloc_v2)(&c, MIB);
  tell(self, cuda_free_bytes());
  /* a second piece of 1 MiB does not fit beside them */
  CUDA(cuMemAlloc_v2)(&d, MIB);
  tell(self, cuda_free_bytes());
  CUDA(cuMemFree_v2)(d);
  tell(self, cuda_free_bytes());
  CUDA(cuMemFree_v2)(a);
  CUDA(cuMemFree_v2)(b);
  tell(self, cuda_free_bytes());
  CUDA(cuMemFree_v2)(c);
  tell(self, cuda_free_bytes());
  CUDA(cuMemAlloc_v2)(&a, MIB + 1);
  tell(self, cuda_free_bytes());
  CUDA(cuMemFree_v2)(a);
  CUDA(cuMemAllocPitch_v2)(&a, &pitch, 1000, 5000, 4);
  tell(self, pitch);
  tell(self, cuda_free_bytes());
  tell(self, (uint64_t)CUDA(cuMemFree_v2)(a));
  tell(self, (uint64_t)CUDA(cuMemFree_v2)(a));
  tell(self, (uint64_t)CUDA(cuMemFree_v2)(0));
  tell(self, (uint64_t)CUDA(cuMemAlloc_v2)(&a, 0));
}

static void rounding(void) {
  child c = child_start(steps, NULL);
  check_equal(ask(&c), CUDA_SUCCESS, "a process gets a context");
  check_equal(ask(&c), CAPACITY, "CUDA's total is NVML's less the driver's part");
  uint64_t all = ask(&c);
  check_equal(all, CAPACITY - CONTEXT, "the first free figure lacks the context");
  check_equal(ask(&c), all - 2 * MIB, "one byte takes a 2 MiB page");
  check_equal(ask(&c), 512, "the next piece lies 512 bytes on");
  check_equal(ask(&c), all - 2 * MIB, "and takes no page of its own");
  check_equal(ask(&c), all - 2 * MIB, "1 MiB still fits in that page");
  check_equal(ask(&c), all - 4 * MIB, "a second one does not");
  check_equal(ask(&c), all - 2 * MIB, "its page goes with it");
  check_equal(ask(&c), all - 2 * MIB, "a page stays while one piece lives");
  check_equal(ask(&c), all, "and goes with the last");
  check_equal(ask(&c), all - 2 * MIB, "1 MiB and a byte is a whole page");
  check_equal(ask(&c), 1024, "rows of 1000 bytes are 1024 apart");
  check_equal(ask(&c), all - 6 * MIB, "pitched memory is charged with its pitch, in whole pages");
  check_equal(ask(&c), CUDA_SUCCESS, "a free");
  check_equal(ask(&c), CUDA_ERROR_INVALID_VALUE, "a second free is an error");
  check_equal(ask(&c), CUDA_SUCCESS, "null can be freed");
  check_equal(ask(&c), CUDA_ERROR_INVALID_VALUE, "no bytes are none");
  child_end(&c);
}

/* ---- limits -------------------------------------------------------------- */

static void to_the_byte(child *self, void *unused) {
  CUdeviceptr all, one, other;
  (void)unused;
  start_cuda(0);
  uint64_t left = cuda_free_bytes();
  tell(self, (uint64_t)CUDA(cuMemAlloc_v2)(&one, left + 1));
  tell(self, cuda_free_bytes() == left);
  tell(self, (uint64_t)CUDA(cuMemAlloc_v2)(&all, left));
  tell(self, cuda_free_bytes());
  tell(self, (uint64_t)CUDA(cuMemAlloc_v2)(&one, 1));
  tell(self, (uint64_t)CUDA(cuMemFree_v2)(all));
  tell(self, (uint64_t)CUDA(cuMemAlloc_v2)(&all, left - 2 * MIB));
  tell(self, (uint64_t)CUDA(cuMemAlloc_v2)(&one, 1));
  tell(self, (uint64_t)CUDA(cuMemAlloc_v2)(&other, 512));
  tell(self, (uint64_t)CUDA(cuMemAlloc_v2)(&other, 2 * MIB));
  tell(self, (uint64_t)CUDA(cuMemAlloc_v2)(&other, UINT64_MAX - 5));
  tell(self, (uint64_t)CUDA(cuMemAlloc_v2)(&other, UINT64_MAX / 2));
}

static void exact(void) {
  child c = child_start(to_the_byte, NULL);
  check_equal(ask(&c), CUDA_ERROR_OUT_OF_MEMORY, "a byte over what is free is refused");
  check(ask(&c) == 1, "and changes nothing");
  check_equal(ask(&c), CUDA_SUCCESS, "all that is free can be had");
  check_equal(ask(&c), 0, "then nothing is left");
  check_equal(ask(&c), CUDA_ERROR_OUT_OF_MEMORY, "not a byte");
  check_equal(ask(&c), CUDA_SUCCESS, "it goes back");
  check_equal(ask(&c), CUDA_SUCCESS, "all but a page");
  check_equal(ask(&c), CUDA_SUCCESS, "a byte in that page");
  check_equal(ask(&c), CUDA_SUCCESS, "and a second piece beside it");
  check_equal(ask(&c), CUDA_ERROR_OUT_OF_MEMORY, "a page more is refused");
  check_equal(ask(&c), CUDA_ERROR_OUT_OF_MEMORY, "sizes that overflow are refused");
  check_equal(ask(&c), CUDA_ERROR_OUT_OF_MEMORY, "sizes beyond any card are refused");
  child_end(&c);
}

/* ---- two processes, and death -------------------------------------------- */

static void holder(child *self, void *bytes) {
  CUdeviceptr pointer;
  start_cuda(0);
  tell(self, (uint64_t)CUDA(cuMemAlloc_v2)(&pointer, *(uint64_t *)bytes));
  while (ask(self) == 1) tell(self, cuda_free_bytes());
}

static void death(void) {
  uint64_t ten = 10 * GIB;
  nap_ms(250); /* what went before is buried */
  check_equal(used_bytes(0), 0, "nothing is held before");
  child a = child_start(holder, &ten), b = child_start(holder, &ten);
  check_equal(ask(&a), CUDA_SUCCESS, "the first takes 10 GiB");
  check_equal(ask(&b), CUDA_SUCCESS, "the second too");
  tell(&a, 1);
  check_equal(ask(&a), CAPACITY - 2 * (CONTEXT + ten), "each sees what the other holds");
  check_equal(used_bytes(0), 2 * (CONTEXT + ten), "and so does who looks on");

  uint64_t killed = real_ns();
  kill(b.pid, SIGKILL);
  child_end(&b);
  tell(&a, 1);
  uint64_t seen = ask(&a);
  check(seen == CAPACITY - 2 * (CONTEXT + ten) || real_ns() - killed > 200000000, "memory of a killed process is not free at once");
  while (used_bytes(0) > CONTEXT + ten && real_ns() - killed < 2000000000ull) nap_ms(1);
  uint64_t took_ms = (real_ns() - killed) / 1000000;
  check(took_ms >= 190 && took_ms < 1000, "it is free 200 ms later (%llu ms)", (unsigned long long)took_ms);
  tell(&a, 1);
  check_equal(ask(&a), CAPACITY - CONTEXT - ten, "then its sibling sees it");

  run_tool("softgpu", "set", state_open()->device_prefix, "free-delay=0", NULL);
  tell(&a, 0);
  check_equal(child_end(&a), 0, "a process ends by itself");
  check_equal(used_bytes(0), 0, "with no delay set, all is free at once");
  run_tool("softgpu", "set", state_open()->device_prefix, "free-delay=200ms", NULL);
}

/* Both programs of one process, by exec. */
static void take(child *self, void *library, int size_mib) {
  CUcontext context = NULL;
  CUdeviceptr p = 0;
  CUresult result = ((__typeof__(cuInit) *)dlsym(library, "cuInit"))(0);
  if (result == CUDA_SUCCESS) result = ((__typeof__(cuCtxCreate_v2) *)dlsym(library, "cuCtxCreate_v2"))(&context, 0, 0);
  if (result == CUDA_SUCCESS) result = ((__typeof__(cuMemAlloc_v2) *)dlsym(library, "cuMemAlloc_v2"))(&p, (uint64_t)size_mib * MIB);
  tell(self, result);
}

static void first_program(child *self, void *unused) {
  char from[16], to[16], path[600];
  (void)unused;
  take(self, cuda_library(), 300);
  ask(self);
  snprintf(from, sizeof from, "%d", self->from);
  snprintf(to, sizeof to, "%d", self->to);
  snprintf(path, sizeof path, "%s/usr/lib/x86_64-linux-gnu/libcuda.so.1", state_open()->device_prefix);
  execl("/proc/self/exe", "memory", path, from, to, NULL);
}

static int second_program(char **argv) {
  child self = {.pid = getpid(), .from = atoi(argv[2]), .to = atoi(argv[3])};
  void *library = dlopen(argv[1], RTLD_NOW);
  if (!library) return 9;
  take(&self, library, 100);
  ask(&self);
  return 0;
}

/* What a program had is free before the next one in its process begins. */
static void replaced(void) {
  run_tool("softgpu", "set", state_open()->device_prefix, "free-delay=30s", NULL);
  child c = child_start(first_program, NULL);
  check_equal(ask(&c), CUDA_SUCCESS, "a program has 300 MiB");
  check_equal(used_bytes(0), CONTEXT + 300 * MIB, "as the card says");
  tell(&c, 1);
  check_equal(ask(&c), CUDA_SUCCESS, "it is followed by one that has 100, by exec");
  check_equal(used_bytes(0), CONTEXT + 100 * MIB, "and that is all");
  run_tool("softgpu", "set", state_open()->device_prefix, "free-delay=0", NULL);
  tell(&c, 1);
  check_equal(child_end(&c), 0, "it ends");
  check_equal(used_bytes(0), 0, "nothing is left");
  run_tool("softgpu", "set", state_open()->device_prefix, "free-delay=200ms", NULL);
}

/* A process that nobody looked at for long counts as ended when it was last seen. */
static void unseen_death(void) {
  uint64_t one = GIB;
  child a = child_start(holder, &one);
  ask(&a);
  nap_ms(300);
  child_kill(&a);
  check_equal(used_bytes(0), 0, "memory of a process that was idle and unwatched is free at the first look");
}

/* ---- fork ---------------------------------------------------------------- */

static void forked(child *self, void *unused) {
  CUdeviceptr pointer;
  (void)unused;
  start_cuda(0);
  CUDA(cuMemAlloc_v2)(&pointer, GIB);
  for (int raw = 0; raw < 2; raw++) {
    pid_t pid = raw ? (pid_t)syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0) : fork();
    if (pid == 0) {
      size_t left, total;
      bool ok = CUDA(cuInit)(0) == CUDA_ERROR_NOT_INITIALIZED && CUDA(cuMemGetInfo_v2)(&left, &total) == CUDA_ERROR_NOT_INITIALIZED &&
                CUDA(cuMemFree_v2)(pointer) == CUDA_ERROR_NOT_INITIALIZED;
      _exit(ok ? 7 : 8);
    }
    int status;
    waitpid(pid, &status, 0);
    tell(self, (uint64_t)WEXITSTATUS(status));
  }
  tell(self, cuda_free_bytes());
  tell(self, (uint64_t)CUDA(cuMemFree_v2)(pointer));
}

static void forks(void) {
  child c = child_start(forked, NULL);
  check_equal(ask(&c), 7, "after fork the child can't use CUDA");
  check_equal(ask(&c), 7, "nor after a raw clone");
  check_equal(ask(&c), CAPACITY - CONTEXT - GIB, "a child's end takes nothing from the parent");
  check_equal(ask(&c), CUDA_SUCCESS, "whose memory is still its own");
  child_end(&c);
}

/* ---- contexts ------------------------------------------------------------ */

static void contexts(child *self, void *unused) {
  CUcontext first, second, primary, current;
  CUdeviceptr pointer;
  unsigned int version = 0;
  (void)unused;
  CUDA(cuInit)(0);
  size_t left, total;
  tell(self, (uint64_t)CUDA(cuMemGetInfo_v2)(&left, &total));
  tell(self, (uint64_t)CUDA(cuCtxCreate_v2)(&first, 0, 0));
  uint64_t one = cuda_free_bytes();
  tell(self, one);
  tell(self, (uint64_t)CUDA(cuCtxCreate_v3)(&second, NULL, 0, 0, 0));
  tell(self, one - cuda_free_bytes());
  CUDA(cuCtxGetApiVersion)(second, &version);
  tell(self, version);
  CUDA(cuMemAlloc_v2)(&pointer, GIB);
  tell(self, one - cuda_free_bytes());
  tell(self, (uint64_t)CUDA(cuCtxDestroy_v2)(second)); /* its memory goes with it */
  CUDA(cuCtxGetCurrent)(&current);
  tell(self, current == first);
  tell(self, one - cuda_free_bytes());
  tell(self, (uint64_t)CUDA(cuCtxDestroy_v2)(second));
  tell(self, (uint64_t)CUDA(cuCtxSetCurrent)((CUcontext)(uintptr_t)0x1234567));
  tell(self, (uint64_t)CUDA(cuDevicePrimaryCtxRetain)(&primary, 0));
  CUDA(cuCtxSetCurrent)(primary);
  CUDA(cuMemAlloc_v2)(&pointer, GIB);
  tell(self, one - cuda_free_bytes());
  tell(self, (uint64_t)CUDA(cuDevicePrimaryCtxReset_v2)(0));
  tell(self, (uint64_t)CUDA(cuMemAlloc_v2)(&pointer, GIB)); /* current, but destroyed */
  CUDA(cuCtxPushCurrent_v2)(first);
  tell(self, one - cuda_free_bytes());
  CUDA(cuCtxDestroy_v2)(first);
}

static void context_cost(void) {
  child c = child_start(contexts, NULL);
  check_equal(ask(&c), CUDA_ERROR_INVALID_CONTEXT, "without a context there is nothing to ask");
  check_equal(ask(&c), CUDA_SUCCESS, "a context is made");
  check_equal(ask(&c), CAPACITY - CONTEXT, "it costs what the card says");
  check_equal(ask(&c), CUDA_SUCCESS, "a second one");
  check_equal(ask(&c), 0, "costs nothing more in the same process");
  check_equal(ask(&c), 3020, "the API version of a context");
  check_equal(ask(&c), GIB, "its memory is charged");
  check_equal(ask(&c), CUDA_SUCCESS, "destroying a context");
  check_equal(ask(&c), 1, "makes the one below current");
  check_equal(ask(&c), 0, "and frees its memory");
  check_equal(ask(&c), CUDA_ERROR_CONTEXT_IS_DESTROYED, "twice is an error");
  check_equal(ask(&c), CUDA_ERROR_INVALID_CONTEXT, "so is a made-up handle");
  check_equal(ask(&c), CUDA_SUCCESS, "the primary context");
  check_equal(ask(&c), GIB, "with memory in it");
  check_equal(ask(&c), CUDA_SUCCESS, "is reset");
  check_equal(ask(&c), CUDA_ERROR_CONTEXT_IS_DESTROYED, "a thread that had it current is told");
  check_equal(ask(&c), 0, "and its memory is free");
  child_end(&c);
}

/* ---- dying with the lock ------------------------------------------------- */

static void die_locked(child *self, void *unused) {
  soft_region region = {0};
  char dir[600];
  (void)unused;
  snprintf(dir, sizeof dir, "%s/softgpu", state_open()->device_prefix);
  soft_region_open(&region, dir, "");
  soft_slot_claim(&region, SOFT_KIND_OBSERVER);
  soft_lock(&region, 10000);
  region.state->header.cards[0].used_bytes += 12345; /* half-way through something */
  tell(self, 1);
  kill(getpid(), SIGKILL);
}

static void broken_lock(void) {
  uint64_t one = GIB;
  child a = child_start(holder, &one);
  ask(&a);
  soft_region *region = state_open();
  uint32_t before = region->state->header.lock_broken;
  child dying = child_start(die_locked, NULL);
  ask(&dying);
  child_end(&dying);
  tell(&a, 1);
  check_equal(ask(&a), CAPACITY - CONTEXT - GIB, "a sum that a dead process left wrong is counted anew");
  check_equal(region->state->header.lock_broken - before, 1, "the lock was taken from the dead, once");
  tell(&a, 0);
  child_end(&a);
}

/* Processes die at any instruction; in the end the books balance. */
static void storm(void) {
  char *text;
  int status;
  nap_ms(250);
  setenv("LD_LIBRARY_PATH", "", 1);
  char path[600];
  snprintf(path, sizeof path, "%s/usr/lib/x86_64-linux-gnu", state_open()->device_prefix);
  setenv("LD_LIBRARY_PATH", path, 1);
  text = tool_output(&status, "gpuprobe", "race", "--procs", "6", "--size", "30GiB", "--seconds", "1", "--kill", NULL);
  check(status == 0 && strstr(text, "\"failedProcesses\":0"), "processes race and are killed, and none fails otherwise");
  free(text);
  nap_ms(250);
  check_equal(used_bytes(0), 0, "after them nothing is held");
  text = tool_output(&status, "gpuprobe", "race", "--procs", "4", "--size", "30GiB", "--seconds", "1", NULL);
  const char *most = strstr(text, "\"mostHeldBytes\":");
  check(status == 0 && most && strtoull(most + 16, NULL, 10) <= 60 * GIB && strtoull(most + 16, NULL, 10) >= 30 * GIB,
        "four that ask for 30 GiB each never hold more than fits");
  free(text);
}

int main(int argc, char **argv) {
  if (argc == 4) return second_program(argv);
  root_make("--card", "a100-80", "--seed", "1", NULL);
  rounding();
  nap_ms(250);
  exact();
  death();
  unseen_death();
  replaced();
  forks();
  nap_ms(250);
  context_cost();
  nap_ms(250);
  broken_lock();
  storm();
  return finish();
}
