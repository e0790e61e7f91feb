/* The stream gives the order: copies, then the signal behind them, then the flush word, each a stream operation. So
 * neither a signal nor a flush makes the engine wait, and a peer whose link is slow holds back no other peer's
 * stream. */
#include "copy_transport.h"

#include <stdlib.h>

typedef struct {
  ProxycclConnection base;
  ProxycclRuntimeTable runtime;
  void *stream;
  void *event;
  int issued;   /* work was issued behind the last record of `event` */
  int recorded; /* `event` is recorded and not yet seen complete */
} CopyConnection;

static CopyConnection *self_of(ProxycclConnection *base) { return (CopyConnection *)base; }

static int copy_put(ProxycclConnection *base, const ProxycclMemory *dst, uint64_t dst_offset, const ProxycclMemory *src,
                    uint64_t src_offset, uint64_t bytes) {
  CopyConnection *self = self_of(base);
  self->issued = 1;
  return self->runtime.copy(dst->base + dst_offset, src->base + src_offset, bytes, self->stream);
}

static int copy_idle(const ProxycclConnection *base) {
  const CopyConnection *self = (const CopyConnection *)base;
  return !self->issued && !self->recorded;
}

/* With nothing outstanding there is nothing to be behind, and a store of the CPU arrives in half the time. The release
 * pairs with the acquire of who waits for the word. */
static int copy_write(ProxycclConnection *base, uint64_t *address, uint64_t value) {
  CopyConnection *self = self_of(base);
  if (copy_idle(base)) {
    __atomic_store_n(address, value, __ATOMIC_RELEASE);
    return 0;
  }
  self->issued = 1;
  return self->runtime.write64(self->stream, address, value, 0);
}

/* A failed copy shows in the status of an event behind it. One event does: it is recorded again when it is seen
 * complete and more was issued since. */
static int copy_poll(ProxycclConnection *base, uint32_t *progress) {
  CopyConnection *self = self_of(base);
  int status;
  if (!self->recorded) {
    if (!self->issued) return 0;
    status = self->runtime.event_record(self->event, self->stream);
    if (status != PROXYCCL_RUNTIME_SUCCESS) return status;
    self->issued = 0;
    self->recorded = 1;
    base->progress.marked = base->progress.issued;
  }
  status = self->runtime.event_query(self->event);
  if (status == PROXYCCL_RUNTIME_NOT_READY) return 0;
  if (status != PROXYCCL_RUNTIME_SUCCESS) return status;
  self->recorded = 0;
  base->progress.completed = base->progress.marked;
  ++*progress;
  return 0;
}

static void copy_destroy(ProxycclConnection *base) { free(base); }

static const ProxycclTransport copy_transport = {
    "copy",     PROXYCCL_COPIES_SOURCE | PROXYCCL_COPIES_DESTINATION,
    NULL,       copy_put,
    copy_write, copy_write,
    copy_poll,  copy_idle,
    copy_destroy,
};

ProxycclConnection *proxyccl_copy_connection(const ProxycclRuntimeTable *runtime, void *stream, void *event) {
  CopyConnection *self = calloc(1, sizeof *self);
  if (self == NULL) return NULL;
  self->base.transport = &copy_transport;
  self->runtime = *runtime;
  self->stream = stream;
  self->event = event;
  return &self->base;
}
