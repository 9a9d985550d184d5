/*
 * ptx.h - as much of PTX as it takes to know a module's kernels and globals.
 *
 * Kernels are not interpreted. A kernel whose text equals, blanks and comments
 * aside, one of ptx/carve_kernels.ptx can be run (kernels.h); others can be
 * loaded and looked up, and launching them is CUDA_ERROR_NOT_SUPPORTED.
 */
#ifndef SOFT_PTX_H
#define SOFT_PTX_H

#include "driver.h"

enum { PTX_PARAMETERS = 16 };

typedef struct {
  char *name;
  uint64_t text_hash;     /* of parameters and body */
  uint32_t parameter_count;
  uint8_t parameter_bytes[PTX_PARAMETERS];
} ptx_entry;

typedef struct {
  char *name;
  uint64_t bytes;
} ptx_global;

typedef struct {
  int version;            /* 60 for .version 6.0 */
  int target;             /* 50 for sm_50 */
  ptx_entry *entries;
  size_t entry_count;
  ptx_global *globals;
  size_t global_count;
} ptx_image;

/* INVALID_IMAGE for what is no text, NO_BINARY_FOR_GPU for cubins and fat binaries, INVALID_PTX for a text that can't be read. */
CUresult ptx_read(const void *image, ptx_image *out);
void ptx_free(ptx_image *image);

#endif
