/* Posts requests to a libfabric endpoint and takes completions from the endpoint's queue, for the transport `fabric`
 * and for transfers between agents.
 *
 * A program that includes this file need not link libfabric, because libfabric's inline functions call through function
 * tables in the endpoint and in the completion queue. */
#pragma once

#include <errno.h>
#include <rdma/fabric.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>

#include "fabric_transport.h"

enum { COMPLETIONS = 16 }; /* maximum number of completions that one call reads */

/* The memory of a request. Each part is a range of local memory and an equally long range of the peer's memory. */
typedef struct {
  uint32_t count;
  struct iovec own[PROXYCCL_FABRIC_PARTS];
  void *descriptors[PROXYCCL_FABRIC_PARTS]; /* descriptors of `own` */
  struct fi_rma_iov theirs[PROXYCCL_FABRIC_PARTS];
} FabricMemory;

/* Adds a part to a request: `bytes` bytes at the address `own` in local memory and at `theirs` in the peer's memory. */
static inline void fabric_add_part(FabricMemory *parts, void *own, void *descriptor, uint64_t theirs, uint64_t key,
                                   uint64_t bytes) {
  const uint32_t part = parts->count++;
  parts->own[part] = (struct iovec){own, bytes};
  parts->descriptors[part] = descriptor;
  parts->theirs[part] = (struct fi_rma_iov){theirs, bytes, key};
}

/* Posts a read or a write. A read always has a completion. A write has a completion only if `awaited` is set; the
 * completion comes once the data is delivered. The request owns `context` until its completion. Returns 0, FI_EAGAIN if
 * the provider has no room, or another error. */
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

/* Handles a completion of the request that was posted with `context`. If the request failed, `error` is the error
 * number and `entry` is the provider's entry; otherwise `error` is 0 and `entry` is NULL. If the provider does not say
 * which request failed, `context` is NULL. */
typedef void FabricComplete(void *owner, void *context, int error, const struct fi_cq_err_entry *entry);

/* Takes all completions from a queue. The provider may also carry out peers' requests during the call. Adds the number
 * of completions without an error to *taken. Returns 0, or an error after which the queue must not be used. If an error
 * names no request, any request may have failed, so this function returns that error. */
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
