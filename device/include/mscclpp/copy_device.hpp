// copy, read and write between addresses.
#ifndef MSCCLPP_COPY_DEVICE_HPP_
#define MSCCLPP_COPY_DEVICE_HPP_

#include "mscclpp/packet_device.hpp"
#include "proxyccl/copy.h"

namespace mscclpp {

/// Copies bytes. A group of threads calls it together; each copies its part. It orders nothing.
///
/// Works for any alignment and any number of bytes, and copies every byte. It uses the widest accesses that both
/// addresses allow, whatever Alignment says.
template <int Alignment = 16, bool CopyRemainder = true>
PROXYCCL_DEVICE void copy(void* dst, const void* src, uint64_t bytes, uint32_t threadId, uint32_t numThreads) {
  static_assert(Alignment == 4 || Alignment == 8 || Alignment == 16, "Alignment must be 4, 8 or 16");
  proxyccl::copyBytes(dst, src, bytes, threadId, numThreads);
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

#endif
