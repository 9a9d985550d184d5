/*
 * deferred.h - what the card does later than at the call.
 *
 * The bytes of copies, fills and kernels change when the call is made, which
 * is an order that streams allow, as long as nothing in a stream waits for the
 * host. A host function and a wait for a value in memory do: each is a gate in
 * the queue, and while there is a gate, whatever is queued after it changes
 * bytes only when its entry is done.
 *
 * Host functions run in a thread of the driver's own, which there is from the
 * first one on. All functions want the process lock.
 */
#ifndef SOFT_DEFERRED_H
#define SOFT_DEFERRED_H

#include "operation.h"

/* Queues an entry with the operation's effect, at once or later. */
CUresult deferred_effect(const stream *on, const operation *op, soft_entry entry, uint32_t *queue, uint64_t *seq);

/* True while effects have to wait for their entries. */
bool deferred_any(void);

/* Queues a gate: HOST, or BATCH_MEM_OP with a wait in it. */
CUresult deferred_gate(const stream *on, const operation *op, uint32_t *queue, uint64_t *seq);

/* Queues the free of memory that no pool has: what went before in the stream may still use it, gate or no gate. */
CUresult deferred_free(const stream *on, const operation *op);
/* Whether it is to be freed so: nobody else may. */
bool deferred_freed(CUdeviceptr pointer);

/* Does what is due, and opens gates whose value has come. */
void deferred_run(void);

#endif
