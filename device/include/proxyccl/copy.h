// Copies by the threads of a block or grid: copyBytes() divides the bytes among the threads in the fastest way,
// copyInTurn() in a documented order.
#pragma once

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
  size_t i = thread;
#if PROXYCCL_ON_HOST
  for (; i < words; i += threads) to[i] = from[i];
#else
  // A thread issues its loads before its stores, because a load after a store that may alias it would wait for that
  // store. All pointers are computed from one pointer, so that they take few registers.
  const size_t next = threads;
#pragma unroll 1
  for (; i < words; i += 4 * next) {
    const bool second = i + next < words, third = i + 2 * next < words, fourth = i + 3 * next < words;
    const Word* of = from + i;
    Word a = of[0], b, c, d;
    if (second) b = (of += next)[0];
    if (third) c = (of += next)[0];
    if (fourth) d = (of += next)[0];
    Word* at = to + i;
    at[0] = a;
    if (second) (at += next)[0] = b;
    if (third) (at += next)[0] = c;
    if (fourth) (at += next)[0] = d;
  }
#endif
  const size_t done = words * sizeof(Word);
  forEachInTurn(bytes - done, thread, threads, [&](size_t i) { dst[done + i] = src[done + i]; });
}

// Returns 16 bytes from two consecutive words, beginning with byte `first` < 16 of the first word.
PROXYCCL_DEVICE Bytes16 bytesFrom(uint32_t first, const Bytes16& word, const Bytes16& next) {
  const bool near = first < 8;
  const uint64_t low = near ? word.low : word.high, middle = near ? word.high : next.low,
                 high = near ? next.low : next.high;
  const uint32_t bits = first % 8 * 8;  // a shift by 64 is undefined, so the shift to the left takes two steps
  return {low >> bits | middle << 1 << (63 - bits), middle >> bits | high << 1 << (63 - bits)};
}

// copyWords() for addresses with different alignment: stores words of 16 bytes at the destination, each made of two
// words of the source. A link carries stores of 16 bytes faster than narrower stores. A thread has one word in flight,
// because more would make the calling kernels spill registers.
PROXYCCL_DEVICE void copyShifted(char* dst, const char* src, size_t bytes, uint32_t thread, uint32_t threads) {
  const uintptr_t target = reinterpret_cast<uintptr_t>(dst), source = reinterpret_cast<uintptr_t>(src);
  const uint32_t shift = (source - target) % 16;
  size_t head = -target % 16;
  if (head < shift) head += 16;  // so that the source's first whole word begins among the bytes that are copied singly
  const size_t held = bytes > head ? (bytes - (head - shift)) / 16 : 0;  // whole words of the source
  const size_t words = held > 1 ? held - 1 : 0;
  if (words == 0) head = bytes;
  Bytes16* to = reinterpret_cast<Bytes16*>(dst + head);
  const Bytes16* from = reinterpret_cast<const Bytes16*>(src + (head - shift));
#pragma unroll 1
  for (size_t i = thread; i < words; i += threads) to[i] = bytesFrom(shift, from[i], from[i + 1]);
  const size_t done = head + words * 16;
  forEachInTurn(head, thread, threads, [&](size_t i) { dst[i] = src[i]; });
  forEachInTurn(bytes - done, thread, threads, [&](size_t i) { dst[done + i] = src[done + i]; });
}

/// Copies bytes. All threads of a group call copyBytes() together. Each thread copies an unspecified part, so the group
/// needs a barrier before and after the call. The accesses are unordered.
/// @param dst      destination; the ranges must not overlap
/// @param src      source
/// @param bytes    number of bytes; both addresses may have any alignment
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
  const uint32_t width = misaligned % 8 == 0 ? 8 : misaligned % 4 == 0 ? 4 : 1;
  // If each thread copies at most 4 words of `width` bytes, copyWords() is faster than copyShifted(), because all of a
  // thread's loads are in flight at the same time.
  if (bytes > static_cast<size_t>(4 * width) * threads) return copyShifted(to, from, bytes, thread, threads);
  if (width == 8) return copyWords<uint64_t>(to, from, bytes, thread, threads);
  if (width == 4) return copyWords<uint32_t>(to, from, bytes, thread, threads);
  copyWords<char>(to, from, bytes, thread, threads);
#endif
}

// Copies the few bytes before the first word and after the last one. Each thread has one load in flight, because more
// loads would take more registers than a kernel of 1024 threads has.
PROXYCCL_DEVICE void copyRest(char* dst, const char* src, size_t bytes, uint32_t thread, uint32_t threads) {
  size_t done = 0;
  if ((reinterpret_cast<uintptr_t>(dst) | reinterpret_cast<uintptr_t>(src)) % 4 == 0) {
    uint32_t* to = reinterpret_cast<uint32_t*>(dst);
    const uint32_t* from = reinterpret_cast<const uint32_t*>(src);
    forEachInTurn(bytes / 4, thread, threads, [&](size_t i) { to[i] = from[i]; });
    done = bytes / 4 * 4;
  }
  forEachInTurn(bytes - done, thread, threads, [&](size_t i) { dst[done + i] = src[done + i]; });
}

// Copies between addresses with the same offset from a multiple of the word's size.
template <class Word, bool kRemainder>
PROXYCCL_DEVICE void copyWholeWords(char* dst, const char* src, size_t bytes, uint32_t thread, uint32_t threads) {
  const size_t misaligned = reinterpret_cast<uintptr_t>(dst) % sizeof(Word);
  const size_t before = misaligned == 0 ? 0 : sizeof(Word) - misaligned, head = before < bytes ? before : bytes;
  const size_t body = (bytes - head) / sizeof(Word) * sizeof(Word);
  if (kRemainder) copyRest(dst, src, head, thread, threads);
  copyWords<Word>(dst + head, src + head, body, thread, threads);
  if (kRemainder) copyRest(dst + head + body, src + head + body, bytes - head - body, thread, threads);
}

/// Copies bytes word by word: on every target, thread t copies the words t, t + threads, … . So a thread needs no
/// barrier to copy words that it has written itself, or to use words that it has copied. The accesses are unordered.
///
/// A word has kWord bytes if the two addresses are congruent modulo kWord, otherwise the largest of 8, 4 and 1 bytes
/// modulo which they are congruent. The bytes before the first whole word and after the last one are divided among the
/// threads in the same way, as words of 4 bytes or 1 byte.
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
