/* Puts and gets through pinned memory of two hosts, for memory that the network device can't register. A connection of
 * verbs (transport `staged`) or of libfabric (`staged_fabric`) is the wire.
 *
 * Each side of a connection has an area: some words, a ring to send from and a ring to receive in. The sender's engine
 * copies a put in pieces into its ring and writes them into the same place of the receiver's ring. The receiver's
 * engine copies them to their destination, so both engines must run. A get is a request to the peer's engine, which
 * sends the data like a put. */
#ifndef PROXYCCL_STAGED_TRANSPORT_H
#define PROXYCCL_STAGED_TRANSPORT_H

#include "copy_transport.h"

/* A status of these transports is a status of the wire, one of the first two values plus the driver's status, or the
 * third value plus a ProxycclStagedRefusal. */
enum {
  PROXYCCL_STAGED_COPY_OUT = 1 << 17, /* the copy from the source into this side's area failed */
  PROXYCCL_STAGED_COPY_IN = 1 << 18,  /* the copy from this side's area to the destination of a peer's put failed */
  PROXYCCL_STAGED_REFUSED = 1 << 19   /* a message of the peer was refused */
};

typedef enum ProxycclStagedRefusal {
  PROXYCCL_STAGED_BAD_COUNT = 0,   /* the peer's count of messages is out of range */
  PROXYCCL_STAGED_BAD_LENGTH = 1,  /* a message does not fit the ring */
  PROXYCCL_STAGED_BAD_RANGE = 2,   /* a put or get leaves the offered memory */
  PROXYCCL_STAGED_BAD_WORD = 3,    /* a signal's address is not a semaphore word */
  PROXYCCL_STAGED_BAD_REQUEST = 4, /* a request exceeds the outstanding gets, or carries data too */
  PROXYCCL_STAGED_BAD_ANSWER = 5   /* an answer carries more data than was requested */
} ProxycclStagedRefusal;

enum {
  PROXYCCL_STAGED_WRITE_TARGETS = 4096, /* most ranges of a rank that peers may write, and read */
  PROXYCCL_STAGED_GETS = 64,            /* most gets of a side that are not complete; a power of two */
  PROXYCCL_STAGED_MESSAGES = 256,       /* most messages without a credit; a power of two */
  PROXYCCL_STAGED_ALIGN = 64,           /* alignment of messages, and so of rings */
  PROXYCCL_STAGED_WIRES = 16,           /* most wires of a connection */
  PROXYCCL_STAGED_WORDS_BYTES = 2432
};

/* A range of this rank's memory that peers may write and read. The range's index in the table is its key for peers. */
typedef struct ProxycclRemoteWriteTarget {
  uint64_t base;
  uint64_t bytes; /* 0: no range */
  uint64_t host;  /* the CPU's address of the range; 0 if the CPU may not access it */
} ProxycclRemoteWriteTarget;

/* May be called while engines read the table, if no peer names the range. */
void proxyccl_remote_write_target_set(ProxycclRemoteWriteTarget *target, uint64_t base, uint64_t bytes, uint64_t host);

typedef struct ProxycclStagedWire {
  const void *options;    /* options of the wire, with the key of the peer's area for signals */
  uint64_t area_key;      /* the area's key for the wire's own requests */
  uint64_t peer_area;     /* the address by which the wire names the peer's area */
  uint64_t peer_area_key; /* the key by which the wire names that area */
} ProxycclStagedWire;

typedef struct ProxycclStagedOptions {
  ProxycclStagedWire wires[PROXYCCL_STAGED_WIRES]; /* the wires, in the same order as the peer's */
  uint32_t wire_count;
  uint32_t credits_tell; /* 1: a credit implies that the message is complete on its wire, because the wire is a byte
                            stream */
  uintptr_t area;        /* WORDS_BYTES, zeroed, and two rings: pinned and registered */
  uintptr_t device_area; /* the area's address for the runtime's copies */
  uint64_t ring_bytes;   /* the same on both sides; a multiple of PROXYCCL_STAGED_ALIGN */
  uint64_t chunk_bytes;  /* most bytes of a put in one message */
  const ProxycclRemoteWriteTarget *write_targets; /* PROXYCCL_STAGED_WRITE_TARGETS of them */
  uint64_t signals, signals_bytes;                /* local memory with the words that the peer may signal */
  ProxycclCopyOptions copy_out, copy_in;          /* for copies into this side's area, and from it */
} ProxycclStagedOptions;

typedef struct ProxycclConnection ProxycclConnection;

/* Returns a wire as a connection that another worker may poll; that worker must end before the staged connection does.
 * Polling is optional, because the staged connection polls its wires too. */
ProxycclConnection *proxyccl_staged_wire(ProxycclConnection *connection, uint32_t number);

/* The state that a thread of wires shares with the workers of their connections. The thread serves the wires of an
 * endpoint. */
typedef struct ProxycclWireThread {
  uint32_t *asleep;     /* the thread's word (waking.h); NULL without a thread */
  int turn;             /* pairing wire-turn: 1 while a thread serves one of the wires */
  uint64_t padding[14]; /* separates the state from other threads' by a pair of cache lines */
} ProxycclWireThread;

/* Sets a wire's thread, which must outlive the wire's use; NULL, the default, means that the wire has no thread. Call
 * this before the thread or the connection's worker uses the wire. */
void proxyccl_staged_wire_set_thread(ProxycclConnection *wire, ProxycclWireThread *thread);

/* The wire's message about the error that ended a connection of `staged_fabric`; empty if there is none. */
const char *proxyccl_staged_fabric_error_text(const ProxycclConnection *connection);

/* A put's destination has the peer's own address as its `base` and the key of the peer's range as its key; a signal's
 * word is the peer's own address too. */

#endif
