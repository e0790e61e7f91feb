/* The 128-bit trigger: the only definition of its layout, read by kernels, the C engine and Python.
 *
 *   word 0:  size:31 | get:1 | source offset:32
 *   word 1:  destination offset:32 | source memory:9 | destination memory:9 | operation:3 | channel:10 | parity:1
 *
 * A transfer goes from the source to the destination. A put's source is local memory, a get's is the peer's. The bit
 * `get` distinguishes them. The bit belongs to the size if a trigger transfers nothing, and to the value if it carries
 * one.
 *
 * A trigger may carry a value of up to 8 bytes instead of the name of a source: the source memory is then the id of the
 * value's size, and word 0 is the value, in its low bytes. With a signal and no data the value is the count that the
 * signal raises the peer's semaphore to.
 *
 * The layout is MSCCL++'s proxy trigger, except for `get`; its reserved bit is our lap parity. A slot is full if its
 * parity bit equals the parity of the lap in which it is read (see fifo.h). So no slot is ever cleared, and every value
 * of the other 127 bits is legal. Parity is the last bit of word 1: an acquire load of word 1 that sees it change also
 * makes word 0 visible.
 *
 * Plain C, no platform dependence: this header is part of the contract between kernels and the proxy.
 */
#pragma once

#include "proxyccl/types.h"

/* Operations are bits: putWithSignalAndFlush is one trigger with all three. A trigger with no bit set goes to the
 * Python handler of its channel. GET is used with DATA, and is the only bit outside the field `operation`. */
enum {
  PROXYCCL_OP_CUSTOM = 0,
  PROXYCCL_OP_DATA = 1,
  PROXYCCL_OP_SIGNAL = 2,
  PROXYCCL_OP_FLUSH = 4,
  PROXYCCL_OP_GET = 8
};

enum {
  PROXYCCL_SIZE_BITS = 31, /* size of a transfer; 32 bits if a trigger transfers nothing */
  PROXYCCL_OFFSET_BITS = 32,
  PROXYCCL_MEMORY_BITS = 9,
  PROXYCCL_OP_BITS = 3,
  PROXYCCL_CHANNEL_BITS = 10,
  PROXYCCL_MEMORY_IDS = 1 << 9,
  /* The last ids do not name memory, but stand for values of 1, 2, 4 and 8 bytes. */
  PROXYCCL_MAX_MEMORIES = PROXYCCL_MEMORY_IDS - 4,
  PROXYCCL_VALUE_8_BYTES = PROXYCCL_MEMORY_IDS - 1,
  PROXYCCL_MAX_CHANNELS = 1 << 10
};

/* Bit positions of the fields: first those in word 0, then those in word 1. */
enum {
  PROXYCCL_SIZE_SHIFT = 0,
  PROXYCCL_GET_SHIFT = 31,
  PROXYCCL_SRC_OFFSET_SHIFT = 32,
  PROXYCCL_DST_OFFSET_SHIFT = 0,
  PROXYCCL_SRC_MEMORY_SHIFT = 32,
  PROXYCCL_DST_MEMORY_SHIFT = 41,
  PROXYCCL_OP_SHIFT = 50,
  PROXYCCL_CHANNEL_SHIFT = 53,
  PROXYCCL_PARITY_SHIFT = 63
};

/* A memory id covers 4 GiB; a larger memory takes consecutive ids. */
#define PROXYCCL_WINDOW_BYTES (1UL << PROXYCCL_OFFSET_BITS)
/* The most bytes that one trigger moves; a longer transfer becomes several triggers. */
#define PROXYCCL_MAX_TRIGGER_BYTES ((1UL << PROXYCCL_SIZE_BITS) - 4096)

typedef struct ProxycclTrigger {
  uint64_t word0;
  uint64_t word1;
} __attribute__((aligned(16))) ProxycclTrigger;
