// The semaphore of channels: any number of threads and blocks may signal it and wait for it concurrently.
//
// A waiting thread reserves the number of its signal by an atomic add. The add overlaps with the first load of the
// count, so a wait takes no longer than a wait in semaphore.h.
#pragma once

#include "proxyccl/handles.h"
#include "proxyccl/wait.h"

namespace proxyccl {

struct SharedSemaphore : ProxycclSemaphore {
  static constexpr uint32_t kHandleKind = PROXYCCL_HANDLE_SEMAPHORE;

  /// Adds one to the peer's count.
  ///
  /// The release pairs with the acquire in the peer's wait() and poll(): a peer that sees the signal also sees the data
  /// that this thread wrote before the signal, and that the thread's block wrote before a syncThreadsSystem(). Each
  /// addition to the count continues the release sequence of the earlier additions.
  ///
  /// If the link to the peer does not support atomic additions (`adds` is 0), signal() stores the count, and only one
  /// thread at a time may call it.
  PROXYCCL_DEVICE void signal() const {
    if (adds == 0) return storeReleaseSystem<uint64_t>(remote_inbound, ++*outbound);
    addRelaxedDevice(outbound, 1);
    addReleaseSystem(remote_inbound, 1);
  }

  /// Does signal() without ordering, for a signal that announces no data.
  PROXYCCL_DEVICE void relaxedSignal() const {
    if (adds == 0) return storeRelaxedSystem<uint64_t>(remote_inbound, ++*outbound);
    addRelaxedDevice(outbound, 1);
    addRelaxedSystem(remote_inbound, 1);
  }

  /// Raises the peer's count to `value`. The memory order is that of signal().
  /// @param count  receives the count before the call
  /// @return false if the count was already `value` or more: then nothing is signalled
  PROXYCCL_DEVICE bool signal(uint64_t value, uint64_t* count) const {
    *count = raise(outbound, value);
    if (*count >= value) return false;
    if (adds == 0)
      storeReleaseSystem(remote_inbound, value);
    else
      addReleaseSystem(remote_inbound, value - *count);
    return true;
  }

  /// Waits for the first signal that no other thread waits for, and consumes this signal.
  /// @param control  the communicator's control block; null for the module's own
  /// @param kind     ProxycclWaitKind, for the error record if the wait fails
  /// @param peer     the rank that signals, or PROXYCCL_NO_PEER
  /// @param channel  channel id, or PROXYCCL_NO_CHANNEL
  /// @return false if the communicator has ended or the time-out passed
  PROXYCCL_DEVICE bool wait(Control* control, uint32_t kind, uint32_t peer, uint32_t channel) const {
    return await(control, {kind, peer, channel, takeNext()}, [](const uint64_t* p) { return loadAcquireSystem(p); });
  }

  /// Does wait() without ordering, for a signal that announces no data.
  PROXYCCL_DEVICE bool relaxedWait(Control* control, uint32_t kind, uint32_t peer, uint32_t channel) const {
    return await(control, {kind, peer, channel, takeNext()}, [](const uint64_t* p) { return loadRelaxedSystem(p); });
  }

  /// Waits until the count has reached `value`, and consumes all signals up to it. If the count has already reached
  /// `value`, it returns true immediately. The parameters and the result are those of wait().
  PROXYCCL_DEVICE bool waitUntil(Control* control, uint32_t kind, uint32_t peer, uint32_t channel,
                                 uint64_t value) const {
    if (!await(control, {kind, peer, channel, value}, [](const uint64_t* p) { return loadAcquireSystem(p); }))
      return false;
    maxRelaxedDevice(expected, value);
    return true;
  }

  /// Consumes a signal if one has arrived for which no thread waits. A loop around poll() must itself end when the
  /// communicator ends: `while (!poll()) if (aborted(control)) return;`
  /// @return whether there was such a signal
  PROXYCCL_DEVICE bool poll() const {
    const uint64_t taken = loadRelaxedDevice(expected);
    if (loadAcquireSystem(inbound) > taken && compareExchangeDevice(expected, taken, taken + 1)) return true;
    spinHint(0);  // on the host, lets the block's other threads run, because the signal may depend on them
    return false;
  }

  /// Reserves the first signal that no thread waits for, and returns its number, from 1. The caller must wait for it.
  PROXYCCL_DEVICE uint64_t takeNext() const { return fetchAddRelaxedDevice<uint64_t>(expected, 1) + 1; }

 private:
  template <class Load>
  PROXYCCL_DEVICE bool await(Control* control, const WaitFor& what, Load load) const {
    return proxyccl::waitUntil(control, what, [&](uint64_t* seen) { return (*seen = load(inbound)) >= what.expected; });
  }

  // Raises a count in local memory to `value` if the count is lower. Returns the previous count.
  PROXYCCL_DEVICE uint64_t raise(uint64_t* count, uint64_t value) const {
    uint64_t before = loadRelaxedDevice(count);
    while (before < value && !compareExchangeDevice(count, before, value)) before = loadRelaxedDevice(count);
    return before;
  }
};

}  // namespace proxyccl
