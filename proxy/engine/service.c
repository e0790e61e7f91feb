/* A service's tables. See engine.h. */
#include <errno.h>
#include <stdlib.h>

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

int proxyccl_service_set_memory(ProxycclService *service, uint32_t id, char *base, uint64_t bytes, uint64_t key,
                                uint32_t remote_only, char *host) {
  if (id >= PROXYCCL_MAX_MEMORIES) return EINVAL;
  service->memories[id] = (ProxycclMemory){base, bytes, key, remote_only, host};
  return 0;
}

/* Replaces a channel. The old channel first leaves its connection's list, so that no poll confuses the two. */
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
                                 uint64_t *remote_semaphore, uint64_t *flushed, uint64_t *completed) {
  return set_channel(
      service, id,
      (Channel){
          .connection = connection, .remote_semaphore = remote_semaphore, .flushed = flushed, .completed = completed});
}

int proxyccl_service_set_handler(ProxycclService *service, uint32_t id, uint64_t *flushed, uint64_t *completed) {
  return set_channel(service, id, (Channel){.is_handler = 1, .flushed = flushed, .completed = completed});
}
