/*
 * control.h - parts of nvidia-cuda-mps-control: the daemon, its servers, the
 * commands that it understands.
 */
#ifndef SOFT_CMD_MPS_CONTROL_H
#define SOFT_CMD_MPS_CONTROL_H

#include <stdio.h>
#include <sys/types.h>

#include "../node.h"

enum { MOST_SERVERS = 16, MOST_WAITING = 1024 };

typedef struct {
  uint32_t ppm;                   /* of a card's threads */
  uint64_t bytes[SOFT_CARDS];     /* pinned memory by card of the state, 0 no limit */
} mps_limits;

typedef enum { SERVER_NONE = 0, SERVER_STARTING, SERVER_READY } server_phase;

typedef struct {
  server_phase phase;
  pid_t pid;
  uid_t uid;
  int ready_fd;                   /* while it starts */
  uint32_t slot;
  uint64_t generation;
  char shm[65];
  bool closing;                   /* takes no more clients, and ends with its last one */
  bool told;                      /* was sent SIGTERM */
  mps_limits limits;
} mps_server;

typedef struct {
  mps_node node;
  bool all_users;
  mps_limits defaults;
  mps_server servers[MOST_SERVERS];
  bool quitting;
  uint64_t quit_by_ns;            /* SOFT_FOREVER: waits for the clients */
  char last_word[16], last_reason[256]; /* of a server that could not start */
  FILE *log;
  bool foreground;
} mps_daemon;

/* control.c */
void note(mps_daemon *d, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* servers.c */
mps_server *server_by_pid(mps_daemon *d, pid_t pid);
/* The one that a user's clients go to; NULL when there is none yet. */
mps_server *server_of_user(mps_daemon *d, uid_t uid);
/* Starts one; NULL when it can't be now: another's server must end first, or *failed. */
mps_server *server_start(mps_daemon *d, uid_t uid, bool *failed);
/* Reads what a starting one says. */
void server_hear(mps_daemon *d, mps_server *s);
/* Notes those that ended, ends those that should. */
void servers_look(mps_daemon *d);
void server_end(mps_daemon *d, mps_server *s, bool at_once);
bool servers_any(const mps_daemon *d);
/* Slots of a server's clients; gives their number. */
uint32_t server_clients(mps_daemon *d, const mps_server *s, uint32_t *slots, uint32_t room);
uint32_t server_fault(const mps_daemon *d, const mps_server *s);

/* commands.c: does a line, prints into out; the exit status. */
int command_run(mps_daemon *d, char *line, FILE *out);

/* daemon.c */
int daemon_run(mps_daemon *d, const char *pipe_dir, const char *log_dir, int listening, int started);

#endif
