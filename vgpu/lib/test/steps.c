/* SPDX-License-Identifier: Apache-2.0 */
/* steps.c: part of the test build of the front only: stops or kills the process at a named step. */
#define _GNU_SOURCE
#include <signal.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

void carve_test_step(const char *name);
__attribute__((visibility("default"))) void carve_test_arm(const char *name, unsigned after, int signal_number);
__attribute__((visibility("default"))) unsigned carve_test_met(const char *name);

enum { MOST_ARMED = 4 };
static struct armed { const char *name; unsigned after; int signal_number; } armed[MOST_ARMED];
static struct { const char *name; unsigned times; } met[64];

/* The signal comes when the step has been passed after more times. What is armed while something is armed
 * counts from when that has fired. The name must stay where it is. */
void carve_test_arm(const char *name, unsigned after, int signal_number) {
    for (unsigned i = 0; i < MOST_ARMED; i++) {
        if (armed[i].name == NULL) {
            armed[i] = (struct armed){name, after, signal_number};
            return;
        }
    }
}

unsigned carve_test_met(const char *name) {
    for (unsigned i = 0; i < sizeof met / sizeof met[0] && met[i].name != NULL; i++) {
        if (strcmp(met[i].name, name) == 0) {
            return met[i].times;
        }
    }
    return 0;
}

void carve_test_step(const char *name) {
    for (unsigned i = 0; i < sizeof met / sizeof met[0]; i++) {
        if (met[i].name == NULL) {
            met[i].name = name;
        }
        if (strcmp(met[i].name, name) == 0) {
            met[i].times++;
            break;
        }
    }
    if (armed[0].name != NULL && strcmp(armed[0].name, name) == 0 && armed[0].after-- == 0) {
        int signal_number = armed[0].signal_number;
        memmove(&armed[0], &armed[1], sizeof armed - sizeof armed[0]);
        armed[MOST_ARMED - 1].name = NULL;
        syscall(SYS_kill, syscall(SYS_getpid), signal_number);
    }
}
