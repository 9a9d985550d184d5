/*
 * region.h - finding, mapping and safely reading the shared state.
 *
 * One soft_region per library instance. Nothing here depends on the
 * environment: a library finds the state beside the driver root that it was
 * loaded from, or at the one fixed path that a container gets it at.
 */
#ifndef SOFT_REGION_H
#define SOFT_REGION_H

#include <stdbool.h>
#include <stddef.h>

#include "state.h"

/* Where a container finds the state of its node's software driver root. */
#define SOFT_CONTAINER_DIR "/usr/lib/softgpu"

typedef enum {
  SOFT_OK = 0,
  SOFT_ENOSTATE,   /* no state at either place */
  SOFT_EBADSTATE,  /* wrong magic, version or size, or impossible counts */
  SOFT_ELOCK,      /* the lock could not be had in time */
  SOFT_EFULL,      /* no process slot, or no queue, left */
  SOFT_EMEMORY,    /* the card has not that much left */
  SOFT_ELOST,      /* the card fell off the bus, or this process was buried */
  SOFT_ESYSTEM     /* a system call failed: errno says why */
} soft_error;

typedef struct {
  soft_state *state;
  int state_fd;
  int alive_fd;            /* file whose byte locks say who is alive; never closed */
  int shared_fd;           /* file with the bytes that processes share, objects.h */
  uint32_t me;             /* own slot, or SOFT_NO_INDEX */
  uint64_t my_generation;
  uint64_t pid_namespace, start_ticks, image;
  uint32_t pid;
  char device_prefix[512]; /* in front of /dev/nvidia0: the root, or nothing in a container */
} soft_region;

/*
 * Opens the state that belongs to the library which contains address: first
 * DIR/../../../softgpu of its directory, then SOFT_CONTAINER_DIR. A region that
 * is already open is left as it is.
 */
soft_error soft_region_open_for(soft_region *region, const void *address);

/* Opens DIR/state, DIR/alive and DIR/shared. devicePrefix is copied. */
soft_error soft_region_open(soft_region *region, const char *dir, const char *device_prefix);

/* True when the file still has its size and header: a mapped file that was cut
 * short kills whoever reads it, so readers outside of tenants look first. */
bool soft_region_sound(const soft_region *region);

/* Bounded access: NULL for an index that does not exist. */
uint32_t soft_card_count(const soft_region *region);
soft_card *soft_card_at(const soft_region *region, uint32_t index);
soft_slot *soft_slot_at(const soft_region *region, uint32_t index);
soft_queue *soft_queue_at(const soft_region *region, uint32_t index);
uint32_t soft_slots_high(const soft_region *region);

/* Copies a text out of the state, always ended by a zero. */
void soft_text(char *out, size_t size, const char *text, size_t text_size);

const char *soft_error_text(soft_error error);

#endif
