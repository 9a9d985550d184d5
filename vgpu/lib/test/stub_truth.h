/* SPDX-License-Identifier: Apache-2.0 */
/* stub_truth.h: what the stub driver's cards really hold, shared by all processes of a test. */
#ifndef STUB_TRUTH_H
#define STUB_TRUTH_H

#include <stdint.h>

#define STUB_TRUTH_AT "/usr/lib/carve/driver/truth"

enum { STUB_DEVICES = 4, STUB_PROCESSES = 512 };

struct stub_truth {
    uint32_t devices;
    uint32_t reserved;
    uint64_t total_bytes;
    uint64_t context_bytes; /* of a process' first context on a card; more of them cost nothing */
    uint8_t uuid[STUB_DEVICES][16];
    uint64_t used[STUB_DEVICES];
    uint64_t peak[STUB_DEVICES];
    uint64_t refuse_next; /* so many requests that the driver itself refuses */
    uint64_t calls;       /* of functions that allocate or free */
    uint64_t capturing;   /* streams are being captured */
    uint32_t mps_client;      /* processes are clients of MPS */
    uint32_t multiprocessors; /* that a client sees */
    uint64_t in_holes;    /* so many requests of pools find what is idle in pieces that are too small */
    /* by pid modulo STUB_PROCESSES: what the test gives back for a process that it killed */
    uint64_t by_process[STUB_PROCESSES][STUB_DEVICES];
};

#endif
