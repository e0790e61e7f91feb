/* Plain structs that the host fills in and kernels read: one definition for kernels, the engine and Python.
 *
 * Python fills them field by field through cffi, which asks the C compiler for every offset. The classes with the
 * methods (`Fifo`, `SmChannelDeviceHandle`, …) derive from these and add no data.
 */
#ifndef PROXYCCL_HANDLES_H
#define PROXYCCL_HANDLES_H

#include "proxyccl/control.h"
#include "proxyccl/trigger.h"

/* A ring of triggers. `slots` and `tail` are pinned host memory, the rest is device memory. */
typedef struct ProxycclFifo {
  ProxycclTrigger* slots;
  uint64_t* tail;         /* number of triggers that the proxy has released */
  uint64_t* head;         /* number of tickets that producers have taken */
  uint64_t* tail_cache;   /* the producers' copy of `tail`, which saves them the trip to the host */
  uint32_t* refresh_lock; /* held by the producer that refreshes tail_cache */
  uint32_t size_log2;     /* slots = 1 << size_log2 */
  uint32_t reserved;
} ProxycclFifo;

/* A counting semaphore between one writer (the peer, or its proxy) and one waiter. */
typedef struct ProxycclSemaphore {
  uint64_t* inbound;        /* the peer's count of signals, as it arrives here */
  uint64_t* expected;       /* two words in local device memory: signals consumed, then whether a thread waits */
  uint64_t* remote_inbound; /* the peer's `inbound`, if it is mapped */
  uint64_t* outbound;       /* in local device memory: signals sent */
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
  ProxycclSemaphore semaphore;   /* signalled by the peer's proxy; remote_inbound and outbound are the engine's */
  uint64_t* flushed;             /* pinned: one more than the ticket of the channel's last complete flush */
  uint64_t* completed;           /* pinned: one more than the ticket up to which all of the channel is complete */
  const uint64_t* memory_limits; /* pinned: bytes from each memory id on; NULL for a handler's channel */
  ProxycclControl* control;
  uint32_t channel;
  uint32_t peer;
  uint32_t dst_memory; /* first memory id of the default destination */
  uint32_t src_memory; /* first memory id of the default source */
} ProxycclProxyChannel;

#endif
