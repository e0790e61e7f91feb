/* Transfers, and the copies of those that need no socket. See transfers.h. */
#include <errno.h>
#include <limits.h>
#include <time.h>

#include "clock.h"
#include "parts.h"

enum { POST_BYTES = 256 << 10 }; /* a copy up to this takes its caller no longer than waking the agent's thread would */

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
  set_state(transfer, state);
  pthread_cond_broadcast(&transfer->agent->changed);
}

/* The next piece of a copy: whole blocks where they lie in the two lists, or a part of a long block, in `parts`. */
static uint32_t next_piece(const ProxycclTransfer *transfer, struct iovec parts[2], const struct iovec **local,
                           const struct iovec **remote) {
  const Position at = transfer->at;
  uint64_t bytes = 0;
  uint32_t blocks = 0;
  *local = transfer->local + at.index;
  *remote = transfer->remote + at.index;
  if (at.offset == 0) {
    while (blocks < IOV_MAX && at.index + blocks < transfer->count) {
      bytes += (*local)[blocks].iov_len;
      if (bytes > PIECE_BYTES) break;
      ++blocks;
    }
  }
  if (blocks > 0) return blocks;
  uint32_t used;
  blocks_parts(transfer->local, transfer->count, at, PIECE_BYTES, 1, &parts[0], &used);
  blocks_parts(transfer->remote, transfer->count, at, PIECE_BYTES, 1, &parts[1], &used);
  *local = &parts[0];
  *remote = &parts[1];
  return 1;
}

/* Bytes copied, or -1 with errno. */
static ssize_t copy_piece(const ProxycclTransfer *transfer, pid_t pid) {
  struct iovec parts[2];
  const struct iovec *local, *remote;
  const uint32_t blocks = next_piece(transfer, parts, &local, &remote);
  if (pid != 0) {
    return transfer->writes ? process_vm_writev(pid, local, blocks, remote, blocks, 0)
                            : process_vm_readv(pid, local, blocks, remote, blocks, 0);
  }
  ssize_t copied = 0;
  for (uint32_t i = 0; i < blocks; ++i) {
    if (transfer->writes) {
      memmove(remote[i].iov_base, local[i].iov_base, local[i].iov_len);
    } else {
      memmove(local[i].iov_base, remote[i].iov_base, local[i].iov_len);
    }
    copied += (ssize_t)local[i].iov_len;
  }
  return copied;
}

void transfer_copy(ProxycclTransfer *transfer) {
  ProxycclAgent *agent = transfer->agent;
  ProxycclLink *link = transfer->link;
  const pid_t pid = link == NULL ? 0 : link->pid;
  transfer->copying = 1;
  pthread_mutex_unlock(&agent->lock);
  const ssize_t copied = copy_piece(transfer, pid);
  const int error = copied < 0 ? errno : copied == 0 ? EFAULT : 0;
  pthread_mutex_lock(&agent->lock);
  transfer->copying = 0;
  if (__atomic_load_n(&transfer->cancel, __ATOMIC_RELAXED)) {
    pthread_cond_broadcast(&agent->changed); /* whoever cancels it ends it */
  } else if (error == ESRCH) {
    link_lose(link, "the peer's process has ended");
    transfer_end(transfer, PROXYCCL_TRANSFER_LOST);
  } else if (error != 0) {
    transfer->error = error;
    transfer_end(transfer, PROXYCCL_TRANSFER_FAILED);
  } else {
    blocks_advance(transfer->local, &transfer->at, (uint64_t)copied);
    transfer->left -= (uint64_t)copied;
    if (link != NULL && proxyccl_link_lost(link) != NULL) {
      transfer_end(transfer, PROXYCCL_TRANSFER_LOST); /* the number of its process may be another's by now */
    } else if (transfer->left == 0) {
      transfer_end(transfer, PROXYCCL_TRANSFER_DONE);
    }
  }
}

ProxycclTransfer *proxyccl_transfer_create(ProxycclAgent *agent, ProxycclLink *link, int writes, const uint64_t *local,
                                           const uint64_t *remote, uint64_t count) {
  ProxycclTransfer *transfer = calloc(1, sizeof *transfer);
  if (transfer == NULL) return NULL;
  /* An iovec is an address and a length, of a word each. */
  transfer->local = (const struct iovec *)local;
  transfer->remote = (const struct iovec *)remote;
  transfer->agent = agent;
  transfer->link = link;
  transfer->writes = writes;
  transfer->count = count;
  for (uint64_t i = 0; i < count; ++i) transfer->bytes += transfer->local[i].iov_len;
  pthread_mutex_lock(&agent->lock);
  ++agent->references;
  if (link != NULL) ++link->references;
  pthread_mutex_unlock(&agent->lock);
  return transfer;
}

static void queue(ProxycclTransfer *transfer, ProxycclTransfer ***last) {
  transfer->next = NULL;
  transfer->queued = 1;
  **last = transfer;
  *last = &transfer->next;
}

int proxyccl_transfer_post(ProxycclTransfer *transfer, const char *message, uint64_t bytes) {
  ProxycclAgent *agent = transfer->agent;
  ProxycclLink *link = transfer->link;
  if (bytes > PROXYCCL_LONGEST_MESSAGE) return EMSGSIZE;
  const uint64_t posted = now_ns();
  pthread_mutex_lock(&agent->lock);
  int error = transfer->state == PROXYCCL_TRANSFER_ACTIVE ? EBUSY : 0;
  if (error == 0) {
    transfer->message.used = 0;
    if (message != NULL && !buffer_append(&transfer->message, message, bytes)) error = ENOMEM;
  }
  if (error != 0) {
    pthread_mutex_unlock(&agent->lock);
    return error;
  }
  transfer->has_message = message != NULL;
  transfer->times.posted = posted;
  transfer->at = (Position){0, 0};
  transfer->left = transfer->bytes;
  transfer->error = 0;
  transfer->refusal = 0;
  __atomic_store_n(&transfer->cancel, 0, __ATOMIC_RELAXED);
  set_state(transfer, PROXYCCL_TRANSFER_ACTIVE);
  if (agent->stopped) {
    transfer_end(transfer, PROXYCCL_TRANSFER_CANCELED);
  } else if (link != NULL && proxyccl_link_lost(link) != NULL) {
    transfer_end(transfer, PROXYCCL_TRANSFER_LOST);
  } else if (transfer->left == 0) {
    transfer_end(transfer, PROXYCCL_TRANSFER_DONE);
  } else if (link != NULL && link->pid == 0) {
    queue(transfer, &link->last);
    link_send(link);
  } else if (transfer->bytes <= POST_BYTES) {
    while (transfer->state == PROXYCCL_TRANSFER_ACTIVE && !__atomic_load_n(&transfer->cancel, __ATOMIC_RELAXED)) {
      transfer_copy(transfer);
    }
  } else {
    queue(transfer, &agent->last);
    agent_wake(agent);
  }
  transfer->times.returned = now_ns();
  pthread_mutex_unlock(&agent->lock);
  return 0;
}

static void unqueue(ProxycclTransfer *transfer, ProxycclTransfer **first, ProxycclTransfer ***last) {
  ProxycclTransfer **at = first;
  while (*at != transfer) at = &(*at)->next;
  *at = transfer->next;
  if (*last == &transfer->next) *last = at;
  transfer->queued = 0;
}

/* Ends an active transfer as canceled, with the agent locked. */
static void cancel(ProxycclTransfer *transfer) {
  ProxycclAgent *agent = transfer->agent;
  if (transfer->state != PROXYCCL_TRANSFER_ACTIVE) return;
  __atomic_store_n(&transfer->cancel, 1, __ATOMIC_RELAXED);
  while (transfer->copying) pthread_cond_wait(&agent->changed, &agent->lock); /* for one piece at most */
  if (transfer->state != PROXYCCL_TRANSFER_ACTIVE) return;
  ProxycclLink *link = transfer->link;
  const int by_socket = link != NULL && link->pid == 0;
  if (transfer->queued && by_socket) unqueue(transfer, &link->first, &link->last);
  if (transfer->queued) unqueue(transfer, &agent->first, &agent->last);
  if (by_socket) link_forget_transfer(link, transfer);
  if (transfer->state == PROXYCCL_TRANSFER_ACTIVE) transfer_end(transfer, PROXYCCL_TRANSFER_CANCELED);
}

void proxyccl_transfer_cancel(ProxycclTransfer *transfer) {
  pthread_mutex_lock(&transfer->agent->lock);
  cancel(transfer);
  pthread_mutex_unlock(&transfer->agent->lock);
}

void proxyccl_transfer_release(ProxycclTransfer *transfer) {
  ProxycclAgent *agent = transfer->agent;
  pthread_mutex_lock(&agent->lock);
  cancel(transfer);
  if (transfer->link != NULL) link_unreference(transfer->link);
  buffer_free(&transfer->message);
  free(transfer);
  agent_unreference(agent);
}

ProxycclTransferState proxyccl_transfer_wait(ProxycclTransfer *transfer, uint64_t timeout_ns) {
  ProxycclAgent *agent = transfer->agent;
  if (proxyccl_transfer_state(transfer) == PROXYCCL_TRANSFER_ACTIVE) {
    const struct timespec deadline = agent_deadline(timeout_ns);
    pthread_mutex_lock(&agent->lock);
    while (transfer->state == PROXYCCL_TRANSFER_ACTIVE &&
           pthread_cond_timedwait(&agent->changed, &agent->lock, &deadline) == 0) {}
    pthread_mutex_unlock(&agent->lock);
  }
  return proxyccl_transfer_state(transfer);
}

int proxyccl_transfer_error(const ProxycclTransfer *transfer) { return transfer->error; }

void proxyccl_transfer_times(const ProxycclTransfer *transfer, ProxycclTransferTimes *times) {
  pthread_mutex_lock(&transfer->agent->lock);
  *times = transfer->times;
  pthread_mutex_unlock(&transfer->agent->lock);
}
