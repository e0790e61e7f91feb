/* Operations wait in a queue of the connection until fewer than `depth` requests are outstanding. Requests are numbered
 * from 1; requests up to number `retired` are complete.
 *
 * If a provider's writes reach the peer's memory in order, the completion of a write implies that all earlier writes
 * are complete, so most writes ask for no completion. A prepared write is posted only when the next request is made or
 * the connection is polled, because only a write without a successor may need a completion. The last write asks for a
 * completion only if a flush waits, because a completion over sockets costs a message from the peer. If a flush arrives
 * after the last write was posted, or if no request follows within QUIET_NS, the connection posts a write of zero bytes
 * that asks for the completion. If a provider's writes may arrive out of order, each request has its own completion.
 *
 * If the bytes within one write also arrive in order, a signal becomes the second part of a prepared write, so that one
 * message over sockets carries both data and signal.
 *
 * Channels execute reads and writes in order, but providers do not. So a read is posted only when all earlier writes
 * are complete, and a write is posted only when all earlier reads are complete. Each read has its own completion.
 *
 * A write completes only once its data is delivered, because the provider of a peer whose workers have ended carries
 * out no further writes. */
#include "fabric_transport.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "clock.h"
#include "operations.h"
#include "transports.h"

#if __has_include(<rdma/fi_rma.h>)

#include "fabric_queue.h"

enum {
  RUNS = 4,          /* completions requested per `depth` requests; each completion makes room for new requests */
  QUIET_NS = 1000000 /* after this time without further requests, a write of zero bytes asks for a completion */
};

typedef struct FabricConnection FabricConnection;

/* The provider uses `context` from the post until the completion. */
typedef struct {
  struct fi_context2 context;
  FabricConnection *connection;
  uint64_t values[PROXYCCL_FABRIC_PARTS]; /* the bytes to write, for a part that is a value or a signal */
  uint32_t awaited;                       /* whether the request has its own completion */
  uint32_t state; /* pairing fabric-completion: 0 before the completion, then DELIVERED or an error number */
} FabricRequest;

enum { DELIVERED = UINT32_MAX };

_Static_assert(sizeof(FabricRequest) <= PROXYCCL_FABRIC_REQUEST_BYTES,
               "a request fits in its part of the memory `requests`");

struct FabricConnection {
  QueuedConnection queue;
  ProxycclFabricOptions options;
  struct fid_ep *endpoint;
  struct fid_cq *completions;
  uint32_t run;   /* maximum number of successive requests without a completion */
  uint32_t quiet; /* number of requests since the last request with a completion */
  uint64_t made, posted, retired;
  uint64_t quiet_since; /* time when the last request without a completion was posted */
  int hurried;          /* whether requests without a completion delay a read, or a flush for which a thread waits */
  int reading;          /* 1 if the outstanding and prepared requests are reads, 0 if they are writes */
  uint64_t looks;       /* the value of options.looks at this connection's last poll */
  FabricMemory parts;   /* the parts of the prepared request, which is not posted yet */
  char text[PROXYCCL_FABRIC_ERROR_TEXT];
};

static FabricConnection *self_of(ProxycclConnection *base) { return (FabricConnection *)base; }

static int failed(int error) { return PROXYCCL_FABRIC_FAILED + (error > 0 ? error : EIO); }

/* Pairing fabric-completion, release: the worker that takes a completion stores the result for the worker of the
 * request's connection. */
static void request_complete(FabricRequest *request, uint32_t state) {
  __atomic_store_n(&request->state, state, __ATOMIC_RELEASE);
}

/* Pairing fabric-completion, acquire, by the worker of the request's connection. */
static uint32_t request_state(const FabricRequest *request) {
  return __atomic_load_n(&request->state, __ATOMIC_ACQUIRE);
}

static FabricRequest *request_of(const FabricConnection *self, uint64_t number) {
  return (FabricRequest *)(self->options.requests + number % self->options.depth * PROXYCCL_FABRIC_REQUEST_BYTES);
}

static void *descriptor_of(const FabricConnection *self, uint64_t key) {
  return key < PROXYCCL_FABRIC_LOCAL_KEYS ? (void *)(uintptr_t)self->options.descriptors[key] : NULL;
}

/* Posts the prepared request, if there is one. */
static int post(FabricConnection *self, int awaited) {
  if (self->posted == self->made) return 0;
  awaited |= self->reading;
  FabricRequest *request = request_of(self, self->made);
  request->awaited = (uint32_t)awaited;
  request->state = 0;
  const int error = fabric_post(self->endpoint, self->options.peer, self->reading, awaited, &self->parts, request);
  if (error == FI_EAGAIN) return WAITS;
  if (error != 0) return failed(error);
  self->posted = self->made;
  self->quiet = awaited ? 0 : self->quiet + 1;
  if (!awaited) self->quiet_since = now_ns();
  return 0;
}

static void begin_request(FabricConnection *self) {
  request_of(self, ++self->made)->connection = self;
  self->parts.count = 0;
}

static void add_part(FabricConnection *self, uint64_t own, uint64_t own_key, uint64_t theirs, uint64_t their_key,
                     uint64_t bytes) {
  fabric_add_part(&self->parts, (void *)(uintptr_t)own, descriptor_of(self, own_key), theirs, their_key, bytes);
}

/* Adds the write of a value or a signal to the prepared request. */
static void add_value(FabricConnection *self, Operation *operation) {
  uint64_t *value = &request_of(self, self->made)->values[self->parts.count];
  *value = operation->value;
  add_part(self, (uintptr_t)value, self->options.requests_key, operation->destination, operation->destination_key,
           operation->kind == VALUE ? operation->bytes : sizeof *value);
  operation->bytes = 0;
}

static void make_request(FabricConnection *self, Operation *operation) {
  const uint64_t most = self->options.max_message;
  const uint64_t bytes = operation->bytes < most ? operation->bytes : most;
  begin_request(self);
  if (operation->kind == PUT) {
    add_part(self, operation->source, operation->source_key, operation->destination, operation->destination_key, bytes);
    operation_advance(operation, bytes);
  } else if (operation->kind == GET) {
    add_part(self, operation->destination, operation->destination_key, operation->source, operation->source_key, bytes);
    operation_advance(operation, bytes);
  } else {
    add_value(self, operation);
  }
}

/* Returns 1 if an operation is a signal that can become a part of the prepared write. */
static int joins(const FabricConnection *self, const Operation *operation) {
  return self->options.joined && operation->kind == SIGNAL && !self->reading && self->posted < self->made &&
         self->parts.count < PROXYCCL_FABRIC_PARTS &&
         self->parts.own[0].iov_len + sizeof operation->value <= self->options.max_message;
}

/* Returns 1 if an operation must wait for outstanding requests: a read waits for writes, and a write waits for reads.
 * Otherwise returns 0, and sets `reading` for the next request. */
static int turns(FabricConnection *self, const Operation *operation) {
  const int reads = operation->kind == GET;
  if (reads == self->reading) return 0;
  if (self->made != self->retired) {
    if (reads) self->hurried = 1;
    return 1;
  }
  self->reading = reads;
  return 0;
}

/* Prepares the operations' requests in order while there is room, and posts all but the last request. */
static int issue(ProxycclConnection *base) {
  FabricConnection *self = self_of(base);
  for (Operation *operation; (operation = operations_next(&self->queue.operations)) != NULL;) {
    if (operation->kind == FLUSH) {
      if (!flushes_push(&self->queue.flushes, operation, self->made, self->retired)) return 0;
      operations_pop(&self->queue.operations);
      continue;
    }
    if (joins(self, operation)) {
      add_value(self, operation);
      operations_pop(&self->queue.operations);
      continue;
    }
    if (turns(self, operation)) return 0;
    const int status = post(self, !self->options.ordered || self->quiet + 1 >= self->run);
    if (status != 0) return status == WAITS ? 0 : status;
    if (self->made - self->retired == self->options.depth) return 0;
    if (operation->kind == SIGNAL && !self->options.ordered && self->made != self->retired) return 0;
    make_request(self, operation);
    if (operation->bytes == 0) operations_pop(&self->queue.operations);
  }
  return 0;
}

/* Handles a completion, which may belong to another connection's request. Stores the provider's message about an error
 * in the connection of the failed request, or in the polling connection if the error names no request. */
static void take_end(void *reader, void *context, int error, const struct fi_cq_err_entry *entry) {
  FabricRequest *request = context;
  if (entry != NULL) {
    FabricConnection *self = reader, *concerned = request != NULL ? request->connection : self;
    fi_cq_strerror(self->completions, entry->prov_errno, entry->err_data, concerned->text, sizeof concerned->text);
    concerned->text[sizeof concerned->text - 1] = 0;
  }
  if (request != NULL) request_complete(request, error != 0 ? (uint32_t)error : DELIVERED);
}

/* Returns 1 if no connection has polled the shared queue since this connection's last check. So each pass over a
 * worker's connections polls the queue once, because a poll may take several system calls. Relaxed: the shared count
 * orders nothing. */
static int is_to_look(FabricConnection *self) {
  const uint64_t looks = __atomic_load_n(self->options.looks, __ATOMIC_RELAXED);
  const int is_due = looks == self->looks;
  self->looks = is_due ? __atomic_add_fetch(self->options.looks, 1, __ATOMIC_RELAXED) : looks;
  return is_due;
}

/* Retires requests in order, up to the first request that is not known to be complete. */
static int retire(FabricConnection *self) {
  for (uint64_t number = self->retired + 1; number <= self->posted; ++number) {
    const FabricRequest *request = request_of(self, number);
    const uint32_t state = request_state(request);
    /* A request that asks for no completion still reports an error. */
    if (state != 0 && state != DELIVERED) return failed((int)state);
    if (!request->awaited) continue; /* this request is complete once the next request with a completion is complete */
    if (state == 0) break;
    self->retired = number;
  }
  flushes_complete(&self->queue.flushes, self->retired);
  return 0;
}

static int fabric_flush(ProxycclConnection *base, uint64_t *flushed, uint64_t value) {
  FabricConnection *self = self_of(base);
  /* A thread may wait for any flush, except a flush to the word `completed`, which only records progress. */
  if (flushed != &base->progress.completed) self->hurried = 1;
  return queued_flush(base, flushed, value);
}

/* Posts the prepared request, with a completion if one is due. */
static int end_run(FabricConnection *self) {
  return post(self, !self->options.ordered || self->hurried || self->quiet + 1 >= self->run);
}

/* If requests without a completion delay a flush, or if QUIET_NS have passed since the last such request, posts a write
 * of zero bytes with a completion. */
static int ask(FabricConnection *self) {
  if (self->quiet == 0 || self->posted < self->made || self->made - self->retired == self->options.depth) return 0;
  if (!self->hurried && now_ns() - self->quiet_since < QUIET_NS) return 0;
  begin_request(self);
  self->parts.count = 1; /* the write uses the addresses of the last request's first part */
  self->parts.own[0].iov_len = self->parts.theirs[0].len = 0;
  return post(self, 1);
}

static int fabric_poll(ProxycclConnection *base, uint32_t *progress) {
  FabricConnection *self = self_of(base);
  const int posted = end_run(self); /* the post comes before the poll, because a poll takes system calls */
  const int ended = is_to_look(self) ? fabric_drain(self->completions, take_end, self, progress) : 0;
  int status = ended == 0 ? retire(self) : failed(ended);
  /* An error in the queue may have caused a post to fail, so the queue's error is reported. */
  if (status == 0 && posted != WAITS) status = posted;
  if (status == 0) status = issue(base);
  if (status == 0) status = end_run(self);
  if (status == 0) status = ask(self);
  if (self->quiet == 0 && self->posted == self->made && operations_next(&self->queue.operations) == NULL)
    self->hurried = 0;
  if (status == WAITS) status = 0;
  return status == 0 ? proxyccl_mark_progress(base) : status;
}

/* Returns 1 if no request is outstanding. Then no operation waits in the queue either. */
static int fabric_idle(const ProxycclConnection *base) {
  const FabricConnection *self = (const FabricConnection *)base;
  return self->made == self->retired;
}

int proxyccl_fabric_built(void) { return 1; }

static const char *fabric_error_text(const ProxycclConnection *connection) {
  return ((const FabricConnection *)connection)->text;
}

/* Returns the name of an option that is out of range, or NULL if there is none. */
static const char *fabric_refused(const ProxycclFabricOptions *options) {
  if (options->endpoint == 0) return "endpoint";
  if (options->queue == 0) return "queue";
  if (options->depth == 0 || options->depth > PROXYCCL_FABRIC_MOST_DEPTH) return "depth";
  if (options->max_message == 0) return "max_message";
  if (options->requests == 0 || options->requests % sizeof(uint64_t) != 0) return "requests";
  if (options->requests_key >= PROXYCCL_FABRIC_LOCAL_KEYS) return "requests_key";
  if (options->descriptors == NULL) return "descriptors";
  if (options->looks == NULL) return "looks";
  return NULL;
}

static ProxycclConnection *fabric_create(const void *given, const ProxycclRuntimeTable *runtime, const char **refused) {
  const ProxycclFabricOptions *options = given;
  if ((*refused = fabric_refused(options)) != NULL) return NULL;
  FabricConnection *self = calloc(1, sizeof *self);
  (void)runtime;
  if (self == NULL) return NULL;
  self->queue.base.transport = &proxyccl_fabric_transport;
  self->queue.issue = issue;
  self->queue.signal_key = options->signal_key;
  self->queue.no_reads = options->reads ? 0 : PROXYCCL_FABRIC_NO_READS;
  self->options = *options;
  self->endpoint = (struct fid_ep *)options->endpoint;
  self->completions = (struct fid_cq *)options->queue;
  self->run = options->depth / RUNS > 0 ? options->depth / RUNS : 1;
  return &self->queue.base;
}

const ProxycclTransport proxyccl_fabric_transport = {
    .name = "fabric",
    .copies = PROXYCCL_COPIES_OWN, /* providers over sockets use the address of local memory */
    .create = fabric_create,
    .ready = queued_ready,
    .put = queued_put,
    .get = queued_get,
    .put_value = queued_put_value,
    .signal = queued_signal,
    .flush = fabric_flush,
    .poll = fabric_poll,
    .error_text = fabric_error_text,
    .idle = fabric_idle,
};

#else

int proxyccl_fabric_built(void) { return 0; }

static ProxycclConnection *fabric_create(const void *options, const ProxycclRuntimeTable *runtime,
                                         const char **refused) {
  (void)options, (void)runtime, (void)refused;
  errno = ENOSYS;
  return NULL;
}

const ProxycclTransport proxyccl_fabric_transport = {.name = "fabric", .create = fabric_create};

#endif
