// The AMD target, compiled by HIPRTC (or hipcc) for CDNA 2 and later.
#pragma once

#include "proxyccl/types.h"

#define PROXYCCL_ON_HOST 0
#define PROXYCCL_WARP_SIZE 64
#define PROXYCCL_WHOLE_LINES 0
#define PROXYCCL_DEVICE __device__ __forceinline__
#define PROXYCCL_OUT_OF_LINE static __device__ __noinline__

#define PROXYCCL_HIP_SCOPE_DEVICE __HIP_MEMORY_SCOPE_AGENT
#define PROXYCCL_HIP_SCOPE_SYSTEM __HIP_MEMORY_SCOPE_SYSTEM
#define PROXYCCL_LOAD(p, ORDER, SCOPE) __hip_atomic_load(p, __ATOMIC_##ORDER, PROXYCCL_HIP_SCOPE_##SCOPE)
#define PROXYCCL_STORE(p, v, ORDER, SCOPE) \
  (PROXYCCL_HIP_RELEASE_##ORDER(SCOPE), __hip_atomic_store(p, v, __ATOMIC_RELAXED, PROXYCCL_HIP_SCOPE_##SCOPE))
#define PROXYCCL_ADD(p, v, ORDER, SCOPE) PROXYCCL_FETCH_ADD(p, v, ORDER, SCOPE)
#define PROXYCCL_MAX(p, v) __hip_atomic_fetch_max(p, v, __ATOMIC_RELAXED, PROXYCCL_HIP_SCOPE_DEVICE)
#define PROXYCCL_FETCH_ADD(p, v, ORDER, SCOPE) \
  (PROXYCCL_HIP_RELEASE_##ORDER(SCOPE),        \
   __hip_atomic_fetch_add(p, v, PROXYCCL_HIP_ACQUIRE_##ORDER, PROXYCCL_HIP_SCOPE_##SCOPE))
#define PROXYCCL_EXCHANGE(p, v, ORDER, SCOPE) \
  __hip_atomic_exchange(p, v, PROXYCCL_HIP_ACQUIRE_##ORDER, PROXYCCL_HIP_SCOPE_##SCOPE)
#define PROXYCCL_COMPARE_EXCHANGE(p, expected, desired, SCOPE)                                    \
  (PROXYCCL_HIP_RELEASE_ACQ_REL(SCOPE),                                                           \
   __hip_atomic_compare_exchange_strong(p, expected, desired, __ATOMIC_ACQUIRE, __ATOMIC_ACQUIRE, \
                                        PROXYCCL_HIP_SCOPE_##SCOPE))

// Split a memory order into a release, made by a fence before the access, and the access's own remaining order.
#define PROXYCCL_HIP_RELEASE_RELAXED(SCOPE) static_cast<void>(0)
#define PROXYCCL_HIP_RELEASE_RELEASE(SCOPE) ::proxyccl::hip::release##SCOPE()
#define PROXYCCL_HIP_RELEASE_ACQ_REL(SCOPE) ::proxyccl::hip::release##SCOPE()
#define PROXYCCL_HIP_ACQUIRE_RELAXED __ATOMIC_RELAXED
#define PROXYCCL_HIP_ACQUIRE_RELEASE __ATOMIC_RELAXED
#define PROXYCCL_HIP_ACQUIRE_ACQUIRE __ATOMIC_ACQUIRE
#define PROXYCCL_HIP_ACQUIRE_ACQ_REL __ATOMIC_ACQUIRE

namespace proxyccl {
namespace hip {

// Waits until all stores of this wave have arrived and a write-back of the cache is complete. The compiler adds this
// wait to a release only if it knows of a store in flight. The compiler does not know of the write-back, nor of a store
// in assembly (storePacket128). So on AMD each release is a fence followed by this wait.
PROXYCCL_DEVICE void drainStores() { asm volatile("s_waitcnt vmcnt(0)" ::: "memory"); }
PROXYCCL_DEVICE void releaseSYSTEM() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "");
  drainStores();
}
PROXYCCL_DEVICE void releaseDEVICE() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "agent");
  drainStores();
}

}  // namespace hip

PROXYCCL_DEVICE void spinHint(uint32_t) { __builtin_amdgcn_s_sleep(1); }
// The constant-rate counter runs at 100 MHz on all CDNA GPUs.
PROXYCCL_DEVICE uint64_t nanoseconds() { return __builtin_amdgcn_s_memrealtime() * 10; }
constexpr uint32_t kSpinsPerCheck = 2048, kFirstCheck = kSpinsPerCheck - 1;

template <class T>
PROXYCCL_DEVICE T shuffle(T value, uint32_t lane) {
  return __shfl(value, static_cast<int>(lane));
}
PROXYCCL_DEVICE uint64_t ballotWarp(bool predicate) { return __ballot(predicate); }
PROXYCCL_DEVICE void syncWarp() { __builtin_amdgcn_wave_barrier(); }
PROXYCCL_DEVICE void fenceSystem() {
  hip::releaseSYSTEM();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "");
}
// The compiler does not wait for stores before s_barrier, and a wave's release waits only for the wave's own stores. So
// every thread releases its own stores before it enters the block's barrier.
PROXYCCL_DEVICE void syncThreadsSystem() {
  hip::releaseSYSTEM();
  __syncthreads();
}
PROXYCCL_DEVICE void syncThreadsDevice() {
  hip::releaseDEVICE();
  __syncthreads();
}

typedef uint64_t HipVector2 __attribute__((ext_vector_type(2)));
typedef uint32_t HipVector4 __attribute__((ext_vector_type(4)));
// A `volatile` access in the global address space is one dwordx4 instruction at system scope. Without the address
// space, the compiler makes a flat_* instruction of the access and deletes a loop that polls by non-temporal loads.
typedef volatile __attribute__((address_space(1))) HipVector4 HipGlobalVector4;

// A store instruction names its scope on gfx940 and later; on gfx90a the page's attributes determine the scope.
#if defined(__gfx90a__)
#define PROXYCCL_HIP_SYSTEM_SCOPE ""
#else
#define PROXYCCL_HIP_SYSTEM_SCOPE " sc0 sc1"
#endif
// The store is written in assembly, because the compiler waits for each volatile store to arrive, so packets to seven
// peers would take seven round trips. The s_nop delays the next instruction, because the hardware reads the second half
// of the data one instruction after the store.
PROXYCCL_DEVICE void storePacket128(uint64_t* p, uint64_t low, uint64_t high) {
  const HipVector2 pair = {low, high};
  asm volatile("global_store_dwordx4 %0, %1, off" PROXYCCL_HIP_SYSTEM_SCOPE "\n\ts_nop 0" ::"v"(p),
               "v"(__builtin_bit_cast(HipVector4, pair))
               : "memory");
}
PROXYCCL_DEVICE void loadPacket128(const uint64_t* p, uint64_t* low, uint64_t* high) {
  const HipVector4 quad = *(HipGlobalVector4*)p;
  const HipVector2 pair = __builtin_bit_cast(HipVector2, quad);
  *low = pair.x;
  *high = pair.y;
}

// storeTrigger() stores word 0 by a relaxed store and word 1 by a release. This fence orders the store of word 0 after
// the load that found room in the ring.
PROXYCCL_DEVICE void orderBeforeTrigger() { __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "agent"); }
PROXYCCL_DEVICE void storeTrigger(uint64_t* slot, uint64_t word0, uint64_t word1) {
  PROXYCCL_STORE(slot, word0, RELAXED, SYSTEM);
  PROXYCCL_STORE(slot + 1, word1, RELEASE, SYSTEM);
}

PROXYCCL_DEVICE float halfToFloat(uint16_t bits) { return static_cast<float>(__builtin_bit_cast(_Float16, bits)); }
PROXYCCL_DEVICE uint16_t floatToHalf(float value) { return __builtin_bit_cast(uint16_t, static_cast<_Float16>(value)); }

}  // namespace proxyccl
