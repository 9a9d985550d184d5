/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Room for the names of the driver's other functions. No code uses it: vgpu/twin, on the node, fills it in, so that
 * a program linked with the front finds what the driver of that node exports.
 *
 *   .carve.room    the twin's symbol table, names and hash tables; read-only
 *   .carve.behind  where the symbols of functions point that the driver answers. The loader never gives these
 *                  addresses to anybody, since no hash table leads to them; whoever calls one all the same stops
 *                  there. Four bytes each
 *   .carve.data    the same for variables: their sizes and alignments are the driver's
 *
 * Pages that nobody touches cost address space only.
 */
#if defined(__x86_64__)
#define TRAP "0x0b0f0b0f" /* ud2, twice */
#elif defined(__aarch64__)
#define TRAP "0" /* udf #0 */
#else
#error "no trap for this architecture"
#endif

__asm__(".section .carve.room,\"a\",%progbits\n"
        ".balign 64\n"
        ".zero 256 * 1024\n"
        ".section .carve.behind,\"ax\",%progbits\n"
        ".balign 64\n"
        ".fill 4096, 4, " TRAP "\n"
        ".section .carve.data,\"aw\",%nobits\n"
        ".balign 64\n"
        ".zero 64 * 1024\n"
        ".text\n");

/* A translation unit must have something in it. */
extern const char carve_room_is_filled_in_by_vgpu_twin;
