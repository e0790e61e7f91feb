/* The 128-bit trigger, by which a kernel asks the proxy for an operation. Kernels, the C engine and Python all use this
 * definition of its layout.
 *
 *   word 0:  size:31 | get:1 | source offset:32
 *   word 1:  destination offset:32 | source memory:9 | destination memory:9 | operation:3 | channel:10 | parity:1
 *
 * A transfer goes from the source to the destination. A put's source is local memory, a get's source is the peer's
 * memory, and the bit `get` distinguishes the two. In a trigger without a transfer, `get` is the upper bit of `size`;
 * in a trigger with a value, it is a bit of the value.
 *
 * A trigger may carry a value of up to 8 bytes instead of a source: the field `source memory` then encodes the value's
 * size, and the low bytes of word 0 hold the value. In a signal without data, the value is the count to which the
 * signal raises the peer's semaphore.
 *
 * The layout is that of MSCCL++'s proxy trigger, except for `get`; `parity` is MSCCL++'s reserved bit. A slot of the
 * ring is full if its parity bit equals the parity of the lap in which the engine reads it (see fifo.h). So no slot is
 * ever cleared, and every value of the other 127 bits is legal. An acquire load of word 1 that sees the parity bit
 * change also makes word 0 visible.
 *
 * The header is plain C and the same on all platforms.
 */
#pragma once

#include "proxyccl/types.h"

/* An operation is a set of bits: putWithSignalAndFlush is one trigger with DATA, SIGNAL and FLUSH. A trigger without
 * DATA, SIGNAL and FLUSH goes to the channel's Python handler. GET, used only with DATA, is the only bit outside the
 * field `operation`. */
enum {
  PROXYCCL_OP_CUSTOM = 0,
  PROXYCCL_OP_DATA = 1,
  PROXYCCL_OP_SIGNAL = 2,
  PROXYCCL_OP_FLUSH = 4,
  PROXYCCL_OP_GET = 8
};

enum {
  PROXYCCL_SIZE_BITS = 31, /* bits of a transfer's size; the size in a trigger without a transfer has 32 bits */
  PROXYCCL_OFFSET_BITS = 32,
  PROXYCCL_MEMORY_BITS = 9,
  PROXYCCL_OP_BITS = 3,
  PROXYCCL_CHANNEL_BITS = 10,
  PROXYCCL_MEMORY_IDS = 1 << 9,
  /* The last four ids stand for values of 1, 2, 4 and 8 bytes instead of memory. */
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

/* A memory id covers a window of 4 GiB; a larger memory takes consecutive ids. */
#define PROXYCCL_WINDOW_BYTES (1UL << PROXYCCL_OFFSET_BITS)
/* Maximum number of bytes that one trigger moves; a longer transfer takes several triggers. */
#define PROXYCCL_MAX_TRIGGER_BYTES ((1UL << PROXYCCL_SIZE_BITS) - 4096)

typedef struct ProxycclTrigger {
  uint64_t word0;
  uint64_t word1;
} __attribute__((aligned(16))) ProxycclTrigger;
