/* The proxy engine: drains rings of triggers and issues their operations.
 *
 * A service has a table of memories, a table of channels, and workers, each of which drains its own rings. All triggers
 * of a channel go through one ring, so they stay in order with any number of workers. A thread runs the workers of one
 * or more services in a loop. The engine does not know about Python, drivers or ranks; it moves data through
 * connections (transport.h).
 *
 * service.c has the tables, and the requests that other threads make to a worker. thread.c runs workers by calling the
 * functions of schedule.c, drain.c and poll.c. */
#pragma once

#include "observe.h"
#include "outcome.h"
#include "schedule.h"
#include "proxyccl/control.h"
#include "proxyccl/trigger.h"
#include "transport.h"

typedef struct ProxycclService ProxycclService;
typedef struct ProxycclWorker ProxycclWorker;
typedef struct ProxycclThread ProxycclThread;

/* Counters of one channel. Only the channel's worker writes the counters; any process may read them at any time. The
 * counters that most triggers touch share a cache line. */
typedef struct ProxycclCounters {
  uint64_t triggers;
  uint64_t puts;
  uint64_t bytes; /* bytes of puts and gets */
  uint64_t signals;
  uint64_t flushes;
  uint64_t flush_ns;      /* sum over the timed flushes of the time from issue to completion */
  uint64_t timed_flushes; /* number of timed flushes; a connection times one flush at a time, and only if it waits */
  uint64_t errors;
  uint64_t gets;
} __attribute__((aligned(128))) ProxycclCounters;

/* The words of a service that kernels, streams, network adapters or other processes access. Each array is indexed by
 * channel id or by memory id. */
typedef struct ProxycclSharedWords {
  ProxycclCounters counters[PROXYCCL_MAX_CHANNELS];
  uint64_t flushed[PROXYCCL_MAX_CHANNELS];       /* one more than the ticket of the last completed flush */
  uint64_t completed[PROXYCCL_MAX_CHANNELS];     /* one more than the ticket up to which all triggers of the channel are
                                                    complete */
  uint64_t memory_limits[PROXYCCL_MAX_MEMORIES]; /* bytes from the id's first byte to the end of the memory; 0 if the id
                                                    is not in use */
  ProxycclScheduleWords schedule;
} ProxycclSharedWords;

enum { PROXYCCL_MAX_RINGS = 64 }; /* maximum number of rings of one worker */

typedef struct ProxycclExitInfo {
  ProxycclWorker *worker;
  ProxycclTrigger trigger;
  uint32_t channel;
  uint32_t code;                  /* ProxycclErrorCode */
  int32_t status;                 /* status that the transport or the driver returned */
  const char *reason;             /* static text: the reason of the refusal or the failure */
  ProxycclConnection *connection; /* the connection that failed or whose trigger was refused; NULL if the error concerns
                                     no connection */
  uint32_t schedule;              /* number of the schedule that failed; 0 if the error concerns no schedule */
  uint32_t wait;                  /* after a time-out: what the schedule waited for (ProxycclWaitKind) */
  uint32_t of_source; /* 1 if a transfer was refused because of its source, 0 if because of its destination */
} ProxycclExitInfo;

typedef struct ProxycclIdlePolicy {
  uint64_t spin_ns;  /* the thread polls for this long after the last trigger of any worker, at first without yielding
                        its core */
  uint64_t yield_ns; /* then the thread yields its core between polls, for this long */
  uint64_t max_sleep_ns; /* then the thread sleeps between polls, each time for 1/32 of the idle time, but at most this
                            long */
} ProxycclIdlePolicy;

ProxycclService *proxyccl_service_create(ProxycclControl *control, ProxycclCounters *counters);
void proxyccl_service_destroy(ProxycclService *service); /* the service's workers must have ended */

/* The counts of a channel's two words, which only the engine knows. A service that takes over the channel of an
 * earlier service continues from these counts; a new channel begins with zeros. */
typedef struct ProxycclSignals {
  uint64_t sent;  /* last value sent to the peer's word: a count of signals, or a post */
  uint64_t taken; /* number of signals in this rank's word that schedules have consumed, or the last post that was
                     read */
} ProxycclSignals;

/* Each of the next three functions sets the table entry of `id`, and returns 0, or EINVAL if `id` is out of range. If
 * kernels may push triggers that name `id`, the service's workers must be paused during the call. `keys` are the
 * memory's keys on PROXYCCL_RAILS adapters. `flushed` and `completed` are the channel's words (handles.h). */
int proxyccl_service_set_memory(ProxycclService *service, uint32_t id, char *base, uint64_t bytes, const uint64_t *keys,
                                uint32_t remote_only, char *host);
int proxyccl_service_set_channel(ProxycclService *service, uint32_t id, ProxycclConnection *connection,
                                 uint64_t *remote_semaphore, uint64_t *flushed, uint64_t *completed,
                                 ProxycclSignals signals);
int proxyccl_service_set_handler(ProxycclService *service, uint32_t id, uint64_t *flushed, uint64_t *completed);
/* Returns the signals of a channel. Nothing may be outstanding on the channel's connection. */
ProxycclSignals proxyccl_service_signals(const ProxycclService *service, uint32_t id);

/* Reads, with acquire order, a word that a peer's proxy signals: data that was put before the signal is visible. */
uint64_t proxyccl_word_acquire(const uint64_t *word);

/* Lets streams start schedules. Call this function before workers run. `semaphores` has this rank's words that peers
 * signal, indexed by channel id. */
void proxyccl_service_set_schedule_words(ProxycclService *service, ProxycclScheduleWords *words,
                                         const uint64_t *semaphores);
/* After a failure, sets `words` so that streams stop waiting for schedules. `words` may be NULL. */
void proxyccl_schedule_words_end_waits(ProxycclScheduleWords *words);
/* Adds a schedule. Workers may run during the call. Returns 0, EINVAL for an id that is out of range, EEXIST if the
 * number is in use, or ENOMEM. */
int proxyccl_service_add_schedule(ProxycclService *service, uint32_t number, const ProxycclScheduleSteps *steps);
/* Removes a schedule that no stream will start again. Returns 0, or EBUSY while the schedule runs. */
int proxyccl_service_remove_schedule(ProxycclService *service, uint32_t number);

/* Creates a worker. `stats` must be zeroed, and must stay valid until the worker has ended. All workers of a service
 * must be created before any of them runs. */
ProxycclWorker *proxyccl_worker_create(ProxycclService *service, ProxycclWorkerStats *stats);
void proxyccl_worker_destroy(ProxycclWorker *worker);
/* Each of the next two functions may be called while the worker runs, and returns 0, or ENOSPC if the worker has the
 * maximum number of rings or connections. `slots` and `tail` are fields of a ProxycclFifo; the worker takes triggers
 * from the ticket `*tail` on. */
int proxyccl_worker_add_ring(ProxycclWorker *worker, ProxycclTrigger *slots, uint64_t *tail, uint32_t size_log2);
int proxyccl_worker_add_connection(ProxycclWorker *worker, ProxycclConnection *connection);
/* Sets the function that makes the worker's device current (cuCtxSetCurrent, hipSetDevice). If a thread runs workers of
 * several devices, each worker needs this function. Call this function before the worker runs. */
void proxyccl_worker_set_context(ProxycclWorker *worker, int (*make_current)(uintptr_t context), uintptr_t context);
/* Ends the worker once its rings are empty and nothing is outstanding. Any thread may call this function. */
void proxyccl_worker_stop(ProxycclWorker *worker);
/* Ends the worker as soon as its thread sees the request, even if the worker's rings hold triggers. Any thread may call
 * this. */
void proxyccl_worker_abandon(ProxycclWorker *worker);
/* Asks a running worker to report when its rings are empty and nothing is outstanding. Returns the request's number;
 * proxyccl_worker_drained() returns the number of the last answered request. */
uint32_t proxyccl_worker_drain(ProxycclWorker *worker);
uint32_t proxyccl_worker_drained(const ProxycclWorker *worker);
/* Pauses a worker until proxyccl_worker_resume(). A paused worker uses neither its rings nor the service's tables, so
 * that table entries can change. Returns the request's number; the worker is paused once proxyccl_worker_paused()
 * returns that number. */
uint32_t proxyccl_worker_pause(ProxycclWorker *worker);
uint32_t proxyccl_worker_paused(const ProxycclWorker *worker);
void proxyccl_worker_resume(ProxycclWorker *worker);
/* Removes the trigger that PROXYCCL_EXIT_HANDLER reported from the ring. Call this function after the handler and
 * before the thread runs again. */
void proxyccl_worker_handled(ProxycclWorker *worker);

/* Creates a thread. `asleep` is a zeroed word that threads of this and other processes use to wake the thread
 * (waking.h). */
ProxycclThread *proxyccl_thread_create(const ProxycclIdlePolicy *idle, uint32_t *asleep);
void proxyccl_thread_destroy(ProxycclThread *thread);
/* Changes the thread's idle policy. Any thread may call this function. */
void proxyccl_thread_set_idle(ProxycclThread *thread, const ProxycclIdlePolicy *idle);
/* Adds a worker that no other thread runs. The thread may be running during the call. */
void proxyccl_thread_add_worker(ProxycclThread *thread, ProxycclWorker *worker);
/* Runs the thread's workers in a loop until one of them exits or needs a handler. The caller must not hold the GIL. */
ProxycclOutcome proxyccl_thread_run(ProxycclThread *thread, ProxycclExitInfo *info);
/* Lets other threads run this thread's workers (proxyccl_thread_help). Call this function before the thread runs. This
 * function calls `add`, which announces the thread to helpers; proxyccl_thread_destroy calls `remove`, which must
 * return only when no helper is running the thread's workers. */
void proxyccl_thread_take_help(ProxycclThread *thread, void (*add)(int (*help)(void *thread, int waits), void *thread),
                               void (*remove)(void *thread));
/* Runs each of the thread's workers once, unless another thread is running them. If `waits` is 0, runs the workers only
 * if a ring has triggers; a caller that waits for the workers' results sets `waits` to 1. Returns 1 if the workers made
 * progress. If a worker exits or needs a handler, proxyccl_thread_run reports this event later. */
int proxyccl_thread_help(ProxycclThread *thread, int waits);
