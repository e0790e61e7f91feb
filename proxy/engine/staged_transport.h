/* The transports `staged` and `staged_fabric`: puts and gets are copied through pinned memory of both hosts, because
 * the network device can't register the memory. Connections of verbs (`staged`) or of libfabric (`staged_fabric`),
 * called wires, move the data between the hosts.
 *
 * Each of the two ranks has an area of pinned memory for the connection: some words, a sending ring and a receiving
 * ring. The sender's engine copies a put in pieces into its sending ring, and writes each piece to the same offset in
 * the receiver's receiving ring. The receiver's engine copies the pieces to their destination, so both engines must
 * run. A get is a request to the peer's engine, which then sends the data like a put. */
#pragma once

#include "copy_transport.h"
#include "rails_transport.h"

/* A status of these transports is a status of the wire's transport, PROXYCCL_STAGED_COPY_OUT or PROXYCCL_STAGED_COPY_IN
 * plus the driver's status, or PROXYCCL_STAGED_REFUSED plus a ProxycclStagedRefusal. */
enum {
  PROXYCCL_STAGED_COPY_OUT = 1 << 17, /* the copy from the source into this rank's area failed */
  PROXYCCL_STAGED_COPY_IN = 1 << 18,  /* the copy from this rank's area to the destination of a peer's put failed */
  PROXYCCL_STAGED_REFUSED = 1 << 19   /* this rank refused a message of the peer */
};

typedef enum ProxycclStagedRefusal {
  PROXYCCL_STAGED_BAD_COUNT = 0,   /* the peer's count of messages is out of range */
  PROXYCCL_STAGED_BAD_LENGTH = 1,  /* a message does not fit the ring */
  PROXYCCL_STAGED_BAD_RANGE = 2,   /* a put or get exceeds the memory that the rank offers */
  PROXYCCL_STAGED_BAD_WORD = 3,    /* a signal's address is not a semaphore word */
  PROXYCCL_STAGED_BAD_REQUEST = 4, /* more than PROXYCCL_STAGED_GETS requests are unanswered, or a request carries
                                      data */
  PROXYCCL_STAGED_BAD_ANSWER = 5   /* an answer to a get carries more data than was requested */
} ProxycclStagedRefusal;

enum {
  PROXYCCL_STAGED_WRITE_TARGETS = 4096, /* maximum number of memory ranges that a rank offers to peers */
  PROXYCCL_STAGED_GETS = 64,            /* maximum number of incomplete gets of a rank; a power of two */
  PROXYCCL_STAGED_MESSAGES = 256,       /* maximum number of a rank's messages without a credit; a power of two */
  PROXYCCL_STAGED_ALIGN = 64,           /* alignment of messages in a ring, and of a ring's length */
  PROXYCCL_STAGED_WIRES = 16,           /* maximum number of wires that a connection may have */
  PROXYCCL_STAGED_WORDS_BYTES = 2432
};

/* A range of this rank's memory that peers may write and read. Peers use the range's index in the table as its key. */
typedef struct ProxycclRemoteWriteTarget {
  uint64_t base;
  uint64_t bytes; /* size of the range in bytes; 0 if the entry has no range */
  uint64_t host;  /* the CPU's address of the range; 0 if the CPU may not access it */
} ProxycclRemoteWriteTarget;

/* Sets an entry of the table. Engines may read the table during the call, but no peer may name the entry during the
 * call. */
void proxyccl_remote_write_target_set(ProxycclRemoteWriteTarget *target, uint64_t base, uint64_t bytes, uint64_t host);

typedef struct ProxycclStagedWire {
  const void *options; /* options of the wire's transport, or a ProxycclRailsOptions if `over_rails` is set; the key for
                          signals in these options is the peer area's key */
  uint64_t area_keys[PROXYCCL_RAILS];      /* the keys of this rank's area, for the wire's requests, by rail */
  uint64_t peer_area;                      /* the address of the peer's area in the wire's requests */
  uint64_t peer_area_keys[PROXYCCL_RAILS]; /* the keys of the peer's area in the wire's requests, by rail */
} ProxycclStagedWire;

typedef struct ProxycclStagedOptions {
  ProxycclStagedWire wires[PROXYCCL_STAGED_WIRES]; /* the wires, in the same order as on the peer */
  uint32_t wire_count;
  uint32_t over_rails;   /* 1 if each wire is a connection over rails */
  uint32_t credits_tell; /* 1 if a message's credit implies that the requests that wrote the message are complete, as on
                            a byte stream */
  uintptr_t area;        /* this rank's area, pinned and registered: PROXYCCL_STAGED_WORDS_BYTES zeroed bytes, then the
                            two rings */
  uintptr_t device_area; /* the address of the area in the runtime's copies */
  uint64_t ring_bytes;   /* bytes of a ring, the same on both ranks; a multiple of PROXYCCL_STAGED_ALIGN */
  uint64_t chunk_bytes;  /* maximum number of bytes of a put in one message */
  const ProxycclRemoteWriteTarget *write_targets; /* PROXYCCL_STAGED_WRITE_TARGETS of them */
  uint64_t signals, signals_bytes;                /* local memory with the words that the peer may signal */
  ProxycclCopyOptions copy_out, copy_in;          /* the streams for copies into the area, and for copies out of it */
} ProxycclStagedOptions;

typedef struct ProxycclConnection ProxycclConnection;

/* Returns a wire as a connection that another worker may poll. The other worker must end before the staged connection
 * is destroyed. No other worker has to poll the wire, because the staged connection polls its wires itself. */
ProxycclConnection *proxyccl_staged_wire(ProxycclConnection *connection, uint32_t number);

/* Returns a wire's connection of the wire's transport. */
ProxycclConnection *proxyccl_staged_link(ProxycclConnection *connection, uint32_t number);

/* State shared by the thread that serves all wires of one endpoint and the workers of these wires' connections. */
typedef struct ProxycclWireThread {
  uint32_t *asleep;     /* the word that workers use to wake the thread (waking.h); NULL without a thread */
  int turn;             /* pairing wire-turn: a lock; 1 while a thread serves one of the wires */
  uint64_t padding[14]; /* padding: no cache line contains the state of two threads */
} ProxycclWireThread;

/* Sets the thread that serves a wire. The state `thread` must be valid as long as the wire is used. NULL, the default,
 * means that the wire has no thread. Call this before the thread or the connection's worker uses the wire. */
void proxyccl_staged_wire_set_thread(ProxycclConnection *wire, ProxycclWireThread *thread);

/* In a put's destination, `base` is the address of the memory in the peer's process, and the key is the index of the
 * peer's range. A signal's word is given by its address in the peer's process. */
