/* The control block: how a rank's kernels, its proxy and the CPUs of its peers tell each other to stop.
 *
 * One a rank, in pinned host memory that the other ranks of its host map too. Every device-side wait reads `abort`
 * while it spins and `timeout_ns` to know when to give up; whoever gives up first files the one error record and raises
 * the abort of all ranks of the host, its own last. A wait that is told to stop, or asked by the CPU, says in `waits`
 * what it waited for.
 * Plain C, shared with the engine and with Python.
 */
#ifndef PROXYCCL_CONTROL_H
#define PROXYCCL_CONTROL_H

#include "proxyccl/types.h"

enum ProxycclErrorCode {
  PROXYCCL_OK = 0,
  PROXYCCL_ERROR_TIMEOUT = 1,      /* a bounded wait ran out */
  PROXYCCL_ERROR_PEER_LOST = 2,    /* the process of a rank ended */
  PROXYCCL_ERROR_TRANSPORT = 3,    /* a copy or work request failed */
  PROXYCCL_ERROR_BAD_TRIGGER = 4,  /* a trigger names what is not registered, or leaves its memory */
  PROXYCCL_ERROR_HANDLER = 5,      /* a Python handler raised */
  PROXYCCL_ERROR_MISMATCH = 6,     /* ranks called a collective with different arguments */
  PROXYCCL_ERROR_INVALID_FLAG = 7, /* a kernel used packet flag 0 */
  PROXYCCL_ERROR_LOCAL = 8,        /* any other failure on one rank that ends the communicator */
  PROXYCCL_ERROR_PROXY_LOST = 9    /* the node daemon that runs a rank's proxy ended */
};

enum ProxycclWaitKind { /* what a bounded wait waits for */
                        PROXYCCL_WAIT_NONE = 0,
                        PROXYCCL_WAIT_RING_ROOM = 1,
                        PROXYCCL_WAIT_RING_SYNC = 2,
                        PROXYCCL_WAIT_FLUSH = 3,
                        PROXYCCL_WAIT_SM_SIGNAL = 4,
                        PROXYCCL_WAIT_PROXY_SIGNAL = 5,
                        PROXYCCL_WAIT_PACKET = 6,
                        PROXYCCL_WAIT_GRID = 7
};

enum ProxycclRecordState { PROXYCCL_RECORD_EMPTY = 0, PROXYCCL_RECORD_CLAIMED = 1, PROXYCCL_RECORD_VALID = 2 };

#define PROXYCCL_NO_PEER 0xffffffffu

typedef struct ProxycclErrorRecord {
  uint32_t state;     /* ProxycclRecordState: the first reporter claims it, fills it, then publishes it */
  uint32_t code;      /* ProxycclErrorCode */
  uint32_t rank;      /* the rank that reports */
  uint32_t peer;      /* the rank that it concerns, or PROXYCCL_NO_PEER */
  uint32_t wait;      /* ProxycclWaitKind */
  uint32_t operation; /* bits of a trigger's operation, where one is involved */
  uint32_t channel;   /* channel id */
  int32_t status;     /* a driver's or transport's own status */
  uint64_t expected;  /* value waited for: ticket, semaphore value or packet flag */
  uint64_t seen;      /* value last seen */
  uint64_t offset;    /* byte offset of the transfer that failed */
  uint64_t size;      /* its size in bytes */
} ProxycclErrorRecord;

/* What one wait of a kernel says of itself when it is asked. */
typedef struct ProxycclWait {
  uint32_t claimed; /* number of the question: the first wait that finds another here claims the place, fills it … */
  uint32_t told;    /* … and publishes it by the same number */
  uint32_t kind;    /* ProxycclWaitKind */
  uint32_t peer;    /* rank waited for, or PROXYCCL_NO_PEER */
  uint32_t channel;
  uint32_t reserved;
  uint64_t expected; /* as in an error record */
  uint64_t seen;
} ProxycclWait;

enum { /* a wait's place is that of its peer (modulo), or of its kind where it has none */
       PROXYCCL_WAIT_PEERS = 64,
       PROXYCCL_WAIT_PLACES = PROXYCCL_WAIT_PEERS + 8
};

/* The question that an abort puts to all waits. */
#define PROXYCCL_LAST_QUESTION 0xffffffffu

typedef struct ProxycclControl {
  uint32_t abort; /* 0 while all is well, else a ProxycclErrorCode: waits end */
  uint32_t asked; /* number of the question what kernels wait for, while the CPU puts it; else 0 */
  uint32_t rank;
  uint32_t told; /* one more than the rank of this host that has failed, and whose record says why; 0: none */
  uint64_t timeout_ns;
  struct ProxycclControl *const *peers; /* those of the host's other ranks, all by addresses of this rank's device */
  uint32_t peer_count;
  uint32_t reserved;
  ProxycclErrorRecord error;
  ProxycclWait waits[PROXYCCL_WAIT_PLACES];
} __attribute__((aligned(128))) ProxycclControl;

#endif
