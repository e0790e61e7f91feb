// Narrow floats with operators, for kernels that are written like CUDA C++. Each type converts to float and from
// numbers, and each operation rounds its result once. The library's own kernels use the plain structs of reduce.h and
// float8.h.
#pragma once

#include "proxyccl/float8.h"

namespace proxyccl {

// A float with operators. `Stored` is Half, BFloat16, Float8E4M3 or Float8E5M2.
template <class Stored>
struct NarrowFloat : Stored {
  NarrowFloat() = default;
  template <class Number, class = decltype(static_cast<float>(Number()))>
  PROXYCCL_DEVICE NarrowFloat(Number value) : Stored(Element<Stored>::narrow(static_cast<float>(value))) {}

  PROXYCCL_DEVICE operator float() const { return Element<Stored>::widen(*this); }

  PROXYCCL_DEVICE NarrowFloat& operator+=(NarrowFloat other) { return *this = *this + other; }
  PROXYCCL_DEVICE NarrowFloat& operator-=(NarrowFloat other) { return *this = *this - other; }
  PROXYCCL_DEVICE NarrowFloat& operator*=(NarrowFloat other) { return *this = *this * other; }
  PROXYCCL_DEVICE NarrowFloat& operator/=(NarrowFloat other) { return *this = *this / other; }
};

#define PROXYCCL_NARROW_OPERATION(operation)                                                                           \
  template <class Stored>                                                                                              \
  PROXYCCL_DEVICE NarrowFloat<Stored> operator operation(const NarrowFloat<Stored>& a, const NarrowFloat<Stored>& b) { \
    return static_cast<float>(a) operation static_cast<float>(b);                                                      \
  }
PROXYCCL_NARROW_OPERATION(+)
PROXYCCL_NARROW_OPERATION(-)
PROXYCCL_NARROW_OPERATION(*)
PROXYCCL_NARROW_OPERATION(/)
#undef PROXYCCL_NARROW_OPERATION
template <class Stored>
PROXYCCL_DEVICE NarrowFloat<Stored> operator-(const NarrowFloat<Stored>& a) {
  return -static_cast<float>(a);
}

// Two narrow floats, adjacent in memory.
template <class Stored>
struct alignas(2 * sizeof(Stored)) NarrowFloat2 {
  NarrowFloat<Stored> x, y;
};

}  // namespace proxyccl
