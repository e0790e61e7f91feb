/* Other threads' requests to a worker. See engine.h. */
#include "worker.h"

#include <errno.h>
#include <stdlib.h>

#include "clock.h"
#include "waking.h"

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
  worker->rings[worker->ring_count] = (Ring){slots, tail, size_log2, 0, 0};
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
