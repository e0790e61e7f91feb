/* RDMA writes on one reliable connected queue pair for each peer.
 *
 * Needs libibverbs' headers where it is compiled and nothing where it runs: posting and polling are calls through the
 * queue pair's own context. */
#ifndef PROXYCCL_VERBS_TRANSPORT_H
#define PROXYCCL_VERBS_TRANSPORT_H

#include "transport.h"

typedef enum ProxycclVerbsSignal {
  PROXYCCL_VERBS_WRITE = 0,    /* an inline write of the counter, of 8 bytes */
  PROXYCCL_VERBS_FETCH_ADD = 1 /* an atomic add of one */
} ProxycclVerbsSignal;

/* A status of this transport is an errno of ibv_post_send or ibv_poll_cq, or this plus an ibv_wc_status. */
enum { PROXYCCL_VERBS_COMPLETION = 1 << 16 };

enum {
  PROXYCCL_VERBS_OPERATIONS = 256, /* puts, signals and flushes in front of a connection's send queue, at most */
  PROXYCCL_VERBS_CHAIN = 32,       /* work requests posted with one call, at most */
  /* A chain whose puts carry so many bytes is posted too: a call costs little beside them, waiting for more does not. */
  PROXYCCL_VERBS_CHAIN_BYTES = 16 << 10
};

/* No more requests are outstanding than either queue holds: after an error each of them takes a completion. A chain is
 * no longer than half of that, so that the device has the one half while the other is made. */
typedef struct ProxycclVerbsOptions {
  uintptr_t qp;          /* ibv_qp *, ready to send. No other may use it, nor its queue of send completions. */
  uint32_t send_depth;   /* work requests that its send queue takes */
  uint32_t cq_depth;     /* completions that its queue of send completions takes */
  uint32_t max_message;  /* bytes that one request may carry */
  uint32_t signal;       /* ProxycclVerbsSignal */
  uint32_t signal_rkey;  /* of the memory that the peer's semaphore words lie in */
  uint32_t scratch_lkey; /* FETCH_ADD: of `scratch`, */
  uint64_t scratch;      /* 8 registered bytes, aligned to 8, that receive the words' old values */
} ProxycclVerbsOptions;

/* 1 if this build has the transport: libibverbs' headers were there. */
int proxyccl_verbs_built(void);

/* The name of an option that can't be, or NULL. */
const char *proxyccl_verbs_refused(const ProxycclVerbsOptions *options);

/* A put's source key is the memory's lkey, its destination's `base` the peer's own address and its key the rkey; a
 * signal's word is the peer's own address too. The queue pair and `scratch` outlive the connection. NULL, with errno:
 * EINVAL for options that can't be, ENOMEM, ENOSYS for a build without the transport. */
ProxycclConnection *proxyccl_verbs_connection(const ProxycclVerbsOptions *options);

#endif
