/*
 * load.c - a program that wants the card all the time, or in bursts, to see how much of it it gets.
 *
 * On a software GPU all times are of its clock, so that with a virtual one the figures are the same each time; on a card
 * they are the machine's. Durations are drawn within 30 % of their mean, the same for the same seed.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../units.h"
#include "probe.h"

enum { MOST_KERNELS = 8, MOST_STREAMS = 16, MOST_WINDOWS = 64 };

typedef struct {
  unsigned int blocks;
  uint64_t length_ns, kernels[MOST_KERNELS], streams, seed, burst_ns, think_ns, skip_ns, window_ns;
  uint64_t rare, change_ns; /* one function: one launch in so many, or all from then on, take the second time; 0: each kernel has its own */
  unsigned int kernel_count;
  bool sync_each;
} plan;

/* What was done between two moments. */
typedef struct { uint64_t thought_ns, launched_ns; } window;

/* What one of several processes did, which the first adds up. */
typedef struct { window windows[MOST_WINDOWS], all; } account;

/* xorshift64*: the same on every machine. */
static double chance(uint64_t *state) {
  *state ^= *state >> 12;
  *state ^= *state << 25;
  *state ^= *state >> 27;
  return (double)((*state * 0x2545f4914f6cdd1dull) >> 11) / 9007199254740992.0;
}

static uint64_t drawn(uint64_t mean, double spread, uint64_t *state) {
  return (uint64_t)((double)mean * (1 - spread + 2 * spread * chance(state))) + 1;
}

static bool kernels_of(const char *text, plan *p) {
  char copy[256], *rest = copy, *word;
  if (strlen(text) >= sizeof copy) return false;
  strcpy(copy, text);
  p->kernel_count = 0;
  while ((word = strsep(&rest, ",")))
    if (p->kernel_count == MOST_KERNELS || !units_nanoseconds(word, &p->kernels[p->kernel_count++]) || !p->kernels[p->kernel_count - 1]) return false;
  return true;
}

static void thought(window *windows, const plan *p, uint64_t began, uint64_t from, uint64_t to) {
  for (unsigned int i = 0; p->window_ns && i < MOST_WINDOWS; i++) {
    uint64_t low = began + p->skip_ns + i * p->window_ns, high = low + p->window_ns;
    uint64_t a = from > low ? from : low, b = to < high ? to : high;
    if (b > a) windows[i].thought_ns += b - a;
  }
}

static void launched(window *windows, const plan *p, uint64_t began, uint64_t at, uint64_t ns) {
  if (!p->window_ns || at < began + p->skip_ns) return;
  uint64_t i = (at - began - p->skip_ns) / p->window_ns;
  if (i < MOST_WINDOWS) windows[i].launched_ns += ns;
}

static CUresult work(const plan *p, CUfunction *functions, const uint64_t *iterations, CUstream *streams, uint64_t began, window *windows, window *all) {
  CUdeviceptr none = 0;
  uint64_t random = p->seed * 0x9e3779b97f4a7c15ull + 1, now, launches = 0;
  int64_t burst = p->burst_ns ? (int64_t)drawn(p->burst_ns, 0.5, &random) : 0;
  CUresult result = CUDA_SUCCESS;
  while (result == CUDA_SUCCESS && (now = now_ns()) < began + p->length_ns) {
    unsigned int k = (unsigned int)(chance(&random) * p->kernel_count), function = k;
    if (p->rare || p->change_ns) {
      k = p->rare ? chance(&random) * (double)p->rare < 1 : now >= began + p->change_ns;
      function = 0;
    }
    double factor = 0.7 + 0.6 * chance(&random);
    uint64_t ns = (uint64_t)((double)p->kernels[k] * factor) + 1, count = (uint64_t)((double)iterations[k] * factor) + 1;
    void *parameters[] = {&count, &none};
    result = cuda.cuLaunchKernel(functions[function], p->blocks, 1, 1, 1024, 1, 1, 0, streams[launches++ % p->streams], parameters, NULL);
    if (result != CUDA_SUCCESS) break;
    all->launched_ns += ns;
    launched(windows, p, began, now_ns(), ns); /* a launch that was held back counts when it goes */
    if (p->sync_each) result = cuda.cuCtxSynchronize();
    if (!p->burst_ns || (burst -= (int64_t)ns) > 0) continue;
    if (result == CUDA_SUCCESS) result = cuda.cuCtxSynchronize();
    uint64_t from = now_ns(), until = from + drawn(p->think_ns, 0.5, &random);
    sleep_until(until < began + p->length_ns ? until : began + p->length_ns);
    until = now_ns();
    thought(windows, p, began, from, until);
    all->thought_ns += until - from;
    burst = (int64_t)drawn(p->burst_ns, 0.5, &random);
  }
  return result;
}

/* The first of several processes, by which the others begin and end when it does. */
typedef struct { int ready[2], at[2]; uint64_t count, mine; account *accounts; } family;

static bool found_family(family *f) {
  f->accounts = mmap(NULL, f->count * sizeof *f->accounts, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (f->accounts == MAP_FAILED || pipe(f->ready) || pipe(f->at)) return false;
  for (uint64_t i = 1; i < f->count; i++) {
    pid_t pid = fork();
    if (pid < 0) return false;
    if (pid == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      f->mine = i;
      return freopen("/dev/null", "w", stdout) != NULL;
    }
  }
  return true;
}

/* The text that says when to begin, read once. */
static bool when(const family *f, char text[64]) {
  char done = 0;
  if (f->mine) return write(f->ready[1], &done, 1) == 1 && read(f->at[0], text, 64) == 64;
  if (!fgets(text, 64, stdin)) return false;
  for (uint64_t i = 1; i < f->count; i++)
    if (write(f->at[1], text, 64) != 64) return false;
  return true;
}

static bool all_ready(const family *f) {
  char byte;
  for (uint64_t i = 1; i < f->count && !f->mine; i++)
    if (read(f->ready[0], &byte, 1) != 1) return false;
  return true;
}

static void add_up(const family *f) {
  for (uint64_t i = 1; i < f->count && !f->mine; i++) {
    wait(NULL);
  }
  for (uint64_t i = 1; i < f->count && !f->mine; i++) {
    f->accounts[0].all.launched_ns += f->accounts[i].all.launched_ns;
    for (unsigned int w = 0; w < MOST_WINDOWS; w++) f->accounts[0].windows[w].launched_ns += f->accounts[i].windows[w].launched_ns;
  }
}

int probe_load(int argc, char **argv) {
  plan p = {.length_ns = 10000000000ull, .kernels = {1000000}, .kernel_count = 1, .streams = 1, .seed = 1};
  uint64_t device = 0, iterations[MOST_KERNELS], iteration_ps = 0;
  CUfunction functions[MOST_KERNELS];
  CUstream streams[MOST_STREAMS];
  family f = {.count = 1};
  const char *option;
  CUstream captured = NULL;
  CUgraph graph = NULL;
  bool wait_first = take_flag(&argc, argv, "--wait"), capture = take_flag(&argc, argv, "--capture");

  p.sync_each = take_flag(&argc, argv, "--sync");
  if ((option = take_option(&argc, argv, "--for")) && (!units_nanoseconds(option, &p.length_ns) || !p.length_ns)) return usage("--for can't be %s", option);
  if ((option = take_option(&argc, argv, "--kernels")) && !kernels_of(option, &p)) return usage("--kernels can't be %s: up to %d times with commas between", option, MOST_KERNELS);
  if ((option = take_option(&argc, argv, "--streams")) && (!units_number(option, &p.streams) || !p.streams || p.streams > MOST_STREAMS))
    return usage("--streams can't be %s", option);
  if ((option = take_option(&argc, argv, "--seed")) && !units_number(option, &p.seed)) return usage("--seed can't be %s", option);
  if ((option = take_option(&argc, argv, "--burst")) && !units_nanoseconds(option, &p.burst_ns)) return usage("--burst can't be %s", option);
  if ((option = take_option(&argc, argv, "--think")) && !units_nanoseconds(option, &p.think_ns)) return usage("--think can't be %s", option);
  if ((option = take_option(&argc, argv, "--skip")) && !units_nanoseconds(option, &p.skip_ns)) return usage("--skip can't be %s", option);
  if ((option = take_option(&argc, argv, "--window")) && !units_nanoseconds(option, &p.window_ns)) return usage("--window can't be %s", option);
  if ((option = take_option(&argc, argv, "--iteration-ps")) && (!units_number(option, &iteration_ps) || !iteration_ps)) return usage("--iteration-ps can't be %s", option);
  if ((option = take_option(&argc, argv, "--device")) && (!units_number(option, &device) || device > 64)) return usage("--device can't be %s", option);
  if ((option = take_option(&argc, argv, "--rare")) && (!units_number(option, &p.rare) || !p.rare)) return usage("--rare can't be %s", option);
  if ((option = take_option(&argc, argv, "--change")) && (!units_nanoseconds(option, &p.change_ns) || !p.change_ns)) return usage("--change can't be %s", option);
  if ((p.rare || p.change_ns) && p.kernel_count != 2) return usage("--rare and --change are for two times of one kernel");
  if ((option = take_option(&argc, argv, "--procs")) && (!units_number(option, &f.count) || !f.count || f.count > 64 || (f.count > 1 && !wait_first)))
    return usage("--procs can't be %s: up to 64, with --wait", option);
  if (argc) return usage("load takes no %s", argv[0]);
  if (!p.burst_ns != !p.think_ns) return usage("--burst and --think belong together");

  if (!found_family(&f)) {
    perror("load");
    return PROBE_REFUSED;
  }
  window *windows = f.accounts[f.mine].windows, *all = &f.accounts[f.mine].all;
  p.seed += 1000 * f.mine;
  int code = open_device((int)device);
  if (code == PROBE_OK) {
    find_clock();
    p.blocks = card_width((int)device);
  }
  for (unsigned int k = 0; k < p.kernel_count && code == PROBE_OK; k++) {
    /* A module for each, so that each is a function of its own. */
    code = spin_function(&functions[k]);
    iterations[k] = p.kernels[k];
    /* A software GPU needs no calibration, and with a virtual clock there may be nobody to let the time pass. */
    if (iteration_ps) iterations[k] = p.kernels[k] * 1000 / iteration_ps + 1;
    else if (code == PROBE_OK && !on_soft_clock()) code = spin_iterations(functions[k], p.blocks, 1024, p.kernels[k], &iterations[k]);
  }
  if (code != PROBE_OK) return code;
  CUresult result = CUDA_SUCCESS;
  for (uint64_t i = 0; i < p.streams && result == CUDA_SUCCESS; i++) result = cuda.cuStreamCreate(&streams[i], CU_STREAM_NON_BLOCKING);
  if (capture && result == CUDA_SUCCESS) result = cuda.cuStreamCreate(&captured, CU_STREAM_NON_BLOCKING);
  if (capture && result == CUDA_SUCCESS) result = cuda.cuStreamBeginCapture_v2 ? cuda.cuStreamBeginCapture_v2(captured, CU_STREAM_CAPTURE_MODE_RELAXED) : CUDA_ERROR_NOT_SUPPORTED;
  if (result != CUDA_SUCCESS) return refused("load", result);

  if (!all_ready(&f)) return PROBE_REFUSED;
  line("ready");
  field_number("pid", (uint64_t)getpid());
  field_number("iterationPicoseconds", iterations[0] ? p.kernels[0] * 1000 / iterations[0] : 0);
  line_end();
  if (wait_first) {
    /* "AT" on stdin: the clock's time at which to begin. */
    char text[64];
    if (!when(&f, text)) return PROBE_OK;
    sleep_until(strtoull(text, NULL, 10));
  }
  uint64_t began = now_ns();
  result = work(&p, functions, iterations, streams, began, windows, all);
  uint64_t took = now_ns() - began;
  if (capture && result == CUDA_SUCCESS) result = cuda.cuStreamEndCapture(captured, &graph);
  if (result == CUDA_SUCCESS) result = cuda.cuCtxSynchronize();
  uint64_t drained = now_ns() - began;
  leave_clock(); /* what it waits for from here on isn't time */
  add_up(&f);
  for (unsigned int i = 0; i < MOST_WINDOWS && p.window_ns && p.skip_ns + (i + 1) * p.window_ns <= p.length_ns; i++) {
    line("window");
    field_number("number", i);
    field_number("thoughtNanoseconds", windows[i].thought_ns);
    field_number("workNanoseconds", windows[i].launched_ns);
    line_end();
  }
  line("load");
  field_result(result);
  field_number("tookNanoseconds", took);
  field_number("drainedNanoseconds", drained); /* the same until all of it was done */
  field_number("workNanoseconds", all->launched_ns);
  field_number("thoughtNanoseconds", all->thought_ns);
  field_real("percent", took ? 100.0 * (double)all->launched_ns / (double)took : 0);
  line_end();
  return result == CUDA_SUCCESS ? PROBE_OK : PROBE_REFUSED;
}
