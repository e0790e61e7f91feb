/* Transfers by libfabric: one-sided reads and writes of the peer's memory. See transfers.h.
 */
#include "parts.h"

typedef struct FabricTransfer {
  ProxycclTransfer base;
  Rdma rdma;
} FabricTransfer;

static void ended(Rdma *rdma) {
  FabricTransfer *self = (FabricTransfer *)((char *)rdma - offsetof(FabricTransfer, rdma));
  ProxycclTransfer *transfer = &self->base;
  transfer->error = rdma->error;
  transfer->fault.address = rdma->fault;
  if (transfer->cancel) {
    pthread_cond_broadcast(&transfer->agent->changed); /* the canceling thread ends the transfer */
  } else if (rdma->canceled) {
    transfer_end(transfer, PROXYCCL_TRANSFER_CANCELED);
  } else if (transfer->request.refusal != 0) {
    transfer_answered(&transfer->request);
  } else if (transfer->error == 0) {
    transfer_end(transfer, PROXYCCL_TRANSFER_DONE);
  } else if (transfer->abandoned || transfer->fault.address == 0) {
    transfer_end(transfer, PROXYCCL_TRANSFER_FAILED);
  } else { /* asks the peer whether its memory is mapped; the answer, or the loss of the link, ends the transfer */
    link_start(transfer->link, &transfer->request, 0, &transfer->fault);
  }
}

static void begin(ProxycclTransfer *transfer, const uint64_t *stream) {
  (void)stream;
  transfer->request.refusal = 0;
  rdma_start(&((FabricTransfer *)transfer)->rdma, transfer->bytes);
}

static void help(ProxycclTransfer *transfer) { fabric_poll(transfer->agent); }

static int finish(ProxycclTransfer *transfer, uint64_t timeout_ns) {
  FabricTransfer *self = (FabricTransfer *)transfer;
  ProxycclAgent *agent = transfer->agent;
  const struct timespec deadline = agent_deadline(timeout_ns);
  rdma_drop(&self->rdma);
  fabric_poll(agent);
  ++transfer->copying; /* while `copying` is not 0, the transfer stays allocated */
  while (self->rdma.unanswered > 0 && pthread_cond_timedwait(&agent->changed, &agent->lock, &deadline) == 0) {}
  --transfer->copying;
  pthread_cond_broadcast(&agent->changed); /* another thread may wait to cancel the transfer */
  return self->rdma.unanswered == 0;
}

ProxycclTransfer *proxyccl_transfer_create_by_fabric(ProxycclAgent *agent, ProxycclLink *link, int writes,
                                                     const uint64_t *rows, uint64_t count) {
  static const TransferPath path = {.begin = begin, .help = help, .finish = finish};
  FabricTransfer *self = (FabricTransfer *)transfer_new(agent, link, sizeof *self, &path);
  if (self == NULL) return NULL;
  self->base.writes = writes;
  self->base.blocks = count;
  for (uint64_t i = 0; i < count; ++i) self->base.bytes += rows[row_words(link) * i + 2];
  self->rdma = (Rdma){.link = link, .writes = writes, .rows = rows, .request = &self->base.request, .ended = ended};
  return &self->base;
}
