/* Polls a worker's connections, and publishes their progress for waiting threads and for observers. */
#include "clock.h"
#include "worker.h"

static void end_timed_flush(TimedFlush *timed) {
  if (word_load(timed->flushed) < timed->awaited) return;
  counter_add(&timed->counters->flush_ns, now_ns() - timed->issued_ns);
  counter_add(&timed->counters->timed_flushes, 1);
  timed->flushed = NULL;
}

/* Publishes, for each channel of a connection, the ticket up to which its triggers are complete. A channel's `awaited`
 * changes only once its triggers are complete, so that later triggers do not delay the publication. */
static void show_completed(ProxycclConnection *connection) {
  const uint64_t completed = connection->progress.completed;
  for (Channel **place = &connection->unfinished, *channel; (channel = *place) != NULL;) {
    if (completed >= channel->issued.triggers) channel->awaited = channel->issued;
    if (completed >= channel->awaited.triggers) {
      word_store(channel->completed, channel->awaited.end);
      channel->unfinished = channel->awaited.end != channel->issued.end;
      channel->awaited = channel->issued;
    }
    if (channel->unfinished)
      place = &channel->next_unfinished;
    else
      *place = channel->next_unfinished;
  }
}

/* Publishes a connection's progress for observers. If a trace is being recorded, also adds a mark to the trace. */
static void show_progress(ProxycclWorker *worker, const ProxycclConnection *connection, uint64_t *traced_ns) {
  const ProxycclProgress *progress = &connection->progress;
  ProxycclConnectionStats *stats = &worker->stats->connections[connection->number];
  if (stats->issued != progress->issued) counter_set(&stats->issued, progress->issued);
  if (stats->completed == progress->completed) return;
  counter_set(&stats->completed, progress->completed);
  if (*traced_ns == 0 && (*traced_ns = trace_wanted(worker->stats)) == 0) return;
  const uint64_t outstanding = progress->issued - progress->completed;
  trace_mark(&worker->trace, worker->stats, PROXYCCL_MARK_COMPLETED,
             (uint64_t)connection->number << 32 | (outstanding & 0xffffffffu), *traced_ns);
}

/* Returns whether proxyccl_worker_poll polls a connection in this call, while a schedule runs. A schedule learns from
 * memory whether its sends are complete, but a poll calls a driver, which delays these reads. So a call does not poll
 * every connection. A connection that can carry bundles is polled even more rarely, because bundles need no poll. */
static int is_its_turn(const ProxycclWorker *worker, const ProxycclConnection *connection, uint32_t connections) {
  enum { TURNS_PER_POLL = 16 };
  const uint64_t looks = worker->stats->looks;
  if (connection->most_puts == 0) return connection->number == worker->polled;
  return looks % TURNS_PER_POLL == 0 && looks / TURNS_PER_POLL % connections == connection->number;
}

ProxycclOutcome proxyccl_worker_poll(ProxycclWorker *worker, ProxycclExitInfo *info, uint32_t *progress,
                                     int *outstanding) {
  const uint32_t connections = list_count(&worker->connection_count);
  uint64_t traced_ns = 0; /* time of this poll's trace marks; 0 before the first mark */
  *outstanding = 0;
  if (++worker->polled >= connections) worker->polled = 0;
  for (uint32_t i = 0; i < connections; ++i) {
    ProxycclConnection *connection = worker->connections[i];
    if (worker->run.schedule != NULL && !is_its_turn(worker, connection, connections)) {
      *outstanding |= !connection->transport->idle(connection);
      continue;
    }
    const int status = connection->transport->poll(connection, progress);
    if (status != 0) {
      info->connection = connection;
      counter_add(&worker->stats->connections[i].errors, 1);
      return exit_with_error(info, PROXYCCL_ERROR_TRANSPORT, status, "completion");
    }
    if (!connection->transport->idle(connection))
      *outstanding = 1;
    else
      connection->progress.completed = connection->progress.issued;
    show_completed(connection);
    show_progress(worker, connection, &traced_ns);
    if (worker->timed[i].flushed != NULL) end_timed_flush(&worker->timed[i]);
  }
  if (traced_ns != 0) trace_publish(&worker->trace, worker->stats);
  counter_add(&worker->stats->looks, 1);
  return CONTINUE;
}
