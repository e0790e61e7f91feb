// The ring to which kernels push triggers.
//
// A producer takes a ticket, waits until the ring has room for it, and stores 16 bytes. A trigger's parity bit is 1 in
// the ring's first lap and flips with each lap, so zeroed slots read as empty and no slot is ever cleared.
//
// Memory order: the trigger's store is a system-scope release that pairs with the engine's acquire of word 1 (ring_peek
// in ring.h), so the transfer sees the data that the kernel wrote before the push. The engine's release of `tail` pairs
// with the acquire in refreshTail() and sync(), so a slot is rewritten only after the engine has read it, and sync()
// returns only after the engine has issued the trigger's operations.
#pragma once

#include "proxyccl/handles.h"
#include "proxyccl/wait.h"

namespace proxyccl {

constexpr uint64_t kNoTicket = ~0ull;

struct Fifo : ProxycclFifo {
  static constexpr uint32_t kHandleKind = PROXYCCL_HANDLE_FIFO;

  /// Pushes one trigger; waits while the ring is full. Any number of threads may call push() concurrently.
  ///
  /// Triggers of one thread are executed in the order of its pushes. The proxy's transfer sees what the thread wrote
  /// before the push.
  /// @param trigger  from makeTrigger(); its parity bit is ignored
  /// @param control  the control block of the communicator; null for the module's own
  /// @return the trigger's ticket; kNoTicket if the communicator has ended or the ring stayed full until the time-out
  PROXYCCL_DEVICE uint64_t push(ProxycclTrigger trigger, Control* control) const {
    // push() does not read the abort word, because the read would cost a round trip to host memory. After an abort
    // nobody drains the ring, so the ring fills up and the wait for room sees the abort. The load of the cached tail is
    // relaxed, because the fence after it (orderBeforeTrigger) makes it an acquire.
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

  /// Waits until the proxy has taken a trigger out of the ring and issued it. The transfer itself may still be in
  /// flight.
  /// @param ticket   from push(); for kNoTicket it returns false immediately
  /// @param control  the control block of the communicator; null for the module's
  /// @return false if the communicator has ended or the time-out passed
  PROXYCCL_DEVICE bool sync(uint64_t ticket, Control* control) const {
    if (ticket == kNoTicket) return false;
    const WaitFor what = {PROXYCCL_WAIT_RING_SYNC, PROXYCCL_NO_PEER, PROXYCCL_NO_CHANNEL, ticket + 1};
    return waitUntil(control, what, [&](uint64_t* seen) { return (*seen = loadAcquireSystem(tail)) > ticket; });
  }

 private:
  // tail_cache never exceeds the ring's tail, so a slot that is free according to tail_cache is free.
  PROXYCCL_DEVICE bool hasRoom(uint64_t ticket) const {
    return ticket < loadAcquireDevice(tail_cache) + (1ull << size_log2);
  }

  // Only the waiting producer that holds the lock polls the tail in host memory: thousands of threads polling this word
  // across PCIe would starve the proxy's stores to it.
  PROXYCCL_DEVICE bool waitForRoom(uint64_t ticket, Control* control) const {
    const WaitFor what = {PROXYCCL_WAIT_RING_ROOM, PROXYCCL_NO_PEER, PROXYCCL_NO_CHANNEL,
                          ticket + 1 - (1ull << size_log2)};
    return waitUntil(control, what, [&](uint64_t* seen) {
      if (exchangeAcquireDevice<uint32_t>(refresh_lock, 1) == 0) {
        refreshTail();
        storeReleaseDevice<uint32_t>(refresh_lock, 0);
      }
      *seen = loadRelaxedDevice(tail_cache);
      return hasRoom(ticket);
    });
  }

  PROXYCCL_DEVICE void refreshTail() const { storeReleaseDevice<uint64_t>(tail_cache, loadAcquireSystem(tail)); }
};

}  // namespace proxyccl
