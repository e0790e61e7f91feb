/* Transfers whose data the frames of a link carry. See transfers.h. */
#include "parts.h"

typedef struct SocketTransfer {
  ProxycclTransfer base;
  Request request;
} SocketTransfer;

static Request *request_of(ProxycclTransfer *transfer) { return &((SocketTransfer *)transfer)->request; }

static void begin(ProxycclTransfer *transfer, const uint64_t *stream) {
  (void)stream;
  link_start(transfer->link, request_of(transfer), transfer->bytes, NULL);
}

static void help(ProxycclTransfer *transfer) { link_help(transfer->link); }

static int finish(ProxycclTransfer *transfer, uint64_t timeout_ns) {
  (void)timeout_ns;
  link_forget(transfer->link, request_of(transfer));
  return 1;
}

ProxycclTransfer *proxyccl_transfer_create_by_socket(ProxycclAgent *agent, ProxycclLink *link,
                                                     const ProxycclBlocks *blocks) {
  static const TransferPath path = {.begin = begin, .help = help, .finish = finish};
  SocketTransfer *self = (SocketTransfer *)transfer_of_blocks(agent, link, sizeof *self, &path, blocks);
  if (self == NULL) return NULL;
  self->request = (Request){.transfer = &self->base,
                            .writes = blocks->writes,
                            .local = (const struct iovec *)blocks->local,
                            .remote = (const struct iovec *)blocks->remote,
                            .count = blocks->count,
                            .ended = transfer_answered};
  return &self->base;
}
