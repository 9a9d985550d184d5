/* SPDX-License-Identifier: Apache-2.0 */
/* box.h: the node's side of the tests: it makes and changes the files, and looks into them. */
#ifndef BOX_H
#define BOX_H

#include <elf.h>
#include <stdbool.h>
#include <sys/types.h>

#include "carve_region.h"
#include "cuda_abi.h"
#include "stub_truth.h"

#define MIB ((uint64_t)1 << 20)
#define DRIVER_AT "/usr/lib/carve/driver/libcuda.so.1"

/* Limits of up to STUB_DEVICES cards whose UUIDs are those of box_uuid; both files are made anew. */
void box_make(unsigned cards, const uint64_t *limit_bytes, uint64_t context_bytes);
void box_uuid(unsigned card, uint8_t uuid[16]);
/* Changes limits in place, as a resize does. */
void box_limit(unsigned card, uint64_t bytes);
void box_context(unsigned card, uint64_t bytes);
void box_flags(uint32_t flags);
void box_card_flags(unsigned card, uint32_t flags);
/* Programs are to be clients of MPS with that percentage of so many multiprocessors. */
void box_mps(unsigned card, uint32_t percent, uint32_t multiprocessors);
void box_residual(unsigned card, uint64_t bytes);
/* The files as they are now. */
struct carve_limits *box_limits(void);
struct carve_usage *box_usage(void);
void box_remap(void);
/* The files that another process has made: box_open maps them, box_forget lets go of those that were. */
void box_open(void);
void box_forget(void);
uint64_t box_used(unsigned card);
uint64_t box_pending(unsigned card);
uint64_t box_refusals(unsigned card);
int box_slot_of(pid_t pid);
/* What the agent does with a slot whose process is gone, and the driver with its memory. */
void box_reclaim(unsigned slot);

/* The stub driver's books, made anew; NULL where the driver is another. */
struct stub_truth *box_truth(unsigned devices, uint64_t total_bytes, uint64_t context_bytes);
void box_truth_bury(struct stub_truth *truth, pid_t pid);

/* What the tests call, through the front, by dlopen of the name. */
struct api {
    void *handle;
    __typeof__(cuInit) *cuInit;
    __typeof__(cuDeviceGetCount) *cuDeviceGetCount;
    __typeof__(cuDeviceTotalMem_v2) *cuDeviceTotalMem_v2;
    __typeof__(cuCtxCreate_v2) *cuCtxCreate_v2;
    __typeof__(cuCtxDestroy_v2) *cuCtxDestroy_v2;
    __typeof__(cuCtxSetCurrent) *cuCtxSetCurrent;
    __typeof__(cuCtxGetCurrent) *cuCtxGetCurrent;
    __typeof__(cuDevicePrimaryCtxRetain) *cuDevicePrimaryCtxRetain;
    __typeof__(cuDevicePrimaryCtxRelease_v2) *cuDevicePrimaryCtxRelease_v2;
    __typeof__(cuDevicePrimaryCtxReset_v2) *cuDevicePrimaryCtxReset_v2;
    __typeof__(cuMemAlloc_v2) *cuMemAlloc_v2;
    __typeof__(cuMemAllocPitch_v2) *cuMemAllocPitch_v2;
    __typeof__(cuMemAllocManaged) *cuMemAllocManaged;
    __typeof__(cuMemFree_v2) *cuMemFree_v2;
    __typeof__(cuMemGetInfo) *cuMemGetInfo;
    __typeof__(cuMemGetInfo_v2) *cuMemGetInfo_v2;
    __typeof__(cuGetProcAddress_v2) *cuGetProcAddress_v2;
    __typeof__(cuMemAllocAsync) *cuMemAllocAsync;
    __typeof__(cuMemFreeAsync) *cuMemFreeAsync;
    __typeof__(cuStreamSynchronize) *cuStreamSynchronize;
};

/* Loads a library and finds all of them in it; ends the program where one is missing. */
struct api api_load(const char *library);
/* The same, with cuInit and a context on device 0. */
struct api api_start(const char *library);

/* Runs work in a child and gives its exit status, or minus the signal that ended it. */
int in_child(int (*work)(void *), void *argument);

/* Calls visit with each symbol that a library's file defines for others, and adds up what it gives; -1 where the file
 * can't be read. */
int box_for_each_symbol(const char *path, int (*visit)(const char *name, const Elf64_Sym *symbol, void *argument), void *argument);
/* Calls visit with the name of each function of the driver's interface that a library's file exports, and adds up
 * what it gives; -1 where the file can't be read. */
int box_for_each_export(const char *path, int (*visit)(const char *name, void *argument), void *argument);

#endif
