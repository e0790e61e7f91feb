// SmChannel: the kernel's own threads read and write a peer's mapped memory.
//
// Names and argument order are those of MSCCL++'s SmChannelDeviceHandle. Offsets are bytes from the start of the
// channel's destination (the peer's memory) and source (own memory).
#ifndef PROXYCCL_SM_CHANNEL_H
#define PROXYCCL_SM_CHANNEL_H

#include "proxyccl/copy.h"
#include "proxyccl/packet.h"
#include "proxyccl/semaphore.h"

namespace proxyccl {

struct SmChannelDeviceHandle : ProxycclSmChannel {
  // One element of the peer's memory, counted in T.
  template <class T>
  PROXYCCL_DEVICE T read(uint64_t index) const {
    return reinterpret_cast<const volatile T*>(dst)[index];
  }
  template <class T>
  PROXYCCL_DEVICE void write(uint64_t index, const T& value) const {
    reinterpret_cast<volatile T*>(dst)[index] = value;
  }

  // Own memory to the peer's. Called by `numThreads` threads, each with its own `threadId`.
  PROXYCCL_DEVICE void put(uint64_t dstOffset, uint64_t srcOffset, uint64_t bytes, uint32_t threadId,
                           uint32_t numThreads) const {
    copyBytes(dst + dstOffset, src + srcOffset, bytes, threadId, numThreads);
  }
  PROXYCCL_DEVICE void put(uint64_t offset, uint64_t bytes, uint32_t threadId, uint32_t numThreads) const {
    put(offset, offset, bytes, threadId, numThreads);
  }

  // The peer's memory (at dstOffset) to own memory (at srcOffset).
  PROXYCCL_DEVICE void get(uint64_t dstOffset, uint64_t srcOffset, uint64_t bytes, uint32_t threadId,
                           uint32_t numThreads) const {
    copyBytes(src + srcOffset, dst + dstOffset, bytes, threadId, numThreads);
  }
  PROXYCCL_DEVICE void get(uint64_t offset, uint64_t bytes, uint32_t threadId, uint32_t numThreads) const {
    get(offset, offset, bytes, threadId, numThreads);
  }

  // Own memory to packets in the peer's memory: `bytes` (a multiple of the payload) become twice as many there.
  template <class Packet = LL16Packet>
  PROXYCCL_DEVICE void putPackets(uint64_t dstOffset, uint64_t srcOffset, uint64_t bytes, uint32_t threadId,
                                  uint32_t numThreads, uint32_t flag) const {
    if (!flagIsValid(flag, control, peer, channel)) return;
    Packet* packets = reinterpret_cast<Packet*>(dst + dstOffset);
    const auto* payloads = reinterpret_cast<const typename Packet::Payload*>(src + srcOffset);
    forEach(bytes / sizeof(typename Packet::Payload), threadId, numThreads,
            [&](size_t i) { packets[i].write(payloads[i], flag); });
  }

  // The counterpart: packets that the peer put into the own packet buffer, at dstOffset, to own memory at srcOffset.
  // Waits for each packet; `flag` must be the sender's.
  template <class Packet = LL16Packet>
  PROXYCCL_DEVICE void getPackets(uint64_t dstOffset, uint64_t srcOffset, uint64_t bytes, uint32_t threadId,
                                  uint32_t numThreads, uint32_t flag) const {
    if (!flagIsValid(flag, control, peer, channel)) return;
    const Packet* packets = reinterpret_cast<const Packet*>(packet_buffer + dstOffset);
    auto* payloads = reinterpret_cast<typename Packet::Payload*>(src + srcOffset);
    forEach(bytes / sizeof(typename Packet::Payload), threadId, numThreads,
            [&](size_t i) { payloads[i] = readPacket(&packets[i], flag, control, peer, channel); });
  }

  // signal() orders what the calling thread (after a syncThreadsSystem(): the block) wrote before it; relaxedSignal()
  // does not. One thread calls these.
  PROXYCCL_DEVICE void signal() const { semaphoreHandle().signal(); }
  PROXYCCL_DEVICE void relaxedSignal() const { semaphoreHandle().relaxedSignal(); }
  PROXYCCL_DEVICE bool wait() const { return semaphoreHandle().wait(control, PROXYCCL_WAIT_SM_SIGNAL, peer, channel); }
  PROXYCCL_DEVICE bool poll() const { return semaphoreHandle().poll(); }

 private:
  PROXYCCL_DEVICE Semaphore semaphoreHandle() const { return {semaphore}; }
};

}  // namespace proxyccl

#endif
