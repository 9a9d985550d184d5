/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "box.h"

#include <dlfcn.h>
#include <elf.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static struct carve_limits *limits;
static struct carve_usage *usage;

static void die(const char *what) {
    perror(what);
    exit(2);
}

static void *map_new(const char *path, size_t bytes, bool create) {
    int fd = open(path, O_RDWR | O_CLOEXEC | (create ? O_CREAT | O_TRUNC : 0), 0666);
    if (fd < 0 || (create && ftruncate(fd, (off_t)bytes) != 0)) {
        die(path);
    }
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (at == MAP_FAILED) {
        die(path);
    }
    close(fd);
    return at;
}

static void close_bank(struct carve_limits_bank *bank, uint64_t generation) {
    bank->generation = generation;
    bank->checksum = 0;
    uint64_t hash = 0xcbf29ce484222325u;
    for (size_t i = 0; i < sizeof *bank; i++) {
        hash = (hash ^ ((const uint8_t *)bank)[i]) * 0x100000001b3u;
    }
    bank->checksum = hash;
}

void box_uuid(unsigned card, uint8_t uuid[16]) { memset(uuid, 0x11 + (int)card, 16); }

void box_forget(void) {
    if (limits != NULL) {
        munmap(limits, sizeof *limits);
        munmap(usage, sizeof *usage);
    }
    limits = NULL;
    usage = NULL;
}

void box_open(void) {
    limits = map_new(CARVE_LIMITS_PATH, sizeof *limits, false);
    usage = map_new(CARVE_USAGE_PATH, sizeof *usage, false);
}

void box_make(unsigned cards, const uint64_t *limit_bytes, uint64_t context_bytes) {
    box_forget();
    /* New inodes: whoever has the old ones mapped keeps those. */
    unlink(CARVE_LIMITS_PATH);
    unlink(CARVE_USAGE_PATH);
    limits = map_new(CARVE_LIMITS_PATH, sizeof *limits, true);
    usage = map_new(CARVE_USAGE_PATH, sizeof *usage, true);
    *limits = (struct carve_limits){.magic = CARVE_LIMITS_MAGIC, .abi = CARVE_ABI, .size = CARVE_LIMITS_SIZE, .generation = 1};
    struct carve_limits_bank *bank = &limits->banks[1];
    bank->card_count = cards;
    for (unsigned i = 0; i < cards; i++) {
        box_uuid(i, bank->cards[i].uuid);
        bank->cards[i].limit_bytes = limit_bytes[i];
        bank->cards[i].context_bytes = context_bytes;
    }
    close_bank(bank, 1);
    usage->magic = CARVE_USAGE_MAGIC;
    usage->abi = CARVE_ABI;
    usage->size = CARVE_USAGE_SIZE;
    usage->slot_count = CARVE_MAX_SLOTS;
    usage->card_count = CARVE_MAX_CARDS;
}

struct carve_limits *box_limits(void) { return limits; }
struct carve_usage *box_usage(void) { return usage; }

void box_remap(void) {
    munmap(usage, sizeof *usage);
    usage = map_new(CARVE_USAGE_PATH, sizeof *usage, false);
}

/* Opens the bank that isn't in force, as a copy of the one that is. */
static struct carve_limits_bank *next_bank(void) {
    struct carve_limits_bank *bank = &limits->banks[(limits->generation + 1) & 1];
    *bank = limits->banks[limits->generation & 1];
    return bank;
}

static void put_in_force(struct carve_limits_bank *bank) {
    close_bank(bank, limits->generation + 1);
    __atomic_store_n(&limits->generation, limits->generation + 1, __ATOMIC_SEQ_CST);
}

void box_limit(unsigned card, uint64_t bytes) {
    struct carve_limits_bank *bank = next_bank();
    bank->cards[card].limit_bytes = bytes;
    put_in_force(bank);
}

void box_context(unsigned card, uint64_t bytes) {
    struct carve_limits_bank *bank = next_bank();
    bank->cards[card].context_bytes = bytes;
    put_in_force(bank);
}

void box_flags(uint32_t flags) {
    struct carve_limits_bank *bank = next_bank();
    bank->flags = flags;
    put_in_force(bank);
}

void box_card_flags(unsigned card, uint32_t flags) {
    struct carve_limits_bank *bank = next_bank();
    bank->cards[card].flags = flags;
    put_in_force(bank);
}

void box_mps(unsigned card, uint32_t percent, uint32_t multiprocessors) {
    struct carve_limits_bank *bank = next_bank();
    bank->cards[card].mps_percent = percent;
    bank->cards[card].multiprocessors = multiprocessors;
    put_in_force(bank);
}

void box_residual(unsigned card, uint64_t bytes) {
    __atomic_store_n(&limits->live[card].residual_bytes, bytes, __ATOMIC_SEQ_CST);
}

static uint64_t charges(unsigned card, bool pending) {
    uint64_t units = 0;
    for (unsigned i = 0; i < CARVE_MAX_SLOTS; i++) {
        uint64_t charge = __atomic_load_n(&usage->lines[card][i].charge, __ATOMIC_SEQ_CST);
        units += pending ? CARVE_CHARGE_PENDING(charge) : CARVE_CHARGE_USED(charge);
    }
    return units << CARVE_UNIT_SHIFT;
}

uint64_t box_used(unsigned card) { return charges(card, false); }
uint64_t box_pending(unsigned card) { return charges(card, true); }

uint64_t box_refusals(unsigned card) {
    uint64_t sum = 0;
    for (unsigned i = 0; i < CARVE_MAX_SLOTS; i++) {
        sum += usage->lines[card][i].refusals;
    }
    return sum;
}

int box_slot_of(pid_t pid) {
    for (int i = 0; i < (int)CARVE_MAX_SLOTS; i++) {
        uint64_t word = usage->processes[i].state_pid;
        if (CARVE_PID(word) == (uint32_t)pid && CARVE_STATE(word) == CARVE_SLOT_LIVE) {
            return i;
        }
    }
    return -1;
}

void box_reclaim(unsigned slot) {
    uint64_t pid = CARVE_PID(usage->processes[slot].state_pid);
    __atomic_store_n(&usage->processes[slot].state_pid, CARVE_STATE_PID(CARVE_SLOT_DEAD, pid), __ATOMIC_SEQ_CST);
    for (unsigned c = 0; c < CARVE_MAX_CARDS; c++) {
        __atomic_store_n(&usage->lines[c][slot].charge, 0, __ATOMIC_SEQ_CST);
    }
}

struct stub_truth *box_truth(unsigned devices, uint64_t total_bytes, uint64_t context_bytes) {
    unlink(STUB_TRUTH_AT);
    struct stub_truth *truth = map_new(STUB_TRUTH_AT, sizeof *truth, true);
    truth->devices = devices;
    truth->total_bytes = total_bytes;
    truth->context_bytes = context_bytes;
    for (unsigned i = 0; i < devices; i++) {
        box_uuid(i, truth->uuid[i]);
    }
    return truth;
}

void box_truth_bury(struct stub_truth *truth, pid_t pid) {
    for (unsigned c = 0; c < STUB_DEVICES; c++) {
        uint64_t bytes = __atomic_exchange_n(&truth->by_process[pid % STUB_PROCESSES][c], 0, __ATOMIC_SEQ_CST);
        __atomic_sub_fetch(&truth->used[c], bytes, __ATOMIC_SEQ_CST);
    }
}

struct api api_load(const char *library) {
    struct api a = {.handle = dlopen(library, RTLD_NOW | RTLD_LOCAL)};
    if (a.handle == NULL) {
        fprintf(stderr, "%s\n", dlerror());
        exit(2);
    }
#define FIND(name)                                                  \
    a.name = (__typeof__(name) *)dlsym(a.handle, #name);            \
    if (a.name == NULL) {                                           \
        fprintf(stderr, "%s has no %s\n", library, #name);          \
        exit(2);                                                    \
    }
    FIND(cuInit)
    FIND(cuDeviceGetCount)
    FIND(cuDeviceTotalMem_v2)
    FIND(cuCtxCreate_v2)
    FIND(cuCtxDestroy_v2)
    FIND(cuCtxSetCurrent)
    FIND(cuCtxGetCurrent)
    FIND(cuDevicePrimaryCtxRetain)
    FIND(cuDevicePrimaryCtxRelease_v2)
    FIND(cuDevicePrimaryCtxReset_v2)
    FIND(cuMemAlloc_v2)
    FIND(cuMemAllocPitch_v2)
    FIND(cuMemAllocManaged)
    FIND(cuMemFree_v2)
    FIND(cuMemGetInfo)
    FIND(cuMemGetInfo_v2)
    a.cuGetProcAddress_v2 = (__typeof__(cuGetProcAddress_v2) *)dlsym(a.handle, "cuGetProcAddress_v2"); /* since CUDA 12 */
    FIND(cuMemAllocAsync)
    FIND(cuMemFreeAsync)
    FIND(cuStreamSynchronize)
    return a;
}

struct api api_start(const char *library) {
    struct api a = api_load(library);
    CUcontext context;
    CUresult result = a.cuInit(0);
    if (result == CUDA_SUCCESS) {
        result = a.cuCtxCreate_v2(&context, 0, 0);
    }
    if (result != CUDA_SUCCESS) {
        fprintf(stderr, "start: error %d\n", result);
        exit(3);
    }
    return a;
}

int in_child(int (*work)(void *), void *argument) {
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        _exit(work(argument));
    }
    int status = 0;
    if (pid < 0 || waitpid(pid, &status, 0) != pid) {
        die("child");
    }
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

int box_for_each_symbol(const char *path, int (*visit)(const char *name, const Elf64_Sym *symbol, void *argument), void *argument) {
    int fd = open(path, O_RDONLY | O_CLOEXEC), count = 0;
    struct stat st;
    if (fd < 0 || fstat(fd, &st) != 0) {
        return -1;
    }
    const char *file = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
    close(fd);
    const Elf64_Ehdr *head = (const Elf64_Ehdr *)file;
    const Elf64_Shdr *sections = (const Elf64_Shdr *)(file + head->e_shoff);
    for (int i = 0; i < head->e_shnum; i++) {
        if (sections[i].sh_type != SHT_DYNSYM) {
            continue;
        }
        const Elf64_Sym *symbols = (const Elf64_Sym *)(file + sections[i].sh_offset);
        const char *names = file + sections[sections[i].sh_link].sh_offset;
        for (size_t s = 0; s < sections[i].sh_size / sizeof *symbols; s++) {
            if (symbols[s].st_shndx != SHN_UNDEF && ELF64_ST_BIND(symbols[s].st_info) != STB_LOCAL) {
                count += visit(names + symbols[s].st_name, &symbols[s], argument);
            }
        }
    }
    munmap((void *)file, (size_t)st.st_size);
    return count;
}

struct of_functions {
    int (*visit)(const char *name, void *argument);
    void *argument;
};

static int visit_function(const char *name, const Elf64_Sym *symbol, void *argument) {
    struct of_functions *of = argument;
    bool is = ELF64_ST_TYPE(symbol->st_info) == STT_FUNC && strncmp(name, "cu", 2) == 0;
    return is ? of->visit(name, of->argument) : 0;
}

int box_for_each_export(const char *path, int (*visit)(const char *name, void *argument), void *argument) {
    struct of_functions of = {visit, argument};
    return box_for_each_symbol(path, visit_function, &of);
}
