// The AMD target, compiled by HIPRTC (or hipcc) for CDNA 2 and later.
#ifndef PROXYCCL_PLATFORM_HIP_H
#define PROXYCCL_PLATFORM_HIP_H

#include "proxyccl/types.h"

#define PROXYCCL_ON_HOST 0
#define PROXYCCL_WARP_SIZE 64
#define PROXYCCL_DEVICE __device__ __forceinline__

#define PROXYCCL_HIP_SCOPE_DEVICE __HIP_MEMORY_SCOPE_AGENT
#define PROXYCCL_HIP_SCOPE_SYSTEM __HIP_MEMORY_SCOPE_SYSTEM
#define PROXYCCL_LOAD(p, ORDER, SCOPE) __hip_atomic_load(p, __ATOMIC_##ORDER, PROXYCCL_HIP_SCOPE_##SCOPE)
#define PROXYCCL_STORE(p, v, ORDER, SCOPE) __hip_atomic_store(p, v, __ATOMIC_##ORDER, PROXYCCL_HIP_SCOPE_##SCOPE)
#define PROXYCCL_FETCH_ADD(p, v, ORDER, SCOPE) \
  __hip_atomic_fetch_add(p, v, __ATOMIC_##ORDER, PROXYCCL_HIP_SCOPE_##SCOPE)
#define PROXYCCL_EXCHANGE(p, v, ORDER, SCOPE) __hip_atomic_exchange(p, v, __ATOMIC_##ORDER, PROXYCCL_HIP_SCOPE_##SCOPE)
#define PROXYCCL_COMPARE_EXCHANGE(p, expected, desired, SCOPE)                                   \
  __hip_atomic_compare_exchange_strong(p, expected, desired, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE, \
                                       PROXYCCL_HIP_SCOPE_##SCOPE)

namespace proxyccl {

PROXYCCL_DEVICE void spinHint(uint32_t) { __builtin_amdgcn_s_sleep(1); }
// The constant-rate counter runs at 100 MHz on every CDNA part.
PROXYCCL_DEVICE uint64_t nanoseconds() { return __builtin_amdgcn_s_memrealtime() * 10; }
constexpr uint32_t kSpinsPerCheck = 2048;

template <class T>
PROXYCCL_DEVICE T shuffle(T value, uint32_t lane) {
  return __shfl(value, static_cast<int>(lane));
}
PROXYCCL_DEVICE uint64_t ballotWarp(bool predicate) { return __ballot(predicate); }
PROXYCCL_DEVICE void syncWarp() { __builtin_amdgcn_wave_barrier(); }
PROXYCCL_DEVICE void fenceSystem() { __threadfence_system(); }
// The compiler does not drain stores before s_barrier, so each thread fences its own before the block meets.
PROXYCCL_DEVICE void syncThreadsSystem() {
  __threadfence_system();
  __syncthreads();
}
PROXYCCL_DEVICE void* dynamicShared() {
  extern __shared__ __align__(16) char proxyccl_dynamic_shared[];
  return proxyccl_dynamic_shared;
}

typedef uint64_t HipVector2 __attribute__((ext_vector_type(2)));
typedef uint32_t HipVector4 __attribute__((ext_vector_type(4)));
// `volatile` in the global address space is one dwordx4 with sc0 sc1. Without the address space it becomes flat_*,
// and a poll with a non-temporal load is deleted altogether.
typedef volatile __attribute__((address_space(1))) HipVector4 HipGlobalVector4;

PROXYCCL_DEVICE void storePacket128(uint64_t* p, uint64_t low, uint64_t high) {
  const HipVector2 pair = {low, high};
  *(HipGlobalVector4*)p = __builtin_bit_cast(HipVector4, pair);
}
PROXYCCL_DEVICE void loadPacket128(const uint64_t* p, uint64_t* low, uint64_t* high) {
  const HipVector4 quad = *(HipGlobalVector4*)p;
  const HipVector2 pair = __builtin_bit_cast(HipVector2, quad);
  *low = pair.x;
  *high = pair.y;
}
PROXYCCL_DEVICE void storeTrigger(uint64_t* slot, uint64_t word0, uint64_t word1) {
  PROXYCCL_STORE(slot, word0, RELAXED, SYSTEM);
  PROXYCCL_STORE(slot + 1, word1, RELEASE, SYSTEM);
}

PROXYCCL_DEVICE float halfToFloat(uint16_t bits) { return static_cast<float>(__builtin_bit_cast(_Float16, bits)); }
PROXYCCL_DEVICE uint16_t floatToHalf(float value) { return __builtin_bit_cast(uint16_t, static_cast<_Float16>(value)); }

}  // namespace proxyccl

#endif
