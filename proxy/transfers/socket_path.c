/* Transfers whose data is sent in the frames of a link. See transfers.h. */
#include "parts.h"

static void begin(ProxycclTransfer *transfer, const uint64_t *stream) {
  (void)stream;
  link_start(transfer->link, &transfer->request, transfer->bytes, NULL);
}

ProxycclTransfer *proxyccl_transfer_create_by_socket(ProxycclAgent *agent, ProxycclLink *link,
                                                     const ProxycclBlocks *blocks) {
  static const TransferPath path = {.begin = begin};
  return transfer_of_blocks(agent, link, sizeof(ProxycclTransfer), &path, blocks);
}
