/* Implements an agent's inbox, and the ranges of memory that peers may reach. See transfers.h. */
#include <errno.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "clock.h"
#include "parts.h"

#define LONGEST_COPY_NS 30000000000u

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
  if (agent->read == inbox->used) agent->read = inbox->used = 0;
  char *to = buffer_extend(inbox, sizeof lengths + name_bytes + bytes);
  if (to == NULL) return ENOMEM;
  memcpy(to, lengths, sizeof lengths);
  memcpy(to + sizeof lengths, name, name_bytes);
  if (bytes > 0) memcpy(to + sizeof lengths + name_bytes, message, bytes);
  __atomic_store_n(&agent->unread, inbox->used - agent->read, __ATOMIC_RELAXED);
  pthread_cond_broadcast(&agent->changed);
  return 0;
}

uint64_t proxyccl_agent_unread(const ProxycclAgent *agent) { return __atomic_load_n(&agent->unread, __ATOMIC_RELAXED); }

uint64_t proxyccl_agent_take(ProxycclAgent *agent, char *to, uint64_t room) {
  uint64_t taken = 0;
  pthread_mutex_lock(&agent->lock);
  while (agent->read + taken < agent->inbox.used) {
    uint64_t lengths[2];
    memcpy(lengths, agent->inbox.bytes + agent->read + taken, sizeof lengths);
    const uint64_t all = sizeof lengths + lengths[0] + lengths[1];
    if (taken + all > room) break;
    taken += all;
  }
  if (taken > 0) memcpy(to, agent->inbox.bytes + agent->read, taken);
  agent->read += taken;
  if (agent->read == agent->inbox.used && agent->inbox.room > 1 << 20) {
    buffer_free(&agent->inbox);
    agent->read = 0;
  }
  __atomic_store_n(&agent->unread, agent->inbox.used - agent->read, __ATOMIC_RELAXED);
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

int proxyccl_agent_tell_itself(ProxycclAgent *agent, const char *message, uint64_t bytes) {
  if (bytes > PROXYCCL_LONGEST_MESSAGE) return EMSGSIZE;
  pthread_mutex_lock(&agent->lock);
  const int error = agent_receive(agent, agent->name, strlen(agent->name), message, bytes);
  pthread_mutex_unlock(&agent->lock);
  return error;
}

uint64_t proxyccl_agent_secret(const ProxycclAgent *agent) { return (uintptr_t)agent->secret; }

/* Returns the ranges of a device's memory, or of host memory if `staging` is NULL; NULL if out of memory. */
static Ranges *ranges_of(ProxycclAgent *agent, const ProxycclStaging *staging) {
  if (staging == NULL) return &agent->host;
  Device *device = agent->devices;
  while (device != NULL && device->staging != staging) device = device->next;
  if (device == NULL && (device = calloc(1, sizeof *device)) != NULL) {
    device->staging = staging;
    device->next = agent->devices;
    agent->devices = device;
  }
  return device == NULL ? NULL : &device->ranges;
}

int proxyccl_agent_set_memory(ProxycclAgent *agent, const ProxycclStaging *staging, const uint64_t *ranges,
                              uint64_t count) {
  pthread_mutex_lock(&agent->lock);
  Ranges *replaced = ranges_of(agent, staging);
  uint64_t *copy = malloc((2 * count + 1) * sizeof *copy);
  const int error = replaced == NULL || copy == NULL ? ENOMEM : 0;
  if (error == 0) {
    memcpy(copy, ranges, 2 * count * sizeof *copy);
    free(replaced->bounds);
    *replaced = (Ranges){copy, count};
    ++agent->memory;
  } else {
    free(copy);
  }
  const uint64_t last = agent->turns;
  const struct timespec deadline = agent_deadline(LONGEST_COPY_NS);
  while (staging != NULL && agent->stages.first != NULL && ((Stage *)agent->stages.first)->turn <= last &&
         !agent->stopped && pthread_cond_timedwait(&agent->changed, &agent->lock, &deadline) == 0) {}
  pthread_mutex_unlock(&agent->lock);
  return error;
}

static int hold(const Ranges *ranges, const struct iovec *block) {
  const uint64_t *starts = ranges->bounds, *ends = starts + ranges->count;
  const uint64_t address = (uintptr_t)block->iov_base;
  uint64_t low = 0, high = ranges->count; /* `low` becomes the number of ranges that start at or before the block */
  while (low < high) {
    const uint64_t middle = (low + high) / 2;
    if (starts[middle] <= address) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low > 0 && address <= ends[low - 1] && ends[low - 1] - address >= block->iov_len;
}

uint64_t agent_lacks(const ProxycclAgent *agent, const struct iovec *blocks, uint64_t count, Device **device) {
  *device = NULL;
  for (uint64_t i = 0; i < count; ++i) {
    if (*device == NULL && hold(&agent->host, &blocks[i])) continue;
    if (i > 0 && *device == NULL) return i; /* all blocks must be in host memory if the first block is */
    Device *holds = agent->devices;
    while (holds != NULL && !hold(&holds->ranges, &blocks[i])) holds = holds->next;
    if (holds == NULL) return i;
    if (i == 0) *device = holds;
  }
  return count;
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
    free(device->ranges.bounds);
    free(device);
  }
  free(agent->fabric);
  free(agent->host.bounds);
  free(agent->listeners);
  free(agent->name);
  free(agent);
}

void agent_unreference(ProxycclAgent *agent) {
  const uint32_t left = --agent->references;
  pthread_mutex_unlock(&agent->lock);
  if (left == 0) agent_free(agent);
}
