/* Operations wait in a queue of the connection. A long put or get is cut into one part for each rail; every other
 * operation is one part on the home rail. A rail executes its parts in order.
 *
 * Parts on different rails have no order, so a part waits while a part on another rail is outstanding that it must
 * follow (must_follow).
 *
 * After a failure of one rail, recover() moves the rail's incomplete parts to the other rail, in stages. */
#include "rails_transport.h"

#include <stdlib.h>

#include "clock.h"
#include "operations.h"
#include "transports.h"
#include "verbs_transport.h"

enum { RAILS = PROXYCCL_RAILS, PARTS = PROXYCCL_RAIL_PARTS };
enum { WR_FLUSH_ERR = 5 }; /* an ibv_wc_status */

#define LONGEST_NS 30000000000ull /* longest recovery */

typedef struct {
  ProxycclConnection *wire;
  uint64_t first, last; /* the rail's outstanding parts are numbered from `first` to `last` - 1 */
  uint64_t done;        /* number of complete parts */
  uint64_t marked;      /* number of parts before the newest flush */
  uint64_t hurried;     /* number of parts before the newest flush for which the wire hurries */
  uint64_t answered;    /* the word of that flush, which nothing reads */
  uint32_t speed;
  uint32_t signal_rkey;
  Operation parts[PARTS];
  uint64_t numbers[PARTS]; /* the parts' numbers among all parts of the connection, from 1 */
} Rail;

/* The stages of the recovery from a failed rail. */
typedef enum {
  BOTH_UP,
  STOPPING, /* this rank's queue pair must still get into its error state, so that it executes no late requests */
  TELLING,  /* the peer must be told that this rank's queue pair is in its error state */
  WAITING,  /* the peer's queue pair must get into its error state; then the peer executes no outstanding part */
  READING,  /* the peer's semaphore words are read, which show what was executed */
  MOVING,   /* the parts that were not executed are posted on the other rail */
  ONE_UP
} Stage;

typedef struct {
  QueuedConnection queue;
  uint32_t home;
  uint64_t cut;  /* least bytes of a put or get that is cut */
  uint64_t made; /* number of parts that were posted */
  ProxycclRailsOptions options;
  ProxycclRailsMail *mail;
  Stage stage;
  uint32_t failed;   /* number of the failed rail */
  int status;        /* why it failed */
  uint64_t next;     /* in the stages READING and MOVING: number of the failed rail's next part */
  int asked;         /* in the stages STOPPING and READING: whether all requests of the stage are posted */
  uint64_t read;     /* 1 when the words are read */
  uint64_t until_ns; /* time at which the recovery is given up */
  Rail rails[RAILS];
} RailsConnection;

static RailsConnection *self_of(ProxycclConnection *base) { return (RailsConnection *)base; }

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

static int has_room(const Rail *rail) {
  return rail->last - rail->first < PARTS && rail->wire->transport->ready(rail->wire) > 0;
}

/* Makes the wire tell when all parts so far are complete. The word is the one of which `fabric` assumes that no thread
 * waits for it, so that the wire does not ask for a completion of each part. */
static int mark(Rail *rail) {
  rail->marked = rail->last;
  return rail->wire->transport->flush(rail->wire, &rail->wire->progress.completed, rail->marked);
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

/* Posts an operation as a part on a rail that has room. */
static int post(RailsConnection *self, uint32_t number, const Operation *operation) {
  Rail *rail = &self->rails[number];
  rail->numbers[rail->last % PARTS] = ++self->made;
  rail->parts[rail->last++ % PARTS] = *operation;
  return send(rail, number, operation);
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
    int status = post(self, i, &parts[i]);
    if (status == 0 && i != self->home) status = mark(&self->rails[i]); /* a signal may wait for this part */
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

/* Makes the wires of `fabric` ask for the completion of all parts so far, because an operation or a thread waits. A
 * part takes at most three operations of a wire: its own, a mark and this flush. */
static int hurry(RailsConnection *self) {
  int status = 0;
  for (uint32_t i = 0; i < RAILS && self->options.over_fabric && status == 0; ++i) {
    Rail *rail = &self->rails[i];
    if (!is_busy(rail) || rail->hurried == rail->last) continue;
    rail->hurried = rail->last;
    if (rail->marked != rail->last) status = mark(rail);
    if (status == 0) status = rail->wire->transport->flush(rail->wire, &rail->answered, rail->last);
  }
  return status;
}

/* Posts operations in order until one must wait. */
static int issue(ProxycclConnection *base) {
  RailsConnection *self = self_of(base);
  if (self->stage != BOTH_UP && self->stage != ONE_UP) return 0;
  for (Operation *operation; (operation = operations_next(&self->queue.operations)) != NULL;) {
    int status = 0, posted = 0;
    if (operation->kind == FLUSH) {
      posted = flushes_push(&self->queue.flushes, operation, self->made, completed(self));
      for (uint32_t i = 0; i < RAILS && status == 0; ++i)
        if (self->rails[i].marked != self->rails[i].last && !has_failed(self, i)) status = mark(&self->rails[i]);
      if (status == 0 && operation->flushed != &base->progress.completed) status = hurry(self);
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

/* Polls a rail's wire, and removes complete parts. */
static int poll_rail(Rail *rail, uint32_t *progress) {
  const int status = rail->wire->transport->poll(rail->wire, progress);
  if (status != 0) return status;
  if (rail->wire->progress.completed > rail->done) rail->done = rail->wire->progress.completed;
  rail->first = rail->done;
  return is_busy(rail) && rail->done == rail->marked ? mark(rail) : 0;
}

/* Returns whether a status shows that the adapter, the link or the queue pair failed, and not that the request was
 * wrong. */
static int is_of_link(int status) {
  /* ibv_wc_status: LOC_QP_OP_ERR, WR_FLUSH_ERR, RETRY_EXC_ERR, RNR_RETRY_EXC_ERR, FATAL_ERR, RESP_TIMEOUT_ERR,
   * GENERAL_ERR */
  static const int statuses[] = {2, 5, 12, 13, 19, 20, 21};
  for (size_t i = 0; i < sizeof statuses / sizeof *statuses; ++i)
    if (status == PROXYCCL_VERBS_COMPLETION + statuses[i]) return 1;
  return 0;
}

/* Begins the recovery from a rail's failure. Returns the status if the connection can't do without the rail. */
static int begin_recovery(RailsConnection *self, uint32_t rail, int status, Stage stage) {
  if (self->mail == NULL || self->stage != BOTH_UP || !is_of_link(status)) return status;
  self->failed = rail;
  self->status = status;
  self->stage = stage;
  self->until_ns = now_ns() + LONGEST_NS;
  return 0;
}

/* Puts the queue pair of the failed rail into its error state by a request with a key that does not exist. */
static int stop(RailsConnection *self) {
  const Operation wrong = {.kind = PUT,
                           .source = (uintptr_t)self->mail,
                           .destination = self->options.peer_mail,
                           .bytes = 1,
                           .source_key = ~0ull,
                           .destination_key = self->options.peer_mail_keys};
  Rail *rail = &self->rails[self->failed];
  if (self->asked || rail->wire->transport->ready(rail->wire) == 0) return 0;
  self->asked = 1;
  return send(rail, self->failed, &wrong);
}

/* Tells the peer that this rank's queue pair of the failed rail is in its error state. */
static int tell(RailsConnection *self, uint32_t by) {
  const Operation told = {.kind = VALUE,
                          .value = 1,
                          .bytes = sizeof self->mail->down[0],
                          .destination = self->options.peer_mail + self->failed * sizeof self->mail->down[0],
                          .destination_key = self->options.peer_mail_keys};
  return send(&self->rails[by], by, &told);
}

/* Reads the words of the failed rail's signals. Sets `read` when the last is read. */
static int read_words(RailsConnection *self, uint32_t by) {
  const Rail *failed = &self->rails[self->failed];
  Rail *other = &self->rails[by];
  for (; self->next != failed->last; ++self->next) {
    const Operation *part = &failed->parts[self->next % PARTS];
    if (part->kind != SIGNAL) continue;
    if (other->wire->transport->ready(other->wire) == 0) return 0;
    const Operation word = {.kind = GET,
                            .source = part->destination,
                            .source_key = (uint64_t)other->signal_rkey << (32 * by),
                            .destination = (uintptr_t)&self->mail->words[self->next % PARTS],
                            .destination_key = self->options.mail_keys,
                            .bytes = sizeof part->value};
    const int status = send(other, by, &word);
    if (status != 0) return status;
  }
  if (other->wire->transport->ready(other->wire) == 0) return 0;
  self->asked = 1;
  return other->wire->transport->flush(other->wire, &self->read, 1);
}

/* Removes the failed rail's parts up to its last signal that the peer has: a queue pair executes its requests in order.
 * The peer does not know of the parts after this signal, so that posting them again is not noticed. */
static void remove_executed(RailsConnection *self) {
  Rail *failed = &self->rails[self->failed];
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
  if (is_busy(other)) return 0;
  failed->first = failed->last;
  self->home = by;
  self->cut = UINT64_MAX;
  self->stage = ONE_UP;
  return 0;
}

/* Advances the recovery. Returns a status if it fails. */
static int recover(RailsConnection *self, uint32_t *progress) {
  const uint32_t by = 1 - self->failed;
  Rail *failed = &self->rails[self->failed], *other = &self->rails[by];
  if (now_ns() > self->until_ns) return self->status;
  ++*progress; /* the thread must not sleep long meanwhile */
  switch (self->stage) {
    case STOPPING:
      if (failed->wire->transport->poll(failed->wire, progress) < PROXYCCL_VERBS_COMPLETION) return stop(self);
      self->stage = TELLING; /* fall through */
    case TELLING:
      if (other->wire->transport->ready(other->wire) == 0) return 0;
      self->stage = WAITING;
      return tell(self, by);
    case WAITING:
      if (word_load(&self->mail->down[self->failed]) == 0) return 0;
      failed->first = failed->done;
      self->next = failed->first;
      self->asked = 0;
      self->stage = READING;
      return read_words(self, by);
    case READING:
      if (word_load(&self->read) == 0) return self->asked ? 0 : read_words(self, by);
      remove_executed(self);
      self->next = failed->first;
      self->stage = MOVING;
      return move(self, by);
    case MOVING:
      return move(self, by);
    default:
      return 0;
  }
}

/* Polls the rails that are up, and begins a recovery if one fails here or at the peer. */
static int poll_rails(RailsConnection *self, uint32_t *progress) {
  for (uint32_t i = 0; i < RAILS; ++i) {
    if (has_failed(self, i)) continue;
    int status = poll_rail(&self->rails[i], progress);
    if (status != 0) status = begin_recovery(self, i, status, TELLING);
    if (status != 0) return status;
  }
  for (uint32_t i = 0; self->mail != NULL && self->stage == BOTH_UP && i < RAILS; ++i) {
    if (word_load(&self->mail->down[i]) == 0) continue;
    begin_recovery(self, i, PROXYCCL_VERBS_COMPLETION + WR_FLUSH_ERR, STOPPING);
  }
  return self->stage == BOTH_UP || self->stage == ONE_UP ? 0 : recover(self, progress);
}

static int rails_poll(ProxycclConnection *base, uint32_t *progress) {
  RailsConnection *self = self_of(base);
  int status = poll_rails(self, progress);
  if (status != 0) return status;
  flushes_complete(&self->queue.flushes, completed(self));
  status = issue(base);
  return status == 0 ? proxyccl_mark_progress(base) : status;
}

static int rails_signal(ProxycclConnection *base, uint64_t *remote, uint64_t value, uint64_t previous) {
  RailsConnection *self = self_of(base);
  Operation *operation = operations_push(&self->queue.operations, SIGNAL);
  operation->destination = (uintptr_t)remote;
  operation->bytes = 0;
  operation->value = value;
  operation->source = previous;
  return issue(base);
}

/* Operations wait in the queue only while a part is outstanding. */
static int rails_idle(const ProxycclConnection *base) {
  const RailsConnection *self = (const RailsConnection *)base;
  if (self->stage != BOTH_UP && self->stage != ONE_UP) return 0;
  for (uint32_t i = 0; i < RAILS; ++i)
    if (is_busy(&self->rails[i])) return 0;
  return 1;
}

int proxyccl_rails_failed(const ProxycclConnection *base, int *status) {
  const RailsConnection *self = (const RailsConnection *)base;
  if (base->transport != &proxyccl_rails_transport || self->stage == BOTH_UP) return -1;
  *status = self->status;
  return (int)self->failed;
}

static const char *rails_error_text(const ProxycclConnection *base) {
  const RailsConnection *self = (const RailsConnection *)base;
  const char *text = "";
  for (uint32_t i = 0; i < RAILS && *text == 0; ++i) text = proxyccl_connection_error_text(self->rails[i].wire);
  return text;
}

static void rails_destroy(ProxycclConnection *base) {
  RailsConnection *self = self_of(base);
  for (uint32_t i = 0; i < RAILS; ++i)
    if (self->rails[i].wire != NULL) proxyccl_connection_destroy(self->rails[i].wire);
  free(self);
}

static ProxycclConnection *rails_create(const void *given, const ProxycclRuntimeTable *runtime, const char **refused) {
  const ProxycclRailsOptions *options = given;
  for (uint32_t i = 0; i < RAILS; ++i)
    if (options->speeds[i] == 0) *refused = "speeds";
  if (options->home >= RAILS) *refused = "home";
  if (options->cut == 0) *refused = "cut";
  if (*refused != NULL) return NULL;
  RailsConnection *self = calloc(1, sizeof *self);
  if (self == NULL) return NULL;
  self->queue.base.transport = &proxyccl_rails_transport;
  self->queue.issue = issue;
  self->home = options->home;
  self->cut = options->cut;
  self->options = *options;
  self->mail = (ProxycclRailsMail *)options->mail;
  for (uint32_t i = 0; i < RAILS; ++i) {
    Rail *rail = &self->rails[i];
    rail->speed = options->speeds[i];
    if (!options->over_fabric) rail->signal_rkey = ((const ProxycclVerbsOptions *)options->options[i])->signal_rkey;
    const char *transport = options->over_fabric ? "fabric" : "verbs";
    rail->wire = proxyccl_connection_create(transport, options->options[i], runtime, refused);
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
    .signal = rails_signal,
    .flush = queued_flush,
    .poll = rails_poll,
    .error_text = rails_error_text,
    .idle = rails_idle,
    .destroy = rails_destroy,
};
