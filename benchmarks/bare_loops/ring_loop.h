/* Loops that only drain or fill a ring; their rates are the ring's limit, with which benchmarks compare the engine. */
#ifndef PROXYCCL_RING_LOOP_H
#define PROXYCCL_RING_LOOP_H

#include <stdint.h>

/* Takes `count` triggers out of a ring, or fewer if the time-out passes first. Returns their number. `slots` and `tail`
 * are addresses, as in ProxycclFifo. */
uint64_t proxyccl_bare_drain(uintptr_t slots, uintptr_t tail, uint32_t size_log2, uint64_t count, uint64_t timeout_ns);

/* Pushes `count` copies of a trigger from a CPU thread instead of a kernel, or fewer if the time-out passes first.
 * Returns their number. */
uint64_t proxyccl_bare_produce(uintptr_t slots, uintptr_t tail, uint32_t size_log2, uint64_t first_ticket,
                               uint64_t count, uint64_t word0, uint64_t word1, uint64_t timeout_ns);

#endif
