/* SPDX-License-Identifier: Apache-2.0 */
/*
 * linkers.c: a program that is linked with libcuda and NVML, or a library if it is built as one. What it calls is
 * bound to the driver's own, but for the hooks; so are variables. Runs over any driver, with or without a card. Quiet;
 * 0 if all is well.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>

int cuInit(unsigned int flags), cuDriverGetVersion(int *version), cuMemAlloc_v2(unsigned long *address, unsigned long bytes);
int nvmlInit_v2(void), nvmlDeviceGetMemoryInfo(void *device, void *memory);
const char *nvmlErrorString(int result);
#ifdef WITH_VARIABLES
extern char cudbgInjectionPath[4096];
#endif
#ifdef UNKNOWN
int UNKNOWN(void);
#endif

static int of_driver(void *function, const char *name, const char *library) {
    void *driver = dlopen(library, RTLD_NOW | RTLD_NOLOAD);
    return driver != NULL && dlsym(driver, name) == function;
}

#define CUDA "/usr/lib/carve/driver/libcuda.so.1"
#define NVML "/usr/lib/carve/driver/libnvidia-ml.so.1"
/* By way of memory, since a function's address may be known at link time to be another's entry. */
#define OF_DRIVER(name, library) of_driver(dlsym(RTLD_DEFAULT, #name), #name, library)

int main(void) {
    int version = 0;
    unsigned long address;
#ifdef UNKNOWN
    UNKNOWN();
#endif
    cuInit(0); /* 100 without a card */
    if (cuDriverGetVersion(&version) != 0 || version < 11000) {
        return 1;
    }
    nvmlInit_v2(); /* 9 without a driver in the kernel */
    if (nvmlErrorString(2) == NULL || strlen(nvmlErrorString(2)) < 5) {
        return 2;
    }
    void *front = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    if (front == NULL || of_driver(dlsym(front, "cuMemAlloc_v2"), "cuMemAlloc_v2", CUDA) || cuMemAlloc_v2(&address, 1 << 20) == 0) {
        return 3; /* there is no context, and no limits file either */
    }
    if (!OF_DRIVER(cuDriverGetVersion, CUDA) || !OF_DRIVER(nvmlErrorString, NVML) || OF_DRIVER(nvmlDeviceGetMemoryInfo, NVML)) {
        return 4;
    }
#ifdef WITH_VARIABLES
    /* A program may have a copy of the variable, which then stands for it everywhere. */
    if (dlsym(RTLD_DEFAULT, "cudbgInjectionPath") != (void *)cudbgInjectionPath || dlsym(front, "cudbgInjectionPath") == NULL ||
        !of_driver(dlsym(front, "cudbgInjectionPath"), "cudbgInjectionPath", CUDA)) {
        return 5;
    }
#endif
    return 0;
}
