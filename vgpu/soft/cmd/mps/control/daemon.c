/* daemon.c - the control daemon: clients come in, wait for a server of their user, and are told of it. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "../../../../lib/include/cuda_abi.h"
#include "../../../state/clock.h"
#include "../../../state/lock.h"
#include "../../../state/mps.h"
#include "control.h"

enum { LOOK_MS = 50 };

typedef struct {
  int fd;
  uid_t uid;
  pid_t pid;
  bool waits; /* a client that was not answered yet */
} caller;

static caller callers[MOST_WAITING];
static int caller_count;
static volatile sig_atomic_t asked_to_end;

static void on_end(int signal) {
  (void)signal;
  asked_to_end = 1;
}

void note(mps_daemon *d, const char *format, ...) {
  char text[512], when[32];
  va_list arguments;
  struct timespec now;
  struct tm parts;
  clock_gettime(CLOCK_REALTIME, &now);
  strftime(when, sizeof when, "%Y-%m-%d %H:%M:%S", gmtime_r(&now.tv_sec, &parts));
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  FILE *const to[2] = {d->log, d->foreground ? stderr : NULL};
  for (int i = 0; i < 2; i++) {
    if (!to[i]) continue;
    fprintf(to[i], "[%s.%03ld Control %5d] %s\n", when, now.tv_nsec / 1000000, (int)getpid(), text);
    fflush(to[i]);
  }
}

static void say(int fd, const char *text) {
  ssize_t n = send(fd, text, strlen(text), MSG_NOSIGNAL | MSG_DONTWAIT);
  (void)n;
}

static void drop(int at) {
  close(callers[at].fd);
  memmove(&callers[at], &callers[at + 1], (size_t)(--caller_count - at) * sizeof callers[0]);
}

static void refuse(mps_daemon *d, int at, CUresult why) {
  char text[32];
  note(d, "client %d of user %u is refused with error %d", (int)callers[at].pid, (unsigned)callers[at].uid, (int)why);
  snprintf(text, sizeof text, "error %d", (int)why);
  say(callers[at].fd, text);
  drop(at);
}

static void welcome(mps_daemon *d, int at, const mps_server *s) {
  char text[1024];
  int n = snprintf(text, sizeof text, "server %" PRIu32 " %" PRIu64 " %s %" PRIu32 " ", s->slot, s->generation, s->shm, s->limits.ppm);
  for (uint32_t i = 0; i < SOFT_CARDS; i++) n += snprintf(text + n, sizeof text - (size_t)n, "%s%" PRIu64, i ? "," : "", s->limits.bytes[i]);
  note(d, "client %d of user %u goes to server %d", (int)callers[at].pid, (unsigned)callers[at].uid, (int)s->pid);
  say(callers[at].fd, text);
  drop(at);
}

static CUresult start_error(const mps_daemon *d) {
  return strcmp(d->last_word, "busy") == 0 ? CUDA_ERROR_MPS_SERVER_NOT_READY : CUDA_ERROR_MPS_CONNECTION_FAILED;
}

/* Answers those who wait, in their order, as far as that can be done now. */
static void serve_clients(mps_daemon *d) {
  for (int at = 0; at < caller_count;) {
    bool failed = false;
    if (!callers[at].waits) {
      at++;
      continue;
    }
    if (d->quitting) {
      refuse(d, at, CUDA_ERROR_MPS_CONNECTION_FAILED);
      continue;
    }
    mps_server *s = server_of_user(d, callers[at].uid);
    if (!s) s = server_start(d, callers[at].uid, &failed);
    if (failed) refuse(d, at, start_error(d));
    else if (!s || s->phase == SERVER_STARTING) at++;
    else if (server_fault(d, s)) refuse(d, at, CUDA_ERROR_MPS_SERVER_NOT_READY);
    else welcome(d, at, s);
  }
}

static void hear_server(mps_daemon *d, mps_server *s) {
  uid_t uid = s->uid;
  server_hear(d, s);
  if (s->phase != SERVER_NONE) return;
  for (int at = 0; at < caller_count;) {
    if (callers[at].waits && (d->all_users || callers[at].uid == uid)) refuse(d, at, start_error(d));
    else at++;
  }
}

static void do_command(mps_daemon *d, int at, char *line) {
  char *text = NULL;
  size_t size = 0;
  FILE *out = open_memstream(&text, &size);
  if (!out) return drop(at);
  fputc('0', out);
  servers_look(d);
  int status = command_run(d, line, out);
  fclose(out);
  if (text) {
    text[0] = (char)('0' + status);
    if (size >= SOFT_MPS_PACKET) text[SOFT_MPS_PACKET - 1] = 0;
    say(callers[at].fd, text);
  }
  free(text);
  if (!d->quitting) drop(at); /* who asked to quit sees the end by the connection's */
}

static void hear_caller(mps_daemon *d, int at) {
  static char line[SOFT_MPS_PACKET];
  ssize_t n = recv(callers[at].fd, line, sizeof line - 1, MSG_DONTWAIT);
  if (n < 0 && (errno == EINTR || errno == EAGAIN)) return;
  line[n > 0 ? n : 0] = 0;
  size_t command = strlen(SOFT_MPS_COMMAND);
  if (n > 0 && strcmp(line, SOFT_MPS_ATTACH) == 0) callers[at].waits = true;
  else if (n > 0 && strncmp(line, SOFT_MPS_COMMAND, command) == 0) do_command(d, at, line + command);
  else drop(at);
}

static void accept_caller(int listening) {
  struct ucred who;
  socklen_t size = sizeof who;
  int fd = accept4(listening, NULL, NULL, SOCK_CLOEXEC);
  if (fd < 0) return;
  if (caller_count == MOST_WAITING || getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &who, &size) != 0) {
    close(fd);
    return;
  }
  callers[caller_count++] = (caller){.fd = fd, .uid = who.uid, .pid = who.pid};
}

/* One round: waits for something to do, and does it. */
static void look(mps_daemon *d, int listening) {
  static struct pollfd polled[MOST_WAITING + MOST_SERVERS + 1];
  static mps_server *starting[MOST_SERVERS];
  int callers_then = caller_count, servers = 0;
  polled[0] = (struct pollfd){.fd = listening, .events = POLLIN};
  for (int i = 0; i < callers_then; i++) polled[1 + i] = (struct pollfd){.fd = callers[i].fd, .events = POLLIN};
  for (int i = 0; i < MOST_SERVERS; i++) {
    if (d->servers[i].phase != SERVER_STARTING) continue;
    starting[servers] = &d->servers[i];
    polled[1 + callers_then + servers++] = (struct pollfd){.fd = d->servers[i].ready_fd, .events = POLLIN};
  }
  if (poll(polled, (nfds_t)(1 + callers_then + servers), LOOK_MS) > 0) {
    for (int i = 0; i < servers; i++)
      if (polled[1 + callers_then + i].revents && starting[i]->phase == SERVER_STARTING) hear_server(d, starting[i]);
    for (int i = callers_then; i-- > 0;) /* backwards: one that goes moves those behind it */
      if (polled[1 + i].revents && i < caller_count && callers[i].fd == polled[1 + i].fd) hear_caller(d, i);
    if (polled[0].revents) accept_caller(listening);
  }
  servers_look(d);
  serve_clients(d);
}

int daemon_run(mps_daemon *d, const char *pipe_dir, const char *log_dir, int listening, int started) {
  char path[PATH_MAX];
  struct sigaction end = {.sa_handler = on_end};
  sigaction(SIGTERM, &end, NULL);
  sigaction(SIGINT, &end, NULL);
  signal(SIGPIPE, SIG_IGN);
  snprintf(path, sizeof path, "%s/control.log", log_dir);
  d->log = fopen(path, "ae");
  snprintf(path, sizeof path, "%s/nvidia-cuda-mps-control.pid", pipe_dir);
  FILE *pid_file = fopen(path, "we");
  if (pid_file) {
    fprintf(pid_file, "%d\n", (int)getpid());
    fclose(pid_file);
  }
  note(d, "software GPU: control daemon at %s, %u card%s", pipe_dir, d->node.count, d->node.count == 1 ? "" : "s");
  if (started >= 0) {
    ssize_t n = write(started, "0", 1);
    (void)n;
    close(started);
  }
  while (!d->quitting || servers_any(d)) {
    look(d, listening);
    if (asked_to_end) {
      d->quitting = true;
      d->quit_by_ns = 0;
    }
    if (!d->quitting) continue;
    for (int i = 0; i < MOST_SERVERS; i++)
      if (d->servers[i].phase != SERVER_NONE) server_end(d, &d->servers[i], soft_real_ns() >= d->quit_by_ns);
  }
  note(d, "the control daemon ends");
  unlink(path);
  snprintf(path, sizeof path, "%s/%s", pipe_dir, SOFT_MPS_SOCKET);
  unlink(path);
  soft_slot_release(&d->node.region);
  if (d->log) fclose(d->log);
  return 0;
}
