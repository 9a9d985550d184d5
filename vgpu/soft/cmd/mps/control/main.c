/*
 * nvidia-cuda-mps-control - a stand-in for driver roots of software cards.
 *
 *   nvidia-cuda-mps-control -d | -f [-multiuser-server]   the daemon, behind or before
 *   nvidia-cuda-mps-control                               lines of standard input are its commands
 *
 * Environment, as NVIDIA's: CUDA_VISIBLE_DEVICES, CUDA_DEVICE_ORDER,
 * CUDA_MPS_PIPE_DIRECTORY, CUDA_MPS_LOG_DIRECTORY, and the first limits of
 * servers: CUDA_MPS_ACTIVE_THREAD_PERCENTAGE, CUDA_MPS_PINNED_DEVICE_MEM_LIMIT.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "../../../state/lock.h"
#include "../../../state/mps.h"
#include "control.h"

static int fail(const char *what, const char *object) {
  fprintf(stderr, "nvidia-cuda-mps-control (software GPU): %s %s\n", what, object);
  return 1;
}

static bool address(const char *dir, struct sockaddr_un *out) {
  *out = (struct sockaddr_un){.sun_family = AF_UNIX};
  return snprintf(out->sun_path, sizeof out->sun_path, "%s/%s", dir, SOFT_MPS_SOCKET) < (int)sizeof out->sun_path;
}

/* ---- commands ------------------------------------------------------------ */

/* One line to the daemon and its answer to standard output; the exit status. */
static int pass_on(const struct sockaddr_un *to, const char *line) {
  static char packet[SOFT_MPS_PACKET];
  int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  if (fd < 0 || connect(fd, (const struct sockaddr *)to, sizeof *to) != 0) {
    if (fd >= 0) close(fd);
    return fail("no control daemon answers at", to->sun_path);
  }
  int length = snprintf(packet, sizeof packet, SOFT_MPS_COMMAND "%s", line);
  ssize_t n = length < (int)sizeof packet ? send(fd, packet, (size_t)length, MSG_NOSIGNAL) : -1;
  n = n > 0 ? recv(fd, packet, sizeof packet - 1, 0) : n;
  if (n <= 0) {
    close(fd);
    return fail("the control daemon went away at", to->sun_path);
  }
  packet[n] = 0;
  fputs(packet + 1, stdout);
  fflush(stdout);
  int status = packet[0] - '0';
  while (status == 0 && strncmp(line, "quit", 4) == 0 && recv(fd, packet, 1, 0) > 0) { /* until it has ended */
  }
  close(fd);
  return status;
}

static int command_lines(const char *pipe_dir) {
  char line[1024];
  struct sockaddr_un to;
  int status = 0;
  if (!address(pipe_dir, &to)) return fail("path too long:", pipe_dir);
  while (fgets(line, sizeof line, stdin)) {
    char *word = line + strspn(line, " \t\r\n");
    if (!*word) continue;
    status = pass_on(&to, word);
    if (strncmp(word, "quit", 4) == 0) break;
  }
  return status;
}

/* ---- the daemon ---------------------------------------------------------- */

static bool first_limits(mps_daemon *d) {
  const char *percentage = getenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"), *limits = getenv("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT");
  char text[1024], *save;
  d->defaults.ppm = SOFT_MPS_WHOLE;
  if (percentage && !soft_mps_percentage(percentage, &d->defaults.ppm)) return false;
  snprintf(text, sizeof text, "%s", limits ? limits : "");
  for (char *part = strtok_r(text, ",", &save); part; part = strtok_r(NULL, ",", &save)) {
    char *value = strchr(part, '=');
    if (!value) return false;
    *value++ = 0;
    uint32_t card = mps_node_card(&d->node, part);
    if (card == SOFT_NO_INDEX || !soft_mps_bytes(value, &d->defaults.bytes[card])) return false;
  }
  return true;
}

/* The socket, and the lock that says it is ours: held for as long as this process lives. */
static int listen_at(const char *dir, int *lock) {
  char path[PATH_MAX];
  struct sockaddr_un at;
  if (mkdir(dir, 0755) != 0 && errno != EEXIST) return fail("can't make", dir), -1;
  if (!address(dir, &at)) return fail("path too long:", dir), -1;
  snprintf(path, sizeof path, "%s/control_lock", dir);
  *lock = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (*lock < 0) return fail("can't open", path), -1;
  if (flock(*lock, LOCK_EX | LOCK_NB) != 0) return fail("a control daemon runs already at", dir), -1;
  unlink(at.sun_path);
  int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  if (fd < 0 || bind(fd, (struct sockaddr *)&at, sizeof at) != 0 || chmod(at.sun_path, 0666) != 0 || listen(fd, 128) != 0) {
    if (fd >= 0) close(fd);
    return fail("can't listen at", at.sun_path), -1;
  }
  return fd;
}

/* Goes behind: the parent says what became of it. Gives the descriptor to report to, or ends the process. */
static int go_behind(void) {
  int report[2];
  if (pipe2(report, O_CLOEXEC) != 0) exit(fail("can't make", "a pipe"));
  pid_t pid = fork();
  if (pid < 0) exit(fail("can't fork", ""));
  if (pid > 0) {
    char word = '1';
    close(report[1]);
    ssize_t n = read(report[0], &word, 1);
    exit(n == 1 ? word - '0' : 1);
  }
  close(report[0]);
  setsid();
  return report[1];
}

static void forget_terminal(void) {
  int none = open("/dev/null", O_RDWR | O_CLOEXEC);
  for (int fd = 0; none >= 0 && fd < 3; fd++) dup2(none, fd);
}

static int run_daemon(mps_daemon *d, bool behind, const char *pipe_dir, const char *log_dir) {
  int lock, started = behind ? go_behind() : -1;
  const char *wrong = mps_node_open(&d->node);
  if (wrong) return fail("no software GPU:", wrong);
  if (!first_limits(d)) return fail("can't understand", "the limits in the environment");
  int listening = listen_at(pipe_dir, &lock);
  if (listening < 0) return 1;
  soft_error error = soft_slot_claim(&d->node.region, SOFT_KIND_OBSERVER);
  if (error != SOFT_OK) return fail("no software GPU:", soft_error_text(error));
  d->foreground = !behind;
  if (mkdir(log_dir, 0755) != 0 && errno != EEXIST) fail("can't make", log_dir); /* it goes without */
  if (behind) forget_terminal();
  return daemon_run(d, pipe_dir, log_dir, listening, started);
}

static const char *setting(const char *name, const char *otherwise) {
  const char *value = getenv(name);
  return value && value[0] ? value : otherwise;
}

int main(int argc, char **argv) {
  static mps_daemon d;
  bool behind = false, before = false;
  for (int i = 1; i < argc; i++) {
    if (strcmp(argv[i], "-d") == 0) behind = true;
    else if (strcmp(argv[i], "-f") == 0) before = true;
    else if (strcmp(argv[i], "-multiuser-server") == 0) d.all_users = true;
    else return fail("knows -d, -f and -multiuser-server, not", argv[i]), 2;
  }
  const char *pipe_dir = setting("CUDA_MPS_PIPE_DIRECTORY", SOFT_MPS_PIPE_DIR);
  if (!behind && !before) return command_lines(pipe_dir);
  return run_daemon(&d, behind && !before, pipe_dir, setting("CUDA_MPS_LOG_DIRECTORY", SOFT_MPS_LOG_DIR));
}
