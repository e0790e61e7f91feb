/* Implements the fake endpoint: writes and reads are queued, and later polls copy their data. Reads are executed in
 * any order, even if writes keep their order. */
#include "fake_endpoint.h"

#include <pthread.h>
#include <rdma/fabric.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <stdlib.h>
#include <string.h>

enum { PEER = 3, MAX_MEMORIES = 16, MAX_SIGNALS = 1 << 16, MAX_PARTS = 2 };

typedef struct {
  uint64_t source, descriptor, target, bytes, key;
} Part;

typedef struct {
  void *context;
  uint64_t number;
  size_t part_count;
  Part parts[MAX_PARTS];
  int awaited, reads;
} Request;

typedef struct {
  uint64_t key, base, bytes;
  int offsets;
} Memory;

typedef struct {
  void *context;
  int error;
} Completion;

struct FakeEndpoint {
  struct fid_ep endpoint;
  struct fi_ops_rma writes;
  struct fid_cq queue;
  struct fi_ops_cq reads;
  pthread_mutex_t lock;
  uint32_t depth, ordered, joined, held, completed, dawdle, random;
  Request *taken;
  Completion *completions;
  uint64_t max_message;
  int64_t allowed;
  uint64_t failing;
  int failing_error;
  int broken;  /* 1 after a request has failed: no later request is executed, as on a stream that ends */
  int stopped; /* 1 while the endpoint is closed */
  const char *breach;
  Memory memories[MAX_MEMORIES];
  uint32_t memory_count;
  FakeFabricCounts counts;
  FakeFabricSignal *signals;
};

static FakeEndpoint *of_queue(struct fid_cq *queue) {
  return (FakeEndpoint *)((char *)queue - offsetof(FakeEndpoint, queue));
}

static void note(FakeEndpoint *self, const char *breach) {
  if (self->breach == NULL) self->breach = breach;
}

/* Returns the address of a range of registered memory, or NULL. */
static void *reach(const FakeEndpoint *self, uint64_t key, uint64_t address, uint64_t bytes) {
  for (uint32_t i = 0; i < self->memory_count; ++i) {
    const Memory *memory = &self->memories[i];
    const uint64_t offset = memory->offsets ? address : address - memory->base;
    if (memory->key == key && offset <= memory->bytes && bytes <= memory->bytes - offset)
      return (void *)(memory->base + offset);
  }
  return NULL;
}

static int carry_out_part(FakeEndpoint *self, const Request *write, const Part *part) {
  void *target = reach(self, part->key, part->target, part->bytes);
  if (target == NULL) return FI_EACCES;
  if (reach(self, part->descriptor, part->source, part->bytes) == NULL) return FI_EFAULT;
  if (write->reads) {
    memcpy((void *)part->source, target, part->bytes);
    return 0;
  }
  memcpy(target, (void *)part->source, part->bytes);
  /* A write whose source is inside its own request is a signal if it has 8 bytes, else a put of a value. */
  if (part->source >= (uint64_t)write->context && part->source < (uint64_t)write->context + 128) {
    if (part->bytes != 8) return 0;
    if (self->counts.signals == MAX_SIGNALS) note(self, "more signals than the fake endpoint can record");
    self->signals[self->counts.signals++ % MAX_SIGNALS] =
        (FakeFabricSignal){(uint64_t)target, *(uint64_t *)target, self->counts.bytes};
  } else {
    self->counts.bytes += part->bytes;
  }
  return 0;
}

/* Executes a request's parts in order. Returns 0 or an error. */
static int carry_out(FakeEndpoint *self, const Request *write) {
  if (write->number == self->failing) return self->failing_error;
  int error = 0;
  for (size_t i = 0; i < write->part_count && error == 0; ++i) error = carry_out_part(self, write, &write->parts[i]);
  return error;
}

static uint32_t draw(FakeEndpoint *self) {
  self->random = self->random * 1664525u + 1013904223u;
  return self->random >> 16;
}

static void advance(FakeEndpoint *self) {
  uint32_t most = self->dawdle != 0 ? draw(self) % (self->dawdle + 1) : self->depth;
  for (; most > 0 && self->held > 0 && self->allowed != 0 && !self->broken; --most) {
    uint32_t chosen = draw(self) % self->held;
    while (self->ordered && chosen > 0 && !self->taken[chosen].reads) --chosen;
    const Request write = self->taken[chosen];
    const int error = carry_out(self, &write);
    self->broken = error != 0;
    if (self->allowed > 0) --self->allowed;
    memmove(&self->taken[chosen], &self->taken[chosen + 1], (self->held - chosen - 1) * sizeof write);
    --self->held;
    ++self->counts.executed;
    if (write.awaited || error != 0) self->completions[self->completed++] = (Completion){write.context, error};
  }
}

static ssize_t take(struct fid_ep *fid, const struct fi_msg_rma *message, uint64_t flags, int reads) {
  FakeEndpoint *self = (FakeEndpoint *)fid;
  ssize_t status = 0;
  pthread_mutex_lock(&self->lock);
  const size_t parts = message->iov_count;
  if (self->stopped) note(self, "a request to an endpoint that is closed");
  size_t bytes = 0;
  if (parts != message->rma_iov_count) note(self, "a write with different numbers of local and remote parts");
  if (parts < 1 || parts > (self->joined && !reads ? MAX_PARTS : 1)) note(self, "a write of too many parts, or none");
  if (message->addr != PEER) note(self, "a write to another peer");
  for (size_t i = 0; i < parts; ++i) {
    if (message->msg_iov[i].iov_len != message->rma_iov[i].len)
      note(self, "a write whose local and remote lengths differ");
    bytes += message->rma_iov[i].len;
  }
  if (parts > 1 && bytes > self->max_message) note(self, "a write of more than max_message bytes");
  if (flags & FI_INJECT) note(self, "a write whose data is injected");
  if (parts > MAX_PARTS) {
    status = -FI_EINVAL;
  } else if (self->held + self->completed == self->depth || (self->dawdle != 0 && draw(self) % 4 == 0)) {
    ++self->counts.refused;
    status = -FI_EAGAIN;
  } else {
    const int awaited = (flags & FI_COMPLETION) != 0, empty = bytes == 0;
    ++*(empty ? &self->counts.empty : &self->counts.requests);
    self->counts.joined += parts > 1;
    if (!reads && awaited && !(flags & FI_DELIVERY_COMPLETE))
      note(self, "a write asks for a completion before its delivery");
    if (reads && (flags & FI_DELIVERY_COMPLETE || !awaited))
      note(self, "a read without a completion, or with one on delivery");
    self->counts.reads += (uint64_t)reads;
    Request *taken = &self->taken[self->held++];
    *taken = (Request){.context = message->context,
                       .number = empty ? 0 : self->counts.requests,
                       .part_count = parts,
                       .awaited = awaited,
                       .reads = reads};
    for (size_t i = 0; i < parts; ++i)
      taken->parts[i] = (Part){(uint64_t)message->msg_iov[i].iov_base, (uint64_t)message->desc[i],
                               message->rma_iov[i].addr, message->rma_iov[i].len, message->rma_iov[i].key};
    self->counts.awaited += (uint64_t)awaited;
  }
  pthread_mutex_unlock(&self->lock);
  return status;
}

static ssize_t writemsg(struct fid_ep *fid, const struct fi_msg_rma *message, uint64_t flags) {
  return take(fid, message, flags, 0);
}

static ssize_t readmsg(struct fid_ep *fid, const struct fi_msg_rma *message, uint64_t flags) {
  return take(fid, message, flags, 1);
}

static ssize_t read_completions(struct fid_cq *queue, void *buffer, size_t count) {
  FakeEndpoint *self = of_queue(queue);
  struct fi_cq_entry *entries = buffer;
  ssize_t taken = 0;
  pthread_mutex_lock(&self->lock);
  ++self->counts.polls;
  advance(self);
  while ((size_t)taken < count && (uint32_t)taken < self->completed && self->completions[taken].error == 0) {
    entries[taken].op_context = self->completions[taken].context;
    ++taken;
  }
  if (taken == 0) taken = self->completed > 0 ? -FI_EAVAIL : -FI_EAGAIN;
  if (taken > 0) {
    self->completed -= (uint32_t)taken;
    memmove(self->completions, &self->completions[taken], self->completed * sizeof *self->completions);
  }
  pthread_mutex_unlock(&self->lock);
  return taken;
}

static ssize_t read_error(struct fid_cq *queue, struct fi_cq_err_entry *entry, uint64_t flags) {
  FakeEndpoint *self = of_queue(queue);
  (void)flags;
  pthread_mutex_lock(&self->lock);
  *entry = (struct fi_cq_err_entry){
      .op_context = self->completions[0].context, .err = self->completions[0].error, .prov_errno = 5};
  memmove(self->completions, &self->completions[1], --self->completed * sizeof *self->completions);
  pthread_mutex_unlock(&self->lock);
  return 1;
}

static const char *words(struct fid_cq *queue, int error, const void *data, char *buffer, size_t bytes) {
  (void)queue, (void)error, (void)data;
  strncpy(buffer, "the fake provider's words", bytes);
  return buffer;
}

FakeEndpoint *fake_endpoint_open(uint32_t depth, uint32_t ordered, uint32_t joined, uint64_t max_message) {
  FakeEndpoint *self = calloc(1, sizeof *self);
  self->depth = depth;
  self->ordered = ordered;
  self->joined = joined;
  self->max_message = max_message;
  self->allowed = -1;
  self->random = 1;
  self->taken = calloc(depth, sizeof *self->taken);
  self->completions = calloc(depth + 1, sizeof *self->completions);
  self->signals = calloc(MAX_SIGNALS, sizeof *self->signals);
  pthread_mutex_init(&self->lock, NULL);
  self->writes.writemsg = writemsg;
  self->writes.readmsg = readmsg;
  self->endpoint.rma = &self->writes;
  self->reads.read = read_completions;
  self->reads.readerr = read_error;
  self->reads.strerror = words;
  self->queue.ops = &self->reads;
  return self;
}

void fake_endpoint_close(FakeEndpoint *self) {
  free(self->taken);
  free(self->completions);
  free(self->signals);
  free(self);
}

uintptr_t fake_endpoint_fid(FakeEndpoint *self) { return (uintptr_t)&self->endpoint; }
uintptr_t fake_endpoint_queue(FakeEndpoint *self) { return (uintptr_t)&self->queue; }
const char *fake_endpoint_breach(const FakeEndpoint *self) { return self->breach; }

void fake_endpoint_counts(FakeEndpoint *self, FakeFabricCounts *counts) {
  pthread_mutex_lock(&self->lock);
  *counts = self->counts;
  pthread_mutex_unlock(&self->lock);
}

void fake_endpoint_register(FakeEndpoint *self, uint64_t key, uint64_t base, uint64_t bytes, uint32_t offsets) {
  self->memories[self->memory_count++] = (Memory){key, base, bytes, (int)offsets};
}

void fake_endpoint_allow(FakeEndpoint *self, int64_t requests) {
  pthread_mutex_lock(&self->lock);
  self->allowed = requests;
  pthread_mutex_unlock(&self->lock);
}

void fake_endpoint_dawdle(FakeEndpoint *self, uint32_t most, uint32_t seed) {
  self->dawdle = most;
  self->random = seed;
}

void fake_endpoint_fail(FakeEndpoint *self, uint64_t request, int32_t error) {
  self->failing = request;
  self->failing_error = error;
}

int fake_endpoint_stop(FakeEndpoint *self) {
  pthread_mutex_lock(&self->lock);
  self->held = self->completed = 0;
  self->failing = 0;
  self->failing_error = 0;
  self->stopped = 1;
  pthread_mutex_unlock(&self->lock);
  return 1;
}

void fake_endpoint_reopen(FakeEndpoint *self) { self->stopped = self->broken = 0; }

int fake_endpoint_signal(FakeEndpoint *self, uint64_t number, FakeFabricSignal *signal) {
  if (number >= self->counts.signals) return 0;
  *signal = self->signals[number];
  return 1;
}
