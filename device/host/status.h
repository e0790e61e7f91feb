// The status of a function that C calls. Internal to the host runtime.
#pragma once

#include <exception>

#include "runtime.h"

namespace proxyccl {
namespace host {

// Returns the call's status. An exception becomes the status for a lack of memory or threads.
template <class Call>
int statusOf(Call&& call) noexcept {
  try {
    return call();
  } catch (const std::exception&) {
    return PROXYCCL_HOST_OUT_OF_MEMORY;
  }
}

}  // namespace host
}  // namespace proxyccl
