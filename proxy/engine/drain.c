/* The drain loop of a worker: takes triggers from a ring, checks them and issues their operations to connections. */
#include "clock.h"
#include "worker.h"

static ProxycclOutcome refuse(ProxycclExitInfo *info, const char *reason) {
  return exit_with_error(info, PROXYCCL_ERROR_BAD_TRIGGER, 0, reason);
}

/* Fills in the error of a refused transfer. The error names the first failed check: registrations are checked before
 * ranges, and the source before the destination. */
static __attribute__((noinline)) ProxycclOutcome refuse_transfer(const ProxycclMemory *dst, const ProxycclMemory *src,
                                                                 uint64_t src_offset, uint64_t bytes,
                                                                 ProxycclExitInfo *info) {
  info->of_source = src->bytes == 0 || (dst->bytes != 0 && src_offset + bytes > src->bytes);
  if (src->bytes == 0) return refuse(info, "the source memory id is not registered");
  if (dst->bytes == 0) return refuse(info, "the destination memory id is not registered");
  return refuse(
      info, info->of_source ? "the transfer leaves the source memory" : "the transfer leaves the destination memory");
}

/* Returns the number of bytes of the value that a trigger carries; 0 if the trigger names a memory as its source. */
static uint32_t value_bytes(ProxycclTrigger trigger) {
  const uint32_t id = trigger_field(trigger.word1, PROXYCCL_SRC_MEMORY_SHIFT, PROXYCCL_MEMORY_BITS);
  return id < PROXYCCL_MAX_MEMORIES ? 0 : 1u << (id - PROXYCCL_MAX_MEMORIES);
}

/* Functions that take a Route are inlined, because the compiler keeps a route in registers only if its address is never
 * taken. */
#define ALWAYS_INLINE inline __attribute__((always_inline))

/* The table entries for a run: a sequence of triggers with equal ids. A kernel's triggers mostly differ only in offsets
 * and sizes, so ids are looked up only at the start of a run. The contents of the entries are read for each trigger. */
typedef struct {
  uint64_t names; /* word 1 of the run's triggers, with the destination's offset zeroed and the put-or-get bit of word 0
                     instead of the parity */
  uint32_t op;    /* the trigger's operations, PROXYCCL_OP_GET included */
  Channel *channel;
  const ProxycclMemory *dst, *src;
  int (*transfer)(ProxycclConnection *connection, const ProxycclMemory *dst, uint64_t dst_offset,
                  const ProxycclMemory *src, uint64_t src_offset, uint64_t bytes); /* the transport's put or get */
  ProxycclCounters *counters;
  uint64_t triggers, bytes; /* numbers that this run has not yet added to `counters` */
  uint32_t first;           /* number of triggers that visit() had taken before the run */
} Route;

static ALWAYS_INLINE void publish_counts(Route *route) {
  if (route->triggers == 0) return;
  counter_add(&route->counters->triggers, route->triggers);
  if (route->op & PROXYCCL_OP_DATA) { /* the triggers of a run are all puts, all gets, or neither */
    counter_add(route->op & PROXYCCL_OP_GET ? &route->counters->gets : &route->counters->puts, route->triggers);
    counter_add(&route->counters->bytes, route->bytes);
  }
  route->triggers = route->bytes = 0;
}

/* Records that all triggers of a channel before ticket `end` are issued. */
static ALWAYS_INLINE void note_issued(Channel *channel, uint64_t end) {
  ProxycclConnection *connection = channel->connection;
  channel->issued = (Extent){connection->progress.issued, end};
  if (channel->unfinished) return;
  channel->unfinished = 1;
  channel->awaited = channel->issued;
  channel->next_unfinished = connection->unfinished;
  connection->unfinished = channel;
}

/* Ends a run. `taken` is the number of triggers that visit() has taken, and `end` is the ticket of the next trigger. */
static ALWAYS_INLINE void end_run(Route *route, uint32_t taken, uint64_t end) {
  publish_counts(route);
  if (taken != route->first) {
    route->channel->connection->progress.issued += taken - route->first;
    note_issued(route->channel, end);
  }
  route->first = taken;
}

/* Returns the value of Route.names for a trigger. If a trigger has no transfer or carries a value, the trigger's
 * put-or-get bit has no meaning. */
static uint64_t names_of(ProxycclTrigger trigger) {
  _Static_assert(PROXYCCL_GET_SHIFT == PROXYCCL_PARITY_SHIFT - PROXYCCL_SRC_MEMORY_SHIFT, "get takes parity's place");
  return trigger.word1 << 1 >> (PROXYCCL_SRC_MEMORY_SHIFT + 1) | (trigger.word0 & 1ull << PROXYCCL_GET_SHIFT);
}

/* Looks up a trigger's ids and stores the result in *route. Returns CONTINUE, or the reason why the thread must return
 * to Python. */
static ALWAYS_INLINE ProxycclOutcome find_route(ProxycclService *service, ProxycclTrigger trigger, Route *route,
                                                ProxycclExitInfo *info) {
  const uint32_t id = trigger_field(trigger.word1, PROXYCCL_CHANNEL_SHIFT, PROXYCCL_CHANNEL_BITS);
  route->op = trigger_field(trigger.word1, PROXYCCL_OP_SHIFT, PROXYCCL_OP_BITS);
  if (route->op & PROXYCCL_OP_DATA && value_bytes(trigger) == 0 && trigger.word0 >> PROXYCCL_GET_SHIFT & 1)
    route->op |= PROXYCCL_OP_GET;
  route->channel = &service->channels[id];
  route->counters = &service->counters[id];
  route->src = &service->memories[trigger_field(trigger.word1, PROXYCCL_SRC_MEMORY_SHIFT, PROXYCCL_MEMORY_BITS)];
  route->dst = &service->memories[trigger_field(trigger.word1, PROXYCCL_DST_MEMORY_SHIFT, PROXYCCL_MEMORY_BITS)];
  if (route->channel->is_handler) return PROXYCCL_EXIT_HANDLER;
  if (route->channel->connection == NULL) return refuse(info, "the channel id is not in use");
  if (route->op == PROXYCCL_OP_CUSTOM) return refuse(info, "the trigger carries no operation");
  const ProxycclTransport *transport = route->channel->connection->transport;
  const int is_get = (route->op & PROXYCCL_OP_GET) != 0;
  if (route->op & PROXYCCL_OP_DATA &&
      copies_remote_only(transport, is_get ? route->dst : route->src, is_get ? route->src : route->dst))
    return refuse(info, "only a remote link reaches a memory that the trigger names, but its channel copies");
  route->transfer = is_get ? transport->get : transport->put;
  route->names = names_of(trigger);
  return CONTINUE;
}

/* Starts timing a flush that is not complete yet, unless the connection is timing another flush. A flush that is
 * complete immediately is not timed, because reading the clock would take longer than the flush. */
static void time_flush(ProxycclWorker *worker, const Channel *channel, uint64_t awaited, ProxycclCounters *counters) {
  TimedFlush *timed = &worker->timed[channel->connection->number];
  if (timed->flushed == NULL) *timed = (TimedFlush){channel->flushed, awaited, now_ns(), counters};
}

/* Puts the value that a trigger carries. The function is not inlined, because values are rare and the drain loop has no
 * registers to spare. */
static __attribute__((noinline)) ProxycclOutcome put_value(ProxycclConnection *connection, const ProxycclMemory *dst,
                                                           ProxycclTrigger trigger, ProxycclExitInfo *info) {
  const uint64_t offset = trigger_field(trigger.word1, PROXYCCL_DST_OFFSET_SHIFT, PROXYCCL_OFFSET_BITS);
  const uint32_t bytes = value_bytes(trigger);
  if (dst->bytes == 0) return refuse(info, "the destination memory id is not registered");
  if (offset + bytes > dst->bytes) return refuse(info, "the value leaves the destination memory");
  const int status = connection->transport->put_value(connection, dst, offset, trigger.word0, bytes);
  return status == 0 ? CONTINUE : exit_with_error(info, PROXYCCL_ERROR_TRANSPORT, status, "put of a value");
}

/* Checks one trigger, then issues its operations. Returns CONTINUE, or the reason why the thread must return to
 * Python. */
static ALWAYS_INLINE ProxycclOutcome execute(ProxycclWorker *worker, Route *route, uint64_t ticket,
                                             ProxycclTrigger trigger, ProxycclExitInfo *info) {
  Channel *channel = route->channel;
  ProxycclConnection *connection = channel->connection;
  int status;

  if (route->op & PROXYCCL_OP_DATA) {
    const uint64_t bytes = trigger_field(trigger.word0, PROXYCCL_SIZE_SHIFT, PROXYCCL_SIZE_BITS);
    const uint64_t src_offset = trigger_field(trigger.word0, PROXYCCL_SRC_OFFSET_SHIFT, PROXYCCL_OFFSET_BITS);
    const uint64_t dst_offset = trigger_field(trigger.word1, PROXYCCL_DST_OFFSET_SHIFT, PROXYCCL_OFFSET_BITS);
    const ProxycclMemory *dst = route->dst, *src = route->src;
    /* The fields have at most 32 bits, so no sum overflows. If the trigger carries a value, its source id has an unused
     * table entry, so `src->bytes` is 0. */
    if (src->bytes == 0 || dst->bytes == 0 || src_offset + bytes > src->bytes || dst_offset + bytes > dst->bytes) {
      if (value_bytes(trigger) == 0) return refuse_transfer(dst, src, src_offset, bytes, info);
      const ProxycclOutcome result = put_value(connection, dst, trigger, info);
      if (result != CONTINUE) return result;
      route->bytes += value_bytes(trigger);
    } else {
      if (bytes > 0 && (status = route->transfer(connection, dst, dst_offset, src, src_offset, bytes)) != 0)
        return exit_with_error(info, PROXYCCL_ERROR_TRANSPORT, status, route->op & PROXYCCL_OP_GET ? "get" : "put");
      route->bytes += bytes;
    }
  }
  ++route->triggers;
  /* Counters are published before the signal or the flush word, so a reader of these words finds the trigger counted.
   */
  if (route->op & (PROXYCCL_OP_SIGNAL | PROXYCCL_OP_FLUSH)) publish_counts(route);
  if (route->op & PROXYCCL_OP_SIGNAL) {
    counter_add(&route->counters->signals, 1);
    const uint64_t previous = channel->signals.sent;
    uint64_t count = previous + 1;
    if (!(route->op & PROXYCCL_OP_DATA) && value_bytes(trigger) != 0) {
      if (trigger.word0 <= previous)
        return refuse(info, "a signal's value is not above the count of the channel's signals");
      count = trigger.word0;
    }
    channel->signals.sent = count;
    status = connection->transport->signal(connection, channel->remote_semaphore, count, previous);
    if (status != 0) return exit_with_error(info, PROXYCCL_ERROR_TRANSPORT, status, "signal");
  }
  if (route->op & PROXYCCL_OP_FLUSH) {
    counter_add(&route->counters->flushes, 1);
    status = connection->transport->flush(connection, channel->flushed, ticket + 1);
    if (status != 0) return exit_with_error(info, PROXYCCL_ERROR_TRANSPORT, status, "flush");
    if (word_peek(channel->flushed) <= ticket) time_flush(worker, channel, ticket + 1, route->counters);
  }
  return CONTINUE;
}

/* Executes up to `limit` triggers of a ring, and adds their number to *progress. If a trigger's connection has no room,
 * the trigger and all later triggers stay in the ring, and *held is set.
 *
 * Works on a local copy of the Ring struct, so that the compiler keeps the cursor in registers. The function is
 * compiled once with and once without tracing, so that tracing costs no branch while it is off. */
static ALWAYS_INLINE ProxycclOutcome visit(ProxycclWorker *worker, Ring *shared, uint32_t limit, ProxycclExitInfo *info,
                                           uint32_t *progress, int *held, int traced) {
  ProxycclTraceRecord *record = trace_next(&worker->trace, worker->stats);
  const uint32_t most = limit;
  Ring ring = *shared;
  Route route = {.names = ~0ull};
  ProxycclTrigger trigger;
  ProxycclOutcome result = CONTINUE;
  uint32_t taken = 0;
  while (taken < limit && ring_peek(&ring, &trigger)) {
    if (names_of(trigger) != route.names) {
      end_run(&route, taken, ring.next);
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
      if (result == PROXYCCL_EXIT_ERROR) counter_add(&route.counters->errors, 1);
      info->trigger = trigger;
      info->connection = route.channel->connection;
      info->channel = trigger_field(trigger.word1, PROXYCCL_CHANNEL_SHIFT, PROXYCCL_CHANNEL_BITS);
      worker->handling = result == PROXYCCL_EXIT_HANDLER;
      break;
    }
    ++ring.next;
    if (++taken % RING_RELEASE_BATCH == 0) ring_release(&ring);
  }
  end_run(&route, taken, ring.next); /* the counts are published before sync() can see the new tail */
  ring_release(&ring);
  *shared = ring;
  *progress += taken;
  if (traced) worker->trace.next += taken + (result != CONTINUE);
  return result;
}

/* Visits a ring in parts, and reads the clock once for each part. This function is not inlined, because inlining would
 * leave too few registers for the loop in visit(). */
static __attribute__((noinline)) ProxycclOutcome visit_traced(ProxycclWorker *worker, Ring *ring, uint64_t now,
                                                              ProxycclExitInfo *info, uint32_t *progress, int *held) {
  const uint32_t before = *progress, number = (uint32_t)(ring - worker->rings);
  Trace *trace = &worker->trace;
  const uint64_t begin = trace->next;
  ProxycclTrigger trigger;
  ProxycclOutcome result;
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
  if (trace->next == begin + 1) trace->next = begin; /* removes the SEEN mark, because no trigger was taken */
  trace_publish(trace, worker->stats);
  return result;
}

ProxycclOutcome proxyccl_worker_visit_ring(ProxycclWorker *worker, Ring *ring, ProxycclExitInfo *info,
                                           uint32_t *progress, int *held) {
  const uint64_t now = trace_wanted(worker->stats);
  if (now != 0) return visit_traced(worker, ring, now, info, progress, held);
  return visit(worker, ring, POLL_INTERVAL, info, progress, held, 0);
}

void proxyccl_worker_handled(ProxycclWorker *worker) {
  Ring *ring = &worker->rings[worker->current];
  ProxycclTrigger trigger;
  if (!worker->handling || !ring_peek(ring, &trigger)) return;
  const uint32_t id = trigger_field(trigger.word1, PROXYCCL_CHANNEL_SHIFT, PROXYCCL_CHANNEL_BITS);
  Channel *channel = &worker->service->channels[id];
  counter_add(&worker->service->counters[id].triggers, 1);
  /* Handlers run one after the other, so all earlier triggers of this channel are complete. */
  if (trigger_field(trigger.word1, PROXYCCL_OP_SHIFT, PROXYCCL_OP_BITS) & PROXYCCL_OP_FLUSH)
    word_store(channel->flushed, ring->next + 1);
  word_store(channel->completed, ring->next + 1);
  ++ring->next;
  ring_release(ring);
  worker->handling = 0;
  worker->handled = 1;
  worker->current = (worker->current + 1) % list_count(&worker->ring_count);
  const uint64_t traced_ns = trace_wanted(worker->stats);
  if (traced_ns == 0) return;
  trace_mark(&worker->trace, worker->stats, PROXYCCL_MARK_HANDLED, id, traced_ns);
  trace_publish(&worker->trace, worker->stats);
}
