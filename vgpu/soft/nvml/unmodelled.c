#include "unmodelled.h"

#include <string.h>

nvmlReturn_t nvml_unmodelled(const char *symbol) {
  nvmlReturn_t result = nvml_ready(symbol);
  if (result != NVML_SUCCESS) return result;
  soft_header *header = &nvml_region.state->header;
  /* a count for whoever wonders what a program wanted; a torn name does no harm */
  __atomic_fetch_add(&header->unmodelled_calls, 1, __ATOMIC_RELAXED);
  strncpy(header->unmodelled_last, symbol, sizeof header->unmodelled_last - 1);
  return NVML_ERROR_NOT_SUPPORTED;
}
