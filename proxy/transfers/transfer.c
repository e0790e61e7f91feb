/* Transfers, and the copies of those that need no socket. See transfers.h. */
#include <errno.h>
#include <limits.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "clock.h"
#include "parts.h"

uint64_t blocks_parts(const struct iovec *blocks, uint64_t count, Position at, uint64_t most_bytes, uint32_t most_parts,
                      struct iovec *parts, uint32_t *part_count) {
  uint64_t bytes = 0;
  uint32_t used = 0;
  while (used < most_parts && bytes < most_bytes && at.index < count) {
    const uint64_t rest = blocks[at.index].iov_len - at.offset;
    const uint64_t part = rest < most_bytes - bytes ? rest : most_bytes - bytes;
    parts[used++] = (struct iovec){(char *)blocks[at.index].iov_base + at.offset, part};
    bytes += part;
    at = (Position){at.index + 1, 0};
  }
  *part_count = used;
  return bytes;
}

void blocks_advance(const struct iovec *blocks, Position *at, uint64_t bytes) {
  while (bytes > 0) {
    const uint64_t rest = blocks[at->index].iov_len - at->offset;
    if (bytes < rest) {
      at->offset += bytes;
      return;
    }
    bytes -= rest;
    *at = (Position){at->index + 1, 0};
  }
}

int proxyccl_process_read(int32_t pid, uint64_t address, char *to, uint64_t bytes) {
  const struct iovec local = {to, bytes}, remote = {(void *)(uintptr_t)address, bytes};
  const ssize_t read = process_vm_readv(pid, &local, 1, &remote, 1, 0);
  return read == (ssize_t)bytes ? 0 : read < 0 ? errno : EFAULT;
}

int is_mapped(const void *address) {
  unsigned char resident;
  const uintptr_t page = (uintptr_t)address & ~((uintptr_t)sysconf(_SC_PAGESIZE) - 1);
  return mincore((void *)page, 1, &resident) == 0 || errno != ENOMEM;
}

/* Finds the first registration that has ended, and remembers it as the fault. 0: there is none. */
static int find_ended(ProxycclTransfer *transfer, int remote, uint64_t now) {
  Guard *guard = &transfer->guards[remote];
  for (uint64_t i = 0; i < guard->count; ++i) {
    const uint64_t number = guard->rows[2 * i];
    const uint64_t word = __atomic_load_n(&guard->ledger[number % PROXYCCL_LEDGER_WORDS], __ATOMIC_ACQUIRE);
    if (word == number) continue;
    const ProxycclFaultKind kind = word == ~number ? (remote ? PROXYCCL_FAULT_FREED : PROXYCCL_FAULT_FREED_HERE)
                                   : remote        ? PROXYCCL_FAULT_DEREGISTERED
                                                   : PROXYCCL_FAULT_ENDED_HERE;
    transfer->fault = (ProxycclFault){kind, guard->rows[2 * i + 1]};
    return 1;
  }
  guard->seen = now;
  return 0;
}

/* Whether the registrations of its blocks stand, on both sides as far as this one knows. Otherwise `fault` names one.
 */
static int stands(ProxycclTransfer *transfer) {
  for (int remote = 0; remote < 2; ++remote) {
    const Guard *guard = &transfer->guards[remote];
    if (guard->ledger == NULL) continue;
    const uint64_t now = proxyccl_ledger_count(guard->ledger);
    if (now != guard->seen && find_ended(transfer, remote, now)) return 0;
  }
  return 1;
}

static void end_without_registration(ProxycclTransfer *transfer) {
  const ProxycclFaultKind kind = transfer->fault.kind;
  const int freed = kind == PROXYCCL_FAULT_FREED || kind == PROXYCCL_FAULT_FREED_HERE;
  transfer_end(transfer, freed ? PROXYCCL_TRANSFER_FAILED : PROXYCCL_TRANSFER_REFUSED);
}

void proxyccl_ledger_begin(uint64_t *ledger, uint64_t number) {
  __atomic_store_n(&ledger[number % PROXYCCL_LEDGER_WORDS], number, __ATOMIC_RELEASE);
}

void proxyccl_ledger_end(uint64_t *ledger, uint64_t number, int freed) {
  uint64_t *word = &ledger[number % PROXYCCL_LEDGER_WORDS], before = number;
  if (!__atomic_compare_exchange_n(word, &before, freed ? ~number : 0, 0, __ATOMIC_RELEASE, __ATOMIC_RELAXED)) {
    if (freed || before != ~number) return;
    __atomic_store_n(word, 0, __ATOMIC_RELEASE);
  }
  __atomic_add_fetch(&ledger[0], 1, __ATOMIC_RELEASE); /* after the word: who reads it reads that too */
}

uint64_t proxyccl_ledger_count(const uint64_t *ledger) { return __atomic_load_n(&ledger[0], __ATOMIC_ACQUIRE); }

void proxyccl_transfer_guard(ProxycclTransfer *transfer, int remote, const uint64_t *ledger, const uint64_t *rows,
                             uint64_t count) {
  pthread_mutex_lock(&transfer->agent->lock);
  transfer->guards[remote] = (Guard){ledger, rows, count, UINT64_MAX};
  pthread_mutex_unlock(&transfer->agent->lock);
}

static void set_state(ProxycclTransfer *transfer, ProxycclTransferState state) {
  __atomic_store_n(&transfer->state, state, __ATOMIC_RELEASE); /* whoever reads it may read the data */
}

ProxycclTransferState proxyccl_transfer_state(const ProxycclTransfer *transfer) {
  return __atomic_load_n(&transfer->state, __ATOMIC_ACQUIRE);
}

void transfer_end(ProxycclTransfer *transfer, ProxycclTransferState state) {
  if (state == PROXYCCL_TRANSFER_DONE && transfer->has_message) {
    ProxycclAgent *agent = transfer->agent;
    const Buffer *message = &transfer->message;
    int error;
    if (transfer->link == NULL) {
      error = agent_receive(agent, agent->name, strlen(agent->name), message->bytes, message->used);
    } else {
      error = link_append(transfer->link, FRAME_MESSAGE, 0, message->bytes, message->used, NULL, 0);
      link_send(transfer->link);
    }
    transfer->error = error;
    if (error != 0) state = error == ENOTCONN ? PROXYCCL_TRANSFER_LOST : PROXYCCL_TRANSFER_FAILED;
  }
  transfer->times.ended = now_ns();
  if (transfer->words != NULL) { /* the data, too, before what lets the stream go on */
    __atomic_store_n(&transfer->words[1], 1, __ATOMIC_RELEASE);
    transfer->words = NULL;
  }
  if (transfer->whole == NULL && transfer->served == NULL) log_end(transfer, state);
  set_state(transfer, state);
  if (transfer->whole != NULL) {
    staged_moved(transfer);
  } else if (transfer->served != NULL) {
    stage_carried(transfer);
  } else {
    pthread_cond_broadcast(&transfer->agent->changed);
  }
}

void transfer_queue(ProxycclTransfer *transfer, ProxycclTransfer ***last) {
  transfer->next = NULL;
  transfer->queued = 1;
  **last = transfer;
  *last = &transfer->next;
}

void transfer_unqueue(ProxycclTransfer *transfer, ProxycclTransfer **first, ProxycclTransfer ***last) {
  ProxycclTransfer **at = first;
  while (*at != transfer) at = &(*at)->next;
  *at = transfer->next;
  if (*last == &transfer->next) *last = at;
  transfer->queued = 0;
}

/* A piece of a copy: whole blocks where they lie in the two lists, or a part of a long block, in `parts`. */
typedef struct Piece {
  struct iovec parts[2];
  const struct iovec *local, *remote;
  uint32_t blocks;
  uint64_t bytes, copied;
} Piece;

/* The number of a stage that no thread has; PROXYCCL_STAGES: all are taken. */
static uint32_t free_stage(const ProxycclTransfer *transfer) {
  uint32_t stage = 0;
  while (stage < PROXYCCL_STAGES && transfer->staged[stage]) ++stage;
  return stage;
}

/* Whether a piece may be begun: it has a stage if it needs one. */
static int may_copy(const ProxycclTransfer *transfer) {
  return transfer->staging == NULL || free_stage(transfer) < PROXYCCL_STAGES;
}

static void next_piece(const ProxycclTransfer *transfer, Piece *piece) {
  const Position at = transfer->at;
  const uint64_t most = transfer->staging != NULL ? PROXYCCL_STAGE_BYTES : PIECE_BYTES;
  piece->local = transfer->local + at.index;
  piece->remote = transfer->remote + at.index;
  piece->blocks = 0;
  piece->bytes = piece->copied = 0;
  while (at.offset == 0 && piece->blocks < IOV_MAX && at.index + piece->blocks < transfer->count) {
    const uint64_t bytes = piece->local[piece->blocks].iov_len;
    if (piece->bytes + bytes > most) break;
    piece->bytes += bytes;
    ++piece->blocks;
  }
  if (piece->blocks > 0) return;
  piece->bytes = blocks_parts(transfer->local, transfer->count, at, most, 1, &piece->parts[0], &piece->blocks);
  blocks_parts(transfer->remote, transfer->count, at, most, 1, &piece->parts[1], &piece->blocks);
  piece->local = &piece->parts[0];
  piece->remote = &piece->parts[1];
}

/* 0 or an errno. */
static int copy_piece(Piece *piece, int writes, pid_t pid) {
  if (pid != 0) {
    const ssize_t copied = writes ? process_vm_writev(pid, piece->local, piece->blocks, piece->remote, piece->blocks, 0)
                                  : process_vm_readv(pid, piece->local, piece->blocks, piece->remote, piece->blocks, 0);
    if (copied < 0) return errno;
    piece->copied = (uint64_t)copied;
    return piece->copied < piece->bytes ? EFAULT : 0;
  }
  const struct iovec *to = writes ? piece->remote : piece->local, *from = writes ? piece->local : piece->remote;
  piece->copied = guard_copy(to, from, piece->blocks, piece->bytes);
  return piece->copied < piece->bytes ? EFAULT : 0;
}

/* No more pieces are begun. */
static void drop_rest(ProxycclTransfer *transfer) {
  transfer->left = 0;
  if (transfer->queued) transfer_unqueue(transfer, &transfer->agent->first, &transfer->agent->last);
}

/* Remembers where a copy stopped: on the peer's side, or, if that is not mapped here, on this one. A stage always is.
 * Where the CPU copies, both sides are mapped by this process. */
static void note_fault(ProxycclTransfer *transfer, const Piece *piece) {
  Position at = {0, 0};
  blocks_advance(piece->remote, &at, piece->copied);
  char *remote = (char *)piece->remote[at.index].iov_base + at.offset;
  transfer->fault = (ProxycclFault){PROXYCCL_FAULT_PROTECTED, (uintptr_t)remote};
  if (transfer->staging != NULL) return;
  if (transfer->pid == 0 && !is_mapped(remote)) transfer->fault.kind = PROXYCCL_FAULT_FREED_HERE;
  at = (Position){0, 0};
  blocks_advance(piece->local, &at, piece->copied);
  char *local = (char *)piece->local[at.index].iov_base + at.offset;
  if (!is_mapped(local)) transfer->fault = (ProxycclFault){PROXYCCL_FAULT_FREED_HERE, (uintptr_t)local};
}

static void end_copies(ProxycclTransfer *transfer) {
  ProxycclLink *link = transfer->link;
  if (transfer->error == ESRCH) link_lose(link, "the peer's process has ended");
  if (link != NULL && link->lost != NULL) {
    transfer_end(transfer, PROXYCCL_TRANSFER_LOST); /* the number of its process may be another's by now */
  } else if (!stands(transfer)) {
    end_without_registration(transfer);
  } else if (transfer->pid != 0 && transfer->error == EFAULT && transfer->fault.kind == PROXYCCL_FAULT_PROTECTED) {
    /* The peer knows what became of it. If it has gone, so does the link, which then ends the transfer. */
    transfer->asks = 1;
    transfer_queue(transfer, &link->last);
    link_send(link);
  } else {
    transfer_end(transfer, transfer->error != 0 ? PROXYCCL_TRANSFER_FAILED : PROXYCCL_TRANSFER_DONE);
  }
}

void transfer_copy(ProxycclTransfer *transfer) {
  ProxycclAgent *agent = transfer->agent;
  Piece piece;
  if (!stands(transfer)) {
    drop_rest(transfer);
    if (transfer->copying == 0) end_copies(transfer);
    return;
  }
  next_piece(transfer, &piece);
  blocks_advance(transfer->local, &transfer->at, piece.bytes);
  const uint64_t left = transfer->left;
  transfer->left -= piece.bytes;
  if (transfer->left == 0) drop_rest(transfer);
  ++transfer->copying;
  const uint32_t stage = transfer->staging != NULL ? free_stage(transfer) : 0;
  transfer->staged[stage] = 1;
  pthread_mutex_unlock(&agent->lock);
  const int error = transfer->staging != NULL ? device_stage(transfer, stage, piece.local, piece.remote, piece.blocks,
                                                             piece.bytes, &piece.copied)
                                              : copy_piece(&piece, transfer->writes, transfer->pid);
  pthread_mutex_lock(&agent->lock);
  --transfer->copying;
  transfer->staged[stage] = 0;
  if (transfer->staging != NULL) { /* somebody may wait for the stage */
    pthread_cond_broadcast(&agent->changed);
    if (agent->waits_for_stage) agent_wake(agent);
  }
  if (error == EFAULT && (transfer->error == 0 || (transfer->error == EFAULT && left > transfer->faulted))) {
    note_fault(transfer, &piece); /* the first, if several pieces fail at once */
    transfer->faulted = left;
  }
  if (transfer->error == 0) transfer->error = error;
  if (error != 0 || (transfer->link != NULL && transfer->link->lost != NULL)) drop_rest(transfer);
  if (transfer->cancel) {
    pthread_cond_broadcast(&agent->changed); /* whoever cancels it ends it */
  } else if (transfer->left == 0 && transfer->copying == 0) {
    end_copies(transfer);
  }
}

void transfer_end_answered(ProxycclTransfer *transfer) {
  if (transfer->refusal == EACCES) {
    transfer->fault.kind = PROXYCCL_FAULT_DEREGISTERED;
    transfer_end(transfer, PROXYCCL_TRANSFER_REFUSED);
  } else if (transfer->refusal != 0 || transfer->asks) {
    if (transfer->refusal == EFAULT) transfer->fault.kind = PROXYCCL_FAULT_FREED;
    if (transfer->refusal == EPERM && transfer->fault.kind == PROXYCCL_FAULT_NONE)
      transfer->fault.kind = PROXYCCL_FAULT_PROTECTED;
    if (!transfer->asks) transfer->error = (int)transfer->refusal;
    transfer_end(transfer, PROXYCCL_TRANSFER_FAILED);
  } else {
    transfer_end(transfer, PROXYCCL_TRANSFER_DONE);
  }
}

void transfer_lose(ProxycclTransfer *transfer) {
  drop_rest(transfer);
  if (transfer->copying == 0) transfer_end(transfer, PROXYCCL_TRANSFER_LOST); /* else the last copy does */
}

/* Whether its link's frames carry it, or ask about it. */
static int is_by_socket(const ProxycclTransfer *transfer) { return transfer->by_socket || transfer->asks; }

int transfer_has_piece(const ProxycclTransfer *transfer) {
  return transfer->state == PROXYCCL_TRANSFER_ACTIVE && transfer->copier == NULL && transfer->rows == NULL &&
         !is_by_socket(transfer) && !transfer->cancel && transfer->left > 0 && may_copy(transfer);
}

ProxycclTransfer *transfer_make(ProxycclAgent *agent, ProxycclLink *link) {
  ProxycclTransfer *transfer = calloc(1, sizeof *transfer);
  if (transfer == NULL) return NULL;
  transfer->agent = agent;
  transfer->link = link;
  ++agent->references;
  if (link != NULL) ++link->references;
  return transfer;
}

ProxycclTransfer *transfer_new(ProxycclAgent *agent, ProxycclLink *link) {
  pthread_mutex_lock(&agent->lock);
  ProxycclTransfer *transfer = transfer_make(agent, link);
  pthread_mutex_unlock(&agent->lock);
  return transfer;
}

ProxycclTransfer *proxyccl_transfer_create(ProxycclAgent *agent, ProxycclLink *link, int writes, const uint64_t *local,
                                           const uint64_t *remote, uint64_t count, const ProxycclStaging *staging,
                                           ProxycclWay way) {
  const int error = guard_install(); /* the program may have installed another handler */
  ProxycclTransfer *transfer = error == 0 ? transfer_new(agent, link) : NULL;
  if (transfer == NULL) return NULL;
  transfer->staging = staging;
  transfer->pid = link == NULL || way != PROXYCCL_BY_LINK ? 0 : link->pid;
  transfer->by_socket = link != NULL && way != PROXYCCL_BY_MAPPING && transfer->pid == 0;
  /* An iovec is an address and a length, of a word each. */
  transfer->local = (const struct iovec *)local;
  transfer->remote = (const struct iovec *)remote;
  transfer->writes = writes;
  transfer->count = count;
  for (uint64_t i = 0; i < count; ++i) transfer->bytes += transfer->local[i].iov_len;
  if (transfer->by_socket && staging != NULL && !staged_create(transfer, way == PROXYCCL_BY_FABRIC)) {
    proxyccl_transfer_release(transfer);
    return NULL;
  }
  return transfer;
}

void transfer_begin(ProxycclTransfer *transfer, const uint64_t *stream) {
  ProxycclAgent *agent = transfer->agent;
  ProxycclLink *link = transfer->link;
  transfer->left = transfer->bytes;
  if (agent->stopped) {
    transfer_end(transfer, PROXYCCL_TRANSFER_CANCELED);
  } else if (link != NULL && proxyccl_link_lost(link) != NULL) {
    transfer_end(transfer, PROXYCCL_TRANSFER_LOST);
  } else if (!stands(transfer)) {
    end_without_registration(transfer);
  } else if (transfer->left == 0) {
    transfer_end(transfer, PROXYCCL_TRANSFER_DONE);
  } else if (transfer->copier != NULL) {
    device_start(transfer, stream);
  } else if (transfer->parts != NULL) {
    staged_look(transfer);
  } else if (transfer->rows != NULL) {
    fabric_start(transfer);
  } else if (transfer->by_socket) {
    transfer_queue(transfer, &link->last);
    link_send(link);
  } else if (transfer->bytes <= PIECE_BYTES) {
    while (transfer_has_piece(transfer)) transfer_copy(transfer);
  } else {
    transfer_queue(transfer, &agent->last);
    agent_wake(agent);
  }
}

/* Makes it active, with the agent locked. 0 or an error. */
static int activate(ProxycclTransfer *transfer, const char *message, uint64_t bytes, uint64_t posted) {
  if (transfer->state == PROXYCCL_TRANSFER_ACTIVE) return EBUSY;
  transfer->message.used = 0;
  if (message != NULL && !buffer_append(&transfer->message, message, bytes)) return ENOMEM;
  transfer->has_message = message != NULL;
  transfer->times.posted = posted;
  transfer->at = (Position){0, 0};
  transfer->left = 0;
  transfer->error = 0;
  transfer->refusal = 0;
  transfer->asks = 0;
  transfer->abandoned = 0;
  transfer->fault = (ProxycclFault){PROXYCCL_FAULT_NONE, 0};
  transfer->cancel = 0;
  transfer->rung = 1;
  set_state(transfer, PROXYCCL_TRANSFER_ACTIVE);
  return 0;
}

void transfer_restart(ProxycclTransfer *transfer) {
  activate(transfer, NULL, 0, now_ns());
  transfer_begin(transfer, NULL);
}

int proxyccl_transfer_post(ProxycclTransfer *transfer, const char *message, uint64_t bytes, const uint64_t *stream) {
  ProxycclAgent *agent = transfer->agent;
  if (bytes > PROXYCCL_LONGEST_MESSAGE) return EMSGSIZE;
  const uint64_t posted = now_ns();
  pthread_mutex_lock(&agent->lock);
  const int error = activate(transfer, message, bytes, posted);
  if (error == 0) {
    transfer_begin(transfer, stream);
    transfer->times.returned = now_ns();
  }
  pthread_mutex_unlock(&agent->lock);
  return error;
}

int proxyccl_transfer_post_after(ProxycclTransfer *transfer, const char *message, uint64_t bytes, uint64_t *words) {
  ProxycclAgent *agent = transfer->agent;
  if (bytes > PROXYCCL_LONGEST_MESSAGE) return EMSGSIZE;
  const uint64_t posted = now_ns();
  pthread_mutex_lock(&agent->lock);
  const int error = activate(transfer, message, bytes, posted);
  if (error == 0) {
    transfer->words = words;
    transfer->rung = 0;
    if (agent->stopped) {
      transfer_end(transfer, PROXYCCL_TRANSFER_CANCELED);
    } else {
      transfer_queue(transfer, &agent->last_looked_at);
      agent_wake(agent);
    }
    transfer->times.returned = now_ns();
  }
  pthread_mutex_unlock(&agent->lock);
  return error;
}

int transfer_is_looked_at(const ProxycclTransfer *transfer) { return transfer->copier != NULL || !transfer->rung; }

int transfer_look(ProxycclTransfer *transfer) {
  ProxycclAgent *agent = transfer->agent;
  if (transfer->copier != NULL) return device_look(transfer);
  if (transfer->rung && transfer->parts != NULL) return staged_look(transfer);
  if (transfer->rung || __atomic_load_n(&transfer->words[0], __ATOMIC_ACQUIRE) == 0) return 0;
  transfer_unqueue(transfer, &agent->looked_at, &agent->last_looked_at);
  transfer->rung = 1;
  transfer_begin(transfer, NULL);
  return 1;
}

int transfer_cancel(ProxycclTransfer *transfer, uint64_t timeout_ns) {
  ProxycclAgent *agent = transfer->agent;
  if (transfer->state != PROXYCCL_TRANSFER_ACTIVE) return 0;
  transfer->cancel = 1;
  while (transfer->copying > 0) pthread_cond_wait(&agent->changed, &agent->lock); /* for one piece of each thread */
  if (transfer->state != PROXYCCL_TRANSFER_ACTIVE) return 0;
  ProxycclLink *link = transfer->link;
  const int by_socket = is_by_socket(transfer) && transfer->parts == NULL;
  if (transfer->copier != NULL) device_finish(transfer);
  if (!transfer->rung) transfer_unqueue(transfer, &agent->looked_at, &agent->last_looked_at);
  if (transfer->rung &&
      (transfer->parts != NULL ? !staged_finish(transfer, timeout_ns)
                               : transfer->rows != NULL && !transfer->asks && !fabric_finish(transfer, timeout_ns))) {
    transfer->cancel = 0;
    transfer->abandoned = 1;
    return EBUSY;
  }
  if (transfer->queued && by_socket) transfer_unqueue(transfer, &link->first, &link->last);
  if (transfer->queued) transfer_unqueue(transfer, &agent->first, &agent->last);
  if (by_socket) link_forget_transfer(link, transfer);
  if (transfer->state == PROXYCCL_TRANSFER_ACTIVE) transfer_end(transfer, PROXYCCL_TRANSFER_CANCELED);
  return 0;
}

int proxyccl_transfer_cancel(ProxycclTransfer *transfer, uint64_t timeout_ns) {
  pthread_mutex_lock(&transfer->agent->lock);
  const int error = transfer_cancel(transfer, timeout_ns);
  pthread_mutex_unlock(&transfer->agent->lock);
  return error;
}

void transfer_free(ProxycclTransfer *transfer) {
  --transfer->agent->references;
  staged_free(transfer);
  if (transfer->link != NULL) link_unreference(transfer->link);
  buffer_free(&transfer->message);
  free(transfer);
}

int proxyccl_transfer_release(ProxycclTransfer *transfer) {
  ProxycclAgent *agent = transfer->agent;
  pthread_mutex_lock(&agent->lock);
  ++agent->references; /* of this call */
  const int error = transfer_cancel(transfer, LONGEST_CANCEL_S * 1000000000ull);
  if (error == 0) {
    transfer_free(transfer);
  } else {
    transfer->orphaned = 1;
  }
  agent_unreference(agent);
  return error;
}

ProxycclTransferState proxyccl_transfer_wait(ProxycclTransfer *transfer, uint64_t timeout_ns) {
  ProxycclAgent *agent = transfer->agent;
  if (proxyccl_transfer_state(transfer) == PROXYCCL_TRANSFER_ACTIVE) {
    const struct timespec deadline = agent_deadline(timeout_ns);
    const uint64_t end = (uint64_t)deadline.tv_sec * 1000000000u + (uint64_t)deadline.tv_nsec;
    int is_over = 0; /* a last look comes after the time */
    pthread_mutex_lock(&agent->lock);
    if (transfer->link != NULL) link_wake(transfer->link);
    while (transfer->state == PROXYCCL_TRANSFER_ACTIVE && !is_over) {
      is_over = now_ns() >= end;
      if (transfer_has_piece(transfer)) {
        transfer_copy(transfer);
      } else if (transfer_is_looked_at(transfer)) {
        if (!transfer_look(transfer) && !is_over) device_rest(transfer);
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
    if (transfer_has_piece(transfer)) {
      transfer_copy(transfer);
    } else if (is_by_socket(transfer)) {
      link_help(transfer->link);
    } else if (transfer->rows != NULL) {
      fabric_poll(transfer->agent);
    }
    const int looks = transfer_is_looked_at(transfer) || transfer->parts != NULL;
    if (transfer->state == PROXYCCL_TRANSFER_ACTIVE && looks) transfer_look(transfer);
    pthread_mutex_unlock(&transfer->agent->lock);
  }
  return proxyccl_transfer_state(transfer);
}

int proxyccl_transfer_error(const ProxycclTransfer *transfer) { return transfer->error; }

void proxyccl_transfer_fault(const ProxycclTransfer *transfer, ProxycclFault *fault) {
  pthread_mutex_lock(&transfer->agent->lock);
  *fault = transfer->fault;
  pthread_mutex_unlock(&transfer->agent->lock);
}

void proxyccl_transfer_times(const ProxycclTransfer *transfer, ProxycclTransferTimes *times) {
  pthread_mutex_lock(&transfer->agent->lock);
  *times = transfer->times;
  pthread_mutex_unlock(&transfer->agent->lock);
}
