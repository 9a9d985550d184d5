/* symbols.c - names through dlsym and cuGetProcAddress. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "../units.h"
#include "probe.h"

static const char *owner_of(const void *address) {
  Dl_info info;
  return address && dladdr(address, &info) && info.dli_fname ? info.dli_fname : "";
}

static const char *nearest(const void *address) {
  Dl_info info;
  return address && dladdr(address, &info) && info.dli_sname && info.dli_saddr == address ? info.dli_sname : "";
}

static bool one(void *handle, const char *name, int version) {
  void *by_symbol = dlsym(handle, name), *by_address = NULL;
  CUdriverProcAddressQueryResult status = -1;
  CUresult result = CUDA_ERROR_NOT_FOUND;
  if (cuda.cuGetProcAddress_v2) result = cuda.cuGetProcAddress_v2(name, &by_address, version, CU_GET_PROC_ADDRESS_DEFAULT, &status);
  else if (cuda.cuGetProcAddress) result = cuda.cuGetProcAddress(name, &by_address, version, CU_GET_PROC_ADDRESS_DEFAULT);
  line("symbol");
  field_bool("ok", by_symbol != NULL);
  field_text("name", name);
  if (by_symbol) field_text("file", owner_of(by_symbol));
  field_signed("procResult", result);
  field_signed("procStatus", status);
  if (result == CUDA_SUCCESS && by_address) {
    field_text("procSymbol", nearest(by_address));
    field_text("procFile", owner_of(by_address));
    field_bool("same", by_address == by_symbol);
  }
  line_end();
  return by_symbol != NULL;
}

int probe_symbols(int argc, char **argv) {
  uint64_t version = 0;
  char row[256];
  int own_version = 0, missing = 0;
  const char *text = take_option(&argc, argv, "--version");
  if (text && !units_number(text, &version)) return usage("--version can't be %s", text);
  if (argc > 1) return usage("symbols takes one file");
  void *handle = dlopen("libcuda.so.1", RTLD_NOW);
  if (!handle) return open_cuda();
  cuda.handle = handle;
  void *found = dlsym(handle, "cuGetProcAddress_v2");
  memcpy(&cuda.cuGetProcAddress_v2, &found, sizeof found);
  found = dlsym(handle, "cuGetProcAddress");
  memcpy(&cuda.cuGetProcAddress, &found, sizeof found);
  found = dlsym(handle, "cuDriverGetVersion");
  memcpy(&cuda.cuDriverGetVersion, &found, sizeof found);
  if (!version && cuda.cuDriverGetVersion && cuda.cuDriverGetVersion(&own_version) == CUDA_SUCCESS) version = (uint64_t)own_version;
  FILE *names = argc ? fopen(argv[0], "re") : stdin;
  if (!names) return usage("%s can't be read", argv[0]);
  while (fgets(row, sizeof row, names)) {
    row[strcspn(row, " \t\r\n")] = 0;
    if (row[0] && row[0] != '#' && !one(handle, row, (int)version)) missing++;
  }
  if (argc) fclose(names);
  return missing ? PROBE_REFUSED : PROBE_OK;
}
