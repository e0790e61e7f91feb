/* Operations wait in a queue of their own until the send queue has room for them. Requests are counted from the first
 * of the connection: one whose number is at most `retired` is complete, and so are all before it. */
#include "verbs_transport.h"

#include <errno.h>
#include <stdlib.h>

const char *proxyccl_verbs_refused(const ProxycclVerbsOptions *options) {
  if (options->qp == 0) return "qp";
  if (options->send_depth == 0) return "send_depth";
  if (options->cq_depth == 0) return "cq_depth";
  if (options->max_message == 0) return "max_message";
  if (options->signal != PROXYCCL_VERBS_WRITE && options->signal != PROXYCCL_VERBS_FETCH_ADD) return "signal";
  if (options->signal == PROXYCCL_VERBS_FETCH_ADD && (options->scratch == 0 || options->scratch % 8 != 0))
    return "scratch";
  return NULL;
}

#if __has_include(<infiniband/verbs.h>)

#include <infiniband/verbs.h>

enum {
  OPERATIONS = PROXYCCL_VERBS_OPERATIONS, /* a power of two */
  OF_ONE_TRIGGER = 3,                     /* a put, a signal and a flush */
  FLUSHES = 256,                          /* that wait for completions; a power of two */
  CHAIN = PROXYCCL_VERBS_CHAIN,
  COMPLETIONS = 16 /* taken with one call */
};

typedef enum { PUT, SIGNAL, FLUSH } Kind;

typedef struct {
  Kind kind;
  uint32_t lkey, rkey;
  uint64_t source, destination; /* of the part of a put that has no request yet; of a signal the word */
  uint64_t bytes;               /* of that part */
  uint64_t *flushed;
  uint64_t value; /* of a signal or a flush */
} Operation;

typedef struct {
  uint64_t *flushed;
  uint64_t value;
  uint64_t behind; /* number of the last request before it */
} Flush;

typedef struct {
  ProxycclConnection base;
  ProxycclVerbsOptions options;
  struct ibv_qp *qp;
  uint32_t depth;       /* requests outstanding, at most */
  uint32_t chain_limit; /* requests in a chain, at most */
  uint32_t chained;     /* requests that are made and not yet posted */
  uint64_t chained_bytes; /* that their puts carry */
  uint64_t made, retired;
  uint64_t first_operation, last_operation; /* cursors: what lies between them waits */
  uint64_t first_flush, last_flush;
  struct ibv_send_wr requests[CHAIN]; /* linked in their order */
  struct ibv_sge parts[CHAIN];
  uint64_t values[CHAIN]; /* of inline writes */
  Operation operations[OPERATIONS];
  Flush flushes[FLUSHES];
} VerbsConnection;

static VerbsConnection *self_of(ProxycclConnection *base) { return (VerbsConnection *)base; }

/* One call for all that is chained. The last is signalled: a completion frees the slots of all requests before it, and
 * without one none is ever freed. */
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

/* Puts the next message of an operation into the chain. */
static void make_request(VerbsConnection *self, Operation *operation) {
  const uint32_t slot = self->chained++;
  struct ibv_send_wr *request = &self->requests[slot];
  struct ibv_sge *part = &self->parts[slot];
  request->wr_id = ++self->made;
  request->send_flags = 0;
  if (operation->kind == PUT) {
    const uint32_t max_message = self->options.max_message;
    const uint32_t bytes = operation->bytes < max_message ? (uint32_t)operation->bytes : max_message;
    *part = (struct ibv_sge){operation->source, bytes, operation->lkey};
    request->opcode = IBV_WR_RDMA_WRITE;
    request->wr.rdma.remote_addr = operation->destination;
    request->wr.rdma.rkey = operation->rkey;
    operation->source += bytes;
    operation->destination += bytes;
    operation->bytes -= bytes;
    self->chained_bytes += bytes;
  } else if (self->options.signal == PROXYCCL_VERBS_WRITE) {
    self->values[slot] = operation->value;
    *part = (struct ibv_sge){(uintptr_t)&self->values[slot], sizeof operation->value, 0};
    request->opcode = IBV_WR_RDMA_WRITE;
    request->send_flags = IBV_SEND_INLINE;
    request->wr.rdma.remote_addr = operation->destination;
    request->wr.rdma.rkey = operation->rkey;
  } else {
    *part = (struct ibv_sge){self->options.scratch, sizeof operation->value, self->options.scratch_lkey};
    request->opcode = IBV_WR_ATOMIC_FETCH_AND_ADD;
    request->wr.atomic.remote_addr = operation->destination;
    request->wr.atomic.rkey = operation->rkey;
    request->wr.atomic.compare_add = 1;
  }
}

/* The release pairs with the acquire of who waits for the word. */
static void store_flushed(uint64_t *flushed, uint64_t value) { __atomic_store_n(flushed, value, __ATOMIC_RELEASE); }

/* Makes requests of the operations in their order, as far as there is room, and posts each chain that is full. */
static int issue(VerbsConnection *self) {
  while (self->first_operation != self->last_operation) {
    Operation *operation = &self->operations[self->first_operation % OPERATIONS];
    if (operation->kind == FLUSH) {
      if (self->made == self->retired) {
        store_flushed(operation->flushed, operation->value);
      } else {
        if (self->last_flush - self->first_flush == FLUSHES) return 0;
        self->flushes[self->last_flush++ % FLUSHES] = (Flush){operation->flushed, operation->value, self->made};
      }
      ++self->first_operation;
      continue;
    }
    if (self->made - self->retired == self->depth) return 0;
    make_request(self, operation);
    if (operation->bytes == 0) ++self->first_operation;
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
    if (self->retired == self->made - self->chained) return 0;
    taken = ibv_poll_cq(self->qp->send_cq, COMPLETIONS, completions);
    if (taken < 0) return EIO;
    for (int i = 0; i < taken; ++i) {
      /* The first is the cause: those behind it were flushed because of it. */
      if (completions[i].status != IBV_WC_SUCCESS) return PROXYCCL_VERBS_COMPLETION + completions[i].status;
      self->retired = completions[i].wr_id;
    }
    while (self->first_flush != self->last_flush) {
      const Flush *flush = &self->flushes[self->first_flush % FLUSHES];
      if (flush->behind > self->retired) break;
      store_flushed(flush->flushed, flush->value);
      ++self->first_flush;
    }
    *progress += (uint32_t)taken;
  } while (taken == COMPLETIONS);
  return 0;
}

/* The engine asked before whether there is room. The fields are filled in place: a struct that is made of small stores
 * and then copied by large loads waits for each. */
static Operation *queue(VerbsConnection *self, Kind kind) {
  Operation *operation = &self->operations[self->last_operation++ % OPERATIONS];
  operation->kind = kind;
  return operation;
}

static uint32_t verbs_ready(const ProxycclConnection *base) {
  const VerbsConnection *self = (const VerbsConnection *)base;
  return (uint32_t)(OPERATIONS - (self->last_operation - self->first_operation)) / OF_ONE_TRIGGER;
}

static int verbs_put(ProxycclConnection *base, const ProxycclMemory *dst, uint64_t dst_offset,
                     const ProxycclMemory *src, uint64_t src_offset, uint64_t bytes) {
  VerbsConnection *self = self_of(base);
  Operation *operation = queue(self, PUT);
  operation->lkey = (uint32_t)src->key;
  operation->rkey = (uint32_t)dst->key;
  operation->source = (uintptr_t)src->base + src_offset;
  operation->destination = (uintptr_t)dst->base + dst_offset;
  operation->bytes = bytes;
  return issue(self);
}

static int verbs_signal(ProxycclConnection *base, uint64_t *remote, uint64_t value) {
  VerbsConnection *self = self_of(base);
  Operation *operation = queue(self, SIGNAL);
  operation->rkey = self->options.signal_rkey;
  operation->destination = (uintptr_t)remote;
  operation->bytes = 0;
  operation->value = value;
  return issue(self);
}

static int verbs_flush(ProxycclConnection *base, uint64_t *flushed, uint64_t value) {
  VerbsConnection *self = self_of(base);
  Operation *operation = queue(self, FLUSH);
  operation->flushed = flushed;
  operation->value = value;
  return issue(self);
}

static int verbs_poll(ProxycclConnection *base, uint32_t *progress) {
  VerbsConnection *self = self_of(base);
  int status = retire(self, progress);
  if (status == 0) status = issue(self);
  if (status == 0) status = post(self);
  return status == 0 ? proxyccl_mark_progress(base) : status;
}

/* An operation waits only behind a request that is outstanding. */
static int verbs_idle(const ProxycclConnection *base) {
  const VerbsConnection *self = (const VerbsConnection *)base;
  return self->made == self->retired;
}

static void verbs_destroy(ProxycclConnection *base) { free(base); }

static const ProxycclTransport verbs_transport = {
    "verbs", 0, verbs_ready, verbs_put, verbs_signal, verbs_flush, verbs_poll, verbs_idle, verbs_destroy,
};

int proxyccl_verbs_built(void) { return 1; }

ProxycclConnection *proxyccl_verbs_connection(const ProxycclVerbsOptions *options) {
  VerbsConnection *self;
  if (proxyccl_verbs_refused(options) != NULL) {
    errno = EINVAL;
    return NULL;
  }
  self = calloc(1, sizeof *self);
  if (self == NULL) return NULL;
  self->base.transport = &verbs_transport;
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
  return &self->base;
}

#else

int proxyccl_verbs_built(void) { return 0; }

ProxycclConnection *proxyccl_verbs_connection(const ProxycclVerbsOptions *options) {
  (void)options;
  errno = ENOSYS;
  return NULL;
}

#endif
