#define _GNU_SOURCE
#include "mps.h"

#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static const char *root(void) { return state_open()->device_prefix; }

const char *mps_dir(void) {
  static char dir[600];
  snprintf(dir, sizeof dir, "%s/mps", root());
  return dir;
}

static void settings(char *out, size_t size) { snprintf(out, size, "CUDA_MPS_PIPE_DIRECTORY=%s CUDA_MPS_LOG_DIRECTORY=%s", mps_dir(), mps_dir()); }

int mps_daemon_start(const char *environment, const char *options) {
  char command[4096], common[1400];
  settings(common, sizeof common);
  snprintf(command, sizeof command, "%s %s %s/usr/bin/nvidia-cuda-mps-control -d %s 2> /dev/null", common, environment, root(), options);
  fflush(stdout);
  int status = system(command);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1000;
}

static const char *line(int *status, const char *format, va_list arguments) {
  static char text[65536];
  char command[4096], common[1400], words[512];
  settings(common, sizeof common);
  vsnprintf(words, sizeof words, format, arguments);
  snprintf(command, sizeof command, "echo '%s' | %s %s/usr/bin/nvidia-cuda-mps-control 2>&1", words, common, root());
  fflush(stdout);
  FILE *from = popen(command, "re");
  if (!from) return "";
  size_t n = fread(text, 1, sizeof text - 1, from);
  text[n] = 0;
  int ended = pclose(from);
  if (status) *status = WIFEXITED(ended) ? WEXITSTATUS(ended) : 1000;
  return text;
}

const char *mps_control(int *status, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  const char *text = line(status, format, arguments);
  va_end(arguments);
  return text;
}

long mps_number(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  long value = strtol(line(NULL, format, arguments), NULL, 10);
  va_end(arguments);
  return value;
}

pid_t mps_daemon_pid(void) {
  char path[700];
  int pid = 0;
  snprintf(path, sizeof path, "%s/nvidia-cuda-mps-control.pid", mps_dir());
  FILE *file = fopen(path, "re");
  if (!file) return 0;
  if (fscanf(file, "%d", &pid) != 1) pid = 0;
  fclose(file);
  return pid;
}

static bool running(pid_t pid) {
  char path[64], text[256] = "";
  snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
  FILE *file = fopen(path, "re");
  if (!file) return false;
  size_t n = fread(text, 1, sizeof text - 1, file);
  fclose(file);
  const char *end = n ? strrchr(text, ')') : NULL;
  return end && end[2] != 'Z'; /* whoever should bury it may be dead, too */
}

bool mps_is_gone(const void *pid) { return !running(*(const pid_t *)pid); }

bool mps_until(bool (*good)(const void *about), const void *about) {
  for (int i = 0; i < 2000; i++) {
    if (good(about)) return true;
    nap_ms(5);
  }
  return false;
}

void mps_clear(void) {
  pid_t pid = mps_daemon_pid();
  if (pid && running(pid)) kill(pid, SIGKILL);
  soft_region *region = state_open();
  for (uint32_t i = 0; i < soft_slots_high(region); i++) {
    const soft_slot *slot = soft_slot_at(region, i);
    pid_t server = (pid_t)slot->pid;
    if (slot->kind != SOFT_KIND_SERVER || slot->state != SOFT_SLOT_LIVE || !running(server)) continue;
    kill(server, SIGTERM); /* so that it takes its file along */
    if (!mps_until(mps_is_gone, &server)) kill(server, SIGKILL);
  }
  if (pid) mps_until(mps_is_gone, &pid);
  for (uint32_t i = 0; i < soft_slots_high(region); i++) { /* those that were killed left theirs */
    static const unsigned int users[] = {0, 1234};
    char path[64];
    for (int u = 0; u < 2 && soft_slot_at(region, i)->kind == SOFT_KIND_SERVER; u++) {
      snprintf(path, sizeof path, "/dev/shm/cuda.shm.%x.%x.1", users[u], soft_slot_at(region, i)->pid);
      unlink(path);
    }
  }
  char command[700];
  snprintf(command, sizeof command, "rm -rf %s", mps_dir());
  if (system(command) != 0) printf("# %s could not be removed\n", mps_dir());
}

/* ---- clients ------------------------------------------------------------- */

static void set(const char *name, const char *value) {
  if (value) setenv(name, value, 1);
  else unsetenv(name);
}

static void prepare(const mps_wish *w) {
  set("CUDA_MPS_PIPE_DIRECTORY", w->pipe_dir ? w->pipe_dir[0] ? w->pipe_dir : "/nowhere" : mps_dir());
  set("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", w->percentage);
  set("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", w->limits);
  set("CUDA_VISIBLE_DEVICES", w->cards);
  if (w->own_shm && (unshare(CLONE_NEWNS) != 0 || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0 || mount("tmpfs", "/dev/shm", "tmpfs", 0, NULL) != 0)) _exit(8);
  cuda_library();
  if (w->uid && (setgid((gid_t)w->uid) != 0 || setuid(w->uid) != 0)) _exit(9);
}

/* at: where it writes, 0 nowhere */
static uint64_t launch(uint64_t ms, CUdeviceptr at) {
  static CUfunction spin;
  CUmodule module;
  CUresult result = spin ? CUDA_SUCCESS : CUDA(cuModuleLoadData)(&module, kernel_text);
  if (result == CUDA_SUCCESS && !spin) result = CUDA(cuModuleGetFunction)(&spin, module, "carve_spin");
  if (result != CUDA_SUCCESS) return (uint64_t)result;
  uint64_t ns = ms * 1000000;
  void *parameters[] = {&ns, &at};
  return (uint64_t)CUDA(cuLaunchKernel)(spin, 216, 1, 1, 1024, 1, 1, 0, NULL, parameters, NULL);
}

static uint64_t context(unsigned int multiprocessors) {
  CUexecAffinityParam wish = {.type = 0, .param.smCount.val = multiprocessors}, got = {0};
  CUcontext ctx;
  CUresult result = CUDA(cuCtxCreate_v3)(&ctx, &wish, 1, 0, 0);
  if (result == CUDA_SUCCESS) result = ((CUresult(*)(CUexecAffinityParam *, int))entry(cuda_library(), "cuCtxGetExecAffinity"))(&got, 0);
  return result == CUDA_SUCCESS ? got.param.smCount.val : 1000 + (uint64_t)result;
}

static void serve(child *self, void *argument) {
  prepare(argument);
  for (;;) {
    uint64_t order = ask(self), what = order & 0xff, value = order >> 8;
    CUdeviceptr pointer;
    int number = -1;
    uint64_t answer = UINT64_MAX;
    switch (what) {
    case DO_START: answer = (uint64_t)start_cuda(0); break;
    case DO_INIT: answer = (uint64_t)CUDA(cuInit)(0); break;
    case DO_ALLOC: answer = (uint64_t)CUDA(cuMemAlloc_v2)(&pointer, value * MIB); break;
    case DO_ATTRIBUTE: answer = CUDA(cuDeviceGetAttribute)(&number, (CUdevice_attribute)value, 0) == CUDA_SUCCESS ? (uint64_t)number : UINT64_MAX; break;
    case DO_AFFINITY: answer = CUDA(cuDeviceGetExecAffinitySupport)(&number, 0, 0) == CUDA_SUCCESS ? (uint64_t)number : UINT64_MAX; break;
    case DO_LAUNCH: answer = launch(value, 0); break;
    case DO_SYNC: answer = (uint64_t)CUDA(cuCtxSynchronize)(); break;
    case DO_WILD:
      answer = launch(0, 0x1000);
      if (answer == CUDA_SUCCESS) answer = (uint64_t)CUDA(cuCtxSynchronize)();
      break;
    case DO_CONTEXT: answer = context((unsigned int)value); break;
    default: return;
    }
    tell(self, answer);
  }
}

child mps_child(const mps_wish *wish) { return child_start(serve, (void *)wish); }

void mps_say(child *c, int what, uint64_t argument) { tell(c, (uint64_t)what | argument << 8); }

uint64_t mps_do(child *c, int what, uint64_t argument) {
  mps_say(c, what, argument);
  return ask(c);
}

void mps_end(child *c) {
  mps_say(c, DO_END, 0);
  child_end(c);
}

int mps_scenes(const mps_scene *scenes, unsigned int count) {
  int bad = 0;
  for (unsigned int i = 0; i < count; i++) {
    int status = 0;
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
      scenes[i]();
      mps_clear();
      exit(finish() ? 3 : 0);
    }
    waitpid(pid, &status, 0);
    bad += status != 0;
  }
  check(bad == 0, "all scenes came to their end");
  return finish();
}
