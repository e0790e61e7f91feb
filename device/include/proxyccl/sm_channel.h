// SmChannel: the kernel's own threads read and write a peer's mapped memory.
//
// Names and argument order are those of MSCCL++'s MemoryChannelDeviceHandle. An operation copies data from its origin
// to its target. Offsets and sizes are in bytes; only offsets and sizes of packets need an alignment. An offset counts
// from the start of the peer's memory (`dst`) or of local memory (`src`).
//
// If a range leaves its memory, or is not a multiple of the packets' payload, nothing moves and the communicator ends
// with a TriggerError that names the call, the offset and the memory. The kernel itself sees no error and runs to its
// end.
#pragma once

#include "proxyccl/copy.h"
#include "proxyccl/element.h"
#include "proxyccl/packet.h"
#include "proxyccl/shared_semaphore.h"

namespace proxyccl {

struct SmChannelDeviceHandle : ProxycclSmChannel {
  static constexpr uint32_t kHandleKind = PROXYCCL_HANDLE_SM_CHANNEL;

  /// Reads one element of the peer's memory. Any thread may call read().
  ///
  /// The access is relaxed, and is a single access if sizeof(T) == alignof(T) <= 16 (element.h). read() is for inner
  /// loops, so it does not check the index against the memory's size.
  /// @tparam T      any trivially copyable type
  /// @param  index the element's index, counted in T from the start of the peer's memory; the start is aligned to T
  /// @return the element
  template <class T>
  PROXYCCL_DEVICE T read(uint64_t index) const {
    return loadElement(reinterpret_cast<const T*>(dst) + index);
  }

  /// Writes one element of the peer's memory, by a relaxed access, as read() does. A later signal() tells the peer that
  /// the element has arrived.
  /// @param index the element's index, counted in T
  /// @param value  the value to write
  template <class T>
  PROXYCCL_DEVICE void write(uint64_t index, const T& value) const {
    storeElement(reinterpret_cast<T*>(dst) + index, value);
  }

  /// Copies local memory to the peer's. All threads of a group call put() together: on every target, thread t copies
  /// the words t, t + numThreads, … that copyInTurn() describes. So a thread needs no barrier to put words that it has
  /// written itself.
  ///
  /// When the call returns, local memory may be overwritten, but the data may still be in flight. The peer may read the
  /// data after a signal() that follows a syncThreadsSystem() of the block.
  /// @param targetOffset  offset in the peer's memory, in bytes
  /// @param originOffset  offset in local memory, in bytes
  /// @param bytes         number of bytes
  /// @param threadId      the calling thread's number in the group: 0 to numThreads - 1
  /// @param numThreads    threads in the group
  /// @tparam kWord        bytes of a word: 4, 8 or 16
  /// @tparam kRemainder   whether to copy the bytes before the first whole word and after the last one
  template <uint32_t kWord = 16, bool kRemainder = true>
  PROXYCCL_DEVICE void put(uint64_t targetOffset, uint64_t originOffset, uint64_t bytes, uint32_t threadId,
                           uint32_t numThreads) const {
    if (peerMemoryHas(PROXYCCL_SM_PUT, targetOffset, bytes) && ownMemoryHas(PROXYCCL_SM_PUT, originOffset, bytes))
      copyInTurn<kWord, kRemainder>(dst + targetOffset, src + originOffset, bytes, threadId, numThreads);
  }
  /// put() with one offset for both memories.
  template <uint32_t kWord = 16, bool kRemainder = true>
  PROXYCCL_DEVICE void put(uint64_t offset, uint64_t bytes, uint32_t threadId, uint32_t numThreads) const {
    put<kWord, kRemainder>(offset, offset, bytes, threadId, numThreads);
  }

  /// Copies the peer's memory to local memory. All threads of a group call get() together: thread t copies the words t,
  /// t + numThreads, … .
  ///
  /// After the wait() for a signal, a get reads the data that the peer wrote before that signal. When the call returns,
  /// a thread may read the words that it copied. After a __syncthreads() each thread of the group may read all words.
  /// @param targetOffset  offset in local memory, in bytes: the target comes first, as in put()
  /// @param originOffset  offset in the peer's memory, in bytes
  /// @param bytes         number of bytes
  /// @param threadId      the calling thread's number in the group: 0 to numThreads - 1
  /// @param numThreads    threads in the group
  /// @tparam kWord        bytes of a word: 4, 8 or 16
  /// @tparam kRemainder   whether to copy the bytes before the first whole word and after the last one
  template <uint32_t kWord = 16, bool kRemainder = true>
  PROXYCCL_DEVICE void get(uint64_t targetOffset, uint64_t originOffset, uint64_t bytes, uint32_t threadId,
                           uint32_t numThreads) const {
    if (ownMemoryHas(PROXYCCL_SM_GET, targetOffset, bytes) && peerMemoryHas(PROXYCCL_SM_GET, originOffset, bytes))
      copyInTurn<kWord, kRemainder>(src + targetOffset, dst + originOffset, bytes, threadId, numThreads);
  }
  /// get() with one offset for both memories.
  template <uint32_t kWord = 16, bool kRemainder = true>
  PROXYCCL_DEVICE void get(uint64_t offset, uint64_t bytes, uint32_t threadId, uint32_t numThreads) const {
    get<kWord, kRemainder>(offset, offset, bytes, threadId, numThreads);
  }

  /// Writes local memory as packets to the peer's memory. All threads of a group call putPackets() together: on every
  /// target, thread t writes packets t, t + numThreads, … . So a thread needs no barrier to send words that it has
  /// written itself.
  ///
  /// No fence and no signal are needed: the peer's getPackets() with the same flag waits for each packet.
  /// @tparam Packet      LL16Packet (16 bytes with 8 bytes of data) or LL8Packet (8 bytes with 4 bytes of data)
  /// @param packetOffset offset in the peer's memory, in bytes; a multiple of sizeof(Packet)
  /// @param dataOffset   offset in local memory, in bytes; a multiple of the payload's size
  /// @param bytes        bytes of data; a multiple of the payload's size
  /// @param threadId     the calling thread's number in the group: 0 to numThreads - 1
  /// @param numThreads   threads in the group
  /// @param flag         not 0, and not the previous flag of these packets; 0 ends the communicator with a TriggerError
  template <class Packet = LL16Packet>
  PROXYCCL_DEVICE void putPackets(uint64_t packetOffset, uint64_t dataOffset, uint64_t bytes, uint32_t threadId,
                                  uint32_t numThreads, uint32_t flag) const {
    using Payload = typename Packet::Payload;
    const uint64_t count = bytes / sizeof(Payload);
    if (!flagIsValid(flag, control, peer, channel) ||
        !ownMemoryHas(PROXYCCL_SM_PUT_PACKETS, dataOffset, bytes, sizeof(Payload)) ||
        !peerMemoryHas(PROXYCCL_SM_PUT_PACKETS, packetOffset, count * sizeof(Packet), sizeof(Packet)))
      return;
    Packet* packets = reinterpret_cast<Packet*>(dst + packetOffset);
    const auto* payloads = reinterpret_cast<const Payload*>(src + dataOffset);
    forEachInTurn(count, threadId, numThreads, [&](size_t i) { packets[i].write(payloads[i], flag); });
  }

  /// Waits for the packets that the peer puts into this rank's packet buffer, and writes their data to local memory.
  /// All threads of a group call getPackets() together: thread t takes packets t, t + numThreads, … . The thread may
  /// use the data of its own packets immediately; after a __syncthreads() the group may use all data.
  ///
  /// If the communicator ends or the time-out passes during a wait, zeros are written. A time-out ends the communicator
  /// with a WaitTimeoutError.
  /// @param packetOffset offset in this rank's packet buffer, in bytes. If this buffer is the memory `dst` of the
  /// sender's channel, pass the packetOffset that the sender passes to putPackets()
  /// @param dataOffset   offset in local memory, in bytes; a multiple of the payload's size
  /// @param bytes        bytes of data; a multiple of the payload's size
  /// @param threadId     the calling thread's number in the group: 0 to numThreads - 1
  /// @param numThreads   threads in the group
  /// @param flag the sender's flag
  template <class Packet = LL16Packet>
  PROXYCCL_DEVICE void getPackets(uint64_t packetOffset, uint64_t dataOffset, uint64_t bytes, uint32_t threadId,
                                  uint32_t numThreads, uint32_t flag) const {
    using Payload = typename Packet::Payload;
    const uint64_t count = bytes / sizeof(Payload);
    if (!flagIsValid(flag, control, peer, channel) ||
        !ownMemoryHas(PROXYCCL_SM_GET_PACKETS, dataOffset, bytes, sizeof(Payload)) ||
        !has(PROXYCCL_SM_GET_PACKETS, PROXYCCL_SM_PACKET_BUFFER, packet_buffer_bytes, packetOffset,
             count * sizeof(Packet), sizeof(Packet)))
      return;
    const Packet* packets = reinterpret_cast<const Packet*>(packet_buffer + packetOffset);
    auto* payloads = reinterpret_cast<Payload*>(src + dataOffset);
    forEachInTurn(count, threadId, numThreads,
                  [&](size_t i) { payloads[i] = readPacket(&packets[i], flag, control, peer, channel); });
  }

  /// Adds one to the peer's semaphore of this channel. Any number of threads may call signal() concurrently; if the
  /// link to the peer does not support atomic additions (PCIe), only one thread at a time may.
  ///
  /// A peer that has waited for the signal sees the data that this thread wrote before the signal, and that the
  /// thread's block wrote before a syncThreadsSystem().
  PROXYCCL_DEVICE void signal() const { semaphoreHandle().signal(); }

  /// Raises the count of the peer's semaphore to `value`, as if this rank had called signal() until the count was
  /// `value`. The memory order is that of signal(). The peer waits with waitUntil(value), or calls wait() once for each
  /// signal.
  /// @param value  greater than every earlier count, or the communicator ends with a TriggerError
  PROXYCCL_DEVICE void signal(uint64_t value) const {
    uint64_t count;
    if (!semaphoreHandle().signal(value, &count))
      recordError(control, PROXYCCL_ERROR_SIGNAL_VALUE, {PROXYCCL_WAIT_SM_SIGNAL, peer, channel, count}, value);
  }

  /// Does signal() without ordering, for a signal that announces no data.
  PROXYCCL_DEVICE void relaxedSignal() const { semaphoreHandle().relaxedSignal(); }

  /// Waits for the peer's next signal and consumes it. Any number of threads may call wait() concurrently: each
  /// consumes one signal. If one thread calls wait() for its block, the block's other threads continue after a
  /// __syncthreads().
  /// @return false if the communicator has ended or the time-out passed: the kernel must then give up its work
  PROXYCCL_DEVICE bool wait() const { return semaphoreHandle().wait(control, PROXYCCL_WAIT_SM_SIGNAL, peer, channel); }

  /// Waits like wait() until the count of the peer's signals has reached `value`, and consumes these signals. If the
  /// count has already reached `value`, it returns true immediately.
  /// @param value number of signals since the channel was made
  PROXYCCL_DEVICE bool waitUntil(uint64_t value) const {
    return semaphoreHandle().waitUntil(control, PROXYCCL_WAIT_SM_SIGNAL, peer, channel, value);
  }

  /// Does wait() without ordering, for a signal that announces no data.
  PROXYCCL_DEVICE bool relaxedWait() const {
    return semaphoreHandle().relaxedWait(control, PROXYCCL_WAIT_SM_SIGNAL, peer, channel);
  }

  /// Consumes the peer's next signal if it has arrived. Any number of threads may call poll() concurrently.
  ///
  /// poll() never waits, so a loop around it must itself end when the communicator ends: `while (!channel.poll()) if
  /// (aborted(channel.control)) return;`
  /// @return whether there was a signal; if so, the kernel may read what the peer wrote before the signal
  PROXYCCL_DEVICE bool poll() const { return semaphoreHandle().poll(); }

 private:
  PROXYCCL_DEVICE SharedSemaphore semaphoreHandle() const { return {semaphore}; }

  PROXYCCL_DEVICE bool has(uint32_t call, uint32_t memory, uint64_t memory_bytes, uint64_t offset, uint64_t bytes,
                           uint64_t unit = 1) const {
    if (offset <= memory_bytes && bytes <= memory_bytes - offset && ((offset | bytes) & (unit - 1)) == 0) return true;
    recordError(control, PROXYCCL_ERROR_OUT_OF_RANGE, {memory, peer, channel, unit}, memory_bytes,
                {call, offset, bytes});
    return false;
  }
  PROXYCCL_DEVICE bool peerMemoryHas(uint32_t call, uint64_t offset, uint64_t bytes, uint64_t unit = 1) const {
    return has(call, PROXYCCL_SM_PEER_MEMORY, dst_bytes, offset, bytes, unit);
  }
  PROXYCCL_DEVICE bool ownMemoryHas(uint32_t call, uint64_t offset, uint64_t bytes, uint64_t unit = 1) const {
    return has(call, PROXYCCL_SM_OWN_MEMORY, src_bytes, offset, bytes, unit);
  }
};

}  // namespace proxyccl
