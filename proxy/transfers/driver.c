/* Driver calls for a device that copies, and copies between the device's memory and stages. See parts.h. */
#include "clock.h"
#include "parts.h"

Entered driver_enter(const ProxycclCopier *copier) {
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

void driver_leave(const ProxycclCopier *copier, Entered before) {
  if (copier->exchange_capture_mode != 0) {
    ((int (*)(int *))(uintptr_t)copier->exchange_capture_mode)(&before.mode);
  }
  if (copier->make_current != 0 && before.context != copier->context) {
    ((int (*)(uintptr_t))(uintptr_t)copier->make_current)(before.context);
  }
}

int driver_copy(const ProxycclCopier *copier, uint64_t to, uint64_t from, uint64_t bytes, void *stream) {
  return ((int (*)(void *, const void *, size_t, void *))(uintptr_t)copier->copy)(
      (void *)(uintptr_t)to, (const void *)(uintptr_t)from, bytes, stream);
}

int driver_write(const ProxycclCopier *copier, void *stream, uint64_t word, uint64_t value) {
  return ((int (*)(void *, uint64_t *, uint64_t, unsigned))(uintptr_t)copier->write64)(
      stream, (uint64_t *)(uintptr_t)word, value, 0);
}

int driver_reached(const ProxycclCopier *copier, void *event) {
  return ((int (*)(void *))(uintptr_t)copier->event_query)(event);
}

int staging_queue(const ProxycclStaging *staging, uint32_t stage, void *memory, int to_device,
                  const struct iovec *blocks, uint64_t count) {
  const ProxycclCopier *copier = staging->copier;
  /* All copies to the device are on one stream, so that data of a canceled write can't land after a later write. */
  void *stream = (void *)(uintptr_t)staging->streams[to_device ? 0 : stage];
  void *event = (void *)(uintptr_t)staging->events[stage];
  uint64_t at = (uintptr_t)memory;
  int status = 0;
  const Entered before = driver_enter(copier);
  for (uint64_t i = 0; i < count && status == 0; ++i) {
    const uint64_t block = (uintptr_t)blocks[i].iov_base;
    status = driver_copy(copier, to_device ? block : at, to_device ? at : block, blocks[i].iov_len, stream);
    at += blocks[i].iov_len;
  }
  /* Recorded also after a failure, because earlier copies are running. */
  const int recorded = ((int (*)(void *, void *))(uintptr_t)copier->event_record)(event, stream);
  driver_leave(copier, before);
  return status != 0 ? status : recorded;
}

int staging_reached(const ProxycclStaging *staging, uint32_t stage) {
  const Entered before = driver_enter(staging->copier);
  const int status = driver_reached(staging->copier, (void *)(uintptr_t)staging->events[stage]);
  driver_leave(staging->copier, before);
  return status;
}

int staging_await(const ProxycclStaging *staging, uint32_t stage) {
  const uint64_t deadline = now_ns() + LONGEST_CANCEL_S * 1000000000ull;
  const Entered before = driver_enter(staging->copier);
  int status;
  do { /* at most half a megabyte, which takes tens of microseconds */
    status = driver_reached(staging->copier, (void *)(uintptr_t)staging->events[stage]);
  } while (status == PROXYCCL_RUNTIME_NOT_READY && now_ns() < deadline);
  driver_leave(staging->copier, before);
  return status;
}
