/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Whatever subset and order of cards a program asks for, by whatever kind of name, each is held to its own share: cases
 * share-17, vgpu-3, vgpu-4 and vgpu-5. Over the software GPU's two cards.
 */
#define _GNU_SOURCE
#include <string.h>
#include <sys/mman.h>

#include "soft_box.h"
#include "tap.h"

enum { FIRST_MIB = 2000, SECOND_MIB = 3000 };

/* What the files' two cards are called, and what a child found. */
static struct seen {
    char uuid[2][64];
    int count;
    int card[4]; /* of each device, in the order of the limits file */
    unsigned wrong;
} *seen;

static int make_files(void *unused) {
    (void)unused;
    struct api a = start(FIRST_MIB, SECOND_MIB, CARVE_LIMITS_SELF_VISIBLE);
    for (int i = 0; i < 2; i++) {
        CUuuid uuid;
        char *at = seen->uuid[i] + sprintf(seen->uuid[i], "GPU-");
        ((__typeof__(cuDeviceGetUuid_v2) *)dlsym(a.handle, "cuDeviceGetUuid_v2"))(&uuid, i);
        for (int b = 0; b < 16; b++) {
            at += sprintf(at, "%s%02x", b == 4 || b == 6 || b == 8 || b == 10 ? "-" : "", (uint8_t)uuid.bytes[b]);
        }
    }
    return 0;
}

/* On each device: the card's share is shown, held, and charged in its own column. */
static int look_around(void *value) {
    static const uint64_t limits[2] = {FIRST_MIB * MIB, SECOND_MIB * MIB};
    if (value != NULL) {
        setenv("CUDA_VISIBLE_DEVICES", value, 1);
    }
    struct api a = api_load("libcuda.so.1");
    seen->count = 0;
    if (a.cuInit(0) != CUDA_SUCCESS) {
        return 0; /* no device: the driver says so */
    }
    a.cuDeviceGetCount(&seen->count);
    for (int i = 0; i < seen->count && i < 4; i++) {
        CUuuid uuid;
        CUcontext c;
        CUdeviceptr p;
        size_t total = 0;
        seen->card[i] = -1;
        ((__typeof__(cuDeviceGetUuid_v2) *)dlsym(a.handle, "cuDeviceGetUuid_v2"))(&uuid, i);
        for (int card = 0; card < 2; card++) {
            if (memcmp(box_limits()->banks[box_limits()->generation & 1].cards[card].uuid, uuid.bytes, 16) == 0) {
                seen->card[i] = card;
            }
        }
        if (seen->card[i] < 0) {
            seen->wrong++;
            continue;
        }
        unsigned card = (unsigned)seen->card[i];
        uint64_t before[2] = {box_used(0), box_used(1)};
        seen->wrong += a.cuDeviceTotalMem_v2(&total, i) != CUDA_SUCCESS || total != limits[card];
        seen->wrong += a.cuCtxCreate_v2(&c, 0, i) != CUDA_SUCCESS || info(&a).total != limits[card];
        seen->wrong += a.cuMemAlloc_v2(&p, info(&a).free + MIB) != CUDA_ERROR_OUT_OF_MEMORY;
        seen->wrong += a.cuMemAlloc_v2(&p, 500 * MIB) != CUDA_SUCCESS;
        seen->wrong += box_used(card) < before[card] + 500 * MIB || box_used(1 - card) != before[1 - card];
        seen->wrong += a.cuCtxDestroy_v2(c) != CUDA_SUCCESS || box_used(card) != before[card];
    }
    return 0;
}

static void visible(const char *value, const char *cards) {
    box_open();
    memset(seen->card, 0, sizeof seen->card);
    seen->wrong = 0;
    bool ended = in_child(look_around, (void *)value) == 0;
    char found[16] = "";
    for (int i = 0; i < seen->count && i < 4; i++) {
        snprintf(found + strlen(found), sizeof found - strlen(found), "%d", seen->card[i]);
    }
    check(ended && strcmp(found, cards) == 0 && seen->wrong == 0, "%s%s shows cards \"%s\" (%s), each with its share (%u wrong)", value != NULL ? "" : "nothing set", value != NULL ? value : "", cards, found, seen->wrong);
    for (unsigned i = 0; i < CARVE_MAX_SLOTS; i++) {
        if (CARVE_STATE(box_usage()->processes[i].state_pid) == CARVE_SLOT_LIVE) {
            box_reclaim(i);
        }
    }
    box_forget();
}

int main(void) {
    char text[256];
    seen = mmap(NULL, sizeof *seen, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (seen == MAP_FAILED || in_child(make_files, NULL) != 0) {
        return 2;
    }
    visible(NULL, "01");
    visible("0", "0");
    visible("1", "1");
    visible("1,0", "10");
    visible("0,1", "01");
    visible(" 1 , 0 ", "10");
    visible(seen->uuid[1], "1");
    snprintf(text, sizeof text, "%s,%s", seen->uuid[1], seen->uuid[0]);
    visible(text, "10");
    snprintf(text, sizeof text, "%.12s", seen->uuid[1]);
    visible(text, "1");
    snprintf(text, sizeof text, "%.9s,%.14s", seen->uuid[0], seen->uuid[1]);
    visible(text, "01");
    snprintf(text, sizeof text, "1,%s", seen->uuid[0]);
    visible(text, "10");
    /* A list ends at what names no card. */
    visible("1,7,0", "1");
    visible("-1", "");
    visible("", "");
    visible("0,-1,1", "0");
    visible("1,GPU-00000000,0", "1");
    visible("NoDevFiles", "");
    visible("GPU-", ""); /* which both begin with */
    visible("0,0", "");
    /* Names of MIG instances, of which this node has none: as whole, and of the older form. */
    visible("MIG-11111111-2222-3333-4444-555555555555", "");
    snprintf(text, sizeof text, "MIG-%s/1/0", seen->uuid[0]);
    visible(text, "");
    snprintf(text, sizeof text, "1,MIG-%s/1/0,0", seen->uuid[0]);
    visible(text, "1");
    setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID", 1);
    visible("1", "1");
    visible("1,0", "10");
    return tap_done();
}
