/* A connection is made of three others: one copies into the ring to send from, one is the wire to the peer, and one
 * copies out of the ring to receive in. Messages are numbered from 1 and pass through these states in order:
 *
 *   made     it has a place in the ring, and its copy is issued
 *   copied   its copy is complete
 * posted   the wire has it, and after it the peer's count of arrived messages
 *   sent     its requests are complete
 * taken    the peer has issued its copy, and its signal after that
 *   placed   both are complete
 *   credited the sender knows that
 *
 * A message's place is free once it is sent and credited. The wire never waits for a peer's engine, so two engines that
 * wait for each other's credits both return theirs.
 *
 * A get is a message without data, the request. It is credited like any other. The peer notes it, and sends the data in
 * its own messages, the answer, when everything that arrived before the request is placed. Requests are answered in
 * order, so the requester itself knows where the data belongs. Until its gets are complete it makes no messages of
 * later operations. The number of noted requests is bounded, so an answer waits only for room in the ring.
 *
 * A wire over sockets may leave a count half written, its low bytes first, until the rest arrives. Such a count is
 * too low and never too high, so the highest that was read is the one that counts. */
#include "staged_transport.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "fabric_transport.h"
#include "operations.h"
#include "transports.h"

enum { MESSAGES = PROXYCCL_STAGED_MESSAGES };

/* The header of a message, which carries a piece of a put or of an answer, a signal after it, both or neither; or it
 * is a request. */
typedef struct {
  uint64_t address; /* of the put's data or of the requested data, the receiver's own */
  uint64_t target;  /* key of the receiver's range that contains it */
  uint64_t bytes;   /* of data in the message */
  uint64_t word;    /* address of a semaphore word, the receiver's own; 0: no signal */
  uint64_t value;
  uint64_t asked;   /* requested bytes; 0: it is not a request */
  uint64_t answers; /* 1: the data belongs to the oldest request that is not answered; 0: to `address` */
  uint64_t reserved;
} Header;

_Static_assert(sizeof(Header) == PROXYCCL_STAGED_ALIGN, "messages are aligned to their headers");

/* Each word has two cache lines to itself, because some processors fetch lines in pairs. */
typedef struct {
  uint64_t arrived __attribute__((aligned(128)));  /* by the peer: messages in the ring here */
  uint64_t credited __attribute__((aligned(128))); /* by the peer: messages of this side that it has placed */
  uint64_t copied __attribute__((aligned(128)));   /* by the stream of copies into the area */
  uint64_t placed __attribute__((aligned(128)));   /* by the stream of copies out of the area */
} Words;

_Static_assert(sizeof(Words) == PROXYCCL_STAGED_WORDS_BYTES, "the rings begin after the words");

/* A get whose data has not all arrived, or not all been placed. */
typedef struct {
  uint64_t destination, bytes; /* of the data that has not arrived */
  uint64_t last;               /* number of the peer's message with the last of the data */
} Asked;

/* A request of the peer. */
typedef struct {
  uint64_t source, bytes; /* of the data that is not in a message yet */
  uint64_t behind;        /* number of the request's message: earlier messages must be placed first */
} Answer;

enum { GETS = PROXYCCL_STAGED_GETS };

typedef struct {
  ProxycclConnection base;
  ProxycclStagedOptions options;
  ProxycclConnection *out, *wire, *in;
  Words *words;
  Words *peer_words;                               /* the peer's own addresses: never dereferenced */
  ProxycclMemory sending, peer_receiving;          /* the rings, for the wire */
  ProxycclMemory device_sending, device_receiving; /* the rings, for copies */
  char *receiving;
  /* Sending. Positions count bytes from the first message. */
  uint64_t head, next, tail; /* positions up to which messages are made, posted, freed */
  uint64_t made, marked;     /* `marked`: value that the stream will store to `copied` */
  uint64_t posted, sent, freed;
  uint64_t credited; /* the highest that was read */
  Header *last;      /* header of the last message that was made */
  /* Receiving. */
  uint64_t received; /* position after the last message that was taken */
  uint64_t arrived;  /* the highest that was read */
  uint64_t taken, taken_marked;
  uint64_t returned; /* credits returned */
  /* Gets, by number. */
  uint64_t asked, arriving, got; /* requests made; the one whose data arrives next; complete */
  uint64_t noted, answered;      /* requests of the peer, and those whose answers are made */
  Asked gets[GETS];
  Answer answers[GETS];
  OperationQueue operations;
  FlushQueue flushes; /* by messages */
} StagedConnection;

static StagedConnection *self_of(ProxycclConnection *base) { return (StagedConnection *)base; }

/* Bytes that a message takes in the ring. */
static uint64_t message_bytes(uint64_t data) {
  return sizeof(Header) + (data + PROXYCCL_STAGED_ALIGN - 1) / PROXYCCL_STAGED_ALIGN * PROXYCCL_STAGED_ALIGN;
}

/* The header at a position of the ring to send from. */
static Header *header_at(const StagedConnection *self, uint64_t position) {
  return (Header *)(self->sending.base + position % self->options.ring_bytes);
}

static int copy_status(int status, int direction) { return status == 0 ? 0 : direction + status; }

/* Reads a count that the wire writes. */
static uint64_t count_load(const uint64_t *word, uint64_t *highest) {
  const uint64_t count = word_load(word);
  if (count > *highest) *highest = count;
  return *highest;
}

/* Pairing write-target, release: a reader finds either no range, or all of one. */
void proxyccl_remote_write_target_set(ProxycclRemoteWriteTarget *target, uint64_t base, uint64_t bytes) {
  __atomic_store_n(&target->bytes, 0, __ATOMIC_RELAXED);
  __atomic_store_n(&target->base, base, __ATOMIC_RELEASE);
  __atomic_store_n(&target->bytes, bytes, __ATOMIC_RELEASE);
}

/* Pairing write-target, acquire: `bytes` before `base`. */
static ProxycclRemoteWriteTarget target_load(const ProxycclRemoteWriteTarget *target) {
  const uint64_t bytes = __atomic_load_n(&target->bytes, __ATOMIC_ACQUIRE);
  return (ProxycclRemoteWriteTarget){__atomic_load_n(&target->base, __ATOMIC_ACQUIRE), bytes};
}

/* -- sending --- */

/* Makes a message at the ring's head. Returns its header, or NULL if there is no room. */
static Header *open_message(StagedConnection *self, uint64_t bytes) {
  const uint64_t size = message_bytes(bytes);
  if (self->made - self->freed == MESSAGES || self->head + size - self->tail > self->options.ring_bytes) return NULL;
  self->last = header_at(self, self->head);
  *self->last = (Header){.bytes = bytes};
  self->head += size;
  ++self->made;
  return self->last;
}

/* Makes a message with the first bytes from `source` on, at most `most`, and returns its header; *made is their number.
 * A message does not wrap, so the rest of the ring limits its data. A message without data fills a rest of one header.
 * NULL with a status, or WAITS. */
static Header *make_piece(StagedConnection *self, uint64_t source, uint64_t most, uint64_t *made, int *status) {
  const uint64_t place = self->head % self->options.ring_bytes + sizeof(Header);
  uint64_t bytes = self->options.ring_bytes - place;
  if (bytes > self->options.chunk_bytes) bytes = self->options.chunk_bytes;
  if (bytes > most) bytes = most;
  Header *header = open_message(self, bytes);
  *status = header == NULL ? WAITS : 0;
  *made = header == NULL ? 0 : bytes;
  if (*made == 0) return header;
  const ProxycclMemory memory = {.base = (char *)(uintptr_t)source, .bytes = bytes};
  *status = self->out->transport->put(self->out, &self->device_sending, place, &memory, 0, bytes);
  *status = copy_status(*status, PROXYCCL_STAGED_COPY_OUT);
  return header;
}

/* A piece of a put. */
static int make_put(StagedConnection *self, Operation *operation) {
  uint64_t bytes;
  int status;
  Header *header = make_piece(self, operation->source, operation->bytes, &bytes, &status);
  if (status != 0 || bytes == 0) return status;
  header->address = operation->destination;
  header->target = operation->destination_key;
  operation_advance(operation, bytes);
  return 0;
}

/* A request. */
static int make_get(StagedConnection *self, Operation *operation) {
  if (self->asked - self->got == GETS) return WAITS;
  Header *header = open_message(self, 0);
  if (header == NULL) return WAITS;
  header->address = operation->source;
  header->target = operation->source_key;
  header->asked = operation->bytes;
  self->gets[self->asked++ % GETS] = (Asked){operation->destination, operation->bytes, 0};
  operation->bytes = 0;
  return 0;
}

/* A piece of the answer to the oldest request that is not answered. */
static int make_answer(StagedConnection *self) {
  Answer *answer = &self->answers[self->answered % GETS];
  uint64_t bytes;
  int status;
  if (self->answered == self->noted || answer->behind > word_load(&self->words->placed)) return WAITS;
  Header *header = make_piece(self, answer->source, answer->bytes, &bytes, &status);
  if (status != 0 || bytes == 0) return status;
  header->answers = 1;
  answer->source += bytes;
  answer->bytes -= bytes;
  self->answered += answer->bytes == 0;
  return 0;
}

/* The CPU copies a value. The rest of the ring has room for a header, and for one value more unless it ends there. */
static int make_value(StagedConnection *self, Operation *operation) {
  const uint64_t place = self->head % self->options.ring_bytes + sizeof(Header);
  if (place == self->options.ring_bytes && open_message(self, 0) == NULL) return WAITS;
  Header *header = open_message(self, operation->bytes);
  if (header == NULL) return WAITS;
  header->address = operation->destination;
  header->target = operation->destination_key;
  memcpy(header + 1, &operation->value, operation->bytes);
  operation->bytes = 0;
  return 0;
}

/* Puts the signal into the last message if that is not posted yet. */
static int make_signal(StagedConnection *self, const Operation *operation) {
  Header *header = self->last;
  if (self->made == self->posted || header->word != 0) header = open_message(self, 0);
  if (header == NULL) return WAITS;
  header->word = operation->destination;
  header->value = operation->value;
  return 0;
}

static int make_flush(StagedConnection *self, const Operation *operation) {
  return flushes_push(&self->flushes, operation, self->made, self->freed) ? 0 : WAITS;
}

/* Makes a message of the next operation, or of a part of it. */
static int make_next(StagedConnection *self) {
  Operation *operation = operations_next(&self->operations);
  int status;
  if (operation == NULL || (operation->kind != GET && self->asked != self->got)) return WAITS;
  if (operation->kind == PUT)
    status = make_put(self, operation);
  else if (operation->kind == GET)
    status = make_get(self, operation);
  else if (operation->kind == VALUE)
    status = make_value(self, operation);
  else if (operation->kind == SIGNAL)
    status = make_signal(self, operation);
  else
    status = make_flush(self, operation);
  if (status == 0 && (operation->kind == FLUSH || operation->bytes == 0)) operations_pop(&self->operations);
  return status;
}

/* Makes messages of the operations, and of answers to the peer, each in their order and in turn, as far as there is
 * room.
 */
static int issue(StagedConnection *self) {
  for (;;) {
    const int answered = make_answer(self);
    if (answered != 0 && answered != WAITS) return answered;
    const int made = make_next(self);
    if (made != 0 && made != WAITS) return made;
    if (answered == WAITS && made == WAITS) return 0;
  }
}

/* Makes a stream store `count` to `word` after the copies issued so far. */
static int mark(ProxycclConnection *copies, uint64_t *word, uint64_t count, uint64_t *marked) {
  if (*marked == count) return 0;
  *marked = count;
  return copies->transport->flush(copies, word, count);
}

static int post(StagedConnection *self, uint32_t *progress) {
  const ProxycclTransport *wire = self->wire->transport;
  const uint64_t copied = word_load(&self->words->copied);
  while (self->posted < copied && wire->ready(self->wire) > 0) {
    const Header *header = header_at(self, self->next);
    const uint64_t place = self->next % self->options.ring_bytes, bytes = sizeof *header + header->bytes;
    int status = wire->put(self->wire, &self->peer_receiving, place, &self->sending, place, bytes);
    const uint64_t arrived = self->posted++;
    if (status == 0) status = wire->signal(self->wire, &self->peer_words->arrived, self->posted, arrived);
    if (status == 0) status = wire->flush(self->wire, &self->sent, self->posted);
    if (status != 0) return status;
    self->next += message_bytes(header->bytes);
    ++*progress;
  }
  return 0;
}

static int reclaim(StagedConnection *self, uint32_t *progress) {
  const uint64_t credited = count_load(&self->words->credited, &self->credited);
  const uint64_t done = credited < self->sent ? credited : self->sent;
  if (credited - self->freed > self->posted - self->freed) return PROXYCCL_STAGED_REFUSED + PROXYCCL_STAGED_BAD_COUNT;
  for (; self->freed < done; ++self->freed, ++*progress)
    self->tail += message_bytes(header_at(self, self->tail)->bytes);
  flushes_complete(&self->flushes, self->freed);
  return 0;
}

/* -- receiving --- */

/* 1 if bytes at the message's address lie in the range that it names. */
static int may_reach(const StagedConnection *self, const Header *header, uint64_t bytes) {
  if (header->target >= PROXYCCL_STAGED_WRITE_TARGETS) return 0;
  const ProxycclRemoteWriteTarget target = target_load(&self->options.write_targets[header->target]);
  return header->address >= target.base && header->address - target.base <= target.bytes &&
         bytes <= target.bytes - (header->address - target.base);
}

static int may_signal(const StagedConnection *self, uint64_t word) {
  return word % sizeof(uint64_t) == 0 && word >= self->options.signals &&
         word - self->options.signals < self->options.signals_bytes;
}

/* Notes a request. Its message is the next to be taken. */
static int note_request(StagedConnection *self, const Header *header) {
  if (header->bytes > 0 || self->noted - self->answered == GETS)
    return PROXYCCL_STAGED_REFUSED + PROXYCCL_STAGED_BAD_REQUEST;
  if (!may_reach(self, header, header->asked)) return PROXYCCL_STAGED_REFUSED + PROXYCCL_STAGED_BAD_RANGE;
  self->answers[self->noted++ % GETS] = (Answer){header->address, header->asked, self->taken + 1};
  return 0;
}

/* Where the data of an answer belongs, or 0 if nobody asked for it. The message is the next to be taken. */
static uint64_t take_answer(StagedConnection *self, uint64_t bytes) {
  Asked *get = &self->gets[self->arriving % GETS];
  if (self->arriving == self->asked || bytes > get->bytes) return 0;
  const uint64_t destination = get->destination;
  get->destination += bytes;
  get->bytes -= bytes;
  get->last = self->taken + 1;
  self->arriving += get->bytes == 0;
  return destination;
}

/* Checks a message, then issues its copy and its signal. */
static int place(StagedConnection *self, const Header *header, uint64_t data) {
  uint64_t address = header->address;
  int status = 0;
  if (header->asked > 0 && (status = note_request(self, header)) != 0) return status;
  if (header->bytes > 0 && header->answers && (address = take_answer(self, header->bytes)) == 0)
    return PROXYCCL_STAGED_REFUSED + PROXYCCL_STAGED_BAD_ANSWER;
  if (header->bytes > 0 && !header->answers && !may_reach(self, header, header->bytes))
    return PROXYCCL_STAGED_REFUSED + PROXYCCL_STAGED_BAD_RANGE;
  if (header->word != 0 && !may_signal(self, header->word)) return PROXYCCL_STAGED_REFUSED + PROXYCCL_STAGED_BAD_WORD;
  if (header->bytes > 0) {
    const ProxycclMemory destination = {.base = (char *)(uintptr_t)address, .bytes = header->bytes};
    status = self->in->transport->put(self->in, &destination, 0, &self->device_receiving, data, header->bytes);
  }
  if (status == 0 && header->word != 0)
    status = self->in->transport->flush(self->in, (uint64_t *)(uintptr_t)header->word, header->value);
  return copy_status(status, PROXYCCL_STAGED_COPY_IN);
}

static int take(StagedConnection *self, uint32_t *progress) {
  const uint64_t arrived = count_load(&self->words->arrived, &self->arrived);
  if (arrived - self->returned > MESSAGES) return PROXYCCL_STAGED_REFUSED + PROXYCCL_STAGED_BAD_COUNT;
  while (self->taken < arrived) {
    const uint64_t start = self->received % self->options.ring_bytes, data = start + sizeof(Header);
    const Header header = *(const volatile Header *)(self->receiving + start); /* one copy, which is checked and used */
    int status;
    if (header.bytes > self->options.ring_bytes - data) return PROXYCCL_STAGED_REFUSED + PROXYCCL_STAGED_BAD_LENGTH;
    status = place(self, &header, data);
    if (status != 0) return status;
    self->received += message_bytes(header.bytes);
    ++self->taken;
    ++*progress;
  }
  return 0;
}

/* Completes the gets whose data is placed. */
static void complete_gets(StagedConnection *self, uint32_t *progress) {
  const uint64_t placed = word_load(&self->words->placed);
  for (; self->got != self->arriving && self->gets[self->got % GETS].last <= placed; ++self->got) ++*progress;
}

static int return_credits(StagedConnection *self, uint32_t *progress) {
  const ProxycclTransport *wire = self->wire->transport;
  const uint64_t placed = word_load(&self->words->placed);
  if (self->returned == placed || wire->ready(self->wire) == 0) return 0;
  const uint64_t returned = self->returned;
  self->returned = placed;
  ++*progress;
  return wire->signal(self->wire, &self->peer_words->credited, placed, returned);
}

/* -- the transport --- */

static uint32_t staged_ready(const ProxycclConnection *base) {
  return operations_ready(&((const StagedConnection *)base)->operations);
}

static int staged_put(ProxycclConnection *base, const ProxycclMemory *dst, uint64_t dst_offset,
                      const ProxycclMemory *src, uint64_t src_offset, uint64_t bytes) {
  StagedConnection *self = self_of(base);
  operations_push_transfer(&self->operations, PUT, dst, dst_offset, src, src_offset, bytes);
  return issue(self);
}

static int staged_get(ProxycclConnection *base, const ProxycclMemory *dst, uint64_t dst_offset,
                      const ProxycclMemory *src, uint64_t src_offset, uint64_t bytes) {
  StagedConnection *self = self_of(base);
  operations_push_transfer(&self->operations, GET, dst, dst_offset, src, src_offset, bytes);
  return issue(self);
}

static int staged_put_value(ProxycclConnection *base, const ProxycclMemory *dst, uint64_t dst_offset, uint64_t value,
                            uint32_t bytes) {
  StagedConnection *self = self_of(base);
  operations_push_value(&self->operations, dst, dst_offset, value, bytes);
  return issue(self);
}

static int staged_signal(ProxycclConnection *base, uint64_t *remote, uint64_t value, uint64_t previous) {
  StagedConnection *self = self_of(base);
  (void)previous;
  operations_push_signal(&self->operations, remote, 0, value); /* its address is enough: the peer checks it */
  return issue(self);
}

static int staged_flush(ProxycclConnection *base, uint64_t *flushed, uint64_t value) {
  StagedConnection *self = self_of(base);
  operations_push_flush(&self->operations, flushed, value);
  return issue(self);
}

/* In the order of a message's states, so one poll takes a message through all that can complete at once. */
static int staged_poll(ProxycclConnection *base, uint32_t *progress) {
  StagedConnection *self = self_of(base);
  int status = reclaim(self, progress);
  complete_gets(self, progress);
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
  status = return_credits(self, progress);
  if (status == 0) status = self->wire->transport->poll(self->wire, progress);
  return status == 0 ? proxyccl_mark_progress(base) : status;
}

/* An operation waits only for a message without a credit, or for a get. */
static int staged_idle(const ProxycclConnection *base) {
  const StagedConnection *self = (const StagedConnection *)base;
  return self->asked == self->got && self->answered == self->noted && self->made == self->freed &&
         self->returned == self->taken && self->wire->transport->idle(self->wire) &&
         self->out->transport->idle(self->out) && self->in->transport->idle(self->in);
}

static void staged_destroy(ProxycclConnection *base) {
  StagedConnection *self = self_of(base);
  ProxycclConnection *const parts[] = {self->wire, self->out, self->in};
  for (int i = 0; i < 3; ++i)
    if (parts[i] != NULL) parts[i]->transport->destroy(parts[i]);
  free(self);
}

static const char *refused_over(const ProxycclTransport *wire, const void *given) {
  const ProxycclStagedOptions *options = given;
  const char *refused;
  if (options->wire == NULL) return "wire";
  refused = wire->refused(options->wire);
  if (refused != NULL) return refused;
  if (options->area == 0 || options->area % sizeof(Words) != 0) return "area";
  if (options->device_area == 0) return "device_area";
  if (options->ring_bytes < 2 * sizeof(Header) || options->ring_bytes % PROXYCCL_STAGED_ALIGN != 0) return "ring_bytes";
  if (options->chunk_bytes == 0) return "chunk_bytes";
  if (options->write_targets == NULL) return "write_targets";
  return NULL;
}

static ProxycclConnection *create_over(const ProxycclTransport *wire, const ProxycclTransport *transport,
                                       const void *given, const ProxycclRuntimeTable *runtime) {
  const ProxycclStagedOptions *options = given;
  const uint64_t ring = options->ring_bytes, first = sizeof(Words), second = first + ring;
  StagedConnection *self = calloc(1, sizeof *self);
  if (self == NULL) return NULL;
  self->base.transport = transport;
  self->options = *options;
  self->options.wire = NULL; /* the caller's, for this call */
  self->words = (Words *)options->area;
  self->peer_words = (Words *)(uintptr_t)options->peer_area;
  self->sending = (ProxycclMemory){(char *)options->area + first, ring, options->area_key, 0};
  self->receiving = (char *)options->area + second;
  self->peer_receiving =
      (ProxycclMemory){(char *)(uintptr_t)options->peer_area + second, ring, options->peer_area_key, 1};
  self->device_sending = (ProxycclMemory){(char *)options->device_area + first, ring, 0, 0};
  self->device_receiving = (ProxycclMemory){(char *)options->device_area + second, ring, 0, 0};
  self->wire = wire->create(options->wire, runtime);
  if (self->wire != NULL) {
    self->out = proxyccl_copy_transport.create(&options->copy_out, runtime);
    self->in = proxyccl_copy_transport.create(&options->copy_in, runtime);
  }
  if (self->wire == NULL || self->out == NULL || self->in == NULL) {
    const int error = errno;
    staged_destroy(&self->base);
    errno = error;
    return NULL;
  }
  return &self->base;
}

const char *proxyccl_staged_fabric_error_text(const ProxycclConnection *base) {
  return proxyccl_fabric_error_text(((const StagedConnection *)base)->wire);
}

/* The transport over a wire. */
#define STAGED_OVER(wire_name, own_name)                                                                       \
  static const char *own_name##_refused(const void *options) {                                                 \
    return refused_over(&proxyccl_##wire_name##_transport, options);                                           \
  }                                                                                                            \
  static ProxycclConnection *own_name##_create(const void *options, const ProxycclRuntimeTable *runtime) {     \
    return create_over(&proxyccl_##wire_name##_transport, &proxyccl_##own_name##_transport, options, runtime); \
  }                                                                                                            \
  const ProxycclTransport proxyccl_##own_name##_transport = {                                                  \
      .name = #own_name,                                                                                       \
      .copies = PROXYCCL_COPIES_OWN,                                                                           \
      .refused = own_name##_refused,                                                                           \
      .create = own_name##_create,                                                                             \
      .ready = staged_ready,                                                                                   \
      .put = staged_put,                                                                                       \
      .get = staged_get,                                                                                       \
      .put_value = staged_put_value,                                                                           \
      .signal = staged_signal,                                                                                 \
      .flush = staged_flush,                                                                                   \
      .poll = staged_poll,                                                                                     \
      .idle = staged_idle,                                                                                     \
      .destroy = staged_destroy,                                                                               \
  };

STAGED_OVER(verbs, staged)
STAGED_OVER(fabric, staged_fabric)
