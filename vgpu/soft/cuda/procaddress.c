/*
 * procaddress.c - cuGetProcAddress.
 *
 * What a driver answers (tried on R535 and R550): only base names are known,
 * never _v2 or _ptsz; the version that is asked for picks the newest form that
 * is not newer than it; versions above the driver's own are no error, nor are
 * versions below every form (the status says so); the version is compared
 * unsigned. The first form of the entry reports both cases as NOT_FOUND and
 * leaves the pointer alone, the second sets it to NULL and says which.
 */
#include "procaddress.h"

#include <string.h>

#include "driver.h"
#include "personality.h"

static CUdriverProcAddressQueryResult find(const char *name, unsigned int version, cuuint64_t flags, void **out) {
  export_stream other = flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM ? EXPORT_LEGACY : EXPORT_THREAD;
  const export_row *best = NULL;
  bool known = false;
  for (unsigned int i = 0; i < export_count; i++) {
    const export_row *row = &export_table[i];
    if (!row->base || row->branch > soft_branch || row->stream == other || strcmp(row->base, name) != 0) continue;
    known = true;
    if (row->since <= version && (!best || row->since > best->since)) best = row;
  }
  *out = NULL;
  if (!best) return known ? CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  memcpy(out, &best->address, sizeof *out);
  return CU_GET_PROC_ADDRESS_SUCCESS;
}

EXPORT CUresult cuGetProcAddress_v2(const char *symbol, void **function, int version, cuuint64_t flags, CUdriverProcAddressQueryResult *status) {
  if (!symbol || !function || flags > 3) return CUDA_ERROR_INVALID_VALUE;
  CUdriverProcAddressQueryResult found = find(symbol, (unsigned int)version, flags, function);
  if (status) *status = found;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuGetProcAddress(const char *symbol, void **function, int version, cuuint64_t flags) {
  void *found;
  if (!symbol || !function || flags > 3) return CUDA_ERROR_INVALID_VALUE;
  if (find(symbol, (unsigned int)version, flags, &found) != CU_GET_PROC_ADDRESS_SUCCESS) return CUDA_ERROR_NOT_FOUND;
  *function = found;
  return CUDA_SUCCESS;
}
