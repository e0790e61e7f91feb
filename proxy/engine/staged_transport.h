/* RDMA writes between pinned memory of two hosts, for memory that an RDMA device can't register.
 *
 * Each end of a connection has an area: some words, the ring that it sends from and the ring that it receives in. A put
 * is copied into the sender's ring in pieces, written into the same place of the receiver's, and copied from there to
 * where it belongs by the receiver's engine, which so must be running for any of it to be done. */
#ifndef PROXYCCL_STAGED_TRANSPORT_H
#define PROXYCCL_STAGED_TRANSPORT_H

#include "runtime_table.h"
#include "transport.h"
#include "verbs_transport.h"

/* A status of this transport is one of the verbs transport, or the runtime's own plus one of the first two of these, or
 * the third plus a ProxycclStagedRefusal. */
enum {
  PROXYCCL_STAGED_COPY_OUT = 1 << 17, /* from the source into the own area */
  PROXYCCL_STAGED_COPY_IN = 1 << 18,  /* from the own area to where a peer's put belongs */
  PROXYCCL_STAGED_REFUSED = 1 << 19   /* what the peer sent was refused */
};

typedef enum ProxycclStagedRefusal {
  PROXYCCL_STAGED_BAD_COUNT = 0,  /* it counts messages that can't be */
  PROXYCCL_STAGED_BAD_LENGTH = 1, /* a message that leaves the ring */
  PROXYCCL_STAGED_BAD_RANGE = 2,  /* data for memory that was not offered */
  PROXYCCL_STAGED_BAD_WORD = 3    /* a signal to what is no semaphore word */
} ProxycclStagedRefusal;

enum {
  PROXYCCL_STAGED_LANDINGS = 4096, /* ranges that peers may have data put in, of a rank */
  PROXYCCL_STAGED_MESSAGES = 256,  /* that a sender has under way, at most; a power of two */
  PROXYCCL_STAGED_ALIGN = 64,      /* of messages, and so of rings */
  PROXYCCL_STAGED_WORDS_BYTES = 512
};

/* A range of own memory that peers may have data put in. Its number is the key by which they name it. */
typedef struct ProxycclLanding {
  uint64_t base;
  uint64_t bytes; /* 0: none */
} ProxycclLanding;

/* Also while connections look at it, if no peer names it. */
void proxyccl_landing_set(ProxycclLanding *landing, uint64_t base, uint64_t bytes);

typedef struct ProxycclStagedOptions {
  ProxycclVerbsOptions wire;       /* its signal_rkey is of the peer's area */
  uintptr_t area;                  /* PROXYCCL_STAGED_WORDS_BYTES, zeroed, and two rings: pinned and registered */
  uintptr_t device_area;           /* the same, as the runtime's copies reach it */
  uint32_t area_lkey;
  uint64_t peer_area;              /* the peer's, as it has registered it */
  uint64_t ring_bytes;             /* the same on both ends; a multiple of PROXYCCL_STAGED_ALIGN */
  uint64_t chunk_bytes;            /* of a put that one message carries, at most */
  const ProxycclLanding *landings; /* PROXYCCL_STAGED_LANDINGS of them */
  uint64_t signals, signals_bytes; /* own memory that holds the words that the peer signals */
} ProxycclStagedOptions;

/* The name of an option that can't be, or NULL. */
const char *proxyccl_staged_refused(const ProxycclStagedOptions *options);

/* A put's destination has the peer's own address as its `base` and the peer's number of the landing as its key; a
 * signal's word is the peer's own address too. The streams and events, one of each for either direction, belong to the
 * caller; they, the areas and the queue pair outlive the connection. NULL, with errno, as for a verbs connection. */
ProxycclConnection *proxyccl_staged_connection(const ProxycclStagedOptions *options,
                                               const ProxycclRuntimeTable *runtime, void *const streams[2],
                                               void *const events[2]);

#endif
