// The status of a function that C calls, and objects that outlast threads. Internal to the host runtime.
#pragma once

#include <exception>
#include <new>

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

// The process's only object of type T. The object is never destroyed, because threads may still use it at exit. It is
// not on the heap, which may be full.
template <class T>
class Lasting {
 public:
  static T& get() {
    static T& only = *new (room_) T();
    return only;
  }
  // Called in a fork's child, because a thread that the child lacks may hold the object's lock.
  static void startAnew() {
    get();
    new (room_) T();
  }

 private:
  alignas(T) static inline char room_[sizeof(T)];
};

}  // namespace host
}  // namespace proxyccl
