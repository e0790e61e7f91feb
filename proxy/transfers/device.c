/* Transfers that a device copies: queued on a stream of it, and ended when the stream has written a word after them.
 * See transfers.h.
 *
 * A caller that waits or asks looks at the word itself. Otherwise the agent's thread does, from time to time.
 */
#include <errno.h>
#include <time.h>

#include "clock.h"
#include "launch.h"
#include "parts.h"
#include "runtime_table.h"

enum {
  CHECK_NS = 1000000,        /* between two questions whether the device has failed */
  SPIN_NS = 250000,          /* whoever waits spins for this long: 64 MiB take 180 us between GPUs, and a sleep 70 */
  SHORTEST_PAUSE_NS = 20000, /* between two looks of the agent's thread */
  LONGEST_PAUSE_NS = 1000000 /* likewise */
};

/* The calling thread's state before it used a device. */
typedef struct Entered {
  uint64_t context;
  int mode;
} Entered;

/* Makes the device current, and allows calls that a graph capture elsewhere in the process forbids. */
static Entered enter(const ProxycclCopier *copier) {
  Entered before = {copier->context, copier->relaxed};
  if (copier->make_current != 0) {
    before.context = 0;
    ((int (*)(uint64_t *))(uintptr_t)copier->current)(&before.context);
    if (before.context != copier->context) ((int (*)(uintptr_t))(uintptr_t)copier->make_current)(copier->context);
  }
  if (copier->exchange_capture_mode != 0) {
    ((int (*)(int *))(uintptr_t)copier->exchange_capture_mode)(&before.mode);
  }
  return before;
}

static void leave(const ProxycclCopier *copier, Entered before) {
  if (copier->exchange_capture_mode != 0) {
    ((int (*)(int *))(uintptr_t)copier->exchange_capture_mode)(&before.mode);
  }
  if (copier->make_current != 0 && before.context != copier->context) {
    ((int (*)(uintptr_t))(uintptr_t)copier->make_current)(before.context);
  }
}

static int copy(const ProxycclCopier *copier, uint64_t to, uint64_t from, uint64_t bytes, void *stream) {
  return ((int (*)(void *, const void *, size_t, void *))(uintptr_t)copier->copy)(
      (void *)(uintptr_t)to, (const void *)(uintptr_t)from, bytes, stream);
}

static int record(const ProxycclCopier *copier, void *event, void *stream) {
  return ((int (*)(void *, void *))(uintptr_t)copier->event_record)(event, stream);
}

static int reached(const ProxycclCopier *copier, void *event) {
  return ((int (*)(void *))(uintptr_t)copier->event_query)(event);
}

/* Whether the stream has written the transfer's word, which it does after the copies. */
static int is_over(const ProxycclTransfer *transfer) {
  return __atomic_load_n(transfer->word, __ATOMIC_ACQUIRE) == transfer->turn;
}

/* The device's failure, or 0: after one a word may never be written. The event marks nothing, so it is reached. */
static int failure(const ProxycclTransfer *transfer) {
  const Entered before = enter(transfer->copier);
  const int status = reached(transfer->copier, transfer->event);
  leave(transfer->copier, before);
  return status == PROXYCCL_RUNTIME_NOT_READY ? 0 : status;
}

/* Queues the copies and the write of the word, also after a failure, as earlier copies run. *queued: whether it was.
 * Returns the driver's first failure, or 0. */
static int issue(const ProxycclTransfer *transfer, void *stream, int *queued) {
  const ProxycclCopier *copier = transfer->copier;
  const ProxycclLaunch *launch = transfer->launch;
  const Entered before = enter(copier);
  int status = 0;
  for (uint64_t i = 0; i < transfer->copy_count && status == 0; ++i) {
    const uint64_t *row = transfer->copies + 3 * i;
    status = copy(copier, row[0], row[1], row[2], stream);
  }
  if (status == 0 && launch != NULL) status = proxyccl_launch_current(launch, (uintptr_t)stream);
  const int failed = ((int (*)(void *, uint64_t *, uint64_t, unsigned))(uintptr_t)copier->write64)(
      stream, (uint64_t *)(uintptr_t)transfer->word_on_device, transfer->turn, 0);
  leave(copier, before);
  *queued = failed == 0;
  return status != 0 ? status : failed;
}

static void end(ProxycclTransfer *transfer) {
  ProxycclAgent *agent = transfer->agent;
  ProxycclLink *link = transfer->link;
  if (transfer->queued) transfer_unqueue(transfer, &agent->looked_at, &agent->last_looked_at);
  if (link != NULL && transfer->error != 0) link_look(link);
  if (link != NULL && link->lost != NULL) {
    transfer_end(transfer, PROXYCCL_TRANSFER_LOST);
  } else {
    transfer_end(transfer, transfer->error != 0 ? PROXYCCL_TRANSFER_FAILED : PROXYCCL_TRANSFER_DONE);
  }
}

void device_start(ProxycclTransfer *transfer, const uint64_t *stream) {
  static uint64_t turns; /* no word ever gets the same value twice, not even that of a transfer that was given up */
  ProxycclAgent *agent = transfer->agent;
  const int is_short = stream == NULL && transfer->bytes <= SHORT_BYTES;
  void *queue = stream == NULL ? transfer->stream : (void *)(uintptr_t)*stream;
  int queued;
  transfer->turn = __atomic_add_fetch(&turns, 1, __ATOMIC_RELAXED);
  transfer->checked = transfer->times.posted;
  ++transfer->copying;
  pthread_mutex_unlock(&agent->lock);
  const int status = issue(transfer, queue, &queued);
  const uint64_t deadline = transfer->times.posted + SHORT_NS;
  while (is_short && queued && !is_over(transfer) && now_ns() < deadline) {}
  pthread_mutex_lock(&agent->lock);
  --transfer->copying;
  transfer->error = -status;
  if (transfer->cancel) pthread_cond_broadcast(&agent->changed); /* whoever cancels it ends it */
  if (!queued || is_over(transfer)) {
    if (!transfer->cancel) end(transfer);
    return;
  }
  transfer_queue(transfer, &agent->last_looked_at);
  agent_wake(agent);
}

int device_look(ProxycclTransfer *transfer) {
  ProxycclAgent *agent = transfer->agent;
  if (transfer->copying > 0 || transfer->cancel) return 0; /* whoever looks or cancels ends it */
  if (!is_over(transfer)) {
    const uint64_t now = now_ns();
    if (now - transfer->checked < CHECK_NS) return 0;
    transfer->checked = now;
    ++transfer->copying;
    pthread_mutex_unlock(&agent->lock);
    const int status = failure(transfer);
    pthread_mutex_lock(&agent->lock);
    --transfer->copying;
    if (transfer->cancel) {
      pthread_cond_broadcast(&agent->changed);
      return 0;
    }
    if (status == 0) return 0;
    transfer->error = -status;
  }
  end(transfer);
  return 1;
}

uint64_t device_pause(const ProxycclAgent *agent) {
  uint64_t shortest = agent->stages != NULL ? SHORTEST_PAUSE_NS : LONGEST_PAUSE_NS;
  const uint64_t now = now_ns();
  for (const ProxycclTransfer *transfer = agent->looked_at; transfer != NULL; transfer = transfer->next) {
    /* Seldom for what takes long; soon for a stage. */
    const uint64_t pause = transfer->parts != NULL && transfer->rung ? 0 : (now - transfer->times.posted) / 8;
    if (pause < shortest) shortest = pause;
  }
  return shortest < SHORTEST_PAUSE_NS ? SHORTEST_PAUSE_NS : shortest;
}

void device_look_at_all(ProxycclAgent *agent) {
  uint32_t count = 0;
  for (const ProxycclTransfer *each = agent->looked_at; each != NULL; each = each->next) ++count;
  /* The list may change while the lock is released, so each turn takes the first one, and puts it last. */
  for (; count > 0 && agent->looked_at != NULL; --count) {
    ProxycclTransfer *first = agent->looked_at;
    transfer_unqueue(first, &agent->looked_at, &agent->last_looked_at);
    transfer_queue(first, &agent->last_looked_at);
    transfer_look(first);
  }
}

void device_rest(ProxycclTransfer *transfer) {
  const uint64_t elapsed = now_ns() - transfer->times.posted;
  pthread_mutex_unlock(&transfer->agent->lock);
  if (elapsed > SPIN_NS) { /* a short copy is spun for, and a long one is noticed a little late */
    const uint64_t pause = elapsed / 16 < SHORTEST_PAUSE_NS ? elapsed / 16 : SHORTEST_PAUSE_NS;
    nanosleep(&(struct timespec){0, (long)pause}, NULL);
  }
  pthread_mutex_lock(&transfer->agent->lock);
}

void device_finish(ProxycclTransfer *transfer) {
  ProxycclAgent *agent = transfer->agent;
  const uint64_t deadline = now_ns() + LONGEST_CANCEL_S * 1000000000ull;
  const struct timespec pause = {0, SHORTEST_PAUSE_NS};
  ++transfer->copying; /* it stays, and nobody else looks */
  pthread_mutex_unlock(&agent->lock);
  while (!is_over(transfer) && failure(transfer) == 0 && now_ns() < deadline) nanosleep(&pause, NULL);
  pthread_mutex_lock(&agent->lock);
  --transfer->copying;
  if (transfer->queued) transfer_unqueue(transfer, &agent->looked_at, &agent->last_looked_at);
}

int device_queue(const ProxycclStaging *staging, uint32_t stage, void *memory, int to_device,
                 const struct iovec *blocks, uint64_t count) {
  const ProxycclCopier *copier = staging->copier;
  /* All copies to the device are on one stream: what a canceled write has sent must not come after a later write. */
  void *stream = (void *)(uintptr_t)staging->streams[to_device ? 0 : stage];
  void *event = (void *)(uintptr_t)staging->events[stage];
  uint64_t at = (uintptr_t)memory;
  int status = 0;
  const Entered before = enter(copier);
  for (uint64_t i = 0; i < count && status == 0; ++i) {
    const uint64_t block = (uintptr_t)blocks[i].iov_base;
    status = copy(copier, to_device ? block : at, to_device ? at : block, blocks[i].iov_len, stream);
    at += blocks[i].iov_len;
  }
  const int recorded = record(copier, event, stream); /* also after a failure, as earlier copies run */
  leave(copier, before);
  return status != 0 ? status : recorded;
}

int device_reached(const ProxycclStaging *staging, uint32_t stage) {
  const Entered before = enter(staging->copier);
  const int status = reached(staging->copier, (void *)(uintptr_t)staging->events[stage]);
  leave(staging->copier, before);
  return status;
}

int device_await(const ProxycclStaging *staging, uint32_t stage) {
  const uint64_t deadline = now_ns() + LONGEST_CANCEL_S * 1000000000ull;
  const Entered before = enter(staging->copier);
  int status;
  do { /* at most half a megabyte, which takes tens of microseconds */
    status = reached(staging->copier, (void *)(uintptr_t)staging->events[stage]);
  } while (status == PROXYCCL_RUNTIME_NOT_READY && now_ns() < deadline);
  leave(staging->copier, before);
  return status;
}

/* Copies between a stage and the device's blocks, and waits for it. The driver's status. */
static int between(const ProxycclStaging *staging, uint32_t stage, int to_device, const struct iovec *blocks,
                   uint32_t count) {
  void *memory = (void *)(uintptr_t)staging->memory[stage];
  const int status = device_queue(staging, stage, memory, to_device, blocks, count);
  const int ended = device_await(staging, stage);
  return status != 0 ? status : ended;
}

int device_stage(const ProxycclTransfer *transfer, uint32_t stage, const struct iovec *local,
                 const struct iovec *remote, uint32_t blocks, uint64_t bytes, uint64_t *copied) {
  const ProxycclStaging *staging = transfer->staging;
  const struct iovec here = {(void *)(uintptr_t)staging->memory[stage], bytes};
  const pid_t pid = transfer->link->pid;
  int status = 0;
  if (transfer->writes) status = between(staging, stage, 0, local, blocks);
  if (status != 0) return -status;
  const ssize_t done = transfer->writes ? process_vm_writev(pid, &here, 1, remote, blocks, 0)
                                        : process_vm_readv(pid, &here, 1, remote, blocks, 0);
  if (done < 0) return errno;
  *copied = (uint64_t)done;
  if (*copied < bytes) return EFAULT;
  return transfer->writes ? 0 : -between(staging, stage, 1, local, blocks);
}

ProxycclTransfer *proxyccl_transfer_create_on_device(ProxycclAgent *agent, ProxycclLink *link,
                                                     const ProxycclCopier *copier, const ProxycclDeviceCopies *copies) {
  ProxycclTransfer *transfer = transfer_new(agent, link);
  if (transfer == NULL) return NULL;
  transfer->copier = copier;
  transfer->copies = copies->rows;
  transfer->copy_count = copies->count;
  transfer->launch = (const ProxycclLaunch *)(uintptr_t)copies->launch;
  transfer->bytes = copies->bytes;
  transfer->stream = (void *)(uintptr_t)copies->stream;
  transfer->event = (void *)(uintptr_t)copies->event;
  transfer->word = (uint64_t *)(uintptr_t)copies->word;
  transfer->word_on_device = copies->word_on_device;
  return transfer;
}
