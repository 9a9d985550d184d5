/* SPDX-License-Identifier: Apache-2.0 */
/* compute_box.h: a share of a software GPU's compute, by the files that an agent would make, and its kernels. */
#ifndef COMPUTE_BOX_H
#define COMPUTE_BOX_H

#include "soft_box.h"

#define MS 1000000ull

__asm__(".section .rodata\n"
        ".globl kernel_text\n"
        "kernel_text:\n"
        ".incbin \"" SOFT_KERNELS "\"\n"
        ".byte 0\n"
        ".previous\n");
extern const char kernel_text[];

#define CUDA(name) ((__typeof__(name) *)dlsym(api->handle, #name))

__attribute__((unused)) static uint64_t (*clock_ns)(void);
__attribute__((unused)) static int (*busy_ns)(unsigned int card, unsigned int pid, uint64_t *out);

/* A share of card 0, by the file that the agent would make. */
__attribute__((unused)) static struct api with_share(uint32_t ppm) {
    make_share(8000, 8000, CARVE_LIMITS_SELF_VISIBLE);
    struct carve_limits *l = box_limits();
    for (int bank = 0; bank < 2; bank++) {
        l->banks[bank].cards[0].compute_ppm = ppm;
        l->banks[bank].cards[0].flags = CARVE_CARD_COMPUTE_FIXED;
    }
    box_flags(CARVE_LIMITS_SELF_VISIBLE);
    if (truncate(CARVE_LIMITS_PATH, CARVE_COMPUTE_AT + CARVE_MAX_CARDS * sizeof(struct carve_compute_card)) != 0) {
        exit(3);
    }
    l->compute = 1;
    clock_ns = (uint64_t(*)(void))dlsym(dlopen(DRIVER_AT, RTLD_NOW | RTLD_NOLOAD), "softgpu_clock_ns");
    busy_ns = (int (*)(unsigned int, unsigned int, uint64_t *))dlsym(dlopen(DRIVER_AT, RTLD_NOW | RTLD_NOLOAD), "softgpu_busy_ns");
    return start_in_share();
}

#endif
