/* The drain loop, its tables and its idling. See engine.h for the contract. */
#include "engine.h"

#include <errno.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "ring.h"
#include "trace.h"

enum {
  RELEASE_BATCH = 64,   /* triggers between two stores to a tail: a store to a line that a GPU polls is not free */
  POLL_INTERVAL = 256,  /* triggers between two polls of the connections under load: each asks the driver */
  LOOKS_PER_CLOCK = 16, /* looks at the rings between two at the clock, which takes as long as several looks */
  SLEEP_PART = 32,      /* an idle thread sleeps for this part of the time that it has been idle */
  OUTSTANDING_SLEEP_NS = 50000 /* longest sleep while something is: its completion may be what the next waits for */
};

typedef struct {
  ProxycclConnection *connection; /* NULL: not in use, or a handler's */
  int is_handler;
  uint64_t *remote_semaphore;
  uint64_t *flushed;
  uint64_t outbound; /* signals sent: the engine is the only writer of the peer's word, so the count is kept here */
} Channel;

struct ProxycclService {
  ProxycclControl *control;
  ProxycclCounters *counters;
  ProxycclMemory memories[PROXYCCL_MAX_MEMORIES];
  Channel channels[PROXYCCL_MAX_CHANNELS];
};

enum { STOP_WHEN_DONE = 1, STOP_AT_ONCE = 2 };
#define NO_CONTEXT UINTPTR_MAX /* 0 is a device where contexts are known by number */

/* A flush that is being timed; one a connection. */
typedef struct {
  const uint64_t *flushed; /* NULL: none is */
  uint64_t awaited;        /* the value that tells of its completion */
  uint64_t seen_ns;
  ProxycclCounters *counters;
} TimedFlush;

struct ProxycclWorker {
  ProxycclService *service;
  ProxycclWorkerStats *stats;
  Trace trace;
  ProxycclWorker *next;                   /* of its thread's, or of those that are handed over to it */
  int (*make_current)(uintptr_t context); /* NULL: the thread's context is this worker's for good */
  uintptr_t context;
  Ring rings[PROXYCCL_MAX_RINGS];
  ProxycclConnection *connections[PROXYCCL_MAX_CONNECTIONS];
  TimedFlush timed[PROXYCCL_MAX_CONNECTIONS];
  /* Stored with release after the entry, so that entries can be added under a running worker. */
  uint32_t ring_count, connection_count;
  uint32_t current; /* ring to look at first; fair over returns to Python */
  int handling;     /* the current ring's next trigger is with a Python handler */
  int stop;
  uint32_t drain_asked, drained; /* numbers of requests to tell when all is done */
  uint32_t pause_asked, paused;  /* numbers of requests to pause, odd, and to go on, even */
};

struct ProxycclThread {
  ProxycclIdlePolicy idle;
  ProxycclWorker *added;       /* a stack: pushed to by any thread, taken whole by this one */
  ProxycclWorker *first, **at; /* its workers, and the place of the one whose turn it is */
  uintptr_t context;           /* the one that is current, as far as workers have made it so */
};

static uint64_t now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void cpu_relax(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

ProxycclService *proxyccl_service_create(ProxycclControl *control, ProxycclCounters *counters) {
  ProxycclService *service = calloc(1, sizeof *service);
  if (service == NULL) return NULL;
  service->control = control;
  service->counters = counters;
  return service;
}

void proxyccl_service_destroy(ProxycclService *service) { free(service); }

int proxyccl_service_set_memory(ProxycclService *service, uint32_t id, char *base, uint64_t bytes, uint64_t key,
                                uint32_t keyed) {
  if (id >= PROXYCCL_MAX_MEMORIES) return EINVAL;
  service->memories[id] = (ProxycclMemory){base, bytes, key, keyed};
  return 0;
}

int proxyccl_service_set_channel(ProxycclService *service, uint32_t id, ProxycclConnection *connection,
                                 uint64_t *remote_semaphore, uint64_t *flushed) {
  if (id >= PROXYCCL_MAX_CHANNELS) return EINVAL;
  service->channels[id] = (Channel){connection, 0, remote_semaphore, flushed, 0};
  return 0;
}

int proxyccl_service_set_handler(ProxycclService *service, uint32_t id, uint64_t *flushed) {
  if (id >= PROXYCCL_MAX_CHANNELS) return EINVAL;
  service->channels[id] = (Channel){NULL, 1, NULL, flushed, 0};
  return 0;
}

ProxycclWorker *proxyccl_worker_create(ProxycclService *service, ProxycclWorkerStats *stats) {
  ProxycclWorker *worker = calloc(1, sizeof *worker);
  if (worker == NULL) return NULL;
  worker->service = service;
  worker->stats = stats;
  stats->started_ns = now_ns();
  return worker;
}

void proxyccl_worker_destroy(ProxycclWorker *worker) { free(worker); }

int proxyccl_worker_add_ring(ProxycclWorker *worker, ProxycclTrigger *slots, uint64_t *tail, uint32_t size_log2) {
  if (worker->ring_count == PROXYCCL_MAX_RINGS) return ENOSPC;
  worker->rings[worker->ring_count] = (Ring){slots, tail, size_log2, 0, 0};
  __atomic_store_n(&worker->ring_count, worker->ring_count + 1, __ATOMIC_RELEASE);
  return 0;
}

int proxyccl_worker_add_connection(ProxycclWorker *worker, ProxycclConnection *connection) {
  if (worker->connection_count == PROXYCCL_MAX_CONNECTIONS) return ENOSPC;
  connection->number = worker->connection_count;
  worker->connections[worker->connection_count] = connection;
  __atomic_store_n(&worker->connection_count, worker->connection_count + 1, __ATOMIC_RELEASE);
  return 0;
}

void proxyccl_worker_set_context(ProxycclWorker *worker, int (*make_current)(uintptr_t context), uintptr_t context) {
  worker->make_current = make_current;
  worker->context = context;
}

uint32_t proxyccl_worker_drain(ProxycclWorker *worker) {
  return __atomic_add_fetch(&worker->drain_asked, 1, __ATOMIC_RELEASE);
}

uint32_t proxyccl_worker_drained(const ProxycclWorker *worker) {
  return __atomic_load_n(&worker->drained, __ATOMIC_ACQUIRE);
}

void proxyccl_worker_stop(ProxycclWorker *worker) {
  __atomic_fetch_or(&worker->stop, STOP_WHEN_DONE, __ATOMIC_RELEASE);
}

void proxyccl_worker_abandon(ProxycclWorker *worker) {
  __atomic_fetch_or(&worker->stop, STOP_AT_ONCE, __ATOMIC_RELEASE);
}

uint32_t proxyccl_worker_pause(ProxycclWorker *worker) {
  return __atomic_add_fetch(&worker->pause_asked, 1, __ATOMIC_RELAXED);
}

/* The acquire pairs with the release in take_turn: what the worker read from the tables, it read before they change. */
uint32_t proxyccl_worker_paused(const ProxycclWorker *worker) {
  return __atomic_load_n(&worker->paused, __ATOMIC_ACQUIRE);
}

/* The release pairs with the acquire in take_turn: the worker sees the changes. */
void proxyccl_worker_resume(ProxycclWorker *worker) { __atomic_add_fetch(&worker->pause_asked, 1, __ATOMIC_RELEASE); }

ProxycclThread *proxyccl_thread_create(const ProxycclIdlePolicy *idle) {
  ProxycclThread *thread = calloc(1, sizeof *thread);
  if (thread == NULL) return NULL;
  thread->idle = *idle;
  thread->at = &thread->first;
  thread->context = NO_CONTEXT;
  return thread;
}

void proxyccl_thread_destroy(ProxycclThread *thread) { free(thread); }

/* The release pairs with the acquire in take_added: the thread sees the worker's rings. */
void proxyccl_thread_add_worker(ProxycclThread *thread, ProxycclWorker *worker) {
  worker->next = __atomic_load_n(&thread->added, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(&thread->added, &worker->next, worker, 1, __ATOMIC_RELEASE, __ATOMIC_RELAXED)) {}
}

/* Only this worker writes these; a plain add would do but for readers in other threads, who must not see a torn
 * value. */
static void count(uint64_t *counter, uint64_t amount) {
  __atomic_store_n(counter, __atomic_load_n(counter, __ATOMIC_RELAXED) + amount, __ATOMIC_RELAXED);
}

static ProxycclExit fail(ProxycclExitInfo *info, uint32_t code, int status, const char *reason) {
  info->code = code;
  info->status = status;
  info->reason = reason;
  return PROXYCCL_EXIT_ERROR;
}

/* Which of its bounds a refused transfer breaks. */
static const char *refusal(const ProxycclMemory *dst, const ProxycclMemory *src, uint64_t src_offset, uint64_t size) {
  if (src->bytes == 0) return "the source memory id is not registered";
  if (dst->bytes == 0) return "the destination memory id is not registered";
  if (src_offset + size > src->bytes) return "the transfer leaves the source memory";
  return "the transfer leaves the destination memory";
}

#define CONTINUE ((ProxycclExit) - 1)
/* A route stays in registers only where nobody is given its address. */
#define ALWAYS_INLINE inline __attribute__((always_inline))

/* What a run of triggers has in common. A kernel's triggers mostly differ in offsets and sizes alone, so what the rest
 * of word 1 names is looked up when it changes. The tables' entries are read again for each trigger. */
typedef struct {
  uint64_t names; /* word 1 above the destination's offset, but for the parity */
  uint32_t op;
  Channel *channel;
  const ProxycclMemory *dst, *src;
  ProxycclCounters *counters;
  uint64_t triggers, bytes; /* not yet in `counters`: a sum in a register costs less than one in memory */
  uint32_t first;           /* how many triggers the visit had taken when the run began */
} Route;

static ALWAYS_INLINE void publish_counts(Route *route) {
  if (route->triggers == 0) return;
  count(&route->counters->triggers, route->triggers);
  if (route->op & PROXYCCL_OP_DATA) { /* every trigger of the run is a put, or none */
    count(&route->counters->puts, route->triggers);
    count(&route->counters->bytes, route->bytes);
  }
  route->triggers = route->bytes = 0;
}

/* At the end of a run, of which the last was number `taken` of the visit. */
static ALWAYS_INLINE void end_run(Route *route, uint32_t taken) {
  publish_counts(route);
  if (taken != route->first) route->channel->connection->progress.issued += taken - route->first;
  route->first = taken;
}

static uint64_t names_of(ProxycclTrigger trigger) { return trigger.word1 << 1 >> (PROXYCCL_SRC_MEMORY_SHIFT + 1); }

/* 1 if a transport would copy from or to what is no address of this process. */
static int copies_keyed(const ProxycclTransport *transport, const Route *route) {
  return (route->src->keyed && transport->copies & PROXYCCL_COPIES_SOURCE) ||
         (route->dst->keyed && transport->copies & PROXYCCL_COPIES_DESTINATION);
}

/* CONTINUE, or the reason to return to Python. */
static ALWAYS_INLINE ProxycclExit find_route(ProxycclService *service, ProxycclTrigger trigger, Route *route,
                                             ProxycclExitInfo *info) {
  const uint32_t id = trigger_field(trigger.word1, PROXYCCL_CHANNEL_SHIFT, PROXYCCL_CHANNEL_BITS);
  route->op = trigger_field(trigger.word1, PROXYCCL_OP_SHIFT, PROXYCCL_OP_BITS);
  route->channel = &service->channels[id];
  route->counters = &service->counters[id];
  route->src = &service->memories[trigger_field(trigger.word1, PROXYCCL_SRC_MEMORY_SHIFT, PROXYCCL_MEMORY_BITS)];
  route->dst = &service->memories[trigger_field(trigger.word1, PROXYCCL_DST_MEMORY_SHIFT, PROXYCCL_MEMORY_BITS)];
  if (route->channel->is_handler) return PROXYCCL_EXIT_HANDLER;
  if (route->channel->connection == NULL)
    return fail(info, PROXYCCL_ERROR_BAD_TRIGGER, 0, "the channel id is not in use");
  if (route->op == PROXYCCL_OP_CUSTOM)
    return fail(info, PROXYCCL_ERROR_BAD_TRIGGER, 0, "the trigger carries no operation");
  if (route->op & PROXYCCL_OP_DATA && copies_keyed(route->channel->connection->transport, route))
    return fail(info, PROXYCCL_ERROR_BAD_TRIGGER, 0, "RDMA alone reaches a memory that it names, and the channel copies");
  route->names = names_of(trigger);
  return CONTINUE;
}

/* Times a flush that has something to wait for, and costs a transport more than the clock does. */
static void time_flush(ProxycclWorker *worker, const Channel *channel, uint64_t awaited, ProxycclCounters *counters) {
  TimedFlush *timed = &worker->timed[channel->connection->number];
  if (timed->flushed == NULL) *timed = (TimedFlush){channel->flushed, awaited, now_ns(), counters};
}

/* Acts on one trigger. CONTINUE, or the reason to return to Python. Nothing has moved when a trigger is refused: all
 * of it is checked before any of it is done. */
static ALWAYS_INLINE ProxycclExit execute(ProxycclWorker *worker, Route *route, uint64_t ticket,
                                          ProxycclTrigger trigger, ProxycclExitInfo *info) {
  Channel *channel = route->channel;
  ProxycclConnection *connection = channel->connection;
  int status;

  if (route->op & PROXYCCL_OP_DATA) {
    const uint64_t size = trigger_field(trigger.word0, PROXYCCL_SIZE_SHIFT, PROXYCCL_SIZE_BITS);
    const uint64_t src_offset = trigger_field(trigger.word0, PROXYCCL_SRC_OFFSET_SHIFT, PROXYCCL_OFFSET_BITS);
    const uint64_t dst_offset = trigger_field(trigger.word1, PROXYCCL_DST_OFFSET_SHIFT, PROXYCCL_OFFSET_BITS);
    const ProxycclMemory *dst = route->dst, *src = route->src;
    /* The fields have 32 bits, so no sum overflows. */
    if (src->bytes == 0 || dst->bytes == 0 || src_offset + size > src->bytes || dst_offset + size > dst->bytes)
      return fail(info, PROXYCCL_ERROR_BAD_TRIGGER, 0, refusal(dst, src, src_offset, size));
    if (size > 0 && (status = connection->transport->put(connection, dst, dst_offset, src, src_offset, size)) != 0)
      return fail(info, PROXYCCL_ERROR_TRANSPORT, status, "put");
    route->bytes += size;
  }
  ++route->triggers;
  /* Published before a signal or a flush word tells anyone: who has learnt of a trigger finds it in the counters. */
  if (route->op & (PROXYCCL_OP_SIGNAL | PROXYCCL_OP_FLUSH)) publish_counts(route);
  if (route->op & PROXYCCL_OP_SIGNAL) {
    count(&route->counters->signals, 1);
    status = connection->transport->signal(connection, channel->remote_semaphore, ++channel->outbound);
    if (status != 0) return fail(info, PROXYCCL_ERROR_TRANSPORT, status, "signal");
  }
  if (route->op & PROXYCCL_OP_FLUSH) {
    count(&route->counters->flushes, 1);
    status = connection->transport->flush(connection, channel->flushed, ticket + 1);
    if (status != 0) return fail(info, PROXYCCL_ERROR_TRANSPORT, status, "flush");
    if (__atomic_load_n(channel->flushed, __ATOMIC_RELAXED) <= ticket)
      time_flush(worker, channel, ticket + 1, route->counters);
  }
  return CONTINUE;
}

static uint32_t room_of(const ProxycclConnection *connection) {
  return connection->transport->ready == NULL ? POLL_INTERVAL : connection->transport->ready(connection);
}

/* Acts on what a ring holds, up to `limit` triggers, and adds their number to *progress. A trigger whose connection
 * takes none stays where it is, with all behind it, and sets *held.
 *
 * The cursor is a copy that the compiler keeps in registers: behind the pointer it would be stored and loaded again
 * for each trigger. What leads to an exit is noted at the exit only, for the same reason. It is compiled twice, so that
 * a trigger that is not traced does not even ask. */
static ALWAYS_INLINE ProxycclExit visit(ProxycclWorker *worker, Ring *shared, uint32_t limit, ProxycclExitInfo *info,
                                        uint32_t *progress, int *held, int traced) {
  ProxycclTraceRecord *record = trace_next(&worker->trace, worker->stats);
  const uint32_t most = limit;
  Ring ring = *shared;
  Route route = {.names = ~0ull};
  ProxycclTrigger trigger;
  ProxycclExit result = CONTINUE;
  uint32_t taken = 0;
  while (taken < limit && ring_peek(&ring, &trigger)) {
    if (names_of(trigger) != route.names) {
      end_run(&route, taken);
      result = find_route(worker->service, trigger, &route, info);
      if (result == CONTINUE) {
        const uint32_t room = room_of(route.channel->connection);
        if (room == 0) {
          *held = 1;
          break;
        }
        limit = room < most - taken ? taken + room : most;
      }
    }
    if (traced) trace_trigger(record++, trigger);
    if (result == CONTINUE) result = execute(worker, &route, ring.next, trigger, info);
    if (result != CONTINUE) {
      if (result == PROXYCCL_EXIT_ERROR) count(&route.counters->errors, 1);
      info->trigger = trigger;
      info->ticket = ring.next;
      info->connection = route.channel->connection;
      info->channel = trigger_field(trigger.word1, PROXYCCL_CHANNEL_SHIFT, PROXYCCL_CHANNEL_BITS);
      worker->handling = result == PROXYCCL_EXIT_HANDLER;
      break;
    }
    ++ring.next;
    if (++taken % RELEASE_BATCH == 0) ring_release(&ring);
  }
  end_run(&route, taken); /* before the tail, for who waits in sync() */
  ring_release(&ring);
  *shared = ring;
  *progress += taken;
  if (traced) worker->trace.next += taken + (result != CONTINUE);
  return result;
}

/* The time, if an observer wants records, else 0. The time until which it does is taken away once it has passed, so that
 * it is asked for once; the observer may have put it off meanwhile. */
static uint64_t traced_at(ProxycclWorker *worker) {
  uint64_t until = __atomic_load_n(&worker->stats->trace_until, __ATOMIC_RELAXED);
  if (__builtin_expect(until == 0, 1)) return 0;
  const uint64_t now = now_ns();
  trace_begin();
  if (now <= until) return now;
  __atomic_compare_exchange_n(&worker->stats->trace_until, &until, 0, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  return 0;
}

/* Visits a ring in parts, as many triggers as share a look at the clock. Not inlined: where both loops lie in one
 * function, the traced one finds no registers free. */
static __attribute__((noinline)) ProxycclExit drain_traced(ProxycclWorker *worker, Ring *ring, uint64_t now,
                                                           ProxycclExitInfo *info, uint32_t *progress, int *held) {
  const uint32_t before = *progress, number = (uint32_t)(ring - worker->rings);
  Trace *trace = &worker->trace;
  const uint64_t begin = trace->next;
  ProxycclTrigger trigger;
  ProxycclExit result;
  if (!ring_peek(ring, &trigger)) return CONTINUE;
  trace_seen(trace, worker->stats, number, ring->next, now);
  for (;;) {
    const uint32_t left = POLL_INTERVAL - (*progress - before), share = trace->share == 0 ? 1 : trace->share;
    const uint32_t room = trace_room(trace), most = share < left ? share : left, limit = room < most ? room : most;
    const uint64_t first = ring->next;
    result = visit(worker, ring, limit, info, progress, held, 1);
    const uint32_t taken = (uint32_t)(ring->next - first);
    if (taken == 0 && result == CONTINUE) break;
    const uint64_t end = now_ns();
    trace_mark(trace, worker->stats, PROXYCCL_MARK_ISSUED, 0, end);
    if (taken > 0) trace->share = trace_share(taken, end - now, POLL_INTERVAL);
    now = end;
    if (result != CONTINUE || taken < limit || taken == left) break;
  }
  if (trace->next == begin + 1) trace->next = begin; /* the trigger is held: it is seen again */
  trace_tell(trace, worker->stats);
  return result;
}

static ProxycclExit drain(ProxycclWorker *worker, Ring *ring, ProxycclExitInfo *info, uint32_t *progress, int *held) {
  const uint64_t now = traced_at(worker);
  if (now != 0) return drain_traced(worker, ring, now, info, progress, held);
  return visit(worker, ring, POLL_INTERVAL, info, progress, held, 0);
}

static void end_timed_flush(TimedFlush *timed) {
  /* Pairs with the release of the transport, or of its stream. */
  if (__atomic_load_n(timed->flushed, __ATOMIC_ACQUIRE) < timed->awaited) return;
  count(&timed->counters->flush_ns, now_ns() - timed->seen_ns);
  count(&timed->counters->timed_flushes, 1);
  timed->flushed = NULL;
}

/* Shows how far a connection has come, to those that trace in a mark too. */
static void show_progress(ProxycclWorker *worker, const ProxycclConnection *connection, uint64_t *traced_ns) {
  const ProxycclProgress *progress = &connection->progress;
  ProxycclConnectionStats *stats = &worker->stats->connections[connection->number];
  if (stats->issued != progress->issued) __atomic_store_n(&stats->issued, progress->issued, __ATOMIC_RELAXED);
  if (stats->completed == progress->completed) return;
  __atomic_store_n(&stats->completed, progress->completed, __ATOMIC_RELAXED);
  if (*traced_ns == 0 && (*traced_ns = traced_at(worker)) == 0) return;
  const uint64_t outstanding = progress->issued - progress->completed;
  trace_mark(&worker->trace, worker->stats, PROXYCCL_MARK_COMPLETED,
             (uint64_t)connection->number << 32 | (outstanding & 0xffffffffu), *traced_ns);
}

static ProxycclExit poll_connections(ProxycclWorker *worker, ProxycclExitInfo *info, uint32_t *progress,
                                     int *outstanding) {
  const uint32_t connections = __atomic_load_n(&worker->connection_count, __ATOMIC_ACQUIRE);
  uint64_t traced_ns = 0; /* when the first to be marked as complete was found to be */
  *outstanding = 0;
  for (uint32_t i = 0; i < connections; ++i) {
    ProxycclConnection *connection = worker->connections[i];
    const int status = connection->transport->poll(connection, progress);
    if (status != 0) {
      memset(info, 0, sizeof *info);
      info->channel = PROXYCCL_MAX_CHANNELS;
      info->connection = connection;
      count(&worker->stats->connections[i].errors, 1);
      return fail(info, PROXYCCL_ERROR_TRANSPORT, status, "completion");
    }
    if (!connection->transport->idle(connection))
      *outstanding = 1;
    else
      connection->progress.completed = connection->progress.issued;
    show_progress(worker, connection, &traced_ns);
    if (worker->timed[i].flushed != NULL) end_timed_flush(&worker->timed[i]);
  }
  if (traced_ns != 0) trace_tell(&worker->trace, worker->stats);
  count(&worker->stats->looks, 1);
  return CONTINUE;
}

void proxyccl_worker_handled(ProxycclWorker *worker) {
  Ring *ring = &worker->rings[worker->current];
  ProxycclTrigger trigger;
  if (!worker->handling || !ring_peek(ring, &trigger)) return;
  const uint32_t id = trigger_field(trigger.word1, PROXYCCL_CHANNEL_SHIFT, PROXYCCL_CHANNEL_BITS);
  Channel *channel = &worker->service->channels[id];
  count(&worker->service->counters[id].triggers, 1);
  /* The handler has returned, so what this channel was given before is complete by definition. */
  if (trigger_field(trigger.word1, PROXYCCL_OP_SHIFT, PROXYCCL_OP_BITS) & PROXYCCL_OP_FLUSH)
    __atomic_store_n(channel->flushed, ring->next + 1, __ATOMIC_RELEASE);
  ++ring->next;
  ring_release(ring);
  worker->handling = 0;
  const uint64_t traced_ns = traced_at(worker);
  if (traced_ns == 0) return;
  trace_mark(&worker->trace, worker->stats, PROXYCCL_MARK_HANDLED, id, traced_ns);
  trace_tell(&worker->trace, worker->stats);
}

/* Spins, then yields, then sleeps for a part of the time that nothing has happened: waking late costs little beside the
 * wait that came before it, and a thread that is idle for long costs next to no core. Returns the time slept. */
static uint64_t back_off(const ProxycclIdlePolicy *policy, uint64_t idle_ns, int outstanding) {
  if (idle_ns < policy->spin_ns) {
    return 0;
  } else if (idle_ns < policy->spin_ns + policy->yield_ns) {
    sched_yield();
    return 0;
  } else {
    const uint64_t begin_ns = now_ns();
    uint64_t sleep_ns = idle_ns / SLEEP_PART;
    if (sleep_ns > policy->max_sleep_ns) sleep_ns = policy->max_sleep_ns;
    if (outstanding && sleep_ns > OUTSTANDING_SLEEP_NS) sleep_ns = OUTSTANDING_SLEEP_NS;
    const struct timespec pause = {(time_t)(sleep_ns / 1000000000u), (long)(sleep_ns % 1000000000u)};
    nanosleep(&pause, NULL);
    return now_ns() - begin_ns;
  }
}

/* Time in which all workers of a thread were idle. */
static void count_idle(ProxycclThread *thread, uint64_t idle_ns, uint64_t slept_ns) {
  for (ProxycclWorker *worker = thread->first; worker != NULL; worker = worker->next) {
    count(&worker->stats->idle_ns, idle_ns);
    if (slept_ns == 0) continue;
    count(&worker->stats->sleeps, 1);
    count(&worker->stats->slept_ns, slept_ns);
  }
}

static void take_added(ProxycclThread *thread) {
  if (__atomic_load_n(&thread->added, __ATOMIC_RELAXED) == NULL) return;
  ProxycclWorker *added = __atomic_exchange_n(&thread->added, NULL, __ATOMIC_ACQUIRE);
  while (added != NULL) {
    ProxycclWorker *worker = added;
    added = worker->next;
    worker->next = thread->first;
    thread->first = worker;
  }
  thread->at = &thread->first;
}

/* Makes a worker's context current where the last that worked here had another. */
static int enter_context(ProxycclThread *thread, const ProxycclWorker *worker) {
  if (worker->make_current == NULL || worker->context == thread->context) return 0;
  const int status = worker->make_current(worker->context);
  thread->context = status == 0 ? worker->context : NO_CONTEXT;
  return status;
}

/* A worker's turn: what its rings hold, up to POLL_INTERVAL triggers of each, and a look at its connections. CONTINUE,
 * or what there is to tell. Adds to *progress, sets *busy where triggers were taken, *any_outstanding where work is
 * under way. */
static ProxycclExit take_turn(ProxycclThread *thread, ProxycclWorker *worker, ProxycclExitInfo *info, int *progress,
                              int *busy, int *any_outstanding) {
  const uint32_t rings = __atomic_load_n(&worker->ring_count, __ATOMIC_ACQUIRE);
  const uint32_t drain_asked = __atomic_load_n(&worker->drain_asked, __ATOMIC_ACQUIRE);
  const int stop = __atomic_load_n(&worker->stop, __ATOMIC_ACQUIRE);
  uint32_t done = 0;
  int held = 0, outstanding;
  const uint32_t pause_asked = __atomic_load_n(&worker->pause_asked, __ATOMIC_ACQUIRE);
  /* Before anything is taken: what comes behind an abort, in a ring or when a handler has returned, may name memory that
   * is gone, or carry what a kernel that was told to stop has made up. */
  if ((stop & STOP_AT_ONCE) || __atomic_load_n(&worker->service->control->abort, __ATOMIC_ACQUIRE) != PROXYCCL_OK)
    return PROXYCCL_EXIT_ABORTED;
  if (worker->paused != pause_asked) __atomic_store_n(&worker->paused, pause_asked, __ATOMIC_RELEASE);
  if (pause_asked & 1) return CONTINUE;
  const int status = enter_context(thread, worker);
  if (status != 0) return fail(info, PROXYCCL_ERROR_TRANSPORT, status, "making the device current");
  for (uint32_t visited = 0; visited < rings; ++visited) {
    const ProxycclExit result = drain(worker, &worker->rings[worker->current], info, &done, &held);
    if (result != CONTINUE) return result;
    worker->current = (worker->current + 1) % rings;
  }

  const int took = done != 0;
  const ProxycclExit result = poll_connections(worker, info, &done, &outstanding);
  if (result != CONTINUE) return result;
  *progress |= done != 0;
  *busy |= took;
  *any_outstanding |= outstanding;
  if (!took && !outstanding && !held) {
    if (worker->drained != drain_asked) __atomic_store_n(&worker->drained, drain_asked, __ATOMIC_RELEASE);
    if (stop) return PROXYCCL_EXIT_STOPPED;
  }
  return CONTINUE;
}

ProxycclExit proxyccl_thread_run(ProxycclThread *thread, ProxycclExitInfo *info) {
  uint64_t idle_since = 0, counted = 0; /* idle time is counted as far as the clock was looked at anyway */
  uint32_t looks = 0;
  memset(info, 0, sizeof *info);
  info->channel = PROXYCCL_MAX_CHANNELS;
  for (;;) {
    int progress = 0, busy = 0, outstanding = 0;
    take_added(thread);
    if (thread->first == NULL) return PROXYCCL_EXIT_NO_WORKERS;
    do {
      ProxycclWorker *worker = *thread->at;
      const ProxycclExit result = take_turn(thread, worker, info, &progress, &busy, &outstanding);
      if (result != CONTINUE) {
        info->worker = worker;
        if (result != PROXYCCL_EXIT_HANDLER) *thread->at = worker->next;
        if (*thread->at == NULL) thread->at = &thread->first;
        return result;
      }
      thread->at = worker->next != NULL ? &worker->next : &thread->first;
    } while (thread->at != &thread->first);
    if (progress) {
      idle_since = 0;
      if (busy) continue;
    }
    if (idle_since == 0) idle_since = counted = now_ns();
    if (++looks % LOOKS_PER_CLOCK == 0) {
      const uint64_t now = now_ns(), slept = back_off(&thread->idle, now - idle_since, outstanding);
      count_idle(thread, now + slept - counted, slept);
      counted = now + slept;
    }
  }
}

uint64_t proxyccl_bare_drain(ProxycclTrigger *slots, uint64_t *tail, uint32_t size_log2, uint64_t count_,
                             uint64_t timeout_ns) {
  Ring ring = {slots, tail, size_log2, 0, 0};
  const uint64_t deadline = now_ns() + timeout_ns;
  ProxycclTrigger trigger;
  uint32_t misses = 0;
  while (ring.next < count_) {
    if (ring_peek(&ring, &trigger)) {
      if (++ring.next % RELEASE_BATCH == 0) ring_release(&ring);
      misses = 0;
    } else {
      ring_release(&ring);
      cpu_relax();
      if (++misses % 1024 == 0) {
        sched_yield();
        if (now_ns() > deadline) break;
      }
    }
  }
  ring_release(&ring);
  return ring.next;
}

uint64_t proxyccl_bare_produce(ProxycclTrigger *slots, const uint64_t *tail, uint32_t size_log2, uint64_t first_ticket,
                               uint64_t count_, ProxycclTrigger trigger, uint64_t timeout_ns) {
  const uint64_t size = 1ull << size_log2, deadline = now_ns() + timeout_ns;
  uint64_t ticket = first_ticket, cache = __atomic_load_n(tail, __ATOMIC_ACQUIRE);
  uint32_t misses = 0;
  while (ticket < first_ticket + count_) {
    if (ticket >= cache + size) {
      cache = __atomic_load_n(tail, __ATOMIC_ACQUIRE);
      cpu_relax();
      if (++misses % 1024 == 0) {
        sched_yield();
        if (now_ns() > deadline) break;
      }
      continue;
    }
    ProxycclTrigger *slot = &slots[ticket & (size - 1)];
    const uint64_t parity = ~(ticket >> size_log2) & 1;
    __atomic_store_n(&slot->word0, trigger.word0, __ATOMIC_RELAXED);
    __atomic_store_n(&slot->word1, (trigger.word1 & ~(1ull << PROXYCCL_PARITY_SHIFT)) | parity << PROXYCCL_PARITY_SHIFT,
                     __ATOMIC_RELEASE);
    ++ticket;
  }
  return ticket - first_ticket;
}
