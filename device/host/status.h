// Turns exceptions into status codes, and holds objects that are never destroyed.
#pragma once

#include <exception>
#include <new>

#include "runtime.h"

namespace proxyccl {
namespace host {

// Returns the call's status, or PROXYCCL_HOST_OUT_OF_MEMORY if it throws.
template <class Call>
int statusOf(Call&& call) noexcept {
  try {
    return call();
  } catch (const std::exception&) {
    return PROXYCCL_HOST_OUT_OF_MEMORY;
  }
}

// The process's only object of type T. The object is never destroyed, because threads may still use it at exit. Its
// memory is static, so that creating the object can't fail.
template <class T>
class Lasting {
 public:
  static T& get() {
    static T& only = *new (room_) T();
    return only;
  }
  // Replaces the object in a fork's child, which may lack the thread that holds the object's lock.
  static void startAnew() {
    get();
    new (room_) T();
  }

 private:
  alignas(T) static inline char room_[sizeof(T)];
};

}  // namespace host
}  // namespace proxyccl
