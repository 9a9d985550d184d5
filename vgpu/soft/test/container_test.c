/*
 * As in a container: libraries in the system directory, the state at its fixed
 * path, nodes in /dev, a PID namespace, nothing else of the driver root.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>
#include <unistd.h>

#include "harness.h"

static const char *root;

static void must(bool good, const char *what) {
  if (good) return;
  perror(what);
  _exit(9);
}

static void bind_file(const char *from, const char *to) {
  int fd = open(to, O_CREAT | O_WRONLY | O_CLOEXEC, 0755);
  must(fd >= 0, to);
  close(fd);
  must(mount(from, to, NULL, MS_BIND, NULL) == 0, to);
}

/* This machine's own root under a scratch layer, so that an image with a libc is at hand. */
static void build_image(uint32_t cards) {
  char from[600], to[600];
  must(unshare(CLONE_NEWNS | CLONE_NEWPID) == 0, "unshare");
  must(mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) == 0, "private mounts");
  /* what lies on other file systems must be opened before / is covered */
  must(mount("tmpfs", "/mnt", "tmpfs", 0, "mode=755") == 0, "scratch");
  must(mkdir("/mnt/up", 0755) == 0 && mkdir("/mnt/work", 0755) == 0 && mkdir("/mnt/root", 0755) == 0, "scratch directories");
  must(mount("overlay", "/mnt/root", "overlay", 0, "lowerdir=/,upperdir=/mnt/up,workdir=/mnt/work") == 0, "overlay");
  must(mount("tmpfs", "/mnt/root/dev", "tmpfs", 0, "mode=755") == 0, "/dev");
  must(mkdir("/mnt/root" SOFT_CONTAINER_DIR, 0755) == 0, "the state's place");
  snprintf(from, sizeof from, "%s/softgpu", root);
  must(mount(from, "/mnt/root" SOFT_CONTAINER_DIR, NULL, MS_BIND, NULL) == 0, "the state");
  static const char *const libraries[] = {"libcuda.so", "libnvidia-ml.so"};
  for (int i = 0; i < 2; i++) {
    snprintf(from, sizeof from, "%s/usr/lib/x86_64-linux-gnu/%s.550.90.07", root, libraries[i]);
    snprintf(to, sizeof to, "/mnt/root/usr/lib/x86_64-linux-gnu/%s.1", libraries[i]);
    bind_file(from, to);
    snprintf(to, sizeof to, "/mnt/root/usr/lib/x86_64-linux-gnu/%s.550.90.07", libraries[i]);
    bind_file(from, to);
  }
  unlink("/mnt/root/usr/lib/x86_64-linux-gnu/libcuda.so"); /* of the scratch layer */
  must(symlink("libcuda.so.1", "/mnt/root/usr/lib/x86_64-linux-gnu/libcuda.so") == 0, "libcuda.so");
  snprintf(from, sizeof from, "%s/gpuprobe", build_dir());
  bind_file(from, "/mnt/root/usr/bin/gpuprobe");
  snprintf(from, sizeof from, "%s/usr/bin/nvidia-smi", root);
  bind_file(from, "/mnt/root/usr/bin/nvidia-smi");
  const soft_card_facts *control = &soft_card_at(state_open(), 0)->facts; /* any number that opens */
  must(mknod("/mnt/root/dev/nvidiactl", S_IFCHR | 0666, makedev(control->node_major, control->node_minor)) == 0, "nvidiactl");
  for (uint32_t i = 0; i < cards; i++) {
    const soft_card_facts *f = &soft_card_at(state_open(), i)->facts;
    snprintf(to, sizeof to, "/mnt/root/dev/nvidia%u", f->minor);
    must(mknod(to, S_IFCHR | 0666, makedev(f->node_major, f->node_minor)) == 0, to);
  }
}

typedef struct {
  uint32_t cards;
  const char *command[6];
  bool cleared;
  char output[64];
} job;

static void run_inside(child *self, void *argument) {
  job *j = argument;
  int out = open(j->output, O_CREAT | O_TRUNC | O_WRONLY | O_CLOEXEC, 0600), status = 0;
  must(out >= 0, j->output);
  build_image(j->cards);
  pid_t pid = fork();
  if (pid == 0) {
    static char *const empty[] = {NULL};
    must(chroot("/mnt/root") == 0 && chdir("/") == 0, "chroot");
    must(mount("proc", "/proc", "proc", 0, NULL) == 0, "/proc");
    dup2(out, 1);
    unsetenv("LD_LIBRARY_PATH");
    extern char **environ;
    execve(j->command[0], (char *const *)j->command, j->cleared ? empty : environ);
    _exit(127);
  }
  waitpid(pid, &status, 0);
  tell(self, WIFEXITED(status) ? (uint64_t)WEXITSTATUS(status) : 999);
}

static char *inside(job j, uint64_t *status) {
  static char text[65536];
  snprintf(j.output, sizeof j.output, "/tmp/softgpu-inside-%d", (int)getpid());
  child c = child_start(run_inside, &j);
  *status = ask(&c);
  child_end(&c);
  int fd = open(j.output, O_RDONLY | O_CLOEXEC);
  ssize_t n = fd >= 0 ? read(fd, text, sizeof text - 1) : 0;
  text[n > 0 ? n : 0] = 0;
  if (fd >= 0) close(fd);
  unlink(j.output);
  return text;
}

static int count(const char *text, const char *what) {
  int n = 0;
  for (const char *at = text; (at = strstr(at, what)); at += strlen(what)) n++;
  return n;
}

static void holder(child *self, void *unused) {
  CUdeviceptr pointer;
  (void)unused;
  start_cuda(0);
  CUDA(cuMemAlloc_v2)(&pointer, 7 * GIB);
  tell(self, 1);
  ask(self);
}

int main(void) {
  uint64_t status;
  root = root_make("--card", "a100-80x3", "--seed", "10", NULL);
  state_open();
  child neighbour = child_start(holder, NULL);
  ask(&neighbour);

  char *text = inside((job){.cards = 2, .command = {"/usr/bin/gpuprobe", "info"}}, &status);
  check_equal(status, 0, "a program in a container runs");
  check(count(text, "\"step\":\"card\",\"ok\":true") == 2 && strstr(text, "\"nvmlCards\":2"), "and sees the two cards whose nodes it has");
  check(strstr(text, "\"cudaFreeBytes\":76590088192") != NULL, "with what a neighbour outside holds");
  check(count(text, "\"nvmlProcesses\":1") == 2, "and itself only among the processes");
  text = inside((job){.cards = 0, .command = {"/usr/bin/gpuprobe", "alloc", "1MiB"}}, &status);
  check(status == 1 && strstr(text, "CUDA_ERROR_NO_DEVICE"), "without a node there is no card");
  text = inside((job){.cards = 1, .command = {"/usr/bin/gpuprobe", "paths"}, .cleared = true}, &status);
  check_equal(status, 0, "each way of loading finds the libraries, in an empty environment too");
  check_equal(count(text, "\"ok\":true"), 11, "all eleven");
  check_equal(count(text, "\"file\":\"/usr/lib/x86_64-linux-gnu/lib"), 11, "in the system's directory");
  text = inside((job){.cards = 2, .command = {"/usr/bin/nvidia-smi", "-L"}}, &status);
  check(status == 0 && count(text, "A100") == 2, "nvidia-smi lists them");

  tell(&neighbour, 0);
  child_end(&neighbour);
  return finish();
}
