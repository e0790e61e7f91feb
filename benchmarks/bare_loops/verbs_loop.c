/* Posts writes, of which up to `depth` are outstanding at a time. See verbs_loop.h. */
#include "verbs_loop.h"

#include <errno.h>

#if __has_include(<infiniband/verbs.h>)

#include <infiniband/verbs.h>

#include "clock.h"
#include "verbs_transport.h"

enum { COMPLETIONS = 16 }; /* maximum number of completions that one call reads */

static int possible(const ProxycclVerbsBareWrites* options) {
  return options->qp != 0 && options->cq != 0 && options->count > 0 && options->depth > 0 && options->chain > 0 &&
         options->chain <= PROXYCCL_VERBS_BARE_CHAIN && options->signal_every > 0 &&
         (uint64_t)options->chain + options->signal_every <= (uint64_t)options->depth + 1;
}

/* Posts the writes that follow write number `posted`, in one call. Returns 0 or the errno. */
static int post(const ProxycclVerbsBareWrites* options, struct ibv_send_wr* requests, uint64_t posted, uint64_t count) {
  struct ibv_send_wr* refused;
  int status;
  for (uint64_t i = 0; i < count; ++i) {
    const uint64_t number = posted + i + 1;
    requests[i].wr_id = number;
    requests[i].send_flags = number % options->signal_every == 0 || number == options->count ? IBV_SEND_SIGNALED : 0;
    requests[i].next = i + 1 < count ? &requests[i + 1] : NULL;
  }
  status = ibv_post_send((struct ibv_qp*)options->qp, requests, &refused);
  return status >= 0 ? status : EIO;
}

int64_t proxyccl_verbs_bare_writes(const ProxycclVerbsBareWrites* options) {
  struct ibv_send_wr requests[PROXYCCL_VERBS_BARE_CHAIN] = {0};
  struct ibv_wc completions[COMPLETIONS];
  struct ibv_sge part = {options->local, options->bytes, options->lkey};
  uint64_t posted = 0, done = 0;
  if (!possible(options)) return -EINVAL;
  for (uint32_t i = 0; i < PROXYCCL_VERBS_BARE_CHAIN; ++i) {
    requests[i].sg_list = &part;
    requests[i].num_sge = 1;
    requests[i].opcode = IBV_WR_RDMA_WRITE;
    requests[i].wr.rdma.remote_addr = options->remote;
    requests[i].wr.rdma.rkey = options->rkey;
  }
  const uint64_t start = now_ns();
  while (done < options->count) {
    while (posted < options->count) {
      const uint64_t left = options->count - posted, chain = left < options->chain ? left : options->chain;
      if (posted - done + chain > options->depth) break;
      const int status = post(options, requests, posted, chain);
      if (status != 0) return -status;
      posted += chain;
    }
    const int taken = ibv_poll_cq((struct ibv_cq*)options->cq, COMPLETIONS, completions);
    if (taken < 0) return -EIO;
    for (int i = 0; i < taken; ++i) {
      if (completions[i].status != IBV_WC_SUCCESS) return -(PROXYCCL_VERBS_COMPLETION + (int64_t)completions[i].status);
      done = completions[i].wr_id;
    }
    if (taken == 0 && now_ns() - start > options->timeout_ns) return -ETIMEDOUT;
  }
  return (int64_t)(now_ns() - start);
}

#else

int64_t proxyccl_verbs_bare_writes(const ProxycclVerbsBareWrites* options) {
  (void)options;
  return -ENOSYS;
}

#endif
