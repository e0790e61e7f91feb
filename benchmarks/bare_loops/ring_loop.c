#include "ring_loop.h"

#include <sched.h>

#include "clock.h"
#include "ring.h"

enum { MISSES_PER_CLOCK = 1024 };

static void cpu_relax(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

/* Waits briefly. Reads the clock only in every MISSES_PER_CLOCK-th call. Returns 1 if the time-out has passed. */
static int missed(uint32_t* misses, uint64_t deadline) {
  cpu_relax();
  if (++*misses % MISSES_PER_CLOCK != 0) return 0;
  sched_yield();
  return now_ns() > deadline;
}

uint64_t proxyccl_bare_drain(uintptr_t slots, uintptr_t tail, uint32_t size_log2, uint64_t count, uint64_t timeout_ns) {
  Ring ring = {(ProxycclTrigger*)slots, (uint64_t*)tail, size_log2, 0, 0};
  const uint64_t deadline = now_ns() + timeout_ns;
  ProxycclTrigger trigger;
  uint32_t misses = 0;
  while (ring.next < count) {
    if (ring_peek(&ring, &trigger)) {
      if (++ring.next % RING_RELEASE_BATCH == 0) ring_release(&ring);
      misses = 0;
    } else {
      ring_release(&ring);
      if (missed(&misses, deadline)) break;
    }
  }
  ring_release(&ring);
  return ring.next;
}

/* The producer's side of the pairings "trigger" and "tail" of MEMORY_ORDER.md; fifo.h has the same code for kernels. */
static uint64_t acquire_tail(const uint64_t* tail) { return __atomic_load_n(tail, __ATOMIC_ACQUIRE); }

static void store_trigger(ProxycclTrigger* slot, uint64_t word0, uint64_t word1) {
  __atomic_store_n(&slot->word0, word0, __ATOMIC_RELAXED);
  __atomic_store_n(&slot->word1, word1, __ATOMIC_RELEASE);
}

uint64_t proxyccl_bare_produce(uintptr_t slots, uintptr_t tail_address, uint32_t size_log2, uint64_t first_ticket,
                               uint64_t count, uint64_t word0, uint64_t word1, uint64_t timeout_ns) {
  const uint64_t* tail = (const uint64_t*)tail_address;
  const uint64_t size = 1ull << size_log2, deadline = now_ns() + timeout_ns;
  const uint64_t fields = word1 & ~(1ull << PROXYCCL_PARITY_SHIFT);
  uint64_t ticket = first_ticket, known_tail = acquire_tail(tail);
  uint32_t misses = 0;
  while (ticket < first_ticket + count) {
    if (ticket >= known_tail + size) {
      known_tail = acquire_tail(tail);
      if (missed(&misses, deadline)) break;
      continue;
    }
    const uint64_t parity = ~(ticket >> size_log2) & 1;
    store_trigger(&((ProxycclTrigger*)slots)[ticket & (size - 1)], word0, fields | parity << PROXYCCL_PARITY_SHIFT);
    ++ticket;
  }
  return ticket - first_ticket;
}
