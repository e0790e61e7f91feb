/* The transport `fabric`: RMA writes and reads through libfabric. A rank has one endpoint for all peers.
 *
 * The transport is built only with libfabric's headers. The engine is not linked to the library, because libfabric's
 * inline functions call through function tables in the endpoint and in its completion queue. */
#ifndef PROXYCCL_FABRIC_TRANSPORT_H
#define PROXYCCL_FABRIC_TRANSPORT_H

#include <stdint.h>

/* Statuses of this transport: PROXYCCL_FABRIC_FAILED plus libfabric's error number, or PROXYCCL_FABRIC_NO_READS for a
 * get if the provider does not support reads. */
enum { PROXYCCL_FABRIC_FAILED = 1 << 20, PROXYCCL_FABRIC_NO_READS = (2 << 20) - 1 };

enum {
  PROXYCCL_FABRIC_REQUEST_BYTES = 128, /* bytes of a request's place in the memory of requests */
  PROXYCCL_FABRIC_MOST_DEPTH = 4096,   /* most requests that a connection may have outstanding */
  PROXYCCL_FABRIC_LOCAL_KEYS = 4096,   /* number of local keys of a rank */
  PROXYCCL_FABRIC_PARTS = 2,           /* most parts of a write: data, and the signal that has joined it */
  PROXYCCL_FABRIC_ERROR_TEXT = 128     /* bytes of a provider's error message */
};

typedef struct ProxycclFabricOptions {
  uintptr_t endpoint; /* fid_ep *, enabled */
  uintptr_t queue;    /* fid_cq *, the endpoint's. Connections share endpoint and queue; a poll takes the completions of
                         all connections. */
  uint64_t peer;      /* the peer's fi_addr_t */
  uint32_t depth;     /* most requests outstanding */
  uint32_t ordered;   /* 1 if writes reach the peer's memory in order; 0 if a signal waits for earlier writes */
  uint32_t joined;    /* 1 if the bytes of one write also arrive in order, so that a signal may be the second part of a
                         write */
  uint32_t reads;     /* 1 if the endpoint supports reads */
  uint64_t max_message;  /* bytes that one request may carry */
  uint64_t signal_key;   /* key of the memory with the peer's semaphore words */
  uintptr_t requests;    /* memory of `depth` times REQUEST_BYTES, aligned to 8, registered, kept until the endpoint is
                            closed */
  uint32_t requests_key; /* local key of the requests' memory */
  const uint64_t *descriptors; /* descriptors of registered memory, indexed by local key; PROXYCCL_FABRIC_LOCAL_KEYS of
                                  them */
  uint64_t *looks;             /* number of polls of the queue, counted by all connections that share it */
} ProxycclFabricOptions;

/* Keys of memory: the key of local memory (a put's source or a get's destination) is its local key, an index into
 * `descriptors`. It is not a pointer, because it may come from another process. For the peer's memory and for a
 * signal's word, the key is the one that the peer sent, and `base` is the address that the peer sent with it. */

/* Returns 1 if this build has the transport, which needs libfabric's headers. */
int proxyccl_fabric_built(void);

typedef struct ProxycclConnection ProxycclConnection;

/* Returns the provider's message about the error that ended a connection of this transport; "" if there is none. */
const char *proxyccl_fabric_error_text(const ProxycclConnection *connection);

#endif
