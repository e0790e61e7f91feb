/* What moves data to one peer. A connection is one peer's: the channels to it share it.
 *
 * Every function returns 0, or a status of its own that ends the communicator; none of them blocks. What a connection
 * is given is done in order: a signal arrives behind the puts before it, and a flush word is written when they are
 * complete.
 */
#ifndef PROXYCCL_TRANSPORT_H
#define PROXYCCL_TRANSPORT_H

#include <stdint.h>

/* One memory id. For a memory longer than a window, id + i starts i windows further. */
typedef struct ProxycclMemory {
  char *base;     /* address of the window, as the transport reaches it */
  uint64_t bytes; /* from `base` to the end of the memory; 0: id not in use */
  uint64_t key;   /* the transport's: an RDMA key */
  uint32_t keyed; /* known to RDMA alone, by its key: `base` is no address for a copy of this process */
} ProxycclMemory;

typedef struct ProxycclConnection ProxycclConnection;

/* The ends of a put that a transport reaches by copies of this process. */
enum { PROXYCCL_COPIES_SOURCE = 1, PROXYCCL_COPIES_DESTINATION = 2 };

typedef struct ProxycclTransport {
  const char *name;
  uint32_t copies; /* the engine gives it no keyed memory there */
  /* Number of triggers that the connection is ready to take now, of a put, a signal and a flush each. NULL: any. The
   * engine gives it no more; after a 0 it leaves the trigger in its ring and asks again behind the next poll. */
  uint32_t (*ready)(const ProxycclConnection *self);
  /* Of one byte at least. */
  int (*put)(ProxycclConnection *self, const ProxycclMemory *dst, uint64_t dst_offset, const ProxycclMemory *src,
             uint64_t src_offset, uint64_t bytes);
  /* Stores `value` to the peer's semaphore word. */
  int (*signal)(ProxycclConnection *self, uint64_t *remote, uint64_t value);
  /* Stores `value` to the own word `flushed` when all before is complete. */
  int (*flush)(ProxycclConnection *self, uint64_t *flushed, uint64_t value);
  /* Makes progress and finds failures. Adds the number of completions to *progress. */
  int (*poll)(ProxycclConnection *self, uint32_t *progress);
  /* 1 when nothing is outstanding. */
  int (*idle)(const ProxycclConnection *self);
  void (*destroy)(ProxycclConnection *self);
} ProxycclTransport;

/* How far a connection's work has come, in triggers from the first that it was given. */
typedef struct ProxycclProgress {
  uint64_t issued;    /* by the engine, behind a run of triggers */
  uint64_t completed; /* by the transport, at a poll: so many of them, at least, are complete */
  uint64_t marked;    /* by the transport: what `completed` comes to be next */
} ProxycclProgress;

struct ProxycclConnection {
  const ProxycclTransport *transport;
  ProxycclProgress progress;
  uint32_t number; /* in its worker */
};

/* For the end of a poll, where a flush costs the transport nothing: has `completed` follow what was issued, by one flush
 * at a time. */
static inline int proxyccl_mark_progress(ProxycclConnection *self) {
  ProxycclProgress *progress = &self->progress;
  if (progress->completed < progress->marked || progress->marked == progress->issued) return 0;
  if (self->transport->ready(self) == 0) return 0;
  progress->marked = progress->issued;
  return self->transport->flush(self, &progress->completed, progress->marked);
}

#endif
