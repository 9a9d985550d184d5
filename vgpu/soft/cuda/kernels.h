/*
 * kernels.h - the kernels that can be run. They work on the real bytes at the
 * launch, and last on the card's clock as long as their arguments say.
 */
#ifndef SOFT_KERNELS_H
#define SOFT_KERNELS_H

#include "ptx.h"

typedef struct {
  uint64_t value[PTX_PARAMETERS];
} kernel_arguments;

typedef struct {
  uint64_t threads;     /* of all blocks */
  const soft_card *card;
} kernel_grid;

typedef struct kernel {
  const char *name;
  /* Does the work. CUDA_ERROR_ILLEGAL_ADDRESS when an argument points nowhere. */
  CUresult (*run)(const kernel_arguments *arguments, const kernel_grid *grid);
  /* Nanoseconds that it has the card, were all its blocks resident at once. */
  uint64_t (*duration_ns)(const kernel_arguments *arguments, const kernel_grid *grid);
} kernel;

/* The kernel that an entry is, or NULL. */
const kernel *kernel_for(const ptx_entry *entry);

#endif
