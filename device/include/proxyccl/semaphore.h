// Counting semaphores between two ranks. Counters only grow, in device memory, so a captured graph can be replayed.
#ifndef PROXYCCL_SEMAPHORE_H
#define PROXYCCL_SEMAPHORE_H

#include "proxyccl/handles.h"
#include "proxyccl/wait.h"

namespace proxyccl {

struct Semaphore : ProxycclSemaphore {
  // Adds one at the peer. The release pairs with the acquire in wait() and poll() there: what this thread, and before
  // a syncThreadsSystem() its block, wrote to the peer is visible once the signal is. The only writer of
  // `remote_inbound` is this side, so a store of the count does, with no atomic across the link. One thread at a
  // time.
  PROXYCCL_DEVICE void signal() const { storeReleaseSystem<uint64_t>(remote_inbound, ++*outbound); }

  // The same without ordering: for a signal that announces no data.
  PROXYCCL_DEVICE void relaxedSignal() const { storeRelaxedSystem<uint64_t>(remote_inbound, ++*outbound); }

  // Waits for the next signal and consumes it. One thread at a time.
  PROXYCCL_DEVICE bool wait(Control* control, uint32_t kind, uint32_t peer, uint32_t channel) const {
    const uint64_t target = *expected + 1;
    const WaitFor what = {kind, peer, channel, target};
    if (!waitUntil(control, what, [&](uint64_t* seen) { return (*seen = loadAcquireSystem(inbound)) >= target; }))
      return false;
    *expected = target;
    return true;
  }

  // Consumes a signal if one is there.
  PROXYCCL_DEVICE bool poll() const {
    if (loadAcquireSystem(inbound) <= *expected) return false;
    ++*expected;
    return true;
  }
};

}  // namespace proxyccl

#endif
