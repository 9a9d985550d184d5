/* softgpu.h - what the commands of the tool share. */
#ifndef SOFTGPU_H
#define SOFTGPU_H

#include "../../state/clock.h"
#include "../../state/events.h"
#include "../../state/ledger.h"
#include "../../state/lock.h"
#include "../../state/models.h"
#include "../../state/objects.h"
#include "../../state/region.h"
#include "../../state/sched.h"
#include "../units.h"

enum { EXIT_OK = 0, EXIT_FAILED = 1, EXIT_USAGE = 2 };

int command_init(int argc, char **argv);
int command_destroy(int argc, char **argv);
int command_show(int argc, char **argv);
int command_set(int argc, char **argv);
int command_fault(int argc, char **argv);
int command_watch(int argc, char **argv);
int command_models(int argc, char **argv);

/* Says on stderr what went wrong, with "softgpu: " in front, and returns code. */
int complain(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Opens a root's state as an observer and takes the lock. */
int root_open(const char *root, soft_region *region);
void root_close(soft_region *region);

/* nodes.c: makes the stand-in device nodes of a root and writes their numbers into the cards.
 * numbers: nvidiactl, nvidia-uvm, nvidia-uvm-tools. */
typedef struct { uint32_t major, minor; } device_number;
int make_nodes(const char *root, soft_header *header, device_number numbers[3]);

/* The branches that have a library, lowest first, ended by 0, and what CUDA they bring. */
typedef struct { uint32_t branch, cuda_version; } branch_row;
extern const branch_row branches[];

#endif
