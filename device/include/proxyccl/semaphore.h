// A counting semaphore between two ranks, for the library's own kernels: one thread at a time signals and waits. The
// counters are in device memory and only grow, so a captured graph can be replayed.
#pragma once

#include "proxyccl/handles.h"
#include "proxyccl/wait.h"

namespace proxyccl {

struct Semaphore : ProxycclSemaphore {
  /// Adds one to the peer's count. One thread at a time calls signal().
  ///
  /// The release pairs with the acquire in the peer's wait(): a peer that sees the signal also sees the data that this
  /// thread wrote before the signal, and that the thread's block wrote before a syncThreadsSystem(). Only this thread
  /// writes `remote_inbound`, so it stores the count and needs no atomic across the link.
  PROXYCCL_DEVICE void signal() const { storeReleaseSystem<uint64_t>(remote_inbound, ++*outbound); }

  /// Adds one to the peer's count, as a release of loads (storeReleaseLoadsSystem in platform.h): the addition is
  /// ordered after the stores of earlier kernels and after this block's loads, but not after its stores.
  PROXYCCL_DEVICE void signalLoads() const { storeReleaseLoadsSystem<uint64_t>(remote_inbound, ++*outbound); }

  /// Does signal() without ordering, for a signal that announces no data.
  PROXYCCL_DEVICE void relaxedSignal() const { storeRelaxedSystem<uint64_t>(remote_inbound, ++*outbound); }

  /// Waits for the next signal and consumes it. One thread at a time calls wait().
  /// @param control  the communicator's control block; null for the module's own
  /// @param kind     ProxycclWaitKind, for the error record if the wait fails
  /// @param peer     the rank that signals, or PROXYCCL_NO_PEER
  /// @param channel  channel id, or PROXYCCL_NO_CHANNEL
  /// @return false if the communicator has ended or the time-out passed; then no signal is consumed
  PROXYCCL_DEVICE bool wait(Control* control, uint32_t kind, uint32_t peer, uint32_t channel) const {
    return consume(control, {kind, peer, channel, *expected + 1},
                   [](const uint64_t* p) { return loadAcquireSystem(p); });
  }

  /// Does wait() without ordering, for a signal that announces no data.
  PROXYCCL_DEVICE bool relaxedWait(Control* control, uint32_t kind, uint32_t peer, uint32_t channel) const {
    return consume(control, {kind, peer, channel, *expected + 1},
                   [](const uint64_t* p) { return loadRelaxedSystem(p); });
  }

 private:
  template <class Load>
  PROXYCCL_DEVICE bool consume(Control* control, const WaitFor& what, Load load) const {
    if (!waitUntil(control, what, [&](uint64_t* seen) { return (*seen = load(inbound)) >= what.expected; }))
      return false;
    *expected = what.expected;
    return true;
  }
};

}  // namespace proxyccl
