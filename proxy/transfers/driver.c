/* Calls the driver of a device that copies, and queues copies between the device's memory and stages. See parts.h. */
#include "clock.h"
#include "parts.h"

Entered driver_enter(const ProxycclCopier *copier) {
  Entered before = {copier->context, copier->relaxed};
  if (copier->make_current != NULL) {
    before.context = 0;
    copier->current(&before.context);
    if (before.context != copier->context) copier->make_current(copier->context);
  }
  if (copier->exchange_capture_mode != NULL) copier->exchange_capture_mode(&before.mode);
  return before;
}

void driver_leave(const ProxycclCopier *copier, Entered before) {
  if (copier->exchange_capture_mode != NULL) copier->exchange_capture_mode(&before.mode);
  if (copier->make_current != NULL && before.context != copier->context) copier->make_current(before.context);
}

int staging_queue(const ProxycclStaging *staging, uint32_t stage, void *memory, int to_device,
                  const struct iovec *blocks, uint64_t count) {
  const ProxycclCopier *copier = staging->copier;
  /* All copies to the device are on one stream, so that a canceled write can't overwrite the data of a later write. */
  void *stream = (void *)(uintptr_t)staging->streams[to_device ? 0 : stage];
  void *event = (void *)(uintptr_t)staging->events[stage];
  char *at = memory;
  int status = 0;
  const Entered before = driver_enter(copier);
  for (uint64_t i = 0; i < count && status == 0; ++i) {
    void *block = blocks[i].iov_base;
    status = copier->copy(to_device ? block : at, to_device ? at : block, blocks[i].iov_len, stream);
    at += blocks[i].iov_len;
  }
  /* Records the event even after a failure, because earlier copies may be running. */
  const int recorded = copier->event_record(event, stream);
  driver_leave(copier, before);
  return status != 0 ? status : recorded;
}

int staging_await(const ProxycclStaging *staging, uint32_t stage, uint64_t timeout_ns) {
  const uint64_t deadline = now_ns() + timeout_ns;
  const Entered before = driver_enter(staging->copier);
  int status;
  do { /* spins, because a copy has at most half a megabyte and takes tens of microseconds */
    status = staging->copier->event_query((void *)(uintptr_t)staging->events[stage]);
  } while (status == PROXYCCL_RUNTIME_NOT_READY && now_ns() < deadline);
  driver_leave(staging->copier, before);
  return status;
}
