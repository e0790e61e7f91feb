// Copies by the threads of a block or grid: copyBytes() divides the bytes as is fastest, copyInTurn() as documented.
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
  constexpr uint32_t kInFlight = PROXYCCL_ON_HOST ? 1 : 4;
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
  forEachInTurn(bytes - done, thread, threads, [&](size_t i) { dst[done + i] = src[done + i]; });
}

/// Copies bytes. A group of threads calls it together, and each copies its part: which one is unspecified, so the group
/// meets before and after. It orders nothing.
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

// The bytes before the first word and after the last one, of which there are few.
PROXYCCL_DEVICE void copyRest(char* dst, const char* src, size_t bytes, uint32_t thread, uint32_t threads) {
  if ((reinterpret_cast<uintptr_t>(dst) | reinterpret_cast<uintptr_t>(src)) % 4 == 0)
    copyWords<uint32_t>(dst, src, bytes, thread, threads);
  else
    copyWords<char>(dst, src, bytes, thread, threads);
}

// Both addresses are equally far from a whole word.
template <class Word, bool kRemainder>
PROXYCCL_DEVICE void copyWholeWords(char* dst, const char* src, size_t bytes, uint32_t thread, uint32_t threads) {
  const size_t misaligned = reinterpret_cast<uintptr_t>(dst) % sizeof(Word);
  const size_t before = misaligned == 0 ? 0 : sizeof(Word) - misaligned, head = before < bytes ? before : bytes;
  const size_t body = (bytes - head) / sizeof(Word) * sizeof(Word);
  if (kRemainder) copyRest(dst, src, head, thread, threads);
  copyWords<Word>(dst + head, src + head, body, thread, threads);
  if (kRemainder) copyRest(dst + head + body, src + head + body, bytes - head - body, thread, threads);
}

/// Copies bytes word by word: of the whole words, thread t copies number t, t + threads, … , on every target. So a
/// thread may copy what it has written itself, and use what it has copied, without a barrier. It orders nothing.
///
/// A word has kWord bytes; or 8, 4 or 1, if the two addresses are not equally far from a multiple of more. The bytes
/// before the first whole word, and those after the last one, are copied in the same way by words of 4 bytes, or of 1.
/// @tparam kWord       4, 8 or 16
/// @tparam kRemainder  whether to copy the bytes before the first whole word and after the last one
/// @param dst      destination; the ranges must not overlap
/// @param src      source
/// @param bytes    number of bytes
/// @param thread   the calling thread's number in the group: 0 to threads - 1
/// @param threads  threads in the group
template <uint32_t kWord, bool kRemainder = true>
PROXYCCL_OUT_OF_LINE void copyInTurn(void* dst, const void* src, size_t bytes, uint32_t thread, uint32_t threads) {
  char* to = static_cast<char*>(dst);
  const char* from = static_cast<const char*>(src);
  const uintptr_t apart = reinterpret_cast<uintptr_t>(to) ^ reinterpret_cast<uintptr_t>(from);
  if (kWord >= 16 && apart % 16 == 0) return copyWholeWords<Bytes16, kRemainder>(to, from, bytes, thread, threads);
  if (kWord >= 8 && apart % 8 == 0) return copyWholeWords<uint64_t, kRemainder>(to, from, bytes, thread, threads);
  if (apart % 4 == 0) return copyWholeWords<uint32_t, kRemainder>(to, from, bytes, thread, threads);
  copyWords<char>(to, from, bytes, thread, threads);
}

}  // namespace proxyccl

#endif
