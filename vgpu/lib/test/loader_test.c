/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Whatever way a program gets to libcuda, it gets the front; and what the front doesn't hook is the driver's. Runs
 * over whatever driver stands at the private path.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "box.h"
#include "cuda_hooks.h"
#include "tap.h"

static const char *const hooks[] = {
#define X(name, ...) #name,
    CARVE_CUDA_HOOKS(X)
#undef X
};
enum { HOOKS = sizeof hooks / sizeof hooks[0] };

static bool is_hook(const char *name) {
    for (int i = 0; i < HOOKS; i++) {
        if (strcmp(hooks[i], name) == 0) {
            return true;
        }
    }
    return false;
}

static char libdir[256];
static const char *in_libdir(const char *name) {
    static char path[512];
    snprintf(path, sizeof path, "%s/%s", libdir, name);
    return path;
}

/* Whether an address is in the front: its file is the one behind the driver's name, and not the private one. */
static bool in_front(void *address) {
    Dl_info info;
    struct stat of, front;
    return address != NULL && dladdr(address, &info) != 0 && stat(info.dli_fname, &of) == 0 && stat(in_libdir("libcuda.so.1"), &front) == 0 &&
           of.st_ino == front.st_ino && of.st_dev == front.st_dev;
}

static bool front_handle(void *handle) {
    return handle != NULL && in_front(dlsym(handle, "cuMemAlloc_v2")) && dlsym(handle, "cuDriverGetVersion") != NULL && !in_front(dlsym(handle, "cuDriverGetVersion"));
}

static int by_name(void *name) {
    char path[512];
    snprintf(path, sizeof path, "%s", (const char *)name);
    check(dlopen(path, RTLD_NOW | RTLD_NOLOAD) == NULL, "%s isn't loaded at first", path);
    void *handle = dlopen(path, RTLD_NOW);
    check(front_handle(handle), "%s is the front", path);
    check(dlopen(path, RTLD_NOW | RTLD_NOLOAD) == handle, "%s is found loaded", path);
    const char *const others[] = {"libcuda.so.1", "libcuda.so", in_libdir("libcuda.so.1"), NULL};
    for (int i = 0; others[i] != NULL; i++) {
        check(dlopen(others[i], RTLD_NOW) == handle, "  and is the same as %s", others[i]);
    }
    for (int i = 0; i < 20; i++) {
        dlclose(handle);
    }
    check(front_handle(dlopen("libcuda.so.1", RTLD_NOW)), "  closed and opened again it is the front");
    check(front_handle(dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL)) && in_front(dlsym(RTLD_DEFAULT, "cuMemAlloc_v2")) && dlsym(RTLD_DEFAULT, "cuDriverGetVersion") == dlsym(handle, "cuDriverGetVersion"),
          "  made global, its hooks are found first and the driver's functions behind it");
    return 0;
}

#ifndef UNDER_SANITIZER /* whose runtime can't be loaded twice */
static int in_new_namespace(void *unused) {
    (void)unused;
    void *handle = dlmopen(LM_ID_NEWLM, "libcuda.so.1", RTLD_NOW);
    check(front_handle(handle), "in a namespace of its own (dlmopen) it is the front");
    check(front_handle(dlopen("libcuda.so.1", RTLD_NOW)) && dlopen("libcuda.so.1", RTLD_NOW) != handle, "beside one in the usual namespace");
    return 0;
}
#endif

/* Runs a program that is linked with -lcuda, in an environment of which nothing is left. */
static int linked(void *path) {
    char *const none[] = {NULL};
    execve(path, (char *const[]){path, NULL}, none);
    return 99;
}

/* ---- a twin's own table, which the linker reads ---- */

struct listed { char name[128]; unsigned char info; unsigned long size; };
struct list { struct listed *at; int count; };

static int note(const char *name, const Elf64_Sym *symbol, void *argument) {
    struct list *l = argument;
    l->at = realloc(l->at, (size_t)(l->count + 1) * sizeof *l->at);
    struct listed *s = &l->at[l->count++];
    snprintf(s->name, sizeof s->name, "%s", name);
    s->info = symbol->st_info;
    /* What a function is long is its own matter; a variable's size is what the linker copies. */
    s->size = ELF64_ST_TYPE(symbol->st_info) == STT_OBJECT ? symbol->st_size : 0;
    return 1;
}

static int by_listed_name(const void *a, const void *b) { return strcmp(((const struct listed *)a)->name, ((const struct listed *)b)->name); }

/* Front and driver list the same, and the loader gives the driver's own for all that isn't hooked. */
static void list_names(void *front_handle) {
    struct list front = {0}, driver = {0};
    box_for_each_symbol(in_libdir("libcuda.so.1"), note, &front);
    box_for_each_symbol(DRIVER_AT, note, &driver);
    qsort(front.at, (size_t)front.count, sizeof *front.at, by_listed_name);
    qsort(driver.at, (size_t)driver.count, sizeof *driver.at, by_listed_name);
    void *driver_handle = dlopen(DRIVER_AT, RTLD_NOW | RTLD_NOLOAD);
    int wrong = 0;
    for (int i = 0; i < front.count && i < driver.count; i++) {
        const struct listed *f = &front.at[i], *d = &driver.at[i];
        void *found = dlsym(front_handle, d->name);
        if (strcmp(f->name, d->name) != 0 || f->info != d->info || f->size != d->size || found == NULL ||
            (found == dlsym(driver_handle, d->name)) == is_hook(d->name)) {
            printf("# %s of the front, %s of the driver, found at %p\n", f->name, d->name, found);
            wrong++;
        }
    }
    check(front.count == driver.count && front.count > 20 && wrong == 0, "front (%d) and driver (%d) list the same names, types and sizes, and each leads where it should", front.count, driver.count);
    free(front.at);
    free(driver.at);
}

struct both { void *front, *driver; struct api *api; int hooked, wrong; };

static int compare_export(const char *name, void *argument) {
    struct both *b = argument;
    void *front = dlsym(b->front, name), *driver = dlsym(b->driver, name);
    bool good = driver != NULL && (is_hook(name) ? in_front(front) : front == driver);
    b->hooked += is_hook(name);
    if (!good) {
        b->wrong++;
        printf("# %s: front %p, driver %p\n", name, front, driver);
    }
    return 1;
}

/* The name that cuGetProcAddress takes: without version and stream suffix. */
static void plain_name(const char *name, char *plain) {
    strcpy(plain, name);
    char *suffix = strstr(plain, "_pt");
    if (suffix != NULL) {
        *suffix = '\0';
    }
    suffix = strrchr(plain, '_');
    if (suffix != NULL && suffix[1] == 'v') {
        *suffix = '\0';
    }
}

/* Asks both for the name in all versions and both kinds of stream: what the driver gives is given, except that a
 * hook of the very variant stands in the place of a function that is hooked. */
static int compare_proc_address(const char *name, void *argument) {
    static const int versions[] = {2000, 3020, 4000, 6000, 7000, 8000, 9020, 10020, 11000, 11030, 11040, 11080, 12000, 12010, 12030, 12050, 12080, 13000};
    struct both *b = argument;
    char plain[256];
    plain_name(name, plain);
    __typeof__(cuGetProcAddress_v2) *front = b->api->cuGetProcAddress_v2,
                                    *driver = (__typeof__(cuGetProcAddress_v2) *)dlsym(b->driver, "cuGetProcAddress_v2");
    __typeof__(cuGetProcAddress) *front_v1 = (__typeof__(cuGetProcAddress) *)dlsym(b->front, "cuGetProcAddress"),
                                 *driver_v1 = (__typeof__(cuGetProcAddress) *)dlsym(b->driver, "cuGetProcAddress");
    int asked = 0;
    for (size_t v = 0; v < sizeof versions / sizeof versions[0]; v++) {
        for (cuuint64_t flags = 0; flags < 3; flags++) {
            void *f = NULL, *d = NULL, *f1 = NULL, *d1 = NULL;
            CUdriverProcAddressQueryResult fs = 7, ds = 7;
            CUresult f1r = front_v1(plain, &f1, versions[v], flags), d1r = driver_v1(plain, &d1, versions[v], flags);
            CUresult fr = front == NULL ? d1r : front(plain, &f, versions[v], flags, &fs), dr = d1r;
            if (driver != NULL) {
                dr = driver(plain, &d, versions[v], flags, &ds);
            } else if (front != NULL) { /* case vgpu-12: before CUDA 12 there is the first form only, which the second of a front as built stands on */
                d = d1;
                ds = d1r == CUDA_SUCCESS ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
            }
            void *want = d, *want1 = d1;
            for (int h = 0; h < HOOKS; h++) {
                void *real = dlsym(b->driver, hooks[h]);
                want = d != NULL && d == real ? dlsym(b->front, hooks[h]) : want;
                want1 = d1 != NULL && d1 == real ? dlsym(b->front, hooks[h]) : want1;
            }
            fs = front == NULL ? ds : fs; /* a twin hasn't got the second form then, as the driver hasn't */
            b->hooked += want1 != d1;
            if (fr != dr || fs != ds || f != want || f1r != d1r || f1 != want1) {
                b->wrong++;
                printf("# %s, version %d, flags %d: front %p (%d, %d), driver %p (%d, %d)\n", plain, versions[v], (int)flags, f, fr, fs, d, dr, ds);
            }
            asked++;
        }
    }
    return asked;
}

static int every_function(void *unused) {
    (void)unused;
    uint64_t limits[] = {1000 * MIB};
    box_make(1, limits, 0);
    struct api a = api_load("libcuda.so.1");
    struct both b = {.front = a.handle, .driver = dlopen(DRIVER_AT, RTLD_NOW | RTLD_NOLOAD), .api = &a};
    int count = box_for_each_export(DRIVER_AT, compare_export, &b);
    check(b.driver != NULL && count > 20 && b.hooked >= 20 && b.wrong == 0, "each of the %d functions of the driver is the driver's own, except the %d that are hooked", count, b.hooked);
    b.hooked = 0;
    int asked = box_for_each_export(DRIVER_AT, compare_proc_address, &b);
    check(asked > 1000 && b.hooked > 100 && b.wrong == 0, "so it is with %d answers of cuGetProcAddress, %d of which are hooks", asked, b.hooked);
    int absent = 0, hidden = 0, said = 0;
    bool twin = getenv("TWIN") != NULL;
    for (int i = 0; i < HOOKS; i++) {
        /* A front as it was built answers in the name of the older function. */
        bool stands_in = !twin && strcmp(hooks[i], "cuGetProcAddress_v2") == 0 && dlsym(b.driver, "cuGetProcAddress") != NULL;
        if (dlsym(b.driver, hooks[i]) != NULL || stands_in) {
            continue;
        }
        absent++;
        void *hook = dlsym(b.front, hooks[i]);
        hidden += hook == NULL;
        /* No hook looks at its arguments before it knows that the driver has it. */
        said += !twin && hook != NULL && ((CUresult (*)(void *, void *, void *, void *, void *))hook)(NULL, NULL, NULL, NULL, NULL) == CUDA_ERROR_NOT_SUPPORTED;
    }
    if (twin) {
        check(absent == hidden, "the %d hooks that the driver lacks aren't there", absent);
        list_names(b.front);
    } else {
        check(absent == said, "the %d hooks that the driver lacks say that they aren't supported", absent);
    }
    return 0;
}

/* Two copies would be two fronts with two tables. */
static int one_mapping(void *unused) {
    (void)unused;
    char line[512], names[8][256];
    int count = 0;
    check(dlopen("libcuda.so.1", RTLD_NOW) != NULL && dlopen(in_libdir("libcuda.so"), RTLD_NOW) != NULL, "loaded by two names");
    FILE *maps = fopen("/proc/self/maps", "r");
    while (maps != NULL && fgets(line, sizeof line, maps) != NULL) {
        char *name = strchr(line, '/');
        if (name == NULL || strstr(name, "libcuda") == NULL) {
            continue;
        }
        name[strcspn(name, "\n")] = '\0';
        int i = 0;
        while (i < count && strcmp(names[i], name) != 0) {
            i++;
        }
        if (i == count && count < 8) {
            snprintf(names[count++], sizeof names[0], "%s", name);
        }
    }
    check(count == 2, "two files are mapped, the front and the driver (%d)", count);
    return 0;
}

int main(int argc, char **argv) {
    char versioned[512];
    snprintf(libdir, sizeof libdir, "%s", getenv("LIBDIR"));
    snprintf(versioned, sizeof versioned, "%s/libcuda.so.%s", libdir, getenv("DRIVER_VERSION"));
    const char *const names[] = {"libcuda.so.1", "libcuda.so", versioned, strdup(in_libdir("libcuda.so.1")), strdup(in_libdir("libcuda.so"))};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        check(in_child(by_name, (void *)names[i]) == 0, "%s: ran to its end", names[i]);
    }
#ifndef UNDER_SANITIZER
    check(in_child(in_new_namespace, NULL) == 0, "dlmopen: ran to its end");
#endif
    check(in_child(every_function, NULL) == 0, "every function: ran to its end");
    check(in_child(one_mapping, NULL) == 0, "one mapping: ran to its end");
    if (argc > 1) {
        uint64_t limit = 1000 * MIB;
        box_make(1, &limit, 100 * MIB);
        (void)box_truth(1, 100000 * MIB, 100 * MIB);
        check(in_child(linked, argv[1]) == 0, "a program that is linked with it, without any environment, is limited, and finds what isn't hooked");
    }
    return tap_done();
}
