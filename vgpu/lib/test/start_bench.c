/* SPDX-License-Identifier: Apache-2.0 */
/*
 * start_bench: how long it takes until 200 processes that start at once have a context each, under the front and
 * without it, over the software GPU, turn and turn about. Prints the ratio of the medians.
 */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "soft_box.h"

enum { PROCESSES = 200, ROUNDS = 7 };

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static int make_files(void *unused) {
    (void)unused;
    make_share(1000000, 1000, 0);
    return 0;
}

/* One of them, in a program of its own. */
static int begin(const char *library, int ready) {
    void *handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    __typeof__(cuInit) *init = handle == NULL ? NULL : (__typeof__(cuInit) *)dlsym(handle, "cuInit");
    __typeof__(cuCtxCreate_v2) *create = handle == NULL ? NULL : (__typeof__(cuCtxCreate_v2) *)dlsym(handle, "cuCtxCreate_v2");
    __typeof__(cuMemAlloc_v2) *allocate = handle == NULL ? NULL : (__typeof__(cuMemAlloc_v2) *)dlsym(handle, "cuMemAlloc_v2");
    CUcontext context;
    CUdeviceptr p;
    char good = init != NULL && init(0) == CUDA_SUCCESS && create(&context, 0, 0) == CUDA_SUCCESS && allocate(&p, 2 * MIB) == CUDA_SUCCESS;
    return write(ready, &good, 1) == 1 && good ? 0 : 1;
}

static double all_at_once(const char *library) {
    int gate[2], ready[2];
    char number[16];
    if (pipe(gate) != 0 || pipe(ready) != 0) {
        exit(2);
    }
    snprintf(number, sizeof number, "%d", ready[1]);
    for (int i = 0; i < PROCESSES; i++) {
        pid_t pid = fork();
        if (pid == 0) {
            char byte;
            close(gate[1]);
            if (read(gate[0], &byte, 1) == 0) {
                execl("/proc/self/exe", "start_bench", "one", library, number, (char *)NULL);
            }
            _exit(9);
        }
        if (pid < 0) {
            perror("fork");
            exit(2);
        }
    }
    double from = now();
    close(gate[1]);
    int good = 0;
    for (int i = 0; i < PROCESSES; i++) {
        char byte = 0;
        good += read(ready[0], &byte, 1) == 1 && byte == 1;
    }
    double took = now() - from;
    for (int i = 0; i < PROCESSES; i++) {
        wait(NULL);
    }
    close(gate[0]), close(ready[0]), close(ready[1]);
    if (good != PROCESSES) {
        fprintf(stderr, "%d of %d began\n", good, PROCESSES);
        exit(1);
    }
    return took;
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv) {
    double front[ROUNDS], bare[ROUNDS];
    if (argc == 4 && strcmp(argv[1], "one") == 0) {
        return begin(argv[2], atoi(argv[3]));
    }
    for (int i = -1; i < ROUNDS; i++) {
        if (in_child(make_files, NULL) != 0) { /* new ones, since nobody reclaims here */
            return 2;
        }
        double first = all_at_once(i % 2 == 0 ? "libcuda.so.1" : DRIVER_AT), second = all_at_once(i % 2 == 0 ? DRIVER_AT : "libcuda.so.1");
        if (i >= 0) {
            front[i] = i % 2 == 0 ? first : second;
            bare[i] = i % 2 == 0 ? second : first;
        }
    }
    qsort(front, ROUNDS, sizeof front[0], by_value);
    qsort(bare, ROUNDS, sizeof bare[0], by_value);
    printf("start200_ratio %.2f ratio\n", front[ROUNDS / 2] / bare[ROUNDS / 2]);
    fprintf(stderr, "%d processes at once: %.0f ms under the front, %.0f ms without\n", PROCESSES, 1e3 * front[ROUNDS / 2], 1e3 * bare[ROUNDS / 2]);
    return 0;
}
