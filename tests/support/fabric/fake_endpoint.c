/* Writes and reads are taken as a provider takes them, and carried out at later polls: their data is read then. Reads
 * are carried out in any order among each other and among writes, whatever order writes keep. */
#include "fake_endpoint.h"

#include <pthread.h>
#include <rdma/fabric.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <stdlib.h>
#include <string.h>

enum { PEER = 3, MAX_MEMORIES = 16, MAX_SIGNALS = 1 << 16 };

typedef struct {
  void* context;
  uint64_t number, source, descriptor, target, bytes, key;
  int awaited, reads;
} Request;

typedef struct {
  uint64_t key, base, bytes;
  int offsets;
} Memory;

typedef struct {
  void* context;
  int error;
} Completion;

struct FakeEndpoint {
  struct fid_ep endpoint;
  struct fi_ops_rma writes;
  struct fid_cq queue;
  struct fi_ops_cq reads;
  pthread_mutex_t lock;
  uint32_t depth, ordered, held, completed, dawdle, random;
  Request* taken;
  Completion* completions;
  int64_t allowed;
  uint64_t failing;
  int failing_error;
  const char* breach;
  Memory memories[MAX_MEMORIES];
  uint32_t memory_count;
  FakeFabricCounts counts;
  FakeFabricSignal* signals;
};

static FakeEndpoint* of_queue(struct fid_cq* queue) {
  return (FakeEndpoint*)((char*)queue - offsetof(FakeEndpoint, queue));
}

static void note(FakeEndpoint* self, const char* breach) {
  if (self->breach == NULL) self->breach = breach;
}

/* The address of a range, or NULL. */
static void* reach(const FakeEndpoint* self, uint64_t key, uint64_t address, uint64_t bytes) {
  for (uint32_t i = 0; i < self->memory_count; ++i) {
    const Memory* memory = &self->memories[i];
    const uint64_t offset = memory->offsets ? address : address - memory->base;
    if (memory->key == key && offset <= memory->bytes && bytes <= memory->bytes - offset)
      return (void*)(memory->base + offset);
  }
  return NULL;
}

static int carry_out(FakeEndpoint* self, const Request* write) {
  if (write->number == self->failing) return self->failing_error;
  void* target = reach(self, write->key, write->target, write->bytes);
  const uint64_t base = (uint64_t)write->source;
  if (target == NULL) return FI_EACCES;
  if (reach(self, write->descriptor, base, write->bytes) == NULL) return FI_EFAULT;
  if (write->reads) {
    memcpy((void*)write->source, target, write->bytes);
    return 0;
  }
  memcpy(target, (void*)write->source, write->bytes);
  /* Signals and values are the writes of what is in the memory of requests; signals have 8 bytes. */
  if (write->source >= (uint64_t)write->context && write->source < (uint64_t)write->context + 128) {
    if (write->bytes != 8) return 0;
    if (self->counts.signals == MAX_SIGNALS) note(self, "more signals than the fake endpoint notes");
    self->signals[self->counts.signals++ % MAX_SIGNALS] =
        (FakeFabricSignal){(uint64_t)target, *(uint64_t*)target, self->counts.bytes};
  } else {
    self->counts.bytes += write->bytes;
  }
  return 0;
}

static uint32_t draw(FakeEndpoint* self) {
  self->random = self->random * 1664525u + 1013904223u;
  return self->random >> 16;
}

static void advance(FakeEndpoint* self) {
  uint32_t most = self->dawdle != 0 ? draw(self) % (self->dawdle + 1) : self->depth;
  for (; most > 0 && self->held > 0 && self->allowed != 0; --most) {
    uint32_t chosen = draw(self) % self->held;
    while (self->ordered && chosen > 0 && !self->taken[chosen].reads) --chosen;
    const Request write = self->taken[chosen];
    const int error = carry_out(self, &write);
    if (self->allowed > 0) --self->allowed;
    memmove(&self->taken[chosen], &self->taken[chosen + 1], (self->held - chosen - 1) * sizeof write);
    --self->held;
    ++self->counts.executed;
    if (write.awaited || error != 0) self->completions[self->completed++] = (Completion){write.context, error};
  }
}

static ssize_t take(struct fid_ep* fid, const struct fi_msg_rma* message, uint64_t flags, int reads) {
  FakeEndpoint* self = (FakeEndpoint*)fid;
  ssize_t status = 0;
  pthread_mutex_lock(&self->lock);
  if (message->iov_count != 1 || message->rma_iov_count != 1) note(self, "a write has not one part");
  if (message->addr != PEER) note(self, "a write to another peer");
  if (message->msg_iov->iov_len != message->rma_iov->len) note(self, "a write whose lengths differ");
  if (flags & FI_INJECT) note(self, "a write whose data is to be copied at once");
  if (self->held + self->completed == self->depth || (self->dawdle != 0 && draw(self) % 4 == 0)) {
    ++self->counts.refused;
    status = -FI_EAGAIN;
  } else {
    const int awaited = (flags & FI_COMPLETION) != 0, empty = message->rma_iov->len == 0;
    ++*(empty ? &self->counts.empty : &self->counts.requests);
    if (!reads && awaited && !(flags & FI_DELIVERY_COMPLETE)) note(self, "a completion before the delivery");
    if (reads && (flags & FI_DELIVERY_COMPLETE || !awaited))
      note(self, "a read with a completion that it does not have");
    self->counts.reads += (uint64_t)reads;
    self->taken[self->held++] = (Request){message->context,
                                          empty ? 0 : self->counts.requests,
                                          (uint64_t)message->msg_iov->iov_base,
                                          (uint64_t)*message->desc,
                                          message->rma_iov->addr,
                                          message->rma_iov->len,
                                          message->rma_iov->key,
                                          awaited,
                                          reads};
    self->counts.awaited += (uint64_t)awaited;
  }
  pthread_mutex_unlock(&self->lock);
  return status;
}

static ssize_t writemsg(struct fid_ep* fid, const struct fi_msg_rma* message, uint64_t flags) {
  return take(fid, message, flags, 0);
}

static ssize_t readmsg(struct fid_ep* fid, const struct fi_msg_rma* message, uint64_t flags) {
  return take(fid, message, flags, 1);
}

static ssize_t read_completions(struct fid_cq* queue, void* buffer, size_t count) {
  FakeEndpoint* self = of_queue(queue);
  struct fi_cq_entry* entries = buffer;
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

static ssize_t read_error(struct fid_cq* queue, struct fi_cq_err_entry* entry, uint64_t flags) {
  FakeEndpoint* self = of_queue(queue);
  (void)flags;
  pthread_mutex_lock(&self->lock);
  *entry = (struct fi_cq_err_entry){
      .op_context = self->completions[0].context, .err = self->completions[0].error, .prov_errno = 5};
  memmove(self->completions, &self->completions[1], --self->completed * sizeof *self->completions);
  pthread_mutex_unlock(&self->lock);
  return 1;
}

static const char* words(struct fid_cq* queue, int error, const void* data, char* buffer, size_t bytes) {
  (void)queue, (void)error, (void)data;
  strncpy(buffer, "the fake provider's words", bytes);
  return buffer;
}

FakeEndpoint* fake_endpoint_open(uint32_t depth, uint32_t ordered) {
  FakeEndpoint* self = calloc(1, sizeof *self);
  self->depth = depth;
  self->ordered = ordered;
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

void fake_endpoint_close(FakeEndpoint* self) {
  free(self->taken);
  free(self->completions);
  free(self->signals);
  free(self);
}

uintptr_t fake_endpoint_fid(FakeEndpoint* self) { return (uintptr_t)&self->endpoint; }
uintptr_t fake_endpoint_queue(FakeEndpoint* self) { return (uintptr_t)&self->queue; }
const char* fake_endpoint_breach(const FakeEndpoint* self) { return self->breach; }

void fake_endpoint_counts(FakeEndpoint* self, FakeFabricCounts* counts) {
  pthread_mutex_lock(&self->lock);
  *counts = self->counts;
  pthread_mutex_unlock(&self->lock);
}

void fake_endpoint_register(FakeEndpoint* self, uint64_t key, uint64_t base, uint64_t bytes, uint32_t offsets) {
  self->memories[self->memory_count++] = (Memory){key, base, bytes, (int)offsets};
}

void fake_endpoint_allow(FakeEndpoint* self, int64_t requests) {
  pthread_mutex_lock(&self->lock);
  self->allowed = requests;
  pthread_mutex_unlock(&self->lock);
}

void fake_endpoint_dawdle(FakeEndpoint* self, uint32_t most, uint32_t seed) {
  self->dawdle = most;
  self->random = seed;
}

void fake_endpoint_fail(FakeEndpoint* self, uint64_t request, int32_t error) {
  self->failing = request;
  self->failing_error = error;
}

int fake_endpoint_signal(FakeEndpoint* self, uint64_t number, FakeFabricSignal* signal) {
  if (number >= self->counts.signals) return 0;
  *signal = self->signals[number];
  return 1;
}
