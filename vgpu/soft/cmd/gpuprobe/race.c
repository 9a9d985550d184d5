/* race.c - many processes that allocate and free at once: how much was held at most, who was refused. */
#define _GNU_SOURCE
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../units.h"
#include "probe.h"

enum { MOST = 256 };

typedef struct {
  _Atomic uint64_t held, most_held; /* bytes by all, while the calls run */
  _Atomic uint64_t grants[MOST], refusals[MOST], other_errors[MOST];
  _Atomic int ready, go;
} shared;

static void child(shared *s, int self, int device, uint64_t bytes, uint64_t end_ns) {
  CUdeviceptr pointer;
  if (open_device(device) != PROBE_OK) _exit(PROBE_REFUSED);
  atomic_fetch_add(&s->ready, 1);
  while (!atomic_load(&s->go)) nap_ns(200000);
  while (wall_ns() < end_ns || !end_ns) {
    CUresult result = cuda.cuMemAlloc_v2(&pointer, bytes);
    if (result == CUDA_SUCCESS) {
      uint64_t now = atomic_fetch_add(&s->held, bytes) + bytes, most = atomic_load(&s->most_held);
      while (now > most && !atomic_compare_exchange_weak(&s->most_held, &most, now)) {
      }
      atomic_fetch_add(&s->grants[self], 1);
      /* uncount first: a free that another one sees already must not look like an overrun */
      atomic_fetch_sub(&s->held, bytes);
      result = cuda.cuMemFree_v2(pointer);
      if (result != CUDA_SUCCESS) atomic_fetch_add(&s->other_errors[self], 1);
    } else if (result == CUDA_ERROR_OUT_OF_MEMORY) {
      atomic_fetch_add(&s->refusals[self], 1);
    } else {
      atomic_fetch_add(&s->other_errors[self], 1);
      break;
    }
  }
  _exit(PROBE_OK);
}

int probe_race(int argc, char **argv) {
  uint64_t procs = 4, bytes = 1ull << 30, seconds = 2, device = 0;
  pid_t pids[MOST];
  const char *option;

  if ((option = take_option(&argc, argv, "--procs")) && (!units_number(option, &procs) || !procs || procs > MOST)) return usage("--procs can't be %s", option);
  if ((option = take_option(&argc, argv, "--size")) && (!units_bytes(option, &bytes) || !bytes)) return usage("--size can't be %s", option);
  if ((option = take_option(&argc, argv, "--seconds")) && (!units_number(option, &seconds) || seconds > 3600)) return usage("--seconds can't be %s", option);
  if ((option = take_option(&argc, argv, "--device")) && (!units_number(option, &device) || device > 64)) return usage("--device can't be %s", option);
  bool kills = take_flag(&argc, argv, "--kill");
  if (argc) return usage("race takes no %s", argv[0]);
  shared *s = mmap(NULL, sizeof *s, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (s == MAP_FAILED) return PROBE_REFUSED;

  uint64_t end_ns = wall_ns() + (seconds + 1) * 1000000000ull, kill_count = 0;
  for (uint64_t i = 0; i < procs; i++) {
    pids[i] = fork();
    if (pids[i] == 0) child(s, (int)i, (int)device, bytes, end_ns);
  }
  for (int tries = 0; atomic_load(&s->ready) < (int)procs && tries < 5000; tries++) nap_ns(1000000);
  atomic_store(&s->go, 1);
  while (kills && wall_ns() < end_ns) {
    /* one at a time, somewhere in its loop; a new one takes its place */
    nap_ns(20000000);
    uint64_t victim = kill_count++ % procs;
    kill(pids[victim], SIGKILL);
    waitpid(pids[victim], NULL, 0);
    pids[victim] = fork();
    if (pids[victim] == 0) child(s, (int)victim, (int)device, bytes, end_ns);
  }
  int failed = 0;
  for (uint64_t i = 0; i < procs; i++) {
    int status = 0;
    waitpid(pids[i], &status, 0);
    failed += !WIFEXITED(status) || WEXITSTATUS(status) != PROBE_OK;
  }
  uint64_t grants = 0, refusals = 0, others = 0;
  for (uint64_t i = 0; i < procs; i++) {
    line("racer");
    field_number("process", i);
    field_number("grants", s->grants[i]);
    field_number("refusals", s->refusals[i]);
    line_end();
    grants += s->grants[i];
    refusals += s->refusals[i];
    others += s->other_errors[i];
  }
  line("race");
  field_bool("ok", !failed && !others);
  field_number("grants", grants);
  field_number("refusals", refusals);
  field_number("otherErrors", others);
  field_number("failedProcesses", (uint64_t)failed);
  field_number("killed", kill_count);
  if (!kills) field_number("mostHeldBytes", s->most_held); /* a killed process can't uncount */
  line_end();
  return failed || others ? PROBE_REFUSED : PROBE_OK;
}
