/* module.c - loading images and finding what is in them. */
#include "module.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "arena.h"
#include "personality.h"

CUresult module_load(context *ctx, const void *image, struct CUmod_st **out) {
  const soft_card *card = context_card(ctx);
  if (!image) return CUDA_ERROR_INVALID_VALUE;
  struct CUmod_st *module = calloc(1, sizeof *module);
  if (!module) return CUDA_ERROR_OUT_OF_MEMORY;
  CUresult result = ptx_read(image, &module->image);
  if (result == CUDA_SUCCESS && module->image.version > soft_ptx_version) result = CUDA_ERROR_UNSUPPORTED_PTX_VERSION;
  if (result == CUDA_SUCCESS && module->image.target > (int)(card->facts.cc_major * 10 + card->facts.cc_minor)) result = CUDA_ERROR_NO_BINARY_FOR_GPU;
  if (result == CUDA_SUCCESS && module->image.global_count) {
    module->globals = calloc(module->image.global_count, sizeof *module->globals);
    if (!module->globals) result = CUDA_ERROR_OUT_OF_MEMORY;
  }
  for (size_t i = 0; result == CUDA_SUCCESS && i < module->image.global_count; i++) {
    result = memory_allocate(ctx, module->image.globals[i].bytes, false, &module->globals[i]);
    if (result == CUDA_SUCCESS) memset(memory_host_view(module->globals[i], module->image.globals[i].bytes, true), 0, module->image.globals[i].bytes);
  }
  if (result == CUDA_SUCCESS) result = limits_heap(ctx);
  if (result == CUDA_SUCCESS && !handle_add(module, HANDLE_MODULE)) result = CUDA_ERROR_OUT_OF_MEMORY;
  module->owner = ctx;
  if (result != CUDA_SUCCESS) {
    module_unload(module);
    return result;
  }
  module->next = ctx->modules;
  ctx->modules = module;
  *out = module;
  return CUDA_SUCCESS;
}

void module_unload(struct CUmod_st *module) {
  for (struct CUmod_st **link = &module->owner->modules; *link; link = &(*link)->next)
    if (*link == module) {
      *link = module->next;
      break;
    }
  while (module->functions) {
    struct CUfunc_st *gone = module->functions;
    module->functions = gone->next;
    handle_remove(gone);
    free(gone);
  }
  for (size_t i = 0; module->globals && i < module->image.global_count; i++)
    if (module->globals[i]) memory_free(module->globals[i]);
  free(module->globals);
  ptx_free(&module->image);
  handle_remove(module);
  free(module);
}

void modules_drop(context *ctx) {
  while (ctx->modules) module_unload(ctx->modules);
}

CUresult module_function(struct CUmod_st *module, const char *name, struct CUfunc_st **out) {
  for (struct CUfunc_st *f = module->functions; f; f = f->next)
    if (strcmp(f->entry->name, name) == 0) {
      *out = f;
      return CUDA_SUCCESS;
    }
  for (size_t i = 0; i < module->image.entry_count; i++) {
    if (strcmp(module->image.entries[i].name, name) != 0) continue;
    struct CUfunc_st *fresh = calloc(1, sizeof *fresh);
    if (!fresh || !handle_add(fresh, HANDLE_FUNCTION)) {
      free(fresh);
      return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *fresh = (struct CUfunc_st){.of = module, .entry = &module->image.entries[i], .next = module->functions};
    fresh->known = kernel_for(fresh->entry);
    module->functions = fresh;
    *out = fresh;
    return CUDA_SUCCESS;
  }
  return CUDA_ERROR_NOT_FOUND;
}

CUresult module_global(struct CUmod_st *module, const char *name, CUdeviceptr *pointer, size_t *bytes) {
  for (size_t i = 0; i < module->image.global_count; i++) {
    if (strcmp(module->image.globals[i].name, name) != 0) continue;
    if (pointer) *pointer = module->globals[i];
    if (bytes) *bytes = module->image.globals[i].bytes;
    return CUDA_SUCCESS;
  }
  return CUDA_ERROR_NOT_FOUND;
}

char *module_read_file(const char *path) {
  FILE *file = path ? fopen(path, "rbe") : NULL;
  char *text = NULL;
  if (!file) return NULL;
  if (fseek(file, 0, SEEK_END) == 0) {
    long size = ftell(file);
    rewind(file);
    text = size >= 0 ? calloc(1, (size_t)size + 8) : NULL;
    if (text && fread(text, 1, (size_t)size, file) != (size_t)size) {
      free(text);
      text = NULL;
    }
  }
  fclose(file);
  return text;
}

/* ---- entry points -------------------------------------------------------- */

#define CURRENT(ctx)                        \
  context *ctx;                             \
  ENTER();                                  \
  CUresult current = context_current(&ctx); \
  if (current != CUDA_SUCCESS) LEAVE(current)

static CUresult load(CUmodule *out, const void *image) {
  CURRENT(ctx);
  SAFE();
  if (!out) LEAVE(CUDA_ERROR_INVALID_VALUE);
  LEAVE(module_load(ctx, image, out));
}

EXPORT CUresult cuModuleLoadData(CUmodule *out, const void *image) { return load(out, image); }

EXPORT CUresult cuModuleLoadDataEx(CUmodule *out, const void *image, unsigned int count, CUjit_option *options, void **values) {
  if (count && (!options || !values)) return CUDA_ERROR_INVALID_VALUE;
  return load(out, image);
}

EXPORT CUresult cuModuleLoadFatBinary(CUmodule *out, const void *image) { return load(out, image); }

EXPORT CUresult cuModuleLoad(CUmodule *out, const char *path) {
  char *text = module_read_file(path);
  if (!text) return CUDA_ERROR_FILE_NOT_FOUND;
  CUresult result = load(out, text);
  free(text);
  return result;
}

EXPORT CUresult cuModuleUnload(CUmodule handle) {
  CURRENT(ctx);
  SAFE();
  (void)ctx;
  if (!handle_is(handle, HANDLE_MODULE)) LEAVE(CUDA_ERROR_INVALID_HANDLE);
  module_unload(handle);
  LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuModuleGetFunction(CUfunction *out, CUmodule handle, const char *name) {
  CURRENT(ctx);
  (void)ctx;
  if (!out || !name) LEAVE(CUDA_ERROR_INVALID_VALUE);
  if (!handle_is(handle, HANDLE_MODULE)) LEAVE(CUDA_ERROR_INVALID_HANDLE);
  LEAVE(module_function(handle, name, out));
}

EXPORT CUresult cuModuleGetGlobal_v2(CUdeviceptr *pointer, size_t *bytes, CUmodule handle, const char *name) {
  CURRENT(ctx);
  (void)ctx;
  if (!name) LEAVE(CUDA_ERROR_INVALID_VALUE);
  if (!handle_is(handle, HANDLE_MODULE)) LEAVE(CUDA_ERROR_INVALID_HANDLE);
  LEAVE(module_global(handle, name, pointer, bytes));
}

EXPORT CUresult cuModuleGetGlobal(CUdeviceptr_v1 *pointer, unsigned int *bytes, CUmodule handle, const char *name) {
  CUdeviceptr wide = 0;
  size_t size = 0;
  CUresult result = cuModuleGetGlobal_v2(&wide, &size, handle, name);
  if (result != CUDA_SUCCESS) return result;
  if (wide > UINT32_MAX) return CUDA_ERROR_NOT_SUPPORTED; /* globals lie above what 32 bits reach */
  if (pointer) *pointer = (CUdeviceptr_v1)wide;
  if (bytes) *bytes = (unsigned int)size;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuModuleGetLoadingMode(int *mode) {
  ENTER();
  if (!mode) LEAVE(CUDA_ERROR_INVALID_VALUE);
  *mode = 2; /* lazy */
  LEAVE(CUDA_SUCCESS);
}

/* ---- functions ----------------------------------------------------------- */

EXPORT CUresult cuFuncGetAttribute(int *value, CUfunction_attribute which, CUfunction handle) {
  struct CUfunc_st *function;
  CURRENT(ctx);
  CUresult result = function_resolve(ctx, handle, &function);
  if (result != CUDA_SUCCESS) LEAVE(result);
  if (!value) LEAVE(CUDA_ERROR_INVALID_VALUE);
  const soft_card *card = context_card(ctx);
  switch (which) {
  case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = 1024; break;
  case CU_FUNC_ATTRIBUTE_NUM_REGS: *value = 32; break;
  case CU_FUNC_ATTRIBUTE_PTX_VERSION: *value = function->of->image.target; break;
  case CU_FUNC_ATTRIBUTE_BINARY_VERSION: *value = (int)(card->facts.cc_major * 10 + card->facts.cc_minor); break;
  case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: *value = function->dynamic_shared ? function->dynamic_shared : 49152; break;
  case CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT: *value = -1; break;
  default:
    if (which < 0 || which > 15) LEAVE(CUDA_ERROR_INVALID_VALUE);
    *value = 0;
  }
  LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuFuncSetAttribute(CUfunction handle, CUfunction_attribute which, int value) {
  struct CUfunc_st *function;
  CURRENT(ctx);
  CUresult result = function_resolve(ctx, handle, &function);
  if (result != CUDA_SUCCESS) LEAVE(result);
  if (which == CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT) LEAVE(CUDA_SUCCESS);
  if (which != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) LEAVE(CUDA_ERROR_INVALID_VALUE);
  if (value < 0 || value > (int)context_card(ctx)->facts.shared_per_block_kib * 1024) LEAVE(CUDA_ERROR_INVALID_VALUE);
  function->dynamic_shared = value;
  LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuFuncSetCacheConfig(CUfunction handle, CUfunc_cache config) {
  struct CUfunc_st *function;
  CURRENT(ctx);
  if (config < 0 || config > CU_FUNC_CACHE_PREFER_EQUAL) LEAVE(CUDA_ERROR_INVALID_VALUE);
  LEAVE(function_resolve(ctx, handle, &function));
}

EXPORT CUresult cuFuncGetModule(CUmodule *out, CUfunction handle) {
  struct CUfunc_st *function;
  CURRENT(ctx);
  CUresult result = function_resolve(ctx, handle, &function);
  if (result != CUDA_SUCCESS) LEAVE(result);
  if (!out) LEAVE(CUDA_ERROR_INVALID_VALUE);
  *out = function->of;
  LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuFuncGetName(const char **name, CUfunction handle) {
  struct CUfunc_st *function;
  CURRENT(ctx);
  CUresult result = function_resolve(ctx, handle, &function);
  if (result != CUDA_SUCCESS) LEAVE(result);
  if (!name) LEAVE(CUDA_ERROR_INVALID_VALUE);
  *name = function->entry->name;
  LEAVE(CUDA_SUCCESS);
}
