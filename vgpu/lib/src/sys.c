/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "sys.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#ifndef MADV_WIPEONFORK
#define MADV_WIPEONFORK 18
#endif

/* By number, since the C library's own functions are points at which a thread can be cancelled, with our locks held. */
static int open_file(const char *path, int flags) {
    return (int)syscall(SYS_openat, AT_FDCWD, path, flags | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY, 0);
}
static void close_file(int fd) { (void)syscall(SYS_close, fd); }

void *carve_map_file(const char *path, size_t bytes, bool writable) {
    int saved = errno;
    void *memory = NULL;
    int fd = open_file(path, writable ? O_RDWR : O_RDONLY);
    if (fd >= 0) {
        struct stat st;
        /* By number: the C library's own name for it is newer than 2.17. */
        if (syscall(SYS_fstat, fd, &st) == 0 && S_ISREG(st.st_mode) && st.st_size >= 0 && (uint64_t)st.st_size >= bytes) {
            memory = mmap(NULL, bytes, writable ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED, fd, 0);
            if (memory == MAP_FAILED) {
                memory = NULL;
            } else {
                (void)madvise(memory, bytes, MADV_DONTFORK);
            }
        }
        close_file(fd);
    }
    errno = saved;
    return memory;
}

static void *map_anonymous(size_t bytes) {
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

void *carve_map_wiped(size_t bytes, bool *wiped) {
    int saved = errno;
    void *memory = map_anonymous(bytes);
    *wiped = memory != NULL && madvise(memory, bytes, MADV_WIPEONFORK) == 0;
    errno = saved;
    return memory;
}

void *carve_map_private(size_t bytes) {
    int saved = errno;
    void *memory = map_anonymous(bytes);
    if (memory != NULL) {
        (void)madvise(memory, bytes, MADV_DONTFORK);
    }
    errno = saved;
    return memory;
}

void carve_unmap(void *memory, size_t bytes) {
    int saved = errno;
    (void)munmap(memory, bytes);
    errno = saved;
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define PLAIN_CALL 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define PLAIN_CALL 1
#endif
#endif

#ifdef PLAIN_CALL
bool carve_on_own_stack(void (*work)(void *), void *argument) {
    work(argument);
    return true;
}
#else
enum { OWN_STACK_BYTES = 512 << 10, GUARD_BYTES = 64 << 10 }; /* no page is larger */

/* What a stack begins with: contexts are some KiB on some machines, too large for the thread's. */
struct own_stack {
    ucontext_t back, there;
    void (*work)(void *);
    void *argument;
};

/* Arguments of makecontext are ints. */
static void begin_there(unsigned int high, unsigned int low) {
    struct own_stack *own = (struct own_stack *)((uintptr_t)high << 32 | low);
    own->work(own->argument);
}

bool carve_on_own_stack(void (*work)(void *), void *argument) {
    int saved = errno, state;
    char *memory = map_anonymous(OWN_STACK_BYTES);
    if (memory == NULL) {
        errno = saved;
        return false;
    }
    struct own_stack *own = (struct own_stack *)(memory + OWN_STACK_BYTES) - 1;
    own->work = work;
    own->argument = argument;
    (void)mprotect(memory, GUARD_BYTES, PROT_NONE);
    (void)pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &state);
    bool good = getcontext(&own->there) == 0;
    if (good) {
        own->there.uc_link = &own->back;
        own->there.uc_stack.ss_sp = memory + GUARD_BYTES;
        own->there.uc_stack.ss_size = (size_t)((char *)own - memory) / 64 * 64 - GUARD_BYTES;
        makecontext(&own->there, (void (*)(void))begin_there, 2, (unsigned int)((uintptr_t)own >> 32), (unsigned int)(uintptr_t)own);
        good = swapcontext(&own->back, &own->there) == 0;
    }
    (void)pthread_setcancelstate(state, &state);
    carve_unmap(memory, OWN_STACK_BYTES);
    errno = saved;
    return good;
}
#endif

long carve_read_file(const char *path, void *buffer, size_t bytes, uint64_t offset) {
    int saved = errno;
    long total = -1;
    int fd = open_file(path, O_RDONLY);
    if (fd >= 0) {
        total = 0;
        while ((size_t)total < bytes) {
            ssize_t n = syscall(SYS_pread64, fd, (char *)buffer + total, bytes - (size_t)total, (off_t)(offset + (uint64_t)total));
            if (n < 0 && errno == EINTR) {
                continue;
            }
            if (n <= 0) {
                break;
            }
            total += n;
        }
        close_file(fd);
    }
    errno = saved;
    return total;
}

uint64_t carve_file_at(int descriptor) {
    struct stat st;
    int saved = errno;
    uint64_t file = 0;
    if (syscall(SYS_fstat, descriptor, &st) == 0) {
        file = ((uint64_t)st.st_dev * 0x9e3779b97f4a7c15u ^ (uint64_t)st.st_ino) * 0x9e3779b97f4a7c15u ^ (uint64_t)st.st_rdev;
        file += file == 0;
    }
    errno = saved;
    return file;
}

uint64_t carve_now(void) {
    struct timespec t = {0, 0};
    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

void carve_sleep(uint64_t nanoseconds) {
    int saved = errno;
    struct timespec t = {(time_t)(nanoseconds / 1000000000u), (long)(nanoseconds % 1000000000u)};
    (void)syscall(SYS_nanosleep, &t, NULL); /* not by the C library's: see open_file */
    errno = saved;
}

void carve_yield(void) { (void)sched_yield(); }

/* By number: the C library may remember the pid across a raw clone (before 2.25). */
uint32_t carve_pid(void) { return (uint32_t)syscall(SYS_getpid); }

uintptr_t carve_thread(void) { return (uintptr_t)pthread_self(); }

/* Writes a number in decimal and gives the end. */
static char *put_number(char *at, uint64_t number) {
    char digits[20];
    int n = 0;
    do {
        digits[n++] = (char)('0' + number % 10);
        number /= 10;
    } while (number != 0);
    while (n > 0) {
        *at++ = digits[--n];
    }
    return at;
}

static uint64_t take_number(const char *at, const char *end) {
    uint64_t number = 0;
    for (; at < end && *at >= '0' && *at <= '9'; at++) {
        number = number * 10 + (uint64_t)(*at - '0');
    }
    return number;
}

/* What /proc/<pid>/stat says. */
struct stat_fields {
    char letter;          /* field 3 */
    uint64_t threads;     /* field 20 */
    uint64_t start_ticks; /* field 22 */
};

/* Field 2 is the program's name in parentheses and may hold anything, so fields are counted from the last one. */
static bool read_stat(const char *path, struct stat_fields *fields) {
    char text[640]; /* 22 numbers and a name are less */
    long n = carve_read_file(path, text, sizeof text, 0);
    if (n <= 0) {
        return false;
    }
    const char *end = text + n;
    const char *at = end;
    while (at > text && at[-1] != ')') {
        at--;
    }
    if (at == text || end - at < 2) {
        return false;
    }
    fields->letter = at[1];
    for (int field = 2; at < end; at++) {
        if (*at == ' ' && ++field == 20) {
            fields->threads = take_number(at + 1, end);
        } else if (*at == ' ' && field == 22) {
            fields->start_ticks = take_number(at + 1, end);
            return true;
        }
    }
    return false;
}

static uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 32)) * 0xd6e8feb86659fd93u;
    x = (x ^ (x >> 32)) * 0xd6e8feb86659fd93u;
    return x ^ (x >> 32);
}

/* The kernel hands each program that is started 16 random bytes. The C library makes its stack and pointer
 * guards of them, so what is written where others can read it is 32 bits of a hash of all 16: no guard can be
 * told from that. */
static uint64_t image_of_this_program(void) {
    uint64_t words[2] = {0, 0};
    const void *random = (const void *)getauxval(AT_RANDOM);
    if (random == NULL) {
        return 0;
    }
    memcpy(words, random, sizeof words);
    return (mix(mix(words[0]) ^ words[1]) >> 32) | 1u << 31;
}

struct carve_identity carve_self(void) {
    int saved = errno;
    struct carve_identity self = {carve_pid(), 0, 0, 0};
    struct stat_fields fields;
    /* Not by number: /proc may be that of another PID namespace, where the number is somebody else's. */
    if (read_stat("/proc/self/stat", &fields)) {
        self.start_ticks = fields.start_ticks;
    }
    char link[64]; /* "pid:[4026531836]" */
    ssize_t n = readlink("/proc/self/ns/pid", link, sizeof link);
    if (n > 5) {
        self.pid_namespace = take_number(link + 5, link + n);
    }
    self.image = image_of_this_program();
    errno = saved;
    return self;
}

/* Whether /proc has processes by the pids of our own PID namespace. */
static bool proc_is_ours(void) {
    char link[16];
    ssize_t n = readlink("/proc/self", link, sizeof link);
    return n > 0 && take_number(link, link + n) == carve_pid();
}

bool carve_process_gone(uint32_t pid, uint64_t start_ticks) {
    int saved = errno;
    bool gone = false;
    /* 0 and numbers that are negative as a pid_t would ask about whole groups. */
    if (pid != 0 && pid <= INT32_MAX) {
        if (kill((pid_t)pid, 0) != 0 && errno == ESRCH) {
            gone = true;
        } else {
            struct stat_fields fields;
            char path[32] = "/proc/";
            memcpy(put_number(path + 6, pid), "/stat", 6);
            /* A process whose first thread has left shows as a zombie too, but goes on while it has others. */
            gone = proc_is_ours() && read_stat(path, &fields) && (((fields.letter == 'Z' || fields.letter == 'X') && fields.threads <= 1) ||
                                               (start_ticks != 0 && fields.start_ticks != start_ticks));
        }
    }
    errno = saved;
    return gone;
}

void carve_back_off(unsigned *round) {
    unsigned n = (*round)++;
    if (n < 64) {
        carve_pause();
    } else if (n < 96) {
        carve_yield();
    } else {
        carve_sleep(20000);
    }
}

void carve_lock_wait(carve_lock_t *lock) {
    unsigned round = 0;
    do {
        while (__atomic_load_n(lock, __ATOMIC_RELAXED) != 0) {
            carve_back_off(&round);
        }
    } while (__atomic_exchange_n(lock, 1, __ATOMIC_ACQUIRE) != 0);
}
