/*
 * harness.h - what the tests share: driver roots, libraries opened by path,
 * checks in TAP form, children that answer over a pipe.
 *
 * A process that has initialised CUDA can't hand it on by fork, so tests keep
 * CUDA in children and look on from outside by NVML or by the state itself.
 */
#ifndef SOFT_TEST_HARNESS_H
#define SOFT_TEST_HARNESS_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "../../lib/include/cuda_abi.h"
#include "../../lib/include/nvml_abi.h"
#include "../state/region.h"

#define MIB (1ull << 20)
#define GIB (1ull << 30)

/* One check. Prints "ok N - name" or "not ok N - name". */
bool check_at(bool good, const char *file, int at, const char *format, ...) __attribute__((format(printf, 4, 5)));
#define check(good, ...) check_at((good), __FILE__, __LINE__, __VA_ARGS__)
/* Equal numbers; says both when they aren't. */
bool check_equal_at(uint64_t got, uint64_t want, const char *file, int at, const char *format, ...) __attribute__((format(printf, 5, 6)));
#define check_equal(got, want, ...) check_equal_at((uint64_t)(got), (uint64_t)(want), __FILE__, __LINE__, __VA_ARGS__)
/* The closing lines and the exit status. */
int finish(void);

/* Makes a driver root with the built softgpu: root_make("--card", "a100-80", NULL). Aborts the test when it can't. */
const char *root_make(const char *argument, ...);
void root_remove(void);
/* Runs build/NAME arguments...; gives the exit status, output is thrown away. */
int run_tool(const char *name, const char *argument, ...);
/* The same with standard output kept; free it. */
char *tool_output(int *status, const char *name, const char *argument, ...);
const char *build_dir(void);

/* Entry points of the root's libraries, opened by path. Aborts when one is missing. */
void *cuda_library(void);
void *nvml_library(void);
void *entry(void *library, const char *name);
#define CUDA(name) ((__typeof__(name) *)entry(cuda_library(), #name))
#define NVML(name) ((__typeof__(name) *)entry(nvml_library(), #name))

/* cuInit and the primary context of device 0, current. */
CUresult start_cuda(int device);
uint64_t cuda_free_bytes(void);

/* A child process that runs body(argument) after a fork, and answers numbers over a pipe. */
typedef struct {
  pid_t pid;
  int from, to;
} child;
typedef void (*child_body)(child *self, void *argument);
child child_start(child_body body, void *argument);
/* Both sides: one number at a time. Waits; aborts the test after 60 s. */
void tell(child *c, uint64_t value);
uint64_t ask(child *c);
/* Waits for the end. Gives the exit status, or 1000 + the signal. */
int child_end(child *c);
void child_kill(child *c);

uint64_t real_ns(void);
void nap_ms(unsigned int ms);

/* The root's state, opened as an observer. */
soft_region *state_open(void);
/* Used bytes of a card as the state has them, after burying the dead. */
uint64_t used_bytes(uint32_t card);

/* The text of the conformance kernels. */
extern const char kernel_text[];
CUfunction kernel(const char *name);

#endif
