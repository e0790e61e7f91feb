/* Implements the fake device: a post queues requests, and later polls execute them in order. A slot of the send queue
 * is free again once a poll has returned the completion of its request or of a later request.
 *
 * A read copies its data as late as verbs allow: before a later fenced request is executed, or when the read or a later
 * request completes.
 */
#include "fake_device.h"

#include <errno.h>
#include <infiniband/verbs.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { QP_NUM = 4711, MAX_MEMORIES = 64, MAX_INLINE = 8, MAX_SIGNALS = 1 << 16 };

typedef struct {
  uint64_t wr_id;
  uint64_t local, remote, length, add;
  uint64_t inlined;
  uint32_t lkey, rkey;
  int opcode, is_inline, is_signalled, is_fenced;
} Request;

typedef struct {
  struct ibv_wc wc;
  uint64_t number; /* of the request */
} Completion;

typedef struct {
  uint32_t key;
  uintptr_t base;
  uint64_t bytes;
} Memory;

struct FakeDevice {
  struct ibv_context context;
  struct ibv_pd pd;
  struct ibv_cq cq;
  struct ibv_qp qp;
  pthread_mutex_t lock;
  uint32_t send_depth, cq_depth, reads;
  Request *queue;          /* request n is queue[n % send_depth] */
  Completion *completions; /* completion n is completions[n % cq_depth] */
  uint64_t posted, executed, freed, completed, polled;
  uint64_t carried_out; /* number of the last request up to which all reads have copied */
  int64_t allowed;
  uint32_t dawdle, random;
  uint64_t failing_request, failing_post;
  uint32_t lost;
  int failing_status, failing_error, failing_polls, in_error;
  const char *breach;
  Memory memories[MAX_MEMORIES];
  uint32_t memory_count;
  uint64_t bytes;
  FakeCounts counts;
  FakeSignal *signals;
};

static void note(FakeDevice *device, const char *breach) {
  if (device->breach == NULL) device->breach = breach;
}

static int reachable(const FakeDevice *device, uint32_t key, uint64_t address, uint64_t bytes) {
  for (uint32_t i = 0; i < device->memory_count; ++i) {
    const Memory *memory = &device->memories[i];
    if (memory->key == key && address >= memory->base && bytes <= memory->bytes &&
        address - memory->base <= memory->bytes - bytes)
      return 1;
  }
  return 0;
}

/* Copies the data of all reads up to request `number`. */
static void read_up_to(FakeDevice *device, uint64_t number) {
  while (device->carried_out < number) {
    const Request *request = &device->queue[++device->carried_out % device->send_depth];
    if (request->opcode == IBV_WR_RDMA_READ && device->carried_out <= device->executed)
      memcpy((void *)request->local, (void *)request->remote, request->length);
  }
}

static void complete(FakeDevice *device, const Request *request, uint64_t number, int status) {
  Completion *completion = &device->completions[device->completed % device->cq_depth];
  if (device->completed - device->polled == device->cq_depth) {
    note(device, "the completion queue overflows");
    return;
  }
  memset(completion, 0, sizeof *completion);
  completion->wc.wr_id = request->wr_id;
  completion->wc.status = (enum ibv_wc_status)status;
  completion->wc.qp_num = QP_NUM;
  completion->number = number;
  ++device->completed;
}

static void note_signal(FakeDevice *device, const Request *request) {
  if (device->counts.signals == MAX_SIGNALS) {
    note(device, "more signals than the fake device can record");
    return;
  }
  device->signals[device->counts.signals++] =
      (FakeSignal){request->remote, __atomic_load_n((uint64_t *)request->remote, __ATOMIC_RELAXED), device->bytes};
}

/* Returns an ibv_wc_status. */
static int execute(FakeDevice *device, const Request *request) {
  if (!request->is_inline && !reachable(device, request->lkey, request->local, request->length))
    return IBV_WC_LOC_PROT_ERR;
  if (!reachable(device, request->rkey, request->remote, request->length)) return IBV_WC_REM_ACCESS_ERR;
  if (request->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
    if (request->remote % 8 != 0) return IBV_WC_REM_INV_REQ_ERR;
    *(uint64_t *)request->local = __atomic_fetch_add((uint64_t *)request->remote, request->add, __ATOMIC_RELEASE);
    note_signal(device, request);
  } else if (request->opcode == IBV_WR_RDMA_READ) {
    ++device->counts.reads;
  } else if (request->is_inline) {
    if (request->length == MAX_INLINE && request->remote % MAX_INLINE == 0) {
      __atomic_store_n((uint64_t *)request->remote, request->inlined, __ATOMIC_RELEASE);
      note_signal(device, request);
    } else {
      memcpy((void *)request->remote, &request->inlined, request->length);
    }
  } else {
    memcpy((void *)request->remote, (void *)request->local, request->length);
    device->bytes += request->length;
  }
  return IBV_WC_SUCCESS;
}

/* Executes the requests whose acknowledgements are lost. A fenced request does not start after a read without a
 * response. */
static int fail(FakeDevice *device) {
  const uint64_t first = device->failing_request;
  for (uint64_t number = first; number < first + device->lost && number <= device->posted; ++number) {
    const Request *request = &device->queue[number % device->send_depth];
    if (number > first && request->is_fenced) break;
    execute(device, request);
  }
  return device->failing_status;
}

static void advance(FakeDevice *device) {
  uint32_t most = device->send_depth;
  if (device->dawdle != 0) {
    device->random = device->random * 1664525u + 1013904223u;
    most = (device->random >> 16) % (device->dawdle + 1);
  }
  for (; most > 0 && device->executed != device->posted; --most) {
    const uint64_t number = device->executed + 1;
    const Request *request = &device->queue[number % device->send_depth];
    int status = IBV_WC_WR_FLUSH_ERR;
    if (!device->in_error) {
      if (device->allowed == 0) return;
      if (device->allowed > 0) --device->allowed;
      if (request->is_fenced) read_up_to(device, number - 1);
      status = number == device->failing_request ? fail(device) : execute(device, request);
      device->in_error = status != IBV_WC_SUCCESS;
    }
    if (status == IBV_WC_SUCCESS) ++device->executed;
    if (request->is_signalled || status != IBV_WC_SUCCESS) {
      read_up_to(device, status == IBV_WC_SUCCESS ? number : number - 1);
      complete(device, request, number, status);
    }
    if (status != IBV_WC_SUCCESS) device->carried_out = ++device->executed;
  }
}

/* Returns 0, or the errno with which the request is refused. */
static int take(FakeDevice *device, const struct ibv_send_wr *wr) {
  Request *request;
  if (device->posted - device->freed == device->send_depth) {
    note(device, "the send queue overflows");
    return ENOMEM;
  }
  if (wr->num_sge != 1) {
    note(device, "a request does not have exactly one part");
    return EINVAL;
  }
  request = &device->queue[++device->posted % device->send_depth];
  *request = (Request){.wr_id = wr->wr_id,
                       .local = wr->sg_list->addr,
                       .length = wr->sg_list->length,
                       .lkey = wr->sg_list->lkey,
                       .opcode = (int)wr->opcode,
                       .is_inline = (wr->send_flags & IBV_SEND_INLINE) != 0,
                       .is_signalled = (wr->send_flags & IBV_SEND_SIGNALED) != 0,
                       .is_fenced = (wr->send_flags & IBV_SEND_FENCE) != 0};
  if (request->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
    request->remote = wr->wr.atomic.remote_addr;
    request->rkey = wr->wr.atomic.rkey;
    request->add = wr->wr.atomic.compare_add;
  } else {
    request->remote = wr->wr.rdma.remote_addr;
    request->rkey = wr->wr.rdma.rkey;
    if (request->opcode == IBV_WR_RDMA_READ && device->reads == 0) note(device, "a read on a device without reads");
    if (request->opcode != IBV_WR_RDMA_WRITE && request->opcode != IBV_WR_RDMA_READ)
      note(device, "a request is neither a write nor a read nor an atomic add");
  }
  if (request->length == 0) note(device, "a request carries nothing");
  if (request->is_inline) {
    if (request->opcode != IBV_WR_RDMA_WRITE || request->length > MAX_INLINE)
      note(device, "a request that is neither a signal nor a value is inline");
    else
      memcpy(&request->inlined, (void *)request->local, request->length);
  }
  ++device->counts.requests;
  device->counts.signalled += (uint64_t)request->is_signalled;
  device->counts.inlined += (uint64_t)request->is_inline;
  device->counts.fenced += (uint64_t)request->is_fenced;
  if (device->posted - device->freed > device->counts.most_outstanding)
    device->counts.most_outstanding = device->posted - device->freed;
  return 0;
}

static int fake_post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad_wr) {
  FakeDevice *device = qp->qp_context;
  uint64_t chain = 0;
  int status = 0;
  pthread_mutex_lock(&device->lock);
  if (++device->counts.posts == device->failing_post) status = device->failing_error;
  for (; status == 0 && wr != NULL; wr = wr->next) {
    status = take(device, wr);
    if (status != 0) break;
    ++chain;
  }
  if (status != 0) *bad_wr = wr;
  if (chain > device->counts.longest_chain) device->counts.longest_chain = chain;
  pthread_mutex_unlock(&device->lock);
  return status;
}

static int fake_poll_cq(struct ibv_cq *cq, int entries, struct ibv_wc *wc) {
  FakeDevice *device = cq->cq_context;
  int taken = 0;
  pthread_mutex_lock(&device->lock);
  ++device->counts.polls;
  advance(device);
  while (taken < entries && device->polled != device->completed) {
    const Completion *completion = &device->completions[device->polled++ % device->cq_depth];
    device->freed = completion->number;
    wc[taken++] = completion->wc;
  }
  if (device->failing_polls) taken = -1;
  pthread_mutex_unlock(&device->lock);
  return taken;
}

FakeDevice *fake_open(uint32_t send_depth, uint32_t cq_depth, uint32_t reads) {
  FakeDevice *device = calloc(1, sizeof *device);
  pthread_mutex_init(&device->lock, NULL);
  device->queue = calloc(send_depth, sizeof *device->queue);
  device->completions = calloc(cq_depth, sizeof *device->completions);
  device->signals = calloc(MAX_SIGNALS, sizeof *device->signals);
  device->send_depth = send_depth;
  device->cq_depth = cq_depth;
  device->reads = reads;
  device->allowed = -1;
  device->context.ops.post_send = fake_post_send;
  device->context.ops.poll_cq = fake_poll_cq;
  device->pd.context = &device->context;
  device->cq.context = &device->context;
  device->cq.cq_context = device;
  device->cq.cqe = (int)cq_depth;
  device->qp.context = &device->context;
  device->qp.qp_context = device;
  device->qp.pd = &device->pd;
  device->qp.send_cq = device->qp.recv_cq = &device->cq;
  device->qp.qp_num = QP_NUM;
  device->qp.state = IBV_QPS_RTS;
  return device;
}

void fake_close(FakeDevice *device) {
  pthread_mutex_destroy(&device->lock);
  free(device->queue);
  free(device->completions);
  free(device->signals);
  free(device);
}

uintptr_t fake_qp(const FakeDevice *device) { return (uintptr_t)&device->qp; }
uintptr_t fake_cq(const FakeDevice *device) { return (uintptr_t)&device->cq; }
uint32_t fake_qp_num(const FakeDevice *device) { return device->qp.qp_num; }

/* Runs `change` under the lock. */
#define ALONE(change)                    \
  do {                                   \
    pthread_mutex_lock(&device->lock);   \
    change;                              \
    pthread_mutex_unlock(&device->lock); \
  } while (0)

void fake_register(FakeDevice *device, uint32_t key, uintptr_t base, uint64_t bytes) {
  ALONE(if (device->memory_count == MAX_MEMORIES) note(device, "more memories than the fake device can hold");
        else device->memories[device->memory_count++] = ((Memory){key, base, bytes}));
}

void fake_allow(FakeDevice *device, int64_t requests) { ALONE(device->allowed = requests); }

void fake_dawdle(FakeDevice *device, uint32_t most, uint32_t seed) {
  ALONE(device->dawdle = most; device->random = seed);
}

void fake_fail_request(FakeDevice *device, uint64_t number, int status, uint32_t lost) {
  ALONE(device->failing_request = number; device->failing_status = status; device->lost = lost);
}

void fake_stop(FakeDevice *device) { ALONE(device->in_error = 1); }

void fake_reset(FakeDevice *device) {
  ALONE(device->in_error = device->failing_polls = 0;
        device->executed = device->carried_out = device->freed = device->posted; device->polled = device->completed);
}

void fake_fail_post(FakeDevice *device, uint64_t number, int error) {
  ALONE(device->failing_post = number; device->failing_error = error);
}

void fake_fail_polls(FakeDevice *device) { ALONE(device->failing_polls = 1); }

const char *fake_breach(FakeDevice *device) {
  const char *breach;
  ALONE(breach = device->breach);
  return breach;
}

void fake_counts(FakeDevice *device, FakeCounts *counts) {
  ALONE(*counts = device->counts; counts->executed = device->executed);
}

int fake_signal(FakeDevice *device, uint64_t index, FakeSignal *signal) {
  int found;
  ALONE(found = index < device->counts.signals; if (found) *signal = device->signals[index]);
  return found;
}

const char *fake_status_name(int status) {
#define NAME(name) [name] = #name
  static const char *const names[] = {
      NAME(IBV_WC_SUCCESS),
      NAME(IBV_WC_LOC_LEN_ERR),
      NAME(IBV_WC_LOC_QP_OP_ERR),
      NAME(IBV_WC_LOC_EEC_OP_ERR),
      NAME(IBV_WC_LOC_PROT_ERR),
      NAME(IBV_WC_WR_FLUSH_ERR),
      NAME(IBV_WC_MW_BIND_ERR),
      NAME(IBV_WC_BAD_RESP_ERR),
      NAME(IBV_WC_LOC_ACCESS_ERR),
      NAME(IBV_WC_REM_INV_REQ_ERR),
      NAME(IBV_WC_REM_ACCESS_ERR),
      NAME(IBV_WC_REM_OP_ERR),
      NAME(IBV_WC_RETRY_EXC_ERR),
      NAME(IBV_WC_RNR_RETRY_EXC_ERR),
      NAME(IBV_WC_LOC_RDD_VIOL_ERR),
      NAME(IBV_WC_REM_INV_RD_REQ_ERR),
      NAME(IBV_WC_REM_ABORT_ERR),
      NAME(IBV_WC_INV_EECN_ERR),
      NAME(IBV_WC_INV_EEC_STATE_ERR),
      NAME(IBV_WC_FATAL_ERR),
      NAME(IBV_WC_RESP_TIMEOUT_ERR),
      NAME(IBV_WC_GENERAL_ERR),
      NAME(IBV_WC_TM_ERR),
      NAME(IBV_WC_TM_RNDV_INCOMPLETE),
  };
  return status >= 0 && (size_t)status < sizeof names / sizeof *names ? names[status] : NULL;
}
