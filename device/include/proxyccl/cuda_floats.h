// Defines CUDA's names of narrow floats for targets without CUDA's own headers: the host, and NVRTC without a toolkit.
// Only conversions, arithmetic and comparisons are defined. The files in cuda_names include this header.
#pragma once

#include "proxyccl/narrow_float.h"

// These macros are the include guards of CUDA's headers, so that a later include does not define the names again.
#define __CUDA_FP16_H__
#define __CUDA_BF16_H__
#define __CUDA_FP8_H__

using __half = ::proxyccl::NarrowFloat<::proxyccl::Half>;
using __half2 = ::proxyccl::NarrowFloat2<::proxyccl::Half>;
using half = __half;
using half2 = __half2;
using __nv_bfloat16 = ::proxyccl::NarrowFloat<::proxyccl::BFloat16>;
using __nv_bfloat162 = ::proxyccl::NarrowFloat2<::proxyccl::BFloat16>;
using nv_bfloat16 = __nv_bfloat16;
using nv_bfloat162 = __nv_bfloat162;
using __nv_fp8_e4m3 = ::proxyccl::NarrowFloat<::proxyccl::Float8E4M3>;
using __nv_fp8x2_e4m3 = ::proxyccl::NarrowFloat2<::proxyccl::Float8E4M3>;
using __nv_fp8_e5m2 = ::proxyccl::NarrowFloat<::proxyccl::Float8E5M2>;
using __nv_fp8x2_e5m2 = ::proxyccl::NarrowFloat2<::proxyccl::Float8E5M2>;

PROXYCCL_DEVICE __half __int2half_rn(int x) { return x; }
PROXYCCL_DEVICE __half __low2half(__half2 x) { return x.x; }
PROXYCCL_DEVICE __half __high2half(__half2 x) { return x.y; }

// Defines CUDA's conversions of a 16-bit type and of pairs of it; `name` is the type's name in the functions' names.
#define PROXYCCL_CUDA_CONVERSIONS(name, T, T2)                                                \
  PROXYCCL_DEVICE T __float2##name(float x) { return x; }                                     \
  PROXYCCL_DEVICE T __float2##name##_rn(float x) { return x; }                                \
  PROXYCCL_DEVICE float __##name##2float(T x) { return x; }                                   \
  PROXYCCL_DEVICE T __ushort_as_##name(unsigned short x) { return __builtin_bit_cast(T, x); } \
  PROXYCCL_DEVICE unsigned short __##name##_as_ushort(T x) { return x.bits; }                 \
  PROXYCCL_DEVICE T2 make_##name##2(T x, T y) { return {x, y}; }                              \
  PROXYCCL_DEVICE T2 __halves2##name##2(T x, T y) { return {x, y}; }                          \
  PROXYCCL_DEVICE T2 __float2##name##2_rn(float x) { return {x, x}; }                         \
  PROXYCCL_DEVICE T2 __floats2##name##2_rn(float x, float y) { return {x, y}; }               \
  PROXYCCL_DEVICE T2 __float22##name##2_rn(float2 x) { return {x.x, x.y}; }                   \
  PROXYCCL_DEVICE float2 __##name##22float2(T2 x) { return make_float2(x.x, x.y); }
PROXYCCL_CUDA_CONVERSIONS(half, __half, __half2)
PROXYCCL_CUDA_CONVERSIONS(bfloat16, __nv_bfloat16, __nv_bfloat162)
#undef PROXYCCL_CUDA_CONVERSIONS

// Defines an operation on each of the two 16-bit types, and on pairs of each.
#define PROXYCCL_CUDA_OPERATION(name, expression)                                                                     \
  template <class S>                                                                                                  \
  PROXYCCL_DEVICE ::proxyccl::NarrowFloat<S> name(::proxyccl::NarrowFloat<S> a, ::proxyccl::NarrowFloat<S> b) {       \
    return expression;                                                                                                \
  }                                                                                                                   \
  template <class S>                                                                                                  \
  PROXYCCL_DEVICE ::proxyccl::NarrowFloat2<S> name##2(::proxyccl::NarrowFloat2<S> a, ::proxyccl::NarrowFloat2<S> b) { \
    return {name(a.x, b.x), name(a.y, b.y)};                                                                          \
  }
PROXYCCL_CUDA_OPERATION(__hadd, a + b)
PROXYCCL_CUDA_OPERATION(__hsub, a - b)
PROXYCCL_CUDA_OPERATION(__hmul, a* b)
PROXYCCL_CUDA_OPERATION(__hmin, float(a) < float(b) || float(b) != float(b) ? a : b)
PROXYCCL_CUDA_OPERATION(__hmax, float(a) > float(b) || float(b) != float(b) ? a : b)
#undef PROXYCCL_CUDA_OPERATION
template <class S>
PROXYCCL_DEVICE ::proxyccl::NarrowFloat<S> __hdiv(::proxyccl::NarrowFloat<S> a, ::proxyccl::NarrowFloat<S> b) {
  return a / b;
}
template <class S>
PROXYCCL_DEVICE ::proxyccl::NarrowFloat<S> __hfma(::proxyccl::NarrowFloat<S> a, ::proxyccl::NarrowFloat<S> b,
                                                  ::proxyccl::NarrowFloat<S> c) {
  return __builtin_fmaf(a, b, c);
}
template <class S>
PROXYCCL_DEVICE ::proxyccl::NarrowFloat<S> __hneg(::proxyccl::NarrowFloat<S> a) {
  return -a;
}
#define PROXYCCL_CUDA_COMPARISON(name, comparison)                                        \
  template <class S>                                                                      \
  PROXYCCL_DEVICE bool name(::proxyccl::NarrowFloat<S> a, ::proxyccl::NarrowFloat<S> b) { \
    return float(a) comparison float(b);                                                  \
  }
PROXYCCL_CUDA_COMPARISON(__heq, ==)
PROXYCCL_CUDA_COMPARISON(__hne, !=)
PROXYCCL_CUDA_COMPARISON(__hlt, <)
PROXYCCL_CUDA_COMPARISON(__hle, <=)
PROXYCCL_CUDA_COMPARISON(__hgt, >)
PROXYCCL_CUDA_COMPARISON(__hge, >=)
#undef PROXYCCL_CUDA_COMPARISON
