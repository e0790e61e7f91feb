// Defines MSCCL++'s macros that wait for a condition. The communicator's time-out bounds each wait.
#pragma once

#include "mscclpp/assert_device.hpp"
#include "proxyccl/wait.h"

namespace mscclpp {
namespace detail {

template <class Ready>
PROXYCCL_DEVICE void waitForCondition(Ready ready) {
  const proxyccl::WaitFor what = {PROXYCCL_WAIT_CONDITION, PROXYCCL_NO_PEER, PROXYCCL_NO_CHANNEL, 1};
  proxyccl::waitUntil(nullptr, what, [&](uint64_t*) { return ready(); });
}

}  // namespace detail
}  // namespace mscclpp

/// Spins while the condition holds. If the communicator ends or the time-out passes, the kernel continues and the
/// program gets a WaitTimeoutError.
#define POLL_MAYBE_JAILBREAK(condition, max_spins)                     \
  do {                                                                 \
    static_cast<void>(max_spins);                                      \
    ::mscclpp::detail::waitForCondition([&] { return !(condition); }); \
  } while (0)

/// Spins while both conditions hold; see POLL_MAYBE_JAILBREAK.
#define OR_POLL_MAYBE_JAILBREAK(first, second, max_spins) POLL_MAYBE_JAILBREAK((first) && (second), max_spins)
