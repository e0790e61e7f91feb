// Counting semaphores between two ranks. Counters only grow, in device memory, so a captured graph can be replayed.
#ifndef PROXYCCL_SEMAPHORE_H
#define PROXYCCL_SEMAPHORE_H

#include "proxyccl/handles.h"
#include "proxyccl/wait.h"

namespace proxyccl {

struct Semaphore : ProxycclSemaphore {
  /// Adds one to the count at the peer. One thread at a time calls it.
  ///
  /// The release pairs with the acquire in the peer's wait() and poll(): once the signal is visible, so is what this
  /// thread wrote before, and what its block wrote before a syncThreadsSystem(). Only this side writes
  /// `remote_inbound`, so a store of the count is enough, without an atomic across the link.
  PROXYCCL_DEVICE void signal() const { storeReleaseSystem<uint64_t>(remote_inbound, ++*outbound); }

  /// Raises the count at the peer to `value`, which must be greater than every earlier count; ordered like signal().
  /// One thread at a time calls it.
  PROXYCCL_DEVICE void signal(uint64_t value) const { storeReleaseSystem(remote_inbound, *outbound = value); }

  /// The same without ordering: for a signal that announces no data.
  PROXYCCL_DEVICE void relaxedSignal() const { storeRelaxedSystem<uint64_t>(remote_inbound, ++*outbound); }

  /// Waits for the next signal and consumes it. One thread at a time calls it: on the host runtime a second one ends
  /// the communicator with a TriggerError.
  /// @param control  the communicator's control block; null for the module's
  /// @param kind     ProxycclWaitKind, for the error record if the wait fails
  /// @param peer     the rank that signals, or PROXYCCL_NO_PEER
  /// @param channel  channel id, or PROXYCCL_NO_CHANNEL
  /// @return false if the communicator has ended or the time-out passed; then no signal is consumed
  PROXYCCL_DEVICE bool wait(Control* control, uint32_t kind, uint32_t peer, uint32_t channel) const {
    return waitUntil(control, kind, peer, channel, *expected + 1);
  }

  /// Waits until the count has reached `value`, and consumes all signals up to it. If they were consumed before, it
  /// returns true at once. Otherwise like wait().
  PROXYCCL_DEVICE bool waitUntil(Control* control, uint32_t kind, uint32_t peer, uint32_t channel,
                                 uint64_t value) const {
    if (*expected >= value) return true;
    return consume(control, kind, peer, channel, value, [](const uint64_t* p) { return loadAcquireSystem(p); });
  }

  /// The same without ordering: for a signal that announces no data.
  PROXYCCL_DEVICE bool relaxedWait(Control* control, uint32_t kind, uint32_t peer, uint32_t channel) const {
    return consume(control, kind, peer, channel, *expected + 1, [](const uint64_t* p) { return loadRelaxedSystem(p); });
  }

  /// Consumes a signal if one has arrived. One thread at a time calls it. A loop around it must itself end when the
  /// communicator ends: `while (!poll()) if (aborted(control)) return;`
  /// @return whether there was one
  PROXYCCL_DEVICE bool poll() const {
    if (loadAcquireSystem(inbound) <= *expected) {
      spinHint(0);  // threads of a block take turns on the host, and the signal may depend on one of them
      return false;
    }
    ++*expected;
    return true;
  }

 private:
  template <class Load>
  PROXYCCL_DEVICE bool consume(Control* control, uint32_t kind, uint32_t peer, uint32_t channel, uint64_t target,
                               Load load) const {
    const WaitFor what = {kind, peer, channel, target};
    if (!beginWait(control, what)) return false;
    const bool came =
        proxyccl::waitUntil(control, what, [&](uint64_t* seen) { return (*seen = load(inbound)) >= target; });
    if (came) *expected = target;
    endWait();
    return came;
  }

  // If two threads wait at once, both may take the same signal, or one may wait for a signal that never comes. The host
  // runtime refuses that with an error that names the channel. On a GPU the check would cost every wait a trip to
  // memory. The exchange is relaxed, so that it hides no race of the kernel from a sanitizer.
  PROXYCCL_DEVICE bool beginWait([[maybe_unused]] Control* control, [[maybe_unused]] const WaitFor& what) const {
#if PROXYCCL_ON_HOST
    if (exchangeRelaxedDevice<uint64_t>(expected + 1, 1) != 0) {
      recordError(control, PROXYCCL_ERROR_SHARED_WAIT, what, 0);
      return false;
    }
#endif
    return true;
  }
  PROXYCCL_DEVICE void endWait() const {
#if PROXYCCL_ON_HOST
    storeRelaxedDevice<uint64_t>(expected + 1, 0);
#endif
  }
};

}  // namespace proxyccl

#endif
