/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A program succeeds and fails with a share as it would with a card of that size (case vgpu-8: a program on two cards
 * that ran out of memory only under a shim). Two processes with two cards each make the same random calls, one after
 * another, and every answer goes to a file: once bare, on cards of a size; once with shares of that size of larger
 * cards of the same kind. The files must be equal, figures of free memory included.
 *
 *   same_test FILE SEED CALLS [LIMIT_MIB CONTEXT_MIB]
 *
 * Without a limit it is bare. Memory of processes that end isn't looked at: who frees that is the agent.
 */
#define _GNU_SOURCE
#include <sys/wait.h>

#include "soft_box.h"
#include "tap.h"

enum { PROCESSES = 2, CARDS = 2, PLACES = 48, POOLS = 2 };

enum kind { NOTHING, LINEAR, PITCHED, ORDERED, PRIVATE, BLOCK, MAPPED, ARRAY, OPENED, KINDS };
static const char *const kinds[] = {"nothing", "cuMemAlloc", "cuMemAllocPitch", "cuMemAllocAsync", "cuMemAllocFromPoolAsync", "cuMemCreate", "cuMemCreate and cuMemMap", "cuArray3DCreate", "cuIpcOpenMemHandle"};

enum what { CONTEXT, END_CONTEXT, MAKE, FREE, TRIM, KEEP, POOL, END_POOL, STACK, SETTLE, EXPORT };

/* What the parent asks of a process, and what it answers. */
struct ask {
    enum what what;
    enum kind kind;
    int card, place, pool;
    uint64_t size, more;
    CUipcMemHandle handle;
};
struct answer {
    CUresult result;
    size_t free, total, pitch;
    uint64_t reserved;
    CUipcMemHandle handle;
};

/* ------------------------------------------------------------------------------- a process that does as it is told */

static struct api a;
#define CALL(name) ((__typeof__(name) *)dlsym(a.handle, #name))

static CUcontext contexts[CARDS];
static CUmemoryPool pools[CARDS][POOLS];
static struct place {
    enum kind kind;
    CUdeviceptr pointer;
    CUmemGenericAllocationHandle block;
    CUarray array;
    size_t size;
} places[CARDS][PLACES];

static CUresult make(const struct ask *q, struct answer *r) {
    struct place *p = &places[q->card][q->place];
    CUmemAllocationProp property = {.type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {CU_MEM_LOCATION_TYPE_DEVICE, q->card}};
    CUDA_ARRAY3D_DESCRIPTOR shape = {.Width = q->size, .Height = q->more, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 4};
    CUmemAccessDesc access = {.location = property.location, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUresult result = CUDA_ERROR_NOT_SUPPORTED;
    *p = (struct place){.kind = q->kind, .size = q->size};
    switch (q->kind) {
    case LINEAR: result = a.cuMemAlloc_v2(&p->pointer, q->size); break;
    case PITCHED: result = a.cuMemAllocPitch_v2(&p->pointer, &r->pitch, q->size, q->more, 8); break;
    case ORDERED: result = a.cuMemAllocAsync(&p->pointer, q->size, NULL); break;
    case PRIVATE: result = CALL(cuMemAllocFromPoolAsync)(&p->pointer, q->size, pools[q->card][q->pool], NULL); break;
    case ARRAY: result = CALL(cuArray3DCreate_v2)(&p->array, &shape); break;
    case OPENED: result = CALL(cuIpcOpenMemHandle_v2)(&p->pointer, q->handle, 1); break;
    case BLOCK:
    case MAPPED:
        result = CALL(cuMemCreate)(&p->block, q->size, &property, 0);
        if (result == CUDA_SUCCESS && q->kind == MAPPED) {
            CALL(cuMemAddressReserve)(&p->pointer, q->size, 0, 0, 0);
            result = CALL(cuMemMap)(p->pointer, q->size, 0, p->block, 0);
            CALL(cuMemSetAccess)(p->pointer, q->size, &access, 1);
            CALL(cuMemRelease)(p->block);
        }
        break;
    default: break;
    }
    if (result != CUDA_SUCCESS) {
        *p = (struct place){.kind = NOTHING};
    }
    return result;
}

static CUresult discard(struct place *p) {
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    switch (p->kind) {
    case LINEAR:
    case PITCHED: result = a.cuMemFree_v2(p->pointer); break;
    case ORDERED:
    case PRIVATE: result = a.cuMemFreeAsync(p->pointer, NULL); break;
    case ARRAY: result = CALL(cuArrayDestroy)(p->array); break;
    case OPENED: result = CALL(cuIpcCloseMemHandle)(p->pointer); break;
    case BLOCK: result = CALL(cuMemRelease)(p->block); break;
    case MAPPED:
        result = CALL(cuMemUnmap)(p->pointer, p->size);
        CALL(cuMemAddressFree)(p->pointer, p->size);
        break;
    default: break;
    }
    p->kind = NOTHING;
    return result;
}

static CUmemoryPool pool_of(int card, int pool) {
    CUmemoryPool standard = NULL;
    CALL(cuDeviceGetDefaultMemPool)(&standard, card);
    return pool < 0 ? standard : pools[card][pool];
}

static CUresult obey(const struct ask *q, struct answer *r) {
    CUmemPoolProps properties = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {CU_MEM_LOCATION_TYPE_DEVICE, q->card}};
    cuuint64_t value = q->size;
    CUresult result;
    if (q->what == CONTEXT) {
        return a.cuCtxCreate_v2(&contexts[q->card], 0, q->card);
    }
    a.cuCtxSetCurrent(contexts[q->card]);
    switch (q->what) {
    case MAKE: return make(q, r);
    case FREE: return discard(&places[q->card][q->place]);
    case TRIM: return CALL(cuMemPoolTrimTo)(pool_of(q->card, q->pool), q->size);
    case KEEP: return CALL(cuMemPoolSetAttribute)(pool_of(q->card, q->pool), CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &value);
    case POOL: return CALL(cuMemPoolCreate)(&pools[q->card][q->pool], &properties);
    case END_POOL:
        result = CALL(cuMemPoolDestroy)(pools[q->card][q->pool]);
        pools[q->card][q->pool] = NULL;
        return result;
    case STACK: return CALL(cuCtxSetLimit)(CU_LIMIT_STACK_SIZE, q->size);
    case SETTLE: return a.cuStreamSynchronize(NULL);
    case EXPORT: return CALL(cuIpcGetMemHandle)(&r->handle, places[q->card][q->place].pointer);
    case END_CONTEXT:
        /* What belongs to the context goes with it; the rest is the process's. */
        for (int i = 0; i < PLACES; i++) {
            enum kind kind = places[q->card][i].kind;
            if (kind == ORDERED || kind == PRIVATE) { /* whose they are then is written nowhere */
                discard(&places[q->card][i]);
            } else if (kind == LINEAR || kind == PITCHED || kind == ARRAY) {
                places[q->card][i].kind = NOTHING;
            }
        }
        a.cuStreamSynchronize(NULL);
        result = a.cuCtxDestroy_v2(contexts[q->card]);
        contexts[q->card] = NULL;
        return result;
    default: return CUDA_ERROR_INVALID_VALUE;
    }
}

/* Before a request is refused, what the process's pools don't use is given back: with a share, just what is missing, and
 * also where the pool might have served it, in pieces. Whether a driver does that isn't written anywhere. So that
 * both have the same, the program gives back all, whenever it might come to that. */
static bool scarce(const struct ask *q) {
    struct info now = {0, 0};
    uint64_t most = q->kind == ARRAY ? q->size * q->more * 16 : q->kind == PITCHED ? (q->size + 512) * q->more : q->size;
    if (q->what != MAKE && q->what != STACK && q->what != CONTEXT) {
        return false;
    }
    if (contexts[q->card] != NULL) {
        a.cuCtxSetCurrent(contexts[q->card]);
        now = info(&a);
    }
    return now.free < (q->what == STACK ? 132 * 2048 * q->size : most + most / 8) + 64 * MIB;
}

static void give_back(int card) {
    for (int pool = -1; pool < POOLS; pool++) {
        if (pool_of(card, pool) != NULL) {
            CALL(cuMemPoolTrimTo)(pool_of(card, pool), 0);
        }
    }
}

static int serve(int from, int to) {
    struct ask q;
    a = api_load("libcuda.so.1");
    if (a.cuInit(0) != CUDA_SUCCESS) {
        return 3;
    }
    while (read(from, &q, sizeof q) == sizeof q) {
        struct answer r;
        memset(&r, 0, sizeof r);
        if (scarce(&q)) {
            give_back(q.card);
        }
        r.result = obey(&q, &r);
        if (contexts[q.card] != NULL) {
            cuuint64_t reserved = 0;
            a.cuCtxSetCurrent(contexts[q.card]);
            CALL(cuMemPoolGetAttribute)(pool_of(q.card, -1), CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &reserved);
            a.cuMemGetInfo_v2(&r.free, &r.total);
            r.reserved = reserved;
        }
        if (write(to, &r, sizeof r) != sizeof r) {
            return 4;
        }
    }
    return 0;
}

/* ----------------------------------------------------------------------------------------- the parent, who chooses */

static unsigned seed;
static unsigned pick(unsigned n) { return (unsigned)rand_r(&seed) % n; }

/* A size as programs ask for: small ones, some hundred MiB, a good part of a card. */
static uint64_t some(void) {
    switch (pick(8)) {
    case 0:
    case 1: return 1 + pick(5000);
    case 2: return 1 + pick(3 << 20);
    case 3:
    case 4:
    case 5: return 1 + (uint64_t)pick(1 << 20) * 900;
    default: return 1 + (uint64_t)pick(1 << 20) * 12000;
    }
}

int main(int argc, char **argv) {
    if (argc < 4) {
        fprintf(stderr, "usage: same_test FILE SEED CALLS [LIMIT_MIB CONTEXT_MIB]\n");
        return 2;
    }
    FILE *out = fopen(argv[1], "w");
    int calls = atoi(argv[3]), in[PROCESSES], from[PROCESSES];
    pid_t pids[PROCESSES];
    struct { enum kind kind; bool exported; } live[PROCESSES][CARDS][PLACES];
    bool context[PROCESSES][CARDS] = {{false}}, pool[PROCESSES][CARDS][POOLS] = {{{false}}};
    unsigned had = 0, refused = 0, strange = 0, by_kind[KINDS] = {0};
    memset(live, 0, sizeof live);
    seed = (unsigned)atoi(argv[2]);
    if (out == NULL) {
        perror(argv[1]);
        return 2;
    }
    if (argc > 5) { /* its process ends here, so that nobody but the two has a slot */
        pid_t maker = fork();
        if (maker == 0) {
            start((uint64_t)atoll(argv[4]), (uint64_t)atoll(argv[4]), CARVE_LIMITS_SELF_VISIBLE);
            for (unsigned card = 0; card < CARDS; card++) { /* as the agent has learnt */
                box_context(card, (uint64_t)atoll(argv[5]) * MIB);
            }
            _exit(0);
        }
        waitpid(maker, NULL, 0);
    }
    for (int i = 0; i < PROCESSES; i++) {
        int there[2], back[2];
        if (pipe(there) != 0 || pipe(back) != 0) {
            return 2;
        }
        if ((pids[i] = fork()) == 0) {
            close(there[1]);
            close(back[0]);
            for (int j = 0; j < i; j++) {
                close(in[j]);
                close(from[j]);
            }
            _exit(serve(there[0], back[1]));
        }
        close(there[0]);
        close(back[1]);
        in[i] = there[1], from[i] = back[0];
    }
    for (int n = 0; n < calls; n++) {
        int p = (int)pick(PROCESSES), c = (int)pick(CARDS), at = (int)pick(PLACES), of = (int)pick(POOLS);
        struct ask q = {.card = c, .place = at, .pool = of};
        struct answer r;
        unsigned what = pick(1000);
        if (!context[p][c]) {
            q.what = CONTEXT;
        } else if (what < 3) {
            q.what = END_CONTEXT;
            for (int i = 0; i < PLACES; i++) { /* memory that another has open is left alone */
                q.what = live[p][c][i].exported || live[p][c][i].kind == OPENED ? SETTLE : q.what;
            }
        } else if (what < 20) {
            q.what = what < 8 ? TRIM : KEEP;
            q.pool = pick(2) ? -1 : pool[p][c][of] ? of : -1;
            q.size = pick(3) ? some() : pick(2) ? 0 : UINT64_MAX;
        } else if (what < 30) {
            bool empty = true;
            for (int i = 0; i < PLACES; i++) {
                empty = empty && live[p][c][i].kind != PRIVATE;
            }
            q.what = !pool[p][c][of] ? POOL : empty ? END_POOL : SETTLE;
        } else if (what < 36) {
            q.what = STACK; /* not the heap of malloc, which is charged before the driver takes it */
            q.size = 1 + pick(60000);
        } else if (what < 150) {
            q.what = SETTLE;
        } else if (live[p][c][at].kind != NOTHING) {
            q.what = FREE;
            if (live[p][c][at].exported) {
                q.what = SETTLE;
            } else if (live[p][c][at].kind == LINEAR && pick(6) == 0 && context[1 - p][c]) {
                q.what = EXPORT;
            }
        } else {
            q.what = MAKE;
            q.kind = LINEAR + (enum kind)pick(OPENED - LINEAR);
            q.kind = q.kind == PRIVATE && !pool[p][c][of] ? ORDERED : q.kind;
            q.size = some();
            switch (q.kind) {
            case PITCHED: q.more = 1 + q.size / 8192, q.size = 1 + pick(8192); break;
            case ARRAY: q.more = 1 + pick(4096), q.size = 1 + pick(8192); break;
            case BLOCK:
            case MAPPED: q.size = (q.size + 2 * MIB - 1) / (2 * MIB) * (2 * MIB); break;
            default: break;
            }
        }
        for (int turn = 0; turn < 2; turn++) {
            int who = turn == 0 ? p : 1 - p;
            if (write(in[who], &q, sizeof q) != sizeof q || read(from[who], &r, sizeof r) != sizeof r) {
                fprintf(out, "%d: process %d is gone\n", n, who);
                strange++;
                n = calls;
                break;
            }
            fprintf(out, "%d: process %d, card %d: %d %s of %zu by %zu, place %d, pool %d: %d; %zu of %zu free, %zu in the pool, pitch %zu\n", n, who, c, q.what,
                    kinds[q.kind], (size_t)q.size, (size_t)q.more, q.place, q.pool, r.result, r.free, r.total, (size_t)r.reserved, r.pitch);
            if (q.what == MAKE) {
                had += r.result == CUDA_SUCCESS;
                by_kind[q.kind] += r.result == CUDA_SUCCESS;
            }
            refused += r.result == CUDA_ERROR_OUT_OF_MEMORY;
            strange += r.result != CUDA_SUCCESS && r.result != CUDA_ERROR_OUT_OF_MEMORY;
            if (r.result != CUDA_SUCCESS) {
                break;
            }
            switch (q.what) {
            case CONTEXT: context[p][c] = true; break;
            case POOL: pool[p][c][of] = true; break;
            case END_POOL: pool[p][c][of] = false; break;
            case FREE:
                if (live[p][c][at].kind == OPENED) { /* opened by this process from the other's place of that number */
                    live[1 - p][c][at].exported = false;
                }
                live[p][c][at].kind = NOTHING;
                break;
            case MAKE: live[who][c][q.place].kind = q.kind; break;
            case END_CONTEXT:
                context[p][c] = false;
                for (int i = 0; i < PLACES; i++) {
                    enum kind kind = live[p][c][i].kind;
                    live[p][c][i].kind = kind == BLOCK || kind == MAPPED ? kind : NOTHING;
                }
                break;
            default: break;
            }
            /* Memory that was exported is opened by the other process, at the same place of its own. */
            if (q.what != EXPORT || live[1 - p][c][at].kind != NOTHING) {
                break;
            }
            q.what = MAKE, q.kind = OPENED, q.handle = r.handle;
            live[p][c][at].exported = true;
        }
    }
    for (int i = 0; i < PROCESSES; i++) {
        int status = -1;
        close(in[i]);
        waitpid(pids[i], &status, 0);
        strange += status != 0;
    }
    fclose(out);
    bool all = true;
    for (int k = LINEAR; k < KINDS; k++) {
        all = all && by_kind[k] > 5;
        printf("# %u of %s\n", by_kind[k], kinds[k]);
    }
    check(had > (unsigned)calls / 10 && refused > (unsigned)calls / 100 && all, "%d calls: memory of each kind %u times, %u refusals", calls, had, refused);
    check(strange == 0, "and no other answers (%u)", strange);
    return tap_done();
}
