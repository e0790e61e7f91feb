/* The proxy engine: drains rings of triggers and issues what they ask for.
 *
 * A service has one table of memories, one of channels, and some workers, each of which drains its own rings. A
 * channel's triggers all come through one ring, so its order is kept whatever the number of workers. A thread runs
 * workers in turn, of one service or of many. The engine knows no Python, no driver and no rank; it reaches data
 * through connections (transport.h).
 */
#ifndef PROXYCCL_ENGINE_H
#define PROXYCCL_ENGINE_H

#include "observe.h"
#include "proxyccl/control.h"
#include "proxyccl/trigger.h"
#include "transport.h"

typedef struct ProxycclService ProxycclService;
typedef struct ProxycclWorker ProxycclWorker;
typedef struct ProxycclThread ProxycclThread;

/* Counters of one channel. Written by its worker alone, with plain 8-byte stores; read by anybody at any time. They
 * may lie in memory that other processes map. */
typedef struct ProxycclCounters {
  uint64_t triggers;
  uint64_t puts;
  uint64_t bytes;
  uint64_t signals;
  uint64_t flushes;
  uint64_t flush_ns;      /* from issue to completion of flushes, all together … */
  uint64_t timed_flushes; /* … of so many: those that had something to wait for, one at a time for each connection */
  uint64_t errors;
} ProxycclCounters;

enum { PROXYCCL_MAX_RINGS = 64 }; /* of one worker; and PROXYCCL_MAX_CONNECTIONS */

typedef enum ProxycclExit { /* why proxyccl_thread_run returned; the thread has let go of the worker but for a handler
                             */
                            PROXYCCL_EXIT_STOPPED = 0,   /* asked to, with its rings drained */
                            PROXYCCL_EXIT_HANDLER = 1,   /* `trigger` belongs to a Python handler; run again after it */
                            PROXYCCL_EXIT_ERROR = 2,     /* see the fields below; the worker must not be run again */
                            PROXYCCL_EXIT_ABORTED = 3,   /* the abort word was raised elsewhere, or it was abandoned */
                            PROXYCCL_EXIT_NO_WORKERS = 4 /* the thread has none to run */
} ProxycclExit;

typedef struct ProxycclExitInfo {
  ProxycclWorker *worker;
  ProxycclTrigger trigger;
  uint64_t ticket;
  uint32_t channel;
  uint32_t code;                  /* ProxycclErrorCode */
  int32_t status;                 /* the transport's or driver's own */
  const char *reason;             /* static text: why a trigger is bad, or what failed */
  ProxycclConnection *connection; /* the one that failed, or that the trigger is for; NULL: none is concerned */
} ProxycclExitInfo;

typedef struct ProxycclIdlePolicy {
  uint64_t spin_ns;      /* spin this long after the last trigger of any worker … */
  uint64_t yield_ns;     /* … then yield the core between looks for this long … */
  uint64_t max_sleep_ns; /* … then sleep between looks, for a 32nd of the time idle, up to this */
} ProxycclIdlePolicy;

ProxycclService *proxyccl_service_create(ProxycclControl *control, ProxycclCounters *counters);
void proxyccl_service_destroy(ProxycclService *service); /* its workers have returned */

/* Table entries may be set while workers run, before a trigger names them; otherwise while its workers are paused. The
 * last arguments are the entry's fields. */
int proxyccl_service_set_memory(ProxycclService *service, uint32_t id, char *base, uint64_t bytes, uint64_t key,
                                uint32_t keyed);
int proxyccl_service_set_channel(ProxycclService *service, uint32_t id, ProxycclConnection *connection,
                                 uint64_t *remote_semaphore, uint64_t *flushed);
int proxyccl_service_set_handler(ProxycclService *service, uint32_t id, uint64_t *flushed);

/* `stats` are zeroed and outlive the worker. */
ProxycclWorker *proxyccl_worker_create(ProxycclService *service, ProxycclWorkerStats *stats);
void proxyccl_worker_destroy(ProxycclWorker *worker);
/* Also while it runs. `slots` and `tail` as in ProxycclFifo. */
int proxyccl_worker_add_ring(ProxycclWorker *worker, ProxycclTrigger *slots, uint64_t *tail, uint32_t size_log2);
int proxyccl_worker_add_connection(ProxycclWorker *worker, ProxycclConnection *connection);
/* Before it runs: what its thread calls, where it runs workers of several devices, before this one's connections are
 * used (cuCtxSetCurrent, hipSetDevice). */
void proxyccl_worker_set_context(ProxycclWorker *worker, int (*make_current)(uintptr_t context), uintptr_t context);
/* From any thread: its thread lets go of it when the rings are empty and nothing is outstanding. */
void proxyccl_worker_stop(ProxycclWorker *worker);
/* The same, but at once and whatever there is. */
void proxyccl_worker_abandon(ProxycclWorker *worker);
/* Asks a running worker to tell when its rings were seen empty and nothing was outstanding. Returns the request's
 * number; proxyccl_worker_drained() gives that of the last one told of. */
uint32_t proxyccl_worker_drain(ProxycclWorker *worker);
uint32_t proxyccl_worker_drained(const ProxycclWorker *worker);
/* Keeps a worker from its rings and from the service's tables, until proxyccl_worker_resume(): its entries can then be
 * changed whatever its triggers name. Returns the request's number; it holds when proxyccl_worker_paused() gives that.
 */
uint32_t proxyccl_worker_pause(ProxycclWorker *worker);
uint32_t proxyccl_worker_paused(const ProxycclWorker *worker);
void proxyccl_worker_resume(ProxycclWorker *worker);
/* Ends the trigger that PROXYCCL_EXIT_HANDLER gave, before the thread is run again. */
void proxyccl_worker_handled(ProxycclWorker *worker);

ProxycclThread *proxyccl_thread_create(const ProxycclIdlePolicy *idle);
void proxyccl_thread_destroy(ProxycclThread *thread);
/* Hands a worker over, also while the thread runs. No other thread may have it. */
void proxyccl_thread_add_worker(ProxycclThread *thread, ProxycclWorker *worker);
/* Runs its workers in turn until one of them has something to tell. The caller's thread stays inside, without the GIL.
 */
ProxycclExit proxyccl_thread_run(ProxycclThread *thread, ProxycclExitInfo *info);

/* Drains a ring and nothing else: what the ring itself allows, for the benchmark to compare the engine with. Returns
 * when `count` triggers were taken, or, with fewer, after timeout_ns. */
uint64_t proxyccl_bare_drain(ProxycclTrigger *slots, uint64_t *tail, uint32_t size_log2, uint64_t count,
                             uint64_t timeout_ns);
/* Fills a ring from one CPU thread, `count` copies of `trigger`. Returns the number pushed before timeout_ns. */
uint64_t proxyccl_bare_produce(ProxycclTrigger *slots, const uint64_t *tail, uint32_t size_log2, uint64_t first_ticket,
                               uint64_t count, ProxycclTrigger trigger, uint64_t timeout_ns);

#endif
