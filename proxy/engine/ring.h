/* The consumer's functions for a ring of triggers; fifo.h has the producers' functions. */
#pragma once

#include <stdint.h>

#include "proxyccl/trigger.h"

/* Number of slots that the consumer prefetches ahead: four cache lines. A full slot is in the producer's cache, and
 * fetching the slot takes longer than executing a trigger. */
enum { RING_PREFETCH = 16 };

/* Number of triggers between two stores to a ring's tail. Stores to the tail are expensive, because a GPU polls the
 * tail's cache line. */
enum { RING_RELEASE_BATCH = 64 };

typedef struct {
  ProxycclTrigger *slots;
  uint64_t *tail;
  uint32_t size_log2;
  uint64_t next;     /* ticket of the next trigger to take */
  uint64_t released; /* the value that was last stored to *tail */
} Ring;

/* Reads the next slot and returns 1 if the slot is full; otherwise returns 0. A slot is full if its parity bit equals
 * the parity of the current lap around the ring. The first lap's parity is 1, so zeroed memory is an empty ring.
 *
 * Pairing trigger, acquire; the producer's release is in storeTrigger. A reader that sees word 1 also sees word 0 and
 * everything that the kernel wrote before the push of the trigger. */
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

/* Returns the slots before `next` to the producers.
 *
 * Pairing tail, release; producers acquire the tail in refreshTail() and sync(). So a slot is read before a producer
 * overwrites it, and a trigger's operations are issued before sync() returns. */
static inline void ring_release(Ring *ring) {
  if (ring->released == ring->next) return;
  __atomic_store_n(ring->tail, ring->next, __ATOMIC_RELEASE);
  ring->released = ring->next;
}

static inline uint32_t trigger_field(uint64_t word, int shift, int bits) {
  return (uint32_t)(word >> shift & ((1ull << bits) - 1));
}
