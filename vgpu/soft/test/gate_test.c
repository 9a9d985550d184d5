/* Gating: a card whose node can't be opened isn't there, by each way of not being able to. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/bpf.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include "harness.h"

static const char *root;

static void count_cards(child *self) {
  int count = 0;
  unsigned int seen = 0;
  CUresult result = CUDA(cuInit)(0);
  tell(self, (uint64_t)result);
  if (result == CUDA_SUCCESS) CUDA(cuDeviceGetCount)(&count);
  tell(self, (uint64_t)count);
  nvmlReturn_t started = NVML(nvmlInit_v2)();
  tell(self, (uint64_t)started);
  if (started == NVML_SUCCESS) NVML(nvmlDeviceGetCount_v2)(&seen);
  tell(self, seen);
}

static void expect(child_body body, void *argument, uint64_t cuda_result, uint64_t devices, uint64_t nvml_result, uint64_t cards, const char *what) {
  child c = child_start(body, argument);
  check_equal(ask(&c), cuda_result, "%s: cuInit", what);
  check_equal(ask(&c), devices, "%s: devices", what);
  check_equal(ask(&c), nvml_result, "%s: nvmlInit", what);
  check_equal(ask(&c), cards, "%s: cards of NVML", what);
  check_equal(child_end(&c), 0, "%s: end", what);
}

static void free_access(child *self, void *unused) {
  (void)unused;
  count_cards(self);
}

static void environment(child *self, void *value) {
  setenv("CUDA_VISIBLE_DEVICES", value, 1);
  count_cards(self);
}

/* A mount namespace of its own in which some nodes are missing. */
static void without(child *self, void *names) {
  char path[400];
  if (unshare(CLONE_NEWNS) != 0 || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0) _exit(9);
  snprintf(path, sizeof path, "%s/dev", root);
  if (mount("tmpfs", path, "tmpfs", 0, "mode=755") != 0) _exit(9);
  for (const char *name = names; *name; name += strlen(name) + 1) {
    soft_region *region = state_open();
    uint32_t major = 7, minor = 0; /* any that opens */
    if (strcmp(name, "nvidiactl") != 0) {
      const soft_card_facts *facts = &soft_card_at(region, (uint32_t)atoi(name + 6))->facts;
      major = facts->node_major;
      minor = facts->node_minor;
    }
    snprintf(path, sizeof path, "%s/dev/%s", root, name);
    if (mknod(path, S_IFCHR | 0666, makedev(major, minor)) != 0) _exit(9);
  }
  count_cards(self);
}

/* Permission bits, for one who is not root. */
static void without_rights(child *self, void *unused) {
  (void)unused;
  if (setgid(65534) != 0 || setuid(65534) != 0) _exit(9);
  count_cards(self);
}

/* ---- the container's way: a cgroup that allows some device numbers -------- */

#define INSN(op, dst, src, offset, value) ((struct bpf_insn){.code = (op), .dst_reg = (dst), .src_reg = (src), .off = (offset), .imm = (value)})

/* Allows everything but character device major:minor. */
static int device_program(uint32_t major, uint32_t minor) {
  struct bpf_insn code[] = {
      INSN(BPF_LDX | BPF_MEM | BPF_W, BPF_REG_2, BPF_REG_1, 4, 0), /* ctx->major */
      INSN(BPF_LDX | BPF_MEM | BPF_W, BPF_REG_3, BPF_REG_1, 8, 0), /* ctx->minor */
      INSN(BPF_ALU64 | BPF_MOV | BPF_K, BPF_REG_0, 0, 0, 1),
      INSN(BPF_JMP | BPF_JNE | BPF_K, BPF_REG_2, 0, 2, (int32_t)major),
      INSN(BPF_JMP | BPF_JNE | BPF_K, BPF_REG_3, 0, 1, (int32_t)minor),
      INSN(BPF_ALU64 | BPF_MOV | BPF_K, BPF_REG_0, 0, 0, 0),
      INSN(BPF_JMP | BPF_EXIT, 0, 0, 0, 0),
  };
  union bpf_attr attr;
  memset(&attr, 0, sizeof attr);
  attr.prog_type = BPF_PROG_TYPE_CGROUP_DEVICE;
  attr.insns = (uint64_t)(uintptr_t)code;
  attr.insn_cnt = sizeof code / sizeof code[0];
  attr.license = (uint64_t)(uintptr_t) "GPL";
  return (int)syscall(SYS_bpf, BPF_PROG_LOAD, &attr, sizeof attr);
}

static void write_text(const char *path, const char *text) {
  int fd = open(path, O_WRONLY | O_CLOEXEC);
  if (fd < 0 || write(fd, text, strlen(text)) < 0) _exit(9);
  close(fd);
}

static void in_cgroup(child *self, void *unused) {
  char dir[400], path[500], text[32];
  (void)unused;
  const soft_card_facts *facts = &soft_card_at(state_open(), 1)->facts;
  /* a private mount of the unified tree, wherever the machine has it */
  if (unshare(CLONE_NEWNS) != 0 || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0) _exit(9);
  if (mount("cgroup2", "/mnt", "cgroup2", 0, NULL) != 0) _exit(9);
  snprintf(dir, sizeof dir, "/mnt/softgpu-test-%d", (int)getpid());
  if (mkdir(dir, 0755) != 0) _exit(9);
  int group = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC), program = device_program(facts->node_major, facts->node_minor);
  union bpf_attr attr;
  memset(&attr, 0, sizeof attr);
  attr.target_fd = (uint32_t)group;
  attr.attach_bpf_fd = (uint32_t)program;
  attr.attach_type = BPF_CGROUP_DEVICE;
  if (group < 0 || program < 0 || syscall(SYS_bpf, BPF_PROG_ATTACH, &attr, sizeof attr) != 0) _exit(9);
  snprintf(path, sizeof path, "%s/cgroup.procs", dir);
  snprintf(text, sizeof text, "%d", (int)getpid());
  write_text(path, text);
  count_cards(self);
  write_text("/mnt/cgroup.procs", text);
  rmdir(dir);
}

int main(void) {
  root = root_make("--card", "a100-80x3", "--seed", "5", NULL);
  state_open();
  char uuid[48], list[200], node[400];

  expect(free_access, NULL, CUDA_SUCCESS, 3, NVML_SUCCESS, 3, "all nodes");
  expect(without, "nvidiactl\0nvidia0\0nvidia2\0", CUDA_SUCCESS, 2, NVML_SUCCESS, 2, "a node missing");
  expect(without, "nvidiactl\0", CUDA_ERROR_NO_DEVICE, 0, NVML_SUCCESS, 0, "no card's node");
  expect(without, "nvidia0\0nvidia1\0", CUDA_ERROR_NO_DEVICE, 0, NVML_ERROR_DRIVER_NOT_LOADED, 0, "no control node");
  expect(in_cgroup, NULL, CUDA_SUCCESS, 2, NVML_SUCCESS, 2, "a device rule of the cgroup");

  snprintf(node, sizeof node, "%s/dev/nvidia1", root);
  chmod(node, 0600);
  expect(without_rights, NULL, CUDA_SUCCESS, 2, NVML_SUCCESS, 2, "no permission");
  chmod(node, 0666);

  soft_text(uuid, sizeof uuid, soft_card_at(state_open(), 1)->facts.uuid, sizeof uuid);
  expect(environment, "1", CUDA_SUCCESS, 1, NVML_SUCCESS, 3, "CUDA_VISIBLE_DEVICES by index");
  expect(environment, "2,0", CUDA_SUCCESS, 2, NVML_SUCCESS, 3, "two indices");
  expect(environment, "0,7,1", CUDA_SUCCESS, 1, NVML_SUCCESS, 3, "up to the first that is none");
  expect(environment, "0,0", CUDA_ERROR_NO_DEVICE, 0, NVML_SUCCESS, 3, "one twice");
  expect(environment, "", CUDA_ERROR_NO_DEVICE, 0, NVML_SUCCESS, 3, "an empty list");
  expect(environment, "void", CUDA_ERROR_NO_DEVICE, 0, NVML_SUCCESS, 3, "a word that is no card");
  expect(environment, uuid, CUDA_SUCCESS, 1, NVML_SUCCESS, 3, "a UUID");
  snprintf(list, sizeof list, "%.12s,2", uuid);
  expect(environment, list, CUDA_SUCCESS, 2, NVML_SUCCESS, 3, "the beginning of a UUID, and an index");
  expect(environment, "MIG-1234", CUDA_ERROR_NO_DEVICE, 0, NVML_SUCCESS, 3, "a MIG UUID where there is none");

  /* the numbers themselves */
  for (uint32_t i = 0; i < 3; i++)
    for (uint32_t j = 0; j < i; j++) {
      const soft_card_facts *a = &soft_card_at(state_open(), i)->facts, *b = &soft_card_at(state_open(), j)->facts;
      check(a->node_major != b->node_major || a->node_minor != b->node_minor, "cards %u and %u have numbers of their own", j, i);
    }
  for (uint32_t i = 0; i < 3; i++) {
    const soft_card_facts *f = &soft_card_at(state_open(), i)->facts;
    bool usual = f->node_major == 1 || f->node_major == 5 || f->node_major == 136 || (f->node_major == 10 && f->node_minor == 200);
    check(!usual, "card %u's number is none that runtimes allow by default", i);
  }
  return finish();
}
