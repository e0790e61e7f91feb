/* Operations wait in a queue of the connection. A long put or get is cut into one part for each rail that is up; every
 * other operation is one part on the home rail. A rail executes its parts in order.
 *
 * Parts on different rails have no order, so a part waits while a part on another rail is outstanding that it must
 * follow (must_follow).
 *
 * After a failure of a rail, recover() moves the rail's incomplete parts to another rail, in stages. restore() uses the
 * failed rail again once both ranks have connected their queue pairs of the rail. Each rail has its own stage, so
 * several rails may be down, and a rail may fail during the recovery from another rail's failure. */
#include "rails_transport.h"

#include <errno.h>
#include <stddef.h>
#include <stdlib.h>

#include "clock.h"
#include "fabric_transport.h"
#include "operations.h"
#include "transports.h"
#include "verbs_transport.h"

enum { PARTS = PROXYCCL_RAIL_PARTS };
enum { WR_FLUSH_ERR = 5 }; /* an ibv_wc_status */
enum {
  SILENT_NS = 1000000000,      /* TCP sends a lost packet again 0.2, 0.6 and 1.4 s after the first time */
  SLOWEST_BYTES_PER_MS = 16384 /* a rail over `fabric` that is slower may be taken for failed */
};

/* The stages of a rail: in use, its restoration after a failure, and its recovery from the failure. */
typedef enum {
  UP,
  DOWN,     /* the rail's queue pair is free, so that another thread may connect it again */
  JOINING,  /* this rank's queue pair is connected; the peer must be told so, and must have connected its own */
  TRYING,   /* a request on the rail must be executed before the rail is used */
  LEAVING,  /* the request has completed with an error; the peer's queue pair must stop before both are connected */
  STOPPING, /* this rank's queue pair must still get into its error state, so that it executes no late requests; over
               `fabric`, the rail's endpoint must be closed */
  WAITING,  /* the peer must be told that the queue pair is in its error state, and its own queue pair must get there;
               then the peer executes no outstanding part */
  READING,  /* the peer's semaphore words are read, which show what was executed */
  MOVING    /* the parts that were not executed are posted on another rail */
} Stage;

typedef struct {
  ProxycclConnection *wire;
  uint64_t first, last; /* the rail's outstanding parts are numbered from `first` to `last` - 1 */
  uint64_t counted;     /* the value that the peer's word `executed` gets from the requests posted so far */
  uint64_t hurried;     /* number of parts before the newest flush for which the wire hurries */
  uint64_t answered;    /* the word of that flush, which nothing reads */
  uint32_t speed;
  Stage stage;
  int status;        /* why the rail failed last */
  uint32_t losses;   /* number of failures before which the rail was in use */
  uint64_t failures; /* number of failures so far */
  uint64_t turn;     /* number of the last failure among the failures of all rails */
  int told;          /* whether the peer has been told of the stage, by a rail that has not failed since */
  uint64_t next;     /* in the stages READING and MOVING: number of the rail's next part */
  uint64_t asked; /* in the stages READING, TRYING and UP: the value that `finished` gets; 0 until all is requested */
  uint64_t finished; /* the value of the last flush of requests for a recovery or a trial on this rail */
  uint64_t until_ns; /* time at which the recovery is given up */
  /* For is_silent: `first` at the last poll; the time from which the rail is silent, 0 if it is not; and whether the
   * peer has answered a request on another rail since. */
  uint64_t seen, silent_ns;
  int is_answered;
  uint64_t state; /* pairing rail-state: what proxyccl_rails_state returns, packed */
  /* Pairing rail-change, written by another thread: number of the failure after which the queue pair was stopped, or
   * connected again, or of the failure that the rail has because its adapter is down. */
  uint64_t stopped, connected, fallen;
  const void *options;     /* as ProxycclRailsOptions.options */
  Operation parts[PARTS];  /* a part's keys are addresses of its keys on all rails */
  uint64_t numbers[PARTS]; /* the parts' numbers among all parts of the connection, from 1 */
} Rail;

typedef struct {
  QueuedConnection queue;
  uint32_t count; /* number of rails */
  uint32_t home;  /* number of the rail that carries short operations now */
  int recovers;   /* whether a rail recovers; all operations wait meanwhile */
  uint64_t made;  /* number of parts that were posted */
  uint64_t turns; /* number of failures of all rails */
  uint64_t asks;  /* number of flushes of requests for recoveries and trials */
  ProxycclRailsOptions options;
  ProxycclRailsMail *mail;
  const ProxycclRuntimeTable *runtime;
  uint64_t signal_keys[PROXYCCL_RAILS]; /* the keys of the peer's semaphore words */
  Rail rails[];
} RailsConnection;

static RailsConnection *self_of(ProxycclConnection *base) { return (RailsConnection *)base; }

/* The fields of `state`. The statuses of failed rails fit into 17 bits, over `fabric` without PROXYCCL_FABRIC_FAILED; 7
 * bits remain for the number of losses. */
enum {
  STATE_DOWN = 1,
  STATE_STOPPING = 2,
  STATE_FREE = 4,
  STATE_STATUS_SHIFT = 8,
  STATE_STATUS = 0x1ffff,
  STATE_LOSSES_SHIFT = 25,
  STATE_FAILURES_SHIFT = 32
};

static int is_up(const RailsConnection *self, uint32_t rail) { return self->rails[rail].stage == UP; }

/* Returns the number of the first rail that is up, from rail `first` on in a circle; `count` if none is up. Rails
 * become up only while none recovers, so a recovery changes to another rail only if the rail that it uses fails. */
static uint32_t find_up(const RailsConnection *self, uint32_t first) {
  for (uint32_t i = 0; i < self->count; ++i)
    if (is_up(self, (first + i) % self->count)) return (first + i) % self->count;
  return self->count;
}

static int is_recovering(const Rail *rail) { return rail->stage >= STOPPING; }

static void enter(RailsConnection *self, Rail *rail, Stage stage) {
  rail->stage = stage;
  if (stage == JOINING || stage == LEAVING || stage == WAITING) rail->told = 0;
  rail->asked = 0;
  word_store(&rail->state, rail->failures << STATE_FAILURES_SHIFT |
                               (uint64_t)(rail->status & STATE_STATUS) << STATE_STATUS_SHIFT |
                               rail->losses << STATE_LOSSES_SHIFT | (stage == UP ? 0 : STATE_DOWN) |
                               (stage == STOPPING ? STATE_STOPPING : 0) | (stage == DOWN ? STATE_FREE : 0));
  self->home = find_up(self, self->options.home);
  self->recovers = 0;
  for (uint32_t i = 0; i < self->count; ++i) {
    self->recovers |= is_recovering(&self->rails[i]);
    self->rails[i].silent_ns = 0; /* the rail over which is_silent asks may be another one now */
  }
}

static int is_busy(const Rail *rail) { return rail->first != rail->last; }

static int overlap(uint64_t a, uint64_t a_bytes, uint64_t b, uint64_t b_bytes) {
  return a < b + b_bytes && b < a + a_bytes;
}

/* Returns whether an operation must not overtake an earlier part, because one of the two ranks could notice the changed
 * order. Signals, and values on which a peer may wait, show that all earlier operations are complete. */
static int must_follow(const Operation *later, const Operation *earlier) {
  if (later->kind != PUT && later->kind != GET) return 1;
  if (earlier->kind == SIGNAL) return 0;
  const int gets = (later->kind == GET) + (earlier->kind == GET);
  /* A put writes the peer's memory and reads this rank's memory; a get does the opposite. */
  const int writes_peer = gets < 2, writes_own = gets > 0;
  const uint64_t later_peer = later->kind == GET ? later->source : later->destination;
  const uint64_t earlier_peer = earlier->kind == GET ? earlier->source : earlier->destination;
  const uint64_t later_own = later->kind == GET ? later->destination : later->source;
  const uint64_t earlier_own = earlier->kind == GET ? earlier->destination : earlier->source;
  if (writes_peer && overlap(later_peer, later->bytes, earlier_peer, earlier->bytes)) return 1;
  return writes_own && earlier->kind != VALUE && overlap(later_own, later->bytes, earlier_own, earlier->bytes);
}

/* Returns whether an operation must wait for a part on a rail other than `rail`. */
static int waits_for_others(const RailsConnection *self, uint32_t rail, const Operation *operation) {
  for (uint32_t i = 0; i < self->count; ++i) {
    const Rail *other = &self->rails[i];
    if (i == rail) continue;
    for (uint64_t number = other->first; number != other->last; ++number)
      if (must_follow(operation, &other->parts[number % PARTS])) return 1;
  }
  return 0;
}

/* A part takes at most four operations of a wire: over `verbs` a value, a count before and after it, and a flush; over
 * `fabric` the operation, its flush and the flush of `hurry`. */
static int has_room(const Rail *rail) {
  return rail->last - rail->first < PARTS && rail->wire->transport->ready(rail->wire) > 1;
}

static uint64_t key_of(uint64_t keys, uint32_t rail) { return ((const uint64_t *)keys)[rail]; }

/* Hands an operation to the wire of a rail that has room. */
static int send(Rail *rail, uint32_t number, const Operation *operation) {
  const ProxycclTransport *transport = rail->wire->transport;
  if (operation->kind == SIGNAL)
    return transport->signal(rail->wire, (uint64_t *)operation->destination, operation->value, operation->source);
  const ProxycclMemory dst = {.base = (char *)operation->destination,
                              .bytes = operation->bytes,
                              .key = key_of(operation->destination_key, number)};
  if (operation->kind == VALUE)
    return transport->put_value(rail->wire, &dst, 0, operation->value, (uint32_t)operation->bytes);
  const ProxycclMemory src = {
      .base = (char *)operation->source, .bytes = operation->bytes, .key = key_of(operation->source_key, number)};
  if (operation->kind == PUT) return transport->put(rail->wire, &dst, 0, &src, 0, operation->bytes);
  return transport->get(rail->wire, &dst, 0, &src, 0, operation->bytes);
}

/* Writes a rail's word of an array in the peer's ProxycclRailsMail, over rail `by`. */
static int write_mail(RailsConnection *self, uint32_t by, size_t words, uint32_t rail, uint64_t value) {
  const Operation word = {.kind = VALUE,
                          .value = value,
                          .bytes = sizeof value,
                          .destination = self->options.peer_mail + words + rail * sizeof value,
                          .destination_key = (uintptr_t)self->options.peer_mail_keys};
  return send(&self->rails[by], by, &word);
}

/* Has the peer's memory show that all parts of the rail so far are executed, when they are. */
static int count(RailsConnection *self, uint32_t number) {
  Rail *rail = &self->rails[number];
  if (rail->counted == rail->last || self->mail == NULL) return 0;
  rail->counted = rail->last;
  return write_mail(self, number, offsetof(ProxycclRailsMail, executed), number, rail->last);
}

/* Posts an operation as a part on a rail that has room. A peer that sees a value may overwrite the data of earlier
 * parts, which must then not be put again. So the peer's memory shows a count before and after the value.
 *
 * The flush stores the number of complete parts. Its word is the one of which `fabric` assumes that no thread waits for
 * it, so that the wire does not ask for a completion of each part. */
static int post(RailsConnection *self, uint32_t number, const Operation *operation) {
  Rail *rail = &self->rails[number];
  ProxycclConnection *wire = rail->wire;
  int status = operation->kind == VALUE ? count(self, number) : 0;
  rail->numbers[rail->last % PARTS] = ++self->made;
  rail->parts[rail->last++ % PARTS] = *operation;
  if (status == 0) status = send(rail, number, operation);
  if (status == 0) status = wire->transport->flush(wire, &wire->progress.completed, rail->last);
  return status == 0 && operation->kind == VALUE ? count(self, number) : status;
}

/* Cuts a put or get into one part for each rail that is up. Returns a status, and sets *posted if the parts were
 * posted. */
static int post_cut(RailsConnection *self, const Operation *whole, int *posted) {
  Operation parts[PROXYCCL_RAILS];
  uint64_t speeds = 0, begin = 0, left = whole->bytes;
  for (uint32_t i = 0; i < self->count; ++i) speeds += is_up(self, i) ? self->rails[i].speed : 0;
  for (uint32_t i = 0; i < self->count; ++i) {
    if (!is_up(self, i)) continue;
    const uint64_t speed = self->rails[i].speed;
    const uint64_t share = left / speeds * speed / PROXYCCL_RAILS_ALIGN * PROXYCCL_RAILS_ALIGN;
    parts[i] = *whole;
    operation_advance(&parts[i], begin);
    parts[i].bytes = speeds == speed ? left : share;
    if (!has_room(&self->rails[i]) || waits_for_others(self, i, &parts[i])) return 0;
    speeds -= speed;
    begin += parts[i].bytes;
    left -= parts[i].bytes;
  }
  *posted = 1;
  for (uint32_t i = 0; i < self->count; ++i) {
    if (!is_up(self, i) || parts[i].bytes == 0) continue;
    const int status = post(self, i, &parts[i]);
    if (status != 0) return status;
  }
  return 0;
}

/* Returns the number of the last part before the first incomplete part. */
static uint64_t completed(const RailsConnection *self) {
  uint64_t next = self->made + 1;
  for (uint32_t i = 0; i < self->count; ++i) {
    const Rail *rail = &self->rails[i];
    if (is_busy(rail) && rail->numbers[rail->first % PARTS] < next) next = rail->numbers[rail->first % PARTS];
  }
  return next - 1;
}

/* Makes the wires of `fabric` ask for the completion of all parts so far, because an operation or a thread waits. */
static int hurry(RailsConnection *self) {
  int status = 0;
  for (uint32_t i = 0; i < self->count && self->options.over_fabric && status == 0; ++i) {
    Rail *rail = &self->rails[i];
    if (!is_busy(rail) || rail->hurried == rail->last) continue;
    rail->hurried = rail->last;
    status = rail->wire->transport->flush(rail->wire, &rail->answered, rail->last);
  }
  return status;
}

/* Posts operations in order until one must wait. */
static int issue(ProxycclConnection *base) {
  RailsConnection *self = self_of(base);
  if (self->recovers) return 0;
  for (Operation *operation; (operation = operations_next(&self->queue.operations)) != NULL;) {
    int status = 0, posted = 0;
    if (operation->kind == FLUSH) {
      posted = flushes_push(&self->queue.flushes, operation, self->made, completed(self));
      if (operation->flushed != &base->progress.completed) status = hurry(self);
    } else if (operation->bytes >= self->options.cut) {
      status = post_cut(self, operation, &posted);
    } else if (has_room(&self->rails[self->home]) && !waits_for_others(self, self->home, operation)) {
      posted = 1;
      status = post(self, self->home, operation);
    }
    if (status != 0) return status;
    if (!posted) return hurry(self);
    operations_pop(&self->queue.operations);
  }
  return 0;
}

static void remove_complete(Rail *rail) { rail->first = rail->wire->progress.completed; }

/* Returns whether a status shows that the adapter, the link or the queue pair failed, and not that the request was
 * wrong. */
static int is_of_link(int status) {
  static const int errors[] = {EIO,      EPIPE,     ENETDOWN,  ENETUNREACH,  ENETRESET, ECONNABORTED, ECONNRESET,
                               ENOTCONN, ESHUTDOWN, ETIMEDOUT, ECONNREFUSED, EHOSTDOWN, ECANCELED,    EHOSTUNREACH};
  for (size_t i = 0; i < sizeof errors / sizeof *errors; ++i)
    if (status == PROXYCCL_FABRIC_FAILED + errors[i]) return 1;
  /* ibv_wc_status: LOC_QP_OP_ERR, WR_FLUSH_ERR, RETRY_EXC_ERR, RNR_RETRY_EXC_ERR, FATAL_ERR, RESP_TIMEOUT_ERR,
   * GENERAL_ERR */
  const uint32_t statuses = 1 << 2 | 1 << 5 | 1 << 12 | 1 << 13 | 1 << 19 | 1 << 20 | 1 << 21;
  return status >> 5 == PROXYCCL_VERBS_COMPLETION >> 5 && (statuses >> status % 32 & 1);
}

/* Enters a stage after a failure of a rail. Words for the peer that other rails have posted on this rail may be lost,
 * as may the answers to requests, so all are posted again. */
static void enter_after_failure(RailsConnection *self, Rail *failed, int status, Stage stage) {
  ++failed->failures;
  failed->losses += failed->stage == UP;
  failed->turn = ++self->turns;
  failed->status = status;
  failed->until_ns = now_ns() + self->options.limit_ns;
  enter(self, failed, stage);
  for (uint32_t i = 0; i < self->count; ++i) {
    self->rails[i].told = 0;
    if (self->rails[i].stage == READING) enter(self, &self->rails[i], WAITING);
  }
}

/* Returns a rail's first stage after a failure with this status: `stopped` if a completion with an error shows that the
 * queue pair is in its error state. An endpoint of libfabric must be closed after any failure. */
static Stage stage_after(const RailsConnection *self, int status, Stage stopped) {
  return self->options.over_fabric || status < PROXYCCL_VERBS_COMPLETION ? STOPPING : stopped;
}

/* Begins the recovery from a rail's failure. Returns the status if the connection can't do without the rail. */
static int begin_recovery(RailsConnection *self, uint32_t rail, int status, Stage stage) {
  const uint32_t other = find_up(self, rail + 1);
  if (self->mail == NULL || other == rail || other == self->count || !is_of_link(status)) return status;
  enter_after_failure(self, &self->rails[rail], status, stage);
  return 0;
}

/* Tells the peer that this rank's queue pair of a rail that is not up has been in its error state, and in the stage
 * JOINING that it is connected again. The peer may execute a word late that was posted on a rail that has failed since.
 * So a rail joins only when no rail recovers: then the peer's queue pairs of all failed rails have stopped, and no word
 * of an earlier failure can replace a word of a later one. */
static int tell(RailsConnection *self, uint32_t number) {
  Rail *rail = &self->rails[number];
  const uint32_t by = find_up(self, 0);
  if (rail->told || rail->stage == STOPPING || rail->stage == TRYING) return 0;
  if (rail->stage == JOINING && self->recovers) return 0;
  if (self->rails[by].wire->transport->ready(self->rails[by].wire) == 0) return 0;
  rail->told = 1;
  const int status = write_mail(self, by, offsetof(ProxycclRailsMail, down), number, rail->failures);
  if (status != 0 || rail->stage != JOINING) return status;
  return write_mail(self, by, offsetof(ProxycclRailsMail, up), number, rail->failures);
}

/* Flushes requests on a rail. The rail's word `finished` gets the value `asked` when they are complete. */
static int ask(RailsConnection *self, Rail *by, uint64_t *asked) {
  *asked = ++self->asks;
  return by->wire->transport->flush(by->wire, &by->finished, *asked);
}

/* Reads the words of the failed rail's signals, and the rail's count of executed parts. */
static int read_words(RailsConnection *self, uint32_t number, uint32_t by) {
  Rail *failed = &self->rails[number], *other = &self->rails[by];
  for (; failed->next != failed->last; ++failed->next) {
    const Operation *part = &failed->parts[failed->next % PARTS];
    if (part->kind != SIGNAL) continue;
    if (other->wire->transport->ready(other->wire) == 0) return 0;
    const Operation word = {.kind = GET,
                            .source = part->destination,
                            .source_key = (uintptr_t)self->signal_keys,
                            .destination = (uintptr_t)&self->mail->words[failed->next % PARTS],
                            .destination_key = (uintptr_t)self->options.mail_keys,
                            .bytes = sizeof part->value};
    const int status = send(other, by, &word);
    if (status != 0) return status;
  }
  if (other->wire->transport->ready(other->wire) == 0) return 0;
  const Operation executed = {
      .kind = GET,
      .source = self->options.peer_mail + offsetof(ProxycclRailsMail, executed) + number * sizeof(uint64_t),
      .source_key = (uintptr_t)self->options.peer_mail_keys,
      .destination = (uintptr_t)&self->mail->peer_executed,
      .destination_key = (uintptr_t)self->options.mail_keys,
      .bytes = sizeof(uint64_t)};
  const int status = send(other, by, &executed);
  return status == 0 ? ask(self, other, &failed->asked) : status;
}

/* Removes the failed rail's parts that were executed at the peer, as its count and its signals show, because a queue
 * pair executes its requests in order. No count and no signal tells the peer of the later parts, so it can't notice
 * that they are posted again. */
static void remove_executed(RailsConnection *self, Rail *failed) {
  const uint64_t executed = self->mail->peer_executed;
  if (executed > failed->first && executed <= failed->last) failed->first = executed;
  for (uint64_t number = failed->first; number != failed->last; ++number) {
    const Operation *part = &failed->parts[number % PARTS];
    if (part->kind == SIGNAL && self->mail->words[number % PARTS] >= part->value) failed->first = number + 1;
  }
}

/* Posts the failed rail's parts on another rail. The parts stay in the failed rail's list until all are complete, so
 * that flushes wait for these parts. */
static int move(RailsConnection *self, Rail *failed, uint32_t by) {
  for (; failed->next != failed->last; ++failed->next) {
    if (!has_room(&self->rails[by])) return 0;
    const int status = post(self, by, &failed->parts[failed->next % PARTS]);
    if (status != 0) return status;
  }
  if (is_busy(failed) && is_busy(&self->rails[by])) return 0;
  failed->first = failed->last;
  enter(self, failed, DOWN);
  return 0;
}

/* Returns whether no rail that is recovering failed later. A rail that fails may hold parts that were moved to it from
 * another failed rail. The parts must be moved on before the other rail moves its next parts. */
static int is_last_failed(const RailsConnection *self, const Rail *rail) {
  for (uint32_t i = 0; i < self->count; ++i)
    if (is_recovering(&self->rails[i]) && self->rails[i].turn > rail->turn) return 0;
  return 1;
}

/* Advances the recovery from a rail's failure. Returns a status if it fails. */
static int recover(RailsConnection *self, uint32_t number, uint32_t *progress) {
  const uint32_t by = find_up(self, 0);
  Rail *failed = &self->rails[number];
  if (now_ns() > failed->until_ns) return failed->status;
  ++*progress; /* the thread must not sleep long meanwhile */
  switch (failed->stage) {
    case STOPPING: /* the other thread, or a completion with an error, shows the error state */
      if (word_load(&failed->stopped) == failed->failures ||
          (!self->options.over_fabric &&
           failed->wire->transport->poll(failed->wire, progress) >= PROXYCCL_VERBS_COMPLETION))
        enter(self, failed, WAITING);
      return 0;
    case WAITING:
      if (!failed->told || word_load(&self->mail->down[number]) < failed->failures || !is_last_failed(self, failed))
        return 0;
      remove_complete(failed);
      failed->next = failed->first;
      enter(self, failed, READING); /* fall through */
    case READING:
      if (failed->asked == 0) return read_words(self, number, by);
      if (word_load(&self->rails[by].finished) < failed->asked) return 0;
      remove_executed(self, failed);
      failed->next = failed->first;
      enter(self, failed, MOVING); /* fall through */
    case MOVING:
      return is_last_failed(self, failed) ? move(self, failed, by) : 0;
    default:
      return 0;
  }
}

static const char *wires_of(const RailsConnection *self) { return self->options.over_fabric ? "fabric" : "verbs"; }

/* Makes a new connection over a failed rail's queue pair. Returns 0 if there is no memory for it. */
static int renew(const RailsConnection *self, Rail *failed) {
  const char *refused;
  ProxycclConnection *wire = proxyccl_connection_create(wires_of(self), failed->options, self->runtime, &refused);
  if (wire == NULL) return 0;
  proxyccl_connection_destroy(failed->wire);
  failed->wire = wire;
  wire->progress.completed = failed->last;
  return 1;
}

/* Tries a rail that both ranks have connected: the peer is told so again, over this rail. */
static int try(RailsConnection *self, uint32_t number) {
  Rail *rail = &self->rails[number];
  enter(self, rail, TRYING);
  const int status = write_mail(self, number, offsetof(ProxycclRailsMail, up), number, rail->failures);
  return status == 0 ? ask(self, rail, &rail->asked) : status;
}

/* Advances the restoration of a failed rail. */
static void restore(RailsConnection *self, uint32_t number, uint32_t *progress) {
  Rail *failed = &self->rails[number];
  int status = 0;
  switch (failed->stage) {
    case DOWN:
      if (word_load(&failed->connected) == failed->failures && renew(self, failed)) enter(self, failed, JOINING);
      return;
    case JOINING:
      if (failed->told && word_load(&self->mail->up[number]) >= failed->failures) status = try(self, number);
      break;
    case TRYING:
      status = failed->wire->transport->poll(failed->wire, progress);
      if (status == 0 && word_load(&failed->finished) >= failed->asked && !self->recovers) enter(self, failed, UP);
      break;
    case LEAVING:
      if (failed->told && word_load(&self->mail->down[number]) >= failed->failures) enter(self, failed, DOWN);
      return;
    default:
      return;
  }
  /* If no completion shows a failure, the queue pair may not be in its error state yet. */
  if (status != 0) enter_after_failure(self, failed, status, stage_after(self, status, LEAVING));
}

/* Returns whether a rail over `fabric`, which is not the only one that is up, makes no progress although the peer
 * answers over another rail. After SILENT_NS without a completion, and the time that the outstanding bytes may take,
 * the rank makes a request over the other rail. The peer's proxy may have been paused until then, so the rail has
 * failed only if it makes no progress for SILENT_NS after the answer. */
static int is_silent(RailsConnection *self, uint32_t number) {
  Rail *rail = &self->rails[number];
  const uint32_t other = find_up(self, number + 1);
  if (!is_busy(rail) || rail->first != rail->seen) rail->silent_ns = 0;
  if (!is_busy(rail)) return 0;
  const uint64_t now = now_ns();
  if (rail->silent_ns == 0) {
    rail->seen = rail->first;
    rail->silent_ns = now;
    rail->asked = 0;
    rail->is_answered = 0;
  }
  if (now - rail->silent_ns < SILENT_NS) return 0;
  if (rail->is_answered) return 1;
  if (rail->asked == 0) {
    uint64_t bytes = 0;
    for (uint64_t i = rail->first; i != rail->last; ++i) bytes += rail->parts[i % PARTS].bytes;
    const uint64_t limit_ns = SILENT_NS + bytes / SLOWEST_BYTES_PER_MS * 1000000;
    if (now - rail->silent_ns < limit_ns || !has_room(&self->rails[other])) return 0;
    /* Writes a word that only the other rail writes, so that a late write replaces no newer value. If the other rail
     * fails, its next poll shows the status. */
    write_mail(self, other, offsetof(ProxycclRailsMail, executed), other, self->rails[other].counted);
    ask(self, &self->rails[other], &rail->asked);
  } else if (word_load(&self->rails[other].finished) >= rail->asked) {
    rail->is_answered = 1;
    rail->silent_ns = now;
  }
  return 0;
}

/* Polls the rails that are up, and begins a recovery if one fails here or at the peer. */
static int poll_rails(RailsConnection *self, uint32_t *progress) {
  const uint32_t before = *progress;
  int status = 0;
  for (uint32_t i = 0; i < self->count && status == 0; ++i) {
    Rail *rail = &self->rails[i];
    if (!is_up(self, i)) continue;
    status = rail->wire->transport->poll(rail->wire, progress);
    remove_complete(rail); /* a wire may complete parts and then fail in one poll */
    /* TCP goes on by itself when the only link has a carrier again. */
    if (status == 0 && self->options.over_fabric && self->mail != NULL && find_up(self, i + 1) != i) {
      if (word_load(&rail->fallen) > rail->failures)
        status = PROXYCCL_FABRIC_FAILED + ENETDOWN;
      else if (is_silent(self, i))
        status = PROXYCCL_FABRIC_FAILED + ETIMEDOUT;
    }
    if (status != 0) status = begin_recovery(self, i, status, stage_after(self, status, WAITING));
  }
  if (self->mail == NULL || status != 0) return status;
  const int progressed = *progress != before;
  const int ended_by_peer =
      self->options.over_fabric ? PROXYCCL_FABRIC_FAILED + ECONNRESET : PROXYCCL_VERBS_COMPLETION + WR_FLUSH_ERR;
  for (uint32_t i = 0; i < self->count && status == 0; ++i) {
    Rail *rail = &self->rails[i];
    if (word_load(&self->mail->down[i]) > rail->failures)
      begin_recovery(self, i, ended_by_peer, STOPPING); /* later, if no other rail is up */
    if (rail->stage == UP) continue;
    status = tell(self, i);
    if (status == 0) restore(self, i, progress);
    /* The words of the recovery follow the data that was posted before them. */
    if (progressed) rail->until_ns = now_ns() + self->options.limit_ns;
    if (status == 0 && is_recovering(rail)) status = recover(self, i, progress);
  }
  return status;
}

static int rails_poll(ProxycclConnection *base, uint32_t *progress) {
  RailsConnection *self = self_of(base);
  int status = poll_rails(self, progress);
  if (status != 0) return status;
  flushes_complete(&self->queue.flushes, completed(self));
  status = issue(base);
  return status == 0 ? proxyccl_mark_progress(base) : status;
}

/* Operations wait in the queue only while a part is outstanding. */
static int rails_idle(const ProxycclConnection *base) {
  const RailsConnection *self = (const RailsConnection *)base;
  if (self->recovers) return 0;
  for (uint32_t i = 0; i < self->count; ++i) {
    const ProxycclConnection *wire = self->rails[i].wire;
    if (is_up(self, i) && !wire->transport->idle(wire)) return 0;
  }
  return 1;
}

void proxyccl_rails_state(const ProxycclConnection *base, uint32_t rail, ProxycclRailsState *state) {
  const RailsConnection *self = (const RailsConnection *)base;
  const uint64_t word = word_load(&self->rails[rail].state);
  state->failures = word >> STATE_FAILURES_SHIFT;
  state->is_down = (word & STATE_DOWN) != 0;
  state->is_stopping = (word & STATE_STOPPING) != 0;
  state->is_free = (word & STATE_FREE) != 0;
  state->status =
      (int)(word >> STATE_STATUS_SHIFT & STATE_STATUS) + (self->options.over_fabric ? PROXYCCL_FABRIC_FAILED : 0);
  state->losses = (uint32_t)word >> STATE_LOSSES_SHIFT;
}

void proxyccl_rails_stopped(ProxycclConnection *base, uint32_t rail, uint64_t failure) {
  word_store(&self_of(base)->rails[rail].stopped, failure);
}

void proxyccl_rails_reconnected(ProxycclConnection *base, uint32_t rail, uint64_t failure) {
  word_store(&self_of(base)->rails[rail].connected, failure);
}

void proxyccl_rails_fell(ProxycclConnection *base, uint32_t rail, uint64_t failure) {
  word_store(&self_of(base)->rails[rail].fallen, failure);
}

/* The queue holds the address of a memory's keys on all rails in place of a key. */
static ProxycclMemory with_keys(const ProxycclMemory *memory) {
  ProxycclMemory made = *memory;
  made.key = (uintptr_t)memory->keys;
  return made;
}

static int rails_put(ProxycclConnection *base, const ProxycclMemory *dst, uint64_t dst_offset,
                     const ProxycclMemory *src, uint64_t src_offset, uint64_t bytes) {
  const ProxycclMemory to = with_keys(dst), from = with_keys(src);
  return queued_put(base, &to, dst_offset, &from, src_offset, bytes);
}

static int rails_get(ProxycclConnection *base, const ProxycclMemory *dst, uint64_t dst_offset,
                     const ProxycclMemory *src, uint64_t src_offset, uint64_t bytes) {
  const ProxycclMemory to = with_keys(dst), from = with_keys(src);
  return queued_get(base, &to, dst_offset, &from, src_offset, bytes);
}

static int rails_put_value(ProxycclConnection *base, const ProxycclMemory *dst, uint64_t dst_offset, uint64_t value,
                           uint32_t bytes) {
  const ProxycclMemory to = with_keys(dst);
  return queued_put_value(base, &to, dst_offset, value, bytes);
}

static const char *rails_error_text(const ProxycclConnection *base) {
  const RailsConnection *self = (const RailsConnection *)base;
  const char *text = "";
  for (uint32_t i = 0; i < self->count && *text == 0; ++i) text = proxyccl_connection_error_text(self->rails[i].wire);
  return text;
}

static void rails_destroy(ProxycclConnection *base) {
  RailsConnection *self = self_of(base);
  for (uint32_t i = 0; i < self->count; ++i) proxyccl_connection_destroy(self->rails[i].wire);
  free(self);
}

static ProxycclConnection *rails_create(const void *given, const ProxycclRuntimeTable *runtime, const char **refused) {
  const ProxycclRailsOptions *options = given;
  if (options->count == 0 || options->count > PROXYCCL_RAILS) *refused = "count";
  for (uint32_t i = 0; i < options->count && *refused == NULL; ++i)
    if (options->speeds[i] == 0) *refused = "speeds";
  if (options->home >= options->count) *refused = "home";
  if (options->cut == 0) *refused = "cut";
  if (options->mail != 0 && options->limit_ns == 0) *refused = "limit_ns";
  if (*refused != NULL) return NULL;
  RailsConnection *self = calloc(1, sizeof *self + options->count * sizeof(Rail));
  if (self == NULL) return NULL;
  self->queue.base.transport = &proxyccl_rails_transport;
  self->queue.issue = issue;
  self->home = options->home;
  self->count = options->count;
  self->options = *options;
  self->runtime = runtime;
  self->mail = (ProxycclRailsMail *)options->mail;
  for (uint32_t i = 0; i < self->count; ++i) {
    Rail *rail = &self->rails[i];
    rail->speed = options->speeds[i];
    rail->options = options->options[i];
    self->signal_keys[i] = options->over_fabric ? ((const ProxycclFabricOptions *)rail->options)->signal_key
                                                : ((const ProxycclVerbsOptions *)rail->options)->signal_rkey;
    rail->wire = proxyccl_connection_create(wires_of(self), rail->options, runtime, refused);
    if (rail->wire == NULL) {
      rails_destroy(&self->queue.base);
      return NULL;
    }
  }
  return &self->queue.base;
}

const ProxycclTransport proxyccl_rails_transport = {
    .name = "rails",
    .create = rails_create,
    .ready = queued_ready,
    .put = rails_put,
    .get = rails_get,
    .put_value = rails_put_value,
    .signal = queued_signal,
    .flush = queued_flush,
    .poll = rails_poll,
    .error_text = rails_error_text,
    .idle = rails_idle,
    .destroy = rails_destroy,
};
