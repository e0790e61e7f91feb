// MSCCLPP_ASSERT_DEVICE: a condition that ends the communicator if it does not hold.
#ifndef MSCCLPP_ASSERT_DEVICE_HPP_
#define MSCCLPP_ASSERT_DEVICE_HPP_

#include "mscclpp/device.hpp"
#include "proxyccl/wait.h"

/// Unless the condition holds, the communicator ends with an AbortedError that names this rank; the kernel goes on. The
/// message serves only as a comment in the source. MSCCL++ checks only in debug builds.
#define MSCCLPP_ASSERT_DEVICE(condition, message)                                                 \
  do {                                                                                            \
    static_cast<void>(message);                                                                   \
    if (!(condition))                                                                             \
      ::proxyccl::recordError(nullptr, PROXYCCL_ERROR_LOCAL,                                      \
                              {PROXYCCL_WAIT_NONE, PROXYCCL_NO_PEER, PROXYCCL_NO_CHANNEL, 0}, 0); \
  } while (0)

#endif
