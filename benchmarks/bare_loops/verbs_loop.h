/* A loop that only posts RDMA writes; its rate is the limit of verbs, with which benchmarks compare the transport. */
#ifndef PROXYCCL_VERBS_LOOP_H
#define PROXYCCL_VERBS_LOOP_H

#include <stdint.h>

enum { PROXYCCL_VERBS_BARE_CHAIN = 64 };

typedef struct ProxycclVerbsBareWrites {
  uintptr_t qp, cq; /* ibv_qp *, and the ibv_cq * of its send completions, without outstanding work requests */
  uint64_t local;   /* address that each write reads */
  uint64_t remote;  /* address that each write goes to */
  uint32_t lkey, rkey;
  uint32_t bytes;        /* bytes of each write */
  uint32_t depth;        /* maximum number of outstanding writes; at most the length of the send queue */
  uint32_t chain;        /* writes posted with one call: from 1 to PROXYCCL_VERBS_BARE_CHAIN */
  uint32_t signal_every; /* every n-th write and the last write are signalled. n is at most depth + 1 - chain,
                            so that unsignalled writes leave room for a chain. */
  uint64_t count;        /* number of writes */
  uint64_t timeout_ns;   /* time-out of all writes together */
} ProxycclVerbsBareWrites;

/* Returns the nanoseconds from the first post to the last completion, or a negative status: -EINVAL for options that
 * are out of range, -ETIMEDOUT, or -ENOSYS in a build without verbs. */
int64_t proxyccl_verbs_bare_writes(const ProxycclVerbsBareWrites* options);

#endif
