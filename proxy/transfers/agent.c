/* Implements an agent's inbox. See transfers.h. */
#include <errno.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "clock.h"
#include "parts.h"

int agent_watch(ProxycclAgent *agent, int descriptor, uintptr_t tag, int operation, uint32_t events) {
  struct epoll_event event = {.events = events, .data.u64 = tag};
  return epoll_ctl(agent->epoll, operation, descriptor, &event) == 0 ? 0 : errno;
}

void agent_wake(ProxycclAgent *agent) {
  const uint64_t one = 1;
  const ssize_t written = write(agent->wake, &one, sizeof one);
  (void)
      written; /* a write to an eventfd fails only if the count would overflow, and then the thread is awake already */
}

struct timespec agent_deadline(uint64_t timeout_ns) {
  const uint64_t now = now_ns();
  const uint64_t at = timeout_ns > UINT64_MAX / 4 ? UINT64_MAX / 4 : now + timeout_ns;
  return (struct timespec){(time_t)(at / 1000000000u), (long)(at % 1000000000u)};
}

int agent_receive(ProxycclAgent *agent, const char *name, uint64_t name_bytes, const char *message, uint64_t bytes) {
  const uint64_t lengths[2] = {name_bytes, bytes};
  Buffer *inbox = &agent->inbox;
  char *to = buffer_extend(inbox, sizeof lengths + name_bytes + bytes);
  if (to == NULL) return ENOMEM;
  memcpy(to, lengths, sizeof lengths);
  memcpy(to + sizeof lengths, name, name_bytes);
  if (bytes > 0) memcpy(to + sizeof lengths + name_bytes, message, bytes);
  __atomic_store_n(&agent->unread, inbox->used, __ATOMIC_RELAXED);
  pthread_cond_broadcast(&agent->changed);
  return 0;
}

uint64_t proxyccl_agent_unread(const ProxycclAgent *agent) { return __atomic_load_n(&agent->unread, __ATOMIC_RELAXED); }

uint64_t proxyccl_agent_take(ProxycclAgent *agent, char *to, uint64_t room) {
  uint64_t taken = 0;
  Buffer *inbox = &agent->inbox;
  pthread_mutex_lock(&agent->lock);
  while (taken < inbox->used) {
    uint64_t lengths[2];
    memcpy(lengths, inbox->bytes + taken, sizeof lengths);
    const uint64_t all = sizeof lengths + lengths[0] + lengths[1];
    if (taken + all > room) break;
    taken += all;
  }
  if (taken > 0) {
    memcpy(to, inbox->bytes, taken);
    inbox->used -= taken;
    memmove(inbox->bytes, inbox->bytes + taken, inbox->used);
  }
  if (inbox->used == 0 && inbox->room > 1 << 20) buffer_free(inbox);
  __atomic_store_n(&agent->unread, inbox->used, __ATOMIC_RELAXED);
  pthread_mutex_unlock(&agent->lock);
  return taken;
}

int proxyccl_agent_wait(ProxycclAgent *agent, uint64_t timeout_ns) {
  const struct timespec deadline = agent_deadline(timeout_ns);
  pthread_mutex_lock(&agent->lock);
  while (agent->unread == 0 && !agent->stopped &&
         pthread_cond_timedwait(&agent->changed, &agent->lock, &deadline) == 0) {}
  const int has_one = agent->unread > 0;
  pthread_mutex_unlock(&agent->lock);
  return has_one;
}

uint64_t proxyccl_agent_secret(const ProxycclAgent *agent) { return (uintptr_t)agent->secret; }

static void free_regions(Regions *regions) {
  buffer_free(&regions->sorted);
  buffer_free(&regions->added);
  buffer_free(&regions->removed);
  buffer_free(&regions->spare);
}

void agent_free(ProxycclAgent *agent) {
  for (uint32_t i = 0; i < agent->listener_count; ++i) {
    if (agent->listeners[i] >= 0) close(agent->listeners[i]);
  }
  if (agent->epoll >= 0) close(agent->epoll);
  if (agent->wake >= 0) close(agent->wake);
  if (agent->spare >= 0) close(agent->spare);
  pthread_cond_destroy(&agent->changed);
  pthread_mutex_destroy(&agent->lock);
  buffer_free(&agent->inbox);
  for (Device *device = agent->devices, *next; device != NULL; device = next) {
    next = device->next;
    free_regions(&device->regions);
    free(device);
  }
  free(agent->fabric);
  free_regions(&agent->host);
  free(agent->listeners);
  free(agent->name);
  free(agent);
}

void agent_unreference(ProxycclAgent *agent) {
  const uint32_t left = --agent->references;
  pthread_mutex_unlock(&agent->lock);
  if (left == 0) agent_free(agent);
}
