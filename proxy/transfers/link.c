/* Links, which are sockets between agents. link_send.c and link_receive.c send and receive the links' frames. */
#include <errno.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "parts.h"

const char *proxyccl_link_lost(const ProxycclLink *link) { return __atomic_load_n(&link->lost, __ATOMIC_ACQUIRE); }

/* Removes a descriptor from the epoll set and closes it. Closing alone does not remove a descriptor from the set while
 * a fork's child has a copy. */
static void unwatch(ProxycclAgent *agent, int *descriptor) {
  if (*descriptor < 0) return;
  agent_watch(agent, *descriptor, 0, EPOLL_CTL_DEL, 0);
  close(*descriptor);
  *descriptor = -1;
}

ProxycclLink *link_new(ProxycclAgent *agent, int socket, int process, int serves) {
  ProxycclLink *link = calloc(1, sizeof *link);
  char *ahead = malloc(AHEAD_BYTES);
  int error = agent->stopped ? ECANCELED : link == NULL || ahead == NULL ? ENOMEM : 0;
  if (error == 0) error = agent_watch(agent, socket, (uintptr_t)link, EPOLL_CTL_ADD, EPOLLIN);
  if (error == 0 && process >= 0) {
    error = agent_watch(agent, process, (uintptr_t)link | TAG_PROCESS, EPOLL_CTL_ADD, EPOLLIN);
  }
  if (error != 0) {
    unwatch(agent, &socket);
    unwatch(agent, &process);
    free(link);
    free(ahead);
    errno = error;
    return NULL;
  }
  link->agent = agent;
  link->socket = socket;
  link->process = process;
  link->serves = serves;
  link->references = serves ? 0 : 1;
  link->ahead = ahead;
  link->in.left = sizeof link->in.frame;
  link->next = agent->links;
  agent->links = link;
  ++agent->references;
  return link;
}

void link_watch(ProxycclLink *link, uint32_t events) {
  if (agent_watch(link->agent, link->socket, (uintptr_t)link, EPOLL_CTL_MOD, events) != 0) {
    link_lose(link, "epoll cannot watch the link's socket");
  }
}

void link_wake(ProxycclLink *link) {
  link->helped = 0;
  if (!link->resting) return;
  link->resting = 0;
  --link->agent->resting;
  if (link->lost != NULL) return;
  link_watch(link, EPOLLIN | (link->writable ? EPOLLOUT : 0));
}

void request_end(Request *request) {
  if (!request->active) return;
  request->active = 0;
  request->ended(request);
}

void link_end_sending(ProxycclLink *link) {
  if (link->out.stage != NULL) stage_give(link->out.stage);
  free(link->out.own);
  link->out.stage = NULL;
  link->out.own = NULL;
  link->out.request = NULL;
  link->out.answer = NULL;
  link->out.head.used = link->out.sent = 0;
  link->out.left = link->out.tail_left = 0;
}

void link_lose(ProxycclLink *link, const char *reason) {
  ProxycclAgent *agent = link->agent;
  if (link->lost != NULL) return;
  __atomic_store_n(&link->lost, reason, __ATOMIC_RELEASE);
  link_wake(link);
  unwatch(agent, &link->socket);
  unwatch(agent, &link->process);
  link_end_sending(link);
  for (Request *request; (request = queue_pop(&link->requests)) != NULL;) request_end(request);
  for (; link->unanswered > 0; --link->unanswered) {
    Request *request = link->awaited[link->oldest++ % WINDOW].request;
    if (request != NULL) request_end(request);
  }
  for (Node *each = agent->copies.first, *next; each != NULL; each = next) {
    ProxycclTransfer *transfer = (ProxycclTransfer *)each;
    next = each->next;
    if (transfer->link == link) transfer->path->lose(transfer);
  }
  fabric_lose(link);
  if (!link->serves) {
    const uint64_t one = 1;
    const ssize_t written = write(agent->losses, &one, sizeof one);
    (void)written; /* the write fails only if the eventfd's count would overflow, and then the reader wakes anyway */
  }
  if (link->in.stage != NULL) stage_give(link->in.stage);
  link->in.stage = NULL;
  for (Answer *answer; (answer = queue_pop(&link->answers)) != NULL; free(answer)) {
    if (answer->stage != NULL) stage_give(answer->stage);
  }
}

void link_free(ProxycclLink *link) {
  --link->agent->references;
  buffer_free(&link->messages);
  buffer_free(&link->out.head);
  buffer_free(&link->in.body);
  free(link->ahead);
  free(link->name);
  free(link);
}

void link_unreference(ProxycclLink *link) {
  ProxycclAgent *agent = link->agent;
  if (--link->references > 0 || link->lost == NULL) return;
  if (!agent->stopped) {
    agent_wake(agent); /* the agent's thread frees the link, because events that it has received may name the link */
    return;
  }
  ProxycclLink **at = &agent->links;
  while (*at != link) at = &(*at)->next;
  *at = link->next;
  link_free(link);
}

int link_append(ProxycclLink *link, FrameKind kind, uint32_t count, const void *first, uint64_t first_bytes,
                const void *second, uint64_t second_bytes) {
  Buffer *messages = &link->messages;
  const Frame frame = {kind, count, first_bytes + second_bytes};
  if (link->lost != NULL) return ENOTCONN;
  if (messages->used > PROXYCCL_MOST_UNSENT) return ENOBUFS;
  const size_t before = messages->used;
  if (buffer_append(messages, &frame, sizeof frame) && buffer_append(messages, first, first_bytes) &&
      buffer_append(messages, second, second_bytes)) {
    return 0;
  }
  messages->used = before;
  return ENOMEM;
}

void proxyccl_link_end(ProxycclLink *link) {
  pthread_mutex_lock(&link->agent->lock);
  link_lose(link, "the peer was removed");
  pthread_mutex_unlock(&link->agent->lock);
}

void proxyccl_link_release(ProxycclLink *link) {
  ProxycclAgent *agent = link->agent;
  pthread_mutex_lock(&agent->lock);
  link_lose(link, "the peer was removed");
  ++agent->references; /* keeps the agent allocated during this call */
  link_unreference(link);
  agent_unreference(agent);
}
