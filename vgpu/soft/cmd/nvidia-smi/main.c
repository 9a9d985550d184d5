/*
 * nvidia-smi - the few views of it that people and scripts use, over NVML.
 *
 * A stand-in for driver roots without NVIDIA's own. It works on any NVML, and
 * says "software GPU" on a line of its own in the table.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "../../../lib/include/nvml_abi.h"

#define CALLS(F)                                                                                                                    \
  F(nvmlInit_v2) F(nvmlErrorString) F(nvmlDeviceGetCount_v2) F(nvmlDeviceGetHandleByIndex_v2) F(nvmlDeviceGetName)                  \
  F(nvmlDeviceGetUUID) F(nvmlDeviceGetSerial) F(nvmlDeviceGetPciInfo_v3) F(nvmlDeviceGetMemoryInfo_v2) F(nvmlDeviceGetUtilizationRates) \
  F(nvmlDeviceGetTemperature) F(nvmlDeviceGetPowerUsage) F(nvmlDeviceGetEnforcedPowerLimit) F(nvmlDeviceGetComputeMode)             \
  F(nvmlDeviceGetPersistenceMode) F(nvmlDeviceGetMinorNumber) F(nvmlDeviceGetClockInfo) F(nvmlDeviceGetPerformanceState)            \
  F(nvmlDeviceGetComputeRunningProcesses_v3) F(nvmlDeviceGetMPSComputeRunningProcesses_v3) F(nvmlDeviceGetCudaComputeCapability) F(nvmlDeviceGetTotalEccErrors)                   \
  F(nvmlDeviceGetMigMode) F(nvmlDeviceGetVbiosVersion) F(nvmlDeviceGetIndex) F(nvmlDeviceSetComputeMode) F(nvmlSystemGetDriverVersion)                          \
  F(nvmlSystemGetCudaDriverVersion_v2) F(nvmlSystemGetProcessName) F(nvmlSystemGetNVMLVersion)

#define MEMBER(name) static __typeof__(name) *p_##name;
CALLS(MEMBER)

static int fail(const char *what, nvmlReturn_t result) {
  fprintf(stderr, "%s: %s\n", what, p_nvmlErrorString ? p_nvmlErrorString(result) : "no NVML");
  return result ? (int)(result & 0xff) : 1;
}

static int start(void) {
  void *handle = dlopen("libnvidia-ml.so.1", RTLD_NOW);
  char beside[4096];
  if (!handle) {
    /* as called by path from a driver root that is not in the loader's search path */
    Dl_info self;
    if (dladdr((void *)&start, &self) && self.dli_fname && realpath(self.dli_fname, beside)) {
      for (int up = 0; up < 3; up++) {
        char *slash = strrchr(beside, '/');
        if (slash) *slash = 0;
      }
      strncat(beside, "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1", sizeof beside - strlen(beside) - 1);
      handle = dlopen(beside, RTLD_NOW);
    }
  }
  if (!handle) {
    fprintf(stderr, "NVIDIA-SMI couldn't find libnvidia-ml.so library in your system (software GPU).\n");
    return 12;
  }
#define LOAD(name)                          \
  do {                                      \
    void *found = dlsym(handle, #name);     \
    if (!found) return fail(#name, 13);     \
    memcpy(&p_##name, &found, sizeof found); \
  } while (0);
  CALLS(LOAD)
  nvmlReturn_t result = p_nvmlInit_v2();
  return result == NVML_SUCCESS ? 0 : fail("Failed to initialize NVML", result);
}

/* ---- the card, as texts -------------------------------------------------- */

typedef struct {
  nvmlDevice_t device;
  unsigned int index;
  char name[96], uuid[80];
  nvmlPciInfo_t pci;
  nvmlMemory_v2_t memory;
  nvmlUtilization_t load;
  unsigned int celsius, milliwatts, limit_mw, sm_mhz, mem_mhz;
  int state, mode;
  nvmlEnableState_t persistence;
} card;

static bool read_card(unsigned int index, card *c) {
  memset(c, 0, sizeof *c);
  c->index = index;
  c->memory.version = NVML_MEMORY_V2_VERSION;
  if (p_nvmlDeviceGetHandleByIndex_v2(index, &c->device) != NVML_SUCCESS) return false;
  if (p_nvmlDeviceGetName(c->device, c->name, sizeof c->name) != NVML_SUCCESS) return false;
  p_nvmlDeviceGetUUID(c->device, c->uuid, sizeof c->uuid);
  p_nvmlDeviceGetPciInfo_v3(c->device, &c->pci);
  p_nvmlDeviceGetMemoryInfo_v2(c->device, &c->memory);
  p_nvmlDeviceGetUtilizationRates(c->device, &c->load);
  p_nvmlDeviceGetTemperature(c->device, NVML_TEMPERATURE_GPU, &c->celsius);
  p_nvmlDeviceGetPowerUsage(c->device, &c->milliwatts);
  p_nvmlDeviceGetEnforcedPowerLimit(c->device, &c->limit_mw);
  p_nvmlDeviceGetClockInfo(c->device, NVML_CLOCK_SM, &c->sm_mhz);
  p_nvmlDeviceGetClockInfo(c->device, NVML_CLOCK_MEM, &c->mem_mhz);
  p_nvmlDeviceGetPerformanceState(c->device, &c->state);
  p_nvmlDeviceGetComputeMode(c->device, &c->mode);
  p_nvmlDeviceGetPersistenceMode(c->device, &c->persistence);
  return true;
}

static unsigned long long mib(unsigned long long bytes) { return bytes >> 20; }

static const char *mode_text(int mode) {
  return mode == NVML_COMPUTEMODE_PROHIBITED ? "Prohibited" : mode == NVML_COMPUTEMODE_EXCLUSIVE_PROCESS ? "Exclusive_Process" : "Default";
}

static const char *mig_text(const card *c) {
  unsigned int current, pending;
  if (p_nvmlDeviceGetMigMode(c->device, &current, &pending) != NVML_SUCCESS) return "[N/A]";
  return current ? "Enabled" : "Disabled";
}

/* ---- views --------------------------------------------------------------- */

static int view_list(unsigned int count) {
  card c;
  for (unsigned int i = 0; i < count; i++)
    if (read_card(i, &c)) printf("GPU %u: %s (UUID: %s)\n", i, c.name, c.uuid);
    else printf("Unable to determine the device handle for GPU%u: GPU is lost.\n", i);
  return 0;
}

static void processes(const card *c, bool clients, unsigned int *printed) {
  static nvmlProcessInfo_t rows[4096];
  unsigned int count = sizeof rows / sizeof rows[0];
  char name[256];
  nvmlReturn_t result = clients ? p_nvmlDeviceGetMPSComputeRunningProcesses_v3(c->device, &count, rows) : p_nvmlDeviceGetComputeRunningProcesses_v3(c->device, &count, rows);
  if (result != NVML_SUCCESS) return;
  for (unsigned int i = 0; i < count; i++) {
    if (p_nvmlSystemGetProcessName(rows[i].pid, name, sizeof name) != NVML_SUCCESS) snprintf(name, sizeof name, "[Not Found]");
    printf("| %5u   N/A  N/A %11u %6s   %-34.34s %9lluMiB |\n", c->index, rows[i].pid, clients ? "M+C" : "C", name, mib(rows[i].usedGpuMemory));
    (*printed)++;
  }
}

static int view_table(unsigned int count) {
  char driver[80] = "", when[64];
  int cuda = 0;
  unsigned int printed = 0;
  time_t now = time(NULL);
  struct tm parts;
  card c;
  p_nvmlSystemGetDriverVersion(driver, sizeof driver);
  p_nvmlSystemGetCudaDriverVersion_v2(&cuda);
  strftime(when, sizeof when, "%a %b %e %H:%M:%S %Y", localtime_r(&now, &parts));
  printf("%s   (software GPU)\n", when);
  puts("+-----------------------------------------------------------------------------------------+");
  char row[160];
  snprintf(row, sizeof row, "NVIDIA-SMI %-22s Driver Version: %-14s CUDA Version: %d.%d", driver, driver, cuda / 1000, cuda % 1000 / 10);
  printf("| %-87.87s |\n", row);
  puts("|-----------------------------------------+------------------------+----------------------+");
  puts("| GPU  Name                 Persistence-M | Bus-Id                 |              MIG M.  |");
  puts("| Temp  Perf          Pwr:Usage/Cap       |           Memory-Usage | GPU-Util  Compute M. |");
  puts("|=========================================+========================+======================|");
  for (unsigned int i = 0; i < count; i++) {
    if (!read_card(i, &c)) {
      printf("| %3u  ERR!                               |                        | GPU is lost          |\n", i);
      continue;
    }
    printf("| %3u  %-27.27s %5s  | %-22s | %20s |\n", i, c.name, c.persistence ? "On" : "Off", c.pci.busId, mig_text(&c));
    snprintf(row, sizeof row, "%3uC   P%-2d %15uW / %4uW", c.celsius, c.state, c.milliwatts / 1000, c.limit_mw / 1000);
    printf("| %-39.39s | %9lluMiB / %6lluMiB | %7u%%  %11s |\n", row, mib(c.memory.used), mib(c.memory.total), c.load.gpu, mode_text(c.mode));
    puts("+-----------------------------------------+------------------------+----------------------+");
  }
  puts("");
  puts("+-----------------------------------------------------------------------------------------+");
  puts("|   GPU   GI   CI          PID   Type   Process name                          GPU Memory  |");
  puts("|=========================================================================================|");
  for (unsigned int i = 0; i < count; i++)
    if (read_card(i, &c)) {
      processes(&c, false, &printed);
      processes(&c, true, &printed);
    }
  if (!printed) puts("|  No running processes found                                                             |");
  puts("+-----------------------------------------------------------------------------------------+");
  return 0;
}

static int view_query(unsigned int count) {
  char text[96];
  int cuda = 0, major, minor;
  card c;
  p_nvmlSystemGetDriverVersion(text, sizeof text);
  p_nvmlSystemGetCudaDriverVersion_v2(&cuda);
  printf("\n==============NVSMI LOG (software GPU)==============\n\nDriver Version                            : %s\n", text);
  printf("CUDA Version                              : %d.%d\n\nAttached GPUs                             : %u\n", cuda / 1000, cuda % 1000 / 10, count);
  for (unsigned int i = 0; i < count; i++) {
    if (!read_card(i, &c)) continue;
    printf("GPU %s\n", c.pci.busId);
    printf("    Product Name                          : %s\n", c.name);
    printf("    Persistence Mode                      : %s\n", c.persistence ? "Enabled" : "Disabled");
    printf("    MIG Mode\n        Current                           : %s\n", mig_text(&c));
    text[0] = 0;
    p_nvmlDeviceGetSerial(c.device, text, 30);
    printf("    Serial Number                         : %s\n    GPU UUID                              : %s\n", text, c.uuid);
    unsigned int number = 0;
    p_nvmlDeviceGetMinorNumber(c.device, &number);
    printf("    Minor Number                          : %u\n", number);
    text[0] = 0;
    p_nvmlDeviceGetVbiosVersion(c.device, text, 32);
    printf("    VBIOS Version                         : %s\n", text);
    if (p_nvmlDeviceGetCudaComputeCapability(c.device, &major, &minor) == NVML_SUCCESS)
      printf("    CUDA Compute Capability               : %d.%d\n", major, minor);
    printf("    PCI\n        Bus Id                            : %s\n", c.pci.busId);
    printf("    FB Memory Usage\n        Total                             : %llu MiB\n        Reserved                          : %llu MiB\n"
           "        Used                              : %llu MiB\n        Free                              : %llu MiB\n",
           mib(c.memory.total), mib(c.memory.reserved), mib(c.memory.used), mib(c.memory.free));
    printf("    Compute Mode                          : %s\n", mode_text(c.mode));
    printf("    Utilization\n        Gpu                               : %u %%\n        Memory                            : %u %%\n", c.load.gpu, c.load.memory);
    printf("    Temperature\n        GPU Current Temp                  : %u C\n", c.celsius);
    printf("    GPU Power Readings\n        Power Draw                        : %u.%02u W\n        Current Power Limit               : %u.00 W\n",
           c.milliwatts / 1000, c.milliwatts % 1000 / 10, c.limit_mw / 1000);
  }
  return 0;
}

/* ---- --query-gpu --------------------------------------------------------- */

static bool value(const card *c, unsigned int count, const char *field, bool units, char *out, size_t size) {
#define IS(name) (strcmp(field, name) == 0)
#define SAY(...) (snprintf(out, size, __VA_ARGS__), true)
  char text[96] = "";
  int major, minor;
  unsigned int number = 0;
  unsigned long long errors;
  if (IS("index")) return SAY("%u", c->index);
  if (IS("name") || IS("gpu_name")) return SAY("%s", c->name);
  if (IS("uuid") || IS("gpu_uuid")) return SAY("%s", c->uuid);
  if (IS("count")) return SAY("%u", count);
  if (IS("pci.bus_id") || IS("gpu_bus_id")) return SAY("%s", c->pci.busId);
  if (IS("pci.device_id")) return SAY("0x%08X", c->pci.pciDeviceId);
  if (IS("serial") || IS("gpu_serial")) return SAY("%s", p_nvmlDeviceGetSerial(c->device, text, 30) == NVML_SUCCESS ? text : "[N/A]");
  if (IS("driver_version")) return SAY("%s", p_nvmlSystemGetDriverVersion(text, 80) == NVML_SUCCESS ? text : "[N/A]");
  if (IS("vbios_version")) return SAY("%s", p_nvmlDeviceGetVbiosVersion(c->device, text, 32) == NVML_SUCCESS ? text : "[N/A]");
  if (IS("memory.total")) return SAY("%llu%s", mib(c->memory.total), units ? " MiB" : "");
  if (IS("memory.reserved")) return SAY("%llu%s", mib(c->memory.reserved), units ? " MiB" : "");
  if (IS("memory.used")) return SAY("%llu%s", mib(c->memory.used), units ? " MiB" : "");
  if (IS("memory.free")) return SAY("%llu%s", mib(c->memory.free), units ? " MiB" : "");
  if (IS("utilization.gpu")) return SAY("%u%s", c->load.gpu, units ? " %" : "");
  if (IS("utilization.memory")) return SAY("%u%s", c->load.memory, units ? " %" : "");
  if (IS("temperature.gpu")) return SAY("%u", c->celsius);
  if (IS("power.draw")) return SAY("%u.%02u%s", c->milliwatts / 1000, c->milliwatts % 1000 / 10, units ? " W" : "");
  if (IS("power.limit") || IS("enforced.power.limit")) return SAY("%u.00%s", c->limit_mw / 1000, units ? " W" : "");
  if (IS("clocks.sm") || IS("clocks.current.sm")) return SAY("%u%s", c->sm_mhz, units ? " MHz" : "");
  if (IS("clocks.mem") || IS("clocks.current.memory")) return SAY("%u%s", c->mem_mhz, units ? " MHz" : "");
  if (IS("pstate")) return SAY("P%d", c->state);
  if (IS("compute_mode")) return SAY("%s", mode_text(c->mode));
  if (IS("persistence_mode")) return SAY("%s", c->persistence ? "Enabled" : "Disabled");
  if (IS("mig.mode.current")) return SAY("%s", mig_text(c));
  if (IS("compute_cap")) return p_nvmlDeviceGetCudaComputeCapability(c->device, &major, &minor) == NVML_SUCCESS ? SAY("%d.%d", major, minor) : SAY("[N/A]");
  if (IS("minor_number")) return p_nvmlDeviceGetMinorNumber(c->device, &number) == NVML_SUCCESS ? SAY("%u", number) : SAY("[N/A]");
  if (IS("ecc.errors.uncorrected.volatile.total"))
    return p_nvmlDeviceGetTotalEccErrors(c->device, 1, 0, &errors) == NVML_SUCCESS ? SAY("%llu", errors) : SAY("[N/A]");
  if (IS("timestamp")) {
    time_t now = time(NULL);
    struct tm parts;
    return strftime(out, size, "%Y/%m/%d %H:%M:%S.000", localtime_r(&now, &parts)) > 0;
  }
  return false;
}

static const char *unit_of(const char *field) {
  if (strncmp(field, "memory.", 7) == 0) return " [MiB]";
  if (strncmp(field, "utilization.", 12) == 0) return " [%]";
  if (strncmp(field, "power.", 6) == 0 || strncmp(field, "enforced.power", 14) == 0) return " [W]";
  if (strncmp(field, "clocks.", 7) == 0) return " [MHz]";
  return "";
}

static int view_fields(unsigned int count, const char *fields, const char *format, const char *wanted) {
  char list[1024], out[256], *save;
  bool header = !strstr(format, "noheader"), units = !strstr(format, "nounits");
  card c;
  if (strncmp(format, "csv", 3) != 0) {
    fprintf(stderr, "\"--query-gpu=\" needs \"--format=csv\".\n");
    return 2;
  }
  snprintf(list, sizeof list, "%s", fields);
  memset(&c, 0, sizeof c);
  bool first = true;
  /* names are checked before anything is printed */
  for (char *f = strtok_r(list, ", ", &save); f; f = strtok_r(NULL, ", ", &save)) {
    if (count && read_card(0, &c) && !value(&c, count, f, units, out, sizeof out)) {
      fprintf(stderr, "Field \"%s\" is not a valid field to query.\n", f);
      return 2;
    }
  }
  if (header) {
    snprintf(list, sizeof list, "%s", fields);
    for (char *f = strtok_r(list, ", ", &save); f; f = strtok_r(NULL, ", ", &save), first = false)
      printf("%s%s%s", first ? "" : ", ", f, units ? unit_of(f) : "");
    puts("");
  }
  for (unsigned int i = 0; i < count; i++) {
    if (!read_card(i, &c)) continue;
    if (wanted && strcmp(wanted, c.uuid) != 0 && (wanted[0] < '0' || wanted[0] > '9' || (unsigned int)atoi(wanted) != i)) continue;
    snprintf(list, sizeof list, "%s", fields);
    first = true;
    for (char *f = strtok_r(list, ", ", &save); f; f = strtok_r(NULL, ", ", &save), first = false) {
      value(&c, count, f, units, out, sizeof out);
      printf("%s%s", first ? "" : ", ", out);
    }
    puts("");
  }
  return 0;
}

/* ---- changing ------------------------------------------------------------ */

static bool is_meant(const card *c, const char *wanted) {
  return !wanted || strcmp(wanted, c->uuid) == 0 || strcmp(wanted, c->pci.busId) == 0 || (wanted[0] >= '0' && wanted[0] <= '9' && !strchr(wanted, ':') && (unsigned int)atoi(wanted) == c->index);
}

static int set_mode(unsigned int count, const char *mode, const char *wanted) {
  static const struct { const char *name, *number; int mode; } modes[] = {
      {"DEFAULT", "0", NVML_COMPUTEMODE_DEFAULT}, {"PROHIBITED", "2", NVML_COMPUTEMODE_PROHIBITED}, {"EXCLUSIVE_PROCESS", "3", NVML_COMPUTEMODE_EXCLUSIVE_PROCESS}};
  unsigned int at = 0, changed = 0;
  card c;
  while (at < 3 && strcmp(mode, modes[at].name) != 0 && strcmp(mode, modes[at].number) != 0) at++;
  if (at == 3) {
    fprintf(stderr, "%s is no compute mode.\n", mode);
    return 2;
  }
  for (unsigned int i = 0; i < count; i++) {
    if (!read_card(i, &c) || !is_meant(&c, wanted)) continue;
    nvmlReturn_t result = p_nvmlDeviceSetComputeMode(c.device, modes[at].mode);
    if (result != NVML_SUCCESS) return fail(c.pci.busId, result);
    printf("Compute mode of GPU %s is %s now.\n", c.pci.busId, modes[at].name);
    changed++;
  }
  return changed ? 0 : 6;
}

int main(int argc, char **argv) {
  const char *fields = NULL, *format = "", *wanted = NULL, *mode = NULL;
  bool list = false, query = false;
  unsigned int count = 0;
  for (int i = 1; i < argc; i++) {
    if (strcmp(argv[i], "-L") == 0 || strcmp(argv[i], "--list-gpus") == 0) list = true;
    else if (strcmp(argv[i], "-q") == 0 || strcmp(argv[i], "--query") == 0) query = true;
    else if (strncmp(argv[i], "--query-gpu=", 12) == 0) fields = argv[i] + 12;
    else if (strncmp(argv[i], "--format=", 9) == 0) format = argv[i] + 9;
    else if (strncmp(argv[i], "--id=", 5) == 0) wanted = argv[i] + 5;
    else if (strcmp(argv[i], "-i") == 0 && i + 1 < argc) wanted = argv[++i];
    else if (strncmp(argv[i], "--compute-mode=", 15) == 0) mode = argv[i] + 15;
    else if (strcmp(argv[i], "-c") == 0 && i + 1 < argc) mode = argv[++i];
    else {
      fprintf(stderr, "nvidia-smi (software GPU) knows -L, -q, --query-gpu=FIELDS --format=csv[,noheader][,nounits], -c MODE and -i; not %s\n", argv[i]);
      return 2;
    }
  }
  int code = start();
  if (code) return code;
  nvmlReturn_t result = p_nvmlDeviceGetCount_v2(&count);
  if (result != NVML_SUCCESS) return fail("Failed to count devices", result);
  if (!count) {
    puts("No devices were found");
    return 6;
  }
  if (mode) return set_mode(count, mode, wanted);
  if (list) return view_list(count);
  if (fields) return view_fields(count, fields, format, wanted);
  return query ? view_query(count) : view_table(count);
}
