/* Transfers that a device copies. The copies are queued on a stream, followed by the write of a word that shows that
 * the copies have ended. See transfers.h.
 *
 * Waiting and polling callers read the word, and so does the agent's thread from time to time.
 */
#include <time.h>

#include "clock.h"
#include "launch.h"
#include "parts.h"

enum { CHECK_NS = 1000000 }; /* ns between two checks whether the device has failed */

typedef struct DeviceTransfer {
  ProxycclTransfer base;
  const ProxycclCopier *copier;
  ProxycclDeviceCopies copies;
  uint64_t turn;    /* the value that the stream writes to the word after the copies */
  uint64_t checked; /* time of the last check whether the device has failed */
} DeviceTransfer;

/* Returns whether the stream has written the transfer's word, as it does after the copies. */
static int is_over(const DeviceTransfer *self) {
  return __atomic_load_n((const uint64_t *)(uintptr_t)self->copies.word, __ATOMIC_ACQUIRE) == self->turn;
}

/* Returns the driver's status if the device has failed, or 0. After a failure the stream may never write the word. The
 * event is never recorded, so a query of the event reports only failures. */
static int failure(const DeviceTransfer *self) {
  const Entered before = driver_enter(self->copier);
  const int status = self->copier->event_query((void *)(uintptr_t)self->copies.event);
  driver_leave(self->copier, before);
  return status == PROXYCCL_RUNTIME_NOT_READY ? 0 : status;
}

/* Queues the copies and then the write of the word. Queues the write even if a copy can't be queued, because earlier
 * copies may be running. Sets *queued to whether the write was queued. Returns the driver's first failure, or 0. */
static int issue(const DeviceTransfer *self, uint64_t stream, int *queued) {
  const ProxycclLaunch *launch = (const ProxycclLaunch *)(uintptr_t)self->copies.launch;
  void *queue = (void *)(uintptr_t)stream;
  const Entered before = driver_enter(self->copier);
  int status = 0;
  for (uint64_t i = 0; i < self->copies.count && status == 0; ++i) {
    const uint64_t *row = self->copies.rows + 3 * i;
    status = self->copier->copy((void *)(uintptr_t)row[0], (void *)(uintptr_t)row[1], row[2], queue);
  }
  if (status == 0 && launch != NULL) status = proxyccl_launch_current(launch, stream);
  const int failed = self->copier->write64(queue, (uint64_t *)(uintptr_t)self->copies.word_on_device, self->turn, 0);
  driver_leave(self->copier, before);
  *queued = failed == 0;
  return status != 0 ? status : failed;
}

static void end(ProxycclTransfer *transfer) {
  queue_remove(&transfer->agent->looked_at, transfer);
  if (transfer->link != NULL && transfer->error != 0) link_look(transfer->link);
  transfer_end(transfer, transfer->error != 0 ? PROXYCCL_TRANSFER_FAILED : PROXYCCL_TRANSFER_DONE);
}

static void begin(ProxycclTransfer *transfer, const uint64_t *stream) {
  static uint64_t turns; /* unique values keep a late write of an abandoned transfer from ending a later one */
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
  if (transfer->cancel) pthread_cond_broadcast(&agent->changed); /* the canceling thread ends the transfer */
  if (queued && !is_over(self)) {
    transfer_watch(transfer);
  } else if (!transfer->cancel) {
    end(transfer);
  }
}

static int look(ProxycclTransfer *transfer) {
  DeviceTransfer *self = (DeviceTransfer *)transfer;
  ProxycclAgent *agent = transfer->agent;
  if (transfer->copying > 0 || transfer->cancel) return 0; /* another thread ends the transfer */
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

/* Waits for the copies, because a driver can't cancel them. */
static int finish(ProxycclTransfer *transfer, uint64_t timeout_ns) {
  DeviceTransfer *self = (DeviceTransfer *)transfer;
  const uint64_t deadline = now_ns() + LONGEST_CANCEL_NS;
  const struct timespec pause = {0, SHORTEST_PAUSE_NS};
  (void)timeout_ns;
  ++transfer->copying; /* while `copying` is not 0, the transfer stays allocated and other threads do not poll it */
  pthread_mutex_unlock(&transfer->agent->lock);
  while (!is_over(self) && failure(self) == 0 && now_ns() < deadline) nanosleep(&pause, NULL);
  pthread_mutex_lock(&transfer->agent->lock);
  --transfer->copying;
  return 1;
}

ProxycclTransfer *proxyccl_transfer_create_on_device(ProxycclAgent *agent, ProxycclLink *link, int writes,
                                                     const ProxycclCopier *copier, const ProxycclDeviceCopies *copies) {
  static const TransferPath path = {.begin = begin, .look = look, .finish = finish, .silent = 1};
  DeviceTransfer *self = (DeviceTransfer *)transfer_new(agent, link, sizeof *self, &path);
  if (self == NULL) return NULL;
  self->base.writes = writes;
  self->base.blocks = copies->blocks;
  self->base.bytes = copies->bytes;
  self->copier = copier;
  self->copies = *copies;
  return &self->base;
}
