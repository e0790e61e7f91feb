/* The consumer's side of the ring (fifo.h is the producers'). */
#ifndef PROXYCCL_RING_H
#define PROXYCCL_RING_H

#include <stdint.h>

#include "proxyccl/trigger.h"

/* Slots to look ahead: four cache lines. A full slot's line lies in the producer's cache, and fetching it takes longer
 * than acting on a trigger. */
enum { RING_PREFETCH = 16 };

typedef struct {
  ProxycclTrigger *slots;
  uint64_t *tail;
  uint32_t size_log2;
  uint64_t next;     /* ticket of the next trigger to take */
  uint64_t released; /* value last stored to *tail */
} Ring;

/* Looks at the next slot. It is full when its parity bit is that of the current lap: 1 in the first, so zeroed memory
 * is empty.
 *
 * The acquire pairs with the producer's release (storeTrigger): seeing word 1 means seeing word 0, and everything
 * that the kernel wrote before it pushed. */
static inline int ring_peek(const Ring *ring, ProxycclTrigger *trigger) {
  const uint64_t mask = (1ull << ring->size_log2) - 1;
  const ProxycclTrigger *slot = &ring->slots[ring->next & mask];
  const uint64_t parity = ~(ring->next >> ring->size_log2) & 1;
  const uint64_t word1 = __atomic_load_n(&slot->word1, __ATOMIC_ACQUIRE);
  if (word1 >> PROXYCCL_PARITY_SHIFT != parity) return 0;
  __builtin_prefetch(&ring->slots[(ring->next + RING_PREFETCH) & mask]);
  trigger->word0 = __atomic_load_n(&slot->word0, __ATOMIC_RELAXED);
  trigger->word1 = word1;
  return 1;
}

/* Gives the slots before `next` back to the producers. The release pairs with their acquire of the tail: a slot is
 * stored to again only after it was read, and sync() returns only after the trigger was acted on. */
static inline void ring_release(Ring *ring) {
  if (ring->released == ring->next) return;
  __atomic_store_n(ring->tail, ring->next, __ATOMIC_RELEASE);
  ring->released = ring->next;
}

static inline uint32_t trigger_field(uint64_t word, int shift, int bits) {
  return (uint32_t)(word >> shift & ((1ull << bits) - 1));
}

#endif
