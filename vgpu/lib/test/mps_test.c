/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A program that must be a client of MPS starts as one and with its percentage, or not at all: case node-21. Over the
 * stub driver, which says what a driver says to a client and to others.
 */
#define _GNU_SOURCE
#include <string.h>

#include "box.h"
#include "tap.h"

enum { CARDS = 2, ALL = 108, CONTEXT_MIB = 100 };

/* One start of a program. */
struct start {
    uint32_t percent[CARDS]; /* in the limits file; 0: it needn't be a client */
    uint32_t known;          /* multiprocessors of the card, as the limits file has them */
    bool client;             /* what the driver says */
    uint32_t sees;
    bool good;
    const char *what;
};

static struct stub_truth *truth;

static int run(void *argument) {
    const struct start *s = argument;
    struct api a = api_load("libcuda.so.1");
    CUcontext c = NULL, primary = NULL;
    CUdeviceptr p = 0;
    CUresult want = s->good ? CUDA_SUCCESS : CUDA_ERROR_MPS_CONNECTION_FAILED;
    check(a.cuInit(0) == want, "%s: cuInit is %d", s->what, want);
    check(a.cuInit(0) == want, "%s: and so when asked again", s->what);
    CUresult made = a.cuCtxCreate_v2(&c, 0, 0), retained = a.cuDevicePrimaryCtxRetain(&primary, 1);
    check(made == want && retained == want, "%s: contexts too, for a program that goes on (%d, %d)", s->what, made, retained);
    if (s->good) {
        check(a.cuCtxSetCurrent(c) == CUDA_SUCCESS && a.cuMemAlloc_v2(&p, 10 * MIB) == CUDA_SUCCESS && box_used(0) >= 10 * MIB, "%s: memory is charged as ever", s->what);
    } else {
        check(box_used(0) == 0 && box_used(1) == 0 && truth->used[0] == 0 && truth->used[1] == 0, "%s: nothing is charged, nothing is on the cards", s->what);
    }
    return 0;
}

static void start(struct start s) {
    const uint64_t limits[CARDS] = {1000 * MIB, 1000 * MIB};
    box_make(CARDS, limits, CONTEXT_MIB * MIB);
    truth = box_truth(CARDS, 80000 * MIB, CONTEXT_MIB * MIB);
    truth->mps_client = s.client;
    truth->multiprocessors = s.sees;
    for (unsigned i = 0; i < CARDS; i++) {
        box_mps(i, s.percent[i], s.known);
    }
    check(in_child(run, &s) == 0, "%s: it ended well", s.what);
}

int main(void) {
    start((struct start){{0, 0}, 0, false, ALL, true, "no client, and none need be"});
    start((struct start){{0, 0}, 0, true, 32, true, "a client that needn't be one"});
    start((struct start){{30, 30}, ALL, false, ALL, false, "cleared its environment: no client"});
    start((struct start){{100, 100}, ALL, false, ALL, false, "no client, with all of the card"});
    start((struct start){{0, 30}, ALL, false, ALL, false, "no client, on its second card only"});
    start((struct start){{30, 30}, ALL, true, 32, true, "a client with its percentage"});
    start((struct start){{30, 30}, ALL, true, 34, true, "a client, rounded up by pairs"});
    start((struct start){{30, 30}, ALL, true, 40, true, "a client, rounded up by eights"});
    start((struct start){{30, 30}, ALL, true, 42, false, "a client with more than its percentage"});
    start((struct start){{30, 30}, ALL, true, ALL, false, "a client that cleared its percentage"});
    start((struct start){{30, 30}, ALL, true, 2, true, "a client that asked for less"});
    start((struct start){{30, 30}, ALL, true, 0, false, "a client whose driver doesn't say what it sees"});
    start((struct start){{100, 100}, ALL, true, ALL, true, "a client with all of the card"});
    start((struct start){{30, 30}, 0, true, ALL, true, "a client of a card whose size isn't known"});
    start((struct start){{1, 1}, ALL, true, 2, true, "one percent is some multiprocessors"});
    return tap_done();
}
