/* RMA writes and reads through libfabric, from one endpoint for all peers of a rank.
 *
 * Compiling it needs libfabric's headers; running it needs no link to the library, because writing and polling are
 * calls through the operation tables of the endpoint and of its completion queue. */
#ifndef PROXYCCL_FABRIC_TRANSPORT_H
#define PROXYCCL_FABRIC_TRANSPORT_H

#include <stdint.h>

/* Statuses of this transport: the first value plus the number of libfabric's error; or the second value, for a get on a
 * provider that does not support reads. */
enum { PROXYCCL_FABRIC_FAILED = 1 << 20, PROXYCCL_FABRIC_NO_READS = (2 << 20) - 1 };

enum {
  PROXYCCL_FABRIC_REQUEST_BYTES = 128, /* of the memory that a request takes */
  PROXYCCL_FABRIC_MOST_DEPTH = 4096,   /* most requests that a connection may have outstanding */
  PROXYCCL_FABRIC_LOCAL_KEYS = 4096,   /* local keys of a rank */
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
  uint32_t joined;    /* 1 if the bytes of one write arrive in order too, so that a write may have two parts */
  uint32_t reads;     /* 1 if the endpoint makes reads too */
  uint64_t max_message; /* bytes that one request may carry */
  uint64_t signal_key;  /* key of the memory with the peer's semaphore words */
  uintptr_t requests; /* `depth` times REQUEST_BYTES, aligned to 8, registered, and kept until the endpoint is closed */
  uint32_t requests_key;       /* local key of that memory */
  const uint64_t *descriptors; /* by local key, the descriptor of registered memory; LOCAL_KEYS of them */
  uint64_t *looks;             /* into the queue, counted by all connections that share it */
} ProxycclFabricOptions;

/* The key of local memory, a put's source or a get's destination, is its local key: an index, because the key may come
 * from another process. For the peer's memory, and for a signal's word, the key is the peer's, and `base` is the
 * address that the peer gave with that key. */

/* 1 if this build has the transport: it was built with libfabric's headers. */
int proxyccl_fabric_built(void);

typedef struct ProxycclConnection ProxycclConnection;

/* The provider's message about the error that ended a connection of this transport; empty if there is none. */
const char *proxyccl_fabric_error_text(const ProxycclConnection *connection);

#endif
