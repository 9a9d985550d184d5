/* serve.c - a program that holds memory and says each second what it has. */
#define _GNU_SOURCE
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "../units.h"
#include "probe.h"

enum { MOST = 4096 };

static struct { CUdeviceptr pointer; uint64_t bytes; } held[MOST];
static int count;

static void state_fields(void) {
  size_t left = 0, total = 0;
  uint64_t own = 0;
  for (int i = 0; i < count; i++) own += held[i].bytes;
  field_number("pid", (uint64_t)getpid());
  field_number("heldBytes", own);
  if (cuda.cuMemGetInfo_v2(&left, &total) == CUDA_SUCCESS) {
    field_number("freeBytes", left);
    field_number("totalBytes", total);
  }
}

static int take(const char *size, bool managed) {
  uint64_t bytes = 0;
  CUresult result = CUDA_ERROR_INVALID_VALUE;
  if (units_bytes(size, &bytes) && count < MOST) {
    CUdeviceptr *pointer = &held[count].pointer;
    result = managed ? cuda.cuMemAllocManaged(pointer, bytes, CU_MEM_ATTACH_GLOBAL) : cuda.cuMemAlloc_v2(pointer, bytes);
  }
  if (result == CUDA_SUCCESS) held[count++].bytes = bytes;
  line("alloc");
  field_result(result);
  field_number("askedBytes", bytes);
  state_fields();
  line_end();
  return result == CUDA_SUCCESS ? PROBE_OK : PROBE_REFUSED;
}

static void give(const char *number) {
  uint64_t which = 0;
  CUresult result = CUDA_ERROR_INVALID_VALUE;
  if (units_number(number, &which) && which < (uint64_t)count) {
    result = cuda.cuMemFree_v2(held[which].pointer);
    if (result == CUDA_SUCCESS) held[which] = held[--count];
  }
  line("free");
  field_result(result);
  state_fields();
  line_end();
}

static void launch(const char *time) {
  static CUfunction spin;
  uint64_t ns = 0, iterations = 0;
  CUdeviceptr none = 0;
  void *parameters[] = {&iterations, &none};
  if (!units_nanoseconds(time, &ns) || (!spin && spin_function(&spin) != PROBE_OK)) return;
  if (spin_iterations(spin, 1, 32, ns, &iterations) != PROBE_OK) return;
  uint64_t began = wall_ns();
  CUresult result = cuda.cuLaunchKernel(spin, 1, 1, 1, 32, 1, 1, 0, NULL, parameters, NULL);
  if (result == CUDA_SUCCESS) result = cuda.cuCtxSynchronize();
  line("launch");
  field_result(result);
  field_real("wallMilliseconds", (double)(wall_ns() - began) / 1e6);
  line_end();
}

/* Puts memory of its own in the place of all that is mapped of a file. */
static void unmap(const char *path) {
  unsigned count = 0;
  char row[8192];
  FILE *maps = fopen("/proc/self/maps", "re");
  while (maps && fgets(row, sizeof row, maps)) {
    unsigned long from, to;
    int name = 0;
    row[strcspn(row, "\n")] = 0;
    if (sscanf(row, "%lx-%lx %*s %*s %*s %*s %n", &from, &to, &name) == 2 && name && strcmp(row + name, path) == 0)
      count += mmap((void *)from, to - from, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != MAP_FAILED;
  }
  if (maps) fclose(maps);
  line("unmap");
  field_bool("ok", count > 0);
  line_end();
}

static void obey(char *row) {
  char *word = strtok(row, " \t\r\n"), *value = strtok(NULL, " \t\r\n");
  if (!word) return;
  if (strcmp(word, "quit") == 0) exit(PROBE_OK);
  if (strcmp(word, "alloc") == 0 && value) {
    take(value, false);
  } else if (strcmp(word, "managed") == 0 && value) {
    take(value, true);
  } else if (strcmp(word, "free") == 0 && value) {
    give(value);
  } else if (strcmp(word, "launch") == 0 && value) {
    launch(value);
  } else if (strcmp(word, "unmap") == 0 && value) {
    unmap(value);
  } else if (strcmp(word, "exec") == 0 && value) {
    char *arguments[16] = {value};
    for (int n = 1; n < 15 && (arguments[n] = strtok(NULL, " \t\r\n")); n++) continue;
    execvp(value, arguments);
    line("exec"); /* only where it failed */
    field_bool("ok", false);
    line_end();
  } else if (strcmp(word, "info") == 0) {
    line("memory");
    field_bool("ok", true);
    state_fields();
    line_end();
  } else {
    line("unknown");
    field_bool("ok", false);
    field_text("command", word);
    line_end();
  }
}

int probe_serve(int argc, char **argv) {
  uint64_t device = 0;
  char buffer[1024];
  size_t filled = 0;
  bool input = true;
  const char *option = take_option(&argc, argv, "--device");
  if (option && (!units_number(option, &device) || device > 64)) return usage("--device can't be %s", option);
  int code = open_device((int)device);
  if (code != PROBE_OK) return code;
  for (int i = 0; i < argc; i++)
    if (take(argv[i], false) != PROBE_OK) code = PROBE_REFUSED;
  if (code != PROBE_OK) return code;
  uint64_t next = wall_ns();
  for (;;) {
    uint64_t now = wall_ns();
    if (now >= next) {
      line("memory");
      field_bool("ok", true);
      state_fields();
      line_end();
      next = now + 1000000000ull;
    }
    struct pollfd stdin_fd = {.fd = input ? 0 : -1, .events = POLLIN};
    if (poll(&stdin_fd, 1, (int)((next - now) / 1000000 + 1)) <= 0) continue;
    ssize_t n = read(0, buffer + filled, sizeof buffer - filled - 1);
    if (n <= 0) {
      input = false; /* as in a pod without stdin: go on until killed */
      continue;
    }
    filled += (size_t)n;
    buffer[filled] = 0;
    char *from = buffer;
    for (char *end; (end = strchr(from, '\n')); from = end + 1) {
      *end = 0;
      obey(from);
    }
    filled -= (size_t)(from - buffer);
    memmove(buffer, from, filled);
    if (filled == sizeof buffer - 1) filled = 0;
  }
}
