/* SPDX-License-Identifier: Apache-2.0 */
/* tap.h: one line for each thing that is checked, and the sum at the end. Children that are forked count in. */
#ifndef TAP_H
#define TAP_H

#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

static struct {
    int passed, failed;
} *tap_sums;

__attribute__((constructor)) static void tap_begin(void) {
    tap_sums = mmap(NULL, sizeof *tap_sums, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (tap_sums == MAP_FAILED) {
        abort();
    }
}

__attribute__((format(printf, 2, 3), unused)) static bool check(bool good, const char *sentence, ...) {
    char line[512];
    va_list args;
    int number = __atomic_add_fetch(good ? &tap_sums->passed : &tap_sums->failed, 1, __ATOMIC_SEQ_CST) +
                 __atomic_load_n(good ? &tap_sums->failed : &tap_sums->passed, __ATOMIC_SEQ_CST);
    va_start(args, sentence);
    vsnprintf(line, sizeof line, sentence, args);
    va_end(args);
    printf("%s %d - %s\n", good ? "ok" : "not ok", number, line);
    fflush(stdout);
    return good;
}

/* The last line of a program, which the runner adds up, and its exit status. */
__attribute__((unused)) static int tap_done(void) {
    printf("%d passed, %d failed\n", tap_sums->passed, tap_sums->failed);
    return tap_sums->failed == 0 && tap_sums->passed > 0 ? 0 : 1;
}

#endif
