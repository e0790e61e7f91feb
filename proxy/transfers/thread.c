/* An agent's thread, which starts and ends with the agent. See transfers.h. */
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "clock.h"
#include "parts.h"

enum {
  EVENTS = 32,
  REST_MS = 1,
  SLACK_NS = 1000,
  FEWEST_UNGREETED = 64,
  MOST_UNGREETED = 1024 /* the listeners' backlog */
};

/* Returns the most accepted links that may wait for their greetings at the same time. Many peers may connect at once,
 * and a greeting arrives a round trip after its connection, so this is up to a quarter of the process's descriptors. */
static uint32_t most_ungreeted(void) {
  struct rlimit descriptors;
  if (getrlimit(RLIMIT_NOFILE, &descriptors) != 0) return FEWEST_UNGREETED;
  const rlim_t share = descriptors.rlim_cur / 4;
  if (share < FEWEST_UNGREETED) return FEWEST_UNGREETED;
  return share < MOST_UNGREETED ? (uint32_t)share : MOST_UNGREETED;
}

/* Accepts one connection as a link. If most_ungreeted() accepted peers have not sent their greeting yet, first closes
 * the oldest of their links, so that silent peers can't use up the process's descriptors. */
static void accept_link(ProxycclAgent *agent, int listener) {
  int socket = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
  if (socket < 0 && (errno == EMFILE || errno == ENFILE)) { /* drops the connection, so that epoll reports it once */
    close(agent->spare);
    socket = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    if (socket >= 0) close(socket);
    agent->spare = eventfd(0, EFD_CLOEXEC);
    return;
  }
  if (socket < 0) return; /* the peer has already closed the connection */
  if (listener != agent->listeners[0]) {
    const ssize_t sent = send(socket, agent->token, sizeof agent->token, MSG_NOSIGNAL);
    (void)sent; /* a new connection has room for the token, unless the peer has already closed the connection */
  }
  uint32_t ungreeted = 0;
  ProxycclLink *oldest = NULL; /* the last link found, because the list begins with the newest link */
  for (ProxycclLink *link = agent->links; link != NULL; link = link->next) {
    if (!link->serves || link->greeted || proxyccl_link_lost(link) != NULL) continue;
    oldest = link;
    ++ungreeted;
  }
  if (ungreeted >= most_ungreeted()) link_lose(oldest, "the peer sent no greeting in time");
  link_new(agent, socket, -1, 1); /* closes the socket if out of memory */
}

/* Makes the thread watch again all sockets that no caller has polled since the last call of this function. */
static void wake_links(ProxycclAgent *agent) {
  for (ProxycclLink *link = agent->links; link != NULL && agent->resting > 0; link = link->next) {
    if (!link->resting) continue;
    if (!link->helped) link_wake(link);
    link->helped = 0;
  }
}

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
    (void)cleared; /* the count has no meaning: the eventfd only wakes this thread */
    return;
  }
  void *object = (void *)(tag & ~(uintptr_t)TAG_BITS);
  switch (tag & TAG_BITS) {
    case TAG_LISTENER:
      accept_link(agent, *(const int *)object);
      break;
    case TAG_FABRIC: /* the thread's loop polls the completion queue */
      break;
    case TAG_PROCESS:
      link_ready(object, EPOLLIN); /* first reads the last answers of the ended process */
      link_lose(object, "the peer's process has ended");
      break;
    default:
      link_watched(object, event->events);
  }
}

/* Copies one piece of the first transfer that has a piece to copy and, if it needs a stage, a free stage. Moves the
 * transfer to the queue's end. Returns 0 if no transfer can copy a piece. A thread that starts a transfer or frees a
 * stage wakes this thread. */
static int copy_next(ProxycclAgent *agent) {
  agent->waits_for_stage = 0;
  for (Node *each = agent->copies.first; each != NULL; each = each->next) {
    ProxycclTransfer *transfer = (ProxycclTransfer *)each;
    if (!transfer->path->copy(transfer)) continue;
    if (!each->queued) return 1;
    queue_remove(&agent->copies, each);
    queue_push(&agent->copies, each);
    return 1;
  }
  agent->waits_for_stage = agent->copies.first != NULL;
  return 0;
}

static void *run(void *argument) {
  ProxycclAgent *agent = argument;
  struct epoll_event events[EVENTS];
  uint64_t woken = 0;
  prctl(PR_SET_TIMERSLACK, SLACK_NS, 0, 0, 0); /* the default timer slack of 50 us is too long for the pauses below */
  pthread_mutex_lock(&agent->lock);
  while (!agent->stopped) {
    const int copied = copy_next(agent);
    transfers_look(agent);
    stages_look(agent);
    if (agent->fabric != NULL) fabric_poll(agent);
    if (agent->feeds) links_feed(agent);
    const uint64_t rest = fabric_rest(agent);
    const int looks = agent->looked_at.first != NULL || agent->stages.first != NULL;
    const int busy = copied || looks || rest != UINT64_MAX;
    /* Sleeps until a descriptor is ready, or until it is time to check whether callers have stopped polling. */
    const int timeout = busy ? 0 : agent->resting > 0 ? REST_MS : -1;
    uint64_t pause = !copied && looks ? transfers_pause(agent) : 0;
    if (!copied && rest != UINT64_MAX && (!looks || rest < pause)) pause = rest;
    pthread_mutex_unlock(&agent->lock);
    if (pause > 0) { /* ppoll is used, because the time-outs of epoll_wait are in milliseconds */
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

/* Starts the thread with all signals except fault signals blocked, so that the program's signal handlers run in the
 * program's threads. Returns 0 or an errno. */
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

ProxycclAgent *proxyccl_agent_create(const char *name, const char *token, const char *secret, int copied,
                                     const int *listeners, uint32_t count, int losses, ProxycclTransferLog *log) {
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
  memcpy(agent->token, token, sizeof agent->token);
  memcpy(agent->secret, secret, sizeof agent->secret);
  agent->name = named;
  agent->copied = copied;
  agent->losses = losses;
  agent->log = log;
  agent->listeners = copy;
  agent->listener_count = count;
  agent->references = 1;
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
  agent_free(agent);
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
  for (ProxycclLink *link = agent->links; link != NULL; link = link->next) ++link->references; /* keeps the link */
  for (ProxycclLink *link = agent->links; link != NULL; link = link->next) link_lose(link, "the agent was closed");
  while (agent->copies.first != NULL)
    transfer_cancel((ProxycclTransfer *)agent->copies.first, 0); /* transfers within the agent have no link */
  fabric_stop(agent); /* before the next line, because staged transfers wait for the end of their requests there */
  while (agent->looked_at.first != NULL) transfer_cancel((ProxycclTransfer *)agent->looked_at.first, 0);
  stages_finish(agent);
  /* Waits for threads of the program that are copying a piece. */
  const struct timespec deadline = agent_deadline(LONGEST_CANCEL_NS);
  while (agent->copying > 0 && pthread_cond_timedwait(&agent->changed, &agent->lock, &deadline) == 0) {}
  for (ProxycclLink *link = agent->links; link != NULL; link = link->next) --link->references;
  agent->log = NULL; /* stops recording, because the log's memory is freed with the agent's handle */
  reap(agent);
  pthread_mutex_unlock(&agent->lock);
}

void proxyccl_agent_release(ProxycclAgent *agent) {
  proxyccl_agent_stop(agent);
  pthread_mutex_lock(&agent->lock);
  agent_unreference(agent);
}

void proxyccl_agent_forget(ProxycclAgent *agent) {
  /* The lock can't be taken here, because a thread of the parent may have held it at the fork. */
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
