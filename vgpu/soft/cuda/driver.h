/*
 * driver.h - what the parts of the software libcuda share.
 *
 * Every entry point runs as: ENTER (is the driver initialised, are we still
 * the process that did it), work under the process's one lock, LEAVE. Waiting
 * happens outside that lock. Handles are checked against a table before they
 * are followed, so a stale or made-up one is an error and no crash.
 */
#ifndef SOFT_DRIVER_H
#define SOFT_DRIVER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../../lib/include/cuda_abi.h"
#include "../state/region.h"

#define EXPORT __attribute__((visibility("default")))

typedef enum { HANDLE_NONE = 0, HANDLE_CONTEXT, HANDLE_STREAM, HANDLE_EVENT, HANDLE_MODULE, HANDLE_FUNCTION, HANDLE_LIBRARY, HANDLE_KERNEL, HANDLE_POOL, HANDLE_ARRAY, HANDLE_MIPMAP, HANDLE_EXTERNAL, HANDLE_GRAPH, HANDLE_NODE, HANDLE_EXEC, HANDLE_OBJECT } handle_kind;

typedef struct block block; /* arena.h */
typedef struct CUctx_st context;
typedef struct CUstream_st stream;
typedef struct CUevent_st event;

struct CUstream_st {
  context *owner;
  uint32_t number;       /* SOFT_LEGACY_STREAM for the legacy default stream */
  unsigned int flags;
  int priority;
  CUgreenCtx green;      /* that it belongs to, or NULL: green.h */
  struct capture *capture;  /* that it belongs to, capture.h */
  CUgraphNode *after;       /* what its next node comes after */
  size_t after_count;
  stream *next_captured;    /* of that capture */
  stream *next;
};

struct CUevent_st {
  context *owner;
  unsigned int flags;
  bool recorded;
  bool pending;          /* its entry is still in the queue */
  uint64_t seq;          /* of its latest record */
  uint32_t queue;
  uint32_t stream_number;
  uint64_t time_ns;
  struct shared_ref *shared; /* other processes know it too: ipc.h */
  uint64_t captured_in;     /* 0, or id of the capture that it was last recorded in */
  CUgraphNode *captured_after;
  size_t captured_count;
  event *next;
};

enum { CONTEXT_LIMITS = 7 };

struct CUctx_st {
  int device;            /* ordinal in this process */
  uint32_t card;         /* index in the state */
  context *home;         /* of a green context's name: the primary one, which has all but the streams */
  bool primary;
  bool destroyed;        /* kept, so that threads that have it current can be told */
  uint32_t sm_count;     /* multiprocessors that its kernels may use */
  unsigned int references; /* primary: retains; else attaches */
  unsigned int flags;
  unsigned int api_version;
  unsigned long long id;
  size_t limits[CONTEXT_LIMITS];
  uint64_t limit_bytes[CONTEXT_LIMITS]; /* charged beyond what the context's cost has of each */
  bool heap_made;        /* modules were loaded, and with the first the heap of malloc */
  CUfunc_cache cache_config;
  CUsharedconfig shared_config;
  uint32_t peers;        /* bit per device: access enabled */
  CUresult sticky;       /* an error that only the end of the context clears */
  stream legacy;         /* the default stream */
  stream *streams;
  event *events;
  block *blocks;         /* all memory of the context */
  block *open_chunks;    /* chunks of small pieces with room */
  struct CUmod_st *modules;
  struct CUarray_st *arrays;
  struct CUmipmappedArray_st *mipmaps;
  context *next;
};

typedef struct {
  soft_region region;
  bool initialised;
  uint32_t device_count;
  uint32_t cards[SOFT_CARDS];    /* device ordinal -> card index */
  context *contexts;             /* all, destroyed ones at their end */
  context *primary[SOFT_CARDS];
  unsigned int primary_flags[SOFT_CARDS];
  unsigned long long next_id;
  uint32_t next_stream;
} driver;

extern driver the_driver;

/* ---- process.c ---- */

/* Takes the process lock; anything but CUDA_SUCCESS must be returned as it is. */
CUresult driver_enter(void);
CUresult driver_leave(CUresult result);
CUresult driver_from(soft_error error);
#define ENTER()                                 \
  do {                                          \
    CUresult entered = driver_enter();          \
    if (entered != CUDA_SUCCESS) return entered; \
  } while (0)
#define LEAVE(result) return driver_leave(result)

/* True in a host function, which may make no call. */
extern __thread bool driver_in_host_function;

/* Releases and retakes the process lock around a wait. */
void driver_pause(void);
void driver_resume(void);

/* ---- visible.c ---- */
void visible_devices(driver *d, const bool *reachable, const char *wish, const char *order);

/* ---- mps.c: this process as a client of MPS ---- */

/* At the start: whether a control daemon has a server for us, and which cards that leaves. */
typedef struct {
  bool client;
  uint32_t server, cards;   /* slot, bit per card of the state */
  uint64_t generation;
  uint32_t ppm;             /* of a card's threads */
  uint64_t limits[SOFT_CARDS];
} mps_offer;
CUresult mps_connect(const soft_region *region, mps_offer *out);
/* With a slot: becomes a client, with the smaller limits of offer and environment. */
CUresult mps_join(driver *d, const mps_offer *offer, const char *percentage, const char *limits);
bool mps_client(void);
/* What all calls on a context get when the server is gone or ended us. */
CUresult mps_lost(void);
/* A context's fault is one of all clients. */
void mps_fault(CUresult error);
/* Multiprocessors of a card that this process may use. */
uint32_t card_multiprocessors(uint32_t card);

/* ---- handles.c ---- */
bool handle_add(const void *handle, handle_kind kind);
void handle_remove(const void *handle);
bool handle_is(const void *handle, handle_kind kind);

/* ---- context.c ---- */

/* The calling thread's context; fails with INVALID_CONTEXT, CONTEXT_IS_DESTROYED or the context's sticky error. */
CUresult context_current(context **out);
/* The same, but the context of a device's card may have been lost or broken. */
context *context_peek(void);
soft_card *context_card(const context *ctx);
CUresult context_lost(const context *ctx);

/* ---- limit.c: what a context sets aside for stacks, printf and malloc ---- */
void limits_begin(context *ctx);
void limits_drop(context *ctx);
/* The heap of malloc is made with the first module. */
CUresult limits_heap(context *ctx);

/* ---- stream.c, work.c ---- */

/* Resolves a stream argument. per_thread: what zero means. */
CUresult stream_resolve(context *ctx, CUstream handle, bool per_thread, stream **out);
CUresult stream_make(context *ctx, CUgreenCtx green, unsigned int flags, int priority, CUstream *out);
/* The same for a call that puts work into it, which a capture may forbid. */
CUresult stream_for_work(context *ctx, CUstream handle, bool per_thread, stream **out);
bool stream_capturing(const stream *on);
/* Whether a call that no capture can see is allowed now. */
CUresult capture_unsafe(void);
#define SAFE()                                 \
  do {                                         \
    CUresult forbidden = capture_unsafe();     \
    if (forbidden != CUDA_SUCCESS) LEAVE(forbidden); \
  } while (0)
/* Queues a record of an event, or a wait for its last one (no entry when that is over). */
CUresult event_record(const stream *on, CUevent handle, uint32_t *queue, uint64_t *seq);
CUresult event_wait(const stream *on, CUevent handle, uint32_t *queue, uint64_t *seq);
void streams_drop(context *ctx);
void streams_drop_green(context *ctx, CUgreenCtx green);
void events_drop(context *ctx);

/* Adds an entry to the context's queue; waits for room. Gives queue and sequence number. */
CUresult work_submit(context *ctx, const stream *on, soft_entry entry, uint32_t *queue, uint64_t *seq);
/* Brings the queue up to now and delivers finished events. */
void work_collect(context *ctx);
/* Waits for a stream's entries up to seq (SOFT_FOREVER: all so far). Releases the process lock meanwhile. */
CUresult work_wait(context *ctx, uint32_t stream_number, uint64_t seq, bool spin);
/* True when nothing of the stream is outstanding. */
CUresult work_query(context *ctx, uint32_t stream_number);
/* What a synchronous call on a stream waits for. */
CUresult work_wait_stream(context *ctx, const stream *on);
bool work_spins(const context *ctx);

/* ---- memory ---- */
void pools_trim(context *ctx);
void pools_drop(context *ctx);
void arrays_drop(context *ctx);
void imports_drop(context *ctx);
void graph_memory_drop(uint32_t card);
void modules_drop(context *ctx);

#endif
