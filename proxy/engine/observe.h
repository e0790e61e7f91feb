/* The memory of a service that observers, which are other processes, map and may read at any time.
 *
 * Each worker writes its own part with plain 8-byte stores. A worker never waits for readers. The channels' counters
 * are in other memory (ProxycclSharedWords in engine.h). The parity bits of a ring's slots show how full the ring
 * is. */
#pragma once

#include <stdint.h>

#include "proxyccl/trigger.h"

enum {
  PROXYCCL_OBSERVE_FORMAT = 6, /* version of this layout; observers that were built for another version refuse to read
                                  it */
  PROXYCCL_MAX_CONNECTIONS = 1024,
  PROXYCCL_TRACE_RECORDS = 1 << 16, /* number of records kept per worker */
  PROXYCCL_TRACE_UNPUBLISHED = 2048 /* maximum number of records that a worker writes between two stores to `traced` */
};

/* A channel's worker, ring and connection. */
typedef struct ProxycclChannelPlace {
  uint32_t connection; /* the connection's number in the worker, plus one; 0 if the channel id is not in use */
  uint16_t worker;
  uint16_t ring;
} ProxycclChannelPlace;

#define PROXYCCL_PLACE_HANDLER 0xffffffffu /* value of `connection` for a channel with a Python handler */

typedef struct ProxycclConnectionStats {
  uint64_t issued;    /* number of issued triggers and sends of schedules */
  uint64_t completed; /* number of operations that are known to be complete, of the `issued` operations */
  uint64_t errors;
  uint32_t in_use;
  uint32_t peer; /* the peer's rank, or PROXYCCL_NO_PEER */
  char transport[16];
  uint64_t schedule_wait; /* while a schedule makes no progress: a ProxycclWaitKind in the upper half and the schedule's
                             number in the lower half; otherwise 0 */
  uint16_t rails;         /* number of rails; 0 for a connection without rails */
  uint16_t rails_up;      /* number of rails in use */
  uint32_t rail_failures; /* number of failures of a rail */
} ProxycclConnectionStats;

#define PROXYCCL_SCHEDULE_WAIT_SHIFT 32 /* bit position of the ProxycclWaitKind in `schedule_wait` */

/* A record is a trigger or a mark. A trigger is recorded as it was in its ring, but with parity 0. A mark has parity 1;
 * its word 0 is the time by CLOCK_MONOTONIC in ns, and its word 1 has a ProxycclTraceMark and a number. A send of a
 * schedule is recorded as an equivalent trigger. */
typedef struct ProxycclTraceRecord {
  uint64_t word0, word1;
} __attribute__((aligned(16))) ProxycclTraceRecord;

/* The bits of word 1 that hold a ProxycclTraceMark, between the number and the parity. */
enum { PROXYCCL_MARK_SHIFT = 60, PROXYCCL_MARK_BITS = 3 };

typedef enum ProxycclTraceMark {
  PROXYCCL_MARK_SEEN = 0,      /* the triggers after the mark come from ring (number >> 48), beginning with ticket
                                  (number % 2^48) */
  PROXYCCL_MARK_ISSUED = 1,    /* the triggers between the previous mark and this one are issued */
  PROXYCCL_MARK_COMPLETED = 2, /* connection (number >> 32) has completed its triggers before the mark, except the last
                                  (number % 2^32) of them */
  PROXYCCL_MARK_HANDLED = 3,   /* the handler of the channel with this number has returned from the last trigger before
                                  the mark */
  PROXYCCL_MARK_SCHEDULE = 4,  /* the triggers after the mark are sends of the schedule with this number */
  PROXYCCL_MARK_STEP = 5       /* an event of a schedule; the number has a ProxycclTracedStep above the 32 bits of a
                                  schedule's or channel's number */
} ProxycclTraceMark;

#define PROXYCCL_TRACED_STEP_SHIFT 32

typedef enum ProxycclTracedStep {
  PROXYCCL_TRACED_BEGIN = 0,   /* the worker began its part of the schedule with this number */
  PROXYCCL_TRACED_JOINED = 1,  /* the post on the channel with this number has arrived, so the channel's peer has joined
                                  the schedule */
  PROXYCCL_TRACED_SENT = 2,    /* the oldest incomplete send on the channel with this number has completed */
  PROXYCCL_TRACED_RECEIVED = 3 /* the data of a receive on the channel with this number has arrived */
} ProxycclTracedStep;

typedef struct ProxycclWorkerStats {
  /* Written by the worker. */
  uint64_t looks;      /* number of polls of the worker's rings and connections */
  uint64_t idle_ns;    /* time in ns in which no worker of the thread had anything to do */
  uint64_t sleeps;     /* number of the thread's sleeps */
  uint64_t slept_ns;   /* time asleep */
  uint64_t wakes;      /* number of sleeps that a launch ended */
  uint64_t started_ns; /* start time by CLOCK_MONOTONIC; 0 once the worker has ended */
  /* Written by the thread's owner. */
  uint64_t thread;                               /* the system's id of the thread, in the worker's process */
  uint64_t spin_ns, yield_ns, max_sleep_ns;      /* the thread's idle policy (engine.h) */
  uint64_t traced __attribute__((aligned(128))); /* number of records written so far; `records` has the latest */
  /* Written by an observer: the time by CLOCK_MONOTONIC until which the worker writes records, or 0. The worker zeroes
   * the field after that time, so a killed observer causes no lasting cost. */
  uint64_t trace_until __attribute__((aligned(128)));
  ProxycclConnectionStats connections[PROXYCCL_MAX_CONNECTIONS] __attribute__((aligned(128)));
  ProxycclTraceRecord records[PROXYCCL_TRACE_RECORDS] __attribute__((aligned(4096)));
} ProxycclWorkerStats;

/* The observed memory of one service. Pages to which no worker has written take no memory. */
typedef struct ProxycclObserved {
  ProxycclChannelPlace channels[PROXYCCL_MAX_CHANNELS];
  ProxycclWorkerStats workers[] __attribute__((aligned(4096)));
} ProxycclObserved;

/* Observers call this function to copy up to `room` records, beginning with record number *next. Advances *next.
 * Returns the number of copied records. Adds to *lost the number of records that were overwritten before they could be
 * copied. */
uint32_t proxyccl_trace_read(const ProxycclWorkerStats *stats, uint64_t *next, ProxycclTraceRecord *records,
                             uint32_t room, uint64_t *lost);
