/* Transfers that a device copies: queued on a stream of it, and ended when the stream has written a word after them.
 * See transfers.h.
 *
 * A caller that waits or asks looks at the word itself. Otherwise the agent's thread does, from time to time.
 */
#include <time.h>

#include "clock.h"
#include "launch.h"
#include "parts.h"

enum { CHECK_NS = 1000000 }; /* between two questions whether the device has failed */

typedef struct DeviceTransfer {
  ProxycclTransfer base;
  const ProxycclCopier *copier;
  ProxycclDeviceCopies copies;
  uint64_t turn;    /* the stream writes it to the word after the copies */
  uint64_t checked; /* when the device was last asked whether it has failed */
} DeviceTransfer;

/* Whether the stream has written the transfer's word, which it does after the copies. */
static int is_over(const DeviceTransfer *self) {
  return __atomic_load_n((const uint64_t *)(uintptr_t)self->copies.word, __ATOMIC_ACQUIRE) == self->turn;
}

/* The device's failure, or 0: after one a word may never be written. The event marks nothing, so it is reached. */
static int failure(const DeviceTransfer *self) {
  const Entered before = driver_enter(self->copier);
  const int status = driver_reached(self->copier, (void *)(uintptr_t)self->copies.event);
  driver_leave(self->copier, before);
  return status == PROXYCCL_RUNTIME_NOT_READY ? 0 : status;
}

/* Queues the copies and the write of the word, also after a failure, as earlier copies run. *queued: whether it was.
 * Returns the driver's first failure, or 0. */
static int issue(const DeviceTransfer *self, uint64_t stream, int *queued) {
  const ProxycclLaunch *launch = (const ProxycclLaunch *)(uintptr_t)self->copies.launch;
  void *queue = (void *)(uintptr_t)stream;
  const Entered before = driver_enter(self->copier);
  int status = 0;
  for (uint64_t i = 0; i < self->copies.count && status == 0; ++i) {
    const uint64_t *row = self->copies.rows + 3 * i;
    status = driver_copy(self->copier, row[0], row[1], row[2], queue);
  }
  if (status == 0 && launch != NULL) status = proxyccl_launch_current(launch, stream);
  const int failed = driver_write(self->copier, queue, self->copies.word_on_device, self->turn);
  driver_leave(self->copier, before);
  *queued = failed == 0;
  return status != 0 ? status : failed;
}

static void end(ProxycclTransfer *transfer) {
  ProxycclLink *link = transfer->link;
  queue_remove(&transfer->agent->looked_at, transfer);
  if (link != NULL && transfer->error != 0) link_look(link);
  if (link != NULL && link->lost != NULL) {
    transfer_end(transfer, PROXYCCL_TRANSFER_LOST);
  } else {
    transfer_end(transfer, transfer->error != 0 ? PROXYCCL_TRANSFER_FAILED : PROXYCCL_TRANSFER_DONE);
  }
}

static void begin(ProxycclTransfer *transfer, const uint64_t *stream) {
  static uint64_t turns; /* no word ever gets the same value twice, not even that of a transfer that was given up */
  DeviceTransfer *self = (DeviceTransfer *)transfer;
  ProxycclAgent *agent = transfer->agent;
  const int is_short = stream == NULL && transfer->bytes <= SHORT_BYTES;
  int queued;
  self->turn = __atomic_add_fetch(&turns, 1, __ATOMIC_RELAXED);
  self->checked = transfer->times.posted;
  ++transfer->copying;
  pthread_mutex_unlock(&agent->lock);
  const int status = issue(self, stream == NULL ? self->copies.stream : *stream, &queued);
  const uint64_t deadline = transfer->times.posted + SHORT_NS;
  while (is_short && queued && !is_over(self) && now_ns() < deadline) {}
  pthread_mutex_lock(&agent->lock);
  --transfer->copying;
  transfer->error = -status;
  if (transfer->cancel) pthread_cond_broadcast(&agent->changed); /* whoever cancels it ends it */
  if (queued && !is_over(self)) {
    transfer_watch(transfer);
  } else if (!transfer->cancel) {
    end(transfer);
  }
}

static int look(ProxycclTransfer *transfer) {
  DeviceTransfer *self = (DeviceTransfer *)transfer;
  ProxycclAgent *agent = transfer->agent;
  if (transfer->copying > 0 || transfer->cancel) return 0; /* whoever looks or cancels ends it */
  if (!is_over(self)) {
    const uint64_t now = now_ns();
    if (now - self->checked < CHECK_NS) return 0;
    self->checked = now;
    ++transfer->copying;
    pthread_mutex_unlock(&agent->lock);
    const int status = failure(self);
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

static void help(ProxycclTransfer *transfer) { look(transfer); }

/* A driver does not take copies back. */
static int finish(ProxycclTransfer *transfer, uint64_t timeout_ns) {
  DeviceTransfer *self = (DeviceTransfer *)transfer;
  const uint64_t deadline = now_ns() + LONGEST_CANCEL_S * 1000000000ull;
  const struct timespec pause = {0, SHORTEST_PAUSE_NS};
  (void)timeout_ns;
  ++transfer->copying; /* it stays, and nobody else looks */
  pthread_mutex_unlock(&transfer->agent->lock);
  while (!is_over(self) && failure(self) == 0 && now_ns() < deadline) nanosleep(&pause, NULL);
  pthread_mutex_lock(&transfer->agent->lock);
  --transfer->copying;
  return 1;
}

ProxycclTransfer *proxyccl_transfer_create_on_device(ProxycclAgent *agent, ProxycclLink *link, int writes,
                                                     const ProxycclCopier *copier, const ProxycclDeviceCopies *copies) {
  static const TransferPath path = {.begin = begin, .look = look, .help = help, .finish = finish, .silent = 1};
  DeviceTransfer *self = (DeviceTransfer *)transfer_new(agent, link, sizeof *self, &path);
  if (self == NULL) return NULL;
  self->base.writes = writes;
  self->base.blocks = copies->blocks;
  self->base.bytes = copies->bytes;
  self->copier = copier;
  self->copies = *copies;
  return &self->base;
}
