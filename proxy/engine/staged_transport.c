/* A staged connection uses other connections: one copies into the sending ring, one or more (the wires) write to the
 * peer, and one copies out of the receiving ring. Messages are numbered from 0 and pass through these states in order:
 *
 * `made`: space in the ring is reserved for the message, and the message's copy into the ring is issued. `copied`: the
 * copy into the ring is complete. `posted`: the write of the message, and then of the peer's count of arrived messages,
 * is issued to the wire. `sent`: the message's requests are complete. `taken`: the peer has issued the copy out of its
 * ring. `placed`: the copy out of the peer's ring is complete, and the peer's worker stores the message's signal.
 * `credited`: the peer's credit has reached the sender; the peer may delay a credit for which the sender does not wait.
 *
 * A message's space in the ring is free once the message is sent and credited. If the wire is a byte stream, a
 * message's credit implies that the message is sent. Sending on a wire never waits for the peer's engine, so two
 * engines can return credits while they wait for each other's credits.
 *
 * A message that follows a long message uses the next wire; a message that follows a short message uses the same wire.
 * If all earlier messages are posted when a put begins, the message after the put uses the first wire, so that
 * successive calls use wires whose threads are awake. Each message tells the receiver which wire carries the next
 * message. The receiver takes messages in the order of their numbers, regardless of their wires. Sending a few
 * gigabytes per second over sockets fully occupies a core. So a thread other than the worker may serve a wire: it posts
 * messages and credits, and polls. The worker wakes a wire's thread for long messages. The worker does not serve a wire
 * whose thread is awake and has just polled the wire, because sending a long message would keep the worker from
 * starting copies. The worker serves all other wires, so short messages need no other thread. A provider holds an
 * endpoint's locks during system calls, and all wires of the endpoint, to all peers, need these locks. So a thread
 * serves an endpoint's wires only while it holds the lock `turn` of ProxycclWireThread, and a thread that finds the
 * lock taken does not wait for it.
 *
 * For a get, a rank sends a message without data, called the request. The peer returns a credit for the request, and
 * records the request. Once all messages that arrived before the request are placed, the peer sends the data in
 * messages of its own, called the answer. Requests are answered in order, so an answer need not name the destination of
 * its data. A rank makes no messages for operations after a get until all its gets are complete. The peer can always
 * record a request, because a rank has at most PROXYCCL_STAGED_GETS incomplete gets.
 *
 * Over sockets, a count may arrive in parts, low bytes first. A partly written count may be too low but is never too
 * high, so a reader uses the highest value that it has read. */
#include "staged_transport.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "clock.h"
#include "fabric_transport.h"
#include "operations.h"
#include "transports.h"
#include "waking.h"

enum { MESSAGES = PROXYCCL_STAGED_MESSAGES };

/* The header of a message. A message may be empty, or carry a piece of a put or of an answer, a signal to store after
 * the piece, or a request. */
typedef struct {
  uint64_t address; /* address, in the receiver's process, of a put's destination or a get's source; with ALERTS, the
                       number of parts */
  uint64_t target;  /* key of the receiver's range that contains `address` */
  uint64_t bytes;   /* bytes of data in the message */
  uint64_t word;    /* address of a semaphore word in the receiver's process; 0 without a signal */
  uint64_t value;
  uint64_t asked;   /* requested bytes; 0 if the message is not a request */
  uint64_t answers; /* 1 if the data answers the receiver's oldest unanswered request; 0 if it is put to `address` */
  uint64_t flags;   /* a combination of the flags below */
} Header;

enum {
  AWAITED = 1, /* a flush waits for the message's credit; without this flag the peer may delay the credit */
  REWINDS = 2, /* the next message uses the first wire */
  FILLS = 4,   /* the message only fills the rest of the ring; its data is not sent */
  ALERTS = 8 /* a put of `address` parts follows; the receiver wakes the threads of the wires that carry these parts */
};

_Static_assert(sizeof(Header) == PROXYCCL_STAGED_ALIGN, "messages are aligned to their headers");

/* Each word occupies a separate pair of cache lines, because some processors fetch lines in pairs. */
typedef struct {
  uint64_t count __attribute__((aligned(128)));
} Count;

typedef struct {
  Count arrived[PROXYCCL_STAGED_WIRES]; /* written by the peer: for each wire, the number of messages that arrived */
  Count credited;                       /* written by the peer: number of this rank's messages that are credited */
  Count copied;                         /* written by the stream that copies into the area: number of copied messages */
  Count placed;                         /* written by the stream that copies out of the area: number of placed
                                           messages */
} Words;

_Static_assert(sizeof(Words) == PROXYCCL_STAGED_WORDS_BYTES, "the rings begin after the words");

/* An incomplete get of this rank. */
typedef struct {
  uint64_t destination, bytes; /* destination range of the data that has not arrived yet */
  uint64_t last;               /* the get is complete once this many of the peer's messages are placed */
} Asked;

/* A get that the peer has requested. */
typedef struct {
  uint64_t source, bytes; /* source range of the data that no message contains yet */
  uint64_t behind;        /* the answer may begin once this many messages are placed */
} Answer;

enum { GETS = PROXYCCL_STAGED_GETS };

/* The signal of a taken message. */
typedef struct {
  uint64_t word, value;
  uint64_t message; /* the signal may be stored once this many messages are placed */
} Signal;

enum {
  HELD_NS = 50000,        /* longest time for which a credit is delayed */
  SERVED_NS = 50000,      /* the worker does not serve a wire whose thread is awake and has polled the wire within this
                             time */
  LONG_PART = 1024,       /* a message is long if its data exceeds 1/1024 of the ring or has at least SHORTEST_PIECE
                             bytes */
  SHORTEST_PIECE = 65536, /* bytes of the shortest part into which a put is cut to use several wires */
  RESTED_NS = 500000,     /* if the last long put began this long ago, the wires' threads may be asleep */
  MOST_PARTS = 8,         /* maximum number of parts into which a put is cut */
  FILLED_PART = 256,      /* if less than 1/256 of the ring is left before its end, this space is not used for a short
                             piece */
  LOOKS_AT_ALL = 64,      /* once in this many polls, the worker polls all wires that no awake thread serves, because
                             providers answer peers only in polls */
  LOOKS_AT_COPIES = 16 /* once in this many polls, the worker asks the driver whether incomplete copies have failed */
};

typedef struct StagedConnection StagedConnection;

/* A wire. Only the thread that holds the lock `thread->turn` uses `link`. */
typedef struct {
  ProxycclConnection base; /* the wire as a connection that another thread polls */
  StagedConnection *staged;
  ProxycclConnection *link;
  uint32_t number;
  ProxycclWireThread *thread; /* state shared with the thread that serves the wire; points to the field `own` if there
                                 is no such thread */
  ProxycclWireThread own;
  int status;                 /* pairing wire-turn: status of the failure that ended the wire */
  int resting;                /* pairing wire-turn: 1 if nothing is outstanding on the link */
  uint64_t made;              /* pairing wire-message: number of messages assigned to this wire */
  uint64_t numbers[MESSAGES]; /* pairing wire-message: element i % MESSAGES is the number, in the connection, of this
                                 wire's message i */
  uint64_t posted;            /* number of this wire's posted messages; atomic, because threads that do not hold the
                                 lock read it */
  uint64_t sent;              /* number of this wire's messages whose requests are complete */
  uint64_t seen;              /* number of messages that had arrived on this wire when the wire's thread last polled */
  uint64_t looked_ns;         /* relaxed: time of the last poll by the wire's thread; 0 before the first poll */
} Wire;

struct StagedConnection {
  QueuedConnection queue;
  ProxycclStagedOptions options;
  ProxycclConnection *out, *in;
  Wire wires[PROXYCCL_STAGED_WIRES];
  Words *words;
  char *sending, *receiving;                       /* the rings */
  ProxycclMemory device_sending, device_receiving; /* the rings' addresses in copies */
  /* Sending. Positions count the bytes since the first message, and never wrap around. */
  uint64_t head, tail;   /* head: position after the last message written to the ring; tail: position after the last
                            freed message */
  uint64_t made, marked; /* made: number of messages written to the ring; marked: the last value of `made` that a stream
                            was asked to store in `words->copied` */
  uint64_t freed;
  uint64_t credited;            /* the highest value read from `words->credited` */
  uint64_t positions[MESSAGES]; /* start positions of messages that are not freed, by message number */
  uint8_t wire_of[MESSAGES];    /* wires of messages that are not freed, by message number */
  uint64_t freed_by[PROXYCCL_STAGED_WIRES];
  uint32_t next_wire; /* wire of the next message */
  Header *last;       /* header of the last message written to the ring */
  uint64_t piece;     /* maximum number of bytes per message of the put in progress; 0 if no put is in progress */
  int rewinds;        /* whether the message after the put in progress uses the first wire */
  uint64_t put_ns;    /* when the last long put began */
  int has_copied;     /* whether the CPU has copied a long piece since the last poll */
  /* Receiving. */
  uint64_t received;                       /* position after the last message that was taken */
  uint64_t arrived[PROXYCCL_STAGED_WIRES]; /* the highest values read from `words->arrived` */
  uint64_t taken_by[PROXYCCL_STAGED_WIRES];
  uint32_t from_wire; /* the wire on which the next message arrives */
  uint64_t taken, taken_marked;
  uint64_t ends[MESSAGES]; /* end positions of taken messages, by message number */
  uint64_t wanted;         /* the peer waits for the credits of this many messages */
  uint64_t signals_taken, signals_stored;
  Signal signals[MESSAGES]; /* signals that are not stored, by message number */
  uint64_t waiting; /* one more than the number of the first message whose signal is not stored; UINT64_MAX if all
                       signals are stored */
  /* Credits; only the thread that serves the first wire uses these fields. */
  uint64_t returned;     /* number of messages for which credits were returned */
  uint64_t returned_end; /* position after the last credited message */
  uint64_t held_since;   /* time since which a credit is delayed; 0 if no credit is delayed */
  /* The counts of gets; get i is gets[i % GETS], and the peer's get i is answers[i % GETS]. */
  uint64_t asked, arriving, got; /* numbers of the next get to request, of the next get whose data arrives, of the next
                                    get to complete */
  uint64_t noted, answered;      /* number of requests received; number of requests answered completely */
  Asked gets[GETS];
  Answer answers[GETS];
  FlushQueue releases; /* RELEASE operations that wait until copies have read their sources */
  uint32_t polls;
};

static StagedConnection *self_of(ProxycclConnection *base) { return (StagedConnection *)base; }

/* Returns the number of bytes that a message with `data` bytes of data takes in the ring. */
static uint64_t message_bytes(uint64_t data) {
  return sizeof(Header) + (data + PROXYCCL_STAGED_ALIGN - 1) / PROXYCCL_STAGED_ALIGN * PROXYCCL_STAGED_ALIGN;
}

static Header *header_at(const StagedConnection *self, uint64_t position) {
  return (Header *)(self->sending + position % self->options.ring_bytes);
}

static int copy_status(int status, int direction) { return status == 0 ? 0 : direction + status; }

/* Reads a count that the wire writes. Returns the highest value read so far. */
static uint64_t count_load(const uint64_t *word, uint64_t *highest) {
  const uint64_t count = word_load(word);
  if (count > *highest) *highest = count;
  return *highest;
}

/* Pairing write-target, release: the addresses are stored before the size, so a reader finds either no range or a
 * complete range. */
void proxyccl_remote_write_target_set(ProxycclRemoteWriteTarget *target, uint64_t base, uint64_t bytes, uint64_t host) {
  __atomic_store_n(&target->bytes, 0, __ATOMIC_RELAXED);
  __atomic_store_n(&target->host, host, __ATOMIC_RELEASE);
  __atomic_store_n(&target->base, base, __ATOMIC_RELEASE);
  __atomic_store_n(&target->bytes, bytes, __ATOMIC_RELEASE);
}

/* Pairing write-target, acquire: this load of `bytes` comes before the loads of the addresses. */
static ProxycclRemoteWriteTarget target_load(const ProxycclRemoteWriteTarget *target) {
  const uint64_t bytes = __atomic_load_n(&target->bytes, __ATOMIC_ACQUIRE);
  const uint64_t base = __atomic_load_n(&target->base, __ATOMIC_ACQUIRE);
  return (ProxycclRemoteWriteTarget){base, bytes, __atomic_load_n(&target->host, __ATOMIC_ACQUIRE)};
}

/* -- sending --- */

/* Returns whether a message with this many bytes of data is long. Both ranks get the same result, because their rings
 * have the same size. */
static int is_long(const StagedConnection *self, uint64_t bytes) {
  return bytes >= SHORTEST_PIECE || bytes > self->options.ring_bytes / LONG_PART;
}

/* Returns the wire of a message that follows a message with `bytes` bytes of data on `wire`. */
static uint32_t wire_after(const StagedConnection *self, uint32_t wire, uint64_t bytes) {
  return is_long(self, bytes) ? (wire + 1) % self->options.wire_count : wire;
}

static void wake(const Wire *wire) {
  if (wire->thread->asleep != NULL) proxyccl_wake_one(wire->thread->asleep);
}

/* Makes a message at the head of the sending ring. Returns the message's header, or NULL if there is no room. */
static Header *open_message(StagedConnection *self, uint64_t bytes) {
  const uint64_t size = message_bytes(bytes);
  if (self->made - self->freed == MESSAGES || self->head + size - self->tail > self->options.ring_bytes) return NULL;
  self->last = header_at(self, self->head);
  self->positions[self->made % MESSAGES] = self->head;
  *self->last = (Header){.bytes = bytes};
  self->head += size;
  Wire *wire = &self->wires[self->next_wire];
  wire->numbers[wire->made % MESSAGES] = self->made;
  word_store(&wire->made, wire->made + 1);
  self->wire_of[self->made % MESSAGES] = (uint8_t)self->next_wire;
  if (is_long(self, bytes)) wake(wire);
  self->next_wire = wire_after(self, self->next_wire, bytes);
  ++self->made;
  return self->last;
}

/* Makes a message with up to `most` bytes from `source`, stores their number in *made, and returns the message's
 * header. `host` is the CPU's address of the source, or 0. A message does not wrap around the ring's end. If little
 * space is left before the end, makes a message without data that fills the space, and sets *made to 0, because even a
 * short copy by a GPU may have to wait for kernels. If the ring is full, returns NULL and sets *status to WAITS. If the
 * copy can't be issued, sets *status to the copy's status. */
static Header *make_piece(StagedConnection *self, uint64_t source, uint64_t host, uint64_t most, uint64_t *made,
                          int *status) {
  const uint64_t place = self->head % self->options.ring_bytes + sizeof(Header);
  const uint64_t rest = self->options.ring_bytes - place;
  if (rest < most && rest < self->options.ring_bytes / FILLED_PART) {
    Header *filler = open_message(self, rest);
    *status = filler == NULL ? WAITS : 0;
    *made = 0;
    if (filler != NULL) filler->flags = FILLS;
    return filler;
  }
  const uint64_t bytes = rest < most ? rest : most;
  Header *header = open_message(self, bytes);
  *status = header == NULL ? WAITS : 0;
  *made = header == NULL ? 0 : bytes;
  if (*made == 0) return header;
  const ProxycclMemory memory = {.base = (char *)(uintptr_t)source, .bytes = bytes, .host = (char *)(uintptr_t)host};
  *status = self->out->transport->put(self->out, &self->device_sending, place, &memory, 0, bytes);
  *status = copy_status(*status, PROXYCCL_STAGED_COPY_OUT);
  return header;
}

/* Returns whether all messages are posted. */
static int is_calm(const StagedConnection *self) {
  for (uint32_t i = 0; i < self->options.wire_count; ++i)
    if (self->wires[i].made != word_peek(&self->wires[i].posted)) return 0;
  return 1;
}

static uint64_t quotient_up(uint64_t dividend, uint64_t divisor) { return (dividend + divisor - 1) / divisor; }

static int mark(ProxycclConnection *copies, uint64_t *word, uint64_t count, uint64_t *marked);
static int take_turn(Wire *wire, uint32_t *progress);

/* Makes a message that tells the peer to wake the threads of a put's wires, unless a recent long put has kept the
 * threads awake. The threads then wake up while this rank copies the first parts. If the threads were woken only when
 * parts arrive, the peer's worker would handle all parts itself. */
static int alert_after_rest(StagedConnection *self, uint64_t bytes, uint64_t parts) {
  if (self->options.wire_count == 1 || bytes < 2 * SHORTEST_PIECE) return 0;
  const uint64_t last = self->put_ns;
  self->put_ns = now_ns();
  if (self->put_ns - last < RESTED_NS) return 0;
  Wire *wire = &self->wires[self->next_wire];
  Header *header = open_message(self, 0);
  uint32_t progress = 0;
  if (header == NULL) return 0; /* the ring is full, so the threads are awake without an alert */
  header->flags = ALERTS;
  header->address = parts;
  const int status = mark(self->out, &self->words->copied.count, self->made, &self->marked);
  if (status == 0) take_turn(wire, &progress);
  return copy_status(status, PROXYCCL_STAGED_COPY_OUT);
}

/* Chooses the length of the parts into which the next put is cut, so that the put uses several wires. A part is at most
 * as long as a message's data or a copy by the CPU may be. Returns the number of parts. */
static uint64_t begin_put(StagedConnection *self, uint64_t bytes, int by_cpu) {
  const uint64_t chunk = self->options.chunk_bytes, wires = self->options.wire_count;
  const uint64_t longest = by_cpu && chunk > PROXYCCL_CPU_COPY_BYTES ? PROXYCCL_CPU_COPY_BYTES : chunk;
  uint64_t parts = bytes / SHORTEST_PIECE;
  if (parts > MOST_PARTS) parts = MOST_PARTS;
  if (parts > wires) parts = wires;
  if (parts < quotient_up(bytes, longest)) parts = quotient_up(bytes, longest);
  self->piece = quotient_up(quotient_up(bytes, parts), PROXYCCL_STAGED_ALIGN) * PROXYCCL_STAGED_ALIGN;
  if (self->piece > longest) self->piece = longest;
  self->rewinds = is_calm(self);
  return parts;
}

/* Makes a piece of a put. In each poll, the CPU copies at most one long piece, so that sending and receiving continue
 * between pieces. */
static int make_put(StagedConnection *self, Operation *operation) {
  const int by_cpu = operation->source_host != 0;
  uint64_t bytes;
  int status;
  if (by_cpu && self->has_copied) return WAITS;
  if (self->piece == 0) {
    const uint64_t parts = begin_put(self, operation->bytes, by_cpu);
    status = alert_after_rest(self, operation->bytes, parts);
    if (status != 0) return status;
  }
  const uint64_t most = operation->bytes < self->piece ? operation->bytes : self->piece;
  Header *header = make_piece(self, operation->source, operation->source_host, most, &bytes, &status);
  if (status != 0 || bytes == 0) return status;
  header->address = operation->destination;
  header->target = operation->destination_key;
  operation_advance(operation, bytes);
  self->has_copied |= by_cpu && is_long(self, bytes);
  if (operation->bytes > 0) return 0;
  self->piece = 0;
  if (self->rewinds) {
    header->flags |= REWINDS;
    self->next_wire = 0;
  }
  return 0;
}

/* Makes the message that requests a get's data. */
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

/* Makes a piece of the answer to the oldest unanswered request. */
static int make_answer(StagedConnection *self) {
  Answer *answer = &self->answers[self->answered % GETS];
  uint64_t bytes;
  int status;
  if (self->answered == self->noted || answer->behind > word_load(&self->words->placed.count)) return WAITS;
  const uint64_t longest = self->options.chunk_bytes, most = answer->bytes < longest ? answer->bytes : longest;
  Header *header = make_piece(self, answer->source, 0, most, &bytes, &status);
  if (status != 0 || bytes == 0) return status;
  header->answers = 1;
  answer->source += bytes;
  answer->bytes -= bytes;
  self->answered += answer->bytes == 0;
  return 0;
}

/* Makes a message with a value, which the CPU copies. If only a header fits before the ring's end, first makes an empty
 * message that fills this space. */
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

/* If no wire can have sent the last message yet, adds a signal to the last message; otherwise makes a message for the
 * signal. */
static int make_signal(StagedConnection *self, const Operation *operation) {
  Header *header = self->last;
  if (self->made == self->marked || header->word != 0) header = open_message(self, 0);
  if (header == NULL) return WAITS;
  header->word = operation->destination;
  header->value = operation->value;
  return 0;
}

/* Queues a flush until all earlier messages are freed. Asks the peer for an early credit, unless the flush only reports
 * progress to observers, because nobody waits for such a flush. */
static int make_flush(StagedConnection *self, const Operation *operation) {
  const int awaited = self->made != self->freed && operation->flushed != &self->queue.base.progress.completed;
  if (!flushes_have_room(&self->queue.flushes)) return WAITS;
  /* If the ring is full, no message is made, because the peer then returns credits without being asked. */
  if (awaited && self->made == self->marked) open_message(self, 0);
  if (awaited && self->made != self->marked) self->last->flags |= AWAITED;
  flushes_push(&self->queue.flushes, operation, self->made, self->freed);
  return 0;
}

static int make_release(StagedConnection *self, const Operation *operation) {
  return flushes_push(&self->releases, operation, self->made, word_load(&self->words->copied.count)) ? 0 : WAITS;
}

static int make_next(StagedConnection *self) {
  Operation *operation = operations_next(&self->queue.operations);
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
  else if (operation->kind == RELEASE)
    status = make_release(self, operation);
  else
    status = make_flush(self, operation);
  if (status == 0 && (operation->kind == FLUSH || operation->kind == RELEASE || operation->bytes == 0))
    operations_pop(&self->queue.operations);
  return status;
}

/* Makes messages while there is room, alternately for the next operation and for the next answer to the peer.
 */
static int issue(ProxycclConnection *base) {
  StagedConnection *self = self_of(base);
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

/* Pairing wire-turn, release and acquire of values that the worker reads without holding the lock. */
static void shown_store(int *shown, int value) { __atomic_store_n(shown, value, __ATOMIC_RELEASE); }
static int shown_load(const int *shown) { return __atomic_load_n(shown, __ATOMIC_ACQUIRE); }

/* The addresses by which a wire's requests name the peer's words and receiving ring. This process never dereferences
 * these addresses. */
typedef struct {
  Words *words;
  char *receiving;
} PeerArea;

static PeerArea peer_area(const StagedConnection *self, const Wire *wire) {
  const uint64_t address = self->options.wires[wire->number].peer_area;
  const uint64_t receiving = (uintptr_t)self->receiving - self->options.area;
  return (PeerArea){(Words *)(uintptr_t)address, (char *)(uintptr_t)address + receiving};
}

static int post(Wire *wire, uint32_t *progress) {
  const StagedConnection *self = wire->staged;
  ProxycclConnection *link = wire->link;
  const ProxycclTransport *transport = link->transport;
  const uint64_t copied = word_load(&self->words->copied.count), made = word_load(&wire->made);
  while (wire->posted < made && transport->ready(link) > 0) {
    const uint64_t number = wire->numbers[wire->posted % MESSAGES];
    if (number >= copied) break;
    const uint64_t position = self->positions[number % MESSAGES], place = position % self->options.ring_bytes;
    const Header *header = header_at(self, position);
    const uint64_t bytes = sizeof(Header) + (header->flags & FILLS ? 0 : header->bytes);
    const ProxycclStagedWire *keys = &self->options.wires[wire->number];
    const PeerArea theirs = peer_area(self, wire);
    const ProxycclMemory sending = {
        .base = self->sending, .bytes = self->options.ring_bytes, .key = keys->area_keys[0], .keys = keys->area_keys};
    const ProxycclMemory receiving = {.base = theirs.receiving,
                                      .bytes = self->options.ring_bytes,
                                      .key = keys->peer_area_keys[0],
                                      .keys = keys->peer_area_keys,
                                      .remote_only = 1};
    int status = transport->put(link, &receiving, place, &sending, place, bytes);
    const uint64_t arrived = wire->posted;
    counter_set(&wire->posted, arrived + 1);
    uint64_t *const count = &theirs.words->arrived[wire->number].count;
    if (status == 0) status = transport->signal(link, count, wire->posted, arrived);
    if (status == 0 && !self->options.credits_tell) status = transport->flush(link, &wire->sent, wire->posted);
    if (status != 0) return status;
    ++*progress;
  }
  return 0;
}

/* Returns whether the credits for the first `placed` messages may be delayed. */
static int may_be_held(StagedConnection *self, uint64_t placed) {
  const uint64_t returned = self->returned, wanted = word_load(&self->wanted);
  if (wanted > returned && placed >= wanted) return 0;
  const uint64_t bytes = self->ends[(placed - 1) % MESSAGES] - self->returned_end;
  if (bytes >= self->options.ring_bytes / 4 || placed - returned >= MESSAGES / 4) return 0;
  const uint64_t now = now_ns();
  if (self->held_since == 0) self->held_since = now;
  return now - self->held_since < HELD_NS;
}

/* Returns the number of messages whose data is placed and whose signals are stored. */
static uint64_t completed(const StagedConnection *self) {
  const uint64_t placed = word_load(&self->words->placed.count), waiting = word_load(&self->waiting);
  return placed < waiting ? placed : waiting - 1;
}

static int return_credits(Wire *wire, uint32_t *progress) {
  StagedConnection *self = wire->staged;
  ProxycclConnection *link = wire->link;
  const uint64_t placed = completed(self), returned = self->returned;
  if (returned == placed || link->transport->ready(link) == 0 || may_be_held(self, placed)) return 0;
  self->returned_end = self->ends[(placed - 1) % MESSAGES];
  self->held_since = 0;
  shown_store(&wire->resting, 0);
  word_store(&self->returned, placed);
  ++*progress;
  return link->transport->signal(link, &peer_area(self, wire).words->credited.count, placed, returned);
}

/* Serves a wire: posts messages and credits, and polls. Stores a failure in the wire's status. Returns 1, or 0 if
 * another thread is serving a wire of the same endpoint and this thread would have to wait for the provider's lock. */
static int take_turn(Wire *wire, uint32_t *progress) {
  if (!turn_taken(&wire->thread->turn)) return 0;
  if (wire->status == 0) {
    int status = post(wire, progress);
    if (status == 0 && wire->number == 0) status = return_credits(wire, progress);
    if (status == 0) status = wire->link->transport->poll(wire->link, progress);
    shown_store(&wire->resting, wire->link->transport->idle(wire->link));
    shown_store(&wire->status, status);
  }
  turn_give(&wire->thread->turn);
  return 1;
}

/* Returns whether the worker has a reason to poll a wire: a message to post or to take, credits to send or to receive,
 * or outstanding requests. */
static int concerns_worker(const StagedConnection *self, const Wire *wire) {
  if (wire->number == self->from_wire || wire->made != word_peek(&wire->posted) || !shown_load(&wire->resting))
    return 1;
  return wire->number == 0 && (self->made != self->freed || word_peek(&self->returned) != self->taken);
}

/* Returns whether a wire's thread is awake and has just polled the wire. */
static int is_served(const Wire *wire) {
  const ProxycclWireThread *thread = wire->thread;
  if (thread->asleep == NULL || __atomic_load_n(thread->asleep, __ATOMIC_RELAXED) != 0) return 0;
  return word_peek(&wire->looked_ns) + SERVED_NS > now_ns();
}

static int wires_turns(StagedConnection *self, uint32_t *progress) {
  const int all = self->polls % LOOKS_AT_ALL == 0;
  for (uint32_t i = 0; i < self->options.wire_count; ++i) {
    Wire *wire = &self->wires[i];
    if ((all || self->options.wire_count == 1 || concerns_worker(self, wire)) && !is_served(wire))
      take_turn(wire, progress);
    const int status = shown_load(&wire->status);
    if (status != 0) return status;
  }
  return 0;
}

/* Returns whether the requests that wrote the oldest message to the peer are complete. */
static int is_sent(const StagedConnection *self) {
  const uint32_t wire = self->wire_of[self->freed % MESSAGES];
  return self->options.credits_tell || self->freed_by[wire] < word_load(&self->wires[wire].sent);
}

static int reclaim(StagedConnection *self, uint32_t *progress) {
  const uint64_t credited = count_load(&self->words->credited.count, &self->credited);
  if (credited - self->freed > self->made - self->freed) return PROXYCCL_STAGED_REFUSED + PROXYCCL_STAGED_BAD_COUNT;
  if (credited == self->freed) return 0;
  for (; self->freed < credited && is_sent(self); ++self->freed, ++*progress) {
    ++self->freed_by[self->wire_of[self->freed % MESSAGES]];
    self->tail += message_bytes(header_at(self, self->tail)->bytes);
  }
  flushes_complete(&self->queue.flushes, self->freed);
  return 0;
}

/* -- receiving --- */

/* Sets *memory to the `bytes` bytes at the message's address. Returns 1, or 0 if the bytes are not all in the range
 * that the message names. */
static int find_range(const StagedConnection *self, const Header *header, uint64_t bytes, ProxycclMemory *memory) {
  if (header->target >= PROXYCCL_STAGED_WRITE_TARGETS) return 0;
  const ProxycclRemoteWriteTarget target = target_load(&self->options.write_targets[header->target]);
  const uint64_t offset = header->address - target.base;
  if (header->address < target.base || offset > target.bytes || bytes > target.bytes - offset) return 0;
  const uint64_t host = target.host == 0 ? 0 : target.host + offset;
  *memory =
      (ProxycclMemory){.base = (char *)(uintptr_t)header->address, .bytes = bytes, .host = (char *)(uintptr_t)host};
  return 1;
}

static int may_signal(const StagedConnection *self, uint64_t word) {
  return word % sizeof(uint64_t) == 0 && word >= self->options.signals &&
         word - self->options.signals < self->options.signals_bytes;
}

/* Records the request in the message that is being taken. */
static int note_request(StagedConnection *self, const Header *header) {
  if (header->bytes > 0 || self->noted - self->answered == GETS)
    return PROXYCCL_STAGED_REFUSED + PROXYCCL_STAGED_BAD_REQUEST;
  ProxycclMemory asked;
  if (!find_range(self, header, header->asked, &asked)) return PROXYCCL_STAGED_REFUSED + PROXYCCL_STAGED_BAD_RANGE;
  self->answers[self->noted++ % GETS] = (Answer){header->address, header->asked, self->taken + 1};
  return 0;
}

/* Returns the destination of the answer in the message that is being taken, or 0 if no get requested the data. */
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

static int place(StagedConnection *self, const Header *header, uint64_t data) {
  ProxycclMemory destination = {.bytes = header->bytes};
  int status = 0;
  if (header->asked > 0 && (status = note_request(self, header)) != 0) return status;
  if (header->bytes > 0 && header->answers) {
    destination.base = (char *)(uintptr_t)take_answer(self, header->bytes);
    if (destination.base == NULL) return PROXYCCL_STAGED_REFUSED + PROXYCCL_STAGED_BAD_ANSWER;
  }
  if (header->bytes > 0 && !header->answers && !find_range(self, header, header->bytes, &destination))
    return PROXYCCL_STAGED_REFUSED + PROXYCCL_STAGED_BAD_RANGE;
  if (header->word != 0 && !may_signal(self, header->word)) return PROXYCCL_STAGED_REFUSED + PROXYCCL_STAGED_BAD_WORD;
  if (header->bytes > 0)
    status = self->in->transport->put(self->in, &destination, 0, &self->device_receiving, data, header->bytes);
  if (status == 0 && header->word != 0) {
    if (self->signals_taken == self->signals_stored) word_store(&self->waiting, self->taken + 1);
    self->signals[self->signals_taken++ % MESSAGES] = (Signal){header->word, header->value, self->taken + 1};
  }
  return copy_status(status, PROXYCCL_STAGED_COPY_IN);
}

/* Stores the signals of placed messages. The CPU stores signals, because a store by the stream would cost a driver call
 * and a pause between two copies. */
static void store_signals(StagedConnection *self) {
  const uint64_t placed = word_load(&self->words->placed.count);
  for (; self->signals_stored != self->signals_taken; ++self->signals_stored) {
    const Signal *signal = &self->signals[self->signals_stored % MESSAGES];
    word_store(&self->waiting, signal->message);
    if (signal->message > placed) return;
    word_store((uint64_t *)(uintptr_t)signal->word, signal->value);
  }
  word_store(&self->waiting, UINT64_MAX);
}

/* Polls a connection that copies, which calls the driver. While `word` shows that copies are incomplete, a poll could
 * only find a failure, so most polls are skipped. */
static int poll_copies(const StagedConnection *self, ProxycclConnection *copies, const uint64_t *word, uint64_t marked,
                       uint32_t *progress) {
  if (word_load(word) != marked && self->polls % LOOKS_AT_COPIES != 0) return 0;
  return copies->transport->poll(copies, progress);
}

static int take(StagedConnection *self, uint32_t *progress) {
  for (uint32_t i = 0; i < self->options.wire_count; ++i) {
    const uint64_t count = count_load(&self->words->arrived[i].count, &self->arrived[i]);
    const uint64_t without_credit = count - self->taken_by[i] + self->taken - word_load(&self->returned);
    if (without_credit > MESSAGES) return PROXYCCL_STAGED_REFUSED + PROXYCCL_STAGED_BAD_COUNT;
  }
  for (uint32_t wire = self->from_wire; self->taken_by[wire] < self->arrived[wire]; wire = self->from_wire) {
    const uint64_t start = self->received % self->options.ring_bytes, data = start + sizeof(Header);
    /* Copies the header before checking it, because the peer could change the original after the check. */
    Header header = *(const volatile Header *)(self->receiving + start);
    const uint64_t bytes = header.bytes;
    int status;
    if (bytes > self->options.ring_bytes - data) return PROXYCCL_STAGED_REFUSED + PROXYCCL_STAGED_BAD_LENGTH;
    if (header.flags & FILLS) header.bytes = 0; /* a message that fills space may still carry a signal */
    status = place(self, &header, data);
    if (status != 0) return status;
    self->received += message_bytes(bytes);
    ++self->taken_by[wire];
    self->from_wire = header.flags & REWINDS ? 0 : wire_after(self, wire, bytes);
    if (is_long(self, bytes)) wake(&self->wires[self->from_wire]);
    for (uint32_t i = 0; header.flags & ALERTS && i < header.address && i < self->options.wire_count; ++i)
      wake(&self->wires[(self->from_wire + i) % self->options.wire_count]);
    self->ends[self->taken++ % MESSAGES] = self->received;
    if (header.flags & AWAITED) word_store(&self->wanted, self->taken);
    ++*progress;
  }
  return 0;
}

static void complete_gets(StagedConnection *self, uint32_t *progress) {
  const uint64_t placed = word_load(&self->words->placed.count);
  for (; self->got != self->arriving && self->gets[self->got % GETS].last <= placed; ++self->got) ++*progress;
}

/* -- the transport --- */

static int staged_release(ProxycclConnection *base, uint64_t *released, uint64_t value) {
  StagedConnection *self = self_of(base);
  operations_push_flush(&self->queue.operations, RELEASE, released, value);
  return issue(base);
}

/* Handles the states of messages in order, so that one poll can advance a message through several states. */
static int staged_poll(ProxycclConnection *base, uint32_t *progress) {
  StagedConnection *self = self_of(base);
  int status = reclaim(self, progress);
  ++self->polls;
  self->has_copied = 0;
  complete_gets(self, progress);
  if (status == 0) status = issue(base);
  if (status != 0) return status;
  *progress += (uint32_t)self->has_copied; /* a copied piece counts as progress, because more pieces may need to be
  copied */
  status = mark(self->out, &self->words->copied.count, self->made, &self->marked);
  if (status == 0) status = poll_copies(self, self->out, &self->words->copied.count, self->marked, progress);
  if (status != 0) return copy_status(status, PROXYCCL_STAGED_COPY_OUT);
  flushes_complete(&self->releases, word_load(&self->words->copied.count));
  status = take(self, progress);
  if (status != 0) return status;
  status = mark(self->in, &self->words->placed.count, self->taken, &self->taken_marked);
  store_signals(self);
  if (status == 0) status = poll_copies(self, self->in, &self->words->placed.count, self->taken_marked, progress);
  if (status != 0) return copy_status(status, PROXYCCL_STAGED_COPY_IN);
  status = wires_turns(self, progress);
  return status == 0 ? proxyccl_mark_progress(base) : status;
}

static int are_resting(const StagedConnection *self) {
  for (uint32_t i = 0; i < self->options.wire_count; ++i)
    if (!shown_load(&self->wires[i].resting)) return 0;
  return 1;
}

/* Returns 1 if all gets are complete and all messages are credited. Then no operation waits in the queue either. */
static int staged_idle(const ProxycclConnection *base) {
  const StagedConnection *self = (const StagedConnection *)base;
  return self->asked == self->got && self->answered == self->noted && self->made == self->freed &&
         word_load(&self->returned) == self->taken && self->signals_stored == self->signals_taken &&
         are_resting(self) && self->out->transport->idle(self->out) && self->in->transport->idle(self->in);
}

static void staged_destroy(ProxycclConnection *base) {
  StagedConnection *self = self_of(base);
  for (uint32_t i = 0; i < self->options.wire_count; ++i) proxyccl_connection_destroy(self->wires[i].link);
  proxyccl_connection_destroy(self->out);
  proxyccl_connection_destroy(self->in);
  free(self);
}

/* -- a wire for other threads --- */

/* Polls a wire. Messages that arrived count as progress, because a wire that only receives has no completions. */
static int wire_poll(ProxycclConnection *base, uint32_t *progress) {
  Wire *wire = (Wire *)base;
  uint32_t made = 0;
  if (take_turn(wire, &made)) counter_set(&wire->looked_ns, now_ns());
  const uint64_t arrived = word_peek(&wire->staged->words->arrived[wire->number].count);
  made += arrived != wire->seen;
  wire->seen = arrived;
  *progress += made;
  return 0;
}

/* Always returns 1: the wire's thread may sleep while requests are outstanding, because the worker also polls the wire.
 * */
static int wire_idle(const ProxycclConnection *base) {
  (void)base;
  return 1;
}

static const ProxycclTransport of_wires = {.name = "wire", .poll = wire_poll, .idle = wire_idle};

ProxycclConnection *proxyccl_staged_wire(ProxycclConnection *base, uint32_t number) {
  return &self_of(base)->wires[number].base;
}

ProxycclConnection *proxyccl_staged_link(ProxycclConnection *base, uint32_t number) {
  return self_of(base)->wires[number].link;
}

void proxyccl_staged_wire_set_thread(ProxycclConnection *base, ProxycclWireThread *thread) {
  Wire *wire = (Wire *)base;
  wire->thread = thread != NULL ? thread : &wire->own;
}

/* -- creation --- */

/* Returns the name of an option that is out of range, or NULL. */
static const char *staged_refused(const ProxycclStagedOptions *options) {
  if (options->wire_count == 0 || options->wire_count > PROXYCCL_STAGED_WIRES) return "wires";
  for (uint32_t i = 0; i < options->wire_count; ++i)
    if (options->wires[i].options == NULL) return "wires";
  if (options->area == 0 || options->area % sizeof(Count) != 0) return "area";
  if (options->device_area == 0) return "device_area";
  if (options->ring_bytes < 2 * sizeof(Header) || options->ring_bytes % PROXYCCL_STAGED_ALIGN != 0) return "ring_bytes";
  if (options->chunk_bytes == 0) return "chunk_bytes";
  if (options->write_targets == NULL) return "write_targets";
  return NULL;
}

static int make_wire(StagedConnection *self, uint32_t number, const ProxycclTransport *transport,
                     const ProxycclRuntimeTable *runtime, const char **refused) {
  Wire *wire = &self->wires[number];
  wire->base.transport = &of_wires;
  wire->thread = &wire->own;
  wire->staged = self;
  wire->number = number;
  wire->resting = 1;
  wire->link = transport->create(self->options.wires[number].options, runtime, refused);
  self->options.wires[number].options = NULL; /* a copy, because the caller's struct is valid only during this call */
  return wire->link != NULL;
}

static ProxycclConnection *create_over(const ProxycclTransport *wire, const ProxycclTransport *transport,
                                       const ProxycclStagedOptions *options, const ProxycclRuntimeTable *runtime,
                                       const char **refused) {
  if ((*refused = staged_refused(options)) != NULL) return NULL;
  if (options->over_rails) wire = &proxyccl_rails_transport;
  const uint64_t ring = options->ring_bytes, first = sizeof(Words), second = first + ring;
  StagedConnection *self = calloc(1, sizeof *self);
  if (self == NULL) return NULL;
  self->queue.base.transport = transport;
  self->queue.issue = issue; /* no key for signals is set, because the peer checks the addresses of signals */
  self->options = *options;
  self->waiting = UINT64_MAX;
  self->words = (Words *)options->area;
  self->sending = (char *)options->area + first;
  self->receiving = (char *)options->area + second;
  self->device_sending =
      (ProxycclMemory){.base = (char *)options->device_area + first, .bytes = ring, .host = self->sending};
  self->device_receiving =
      (ProxycclMemory){.base = (char *)options->device_area + second, .bytes = ring, .host = self->receiving};
  int made = 1;
  for (uint32_t i = 0; i < options->wire_count && made; ++i) made = make_wire(self, i, wire, runtime, refused);
  if (made) {
    self->out = proxyccl_copy_transport.create(&options->copy_out, runtime, refused);
    self->in = proxyccl_copy_transport.create(&options->copy_in, runtime, refused);
  }
  if (!made || self->out == NULL || self->in == NULL) {
    const int error = errno;
    staged_destroy(&self->queue.base);
    errno = error;
    return NULL;
  }
  return &self->queue.base;
}

static const char *staged_error_text(const ProxycclConnection *base) {
  const StagedConnection *self = (const StagedConnection *)base;
  uint32_t failed = 0;
  for (uint32_t i = 0; i < self->options.wire_count; ++i)
    if (shown_load(&self->wires[i].status) != 0) failed = i;
  return proxyccl_connection_error_text(self->wires[failed].link);
}

/* Defines the staged transport `own_name`, whose wires are connections of the transport `wire_name`. */
#define STAGED_OVER(wire_name, own_name)                                                                      \
  static ProxycclConnection *own_name##_create(const void *options, const ProxycclRuntimeTable *runtime,      \
                                               const char **refused) {                                        \
    return create_over(&proxyccl_##wire_name##_transport, &proxyccl_##own_name##_transport, options, runtime, \
                       refused);                                                                              \
  }                                                                                                           \
  const ProxycclTransport proxyccl_##own_name##_transport = {                                                 \
      .name = #own_name,                                                                                      \
      .copies = PROXYCCL_COPIES_OWN,                                                                          \
      .create = own_name##_create,                                                                            \
      .ready = queued_ready,                                                                                  \
      .put = queued_put,                                                                                      \
      .get = queued_get,                                                                                      \
      .put_value = queued_put_value,                                                                          \
      .signal = queued_signal,                                                                                \
      .flush = queued_flush,                                                                                  \
      .release = staged_release,                                                                              \
      .poll = staged_poll,                                                                                    \
      .error_text = staged_error_text,                                                                        \
      .idle = staged_idle,                                                                                    \
      .destroy = staged_destroy,                                                                              \
  };

STAGED_OVER(verbs, staged)
STAGED_OVER(fabric, staged_fabric)
