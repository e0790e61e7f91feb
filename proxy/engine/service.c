/* A service's tables, and other threads' requests to a worker. See engine.h. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "clock.h"
#include "waking.h"
#include "worker.h"

ProxycclService *proxyccl_service_create(ProxycclControl *control, ProxycclCounters *counters) {
  ProxycclService *service = calloc(1, sizeof *service);
  if (service == NULL) return NULL;
  service->control = control;
  service->counters = counters;
  return service;
}

void proxyccl_service_destroy(ProxycclService *service) {
  if (service == NULL) return;
  for (uint32_t number = 0; number < PROXYCCL_MAX_SCHEDULES; ++number) free(service->schedules[number]);
  free(service);
}

uint64_t proxyccl_word_acquire(const uint64_t *word) { return word_load(word); }

int proxyccl_service_set_memory(ProxycclService *service, uint32_t id, char *base, uint64_t bytes, const uint64_t *keys,
                                uint32_t remote_only, char *host) {
  if (id >= PROXYCCL_MAX_MEMORIES) return EINVAL;
  memcpy(service->keys[id], keys, sizeof service->keys[id]);
  service->memories[id] = (ProxycclMemory){base, bytes, keys[0], remote_only, host, service->keys[id]};
  return 0;
}

/* Replaces a channel. First removes the old channel from the connection's list, so that no poll mistakes the new
 * channel for the old channel. */
static int set_channel(ProxycclService *service, uint32_t id, Channel made) {
  if (id >= PROXYCCL_MAX_CHANNELS) return EINVAL;
  Channel *channel = &service->channels[id];
  if (channel->unfinished) {
    Channel **place = &channel->connection->unfinished;
    while (*place != channel) place = &(*place)->next_unfinished;
    *place = channel->next_unfinished;
  }
  *channel = made;
  return 0;
}

int proxyccl_service_set_channel(ProxycclService *service, uint32_t id, ProxycclConnection *connection,
                                 uint64_t *remote_semaphore, uint64_t *flushed, uint64_t *completed,
                                 ProxycclSignals signals) {
  return set_channel(service, id,
                     (Channel){.connection = connection,
                               .remote_semaphore = remote_semaphore,
                               .flushed = flushed,
                               .completed = completed,
                               .signals = signals});
}

ProxycclSignals proxyccl_service_signals(const ProxycclService *service, uint32_t id) {
  return service->channels[id].signals;
}

int proxyccl_service_set_handler(ProxycclService *service, uint32_t id, uint64_t *flushed, uint64_t *completed) {
  return set_channel(service, id, (Channel){.is_handler = 1, .flushed = flushed, .completed = completed});
}

ProxycclWorker *proxyccl_worker_create(ProxycclService *service, ProxycclWorkerStats *stats) {
  if (service->worker_count == PROXYCCL_MAX_WORKERS) return NULL;
  ProxycclWorker *worker = calloc(1, sizeof *worker);
  if (worker == NULL) return NULL;
  worker->service = service;
  worker->stats = stats;
  worker->number = service->worker_count++;
  stats->started_ns = now_ns();
  return worker;
}

void proxyccl_worker_destroy(ProxycclWorker *worker) { free(worker); }

int proxyccl_worker_add_ring(ProxycclWorker *worker, ProxycclTrigger *slots, uint64_t *tail, uint32_t size_log2) {
  if (worker->ring_count == PROXYCCL_MAX_RINGS) return ENOSPC;
  worker->rings[worker->ring_count] = (Ring){slots, tail, size_log2, *tail, *tail};
  list_grow(&worker->ring_count);
  return 0;
}

int proxyccl_worker_add_connection(ProxycclWorker *worker, ProxycclConnection *connection) {
  if (worker->connection_count == PROXYCCL_MAX_CONNECTIONS) return ENOSPC;
  connection->number = worker->connection_count;
  connection->worker = worker->number;
  worker->connections[worker->connection_count] = connection;
  list_grow(&worker->connection_count);
  return 0;
}

void proxyccl_worker_set_context(ProxycclWorker *worker, int (*make_current)(uintptr_t context), uintptr_t context) {
  worker->make_current = make_current;
  worker->context = context;
}

static void stop(ProxycclWorker *worker, int how) {
  flags_set(&worker->stop, how);
  if (worker->asleep != NULL) proxyccl_wake_one(worker->asleep);
}

void proxyccl_worker_stop(ProxycclWorker *worker) { stop(worker, STOP_WHEN_DONE); }

void proxyccl_worker_abandon(ProxycclWorker *worker) { stop(worker, STOP_AT_ONCE); }

static uint32_t request(ProxycclWorker *worker, Request *which) {
  const uint32_t number = request_make(which);
  if (worker->asleep != NULL) proxyccl_wake_one(worker->asleep);
  return number;
}

uint32_t proxyccl_worker_drain(ProxycclWorker *worker) { return request(worker, &worker->drain); }

uint32_t proxyccl_worker_drained(const ProxycclWorker *worker) { return request_answered(&worker->drain); }

uint32_t proxyccl_worker_pause(ProxycclWorker *worker) { return request(worker, &worker->pause); }

uint32_t proxyccl_worker_paused(const ProxycclWorker *worker) { return request_answered(&worker->pause); }

void proxyccl_worker_resume(ProxycclWorker *worker) { request_make(&worker->pause); }
