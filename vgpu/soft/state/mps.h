/*
 * mps.h - servers of MPS and their clients, as the state has them.
 *
 * A server is a process of its own (cmd/mps), with a slot and a context on
 * each of its cards. libcuda finds it through the control daemon's socket
 * (the words of that talk are below), and then notes in its own slot whose
 * client it is. From there on the two meet in the state only: to a card a
 * server and its clients are one process, in turns and in exclusive mode, and
 * when the server is gone, its clients' work is, and all their calls fail.
 *
 * Functions want the lock, unless they say otherwise.
 */
#ifndef SOFT_MPS_H
#define SOFT_MPS_H

#include "region.h"

enum {
  SOFT_MPS_CLIENTS = 48,    /* of one card, from compute capability 7 on */
  SOFT_MPS_OLD_CLIENTS = 16 /* before */
};

/* What a server's context takes of a card: as its row in NVIDIA's process lists mostly shows. */
#define SOFT_SERVER_BYTES (30ull << 20)

/* Names of the programs' meeting places, within the pipe directory and /dev/shm. */
#define SOFT_MPS_PIPE_DIR "/tmp/nvidia-mps"
#define SOFT_MPS_LOG_DIR "/var/log/nvidia-mps"
#define SOFT_MPS_SOCKET "control"
#define SOFT_MPS_SHM_DIR "/dev/shm"

/*
 * The talk at the control socket, one packet each way: a client says ATTACH;
 * the answer is "server SLOT GENERATION SHM PPM BYTES,BYTES,..." (limits by
 * card of the state, 0 none) or "error CUDARESULT". The control program says
 * COMMAND and a line; the answer is one digit, its exit status, and the text
 * to print.
 */
#define SOFT_MPS_ATTACH "attach"
#define SOFT_MPS_COMMAND "command "
enum { SOFT_MPS_PACKET = 65536 };

/* All of a card, as parts per million of its threads. */
#define SOFT_MPS_WHOLE 1000000u
/* "12.5" -> 125000. False for what is no percentage above 0 and up to 100. */
bool soft_mps_percentage(const char *text, uint32_t *ppm);
/* "8G", "512M", "512MB", "1024K", "4096": bytes. False for anything else. */
bool soft_mps_bytes(const char *text, uint64_t *bytes);
/* Multiprocessors of such a part: whole ones, rounded down, at least 1. */
uint32_t soft_mps_multiprocessors(uint32_t all, uint32_t ppm);

/* The server that a slot is a client of lives. Needs no lock. */
bool soft_mps_server_lives(const soft_region *region, const soft_slot *client);
/* True for a live client of the server in that slot. Needs no lock. */
bool soft_mps_client_of(const soft_region *region, uint32_t index, uint32_t server);

/* Makes our slot a client: 0, or the CUresult that says why not. cards: a bit each. */
uint32_t soft_mps_attach(soft_region *region, uint32_t server, uint64_t generation, uint32_t cards);

/* From now on a client's calls fail so; its work is dropped. The first error stays. */
void soft_mps_fail(soft_region *region, uint32_t client, uint32_t error);
/* A server ended: its clients have lost it. */
void soft_mps_end_clients(soft_region *region, uint32_t server);
/* A fault on the cards of a client: all clients of its server have it, and no new ones come in until they are gone. */
void soft_mps_fault(soft_region *region, uint32_t client, uint32_t error);

/* The compute mode lets our slot make a context on the card. */
bool soft_mode_allows(soft_region *region, uint32_t card);

#endif
