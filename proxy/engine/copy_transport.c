/* Each connection has a stream, which executes copies, writes of signals and writes of flush words in order. So the
 * engine need not wait for copies before it issues a signal or a flush.
 *
 * While nothing is outstanding on the stream, the CPU stores signals, flush words and values, and copies short data
 * between memories that the CPU may access. While work is outstanding, the stream stores a value in aligned parts: 8 or
 * 4 bytes by a stream write, 2 or 1 bytes by a copy from a table in the device's memory. The table is not in pinned
 * memory, because a copy from pinned memory to a GPU takes a millisecond if another process allocated both memories. */
#include "copy_transport.h"

#include <stdlib.h>
#include <string.h>

#include "order.h"
#include "proxyccl/platform_host_memmove.h"
#include "transports.h"

typedef struct {
  ProxycclConnection base;
  ProxycclRuntimeTable runtime;
  void *stream;
  void *event;
  const char *shorts;
  int issued;   /* whether work was issued after `event` was last recorded */
  int recorded; /* whether `event` is recorded and no query has yet found the event complete */
} CopyConnection;

static CopyConnection *self_of(ProxycclConnection *base) { return (CopyConnection *)base; }

static int copy_idle(const ProxycclConnection *base) {
  const CopyConnection *self = (const CopyConnection *)base;
  return !self->issued && !self->recorded;
}

/* Makes a put or a get. A copy by the CPU leaves the stream idle, so the CPU also stores the signal that follows, with
 * release order. */
static int copy_transfer(ProxycclConnection *base, const ProxycclMemory *dst, uint64_t dst_offset,
                         const ProxycclMemory *src, uint64_t src_offset, uint64_t bytes) {
  CopyConnection *self = self_of(base);
  if (dst->host != NULL && src->host != NULL && bytes <= PROXYCCL_CPU_COPY_BYTES && copy_idle(base)) {
    proxyccl_memmove(dst->host + dst_offset, src->host + src_offset, bytes); /* the ranges may overlap */
    return 0;
  }
  self->issued = 1;
  return self->runtime.copy(dst->base + dst_offset, src->base + src_offset, bytes, self->stream);
}

/* Stores bytes of a value, with a single store if the address is aligned, because a kernel may poll the address. */
static void store_value(char *address, uint64_t value, uint32_t bytes) {
  if ((uintptr_t)address % bytes != 0)
    memcpy(address, &value, bytes);
  else if (bytes == 8)
    __atomic_store_n((uint64_t *)address, value, __ATOMIC_RELAXED);
  else if (bytes == 4)
    __atomic_store_n((uint32_t *)address, (uint32_t)value, __ATOMIC_RELAXED);
  else if (bytes == 2)
    __atomic_store_n((uint16_t *)address, (uint16_t)value, __ATOMIC_RELAXED);
  else
    __atomic_store_n((uint8_t *)address, (uint8_t)value, __ATOMIC_RELAXED);
}

/* Returns the length of the longest aligned write at an address, at most `bytes`. */
static uint32_t aligned_part(const char *address, uint32_t bytes) {
  uint32_t part = 8;
  while (part > bytes || (uintptr_t)address % part != 0) part /= 2;
  return part;
}

static int write_part(CopyConnection *self, char *address, uint64_t value, uint32_t bytes) {
  const ProxycclRuntimeTable *runtime = &self->runtime;
  if (bytes == 8) return runtime->write64(self->stream, (uint64_t *)address, value, 0);
  if (bytes == 4) return runtime->write32(self->stream, (uint32_t *)address, (uint32_t)value, 0);
  const char *entry = self->shorts + 2 * (bytes == 2 ? (uint16_t)value : (uint8_t)value);
  return runtime->copy(address, entry, bytes, self->stream);
}

static int copy_put_value(ProxycclConnection *base, const ProxycclMemory *dst, uint64_t dst_offset, uint64_t value,
                          uint32_t bytes) {
  CopyConnection *self = self_of(base);
  if (dst->host != NULL && copy_idle(base)) {
    store_value(dst->host + dst_offset, value, bytes);
    return 0;
  }
  self->issued = 1;
  char *const address = dst->base + dst_offset;
  for (uint32_t done = 0; done < bytes;) {
    const uint32_t part = aligned_part(address + done, bytes - done);
    const int status = write_part(self, address + done, value >> 8 * done, part);
    if (status != PROXYCCL_RUNTIME_SUCCESS) return status;
    done += part;
  }
  return 0;
}

/* Stores a signal or a flush word. If nothing is outstanding, the CPU stores the word, which takes half as long as a
 * write by the stream. */
static int copy_write(ProxycclConnection *base, uint64_t *address, uint64_t value) {
  CopyConnection *self = self_of(base);
  if (copy_idle(base)) {
    word_store(address, value);
    return 0;
  }
  self->issued = 1;
  return self->runtime.write64(self->stream, address, value, 0);
}

static int copy_signal(ProxycclConnection *base, uint64_t *remote, uint64_t value, uint64_t previous) {
  (void)previous;
  return copy_write(base, remote, value);
}

/* Makes all puts with one call of the driver, which avoids the pauses between separate copies. */
static int copy_put_many(ProxycclConnection *base, const ProxycclPut *puts, uint32_t count) {
  CopyConnection *self = self_of(base);
  uint64_t dst[PROXYCCL_MOST_PUTS], src[PROXYCCL_MOST_PUTS];
  size_t bytes[PROXYCCL_MOST_PUTS], first = 0;
  ProxycclCopyAttributes attributes = {.source_order = PROXYCCL_SOURCES_IN_STREAM_ORDER,
                                       .flags = PROXYCCL_COPIES_BESIDE_KERNELS};
  self->issued = 1;
  if (count == 1) return self->runtime.copy(puts->dst, puts->src, puts->bytes, self->stream);
  for (uint32_t i = 0; i < count; ++i) {
    dst[i] = (uintptr_t)puts[i].dst;
    src[i] = (uintptr_t)puts[i].src;
    bytes[i] = puts[i].bytes;
  }
  return self->runtime.copy_many(dst, src, bytes, count, &attributes, &first, 1, self->stream);
}

/* Records an event after the last copies, or queries the event recorded earlier; the query returns the error of a
 * failed copy. One event suffices, because a complete event can be recorded again. */
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

/* Never refuses an option: even 0 is a valid stream. */
static ProxycclConnection *copy_create(const void *options, const ProxycclRuntimeTable *runtime, const char **refused) {
  const ProxycclCopyOptions *given = options;
  CopyConnection *self = calloc(1, sizeof *self);
  (void)refused;
  if (self == NULL) return NULL;
  self->base.transport = &proxyccl_copy_transport;
  self->runtime = *runtime;
  self->stream = given->stream;
  self->event = given->event;
  self->shorts = given->shorts;
  self->base.most_puts = runtime->copy_many == NULL ? 0 : PROXYCCL_MOST_PUTS;
  return &self->base;
}

const ProxycclTransport proxyccl_copy_transport = {
    .name = "copy",
    .copies = PROXYCCL_COPIES_OWN | PROXYCCL_COPIES_PEER,
    .create = copy_create,
    .put = copy_transfer,
    .get = copy_transfer,
    .put_many = copy_put_many,
    .put_value = copy_put_value,
    .signal = copy_signal,
    .flush = copy_write,
    .poll = copy_poll,
    .idle = copy_idle,
};
