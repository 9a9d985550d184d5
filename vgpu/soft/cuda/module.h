/* module.h - modules and functions, for launch.c and library.c. */
#ifndef SOFT_MODULE_H
#define SOFT_MODULE_H

#include "kernels.h"

struct CUfunc_st {
  struct CUmod_st *of;
  const ptx_entry *entry;
  const kernel *known;    /* NULL: can't be run */
  int dynamic_shared;
  unsigned int old_block[3], old_shared, old_bytes; /* grid.c */
  unsigned char old_arguments[4096];
  struct CUfunc_st *next;
};

struct CUmod_st {
  context *owner;
  ptx_image image;
  CUdeviceptr *globals;   /* address of each, in the image's order */
  struct CUfunc_st *functions;
  struct CUmod_st *next;
};

/* All under the process lock. */
CUresult module_load(context *ctx, const void *image, struct CUmod_st **out);
void module_unload(struct CUmod_st *module);
CUresult module_function(struct CUmod_st *module, const char *name, struct CUfunc_st **out);
CUresult module_global(struct CUmod_st *module, const char *name, CUdeviceptr *pointer, size_t *bytes);

/* Reads a whole text file; the caller frees it. NULL when that fails. */
char *module_read_file(const char *path);

/* A function handle, or a kernel handle of a library resolved in the current context. */
CUresult function_resolve(context *ctx, CUfunction handle, struct CUfunc_st **out);

#endif
