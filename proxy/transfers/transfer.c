/* The part of transfers that all paths share: their starts, waits and ends. See transfers.h. */
#include <errno.h>
#include <time.h>

#include "clock.h"
#include "parts.h"

enum {
  SPIN_NS = 250000, /* a waiting caller spins this long, because copying 64 MiB between GPUs takes 180 us and waking
                       from a sleep 70 us */
  LONGEST_PAUSE_NS = 1000000 /* the agent's thread pauses at most this long between two polls */
};

void transfer_end_deregistered(ProxycclTransfer *transfer) {
  const ProxycclFaultKind kind = transfer->fault.kind;
  const int freed = kind == PROXYCCL_FAULT_FREED || kind == PROXYCCL_FAULT_FREED_HERE;
  transfer_end(transfer, freed ? PROXYCCL_TRANSFER_FAILED : PROXYCCL_TRANSFER_REFUSED);
}

static void set_state(ProxycclTransfer *transfer, ProxycclTransferState state) {
  __atomic_store_n(&transfer->state, state, __ATOMIC_RELEASE); /* release: a reader of the state may read the data */
}

ProxycclTransferState proxyccl_transfer_state(const ProxycclTransfer *transfer) {
  return __atomic_load_n(&transfer->state, __ATOMIC_ACQUIRE);
}

/* The caller holds the lock and a reference to the agent. */
static void free_transfer(ProxycclTransfer *transfer) {
  --transfer->agent->references;
  if (transfer->link != NULL) link_unreference(transfer->link);
  buffer_free(&transfer->message);
  free(transfer);
}

void transfer_end(ProxycclTransfer *transfer, ProxycclTransferState state) {
  const int lost = transfer->link != NULL && transfer->link->lost != NULL;
  if (transfer->abandoned) {
    state = PROXYCCL_TRANSFER_CANCELED;
  } else if (lost && state != PROXYCCL_TRANSFER_CANCELED) {
    /* Copies may have accessed another process that got the ended peer's process id. */
    state = PROXYCCL_TRANSFER_LOST;
  }
  if (!grant_leave(&transfer->granted) && state == PROXYCCL_TRANSFER_DONE) state = PROXYCCL_TRANSFER_STALE;
  if (state == PROXYCCL_TRANSFER_DONE && transfer->has_message) {
    const int error = agent_tell(transfer->agent, transfer->link, transfer->message.bytes, transfer->message.used);
    transfer->error = error;
    if (error != 0) state = error == ENOTCONN ? PROXYCCL_TRANSFER_LOST : PROXYCCL_TRANSFER_FAILED;
  }
  transfer->times.ended = now_ns();
  if (transfer->words != NULL) { /* release: a stream that sees words[1] also sees the data */
    __atomic_store_n(&transfer->words[1], 1, __ATOMIC_RELEASE);
    transfer->words = NULL;
  }
  log_end(transfer, state);
  set_state(transfer, state);
  pthread_cond_broadcast(&transfer->agent->changed);
  if (transfer->orphaned) free_transfer(transfer);
}

void transfer_answered(Request *request) {
  ProxycclTransfer *transfer = request->transfer;
  ProxycclFault *fault = &transfer->fault;
  *fault = request->fault;
  if (request->refusal == EACCES) {
    if (fault->kind != PROXYCCL_FAULT_ENDED_HERE) fault->kind = PROXYCCL_FAULT_DEREGISTERED;
    transfer_end(transfer, PROXYCCL_TRANSFER_REFUSED);
  } else if (request->refusal != 0 || request->asks) {
    if (request->refusal == EFAULT) fault->kind = PROXYCCL_FAULT_FREED;
    if (request->refusal == EPERM && fault->kind == PROXYCCL_FAULT_NONE) fault->kind = PROXYCCL_FAULT_PROTECTED;
    if (!request->asks) transfer->error = (int)request->refusal;
    transfer_end(transfer, PROXYCCL_TRANSFER_FAILED);
  } else {
    transfer_end(transfer, PROXYCCL_TRANSFER_DONE);
  }
}

void transfer_watch(ProxycclTransfer *transfer) {
  queue_push(&transfer->agent->looked_at, transfer);
  agent_wake(transfer->agent);
}

ProxycclTransfer *transfer_new(ProxycclAgent *agent, ProxycclLink *link, size_t bytes, const TransferPath *path) {
  ProxycclTransfer *transfer = calloc(1, bytes);
  if (transfer == NULL) return NULL;
  transfer->path = path;
  transfer->agent = agent;
  transfer->link = link;
  transfer->request = (Request){.transfer = transfer, .ended = transfer_answered};
  pthread_mutex_lock(&agent->lock);
  ++agent->references;
  if (link != NULL) ++link->references;
  pthread_mutex_unlock(&agent->lock);
  return transfer;
}

ProxycclTransfer *transfer_of_blocks(ProxycclAgent *agent, ProxycclLink *link, size_t bytes, const TransferPath *path,
                                     const ProxycclBlocks *blocks) {
  const int error = guard_install(); /* the program may have replaced the fault handler */
  ProxycclTransfer *transfer = error == 0 ? transfer_new(agent, link, bytes, path) : NULL;
  if (transfer == NULL) return NULL;
  transfer->writes = transfer->request.writes = blocks->writes;
  transfer->blocks = transfer->request.count = blocks->count;
  /* An iovec has the layout of a block: a word of address and a word of length. */
  transfer->request.local = (const struct iovec *)blocks->local;
  transfer->request.remote = (const struct iovec *)blocks->remote;
  for (uint64_t i = 0; i < blocks->count; ++i) transfer->bytes += blocks->local[2 * i + 1];
  return transfer;
}

static void begin(ProxycclTransfer *transfer, const uint64_t *stream) {
  if (transfer->agent->stopped) {
    transfer_end(transfer, PROXYCCL_TRANSFER_CANCELED);
  } else if (transfer->link != NULL && proxyccl_link_lost(transfer->link) != NULL) {
    transfer_end(transfer, PROXYCCL_TRANSFER_LOST);
  } else if (!transfer_stands(transfer)) {
    transfer_end_deregistered(transfer);
  } else if (transfer->bytes == 0) {
    transfer_end(transfer, PROXYCCL_TRANSFER_DONE);
  } else {
    transfer->path->begin(transfer, stream);
  }
}

int proxyccl_transfer_post(ProxycclTransfer *transfer, const char *message, uint64_t bytes, const uint64_t *stream,
                           uint64_t *words) {
  ProxycclAgent *agent = transfer->agent;
  if (bytes > PROXYCCL_LONGEST_MESSAGE) return EMSGSIZE;
  const uint64_t posted = now_ns();
  int error = 0;
  pthread_mutex_lock(&agent->lock);
  if (transfer->state == PROXYCCL_TRANSFER_ACTIVE) error = EBUSY;
  if (error == 0) transfer->message.used = 0;
  if (error == 0 && message != NULL && !buffer_append(&transfer->message, message, bytes)) error = ENOMEM;
  if (error == 0) error = grant_enter(&transfer->granted);
  if (error == 0) {
    transfer->has_message = message != NULL;
    transfer->times.posted = posted;
    transfer->error = 0;
    transfer->abandoned = 0;
    transfer->fault = (ProxycclFault){PROXYCCL_FAULT_NONE, 0};
    transfer->cancel = 0;
    transfer->words = words;
    transfer->rung = words == NULL;
    set_state(transfer, PROXYCCL_TRANSFER_ACTIVE);
    if (transfer->rung || agent->stopped) {
      begin(transfer, stream);
    } else {
      transfer_watch(transfer);
    }
    transfer->times.returned = now_ns();
  }
  pthread_mutex_unlock(&agent->lock);
  return error;
}

/* Begins a transfer once its stream has set words[0]; later calls advance it. Returns 1 if the transfer has begun or
 * advanced. */
static int look(ProxycclTransfer *transfer) {
  if (transfer->rung) return transfer->path->look != NULL ? transfer->path->look(transfer) : 0;
  if (__atomic_load_n(&transfer->words[0], __ATOMIC_ACQUIRE) == 0) return 0;
  queue_remove(&transfer->agent->looked_at, transfer);
  transfer->rung = 1;
  begin(transfer, NULL);
  return 1;
}

void transfers_look(ProxycclAgent *agent) {
  uint32_t count = 0;
  for (const Node *each = agent->looked_at.first; each != NULL; each = each->next) ++count;
  /* The list may change while the lock is released, so each iteration moves the first transfer to the end. */
  for (; count > 0 && agent->looked_at.first != NULL; --count) {
    ProxycclTransfer *first = queue_pop(&agent->looked_at);
    queue_push(&agent->looked_at, first);
    look(first);
  }
}

uint64_t transfers_pause(const ProxycclAgent *agent) {
  uint64_t shortest = agent->stages.first != NULL ? SHORTEST_PAUSE_NS : LONGEST_PAUSE_NS;
  const uint64_t now = now_ns();
  for (const Node *each = agent->looked_at.first; each != NULL; each = each->next) {
    const ProxycclTransfer *transfer = (const ProxycclTransfer *)each;
    /* The longer a transfer has run, the less often it is polled. */
    const uint64_t pause = transfer->path->soon && transfer->rung ? 0 : (now - transfer->times.posted) / 8;
    if (pause < shortest) shortest = pause;
  }
  return shortest < SHORTEST_PAUSE_NS ? SHORTEST_PAUSE_NS : shortest;
}

/* Pauses a waiting caller between two polls. The pause is 0 at first, and then grows with the transfer's running
 * time. */
static void rest(ProxycclTransfer *transfer) {
  const uint64_t elapsed = now_ns() - transfer->times.posted;
  pthread_mutex_unlock(&transfer->agent->lock);
  if (elapsed > SPIN_NS) { /* the caller may notice the end of a long copy a little late */
    const uint64_t pause = elapsed / 16 < SHORTEST_PAUSE_NS ? elapsed / 16 : SHORTEST_PAUSE_NS;
    nanosleep(&(struct timespec){0, (long)pause}, NULL);
  }
  pthread_mutex_lock(&transfer->agent->lock);
}

int transfer_cancel(ProxycclTransfer *transfer, uint64_t timeout_ns) {
  ProxycclAgent *agent = transfer->agent;
  if (transfer->state != PROXYCCL_TRANSFER_ACTIVE) return 0;
  transfer->cancel = 1;
  /* Waits until each copying thread has completed its current piece. */
  while (transfer->copying > 0) pthread_cond_wait(&agent->changed, &agent->lock);
  if (transfer->state != PROXYCCL_TRANSFER_ACTIVE) return 0;
  if (transfer->request.active) {
    link_forget(transfer->link, &transfer->request);
  } else if (transfer->rung && transfer->path->finish != NULL && !transfer->path->finish(transfer, timeout_ns)) {
    transfer->cancel = 0;
    transfer->abandoned = 1;
    return EBUSY;
  }
  queue_remove(&agent->looked_at, transfer);
  if (transfer->state == PROXYCCL_TRANSFER_ACTIVE) transfer_end(transfer, PROXYCCL_TRANSFER_CANCELED);
  return 0;
}

int proxyccl_transfer_cancel(ProxycclTransfer *transfer, uint64_t timeout_ns) {
  pthread_mutex_lock(&transfer->agent->lock);
  const int error = transfer_cancel(transfer, timeout_ns);
  pthread_mutex_unlock(&transfer->agent->lock);
  return error;
}

int proxyccl_transfer_release(ProxycclTransfer *transfer) {
  ProxycclAgent *agent = transfer->agent;
  pthread_mutex_lock(&agent->lock);
  ++agent->references; /* keeps the agent allocated during this call */
  const int error = transfer_cancel(transfer, LONGEST_CANCEL_NS);
  if (error == 0) {
    free_transfer(transfer);
  } else {
    transfer->orphaned = 1;
  }
  agent_unreference(agent);
  return error;
}

static int copy(ProxycclTransfer *transfer) { return transfer->path->copy != NULL && transfer->path->copy(transfer); }

ProxycclTransferState proxyccl_transfer_wait(ProxycclTransfer *transfer, uint64_t timeout_ns) {
  ProxycclAgent *agent = transfer->agent;
  if (proxyccl_transfer_state(transfer) == PROXYCCL_TRANSFER_ACTIVE) {
    const struct timespec deadline = agent_deadline(timeout_ns);
    const uint64_t end = (uint64_t)deadline.tv_sec * 1000000000u + (uint64_t)deadline.tv_nsec;
    int is_over = 0; /* polls once more after the time-out */
    pthread_mutex_lock(&agent->lock);
    if (transfer->link != NULL) link_wake(transfer->link);
    while (transfer->state == PROXYCCL_TRANSFER_ACTIVE && !is_over) {
      is_over = now_ns() >= end;
      if (copy(transfer)) continue;
      if (transfer->path->silent || !transfer->rung) {
        if (!look(transfer) && !is_over) rest(transfer);
      } else {
        pthread_cond_timedwait(&agent->changed, &agent->lock, &deadline);
      }
    }
    pthread_mutex_unlock(&agent->lock);
  }
  return proxyccl_transfer_state(transfer);
}

ProxycclTransferState proxyccl_transfer_help(ProxycclTransfer *transfer) {
  if (proxyccl_transfer_state(transfer) == PROXYCCL_TRANSFER_ACTIVE) {
    pthread_mutex_lock(&transfer->agent->lock);
    if (transfer->request.active) {
      link_help(transfer->link);
    } else if (transfer->state == PROXYCCL_TRANSFER_ACTIVE && transfer->rung && transfer->path->help != NULL) {
      transfer->path->help(transfer);
    } else if (transfer->state == PROXYCCL_TRANSFER_ACTIVE && !copy(transfer)) {
      look(transfer);
    }
    pthread_mutex_unlock(&transfer->agent->lock);
  }
  return proxyccl_transfer_state(transfer);
}

ProxycclOutcome proxyccl_transfer_outcome(const ProxycclTransfer *transfer) {
  pthread_mutex_lock(&transfer->agent->lock);
  const ProxycclOutcome outcome = {transfer->state, transfer->times, transfer->error, transfer->fault};
  pthread_mutex_unlock(&transfer->agent->lock);
  return outcome;
}
