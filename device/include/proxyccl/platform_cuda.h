// The NVIDIA target, compiled by NVRTC (or nvcc) for sm_70 and later.
#pragma once

#include "proxyccl/types.h"

#define PROXYCCL_ON_HOST 0
#define PROXYCCL_WARP_SIZE 32
// When one instruction of a warp stores a line of 128 bytes, the line arrives whole, even over NVLink.
#define PROXYCCL_WHOLE_LINES 1
#define PROXYCCL_DEVICE __device__ __forceinline__
// Declares a kernel that has one warp per block and 32 registers per thread. On sm_90, a matrix product that fills the
// GPU (384 threads of 168 registers per multiprocessor) leaves enough registers free for a block of one warp, so the
// kernel starts beside the product immediately.
#define PROXYCCL_SMALL_KERNEL extern "C" __global__ void __maxnreg__(32)
#define PROXYCCL_OUT_OF_LINE static __device__ __noinline__
// A release needs no fence if it orders only loads whose values were used and stores of earlier kernels: those stores
// are visible to all devices when a kernel begins. The fence takes 2 to 2.7 us on an H100 even if nothing is in flight.
#define PROXYCCL_LOADS_NEED_NO_RELEASE

// These macros use NVRTC's built-in atomics, because libcu++ would add a second to each compilation. The built-in
// atomics do not accept a pointer to const, not even for a load.
#define PROXYCCL_LOAD(p, ORDER, SCOPE) \
  __nv_atomic_load_n(::proxyccl::withoutConst(p), __NV_ATOMIC_##ORDER, __NV_THREAD_SCOPE_##SCOPE)
#define PROXYCCL_STORE(p, v, ORDER, SCOPE) __nv_atomic_store_n(p, v, __NV_ATOMIC_##ORDER, __NV_THREAD_SCOPE_##SCOPE)
// An atomic addition without a result; NVRTC's built-in addition always fetches a result.
#define PROXYCCL_ADD(p, v, ORDER, SCOPE) asm volatile(PROXYCCL_PTX_ADD(ORDER, SCOPE)::"l"(p), "l"(v) : "memory")
#define PROXYCCL_PTX_ADD(ORDER, SCOPE) "red" PROXYCCL_PTX_##ORDER PROXYCCL_PTX_##SCOPE ".global.add.u64 [%0], %1;"
#define PROXYCCL_MAX(p, v) asm volatile("red.relaxed.gpu.global.max.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory")
#define PROXYCCL_PTX_RELAXED ".relaxed"
#define PROXYCCL_PTX_RELEASE ".release"
#define PROXYCCL_PTX_DEVICE ".gpu"
#define PROXYCCL_PTX_SYSTEM ".sys"
#define PROXYCCL_FETCH_ADD(p, v, ORDER, SCOPE) \
  __nv_atomic_fetch_add(p, v, __NV_ATOMIC_##ORDER, __NV_THREAD_SCOPE_##SCOPE)
#define PROXYCCL_EXCHANGE(p, v, ORDER, SCOPE) \
  __nv_atomic_exchange_n(p, v, __NV_ATOMIC_##ORDER, __NV_THREAD_SCOPE_##SCOPE)
#define PROXYCCL_COMPARE_EXCHANGE(p, expected, desired, SCOPE)                                          \
  __nv_atomic_compare_exchange_n(p, expected, desired, false, __NV_ATOMIC_ACQ_REL, __NV_ATOMIC_ACQUIRE, \
                                 __NV_THREAD_SCOPE_##SCOPE)

namespace proxyccl {

template <class T>
PROXYCCL_DEVICE T* withoutConst(const T* p) {
  return const_cast<T*>(p);
}

// Returns the same address, and makes accesses faster by telling the compiler that the address is in global memory.
template <class T>
PROXYCCL_DEVICE T* inGlobal(T* p) {
  __builtin_assume(__isGlobal(p));
  return p;
}

PROXYCCL_DEVICE void spinHint(uint32_t) {}
PROXYCCL_DEVICE uint64_t nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}
// A wait checks rarely, because each check reads a word across PCIe.
constexpr uint32_t kSpinsPerCheck = 4096, kFirstCheck = kSpinsPerCheck - 1;

template <class T>
PROXYCCL_DEVICE T shuffle(T value, uint32_t lane) {
  return __shfl_sync(0xffffffffu, value, lane);
}
// The name is not `ballot`, because NVRTC declares a global function `ballot`.
PROXYCCL_DEVICE uint64_t ballotWarp(bool predicate) { return __ballot_sync(0xffffffffu, predicate); }
PROXYCCL_DEVICE void syncWarp() { __syncwarp(); }
// Stores 16 bytes by one access; NVRTC may split a plain store into two accesses. The address is aligned to 16 bytes.
PROXYCCL_DEVICE void store128(void* p, uint64_t low, uint64_t high) {
  asm volatile("st.global.v2.u64 [%0], {%1, %2};" ::"l"(p), "l"(low), "l"(high) : "memory");
}
// Brings a line of 128 bytes into the device's cache.
PROXYCCL_DEVICE void prefetchToDevice(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
// Brings a line into the multiprocessor's cache, so that a later plain load is fast.
PROXYCCL_DEVICE void prefetch(const void* p) { asm volatile("prefetch.global.L1 [%0];" ::"l"(p)); }
PROXYCCL_DEVICE void fenceSystem() { __threadfence_system(); }
// In the PTX memory model, a release by one thread after a block barrier covers the writes of the whole block.
PROXYCCL_DEVICE void syncThreadsSystem() { __syncthreads(); }
PROXYCCL_DEVICE void syncThreadsDevice() { __syncthreads(); }
#if __CUDA_ARCH__ >= 900
#define PROXYCCL_HAS_CLUSTERS 1
PROXYCCL_DEVICE uint32_t sharedAddress(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }
// Returns the address, for stores in the cluster, of the word of another block's shared memory at the offset of `p`.
PROXYCCL_DEVICE uint32_t addressInCluster(const void* p, uint32_t block) {
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(sharedAddress(p)), "r"(block));
  return there;
}
// Barriers in shared memory that complete a phase when the expected number of bytes has been stored. One thread calls
// expectInCluster() in each phase. A thread whose hasArrivedInCluster() returned true sees the stored numbers.
PROXYCCL_DEVICE void initInCluster(uint64_t* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(sharedAddress(barrier)) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
PROXYCCL_DEVICE void storeInCluster(float* p, uint64_t* barrier, uint32_t block, float value) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(
                   addressInCluster(p, block)),
               "r"(__float_as_uint(value)), "r"(addressInCluster(barrier, block))
               : "memory");
}
PROXYCCL_DEVICE void expectInCluster(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(sharedAddress(barrier)), "r"(bytes)
               : "memory");
}
PROXYCCL_DEVICE bool hasArrivedInCluster(uint64_t* barrier, uint32_t parity) {
  uint32_t arrived;
  asm volatile("{ .reg .pred done; mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2; selp.u32 %0, 1, 0, done; }"
               : "=r"(arrived)
               : "r"(sharedAddress(barrier)), "r"(parity)
               : "memory");
  return arrived != 0;
}
// A split barrier (arrive, wait) of all threads of the cluster, which does not order earlier stores.
PROXYCCL_DEVICE void arriveInCluster() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
PROXYCCL_DEVICE void awaitCluster() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
#endif

// From sm_90 on, storeTrigger()'s release is split into this fence and a relaxed store, so that the fence overlaps with
// the equally long fetch of the ticket. Before sm_90, this fence orders the relaxed store of the first word after the
// load that found room, because in PTX the branch between the load and the store does not.
PROXYCCL_DEVICE void orderBeforeTrigger() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.acq_rel.sys;" ::: "memory");
#else
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
#endif
}
PROXYCCL_DEVICE void storeTrigger(uint64_t* slot, uint64_t word0, uint64_t word1) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n\t.reg .b128 trigger;\n\t"
      "mov.b128 trigger, {%1, %2};\n\t"
      "st.relaxed.sys.global.b128 [%0], trigger;\n\t}" ::"l"(slot),
      "l"(word0), "l"(word1)
      : "memory");
#else
  // Before sm_90 a 16-byte store may be torn, so the word with the parity bit is stored second, as a release.
  __nv_atomic_store_n(slot, word0, __NV_ATOMIC_RELAXED, __NV_THREAD_SCOPE_SYSTEM);
  __nv_atomic_store_n(slot + 1, word1, __NV_ATOMIC_RELEASE, __NV_THREAD_SCOPE_SYSTEM);
#endif
}

// A packet's halves each hold data and flag, so a store torn into 8-byte halves is harmless.
PROXYCCL_DEVICE void storePacket128(uint64_t* p, uint64_t low, uint64_t high) {
  asm volatile("st.volatile.global.v2.u64 [%0], {%1, %2};" ::"l"(p), "l"(low), "l"(high) : "memory");
}
PROXYCCL_DEVICE void loadPacket128(const uint64_t* p, uint64_t* low, uint64_t* high) {
  asm volatile("ld.volatile.global.v2.u64 {%0, %1}, [%2];" : "=l"(*low), "=l"(*high) : "l"(p) : "memory");
}

// Stores and loads 16 bytes by a single access, which is never seen half written.
PROXYCCL_DEVICE void storeRelaxed128(uint64_t* p, uint64_t low, uint64_t high) {
  asm volatile(
      "{\n\t.reg .b128 value;\n\t"
      "mov.b128 value, {%1, %2};\n\t"
      "st.relaxed.sys.global.b128 [%0], value;\n\t}" ::"l"(p),
      "l"(low), "l"(high)
      : "memory");
}
PROXYCCL_DEVICE void loadRelaxed128(const uint64_t* p, uint64_t* low, uint64_t* high) {
  asm volatile(
      "{\n\t.reg .b128 value;\n\t"
      "ld.relaxed.sys.global.b128 value, [%2];\n\t"
      "mov.b128 {%0, %1}, value;\n\t}"
      : "=l"(*low), "=l"(*high)
      : "l"(p)
      : "memory");
}

PROXYCCL_DEVICE float halfToFloat(uint16_t bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}
PROXYCCL_DEVICE uint16_t floatToHalf(float value) {
  uint16_t bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}
#if __CUDA_ARCH__ >= 900
PROXYCCL_DEVICE uint16_t floatToBFloat16(float value) {
  uint16_t bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}
#define PROXYCCL_HAS_FLOAT_TO_BFLOAT16
// Convert two floats to two narrow floats; the lower half of the result holds the first.
PROXYCCL_DEVICE uint32_t floatsToBFloat16(float low, float high) {
  uint32_t bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}
PROXYCCL_DEVICE uint32_t floatsToHalf(float low, float high) {
  uint32_t bits;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}
#endif
#if __CUDA_ARCH__ >= 890
// Converts four floats to 8 bits each; the lowest byte holds the first. The sign of a NaN is lost.
PROXYCCL_DEVICE uint32_t floatsToE4M3(float first, float second, float third, float fourth) {
  uint32_t bits;
  asm("{\n\t.reg .b16 low, high;\n\tcvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n\t"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n\tmov.b32 %0, {low, high};\n\t}"
      : "=r"(bits)
      : "f"(first), "f"(second), "f"(third), "f"(fourth));
  return bits;
}
// Compares the lower and the upper 16-bit halves as unsigned integers, and returns the greater of each.
PROXYCCL_DEVICE uint32_t maxHalves(uint32_t a, uint32_t b) { return __vmaxu2(a, b); }
#define PROXYCCL_HAS_FLOATS_TO_E4M3
#endif

}  // namespace proxyccl
