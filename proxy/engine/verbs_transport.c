/* Operations wait in a queue of the connection until the send queue has room. Requests are numbered from 1; requests up
 * to number `retired` are complete.
 *
 * A queue pair starts and executes its requests in order, with one exception: the response to a read may come after
 * later requests were executed. So the first request after a run of reads has a fence: this request and all later
 * requests start only when the reads are complete. A read after writes needs no fence. */
#include "verbs_transport.h"

#include <errno.h>
#include <stdlib.h>

#include "operations.h"
#include "transports.h"

#if __has_include(<infiniband/verbs.h>)

#include <infiniband/verbs.h>

enum {
  CHAIN = PROXYCCL_VERBS_CHAIN,
  COMPLETIONS = 16 /* maximum number of completions that one call reads */
};

_Static_assert((int)OPERATIONS == (int)PROXYCCL_VERBS_OPERATIONS, "the header declares the length of the queue");

typedef struct {
  QueuedConnection queue;
  ProxycclVerbsOptions options;
  struct ibv_qp *qp;
  uint32_t depth;         /* maximum number of outstanding requests */
  uint32_t chain_limit;   /* maximum number of requests in a chain */
  uint32_t chained;       /* number of requests in the chain, which are not posted yet */
  uint64_t chained_bytes; /* bytes of the puts and gets in the chain */
  int reading;            /* whether the last request was a read */
  uint64_t made, retired;
  int failed;                         /* the status of the first request that failed */
  struct ibv_send_wr requests[CHAIN]; /* linked in order */
  struct ibv_sge parts[CHAIN];
  uint64_t values[CHAIN]; /* the values of inline writes */
} VerbsConnection;

static VerbsConnection *self_of(ProxycclConnection *base) { return (VerbsConnection *)base; }

/* Posts the chain with one call. The chain's last request asks for a completion, which frees the send queue's slots of
 * this request and of all earlier requests. */
static int post(VerbsConnection *self) {
  struct ibv_send_wr *last, *refused;
  int status;
  if (self->chained == 0) return 0;
  last = &self->requests[self->chained - 1];
  last->send_flags |= IBV_SEND_SIGNALED;
  last->next = NULL;
  status = ibv_post_send(self->qp, self->requests, &refused);
  last->next = last + 1;
  self->chained = 0;
  self->chained_bytes = 0;
  return status >= 0 ? status : EIO;
}

static void make_request(VerbsConnection *self, Operation *operation) {
  const uint32_t slot = self->chained++;
  struct ibv_send_wr *request = &self->requests[slot];
  struct ibv_sge *part = &self->parts[slot];
  const uint32_t max_message = self->options.max_message;
  const uint32_t most = operation->bytes < max_message ? (uint32_t)operation->bytes : max_message;
  request->wr_id = ++self->made;
  request->send_flags = self->reading && operation->kind != GET ? IBV_SEND_FENCE : 0;
  self->reading = operation->kind == GET;
  if (operation->kind == PUT) {
    *part = (struct ibv_sge){operation->source, most, (uint32_t)operation->source_key};
    request->opcode = IBV_WR_RDMA_WRITE;
    request->wr.rdma.remote_addr = operation->destination;
    request->wr.rdma.rkey = (uint32_t)operation->destination_key;
    operation_advance(operation, most);
    self->chained_bytes += most;
  } else if (operation->kind == GET) {
    *part = (struct ibv_sge){operation->destination, most, (uint32_t)operation->destination_key};
    request->opcode = IBV_WR_RDMA_READ;
    request->wr.rdma.remote_addr = operation->source;
    request->wr.rdma.rkey = (uint32_t)operation->source_key;
    operation_advance(operation, most);
    self->chained_bytes += most;
  } else if (operation->kind == VALUE || self->options.signal == PROXYCCL_VERBS_WRITE) {
    self->values[slot] = operation->value;
    const uint64_t bytes = operation->kind == VALUE ? operation->bytes : sizeof operation->value;
    *part = (struct ibv_sge){(uintptr_t)&self->values[slot], (uint32_t)bytes, 0};
    operation->bytes = 0;
    request->opcode = IBV_WR_RDMA_WRITE;
    request->send_flags |= IBV_SEND_INLINE;
    request->wr.rdma.remote_addr = operation->destination;
    request->wr.rdma.rkey = (uint32_t)operation->destination_key;
  } else {
    *part = (struct ibv_sge){self->options.scratch, sizeof operation->value, self->options.scratch_lkey};
    request->opcode = IBV_WR_ATOMIC_FETCH_AND_ADD;
    request->wr.atomic.remote_addr = operation->destination;
    request->wr.atomic.rkey = (uint32_t)operation->destination_key;
    request->wr.atomic.compare_add = operation->value;
  }
}

/* Makes requests for the operations in order while there is room, and posts each full chain. */
static int issue(ProxycclConnection *base) {
  VerbsConnection *self = self_of(base);
  for (Operation *operation; (operation = operations_next(&self->queue.operations)) != NULL;) {
    if (operation->kind == FLUSH) {
      if (!flushes_push(&self->queue.flushes, operation, self->made, self->retired)) return 0;
      operations_pop(&self->queue.operations);
      continue;
    }
    if (self->made - self->retired == self->depth) return 0;
    make_request(self, operation);
    if (operation->bytes == 0) operations_pop(&self->queue.operations);
    if (self->chained == self->chain_limit || self->chained_bytes >= PROXYCCL_VERBS_CHAIN_BYTES) {
      const int status = post(self);
      if (status != 0) return status;
    }
  }
  return 0;
}

static int retire(VerbsConnection *self, uint32_t *progress) {
  struct ibv_wc completions[COMPLETIONS];
  int taken;
  do {
    if (self->failed != 0 || self->retired == self->made - self->chained) break;
    taken = ibv_poll_cq(self->qp->send_cq, COMPLETIONS, completions);
    if (taken < 0) return EIO;
    for (int i = 0; i < taken && self->failed == 0; ++i) {
      self->retired = completions[i].wr_id;
      if (completions[i].status == IBV_WC_SUCCESS) continue;
      /* All earlier requests are complete. Later requests fail only because of this failure. */
      --self->retired;
      self->failed = PROXYCCL_VERBS_COMPLETION + completions[i].status;
    }
    flushes_complete(&self->queue.flushes, self->retired);
    *progress += (uint32_t)taken;
  } while (taken == COMPLETIONS);
  return self->failed;
}

static int verbs_poll(ProxycclConnection *base, uint32_t *progress) {
  VerbsConnection *self = self_of(base);
  int status = retire(self, progress);
  if (status == 0) status = issue(base);
  if (status == 0) status = post(self);
  return status == 0 ? proxyccl_mark_progress(base) : status;
}

/* Returns 1 if no request is outstanding. Then no operation waits in the queue either. */
static int verbs_idle(const ProxycclConnection *base) {
  const VerbsConnection *self = (const VerbsConnection *)base;
  return self->made == self->retired;
}

int proxyccl_verbs_built(void) { return 1; }

/* Returns the name of an option that is out of range, or NULL. */
static const char *verbs_refused(const ProxycclVerbsOptions *options) {
  if (options->qp == 0) return "qp";
  if (options->send_depth == 0) return "send_depth";
  if (options->cq_depth == 0) return "cq_depth";
  if (options->max_message == 0) return "max_message";
  if (options->signal != PROXYCCL_VERBS_WRITE && options->signal != PROXYCCL_VERBS_FETCH_ADD) return "signal";
  if (options->signal == PROXYCCL_VERBS_FETCH_ADD && (options->scratch == 0 || options->scratch % 8 != 0))
    return "scratch";
  return NULL;
}

static ProxycclConnection *verbs_create(const void *given, const ProxycclRuntimeTable *runtime, const char **refused) {
  const ProxycclVerbsOptions *options = given;
  if ((*refused = verbs_refused(options)) != NULL) return NULL;
  VerbsConnection *self = calloc(1, sizeof *self);
  (void)runtime;
  if (self == NULL) return NULL;
  self->queue.base.transport = &proxyccl_verbs_transport;
  self->queue.issue = issue;
  self->queue.signal_key = options->signal_rkey;
  self->queue.adds = options->signal != PROXYCCL_VERBS_WRITE;
  self->queue.no_reads = options->reads > 0 ? 0 : PROXYCCL_VERBS_NO_READS;
  self->queue.no_values = self->queue.adds ? PROXYCCL_VERBS_NO_INLINE : 0;
  self->options = *options;
  self->qp = (struct ibv_qp *)options->qp;
  self->depth = options->send_depth < options->cq_depth ? options->send_depth : options->cq_depth;
  self->chain_limit = self->depth / 2 < CHAIN ? self->depth / 2 : CHAIN;
  if (self->chain_limit == 0) self->chain_limit = 1;
  for (uint32_t i = 0; i < CHAIN; ++i) {
    self->requests[i].sg_list = &self->parts[i];
    self->requests[i].num_sge = 1;
    self->requests[i].next = &self->requests[i] + 1;
  }
  return &self->queue.base;
}

const ProxycclTransport proxyccl_verbs_transport = {
    .name = "verbs",
    .copies = 0,
    .create = verbs_create,
    .ready = queued_ready,
    .put = queued_put,
    .get = queued_get,
    .put_value = queued_put_value,
    .signal = queued_signal,
    .flush = queued_flush,
    .poll = verbs_poll,
    .idle = verbs_idle,
};

#else

int proxyccl_verbs_built(void) { return 0; }

static ProxycclConnection *verbs_create(const void *options, const ProxycclRuntimeTable *runtime,
                                        const char **refused) {
  (void)options, (void)runtime, (void)refused;
  errno = ENOSYS;
  return NULL;
}

const ProxycclTransport proxyccl_verbs_transport = {.name = "verbs", .create = verbs_create};

#endif
