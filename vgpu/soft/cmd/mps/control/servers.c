/* servers.c - the servers of a daemon: started for a user, told to end, seen to be gone. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <inttypes.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../../../state/lock.h"
#include "../../../state/mps.h"
#include "control.h"

mps_server *server_by_pid(mps_daemon *d, pid_t pid) {
  for (int i = 0; i < MOST_SERVERS; i++)
    if (d->servers[i].phase != SERVER_NONE && d->servers[i].pid == pid) return &d->servers[i];
  return NULL;
}

mps_server *server_of_user(mps_daemon *d, uid_t uid) {
  for (int i = 0; i < MOST_SERVERS; i++) {
    mps_server *s = &d->servers[i];
    if (s->phase != SERVER_NONE && !s->closing && (d->all_users || s->uid == uid)) return s;
  }
  return NULL;
}

bool servers_any(const mps_daemon *d) {
  for (int i = 0; i < MOST_SERVERS; i++)
    if (d->servers[i].phase != SERVER_NONE) return true;
  return false;
}

static void become(uid_t uid) {
  if (uid == geteuid()) return;
  if (setgroups(0, NULL) != 0 || setgid((gid_t)uid) != 0 || setuid(uid) != 0) _exit(4);
}

mps_server *server_start(mps_daemon *d, uid_t uid, bool *failed) {
  char path[4200], number[16];
  int ready[2];
  mps_server *s = NULL;
  *failed = false;
  if (d->all_users) uid = geteuid();
  if (servers_any(d)) { /* one at a time: that of another user goes when its clients have */
    for (int i = 0; i < MOST_SERVERS; i++) d->servers[i].closing = true;
    return NULL;
  }
  *failed = true;
  snprintf(d->last_word, sizeof d->last_word, "failed");
  snprintf(d->last_reason, sizeof d->last_reason, "it could not be started");
  if ((uid != geteuid() && geteuid() != 0) || pipe2(ready, O_CLOEXEC) != 0) return NULL;
  s = &d->servers[0];
  snprintf(path, sizeof path, "%s/nvidia-cuda-mps-server", d->node.directory);
  pid_t pid = fork();
  if (pid < 0) {
    close(ready[0]);
    close(ready[1]);
    return NULL;
  }
  if (pid == 0) {
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    setsid(); /* it outlives its daemon */
    become(uid);
    fcntl(ready[1], F_SETFD, 0);
    snprintf(number, sizeof number, "%d", ready[1]);
    execl(path, "nvidia-cuda-mps-server", number, d->all_users ? "all" : (char *)NULL, (char *)NULL);
    _exit(5);
  }
  close(ready[1]);
  *s = (mps_server){.phase = SERVER_STARTING, .pid = pid, .uid = uid, .ready_fd = ready[0], .limits = d->defaults};
  note(d, "server %d is starting for user %u", (int)pid, (unsigned)uid);
  *failed = false;
  return s;
}

static void gone(mps_daemon *d, mps_server *s, int status) {
  char path[128];
  if (s->phase == SERVER_STARTING) close(s->ready_fd);
  if (s->shm[0]) { /* one that was killed leaves its file */
    snprintf(path, sizeof path, "%s/%s", SOFT_MPS_SHM_DIR, s->shm);
    unlink(path);
  }
  if (WIFSIGNALED(status)) note(d, "server %d was ended by signal %d", (int)s->pid, WTERMSIG(status));
  else note(d, "server %d ended with status %d", (int)s->pid, WEXITSTATUS(status));
  *s = (mps_server){.phase = SERVER_NONE};
}

void server_hear(mps_daemon *d, mps_server *s) {
  char text[320];
  ssize_t n = read(s->ready_fd, text, sizeof text - 1);
  if (n < 0 && errno == EINTR) return;
  text[n > 0 ? n : 0] = 0;
  text[strcspn(text, "\n")] = 0;
  if (sscanf(text, "ready %" SCNu32 " %" SCNu64 " %64s", &s->slot, &s->generation, s->shm) == 3) {
    close(s->ready_fd);
    s->phase = SERVER_READY;
    note(d, "server %d is ready", (int)s->pid);
    return;
  }
  char *blank = strchr(text, ' ');
  if (blank) *blank++ = 0;
  snprintf(d->last_word, sizeof d->last_word, "%s", text[0] ? text : "failed");
  snprintf(d->last_reason, sizeof d->last_reason, "%s", blank ? blank : "it ended before it was ready");
  note(d, "server %d can't start: %s", (int)s->pid, d->last_reason);
  int status = 0;
  waitpid(s->pid, &status, 0);
  gone(d, s, status);
}

uint32_t server_clients(mps_daemon *d, const mps_server *s, uint32_t *slots, uint32_t room) {
  soft_region *region = &d->node.region;
  uint32_t count = 0;
  if (s->phase != SERVER_READY || !soft_region_sound(region)) return 0;
  uint32_t high = soft_slots_high(region);
  for (uint32_t i = 0; i < high; i++) {
    if (!soft_mps_client_of(region, i, s->slot) || !soft_slot_alive(region, i, NULL)) continue;
    if (slots && count < room) slots[count] = i;
    count++;
  }
  return count;
}

uint32_t server_fault(const mps_daemon *d, const mps_server *s) {
  const soft_slot *slot = s->phase == SERVER_READY ? soft_slot_at(&d->node.region, s->slot) : NULL;
  return slot && slot->generation == s->generation ? slot->mps.fault : 0;
}

void server_end(mps_daemon *d, mps_server *s, bool at_once) {
  (void)d;
  s->closing = true;
  if (!at_once || s->told) return;
  s->told = true;
  kill(s->pid, SIGTERM);
}

void servers_look(mps_daemon *d) {
  for (int i = 0; i < MOST_SERVERS; i++) {
    mps_server *s = &d->servers[i];
    int status = 0;
    if (s->phase == SERVER_NONE || s->phase == SERVER_STARTING) continue; /* one that starts is heard to end */
    if (waitpid(s->pid, &status, WNOHANG) == s->pid) {
      gone(d, s, status);
      continue;
    }
    if (s->closing && !s->told && server_clients(d, s, NULL, 0) == 0) server_end(d, s, true);
  }
}
