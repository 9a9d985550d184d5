/* SPDX-License-Identifier: Apache-2.0 */
/*
 * oracle_test REASONS TABLE [LIBCUDA...]: the hook table held against what drivers export.
 *
 * Each export is either hooked, or REASONS says why not, so that a function that a new driver brings can't slip by.
 * Each hook is an export, of the release that the table says. TABLE is the software GPU's list of exports; each
 * LIBCUDA is a real driver's library, which needs no card for that.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "box.h"
#include "cuda_hooks.h"
#include "tap.h"

static const struct { const char *name, *release, *closed; } hooks[] = {
#define X(name, release, parameters, does, rounding, closed) {#name, release, closed},
    CARVE_CUDA_HOOKS(X)
#undef X
};
enum { HOOKS = sizeof hooks / sizeof hooks[0], MOST_REASONS = 512 };

static struct reason { char pattern[80], why[16]; bool used; } reasons[MOST_REASONS];
static int reason_count;

static int number(const char *release) { return (int)(strtol(release, NULL, 10) * 1000 + strtol(strchr(release, '.') + 1, NULL, 10) * 10); }

static bool is_hook(const char *name) {
    for (int i = 0; i < HOOKS; i++) {
        if (strcmp(hooks[i].name, name) == 0) {
            return true;
        }
    }
    return false;
}

/* The name that cuGetProcAddress takes: without version and stream suffix. */
static void plain_name(const char *name, char *plain) {
    strcpy(plain, name);
    size_t n = strlen(plain);
    if (n > 5 && (strcmp(plain + n - 5, "_ptsz") == 0 || strcmp(plain + n - 5, "_ptds") == 0)) {
        plain[n -= 5] = '\0';
    }
    if (n > 3 && plain[n - 3] == '_' && plain[n - 2] == 'v' && plain[n - 1] >= '0' && plain[n - 1] <= '9') {
        plain[n - 3] = '\0';
    }
}

static struct reason *reason_of(const char *name) {
    struct reason *best = NULL;
    char plain[256];
    plain_name(name, plain);
    for (int i = 0; i < reason_count; i++) {
        struct reason *r = &reasons[i];
        size_t n = strlen(r->pattern);
        bool prefix = r->pattern[n - 1] == '*';
        if ((prefix ? strncmp(r->pattern, plain, n - 1) == 0 : strcmp(r->pattern, plain) == 0) &&
            (best == NULL || strlen(r->pattern) > strlen(best->pattern))) {
            best = r;
        }
    }
    return best;
}

static void read_reasons(const char *path) {
    static const char *const known[] = {"query", "work", "order", "host", "range", "view", "graph", "graphics", "residual", "gone", "debugger"};
    FILE *file = fopen(path, "re");
    char line[256];
    int strange = 0;
    while (file != NULL && fgets(line, sizeof line, file) != NULL && reason_count < MOST_REASONS) {
        struct reason *r = &reasons[reason_count];
        if (line[0] == '#' || line[0] == '\n') {
            continue;
        }
        size_t k = 0;
        if (sscanf(line, "%79s %15s", r->pattern, r->why) == 2) {
            while (k < sizeof known / sizeof known[0] && strcmp(known[k], r->why) != 0) {
                k++;
            }
        }
        if (r->why[0] == '\0' || k == sizeof known / sizeof known[0]) {
            strange++;
            printf("# not a reason: %s", line);
        }
        for (int i = 0; i < reason_count; i++) {
            if (strcmp(reasons[i].pattern, r->pattern) == 0) {
                strange++;
                printf("# twice: %s\n", r->pattern);
            }
        }
        reason_count++;
    }
    if (file != NULL) {
        fclose(file);
    }
    check(reason_count > 100 && strange == 0, "%d reasons why something isn't hooked, each of a known kind", reason_count);
}

struct seen { int exports, hooked, unexplained; };

static int explain(const char *name, void *argument) {
    struct seen *s = argument;
    s->exports++;
    if (is_hook(name)) {
        s->hooked++;
        return 1;
    }
    struct reason *r = reason_of(name);
    if (r == NULL) {
        s->unexplained++;
        printf("# %s isn't hooked, and nothing says why\n", name);
        return 1;
    }
    r->used = true;
    return 1;
}

static void against_table(const char *path) {
    FILE *file = fopen(path, "re");
    char line[256], name[80], base[80], stream[16];
    unsigned since;
    struct seen s = {0};
    int wrong = 0, newest = 0;
    bool found[HOOKS] = {false};
    while (file != NULL && fgets(line, sizeof line, file) != NULL) {
        if (line[0] == '#' || sscanf(line, "%79s %79s %u %15s", name, base, &since, stream) != 4) {
            continue;
        }
        explain(name, &s);
        newest = (int)since > newest ? (int)since : newest;
        for (int i = 0; i < HOOKS; i++) {
            if (strcmp(hooks[i].name, name) == 0) {
                found[i] = true;
                if (since != (unsigned)number(hooks[i].release)) {
                    wrong++;
                    printf("# %s is of %u, not of %s\n", name, since, hooks[i].release);
                }
            }
        }
    }
    if (file != NULL) {
        fclose(file);
    }
    for (int i = 0; i < HOOKS; i++) {
        if (!found[i] && number(hooks[i].release) > newest) {
            printf("# %s is of %s, newer than any driver here\n", hooks[i].name, hooks[i].release);
        } else if (!found[i]) {
            wrong++;
            printf("# no driver has %s\n", hooks[i].name);
        }
    }
    check(s.exports > 500 && s.unexplained == 0, "of %d exports %d are hooked, and for the others something says why not", s.exports, s.hooked);
    check(wrong == 0, "all %d hooks are exports, of the release that the table says", HOOKS);
}

/* Whether a later hook has the same name and kind of stream, at most as new. */
static bool superseded(int hook, int version) {
    char plain[256], other[256];
    plain_name(hooks[hook].name, plain);
    for (int i = 0; i < HOOKS; i++) {
        plain_name(hooks[i].name, other);
        if (i != hook && strcmp(plain, other) == 0 && number(hooks[i].release) > number(hooks[hook].release) && number(hooks[i].release) <= version) {
            return true;
        }
    }
    return false;
}

static void against_library(const char *path) {
    struct seen s = {0};
    int count = box_for_each_export(path, explain, &s), asked = 0, wrong = 0;
    check(count > 500 && s.hooked > 20 && s.unexplained == 0, "%s: of %d exports %d are hooked, and for the others something says why not", path, s.exports, s.hooked);
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!check(library != NULL, "%s loads without a card", path)) {
        printf("# %s\n", dlerror());
        return;
    }
    __typeof__(cuGetProcAddress) *ask = (__typeof__(cuGetProcAddress) *)dlsym(library, "cuGetProcAddress");
    for (int i = 0; ask != NULL && i < HOOKS; i++) {
        void *real = dlsym(library, hooks[i].name), *before = NULL, *at = NULL;
        char plain[256];
        int release = number(hooks[i].release);
        size_t n = strlen(hooks[i].name);
        cuuint64_t flags = strcmp(hooks[i].name + n - 5, "_ptsz") == 0 || strcmp(hooks[i].name + n - 5, "_ptds") == 0 ? CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM : CU_GET_PROC_ADDRESS_LEGACY_STREAM;
        plain_name(hooks[i].name, plain);
        if (real == NULL) {
            continue;
        }
        asked++;
        (void)ask(plain, &at, release, flags);
        (void)ask(plain, &before, release - 10, flags);
        if ((at != real && !superseded(i, release)) || before == real) {
            wrong++;
            printf("# %s: the driver doesn't take it to be of %s\n", hooks[i].name, hooks[i].release);
        }
    }
    check(ask == NULL || (asked > 20 && wrong == 0), "and it answers for %d hooks with the release of the table", asked);
}

int main(int argc, char **argv) {
    if (argc < 3) {
        fprintf(stderr, "oracle_test REASONS TABLE [LIBCUDA...]\n");
        return 2;
    }
    read_reasons(argv[1]);
    against_table(argv[2]);
    for (int i = 3; i < argc; i++) {
        against_library(argv[i]);
    }
    int idle = 0, refuse = 0;
    for (int i = 0; i < reason_count; i++) {
        if (!reasons[i].used && strcmp(reasons[i].pattern, "cudbg*") != 0) {
            idle++;
            printf("# nothing needs the reason for %s\n", reasons[i].pattern);
        }
    }
    check(idle == 0, "each reason is needed");
    for (int i = 0; i < HOOKS; i++) {
        refuse += strcmp(hooks[i].closed, "refuse") == 0 || strcmp(hooks[i].closed, "pass") == 0 || strcmp(hooks[i].closed, "the same") == 0 ||
                  strcmp(hooks[i].closed, "operating system error") == 0;
    }
    check(refuse == HOOKS, "each hook says what it does when the limits can't be read");
    return tap_done();
}
