/*
 * state.h - layout of the software GPU's shared state.
 *
 * ROOT/softgpu/state is one sparse file that every libcuda, libnvidia-ml and
 * tool of a driver root maps. It stands in for what the kernel driver and the
 * cards know: who holds which memory, what is queued, what time it is.
 *
 * Tenants write this file. So a reader that is not a tenant (NVML in an
 * agent, the softgpu tool) must treat every index, count and text in it as
 * foreign bytes: region.h has the bounded accessors, and nothing else may
 * index with a value read from here.
 *
 * Everything that changes together changes under the lock (lock.h). Times are
 * nanoseconds of the state's clock (clock.h) unless a name says real.
 */
#ifndef SOFT_STATE_H
#define SOFT_STATE_H

#include <stdatomic.h>
#include <stdint.h>

#define SOFT_MAGIC 0x3155504754464f53ull /* "SOFTGPU1" */
#define SOFT_ABI 4u

enum {
  SOFT_CARDS = 16,      /* cards of a node */
  SOFT_SLOTS = 4096,    /* processes: each library instance in each process takes one */
  SOFT_SPARE_SLOT = SOFT_SLOTS - 1, /* never claimed: for whoever must clean up when all are taken */
  SOFT_QUEUES = 1024,   /* (process, card) pairs that have launched something */
  SOFT_DEPTH = 1024,    /* entries of a queue: a launch into a full queue waits */
  SOFT_EVENTS = 256,    /* NVML events kept for event sets */
  SOFT_LINKS = 18,      /* NVLinks of a card */
  SOFT_CARD_BUCKETS = 64,  /* utilization history of a card */
  SOFT_QUEUE_BUCKETS = 16, /* and of a process on a card */
  SOFT_WAITERS = 8,     /* threads of one process in the virtual clock's waiting room */
  SOFT_RETIRED = 128,   /* accounting records of ended processes */
  SOFT_OBJECTS = 1024   /* memory, pools and events that more than one process can hold */
};

#define SOFT_NO_INDEX 0xFFFFFFFFu
#define SOFT_FOREVER UINT64_MAX
#define SOFT_SAMPLE_NS 166666667ull /* one utilization sample, a sixth of a second */

enum { SOFT_CLOCK_REAL = 0, SOFT_CLOCK_VIRTUAL = 1 };

/* What a card is. Written once, by softgpu init. */
typedef struct {
  char key[24];           /* a100-80 */
  char name[64];          /* NVIDIA A100-SXM4-80GB */
  char uuid[48];          /* GPU-xxxxxxxx-... */
  char serial[24];
  char pci[20];           /* 00000000:17:00.0 */
  char board_part[24];
  char vbios[24];
  uint8_t uuid_bytes[16];
  uint32_t pci_domain, pci_bus, pci_device;
  uint32_t pci_device_id, pci_subsystem_id;
  uint32_t minor;         /* N of /dev/nvidiaN */
  uint32_t node_major, node_minor; /* the number behind the stand-in node */
  uint32_t numa_node;
  uint32_t architecture;  /* NVML's numbering */
  uint32_t cc_major, cc_minor;
  uint32_t brand;
  uint32_t sm_count, cores_per_sm;
  uint32_t threads_per_sm;
  uint32_t shared_per_sm_kib, shared_per_block_kib;
  uint32_t sm_clock_mhz, sm_base_mhz, mem_clock_mhz;
  uint32_t bus_width_bits, l2_kib;
  uint32_t power_limit_mw, power_idle_mw;
  uint32_t pcie_generation;
  uint32_t ecc;           /* has ECC */
  uint32_t mig_capable;
  uint32_t link_count, link_version;
  uint8_t link_kind[SOFT_LINKS];  /* SOFT_LINK_* */
  uint8_t link_peer[SOFT_LINKS];  /* card index, or number of the switch */
  uint64_t total_bytes;    /* what NVML calls total */
  uint64_t reserved_bytes; /* of it: kept by the driver */
  uint64_t bar1_bytes;
} soft_card_facts;

enum { SOFT_LINK_NONE = 0, SOFT_LINK_CARD = 1, SOFT_LINK_SWITCH = 2 };

typedef struct { uint64_t period; uint64_t busy_ns; } soft_bucket;

/* One card: facts, settings, faults, and the running totals. */
typedef struct {
  soft_card_facts facts;

  /* settings */
  uint64_t context_bytes;    /* cost of a process's first context */
  uint32_t compute_mode;
  uint32_t persistence;
  uint32_t accounting;
  uint32_t temperature_c;    /* 0: follows the load */
  uint32_t stack_extra;      /* percent that stacks take beyond what there are threads for */
  uint32_t stacks_stay;      /* lower stacks give nothing back before the context ends */

  /* faults */
  uint32_t lost;             /* fell off the bus */
  uint32_t alloc_fail_count; /* so many allocations are refused next */
  uint64_t nvml_delay_ns;    /* each NVML call on this card takes so much longer */
  uint64_t ecc_corrected, ecc_uncorrected;
  uint32_t remap_pending, remap_failed, remapped_corrected, remapped_uncorrected;
  uint64_t last_xid;

  /* derived: a recount of the slots must give the same */
  uint64_t used_bytes;
  uint32_t context_count;

  /* time slicing */
  uint64_t sim_ns;           /* history is computed up to here */
  uint32_t current;          /* queue on the card, or SOFT_NO_INDEX */
  uint32_t current_party;    /* the one that it stands for: soft_queue.party, 0 itself */
  uint64_t slice_left_ns;
  uint64_t switch_left_ns;   /* of a context switch in progress */
  uint64_t active[SOFT_QUEUES / 64]; /* queues with undone work */
  uint64_t begun;            /* kernels so far */
  uint64_t busy_ns;          /* time with a kernel running */
  uint64_t work_ns;          /* the same, weighted with the width */
  uint64_t switches;
  soft_bucket buckets[SOFT_CARD_BUCKETS];
} soft_card;

/* What one process holds on one card. */
typedef struct {
  uint64_t context_bytes;
  uint64_t memory_bytes;     /* chunks of linear memory, pools, handles */
  uint64_t managed_bytes;    /* managed memory that is on the card now; others may take it off */
  uint64_t peak_bytes;
  uint64_t busy_ns;
  uint64_t since_ns;         /* first context */
  uint64_t limit_bytes;      /* of MPS: most that context_bytes and memory_bytes may be, 0 no limit */
  uint32_t context_count;
  uint32_t queue;            /* SOFT_NO_INDEX until the first launch */
  uint32_t sm_limit;         /* of MPS: multiprocessors that the process may use, 0 all */
  uint32_t pad;
} soft_usage;

enum { SOFT_SLOT_FREE = 0, SOFT_SLOT_CLAIMED = 1, SOFT_SLOT_LIVE = 2, SOFT_SLOT_DEAD = 3 };
enum { SOFT_KIND_CUDA = 1, SOFT_KIND_OBSERVER = 2, SOFT_KIND_SERVER = 3 };

/* A server of MPS, or what a client of one has: mps.h. */
typedef struct {
  uint32_t server;           /* client: slot + 1 of its server, 0 it is none */
  uint32_t error;            /* client: what its calls are answered from now on, 0 nothing */
  uint64_t generation;       /* client: of the server's slot */
  uint32_t cards;            /* bit per card that it has, server and client */
  uint32_t fault;            /* server: what its clients are answered until they have ended, 0 none */
  uint32_t uid;              /* server: whose it is */
  uint32_t id;               /* client: number within its server; server: clients so far */
} soft_mps;

/* A thread that waits on the virtual clock. */
typedef struct {
  uint32_t used;
  _Atomic uint32_t done;     /* futex: 1 when the wait is over */
  uint64_t until_ns;         /* SOFT_FOREVER: for the queue only */
  uint64_t target_seq;       /* done when the queue's entries up to here are */
  uint32_t queue;            /* SOFT_NO_INDEX: for the time only */
  uint32_t stream;           /* SOFT_ALL_STREAMS: every one; without a queue SOFT_GATES: also for a gate */
} soft_waiter;

typedef struct {
  _Atomic uint32_t state;
  uint32_t kind;
  uint64_t generation;       /* counts the owners of this slot */
  uint64_t pid_namespace;    /* inode of /proc/self/ns/pid, 0 unknown */
  uint64_t start_ticks;      /* start time of the process, 0 unknown */
  uint64_t image;            /* differs between two programs that one process ran by exec */
  uint32_t pid;              /* as the process itself sees it */
  uint32_t clock_members;    /* threads that the virtual clock waits for */
  uint64_t seen_namespace;   /* the last observer that saw it alive, */
  uint32_t seen_pid;         /* and the pid that it saw */
  uint32_t gates_ready;      /* a gate of its queues was reached since it last looked */
  uint64_t claimed_real_ns;
  uint64_t seen_real_ns;     /* last known alive */
  uint64_t dead_real_ns;     /* 0 while alive */
  uint64_t exit_real_ns;     /* the process said that it exits */
  char name[64];
  soft_mps mps;
  soft_waiter waiters[SOFT_WAITERS];
  soft_usage usage[SOFT_CARDS];
} soft_slot;

/* GATE: what follows waits until the owner says go on: a host function, a value in memory */
enum { SOFT_ENTRY_KERNEL = 1, SOFT_ENTRY_EVENT = 2, SOFT_ENTRY_WAIT = 3, SOFT_ENTRY_GATE = 4 };
enum { SOFT_ENTRY_BLOCKING = 1, SOFT_ENTRY_STARTED = 2, SOFT_ENTRY_DONE = 4, SOFT_ENTRY_RELEASED = 8 };
#define SOFT_LEGACY_STREAM 0u
#define SOFT_ALL_STREAMS 0xFFFFFFFFu
#define SOFT_GATES 0xFFFFFFFEu
#define SOFT_FOR_ROOM 0xFFFFFFFDu

typedef struct {
  uint32_t kind;
  uint32_t flags;            /* BLOCKING: a stream that syncs with the legacy one */
  uint32_t stream;           /* number within the process */
  uint32_t width_ppm;        /* part of the card's multiprocessors, ppm */
  uint64_t left_ns;
  uint64_t submit_ns, start_ns, end_ns;
  uint64_t cookie;           /* the owner's own, never followed by others */
  uint64_t wait_seq;         /* WAIT: done when this entry of wait_queue is; GATE: when it was released */
  uint32_t wait_queue;
  uint32_t part;             /* KERNEL: of the card's multiprocessors, numbered by the process; 0 all */
  uint32_t part_ppm;         /* its width */
  uint32_t pad;
} soft_entry;

typedef struct {
  uint64_t seq;
  soft_entry entry;
} soft_parked;

typedef struct {
  uint32_t owner;            /* slot + 1, 0 when free */
  uint32_t card;
  uint32_t stream;           /* of all undone entries, unless mixed */
  uint32_t mixed;            /* entries of several streams are undone */
  uint32_t party;            /* queues that have the card together: clients of one MPS server; 0 by itself */
  uint32_t limit_ppm;        /* most of the card that its kernels use at once, 0 all */
  uint64_t begun;            /* number of the kernel of it that began last: soft_card.begun */
  uint64_t head;             /* next sequence number that the owner writes */
  uint64_t tail;             /* oldest one that the owner has not collected */
  uint64_t scan;             /* everything before is done */
  soft_bucket buckets[SOFT_QUEUE_BUCKETS];
  soft_entry entries[SOFT_DEPTH];
  uint32_t parked_count;
  uint32_t pad;
  soft_parked parked[SOFT_DEPTH]; /* undone when later ones needed their place: all before tail, in order */
} soft_queue;

typedef struct {
  uint64_t seq;
  uint64_t type;             /* NVML's event bit */
  uint64_t data;
  uint64_t real_ns;
  uint32_t card;
  uint32_t pad;
} soft_event;

typedef struct {
  uint64_t pid_namespace, seen_namespace;
  uint32_t pid;              /* in pid_namespace */
  uint32_t seen_pid;         /* in seen_namespace, 0 unknown */
  uint32_t card;
  uint32_t pad;
  uint64_t peak_bytes;
  uint64_t busy_ns;
  uint64_t start_ns, end_ns;
} soft_retired;

enum { SOFT_OBJECT_FREE = 0, SOFT_OBJECT_MEMORY = 1, SOFT_OBJECT_POOL = 2, SOFT_OBJECT_EVENT = 3 };

/* What more than one process can hold: objects.h. */
typedef struct {
  uint32_t kind;
  uint32_t card;             /* SOFT_NO_INDEX: memory of the host */
  uint64_t generation;       /* counts the objects of this entry */
  uint64_t bytes, offset;    /* memory: a range of ROOT/softgpu/shared */
  uint32_t payer;            /* slot that is charged, SOFT_NO_INDEX none */
  uint32_t queue;            /* event: where it was recorded last, SOFT_NO_INDEX never */
  uint32_t queue_owner;      /* of that queue then */
  uint32_t stream;
  uint64_t seq;
  uint64_t holders[SOFT_SLOTS / 64]; /* a bit per slot */
} soft_object;

typedef struct {
  uint64_t magic;
  uint32_t abi;
  uint32_t card_count;
  uint64_t size;             /* of the file */
  char driver_version[32];
  char nvml_version[32];
  uint32_t driver_branch;    /* 550 of 550.90.07 */
  uint32_t cuda_version;     /* 12040 */

  /* lock.c */
  _Atomic uint32_t lock;
  uint32_t lock_broken;      /* times that the lock was taken from a dead owner */
  uint32_t slots_high;       /* no slot at or above this was ever used */
  uint32_t queues_high;
  uint64_t scan_real_ns;     /* last look at who is alive */

  /* settings */
  uint32_t clock_mode;
  uint32_t objects_high;
  uint64_t free_delay_ns;    /* memory of a dead process is freed so late */
  uint64_t quantum_ns;
  uint64_t switch_ns;
  uint64_t nvml_delay_ns;
  char nvml_delay_call[64];  /* empty: every call */

  /* clock.c */
  uint64_t virtual_ns;
  uint64_t epoch_ns;         /* clock zero in wall time */
  uint64_t start_ns;         /* the clock when the root was made */

  /* events */
  _Atomic uint32_t event_futex;
  uint32_t pad2;
  uint64_t event_seq;        /* number of the newest */
  soft_event events[SOFT_EVENTS];

  uint64_t retired_count;
  soft_retired retired[SOFT_RETIRED];

  uint64_t unmodelled_calls; /* calls of entry points that are exported but not modelled */
  char unmodelled_last[64];

  soft_card cards[SOFT_CARDS];
} soft_header;

/* Offsets of the parts in the file; each starts on a page. */
typedef struct {
  soft_header header;
  _Alignas(4096) soft_slot slots[SOFT_SLOTS];
  _Alignas(4096) soft_queue queues[SOFT_QUEUES];
  _Alignas(4096) soft_object objects[SOFT_OBJECTS];
} soft_state;

_Static_assert(sizeof(soft_entry) == 80, "soft_entry");
_Static_assert((SOFT_DEPTH & (SOFT_DEPTH - 1)) == 0, "depth is a power of two");

#endif
