// The host target: a GPU thread is a fiber, a block is one OS thread that switches between its fibers.
//
// A fiber's description (Fiber) lies at the top of its aligned stack, so that `self()` computes its address from the
// frame address, without thread-local storage or a symbol to link. The description holds the emulator's entry points as
// function pointers, so a compiled kernel is a shared object without undefined symbols.
#pragma once

#include "proxyccl/types.h"

struct ProxycclControl;

#define PROXYCCL_ON_HOST 1
#define PROXYCCL_WARP_SIZE 32
#define PROXYCCL_WHOLE_LINES 0
// The compiler chooses what to inline: forced inlining doubles the shipped kernels' compile time and does not make them
// faster.
#define PROXYCCL_DEVICE inline
#define PROXYCCL_OUT_OF_LINE inline

// A launch calls a kernel through an entry point with another name (kernel.h). Kernels are hidden symbols, because a
// visible kernel's name could clash with a symbol of the process, such as wait().
#ifndef PROXYCCL_FIND_KERNELS  // defined when the source is only preprocessed, to find its kernels by the word
                               // `__global__`
#define __global__ __attribute__((visibility("hidden")))
#endif
#define __device__
#define __host__
#define __constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __restrict__ __restrict
// One OS thread runs one block at a time, so its thread-local memory is the block's shared memory.
#define __shared__ static thread_local

namespace proxyccl::host {

constexpr uint64_t kStackBytes = 128 * 1024;  // size and alignment of a fiber's stack; only touched pages take memory
constexpr uint64_t kFiberSlot = 256;          // bytes for the Fiber at the stack's top

struct Dim3 {
  uint32_t x, y, z;
};

struct Fiber;

struct EmulatorApi {
  void (*sync_block)(Fiber*);
  uint64_t (*shuffle)(Fiber*, uint32_t mask, uint64_t value, uint32_t source_lane);
  uint32_t (*ballot)(Fiber*, uint32_t mask, uint32_t predicate);
  void (*spin)(Fiber*, uint32_t spins);
  uint64_t (*nanoseconds)(void);
};

// The part of a fiber that kernels read; the emulator writes it before the fiber first runs.
struct Fiber {
  const EmulatorApi* api;
  Dim3 thread_idx, block_idx, block_dim, grid_dim;
  uint32_t lane;
  void* dynamic_shared;
  ProxycclControl* default_control;
};

PROXYCCL_DEVICE Fiber* self() {
  const uint64_t frame = reinterpret_cast<uint64_t>(__builtin_frame_address(0));
  return reinterpret_cast<Fiber*>((frame & ~(kStackBytes - 1)) + kStackBytes - kFiberSlot);
}

template <class T>
PROXYCCL_DEVICE uint64_t toBits(T value) {
  static_assert(sizeof(T) <= 8, "a shuffle moves at most 8 bytes");
  uint64_t bits = 0;
  __builtin_memcpy(&bits, &value, sizeof(T));
  return bits;
}
template <class T>
PROXYCCL_DEVICE T fromBits(uint64_t bits) {
  T value;
  __builtin_memcpy(&value, &bits, sizeof(T));
  return value;
}

template <size_t... I>
struct Indices {};
// The sequence 0 to N - 1, defined without compiler builtins, because g++ and clang++ have different builtins.
template <size_t N, size_t... I>
struct IndicesBelow : IndicesBelow<N - 1, N - 1, I...> {};
template <size_t... I>
struct IndicesBelow<0, I...> {
  using Type = Indices<I...>;
};

// Unpacks the array of argument addresses that a launch passes, as a driver does for a GPU.
template <class... Args, size_t... I>
void call(void (*kernel)(Args...), void** args, Indices<I...>) {
  kernel(*static_cast<Args*>(args[I])...);
}
template <class... Args>
void callKernel(void (*kernel)(Args...), void** args) {
  call(kernel, args, typename IndicesBelow<sizeof...(Args)>::Type{});
}

}  // namespace proxyccl::host

#define threadIdx (::proxyccl::host::self()->thread_idx)
#define blockIdx (::proxyccl::host::self()->block_idx)
#define blockDim (::proxyccl::host::self()->block_dim)
#define gridDim (::proxyccl::host::self()->grid_dim)
PROXYCCL_DEVICE void __syncthreads() { ::proxyccl::host::self()->api->sync_block(::proxyccl::host::self()); }

#define PROXYCCL_LOAD(p, ORDER, SCOPE) __atomic_load_n(p, __ATOMIC_##ORDER)
#define PROXYCCL_STORE(p, v, ORDER, SCOPE) __atomic_store_n(p, v, __ATOMIC_##ORDER)
#define PROXYCCL_ADD(p, v, ORDER, SCOPE) PROXYCCL_FETCH_ADD(p, v, ORDER, SCOPE)
#define PROXYCCL_MAX(p, v) ::atomicMax(p, v)
#define PROXYCCL_FETCH_ADD(p, v, ORDER, SCOPE) __atomic_fetch_add(p, v, __ATOMIC_##ORDER)
#define PROXYCCL_EXCHANGE(p, v, ORDER, SCOPE) __atomic_exchange_n(p, v, __ATOMIC_##ORDER)
#define PROXYCCL_COMPARE_EXCHANGE(p, expected, desired, SCOPE) \
  __atomic_compare_exchange_n(p, expected, desired, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)

namespace proxyccl {

PROXYCCL_DEVICE ProxycclControl* defaultControl() { return host::self()->default_control; }
PROXYCCL_DEVICE void spinHint(uint32_t spins) { host::self()->api->spin(host::self(), spins); }
PROXYCCL_DEVICE uint64_t nanoseconds() { return host::self()->api->nanoseconds(); }
// On the host, a spin yields to the scheduler and may last a time slice on a busy machine. A kernel that must stop may
// have hundreds of waits ahead, so each wait checks the abort word before its first spin.
constexpr uint32_t kSpinsPerCheck = 8, kFirstCheck = 0;

template <class T>
PROXYCCL_DEVICE T shuffle(T value, uint32_t lane) {
  return host::fromBits<T>(host::self()->api->shuffle(host::self(), 0xffffffffu, host::toBits(value), lane));
}
PROXYCCL_DEVICE uint64_t ballotWarp(bool predicate) {
  return host::self()->api->ballot(host::self(), 0xffffffffu, predicate);
}
PROXYCCL_DEVICE void syncWarp() { ballotWarp(false); }
PROXYCCL_DEVICE uint32_t countBits(uint64_t bits) { return static_cast<uint32_t>(__builtin_popcountll(bits)); }
PROXYCCL_DEVICE void fenceSystem() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
PROXYCCL_DEVICE void syncThreadsSystem() { __syncthreads(); }
PROXYCCL_DEVICE void syncThreadsDevice() { __syncthreads(); }
PROXYCCL_DEVICE void* dynamicShared() { return host::self()->dynamic_shared; }

// storeTrigger() stores word 0 by a relaxed store, then word 1, with the parity bit, by a release that publishes both
// words. This fence orders the store of word 0 after the load that found room in the ring.
PROXYCCL_DEVICE void orderBeforeTrigger() { __atomic_thread_fence(__ATOMIC_ACQUIRE); }
PROXYCCL_DEVICE void storeTrigger(uint64_t* slot, uint64_t word0, uint64_t word1) {
  __atomic_store_n(slot, word0, __ATOMIC_RELAXED);
  __atomic_store_n(slot + 1, word1, __ATOMIC_RELEASE);
}

// Each half of a packet holds data and flag, so two accesses of 8 bytes suffice.
PROXYCCL_DEVICE void storePacket128(uint64_t* p, uint64_t low, uint64_t high) {
  __atomic_store_n(p, low, __ATOMIC_RELAXED);
  __atomic_store_n(p + 1, high, __ATOMIC_RELAXED);
}
PROXYCCL_DEVICE void loadPacket128(const uint64_t* p, uint64_t* low, uint64_t* high) {
  *low = __atomic_load_n(p, __ATOMIC_RELAXED);
  *high = __atomic_load_n(p + 1, __ATOMIC_RELAXED);
}

// Conversions to and from halves use integer arithmetic, because not every C++ compiler has a 16-bit float.
PROXYCCL_DEVICE float halfToFloat(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16, magnitude = bits & 0x7fff;
  // The exponent biases of float and half differ by 112. The multiplication is exact and makes subnormal halves normal.
  const float scaled = __builtin_bit_cast(float, magnitude << 13) * 0x1p112f;
  const uint32_t infinite = magnitude >= 0x7c00 ? 0x7f800000u : 0;
  return __builtin_bit_cast(float, __builtin_bit_cast(uint32_t, scaled) | infinite | sign);
}
// Converts to a half: rounds to nearest, ties to even.
PROXYCCL_DEVICE uint16_t floatToHalf(float value) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, value), magnitude = bits & 0x7fffffff;
  const uint32_t sign = bits >> 16 & 0x8000;
  uint32_t half;
  if (magnitude > 0x7f800000) {  // a NaN stays a (quiet) NaN
    half = 0x7e00;
  } else if (magnitude >= 0x477ff000) {  // values from 65520 on round to infinity
    half = 0x7c00;
  } else if (magnitude < 0x38800000) {  // subnormal: a float near 0.5 has the same unit in the last place as a
                                        // subnormal half
    half = __builtin_bit_cast(uint32_t, __builtin_bit_cast(float, magnitude) + 0.5f) - 0x3f000000;
  } else {
    half = (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
  }
  return static_cast<uint16_t>(sign | half);
}

}  // namespace proxyccl

// CUDA's names, so that a kernel written for a GPU compiles unchanged.
PROXYCCL_DEVICE void __threadfence() { ::proxyccl::fenceSystem(); }
PROXYCCL_DEVICE void __threadfence_system() { ::proxyccl::fenceSystem(); }
PROXYCCL_DEVICE void __threadfence_block() { __atomic_thread_fence(__ATOMIC_ACQ_REL); }
PROXYCCL_DEVICE uint32_t __ballot_sync(uint32_t mask, int predicate) {
  return ::proxyccl::host::self()->api->ballot(::proxyccl::host::self(), mask, predicate != 0);
}
PROXYCCL_DEVICE void __syncwarp(uint32_t mask = 0xffffffffu) { __ballot_sync(mask, 0); }
PROXYCCL_DEVICE int __any_sync(uint32_t mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
PROXYCCL_DEVICE int __all_sync(uint32_t mask, int predicate) { return __ballot_sync(mask, !predicate) == 0; }
template <class T>
PROXYCCL_DEVICE T __shfl_sync(uint32_t mask, T value, int lane) {
  using namespace ::proxyccl::host;
  return fromBits<T>(
      self()->api->shuffle(self(), mask, toBits(value), static_cast<uint32_t>(lane) % PROXYCCL_WARP_SIZE));
}
template <class T>
PROXYCCL_DEVICE T __shfl_xor_sync(uint32_t mask, T value, int bits) {
  return __shfl_sync(mask, value, static_cast<int>(::proxyccl::host::self()->lane ^ static_cast<uint32_t>(bits)));
}
template <class T>
PROXYCCL_DEVICE T __shfl_down_sync(uint32_t mask, T value, uint32_t delta) {
  const uint32_t lane = ::proxyccl::host::self()->lane;
  return __shfl_sync(mask, value, static_cast<int>(lane + delta < PROXYCCL_WARP_SIZE ? lane + delta : lane));
}
template <class T>
PROXYCCL_DEVICE T __shfl_up_sync(uint32_t mask, T value, uint32_t delta) {
  const uint32_t lane = ::proxyccl::host::self()->lane;
  return __shfl_sync(mask, value, static_cast<int>(lane >= delta ? lane - delta : lane));
}
template <class T>
PROXYCCL_DEVICE T atomicAdd(T* p, ::proxyccl::Same<T> v) {
  if constexpr (T(1) / T(2) == T(0)) {
    return __atomic_fetch_add(p, v, __ATOMIC_RELAXED);
  } else {  // floating-point atomics have no fetch_add before C++20
    T seen;
    __atomic_load(p, &seen, __ATOMIC_RELAXED);
    for (T next = seen + v; !__atomic_compare_exchange(p, &seen, &next, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED);)
      next = seen + v;
    return seen;
  }
}
template <class T>
PROXYCCL_DEVICE T atomicAdd_system(T* p, ::proxyccl::Same<T> v) {
  return atomicAdd(p, v);
}
template <class T>
PROXYCCL_DEVICE T atomicCAS(T* p, ::proxyccl::Same<T> expected, ::proxyccl::Same<T> desired) {
  __atomic_compare_exchange_n(p, &expected, desired, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  return expected;
}
#define PROXYCCL_ATOMIC(name, built_in)                         \
  template <class T>                                            \
  PROXYCCL_DEVICE T atomic##name(T* p, ::proxyccl::Same<T> v) { \
    return __atomic_##built_in(p, v, __ATOMIC_RELAXED);         \
  }
PROXYCCL_ATOMIC(Exch, exchange_n)
PROXYCCL_ATOMIC(Or, fetch_or)
PROXYCCL_ATOMIC(And, fetch_and)
PROXYCCL_ATOMIC(Xor, fetch_xor)
PROXYCCL_ATOMIC(Sub, fetch_sub)
#undef PROXYCCL_ATOMIC
#define PROXYCCL_ATOMIC(name, replaces)                                                                               \
  template <class T>                                                                                                  \
  PROXYCCL_DEVICE T atomic##name(T* p, ::proxyccl::Same<T> v) {                                                       \
    T seen = __atomic_load_n(p, __ATOMIC_RELAXED);                                                                    \
    while (v replaces seen && !__atomic_compare_exchange_n(p, &seen, v, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {} \
    return seen;                                                                                                      \
  }
PROXYCCL_ATOMIC(Max, >)
PROXYCCL_ATOMIC(Min, <)
#undef PROXYCCL_ATOMIC
