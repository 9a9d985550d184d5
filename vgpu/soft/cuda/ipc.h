/* ipc.h - events that other processes record, ask and wait for too. All under the process lock. */
#ifndef SOFT_IPC_H
#define SOFT_IPC_H

#include "driver.h"

/* Says in the state where a shared event was recorded. */
void ipc_event_recorded(const event *e);
/* A shared event's last record, by whomever: the queue, the stream and the entry. False: done, or never recorded. */
bool ipc_event_pending(const event *e, uint32_t *queue, uint32_t *stream, uint64_t *seq);
void ipc_event_drop(event *e);

#endif
