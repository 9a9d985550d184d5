/* Clients of one MPS server on a card: at once, exact on the shared virtual clock. */
#define _GNU_SOURCE
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "mps.h"

enum { START_NS = 2000000000, MOST = 8 };
#define MS 1000000ull

/* An A100 holds 216 blocks of 1024 threads at once. */
typedef struct {
  const char *percentage;
  uint64_t kernel_ns;
  unsigned int launches, blocks, streams;
  bool plain;                   /* no client */
  bool holds;                   /* stops the clock at the line until it is told to go on */
} load;

static void sleep_until(uint64_t ns) { ((int (*)(uint64_t))entry(cuda_library(), "softgpu_sleep_until_ns"))(ns); }
static uint64_t clock_ns(void) { return ((uint64_t (*)(void))entry(cuda_library(), "softgpu_clock_ns"))(); }

/* Answers its result, then the time that its work took, then the result of all of it. */
static void worker(child *self, void *argument) {
  const load *l = argument;
  CUdeviceptr none = 0;
  CUstream streams[4] = {NULL};
  uint64_t ns = 1;
  void *parameters[] = {&ns, &none};
  setenv("CUDA_MPS_PIPE_DIRECTORY", l->plain ? "/nowhere" : mps_dir(), 1);
  if (l->percentage) setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", l->percentage, 1);
  tell(self, (uint64_t)start_cuda(0));
  CUfunction f = kernel("carve_spin");
  for (unsigned int s = 0; s < l->streams; s++) CUDA(cuStreamCreate)(&streams[s], CU_STREAM_NON_BLOCKING);
  CUDA(cuLaunchKernel)(f, 1, 1, 1, 32, 1, 1, 0, NULL, parameters, NULL); /* so that queues are in the order of arrival */
  tell(self, 1);
  ask(self); /* all are there */
  sleep_until(START_NS);
  if (l->holds) {
    tell(self, 2);
    ask(self);
  }
  ns = l->kernel_ns;
  CUresult result = CUDA_SUCCESS;
  for (unsigned int i = 0; i < l->launches && result == CUDA_SUCCESS; i++)
    result = CUDA(cuLaunchKernel)(f, l->blocks, 1, 1, 1024, 1, 1, 0, l->streams ? streams[i % l->streams] : NULL, parameters, NULL);
  if (result == CUDA_SUCCESS) result = CUDA(cuCtxSynchronize)();
  uint64_t took = clock_ns() - START_NS;
  ((int (*)(void))entry(cuda_library(), "softgpu_clock_leave"))();
  tell(self, took);
  tell(self, (uint64_t)result);
  ask(self); /* stays, so that the clock can be read from outside */
}

static child all[MOST];
static uint64_t took[MOST];

static void begin(const load *loads, int count) {
  for (int i = 0; i < count; i++) {
    all[i] = child_start(worker, (void *)&loads[i]);
    if (ask(&all[i]) != CUDA_SUCCESS) printf("not ok - child %d starts\n", i);
    ask(&all[i]);
  }
  for (int i = 0; i < count; i++) tell(&all[i], 1);
}

static CUresult result_of(int i) {
  took[i] = ask(&all[i]);
  return (CUresult)ask(&all[i]);
}

static void play(const load *loads, int count) {
  begin(loads, count);
  for (int i = 0; i < count; i++) check_equal(result_of(i), CUDA_SUCCESS, "process %d came to its end", i);
}

static void stop(int count) {
  for (int i = 0; i < count; i++) {
    tell(&all[i], 0);
    child_end(&all[i]);
  }
}

static uint64_t busy_of(int i) {
  soft_region *region = state_open();
  for (uint32_t s = 0; s < soft_slots_high(region); s++) {
    const soft_slot *slot = soft_slot_at(region, s);
    if (slot->kind == SOFT_KIND_CUDA && slot->state == SOFT_SLOT_LIVE && slot->pid == (uint32_t)all[i].pid) return slot->usage[0].busy_ns - 1; /* the first kernel */
  }
  return UINT64_MAX;
}

static bool near(uint64_t got, uint64_t want, uint64_t off) { return got + off >= want && got <= want + off; }

static void fresh(const char *quantum) {
  root_make("--card", "a100-80", "--seed", "4", "--clock", "virtual", "--quantum", quantum, "--switch", "0", "--free-delay", "0", NULL);
  mps_daemon_start("", "");
}

/* ---- scenes --------------------------------------------------------------- */

static void half(void) {
  const load one[1] = {{.percentage = "50", .kernel_ns = 10 * MS, .launches = 50, .blocks = 216}};
  fresh("2ms");
  play(one, 1);
  check_equal(took[0], 1000 * MS, "half of the card takes twice the time");
  stop(1);
}

static void halves(void) {
  const load one = {.percentage = "50", .kernel_ns = 10 * MS, .launches = 50, .blocks = 216}, two[2] = {one, one};
  fresh("2ms");
  play(two, 2);
  check(took[0] == 1000 * MS && took[1] == 1000 * MS, "two halves run at once, each as long as alone (%llu, %llu)", (unsigned long long)took[0], (unsigned long long)took[1]);
  check(busy_of(0) == 1000 * MS && busy_of(1) == 1000 * MS, "busy all the time");
  check(near(state_open()->state->header.cards[0].busy_ns, 1000 * MS, 10), "and so was the card");
  stop(2);
}

static void narrow(void) {
  /* a quarter of the card each, by the kernel's own size */
  load four[4];
  for (int i = 0; i < 4; i++) four[i] = (load){.kernel_ns = 10 * MS, .launches = 50, .blocks = 54};
  fresh("2ms");
  play(four, 4);
  bool ok = true;
  for (int i = 0; i < 4; i++) ok &= took[i] == 500 * MS;
  check(ok, "four narrow kernels have room beside each other");
  stop(4);
}

static void crowded(void) {
  load five[5];
  for (int i = 0; i < 5; i++) five[i] = (load){.kernel_ns = 10 * MS, .launches = 50, .blocks = 54};
  fresh("2ms");
  play(five, 5);
  uint64_t last = 0, first = UINT64_MAX;
  for (int i = 0; i < 5; i++) {
    last = took[i] > last ? took[i] : last;
    first = took[i] < first ? took[i] : first;
  }
  /* 250 kernels in fours: 62 rounds and a half */
  check(last == 630 * MS && first >= 610 * MS, "a fifth one takes its turn with the others (%llu to %llu)", (unsigned long long)first, (unsigned long long)last);
  stop(5);
}

static void thirds(void) {
  load l[3];
  for (int i = 0; i < 3; i++) l[i] = (load){.percentage = "33.4", .kernel_ns = 10 * MS, .launches = 20, .blocks = 72};
  fresh("2ms");
  play(l, 3); /* 36 of 108 multiprocessors each: 72 blocks fill them */
  check(took[0] == 200 * MS && took[1] == 200 * MS && took[2] == 200 * MS, "three thirds are a whole");
  stop(3);
}

static void wide(void) {
  const load l[2] = {{.kernel_ns = 10 * MS, .launches = 50, .blocks = 216}, {.kernel_ns = 10 * MS, .launches = 50, .blocks = 216}};
  fresh("2ms");
  play(l, 2);
  uint64_t last = took[0] > took[1] ? took[0] : took[1], first = took[0] < took[1] ? took[0] : took[1];
  check(last == 1000 * MS && first == 990 * MS, "kernels that fill the card alternate, whole ones");
  check(busy_of(0) == 500 * MS && busy_of(1) == 500 * MS, "each had exactly half");
  stop(2);
}

static void patience(void) {
  /* narrow kernels of two, never ending at once, and one that needs all */
  const load l[3] = {{.kernel_ns = 7 * MS, .launches = 100, .blocks = 108}, {.kernel_ns = 11 * MS, .launches = 100, .blocks = 108}, {.kernel_ns = 10 * MS, .launches = 10, .blocks = 216}};
  fresh("2ms");
  play(l, 3);
  check(took[2] <= 10 * (10 + 11) * MS, "a wide kernel isn't passed by narrow ones for ever (%llu)", (unsigned long long)took[2]);
  stop(3);
}

static void own_streams(void) {
  /* streams of a client share its part, not the card's */
  const load l[1] = {{.percentage = "50", .kernel_ns = 10 * MS, .launches = 40, .blocks = 54, .streams = 4}};
  fresh("2ms");
  play(l, 1);
  check_equal(took[0], 200 * MS, "a client's streams run at once within its part");
  stop(1);
}

static void against_others(void) {
  /* clients at the first, third and fourth place, a process without MPS at the second */
  const load l[4] = {{.percentage = "25", .kernel_ns = 10 * MS, .launches = 50, .blocks = 54},
                     {.kernel_ns = 10 * MS, .launches = 50, .blocks = 216, .plain = true},
                     {.percentage = "25", .kernel_ns = 10 * MS, .launches = 50, .blocks = 54},
                     {.percentage = "25", .kernel_ns = 10 * MS, .launches = 50, .blocks = 54}};
  fresh("2ms");
  play(l, 4);
  check(near(took[1], 1000 * MS, 2 * MS), "a server with three clients is one process in the round (%llu)", (unsigned long long)took[1]);
  for (int i = 0; i < 4; i++)
    if (i != 1) check(near(took[i], 1000 * MS, 2 * MS), "its clients run at once in its half (%llu)", (unsigned long long)took[i]);
  for (int i = 0; i < 4; i++) check_equal(busy_of(i), 500 * MS, "process %d has its time", i);
  check(near(state_open()->state->header.cards[0].busy_ns, 1000 * MS, 10), "the card had no rest");
  stop(4);
}

static void two_of_each(void) {
  const load l[4] = {{.percentage = "50", .kernel_ns = 10 * MS, .launches = 30, .blocks = 108},
                     {.kernel_ns = 10 * MS, .launches = 30, .blocks = 216, .plain = true},
                     {.percentage = "50", .kernel_ns = 10 * MS, .launches = 30, .blocks = 108},
                     {.kernel_ns = 10 * MS, .launches = 30, .blocks = 216, .plain = true}};
  fresh("1ms");
  play(l, 4);
  for (int i = 0; i < 4; i++) check(near(took[i], 900 * MS, 3 * MS), "process %d has the card in thirds (%llu)", i, (unsigned long long)took[i]);
  stop(4);
}

static unsigned int nvml_percent(int i) {
  nvmlDevice_t device;
  nvmlProcessUtilizationSample_t samples[16];
  unsigned int count = 16;
  NVML(nvmlDeviceGetHandleByIndex_v2)(0, &device);
  if (NVML(nvmlDeviceGetProcessUtilization)(device, samples, &count, 0) != NVML_SUCCESS) return 1000;
  for (unsigned int s = 0; s < count; s++)
    if (samples[s].pid == (unsigned int)all[i].pid) return samples[s].smUtil;
  return 2000;
}

static void utilization(void) {
  const load l[2] = {{.percentage = "50", .kernel_ns = 3000 * MS, .launches = 1, .blocks = 108}, {.percentage = "50", .kernel_ns = 1583 * MS, .launches = 1, .blocks = 108}};
  nvmlDevice_t device;
  nvmlUtilization_t load;
  fresh("2ms");
  NVML(nvmlInit_v2)();
  play(l, 2);
  NVML(nvmlDeviceGetHandleByIndex_v2)(0, &device);
  NVML(nvmlDeviceGetUtilizationRates)(device, &load);
  check_equal(load.gpu, 100, "the card is busy while one client is");
  check(nvml_percent(0) >= 99, "who computed in all samples has all of them (%u)", nvml_percent(0));
  check(nvml_percent(1) >= 45 && nvml_percent(1) <= 55, "who computed in half of them has half (%u)", nvml_percent(1));
  stop(2);
}

static void deaths(void) {
  const load l[3] = {{.percentage = "50", .kernel_ns = 10 * MS, .launches = 50, .blocks = 108}, {.percentage = "50", .kernel_ns = 10 * MS, .launches = 500, .blocks = 108}, {.percentage = "50", .kernel_ns = 10 * MS, .launches = 500, .blocks = 108}};
  fresh("2ms");
  for (int i = 0; i < 3; i++) {
    all[i] = child_start(worker, (void *)&l[i]);
    ask(&all[i]);
    ask(&all[i]);
  }
  tell(&all[0], 1);
  tell(&all[1], 1); /* the third holds the clock until it is killed */
  child_kill(&all[2]);
  check_equal(result_of(0), CUDA_SUCCESS, "a client goes on when another is killed");
  check_equal(took[0], 500 * MS, "in its own time");
  check_equal(result_of(1), CUDA_SUCCESS, "so does the other one");
  check_equal(took[1], 5000 * MS, "at the same time");
  stop(2);
}

static bool waits_for_work(const void *unused) {
  (void)unused;
  soft_region *region = state_open();
  for (uint32_t s = 0; s < soft_slots_high(region); s++) {
    const soft_slot *slot = soft_slot_at(region, s);
    if (slot->state == SOFT_SLOT_LIVE && slot->pid == (uint32_t)all[0].pid && slot->waiters[0].used && slot->waiters[0].queue != SOFT_NO_INDEX) return true;
  }
  return false;
}

static void server_death(void) {
  const load l[2] = {{.kernel_ns = 10 * MS, .launches = 50, .blocks = 108}, {.kernel_ns = 10 * MS, .launches = 50, .blocks = 108, .holds = true}};
  fresh("2ms");
  begin(l, 2);
  ask(&all[1]);
  check(mps_until(waits_for_work, NULL), "a client waits for its kernels");
  kill((pid_t)mps_number("get_server_list"), SIGKILL);
  check_equal(result_of(0), CUDA_ERROR_MPS_RPC_FAILURE, "and hears when the server is killed");
  tell(&all[1], 1);
  check_equal(result_of(1), CUDA_ERROR_MPS_RPC_FAILURE, "who comes with work later, too");
  check(took[0] == 0 && took[1] == 0, "their work is gone, and takes no time");
  check(busy_of(0) + 1 <= 1 && busy_of(1) + 1 <= 1, "nor was the card busy with it");
  stop(2);
}

int main(void) {
  static const mps_scene scenes[] = {half, halves, narrow, crowded, thirds, wide, patience, own_streams, against_others, two_of_each, utilization, deaths, server_death};
  return mps_scenes(scenes, sizeof scenes / sizeof scenes[0]);
}
