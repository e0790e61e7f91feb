/* Queues for transports that can't issue every operation immediately. A connection has a queue of operations that the
 * transport can't issue yet, and a queue of flushes that wait until all earlier operations are complete. Both queues
 * are first in, first out. */
#pragma once

#include <stddef.h>

#include "order.h"
#include "transport.h"

enum {
  OPERATIONS = 256, /* maximum number of operations in a queue; a power of two */
  PER_TRIGGER = 3,  /* maximum number of operations of a trigger: a put or get, a signal and a flush */
  FLUSHES = 256     /* maximum number of flushes in a queue; a power of two */
};

typedef enum { PUT, GET, VALUE, SIGNAL, FLUSH, RELEASE } OperationKind; /* only staged transports use RELEASE */

typedef struct {
  OperationKind kind;
  uint64_t source, destination; /* addresses of a put's or get's bytes that are not issued yet; a signal's `destination`
                                   is its word, and `source` the word's value before the signal */
  uint64_t bytes;               /* number of bytes that are not issued yet; 0 for a signal */
  uint64_t source_host; /* for a put: the CPU's address of the source bytes that are not issued yet; 0 if the CPU may
                           not access the source */
  uint64_t source_key, destination_key;
  uint64_t *flushed;
  uint64_t value; /* the value that a put of a value, a signal or a flush stores */
} Operation;

typedef struct {
  uint64_t first, last; /* the waiting operations are numbered from `first` to `last` - 1 */
  Operation entries[OPERATIONS];
} OperationQueue;

/* Returns the number of triggers for which the queue has room, as a transport's `ready` does. */
static inline uint32_t operations_ready(const OperationQueue *queue) {
  return (uint32_t)(OPERATIONS - (queue->last - queue->first)) / PER_TRIGGER;
}

/* Returns the operation to issue next, or NULL if none waits. */
static inline Operation *operations_next(OperationQueue *queue) {
  return queue->first == queue->last ? NULL : &queue->entries[queue->first % OPERATIONS];
}

static inline void operations_pop(OperationQueue *queue) { ++queue->first; }

/* Appends an operation to a queue that has room. Returns a pointer to the operation, so that the caller can set the
 * other fields. Copying a struct into the queue would be slower, because the copy's wide loads would wait for the
 * narrow stores just before them. */
static inline Operation *operations_push(OperationQueue *queue, OperationKind kind) {
  Operation *operation = &queue->entries[queue->last++ % OPERATIONS];
  operation->kind = kind;
  return operation;
}

static inline void operations_push_transfer(OperationQueue *queue, OperationKind kind, const ProxycclMemory *dst,
                                            uint64_t dst_offset, const ProxycclMemory *src, uint64_t src_offset,
                                            uint64_t bytes) {
  Operation *operation = operations_push(queue, kind);
  operation->source = (uintptr_t)src->base + src_offset;
  operation->destination = (uintptr_t)dst->base + dst_offset;
  operation->bytes = bytes;
  operation->source_host = src->host == NULL ? 0 : (uintptr_t)src->host + src_offset;
  operation->source_key = src->key;
  operation->destination_key = dst->key;
}

static inline void operations_push_flush(OperationQueue *queue, OperationKind kind, uint64_t *flushed, uint64_t value) {
  Operation *operation = operations_push(queue, kind);
  operation->flushed = flushed;
  operation->value = value;
}

/* Removes issued bytes from the start of a put or get. */
static inline void operation_advance(Operation *transfer, uint64_t bytes) {
  transfer->source += bytes;
  if (transfer->source_host != 0) transfer->source_host += bytes;
  transfer->destination += bytes;
  transfer->bytes -= bytes;
}

typedef struct {
  uint64_t *flushed;
  uint64_t value;
  uint64_t behind; /* number of the last request that was issued before the flush */
} Flush;

typedef struct {
  uint64_t first, last; /* the waiting flushes are numbered from `first` to `last` - 1 */
  Flush entries[FLUSHES];
} FlushQueue;

static inline int flushes_have_room(const FlushQueue *queue) { return queue->last - queue->first < FLUSHES; }

/* Stores a flush's word immediately if all `issued` requests are complete; otherwise queues the flush, whose word
 * flushes_complete stores later. Returns 1, or 0 if the queue is full. */
static inline int flushes_push(FlushQueue *queue, const Operation *flush, uint64_t issued, uint64_t completed) {
  if (issued == completed) {
    word_store(flush->flushed, flush->value);
    return 1;
  }
  if (!flushes_have_room(queue)) return 0;
  queue->entries[queue->last++ % FLUSHES] = (Flush){flush->flushed, flush->value, issued};
  return 1;
}

/* Stores the words of all flushes whose earlier requests are complete. */
static inline void flushes_complete(FlushQueue *queue, uint64_t completed) {
  for (; queue->first != queue->last; ++queue->first) {
    const Flush *flush = &queue->entries[queue->first % FLUSHES];
    if (flush->behind > completed) return;
    word_store(flush->flushed, flush->value);
  }
}

/* A connection with a queue of operations and a queue of flushes. If a transport queues operations, the first member of
 * its connection struct is a QueuedConnection. */
typedef struct {
  ProxycclConnection base;
  int (*issue)(ProxycclConnection *self); /* issues queued operations in order while there is room */
  uint64_t signal_key;                    /* key of the peer's semaphore words */
  int adds;                               /* 1 if a signal adds to the semaphore word, 0 if it stores a value */
  int no_reads, no_values;                /* status that refuses a get, or a put of a value; 0 if the operation is
                                             supported */
  OperationQueue operations;
  FlushQueue flushes;
} QueuedConnection;

/* A transport whose connections begin with a QueuedConnection may use the functions below. */
uint32_t queued_ready(const ProxycclConnection *base);
int queued_put(ProxycclConnection *base, const ProxycclMemory *dst, uint64_t dst_offset, const ProxycclMemory *src,
               uint64_t src_offset, uint64_t bytes);
int queued_get(ProxycclConnection *base, const ProxycclMemory *dst, uint64_t dst_offset, const ProxycclMemory *src,
               uint64_t src_offset, uint64_t bytes);
int queued_put_value(ProxycclConnection *base, const ProxycclMemory *dst, uint64_t dst_offset, uint64_t value,
                     uint32_t bytes);
int queued_signal(ProxycclConnection *base, uint64_t *remote, uint64_t value, uint64_t previous);
int queued_flush(ProxycclConnection *base, uint64_t *flushed, uint64_t value);
