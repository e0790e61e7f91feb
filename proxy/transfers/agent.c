/* An agent: its thread, its inbox and the ranges that peers may reach. See transfers.h. */
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "clock.h"
#include "parts.h"

enum { EVENTS = 32, REST_MS = 1, SLACK_NS = 1000 };
#define LONGEST_COPY_NS 30000000000u

int agent_watch(ProxycclAgent *agent, int descriptor, uintptr_t tag, int operation, uint32_t events) {
  struct epoll_event event = {.events = events, .data.u64 = tag};
  return epoll_ctl(agent->epoll, operation, descriptor, &event) == 0 ? 0 : errno;
}

int agent_watch_fabric(ProxycclAgent *agent, int descriptor) {
  if (descriptor < 0) return 0;
  return agent_watch(agent, descriptor, (uintptr_t)agent | TAG_FABRIC, EPOLL_CTL_ADD, EPOLLIN);
}

void agent_wake(ProxycclAgent *agent) {
  const uint64_t one = 1;
  const ssize_t written = write(agent->wake, &one, sizeof one);
  (void)written; /* an eventfd refuses only a value that would overflow it: then the thread is awake already */
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

void proxyccl_agent_tell_losses(ProxycclAgent *agent, int event) {
  pthread_mutex_lock(&agent->lock);
  agent->losses = event;
  pthread_mutex_unlock(&agent->lock);
}

uint64_t proxyccl_agent_secret(const ProxycclAgent *agent) { return (uintptr_t)agent->secret; }

/* Replaces ranges by a copy of others. 0 or ENOMEM. */
static int set_ranges(ProxycclAgent *agent, Ranges *ranges, const uint64_t *bounds, uint64_t count) {
  uint64_t *copy = malloc((2 * count + 1) * sizeof *copy);
  if (copy == NULL) return ENOMEM;
  memcpy(copy, bounds, 2 * count * sizeof *copy);
  free(ranges->bounds);
  *ranges = (Ranges){copy, count};
  ++agent->memory;
  return 0;
}

int proxyccl_agent_set_memory(ProxycclAgent *agent, const uint64_t *ranges, uint64_t count) {
  pthread_mutex_lock(&agent->lock);
  const int error = set_ranges(agent, &agent->host, ranges, count);
  pthread_mutex_unlock(&agent->lock);
  return error;
}

int proxyccl_agent_set_device_memory(ProxycclAgent *agent, const ProxycclStaging *staging, const uint64_t *ranges,
                                     uint64_t count) {
  pthread_mutex_lock(&agent->lock);
  Device *device = agent->devices;
  while (device != NULL && device->staging != staging) device = device->next;
  if (device == NULL && (device = calloc(1, sizeof *device)) != NULL) {
    device->staging = staging;
    device->next = agent->devices;
    agent->devices = device;
  }
  const int error = device == NULL ? ENOMEM : set_ranges(agent, &device->ranges, ranges, count);
  const uint64_t last = agent->turns;
  const struct timespec deadline = agent_deadline(LONGEST_COPY_NS);
  while (agent->stages != NULL && agent->stages->turn <= last && !agent->stopped &&
         pthread_cond_timedwait(&agent->changed, &agent->lock, &deadline) == 0) {}
  pthread_mutex_unlock(&agent->lock);
  return error;
}

static int hold(const Ranges *ranges, const struct iovec *block) {
  const uint64_t *starts = ranges->bounds, *ends = starts + ranges->count;
  const uint64_t address = (uintptr_t)block->iov_base;
  uint64_t low = 0, high = ranges->count; /* how many ranges start at or before the block */
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
    if (i > 0 && *device == NULL) return i; /* the first is the host's */
    Device *holds = agent->devices;
    while (holds != NULL && !hold(&holds->ranges, &blocks[i])) holds = holds->next;
    if (holds == NULL) return i;
    if (i == 0) *device = holds;
  }
  return count;
}

/* Accepts one link. Strangers that send no greeting hold few descriptors: the oldest of them gives way. */
static void accept_link(ProxycclAgent *agent, int listener) {
  int socket = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
  if (socket < 0 && (errno == EMFILE || errno == ENFILE)) { /* refused, or the thread would find it again at once */
    close(agent->spare);
    socket = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    if (socket >= 0) close(socket);
    agent->spare = eventfd(0, EFD_CLOEXEC);
    return;
  }
  if (socket < 0) return; /* it has gone again */
  uint32_t ungreeted = 0;
  ProxycclLink *oldest = NULL; /* the list has the newest first */
  for (ProxycclLink *link = agent->links; link != NULL; link = link->next) {
    if (!link->serves || link->greeted || proxyccl_link_lost(link) != NULL) continue;
    oldest = link;
    ++ungreeted;
  }
  if (ungreeted >= UNGREETED) link_lose(oldest, "no greeting came");
  link_new(agent, socket, -1, 1); /* without memory the socket is closed */
}

/* Takes back the sockets that no caller has looked at since the last look here. */
static void wake_links(ProxycclAgent *agent) {
  for (ProxycclLink *link = agent->links; link != NULL && agent->resting > 0; link = link->next) {
    if (!link->resting) continue;
    if (!link->helped) link_wake(link);
    link->helped = 0;
  }
}

/* Frees links that ended and that nobody refers to. */
static void reap(ProxycclAgent *agent) {
  for (ProxycclLink **at = &agent->links; *at != NULL;) {
    ProxycclLink *link = *at;
    if (link->references == 0 && proxyccl_link_lost(link) != NULL) {
      *at = link->next;
      link_free(link);
    } else {
      at = &link->next;
    }
  }
}

static void handle(ProxycclAgent *agent, const struct epoll_event *event) {
  const uintptr_t tag = event->data.u64;
  if (tag == 0) {
    uint64_t count;
    const ssize_t cleared = read(agent->wake, &count, sizeof count);
    (void)cleared; /* it only woke this thread */
    return;
  }
  void *object = (void *)(tag & ~(uintptr_t)TAG_BITS);
  switch (tag & TAG_BITS) {
    case TAG_LISTENER:
      accept_link(agent, *(const int *)object);
      break;
    case TAG_FABRIC: /* the thread polls it anyway */
      break;
    case TAG_PROCESS:
      link_ready(object, EPOLLIN); /* its last messages */
      link_lose(object, "the peer's process has ended");
      break;
    default:
      link_watched(object, event->events);
  }
}

/* One piece of the next copy of which one may begin; the others have their turn then. 0: there is none, until a caller
 * ends a piece and gives its stage back, or starts or cancels a transfer. */
static int copy_next(ProxycclAgent *agent) {
  ProxycclTransfer *transfer = agent->first;
  while (transfer != NULL && !transfer_has_piece(transfer)) transfer = transfer->next;
  agent->waits_for_stage = transfer == NULL && agent->first != NULL;
  if (transfer == NULL) return 0;
  transfer_unqueue(transfer, &agent->first, &agent->last);
  transfer_queue(transfer, &agent->last);
  transfer_copy(transfer);
  return 1;
}

static void *run(void *argument) {
  ProxycclAgent *agent = argument;
  struct epoll_event events[EVENTS];
  uint64_t woken = 0;
  prctl(PR_SET_TIMERSLACK, SLACK_NS, 0, 0, 0); /* its pauses are shorter than the usual slack of 50 us */
  pthread_mutex_lock(&agent->lock);
  while (!agent->stopped) {
    const int copied = copy_next(agent);
    device_look_at_all(agent);
    stages_look(agent);
    if (agent->fabric != NULL) fabric_poll(agent);
    if (agent->feeds) stages_feed(agent);
    const uint64_t rest = fabric_rest(agent);
    const int looks = agent->looked_at != NULL || agent->stages != NULL;
    const int busy = copied || looks || rest != UINT64_MAX;
    /* Idle until a descriptor has something, or a caller may have stopped polling. */
    const int timeout = busy ? 0 : agent->resting > 0 ? REST_MS : -1;
    uint64_t pause = !copied && looks ? device_pause(agent) : 0;
    if (!copied && rest != UINT64_MAX && (!looks || rest < pause)) pause = rest;
    pthread_mutex_unlock(&agent->lock);
    if (pause > 0) { /* epoll_wait counts in milliseconds */
      struct pollfd any = {.fd = agent->epoll, .events = POLLIN};
      ppoll(&any, 1, &(struct timespec){0, (long)pause}, NULL);
    }
    const int count = epoll_wait(agent->epoll, events, EVENTS, timeout);
    pthread_mutex_lock(&agent->lock);
    for (int i = 0; i < count; ++i) handle(agent, &events[i]);
    if (agent->resting > 0 && now_ns() - woken >= REST_MS * 1000000u) {
      wake_links(agent);
      woken = now_ns();
    }
    reap(agent);
  }
  pthread_mutex_unlock(&agent->lock);
  return NULL;
}

static void free_agent(ProxycclAgent *agent) {
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
  fabric_free(agent);
  free(agent->host.bounds);
  free(agent->listeners);
  free(agent->name);
  free(agent);
}

void agent_unreference(ProxycclAgent *agent) {
  const uint32_t left = --agent->references;
  pthread_mutex_unlock(&agent->lock);
  if (left == 0) free_agent(agent);
}

/* Starts the thread with all signals blocked but those of faults: handlers belong to the program's threads. 0 or an
 * errno. */
static int start_thread(ProxycclAgent *agent) {
  sigset_t all, before;
  sigfillset(&all);
  guard_admit(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  const int error = pthread_create(&agent->thread, NULL, run, agent);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  if (error == 0) pthread_setname_np(agent->thread, "proxyccl-agent");
  return error;
}

ProxycclAgent *proxyccl_agent_create(const char *name, const char *secret, int copied, const int *listeners,
                                     uint32_t count) {
  ProxycclAgent *agent = calloc(1, sizeof *agent);
  int *copy = malloc((count + 1) * sizeof *copy);
  char *named = strdup(name);
  if (agent == NULL || copy == NULL || named == NULL) {
    for (uint32_t i = 0; i < count; ++i) close(listeners[i]);
    free(agent);
    free(copy);
    free(named);
    errno = ENOMEM;
    return NULL;
  }
  memcpy(copy, listeners, count * sizeof *copy);
  memcpy(agent->secret, secret, sizeof agent->secret);
  agent->name = named;
  agent->copied = copied;
  agent->losses = -1;
  agent->listeners = copy;
  agent->listener_count = count;
  agent->references = 1;
  agent->last = &agent->first;
  agent->last_looked_at = &agent->looked_at;
  agent->last_stage = &agent->stages;
  pthread_mutex_init(&agent->lock, NULL);
  pthread_condattr_t monotonic;
  pthread_condattr_init(&monotonic);
  pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
  pthread_cond_init(&agent->changed, &monotonic);
  pthread_condattr_destroy(&monotonic);
  agent->epoll = epoll_create1(EPOLL_CLOEXEC);
  agent->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  agent->spare = eventfd(0, EFD_CLOEXEC);
  int error = agent->epoll < 0 || agent->wake < 0 || agent->spare < 0 ? errno : guard_install();
  if (error == 0) error = agent_watch(agent, agent->wake, 0, EPOLL_CTL_ADD, EPOLLIN);
  for (uint32_t i = 0; i < count && error == 0; ++i) {
    error = agent_watch(agent, copy[i], (uintptr_t)&copy[i] | TAG_LISTENER, EPOLL_CTL_ADD, EPOLLIN);
  }
  if (error == 0) error = start_thread(agent);
  if (error == 0) return agent;
  free_agent(agent);
  errno = error;
  return NULL;
}

void proxyccl_agent_stop(ProxycclAgent *agent) {
  pthread_mutex_lock(&agent->lock);
  const int stopped = agent->stopped;
  agent->stopped = 1;
  pthread_cond_broadcast(&agent->changed);
  pthread_mutex_unlock(&agent->lock);
  if (stopped) return;
  agent_wake(agent);
  pthread_join(agent->thread, NULL);
  pthread_mutex_lock(&agent->lock);
  for (uint32_t i = 0; i < agent->listener_count; ++i) {
    close(agent->listeners[i]);
    agent->listeners[i] = -1;
  }
  for (ProxycclLink *link = agent->links; link != NULL; link = link->next) ++link->references; /* they stay meanwhile */
  for (ProxycclLink *link = agent->links; link != NULL; link = link->next) link_lose(link, "the agent was closed");
  while (agent->first != NULL) transfer_cancel(agent->first, 0); /* within the agent */
  while (agent->looked_at != NULL) transfer_cancel(agent->looked_at, 0);
  stages_finish(agent);
  fabric_stop(agent);
  for (ProxycclLink *link = agent->links; link != NULL; link = link->next) --link->references;
  agent->log = NULL; /* its memory lives no longer than the agent's handle */
  reap(agent);
  pthread_mutex_unlock(&agent->lock);
}

void proxyccl_agent_release(ProxycclAgent *agent) {
  proxyccl_agent_stop(agent);
  pthread_mutex_lock(&agent->lock);
  agent_unreference(agent);
}

void proxyccl_agent_forget(ProxycclAgent *agent) {
  /* Without the lock, which a thread that the child does not have may hold. The child does nothing else here. */
  close(agent->epoll);
  close(agent->wake);
  close(agent->spare);
  for (uint32_t i = 0; i < agent->listener_count; ++i) {
    if (agent->listeners[i] >= 0) close(agent->listeners[i]);
  }
  for (const ProxycclLink *link = agent->links; link != NULL; link = link->next) {
    if (link->socket >= 0) close(link->socket);
    if (link->process >= 0) close(link->process);
  }
}
