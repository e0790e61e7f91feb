/* The transport `verbs` makes RDMA writes and reads on one reliable connected queue pair for each peer.
 *
 * The transport is built only with libibverbs' headers. The engine is not linked to the library, because posting and
 * polling are inline functions that call through the queue pair's context. */
#pragma once

#include <stdint.h>

typedef enum ProxycclVerbsSignal {
  PROXYCCL_VERBS_WRITE = 0,    /* an inline write of the counter's 8 bytes */
  PROXYCCL_VERBS_FETCH_ADD = 1 /* an atomic add to the counter */
} ProxycclVerbsSignal;

/* A status of this transport is an errno of ibv_post_send or ibv_poll_cq, or PROXYCCL_VERBS_COMPLETION plus an
 * ibv_wc_status. PROXYCCL_VERBS_NO_INLINE refuses a put of a value because the device does not support inline data.
 * PROXYCCL_VERBS_NO_READS refuses a get because one of the two devices does not support RDMA reads. */
enum {
  PROXYCCL_VERBS_COMPLETION = 1 << 16,
  PROXYCCL_VERBS_NO_INLINE = (2 << 16) - 1,
  PROXYCCL_VERBS_NO_READS = (2 << 16) - 2
};

enum {
  PROXYCCL_VERBS_OPERATIONS = 256, /* maximum number of operations that wait for a connection's send queue */
  PROXYCCL_VERBS_CHAIN = 32,       /* maximum number of work requests posted with one call */
  /* A chain with this many bytes is posted without waiting for more requests, because the chain's transfer takes much
   * longer than the call. */
  PROXYCCL_VERBS_CHAIN_BYTES = 16 << 10
};

/* At most min(send_depth, cq_depth) requests are outstanding, because after an error each request has an entry in the
 * completion queue. A chain has at most half of this number, so that the device executes one chain while the engine
 * prepares the next chain. */
typedef struct ProxycclVerbsOptions {
  uintptr_t qp;         /* ibv_qp *, ready to send. Nothing else may use the queue pair or its send completion
                           queue. */
  uint32_t send_depth;  /* work requests that the queue pair's send queue can hold */
  uint32_t cq_depth;    /* completions that the queue pair's send completion queue can hold */
  uint32_t max_message; /* maximum number of bytes of one request */
  uint32_t reads;  /* number of RDMA reads that may be outstanding at a time; 0 if the queue pair supports no reads */
  uint32_t signal; /* ProxycclVerbsSignal */
  uint32_t signal_rkey;  /* rkey of the memory with the peer's semaphore words */
  uint32_t scratch_lkey; /* for FETCH_ADD: lkey of `scratch` */
  uint64_t scratch;      /* for FETCH_ADD: address of 8 registered bytes, aligned to 8, that receive the words' old
                            values */
} ProxycclVerbsOptions;

/* The key of local memory (a put's source or a get's destination) is its lkey. For the peer's memory, `base` is the
 * address in the peer's process, and the key is the rkey. A signal's word is given by its address in the peer's
 * process. */

/* Returns 1 if this build has the transport, which needs libibverbs' headers. */
int proxyccl_verbs_built(void);
