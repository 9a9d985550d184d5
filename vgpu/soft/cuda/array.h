/*
 * array.h - arrays and mipmapped arrays, for copies and for external memory.
 *
 * How large an array is, is our model and no measured fact: hardware keeps
 * arrays in tiles, drivers don't say which. Rows of elements are rounded up to
 * 64 bytes; with more than one row, rows to whole tiles of 8, 16, 32, 64 or
 * 128, the smallest that holds them all; slices of a 3D array (layers are not
 * slices) to 1, 2, 4, 8, 16 or 32 in the same way; the whole to 64 KiB. A
 * mipmapped array is its levels, each to 512 bytes, and the whole to 64 KiB.
 * That is what cuArrayGetMemoryRequirements answers. Up to 1 MiB of it is cut
 * from 2 MiB pages that hold arrays only, more takes 2 MiB pages of its own,
 * and pages are what the card is charged.
 */
#ifndef SOFT_ARRAY_H
#define SOFT_ARRAY_H

#include "driver.h"

struct CUarray_st {
  context *owner;
  CUDA_ARRAY3D_DESCRIPTOR descriptor;
  uint64_t row_bytes, rows, slices;       /* what can be copied */
  uint64_t pitch, slice_bytes, bytes;     /* how it lies; bytes to 512 */
  CUdeviceptr base;                       /* 0: deferred, nothing behind it */
  bool borrowed;                          /* the memory is a level's, a plane's or an external memory's */
  struct CUarray_st *planes[2];
  struct CUarray_st *next;
};

/* Levels stand in for the array: each is one of its own whose memory is borrowed. */
struct CUmipmappedArray_st {
  context *owner;
  CUDA_ARRAY3D_DESCRIPTOR descriptor;
  unsigned int level_count;
  struct CUarray_st *levels[32];
  uint64_t bytes;
  CUdeviceptr base;
  bool borrowed;                          /* the memory is a mapping of external memory */
  struct CUmipmappedArray_st *next;
};

/* The host side of width bytes of a row; NULL outside of the array, or when it is deferred. */
void *array_view(const struct CUarray_st *array, uint64_t x, uint64_t y, uint64_t z, uint64_t width, bool write);

/* A mipmapped array over a mapping (IMPORT_ARRAY) that is there already, at most bytes of it; the mapping goes with the array. */
CUresult mipmap_over(context *ctx, const CUDA_ARRAY3D_DESCRIPTOR *descriptor, unsigned int levels, CUdeviceptr base, uint64_t bytes,
                     CUmipmappedArray *out);

#endif
