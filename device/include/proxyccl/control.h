/* The control block, through which a rank's kernels, proxy and peers stop one another.
 *
 * Each rank has one control block, in pinned host memory that all ranks of the host map. While a device-side wait
 * spins, it reads `abort`, and reads `timeout_ns` to know when to give up. The first wait that gives up fills the error
 * record, then sets `abort` on every rank of the host, on its own rank last. When a wait is aborted, or the CPU asks
 * what kernels wait for (`asked`), the wait describes itself in `waits`.
 */
#pragma once

#include "proxyccl/types.h"

enum ProxycclErrorCode {
  PROXYCCL_OK = 0,
  PROXYCCL_ERROR_TIMEOUT = 1,        /* a bounded wait reached its time-out */
  PROXYCCL_ERROR_PEER_LOST = 2,      /* the process of a rank ended */
  PROXYCCL_ERROR_TRANSPORT = 3,      /* a copy or work request failed */
  PROXYCCL_ERROR_BAD_TRIGGER = 4,    /* a trigger names an unregistered id, or its range leaves its memory */
  PROXYCCL_ERROR_HANDLER = 5,        /* a Python handler raised an exception */
  PROXYCCL_ERROR_MISMATCH = 6,       /* ranks called a collective with different arguments */
  PROXYCCL_ERROR_INVALID_FLAG = 7,   /* a kernel used packet flag 0 */
  PROXYCCL_ERROR_LOCAL = 8,          /* any other failure on one rank that ends the communicator */
  PROXYCCL_ERROR_PROXY_LOST = 9,     /* the node daemon that runs a rank's proxy ended */
  PROXYCCL_ERROR_OUT_OF_RANGE = 10,  /* the range of an SmChannel's call leaves its memory, or splits a packet */
  PROXYCCL_ERROR_SHARED_WAIT = 11,   /* two interpreted Triton programs wait on one channel concurrently */
  PROXYCCL_ERROR_BAD_SCHEDULE = 12,  /* a schedule names an unused id, or a range that leaves its memory */
  PROXYCCL_ERROR_TRANSFER_SIZE = 13, /* a rank expects another number of bytes than its peer sends */
  PROXYCCL_ERROR_PARENT = 14,        /* the communicator that this one was split from has ended */
  PROXYCCL_ERROR_CONTEXT_LOST = 15,  /* an error has ended a rank's context on its GPU */
  PROXYCCL_ERROR_SIGNAL_VALUE = 16   /* a signal's value is not above the semaphore's count */
};

/* The call of SmChannel or mscclpp/packet_device.hpp that was given a range outside its memory. */
enum ProxycclSmCall {
  PROXYCCL_SM_PUT = 1,
  PROXYCCL_SM_GET = 2,
  PROXYCCL_SM_PUT_PACKETS = 3,
  PROXYCCL_SM_GET_PACKETS = 4,
  PROXYCCL_SM_COPY_TO_PACKETS = 5,
  PROXYCCL_SM_COPY_FROM_PACKETS = 6
};
/* The memory in which a refused range lies. */
enum ProxycclSmMemory { PROXYCCL_SM_PEER_MEMORY = 1, PROXYCCL_SM_OWN_MEMORY = 2, PROXYCCL_SM_PACKET_BUFFER = 3 };

enum ProxycclWaitKind {
  PROXYCCL_WAIT_NONE = 0,
  PROXYCCL_WAIT_RING_ROOM = 1,
  PROXYCCL_WAIT_RING_SYNC = 2,
  PROXYCCL_WAIT_FLUSH = 3,
  PROXYCCL_WAIT_SM_SIGNAL = 4,
  PROXYCCL_WAIT_PROXY_SIGNAL = 5,
  PROXYCCL_WAIT_PACKET = 6,
  PROXYCCL_WAIT_GRID = 7,
  /* Waits of the proxy, which never occur in `waits`, where kernels describe their waits: */
  PROXYCCL_WAIT_SCHEDULE_POST = 8,
  PROXYCCL_WAIT_SCHEDULE_DATA = 9,
  PROXYCCL_WAIT_SCHEDULE_SEND = 10,
  PROXYCCL_WAIT_SCHEDULE_GATE = 11,
  PROXYCCL_WAIT_CONDITION = 12, /* a condition of a user's kernel (mscclpp/poll_device.hpp) */
  PROXYCCL_WAIT_EXECUTION = 13, /* in an execution plan's operation; `channel` identifies the operation (execution.h) */
  PROXYCCL_WAIT_COMPLETION = 14,
  PROXYCCL_WAIT_STAGE = 15 /* for data that a peer sends at the proxy's request; the proxy knows which peer */
};

/* Whether a rank may still access its peers' memory. */
enum ProxycclPresence {
  PROXYCCL_PRESENT = 0,
  PROXYCCL_CLOSING_ANOTHER = 1, /* the rank's thread is closing another of its communicators */
  PROXYCCL_LEFT = 2,            /* the rank has closed the communicator, and accesses no peer's memory */
  PROXYCCL_STOPPED = 3          /* the communicator has failed, and its kernels and its proxy have ended */
};

enum ProxycclRecordState { PROXYCCL_RECORD_EMPTY = 0, PROXYCCL_RECORD_CLAIMED = 1, PROXYCCL_RECORD_VALID = 2 };

#define PROXYCCL_NO_PEER 0xffffffffu
#define PROXYCCL_NO_CHANNEL 0xffffffffu

typedef struct ProxycclErrorRecord {
  uint32_t state;     /* ProxycclRecordState: the first failure claims the record, fills it, then publishes it */
  uint32_t code;      /* ProxycclErrorCode */
  uint32_t rank;      /* the rank that fills the record */
  uint32_t peer;      /* the rank that the failure concerns, or PROXYCCL_NO_PEER */
  uint32_t wait;      /* ProxycclWaitKind; for a range error, or a trigger that a kernel refuses: ProxycclSmMemory */
  uint32_t operation; /* bits of a trigger's operation, if any; for an SmChannel's range error: ProxycclSmCall */
  uint32_t channel;   /* channel id, or PROXYCCL_NO_CHANNEL */
  int32_t status;     /* a driver's or transport's own status */
  uint64_t expected;  /* value waited for: ticket, semaphore value or packet flag; for a schedule: its number; for a
                         range error: the required alignment; for a refused trigger: the memory's id */
  uint64_t seen;      /* value last seen; for a range error or a refused trigger: the memory's size in bytes */
  uint64_t offset;    /* byte offset of the transfer that failed */
  uint64_t size;      /* size of that transfer in bytes */
} ProxycclErrorRecord;

/* What one kernel waits for: the kernel's answer to the CPU's question in `asked`. */
typedef struct ProxycclWait {
  uint32_t claimed;  /* the question's number: the first wait to store it here fills in this entry */
  uint32_t answered; /* the question's number, stored after the fields below */
  uint32_t kind;     /* ProxycclWaitKind */
  uint32_t peer;     /* rank waited for, or PROXYCCL_NO_PEER */
  uint32_t channel;  /* channel id, or PROXYCCL_NO_CHANNEL */
  uint32_t reserved;
  uint64_t expected; /* value waited for, as in ProxycclErrorRecord */
  uint64_t seen;
} ProxycclWait;

/* A wait's index in ProxycclControl.waits is its peer modulo PROXYCCL_WAIT_PEERS; for a wait without a peer, it is
 * PROXYCCL_WAIT_PEERS plus the wait's kind. */
enum { PROXYCCL_WAIT_PEERS = 64, PROXYCCL_WAIT_PLACES = PROXYCCL_WAIT_PEERS + 16 };

/* The question number that stands for an abort: every aborted wait answers this question. */
#define PROXYCCL_LAST_QUESTION 0xffffffffu

typedef struct ProxycclControl {
  uint32_t abort; /* 0, or the ProxycclErrorCode for which all waits must end */
  uint32_t asked; /* number of the CPU's question about what kernels wait for; 0 if none is asked */
  uint32_t rank;
  uint32_t failed_rank; /* the rank of this host that failed first, plus one; 0 if none has failed */
  uint64_t timeout_ns;
  struct ProxycclControl* const* peers; /* the control blocks of this host's other ranks, at this device's addresses */
  uint32_t peer_count;
  uint32_t presence;  /* ProxycclPresence, which this rank's CPU writes and the peers' CPUs read */
  uint32_t exchanges; /* number of bootstrap exchanges that the rank took part in before it left */
  uint32_t reserved;
  ProxycclErrorRecord error;
  ProxycclWait waits[PROXYCCL_WAIT_PLACES];
} __attribute__((aligned(128))) ProxycclControl;
