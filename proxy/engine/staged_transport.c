/* Three connections of the other transports do the work: one copies into the ring that is sent from, one is the wire to
 * the peer, one copies out of the ring that is received in. Messages are counted from the first of the connection, from
 * 1, and pass through all three in order:
 *
 *   made     its place in the ring is taken and its copy issued
 *   copied   its copy is done
 *   posted   the wire has it, and behind it the peer's count of what has arrived
 *   sent     its requests are complete
 *   taken    the peer has issued its copy, and its signal behind that
 *   placed   they are done
 *   credited the sender has been told
 *
 * A message's place is free when it is sent and credited. The wire's work is never held up by a peer's engine, so two
 * engines that wait for each other's credits both get to give theirs. */
#include "staged_transport.h"

#include <errno.h>
#include <stdlib.h>

#include "copy_transport.h"

enum {
  OPERATIONS = 256,    /* a power of two */
  OF_ONE_TRIGGER = 3,  /* a put, a signal and a flush */
  FLUSHES = 256,       /* that wait for credits; a power of two */
  MESSAGES = PROXYCCL_STAGED_MESSAGES,
  WAITS = -1 /* not a status: there is no room now */
};

typedef enum { PUT, SIGNAL, FLUSH } Kind;

typedef struct {
  Kind kind;
  uint64_t source, destination; /* of the part of a put that has no message yet; of a signal the word */
  uint64_t landing;
  uint64_t bytes; /* of that part */
  uint64_t *flushed;
  uint64_t value; /* of a signal or a flush */
} Operation;

typedef struct {
  uint64_t *flushed;
  uint64_t value;
  uint64_t behind; /* number of the last message before it */
} Flush;

/* What stands in front of a message's data: some of a put, a signal behind it, either or none. */
typedef struct {
  uint64_t destination; /* of the data, the receiver's own address */
  uint64_t landing;     /* number of the receiver's range that it lies in */
  uint64_t bytes;
  uint64_t word; /* the receiver's own address of a semaphore word; 0: no signal */
  uint64_t value;
  uint64_t reserved[3];
} Header;

_Static_assert(sizeof(Header) == PROXYCCL_STAGED_ALIGN, "messages are aligned to their headers");

/* Each has a cache line of its own, or two where they are fetched in pairs. */
typedef struct {
  uint64_t arrived __attribute__((aligned(128))); /* by the peer: messages that are in the ring here */
  uint64_t credited __attribute__((aligned(128))); /* by the peer: messages from here that are placed there */
  uint64_t copied __attribute__((aligned(128)));   /* by the stream out */
  uint64_t placed __attribute__((aligned(128)));   /* by the stream in */
} Words;

_Static_assert(sizeof(Words) == PROXYCCL_STAGED_WORDS_BYTES, "the rings begin behind the words");

typedef struct {
  ProxycclConnection base;
  ProxycclStagedOptions options;
  ProxycclConnection *out, *wire, *in;
  Words *words;
  Words *peer_words; /* never followed: the peer's own addresses */
  ProxycclMemory sending, peer_receiving;               /* rings as the wire reaches them */
  ProxycclMemory device_sending, device_receiving; /* as copies do */
  char *receiving;
  /* Sending. Positions are counted from the first byte of the connection, too. */
  uint64_t head, next, tail; /* positions: what lies before `head` is made, before `next` posted, before `tail` freed */
  uint64_t made, marked;     /* `copied` comes to be `marked` behind the copies that were issued */
  uint64_t posted, sent, freed;
  Header *last; /* of the last message that was made */
  uint64_t first_operation, last_operation; /* cursors: what lies between them waits */
  uint64_t first_flush, last_flush;
  /* Receiving. */
  uint64_t received; /* position behind the last message taken */
  uint64_t taken, taken_marked;
  uint64_t returned; /* credits */
  Operation operations[OPERATIONS];
  Flush flushes[FLUSHES];
} StagedConnection;

static StagedConnection *self_of(ProxycclConnection *base) { return (StagedConnection *)base; }

/* Bytes of the ring that a message takes. */
static uint64_t size_of(uint64_t data) {
  return sizeof(Header) + (data + PROXYCCL_STAGED_ALIGN - 1) / PROXYCCL_STAGED_ALIGN * PROXYCCL_STAGED_ALIGN;
}

static Header *sent_from(const StagedConnection *self, uint64_t position) {
  return (Header *)(self->sending.base + position % self->options.ring_bytes);
}

/* Pairs with the release of the stream, the CPU or the device that stores the word. */
static uint64_t load(const uint64_t *word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }

static int copy_status(int status, int direction) { return status == 0 ? 0 : direction + status; }

void proxyccl_landing_set(ProxycclLanding *landing, uint64_t base, uint64_t bytes) {
  __atomic_store_n(&landing->bytes, 0, __ATOMIC_RELAXED);
  __atomic_store_n(&landing->base, base, __ATOMIC_RELEASE);
  __atomic_store_n(&landing->bytes, bytes, __ATOMIC_RELEASE);
}

/* -- sending --- */

/* The header of a new message at the ring's head, or NULL where there is no room. */
static Header *open_message(StagedConnection *self, uint64_t bytes) {
  const uint64_t size = size_of(bytes);
  if (self->made - self->freed == MESSAGES || self->head + size - self->tail > self->options.ring_bytes) return NULL;
  self->last = sent_from(self, self->head);
  *self->last = (Header){.bytes = bytes};
  self->head += size;
  ++self->made;
  return self->last;
}

/* A message does not wrap: what is left of the ring limits its data. Where that is nothing, it is a header alone. */
static int make_put(StagedConnection *self, Operation *operation) {
  while (operation->bytes > 0) {
    const uint64_t place = self->head % self->options.ring_bytes + sizeof(Header);
    uint64_t bytes = self->options.ring_bytes - place;
    Header *header;
    if (bytes > self->options.chunk_bytes) bytes = self->options.chunk_bytes;
    if (bytes > operation->bytes) bytes = operation->bytes;
    header = open_message(self, bytes);
    if (header == NULL) return WAITS;
    if (bytes == 0) continue;
    header->destination = operation->destination;
    header->landing = operation->landing;
    const ProxycclMemory source = {(char *)(uintptr_t)operation->source, bytes, 0, 0};
    const int status = self->out->transport->put(self->out, &self->device_sending, place, &source, 0, bytes);
    if (status != 0) return copy_status(status, PROXYCCL_STAGED_COPY_OUT);
    operation->source += bytes;
    operation->destination += bytes;
    operation->bytes -= bytes;
  }
  return 0;
}

/* Rides on the last message if that is still here. */
static int make_signal(StagedConnection *self, const Operation *operation) {
  Header *header = self->last;
  if (self->made == self->posted || header->word != 0) header = open_message(self, 0);
  if (header == NULL) return WAITS;
  header->word = operation->destination;
  header->value = operation->value;
  return 0;
}

static void store_flushed(uint64_t *flushed, uint64_t value) { __atomic_store_n(flushed, value, __ATOMIC_RELEASE); }

static int make_flush(StagedConnection *self, const Operation *operation) {
  if (self->made == self->freed) {
    store_flushed(operation->flushed, operation->value);
    return 0;
  }
  if (self->last_flush - self->first_flush == FLUSHES) return WAITS;
  self->flushes[self->last_flush++ % FLUSHES] = (Flush){operation->flushed, operation->value, self->made};
  return 0;
}

/* Makes messages of the operations in their order, as far as there is room. */
static int issue(StagedConnection *self) {
  while (self->first_operation != self->last_operation) {
    Operation *operation = &self->operations[self->first_operation % OPERATIONS];
    int status;
    if (operation->kind == PUT)
      status = make_put(self, operation);
    else if (operation->kind == SIGNAL)
      status = make_signal(self, operation);
    else
      status = make_flush(self, operation);
    if (status == WAITS) return 0;
    if (status != 0) return status;
    ++self->first_operation;
  }
  return 0;
}

/* Has `word` come to be `count` behind the copies that were issued. */
static int mark(ProxycclConnection *copies, uint64_t *word, uint64_t count, uint64_t *marked) {
  if (*marked == count) return 0;
  *marked = count;
  return copies->transport->flush(copies, word, count);
}

/* The peer's words advance by one with each signal of the wire, which may be an atomic add of one. */
static int post(StagedConnection *self, uint32_t *progress) {
  const ProxycclTransport *wire = self->wire->transport;
  const uint64_t copied = load(&self->words->copied);
  while (self->posted < copied && wire->ready(self->wire) > 0) {
    const Header *header = sent_from(self, self->next);
    const uint64_t place = self->next % self->options.ring_bytes, bytes = sizeof *header + header->bytes;
    int status = wire->put(self->wire, &self->peer_receiving, place, &self->sending, place, bytes);
    if (status == 0) status = wire->signal(self->wire, &self->peer_words->arrived, ++self->posted);
    if (status == 0) status = wire->flush(self->wire, &self->sent, self->posted);
    if (status != 0) return status;
    self->next += size_of(header->bytes);
    ++*progress;
  }
  return 0;
}

static int reclaim(StagedConnection *self, uint32_t *progress) {
  const uint64_t credited = load(&self->words->credited);
  const uint64_t done = credited < self->sent ? credited : self->sent;
  if (credited - self->freed > self->posted - self->freed) return PROXYCCL_STAGED_REFUSED + PROXYCCL_STAGED_BAD_COUNT;
  for (; self->freed < done; ++self->freed, ++*progress) self->tail += size_of(sent_from(self, self->tail)->bytes);
  while (self->first_flush != self->last_flush) {
    const Flush *flush = &self->flushes[self->first_flush % FLUSHES];
    if (flush->behind > self->freed) break;
    store_flushed(flush->flushed, flush->value);
    ++self->first_flush;
  }
  return 0;
}

/* -- receiving --- */

/* 1 if a range lies in the landing of that number. */
static int may_land(const StagedConnection *self, const Header *header) {
  const ProxycclLanding *landing;
  uint64_t base, bytes;
  if (header->landing >= PROXYCCL_STAGED_LANDINGS) return 0;
  landing = &self->options.landings[header->landing];
  bytes = load(&landing->bytes);
  base = load(&landing->base);
  return header->destination >= base && header->destination - base <= bytes &&
         header->bytes <= bytes - (header->destination - base);
}

static int may_signal(const StagedConnection *self, uint64_t word) {
  return word % sizeof(uint64_t) == 0 && word >= self->options.signals &&
         word - self->options.signals < self->options.signals_bytes;
}

/* Issues what a message asks for. Nothing of one that is refused is done. */
static int place(StagedConnection *self, const Header *header, uint64_t data) {
  int status = 0;
  if (header->bytes > 0 && !may_land(self, header)) return PROXYCCL_STAGED_REFUSED + PROXYCCL_STAGED_BAD_RANGE;
  if (header->word != 0 && !may_signal(self, header->word)) return PROXYCCL_STAGED_REFUSED + PROXYCCL_STAGED_BAD_WORD;
  if (header->bytes > 0) {
    const ProxycclMemory destination = {(char *)(uintptr_t)header->destination, header->bytes, 0, 0};
    status = self->in->transport->put(self->in, &destination, 0, &self->device_receiving, data, header->bytes);
  }
  if (status == 0 && header->word != 0)
    status = self->in->transport->signal(self->in, (uint64_t *)(uintptr_t)header->word, header->value);
  return copy_status(status, PROXYCCL_STAGED_COPY_IN);
}

static int take(StagedConnection *self, uint32_t *progress) {
  const uint64_t arrived = load(&self->words->arrived);
  if (arrived - self->returned > MESSAGES || arrived < self->taken)
    return PROXYCCL_STAGED_REFUSED + PROXYCCL_STAGED_BAD_COUNT;
  while (self->taken < arrived) {
    const uint64_t start = self->received % self->options.ring_bytes, data = start + sizeof(Header);
    const Header header = *(const volatile Header *)(self->receiving + start); /* checked and used is the same copy */
    int status;
    if (header.bytes > self->options.ring_bytes - data) return PROXYCCL_STAGED_REFUSED + PROXYCCL_STAGED_BAD_LENGTH;
    status = place(self, &header, data);
    if (status != 0) return status;
    self->received += size_of(header.bytes);
    ++self->taken;
    ++*progress;
  }
  return 0;
}

static int give_credits(StagedConnection *self, uint32_t *progress) {
  const ProxycclTransport *wire = self->wire->transport;
  const uint64_t placed = load(&self->words->placed);
  while (self->returned < placed && wire->ready(self->wire) > 0) {
    /* One write tells of all, but an atomic add only of one. */
    self->returned = self->options.wire.signal == PROXYCCL_VERBS_WRITE ? placed : self->returned + 1;
    const int status = wire->signal(self->wire, &self->peer_words->credited, self->returned);
    if (status != 0) return status;
    ++*progress;
  }
  return 0;
}

/* -- the transport --- */

/* The engine asked before whether there is room. */
static Operation *queue(StagedConnection *self, Kind kind) {
  Operation *operation = &self->operations[self->last_operation++ % OPERATIONS];
  operation->kind = kind;
  return operation;
}

static uint32_t staged_ready(const ProxycclConnection *base) {
  const StagedConnection *self = (const StagedConnection *)base;
  return (uint32_t)(OPERATIONS - (self->last_operation - self->first_operation)) / OF_ONE_TRIGGER;
}

static int staged_put(ProxycclConnection *base, const ProxycclMemory *dst, uint64_t dst_offset,
                      const ProxycclMemory *src, uint64_t src_offset, uint64_t bytes) {
  StagedConnection *self = self_of(base);
  Operation *operation = queue(self, PUT);
  operation->source = (uintptr_t)src->base + src_offset;
  operation->destination = (uintptr_t)dst->base + dst_offset;
  operation->landing = dst->key;
  operation->bytes = bytes;
  return issue(self);
}

static int staged_signal(ProxycclConnection *base, uint64_t *remote, uint64_t value) {
  StagedConnection *self = self_of(base);
  Operation *operation = queue(self, SIGNAL);
  operation->destination = (uintptr_t)remote;
  operation->value = value;
  return issue(self);
}

static int staged_flush(ProxycclConnection *base, uint64_t *flushed, uint64_t value) {
  StagedConnection *self = self_of(base);
  Operation *operation = queue(self, FLUSH);
  operation->flushed = flushed;
  operation->value = value;
  return issue(self);
}

/* Each step finds what the one before it has made possible, so where nothing takes time one poll does it all. */
static int staged_poll(ProxycclConnection *base, uint32_t *progress) {
  StagedConnection *self = self_of(base);
  int status = reclaim(self, progress);
  if (status == 0) status = issue(self);
  if (status != 0) return status;
  status = mark(self->out, &self->words->copied, self->made, &self->marked);
  if (status == 0) status = self->out->transport->poll(self->out, progress);
  if (status != 0) return copy_status(status, PROXYCCL_STAGED_COPY_OUT);
  status = post(self, progress);
  if (status == 0) status = take(self, progress);
  if (status != 0) return status;
  status = mark(self->in, &self->words->placed, self->taken, &self->taken_marked);
  if (status == 0) status = self->in->transport->poll(self->in, progress);
  if (status != 0) return copy_status(status, PROXYCCL_STAGED_COPY_IN);
  status = give_credits(self, progress);
  if (status == 0) status = self->wire->transport->poll(self->wire, progress);
  return status == 0 ? proxyccl_mark_progress(base) : status;
}

/* An operation waits only behind a message that has no credit yet. */
static int staged_idle(const ProxycclConnection *base) {
  const StagedConnection *self = (const StagedConnection *)base;
  return self->made == self->freed && self->returned == self->taken && self->wire->transport->idle(self->wire) &&
         self->out->transport->idle(self->out) && self->in->transport->idle(self->in);
}

static void staged_destroy(ProxycclConnection *base) {
  StagedConnection *self = self_of(base);
  ProxycclConnection *const parts[] = {self->wire, self->out, self->in};
  for (int i = 0; i < 3; ++i)
    if (parts[i] != NULL) parts[i]->transport->destroy(parts[i]);
  free(self);
}

static const ProxycclTransport staged_transport = {
    "staged",     PROXYCCL_COPIES_SOURCE, staged_ready, staged_put,     staged_signal,
    staged_flush, staged_poll,            staged_idle,  staged_destroy,
};

const char *proxyccl_staged_refused(const ProxycclStagedOptions *options) {
  const char *refused = proxyccl_verbs_refused(&options->wire);
  if (refused != NULL) return refused;
  if (options->area == 0 || options->area % sizeof(Words) != 0) return "area";
  if (options->device_area == 0) return "device_area";
  if (options->peer_area == 0) return "peer_area";
  if (options->ring_bytes < 2 * sizeof(Header) || options->ring_bytes % PROXYCCL_STAGED_ALIGN != 0)
    return "ring_bytes";
  if (options->chunk_bytes == 0) return "chunk_bytes";
  if (options->landings == NULL) return "landings";
  return NULL;
}

ProxycclConnection *proxyccl_staged_connection(const ProxycclStagedOptions *options,
                                               const ProxycclRuntimeTable *runtime, void *const streams[2],
                                               void *const events[2]) {
  const uint64_t ring = options->ring_bytes, first = sizeof(Words), second = first + ring;
  StagedConnection *self;
  if (proxyccl_staged_refused(options) != NULL) {
    errno = EINVAL;
    return NULL;
  }
  self = calloc(1, sizeof *self);
  if (self == NULL) return NULL;
  self->base.transport = &staged_transport;
  self->options = *options;
  self->words = (Words *)options->area;
  self->peer_words = (Words *)(uintptr_t)options->peer_area;
  self->sending = (ProxycclMemory){(char *)options->area + first, ring, options->area_lkey, 0};
  self->receiving = (char *)options->area + second;
  self->peer_receiving =
      (ProxycclMemory){(char *)(uintptr_t)options->peer_area + second, ring, options->wire.signal_rkey, 1};
  self->device_sending = (ProxycclMemory){(char *)options->device_area + first, ring, 0, 0};
  self->device_receiving = (ProxycclMemory){(char *)options->device_area + second, ring, 0, 0};
  self->wire = proxyccl_verbs_connection(&options->wire);
  if (self->wire != NULL) {
    self->out = proxyccl_copy_connection(runtime, streams[0], events[0]);
    self->in = proxyccl_copy_connection(runtime, streams[1], events[1]);
  }
  if (self->wire == NULL || self->out == NULL || self->in == NULL) {
    const int error = errno;
    staged_destroy(&self->base);
    errno = error;
    return NULL;
  }
  return &self->base;
}
