/* Transfers that threads copy piece by piece: with the CPU if this process maps the local and the remote memory, else
 * with the kernel. See transfers.h. */
#include <errno.h>
#include <limits.h>

#include "parts.h"

typedef struct CopyTransfer {
  ProxycclTransfer base;
  uint64_t faulted;               /* bytes left to copy when the piece that caused `fault` began */
  pid_t pid;                      /* the process that the kernel copies from and to; 0 if the CPU copies */
  const ProxycclStaging *staging; /* the stages for device memory; NULL for host memory */
  int staged[PROXYCCL_STAGES];    /* for each stage, whether a thread uses it */
} CopyTransfer;

int proxyccl_process_read(int32_t pid, uint64_t address, char *to, uint64_t bytes) {
  const struct iovec local = {to, bytes}, remote = {(void *)(uintptr_t)address, bytes};
  const ssize_t read = process_vm_readv(pid, &local, 1, &remote, 1, 0);
  return read == (ssize_t)bytes ? 0 : read < 0 ? errno : EFAULT;
}

/* A piece of a copy. If a piece consists of whole blocks, `local` and `remote` point into the transfer's lists; if it
 * is a part of one long block, `local` and `remote` point to `parts`. */
typedef struct Piece {
  struct iovec parts[2];
  const struct iovec *local, *remote;
  uint32_t blocks;
  uint64_t bytes, copied;
} Piece;

/* Returns the number of an unused stage, or PROXYCCL_STAGES if all are in use. */
static uint32_t free_stage(const CopyTransfer *transfer) {
  uint32_t stage = 0;
  while (stage < PROXYCCL_STAGES && transfer->staged[stage]) ++stage;
  return stage;
}

/* Takes the next piece from the data that is left to copy. */
static void next_piece(CopyTransfer *self, Piece *piece) {
  Request *all = &self->base.request;
  const Position at = all->at;
  const uint64_t most = self->staging != NULL ? PROXYCCL_STAGE_BYTES : PIECE_BYTES;
  piece->local = all->local + at.index;
  piece->remote = all->remote + at.index;
  piece->blocks = 0;
  piece->bytes = piece->copied = 0;
  while (at.offset == 0 && piece->blocks < IOV_MAX && at.index + piece->blocks < all->count) {
    const uint64_t bytes = piece->local[piece->blocks].iov_len;
    if (piece->bytes + bytes > most) break;
    piece->bytes += bytes;
    ++piece->blocks;
  }
  if (piece->blocks == 0) {
    piece->bytes = blocks_parts(all->local, all->count, at, most, 1, &piece->parts[0], &piece->blocks);
    blocks_parts(all->remote, all->count, at, most, 1, &piece->parts[1], &piece->blocks);
    piece->local = &piece->parts[0];
    piece->remote = &piece->parts[1];
  }
  blocks_advance(all->local, &all->at, piece->bytes);
  all->left -= piece->bytes;
}

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

/* Copies between a stage and the device's blocks, and waits for the copy. Returns the driver's status. */
static int between(const ProxycclStaging *staging, uint32_t stage, int to_device, const struct iovec *blocks,
                   uint32_t count) {
  void *memory = (void *)(uintptr_t)staging->memory[stage];
  const int status = staging_queue(staging, stage, memory, to_device, blocks, count);
  const int ended = staging_await(staging, stage, LONGEST_CANCEL_NS);
  return status != 0 ? status : ended;
}

/* Copies a piece through a stage. Returns 0, an errno, or the driver's negated status. */
static int copy_staged(const CopyTransfer *self, uint32_t stage, Piece *piece) {
  const ProxycclStaging *staging = self->staging;
  const struct iovec here = {(void *)(uintptr_t)staging->memory[stage], piece->bytes};
  const int writes = self->base.writes;
  const int status = writes ? between(staging, stage, 0, piece->local, piece->blocks) : 0;
  if (status != 0) return -status;
  const ssize_t done = writes ? process_vm_writev(self->pid, &here, 1, piece->remote, piece->blocks, 0)
                              : process_vm_readv(self->pid, &here, 1, piece->remote, piece->blocks, 0);
  if (done < 0) return errno;
  piece->copied = (uint64_t)done;
  if (piece->copied < piece->bytes) return EFAULT;
  return writes ? 0 : -between(staging, stage, 1, piece->local, piece->blocks);
}

/* Drops the pieces that no thread has begun. */
static void drop_rest(CopyTransfer *self) {
  self->base.request.left = 0;
  queue_remove(&self->base.agent->copies, self);
}

/* Records the address at which a copy stopped: the local address if that address is not mapped, otherwise the remote
 * address. If the copy uses a stage, records the remote address, because a stage is always mapped. If the CPU copies,
 * both addresses belong to this process. */
static void note_fault(CopyTransfer *self, const Piece *piece) {
  ProxycclFault *fault = &self->base.fault;
  Position at = {0, 0};
  blocks_advance(piece->remote, &at, piece->copied);
  char *remote = (char *)piece->remote[at.index].iov_base + at.offset;
  *fault = (ProxycclFault){PROXYCCL_FAULT_PROTECTED, (uintptr_t)remote};
  if (self->staging != NULL) return;
  if (self->pid == 0 && !is_mapped(remote)) fault->kind = PROXYCCL_FAULT_FREED_HERE;
  at = (Position){0, 0};
  blocks_advance(piece->local, &at, piece->copied);
  char *local = (char *)piece->local[at.index].iov_base + at.offset;
  if (!is_mapped(local)) *fault = (ProxycclFault){PROXYCCL_FAULT_FREED_HERE, (uintptr_t)local};
}

static void end(CopyTransfer *self) {
  ProxycclTransfer *transfer = &self->base;
  ProxycclLink *link = transfer->link;
  if (transfer->error == ESRCH) link_lose(link, "the peer's process has ended");
  if (!transfer_stands(transfer)) {
    transfer_end_deregistered(transfer);
  } else if (self->pid != 0 && transfer->error == EFAULT && transfer->fault.kind == PROXYCCL_FAULT_PROTECTED) {
    /* Asks the peer whether the block is mapped. The peer's answer, or the loss of the link, ends the transfer. */
    link_start(link, &transfer->request, 0, &transfer->fault);
  } else {
    transfer_end(transfer, transfer->error != 0 ? PROXYCCL_TRANSFER_FAILED : PROXYCCL_TRANSFER_DONE);
  }
}

static int copy(ProxycclTransfer *transfer) {
  CopyTransfer *self = (CopyTransfer *)transfer;
  ProxycclAgent *agent = transfer->agent;
  const uint32_t stage = self->staging != NULL ? free_stage(self) : 0;
  uint64_t *rest = &transfer->request.left;
  Piece piece;
  if (transfer->state != PROXYCCL_TRANSFER_ACTIVE || transfer->cancel || *rest == 0 || stage == PROXYCCL_STAGES)
    return 0;
  if (!transfer_stands(transfer) || !grant_stands(transfer)) {
    drop_rest(self);
    if (transfer->copying == 0) end(self);
    return 1;
  }
  const uint64_t left = *rest;
  next_piece(self, &piece);
  if (*rest == 0) drop_rest(self);
  ++transfer->copying;
  ++agent->copying;
  self->staged[stage] = 1;
  pthread_mutex_unlock(&agent->lock);
  const int error =
      self->staging != NULL ? copy_staged(self, stage, &piece) : copy_piece(&piece, transfer->writes, self->pid);
  pthread_mutex_lock(&agent->lock);
  --transfer->copying;
  if (--agent->copying == 0 && agent->stopped) pthread_cond_broadcast(&agent->changed);
  self->staged[stage] = 0;
  if (self->staging != NULL) { /* wakes threads that wait for a free stage */
    pthread_cond_broadcast(&agent->changed);
    if (agent->waits_for_stage) agent_wake(agent);
  }
  if (error == EFAULT && (transfer->error == 0 || (transfer->error == EFAULT && left > self->faulted))) {
    note_fault(self, &piece); /* if several pieces fail, the first one in the list determines the fault */
    self->faulted = left;
  }
  if (transfer->error == 0) transfer->error = error;
  if (error != 0 || (transfer->link != NULL && transfer->link->lost != NULL)) drop_rest(self);
  if (transfer->cancel) {
    pthread_cond_broadcast(&agent->changed); /* the canceling thread ends the transfer */
  } else if (*rest == 0 && transfer->copying == 0) {
    end(self);
  }
  return 1;
}

static void begin(ProxycclTransfer *transfer, const uint64_t *stream) {
  (void)stream;
  transfer->request.at = (Position){0, 0};
  transfer->request.left = transfer->bytes;
  if (transfer->bytes <= PIECE_BYTES) {
    while (copy(transfer)) {}
  } else {
    queue_push(&transfer->agent->copies, transfer);
    agent_wake(transfer->agent);
  }
}

static int finish(ProxycclTransfer *transfer, uint64_t timeout_ns) {
  (void)timeout_ns;
  drop_rest((CopyTransfer *)transfer);
  return 1;
}

static void lose(ProxycclTransfer *transfer) {
  drop_rest((CopyTransfer *)transfer);
  if (transfer->copying == 0)
    transfer_end(transfer, PROXYCCL_TRANSFER_LOST); /* if copies are running, the last one ends the transfer */
}

ProxycclTransfer *proxyccl_transfer_create(ProxycclAgent *agent, ProxycclLink *link, const ProxycclBlocks *blocks,
                                           const ProxycclStaging *staging, int32_t pid) {
  static const TransferPath path = {.begin = begin, .copy = copy, .finish = finish, .lose = lose};
  CopyTransfer *self = (CopyTransfer *)transfer_of_blocks(agent, link, sizeof *self, &path, blocks);
  if (self == NULL) return NULL;
  self->pid = pid;
  self->staging = staging;
  return &self->base;
}
