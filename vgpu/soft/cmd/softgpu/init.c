/* init.c - making a driver root. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "softgpu.h"

const branch_row branches[] = {{535, 12020}, {550, 12040}, {570, 12080}, {580, 13000}, {0, 0}};

typedef struct {
  const char *root;
  const soft_model *cards[SOFT_CARDS];
  uint32_t card_count;
  const char *driver;
  uint64_t seed;
  bool seeded, is_virtual;
  uint64_t free_delay_ns, quantum_ns, switch_ns, numa;
  const char *links;
} wish;

/* ---- arguments ----------------------------------------------------------- */

static int add_cards(wish *w, const char *text) {
  char key[32];
  uint64_t count = 1;
  const char *times = strrchr(text, 'x');
  size_t length = strlen(text);
  /* a100-80x4; the x of rtxpro6000 has no number after it */
  if (times && times != text && units_number(times + 1, &count) && count) length = (size_t)(times - text);
  else count = 1;
  if (length >= sizeof key) return complain(EXIT_USAGE, "no card model %s; see softgpu models", text);
  memcpy(key, text, length);
  key[length] = 0;
  const soft_model *model = soft_model_find(key);
  if (!model) return complain(EXIT_USAGE, "no card model %s; see softgpu models", key);
  if (count > SOFT_CARDS - w->card_count) return complain(EXIT_USAGE, "more than %d cards", SOFT_CARDS);
  while (count--) w->cards[w->card_count++] = model;
  return EXIT_OK;
}

static int read_wish(int argc, char **argv, wish *w) {
  *w = (wish){.driver = "550.90.07", .free_delay_ns = 200000000, .quantum_ns = 2000000, .switch_ns = 20000, .links = "default"};
  for (int i = 0; i < argc; i++) {
    const char *name = argv[i];
    if (name[0] != '-') {
      if (w->root) return complain(EXIT_USAGE, "more than one root: %s and %s", w->root, name);
      w->root = name;
      continue;
    }
    const char *value = i + 1 < argc ? argv[++i] : NULL;
    if (!value) return complain(EXIT_USAGE, "%s needs a value", name);
    bool ok = true;
    if (strcmp(name, "--card") == 0) {
      int code = add_cards(w, value);
      if (code != EXIT_OK) return code;
    } else if (strcmp(name, "--driver") == 0) {
      w->driver = value;
    } else if (strcmp(name, "--seed") == 0) {
      ok = w->seeded = units_number(value, &w->seed);
    } else if (strcmp(name, "--clock") == 0) {
      w->is_virtual = strcmp(value, "virtual") == 0;
      ok = w->is_virtual || strcmp(value, "real") == 0;
    } else if (strcmp(name, "--free-delay") == 0) {
      ok = units_nanoseconds(value, &w->free_delay_ns);
    } else if (strcmp(name, "--quantum") == 0) {
      ok = units_nanoseconds(value, &w->quantum_ns) && w->quantum_ns;
    } else if (strcmp(name, "--switch") == 0) {
      ok = units_nanoseconds(value, &w->switch_ns);
    } else if (strcmp(name, "--numa") == 0) {
      ok = units_number(value, &w->numa) && w->numa >= 1 && w->numa <= 8;
    } else if (strcmp(name, "--links") == 0) {
      w->links = value;
      ok = strcmp(value, "default") == 0 || strcmp(value, "none") == 0 || strcmp(value, "switch") == 0 || strcmp(value, "pairs") == 0;
    } else {
      return complain(EXIT_USAGE, "init has no option %s", name);
    }
    if (!ok) return complain(EXIT_USAGE, "%s can't be %s", name, value);
  }
  if (!w->root) return complain(EXIT_USAGE, "init needs a root");
  if (!w->card_count) return complain(EXIT_USAGE, "init needs at least one --card");
  return EXIT_OK;
}

/* ---- cards --------------------------------------------------------------- */

static uint64_t mix(uint64_t *state) {
  uint64_t z = *state += 0x9E3779B97F4A7C15ull;
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ z >> 27) * 0x94D049BB133111EBull;
  return z ^ z >> 31;
}

static uint64_t chance(void) {
  uint64_t value = soft_real_ns() ^ (uint64_t)getpid() << 32;
  int fd = open("/dev/urandom", O_RDONLY | O_CLOEXEC);
  if (fd >= 0) {
    ssize_t n = read(fd, &value, sizeof value);
    (void)n;
    close(fd);
  }
  return value;
}

static void give_identity(soft_card_facts *f, uint32_t index, uint64_t *random) {
  static const uint32_t buses[] = {0x07, 0x0B, 0x48, 0x4C, 0x88, 0x8B, 0xC8, 0xCB};
  for (int half = 0; half < 2; half++) {
    uint64_t word = mix(random);
    memcpy(f->uuid_bytes + half * 8, &word, 8);
  }
  f->uuid_bytes[6] = (uint8_t)(f->uuid_bytes[6] & 0x0f) | 0x40; /* version 4 */
  f->uuid_bytes[8] = (uint8_t)(f->uuid_bytes[8] & 0x3f) | 0x80;
  const uint8_t *b = f->uuid_bytes;
  snprintf(f->uuid, sizeof f->uuid, "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", b[0], b[1], b[2], b[3], b[4], b[5],
           b[6], b[7], b[8], b[9], b[10], b[11], b[12], b[13], b[14], b[15]);
  snprintf(f->serial, sizeof f->serial, "%013llu", (unsigned long long)(mix(random) % 10000000000000ull));
  f->pci_bus = index < 8 ? buses[index] : 0xD0 + index;
  snprintf(f->pci, sizeof f->pci, "%08X:%02X:%02X.0", f->pci_domain, f->pci_bus, f->pci_device);
  snprintf(f->board_part, sizeof f->board_part, "SOFT-%04X-0000-000", f->pci_device_id >> 16);
  snprintf(f->vbios, sizeof f->vbios, "00.00.00.00.50");
  f->minor = index;
}

static void give_links(soft_card_facts *f, const wish *w, uint32_t index) {
  const char *kind = w->links;
  if (strcmp(kind, "none") == 0) f->link_count = 0;
  bool pairs = strcmp(kind, "pairs") == 0, switches = strcmp(kind, "switch") == 0;
  if ((pairs || switches) && !f->link_count) {
    f->link_count = 4;
    f->link_version = 3;
  }
  for (uint32_t i = 0; i < f->link_count; i++) {
    uint32_t peer = index ^ 1;
    if (pairs) {
      f->link_kind[i] = peer < w->card_count ? SOFT_LINK_CARD : SOFT_LINK_NONE;
      f->link_peer[i] = (uint8_t)peer;
    } else {
      f->link_kind[i] = SOFT_LINK_SWITCH;
      f->link_peer[i] = (uint8_t)(i % 6);
    }
  }
}

static void fill_card(soft_card *card, const wish *w, uint32_t index, uint64_t *random) {
  const soft_model *m = w->cards[index];
  soft_card_facts *f = &card->facts;
  snprintf(f->key, sizeof f->key, "%s", m->key);
  snprintf(f->name, sizeof f->name, "%s", m->name);
  f->pci_device_id = m->pci_device_id;
  f->pci_subsystem_id = 0x50F710DE; /* of no product */
  f->architecture = m->architecture;
  f->cc_major = m->cc_major;
  f->cc_minor = m->cc_minor;
  f->brand = m->brand;
  f->sm_count = m->sm_count;
  f->cores_per_sm = m->cores_per_sm;
  f->threads_per_sm = m->threads_per_sm;
  f->shared_per_sm_kib = m->shared_per_sm_kib;
  f->shared_per_block_kib = m->shared_per_block_kib;
  f->sm_clock_mhz = m->sm_clock_mhz;
  f->sm_base_mhz = m->sm_base_mhz;
  f->mem_clock_mhz = m->mem_clock_mhz;
  f->bus_width_bits = m->bus_width_bits;
  f->l2_kib = m->l2_kib;
  f->power_limit_mw = m->power_limit_w * 1000;
  f->power_idle_mw = m->power_idle_w * 1000;
  f->pcie_generation = m->pcie_generation;
  f->ecc = m->ecc;
  f->mig_capable = m->mig_capable;
  f->link_count = m->link_count;
  f->link_version = m->link_version;
  f->total_bytes = (uint64_t)m->total_mib << 20;
  f->reserved_bytes = (uint64_t)m->reserved_mib << 20;
  f->bar1_bytes = m->ecc ? 128ull << 30 : 256ull << 20;
  uint64_t nodes = w->numa ? w->numa : w->card_count > 1 ? 2 : 1;
  f->numa_node = (uint32_t)(index * nodes / w->card_count);
  give_identity(f, index, random);
  give_links(f, w, index);
  card->context_bytes = (uint64_t)m->context_mib << 20;
  card->current = SOFT_NO_INDEX;
}

static void fill_header(soft_header *h, const wish *w, const branch_row *row) {
  struct timespec wall;
  uint64_t random = w->seeded ? w->seed : chance();
  clock_gettime(CLOCK_REALTIME, &wall);
  uint64_t wall_ns = (uint64_t)wall.tv_sec * 1000000000u + (uint64_t)wall.tv_nsec;
  h->abi = SOFT_ABI;
  h->size = sizeof(soft_state);
  h->card_count = w->card_count;
  snprintf(h->driver_version, sizeof h->driver_version, "%s", w->driver);
  snprintf(h->nvml_version, sizeof h->nvml_version, "%u.%s", row->cuda_version / 1000, w->driver);
  h->driver_branch = (uint32_t)atoi(w->driver);
  h->cuda_version = row->cuda_version;
  h->clock_mode = w->is_virtual ? SOFT_CLOCK_VIRTUAL : SOFT_CLOCK_REAL;
  h->free_delay_ns = w->free_delay_ns;
  h->quantum_ns = w->quantum_ns;
  h->switch_ns = w->switch_ns;
  h->virtual_ns = w->is_virtual ? 1000000000ull : 0; /* so that "a second ago" is no negative time */
  h->start_ns = w->is_virtual ? h->virtual_ns : soft_real_ns();
  h->epoch_ns = wall_ns - h->start_ns;
  for (uint32_t i = 0; i < w->card_count; i++) {
    fill_card(&h->cards[i], w, i, &random);
    h->cards[i].sim_ns = h->start_ns;
  }
}

/* ---- files --------------------------------------------------------------- */

static int make_dirs(const char *path) {
  char part[PATH_MAX];
  if (snprintf(part, sizeof part, "%s", path) >= (int)sizeof part) return complain(EXIT_FAILED, "%s: path too long", path);
  for (char *slash = part + 1; *slash; slash++) {
    if (*slash != '/') continue;
    *slash = 0;
    if (mkdir(part, 0755) != 0 && errno != EEXIST) return complain(EXIT_FAILED, "make directory %s: %s", part, strerror(errno));
    *slash = '/';
  }
  if (mkdir(part, 0755) != 0 && errno != EEXIST) return complain(EXIT_FAILED, "make directory %s: %s", part, strerror(errno));
  return EXIT_OK;
}

static int copy_file(const char *from, const char *to, mode_t mode) {
  char buffer[65536];
  int in = open(from, O_RDONLY | O_CLOEXEC);
  if (in < 0) return complain(EXIT_FAILED, "open %s: %s", from, strerror(errno));
  int out = open(to, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, mode);
  ssize_t n = 0;
  if (out >= 0)
    while ((n = read(in, buffer, sizeof buffer)) > 0)
      if (write(out, buffer, (size_t)n) != n) {
        n = -1;
        break;
      }
  int reason = errno;
  close(in);
  if (out < 0 || n < 0 || fchmod(out, mode) != 0) {
    if (out >= 0) close(out);
    return complain(EXIT_FAILED, "copy %s to %s: %s", from, to, strerror(reason));
  }
  close(out);
  return EXIT_OK;
}

static int write_file(const char *path, mode_t mode, const char *text) {
  int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, mode);
  ssize_t length = (ssize_t)strlen(text);
  bool ok = fd >= 0 && write(fd, text, (size_t)length) == length && fchmod(fd, mode) == 0;
  if (fd >= 0) close(fd);
  return ok ? EXIT_OK : complain(EXIT_FAILED, "write %s: %s", path, strerror(errno));
}

static int link_to(const char *target, const char *path) {
  unlink(path);
  return symlink(target, path) == 0 ? EXIT_OK : complain(EXIT_FAILED, "link %s: %s", path, strerror(errno));
}

#define TRY(call)                     \
  do {                                \
    int code = (call);                \
    if (code != EXIT_OK) return code; \
  } while (0)

enum { PROGRAMS = 3 };
static const char *const programs[PROGRAMS] = {"nvidia-smi", "nvidia-cuda-mps-control", "nvidia-cuda-mps-server"};

static int make_libraries(const wish *w, const branch_row *row) {
  char here[PATH_MAX], from[PATH_MAX + 64], dir[PATH_MAX], to[PATH_MAX + 64], target[128];
  ssize_t n = readlink("/proc/self/exe", here, sizeof here - 1);
  if (n <= 0) return complain(EXIT_FAILED, "find the tool's own directory: %s", strerror(errno));
  here[n] = 0;
  *strrchr(here, '/') = 0;
  static const struct { const char *base, *file; bool plain; } libraries[] = {{"libcuda", "libcuda", true}, {"libnvidia-ml", "libnvidia-ml", false}};
  snprintf(dir, sizeof dir, "%s/usr/lib/x86_64-linux-gnu", w->root);
  TRY(make_dirs(dir));
  for (int i = 0; i < 2; i++) {
    snprintf(from, sizeof from, "%s/%s-%u.so", here, libraries[i].file, row->branch);
    snprintf(to, sizeof to, "%s/%s.so.%s", dir, libraries[i].base, w->driver);
    TRY(copy_file(from, to, 0755));
    snprintf(target, sizeof target, "%s.so.%s", libraries[i].base, w->driver);
    snprintf(to, sizeof to, "%s/%s.so.1", dir, libraries[i].base);
    TRY(link_to(target, to));
    if (!libraries[i].plain) continue;
    snprintf(target, sizeof target, "%s.so.1", libraries[i].base);
    snprintf(to, sizeof to, "%s/%s.so", dir, libraries[i].base);
    TRY(link_to(target, to));
  }
  snprintf(dir, sizeof dir, "%s/usr/bin", w->root);
  TRY(make_dirs(dir));
  for (int i = 0; i < PROGRAMS; i++) {
    snprintf(from, sizeof from, "%s/%s", here, programs[i]);
    snprintf(to, sizeof to, "%s/%s", dir, programs[i]);
    TRY(copy_file(from, to, 0755));
  }
  return EXIT_OK;
}

static int make_proc(const wish *w, const soft_header *h) {
  char dir[PATH_MAX], path[PATH_MAX + 64], text[1024];
  snprintf(dir, sizeof dir, "%s/proc/driver/nvidia/gpus", w->root);
  TRY(make_dirs(dir));
  snprintf(path, sizeof path, "%s/proc/driver/nvidia/version", w->root);
  snprintf(text, sizeof text, "NVRM version: NVIDIA UNIX x86_64 Kernel Module  %s  (software GPU)\n", w->driver);
  TRY(write_file(path, 0444, text));
  for (uint32_t i = 0; i < h->card_count; i++) {
    const soft_card_facts *f = &h->cards[i].facts;
    snprintf(dir, sizeof dir, "%s/proc/driver/nvidia/gpus/%04x:%02x:%02x.0", w->root, f->pci_domain, f->pci_bus, f->pci_device);
    TRY(make_dirs(dir));
    snprintf(path, sizeof path, "%s/information", dir);
    snprintf(text, sizeof text,
             "Model: \t\t %s\nIRQ:   \t\t 0\nGPU UUID: \t %s\nVideo BIOS: \t %s\nBus Type: \t PCIe\nDMA Size: \t 47 bits\n"
             "DMA Mask: \t 0x7fffffffffff\nBus Location: \t %04x:%02x:%02x.0\nDevice Minor: \t %u\nGPU Firmware: \t %s (software GPU)\n"
             "GPU Excluded:\t No\n",
             f->name, f->uuid, f->vbios, f->pci_domain, f->pci_bus, f->pci_device, f->minor, w->driver);
    TRY(write_file(path, 0444, text));
  }
  return EXIT_OK;
}

static int write_config(const wish *w, const soft_header *h, const device_number numbers[3]) {
  char path[PATH_MAX];
  snprintf(path, sizeof path, "%s/softgpu/config.json", w->root);
  FILE *file = fopen(path, "we");
  if (!file) return complain(EXIT_FAILED, "write %s: %s", path, strerror(errno));
  fprintf(file, "{\"software\":true,\"driver\":");
  json_text(file, w->driver);
  fprintf(file, ",\"cudaVersion\":%u,\"clock\":\"%s\",\"nodes\":{", h->cuda_version, w->is_virtual ? "virtual" : "real");
  static const char *const names[3] = {"nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"};
  for (int i = 0; i < 3; i++) fprintf(file, "%s\"%s\":\"%u:%u\"", i ? "," : "", names[i], numbers[i].major, numbers[i].minor);
  fprintf(file, "},\"cards\":[");
  for (uint32_t i = 0; i < h->card_count; i++) {
    const soft_card_facts *f = &h->cards[i].facts;
    fprintf(file, "%s{\"index\":%u,\"model\":\"%s\",\"name\":", i ? "," : "", i, f->key);
    json_text(file, f->name);
    fprintf(file, ",\"uuid\":\"%s\",\"pci\":\"%s\",\"node\":\"nvidia%u\",\"number\":\"%u:%u\",\"memoryBytes\":%llu}", f->uuid, f->pci, f->minor,
            f->node_major, f->node_minor, (unsigned long long)f->total_bytes);
  }
  fprintf(file, "]}\n");
  if (fclose(file) != 0) return complain(EXIT_FAILED, "write %s: %s", path, strerror(errno));
  return EXIT_OK;
}

static int make_state(const wish *w, const branch_row *row, soft_state **out) {
  char path[PATH_MAX];
  snprintf(path, sizeof path, "%s/softgpu/state", w->root);
  int fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (fd < 0) return complain(EXIT_FAILED, "make %s: %s", path, strerror(errno));
  soft_state *state = MAP_FAILED;
  if (fchmod(fd, 0666) == 0 && ftruncate(fd, sizeof(soft_state)) == 0)
    state = mmap(NULL, sizeof(soft_state), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  int reason = errno;
  close(fd);
  if (state == MAP_FAILED) return complain(EXIT_FAILED, "make %s: %s", path, strerror(reason));
  fill_header(&state->header, w, row);
  *out = state;
  snprintf(path, sizeof path, "%s/softgpu/shared", w->root);
  TRY(write_file(path, 0666, ""));
  snprintf(path, sizeof path, "%s/softgpu/alive", w->root);
  return write_file(path, 0666, "");
}

static int fill_root(const wish *w, const branch_row *row) {
  char dir[PATH_MAX];
  device_number numbers[3];
  soft_state *state = NULL;

  snprintf(dir, sizeof dir, "%s/dev", w->root);
  TRY(make_dirs(dir));
  TRY(make_state(w, row, &state));
  TRY(make_libraries(w, row));
  TRY(make_nodes(w->root, &state->header, numbers));
  TRY(make_proc(w, &state->header));
  TRY(write_config(w, &state->header, numbers));
  state->header.magic = SOFT_MAGIC; /* from here on it can be opened */
  printf("software GPU root %s: driver %s, %u card%s\n", w->root, w->driver, w->card_count, w->card_count == 1 ? "" : "s");
  for (uint32_t i = 0; i < w->card_count; i++) {
    const soft_card_facts *f = &state->header.cards[i].facts;
    printf("  %u  %s  %s  /dev/nvidia%u is %u:%u\n", i, f->uuid, f->name, f->minor, f->node_major, f->node_minor);
  }
  munmap(state, sizeof *state);
  return EXIT_OK;
}

static void remove_root(const char *root);

int command_init(int argc, char **argv) {
  wish w;
  char path[PATH_MAX];

  TRY(read_wish(argc, argv, &w));
  const branch_row *row = NULL;
  for (const branch_row *at = branches; at->branch; at++)
    if ((int)at->branch <= atoi(w.driver)) row = at;
  if (!row || strlen(w.driver) >= 24 || strspn(w.driver, "0123456789.") != strlen(w.driver))
    return complain(EXIT_USAGE, "--driver can't be %s: it is a version such as 550.90.07, from 535 on", w.driver);

  char real[PATH_MAX];
  if (realpath(w.root, real) && strcmp(real, "/") == 0) return complain(EXIT_USAGE, "the root can't be /: a real driver may live there");
  umask(022); /* containers with other users read the root */
  snprintf(path, sizeof path, "%s/softgpu", w.root);
  TRY(make_dirs(path));
  snprintf(path, sizeof path, "%s/softgpu/state", w.root);
  if (access(path, F_OK) == 0) return complain(EXIT_FAILED, "%s has a software GPU already", w.root);
  int code = fill_root(&w, row);
  if (code != EXIT_OK) remove_root(w.root);
  return code;
}

/* ---- destroy ------------------------------------------------------------- */

static bool is_root(const char *root) {
  char path[PATH_MAX], text[32] = "";
  snprintf(path, sizeof path, "%s/softgpu/config.json", root);
  int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) {
    /* an init that failed half-way leaves a state and no marker */
    snprintf(path, sizeof path, "%s/softgpu/state", root);
    return access(path, F_OK) == 0;
  }
  ssize_t n = read(fd, text, sizeof text - 1);
  close(fd);
  return n > 0 && strncmp(text, "{\"software\":true", 16) == 0;
}

static void drop(const char *root, const char *name) {
  char path[PATH_MAX];
  snprintf(path, sizeof path, "%s/%s", root, name);
  if (unlink(path) != 0 && errno != ENOENT) rmdir(path);
}

/* Removes DIR's entries whose names begin so; inner: a file in each that goes first. */
static void drop_all(const char *root, const char *dir, const char *prefix, const char *inner) {
  char path[PATH_MAX];
  snprintf(path, sizeof path, "%s/%s", root, dir);
  DIR *list = opendir(path);
  for (struct dirent *at; list && (at = readdir(list));) {
    if (at->d_name[0] == '.' || strncmp(at->d_name, prefix, strlen(prefix)) != 0) continue;
    if (inner) {
      snprintf(path, sizeof path, "%s/%s/%s", dir, at->d_name, inner);
      drop(root, path);
    }
    snprintf(path, sizeof path, "%s/%s", dir, at->d_name);
    drop(root, path);
  }
  if (list) closedir(list);
}

/* By names, not by what the state says: tenants write that. */
static void remove_root(const char *root) {
  drop_all(root, "usr/lib/x86_64-linux-gnu", "libcuda.so", NULL);
  drop_all(root, "usr/lib/x86_64-linux-gnu", "libnvidia-ml.so", NULL);
  drop_all(root, "usr/bin", "nvidia-", NULL);
  drop_all(root, "dev", "nvidia", NULL);
  drop_all(root, "proc/driver/nvidia/gpus", "", "information");
  static const char *const rest[] = {"dev/.probe", "proc/driver/nvidia/version", "proc/driver/nvidia/gpus",
                                     "proc/driver/nvidia", "proc/driver", "proc", "dev", "usr/bin", "usr/lib/x86_64-linux-gnu", "usr/lib", "usr",
                                     "softgpu/config.json", "softgpu/alive", "softgpu/shared", "softgpu/state",
                                     "softgpu"};
  for (unsigned i = 0; i < sizeof rest / sizeof rest[0]; i++) drop(root, rest[i]);
  rmdir(root); /* if nothing else was in it */
}

int command_destroy(int argc, char **argv) {
  if (argc != 1) return complain(EXIT_USAGE, "destroy needs a root");
  const char *root = argv[0];
  if (!is_root(root)) return complain(EXIT_FAILED, "%s has no software GPU", root);
  remove_root(root);
  if (is_root(root)) return complain(EXIT_FAILED, "%s could not be removed: %s", root, strerror(errno));
  printf("software GPU root %s removed\n", root);
  return EXIT_OK;
}
