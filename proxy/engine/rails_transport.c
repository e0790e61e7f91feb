/* Operations wait in a queue of the connection. A long put or get is cut into one part for each rail; every other
 * operation is one part on the home rail. A rail executes its parts in order.
 *
 * Parts on different rails have no order, so a part waits while a part on another rail is outstanding that it must
 * follow (must_follow).
 *
 * After a failure of one rail, recover() moves the rail's incomplete parts to the other rail, in stages. restore() uses
 * the failed rail again once both ranks have connected their queue pairs of the rail. */
#include "rails_transport.h"

#include <stddef.h>
#include <stdlib.h>

#include "clock.h"
#include "operations.h"
#include "transports.h"
#include "verbs_transport.h"

enum { RAILS = PROXYCCL_RAILS, PARTS = PROXYCCL_RAIL_PARTS };
enum { WR_FLUSH_ERR = 5 }; /* an ibv_wc_status */

typedef struct {
  ProxycclConnection *wire;
  uint64_t first, last; /* the rail's outstanding parts are numbered from `first` to `last` - 1 */
  uint64_t counted;     /* the value that the peer's word `executed` gets from the requests posted so far */
  uint64_t hurried;     /* number of parts before the newest flush for which the wire hurries */
  uint64_t answered;    /* the word of that flush, which nothing reads */
  uint32_t speed;
  ProxycclVerbsOptions options;
  Operation parts[PARTS];
  uint64_t numbers[PARTS]; /* the parts' numbers among all parts of the connection, from 1 */
} Rail;

/* The stages of the recovery from a failed rail, and of its restoration. */
typedef enum {
  BOTH_UP,
  ONE_UP,   /* the failed rail's queue pair is free, so that another thread may connect it again */
  JOINING,  /* this rank's queue pair is connected; the peer must be told so, and must have connected its own */
  TRYING,   /* a request on the failed rail must be executed before the rail is used */
  LEAVING,  /* the request has completed with an error; the peer's queue pair must stop before both are connected */
  STOPPING, /* this rank's queue pair must still get into its error state, so that it executes no late requests */
  TELLING,  /* the peer must be told that this rank's queue pair is in its error state */
  WAITING,  /* the peer's queue pair must get into its error state; then the peer executes no outstanding part */
  READING,  /* the peer's semaphore words are read, which show what was executed */
  MOVING    /* the parts that were not executed are posted on the other rail */
} Stage;

typedef struct {
  QueuedConnection queue;
  uint32_t home;
  uint64_t cut;  /* least bytes of a put or get that is cut */
  uint64_t made; /* number of parts that were posted */
  ProxycclRailsOptions options;
  ProxycclRailsMail *mail;
  const ProxycclRuntimeTable *runtime;
  Stage stage;
  uint32_t failed;   /* number of the failed rail */
  int status;        /* why it failed */
  uint64_t failures; /* number of failures so far */
  uint32_t losses;   /* number of these failures before which both rails were in use */
  uint64_t next;     /* in the stages READING and MOVING: number of the failed rail's next part */
  int asked;         /* in the stages JOINING, LEAVING and READING: whether the stage's requests are posted */
  uint64_t finished; /* 1 when the requests of the stage READING or TRYING are complete */
  uint64_t until_ns; /* time at which the recovery is given up */
  uint64_t state;    /* pairing rail-state: what proxyccl_rails_state returns, packed */
  /* Pairing rail-change, written by another thread: number of the failure after which the queue pair was stopped, or
   * connected again. */
  uint64_t stopped, connected;
  Rail rails[RAILS];
} RailsConnection;

static RailsConnection *self_of(ProxycclConnection *base) { return (RailsConnection *)base; }

/* The fields of `state`. All statuses of `verbs` fit into 17 bits; 7 bits remain for the number of losses. */
enum {
  STATE_DOWN = 0xf,
  STATE_STOPPING = 0x10,
  STATE_FREE = 0x20,
  STATE_STATUS_SHIFT = 8,
  STATE_STATUS = 0x1ffff,
  STATE_LOSSES_SHIFT = 25,
  STATE_FAILURES_SHIFT = 32
};

static void enter(RailsConnection *self, Stage stage) {
  self->stage = stage;
  self->asked = 0;
  word_store(&self->state, self->failures << STATE_FAILURES_SHIFT | (uint64_t)self->status << STATE_STATUS_SHIFT |
                               self->losses << STATE_LOSSES_SHIFT | (stage == ONE_UP ? STATE_FREE : 0) |
                               (stage == STOPPING ? STATE_STOPPING : 0) | (stage == BOTH_UP ? 0 : self->failed + 1));
}

/* Returns whether operations are posted in a stage, in the later stages on the rail that is up. */
static int is_usable(const RailsConnection *self) { return self->stage < STOPPING; }

static int is_busy(const Rail *rail) { return rail->first != rail->last; }

static int overlap(uint64_t a, uint64_t a_bytes, uint64_t b, uint64_t b_bytes) {
  return a < b + b_bytes && b < a + a_bytes;
}

/* Returns whether an operation must follow an earlier part, in that the two could not be exchanged without being
 * noticed. Signals, and values on which a peer may wait, show that all earlier operations are complete. */
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
  for (uint32_t i = 0; i < RAILS; ++i) {
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

static uint64_t key_of(uint64_t keys, uint32_t rail) { return keys >> (32 * rail) & 0xffffffffu; }

/* Hands an operation to the wire of a rail that has room. */
static int send(Rail *rail, uint32_t number, const Operation *operation) {
  const ProxycclTransport *transport = rail->wire->transport;
  const ProxycclMemory src = {
      .base = (char *)operation->source, .bytes = operation->bytes, .key = key_of(operation->source_key, number)};
  const ProxycclMemory dst = {.base = (char *)operation->destination,
                              .bytes = operation->bytes,
                              .key = key_of(operation->destination_key, number)};
  if (operation->kind == PUT) return transport->put(rail->wire, &dst, 0, &src, 0, operation->bytes);
  if (operation->kind == GET) return transport->get(rail->wire, &dst, 0, &src, 0, operation->bytes);
  if (operation->kind == VALUE)
    return transport->put_value(rail->wire, &dst, 0, operation->value, (uint32_t)operation->bytes);
  return transport->signal(rail->wire, (uint64_t *)operation->destination, operation->value, operation->source);
}

/* Writes a word of the peer's ProxycclRailsMail. */
static int write_mail(RailsConnection *self, uint32_t by, uint64_t offset, uint64_t value) {
  const Operation word = {.kind = VALUE,
                          .value = value,
                          .bytes = sizeof value,
                          .destination = self->options.peer_mail + offset,
                          .destination_key = self->options.peer_mail_keys};
  return send(&self->rails[by], by, &word);
}

/* Has the peer's memory show that all parts of the rail so far are executed, when they are. */
static int count(RailsConnection *self, uint32_t number) {
  Rail *rail = &self->rails[number];
  if (rail->counted == rail->last || self->mail == NULL) return 0;
  rail->counted = rail->last;
  return write_mail(self, number, offsetof(ProxycclRailsMail, executed) + number * sizeof(uint64_t), rail->last);
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

/* Cuts a put or get into one part for each rail. Returns a status, and sets *posted if the parts were posted. */
static int post_cut(RailsConnection *self, const Operation *whole, int *posted) {
  Operation parts[RAILS];
  uint64_t speeds = 0, begin = 0, left = whole->bytes;
  for (uint32_t i = 0; i < RAILS; ++i) speeds += self->rails[i].speed;
  for (uint32_t i = 0; i < RAILS; ++i) {
    const uint64_t share = left / speeds * self->rails[i].speed / PROXYCCL_RAILS_ALIGN * PROXYCCL_RAILS_ALIGN;
    parts[i] = *whole;
    operation_advance(&parts[i], begin);
    parts[i].bytes = i + 1 == RAILS ? left : share;
    if (!has_room(&self->rails[i]) || waits_for_others(self, i, &parts[i])) return 0;
    speeds -= self->rails[i].speed;
    begin += parts[i].bytes;
    left -= parts[i].bytes;
  }
  *posted = 1;
  for (uint32_t i = 0; i < RAILS; ++i) {
    if (parts[i].bytes == 0) continue;
    const int status = post(self, i, &parts[i]);
    if (status != 0) return status;
  }
  return 0;
}

/* Returns the number of the last part before the first incomplete part. */
static uint64_t completed(const RailsConnection *self) {
  uint64_t next = self->made + 1;
  for (uint32_t i = 0; i < RAILS; ++i) {
    const Rail *rail = &self->rails[i];
    if (is_busy(rail) && rail->numbers[rail->first % PARTS] < next) next = rail->numbers[rail->first % PARTS];
  }
  return next - 1;
}

/* Returns whether a rail has failed. */
static int has_failed(const RailsConnection *self, uint32_t rail) {
  return self->stage != BOTH_UP && rail == self->failed;
}

/* Makes the wires of `fabric` ask for the completion of all parts so far, because an operation or a thread waits. */
static int hurry(RailsConnection *self) {
  int status = 0;
  for (uint32_t i = 0; i < RAILS && self->options.over_fabric && status == 0; ++i) {
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
  if (!is_usable(self)) return 0;
  for (Operation *operation; (operation = operations_next(&self->queue.operations)) != NULL;) {
    int status = 0, posted = 0;
    if (operation->kind == FLUSH) {
      posted = flushes_push(&self->queue.flushes, operation, self->made, completed(self));
      if (operation->flushed != &base->progress.completed) status = hurry(self);
    } else if (operation->bytes >= self->cut) {
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
  /* ibv_wc_status: LOC_QP_OP_ERR, WR_FLUSH_ERR, RETRY_EXC_ERR, RNR_RETRY_EXC_ERR, FATAL_ERR, RESP_TIMEOUT_ERR,
   * GENERAL_ERR */
  const uint32_t statuses = 1 << 2 | 1 << 5 | 1 << 12 | 1 << 13 | 1 << 19 | 1 << 20 | 1 << 21;
  return status >> 5 == PROXYCCL_VERBS_COMPLETION >> 5 && (statuses >> status % 32 & 1);
}

/* Enters a stage after a failure of a rail. */
static void enter_after_failure(RailsConnection *self, uint32_t rail, int status, Stage stage) {
  ++self->failures;
  self->losses += self->stage == BOTH_UP;
  self->failed = rail;
  self->status = status;
  self->until_ns = now_ns() + self->options.limit_ns;
  enter(self, stage);
}

/* Begins the recovery from a rail's failure. Returns the status if the connection can't do without the rail. */
static int begin_recovery(RailsConnection *self, uint32_t rail, int status, Stage stage) {
  if (self->mail == NULL || has_failed(self, 1 - rail) || !is_of_link(status)) return status;
  enter_after_failure(self, rail, status, stage);
  return 0;
}

/* Tells the peer that this rank's queue pair of the failed rail is in its error state. */
static int tell_down(RailsConnection *self, uint32_t by) {
  return write_mail(self, by, offsetof(ProxycclRailsMail, down) + self->failed * sizeof(uint64_t), self->failures);
}

/* Reads the words of the failed rail's signals, and the rail's count of executed parts. Sets `finished` when the last
 * is read. */
static int read_words(RailsConnection *self, uint32_t by) {
  const Rail *failed = &self->rails[self->failed];
  Rail *other = &self->rails[by];
  for (; self->next != failed->last; ++self->next) {
    const Operation *part = &failed->parts[self->next % PARTS];
    if (part->kind != SIGNAL) continue;
    if (other->wire->transport->ready(other->wire) == 0) return 0;
    const Operation word = {.kind = GET,
                            .source = part->destination,
                            .source_key = (uint64_t)other->options.signal_rkey << (32 * by),
                            .destination = (uintptr_t)&self->mail->words[self->next % PARTS],
                            .destination_key = self->options.mail_keys,
                            .bytes = sizeof part->value};
    const int status = send(other, by, &word);
    if (status != 0) return status;
  }
  if (other->wire->transport->ready(other->wire) == 0) return 0;
  self->asked = 1;
  const Operation executed = {
      .kind = GET,
      .source = self->options.peer_mail + offsetof(ProxycclRailsMail, executed) + self->failed * sizeof(uint64_t),
      .source_key = self->options.peer_mail_keys,
      .destination = (uintptr_t)&self->mail->peer_executed,
      .destination_key = self->options.mail_keys,
      .bytes = sizeof(uint64_t)};
  const int status = send(other, by, &executed);
  return status == 0 ? other->wire->transport->flush(other->wire, &self->finished, 1) : status;
}

/* Removes the failed rail's parts that the peer has according to its count and to its signals: a queue pair executes
 * its requests in order. The peer does not know of the parts after them, so that posting these parts again is not
 * noticed. */
static void remove_executed(RailsConnection *self) {
  Rail *failed = &self->rails[self->failed];
  const uint64_t executed = self->mail->peer_executed;
  if (executed > failed->first && executed <= failed->last) failed->first = executed;
  for (uint64_t number = failed->first; number != failed->last; ++number) {
    const Operation *part = &failed->parts[number % PARTS];
    if (part->kind == SIGNAL && self->mail->words[number % PARTS] >= part->value) failed->first = number + 1;
  }
}

/* Posts the failed rail's parts on the other rail. They stay in the failed rail's list until all are complete, so that
 * flushes wait for them. */
static int move(RailsConnection *self, uint32_t by) {
  Rail *failed = &self->rails[self->failed], *other = &self->rails[by];
  for (; self->next != failed->last; ++self->next) {
    if (!has_room(other)) return 0;
    const int status = post(self, by, &failed->parts[self->next % PARTS]);
    if (status != 0) return status;
  }
  if (is_busy(failed) && is_busy(other)) return 0;
  failed->first = failed->last;
  self->home = by;
  self->cut = UINT64_MAX;
  enter(self, ONE_UP);
  return 0;
}

/* Advances the recovery. Returns a status if it fails. */
static int recover(RailsConnection *self, uint32_t *progress) {
  const uint32_t by = 1 - self->failed;
  Rail *failed = &self->rails[self->failed], *other = &self->rails[by];
  int is_stopped;
  if (now_ns() > self->until_ns) return self->status;
  ++*progress; /* the thread must not sleep long meanwhile */
  switch (self->stage) {
    case STOPPING: /* the other thread, or a completion with an error, shows the error state */
      is_stopped = word_load(&self->stopped) == self->failures;
      if (failed->wire->transport->poll(failed->wire, progress) < PROXYCCL_VERBS_COMPLETION && !is_stopped) return 0;
      enter(self, TELLING); /* fall through */
    case TELLING:
      if (other->wire->transport->ready(other->wire) == 0) return 0;
      enter(self, WAITING);
      return tell_down(self, by);
    case WAITING:
      if (word_load(&self->mail->down[self->failed]) < self->failures) return 0;
      remove_complete(failed);
      self->next = failed->first;
      self->finished = 0;
      enter(self, READING);
      return read_words(self, by);
    case READING:
      if (word_load(&self->finished) == 0) return self->asked ? 0 : read_words(self, by);
      remove_executed(self);
      self->next = failed->first;
      enter(self, MOVING);
      return move(self, by);
    case MOVING:
      return move(self, by);
    default:
      return 0;
  }
}

/* Makes a new connection over the failed rail's queue pair. Returns 0 if there is no memory for it. */
static int renew(RailsConnection *self) {
  Rail *failed = &self->rails[self->failed];
  const char *refused;
  ProxycclConnection *wire = proxyccl_connection_create("verbs", &failed->options, self->runtime, &refused);
  if (wire == NULL) return 0;
  proxyccl_connection_destroy(failed->wire);
  failed->wire = wire;
  wire->progress.completed = failed->last;
  return 1;
}

/* Tells the peer that this rank has connected its queue pair of the failed rail. The peer is told over both rails, one
 * after the other: the second request shows whether the failed rail works. */
static int tell_up(RailsConnection *self, uint32_t by) {
  return write_mail(self, by, offsetof(ProxycclRailsMail, up), self->failures);
}

/* Stops the restoration, because a request on the failed rail has failed. If no completion shows the failure, the queue
 * pair may not be in its error state yet. */
static void leave(RailsConnection *self, int status) {
  enter_after_failure(self, self->failed, status, status < PROXYCCL_VERBS_COMPLETION ? STOPPING : LEAVING);
}

/* Advances the restoration of the failed rail. Returns a status if the other rail fails. */
static int restore(RailsConnection *self, uint32_t *progress) {
  const uint32_t by = 1 - self->failed;
  ProxycclConnection *failed = self->rails[self->failed].wire, *other = self->rails[by].wire;
  int status;
  if ((self->stage == JOINING || self->stage == LEAVING) && !self->asked) {
    if (other->transport->ready(other) == 0) return 0;
    self->asked = 1;
    return self->stage == JOINING ? tell_up(self, by) : tell_down(self, by);
  }
  switch (self->stage) {
    case ONE_UP:
      if (word_load(&self->connected) == self->failures && renew(self)) enter(self, JOINING);
      return 0;
    case JOINING:
      if (word_load(&self->mail->up) < self->failures) return 0;
      enter(self, TRYING);
      self->finished = 0;
      status = tell_up(self, self->failed);
      if (status == 0) status = failed->transport->flush(failed, &self->finished, 1);
      if (status != 0) leave(self, status);
      return 0;
    case TRYING:
      status = failed->transport->poll(failed, progress);
      if (status != 0) {
        leave(self, status);
      } else if (word_load(&self->finished) == 1) {
        self->home = self->options.home;
        self->cut = self->options.cut;
        enter(self, BOTH_UP);
      }
      return 0;
    default: /* LEAVING */
      if (word_load(&self->mail->down[self->failed]) >= self->failures) enter(self, ONE_UP);
      return 0;
  }
}

/* Polls the rails that are up, and begins a recovery if one fails here or at the peer. */
static int poll_rails(RailsConnection *self, uint32_t *progress) {
  const uint32_t before = *progress;
  for (uint32_t i = 0; i < RAILS; ++i) {
    Rail *rail = &self->rails[i];
    if (has_failed(self, i)) continue;
    int status = rail->wire->transport->poll(rail->wire, progress);
    remove_complete(rail); /* a wire may complete parts and then fail in one poll */
    if (status != 0) status = begin_recovery(self, i, status, TELLING);
    if (status != 0) return status;
  }
  for (uint32_t i = 0; self->mail != NULL && i < RAILS; ++i) {
    if (word_load(&self->mail->down[i]) <= self->failures || has_failed(self, 1 - i)) continue;
    begin_recovery(self, i, PROXYCCL_VERBS_COMPLETION + WR_FLUSH_ERR, STOPPING);
  }
  if (self->stage == BOTH_UP) return 0;
  if (is_usable(self)) return restore(self, progress);
  /* The words of the recovery follow the data that was posted before them. */
  if (*progress != before) self->until_ns = now_ns() + self->options.limit_ns;
  return recover(self, progress);
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
  if (!is_usable(self)) return 0;
  for (uint32_t i = 0; i < RAILS; ++i) {
    const ProxycclConnection *wire = self->rails[i].wire;
    if (!has_failed(self, i) && !wire->transport->idle(wire)) return 0;
  }
  return 1;
}

void proxyccl_rails_state(const ProxycclConnection *base, ProxycclRailsState *state) {
  const uint64_t word = word_load(&((const RailsConnection *)base)->state);
  state->failures = word >> STATE_FAILURES_SHIFT;
  state->down = word & STATE_DOWN;
  state->is_stopping = (word & STATE_STOPPING) != 0;
  state->is_free = (word & STATE_FREE) != 0;
  state->status = (int)(word >> STATE_STATUS_SHIFT & STATE_STATUS);
  state->losses = (uint32_t)word >> STATE_LOSSES_SHIFT;
}

void proxyccl_rails_stopped(ProxycclConnection *base, uint64_t failure) {
  word_store(&self_of(base)->stopped, failure);
}

void proxyccl_rails_reconnected(ProxycclConnection *base, uint64_t failure) {
  word_store(&self_of(base)->connected, failure);
}

static const char *rails_error_text(const ProxycclConnection *base) {
  const RailsConnection *self = (const RailsConnection *)base;
  const char *text = "";
  for (uint32_t i = 0; i < RAILS && *text == 0; ++i) text = proxyccl_connection_error_text(self->rails[i].wire);
  return text;
}

static void rails_destroy(ProxycclConnection *base) {
  RailsConnection *self = self_of(base);
  for (uint32_t i = 0; i < RAILS; ++i) proxyccl_connection_destroy(self->rails[i].wire);
  free(self);
}

static ProxycclConnection *rails_create(const void *given, const ProxycclRuntimeTable *runtime, const char **refused) {
  const ProxycclRailsOptions *options = given;
  for (uint32_t i = 0; i < RAILS; ++i)
    if (options->speeds[i] == 0) *refused = "speeds";
  if (options->home >= RAILS) *refused = "home";
  if (options->cut == 0) *refused = "cut";
  if (options->mail != 0 && options->limit_ns == 0) *refused = "limit_ns";
  if (*refused != NULL) return NULL;
  RailsConnection *self = calloc(1, sizeof *self);
  if (self == NULL) return NULL;
  self->queue.base.transport = &proxyccl_rails_transport;
  self->queue.issue = issue;
  self->home = options->home;
  self->cut = options->cut;
  self->options = *options;
  self->runtime = runtime;
  self->mail = (ProxycclRailsMail *)options->mail;
  for (uint32_t i = 0; i < RAILS; ++i) {
    Rail *rail = &self->rails[i];
    rail->speed = options->speeds[i];
    const void *given_options = options->options[i];
    if (!options->over_fabric) {
      rail->options = *(const ProxycclVerbsOptions *)given_options;
      given_options = &rail->options;
    }
    rail->wire = proxyccl_connection_create(options->over_fabric ? "fabric" : "verbs", given_options, runtime, refused);
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
    .put = queued_put,
    .get = queued_get,
    .put_value = queued_put_value,
    .signal = queued_signal,
    .flush = queued_flush,
    .poll = rails_poll,
    .error_text = rails_error_text,
    .idle = rails_idle,
    .destroy = rails_destroy,
};
