/* Posts writes, of which up to `depth` are outstanding at a time. See fabric_loop.h. */
#include "fabric_loop.h"

#include <errno.h>

#if __has_include(<rdma/fi_rma.h>)

#include <rdma/fabric.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>

#include "clock.h"

enum { COMPLETIONS = 16 }; /* maximum number of completions that one call reads */

typedef struct {
  struct fi_context2 context;
  uint64_t number;
} Place;

static int possible(const ProxycclFabricBareWrites* options) {
  return options->endpoint != 0 && options->queue != 0 && options->count > 0 && options->depth > 0 &&
         options->depth <= PROXYCCL_FABRIC_BARE_DEPTH && options->complete_every > 0 &&
         options->complete_every <= options->depth;
}

/* Posts the write with this number. Returns 0, -FI_EAGAIN, or another negative error. */
static ssize_t make(const ProxycclFabricBareWrites* options, Place* places, uint64_t number) {
  const int awaited = number % options->complete_every == 0 || number == options->count;
  const struct iovec part = {(void*)(uintptr_t)options->local, options->bytes};
  const struct fi_rma_iov target = {options->remote, options->bytes, options->key};
  void* descriptor = (void*)options->descriptor;
  Place* place = &places[number % options->depth];
  const struct fi_msg_rma message = {&part, &descriptor, 1, options->peer, &target, 1, place, 0};
  place->number = number;
  return fi_writemsg((struct fid_ep*)options->endpoint, &message,
                     awaited ? FI_COMPLETION | FI_DELIVERY_COMPLETE : FI_INJECT_COMPLETE);
}

int64_t proxyccl_fabric_bare_writes(const ProxycclFabricBareWrites* options) {
  static Place places[PROXYCCL_FABRIC_BARE_DEPTH];
  struct fi_cq_entry completions[COMPLETIONS];
  uint64_t posted = 0, done = 0;
  if (!possible(options)) return -EINVAL;
  const uint64_t start = now_ns();
  while (done < options->count) {
    while (posted < options->count && posted - done < options->depth) {
      const ssize_t status = make(options, places, posted + 1);
      if (status == -FI_EAGAIN) break;
      if (status != 0) return status;
      ++posted;
    }
    const ssize_t taken = fi_cq_read((struct fid_cq*)options->queue, completions, COMPLETIONS);
    if (taken < 0 && taken != -FI_EAGAIN) return taken;
    for (ssize_t i = 0; i < taken; ++i) done = ((const Place*)completions[i].op_context)->number;
    if (taken <= 0 && now_ns() - start > options->timeout_ns) return -ETIMEDOUT;
  }
  return (int64_t)(now_ns() - start);
}

int proxyccl_fabric_bare_serve(uintptr_t queue, uint64_t for_ns) {
  struct fi_cq_entry completion;
  const uint64_t start = now_ns();
  do {
    const ssize_t taken = fi_cq_read((struct fid_cq*)queue, &completion, 1);
    if (taken < 0 && taken != -FI_EAGAIN) return (int)-taken;
  } while (now_ns() - start < for_ns);
  return 0;
}

#else

int64_t proxyccl_fabric_bare_writes(const ProxycclFabricBareWrites* options) {
  (void)options;
  return -ENOSYS;
}

int proxyccl_fabric_bare_serve(uintptr_t queue, uint64_t for_ns) {
  (void)queue, (void)for_ns;
  return ENOSYS;
}

#endif
