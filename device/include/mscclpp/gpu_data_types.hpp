// MSCCL++'s element types, and its vectors: several elements that a thread moves or adds in one step.
//
// On NVIDIA and on the host, the 16-bit floats have CUDA's names. On AMD, vectors hold proxyccl::NarrowFloat elements,
// which convert to float and from numbers.
#pragma once

#include "mscclpp/device.hpp"
#include "proxyccl/narrow_float.h"

#ifdef MSCCLPP_DEVICE_HIP
namespace mscclpp::detail {
using Half = proxyccl::NarrowFloat<proxyccl::Half>;
using BFloat16 = proxyccl::NarrowFloat<proxyccl::BFloat16>;
}  // namespace mscclpp::detail
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
using __bfloat16 = __nv_bfloat16;
using __bfloat162 = __nv_bfloat162;
namespace mscclpp::detail {
using Half = __half;
using BFloat16 = __bfloat16;
}  // namespace mscclpp::detail
#endif
using __fp8_e4m3 = ::proxyccl::NarrowFloat<::proxyccl::Float8E4M3>;
using __fp8_e5m2 = ::proxyccl::NarrowFloat<::proxyccl::Float8E5M2>;
#define __FP8_TYPES_EXIST__

/// An 8-bit float with a 4-bit exponent of bias 15. The type has neither infinities nor NaNs, and saturates at 1.875.
struct __fp8_e4m3b15 {
  uint8_t __x;

  __fp8_e4m3b15() = default;
  PROXYCCL_DEVICE explicit __fp8_e4m3b15(uint8_t bits) : __x(bits) {}
  PROXYCCL_DEVICE explicit __fp8_e4m3b15(float value) {
    const uint32_t half = proxyccl::floatToHalf(value), magnitude = half & 0x7fff;
    __x = static_cast<uint8_t>((half & 0x8000) >> 8 | ((magnitude < 0x3f80 ? magnitude : 0x3f80) * 2 + 0x80) >> 8);
  }
  /// Returns the value that `bits` represent.
  static PROXYCCL_DEVICE __fp8_e4m3b15 fromRaw(uint8_t bits) { return __fp8_e4m3b15(bits); }
  PROXYCCL_DEVICE operator float() const {
    return proxyccl::halfToFloat(static_cast<uint16_t>((__x & 0x80) << 8 | (__x & 0x7f) << 7));
  }
};

namespace mscclpp {

enum class DataType {
  INT32,
  UINT32,
  FLOAT16,
  FLOAT32,
  BFLOAT16,
  FLOAT8_E4M3FN,
  FLOAT8_E4M3FNUZ,
  FLOAT8_E5M2,
  FLOAT8_E5M2FNUZ,
  UINT8,
  FLOAT8_E4M3B15,
  AUTO = 255,
};

enum ReduceOp { SUM = 0, MIN = 3, NOP = 255 };

/// A vector's storage, as words of 4 bytes.
template <int Bytes, bool Enabled = (Bytes >= 4 && Bytes % 4 == 0)>
struct alignas(Bytes) Words {
  uint32_t w[Bytes / 4];

  PROXYCCL_DEVICE uint32_t& operator[](int i) { return w[i]; }
  PROXYCCL_DEVICE const uint32_t& operator[](int i) const { return w[i]; }
};
template <int Bytes>
struct Words<Bytes, false> {};

namespace detail {
// The CUDA type that a vector converts to and from: CUDA's vector of the element type if there is one, else unsigned
// integers of the same size.
template <class T, int N, int Bytes = N * sizeof(T)>
struct StorageOf {
  using Type = Words<Bytes>;
};
#define MSCCLPP_STORAGE_BY_SIZE(Bytes, Storage) \
  template <class T, int N>                     \
  struct StorageOf<T, N, Bytes> {               \
    using Type = Storage;                       \
  };
MSCCLPP_STORAGE_BY_SIZE(1, uint8_t)
MSCCLPP_STORAGE_BY_SIZE(2, uint16_t)
MSCCLPP_STORAGE_BY_SIZE(4, uint32_t)
MSCCLPP_STORAGE_BY_SIZE(8, uint2)
MSCCLPP_STORAGE_BY_SIZE(16, uint4)
#undef MSCCLPP_STORAGE_BY_SIZE
#define MSCCLPP_STORAGE_OF_TYPE(T, N, Storage) \
  template <>                                  \
  struct StorageOf<T, N, N * sizeof(T)> {      \
    using Type = Storage;                      \
  };
MSCCLPP_STORAGE_OF_TYPE(int32_t, 1, int32_t)
MSCCLPP_STORAGE_OF_TYPE(float, 1, float)
MSCCLPP_STORAGE_OF_TYPE(double, 1, double)
MSCCLPP_STORAGE_OF_TYPE(int32_t, 2, int2)
MSCCLPP_STORAGE_OF_TYPE(float, 2, float2)
MSCCLPP_STORAGE_OF_TYPE(int32_t, 4, int4)
MSCCLPP_STORAGE_OF_TYPE(float, 4, float4)
#ifndef MSCCLPP_DEVICE_HIP
MSCCLPP_STORAGE_OF_TYPE(__half, 2, __half2)
MSCCLPP_STORAGE_OF_TYPE(__bfloat16, 2, __bfloat162)
#endif
#undef MSCCLPP_STORAGE_OF_TYPE
}  // namespace detail

/// A vector of N elements, accessible as elements, as words of 4 bytes, and as a CUDA vector (`storage`).
template <class T, int N, class Storage>
union alignas(N * sizeof(T)) VectorTypeImpl {
  T data[N];
  Words<N * sizeof(T)> words;
  Storage storage;

  using ElementType = T;
  static constexpr int Size = N;

  VectorTypeImpl() = default;
  PROXYCCL_DEVICE VectorTypeImpl(const Storage& value) : storage(value) {}

  PROXYCCL_DEVICE operator Storage() const { return storage; }
  PROXYCCL_DEVICE operator T*() { return data; }
  PROXYCCL_DEVICE operator const T*() const { return data; }
  PROXYCCL_DEVICE T& operator[](int i) { return data[i]; }
  PROXYCCL_DEVICE const T& operator[](int i) const { return data[i]; }
};

template <class T, int N>
using VectorType = VectorTypeImpl<T, N, typename detail::StorageOf<T, N>::Type>;

using i32x1 = VectorType<int32_t, 1>;
using i32x2 = VectorType<int32_t, 2>;
using i32x4 = VectorType<int32_t, 4>;
using u32x1 = VectorType<uint32_t, 1>;
using u32x2 = VectorType<uint32_t, 2>;
using u32x4 = VectorType<uint32_t, 4>;
using u8x2 = VectorType<uint8_t, 2>;
using u8x4 = VectorType<uint8_t, 4>;
using f64x1 = VectorType<double, 1>;
using f32x1 = VectorType<float, 1>;
using f32x2 = VectorType<float, 2>;
using f32x4 = VectorType<float, 4>;
using f32x8 = VectorType<float, 8>;
using f32x16 = VectorType<float, 16>;
using f16x2 = VectorType<detail::Half, 2>;
using f16x4 = VectorType<detail::Half, 4>;
using f16x8 = VectorType<detail::Half, 8>;
using f16x16 = VectorType<detail::Half, 16>;
using bf16x2 = VectorType<detail::BFloat16, 2>;
using bf16x4 = VectorType<detail::BFloat16, 4>;
using bf16x8 = VectorType<detail::BFloat16, 8>;
#define MSCCLPP_VECTORS_OF_1_BYTE(name, T) \
  using name##x2 = VectorType<T, 2>;       \
  using name##x4 = VectorType<T, 4>;       \
  using name##x8 = VectorType<T, 8>;       \
  using name##x16 = VectorType<T, 16>;
MSCCLPP_VECTORS_OF_1_BYTE(f8_e4m3, __fp8_e4m3)
MSCCLPP_VECTORS_OF_1_BYTE(f8_e5m2, __fp8_e5m2)
MSCCLPP_VECTORS_OF_1_BYTE(f8_e4m3b15, __fp8_e4m3b15)
#undef MSCCLPP_VECTORS_OF_1_BYTE

/// Returns the bits of a value as another type of the same size.
template <class To, class From>
PROXYCCL_DEVICE To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast keeps the size");
  return __builtin_bit_cast(To, from);
}

namespace detail {

// Floats of 16 bits are added in float and rounded once.
template <class T>
struct WideOf {
  using Type = float;
};
template <>
struct WideOf<int32_t> {
  using Type = int32_t;
};
template <>
struct WideOf<uint32_t> {
  using Type = uint32_t;
};
template <>
struct WideOf<uint8_t> {
  using Type = uint8_t;
};
template <>
struct WideOf<double> {
  using Type = double;
};
template <class T>
using Wide = typename WideOf<T>::Type;

template <class T>
PROXYCCL_DEVICE T clipped(T value) {
  return value;
}
PROXYCCL_DEVICE Half clipped(Half value) {
  const float wide = static_cast<float>(value);
  return wide > 65504.0f ? Half(65504.0f) : wide < -65504.0f ? Half(-65504.0f) : value;
}

}  // namespace detail

/// Returns the value; an infinite half becomes the greatest finite half of the same sign.
template <class T>
PROXYCCL_DEVICE T clip(T value) {
  return detail::clipped(value);
}

/// Adds two vectors element by element. With UseClip, sums of halves are clipped to the finite range.
template <bool UseClip = true, class T, int N, class S>
PROXYCCL_DEVICE VectorTypeImpl<T, N, S> operator+(const VectorTypeImpl<T, N, S>& a, const VectorTypeImpl<T, N, S>& b) {
  VectorTypeImpl<T, N, S> sum;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const T each = static_cast<T>(static_cast<detail::Wide<T>>(a.data[i]) + static_cast<detail::Wide<T>>(b.data[i]));
    sum.data[i] = UseClip ? detail::clipped(each) : each;
  }
  return sum;
}

/// Returns the smaller value.
template <class T>
PROXYCCL_DEVICE T min(const T& a, const T& b) {
  return a < b ? a : b;
}
/// Returns the smaller value of each pair of elements.
template <class T, int N, class S>
PROXYCCL_DEVICE VectorTypeImpl<T, N, S> min(const VectorTypeImpl<T, N, S>& a, const VectorTypeImpl<T, N, S>& b) {
  VectorTypeImpl<T, N, S> least;
#pragma unroll
  for (int i = 0; i < N; ++i)
    least.data[i] = static_cast<detail::Wide<T>>(b.data[i]) < static_cast<detail::Wide<T>>(a.data[i]) ||
                            static_cast<detail::Wide<T>>(a.data[i]) != static_cast<detail::Wide<T>>(a.data[i])
                        ? b.data[i]
                        : a.data[i];
  return least;
}

/// Converts a vector's elements to another type.
template <class To, class From>
PROXYCCL_DEVICE To to(const From& from) {
  static_assert(To::Size == From::Size, "to() keeps the number of elements");
  To result;
#pragma unroll
  for (int i = 0; i < From::Size; ++i)
    result.data[i] =
        static_cast<typename To::ElementType>(static_cast<detail::Wide<typename From::ElementType>>(from.data[i]));
  return result;
}

}  // namespace mscclpp
