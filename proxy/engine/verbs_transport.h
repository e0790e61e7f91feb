/* RDMA writes on one reliable connected queue pair for each peer. */
#ifndef PROXYCCL_VERBS_TRANSPORT_H
#define PROXYCCL_VERBS_TRANSPORT_H

#include "transport.h"

typedef enum ProxycclVerbsSignal {
  PROXYCCL_VERBS_WRITE = 0,    /* an inline write of the counter */
  PROXYCCL_VERBS_FETCH_ADD = 1 /* an atomic add of one */
} ProxycclVerbsSignal;

/* A status of this transport is an errno of ibv_post_send or ibv_poll_cq, or this plus an ibv_wc_status. */
enum { PROXYCCL_VERBS_COMPLETION = 1 << 16 };

typedef struct ProxycclVerbsOptions {
  uintptr_t qp;          /* ibv_qp *, ready to send. No other may use it, nor its queue of send completions. */
  uint32_t send_depth;   /* work requests that its send queue takes, at least 2 */
  uint32_t cq_depth;     /* completions that its queue of send completions takes */
  uint32_t max_message;  /* bytes that one request may carry */
  uint32_t signal;       /* ProxycclVerbsSignal */
  uint32_t signal_rkey;  /* of the memory that the peer's semaphore words lie in */
  uint32_t scratch_lkey; /* FETCH_ADD: of `scratch`, */
  uint64_t scratch;      /* 8 registered bytes that receive the words' old values */
} ProxycclVerbsOptions;

/* 1 if this build has the transport: libibverbs' headers were there. */
int proxyccl_verbs_built(void);

/* A put's source key is the memory's lkey, its destination's `base` the peer's own address and its key the rkey; a
 * signal's word is the peer's own address too. The queue pair and `scratch` outlive the connection. NULL, with errno:
 * EINVAL for options that can't be, ENOMEM, ENOSYS for a build without the transport. */
ProxycclConnection *proxyccl_verbs_connection(const ProxycclVerbsOptions *options);

#endif
