/* Posts an agent's libfabric requests and polls for their completions. See transfers.h.
 *
 * Some providers execute a peer's requests only when this process polls its completion queue, so the agent's thread
 * polls the queue even while the agent has no outstanding request.
 */
#include <errno.h>
#include <sys/epoll.h>

#include "clock.h"
#include "parts.h"

#if __has_include(<rdma/fi_rma.h>)

#include "fabric_queue.h"

enum {
  ACTIVE_NS = 20000, /* ns between two polls of a completion queue without a descriptor */
  IDLE_NS = 1000000  /* ns between two polls of a completion queue without a descriptor if no request is outstanding */
};
#define LONGEST_STOP_NS 1000000000ull

/* A posted request. The provider owns `context` until the completion. */
typedef struct Posted {
  struct fi_context2 context;
  struct Posted *next;
  Rdma *rdma; /* NULL if fabric_stop has ended the Rdma before the request completed */
  uint64_t remote;
} Posted;

typedef struct Fabric {
  ProxycclFabricPort port;
  struct fid_ep *endpoint;
  struct fid_cq *queue;
  Queue waiting; /* the Rdmas with requests to post; each posts one request in turn */
  Posted *unused;
  uint32_t outstanding;
  int failed; /* the completion queue's error; 0 while the queue works */
  Posted posted[];
} Fabric;

int proxyccl_agent_set_fabric(ProxycclAgent *agent, const ProxycclFabricPort *port) {
  int error = guard_install(); /* the provider may have replaced the fault handler */
  if (error != 0) return error;
  Fabric *fabric = calloc(1, sizeof *fabric + port->depth * sizeof *fabric->posted);
  if (fabric == NULL) return ENOMEM;
  fabric->port = *port;
  fabric->endpoint = (struct fid_ep *)(uintptr_t)port->endpoint;
  fabric->queue = (struct fid_cq *)(uintptr_t)port->queue;
  for (uint32_t i = 0; i < port->depth; ++i) {
    fabric->posted[i].next = fabric->unused;
    fabric->unused = &fabric->posted[i];
  }
  pthread_mutex_lock(&agent->lock);
  if (port->descriptor >= 0)
    error = agent_watch(agent, port->descriptor, (uintptr_t)agent | TAG_FABRIC, EPOLL_CTL_ADD, EPOLLIN);
  if (error == 0) agent->fabric = fabric;
  pthread_mutex_unlock(&agent->lock);
  if (error == 0) {
    agent_wake(agent);
  } else {
    free(fabric);
  }
  return error;
}

static void end_if_over(Rdma *rdma) {
  if (rdma->left == 0 && rdma->unanswered == 0) rdma->ended(rdma);
}

static void drop_rest(Fabric *fabric, Rdma *rdma) {
  rdma->left = 0;
  queue_remove(&fabric->waiting, rdma);
}

/* Records the failure of an Rdma's request, and drops the Rdma's requests that are not posted. */
static void fail(Fabric *fabric, Rdma *rdma, int error, uint64_t remote) {
  if (rdma->error == 0) {
    rdma->error = error;
    rdma->fault = remote;
  }
  drop_rest(fabric, rdma);
}

/* Posts the next request of the first waiting Rdma. Returns 0 if the provider's queue is full. */
static int post(Fabric *fabric) {
  Rdma *rdma = (Rdma *)fabric->waiting.first;
  const uint64_t *row = rdma->rows + ROW * rdma->at.index, offset = rdma->at.offset;
  const uint64_t rest = row[2] - offset, most = fabric->port.max_message;
  const uint64_t bytes = rest < most ? rest : most;
  Posted *posted = fabric->unused;
  FabricMemory parts = {0};
  fabric_add_part(&parts, (char *)(uintptr_t)row[0] + offset, (void *)(uintptr_t)row[3], row[1] + offset, row[4],
                  bytes);
  const int error = fabric_post(fabric->endpoint, rdma->peer, !rdma->writes, 1, &parts, posted);
  if (error == FI_EAGAIN) return 0;
  if (error != 0) {
    fail(fabric, rdma, error, row[5] + offset);
    end_if_over(rdma);
    return 1;
  }
  fabric->unused = posted->next;
  posted->rdma = rdma;
  posted->remote = row[5] + offset;
  ++fabric->outstanding;
  ++rdma->unanswered;
  rdma->left -= bytes;
  rdma->at = bytes < rest ? (Position){rdma->at.index, offset + bytes} : (Position){rdma->at.index + 1, 0};
  queue_remove(&fabric->waiting, rdma);
  if (rdma->left > 0) queue_push(&fabric->waiting, rdma);
  return 1;
}

static void complete(void *owner, void *context, int error, const struct fi_cq_err_entry *entry) {
  Fabric *fabric = owner;
  Posted *posted = context;
  (void)entry;
  if (posted == NULL) return; /* without a `context`, the call reports a failure of the queue */
  Rdma *rdma = posted->rdma;
  posted->rdma = NULL;
  posted->next = fabric->unused;
  fabric->unused = posted;
  --fabric->outstanding;
  if (rdma == NULL) return;
  --rdma->unanswered;
  if (error != 0) fail(fabric, rdma, error, posted->remote);
  end_if_over(rdma);
}

/* Fails all requests, because the queue will report no more completions. */
static void fail_all(Fabric *fabric) {
  for (uint32_t i = 0; i < fabric->port.depth; ++i) {
    if (fabric->posted[i].rdma != NULL) complete(fabric, &fabric->posted[i], fabric->failed, NULL);
  }
  while (fabric->waiting.first != NULL) {
    Rdma *rdma = (Rdma *)fabric->waiting.first;
    fail(fabric, rdma, fabric->failed, 0);
    end_if_over(rdma);
  }
}

void fabric_poll(ProxycclAgent *agent) {
  Fabric *fabric = agent->fabric;
  uint32_t taken = 0;
  if (fabric->failed == 0) {
    fabric->failed = fabric_drain(fabric->queue, complete, fabric, &taken);
    /* Stops watching the descriptor, which may stay readable forever after the queue has failed. */
    if (fabric->failed != 0 && fabric->port.descriptor >= 0)
      agent_watch(agent, fabric->port.descriptor, 0, EPOLL_CTL_DEL, 0);
  }
  if (fabric->failed != 0) {
    fail_all(fabric);
    return;
  }
  while (fabric->waiting.first != NULL && fabric->unused != NULL && post(fabric)) {}
}

int fabric_failed(const ProxycclAgent *agent) { return agent->fabric->failed != 0; }

void rdma_start(ProxycclAgent *agent, Rdma *rdma, uint64_t bytes) {
  Fabric *fabric = agent->fabric;
  rdma->at = (Position){0, 0};
  rdma->left = bytes;
  rdma->error = 0;
  rdma->fault = 0;
  queue_push(&fabric->waiting, rdma);
  fabric_poll(agent);                             /* fabric_poll may end and free the Rdma */
  if (fabric->outstanding > 0) agent_wake(agent); /* the thread must poll, because completions may not wake it */
}

void rdma_drop(ProxycclAgent *agent, Rdma *rdma) { drop_rest(agent->fabric, rdma); }

int fabric_know(ProxycclLink *link, const void *address, uint64_t bytes) {
  const Fabric *fabric = link->agent->fabric;
  char whole[LONGEST_ADDRESS] = {0}; /* providers read the full length of the address format */
  if (fabric == NULL || link->addressed) return 0;
  memcpy(whole, address, bytes);
  return fi_av_insert((struct fid_av *)(uintptr_t)fabric->port.peers, whole, 1, &link->address, 0, NULL) == 1;
}

void fabric_forget(ProxycclLink *link) {
  struct fid_av *peers = (struct fid_av *)(uintptr_t)link->agent->fabric->port.peers;
  fi_addr_t address = link->address;
  fi_av_remove(peers, &address, 1, 0);
}

uint64_t fabric_rest(ProxycclAgent *agent) {
  const Fabric *fabric = agent->fabric;
  if (fabric == NULL || fabric->failed != 0) return UINT64_MAX;
  if (fabric->port.descriptor >= 0) {
    struct fid *queue = &fabric->queue->fid;
    /* A nonzero result means that completions have arrived for which the descriptor will not become readable. */
    return fi_trywait((struct fid_fabric *)(uintptr_t)fabric->port.fabric, &queue, 1) == 0 ? UINT64_MAX : 0;
  }
  return fabric->outstanding > 0 ? ACTIVE_NS : IDLE_NS;
}

void fabric_lose(ProxycclLink *link) {
  Fabric *fabric = link->agent->fabric;
  for (Node *each = fabric == NULL ? NULL : fabric->waiting.first, *next; each != NULL; each = next) {
    Rdma *rdma = (Rdma *)each;
    next = each->next;
    if (rdma->link != link) continue;
    drop_rest(fabric, rdma);
    end_if_over(rdma); /* ends the Rdma unless requests are posted; otherwise the last completion ends it */
  }
}

void fabric_stop(ProxycclAgent *agent) {
  Fabric *fabric = agent->fabric;
  const uint64_t deadline = now_ns() + LONGEST_STOP_NS;
  const struct timespec pause = {0, ACTIVE_NS};
  if (fabric == NULL) return;
  while (fabric->waiting.first != NULL) {
    Rdma *rdma = (Rdma *)fabric->waiting.first;
    rdma->canceled = 1;
    drop_rest(fabric, rdma);
    end_if_over(rdma);
  }
  for (uint32_t i = 0; i < fabric->port.depth; ++i) {
    if (fabric->posted[i].rdma != NULL) fabric->posted[i].rdma->canceled = 1;
  }
  for (fabric_poll(agent); fabric->outstanding > 0 && now_ns() < deadline; fabric_poll(agent)) {
    pthread_mutex_unlock(&agent->lock);
    nanosleep(&pause, NULL);
    pthread_mutex_lock(&agent->lock);
  }
  for (uint32_t i = 0; i < fabric->port.depth; ++i) { /* ends the remaining requests without completions */
    Rdma *rdma = fabric->posted[i].rdma;
    fabric->posted[i].rdma = NULL;
    if (rdma == NULL) continue;
    --rdma->unanswered;
    end_if_over(rdma);
  }
}

#else

#pragma GCC diagnostic ignored "-Wunused-parameter"

int proxyccl_agent_set_fabric(ProxycclAgent *agent, const ProxycclFabricPort *port) { return ENOSYS; }

/* In a build without libfabric an agent has no endpoint, so these functions do nothing. */
void rdma_start(ProxycclAgent *agent, Rdma *rdma, uint64_t bytes) {}
void rdma_drop(ProxycclAgent *agent, Rdma *rdma) {}
int fabric_failed(const ProxycclAgent *agent) { return agent == NULL; }
void fabric_poll(ProxycclAgent *agent) {}
uint64_t fabric_rest(ProxycclAgent *agent) { return agent == NULL ? 0 : UINT64_MAX; }
int fabric_know(ProxycclLink *link, const void *address, uint64_t bytes) { return 0; }
void fabric_forget(ProxycclLink *link) {}
void fabric_lose(ProxycclLink *link) {}
void fabric_stop(ProxycclAgent *agent) {}

#endif
