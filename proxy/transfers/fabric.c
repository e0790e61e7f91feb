/* Transfers by libfabric: reads and writes of the peer's memory, in which its program takes no part. See transfers.h.
 *
 * Nothing is linked: the calls are in the tables of the endpoint and its queue. Some providers carry out a peer's
 * requests only when this side reads its queue, so the agent's thread also does so when it has none of its own.
 */
#include <errno.h>
#include <sys/epoll.h>
#include <time.h>

#include "clock.h"
#include "parts.h"

enum { ROW = 6 }; /* words of a row */

#if __has_include(<rdma/fi_rma.h>)

#include "fabric_queue.h"

enum {
  ACTIVE_NS = 20000, /* between two looks into a queue without a descriptor */
  IDLE_NS = 1000000  /* likewise, without own requests */
};
#define LONGEST_STOP_NS 1000000000ull

/* `context` is the provider's while the request is outstanding. */
typedef struct Request {
  struct fi_context2 context;
  struct Request *next; /* of those that are free */
  ProxycclTransfer *transfer;
  uint64_t remote;
} Request;

typedef struct Fabric {
  ProxycclFabricPort port;
  struct fid_ep *endpoint;
  struct fid_cq *queue;
  Request *requests, *unused;
  uint32_t outstanding;
  int failed;                      /* why the queue has ended; 0: it has not */
  ProxycclTransfer *first, **last; /* with requests to be posted, in turn */
} Fabric;

int proxyccl_agent_set_fabric(ProxycclAgent *agent, const ProxycclFabricPort *port) {
  int error = guard_install(); /* a provider may have installed a handler */
  if (error != 0) return error;
  Fabric *fabric = calloc(1, sizeof *fabric);
  Request *requests = calloc(port->depth, sizeof *requests);
  if (fabric == NULL || requests == NULL) {
    free(fabric);
    free(requests);
    return ENOMEM;
  }
  fabric->port = *port;
  fabric->endpoint = (struct fid_ep *)(uintptr_t)port->endpoint;
  fabric->queue = (struct fid_cq *)(uintptr_t)port->queue;
  fabric->requests = requests;
  fabric->last = &fabric->first;
  for (uint32_t i = 0; i < port->depth; ++i) {
    requests[i].next = fabric->unused;
    fabric->unused = &requests[i];
  }
  pthread_mutex_lock(&agent->lock);
  error = agent_watch_fabric(agent, port->descriptor);
  if (error == 0) agent->fabric = fabric;
  pthread_mutex_unlock(&agent->lock);
  if (error == 0) {
    agent_wake(agent);
  } else {
    free(fabric);
    free(requests);
  }
  return error;
}

static void drop_rest(ProxycclTransfer *transfer) {
  Fabric *fabric = transfer->agent->fabric;
  transfer->left = 0;
  if (transfer->queued) transfer_unqueue(transfer, &fabric->first, &fabric->last);
}

static void end(ProxycclTransfer *transfer) {
  ProxycclLink *link = transfer->link;
  if (transfer->served != NULL) {
    const int done = transfer->error == 0 && !transfer->abandoned && link->lost == NULL;
    transfer_end(transfer, done ? PROXYCCL_TRANSFER_DONE : PROXYCCL_TRANSFER_FAILED);
  } else if (transfer->abandoned) {
    transfer_end(transfer, PROXYCCL_TRANSFER_CANCELED);
    if (transfer->orphaned) transfer_free(transfer);
  } else if (link->lost != NULL) {
    transfer_end(transfer, PROXYCCL_TRANSFER_LOST);
  } else if (transfer->error == 0) {
    transfer_end(transfer, PROXYCCL_TRANSFER_DONE);
  } else if (transfer->agent->fabric->failed != 0) {
    transfer_end(transfer, PROXYCCL_TRANSFER_FAILED);
  } else { /* the peer knows what became of its memory, and if it has gone, the link ends */
    transfer->asks = 1;
    transfer_queue(transfer, &link->last);
    link_send(link);
  }
}

static void end_if_over(ProxycclTransfer *transfer) {
  if (transfer->left > 0 || transfer->unanswered > 0 || transfer->asks) return;
  if (transfer->cancel) {
    pthread_cond_broadcast(&transfer->agent->changed); /* whoever cancels it ends it */
  } else {
    end(transfer);
  }
}

/* Posts the next request of a transfer. 0: the provider takes none now. */
static int post(Fabric *fabric, ProxycclTransfer *transfer) {
  const uint64_t *row = transfer->rows + ROW * transfer->at.index, offset = transfer->at.offset;
  const uint64_t rest = row[2] - offset, most = fabric->port.max_message;
  const uint64_t bytes = rest < most ? rest : most;
  Request *request = fabric->unused;
  FabricParts parts = {0};
  fabric_add_part(&parts, (char *)(uintptr_t)row[0] + offset, (void *)(uintptr_t)row[3], row[1] + offset, row[4],
                  bytes);
  const int error = fabric_post(fabric->endpoint, transfer->peer, !transfer->writes, 1, &parts, request);
  if (error == FI_EAGAIN) return 0;
  if (error != 0) {
    transfer->error = error;
    transfer->fault.address = row[5] + offset;
    drop_rest(transfer);
    end_if_over(transfer);
    return 1;
  }
  fabric->unused = request->next;
  request->transfer = transfer;
  request->remote = row[5] + offset;
  ++fabric->outstanding;
  ++transfer->unanswered;
  transfer->left -= bytes;
  transfer->at = bytes < rest ? (Position){transfer->at.index, offset + bytes} : (Position){transfer->at.index + 1, 0};
  transfer_unqueue(transfer, &fabric->first, &fabric->last);
  if (transfer->left > 0) transfer_queue(transfer, &fabric->last);
  return 1;
}

static void complete(void *owner, void *context, int error, const struct fi_cq_err_entry *entry) {
  Fabric *fabric = owner;
  Request *request = context;
  (void)entry;
  if (request == NULL) return; /* the queue has ended */
  ProxycclTransfer *transfer = request->transfer;
  request->transfer = NULL;
  request->next = fabric->unused;
  fabric->unused = request;
  --fabric->outstanding;
  if (transfer == NULL) return; /* given up */
  --transfer->unanswered;
  if (error != 0) {
    if (transfer->error == 0) {
      transfer->error = error;
      transfer->fault.address = request->remote;
    }
    drop_rest(transfer);
  }
  end_if_over(transfer);
}

/* Ends all transfers: the queue will report no completion. */
static void fail_all(Fabric *fabric) {
  for (uint32_t i = 0; i < fabric->port.depth; ++i) {
    if (fabric->requests[i].transfer != NULL) complete(fabric, &fabric->requests[i], fabric->failed, NULL);
  }
  while (fabric->first != NULL) {
    ProxycclTransfer *transfer = fabric->first;
    transfer->error = fabric->failed;
    drop_rest(transfer);
    end_if_over(transfer);
  }
}

void fabric_poll(ProxycclAgent *agent) {
  Fabric *fabric = agent->fabric;
  uint32_t taken = 0;
  if (fabric->failed == 0) {
    fabric->failed = fabric_drain(fabric->queue, complete, fabric, &taken);
    /* Its descriptor may be readable for good. */
    if (fabric->failed != 0 && fabric->port.descriptor >= 0)
      agent_watch(agent, fabric->port.descriptor, 0, EPOLL_CTL_DEL, 0);
  }
  if (fabric->failed != 0) {
    fail_all(fabric);
    return;
  }
  while (fabric->first != NULL && fabric->unused != NULL && post(fabric, fabric->first)) {}
}

void fabric_start(ProxycclTransfer *transfer) {
  ProxycclAgent *agent = transfer->agent;
  Fabric *fabric = agent->fabric;
  transfer_queue(transfer, &fabric->last);
  fabric_poll(agent);                             /* one of a stage may end, and is freed then */
  if (fabric->outstanding > 0) agent_wake(agent); /* it may sleep without a descriptor */
}

int fabric_know(ProxycclLink *link, const void *address, uint64_t bytes) {
  const Fabric *fabric = link->agent->fabric;
  char whole[LONGEST_ADDRESS] = {0}; /* providers read as much as the form has */
  if (fabric == NULL || link->addressed) return 0;
  memcpy(whole, address, bytes);
  return fi_av_insert((struct fid_av *)(uintptr_t)fabric->port.peers, whole, 1, &link->address, 0, NULL) == 1;
}

void fabric_forget(ProxycclLink *link) {
  struct fid_av *peers = (struct fid_av *)(uintptr_t)link->agent->fabric->port.peers;
  fi_addr_t address = link->address;
  fi_av_remove(peers, &address, 1, 0);
}

int fabric_carry(Stage *stage, int writes, uint64_t bytes, const Origin *origin) {
  ProxycclTransfer *request = transfer_make(stage->agent, stage->link);
  if (request == NULL) return 0;
  const uint64_t row[ROW] = {(uintptr_t)stage->memory,           origin->address, bytes,
                             stage->device->staging->descriptor, origin->key,     0};
  memcpy(stage->row, row, sizeof row);
  stage->copying = 1;
  request->served = stage;
  request->rows = stage->row;
  request->writes = writes;
  request->count = 1;
  request->bytes = bytes;
  request->peer = stage->link->address;
  transfer_restart(request);
  return 1;
}

uint64_t fabric_rest(ProxycclAgent *agent) {
  const Fabric *fabric = agent->fabric;
  if (fabric == NULL || fabric->failed != 0) return UINT64_MAX;
  if (fabric->port.descriptor >= 0) {
    struct fid *queue = &fabric->queue->fid;
    /* Not zero: something has come since the last look, which the descriptor does not tell. */
    return fi_trywait((struct fid_fabric *)(uintptr_t)fabric->port.fabric, &queue, 1) == 0 ? UINT64_MAX : 0;
  }
  return fabric->outstanding > 0 ? ACTIVE_NS : IDLE_NS;
}

void fabric_lose(ProxycclLink *link) {
  Fabric *fabric = link->agent->fabric;
  if (fabric == NULL) return;
  for (ProxycclTransfer *transfer = fabric->first, *next; transfer != NULL; transfer = next) {
    next = transfer->next;
    if (transfer->link != link) continue;
    drop_rest(transfer);
    end_if_over(transfer); /* else its last request does */
  }
}

int fabric_finish(ProxycclTransfer *transfer, uint64_t timeout_ns) {
  ProxycclAgent *agent = transfer->agent;
  const uint64_t deadline = now_ns() + timeout_ns;
  const struct timespec pause = {0, ACTIVE_NS};
  drop_rest(transfer);
  for (fabric_poll(agent); transfer->unanswered > 0 && now_ns() < deadline; fabric_poll(agent)) {
    ++transfer->copying; /* it stays */
    pthread_mutex_unlock(&agent->lock);
    nanosleep(&pause, NULL);
    pthread_mutex_lock(&agent->lock);
    --transfer->copying;
  }
  return transfer->unanswered == 0;
}

/* Ends a transfer although requests are outstanding: the endpoint will be closed before its memory is used again. */
static void give_up(Fabric *fabric, ProxycclTransfer *transfer) {
  for (uint32_t i = 0; i < fabric->port.depth; ++i) {
    if (fabric->requests[i].transfer == transfer) fabric->requests[i].transfer = NULL;
  }
  transfer->unanswered = 0;
  transfer->abandoned = 1;
  end(transfer);
}

void fabric_stop(ProxycclAgent *agent) {
  Fabric *fabric = agent->fabric;
  if (fabric == NULL) return;
  const uint64_t deadline = now_ns() + LONGEST_STOP_NS;
  while (fabric->first != NULL) transfer_cancel(fabric->first, 0); /* it leaves the queue */
  for (uint32_t i = 0; i < fabric->port.depth; ++i) {              /* requests that are posted */
    ProxycclTransfer *transfer = fabric->requests[i].transfer;
    if (transfer == NULL) continue;
    const uint64_t now = now_ns();
    if (transfer_cancel(transfer, now < deadline ? deadline - now : 0) != 0) give_up(fabric, transfer);
  }
}

void fabric_free(ProxycclAgent *agent) {
  if (agent->fabric != NULL) free(agent->fabric->requests);
  free(agent->fabric);
}

#else

int proxyccl_agent_set_fabric(ProxycclAgent *agent, const ProxycclFabricPort *port) {
  (void)agent, (void)port;
  return ENOSYS;
}

/* Without an endpoint, the others do nothing. */
void fabric_start(ProxycclTransfer *transfer) { (void)transfer; }
void fabric_poll(ProxycclAgent *agent) { (void)agent; }
uint64_t fabric_rest(ProxycclAgent *agent) {
  (void)agent;
  return UINT64_MAX;
}
int fabric_know(ProxycclLink *link, const void *address, uint64_t bytes) {
  (void)link, (void)address, (void)bytes;
  return 0;
}
void fabric_forget(ProxycclLink *link) { (void)link; }
int fabric_carry(Stage *stage, int writes, uint64_t bytes, const Origin *origin) {
  (void)stage, (void)writes, (void)bytes, (void)origin;
  return 0;
}
void fabric_lose(ProxycclLink *link) { (void)link; }
int fabric_finish(ProxycclTransfer *transfer, uint64_t timeout_ns) {
  (void)transfer, (void)timeout_ns;
  return 1;
}
void fabric_stop(ProxycclAgent *agent) { (void)agent; }
void fabric_free(ProxycclAgent *agent) { (void)agent; }

#endif

ProxycclTransfer *proxyccl_transfer_create_by_fabric(ProxycclAgent *agent, ProxycclLink *link, int writes,
                                                     const uint64_t *rows, uint64_t count, uint64_t peer) {
  ProxycclTransfer *transfer = transfer_new(agent, link);
  if (transfer == NULL) return NULL;
  transfer->rows = rows;
  transfer->writes = writes;
  transfer->count = count;
  transfer->peer = peer;
  for (uint64_t i = 0; i < count; ++i) transfer->bytes += rows[ROW * i + 2];
  return transfer;
}
