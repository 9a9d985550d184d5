/* library.c - libraries: an image that each context loads when it is first used there. */
#include <stdlib.h>
#include <string.h>

#include "module.h"

typedef struct loaded {
  context *in;
  struct CUmod_st *module;
  struct loaded *next;
} loaded;

struct CUkern_st {
  struct CUlib_st *of;
  char *name;
  struct CUkern_st *next;
};

struct CUlib_st {
  char *image;
  ptx_image read;
  loaded *modules;
  struct CUkern_st *kernels;
};

static CUresult module_in(struct CUlib_st *library, context *ctx, struct CUmod_st **out) {
  for (loaded *l = library->modules; l; l = l->next)
    if (l->in == ctx && handle_is(l->module, HANDLE_MODULE) && l->module->owner == ctx) {
      *out = l->module;
      return CUDA_SUCCESS;
    }
  loaded *fresh = malloc(sizeof *fresh);
  if (!fresh) return CUDA_ERROR_OUT_OF_MEMORY;
  CUresult result = module_load(ctx, library->image, out);
  if (result != CUDA_SUCCESS) {
    free(fresh);
    return result;
  }
  *fresh = (loaded){ctx, *out, library->modules};
  library->modules = fresh;
  return CUDA_SUCCESS;
}

CUresult function_resolve(context *ctx, CUfunction handle, struct CUfunc_st **out) {
  struct CUmod_st *module;
  if (handle_is(handle, HANDLE_FUNCTION)) {
    *out = handle;
    return CUDA_SUCCESS;
  }
  if (!handle_is(handle, HANDLE_KERNEL)) return CUDA_ERROR_INVALID_HANDLE;
  struct CUkern_st *kernel_handle = (struct CUkern_st *)handle;
  CUresult result = module_in(kernel_handle->of, ctx, &module);
  return result == CUDA_SUCCESS ? module_function(module, kernel_handle->name, out) : result;
}

static CUresult load(CUlibrary *out, const char *image) {
  ENTER();
  if (!out || !image) LEAVE(CUDA_ERROR_INVALID_VALUE);
  struct CUlib_st *library = calloc(1, sizeof *library);
  if (!library) LEAVE(CUDA_ERROR_OUT_OF_MEMORY);
  CUresult result = ptx_read(image, &library->read);
  if (result == CUDA_SUCCESS) {
    library->image = strdup(image);
    if (!library->image || !handle_add(library, HANDLE_LIBRARY)) result = CUDA_ERROR_OUT_OF_MEMORY;
  }
  if (result != CUDA_SUCCESS) {
    ptx_free(&library->read);
    free(library->image);
    free(library);
    LEAVE(result);
  }
  *out = library;
  LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuLibraryLoadData(CUlibrary *out, const void *code, CUjit_option *jit, void **jit_values, unsigned int jit_count,
                                  CUlibraryOption *options, void **values, unsigned int count) {
  (void)jit;
  (void)jit_values;
  (void)jit_count;
  (void)options;
  (void)values;
  (void)count;
  return load(out, code);
}

EXPORT CUresult cuLibraryLoadFromFile(CUlibrary *out, const char *path, CUjit_option *jit, void **jit_values, unsigned int jit_count,
                                      CUlibraryOption *options, void **values, unsigned int count) {
  (void)jit;
  (void)jit_values;
  (void)jit_count;
  (void)options;
  (void)values;
  (void)count;
  char *text = module_read_file(path);
  if (!text) return CUDA_ERROR_FILE_NOT_FOUND;
  CUresult result = load(out, text);
  free(text);
  return result;
}

EXPORT CUresult cuLibraryUnload(CUlibrary handle) {
  ENTER();
  if (!handle_is(handle, HANDLE_LIBRARY)) LEAVE(CUDA_ERROR_INVALID_HANDLE);
  while (handle->modules) {
    loaded *gone = handle->modules;
    handle->modules = gone->next;
    if (handle_is(gone->module, HANDLE_MODULE) && gone->module->owner == gone->in) module_unload(gone->module);
    free(gone);
  }
  while (handle->kernels) {
    struct CUkern_st *gone = handle->kernels;
    handle->kernels = gone->next;
    handle_remove(gone);
    free(gone->name);
    free(gone);
  }
  ptx_free(&handle->read);
  free(handle->image);
  handle_remove(handle);
  free(handle);
  LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuLibraryGetKernel(CUkernel *out, CUlibrary handle, const char *name) {
  ENTER();
  if (!out || !name) LEAVE(CUDA_ERROR_INVALID_VALUE);
  if (!handle_is(handle, HANDLE_LIBRARY)) LEAVE(CUDA_ERROR_INVALID_HANDLE);
  for (struct CUkern_st *k = handle->kernels; k; k = k->next)
    if (strcmp(k->name, name) == 0) {
      *out = k;
      LEAVE(CUDA_SUCCESS);
    }
  for (size_t i = 0; i < handle->read.entry_count; i++) {
    if (strcmp(handle->read.entries[i].name, name) != 0) continue;
    struct CUkern_st *fresh = calloc(1, sizeof *fresh);
    char *copy = strdup(name);
    if (!fresh || !copy || !handle_add(fresh, HANDLE_KERNEL)) {
      free(fresh);
      free(copy);
      LEAVE(CUDA_ERROR_OUT_OF_MEMORY);
    }
    *fresh = (struct CUkern_st){handle, copy, handle->kernels};
    handle->kernels = fresh;
    *out = fresh;
    LEAVE(CUDA_SUCCESS);
  }
  LEAVE(CUDA_ERROR_NOT_FOUND);
}

#define CURRENT(ctx)                        \
  context *ctx;                             \
  ENTER();                                  \
  CUresult current = context_current(&ctx); \
  if (current != CUDA_SUCCESS) LEAVE(current)

EXPORT CUresult cuLibraryGetModule(CUmodule *out, CUlibrary handle) {
  CURRENT(ctx);
  if (!out) LEAVE(CUDA_ERROR_INVALID_VALUE);
  if (!handle_is(handle, HANDLE_LIBRARY)) LEAVE(CUDA_ERROR_INVALID_HANDLE);
  LEAVE(module_in(handle, ctx, out));
}

EXPORT CUresult cuLibraryGetGlobal(CUdeviceptr *pointer, size_t *bytes, CUlibrary handle, const char *name) {
  struct CUmod_st *module;
  CURRENT(ctx);
  if (!name) LEAVE(CUDA_ERROR_INVALID_VALUE);
  if (!handle_is(handle, HANDLE_LIBRARY)) LEAVE(CUDA_ERROR_INVALID_HANDLE);
  CUresult result = module_in(handle, ctx, &module);
  LEAVE(result == CUDA_SUCCESS ? module_global(module, name, pointer, bytes) : result);
}

EXPORT CUresult cuKernelGetFunction(CUfunction *out, CUkernel handle) {
  CURRENT(ctx);
  if (!out) LEAVE(CUDA_ERROR_INVALID_VALUE);
  if (!handle_is(handle, HANDLE_KERNEL)) LEAVE(CUDA_ERROR_INVALID_HANDLE);
  LEAVE(function_resolve(ctx, (CUfunction)handle, out));
}
