/* Transfers between a device and a peer, through stages.
 *
 * Each stage holds one part of the data at a time. For a write, the device fills the stage, and then the data moves to
 * the peer; for a read, the data moves from the peer into the stage, and then the device copies it out. The data moves
 * in one frame of the link or, if the peer's blocks are registered with libfabric, by libfabric's requests. The stages
 * are independent, so the device copies one part while another one moves.
 */
#include <errno.h>

#include "parts.h"

typedef enum PartState {
  PART_IDLE,
  PART_COPYING, /* the device copies to or from the stage */
  PART_MOVING,  /* the stage's data moves to or from the peer */
  PART_MOVED
} PartState;

/* One part of the transfer, which uses one stage. */
typedef struct Part {
  PartState state;
  Request request; /* the part's request, of one frame */
  Origin origin;   /* the stage's address and key for libfabric */
  struct iovec stage, local[FRAME_BLOCKS], remote[FRAME_BLOCKS];
  uint32_t blocks;
  Rdma rdma;      /* the part's libfabric requests, if the transfer has `keys` */
  uint64_t *rows; /* a row of `rdma` for each block */
} Part;

typedef struct StagedTransfer {
  ProxycclTransfer base; /* `base.request` records the first refusal of a part's request, and asks about faults */
  const ProxycclStaging *staging;
  const uint64_t *keys; /* see proxyccl_transfer_create_staged */
  Part parts[PROXYCCL_STAGES];
  uint64_t rows[]; /* of all parts, if the transfer has `keys` */
} StagedTransfer;

static void copy_part(StagedTransfer *self, uint32_t i) {
  Part *part = &self->parts[i];
  ProxycclTransfer *transfer = &self->base;
  part->state = PART_COPYING;
  pthread_mutex_unlock(&transfer->agent->lock);
  const int status =
      staging_queue(self->staging, i, part->stage.iov_base, !transfer->writes, part->local, part->blocks);
  pthread_mutex_lock(&transfer->agent->lock);
  if (status != 0 && transfer->error == 0) transfer->error = -status;
}

static int is_copied(StagedTransfer *self, uint32_t i) {
  ProxycclTransfer *transfer = &self->base;
  pthread_mutex_unlock(&transfer->agent->lock);
  const int status = staging_await(self->staging, i, 0);
  pthread_mutex_lock(&transfer->agent->lock);
  if (status == PROXYCCL_RUNTIME_NOT_READY) return 0;
  if (status != 0 && transfer->error == 0) transfer->error = -status;
  return 1;
}

static void move_part(StagedTransfer *self, Part *part) {
  part->state = PART_MOVING;
  if (self->keys != NULL) {
    rdma_start(&part->rdma, part->stage.iov_len);
    return;
  }
  part->request.count = part->blocks;
  link_start(self->base.link, &part->request, part->stage.iov_len, NULL);
}

/* Describes the libfabric requests of a part, which starts in the block `index`. */
static void fill_rows(StagedTransfer *self, Part *part, uint64_t index) {
  const ProxycclLink *link = self->base.link;
  uint64_t at = (uintptr_t)part->stage.iov_base;
  for (uint32_t i = 0; i < part->blocks; ++i, ++index) {
    const struct iovec *block = &part->remote[i];
    const uint64_t address = (uintptr_t)block->iov_base, *keys = self->keys + (1 + link->rails) * index;
    const uint64_t offset = address - (uintptr_t)self->base.request.remote[index].iov_base;
    const uint64_t row[ROW] = {at, keys[0] + offset, block->iov_len, address};
    uint64_t *to = part->rows + row_words(link) * i;
    memcpy(to, row, sizeof row);
    row_add_rails(to, link, self->staging, keys + 1);
    at += block->iov_len;
  }
}

/* Assigns the next blocks to a part. */
static void fill_part(StagedTransfer *self, Part *part) {
  uint32_t same;
  Request *all = &self->base.request;
  const Position at = all->at;
  part->stage.iov_len =
      blocks_parts(all->local, all->count, at, PROXYCCL_STAGE_BYTES, FRAME_BLOCKS, part->local, &part->blocks);
  blocks_parts(all->remote, all->count, at, PROXYCCL_STAGE_BYTES, FRAME_BLOCKS, part->remote, &same);
  if (self->keys != NULL) fill_rows(self, part, at.index);
  blocks_advance(all->local, &all->at, part->stage.iov_len);
  all->left -= part->stage.iov_len;
}

static int has_failed(StagedTransfer *self) {
  ProxycclTransfer *transfer = &self->base;
  return transfer->error != 0 || transfer->request.refusal != 0 || transfer->abandoned ||
         transfer->link->lost != NULL || !request_stands(&transfer->request);
}

/* Advances a part as far as possible without waiting. Returns 1 if the part's state has changed. */
static int step(StagedTransfer *self, uint32_t i) {
  Part *part = &self->parts[i];
  int stepped = 0;
  for (; !self->base.cancel; stepped = 1) {
    if (part->state == PART_COPYING) {
      if (!is_copied(self, i)) break;
      if (self->base.writes && !has_failed(self)) {
        move_part(self, part);
      } else {
        part->state = PART_IDLE;
      }
    } else if (part->state == PART_MOVED) {
      if (self->base.request.refusal == 0) {
        self->base.request.refusal = part->request.refusal;
        self->base.request.fault = part->request.fault;
      }
      part->state = PART_IDLE;
      if (!self->base.writes && !has_failed(self)) copy_part(self, i);
    } else if (part->state == PART_IDLE && self->base.request.left > 0 && !has_failed(self)) {
      fill_part(self, part);
      if (self->base.writes) {
        copy_part(self, i);
      } else {
        move_part(self, part);
      }
    } else {
      break;
    }
  }
  return stepped;
}

static void end(StagedTransfer *self) {
  ProxycclTransfer *transfer = &self->base;
  if (transfer->error == 0) {
    transfer_answered(&transfer->request);
  } else if (self->keys == NULL || transfer->error < 0 || transfer->abandoned || transfer->fault.address == 0) {
    transfer_end(transfer, PROXYCCL_TRANSFER_FAILED);
  } else { /* a libfabric request failed: asks the peer whether its memory is mapped, as fabric_path.c does */
    link_start(transfer->link, &transfer->request, 0, &transfer->fault);
  }
}

static int look(ProxycclTransfer *transfer) {
  StagedTransfer *self = (StagedTransfer *)transfer;
  ProxycclAgent *agent = transfer->agent;
  if (transfer->state != PROXYCCL_TRANSFER_ACTIVE || transfer->copying > 0 || transfer->cancel) return 0;
  int stepped = 0, waits = 0, active = 0;
  ++transfer->copying;
  for (uint32_t i = 0; i < PROXYCCL_STAGES; ++i) stepped |= step(self, i);
  --transfer->copying;
  if (transfer->cancel) {
    pthread_cond_broadcast(&agent->changed); /* the canceling thread ends the transfer */
    return 0;
  }
  for (uint32_t i = 0; i < PROXYCCL_STAGES; ++i) {
    const PartState state = self->parts[i].state;
    waits |= state == PART_COPYING || state == PART_MOVED;
    active |= state != PART_IDLE;
  }
  const int queued = transfer->node.queued;
  if (!active || !waits) queue_remove(&agent->looked_at, transfer); /* part_moved adds the transfer to the list again */
  if (!active) {
    end(self);
  } else if (waits && !queued) {
    transfer_watch(transfer);
  }
  return stepped;
}

static void part_moved(Request *request) {
  ProxycclTransfer *transfer = request->transfer;
  Part *part = ((StagedTransfer *)transfer)->parts;
  while (&part->request != request) ++part;
  part->state = PART_MOVED;
  pthread_cond_broadcast(&transfer->agent->changed); /* wakes a thread that is canceling the transfer */
  /* If the transfer is queued, copying or being canceled, another thread advances it. */
  if (transfer->node.queued || transfer->copying > 0 || transfer->cancel) return;
  transfer_watch(transfer);
}

static void part_carried(Rdma *rdma) {
  Part *part = (Part *)((char *)rdma - offsetof(Part, rdma));
  ProxycclTransfer *transfer = part->request.transfer;
  if (rdma->error != 0 && transfer->error == 0) {
    transfer->error = rdma->error;
    transfer->fault.address = rdma->fault;
  }
  part_moved(&part->request);
}

static void begin(ProxycclTransfer *transfer, const uint64_t *stream) {
  (void)stream;
  transfer->request.at = (Position){0, 0};
  transfer->request.left = transfer->bytes;
  transfer->request.refusal = 0;
  transfer->request.asks = 0;
  look(transfer);
}

static void help(ProxycclTransfer *transfer) {
  link_help(transfer->link);
  if (((StagedTransfer *)transfer)->keys != NULL) fabric_poll(transfer->agent);
  look(transfer);
}

static int finish(ProxycclTransfer *transfer, uint64_t timeout_ns) {
  StagedTransfer *self = (StagedTransfer *)transfer;
  ProxycclAgent *agent = transfer->agent;
  const struct timespec deadline = agent_deadline(timeout_ns);
  int timed_out = 0, over = 1;
  transfer->request.left = 0;
  ++transfer->copying; /* while `copying` is not 0, the transfer stays allocated */
  link_wake(transfer->link);
  for (uint32_t i = 0; i < PROXYCCL_STAGES; ++i) {
    Part *part = &self->parts[i];
    if (part->state == PART_MOVING && self->keys != NULL) {
      rdma_drop(&part->rdma);
      if (part->rdma.unanswered == 0) part->state = PART_MOVED;
    } else if (part->state == PART_MOVING && (part->request.node.queued || part->request.origin == NULL)) {
      link_forget(transfer->link, &part->request);
      part->state = PART_MOVED;
    }
    while (part->state == PART_MOVING && !timed_out) { /* waits, because the peer may still access the stage */
      timed_out = pthread_cond_timedwait(&agent->changed, &agent->lock, &deadline) != 0;
    }
    over = over && part->state != PART_MOVING;
    if (part->state == PART_MOVING) continue;
    if (part->state == PART_COPYING) {
      pthread_mutex_unlock(&agent->lock);
      staging_await(self->staging, i, LONGEST_CANCEL_NS);
      pthread_mutex_lock(&agent->lock);
    }
    part->state = PART_IDLE;
  }
  --transfer->copying;
  pthread_cond_broadcast(&agent->changed); /* another thread may wait to cancel the transfer */
  return over;
}

ProxycclTransfer *proxyccl_transfer_create_staged(ProxycclAgent *agent, ProxycclLink *link,
                                                  const ProxycclBlocks *blocks, const ProxycclStaging *staging,
                                                  int by_fabric, const uint64_t *keys) {
  static const TransferPath path = {.begin = begin, .look = look, .help = help, .finish = finish, .soon = 1};
  const size_t words = keys == NULL ? 0 : FRAME_BLOCKS * row_words(link);
  const size_t bytes = sizeof(StagedTransfer) + PROXYCCL_STAGES * words * sizeof(uint64_t);
  StagedTransfer *self = (StagedTransfer *)transfer_of_blocks(agent, link, bytes, &path, blocks);
  if (self == NULL) return NULL;
  self->staging = staging;
  self->keys = keys;
  for (uint32_t i = 0; i < PROXYCCL_STAGES; ++i) {
    Part *part = &self->parts[i];
    part->request = (Request){.transfer = &self->base,
                              .writes = blocks->writes,
                              .local = &part->stage,
                              .remote = part->remote,
                              .origin = by_fabric ? &part->origin : NULL,
                              .ended = part_moved};
    part->stage.iov_base = (void *)(uintptr_t)staging->memory[i];
    part->origin.address = staging->base + i * (uint64_t)PROXYCCL_STAGE_BYTES;
    memcpy(part->origin.keys, staging->keys, sizeof staging->keys);
    part->rows = self->rows + i * words;
    part->rdma = (Rdma){.link = link, .writes = blocks->writes, .rows = part->rows, .ended = part_carried};
  }
  return &self->base;
}
