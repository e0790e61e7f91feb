// The status of a function that C calls. Internal to the host runtime.
#pragma once

#include <exception>

#include "runtime.h"

namespace proxyccl {
namespace host {

// Returns the call's status. Its exceptions become one: it has run out of memory or of threads.
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
