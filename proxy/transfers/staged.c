/* Transfers between a device and a socket. See transfers.h and parts.h.
 *
 * Each stage carries a part, one frame: the device fills it and the socket sends it, or the other way round. The stages
 * take turns by themselves, so the device copies one part while the socket carries another.
 */
#include <errno.h>

#include "parts.h"
#include "runtime_table.h"

int staged_create(ProxycclTransfer *transfer, int by_fabric) {
  transfer->parts = calloc(PROXYCCL_STAGES, sizeof *transfer->parts);
  if (transfer->parts == NULL) return 0;
  for (uint32_t i = 0; i < PROXYCCL_STAGES; ++i) {
    Part *part = &transfer->parts[i];
    part->mover = transfer_new(transfer->agent, transfer->link);
    if (part->mover == NULL) return 0;
    part->mover->whole = transfer;
    part->mover->writes = transfer->writes;
    part->mover->by_socket = 1;
    part->mover->local = &part->stage;
    part->mover->remote = part->remote;
    part->stage.iov_base = (void *)(uintptr_t)transfer->staging->memory[i];
    part->origin = (Origin){transfer->staging->base + i * (uint64_t)PROXYCCL_STAGE_BYTES, transfer->staging->key};
    if (by_fabric) part->mover->origin = &part->origin;
  }
  return 1;
}

void staged_free(ProxycclTransfer *transfer) {
  for (uint32_t i = 0; transfer->parts != NULL && i < PROXYCCL_STAGES; ++i) {
    ProxycclTransfer *mover = transfer->parts[i].mover;
    if (mover == NULL) continue;
    link_unreference(mover->link);
    --transfer->agent->references; /* the transfer has one, too */
    free(mover);
  }
  free(transfer->parts);
}

/* Starts what the device does to a part. */
static void copy_part(ProxycclTransfer *transfer, uint32_t i) {
  Part *part = &transfer->parts[i];
  part->state = PART_COPYING;
  pthread_mutex_unlock(&transfer->agent->lock);
  const int status =
      device_queue(transfer->staging, i, part->stage.iov_base, !transfer->writes, part->local, part->blocks);
  pthread_mutex_lock(&transfer->agent->lock);
  if (status != 0 && transfer->error == 0) transfer->error = -status;
}

/* Whether the device has done its copies of a part. */
static int is_copied(ProxycclTransfer *transfer, uint32_t i) {
  pthread_mutex_unlock(&transfer->agent->lock);
  const int status = device_reached(transfer->staging, i);
  pthread_mutex_lock(&transfer->agent->lock);
  if (status == PROXYCCL_RUNTIME_NOT_READY) return 0;
  if (status != 0 && transfer->error == 0) transfer->error = -status;
  return 1;
}

static void move_part(Part *part) {
  part->state = PART_MOVING;
  part->mover->count = part->blocks;
  part->mover->bytes = part->stage.iov_len;
  transfer_restart(part->mover);
}

/* Gives a part the next blocks. */
static void fill_part(ProxycclTransfer *transfer, Part *part) {
  uint32_t same;
  const Position at = transfer->at;
  part->stage.iov_len = blocks_parts(transfer->local, transfer->count, at, PROXYCCL_STAGE_BYTES, FRAME_BLOCKS,
                                     part->local, &part->blocks);
  blocks_parts(transfer->remote, transfer->count, at, PROXYCCL_STAGE_BYTES, FRAME_BLOCKS, part->remote, &same);
  blocks_advance(transfer->local, &transfer->at, part->stage.iov_len);
  transfer->left -= part->stage.iov_len;
}

/* The end of the transfer, if a part's mover did not end well. */
static void note_end(ProxycclTransfer *transfer, const ProxycclTransfer *mover) {
  if (mover->state == PROXYCCL_TRANSFER_DONE || transfer->refusal != 0) return;
  transfer->refusal = mover->refusal != 0 ? mover->refusal : (uint32_t)mover->error;
  transfer->fault = mover->fault;
}

static int has_failed(const ProxycclTransfer *transfer) {
  return transfer->error != 0 || transfer->refusal != 0 || transfer->abandoned || transfer->link->lost != NULL;
}

/* Goes on with a part as far as possible now. 1: it did. */
static int step(ProxycclTransfer *transfer, uint32_t i) {
  Part *part = &transfer->parts[i];
  int stepped = 0;
  for (; !transfer->cancel; stepped = 1) {
    if (part->state == PART_COPYING) {
      if (!is_copied(transfer, i)) break;
      if (transfer->writes && !has_failed(transfer)) {
        move_part(part);
      } else {
        part->state = PART_IDLE;
      }
    } else if (part->state == PART_MOVED) {
      note_end(transfer, part->mover);
      part->state = PART_IDLE;
      if (!transfer->writes && !has_failed(transfer)) copy_part(transfer, i);
    } else if (part->state == PART_IDLE && transfer->left > 0 && !has_failed(transfer)) {
      fill_part(transfer, part);
      if (transfer->writes) {
        copy_part(transfer, i);
      } else {
        move_part(part);
      }
    } else {
      break;
    }
  }
  return stepped;
}

static void end(ProxycclTransfer *transfer) {
  if (transfer->abandoned) {
    transfer_end(transfer, PROXYCCL_TRANSFER_CANCELED);
    if (transfer->orphaned) transfer_free(transfer);
  } else if (transfer->link->lost != NULL) {
    transfer_end(transfer, PROXYCCL_TRANSFER_LOST);
  } else if (transfer->error != 0) {
    transfer_end(transfer, PROXYCCL_TRANSFER_FAILED);
  } else {
    transfer_end_answered(transfer);
  }
}

int staged_look(ProxycclTransfer *transfer) {
  ProxycclAgent *agent = transfer->agent;
  if (transfer->state != PROXYCCL_TRANSFER_ACTIVE || transfer->copying > 0 || transfer->cancel) return 0;
  int stepped = 0, waits = 0, active = 0;
  ++transfer->copying;
  for (uint32_t i = 0; i < PROXYCCL_STAGES; ++i) stepped |= step(transfer, i);
  --transfer->copying;
  if (transfer->cancel) {
    pthread_cond_broadcast(&agent->changed); /* whoever cancels it ends it */
    return 0;
  }
  for (uint32_t i = 0; i < PROXYCCL_STAGES; ++i) {
    const PartState state = transfer->parts[i].state;
    waits |= state == PART_COPYING || state == PART_MOVED;
    active |= state != PART_IDLE;
  }
  if (!active && transfer->queued) transfer_unqueue(transfer, &agent->looked_at, &agent->last_looked_at);
  if (!active) {
    end(transfer);
  } else if (waits && !transfer->queued) {
    transfer_queue(transfer, &agent->last_looked_at);
    agent_wake(agent);
  } else if (!waits && transfer->queued) { /* until staged_moved */
    transfer_unqueue(transfer, &agent->looked_at, &agent->last_looked_at);
  }
  return stepped;
}

void staged_moved(ProxycclTransfer *mover) {
  ProxycclTransfer *transfer = mover->whole;
  Part *part = transfer->parts;
  while (part->mover != mover) ++part;
  part->state = PART_MOVED;
  pthread_cond_broadcast(&transfer->agent->changed);                         /* staged_finish may wait for it */
  if (transfer->queued || transfer->copying > 0 || transfer->cancel) return; /* somebody looks */
  transfer_queue(transfer, &transfer->agent->last_looked_at);
  agent_wake(transfer->agent);
}

int staged_finish(ProxycclTransfer *transfer, uint64_t timeout_ns) {
  ProxycclAgent *agent = transfer->agent;
  const struct timespec deadline = agent_deadline(timeout_ns);
  int timed_out = 0, over = 1;
  transfer->left = 0;
  ++transfer->copying; /* it stays */
  link_wake(transfer->link);
  for (uint32_t i = 0; i < PROXYCCL_STAGES; ++i) {
    Part *part = &transfer->parts[i];
    if (part->state == PART_MOVING && part->mover->queued) transfer_cancel(part->mover, 0);
    if (part->state == PART_MOVING && part->mover->origin == NULL) transfer_cancel(part->mover, 0);
    while (part->state == PART_MOVING && !timed_out) { /* the peer may still read or write the stage */
      timed_out = pthread_cond_timedwait(&agent->changed, &agent->lock, &deadline) != 0;
    }
    over = over && part->state != PART_MOVING;
    if (part->state == PART_MOVING) continue;
    if (part->state == PART_COPYING) {
      pthread_mutex_unlock(&agent->lock);
      device_await(transfer->staging, i);
      pthread_mutex_lock(&agent->lock);
    }
    part->state = PART_IDLE;
  }
  --transfer->copying;
  if (!over) return 0;
  if (transfer->queued) transfer_unqueue(transfer, &agent->looked_at, &agent->last_looked_at);
  return 1;
}
