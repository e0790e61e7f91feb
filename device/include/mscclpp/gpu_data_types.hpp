// MSCCL++'s vectors of elements: words of 4 to 16 bytes that a thread moves at once.
//
// Its 16-bit floats are proxyccl::Half and proxyccl::BFloat16, which have no operators: reduce.h widens them.
#ifndef MSCCLPP_GPU_DATA_TYPES_HPP_
#define MSCCLPP_GPU_DATA_TYPES_HPP_

#include "mscclpp/device.hpp"
#include "proxyccl/reduce.h"

namespace mscclpp {

template <class T, int N>
union alignas(N * sizeof(T)) VectorType {
  T data[N];
  uint32_t words[N * sizeof(T) / sizeof(uint32_t)];

  static constexpr int Size = N;
  using ElementType = T;

  PROXYCCL_DEVICE T& operator[](int i) { return data[i]; }
  PROXYCCL_DEVICE const T& operator[](int i) const { return data[i]; }
};

#define MSCCLPP_VECTORS_OF_4_BYTES(name, T) \
  using name##x1 = VectorType<T, 1>;        \
  using name##x2 = VectorType<T, 2>;        \
  using name##x4 = VectorType<T, 4>;
MSCCLPP_VECTORS_OF_4_BYTES(i32, int32_t)
MSCCLPP_VECTORS_OF_4_BYTES(u32, uint32_t)
MSCCLPP_VECTORS_OF_4_BYTES(f32, float)
#undef MSCCLPP_VECTORS_OF_4_BYTES
#define MSCCLPP_VECTORS_OF_2_BYTES(name, T) \
  using name##x2 = VectorType<T, 2>;        \
  using name##x4 = VectorType<T, 4>;        \
  using name##x8 = VectorType<T, 8>;
MSCCLPP_VECTORS_OF_2_BYTES(f16, proxyccl::Half)
MSCCLPP_VECTORS_OF_2_BYTES(bf16, proxyccl::BFloat16)
#undef MSCCLPP_VECTORS_OF_2_BYTES

/// The bits of a value as another type of the same size.
template <class To, class From>
PROXYCCL_DEVICE To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast keeps the size");
  return __builtin_bit_cast(To, from);
}

/// Element by element.
template <class T, int N>
PROXYCCL_DEVICE VectorType<T, N> operator+(const VectorType<T, N>& a, const VectorType<T, N>& b) {
  using E = proxyccl::Element<T>;
  VectorType<T, N> sum;
  for (int i = 0; i < N; ++i) sum.data[i] = E::narrow(E::widen(a.data[i]) + E::widen(b.data[i]));
  return sum;
}

}  // namespace mscclpp

#endif
