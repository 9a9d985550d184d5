/*
 * mps.h - what the tests of MPS share: a daemon at a directory of its own, the
 * control program, and children that are told call by call what to do.
 */
#ifndef SOFT_TEST_MPS_H
#define SOFT_TEST_MPS_H

#include "harness.h"

/* Environment of a client; NULL leaves a variable out. */
typedef struct {
  const char *pipe_dir;     /* NULL: that of mps_dir(); "" none */
  const char *percentage, *limits, *cards;
  uid_t uid;
  bool own_shm;             /* sees a /dev/shm of its own */
} mps_wish;

/* What a child can be told; the argument is or-ed in, shifted by 8. Each gives one answer. */
enum {
  DO_START = 1,    /* cuInit and the primary context: CUresult */
  DO_INIT,         /* cuInit: CUresult */
  DO_ALLOC,        /* MiB: CUresult */
  DO_ATTRIBUTE,    /* number: value */
  DO_AFFINITY,     /* cuDeviceGetExecAffinitySupport: value */
  DO_LAUNCH,       /* milliseconds of carve_spin on the whole card: CUresult */
  DO_SYNC,         /* CUresult */
  DO_WILD,         /* a kernel that writes where nothing is, and a wait for it: CUresult */
  DO_CONTEXT,      /* another context with so many multiprocessors: what it then has, or 1000 + CUresult */
  DO_END           /* no answer */
};

const char *mps_dir(void);
/* Starts the root's daemon behind; its exit status. options may be "". */
int mps_daemon_start(const char *environment, const char *options);
/* One line to the control program: its output (static) and exit status. */
const char *mps_control(int *status, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* First number that a line gives, 0 none. */
long mps_number(const char *format, ...) __attribute__((format(printf, 1, 2)));
pid_t mps_daemon_pid(void);
/* Ends daemon and servers, however they are. */
void mps_clear(void);

child mps_child(const mps_wish *wish);
uint64_t mps_do(child *c, int what, uint64_t argument);
void mps_say(child *c, int what, uint64_t argument);
void mps_end(child *c);

/* Runs each scene in a process of its own and clears up after it: what main returns. */
typedef void (*mps_scene)(void);
int mps_scenes(const mps_scene *scenes, unsigned int count);

/* Waits until good gives true, for ten seconds at most. */
bool mps_until(bool (*good)(const void *about), const void *about);
bool mps_is_gone(const void *pid);

#endif
