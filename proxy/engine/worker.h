/* The structs of a service and of a worker, which the engine's files share. */
#pragma once

#include "engine.h"
#include "order.h"
#include "rails_transport.h"
#include "schedule.h"
#include "ring.h"
#include "trace.h"

/* A point in a channel's progress, as a count of the connection's triggers and as a ticket of the channel. */
typedef struct {
  uint64_t triggers; /* number of triggers of the channel's connection, as ProxycclProgress counts them */
  uint64_t end;      /* one more than the ticket of the channel's last trigger among `triggers` */
} Extent;

typedef struct Channel Channel;

struct Channel {
  ProxycclConnection *connection; /* NULL if the channel is not in use, or has a handler */
  int is_handler;
  uint64_t *remote_semaphore;
  uint64_t *flushed;
  uint64_t *completed;
  ProxycclSignals signals; /* only the engine writes the peer's word */
  /* The point after all issued triggers, and the point to publish next; valid while `unfinished` is 1. */
  Extent issued, awaited;
  Channel *next_unfinished; /* next channel in the list `unfinished` of the connection */
  int unfinished;           /* whether the channel is in the list `unfinished` */
};

typedef struct Schedule Schedule; /* schedule.c */

struct ProxycclService {
  ProxycclControl *control;
  ProxycclCounters *counters;
  ProxycclScheduleWords *words; /* NULL without schedules */
  const uint64_t *semaphores;   /* the channels' words in this rank, which peers' proxies signal */
  uint32_t worker_count;
  uint32_t current; /* number of the most recently started schedule */
  uint32_t started; /* number of schedules that were started; pairing schedule-start */
  uint32_t parts;   /* number of workers that have not completed their part of the current schedule; pairing
                       schedule-end */
  Schedule *schedules[PROXYCCL_MAX_SCHEDULES];
  ProxycclMemory memories[PROXYCCL_MEMORY_IDS];
  /* The memories' keys. Operations of `rails` hold addresses of rows. */
  uint64_t keys[PROXYCCL_MAX_MEMORIES][PROXYCCL_RAILS];
  Channel channels[PROXYCCL_MAX_CHANNELS];
};

/* The flush that a connection is timing; a connection times one flush at a time. */
typedef struct {
  const uint64_t *flushed; /* NULL if no flush is being timed */
  uint64_t awaited;        /* value that the flush stores in the flush word */
  uint64_t issued_ns;
  ProxycclCounters *counters;
} TimedFlush;

/* A worker's part of the running schedule. */
typedef struct {
  Schedule *schedule;          /* NULL if no schedule runs */
  ProxycclConnection *carrier; /* the connection whose stream copies all bundles; NULL without bundles */
  uint32_t left;               /* number of steps that are not complete */
  uint32_t idle_polls;         /* number of polls since the last progress */
  uint64_t idle_since; /* time at which the worker first found no progress; 0 if the clock has not been read since the
                          last progress */
  int shown;           /* whether the waits are published for observers */
} ScheduleRun;

enum { STOP_WHEN_DONE = 1, STOP_AT_ONCE = 2 };

struct ProxycclWorker {
  ProxycclService *service;
  ProxycclWorkerStats *stats;
  Trace trace;
  uint32_t *asleep;                       /* the word by which requests wake the thread (waking.h); NULL without a
                                             thread */
  ProxycclWorker *next;                   /* next worker in the thread's list */
  int (*make_current)(uintptr_t context); /* NULL if this worker's context is always current in the thread */
  uintptr_t context;
  Ring rings[PROXYCCL_MAX_RINGS];
  ProxycclConnection *connections[PROXYCCL_MAX_CONNECTIONS];
  TimedFlush timed[PROXYCCL_MAX_CONNECTIONS];
  uint32_t ring_count, connection_count; /* pairing worker-list */
  uint32_t current;                      /* index of the ring to visit next; kept while a Python handler runs */
  uint32_t number;                       /* the worker's number in its service; worker 0 reads the bell */
  uint32_t joined; /* the service's `started` when this worker last began a schedule; unused by worker 0 */
  uint32_t polled; /* while a schedule runs: number of the connection to poll */
  ScheduleRun run;
  int handling;  /* whether a Python handler is handling the current ring's next trigger */
  int handled;   /* whether a handler has returned and the connections have not been polled afterwards */
  int stop;      /* STOP_… flags, pairing request */
  Request drain; /* drain requests: the worker answers when nothing is left to do */
  Request pause; /* requests with odd numbers pause the worker, and requests with even numbers resume the worker */
};

enum {
  POLL_INTERVAL = 256 /* maximum number of triggers taken from a ring between two polls of the connections */
};

/* Returns the number of triggers for which a connection has room now. */
static inline uint32_t room_of(const ProxycclConnection *connection) {
  return connection->transport->ready == NULL ? POLL_INTERVAL : connection->transport->ready(connection);
}

/* Returns 1 if a transport would copy from or to memory that only a remote link can access. */
static inline int copies_remote_only(const ProxycclTransport *transport, const ProxycclMemory *own,
                                     const ProxycclMemory *peer) {
  return (own->remote_only && transport->copies & PROXYCCL_COPIES_OWN) ||
         (peer->remote_only && transport->copies & PROXYCCL_COPIES_PEER);
}

/* Fills in the error with which proxyccl_thread_run returns. `info` must have been cleared. The caller adds the
 * channel, connection or schedule. */
static inline ProxycclOutcome exit_with_error(ProxycclExitInfo *info, uint32_t code, int status, const char *reason) {
  info->code = code;
  info->status = status;
  info->reason = reason;
  return PROXYCCL_EXIT_ERROR;
}

/* Executes up to POLL_INTERVAL triggers of a ring, and adds their number to *progress. If a trigger's connection has no
 * room, the trigger and all later triggers stay in the ring, and *held is set. Returns CONTINUE, or the reason why the
 * thread must return. */
ProxycclOutcome proxyccl_worker_visit_ring(ProxycclWorker *worker, Ring *ring, ProxycclExitInfo *info,
                                           uint32_t *progress, int *held);

/* Reads the bell if no schedule runs, then advances the running schedule as far as possible. Adds the number of steps
 * that advanced to *progress, and sets *running if a schedule is still running. Returns CONTINUE, or the reason why the
 * thread must return. */
ProxycclOutcome proxyccl_worker_run_schedule(ProxycclWorker *worker, ProxycclExitInfo *info, uint32_t *progress,
                                             int *running);

/* If a schedule runs, publishes what the schedule waits for, in the statistics of the connections with awaited
 * steps. */
void proxyccl_worker_show_schedule_waits(ProxycclWorker *worker);

/* Polls every connection; while a schedule runs, a call polls only some connections. Publishes the progress of each
 * polled connection for observers. Adds the number of completions to *progress, and sets *outstanding to whether work
 * is outstanding. Returns CONTINUE, or the reason why the thread must return. */
ProxycclOutcome proxyccl_worker_poll(ProxycclWorker *worker, ProxycclExitInfo *info, uint32_t *progress,
                                     int *outstanding);
