// The producers' side of the ring.
//
// A producer takes a ticket, waits until the ring has room for it, and stores 16 bytes. The parity bit that it stores
// is that of its lap, starting with 1, so zeroed memory reads as an empty first lap and nobody ever clears a slot.
//
// Memory order: the trigger's store is a system-scope release and pairs with the engine's acquire of word 1
// (engine.c, ring_peek): what the kernel wrote before the push is visible to the transfer. The engine's release of
// `tail` pairs with the acquire in look() and sync(): a slot is rewritten only after the engine has read it, and
// after sync() what the engine did for the trigger has been issued.
#ifndef PROXYCCL_FIFO_H
#define PROXYCCL_FIFO_H

#include "proxyccl/handles.h"
#include "proxyccl/wait.h"

namespace proxyccl {

constexpr uint64_t kNoTicket = ~0ull;

struct Fifo : ProxycclFifo {
  // Pushes one trigger (its parity bit is ignored). Returns its ticket, or kNoTicket if the communicator was aborted
  // or the ring stayed full for longer than the time-out. Triggers of one thread are executed in the order of its
  // pushes.
  PROXYCCL_DEVICE uint64_t push(ProxycclTrigger trigger, Control* control) const {
    // No look at the abort word: it would cost every push a trip to the host. A ring that nobody drains any more fills
    // up, and the wait for room ends.
    // The cached tail is asked for along with the ticket, not after it. Relaxed will do: the trigger's store depends on
    // it and releases.
    const uint64_t known_tail = loadRelaxedDevice(tail_cache);
    const uint64_t ticket = fetchAddRelaxedDevice<uint64_t>(head, 1);
    orderBeforeTrigger();
    const uint64_t size = 1ull << size_log2;
    if (ticket >= known_tail + size && !waitForRoom(ticket, control)) return kNoTicket;
    const uint64_t parity = ~(ticket >> size_log2) & 1;
    const uint64_t parity_bit = 1ull << PROXYCCL_PARITY_SHIFT;
    storeTrigger(&slots[ticket & (size - 1)].word0, trigger.word0,
                 (trigger.word1 & ~parity_bit) | (parity << PROXYCCL_PARITY_SHIFT));
    return ticket;
  }

  // Waits until the proxy has taken the trigger with this ticket out of the ring and issued it.
  PROXYCCL_DEVICE bool sync(uint64_t ticket, Control* control) const {
    if (ticket == kNoTicket) return false;
    const WaitFor what = {PROXYCCL_WAIT_RING_SYNC, PROXYCCL_NO_PEER, 0, ticket + 1};
    return waitUntil(control, what, [&](uint64_t* seen) { return (*seen = loadAcquireSystem(tail)) > ticket; });
  }

 private:
  // The cache never runs ahead of the tail, so room seen in it is real.
  PROXYCCL_DEVICE bool hasRoom(uint64_t ticket) const {
    return ticket < loadAcquireDevice(tail_cache) + (1ull << size_log2);
  }

  // Of all producers that wait, the one that holds the lock looks at the host's tail for all: thousands of threads
  // polling one word across PCIe would starve the proxy's own stores to it.
  PROXYCCL_DEVICE bool waitForRoom(uint64_t ticket, Control* control) const {
    const WaitFor what = {PROXYCCL_WAIT_RING_ROOM, PROXYCCL_NO_PEER, 0, ticket + 1 - (1ull << size_log2)};
    return waitUntil(control, what, [&](uint64_t* seen) {
      if (exchangeAcquireDevice<uint32_t>(refresh_lock, 1) == 0) {
        look();
        storeReleaseDevice<uint32_t>(refresh_lock, 0);
      }
      *seen = loadRelaxedDevice(tail_cache);
      return hasRoom(ticket);
    });
  }

  PROXYCCL_DEVICE void look() const { storeReleaseDevice<uint64_t>(tail_cache, loadAcquireSystem(tail)); }
};

}  // namespace proxyccl

#endif
