/* The transport `fabric` makes RMA writes and reads through libfabric. A rank has one endpoint for all peers, or, if
 * connections go on after an interface has failed, one for each peer and interface.
 *
 * The transport is built only with libfabric's headers. The engine is not linked to the library, because libfabric's
 * inline functions call through function tables in the endpoint and in the completion queue. */
#pragma once

#include <stdint.h>

/* A status of this transport is PROXYCCL_FABRIC_FAILED plus libfabric's error number, or PROXYCCL_FABRIC_NO_READS for a
 * get if the provider does not support reads. */
enum { PROXYCCL_FABRIC_FAILED = 1 << 20, PROXYCCL_FABRIC_NO_READS = (2 << 20) - 1 };

enum {
  PROXYCCL_FABRIC_REQUEST_BYTES = 128, /* bytes per request in the memory `requests` */
  PROXYCCL_FABRIC_MOST_DEPTH = 4096,   /* maximum number of requests that a connection may have outstanding */
  PROXYCCL_FABRIC_LOCAL_KEYS = 4096,   /* number of local keys of a rank */
  PROXYCCL_FABRIC_PARTS = 2,           /* maximum number of parts of a write: data and a signal */
  PROXYCCL_FABRIC_ERROR_TEXT = 128     /* bytes of a provider's error message */
};

typedef struct ProxycclFabricOptions {
  uintptr_t endpoint;   /* fid_ep *, enabled */
  uintptr_t queue;      /* an enabled fid_cq *; one poll takes the completions of all connections of the endpoint */
  uint64_t peer;        /* the peer's fi_addr_t */
  uint32_t depth;       /* maximum number of outstanding requests */
  uint32_t ordered;     /* 1 if writes reach the peer's memory in order; if 0, a signal waits for earlier writes */
  uint32_t joined;      /* 1 if the bytes within one write also arrive in order, so that a signal may be a write's last
part */
  uint32_t reads;       /* 1 if the endpoint supports reads */
  uint64_t max_message; /* maximum number of bytes of one request */
  uint64_t signal_key;  /* key of the memory with the peer's semaphore words */
  uintptr_t requests;   /* registered memory of `depth` * PROXYCCL_FABRIC_REQUEST_BYTES bytes, aligned to 8 bytes; freed
                           only after the endpoint */
  uint32_t requests_key;       /* local key of the requests' memory */
  const uint64_t *descriptors; /* PROXYCCL_FABRIC_LOCAL_KEYS descriptors of registered memory, indexed by local key */
  uint64_t *looks;             /* number of polls of the queue, counted by all connections that share it */
} ProxycclFabricOptions;

/* The key of local memory (a put's source or a get's destination) is an index into `descriptors`. The key is not a
 * pointer, because another process may have chosen it. The peer sends the key and the address `base` of its own memory
 * and of its semaphore words. */

/* Returns 1 if this build has the transport, which needs libfabric's headers. */
int proxyccl_fabric_built(void);
