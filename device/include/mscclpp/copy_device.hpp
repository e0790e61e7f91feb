// Defines copy(), read() and write() between addresses.
#pragma once

#include "mscclpp/packet_device.hpp"
#include "proxyccl/copy.h"

namespace mscclpp {

namespace detail {
// The word that a thread copies by one access.
PROXYCCL_DEVICE constexpr uint32_t wordOf(int alignment) {
  return alignment % 16 == 0 ? 16 : static_cast<uint32_t>(alignment);
}
}  // namespace detail

/// Copies bytes with unordered accesses. All threads of a group call copy() together, and each copies its part.
///
/// Thread t copies the words t, t + numThreads, … of Alignment bytes (at most 16) each. Unless CopyRemainder is false,
/// the bytes before the first whole word and after the last one are distributed in the same way, as words of 4 bytes.
/// The copy works for any alignment and any number of bytes (proxyccl::copyInTurn()).
template <int Alignment = 16, bool CopyRemainder = true>
PROXYCCL_DEVICE void copy(void* dst, const void* src, uint64_t bytes, uint32_t threadId, uint32_t numThreads) {
  static_assert(Alignment == 4 || Alignment == 8 || (Alignment > 0 && Alignment % 16 == 0),
                "Alignment must be 4, 8 or a multiple of 16");
  proxyccl::copyInTurn<detail::wordOf(Alignment), CopyRemainder>(dst, src, bytes, threadId, numThreads);
}

/// Writes one element, by a plain store.
template <class T>
PROXYCCL_DEVICE void write(void* dst, uint64_t index, const T& value) {
  static_cast<T*>(dst)[index] = value;
}

/// Reads one element, by a plain load.
template <class T>
PROXYCCL_DEVICE T read(const void* src, uint64_t index) {
  return static_cast<const T*>(src)[index];
}

}  // namespace mscclpp
