/*
 * Exports: what the libraries of each branch show, that no two share an
 * address, what cuGetProcAddress answers, and what is not modelled.
 *
 * The samples of cuGetProcAddress are what the libraries of R535 and R550
 * were seen to answer.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "harness.h"

typedef struct {
  char symbol[80], base[80], stream[16];
  unsigned int since;
  int branch;
  bool modelled;
} row;

enum { MOST = 1200 };
static row rows[MOST];
static int row_count;

static void read_cuda_table(void) {
  char text[512], model[4], path[4400];
  snprintf(path, sizeof path, "%s/../tables/cuda_exports.tbl", build_dir());
  FILE *file = fopen(path, "re");
  row_count = 0;
  while (file && row_count < MOST && fgets(text, sizeof text, file)) {
    row *r = &rows[row_count];
    if (text[0] == '#') continue;
    if (sscanf(text, "%79s %79s %u %15s %d %3s", r->symbol, r->base, &r->since, r->stream, &r->branch, model) != 6) continue;
    r->modelled = model[0] == '+';
    row_count++;
  }
  if (file) fclose(file);
}

static void read_nvml_table(void) {
  char text[512], model[4], path[4400];
  snprintf(path, sizeof path, "%s/../tables/nvml_exports.tbl", build_dir());
  FILE *file = fopen(path, "re");
  row_count = 0;
  while (file && row_count < MOST && fgets(text, sizeof text, file)) {
    row *r = &rows[row_count];
    if (text[0] == '#') continue;
    if (sscanf(text, "%79s %d %3s", r->symbol, &r->branch, model) != 3) continue;
    r->modelled = model[0] == '+';
    row_count++;
  }
  if (file) fclose(file);
}

static int by_pointer(const void *a, const void *b) {
  const char *x = *(void *const *)a, *y = *(void *const *)b;
  return x < y ? -1 : x > y;
}

static void *open_branch(const char *base, int branch) {
  char path[4400];
  snprintf(path, sizeof path, "%s/%s-%d.so", build_dir(), base, branch);
  return dlopen(path, RTLD_NOW | RTLD_LOCAL);
}

static void exports(const char *base, int branch) {
  static void *addresses[MOST];
  int missing = 0, extra = 0, found = 0;
  void *library = open_branch(base, branch);
  if (!check(library != NULL, "%s of %d loads", base, branch)) {
    printf("# %s\n", dlerror());
    return;
  }
  for (int i = 0; i < row_count; i++) {
    void *at = dlsym(library, rows[i].symbol);
    Dl_info info;
    /* dlsym also looks into what the library needs */
    if (at && dladdr(at, &info) && strstr(info.dli_fname, base) == NULL) at = NULL;
    if (rows[i].branch <= branch) {
      if (!at) {
        missing++;
        printf("# missing %s\n", rows[i].symbol);
      } else {
        addresses[found++] = at;
      }
    } else if (at) {
      extra++;
      printf("# too new %s\n", rows[i].symbol);
    }
  }
  check_equal(missing, 0, "%s of %d exports all %d names of its release", base, branch, found);
  check_equal(extra, 0, "and none of a later one");
  qsort(addresses, (size_t)found, sizeof *addresses, by_pointer);
  int shared = 0;
  for (int i = 1; i < found; i++) shared += addresses[i] == addresses[i - 1];
  check_equal(shared, 0, "no two have the same address");
  dlclose(library);
}

/* ---- cuGetProcAddress ---------------------------------------------------- */

typedef struct {
  const char *name;
  int version;
  cuuint64_t flags;
  const char *want; /* NULL: none */
  int status;
} question;

static void addresses(void) {
  static const question questions[] = {
      {"cuMemAlloc", 2000, 0, "cuMemAlloc", 0},
      {"cuMemAlloc", 3010, 0, "cuMemAlloc", 0},
      {"cuMemAlloc", 3020, 0, "cuMemAlloc_v2", 0},
      {"cuMemAlloc", 12040, 0, "cuMemAlloc_v2", 0},
      {"cuMemAlloc", 12040, 2, "cuMemAlloc_v2", 0},
      {"cuMemAlloc", 99999, 0, "cuMemAlloc_v2", 0},
      {"cuMemAlloc", -1, 0, "cuMemAlloc_v2", 0},
      {"cuMemAlloc", 0, 0, NULL, 2},
      {"cuMemAlloc_v2", 12040, 0, NULL, 1},
      {"cuLaunchKernel", 3020, 0, NULL, 2},
      {"cuLaunchKernel", 4000, 0, "cuLaunchKernel", 0},
      {"cuLaunchKernel", 12000, 1, "cuLaunchKernel", 0},
      {"cuLaunchKernel", 12000, 2, "cuLaunchKernel_ptsz", 0},
      {"cuLaunchKernel", 6000, 2, NULL, 2},
      {"cuLaunchKernel_ptsz", 12000, 0, NULL, 1},
      {"cuMemcpyHtoD", 3020, 0, "cuMemcpyHtoD_v2", 0},
      {"cuMemcpyHtoD", 7000, 2, "cuMemcpyHtoD_v2_ptds", 0},
      {"cuGetProcAddress", 11030, 0, "cuGetProcAddress", 0},
      {"cuGetProcAddress", 12000, 0, "cuGetProcAddress_v2", 0},
      {"cuStreamGetCaptureInfo", 10010, 0, "cuStreamGetCaptureInfo", 0},
      {"cuStreamGetCaptureInfo", 11030, 0, "cuStreamGetCaptureInfo_v2", 0},
      {"cuStreamGetCaptureInfo", 12030, 0, "cuStreamGetCaptureInfo_v3", 0},
      {"cuStreamGetCaptureInfo", 12030, 2, "cuStreamGetCaptureInfo_v3_ptsz", 0},
      {"cuDeviceGetUuid", 9020, 0, "cuDeviceGetUuid", 0},
      {"cuDeviceGetUuid", 11040, 0, "cuDeviceGetUuid_v2", 0},
      {"cuCtxCreate", 12060, 0, "cuCtxCreate_v3", 0}, /* the fourth form is of a later release */
      {"nothing", 12000, 0, NULL, 1},
      {"", 12000, 0, NULL, 1},
  };
  void *library = cuda_library();
  for (unsigned int i = 0; i < sizeof questions / sizeof questions[0]; i++) {
    const question *q = &questions[i];
    void *got = (void *)7, *want = q->want ? dlsym(library, q->want) : NULL;
    CUdriverProcAddressQueryResult status = 9;
    CUresult result = CUDA(cuGetProcAddress_v2)(q->name, &got, q->version, q->flags, &status);
    check(result == CUDA_SUCCESS && got == want && status == q->status && (!q->want || want), "%s for %d, flags %d: %s", q->name, q->version,
          (int)q->flags, q->want ? q->want : "none");
    void *first = (void *)7;
    result = CUDA(cuGetProcAddress)(q->name, &first, q->version, q->flags);
    bool good = q->want ? result == CUDA_SUCCESS && first == want : result == CUDA_ERROR_NOT_FOUND && first == (void *)7;
    check(good, "the first form agrees");
  }
  void *got;
  check_equal(CUDA(cuGetProcAddress)("cuInit", &got, 12000, 4), CUDA_ERROR_INVALID_VALUE, "flags that there aren't");

  /* every pointer that it ever gives is an export of that very name */
  int wrong = 0, asked = 0;
  for (int i = 0; i < row_count; i++) {
    if (rows[i].since == 0 || rows[i].branch > 550) continue;
    CUdriverProcAddressQueryResult status;
    cuuint64_t flags = strcmp(rows[i].stream, "thread") == 0 ? 2 : 1;
    CUDA(cuGetProcAddress_v2)(rows[i].base, &got, (int)rows[i].since, flags, &status);
    asked++;
    if (got != dlsym(library, rows[i].symbol)) {
      wrong++;
      printf("# %s for %u\n", rows[i].base, rows[i].since);
    }
  }
  check_equal(wrong, 0, "all %d names are answered with their own symbol", asked);
}

/* ---- not modelled -------------------------------------------------------- */

static void not_modelled(void) {
  int pretending = 0, count = 0;
  for (int i = 0; i < row_count; i++) {
    if (rows[i].modelled || rows[i].branch > 550) continue;
    count++;
    CUresult (*call)(void) = (CUresult (*)(void))dlsym(cuda_library(), rows[i].symbol);
    CUresult result = call();
    if (getenv("VERBOSE")) printf("# not modelled: %s\n", rows[i].symbol);
    if (result != CUDA_ERROR_NOT_SUPPORTED) {
      pretending++;
      printf("# %s answers %d\n", rows[i].symbol, result);
    }
  }
  check_equal(pretending, 0, "%d entry points are not modelled and say so (VERBOSE=1 lists them)", count);
  check_equal(state_open()->state->header.unmodelled_calls, count, "and are counted where softgpu show sees it");
}

int main(void) {
  static const int branches[] = {535, 550, 570, 580};
  root_make("--card", "l20", "--seed", "8", NULL);
  read_nvml_table();
  check(row_count > 400, "NVML's table has %d rows", row_count);
  for (int i = 0; i < 4; i++) exports("libnvidia-ml", branches[i]);
  read_cuda_table();
  check(row_count > 600, "CUDA's table has %d rows", row_count);
  for (int i = 0; i < 4; i++) exports("libcuda", branches[i]);
  addresses();
  void *early = entry(cuda_library(), "cuGraphicsMapResources");
  check_equal(((CUresult (*)(void))early)(), CUDA_ERROR_NOT_INITIALIZED, "before cuInit everything says so");
  check_equal(start_cuda(0), CUDA_SUCCESS, "start");
  not_modelled();
  return finish();
}
