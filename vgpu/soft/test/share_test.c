/* Time slicing between processes, exact on the shared virtual clock. */
#define _GNU_SOURCE
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../state/clock.h"
#include "../state/ledger.h"
#include "../state/lock.h"
#include "../state/sched.h"
#include "harness.h"

typedef struct {
  uint64_t kernel_ns;
  unsigned int launches;
  unsigned int blocks;
} load;

/* Everybody stands at one line in virtual time: a sleep until a moment that all know. */
enum { START_NS = 2000000000 };

static void sleep_until(uint64_t ns) { ((int (*)(uint64_t))entry(cuda_library(), "softgpu_sleep_until_ns"))(ns); }
static uint64_t clock_ns(void) { return ((uint64_t (*)(void))entry(cuda_library(), "softgpu_clock_ns"))(); }

static void worker(child *self, void *argument) {
  const load *l = argument;
  CUdeviceptr none = 0;
  uint64_t ns = l->kernel_ns;
  void *parameters[] = {&ns, &none};
  tell(self, (uint64_t)start_cuda(0));
  CUfunction f = kernel("carve_spin");
  ask(self); /* all are there */
  sleep_until(START_NS);
  for (unsigned int i = 0; i < l->launches; i++) CUDA(cuLaunchKernel)(f, l->blocks, 1, 1, 1024, 1, 1, 0, NULL, parameters, NULL);
  CUDA(cuCtxSynchronize)();
  uint64_t took = clock_ns() - START_NS;
  ((int (*)(void))entry(cuda_library(), "softgpu_clock_leave"))(); /* from here on it waits for the test, not for time */
  tell(self, took);
  ask(self); /* stays, so that the clock can be read from outside */
}

static uint64_t busy_of(pid_t pid) {
  soft_region *region = state_open();
  for (uint32_t i = 0; i < soft_slots_high(region); i++) {
    const soft_slot *slot = soft_slot_at(region, i);
    if (slot->kind == SOFT_KIND_CUDA && slot->state == SOFT_SLOT_LIVE && slot->pid == (uint32_t)pid) return slot->usage[0].busy_ns;
  }
  return UINT64_MAX;
}

static void run(const load *loads, int count, uint64_t *ended, child *out) {
  for (int i = 0; i < count; i++) {
    out[i] = child_start(worker, (void *)&loads[i]);
    ask(&out[i]);
  }
  for (int i = 0; i < count; i++) tell(&out[i], 1);
  for (int i = 0; i < count; i++) ended[i] = ask(&out[i]);
}

static void stop(child *all, int count) {
  for (int i = 0; i < count; i++) {
    tell(&all[i], 0);
    child_end(&all[i]);
  }
}

static void fresh(const char *quantum, const char *change) {
  extern void reopen_state(void);
  root_make("--card", "a100-80", "--seed", "4", "--clock", "virtual", "--quantum", quantum, "--switch", change, "--free-delay", "0", NULL);
}

/* Each scene is a process of its own: it has its own root and looks at its own state. */
typedef bool (*scene)(void);

static bool alone(void) {
  load l = {10000000, 50, 216};
  uint64_t ended;
  child c;
  fresh("2ms", "20us");
  run(&l, 1, &ended, &c);
  bool ok = check_equal(ended, 500000000, "a process that is alone has the whole card");
  ok &= check_equal(busy_of(c.pid), 500000000, "and is busy all the time");
  stop(&c, 1);
  return ok;
}

static bool two_equal(void) {
  load l[2] = {{10000000, 50, 216}, {10000000, 50, 216}};
  uint64_t ended[2];
  child c[2];
  fresh("2ms", "0");
  run(l, 2, ended, c);
  bool ok = check_equal(ended[0] > ended[1] ? ended[0] : ended[1], 1000000000, "two with the same work are through after twice the time");
  ok &= check_equal(ended[0] > ended[1] ? ended[0] - ended[1] : ended[1] - ended[0], 2000000, "a quantum apart");
  ok &= check(busy_of(c[0].pid) == 500000000 && busy_of(c[1].pid) == 500000000, "each had exactly half");
  stop(c, 2);
  return ok;
}

static bool two_unequal(void) {
  load l[2] = {{100000000, 10, 216}, {100000, 3000, 216}};
  uint64_t ended[2];
  child c[2];
  fresh("2ms", "0");
  run(l, 2, ended, c);
  /* the second has 300 ms of work: both get half until it is through */
  uint64_t lag = ended[1] > 600000000 ? ended[1] - 600000000 : 600000000 - ended[1];
  bool ok = check(lag <= 2000000, "short kernels get the same half as long ones (%llu ns off)", (unsigned long long)lag);
  ok &= check_equal(ended[0], 1300000000, "and what they leave goes to the other");
  stop(c, 2);
  return ok;
}

static bool switch_cost(void) {
  load l[2] = {{10000000, 50, 216}, {10000000, 50, 216}};
  uint64_t ended[2];
  child c[2];
  fresh("2ms", "20us");
  run(l, 2, ended, c);
  uint64_t last = ended[0] > ended[1] ? ended[0] : ended[1];
  /* 500 slices, one switch before each but the first */
  bool ok = check_equal(last, 1000000000 + 499 * 20000, "a switch costs what was set");
  stop(c, 2);
  return ok;
}

static bool eight(void) {
  load l[8];
  uint64_t ended[8], first = UINT64_MAX, last = 0;
  child c[8];
  fresh("1ms", "0");
  for (int i = 0; i < 8; i++) l[i] = (load){5000000, 20, 216};
  run(l, 8, ended, c);
  bool ok = true;
  for (int i = 0; i < 8; i++) {
    first = ended[i] < first ? ended[i] : first;
    last = ended[i] > last ? ended[i] : last;
    ok &= busy_of(c[i].pid) == 100000000;
  }
  check(ok, "eight get the same");
  ok &= check(last == 800000000 && last - first == 7000000, "one quantum after the other");
  stop(c, 8);
  return ok;
}

/* A member that is killed must not stop the clock, and its work goes with it. */
static bool killed(void) {
  load l[2] = {{10000000, 100, 216}, {10000000, 50, 216}};
  child c[2];
  fresh("2ms", "0");
  for (int i = 0; i < 2; i++) {
    c[i] = child_start(worker, &l[i]);
    ask(&c[i]);
  }
  tell(&c[0], 1);
  nap_ms(100); /* the first waits for the line; the second is held back, so time stands */
  uint64_t before = state_open()->state->header.virtual_ns;
  nap_ms(50);
  bool ok = check_equal(state_open()->state->header.virtual_ns, before, "time stands while a member computes");
  child_kill(&c[1]);
  uint64_t ended = ask(&c[0]);
  ok &= check_equal(ended, 1000000000, "and goes on when that member is killed");
  tell(&c[0], 0);
  child_end(&c[0]);
  return ok;
}

/* On the real clock: order and a wide band only. */
static bool real_time(void) {
  root_make("--card", "a100-80", "--seed", "4", NULL);
  char path[600], *text;
  int status;
  snprintf(path, sizeof path, "%s/usr/lib/x86_64-linux-gnu", state_open()->device_prefix);
  setenv("LD_LIBRARY_PATH", path, 1);
  text = tool_output(&status, "gpuprobe", "launch", "--count", "50", "--duration", "2ms", NULL);
  const char *ms = strstr(text, "\"cardMilliseconds\":");
  double took = ms ? strtod(ms + 19, NULL) : 0;
  bool ok = check(status == 0 && took >= 99 && took < 300, "50 kernels of 2 ms take about 100 ms on the real clock (%.1f)", took);
  free(text);
  return ok;
}

int main(void) {
  static const scene scenes[] = {alone, two_equal, two_unequal, switch_cost, eight, killed, real_time};
  int bad = 0, passed = 0;
  (void)passed;
  for (unsigned int i = 0; i < sizeof scenes / sizeof scenes[0]; i++) {
    pid_t pid = fork();
    if (pid == 0) {
      scenes[i]();
      fflush(stdout);
      root_remove();
      _exit(0);
    }
    child c = {.pid = pid, .from = -1, .to = -1};
    if (child_end(&c) != 0) bad++;
  }
  check(bad == 0, "all scenes came to their end");
  return finish();
}
