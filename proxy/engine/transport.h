/* A transport moves data between this rank and its peers. All channels to one peer share a connection.
 *
 * No function blocks. Functions that return a status return 0 for success; any other status ends the communicator. A
 * connection executes its operations in order. A signal arrives after the data of all earlier puts and gets. A flush
 * word is written once all earlier operations are complete. A get reads the data of earlier puts, and a put sends the
 * data of earlier gets. */
#pragma once

#include <stdint.h>

#include "outcome.h"
#include "runtime_table.h"

/* The table entry of one memory id. A memory longer than a window has consecutive ids, one for each window. */
typedef struct ProxycclMemory {
  char *base;           /* the window's address in the transport's operations */
  uint64_t bytes;       /* bytes from `base` to the end of the memory; 0 if the id is not in use */
  uint64_t key;         /* the memory's key, as the transport defines it; with several adapters, that of the first */
  uint32_t remote_only; /* 1 if the memory can only be accessed through a remote link, by `key`; local copies must not
                           use `base` */
  char *host;           /* the CPU's address of the window; NULL if the CPU may not access the memory */
  const uint64_t *keys; /* the memory's keys on all adapters, PROXYCCL_RAILS of them; only `rails` reads them */
} ProxycclMemory;

typedef struct ProxycclConnection ProxycclConnection;

/* Flags: the transport accesses local memory (OWN) or the peer's memory (PEER) by addresses in this process. */
enum { PROXYCCL_COPIES_OWN = 1, PROXYCCL_COPIES_PEER = 2 };

/* The addresses and the length of a put. */
typedef struct ProxycclPut {
  char *dst;
  const char *src;
  uint64_t bytes;
} ProxycclPut;

enum { PROXYCCL_MOST_PUTS = 32 }; /* maximum number of puts that one put_many makes */

typedef struct ProxycclTransport {
  const char *name;
  uint32_t copies; /* PROXYCCL_COPIES_ flags; the engine refuses `remote_only` memory of the flagged kinds */
  /* Makes a connection. `options` is the transport's options struct; objects that it names must outlive the connection.
   * On failure, returns NULL, and either sets *refused to the name of an option that is out of range, or sets errno to
   * ENOMEM. NULL in a build without the transport. */
  ProxycclConnection *(*create)(const void *options, const ProxycclRuntimeTable *runtime, const char **refused);
  /* Returns the number of triggers, each with a put, a signal and a flush, for which the connection has room now. The
   * engine issues at most this number of triggers. If there is no room, the engine leaves triggers in their ring and
   * asks again after the next poll. The pointer is NULL if there is always room. */
  uint32_t (*ready)(const ProxycclConnection *self);
  /* Moves at least one byte from local memory to the peer's memory. */
  int (*put)(ProxycclConnection *self, const ProxycclMemory *dst, uint64_t dst_offset, const ProxycclMemory *src,
             uint64_t src_offset, uint64_t bytes);
  /* Moves at least one byte from the peer's memory to local memory. */
  int (*get)(ProxycclConnection *self, const ProxycclMemory *dst, uint64_t dst_offset, const ProxycclMemory *src,
             uint64_t src_offset, uint64_t bytes);
  /* Makes at most `most_puts` puts, in any order, to the peers of any connections of this transport. For this
   * connection, the call counts as one operation. */
  int (*put_many)(ProxycclConnection *self, const ProxycclPut *puts, uint32_t count);
  /* Puts the low `bytes` bytes of a value: 1, 2, 4 or 8. The caller need not keep the value. */
  int (*put_value)(ProxycclConnection *self, const ProxycclMemory *dst, uint64_t dst_offset, uint64_t value,
                   uint32_t bytes);
  /* Sets the peer's semaphore word to `value`. `previous` is the word's current value, because a device that can only
   * add to the word adds the difference. */
  int (*signal)(ProxycclConnection *self, uint64_t *remote, uint64_t value, uint64_t previous);
  /* Stores `value` to this rank's word `flushed` when all earlier operations are complete. */
  int (*flush)(ProxycclConnection *self, uint64_t *flushed, uint64_t value);
  /* Stores `value` to this rank's word `released` when earlier puts no longer read their sources. The pointer is NULL
   * if a put may read its source until the put is complete; callers then use `flush`. */
  int (*release)(ProxycclConnection *self, uint64_t *released, uint64_t value);
  /* Advances outstanding operations. Returns the status of an operation that failed, or 0. Adds the number of
   * completions to *progress. */
  int (*poll)(ProxycclConnection *self, uint32_t *progress);
  /* Returns the provider's message about the error that ended the connection; "" if there is none. The pointer is NULL
   * if the transport has no such messages. */
  const char *(*error_text)(const ProxycclConnection *self);
  /* Returns 1 if nothing is outstanding. */
  int (*idle)(const ProxycclConnection *self);
  /* Frees the connection and its resources. The pointer is NULL if the connection owns nothing. */
  void (*destroy)(ProxycclConnection *self);
} ProxycclTransport;

/* A connection's progress: counts of triggers since its first trigger. */
typedef struct ProxycclProgress {
  uint64_t issued;    /* number of issued triggers; set by the engine after each run of triggers */
  uint64_t completed; /* number of triggers that are known to be complete; set by the transport during polls */
  uint64_t marked;    /* the next value of `completed`; set by the transport */
} ProxycclProgress;

struct ProxycclConnection {
  const ProxycclTransport *transport;
  ProxycclProgress progress;
  struct Channel *unfinished; /* the engine's list of channels with triggers that are not known to be complete */
  uint32_t most_puts;         /* maximum number of puts that a put_many of this connection makes; 0 without put_many */
  uint32_t number;            /* the connection's number in its worker */
  uint32_t worker;            /* the worker's number in its service */
};

/* Issues a flush that stores the number of issued triggers in `completed`, unless such a flush is outstanding. A
 * transport whose flushes take no time calls this function at the end of each poll. */
static inline int proxyccl_mark_progress(ProxycclConnection *self) {
  ProxycclProgress *progress = &self->progress;
  if (progress->completed < progress->marked || progress->marked == progress->issued) return 0;
  if (self->transport->ready(self) == 0) return 0;
  progress->marked = progress->issued;
  return self->transport->flush(self, &progress->completed, progress->marked);
}
