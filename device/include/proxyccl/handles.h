/* Plain structs that the host fills in and kernels read, defined once for kernels, the engine and Python.
 *
 * Python fills them field by field through cffi, which asks the C compiler for every offset. The classes with methods
 * (`Fifo`, `SmChannelDeviceHandle`, …) derive from these structs and add no data.
 */
#pragma once

#include "proxyccl/control.h"
#include "proxyccl/trigger.h"

/* The kind of handle that a kernel's parameter takes, by value or by pointer (kernel.h). Python must pass a handle of
 * the same kind.
 */
enum ProxycclHandleKind {
  PROXYCCL_HANDLE_NONE = 0,
  PROXYCCL_HANDLE_SM_CHANNEL = 1,
  PROXYCCL_HANDLE_PROXY_CHANNEL = 2,
  PROXYCCL_HANDLE_SEMAPHORE = 3,       /* a semaphore of either kind of channel */
  PROXYCCL_HANDLE_SM_SEMAPHORE = 4,    /* a semaphore that the peer's kernels signal */
  PROXYCCL_HANDLE_PROXY_SEMAPHORE = 5, /* a semaphore that the peer's proxy signals */
  PROXYCCL_HANDLE_FIFO = 6
};

/* A ring of triggers. `slots` and `tail` point to pinned host memory, the other pointers to device memory. */
typedef struct ProxycclFifo {
  ProxycclTrigger* slots;
  uint64_t* tail;         /* number of triggers that the proxy has taken */
  uint64_t* head;         /* number of tickets that producers have taken */
  uint64_t* tail_cache;   /* the producers' copy of `tail`, which saves reads of host memory */
  uint32_t* refresh_lock; /* not 0 while a producer refreshes tail_cache */
  uint32_t size_log2;     /* slots = 1 << size_log2 */
  uint32_t size;          /* number of slots; size_mask is size - 1 */
  uint64_t size_mask;
} ProxycclFifo;

/* A counting semaphore between two ranks. */
typedef struct ProxycclSemaphore {
  uint64_t* inbound;        /* number of the peer's signals that have arrived */
  uint64_t* expected;       /* local device memory: signals consumed or waited for, then a word for Triton's checks */
  uint64_t* remote_inbound; /* the peer's `inbound`, if mapped; else null */
  uint64_t* outbound;       /* local device memory: number of signals sent */
  uint64_t adds;            /* not 0 if this rank's kernels can add to `remote_inbound` atomically */
} ProxycclSemaphore;

typedef struct ProxycclSmChannel {
  ProxycclSemaphore semaphore;
  char* dst;           /* the peer's memory, mapped */
  char* src;           /* local memory */
  char* packet_buffer; /* local memory that the peer's putPackets() fills */
  ProxycclControl* control;
  uint64_t dst_bytes;
  uint64_t src_bytes;
  uint64_t packet_buffer_bytes;
  uint32_t peer;
  uint32_t channel;
} ProxycclSmChannel;

typedef struct ProxycclProxyChannel {
  ProxycclFifo fifo;
  ProxycclSemaphore semaphore;   /* only the engine uses remote_inbound and outbound */
  uint64_t* flushed;             /* pinned: ticket of the channel's last complete flush, plus one; 0 if none */
  uint64_t* completed;           /* pinned: ticket of the channel's last complete operation, plus one; 0 if none */
  const uint64_t* memory_limits; /* pinned, by memory id: bytes to the memory's end; NULL for a handler's channel */
  ProxycclControl* control;
  uint32_t channel;
  uint32_t peer;
  uint32_t dst_memory; /* first memory id of the default destination */
  uint32_t src_memory; /* first memory id of the default source */
} ProxycclProxyChannel;
