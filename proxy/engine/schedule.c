/* Runs schedules: each worker advances the steps of its own connections. See schedule.h. */
#include "schedule.h"

#include <errno.h>
#include <stdlib.h>

#include "clock.h"
#include "worker.h"

enum {
  POLLS_PER_CLOCK = 16,    /* in a schedule without progress, number of polls between two readings of the clock */
  OFFSET_BITS = 32,        /* number of bits of a post's offset */
  MOST_RECEIVES = 1 << 30, /* maximum number of receives of a stage */
  SEQUENCE_SHIFT = OFFSET_BITS + PROXYCCL_MEMORY_BITS,
  SHOWN_AFTER_NS = 1000000 /* after this time without progress, the wait is published for observers */
};

typedef enum { POST, MEET, SEND, RECEIVE } StepKind;
typedef enum { WAITING, ISSUED, COMPLETE } StepState;

typedef struct Step {
  StepKind kind;
  StepState state;
  uint32_t channel;
  const Channel *bundle; /* for an issued send in a bundle: the channel whose flush word reports the bundle's
                            completion; otherwise NULL */
  uint64_t flushed;      /* value of the flush word of `bundle` once the bundle is complete */
  uint64_t value; /* for a complete MEET step: the peer's post; for a send or receive: value of the channel's word at
                     completion */
  union {
    ProxycclSchedulePost post;
    struct {
      ProxycclScheduleSend send;
      const struct Step *meeting; /* a send's step that waits for the receiver's post; NULL if the send needs no post */
      const struct Step *before;  /* the previous send on the same channel, or NULL */
    };
    ProxycclScheduleReceive receive;
  };
} Step;

struct Schedule {
  uint32_t number;
  uint32_t joined; /* the stage that counts peers that have posted, or PROXYCCL_NO_ID */
  uint32_t count;
  Step steps[]; /* the steps, in the order in which workers advance them: POST, MEET, SEND, RECEIVE */
};

/* -- the table of schedules --- */

static int is_memory(uint32_t first, uint64_t offset) {
  return first < PROXYCCL_MAX_MEMORIES && offset >> OFFSET_BITS < PROXYCCL_MAX_MEMORIES - first;
}

static int is_stage(uint32_t stage) { return stage == PROXYCCL_NO_ID || stage < PROXYCCL_SCHEDULE_STAGES; }

static int is_accepted(const ProxycclScheduleSteps *given) {
  int accepted = is_stage(given->joined);
  for (uint32_t i = 0; i < given->post_count; ++i) {
    const ProxycclSchedulePost *post = &given->posts[i];
    accepted &= post->channel < PROXYCCL_MAX_CHANNELS && is_memory(post->memory, post->offset);
  }
  for (uint32_t i = 0; i < given->send_count; ++i) {
    const ProxycclScheduleSend *send = &given->sends[i];
    const int posted = send->post_channel != PROXYCCL_NO_ID;
    accepted &= send->channel < PROXYCCL_MAX_CHANNELS && is_memory(send->src_memory, 0);
    accepted &= !posted || send->post_channel < PROXYCCL_MAX_CHANNELS;
    accepted &= send->dst_memory == PROXYCCL_NO_ID ? posted : is_memory(send->dst_memory, 0);
    accepted &= is_stage(send->stage) && is_stage(send->gate_stage);
  }
  for (uint32_t i = 0; i < given->receive_count; ++i) {
    const ProxycclScheduleReceive *receive = &given->receives[i];
    accepted &= receive->channel < PROXYCCL_MAX_CHANNELS;
    accepted &= is_stage(receive->stage);
  }
  return accepted;
}

static Step *add_step(Schedule *schedule, StepKind kind, uint32_t channel) {
  Step *step = &schedule->steps[schedule->count++];
  step->kind = kind;
  step->channel = channel;
  return step;
}

/* Returns the MEET step of a channel, which waits for the peer's post; the first call for a channel adds the step. */
static const Step *meeting_on(Schedule *schedule, uint32_t channel) {
  for (uint32_t i = 0; i < schedule->count; ++i)
    if (schedule->steps[i].kind == MEET && schedule->steps[i].channel == channel) return &schedule->steps[i];
  return add_step(schedule, MEET, channel);
}

/* Returns the last send that was added on a channel, or NULL. */
static const Step *last_send_on(const Schedule *schedule, uint32_t channel) {
  for (uint32_t i = schedule->count; i-- > 0;)
    if (schedule->steps[i].kind == SEND && schedule->steps[i].channel == channel) return &schedule->steps[i];
  return NULL;
}

static void add_steps(Schedule *schedule, const ProxycclScheduleSteps *given) {
  for (uint32_t i = 0; i < given->post_count; ++i)
    add_step(schedule, POST, given->posts[i].channel)->post = given->posts[i];
  for (uint32_t i = 0; i < given->send_count; ++i)
    if (given->sends[i].post_channel != PROXYCCL_NO_ID) meeting_on(schedule, given->sends[i].post_channel);
  for (uint32_t i = 0; i < given->send_count; ++i) {
    const ProxycclScheduleSend *send = &given->sends[i];
    const Step *before = last_send_on(schedule, send->channel);
    Step *step = add_step(schedule, SEND, send->channel);
    step->send = *send;
    step->before = before;
    if (send->post_channel != PROXYCCL_NO_ID) step->meeting = meeting_on(schedule, send->post_channel);
  }
  for (uint32_t i = 0; i < given->receive_count; ++i)
    add_step(schedule, RECEIVE, given->receives[i].channel)->receive = given->receives[i];
}

void proxyccl_service_set_schedule_words(ProxycclService *service, ProxycclScheduleWords *words,
                                         const uint64_t *semaphores) {
  service->words = words;
  service->semaphores = semaphores;
}

int proxyccl_service_add_schedule(ProxycclService *service, uint32_t number, const ProxycclScheduleSteps *given) {
  if (service->words == NULL || number == 0 || number >= PROXYCCL_MAX_SCHEDULES || !is_accepted(given)) return EINVAL;
  if (service->schedules[number] != NULL) return EEXIST;
  const size_t most = (size_t)given->post_count + 2 * (size_t)given->send_count + given->receive_count;
  Schedule *schedule = calloc(1, sizeof *schedule + most * sizeof(Step));
  if (schedule == NULL) return ENOMEM;
  schedule->number = number;
  schedule->joined = given->joined;
  add_steps(schedule, given);
  schedule_publish(&service->schedules[number], schedule);
  return 0;
}

int proxyccl_service_remove_schedule(ProxycclService *service, uint32_t number) {
  if (number >= PROXYCCL_MAX_SCHEDULES) return EINVAL;
  if (parts_left(&service->parts) != 0 && service->current == number) return EBUSY;
  free(service->schedules[number]);
  service->schedules[number] = NULL;
  return 0;
}

/* -- words --- */

void proxyccl_schedule_words_end_waits(ProxycclScheduleWords *words) {
  if (words == NULL) return;
  for (uint32_t stage = 0; stage < PROXYCCL_SCHEDULE_STAGES; ++stage) word_store(&words->stages[stage], MOST_RECEIVES);
  word_store(&words->done, 1);
}

/* -- one step --- */

/* Returns the word of the next post. The word holds the post's number on its channel, the id of the window in which the
 * memory begins, and the offset in that window, so a single store makes a post. Posts are numbered from 1. */
static uint64_t next_post(uint64_t last, const ProxycclSchedulePost *post) {
  const uint64_t sequence = (last >> SEQUENCE_SHIFT) + 1, window = post->memory + (post->offset >> OFFSET_BITS);
  return sequence << SEQUENCE_SHIFT | window << OFFSET_BITS | (post->offset & 0xffffffffu);
}

static int is_behind(uint64_t post, uint64_t last) {
  return post >> SEQUENCE_SHIFT == (((last >> SEQUENCE_SHIFT) + 1) << SEQUENCE_SHIFT) >> SEQUENCE_SHIFT;
}

/* Returns whether this process maps the peer's words, so that the CPU can store and read the words itself. */
static int is_mapped(const ProxycclConnection *connection) {
  return (connection->transport->copies & PROXYCCL_COPIES_PEER) != 0;
}

static ProxycclOutcome fail(ProxycclConnection *connection, uint32_t code, int status, const char *reason,
                            ProxycclExitInfo *info) {
  info->connection = connection;
  return exit_with_error(info, code, status, reason);
}

/* Returns the reason why a transfer is refused, or NULL if it is allowed. */
static const char *refusal(const ProxycclTransport *transport, const ProxycclMemory *dst, uint64_t dst_offset,
                           const ProxycclMemory *src, uint64_t src_offset, uint64_t bytes) {
  if (bytes == 0) return NULL;
  if (src_offset > src->bytes || bytes > src->bytes - src_offset) return "a send leaves its source memory";
  if (dst_offset > dst->bytes || bytes > dst->bytes - dst_offset) return "a send leaves the receiver's memory";
  if (copies_remote_only(transport, src, dst))
    return "only a remote link reaches a memory that a send names, but its channel copies";
  return NULL;
}

/* Issues a post. A post does not wait for copies of the connection's stream, because the peer's schedule does not
 * depend on these copies. */
static ProxycclOutcome issue_post(Step *step, Channel *channel, ProxycclExitInfo *info) {
  ProxycclConnection *connection = channel->connection;
  const uint64_t previous = channel->signals.sent, value = channel->signals.sent = next_post(previous, &step->post);
  int status = 0;
  if (is_mapped(connection))
    word_store(channel->remote_semaphore, value);
  else
    status = connection->transport->signal(connection, channel->remote_semaphore, value, previous);
  step->state = COMPLETE;
  return status == 0 ? CONTINUE : fail(connection, PROXYCCL_ERROR_TRANSPORT, status, "post", info);
}

typedef struct {
  uint32_t memory;
  uint64_t offset;
} Place;

/* Returns the destination of a send, which is known once the receiver has posted. */
static Place destination(const Step *step) {
  const ProxycclScheduleSend *send = &step->send;
  if (send->dst_memory != PROXYCCL_NO_ID) return (Place){send->dst_memory, send->dst_offset};
  const uint64_t post = step->meeting->value;
  return (Place){post >> OFFSET_BITS & (PROXYCCL_MEMORY_IDS - 1), send->dst_offset + (post & 0xffffffffu)};
}

typedef struct {
  const ProxycclMemory *dst, *src;
  uint64_t dst_offset;
} Ranges;

static Ranges ranges_of(const ProxycclService *service, const Step *step) {
  const Place place = destination(step);
  return (Ranges){&service->memories[place.memory], &service->memories[step->send.src_memory], place.offset};
}

static void count_send(ProxycclService *service, Step *step) {
  ProxycclCounters *counters = &service->counters[step->channel];
  counter_add(&counters->puts, step->send.bytes > 0);
  counter_add(&counters->bytes, step->send.bytes);
  counter_add(&counters->signals, 1);
  step->state = ISSUED;
}

static ProxycclOutcome issue_send(ProxycclService *service, Step *step, Channel *channel, ProxycclExitInfo *info) {
  const ProxycclScheduleSend *send = &step->send;
  ProxycclConnection *connection = channel->connection;
  const ProxycclTransport *transport = connection->transport;
  const Ranges ranges = ranges_of(service, step);
  int status = 0;
  if (send->bytes > 0)
    status = transport->put(connection, ranges.dst, ranges.dst_offset, ranges.src, send->src_offset, send->bytes);
  if (status != 0) return fail(connection, PROXYCCL_ERROR_TRANSPORT, status, "put", info);
  step->value = ++channel->signals.sent;
  status = transport->signal(connection, channel->remote_semaphore, step->value, step->value - 1);
  if (status != 0) return fail(connection, PROXYCCL_ERROR_TRANSPORT, status, "signal", info);
  if (!is_mapped(connection)) /* waits only until sources are read, because receivers check that data has arrived */
    status =
        (transport->release != NULL ? transport->release : transport->flush)(connection, channel->flushed, step->value);
  if (status != 0) return fail(connection, PROXYCCL_ERROR_TRANSPORT, status, "flush", info);
  ++connection->progress.issued;
  step->bundle = NULL;
  count_send(service, step);
  return CONTINUE;
}

static int is_met(const Step *step) { return step->meeting == NULL || step->meeting->state == COMPLETE; }

/* Returns whether a send may be issued, provided that its receiver has posted. `gate` is the value of
 * ProxycclScheduleWords.gate. The previous send on the channel must have been issued, because the receiver counts
 * sends. */
static int is_next(const ProxycclService *service, const Step *step, uint64_t gate) {
  const ProxycclScheduleSend *send = &step->send;
  if (step->before != NULL && step->before->state == WAITING) return 0;
  if (send->gate_stage != PROXYCCL_NO_ID) gate = word_load(&service->words->stages[send->gate_stage]);
  return gate >= send->gate;
}

static int may_send(const ProxycclService *service, const Step *step) {
  return is_met(step) && is_next(service, step, word_load(&service->words->gate));
}

/* -- bundles: sends to several peers, whose copies one driver call issues --- */

/* A bundle that is not issued yet. A bundle has at most one send per channel, so the signal of a send never waits for
 * later sends to the same peer. */
typedef struct {
  ProxycclConnection *carrier; /* the worker's connection that carries bundles, or NULL */
  ProxycclPut puts[PROXYCCL_MOST_PUTS];
  Step *steps[PROXYCCL_MOST_PUTS];
  uint32_t count;
  int awaited;   /* 1 if further sends could join the bundle, but their peers have not posted yet */
  uint64_t gate; /* value of the word `gate` before the first step; all sends that this value allows share a bundle */
} Bundle;

static ProxycclConnection *carrier_of(const ProxycclWorker *worker) {
  const uint32_t connections = list_count(&worker->connection_count);
  for (uint32_t i = 0; i < connections; ++i)
    if (worker->connections[i]->most_puts > 0) return worker->connections[i];
  return NULL;
}

/* Returns whether a send joins a bundle. A send between pinned memories does not join, because the CPU copies short
 * data between pinned memories without the driver. */
static int is_bundled(const ProxycclConnection *carrier, const ProxycclConnection *connection, const Step *step,
                      const Ranges *ranges) {
  return carrier != NULL && carrier->transport == connection->transport && step->send.bytes > 0 &&
         (ranges->dst->host == NULL || ranges->src->host == NULL);
}

/* Returns whether a send may already follow the previous send on its channel. If only one of the two sends is bundled,
 * the previous send must be complete, because the CPU's stores of a bundle's signals could overtake the stream's writes
 * of other signals. */
static int may_follow(const Step *step, int bundled) {
  const Step *before = step->before;
  return before == NULL || before->state == COMPLETE || (before->bundle != NULL) == bundled;
}

/* Issues a bundle. One flush word reports the completion of all copies, because writing a word between two copies would
 * delay the second copy. */
static ProxycclOutcome issue_bundle(ProxycclService *service, Bundle *bundle, ProxycclExitInfo *info) {
  ProxycclConnection *carrier = bundle->carrier;
  const Channel *first = &service->channels[bundle->steps[0]->channel];
  const uint64_t value = first->signals.sent + 1; /* the flush value that the first send would have without a bundle */
  const char *failed = "put";
  int status = carrier->transport->put_many(carrier, bundle->puts, bundle->count);
  if (status == 0) {
    failed = "flush";
    status = carrier->transport->flush(carrier, first->flushed, value);
  }
  if (status != 0) return fail(first->connection, PROXYCCL_ERROR_TRANSPORT, status, failed, info);
  carrier->progress.issued += bundle->count;
  for (uint32_t i = 0; i < bundle->count; ++i) {
    Step *step = bundle->steps[i];
    step->value = ++service->channels[step->channel].signals.sent;
    step->bundle = first;
    step->flushed = value;
    count_send(service, step);
  }
  return CONTINUE;
}

static void complete_in_stage(ProxycclService *service, Step *step, uint32_t stage) {
  step->state = COMPLETE;
  if (stage != PROXYCCL_NO_ID) stage_add(&service->words->stages[stage]);
}

/* Returns whether a send is complete, as shown by the receiver's word, or by a flush word if this process does not map
 * the receiver's word. */
static int is_sent(const Step *step, const Channel *channel) {
  if (step->bundle != NULL) return word_load(step->bundle->flushed) >= step->flushed;
  const uint64_t *word = is_mapped(channel->connection) ? channel->remote_semaphore : channel->flushed;
  return word_load(word) >= step->value;
}

/* Completes a send. If the send was bundled, signals its receiver. Earlier sends on the channel are complete, because a
 * worker advances its steps in order. */
static void complete_send(ProxycclService *service, Step *step, Channel *channel) {
  if (step->bundle != NULL) word_store(channel->remote_semaphore, step->value);
  complete_in_stage(service, step, step->send.stage);
}

/* Issues a send that may start, or adds it to the bundle. Does nothing if the connection or the bundle has no room. */
static ProxycclOutcome start_send(ProxycclService *service, Bundle *bundle, Step *step, Channel *channel,
                                  ProxycclExitInfo *info) {
  ProxycclConnection *connection = channel->connection;
  const Ranges ranges = ranges_of(service, step);
  const char *reason = refusal(connection->transport, ranges.dst, ranges.dst_offset, ranges.src, step->send.src_offset,
                               step->send.bytes);
  if (reason != NULL) return fail(connection, PROXYCCL_ERROR_BAD_SCHEDULE, 0, reason, info);
  const int bundled = is_bundled(bundle->carrier, connection, step, &ranges);
  if (bundle->carrier != NULL && is_mapped(connection) && !may_follow(step, bundled)) return CONTINUE;
  if (!bundled) return room_of(connection) > 0 ? issue_send(service, step, channel, info) : CONTINUE;
  if (bundle->count == bundle->carrier->most_puts) return CONTINUE;
  bundle->puts[bundle->count] =
      (ProxycclPut){ranges.dst->base + ranges.dst_offset, ranges.src->base + step->send.src_offset, step->send.bytes};
  bundle->steps[bundle->count++] = step;
  return CONTINUE;
}

/* Advances a step as far as possible, and increments *progress if the step's state has changed. */
static ProxycclOutcome take_step(ProxycclService *service, Bundle *bundle, Step *step, uint32_t joined,
                                 uint32_t *progress, ProxycclExitInfo *info) {
  Channel *channel = &service->channels[step->channel];
  const uint64_t *inbound = &service->semaphores[step->channel];
  const StepState before = step->state;
  ProxycclOutcome result = CONTINUE;
  if (channel->connection == NULL)
    return fail(NULL, PROXYCCL_ERROR_BAD_SCHEDULE, 0, "a channel id of the schedule is not in use", info);
  switch (step->kind) {
    case POST:
      if (room_of(channel->connection) > 0) result = issue_post(step, channel, info);
      break;
    case MEET:
      step->value = word_load(inbound);
      if (!is_behind(step->value, channel->signals.taken)) break;
      channel->signals.taken = step->value;
      complete_in_stage(service, step, joined);
      break;
    case SEND:
      if (step->state == WAITING && is_next(service, step, bundle->gate)) {
        if (is_met(step))
          result = start_send(service, bundle, step, channel, info);
        else
          bundle->awaited = 1;
      }
      if (step->state == ISSUED && is_sent(step, channel)) complete_send(service, step, channel);
      break;
    case RECEIVE:
      if (word_load(inbound) >= step->value) complete_in_stage(service, step, step->receive.stage);
      break;
  }
  *progress += step->state != before;
  return result;
}

/* -- the steps that a worker owns --- */

/* Only a step's owner changes the step's state. Worker 0 owns the steps of channels that are not in use, and reports
 * such a step as an error. */
static int is_own(const ProxycclWorker *worker, const Step *step) {
  const ProxycclConnection *connection = worker->service->channels[step->channel].connection;
  return (connection == NULL ? 0 : connection->worker) == worker->number;
}

/* -- what a worker waits for --- */

/* A worker reports that it waits for its incomplete steps of the earliest phase, because steps of later phases may
 * depend on these steps. */
enum {
  PHASE_POSTS,
  PHASE_MEETINGS,
  PHASE_SENDS,
  PHASE_STAGES, /* one phase per stage: the receives that the stage counts */
  PHASE_GATE = PHASE_STAGES + PROXYCCL_SCHEDULE_STAGES,
  PHASE_RECEIVES /* receives without a stage, whose senders may wait for a gate */
};

static uint32_t phase_of(const ProxycclService *service, const Step *step) {
  if (step->kind == POST) return PHASE_POSTS;
  if (step->kind == MEET) return PHASE_MEETINGS;
  if (step->kind == SEND) return step->state == ISSUED || may_send(service, step) ? PHASE_SENDS : PHASE_GATE;
  return step->receive.stage == PROXYCCL_NO_ID ? PHASE_RECEIVES : PHASE_STAGES + step->receive.stage;
}

static uint32_t wait_of(const ProxycclService *service, const Step *step) {
  if (step->kind == MEET) return PROXYCCL_WAIT_SCHEDULE_POST;
  if (step->kind == RECEIVE) return PROXYCCL_WAIT_SCHEDULE_DATA;
  return phase_of(service, step) == PHASE_GATE ? PROXYCCL_WAIT_SCHEDULE_GATE : PROXYCCL_WAIT_SCHEDULE_SEND;
}

/* Returns the first step that this worker waits for, or NULL if all of the worker's steps are complete. */
static const Step *awaited_step(const ProxycclWorker *worker) {
  const Schedule *schedule = worker->run.schedule;
  const Step *found = NULL;
  for (uint32_t i = 0; i < schedule->count; ++i) {
    const Step *step = &schedule->steps[i];
    if (!is_own(worker, step) || step->state == COMPLETE) continue;
    if (found == NULL || phase_of(worker->service, step) < phase_of(worker->service, found)) found = step;
  }
  return found;
}

void proxyccl_worker_show_schedule_waits(ProxycclWorker *worker) {
  const ProxycclService *service = worker->service;
  const Schedule *schedule = worker->run.schedule;
  if (schedule == NULL) return;
  const Step *awaited = awaited_step(worker);
  if (awaited == NULL) return;
  const uint32_t phase = phase_of(service, awaited);
  for (uint32_t i = 0; i < schedule->count; ++i) {
    const Step *step = &schedule->steps[i];
    const ProxycclConnection *connection = service->channels[step->channel].connection;
    if (connection == NULL || !is_own(worker, step) || step->state == COMPLETE || phase_of(service, step) != phase)
      continue;
    counter_set(&worker->stats->connections[connection->number].schedule_wait,
                (uint64_t)wait_of(service, step) << PROXYCCL_SCHEDULE_WAIT_SHIFT | schedule->number);
  }
  worker->run.shown = 1;
}

static void hide_schedule_waits(ProxycclWorker *worker) {
  const uint32_t connections = list_count(&worker->connection_count);
  for (uint32_t i = 0; i < connections; ++i) counter_set(&worker->stats->connections[i].schedule_wait, 0);
  worker->run.shown = 0;
}

/* -- the trace --- */

/* Returns the trigger that represents a send in the trace. A size that does not fit a trigger is recorded as the
 * largest size that fits. */
static ProxycclTrigger trigger_of(const ProxycclService *service, const Step *step) {
  const ProxycclScheduleSend *send = &step->send;
  const Place place = destination(step);
  const uint64_t most = (1u << PROXYCCL_SIZE_BITS) - 1, size = send->bytes > most ? most : send->bytes;
  const uint64_t ids = PROXYCCL_MEMORY_IDS - 1; /* a mask, because an empty send's offset is not checked */
  const uint64_t src_memory = (send->src_memory + (send->src_offset >> OFFSET_BITS)) & ids;
  const uint64_t dst_memory = (place.memory + (place.offset >> OFFSET_BITS)) & ids;
  const int mapped = is_mapped(service->channels[step->channel].connection);
  const uint64_t operation = (size > 0 ? PROXYCCL_OP_DATA : 0) | PROXYCCL_OP_SIGNAL | (mapped ? 0 : PROXYCCL_OP_FLUSH);
  return (ProxycclTrigger){
      .word0 = size << PROXYCCL_SIZE_SHIFT | (send->src_offset & 0xffffffffu) << PROXYCCL_SRC_OFFSET_SHIFT,
      .word1 = (place.offset & 0xffffffffu) << PROXYCCL_DST_OFFSET_SHIFT | src_memory << PROXYCCL_SRC_MEMORY_SHIFT |
               dst_memory << PROXYCCL_DST_MEMORY_SHIFT | operation << PROXYCCL_OP_SHIFT |
               (uint64_t)step->channel << PROXYCCL_CHANNEL_SHIFT};
}

/* Records an issued send; `seen_ns` is the time when the worker found that the send may start. Returns the present
 * time. Publishes each record immediately, because a schedule may issue more sends in one poll than the number of
 * records that may stay unpublished. */
static uint64_t trace_send(ProxycclWorker *worker, const Step *step, uint64_t seen_ns) {
  Trace *trace = &worker->trace;
  trace_begin();
  trace_mark(trace, worker->stats, PROXYCCL_MARK_SCHEDULE, worker->run.schedule->number, seen_ns);
  trace_trigger(trace_next(trace, worker->stats), trigger_of(worker->service, step));
  ++trace->next;
  const uint64_t issued_ns = now_ns();
  trace_mark(trace, worker->stats, PROXYCCL_MARK_ISSUED, 0, issued_ns);
  trace_publish(trace, worker->stats);
  return issued_ns;
}

static void trace_step(ProxycclWorker *worker, ProxycclTracedStep step, uint32_t number, uint64_t at_ns) {
  trace_begin();
  trace_mark(&worker->trace, worker->stats, PROXYCCL_MARK_STEP, (uint64_t)step << PROXYCCL_TRACED_STEP_SHIFT | number,
             at_ns);
  trace_publish(&worker->trace, worker->stats);
}

/* Records that a send was issued, or that a step is complete. Returns the present time, or `traced_ns` if the step's
 * state has not changed. */
static uint64_t trace_turn(ProxycclWorker *worker, const Step *step, StepState before, uint64_t traced_ns) {
  static const ProxycclTracedStep steps[] = {
      [MEET] = PROXYCCL_TRACED_JOINED, [SEND] = PROXYCCL_TRACED_SENT, [RECEIVE] = PROXYCCL_TRACED_RECEIVED};
  if (step->state == before) return traced_ns;
  if (step->kind == SEND && before == WAITING) traced_ns = trace_send(worker, step, traced_ns);
  if (step->kind == POST || step->state != COMPLETE) return traced_ns;
  traced_ns = now_ns();
  trace_step(worker, steps[step->kind], step->channel, traced_ns);
  return traced_ns;
}

/* -- running a schedule --- */

static void begin_part(ProxycclWorker *worker, Schedule *schedule) {
  worker->run = (ScheduleRun){.schedule = schedule, .carrier = carrier_of(worker)};
  for (uint32_t i = 0; i < schedule->count; ++i) {
    Step *step = &schedule->steps[i];
    if (!is_own(worker, step)) continue;
    step->state = WAITING;
    if (step->kind == RECEIVE)
      step->value = worker->service->channels[step->channel].signals.taken += step->receive.sends;
    ++worker->run.left;
  }
}

/* Sets *schedule to the schedule that this worker must begin, or to NULL. Worker 0 reads the bell; the other workers
 * learn of the schedule from worker 0. */
static ProxycclOutcome find_schedule(ProxycclWorker *worker, Schedule **schedule, ProxycclExitInfo *info) {
  ProxycclService *service = worker->service;
  *schedule = NULL;
  if (worker->number != 0) {
    const uint32_t started = schedules_started(&service->started);
    if (started == worker->joined) return CONTINUE;
    worker->joined = started;
    *schedule = schedule_load(&service->schedules[service->current]);
    return CONTINUE;
  }
  if (service->words == NULL || parts_left(&service->parts) != 0) return CONTINUE;
  const uint64_t number = word_load(&service->words->bell);
  if (number == 0) return CONTINUE;
  word_store(&service->words->running,
             number); /* set before the bell is reset, so that `bell` or `running` is nonzero while a stream waits */
  word_store(&service->words->bell, 0);
  *schedule = number < PROXYCCL_MAX_SCHEDULES ? schedule_load(&service->schedules[number]) : NULL;
  if (*schedule == NULL) {
    info->schedule = (uint32_t)number;
    return fail(NULL, PROXYCCL_ERROR_BAD_SCHEDULE, 0, "a stream started a schedule that does not exist", info);
  }
  service->current = (uint32_t)number;
  service->parts = service->worker_count;
  schedule_start(&service->started);
  return CONTINUE;
}

static ProxycclOutcome time_out(ProxycclWorker *worker, ProxycclExitInfo *info) {
  static const char *const reasons[] = {[PROXYCCL_WAIT_SCHEDULE_POST] = "no post came",
                                        [PROXYCCL_WAIT_SCHEDULE_DATA] = "no data came",
                                        [PROXYCCL_WAIT_SCHEDULE_SEND] = "a send is not complete",
                                        [PROXYCCL_WAIT_SCHEDULE_GATE] = "the stream did not open the gate"};
  const ProxycclService *service = worker->service;
  const Step *step = awaited_step(worker);
  info->schedule = worker->run.schedule->number;
  if (step == NULL)
    return fail(NULL, PROXYCCL_ERROR_BAD_SCHEDULE, 0, "a channel id of the schedule is not in use", info);
  ProxycclConnection *connection = service->channels[step->channel].connection;
  info->wait = wait_of(service, step);
  return fail(info->wait == PROXYCCL_WAIT_SCHEDULE_GATE ? NULL : connection, PROXYCCL_ERROR_TIMEOUT, 0,
              reasons[info->wait], info);
}

/* Publishes what the worker waits for, or fails after a time-out. Reads the clock only once in POLLS_PER_CLOCK
 * calls. */
static ProxycclOutcome idle(ProxycclWorker *worker, ProxycclExitInfo *info) {
  ScheduleRun *run = &worker->run;
  if (++run->idle_polls % POLLS_PER_CLOCK != 0) return CONTINUE;
  const uint64_t now = now_ns();
  if (run->idle_since == 0) run->idle_since = now;
  const uint64_t idle_ns = now - run->idle_since;
  if (!run->shown && idle_ns > SHOWN_AFTER_NS) proxyccl_worker_show_schedule_waits(worker);
  return idle_ns > worker->service->control->timeout_ns ? time_out(worker, info) : CONTINUE;
}

/* Issues the gathered bundle, unless more sends could join the bundle once their receivers have posted. Each rank
 * copies first to the rank after it, then to the second rank after it, and so on. If instead all ranks began with the
 * rank that posted first, the copies would share this rank's link and take twice as long. Waiting for posts costs no
 * time, because a late rank delays the schedule in any case. */
static ProxycclOutcome end_bundle(ProxycclWorker *worker, Bundle *bundle, uint64_t traced_ns, uint32_t *progress,
                                  ProxycclExitInfo *info) {
  const uint32_t count = bundle->count;
  if (count == 0 || bundle->awaited) return CONTINUE;
  const ProxycclOutcome result = issue_bundle(worker->service, bundle, info);
  if (result != CONTINUE) return result;
  for (uint32_t i = 0; i < count && traced_ns != 0; ++i) trace_send(worker, bundle->steps[i], traced_ns);
  *progress += count;
  return CONTINUE;
}

static void note_progress(ProxycclWorker *worker) {
  worker->run.idle_since = worker->run.idle_polls = 0;
  if (worker->run.shown) hide_schedule_waits(worker);
}

static void end_part(ProxycclWorker *worker) {
  worker->run.schedule = NULL;
  if (part_end(&worker->service->parts) != 0) return;
  word_store(&worker->service->words->running, 0);
  word_store(&worker->service->words->done, 1);
}

ProxycclOutcome proxyccl_worker_run_schedule(ProxycclWorker *worker, ProxycclExitInfo *info, uint32_t *progress,
                                             int *running) {
  ProxycclOutcome result;
  uint32_t steps = 0;
  const int began = worker->run.schedule == NULL;
  if (began) {
    Schedule *schedule;
    result = find_schedule(worker, &schedule, info);
    if (result != CONTINUE || schedule == NULL) return result;
    begin_part(worker, schedule);
    ++*progress;
  }
  const ScheduleRun *run = &worker->run;
  uint64_t traced_ns = trace_wanted(worker->stats); /* 0 without an observer; otherwise, when the next step begins */
  if (traced_ns != 0 && began) trace_step(worker, PROXYCCL_TRACED_BEGIN, run->schedule->number, traced_ns);
  Bundle bundle;
  bundle.carrier = run->carrier;
  bundle.count = bundle.awaited = 0;
  bundle.gate = word_load(&worker->service->words->gate);
  result = CONTINUE;
  for (uint32_t i = 0; i < run->schedule->count && result == CONTINUE; ++i) {
    Step *step = &run->schedule->steps[i];
    if (!is_own(worker, step) || step->state == COMPLETE) continue;
    const StepState before = step->state;
    result = take_step(worker->service, &bundle, step, run->schedule->joined, &steps, info);
    if (traced_ns != 0) traced_ns = trace_turn(worker, step, before, traced_ns);
    worker->run.left -= step->state == COMPLETE;
  }
  if (result == CONTINUE) result = end_bundle(worker, &bundle, traced_ns, &steps, info);
  if (result != CONTINUE) {
    info->schedule = run->schedule->number;
    return result;
  }
  *progress += steps;
  if (steps != 0) note_progress(worker);
  if (run->left == 0) {
    end_part(worker);
    return CONTINUE;
  }
  *running = 1;
  return steps != 0 ? CONTINUE : idle(worker, info);
}
