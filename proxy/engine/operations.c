#include "operations.h"

static QueuedConnection *queued_of(ProxycclConnection *base) { return (QueuedConnection *)base; }

uint32_t queued_ready(const ProxycclConnection *base) {
  return operations_ready(&((const QueuedConnection *)base)->operations);
}

int queued_put(ProxycclConnection *base, const ProxycclMemory *dst, uint64_t dst_offset, const ProxycclMemory *src,
               uint64_t src_offset, uint64_t bytes) {
  QueuedConnection *self = queued_of(base);
  operations_push_transfer(&self->operations, PUT, dst, dst_offset, src, src_offset, bytes);
  return self->issue(base);
}

int queued_get(ProxycclConnection *base, const ProxycclMemory *dst, uint64_t dst_offset, const ProxycclMemory *src,
               uint64_t src_offset, uint64_t bytes) {
  QueuedConnection *self = queued_of(base);
  if (self->no_reads != 0) return self->no_reads;
  operations_push_transfer(&self->operations, GET, dst, dst_offset, src, src_offset, bytes);
  return self->issue(base);
}

int queued_put_value(ProxycclConnection *base, const ProxycclMemory *dst, uint64_t dst_offset, uint64_t value,
                     uint32_t bytes) {
  QueuedConnection *self = queued_of(base);
  if (self->no_values != 0) return self->no_values;
  Operation *operation = operations_push(&self->operations, VALUE);
  operation->destination = (uintptr_t)dst->base + dst_offset;
  operation->bytes = bytes;
  operation->destination_key = dst->key;
  operation->value = value;
  return self->issue(base);
}

int queued_signal(ProxycclConnection *base, uint64_t *remote, uint64_t value, uint64_t previous) {
  QueuedConnection *self = queued_of(base);
  Operation *operation = operations_push(&self->operations, SIGNAL);
  operation->source = previous;
  operation->destination = (uintptr_t)remote;
  operation->destination_key = self->signal_key;
  operation->bytes = 0;
  operation->value = self->adds ? value - previous : value;
  return self->issue(base);
}

int queued_flush(ProxycclConnection *base, uint64_t *flushed, uint64_t value) {
  operations_push_flush(&queued_of(base)->operations, FLUSH, flushed, value);
  return queued_of(base)->issue(base);
}
