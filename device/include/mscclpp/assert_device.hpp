// Defines MSCCLPP_ASSERT_DEVICE, which ends the communicator if its condition is false.
#pragma once

#include "mscclpp/device.hpp"
#include "proxyccl/wait.h"

/// If the condition is false, ends the communicator with an AbortedError that names this rank; the kernel continues.
/// `message` is not reported. The check is made in all builds; MSCCL++ makes it only in debug builds.
#define MSCCLPP_ASSERT_DEVICE(condition, message)                                                 \
  do {                                                                                            \
    static_cast<void>(message);                                                                   \
    if (!(condition))                                                                             \
      ::proxyccl::recordError(nullptr, PROXYCCL_ERROR_LOCAL,                                      \
                              {PROXYCCL_WAIT_NONE, PROXYCCL_NO_PEER, PROXYCCL_NO_CHANNEL, 0}, 0); \
  } while (0)
