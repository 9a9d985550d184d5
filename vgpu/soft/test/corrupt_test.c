/*
 * A tenant does what it likes to the state: the tools and libraries that look
 * at it from outside answer or refuse, in time, and never die of it.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "harness.h"

static const char *root;
/* How long a call may take that ends: a loaded machine under a sanitizer needs many seconds. */
#define PATIENCE_S 300

static uint64_t seed;

static uint64_t chance(void) {
  uint64_t z = seed += 0x9E3779B97F4A7C15ull;
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ z >> 27) * 0x94D049BB133111EBull;
  return z ^ z >> 31;
}

/* Random words, with a liking for small numbers and extremes. */
static void scribble(void *at, size_t bytes) {
  for (size_t i = 0; i + 8 <= bytes; i += 8) {
    uint64_t word = chance();
    switch (chance() % 6) {
    case 0: word = word % 4; break;
    case 1: word = UINT64_MAX - word % 3; break;
    case 2: word = word % 5000 | (word >> 40 << 32); break;
    case 3: word = 0; break;
    default: break;
    }
    memcpy((char *)at + i, &word, 8);
  }
}

/* All that an agent asks, on every card. Nothing is checked but that it ends. */
static void look(child *self, void *unused) {
  unsigned int count = 0;
  (void)unused;
  alarm(PATIENCE_S);
  nvmlReturn_t started = NVML(nvmlInit_v2)();
  if (started == NVML_SUCCESS) {
    NVML(nvmlDeviceGetCount_v2)(&count);
    for (unsigned int i = 0; i < count; i++) {
      static nvmlProcessInfo_t rows[64];
      static nvmlProcessUtilizationSample_t samples[64];
      static nvmlSample_t history[128];
      nvmlDevice_t device;
      char text[96];
      unsigned int n = 64, value;
      unsigned long long wide;
      unsigned long set[4];
      int type, level;
      nvmlMemory_t memory;
      nvmlUtilization_t load;
      nvmlPciInfo_t pci;
      nvmlAccountingStats_t stats;
      nvmlEventSet_t events;
      nvmlEventData_t event;
      if (NVML(nvmlDeviceGetHandleByIndex_v2)(i, &device) != NVML_SUCCESS) continue;
      NVML(nvmlDeviceGetMemoryInfo)(device, &memory);
      NVML(nvmlDeviceGetName)(device, text, sizeof text);
      NVML(nvmlDeviceGetUUID)(device, text, sizeof text);
      NVML(nvmlDeviceGetPciInfo_v3)(device, &pci);
      NVML(nvmlDeviceGetComputeRunningProcesses_v3)(device, &n, rows);
      n = 64;
      NVML(nvmlDeviceGetProcessUtilization)(device, samples, &n, 0);
      n = 128;
      NVML(nvmlDeviceGetSamples)(device, NVML_GPU_UTILIZATION_SAMPLES, 0, &type, &n, history);
      NVML(nvmlDeviceGetUtilizationRates)(device, &load);
      NVML(nvmlDeviceGetPowerUsage)(device, &value);
      NVML(nvmlDeviceGetTotalEnergyConsumption)(device, &wide);
      NVML(nvmlDeviceGetTemperature)(device, NVML_TEMPERATURE_GPU, &value);
      NVML(nvmlDeviceGetCpuAffinity)(device, 4, set);
      NVML(nvmlDeviceGetTopologyCommonAncestor)(device, device, &level);
      for (unsigned int link = 0; link < 20; link++) NVML(nvmlDeviceGetNvLinkRemotePciInfo_v2)(device, link, &pci);
      NVML(nvmlDeviceGetAccountingStats)(device, 1234, &stats);
      n = 64;
      NVML(nvmlDeviceGetAccountingPids)(device, &n, (unsigned int *)rows);
      if (NVML(nvmlEventSetCreate)(&events) == NVML_SUCCESS) {
        NVML(nvmlDeviceRegisterEvents)(device, NVML_EVENT_XID_CRITICAL, events);
        NVML(nvmlEventSetWait_v2)(events, &event, 1);
        NVML(nvmlEventSetFree)(events);
      }
    }
    NVML(nvmlShutdown)();
  }
  tell(self, 1);
}

static bool survives(const char *what, uint64_t which) {
  uint64_t from = real_ns();
  child c = child_start(look, NULL);
  int ended = child_end(&c);
  bool good = check(ended == 0, "%s %llu: NVML answers or refuses (%d)", what, (unsigned long long)which, ended);
  int shown = run_tool("softgpu", "show", root, "-o", "json", NULL);
  int table = run_tool("softgpu", "show", root, NULL);
  good &= check((shown == 0 || shown == 1) && (table == 0 || table == 1), "%s %llu: so does softgpu show (%d, %d)", what, (unsigned long long)which, shown, table);
  good &= check(real_ns() - from < 3 * PATIENCE_S * 1000000000ull, "%s %llu: in time", what, (unsigned long long)which);
  return good;
}

/* A file as it was, to start each round from. */
static soft_state *map_state(int *fd) {
  char path[400];
  snprintf(path, sizeof path, "%s/softgpu/state", root);
  *fd = open(path, O_RDWR | O_CLOEXEC);
  void *map = mmap(NULL, sizeof(soft_state), PROT_READ | PROT_WRITE, MAP_SHARED, *fd, 0);
  return map == MAP_FAILED ? NULL : map;
}

/* A tenant in the middle of things: what was written over it must not kill it by signal either, where it only makes calls. */
static void tenant(child *self, void *unused) {
  CUdeviceptr pointer, managed = 0;
  (void)unused;
  CUipcMemHandle handle;
  CUmemGenericAllocationHandle memory;
  CUmemAllocationProp property = {.type = CU_MEM_ALLOCATION_TYPE_PINNED, .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                  .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
  tell(self, (uint64_t)start_cuda(0));
  CUDA(cuMemAlloc_v2)(&pointer, 5 * MIB);
  CUDA(cuIpcGetMemHandle)(&handle, pointer);
  CUDA(cuMemCreate)(&memory, 2 * MIB, &property, 0);
  CUDA(cuMemAllocManaged)(&managed, 64 * MIB, CU_MEM_ATTACH_GLOBAL);
  CUDA(cuMemPrefetchAsync)(managed, 64 * MIB, 0, NULL);
  ask(self);
  alarm(PATIENCE_S);
  CUDA(cuMemFree_v2)(pointer);
  CUDA(cuMemRelease)(memory);
  for (int i = 0; i < 5; i++) {
    if (CUDA(cuMemAlloc_v2)(&pointer, 5 * MIB) == CUDA_SUCCESS) CUDA(cuIpcGetMemHandle)(&handle, pointer);
    if (CUDA(cuMemCreate)(&memory, 2 * MIB, &property, 0) == CUDA_SUCCESS) CUDA(cuMemRelease)(memory);
    CUDA(cuMemPrefetchAsync)(managed, 64 * MIB, i % 2 ? 0 : CU_DEVICE_CPU, NULL);
    cuda_free_bytes();
  }
  CUDA(cuMemFree_v2)(managed);
  tell(self, 1);
}

static void nothing(void *data) { (void)data; }

/* One that has a graph with a host function in its queue when that is written over. */
static void graph_tenant(child *self, void *unused) {
  CUgraph graph;
  CUgraphExec exec;
  CUgraphNode node, spin;
  uint64_t ns = 50000000;
  CUdeviceptr none = 0;
  void *parameters[] = {&ns, &none};
  CUDA_HOST_NODE_PARAMS h = {nothing, NULL};
  (void)unused;
  tell(self, (uint64_t)start_cuda(1));
  CUDA_KERNEL_NODE_PARAMS_v1 k = {.func = kernel("carve_spin"), .gridDimX = 1, .gridDimY = 1, .gridDimZ = 1, .blockDimX = 1, .blockDimY = 1,
                                  .blockDimZ = 1, .kernelParams = parameters};
  CUDA(cuGraphCreate)(&graph, 0);
  CUDA(cuGraphAddKernelNode)(&spin, graph, NULL, 0, &k);
  CUDA(cuGraphAddHostNode)(&node, graph, &spin, 1, &h);
  CUDA(cuGraphInstantiateWithFlags)(&exec, graph, 0);
  for (int i = 0; i < 20; i++) CUDA(cuGraphLaunch)(exec, NULL);
  tell(self, soft_slot_at(state_open(), 0) != NULL);
  ask(self);
  alarm(PATIENCE_S);
  for (int i = 0; i < 5; i++) {
    CUDA(cuStreamQuery)(NULL);
    CUDA(cuGraphLaunch)(exec, NULL);
    nap_ms(5);
  }
  tell(self, 1);
}

int main(int argc, char **argv) {
  uint64_t rounds = argc > 1 ? strtoull(argv[1], NULL, 10) : 12;
  int fd;
  root = root_make("--card", "a100-80x2", "--card", "t4", "--seed", "9", NULL);
  soft_state *state = map_state(&fd);
  if (!check(state != NULL, "the state is mapped")) return finish();
  soft_header *good_header = malloc(sizeof *good_header);
  memcpy(good_header, &state->header, sizeof *good_header);

  survives("sound", 0);
  for (uint64_t i = 0; i < rounds; i++) {
    seed = 1000 + i;
    /* the header, but for what it is recognised by */
    scribble((char *)&state->header + 24, sizeof state->header - 24);
    state->header.nvml_delay_ns %= 1000000; /* a scripted delay is obeyed, however long */
    for (int c = 0; c < SOFT_CARDS; c++) state->header.cards[c].nvml_delay_ns %= 1000000;
    survives("header", i);
    memcpy(&state->header, good_header, sizeof *good_header);

    scribble(state->slots, 200 * sizeof state->slots[0]);
    state->header.slots_high = (uint32_t)(chance() % 2 ? 200 : chance());
    survives("slots", i);
    memset(state->slots, 0, 200 * sizeof state->slots[0]);
    memcpy(&state->header, good_header, sizeof *good_header);

    scribble(state->queues, 20 * sizeof state->queues[0]);
    for (uint32_t q = 0; q < 20; q++) {
      state->queues[q].owner = q + 1;
      state->queues[q].card = q % 3;
      state->header.cards[q % 3].active[0] |= 1ull << q;
      state->slots[q].usage[q % 3].queue = q;
      for (uint32_t e = 0; e < SOFT_DEPTH; e += 3) { /* gates, reached, open or neither */
        state->queues[q].entries[e].kind = SOFT_ENTRY_GATE;
        state->queues[q].entries[e].flags &= 15;
      }
    }
    if (chance() % 2) state->header.quantum_ns = 1;
    state->header.queues_high = 20;
    survives("queues", i);
    memset(state->queues, 0, 20 * sizeof state->queues[0]);
    memset(state->slots, 0, 200 * sizeof state->slots[0]);
    memcpy(&state->header, good_header, sizeof *good_header);

    /* what processes share, held by slots that live, died, or never were, on cards that there are and aren't */
    scribble(state->objects, sizeof state->objects);
    scribble(state->slots, 200 * sizeof state->slots[0]);
    for (uint32_t o = 0; o < SOFT_OBJECTS; o++) {
      soft_object *object = &state->objects[o];
      object->kind = (uint32_t)(chance() % 4);
      if (chance() % 2) object->card = (uint32_t)(chance() % 4);
      if (chance() % 4 == 0) memset(object->holders, 0, sizeof object->holders);
      if (chance() % 2) object->payer = (uint32_t)(chance() % 200);
    }
    for (uint32_t slot = 0; slot < 200; slot++) { /* dead for long: the first look buries them and passes on what they hold */
      state->slots[slot].state = SOFT_SLOT_DEAD;
      state->slots[slot].dead_real_ns = 1;
    }
    state->header.slots_high = 200;
    state->header.objects_high = (uint32_t)(chance() % 2 ? SOFT_OBJECTS : chance());
    if (chance() % 2) state->header.lock = 0x7fffffff; /* and all is counted anew */
    survives("objects", i);
    memset(state->objects, 0, sizeof state->objects);
    memset(state->slots, 0, 200 * sizeof state->slots[0]);
    memcpy(&state->header, good_header, sizeof *good_header);
  }

  /* a tenant that lives on */
  child c = child_start(tenant, NULL);
  check_equal(ask(&c), CUDA_SUCCESS, "a tenant starts");
  scribble(&state->header.cards[0], sizeof state->header.cards[0]);
  state->header.cards[0].facts = good_header->cards[0].facts;
  scribble(state->objects, sizeof state->objects);
  state->header.objects_high = SOFT_OBJECTS;
  for (uint32_t slot = 1; slot < 200; slot++) scribble(state->slots[slot].usage, sizeof state->slots[slot].usage);
  state->header.slots_high = 200;
  tell(&c, 1);
  check_equal(ask(&c), 1, "its calls end when another one scribbles over its card");
  child_end(&c);
  memcpy(&state->header, good_header, sizeof *good_header);
  memset(state->slots, 0, 200 * sizeof state->slots[0]);
  memset(state->objects, 0, sizeof state->objects);

  for (uint64_t i = 0; i < 3; i++) {
    seed = 7000 + i;
    c = child_start(graph_tenant, NULL);
    check_equal(ask(&c), CUDA_SUCCESS, "a tenant with graphs starts");
    ask(&c);
    for (uint32_t q = 0; q < SOFT_QUEUES; q++) {
      soft_queue *queue = &state->queues[q];
      if (!queue->owner) continue;
      if (i == 0) scribble(queue->entries, sizeof queue->entries);
      if (i == 1) scribble(&queue->head, 24);
      if (i == 2) queue->owner = (uint32_t)chance();
    }
    tell(&c, 1);
    check_equal(ask(&c), 1, "its calls end when another one scribbles over its queue");
    child_kill(&c);
    memcpy(&state->header, good_header, sizeof *good_header);
    memset(state->queues, 0, 20 * sizeof state->queues[0]);
    memset(state->slots, 0, 200 * sizeof state->slots[0]);
  }

  /* the lock held by nobody that there is, and by one that never lets go */
  state->header.lock = 0x7fffffff;
  survives("a lock of nobody", 0);
  state->header.lock = 0;

  /* the file itself */
  check_equal(ftruncate(fd, 0), 0, "the file is cut to nothing");
  survives("empty", 0);
  check_equal(ftruncate(fd, 100000), 0, "grown to a part");
  survives("short", 0);
  check_equal(ftruncate(fd, (off_t)sizeof(soft_state) + 4096), 0, "and beyond its size");
  survives("long", 0);
  check_equal(ftruncate(fd, (off_t)sizeof(soft_state)), 0, "back to its size, all zero");
  survives("zero", 0);
  free(good_header);
  return finish();
}
