// Defines one set of names for what differs between the targets.
//
// Each platform_*.h defines:
//   PROXYCCL_DEVICE           a function that runs on the device, inlined
//   PROXYCCL_OUT_OF_LINE      a function that is not inlined, because it is long, rarely runs or needs many registers;
//                             this also keeps run-time compilation short
//   PROXYCCL_ON_HOST          1 where GPU threads are fibers on a CPU, else 0
//   PROXYCCL_WARP_SIZE        number of lanes of a warp
//   PROXYCCL_LOAD/STORE/ADD/FETCH_ADD/EXCHANGE/COMPARE_EXCHANGE(pointer, …, ORDER, SCOPE)
//   the CUDA names that kernels use: __global__, __device__, __shared__, threadIdx, …, __syncthreads()
//   namespace proxyccl: defaultControl (the control block for waits that are not given one; may be null),
//   inGlobal, spinHint, nanoseconds, shuffle, ballotWarp, syncWarp, countBits, store128, prefetch, fenceSystem,
//   orderBeforeTrigger, storePacket128, loadPacket128, storeRelaxed128, loadRelaxed128, halfToFloat, floatToHalf,
//   dynamicShared
//   kSpinsPerCheck, kFirstCheck: how often, and from which spin on, a wait checks the abort word and the clock
//   PROXYCCL_LOADS_NEED_NO_RELEASE, if storeReleaseLoadsSystem is a relaxed store on this target
//   PROXYCCL_SMALL_KERNEL, if kernels of single warps start beside a matrix product; with it prefetchToDevice()
//   syncThreadsSystem, syncThreadsDevice: __syncthreads after which one thread's release at that scope covers what the
//   whole block wrote
//
// These files include no system or vendor header, because NVRTC and HIPRTC have none.
#pragma once

#include "proxyccl/types.h"

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#include "proxyccl/platform_cuda.h"
#elif defined(__HIP__) || defined(__HIPCC_RTC__)
#include "proxyccl/platform_hip.h"
#else
#include "proxyccl/platform_host.h"
#endif

#if !PROXYCCL_ON_HOST
// The value that defaultControl() returns in this module; the runtime sets it after loading the module. The symbol is
// weak, because several translation units may be linked into one module.
extern "C" {
struct ProxycclControl;
__device__ __attribute__((weak)) ProxycclControl* proxyccl_default_control = nullptr;
}
#endif

namespace proxyccl {

#if !defined(__CUDACC__) && !defined(__CUDACC_RTC__)
template <class T>
PROXYCCL_DEVICE T* inGlobal(T* p) {
  return p;
}
PROXYCCL_DEVICE void store128(void* p, uint64_t low, uint64_t high) {
  struct alignas(16) Words {
    uint64_t low, high;
  };
  *static_cast<Words*>(p) = {low, high};
}
PROXYCCL_DEVICE void prefetch(const void* p) { __builtin_prefetch(p); }
// An AMD GPU stores an aligned dwordx4 whole. The host makes two accesses of 8 bytes, because neither C++ nor the
// sanitizers have a lock-free access of 16.
PROXYCCL_DEVICE void storeRelaxed128(uint64_t* p, uint64_t low, uint64_t high) { storePacket128(p, low, high); }
PROXYCCL_DEVICE void loadRelaxed128(const uint64_t* p, uint64_t* low, uint64_t* high) { loadPacket128(p, low, high); }
#endif
#if !PROXYCCL_ON_HOST
PROXYCCL_DEVICE ProxycclControl* defaultControl() { return proxyccl_default_control; }
PROXYCCL_DEVICE uint32_t countBits(uint64_t bits) { return static_cast<uint32_t>(__popcll(bits)); }
PROXYCCL_DEVICE void* dynamicShared() {
  extern __shared__ __align__(16) char proxyccl_dynamic_shared[];
  return proxyccl_dynamic_shared;
}
#endif

// Functions such as loadAcquireSystem() name the order and scope of their access.
#define PROXYCCL_NAMED_LOAD(name, ORDER, SCOPE) \
  template <class T>                            \
  PROXYCCL_DEVICE T name(const T* p) {          \
    return PROXYCCL_LOAD(p, ORDER, SCOPE);      \
  }
PROXYCCL_NAMED_LOAD(loadAcquireSystem, ACQUIRE, SYSTEM)
PROXYCCL_NAMED_LOAD(loadRelaxedSystem, RELAXED, SYSTEM)
PROXYCCL_NAMED_LOAD(loadAcquireDevice, ACQUIRE, DEVICE)
PROXYCCL_NAMED_LOAD(loadRelaxedDevice, RELAXED, DEVICE)
#undef PROXYCCL_NAMED_LOAD
#define PROXYCCL_NAMED_STORE(name, ORDER, SCOPE) \
  template <class T>                             \
  PROXYCCL_DEVICE void name(T* p, T v) {         \
    PROXYCCL_STORE(p, v, ORDER, SCOPE);          \
  }
PROXYCCL_NAMED_STORE(storeReleaseSystem, RELEASE, SYSTEM)
PROXYCCL_NAMED_STORE(storeRelaxedSystem, RELAXED, SYSTEM)
PROXYCCL_NAMED_STORE(storeReleaseDevice, RELEASE, DEVICE)
PROXYCCL_NAMED_STORE(storeRelaxedDevice, RELAXED, DEVICE)
// storeReleaseLoadsSystem() is weaker than a release: it is ordered after the stores of earlier kernels and after loads
// whose values the block used before its last barrier, but not after earlier stores of the same kernel.
#ifdef PROXYCCL_LOADS_NEED_NO_RELEASE
PROXYCCL_NAMED_STORE(storeReleaseLoadsSystem, RELAXED, SYSTEM)
#else
PROXYCCL_NAMED_STORE(storeReleaseLoadsSystem, RELEASE, SYSTEM)
#endif
#undef PROXYCCL_NAMED_STORE
#define PROXYCCL_NAMED_UPDATE(name, UPDATE, ORDER, SCOPE) \
  template <class T>                                      \
  PROXYCCL_DEVICE T name(T* p, T v) {                     \
    return PROXYCCL_##UPDATE(p, v, ORDER, SCOPE);         \
  }
PROXYCCL_NAMED_UPDATE(fetchAddRelaxedDevice, FETCH_ADD, RELAXED, DEVICE)
PROXYCCL_NAMED_UPDATE(fetchAddAcqRelDevice, FETCH_ADD, ACQ_REL, DEVICE)
PROXYCCL_NAMED_UPDATE(exchangeAcquireDevice, EXCHANGE, ACQUIRE, DEVICE)
PROXYCCL_NAMED_UPDATE(exchangeRelaxedDevice, EXCHANGE, RELAXED, DEVICE)
#undef PROXYCCL_NAMED_UPDATE
// The additions below return nothing, so the thread does not wait for a result.
PROXYCCL_DEVICE void addReleaseSystem(uint64_t* p, uint64_t v) { PROXYCCL_ADD(p, v, RELEASE, SYSTEM); }
PROXYCCL_DEVICE void addRelaxedSystem(uint64_t* p, uint64_t v) { PROXYCCL_ADD(p, v, RELAXED, SYSTEM); }
PROXYCCL_DEVICE void addRelaxedDevice(uint64_t* p, uint64_t v) { PROXYCCL_ADD(p, v, RELAXED, DEVICE); }
PROXYCCL_DEVICE void maxRelaxedDevice(uint64_t* p, uint64_t v) { PROXYCCL_MAX(p, v); }
template <class T>
PROXYCCL_DEVICE bool compareExchangeDevice(T* p, T expected, T desired) {
  return PROXYCCL_COMPARE_EXCHANGE(p, &expected, desired, DEVICE);
}
template <class T>
PROXYCCL_DEVICE bool compareExchangeSystem(T* p, T expected, T desired) {
  return PROXYCCL_COMPARE_EXCHANGE(p, &expected, desired, SYSTEM);
}

/// Calls body(i) for each i < n, with the work divided among a group of threads: thread t takes i = t, t + threads, … .
/// @param n        number of calls
/// @param thread   the calling thread's number in the group: 0 to threads - 1
/// @param threads  threads in the group
/// @param body     takes a size_t
template <class Body>
PROXYCCL_DEVICE void forEachInTurn(size_t n, uint32_t thread, uint32_t threads, Body body) {
  for (size_t i = thread; i < n; i += threads) body(i);
}

/// Calls body(i) for each i < n, once, in an unspecified thread of the group, so the group needs a barrier before and
/// after the call. The parameters are those of forEachInTurn(). On a GPU, neighbouring threads take neighbouring i, so
/// that accesses coalesce (forEachInTurn()). On a CPU, each fiber takes one contiguous range of i, so that the loop is
/// vectorised, which makes it 20 to 30 times faster.
template <class Body>
PROXYCCL_DEVICE void forEach(size_t n, uint32_t thread, uint32_t threads, Body body) {
#if PROXYCCL_ON_HOST
  const size_t share = n / threads, extra = n % threads;
  const size_t begin = thread * share + (thread < extra ? thread : extra);
  const size_t end = begin + share + (thread < extra ? 1 : 0);
  for (size_t i = begin; i < end; ++i) body(i);
#else
  forEachInTurn(n, thread, threads, body);
#endif
}

}  // namespace proxyccl
