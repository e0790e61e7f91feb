// Copies by the threads of a block or grid, in the widest pieces that both addresses allow.
#ifndef PROXYCCL_COPY_H
#define PROXYCCL_COPY_H

#include "proxyccl/platform.h"
#if PROXYCCL_ON_HOST
#include "proxyccl/platform_host_memmove.h"
#endif

namespace proxyccl {

struct alignas(16) Bytes16 {
  uint64_t low, high;
};

template <class Word>
PROXYCCL_DEVICE void copyWords(char* dst, const char* src, size_t bytes, uint32_t thread, uint32_t threads) {
  Word* to = reinterpret_cast<Word*>(dst);
  const Word* from = reinterpret_cast<const Word*>(src);
  const size_t words = bytes / sizeof(Word);
  // A thread's loads are issued together: otherwise each would wait for the store before it, which may alias it.
  constexpr uint32_t kInFlight = 4;
#pragma unroll 1
  for (size_t first = thread; first < words; first += static_cast<size_t>(kInFlight) * threads) {
    Word held[kInFlight];
#pragma unroll
    for (uint32_t k = 0; k < kInFlight; ++k)
      if (first + k * threads < words) held[k] = from[first + k * threads];
#pragma unroll
    for (uint32_t k = 0; k < kInFlight; ++k)
      if (first + k * threads < words) to[first + k * threads] = held[k];
  }
  const size_t done = words * sizeof(Word);
  forEach(bytes - done, thread, threads, [&](size_t i) { dst[done + i] = src[done + i]; });
}

/// Copies bytes. A group of threads calls it together, and each copies its part. It orders nothing.
/// @param dst      destination; the ranges must not overlap
/// @param src      source
/// @param bytes    number of bytes, of any alignment; it uses the widest accesses that both addresses allow
/// @param thread   the calling thread's number in the group: 0 to threads - 1
/// @param threads  threads in the group
PROXYCCL_OUT_OF_LINE void copyBytes(void* dst, const void* src, size_t bytes, uint32_t thread, uint32_t threads) {
  char* to = static_cast<char*>(dst);
  const char* from = static_cast<const char*>(src);
#if PROXYCCL_ON_HOST
  const size_t begin = bytes * thread / threads, end = bytes * (thread + 1) / threads;
  if (end > begin) proxyccl_memmove(to + begin, from + begin, end - begin);
#else
  const uintptr_t misaligned = reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from);
  if (misaligned % 16 == 0) return copyWords<Bytes16>(to, from, bytes, thread, threads);
  if (misaligned % 8 == 0) return copyWords<uint64_t>(to, from, bytes, thread, threads);
  if (misaligned % 4 == 0) return copyWords<uint32_t>(to, from, bytes, thread, threads);
  copyWords<char>(to, from, bytes, thread, threads);
#endif
}

}  // namespace proxyccl

#endif
