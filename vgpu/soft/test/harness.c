#define _GNU_SOURCE
#include "harness.h"

#include <dlfcn.h>
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "../state/ledger.h"
#include "../state/lock.h"

__asm__(".section .rodata\n"
        ".globl kernel_text\n"
        "kernel_text:\n"
        ".incbin \"" SOFT_KERNEL_FILE "\"\n"
        ".byte 0\n"
        ".previous\n");

static int passed, failed;
static char root[256];

static void give_up(const char *what) {
  printf("not ok - %s\n", what);
  printf("%d passed, %d failed\n", passed, failed + 1);
  fflush(stdout);
  if (root[0]) root_remove();
  _exit(1);
}

/* ---- checks -------------------------------------------------------------- */

static bool report(bool good, const char *file, int at, const char *format, va_list arguments) {
  int number = passed + failed + 1;
  if (good) passed++;
  else failed++;
  printf("%s %d - ", good ? "ok" : "not ok", number);
  vprintf(format, arguments);
  if (!good) printf("\n# %s:%d", file, at);
  printf("\n");
  fflush(stdout);
  return good;
}

bool check_at(bool good, const char *file, int at, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  report(good, file, at, format, arguments);
  va_end(arguments);
  return good;
}

bool check_equal_at(uint64_t got, uint64_t want, const char *file, int at, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  report(got == want, file, at, format, arguments);
  va_end(arguments);
  if (got != want) printf("# got %llu, want %llu\n", (unsigned long long)got, (unsigned long long)want);
  return got == want;
}

int finish(void) {
  if (root[0]) root_remove();
  printf("%d passed, %d failed\n", passed, failed);
  return failed ? 1 : 0;
}

/* ---- tools --------------------------------------------------------------- */

const char *build_dir(void) {
  static char dir[4096];
  if (!dir[0]) {
    ssize_t n = readlink("/proc/self/exe", dir, sizeof dir - 1);
    if (n <= 0) give_up("find the build directory");
    dir[n] = 0;
    *strrchr(dir, '/') = 0; /* build/test */
    *strrchr(dir, '/') = 0;
  }
  return dir;
}

static int run_list(const char *name, char **argv, int out) {
  char path[4400];
  int status = 0;
  snprintf(path, sizeof path, "%s/%s", build_dir(), name);
  fflush(stdout);
  pid_t pid = fork();
  if (pid == 0) {
    dup2(out, 1);
    execv(path, argv);
    _exit(127);
  }
  if (waitpid(pid, &status, 0) != pid) return -1;
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

enum { MOST_ARGUMENTS = 32 };

static void gather(char **argv, const char *name, const char *first, va_list rest) {
  int n = 0;
  argv[n++] = (char *)name;
  for (const char *at = first; at && n < MOST_ARGUMENTS - 1; at = va_arg(rest, const char *)) argv[n++] = (char *)at;
  argv[n] = NULL;
}

int run_tool(const char *name, const char *argument, ...) {
  char *argv[MOST_ARGUMENTS];
  va_list rest;
  va_start(rest, argument);
  gather(argv, name, argument, rest);
  va_end(rest);
  FILE *sink = fopen("/dev/null", "we");
  int status = run_list(name, argv, sink ? fileno(sink) : 1);
  if (sink) fclose(sink);
  return status;
}

char *tool_output(int *status, const char *name, const char *argument, ...) {
  char *argv[MOST_ARGUMENTS];
  va_list rest;
  va_start(rest, argument);
  gather(argv, name, argument, rest);
  va_end(rest);
  FILE *file = tmpfile();
  if (!file) give_up("make a temporary file");
  *status = run_list(name, argv, fileno(file));
  long size = fseek(file, 0, SEEK_END) == 0 ? ftell(file) : 0;
  rewind(file);
  char *text = calloc(1, (size_t)size + 1);
  if (!text || fread(text, 1, (size_t)size, file) != (size_t)size) give_up("read a tool's output");
  fclose(file);
  return text;
}

const char *root_make(const char *argument, ...) {
  char *argv[MOST_ARGUMENTS];
  va_list rest;
  const char *base = getenv("TMPDIR");
  if (root[0]) root_remove();
  snprintf(root, sizeof root, "%s/softgpu-test-XXXXXX", base && base[0] ? base : "/tmp");
  if (!mkdtemp(root)) give_up("make a directory for the root");
  va_start(rest, argument);
  int n = 0;
  argv[n++] = (char *)"softgpu";
  argv[n++] = (char *)"init";
  argv[n++] = root;
  for (const char *at = argument; at && n < MOST_ARGUMENTS - 1; at = va_arg(rest, const char *)) argv[n++] = (char *)at;
  argv[n] = NULL;
  va_end(rest);
  FILE *sink = fopen("/dev/null", "we");
  int status = run_list("softgpu", argv, fileno(sink));
  fclose(sink);
  if (status != 0) give_up("softgpu init");
  chmod(root, 0755);
  return root;
}

void root_remove(void) {
  int status = run_tool("softgpu", "destroy", root, NULL);
  if (status != 0) {
    /* a test that damaged the state on purpose */
    char *argv[] = {(char *)"rm", (char *)"-rf", root, NULL};
    pid_t pid = fork();
    if (pid == 0) {
      execvp("rm", argv);
      _exit(127);
    }
    waitpid(pid, NULL, 0);
  }
  root[0] = 0;
}

/* ---- libraries ----------------------------------------------------------- */

static void *library(const char *name) {
  char path[512];
  snprintf(path, sizeof path, "%s/usr/lib/x86_64-linux-gnu/%s", root, name);
  void *handle = dlopen(path, RTLD_NOW);
  if (!handle) give_up(dlerror());
  return handle;
}

void *cuda_library(void) {
  static void *handle;
  if (!handle) handle = library("libcuda.so.1");
  return handle;
}

void *nvml_library(void) {
  static void *handle;
  if (!handle) handle = library("libnvidia-ml.so.1");
  return handle;
}

void *entry(void *from, const char *name) {
  void *found = dlsym(from, name);
  if (!found) give_up(name);
  return found;
}

CUresult start_cuda(int device) {
  CUcontext ctx;
  CUdevice handle;
  CUresult result = CUDA(cuInit)(0);
  if (result == CUDA_SUCCESS) result = CUDA(cuDeviceGet)(&handle, device);
  if (result == CUDA_SUCCESS) result = CUDA(cuDevicePrimaryCtxRetain)(&ctx, handle);
  return result == CUDA_SUCCESS ? CUDA(cuCtxSetCurrent)(ctx) : result;
}

uint64_t cuda_free_bytes(void) {
  size_t left = 0, total = 0;
  return CUDA(cuMemGetInfo_v2)(&left, &total) == CUDA_SUCCESS ? left : UINT64_MAX;
}

CUfunction kernel(const char *name) {
  CUmodule module;
  CUfunction function;
  if (CUDA(cuModuleLoadData)(&module, kernel_text) != CUDA_SUCCESS) give_up("load the kernels");
  if (CUDA(cuModuleGetFunction)(&function, module, name) != CUDA_SUCCESS) give_up(name);
  return function;
}

/* ---- children ------------------------------------------------------------ */

child child_start(child_body body, void *argument) {
  int down[2], up[2];
  if (pipe(down) != 0 || pipe(up) != 0) give_up("make a pipe");
  fflush(stdout);
  pid_t pid = fork();
  if (pid < 0) give_up("fork");
  if (pid == 0) {
    close(down[1]);
    close(up[0]);
    child self = {.pid = getpid(), .from = down[0], .to = up[1]};
    body(&self, argument);
    fflush(stdout);
    _exit(0);
  }
  close(down[0]);
  close(up[1]);
  return (child){.pid = pid, .from = up[0], .to = down[1]};
}

void tell(child *c, uint64_t value) {
  if (write(c->to, &value, sizeof value) != sizeof value) _exit(3);
}

uint64_t ask(child *c) {
  uint64_t value = 0;
  struct pollfd ready = {.fd = c->from, .events = POLLIN};
  int n;
  while ((n = poll(&ready, 1, 60000)) < 0 && errno == EINTR) {
  }
  if (n <= 0 || read(c->from, &value, sizeof value) != sizeof value) return UINT64_MAX;
  return value;
}

int child_end(child *c) {
  int status = 0;
  close(c->to);
  if (waitpid(c->pid, &status, 0) != c->pid) return -1;
  close(c->from);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

void child_kill(child *c) {
  kill(c->pid, SIGKILL);
  child_end(c);
}

uint64_t real_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

void nap_ms(unsigned int ms) {
  struct timespec left = {ms / 1000, (long)(ms % 1000) * 1000000};
  while (nanosleep(&left, &left) != 0 && errno == EINTR) {
  }
}

/* ---- the state ----------------------------------------------------------- */

soft_region *state_open(void) {
  static soft_region region;
  char dir[300];
  if (region.state) return &region;
  snprintf(dir, sizeof dir, "%s/softgpu", root);
  if (soft_region_open(&region, dir, root) != SOFT_OK || soft_slot_claim(&region, SOFT_KIND_OBSERVER) != SOFT_OK) give_up("open the state");
  return &region;
}

uint64_t used_bytes(uint32_t card) {
  soft_region *region = state_open();
  if (soft_lock(region, 10000) != SOFT_OK) give_up("lock the state");
  soft_ledger_sweep(region, true);
  uint64_t used = soft_card_at(region, card)->used_bytes;
  soft_unlock(region);
  return used;
}
