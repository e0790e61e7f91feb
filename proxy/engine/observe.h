/* What a service shows of itself: memory that other processes map, to read it at any time.
 *
 * A worker writes what is its own with plain 8-byte stores. It knows neither whether anybody looks nor how far a reader
 * has come, and waits for nobody. The channels' counters lie elsewhere (engine.h); how full a ring is shows in the
 * parity of its slots.
 */
#ifndef PROXYCCL_OBSERVE_H
#define PROXYCCL_OBSERVE_H

#include <stdint.h>

#include "proxyccl/trigger.h"

enum {
  PROXYCCL_OBSERVE_FORMAT = 1, /* of all that is here: who finds another number reads nothing */
  PROXYCCL_MAX_CONNECTIONS = 1024,
  PROXYCCL_TRACE_RECORDS = 1 << 16, /* of one worker */
  PROXYCCL_TRACE_UNTOLD = 2048      /* that it writes between two stores to `traced`, at most */
};

/* Where a channel's triggers go. */
typedef struct ProxycclChannelPlace {
  uint32_t connection; /* its number in its worker, plus one; 0: the id is not in use */
  uint16_t worker;
  uint16_t ring;
} ProxycclChannelPlace;

#define PROXYCCL_PLACE_HANDLER 0xffffffffu /* in place of a connection: a Python handler */

typedef struct ProxycclConnectionStats {
  uint64_t issued;    /* triggers that it was given … */
  uint64_t completed; /* … and how many of them, from the first, were seen to be complete */
  uint64_t errors;
  uint32_t in_use;
  uint32_t peer; /* or PROXYCCL_NO_PEER */
  char transport[16];
  uint64_t reserved[2];
} ProxycclConnectionStats;

/* A trigger as it stood in its ring, but with parity 0; or a mark, which has parity 1. A mark's word 0 is the time, of
 * CLOCK_MONOTONIC in ns; its word 1 has a ProxycclTraceMark and a number. */
typedef struct ProxycclTraceRecord {
  uint64_t word0, word1;
} __attribute__((aligned(16))) ProxycclTraceRecord;

enum { PROXYCCL_MARK_SHIFT = 60, PROXYCCL_MARK_BITS = 3 }; /* in word 1, above the number and below the parity */

typedef enum ProxycclTraceMark {
  PROXYCCL_MARK_SEEN = 0,     /* the triggers behind it come from ring number >> 48, from ticket number % 2^48 on */
  PROXYCCL_MARK_ISSUED = 1,   /* the triggers before it, back to the last mark, are issued; others may follow */
  PROXYCCL_MARK_COMPLETED = 2, /* of the triggers before it that connection number >> 32 was given, the last number %
                                  2^32 are not complete, all others are */
  PROXYCCL_MARK_HANDLED = 3    /* the handler of channel number has returned from the last trigger before it */
} ProxycclTraceMark;

typedef struct ProxycclWorkerStats {
  /* By the worker. */
  uint64_t looks;      /* at its rings and connections */
  uint64_t idle_ns;    /* that its thread found nothing to do, for any worker, in steps of some looks */
  uint64_t sleeps;     /* in that time */
  uint64_t slept_ns;   /* of that time */
  uint64_t started_ns; /* by CLOCK_MONOTONIC; 0: it has ended */
  uint64_t traced __attribute__((aligned(128))); /* records ever written; the last of them are in `records` */
  /* By an observer: until when, by CLOCK_MONOTONIC, it wants records; 0: it does not. The worker takes a time that has
   * passed away, so an observer that was killed costs nothing for long. */
  uint64_t trace_until __attribute__((aligned(128)));
  ProxycclConnectionStats connections[PROXYCCL_MAX_CONNECTIONS] __attribute__((aligned(128)));
  ProxycclTraceRecord records[PROXYCCL_TRACE_RECORDS] __attribute__((aligned(4096)));
} ProxycclWorkerStats;

/* A service's; what no worker has touched takes no memory. */
typedef struct ProxycclObserved {
  ProxycclChannelPlace channels[PROXYCCL_MAX_CHANNELS];
  ProxycclWorkerStats workers[] __attribute__((aligned(4096)));
} ProxycclObserved;

/* For observers: copies up to `room` records from number *next on, and moves *next behind the last of them. Returns how
 * many there are; *lost grows by those that were written over before. */
uint32_t proxyccl_trace_read(const ProxycclWorkerStats *stats, uint64_t *next, ProxycclTraceRecord *records,
                             uint32_t room, uint64_t *lost);

#endif
