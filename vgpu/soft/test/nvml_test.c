/* NVML: figures that agree with CUDA's, processes across PID namespaces, events, faults, accounting. */
#define _GNU_SOURCE
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../state/lock.h"
#include "harness.h"

#define CONTEXT (420 * MIB)
#define RESERVED (870 * MIB)
#define TOTAL (81920 * MIB)

static const char *root;

static nvmlDevice_t card(unsigned int index) {
  nvmlDevice_t device = NULL;
  NVML(nvmlDeviceGetHandleByIndex_v2)(index, &device);
  return device;
}

static void holder(child *self, void *unused) {
  CUdeviceptr pointer;
  (void)unused;
  tell(self, (uint64_t)start_cuda(0));
  tell(self, (uint64_t)CUDA(cuMemAlloc_v2)(&pointer, GIB));
  tell(self, (uint64_t)getpid());
  ask(self);
}

static void identity(void) {
  nvmlDevice_t device = card(1), same = NULL;
  char text[96], uuid[96];
  nvmlPciInfo_t pci;
  nvmlPciInfo_v1_t pci1;
  int version = 0, major = 0, minor = 0;
  unsigned int number = 9;
  check_equal(NVML(nvmlDeviceGetUUID)(device, uuid, sizeof uuid), NVML_SUCCESS, "a UUID");
  check(NVML(nvmlDeviceGetHandleByUUID)(uuid, &same) == NVML_SUCCESS && same == device, "finds its card");
  check_equal(NVML(nvmlDeviceGetHandleByUUID)("GPU-nothing", &same), NVML_ERROR_NOT_FOUND, "an unknown one none");
  check_equal(NVML(nvmlDeviceGetUUID)(device, uuid, 10), NVML_ERROR_INSUFFICIENT_SIZE, "a short buffer is refused");
  NVML(nvmlDeviceGetPciInfo_v3)(device, &pci);
  check(NVML(nvmlDeviceGetHandleByPciBusId_v2)(pci.busId, &same) == NVML_SUCCESS && same == device, "a PCI address finds its card");
  check_equal(strlen(pci.busId), 16, "with eight digits of domain");
  memset(&pci1, 0xee, sizeof pci1);
  NVML(nvmlDeviceGetPciInfo)(device, &pci1);
  check(strcmp(pci1.busId, pci.busIdLegacy) == 0 && pci1.pciDeviceId == 0x20B210DE, "the oldest form agrees");
  NVML(nvmlDeviceGetSerial)(device, text, 30);
  check(NVML(nvmlDeviceGetHandleBySerial)(text, &same) == NVML_SUCCESS && same == device, "a serial number finds its card");
  check(NVML(nvmlDeviceGetIndex)(device, &number) == NVML_SUCCESS && number == 1, "the index");
  check(NVML(nvmlDeviceGetMinorNumber)(device, &number) == NVML_SUCCESS && number == 1, "the minor number");
  NVML(nvmlDeviceGetName)(device, text, sizeof text);
  check(strcmp(text, "NVIDIA A100-SXM4-80GB") == 0, "the name");
  NVML(nvmlSystemGetDriverVersion)(text, sizeof text);
  check(strcmp(text, "550.90.07") == 0, "the driver");
  NVML(nvmlSystemGetCudaDriverVersion_v2)(&version);
  check_equal(version, 12040, "its CUDA");
  NVML(nvmlDeviceGetCudaComputeCapability)(device, &major, &minor);
  check(major == 8 && minor == 0, "compute capability");
  check_equal(NVML(nvmlDeviceGetHandleByIndex_v2)(2, &same), NVML_ERROR_INVALID_ARGUMENT, "there is no third card");
  check_equal(NVML(nvmlDeviceGetIndex)((nvmlDevice_t)&number, &number), NVML_ERROR_INVALID_ARGUMENT, "a made-up handle");
  check(strcmp(NVML(nvmlErrorString)(NVML_ERROR_GPU_IS_LOST), "GPU is lost") == 0, "a result's text");
}

static void memory_and_processes(void) {
  nvmlMemory_t v1;
  nvmlMemory_v2_t v2 = {.version = NVML_MEMORY_V2_VERSION};
  nvmlProcessInfo_v1_t old[4];
  nvmlProcessInfo_t rows[4];
  unsigned int count = 4;
  child a = child_start(holder, NULL), b = child_start(holder, NULL);
  for (int i = 0; i < 3; i++) ask(&a), ask(&b);
  NVML(nvmlDeviceGetMemoryInfo)(card(0), &v1);
  NVML(nvmlDeviceGetMemoryInfo_v2)(card(0), &v2);
  uint64_t held = 2 * (CONTEXT + GIB);
  check_equal(v1.total, TOTAL, "total");
  check_equal(v1.used, held + RESERVED, "used, the driver's part included");
  check_equal(v1.free, TOTAL - v1.used, "the rest is free");
  check(v2.total == TOTAL && v2.reserved == RESERVED && v2.used == held && v2.free == v1.free, "the second form parts them");
  v2.version = 77;
  check_equal(NVML(nvmlDeviceGetMemoryInfo_v2)(card(0), &v2), NVML_ERROR_ARGUMENT_VERSION_MISMATCH, "its version is checked");

  check_equal(NVML(nvmlDeviceGetComputeRunningProcesses_v3)(card(0), &count, rows), NVML_SUCCESS, "processes");
  bool both = count == 2 && ((rows[0].pid == (unsigned int)a.pid && rows[1].pid == (unsigned int)b.pid) ||
                             (rows[0].pid == (unsigned int)b.pid && rows[1].pid == (unsigned int)a.pid));
  check(both, "are both, by their pids");
  check(rows[0].usedGpuMemory == CONTEXT + GIB && rows[0].gpuInstanceId == NVML_NO_INSTANCE_ID, "with their memory, on no instance");
  count = 1;
  check_equal(NVML(nvmlDeviceGetComputeRunningProcesses_v3)(card(0), &count, rows), NVML_ERROR_INSUFFICIENT_SIZE, "too short a list");
  check_equal(count, 2, "says how long it must be");
  count = 0;
  check_equal(NVML(nvmlDeviceGetComputeRunningProcesses_v2)(card(0), &count, NULL), NVML_ERROR_INSUFFICIENT_SIZE, "no list asks for that");
  count = 4;
  memset(old, 0xee, sizeof old);
  NVML(nvmlDeviceGetComputeRunningProcesses)(card(0), &count, old);
  check(count == 2 && old[1].usedGpuMemory == CONTEXT + GIB, "the first form has rows of 16 bytes");
  count = 4;
  check(NVML(nvmlDeviceGetComputeRunningProcesses_v3)(card(1), &count, rows) == NVML_SUCCESS && count == 0, "the other card has none");
  check(NVML(nvmlDeviceGetGraphicsRunningProcesses_v3)(card(0), (count = 4, &count), rows) == NVML_SUCCESS && count == 0, "nobody draws");
  child_kill(&a);
  count = 4;
  NVML(nvmlDeviceGetComputeRunningProcesses_v3)(card(0), &count, rows);
  check(count == 1 && rows[0].pid == (unsigned int)b.pid, "a killed process is off the list at once");
  NVML(nvmlDeviceGetMemoryInfo)(card(0), &v1);
  check_equal(v1.used, held + RESERVED, "while its memory is not free yet");
  child_kill(&b);
  nap_ms(250);
  NVML(nvmlDeviceGetMemoryInfo)(card(0), &v1);
  check_equal(v1.used, RESERVED, "later it is");
}

/* ---- PID namespaces ------------------------------------------------------ */

static void in_namespace(child *self, void *unused) {
  int turn[2];
  char byte = 0;
  (void)unused;
  if (unshare(CLONE_NEWPID) != 0 || pipe(turn) != 0) _exit(9);
  pid_t pid = fork();
  if (pid == 0) {
    unsigned int count = 4;
    if (read(turn[0], &byte, 1) != 1) _exit(8); /* what its parent tells comes first */
    nvmlProcessInfo_t rows[4];
    start_cuda(0);
    tell(self, (uint64_t)getpid());
    NVML(nvmlInit_v2)();
    NVML(nvmlDeviceGetComputeRunningProcesses_v3)(card(0), &count, rows);
    tell(self, count);
    tell(self, count ? rows[0].pid : 0);
    ask(self);
    _exit(0);
  }
  tell(self, (uint64_t)pid);
  if (write(turn[1], &byte, 1) != 1) _exit(7);
  waitpid(pid, NULL, 0);
}

static void namespaces(void) {
  nvmlProcessInfo_t rows[8];
  unsigned int count = 8;
  child outside = child_start(holder, NULL);
  for (int i = 0; i < 3; i++) ask(&outside);
  child c = child_start(in_namespace, NULL);
  uint64_t host = ask(&c), inside = ask(&c);
  check_equal(inside, 1, "a process in a PID namespace of its own is number 1 there");
  check_equal(ask(&c), 1, "there it sees one process on the card");
  check_equal(ask(&c), 1, "itself, by its own number");
  NVML(nvmlDeviceGetComputeRunningProcesses_v3)(card(0), &count, rows);
  bool found = false;
  for (unsigned int i = 0; i < count; i++) found |= rows[i].pid == host;
  check(count == 2 && found, "from outside it has its host pid");
  tell(&c, 0);
  child_end(&c);
  child_kill(&outside);
  nap_ms(250);
}

/* ---- events and faults --------------------------------------------------- */

static void events(void) {
  nvmlEventSet_t set;
  nvmlEventData_t data;
  nvmlEventData_v1_t data1;
  unsigned long long types = 0;
  check_equal(NVML(nvmlEventSetCreate)(&set), NVML_SUCCESS, "an event set");
  NVML(nvmlDeviceGetSupportedEventTypes)(card(0), &types);
  check(types & NVML_EVENT_XID_CRITICAL, "Xids are supported");
  NVML(nvmlDeviceRegisterEvents)(card(0), NVML_EVENT_XID_CRITICAL, set);
  uint64_t from = real_ns();
  check_equal(NVML(nvmlEventSetWait_v2)(set, &data, 100), NVML_ERROR_TIMEOUT, "nothing happens");
  check(real_ns() - from >= 99000000, "for as long as was asked");
  run_tool("softgpu", "fault", root, "--card", "1", "xid", "31", NULL);
  run_tool("softgpu", "fault", root, "--card", "0", "xid", "48", NULL);
  check_equal(NVML(nvmlEventSetWait_v2)(set, &data, 1000), NVML_SUCCESS, "an Xid comes");
  check(data.device == card(0) && data.eventType == NVML_EVENT_XID_CRITICAL && data.eventData == 48, "of the card that was registered");
  check_equal(NVML(nvmlEventSetWait_v2)(set, &data, 0), NVML_ERROR_TIMEOUT, "once");
  run_tool("softgpu", "fault", root, "--card", "0", "xid", "13", NULL);
  check(NVML(nvmlEventSetWait)(set, &data1, 1000) == NVML_SUCCESS && data1.eventData == 13, "the first form of the wait");
  check_equal(NVML(nvmlEventSetFree)(set), NVML_SUCCESS, "the set is freed");
  check_equal(NVML(nvmlEventSetWait_v2)(set, &data, 0), NVML_ERROR_INVALID_ARGUMENT, "and then none");
}

static void lost_holder(child *self, void *unused) {
  CUdeviceptr pointer;
  (void)unused;
  start_cuda(0);
  tell(self, 1);
  ask(self);
  tell(self, (uint64_t)CUDA(cuMemAlloc_v2)(&pointer, 4096));
  ask(self);
}

static void late_comer(child *self, void *unused) {
  int count = 0;
  (void)unused;
  CUDA(cuInit)(0);
  CUDA(cuDeviceGetCount)(&count);
  tell(self, (uint64_t)count);
}

static void faults(void) {
  nvmlMemory_t memory;
  child a = child_start(lost_holder, NULL);
  ask(&a);
  run_tool("softgpu", "fault", root, "--card", "0", "lost", NULL);
  check_equal(NVML(nvmlDeviceGetMemoryInfo)(card(1), &memory), NVML_SUCCESS, "when a card is lost, the other answers");
  nvmlDevice_t device;
  check_equal(NVML(nvmlDeviceGetHandleByIndex_v2)(0, &device), NVML_ERROR_GPU_IS_LOST, "the lost one does not");
  tell(&a, 1);
  check_equal(ask(&a), CUDA_ERROR_UNKNOWN, "nor to a program that has it");
  child b = child_start(late_comer, NULL);
  check_equal(ask(&b), 1, "a new program sees the other card only");
  child_end(&b);
  run_tool("softgpu", "fault", root, "--card", "0", "restore", NULL);
  check_equal(NVML(nvmlDeviceGetHandleByIndex_v2)(0, &device), NVML_SUCCESS, "it can come back");
  child_kill(&a);
  nap_ms(250);

  run_tool("softgpu", "fault", root, "--card", "0", "alloc-fail", "2", NULL);
  child c = child_start(holder, NULL);
  check_equal(ask(&c), CUDA_ERROR_OUT_OF_MEMORY, "an allocation fails by script: here the context's");
  child_kill(&c);
  run_tool("softgpu", "fault", root, "--card", "0", "restore", NULL);

  run_tool("softgpu", "fault", root, "nvml-delay", "120ms", "nvmlDeviceGetMemoryInfo", NULL);
  uint64_t from = real_ns();
  NVML(nvmlDeviceGetMemoryInfo)(card(0), &memory);
  check(real_ns() - from >= 120000000, "a call is slow by script");
  from = real_ns();
  nvmlUtilization_t load;
  NVML(nvmlDeviceGetUtilizationRates)(card(0), &load);
  check(real_ns() - from < 100000000, "others are not");
  run_tool("softgpu", "fault", root, "restore", NULL);
  unsigned long long errors = 0;
  run_tool("softgpu", "fault", root, "--card", "1", "ecc-uncorrected", "3", NULL);
  NVML(nvmlDeviceGetTotalEccErrors)(card(1), NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC, &errors);
  check_equal(errors, 3, "memory errors by script");
}

/* ---- load, on the virtual clock ------------------------------------------ */

static void busy(child *self, void *unused) {
  CUdeviceptr none = 0;
  uint64_t ns = 10000000;
  void *parameters[] = {&ns, &none};
  (void)unused;
  start_cuda(0);
  CUfunction f = kernel("carve_spin");
  int (*sleep_until)(uint64_t) = (int (*)(uint64_t))entry(cuda_library(), "softgpu_sleep_until_ns");
  uint64_t (*now)(void) = (uint64_t (*)(void))entry(cuda_library(), "softgpu_clock_ns");
  /* a quarter of the time for three seconds */
  for (int i = 0; i < 75; i++) {
    uint64_t next = now() + 40000000;
    CUDA(cuLaunchKernel)(f, 216, 1, 1, 1024, 1, 1, 0, NULL, parameters, NULL);
    sleep_until(next);
  }
  tell(self, 1);
  ask(self);
}

static void load(void) {
  root = root_make("--card", "a100-80", "--seed", "7", "--clock", "virtual", NULL);
  check_equal(NVML(nvmlInit_v2)(), NVML_SUCCESS, "NVML of a root with a virtual clock");
  nvmlUtilization_t rates;
  nvmlProcessUtilizationSample_t samples[4];
  unsigned int count = 4, watts_idle = 0, watts = 0, mode = 9, pending;
  unsigned long long energy_before = 0, energy = 0;
  NVML(nvmlDeviceGetPowerUsage)(card(0), &watts_idle);
  NVML(nvmlDeviceGetTotalEnergyConsumption)(card(0), &energy_before);
  NVML(nvmlDeviceSetAccountingMode)(card(0), NVML_FEATURE_ENABLED);
  child c = child_start(busy, NULL);
  ask(&c);
  NVML(nvmlDeviceGetUtilizationRates)(card(0), &rates);
  check(rates.gpu >= 18 && rates.gpu <= 31, "a quarter of the time is busy: %u %% of a sixth of a second", rates.gpu);
  check_equal(NVML(nvmlDeviceGetProcessUtilization)(card(0), samples, &count, 0), NVML_SUCCESS, "by process");
  check(count == 1 && samples[0].pid == (unsigned int)c.pid && samples[0].smUtil >= 23 && samples[0].smUtil <= 26,
        "over 15 samples it is %u %%", samples[0].smUtil);
  unsigned long long last = samples[0].timeStamp;
  count = 4;
  check_equal(NVML(nvmlDeviceGetProcessUtilization)(card(0), samples, &count, last), NVML_ERROR_NOT_FOUND, "nothing is newer than the newest");
  NVML(nvmlDeviceGetPowerUsage)(card(0), &watts);
  check(watts > watts_idle, "work takes power");
  NVML(nvmlDeviceGetTotalEnergyConsumption)(card(0), &energy);
  check(energy - energy_before > 3 * 62000 && energy - energy_before < 3 * 400000, "and energy: %llu mJ in 3 s", energy - energy_before);

  nvmlAccountingStats_t stats;
  unsigned int pids[4];
  check_equal(NVML(nvmlDeviceGetAccountingStats)(card(0), (unsigned int)c.pid, &stats), NVML_SUCCESS, "accounting of a running process");
  /* the module's global takes a page */
  check(stats.isRunning == 1 && stats.maxMemoryUsage == CONTEXT + 2 * MIB && stats.gpuUtilization >= 23 && stats.gpuUtilization <= 26, "has what it did");
  unsigned int pid = (unsigned int)c.pid;
  child_kill(&c);
  nap_ms(250);
  NVML(nvmlDeviceGetUtilizationRates)(card(0), &rates);
  nap_ms(250);
  NVML(nvmlDeviceGetUtilizationRates)(card(0), &rates);
  count = 4;
  check(NVML(nvmlDeviceGetAccountingPids)(card(0), &count, pids) == NVML_SUCCESS && count == 1 && pids[0] == pid, "it stays listed after its end");
  check(NVML(nvmlDeviceGetAccountingStats)(card(0), pid, &stats) == NVML_SUCCESS && !stats.isRunning && stats.maxMemoryUsage == CONTEXT + 2 * MIB, "with its figures");
  check(NVML(nvmlDeviceGetMigMode)(card(0), &mode, &pending) == NVML_SUCCESS && mode == NVML_DEVICE_MIG_DISABLE, "MIG is off");
  check_equal(((nvmlReturn_t (*)(nvmlDevice_t, unsigned int))entry(nvml_library(), "nvmlDeviceGetFanSpeed"))(card(0), 0), NVML_ERROR_NOT_SUPPORTED,
              "what is not modelled is not supported");
}

static void topology(void) {
  int level = 0, status = 9;
  nvmlEnableState_t active = 0;
  unsigned long set[4] = {0};
  nvmlPciInfo_t far;
  NVML(nvmlDeviceGetTopologyCommonAncestor)(card(0), card(1), &level);
  check_equal(level, NVML_TOPOLOGY_SYSTEM, "two cards on two NUMA nodes meet at the system");
  check(NVML(nvmlDeviceGetP2PStatus)(card(0), card(1), NVML_P2P_CAPS_INDEX_NVLINK, &status) == NVML_SUCCESS && status == NVML_P2P_STATUS_OK, "linked by switches");
  check(NVML(nvmlDeviceGetNvLinkState)(card(0), 11, &active) == NVML_SUCCESS && active, "twelve links are up");
  check_equal(NVML(nvmlDeviceGetNvLinkState)(card(0), 12, &active), NVML_ERROR_NOT_SUPPORTED, "a thirteenth there isn't");
  check_equal(NVML(nvmlDeviceGetNvLinkState)(card(0), 99, &active), NVML_ERROR_INVALID_ARGUMENT, "nor a hundredth");
  check(NVML(nvmlDeviceGetNvLinkRemotePciInfo_v2)(card(0), 0, &far) == NVML_SUCCESS && far.bus >= 0xC4, "a switch is at the far end");
  check(NVML(nvmlDeviceGetCpuAffinity)(card(0), 4, set) == NVML_SUCCESS && set[0], "processors near a card");
}

/* The load has a root, and so a library, of its own: it runs in a child. */
static void apart(child *self, void *unused) {
  (void)self;
  (void)unused;
  load();
  root_remove();
}

int main(void) {
  child c = child_start(apart, NULL);
  int ended = child_end(&c);
  root = root_make("--card", "a100-80x2", "--seed", "6", NULL);
  check_equal(ended, 0, "the load's scene came to its end");
  check_equal(NVML(nvmlDeviceGetHandleByIndex_v2)(0, &(nvmlDevice_t){NULL}), NVML_ERROR_UNINITIALIZED, "before nvmlInit there is nothing");
  check_equal(NVML(nvmlInit_v2)(), NVML_SUCCESS, "start");
  identity();
  memory_and_processes();
  namespaces();
  events();
  faults();
  topology();
  check_equal(NVML(nvmlShutdown)(), NVML_SUCCESS, "end");
  check_equal(NVML(nvmlShutdown)(), NVML_ERROR_UNINITIALIZED, "twice is an error");
  return finish();
}
