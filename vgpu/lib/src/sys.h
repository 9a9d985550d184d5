/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sys.h: the library's only door to the operating system and the C library.
 *
 * This code runs inside other people's processes: under their locks, in their constructors, between their
 * fork and exec, with their limits on threads and memory. So nothing here allocates from malloc, starts a
 * thread, prints, exits, changes the environment or installs a handler, and no symbol is used that is newer
 * than glibc 2.17. Functions that fail say so by their result; errno is left as it was found.
 */
#ifndef CARVE_SYS_H
#define CARVE_SYS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define CARVE_LIKELY(x) __builtin_expect(!!(x), 1)
#define CARVE_UNLIKELY(x) __builtin_expect(!!(x), 0)

/* Named points at which the tests stop or kill a process. Nothing in a shipped build. */
#ifdef CARVE_TEST_STEPS
void carve_test_step(const char *name);
#define CARVE_STEP(name) carve_test_step(name)
#else
#define CARVE_STEP(name) ((void)0)
#endif

/* Maps a regular file of at least bytes bytes, shared, and not passed on to a forked child. Doesn't follow
 * a link in the last element of path. NULL where there is no such file or it may not be mapped. */
void *carve_map_file(const char *path, size_t bytes, bool writable);

/* Zeroed memory of the process that a forked child finds zeroed again, however it was forked (Linux 4.14).
 * *wiped is false where the kernel can't do that; then the caller compares carve_pid. NULL: no memory. */
void *carve_map_wiped(size_t bytes, bool *wiped);

/* Calls work on a stack of its own of 512 KiB: for calls into libraries that may want more than is left of the thread's,
 * which can be all but 16 KiB and without a guard behind it. The thread isn't cancelled meanwhile. False, and it wasn't
 * called, where there is no memory. Under sanitizers, which would have to be told, it is a plain call. */
bool carve_on_own_stack(void (*work)(void *), void *argument);

/* Zeroed memory that a forked child doesn't have at all. NULL: no memory. */
void *carve_map_private(size_t bytes);
void carve_unmap(void *memory, size_t bytes);

/* Reads at most bytes bytes of the file from offset; -1 where it can't be opened, else what was read. */
long carve_read_file(const char *path, void *buffer, size_t bytes, uint64_t offset);

/* What file is open at a descriptor, as far as that can be told; 0: none. */
uint64_t carve_file_at(int descriptor);

/* The clock that doesn't jump, in nanoseconds. */
uint64_t carve_now(void);
void carve_sleep(uint64_t nanoseconds);
void carve_yield(void);

/* Who a process is, as the usage file holds it. */
struct carve_identity {
    uint32_t pid;           /* in the own PID namespace */
    uint64_t start_ticks;   /* 0: not known */
    uint64_t pid_namespace; /* 0: not known */
    uint64_t image;         /* 0: not known */
};

uint32_t carve_pid(void);
/* Names the calling thread among those of the process that live. */
uintptr_t carve_thread(void);
struct carve_identity carve_self(void);

/* Whether the process with that pid in the own PID namespace is gone: no such process, a zombie, or another
 * one by now. Without start_ticks (0), or with another namespace's /proc, others aren't told apart. False where that
 * can't be found out. */
bool carve_process_gone(uint32_t pid, uint64_t start_ticks);

/* A lock between the threads of this process, for a few instructions at a time. It needs no set-up but
 * zeroed memory, so a child that finds it wiped finds it free. A waiter sleeps after a while, so that a
 * holder of lower priority gets on. */
typedef uint32_t carve_lock_t;

void carve_lock_wait(carve_lock_t *lock);

static inline void carve_lock(carve_lock_t *lock) {
    if (CARVE_UNLIKELY(__atomic_exchange_n(lock, 1, __ATOMIC_ACQUIRE) != 0)) {
        carve_lock_wait(lock);
    }
}

static inline void carve_unlock(carve_lock_t *lock) { __atomic_store_n(lock, 0, __ATOMIC_RELEASE); }

static inline void carve_pause(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Waits between two looks at something that another process is about to change: first by spinning, later
 * by giving the processor away, then by sleeping. *round counts from 0. */
void carve_back_off(unsigned *round);

#endif
