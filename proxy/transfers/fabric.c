/* Posts an agent's libfabric requests and polls for their completions. See transfers.h.
 *
 * Some providers execute a peer's requests only when this process polls its completion queues, so the agent's thread
 * polls the queues even while the agent has no outstanding request.
 */
#include <errno.h>
#include <sys/epoll.h>

#include "clock.h"
#include "parts.h"

size_t row_words(const ProxycclLink *link) { return ROW + (size_t)2 * link->rails; }

void row_add_rails(uint64_t *row, const ProxycclLink *link, const ProxycclStaging *staging, const uint64_t *keys) {
  for (uint32_t i = 0; i < link->rails; ++i) {
    row[ROW + 2 * i] = staging->descriptors[i];
    row[ROW + 2 * i + 1] = keys[i];
  }
}

#if __has_include(<rdma/fi_rma.h>)

#include "fabric_queue.h"

enum {
  ACTIVE_NS = 20000, /* ns between two polls of a completion queue without a descriptor */
  IDLE_NS = 1000000, /* ns between two polls of a completion queue without a descriptor if no request is outstanding */
  STRIPE_BYTES = 512 << 10, /* most bytes of a request if the link has several rails */
  WINDOW_BYTES = 4 << 20    /* most outstanding bytes of a link on each of several rails */
};
#define STALLED_NS 2000000000ull /* a rail on which a link's requests make no progress for this time has stalled */
#define DOWN_NS 10000000000ull   /* for this time after a failed request, a link prefers other rails */
#define LONGEST_STOP_NS 1000000000ull

typedef struct Rail Rail;

/* A posted request. The provider owns `context` until the completion. */
typedef struct Posted {
  struct fi_context2 context;
  struct Posted *next;
  Rail *rail;
  Rdma *rdma; /* NULL if fabric_stop has ended the Rdma before the request completed */
  uint64_t remote, bytes;
} Posted;

struct Rail {
  ProxycclFabricPort port;
  struct fid_ep *endpoint;
  struct fid_cq *queue;
  Posted *unused;
  uint64_t bytes;  /* bytes of the outstanding requests; each request has at least one byte */
  uint64_t posted; /* bytes of all requests so far */
  int full;        /* whether the provider has refused a request since the last poll, because the provider is full */
  int failed;      /* the completion queue's error; 0 while the queue works */
};

typedef struct Fabric {
  Queue waiting; /* the Rdmas with requests to post; each posts one request in turn */
  uint32_t count;
  Rail rails[PROXYCCL_AGENT_RAILS];
  uint32_t depth; /* number of elements of `posted` */
  Posted posted[];
} Fabric;

int proxyccl_agent_set_fabric(ProxycclAgent *agent, const ProxycclFabricPort *ports, uint32_t count) {
  int error = guard_install(); /* the provider may have replaced the fault handler */
  if (error != 0) return error;
  uint64_t depth = 0;
  for (uint32_t i = 0; i < count; ++i) depth += ports[i].depth;
  Fabric *fabric = calloc(1, sizeof *fabric + depth * sizeof *fabric->posted);
  if (fabric == NULL) return ENOMEM;
  pthread_mutex_lock(&agent->lock);
  for (; fabric->count < count && error == 0; ++fabric->count) {
    const ProxycclFabricPort *port = &ports[fabric->count];
    Rail *rail = &fabric->rails[fabric->count];
    rail->port = *port;
    rail->endpoint = (struct fid_ep *)(uintptr_t)port->endpoint;
    rail->queue = (struct fid_cq *)(uintptr_t)port->queue;
    for (uint32_t i = 0; i < port->depth; ++i) {
      Posted *posted = &fabric->posted[fabric->depth++];
      posted->rail = rail;
      posted->next = rail->unused;
      rail->unused = posted;
    }
    if (port->descriptor >= 0)
      error = agent_watch(agent, port->descriptor, (uintptr_t)agent | TAG_FABRIC, EPOLL_CTL_ADD, EPOLLIN);
  }
  agent->fabric = fabric;
  pthread_mutex_unlock(&agent->lock);
  agent_wake(agent);
  return error;
}

static void end_if_over(Rdma *rdma) {
  if (rdma->left == 0 && rdma->unanswered == 0) rdma->ended(rdma);
}

void rdma_drop(Rdma *rdma) {
  rdma->left = 0;
  queue_remove(&rdma->link->agent->fabric->waiting, rdma);
}

/* Records the failure of an Rdma's request, and drops the Rdma's requests that are not posted. */
static void fail(Rdma *rdma, int error, uint64_t remote) {
  if (rdma->error == 0) {
    rdma->error = error;
    rdma->fault = remote;
  }
  rdma_drop(rdma);
}

/* Posts the next request of an Rdma on a rail that has room. */
static void post(Fabric *fabric, Rail *rail, Rdma *rdma) {
  const uint64_t *row = rdma->rows + row_words(rdma->link) * rdma->at.index, offset = rdma->at.offset;
  const size_t number = (size_t)(rail - fabric->rails);
  const uint64_t descriptor = row[ROW + 2 * number], key = row[ROW + 2 * number + 1];
  LinkRail *of_link = &rdma->link->rail[number];
  const uint64_t rest = row[2] - offset;
  uint64_t most = rail->port.max_message;
  if (rdma->link->rails > 1 && most > STRIPE_BYTES) most = STRIPE_BYTES;
  const uint64_t bytes = rest < most ? rest : most;
  Posted *posted = rail->unused;
  FabricMemory parts = {0};
  fabric_add_part(&parts, (char *)(uintptr_t)row[0] + offset, (void *)(uintptr_t)descriptor, row[1] + offset, key,
                  bytes);
  const int error = fabric_post(rail->endpoint, of_link->address, !rdma->writes, 1, &parts, posted);
  if (error == FI_EAGAIN) {
    rail->full = 1;
    return;
  }
  if (error != 0) {
    of_link->failed = now_ns();
    fail(rdma, error, row[3] + offset);
    end_if_over(rdma);
    return;
  }
  rail->unused = posted->next;
  rail->bytes += bytes;
  rail->posted += bytes;
  if (of_link->bytes == 0) of_link->moved = now_ns();
  of_link->bytes += bytes;
  posted->rdma = rdma;
  posted->remote = row[3] + offset;
  posted->bytes = bytes;
  ++rdma->unanswered;
  rdma->left -= bytes;
  rdma->at = bytes < rest ? (Position){rdma->at.index, offset + bytes} : (Position){rdma->at.index + 1, 0};
  queue_remove(&fabric->waiting, rdma);
  if (rdma->left > 0) queue_push(&fabric->waiting, rdma);
}

static int is_stalled(const LinkRail *rail) { return rail->bytes > 0 && now_ns() - rail->moved >= STALLED_NS; }

uint32_t proxyccl_link_stalled(const ProxycclLink *link) {
  uint32_t stalled = 0;
  pthread_mutex_lock(&link->agent->lock);
  for (uint32_t i = 0; i < link->rails; ++i) stalled |= (uint32_t)is_stalled(&link->rail[i]) << i;
  pthread_mutex_unlock(&link->agent->lock);
  return stalled;
}

static int is_down(const LinkRail *rail) { return rail->failed != 0 && now_ns() - rail->failed < DOWN_NS; }

/* Returns the rail for a link's next request: of the rails that have room, the one on which the link has the fewest
 * outstanding bytes or, if these are equal, the one that has carried the fewest bytes. A rail on which a request of the
 * link has failed lately is chosen only if this holds for all rails. Returns NULL if no rail has room, and sets *error
 * to the error of a rail if all rails have failed, else to 0. */
static Rail *choose_rail(Fabric *fabric, const ProxycclLink *link, int *error) {
  Rail *best = NULL;
  uint64_t fewest = 0;
  uint32_t failed = 0, reliable = 0;
  for (uint32_t i = 0; i < link->rails; ++i) {
    const Rail *rail = &fabric->rails[i];
    if (rail->failed != 0) *error = rail->failed;
    failed += rail->failed != 0;
    reliable += rail->failed == 0 && !is_down(&link->rail[i]);
  }
  if (failed < link->rails) *error = 0;
  for (uint32_t i = 0; i < link->rails; ++i) {
    Rail *rail = &fabric->rails[i];
    const LinkRail *of_link = &link->rail[i];
    if (rail->failed != 0 || rail->full || rail->unused == NULL) continue;
    if (reliable > 0 && is_down(of_link)) continue;
    if (link->rails > 1 && (of_link->bytes >= WINDOW_BYTES || is_stalled(of_link))) continue;
    if (best != NULL && of_link->bytes > fewest) continue;
    if (best != NULL && of_link->bytes == fewest && rail->posted >= best->posted) continue;
    best = rail;
    fewest = of_link->bytes;
  }
  return best;
}

/* Handles the first waiting Rdma that can go on. If a rail has room, posts one of the Rdma's requests. If all of its
 * rails have failed, or a registration of its local memory has ended, ends the Rdma. Returns 0 if no Rdma can go on. */
static int advance(Fabric *fabric) {
  int may_advance = 0; /* keeps the loop from looking at each Rdma in vain while all rails are full */
  for (uint32_t i = 0; i < fabric->count; ++i) {
    const Rail *rail = &fabric->rails[i];
    may_advance |= rail->failed != 0 || (!rail->full && rail->unused != NULL);
  }
  if (!may_advance) return 0;
  for (Node *each = fabric->waiting.first; each != NULL; each = each->next) {
    Rdma *rdma = (Rdma *)each;
    if (rdma->request != NULL && !request_stands(rdma->request)) {
      rdma_drop(rdma);
      end_if_over(rdma);
      return 1;
    }
    int error = 0;
    Rail *rail = choose_rail(fabric, rdma->link, &error);
    if (rail == NULL && error == 0) continue;
    if (rail != NULL) {
      post(fabric, rail, rdma);
    } else {
      fail(rdma, error, 0);
      end_if_over(rdma);
    }
    return 1;
  }
  return 0;
}

static struct fid_av *peers_of(const Fabric *fabric, uint32_t rail) {
  return (struct fid_av *)(uintptr_t)fabric->rails[rail].port.peers;
}

void fabric_know(ProxycclLink *link, const char *addresses, uint64_t bytes) {
  const Fabric *fabric = link->agent->fabric;
  if (fabric == NULL || link->rails > 0 || link->lost != NULL) return;
  for (; link->rails < fabric->count && bytes >= PROXYCCL_ADDRESS_BYTES; link->known = ++link->rails) {
    LinkRail *rail = &link->rail[link->rails];
    if (fi_av_insert(peers_of(fabric, link->rails), addresses, 1, &rail->address, 0, NULL) != 1) return;
    addresses += PROXYCCL_ADDRESS_BYTES;
    bytes -= PROXYCCL_ADDRESS_BYTES;
  }
}

/* Removes the addresses of a lost link's peer, unless a request of the link is outstanding. */
static void forget(ProxycclLink *link) {
  if (link->lost == NULL || link->agent->stopped) return; /* a stopped agent's rails may be closed already */
  for (uint32_t i = 0; i < link->rails; ++i) {
    if (link->rail[i].bytes > 0) return;
  }
  while (link->known > 0) {
    --link->known;
    fi_av_remove(peers_of(link->agent->fabric, link->known), &link->rail[link->known].address, 1, 0);
  }
}

static void complete(void *owner, void *context, int error, const struct fi_cq_err_entry *entry) {
  const Fabric *fabric = owner;
  Posted *posted = context;
  (void)entry;
  if (posted == NULL) return; /* without a `context`, the call reports a failure of the queue */
  Rail *rail = posted->rail;
  Rdma *rdma = posted->rdma;
  posted->rdma = NULL;
  posted->next = rail->unused;
  rail->unused = posted;
  rail->bytes -= posted->bytes;
  if (rdma == NULL) return;
  --rdma->unanswered;
  LinkRail *of_link = &rdma->link->rail[rail - fabric->rails];
  of_link->bytes -= posted->bytes;
  of_link->moved = now_ns();
  forget(rdma->link);
  if (error != 0) {
    of_link->failed = of_link->moved;
    fail(rdma, error, posted->remote);
  }
  end_if_over(rdma);
}

/* Takes a rail's completions. After a failure of the queue, which will report no more completions, fails the rail's
 * requests. */
static void poll_rail(ProxycclAgent *agent, Rail *rail) {
  Fabric *fabric = agent->fabric;
  uint32_t taken = 0;
  rail->full = 0;
  if (rail->failed != 0) return;
  rail->failed = fabric_drain(rail->queue, complete, fabric, &taken);
  if (rail->failed == 0) return;
  /* Stops watching the descriptor, which may stay readable forever after the queue has failed. */
  if (rail->port.descriptor >= 0) agent_watch(agent, rail->port.descriptor, 0, EPOLL_CTL_DEL, 0);
  for (uint32_t i = 0; i < fabric->depth; ++i) {
    Posted *posted = &fabric->posted[i];
    if (posted->rail != rail || posted->rdma == NULL) continue;
    posted->remote = 0;
    complete(fabric, posted, rail->failed, NULL);
  }
}

void fabric_poll(ProxycclAgent *agent) {
  Fabric *fabric = agent->fabric;
  for (uint32_t i = 0; i < fabric->count; ++i) poll_rail(agent, &fabric->rails[i]);
  while (advance(fabric)) {}
}

/* Returns whether a request has not completed. */
static int is_busy(const Fabric *fabric) {
  uint64_t bytes = 0;
  for (uint32_t i = 0; i < fabric->count; ++i) bytes += fabric->rails[i].bytes;
  return bytes > 0;
}

void rdma_start(Rdma *rdma, uint64_t bytes) {
  ProxycclAgent *agent = rdma->link->agent;
  rdma->at = (Position){0, 0};
  rdma->left = bytes;
  rdma->error = 0;
  rdma->fault = 0;
  queue_push(&agent->fabric->waiting, rdma);
  fabric_poll(agent);                            /* fabric_poll may end and free the Rdma */
  if (is_busy(agent->fabric)) agent_wake(agent); /* the thread must poll, because completions may not wake it */
}

static uint64_t rest_of(const Rail *rail) {
  if (rail->failed != 0) return UINT64_MAX;
  if (rail->port.descriptor < 0) return rail->bytes > 0 ? ACTIVE_NS : IDLE_NS;
  struct fid *queue = &rail->queue->fid;
  /* A nonzero result means that completions have arrived for which the descriptor will not become readable. */
  return fi_trywait((struct fid_fabric *)(uintptr_t)rail->port.fabric, &queue, 1) == 0 ? UINT64_MAX : 0;
}

uint64_t fabric_rest(ProxycclAgent *agent) {
  const Fabric *fabric = agent->fabric;
  uint64_t rest = UINT64_MAX;
  for (uint32_t i = 0; fabric != NULL && i < fabric->count; ++i) {
    const uint64_t of_rail = rest_of(&fabric->rails[i]);
    if (of_rail < rest) rest = of_rail;
  }
  return rest;
}

void fabric_lose(ProxycclLink *link) {
  Fabric *fabric = link->agent->fabric;
  for (Node *each = fabric == NULL ? NULL : fabric->waiting.first, *next; each != NULL; each = next) {
    Rdma *rdma = (Rdma *)each;
    next = each->next;
    if (rdma->link != link) continue;
    rdma_drop(rdma);
    end_if_over(rdma); /* ends the Rdma unless requests are posted; otherwise the last completion ends it */
  }
  forget(link);
}

void fabric_stop(ProxycclAgent *agent) {
  Fabric *fabric = agent->fabric;
  const uint64_t deadline = now_ns() + LONGEST_STOP_NS;
  const struct timespec pause = {0, ACTIVE_NS};
  if (fabric == NULL) return;
  while (fabric->waiting.first != NULL) {
    Rdma *rdma = (Rdma *)fabric->waiting.first;
    rdma->canceled = 1;
    rdma_drop(rdma);
    end_if_over(rdma);
  }
  for (uint32_t i = 0; i < fabric->depth; ++i) {
    if (fabric->posted[i].rdma != NULL) fabric->posted[i].rdma->canceled = 1;
  }
  for (fabric_poll(agent); is_busy(fabric) && now_ns() < deadline; fabric_poll(agent)) {
    pthread_mutex_unlock(&agent->lock);
    nanosleep(&pause, NULL);
    pthread_mutex_lock(&agent->lock);
  }
  for (uint32_t i = 0; i < fabric->depth; ++i) { /* ends the remaining requests without completions */
    Rdma *rdma = fabric->posted[i].rdma;
    fabric->posted[i].rdma = NULL;
    if (rdma == NULL) continue;
    --rdma->unanswered;
    end_if_over(rdma);
  }
}

#else

#pragma GCC diagnostic ignored "-Wunused-parameter"

int proxyccl_agent_set_fabric(ProxycclAgent *agent, const ProxycclFabricPort *ports, uint32_t count) { return ENOSYS; }
uint32_t proxyccl_link_stalled(const ProxycclLink *link) { return 0; }

/* In a build without libfabric an agent has no rails, so these functions do nothing. */
void rdma_start(Rdma *rdma, uint64_t bytes) {}
void rdma_drop(Rdma *rdma) {}
void fabric_poll(ProxycclAgent *agent) {}
uint64_t fabric_rest(ProxycclAgent *agent) { return agent == NULL ? 0 : UINT64_MAX; }
void fabric_know(ProxycclLink *link, const char *addresses, uint64_t bytes) {}
void fabric_lose(ProxycclLink *link) {}
void fabric_stop(ProxycclAgent *agent) {}

#endif
