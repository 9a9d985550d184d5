/*
 * chain.c - short processes one after another, to see how much of a card they get together.
 *
 * The first process uses no card. On a software GPU it is a member of the clock, so that the time that it takes to start
 * and end a process is none.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../units.h"
#include "probe.h"

enum { MOST_AT_ONCE = 16, LOOK_NS = 200000 };

/* One of them: says that it is ready, works, says that it is done. */
static int work(int report, uint64_t device, uint64_t kernel_ns, uint64_t launches) {
  CUfunction spin;
  int code = open_device((int)device);
  if (code == PROBE_OK) code = spin_function(&spin);
  if (code != PROBE_OK || write(report, "r", 1) != 1) return PROBE_REFUSED;
  CUdeviceptr none = 0;
  void *parameters[] = {&kernel_ns, &none};
  unsigned int blocks = card_width((int)device);
  CUresult result = CUDA_SUCCESS;
  for (uint64_t i = 0; i < launches && result == CUDA_SUCCESS; i++) result = cuda.cuLaunchKernel(spin, blocks, 1, 1, 1024, 1, 1, 0, NULL, parameters, NULL);
  if (result == CUDA_SUCCESS) result = cuda.cuCtxSynchronize();
  if (result != CUDA_SUCCESS) return refused("chain", result);
  return write(report, "d", 1) == 1 ? PROBE_OK : PROBE_REFUSED;
}

typedef struct { pid_t pid; int report; uint64_t end; } one;

static bool begin_one(one *o, uint64_t device, uint64_t kernel_ns, uint64_t launches, uint64_t life_ns) {
  int ends[2];
  char byte, *arguments[] = {"gpuprobe", "chain", "--child", NULL, NULL, NULL, NULL, NULL}, numbers[4][32];
  if (pipe(ends)) return false;
  uint64_t values[4] = {(uint64_t)ends[1], device, kernel_ns, launches};
  for (int i = 0; i < 4; i++) {
    snprintf(numbers[i], sizeof numbers[i], "%llu", (unsigned long long)values[i]);
    arguments[3 + i] = numbers[i];
  }
  o->pid = fork();
  if (o->pid == 0) {
    close(ends[0]);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    execv("/proc/self/exe", arguments);
    _exit(127);
  }
  close(ends[1]);
  o->report = ends[0];
  if (o->pid < 0 || read(o->report, &byte, 1) != 1 || byte != 'r') return false;
  o->end = life_ns ? now_ns() + life_ns : 0;
  return true;
}

/* Whether it has ended; fault where it did by itself and not well. */
static bool over(one *o, bool *fault) {
  struct pollfd at = {.fd = o->report, .events = POLLIN};
  char byte = 0;
  int status = 0;
  bool killed = o->end && now_ns() >= o->end;
  if (killed) kill(o->pid, SIGKILL);
  else if (poll(&at, 1, 0) != 1) return false;
  else if (read(o->report, &byte, 1) != 1 || byte != 'd') *fault = true;
  while (waitpid(o->pid, &status, 0) < 0 && errno == EINTR) {
  }
  *fault |= !killed && status != 0;
  close(o->report);
  o->pid = 0;
  return true;
}

int probe_chain(int argc, char **argv) {
  uint64_t length_ns = 10000000000ull, kernel_ns = 1000000, launches = 10, life_ns = 0, device = 0, at_once = 1, count = 0;
  one ones[MOST_AT_ONCE] = {{0}};
  const char *option;
  bool fault = false;

  if (argc == 5 && strcmp(argv[0], "--child") == 0)
    return work(atoi(argv[1]), strtoull(argv[2], NULL, 10), strtoull(argv[3], NULL, 10), strtoull(argv[4], NULL, 10));
  bool wait_first = take_flag(&argc, argv, "--wait");
  if ((option = take_option(&argc, argv, "--for")) && (!units_nanoseconds(option, &length_ns) || !length_ns)) return usage("--for can't be %s", option);
  if ((option = take_option(&argc, argv, "--kernel")) && (!units_nanoseconds(option, &kernel_ns) || !kernel_ns)) return usage("--kernel can't be %s", option);
  if ((option = take_option(&argc, argv, "--launches")) && (!units_number(option, &launches) || !launches)) return usage("--launches can't be %s", option);
  if ((option = take_option(&argc, argv, "--kill-after")) && (!units_nanoseconds(option, &life_ns) || !life_ns)) return usage("--kill-after can't be %s", option);
  if ((option = take_option(&argc, argv, "--at-once")) && (!units_number(option, &at_once) || !at_once || at_once > MOST_AT_ONCE)) return usage("--at-once can't be %s", option);
  if ((option = take_option(&argc, argv, "--device")) && (!units_number(option, &device) || device > 64)) return usage("--device can't be %s", option);
  if (argc) return usage("chain takes no %s", argv[0]);

  int code = open_cuda();
  if (code != PROBE_OK) return code;
  find_clock();
  line("ready");
  field_number("pid", (uint64_t)getpid());
  line_end();
  if (wait_first) {
    char text[64];
    if (!fgets(text, sizeof text, stdin)) return PROBE_OK;
    sleep_until(strtoull(text, NULL, 10));
  }
  uint64_t end = now_ns() + length_ns;
  while (now_ns() < end && !fault) {
    for (unsigned int i = 0; i < at_once && !fault; i++) {
      if (ones[i].pid && !over(&ones[i], &fault)) continue;
      fault |= !begin_one(&ones[i], device, kernel_ns, life_ns ? UINT64_MAX : launches, life_ns);
      count++;
    }
    sleep_until(now_ns() + LOOK_NS);
  }
  for (unsigned int i = 0; i < at_once; i++) {
    if (!ones[i].pid) continue;
    kill(ones[i].pid, SIGKILL);
    waitpid(ones[i].pid, NULL, 0);
  }
  leave_clock();
  line("load");
  field_result(fault ? CUDA_ERROR_UNKNOWN : CUDA_SUCCESS);
  field_number("processes", count);
  line_end();
  return fault ? PROBE_REFUSED : PROBE_OK;
}
