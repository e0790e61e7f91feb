/* Posts requests to a libfabric endpoint and polls completions, for the transport and for transfers between agents.
 *
 * Nothing is linked: posting and reading are calls through the tables of the endpoint and of its completion queue. */
#ifndef PROXYCCL_FABRIC_QUEUE_H
#define PROXYCCL_FABRIC_QUEUE_H

#include <errno.h>
#include <rdma/fabric.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>

#include "fabric_transport.h"

enum { COMPLETIONS = 16 }; /* most completions taken with one call */

/* The memory of a request, in parts of equal lengths on both sides. */
typedef struct {
  uint32_t count;
  struct iovec own[PROXYCCL_FABRIC_PARTS];
  void *descriptors[PROXYCCL_FABRIC_PARTS]; /* descriptors of `own` */
  struct fi_rma_iov theirs[PROXYCCL_FABRIC_PARTS];
} FabricMemory;

/* Adds a part to a request: `bytes` of local memory, and of the peer's. */
static inline void fabric_add_part(FabricMemory *parts, void *own, void *descriptor, uint64_t theirs, uint64_t key,
                                   uint64_t bytes) {
  const uint32_t part = parts->count++;
  parts->own[part] = (struct iovec){own, bytes};
  parts->descriptors[part] = descriptor;
  parts->theirs[part] = (struct fi_rma_iov){theirs, bytes, key};
}

/* Posts a read or a write. A read has a completion; a write has a completion, upon delivery, only if it is `awaited`.
 * The request owns `context` until then. Returns 0, FI_EAGAIN if the provider has no room, or another error. */
static inline int fabric_post(struct fid_ep *endpoint, uint64_t peer, int reads, int awaited, const FabricMemory *parts,
                              void *context) {
  const struct fi_msg_rma message = {
      .msg_iov = parts->own,
      .desc = (void **)parts->descriptors,
      .iov_count = parts->count,
      .addr = peer,
      .rma_iov = parts->theirs,
      .rma_iov_count = parts->count,
      .context = context,
  };
  const uint64_t delivered = awaited ? FI_COMPLETION | FI_DELIVERY_COMPLETE : FI_INJECT_COMPLETE;
  return (int)-(reads ? fi_readmsg(endpoint, &message, FI_COMPLETION) : fi_writemsg(endpoint, &message, delivered));
}

/* Handles a completion: the request's context, and 0, or the error number and the provider's entry. The context is NULL
 * for an error that names no request. */
typedef void FabricComplete(void *owner, void *context, int error, const struct fi_cq_err_entry *entry);

/* Takes all completions, and so also lets the provider carry out peers' requests. Counts completions without an error
 * in *taken. Returns 0, or the error that ended the queue. An error that names no request ends it, because the
 * incomplete requests are then unknown. */
static inline int fabric_drain(struct fid_cq *queue, FabricComplete *complete, void *owner, uint32_t *taken) {
  struct fi_cq_entry entries[COMPLETIONS];
  ssize_t count = COMPLETIONS;
  while (count == COMPLETIONS || count == -FI_EAVAIL) {
    count = fi_cq_read(queue, entries, COMPLETIONS);
    for (ssize_t i = 0; i < count; ++i) complete(owner, entries[i].op_context, 0, NULL);
    if (count > 0) *taken += (uint32_t)count;
    if (count != -FI_EAVAIL) continue;
    struct fi_cq_err_entry entry = {0};
    const ssize_t read = fi_cq_readerr(queue, &entry, 0);
    if (read < 0) return read == -FI_EAGAIN ? 0 : (int)-read; /* EAGAIN: another thread took the error */
    const int error = entry.err > 0 ? entry.err : EIO;
    complete(owner, entry.op_context, error, &entry);
    if (entry.op_context == NULL) return error;
  }
  return count >= 0 || count == -FI_EAGAIN ? 0 : (int)-count;
}

#endif
