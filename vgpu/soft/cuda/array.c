/* array.c - arrays and mipmapped arrays: formats, layouts, life. */
#include "array.h"

#include <stdlib.h>
#include <string.h>

#include "../state/ledger.h"
#include "shared.h"

enum { TILE_ROW_BYTES = 64, TILE_ROWS = 8, MOST_TILE_ROWS = 128, MOST_TILE_SLICES = 32, MOST_LEVELS = 32 };
enum { LEVEL_BYTES = 512, ARRAY_BYTES = 65536 };
#define KNOWN_FLAGS                                                                                                   \
  (CUDA_ARRAY3D_LAYERED | CUDA_ARRAY3D_SURFACE_LDST | CUDA_ARRAY3D_CUBEMAP | CUDA_ARRAY3D_TEXTURE_GATHER |            \
   CUDA_ARRAY3D_DEPTH_TEXTURE | CUDA_ARRAY3D_COLOR_ATTACHMENT | CUDA_ARRAY3D_SPARSE | CUDA_ARRAY3D_DEFERRED_MAPPING)

static uint64_t up(uint64_t value, uint64_t step) { return (value + step - 1) / step * step; }

/* ---- formats ------------------------------------------------------------- */

typedef struct {
  int format;
  unsigned int channels;     /* 0: the caller says, 1, 2 or 4 */
  unsigned int channel_bytes;
  unsigned int block_bytes;  /* of 4x4 elements, 0: not in blocks */
} format_row;

static const format_row formats[] = {
    {CU_AD_FORMAT_UNSIGNED_INT8, 0, 1, 0},   {CU_AD_FORMAT_UNSIGNED_INT16, 0, 2, 0},  {CU_AD_FORMAT_UNSIGNED_INT32, 0, 4, 0},
    {CU_AD_FORMAT_SIGNED_INT8, 0, 1, 0},     {CU_AD_FORMAT_SIGNED_INT16, 0, 2, 0},    {CU_AD_FORMAT_SIGNED_INT32, 0, 4, 0},
    {CU_AD_FORMAT_HALF, 0, 2, 0},            {CU_AD_FORMAT_FLOAT, 0, 4, 0},           {CU_AD_FORMAT_NV12, 3, 1, 0},
    {CU_AD_FORMAT_UNORM_INT8X1, 1, 1, 0},    {CU_AD_FORMAT_UNORM_INT8X2, 2, 1, 0},    {CU_AD_FORMAT_UNORM_INT8X4, 4, 1, 0},
    {CU_AD_FORMAT_UNORM_INT16X1, 1, 2, 0},   {CU_AD_FORMAT_UNORM_INT16X2, 2, 2, 0},   {CU_AD_FORMAT_UNORM_INT16X4, 4, 2, 0},
    {CU_AD_FORMAT_SNORM_INT8X1, 1, 1, 0},    {CU_AD_FORMAT_SNORM_INT8X2, 2, 1, 0},    {CU_AD_FORMAT_SNORM_INT8X4, 4, 1, 0},
    {CU_AD_FORMAT_SNORM_INT16X1, 1, 2, 0},   {CU_AD_FORMAT_SNORM_INT16X2, 2, 2, 0},   {CU_AD_FORMAT_SNORM_INT16X4, 4, 2, 0},
    {CU_AD_FORMAT_BC1_UNORM, 4, 0, 8},       {CU_AD_FORMAT_BC1_UNORM_SRGB, 4, 0, 8},  {CU_AD_FORMAT_BC2_UNORM, 4, 0, 16},
    {CU_AD_FORMAT_BC2_UNORM_SRGB, 4, 0, 16}, {CU_AD_FORMAT_BC3_UNORM, 4, 0, 16},      {CU_AD_FORMAT_BC3_UNORM_SRGB, 4, 0, 16},
    {CU_AD_FORMAT_BC4_UNORM, 1, 0, 8},       {CU_AD_FORMAT_BC4_SNORM, 1, 0, 8},       {CU_AD_FORMAT_BC5_UNORM, 2, 0, 16},
    {CU_AD_FORMAT_BC5_SNORM, 2, 0, 16},      {CU_AD_FORMAT_BC6H_UF16, 3, 0, 16},      {CU_AD_FORMAT_BC6H_SF16, 3, 0, 16},
    {CU_AD_FORMAT_BC7_UNORM, 4, 0, 16},      {CU_AD_FORMAT_BC7_UNORM_SRGB, 4, 0, 16},
};

static const format_row *format_of(const CUDA_ARRAY3D_DESCRIPTOR *d) {
  for (size_t i = 0; i < sizeof formats / sizeof formats[0]; i++) {
    if (formats[i].format != d->Format) continue;
    unsigned int n = d->NumChannels;
    bool right = formats[i].channels ? n == formats[i].channels : n == 1 || n == 2 || n == 4;
    return right ? &formats[i] : NULL;
  }
  return NULL;
}

/* ---- what may be --------------------------------------------------------- */

static bool within(const CUDA_ARRAY3D_DESCRIPTOR *d, uint64_t width, uint64_t height, uint64_t depth) {
  return d->Width <= width && d->Height <= height && d->Depth <= depth;
}

static bool dimensions_fit(const CUDA_ARRAY3D_DESCRIPTOR *d) {
  unsigned int flags = d->Flags;
  if (!d->Width) return false;
  if (flags & CUDA_ARRAY3D_CUBEMAP) {
    if (d->Width != d->Height || !d->Depth || d->Depth % 6) return false;
    return within(d, 32768, 32768, flags & CUDA_ARRAY3D_LAYERED ? 2046 : 6);
  }
  if (flags & CUDA_ARRAY3D_LAYERED) return d->Depth && within(d, 32768, 32768, 2048);
  if (d->Depth) return d->Height && within(d, 16384, 16384, 16384);
  if (flags & CUDA_ARRAY3D_TEXTURE_GATHER) return d->Height && within(d, 32768, 32768, 0);
  return within(d, 131072, 65536, 0);
}

static CUresult acceptable(const CUDA_ARRAY3D_DESCRIPTOR *d) {
  const format_row *format = format_of(d);
  if (!format || d->Flags & ~(unsigned int)KNOWN_FLAGS || !dimensions_fit(d)) return CUDA_ERROR_INVALID_VALUE;
  if (d->Flags & CUDA_ARRAY3D_TEXTURE_GATHER && d->Flags & (CUDA_ARRAY3D_LAYERED | CUDA_ARRAY3D_CUBEMAP)) return CUDA_ERROR_INVALID_VALUE;
  if (format->block_bytes && (!d->Height || d->Width % 4 || d->Height % 4)) return CUDA_ERROR_INVALID_VALUE;
  if (d->Format == CU_AD_FORMAT_NV12 && (!d->Height || d->Depth || d->Width % 2 || d->Height % 2)) return CUDA_ERROR_INVALID_VALUE;
  return d->Flags & CUDA_ARRAY3D_SPARSE ? CUDA_ERROR_NOT_SUPPORTED : CUDA_SUCCESS;
}

/* ---- layout -------------------------------------------------------------- */

static uint64_t tile(uint64_t count, uint64_t least, uint64_t most) {
  uint64_t size = least;
  while (size < count && size < most) size *= 2;
  return size;
}

/* Fills in the sizes of an array whose descriptor is set and acceptable. */
static void lay_out(struct CUarray_st *array) {
  const CUDA_ARRAY3D_DESCRIPTOR *d = &array->descriptor;
  const format_row *format = format_of(d);
  bool layers = d->Flags & (CUDA_ARRAY3D_LAYERED | CUDA_ARRAY3D_CUBEMAP);
  uint64_t height = d->Height ? d->Height : 1;
  array->slices = d->Depth ? d->Depth : 1;
  if (format->block_bytes) {
    array->row_bytes = (d->Width + 3) / 4 * format->block_bytes;
    array->rows = (height + 3) / 4;
  } else if (d->Format == CU_AD_FORMAT_NV12) {
    array->row_bytes = d->Width; /* half as many rows of pairs follow those of the first plane */
    array->rows = height + height / 2;
  } else {
    array->row_bytes = d->Width * format->channel_bytes * d->NumChannels;
    array->rows = height;
  }
  array->pitch = up(array->row_bytes, TILE_ROW_BYTES);
  uint64_t rows = array->rows > 1 ? up(array->rows, tile(array->rows, TILE_ROWS, MOST_TILE_ROWS)) : 1;
  uint64_t slices = layers ? array->slices : up(array->slices, tile(array->slices, 1, MOST_TILE_SLICES));
  array->slice_bytes = array->pitch * rows;
  array->bytes = up(array->slice_bytes * slices, LEVEL_BYTES);
}

void *array_view(const struct CUarray_st *array, uint64_t x, uint64_t y, uint64_t z, uint64_t width, bool write) {
  if (!array->base || x > array->row_bytes || width > array->row_bytes - x || y >= array->rows || z >= array->slices) return NULL;
  return memory_host_view(array->base + z * array->slice_bytes + y * array->pitch + x, width, write);
}

/* ---- life ---------------------------------------------------------------- */

static struct CUarray_st *array_new(context *ctx, const CUDA_ARRAY3D_DESCRIPTOR *d, bool borrowed) {
  struct CUarray_st *fresh = calloc(1, sizeof *fresh);
  if (!fresh || !handle_add(fresh, HANDLE_ARRAY)) {
    free(fresh);
    return NULL;
  }
  fresh->owner = ctx;
  fresh->descriptor = *d;
  fresh->borrowed = borrowed;
  lay_out(fresh);
  return fresh;
}

static void array_delete(struct CUarray_st *gone) {
  for (int i = 0; i < 2; i++)
    if (gone->planes[i]) array_delete(gone->planes[i]);
  if (gone->base && !gone->borrowed) opaque_free(gone->base);
  handle_remove(gone);
  free(gone);
}

static CUresult array_create(context *ctx, const CUDA_ARRAY3D_DESCRIPTOR *d, CUarray *out) {
  CUresult result = acceptable(d);
  if (result != CUDA_SUCCESS) return result;
  struct CUarray_st *fresh = array_new(ctx, d, false);
  if (!fresh) return CUDA_ERROR_OUT_OF_MEMORY;
  if (!(d->Flags & CUDA_ARRAY3D_DEFERRED_MAPPING)) result = opaque_allocate(ctx, up(fresh->bytes, ARRAY_BYTES), &fresh->base);
  if (result != CUDA_SUCCESS) {
    array_delete(fresh);
    return result;
  }
  fresh->next = ctx->arrays;
  ctx->arrays = fresh;
  *out = fresh;
  return CUDA_SUCCESS;
}

static void mipmap_delete(struct CUmipmappedArray_st *gone) {
  for (unsigned int i = 0; i < gone->level_count; i++)
    if (gone->levels[i]) array_delete(gone->levels[i]);
  if (gone->base && gone->borrowed) (void)import_close(gone->base, IMPORT_ARRAY);
  else if (gone->base) opaque_free(gone->base);
  handle_remove(gone);
  free(gone);
}

static unsigned int most_levels(const CUDA_ARRAY3D_DESCRIPTOR *d) {
  bool layers = d->Flags & (CUDA_ARRAY3D_LAYERED | CUDA_ARRAY3D_CUBEMAP);
  uint64_t longest = d->Width > d->Height ? d->Width : d->Height;
  if (!layers && d->Depth > longest) longest = d->Depth;
  unsigned int levels = 1;
  while (longest >>= 1) levels++;
  return levels;
}

static uint64_t halved(uint64_t side, unsigned int level) { return !side ? 0 : side >> level ? side >> level : 1; }

static CUresult mipmap_lay_out(context *ctx, const CUDA_ARRAY3D_DESCRIPTOR *d, unsigned int levels, struct CUmipmappedArray_st **out) {
  CUresult result = acceptable(d);
  if (result != CUDA_SUCCESS) return result;
  if (!levels || d->Format == CU_AD_FORMAT_NV12) return CUDA_ERROR_INVALID_VALUE;
  struct CUmipmappedArray_st *fresh = calloc(1, sizeof *fresh);
  if (!fresh || !handle_add(fresh, HANDLE_MIPMAP)) {
    free(fresh);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  fresh->owner = ctx;
  fresh->descriptor = *d;
  fresh->level_count = levels < most_levels(d) ? levels : most_levels(d);
  if (fresh->level_count > MOST_LEVELS) fresh->level_count = MOST_LEVELS;
  for (unsigned int i = 0; i < fresh->level_count; i++) {
    CUDA_ARRAY3D_DESCRIPTOR level = *d;
    level.Width = halved(d->Width, i);
    level.Height = halved(d->Height, i);
    if (!(d->Flags & (CUDA_ARRAY3D_LAYERED | CUDA_ARRAY3D_CUBEMAP))) level.Depth = halved(d->Depth, i);
    fresh->levels[i] = array_new(ctx, &level, true);
    if (!fresh->levels[i]) {
      mipmap_delete(fresh);
      return CUDA_ERROR_OUT_OF_MEMORY;
    }
    fresh->bytes += fresh->levels[i]->bytes;
  }
  fresh->bytes = up(fresh->bytes, ARRAY_BYTES);
  *out = fresh;
  return CUDA_SUCCESS;
}

static void mipmap_place(struct CUmipmappedArray_st *array, CUdeviceptr base, CUmipmappedArray *out) {
  array->base = base;
  uint64_t at = base;
  for (unsigned int i = 0; base && i < array->level_count; i++) {
    array->levels[i]->base = at;
    at += array->levels[i]->bytes;
  }
  array->next = array->owner->mipmaps;
  array->owner->mipmaps = array;
  *out = array;
}

CUresult mipmap_over(context *ctx, const CUDA_ARRAY3D_DESCRIPTOR *d, unsigned int levels, CUdeviceptr base, uint64_t bytes,
                     CUmipmappedArray *out) {
  struct CUmipmappedArray_st *fresh;
  CUresult result = mipmap_lay_out(ctx, d, levels, &fresh);
  if (result != CUDA_SUCCESS) return result;
  if (fresh->bytes > bytes) {
    mipmap_delete(fresh);
    return CUDA_ERROR_INVALID_VALUE;
  }
  fresh->borrowed = true;
  mipmap_place(fresh, base, out);
  return CUDA_SUCCESS;
}

void arrays_drop(context *ctx) {
  while (ctx->arrays) {
    struct CUarray_st *gone = ctx->arrays;
    ctx->arrays = gone->next;
    array_delete(gone);
  }
  while (ctx->mipmaps) {
    struct CUmipmappedArray_st *gone = ctx->mipmaps;
    ctx->mipmaps = gone->next;
    mipmap_delete(gone);
  }
}

/* ---- entry points -------------------------------------------------------- */

#define CURRENT(ctx)                        \
  context *ctx;                             \
  ENTER();                                  \
  CUresult current = context_current(&ctx); \
  if (current != CUDA_SUCCESS) LEAVE(current)

static CUresult create(CUarray *out, const CUDA_ARRAY3D_DESCRIPTOR *d) {
  CURRENT(ctx);
  SAFE();
  LEAVE(array_create(ctx, d, out));
}

EXPORT CUresult cuArrayCreate(CUarray *out, const CUDA_ARRAY_DESCRIPTOR_v1 *d) {
  if (!out || !d) return CUDA_ERROR_INVALID_VALUE;
  return create(out, &(CUDA_ARRAY3D_DESCRIPTOR){d->Width, d->Height, 0, d->Format, d->NumChannels, 0});
}

EXPORT CUresult cuArrayCreate_v2(CUarray *out, const CUDA_ARRAY_DESCRIPTOR *d) {
  if (!out || !d) return CUDA_ERROR_INVALID_VALUE;
  return create(out, &(CUDA_ARRAY3D_DESCRIPTOR){d->Width, d->Height, 0, d->Format, d->NumChannels, 0});
}

EXPORT CUresult cuArray3DCreate(CUarray *out, const CUDA_ARRAY3D_DESCRIPTOR_v1 *d) {
  if (!out || !d) return CUDA_ERROR_INVALID_VALUE;
  return create(out, &(CUDA_ARRAY3D_DESCRIPTOR){d->Width, d->Height, d->Depth, d->Format, d->NumChannels, d->Flags});
}

EXPORT CUresult cuArray3DCreate_v2(CUarray *out, const CUDA_ARRAY3D_DESCRIPTOR *d) {
  if (!out || !d) return CUDA_ERROR_INVALID_VALUE;
  return create(out, d);
}

EXPORT CUresult cuArrayDestroy(CUarray handle) {
  ENTER();
  if (!handle_is(handle, HANDLE_ARRAY)) LEAVE(CUDA_ERROR_INVALID_HANDLE);
  CUresult result = work_wait(handle->owner, SOFT_ALL_STREAMS, SOFT_FOREVER, work_spins(handle->owner));
  if (result != CUDA_SUCCESS) LEAVE(result);
  if (!handle_is(handle, HANDLE_ARRAY)) LEAVE(CUDA_ERROR_INVALID_HANDLE); /* gone while we waited */
  struct CUarray_st **link = &handle->owner->arrays;
  while (*link && *link != handle) link = &(*link)->next;
  if (!*link) LEAVE(CUDA_ERROR_INVALID_HANDLE); /* a level or a plane goes with its array */
  *link = handle->next;
  array_delete(handle);
  LEAVE(CUDA_SUCCESS);
}

static CUresult description(CUarray handle, CUDA_ARRAY3D_DESCRIPTOR *out) {
  ENTER();
  if (!handle_is(handle, HANDLE_ARRAY)) LEAVE(CUDA_ERROR_INVALID_HANDLE);
  *out = handle->descriptor;
  LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuArrayGetDescriptor(CUDA_ARRAY_DESCRIPTOR_v1 *out, CUarray handle) {
  CUDA_ARRAY3D_DESCRIPTOR d;
  if (!out) return CUDA_ERROR_INVALID_VALUE;
  CUresult result = description(handle, &d);
  if (result == CUDA_SUCCESS) *out = (CUDA_ARRAY_DESCRIPTOR_v1){(unsigned int)d.Width, (unsigned int)d.Height, d.Format, d.NumChannels};
  return result;
}

EXPORT CUresult cuArrayGetDescriptor_v2(CUDA_ARRAY_DESCRIPTOR *out, CUarray handle) {
  CUDA_ARRAY3D_DESCRIPTOR d;
  if (!out) return CUDA_ERROR_INVALID_VALUE;
  CUresult result = description(handle, &d);
  if (result == CUDA_SUCCESS) *out = (CUDA_ARRAY_DESCRIPTOR){d.Width, d.Height, d.Format, d.NumChannels};
  return result;
}

EXPORT CUresult cuArray3DGetDescriptor(CUDA_ARRAY3D_DESCRIPTOR_v1 *out, CUarray handle) {
  CUDA_ARRAY3D_DESCRIPTOR d;
  if (!out) return CUDA_ERROR_INVALID_VALUE;
  CUresult result = description(handle, &d);
  if (result == CUDA_SUCCESS)
    *out = (CUDA_ARRAY3D_DESCRIPTOR_v1){(unsigned int)d.Width, (unsigned int)d.Height, (unsigned int)d.Depth, d.Format, d.NumChannels, d.Flags};
  return result;
}

EXPORT CUresult cuArray3DGetDescriptor_v2(CUDA_ARRAY3D_DESCRIPTOR *out, CUarray handle) {
  return out ? description(handle, out) : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuArrayGetPlane(CUarray *out, CUarray handle, unsigned int index) {
  ENTER();
  if (!handle_is(handle, HANDLE_ARRAY)) LEAVE(CUDA_ERROR_INVALID_HANDLE);
  const CUDA_ARRAY3D_DESCRIPTOR *d = &handle->descriptor;
  if (!out || index > 1 || d->Format != CU_AD_FORMAT_NV12) LEAVE(CUDA_ERROR_INVALID_VALUE);
  if (!handle->planes[index]) {
    CUDA_ARRAY3D_DESCRIPTOR plane = {d->Width >> index, d->Height >> index, 0, CU_AD_FORMAT_UNSIGNED_INT8, index + 1, d->Flags};
    struct CUarray_st *fresh = array_new(handle->owner, &plane, true);
    if (!fresh) LEAVE(CUDA_ERROR_OUT_OF_MEMORY);
    fresh->pitch = handle->pitch;
    fresh->base = handle->base ? handle->base + (index ? d->Height * handle->pitch : 0) : 0;
    handle->planes[index] = fresh;
  }
  *out = handle->planes[index];
  LEAVE(CUDA_SUCCESS);
}

/* Sizes are told only of arrays that get their memory later, as drivers do it. */
static CUresult requirements(CUDA_ARRAY_MEMORY_REQUIREMENTS *out, const CUDA_ARRAY3D_DESCRIPTOR *d, uint64_t bytes, CUdevice device) {
  if (device < 0 || (uint32_t)device >= the_driver.device_count) return CUDA_ERROR_INVALID_DEVICE;
  if (!out || !(d->Flags & CUDA_ARRAY3D_DEFERRED_MAPPING)) return CUDA_ERROR_INVALID_VALUE;
  *out = (CUDA_ARRAY_MEMORY_REQUIREMENTS){.size = up(bytes, ARRAY_BYTES), .alignment = ARRAY_BYTES};
  return CUDA_SUCCESS;
}

EXPORT CUresult cuArrayGetMemoryRequirements(CUDA_ARRAY_MEMORY_REQUIREMENTS *out, CUarray handle, CUdevice device) {
  ENTER();
  if (!handle_is(handle, HANDLE_ARRAY)) LEAVE(CUDA_ERROR_INVALID_HANDLE);
  LEAVE(requirements(out, &handle->descriptor, handle->bytes, device));
}

EXPORT CUresult cuMipmappedArrayGetMemoryRequirements(CUDA_ARRAY_MEMORY_REQUIREMENTS *out, CUmipmappedArray handle, CUdevice device) {
  ENTER();
  if (!handle_is(handle, HANDLE_MIPMAP)) LEAVE(CUDA_ERROR_INVALID_HANDLE);
  LEAVE(requirements(out, &handle->descriptor, handle->bytes, device));
}

/* No array here is sparse, and of others a driver tells no such properties. */
EXPORT CUresult cuArrayGetSparseProperties(CUDA_ARRAY_SPARSE_PROPERTIES *out, CUarray handle) {
  (void)out;
  ENTER();
  LEAVE(handle_is(handle, HANDLE_ARRAY) ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_HANDLE);
}

EXPORT CUresult cuMipmappedArrayGetSparseProperties(CUDA_ARRAY_SPARSE_PROPERTIES *out, CUmipmappedArray handle) {
  (void)out;
  ENTER();
  LEAVE(handle_is(handle, HANDLE_MIPMAP) ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_HANDLE);
}

EXPORT CUresult cuMipmappedArrayCreate(CUmipmappedArray *out, const CUDA_ARRAY3D_DESCRIPTOR *d, unsigned int levels) {
  struct CUmipmappedArray_st *fresh;
  CUdeviceptr base = 0;
  CURRENT(ctx);
  SAFE();
  if (!out || !d) LEAVE(CUDA_ERROR_INVALID_VALUE);
  CUresult result = mipmap_lay_out(ctx, d, levels, &fresh);
  if (result != CUDA_SUCCESS) LEAVE(result);
  if (!(d->Flags & CUDA_ARRAY3D_DEFERRED_MAPPING)) result = opaque_allocate(ctx, fresh->bytes, &base);
  if (result != CUDA_SUCCESS) {
    mipmap_delete(fresh);
    LEAVE(result);
  }
  mipmap_place(fresh, base, out);
  LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuMipmappedArrayGetLevel(CUarray *out, CUmipmappedArray handle, unsigned int index) {
  ENTER();
  if (!handle_is(handle, HANDLE_MIPMAP)) LEAVE(CUDA_ERROR_INVALID_HANDLE);
  if (!out || index >= handle->level_count) LEAVE(CUDA_ERROR_INVALID_VALUE);
  *out = handle->levels[index];
  LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuMipmappedArrayDestroy(CUmipmappedArray handle) {
  ENTER();
  if (!handle_is(handle, HANDLE_MIPMAP)) LEAVE(CUDA_ERROR_INVALID_HANDLE);
  CUresult result = work_wait(handle->owner, SOFT_ALL_STREAMS, SOFT_FOREVER, work_spins(handle->owner));
  if (result != CUDA_SUCCESS) LEAVE(result);
  if (!handle_is(handle, HANDLE_MIPMAP)) LEAVE(CUDA_ERROR_INVALID_HANDLE);
  struct CUmipmappedArray_st **link = &handle->owner->mipmaps;
  while (*link && *link != handle) link = &(*link)->next;
  if (*link) *link = handle->next;
  mipmap_delete(handle);
  LEAVE(CUDA_SUCCESS);
}
