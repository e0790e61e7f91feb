// Defines CUDA C++'s built-in functions for the host target, so that a kernel written for a GPU compiles unchanged:
// arithmetic, bits, loads with cache hints, printf, assert. Thread indices, barriers, warp functions and atomics are in
// platform_host.h. docs/coming_from_mscclpp.md lists the built-in functions.
//
// Functions that libc also declares are templates, so that libc's headers may be included before or after this one.
#pragma once

#include "proxyccl/wait.h"

// -- types ---

#define PROXYCCL_VECTOR1(Name, T) \
  struct Name {                   \
    T x;                          \
  };                              \
  PROXYCCL_DEVICE Name make_##Name(T x) { return Name{x}; }
#define PROXYCCL_VECTOR2(Name, T)      \
  struct alignas(2 * sizeof(T)) Name { \
    T x, y;                            \
  };                                   \
  PROXYCCL_DEVICE Name make_##Name(T x, T y) { return Name{x, y}; }
#define PROXYCCL_VECTOR3(Name, T) \
  struct Name {                   \
    T x, y, z;                    \
  };                              \
  PROXYCCL_DEVICE Name make_##Name(T x, T y, T z) { return Name{x, y, z}; }
#define PROXYCCL_VECTOR4(Name, T)                                \
  struct alignas(4 * sizeof(T) < 16 ? 4 * sizeof(T) : 16) Name { \
    T x, y, z, w;                                                \
  };                                                             \
  PROXYCCL_DEVICE Name make_##Name(T x, T y, T z, T w) { return Name{x, y, z, w}; }
#define PROXYCCL_VECTORS(prefix, T) \
  PROXYCCL_VECTOR1(prefix##1, T)    \
  PROXYCCL_VECTOR2(prefix##2, T)    \
  PROXYCCL_VECTOR3(prefix##3, T)    \
  PROXYCCL_VECTOR4(prefix##4, T)
PROXYCCL_VECTORS(char, signed char)
PROXYCCL_VECTORS(uchar, unsigned char)
PROXYCCL_VECTORS(short, short)
PROXYCCL_VECTORS(ushort, unsigned short)
PROXYCCL_VECTORS(int, int)
PROXYCCL_VECTORS(uint, unsigned)
PROXYCCL_VECTORS(long, long)
PROXYCCL_VECTORS(ulong, unsigned long)
PROXYCCL_VECTORS(longlong, long long)
PROXYCCL_VECTORS(ulonglong, unsigned long long)
PROXYCCL_VECTORS(float, float)
PROXYCCL_VECTORS(double, double)
#undef PROXYCCL_VECTORS
#undef PROXYCCL_VECTOR1
#undef PROXYCCL_VECTOR2
#undef PROXYCCL_VECTOR3
#undef PROXYCCL_VECTOR4

struct dim3 {
  unsigned x, y, z;

  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
  constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
  constexpr dim3(::proxyccl::host::Dim3 v) : x(v.x), y(v.y), z(v.z) {}
};

#define __align__(n) alignas(n)
#define __noinline__ __attribute__((noinline))
#define warpSize PROXYCCL_WARP_SIZE

// -- arithmetic ---

template <class A, class B>
PROXYCCL_DEVICE constexpr auto min(A a, B b) -> decltype(true ? A() : B()) {
  using Common = decltype(true ? A() : B());
  return static_cast<Common>(a) < static_cast<Common>(b) ? a : b;
}
template <class A, class B>
PROXYCCL_DEVICE constexpr auto max(A a, B b) -> decltype(true ? A() : B()) {
  using Common = decltype(true ? A() : B());
  return static_cast<Common>(a) < static_cast<Common>(b) ? b : a;
}
// If one argument is a NaN, min() and max() return the other argument.
PROXYCCL_DEVICE float min(float a, float b) { return __builtin_fminf(a, b); }
PROXYCCL_DEVICE float max(float a, float b) { return __builtin_fmaxf(a, b); }
PROXYCCL_DEVICE double min(double a, double b) { return __builtin_fmin(a, b); }
PROXYCCL_DEVICE double max(double a, double b) { return __builtin_fmax(a, b); }
template <class T>
PROXYCCL_DEVICE constexpr T abs(T a) {
  return a < T(0) ? -a : a > T(0) ? a : a * a;  // -0 gives 0, and a NaN stays a NaN
}

// The empty parameter packs make overload resolution prefer the overloads of the C++ library, if these are visible.
#define PROXYCCL_OF_ONE(name)                                       \
  template <class T>                                                \
  PROXYCCL_DEVICE float name##f(T x) {                              \
    return __builtin_##name##f(x);                                  \
  }                                                                 \
  template <class T, class... None>                                 \
  PROXYCCL_DEVICE decltype(T(0) * 1.0f) name(T x, None...) {        \
    static_assert(sizeof...(None) == 0, #name " takes one number"); \
    if constexpr (sizeof(T(0) * 1.0f) == 4)                         \
      return __builtin_##name##f(x);                                \
    else                                                            \
      return __builtin_##name(x);                                   \
  }
#define PROXYCCL_OF_TWO(name)                                            \
  template <class T, class U>                                            \
  PROXYCCL_DEVICE float name##f(T x, U y) {                              \
    return __builtin_##name##f(x, y);                                    \
  }                                                                      \
  template <class T, class U, class... None>                             \
  PROXYCCL_DEVICE decltype(T(0) * U(0) * 1.0f) name(T x, U y, None...) { \
    static_assert(sizeof...(None) == 0, #name " takes two numbers");     \
    if constexpr (sizeof(T(0) * U(0) * 1.0f) == 4)                       \
      return __builtin_##name##f(x, y);                                  \
    else                                                                 \
      return __builtin_##name(x, y);                                     \
  }
PROXYCCL_OF_ONE(sqrt)
PROXYCCL_OF_ONE(cbrt)
PROXYCCL_OF_ONE(exp)
PROXYCCL_OF_ONE(exp2)
PROXYCCL_OF_ONE(expm1)
PROXYCCL_OF_ONE(log)
PROXYCCL_OF_ONE(log2)
PROXYCCL_OF_ONE(log10)
PROXYCCL_OF_ONE(log1p)
PROXYCCL_OF_ONE(sin)
PROXYCCL_OF_ONE(cos)
PROXYCCL_OF_ONE(tan)
PROXYCCL_OF_ONE(tanh)
PROXYCCL_OF_ONE(erf)
PROXYCCL_OF_ONE(fabs)
PROXYCCL_OF_ONE(floor)
PROXYCCL_OF_ONE(ceil)
PROXYCCL_OF_ONE(round)
PROXYCCL_OF_ONE(rint)
PROXYCCL_OF_ONE(trunc)
PROXYCCL_OF_TWO(fmin)
PROXYCCL_OF_TWO(fmax)
PROXYCCL_OF_TWO(fmod)
PROXYCCL_OF_TWO(pow)
PROXYCCL_OF_TWO(atan2)
PROXYCCL_OF_TWO(copysign)
#undef PROXYCCL_OF_ONE
#undef PROXYCCL_OF_TWO
PROXYCCL_DEVICE float rsqrtf(float x) { return 1.0f / __builtin_sqrtf(x); }
PROXYCCL_DEVICE double rsqrt(double x) { return 1.0 / __builtin_sqrt(x); }
template <class T>
PROXYCCL_DEVICE float fmaf(T x, float y, float z) {
  return __builtin_fmaf(x, y, z);
}
template <class T>
PROXYCCL_DEVICE double fma(T x, double y, double z) {
  return __builtin_fma(x, y, z);
}
#define PROXYCCL_AS_BUILT_IN(Result, name, function) \
  template <class T>                                 \
  PROXYCCL_DEVICE Result name(T x) {                 \
    return __builtin_##function(x);                  \
  }
PROXYCCL_AS_BUILT_IN(bool, isnan, isnan)
PROXYCCL_AS_BUILT_IN(bool, isinf, isinf)
PROXYCCL_AS_BUILT_IN(bool, isfinite, isfinite)
PROXYCCL_AS_BUILT_IN(float, __expf, expf)
template <class T>
PROXYCCL_DEVICE float __exp10f(T x) {
  return __builtin_powf(10, x);
}
PROXYCCL_AS_BUILT_IN(float, __logf, logf)
PROXYCCL_AS_BUILT_IN(float, __log2f, log2f)
PROXYCCL_AS_BUILT_IN(float, __sinf, sinf)
PROXYCCL_AS_BUILT_IN(float, __cosf, cosf)
#undef PROXYCCL_AS_BUILT_IN
template <class T, class U>
PROXYCCL_DEVICE float __powf(T x, U y) {
  return __builtin_powf(x, y);
}
PROXYCCL_DEVICE float __fdividef(float x, float y) { return x / y; }
PROXYCCL_DEVICE float __fadd_rn(float x, float y) { return x + y; }
PROXYCCL_DEVICE float __fmul_rn(float x, float y) { return x * y; }
PROXYCCL_DEVICE float __fmaf_rn(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
PROXYCCL_DEVICE float __frcp_rn(float x) { return 1.0f / x; }
PROXYCCL_DEVICE float __fsqrt_rn(float x) { return __builtin_sqrtf(x); }
PROXYCCL_DEVICE float __saturatef(float x) { return x > 0 ? x < 1 ? x : 1 : 0; }
PROXYCCL_DEVICE float __int2float_rn(int x) { return static_cast<float>(x); }
PROXYCCL_DEVICE float __uint2float_rn(unsigned x) { return static_cast<float>(x); }
PROXYCCL_DEVICE int __float2int_rn(float x) { return static_cast<int>(__builtin_rintf(x)); }
PROXYCCL_DEVICE int __float2int_rz(float x) { return static_cast<int>(x); }

// -- bits ---

PROXYCCL_DEVICE int __popc(unsigned x) { return __builtin_popcount(x); }
PROXYCCL_DEVICE int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
PROXYCCL_DEVICE int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
PROXYCCL_DEVICE int __clzll(long long x) { return x == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(x)); }
PROXYCCL_DEVICE int __ffs(int x) { return __builtin_ffs(x); }
PROXYCCL_DEVICE int __ffsll(long long x) { return __builtin_ffsll(x); }
PROXYCCL_DEVICE unsigned long long __brevll(unsigned long long x) {
  unsigned long long reversed = 0;
  for (int i = 0; i < 64; ++i, x >>= 1) reversed = reversed << 1 | (x & 1);
  return reversed;
}
PROXYCCL_DEVICE unsigned __brev(unsigned x) { return static_cast<unsigned>(__brevll(x) >> 32); }
PROXYCCL_DEVICE unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const unsigned long long bytes = static_cast<unsigned long long>(y) << 32 | x;
  unsigned chosen = 0;
  for (int i = 0; i < 4; ++i) chosen |= static_cast<unsigned>(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return chosen;
}
PROXYCCL_DEVICE unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((static_cast<unsigned long long>(high) << 32 | low) << (shift & 31) >> 32);
}
PROXYCCL_DEVICE unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((static_cast<unsigned long long>(high) << 32 | low) >> (shift & 31));
}
PROXYCCL_DEVICE unsigned __umulhi(unsigned x, unsigned y) {
  return static_cast<unsigned>(static_cast<unsigned long long>(x) * y >> 32);
}
PROXYCCL_DEVICE int __mulhi(int x, int y) { return static_cast<int>(static_cast<long long>(x) * y >> 32); }
PROXYCCL_DEVICE int __float_as_int(float x) { return __builtin_bit_cast(int, x); }
PROXYCCL_DEVICE unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }
PROXYCCL_DEVICE float __int_as_float(int x) { return __builtin_bit_cast(float, x); }
PROXYCCL_DEVICE float __uint_as_float(unsigned x) { return __builtin_bit_cast(float, x); }
PROXYCCL_DEVICE long long __double_as_longlong(double x) { return __builtin_bit_cast(long long, x); }
PROXYCCL_DEVICE double __longlong_as_double(long long x) { return __builtin_bit_cast(double, x); }
PROXYCCL_DEVICE unsigned __vadd4(unsigned x, unsigned y) {
  return ((x & 0x7f7f7f7f) + (y & 0x7f7f7f7f)) ^ ((x ^ y) & 0x80808080);
}
PROXYCCL_DEVICE unsigned __vminu4(unsigned x, unsigned y) {
  unsigned least = 0;
  for (int at = 0; at < 32; at += 8) least |= min(x >> at & 0xff, y >> at & 0xff) << at;
  return least;
}
PROXYCCL_DEVICE unsigned __vmaxu4(unsigned x, unsigned y) {
  unsigned most = 0;
  for (int at = 0; at < 32; at += 8) most |= max(x >> at & 0xff, y >> at & 0xff) << at;
  return most;
}

// -- memory ---

template <class T, class U>
PROXYCCL_DEVICE void* memcpy(T* to, U* from, size_t bytes) {
  return __builtin_memcpy(to, from, bytes);
}
template <class T>
PROXYCCL_DEVICE void* memset(T* to, int value, size_t bytes) {
  return __builtin_memset(to, value, bytes);
}
#define PROXYCCL_LOAD_WITH_HINT(name)  \
  template <class T>                   \
  PROXYCCL_DEVICE T name(const T* p) { \
    return *p;                         \
  }
PROXYCCL_LOAD_WITH_HINT(__ldg)
PROXYCCL_LOAD_WITH_HINT(__ldca)
PROXYCCL_LOAD_WITH_HINT(__ldcg)
PROXYCCL_LOAD_WITH_HINT(__ldcs)
PROXYCCL_LOAD_WITH_HINT(__ldlu)
#undef PROXYCCL_LOAD_WITH_HINT
#define PROXYCCL_STORE_WITH_HINT(name)       \
  template <class T>                         \
  PROXYCCL_DEVICE void name(T* p, T value) { \
    *p = value;                              \
  }
PROXYCCL_STORE_WITH_HINT(__stwb)
PROXYCCL_STORE_WITH_HINT(__stcg)
PROXYCCL_STORE_WITH_HINT(__stcs)
#undef PROXYCCL_STORE_WITH_HINT

// -- clock, block-wide votes, printf and assert ---

PROXYCCL_DEVICE long long clock64() { return static_cast<long long>(::proxyccl::nanoseconds()); }
PROXYCCL_DEVICE void __nanosleep(unsigned) { ::proxyccl::spinHint(0); }
PROXYCCL_DEVICE uint32_t __activemask() { return 0xffffffffu; }
PROXYCCL_DEVICE int __syncthreads_count(int predicate) {
  __shared__ int count;
  __syncthreads();  // after this barrier, all threads have read the previous call's count
  count = 0;
  __syncthreads();
  count += predicate != 0;
  __syncthreads();
  return count;
}
PROXYCCL_DEVICE int __syncthreads_or(int predicate) { return __syncthreads_count(predicate) != 0; }
PROXYCCL_DEVICE int __syncthreads_and(int predicate) { return __syncthreads_count(!predicate) == 0; }
template <class... Values>
PROXYCCL_DEVICE int printf(const char* format, Values... values) {
  return __builtin_printf(format, values...);
}

namespace proxyccl {
namespace host {

// Replaces `extern __shared__ T name[];` outside of functions (cuda_source.py).
template <class T>
struct DynamicShared {
  PROXYCCL_DEVICE operator T*() const { return static_cast<T*>(dynamicShared()); }
  template <class U>
  PROXYCCL_DEVICE explicit operator U*() const {
    return static_cast<U*>(dynamicShared());
  }
};

// Ends the communicator that compiled the kernel with an AbortedError; the kernel continues.
PROXYCCL_DEVICE void endCommunicator() {
  recordError(nullptr, PROXYCCL_ERROR_LOCAL, {PROXYCCL_WAIT_NONE, PROXYCCL_NO_PEER, PROXYCCL_NO_CHANNEL, 0}, 0);
}
PROXYCCL_DEVICE void failAssertion(const char* condition, const char* file, int line) {
  __builtin_printf("%s:%d: block (%u, %u, %u), thread (%u, %u, %u): assertion `%s` failed\n", file, line, blockIdx.x,
                   blockIdx.y, blockIdx.z, threadIdx.x, threadIdx.y, threadIdx.z, condition);
  endCommunicator();
}

}  // namespace host
}  // namespace proxyccl

PROXYCCL_DEVICE void __trap() { ::proxyccl::host::endCommunicator(); }

#include "cuda_names/assert.h"
