/* MPS: what goes on and what ends when a client, a server or the daemon does, at several moments. */
#define _GNU_SOURCE
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../state/mps.h"
#include "mps.h"

static const mps_wish client = {0}, plain = {.pipe_dir = ""};

static void fresh(const char *mode) {
  root_make("--card", "a100-80", "--seed", "3", "--free-delay", "0", NULL);
  run_tool("softgpu", "set", state_open()->device_prefix, mode, NULL);
  check_equal(mps_daemon_start("", ""), 0, "a daemon comes up");
}

static child started(const mps_wish *wish) {
  child c = mps_child(wish);
  check_equal(mps_do(&c, DO_START, 0), CUDA_SUCCESS, "a process starts");
  return c;
}

static pid_t server(void) { return (pid_t)mps_number("get_server_list"); }

static void kill_and_wait(pid_t pid) {
  kill(pid, SIGKILL);
  check(mps_until(mps_is_gone, &pid), "it is gone");
}

/* Its queue on the card has work. */
static bool computes(const void *pid) {
  soft_region *region = state_open();
  for (uint32_t i = 0; i < soft_slots_high(region); i++) {
    const soft_slot *slot = soft_slot_at(region, i);
    if (slot->state != SOFT_SLOT_LIVE || slot->pid != (uint32_t) * (const pid_t *)pid) continue;
    const soft_queue *queue = soft_queue_at(region, slot->usage[0].queue);
    return queue && queue->scan < queue->head;
  }
  return false;
}

static bool is_freed(const void *bytes) { return used_bytes(0) == *(const uint64_t *)bytes; }

/* ---- a client ------------------------------------------------------------- */

static void clients_die(void) {
  fresh("compute-mode=exclusive-process");
  child a = started(&client), c = started(&client);
  mps_do(&c, DO_LAUNCH, 1); /* the first has the module loaded */
  pid_t was = server();
  mps_do(&a, DO_ALLOC, 1000);
  uint64_t left = used_bytes(0);
  child b = started(&client);
  mps_do(&b, DO_ALLOC, 500);
  mps_do(&b, DO_LAUNCH, 600000);
  mps_say(&b, DO_SYNC, 0);
  mps_do(&c, DO_LAUNCH, 1); /* behind the long one */
  check(mps_until(computes, &b.pid), "one computes for long");
  child_kill(&b);
  check_equal(mps_do(&c, DO_SYNC, 0), CUDA_SUCCESS, "when it is killed, the card goes on with the next");
  check(left > 1000 * MIB && mps_until(is_freed, &left), "and its memory is free");
  child_kill(&a);
  check_equal(mps_do(&c, DO_ALLOC, 1), CUDA_SUCCESS, "one that dies idle disturbs nobody");
  check_equal(server(), was, "nor the server");
  child d = mps_child(&client);
  mps_say(&d, DO_INIT, 0);
  child_kill(&d); /* in cuInit, or just before or after */
  child e = started(&client);
  check_equal(mps_number("get_client_list %d", (int)was) > 0, 1, "nor does one that dies as it comes");
  mps_end(&c);
  mps_end(&e);
  left = SOFT_SERVER_BYTES;
  check(mps_until(is_freed, &left), "the server is left");
}

static void terminated(void) {
  int status;
  fresh("compute-mode=default");
  child a = started(&client), b = started(&client);
  pid_t of = server();
  mps_do(&a, DO_LAUNCH, 600000);
  mps_say(&a, DO_SYNC, 0);
  check(mps_until(computes, &a.pid), "a client waits for its kernel");
  mps_control(&status, "terminate_client %d %d", (int)of, (int)a.pid);
  check_equal(status, 0, "it is terminated");
  check_equal(ask(&a), CUDA_ERROR_MPS_CLIENT_TERMINATED, "its wait ends, and says so");
  check_equal(mps_do(&a, DO_ALLOC, 1), CUDA_ERROR_MPS_CLIENT_TERMINATED, "as does all it tries then");
  check_equal(mps_do(&a, DO_SYNC, 0), CUDA_ERROR_MPS_CLIENT_TERMINATED, "again and again");
  check_equal(mps_do(&b, DO_LAUNCH, 1), CUDA_SUCCESS, "others work on");
  check_equal(mps_do(&b, DO_SYNC, 0), CUDA_SUCCESS, "to their end");
  mps_control(&status, "terminate_client %d %d", (int)of, (int)getpid());
  check_equal(status, 1, "who is no client can't be terminated");
  child_kill(&a);
  mps_end(&b);
}

static void fault(void) {
  fresh("compute-mode=default");
  child a = started(&client), b = started(&client);
  pid_t of = server();
  check_equal(mps_do(&a, DO_WILD, 0), CUDA_ERROR_ILLEGAL_ADDRESS, "a client's kernel goes astray");
  check_equal(mps_do(&b, DO_ALLOC, 1), CUDA_ERROR_ILLEGAL_ADDRESS, "all clients of the card have that");
  check(strcmp(mps_control(NULL, "get_server_status %d", (int)of), "FAULT\n") == 0, "the server says so");
  child c = mps_child(&client);
  check_equal(mps_do(&c, DO_INIT, 0), CUDA_ERROR_MPS_SERVER_NOT_READY, "and takes no more clients");
  mps_end(&a);
  check_equal(mps_do(&c, DO_INIT, 0), CUDA_ERROR_MPS_SERVER_NOT_READY, "while one is left");
  mps_end(&b);
  CUresult result = CUDA_ERROR_MPS_SERVER_NOT_READY;
  for (int i = 0; i < 2000 && result == CUDA_ERROR_MPS_SERVER_NOT_READY; i++) {
    result = (CUresult)mps_do(&c, DO_INIT, 0);
    if (result != CUDA_SUCCESS) nap_ms(5);
  }
  check_equal(result, CUDA_SUCCESS, "then it does again");
  check(strcmp(mps_control(NULL, "get_server_status %d", (int)of), "ACTIVE\n") == 0 && server() == of, "the same one");
  mps_end(&c);
}

/* ---- a server -------------------------------------------------------------- */

static void server_dies(void) {
  fresh("compute-mode=exclusive-process");
  child idle = started(&client), waits = started(&client), fills = started(&client);
  pid_t was = server();
  mps_do(&waits, DO_LAUNCH, 600000);
  mps_say(&waits, DO_SYNC, 0);
  check(mps_until(computes, &waits.pid), "a client waits for its kernel");
  for (int i = 0; i < 1024; i++) mps_do(&fills, DO_LAUNCH, 1000);
  mps_say(&fills, DO_LAUNCH, 1); /* waits for room in its queue */
  kill_and_wait(was);
  check_equal(ask(&waits), CUDA_ERROR_MPS_RPC_FAILURE, "when the server is killed, the wait ends");
  check_equal(ask(&fills), CUDA_ERROR_MPS_RPC_FAILURE, "so does the one for room");
  check_equal(mps_do(&idle, DO_ALLOC, 1), CUDA_ERROR_MPS_RPC_FAILURE, "and who did nothing finds out");
  check_equal(mps_do(&idle, DO_START, 0), CUDA_SUCCESS, "a primary context that is there can still be named");
  check(mps_do(&idle, DO_SYNC, 0) == CUDA_ERROR_MPS_RPC_FAILURE && mps_do(&idle, DO_CONTEXT, 10) == 1000 + CUDA_ERROR_MPS_RPC_FAILURE, "but it is of no use, nor is there a new one");
  check(strcmp(mps_control(NULL, "get_server_list"), "") == 0, "the daemon has no server");
  child next = mps_child(&client);
  check_equal(mps_do(&next, DO_INIT, 0), CUDA_ERROR_MPS_SERVER_NOT_READY, "its clients hold the card as yet");
  child_kill(&waits);
  child_kill(&fills);
  check_equal(mps_do(&next, DO_INIT, 0), CUDA_ERROR_MPS_SERVER_NOT_READY, "to the last");
  mps_end(&idle);
  check_equal(mps_do(&next, DO_START, 0), CUDA_SUCCESS, "then there is a new server");
  check(server() > 0 && server() != was, "another one");
  check_equal(mps_do(&next, DO_LAUNCH, 1), CUDA_SUCCESS, "with which one can work");
  check_equal(mps_do(&next, DO_SYNC, 0), CUDA_SUCCESS, "to the end");
  mps_end(&next);
  uint64_t left = SOFT_SERVER_BYTES;
  check(mps_until(is_freed, &left), "nothing is left but the new server");
}

static void server_dies_and_nobody_looks(void) {
  fresh("compute-mode=default");
  child a = started(&client);
  kill_and_wait(server());
  child b = started(&client); /* a new server, in the default mode at once */
  check_equal(mps_do(&a, DO_LAUNCH, 1), CUDA_ERROR_MPS_RPC_FAILURE, "an old client isn't the new server's");
  check_equal(mps_number("get_client_list %d", (int)server()), b.pid, "nor does that have it");
  mps_end(&a);
  mps_end(&b);
}

/* ---- the daemon ------------------------------------------------------------ */

static void daemon_dies(void) {
  int status;
  fresh("compute-mode=exclusive-process");
  child a = started(&client);
  pid_t of = server(), daemon = mps_daemon_pid();
  kill_and_wait(daemon);
  check_equal(mps_do(&a, DO_LAUNCH, 1), CUDA_SUCCESS, "when the daemon is killed, clients work on");
  check_equal(mps_do(&a, DO_SYNC, 0), CUDA_SUCCESS, "to the end");
  child b = mps_child(&client);
  check_equal(mps_do(&b, DO_START, 0), CUDA_ERROR_DEVICE_UNAVAILABLE, "a new program finds no MPS, and the card taken");
  check_equal(mps_do(&b, DO_AFFINITY, 0), 0, "it is no client");
  mps_control(&status, "get_server_list");
  check_equal(status, 1, "nobody answers");
  check_equal(mps_daemon_start("", ""), 0, "another daemon can take the place");
  check(strcmp(mps_control(&status, "get_server_list"), "") == 0 && status == 0, "which doesn't know the old server");
  child c = mps_child(&client);
  check_equal(mps_do(&c, DO_INIT, 0), CUDA_ERROR_MPS_SERVER_NOT_READY, "nor gets the card from it");
  check_equal(mps_do(&a, DO_ALLOC, 1), CUDA_SUCCESS, "whose client works on");
  mps_end(&a);
  mps_end(&b);
  kill(of, SIGTERM);
  check(mps_until(mps_is_gone, &of), "the old server is ended");
  check_equal(mps_do(&c, DO_START, 0), CUDA_SUCCESS, "now it does");
  mps_end(&c);
}

static void daemon_dies_in_talk(void) {
  fresh("compute-mode=default");
  child a = started(&client), other = mps_child(&(mps_wish){.uid = 1234}), c = mps_child(&client);
  mps_say(&other, DO_INIT, 0); /* waits for the first user's to end */
  pid_t daemon = mps_daemon_pid();
  check_equal(mps_number("get_client_list %d", (int)server()), a.pid, "the daemon serves");
  kill(daemon, SIGSTOP);
  mps_say(&c, DO_INIT, 0); /* nobody takes the call */
  nap_ms(100);             /* so that it has made it: either way the answer must be the same */
  kill_and_wait(daemon);
  check_equal(ask(&other), CUDA_ERROR_MPS_CONNECTION_FAILED, "who waits for a server hears when the daemon is killed");
  CUresult result = (CUresult)ask(&c);
  check(result == CUDA_ERROR_MPS_CONNECTION_FAILED, "so does who was not heard (%d)", (int)result);
  check_equal(mps_do(&a, DO_ALLOC, 1), CUDA_SUCCESS, "a client that is there works on");
  check_equal(mps_do(&c, DO_START, 0), CUDA_SUCCESS, "one that tries again runs without MPS");
  mps_end(&a);
  mps_end(&other);
  mps_end(&c);
}

/* ---- ending in order -------------------------------------------------------- */

static void quits(void) {
  int status;
  char command[1500];
  fresh("compute-mode=default");
  child a = started(&client);
  pid_t of = server(), daemon = mps_daemon_pid();
  mps_control(&status, "shutdown_server %d", (int)of);
  check_equal(status, 0, "a server is told to end");
  check_equal(mps_do(&a, DO_ALLOC, 1), CUDA_SUCCESS, "and waits for its clients");
  check(!mps_is_gone(&of), "while there is one");
  mps_control(&status, "shutdown_server %d -f", (int)of);
  check(status == 0 && mps_until(mps_is_gone, &of), "by force it doesn't");
  check_equal(mps_do(&a, DO_ALLOC, 1), CUDA_ERROR_MPS_RPC_FAILURE, "and they lose it");
  mps_end(&a);
  a = started(&client);
  of = server();
  fflush(stdout);
  pid_t quitting = fork();
  if (quitting == 0) {
    mps_control(&status, "quit");
    _exit(status);
  }
  child b = mps_child(&client);
  CUresult result = CUDA_SUCCESS;
  snprintf(command, sizeof command, "grep -q refused %s/control.log", mps_dir());
  for (int i = 0; i < 2000 && result == CUDA_SUCCESS; i++) { /* until the daemon has heard of it */
    child probe = mps_child(&client);
    result = (CUresult)mps_do(&probe, DO_INIT, 0);
    mps_end(&probe);
  }
  check_equal(result, CUDA_ERROR_MPS_CONNECTION_FAILED, "a daemon that quits takes no more clients");
  check_equal(mps_do(&a, DO_ALLOC, 1), CUDA_SUCCESS, "those it has work on");
  check(!mps_is_gone(&daemon), "and it waits for them");
  mps_end(&a);
  check(waitpid(quitting, &status, 0) == quitting && status == 0, "then quit comes back");
  check(mps_is_gone(&of) && mps_until(mps_is_gone, &daemon), "and all are gone");
  check_equal(mps_do(&b, DO_START, 0), CUDA_SUCCESS, "what comes now runs without");
  check_equal(system(command), 0, "the log tells of it");
  mps_end(&b);

  check_equal(mps_daemon_start("", ""), 0, "a daemon comes up again");
  a = started(&client);
  of = server(), daemon = mps_daemon_pid();
  mps_control(&status, "quit -t 0");
  check(status == 0 && mps_is_gone(&of) && mps_until(mps_is_gone, &daemon), "with a limit quit doesn't wait longer");
  check_equal(mps_do(&a, DO_ALLOC, 1), CUDA_ERROR_MPS_RPC_FAILURE, "and clients lose their server");
  mps_end(&a);
  mps_daemon_start("", "");
  a = started(&client);
  of = server(), daemon = mps_daemon_pid();
  kill(daemon, SIGTERM);
  check(mps_until(mps_is_gone, &daemon) && mps_is_gone(&of), "SIGTERM ends both");
  child c = started(&plain);
  mps_end(&a);
  mps_end(&c);
}

int main(void) {
  static const mps_scene scenes[] = {clients_die, terminated, fault, server_dies, server_dies_and_nobody_looks, daemon_dies, daemon_dies_in_talk, quits};
  return mps_scenes(scenes, sizeof scenes / sizeof scenes[0]);
}
