// SmChannel: the kernel's own threads read and write a peer's mapped memory.
//
// Names and argument order are those of MSCCL++'s MemoryChannelDeviceHandle. The target of an operation is where data
// goes, the origin where it comes from. Offsets and sizes are in bytes, of any alignment except in packets; an offset
// counts from the start of the peer's memory (`dst`) or of local memory (`src`).
//
// If a range leaves its memory, or packets can't carry it whole, nothing moves, and the communicator ends with a
// TriggerError that names the call, the offset and the memory. The kernel itself sees no error and runs to its end.
#pragma once

#include "proxyccl/copy.h"
#include "proxyccl/element.h"
#include "proxyccl/packet.h"
#include "proxyccl/shared_semaphore.h"

namespace proxyccl {

struct SmChannelDeviceHandle : ProxycclSmChannel {
  static constexpr uint32_t kHandleKind = PROXYCCL_HANDLE_SM_CHANNEL;

  /// Reads one element of the peer's memory. Any thread may call it.
  ///
  /// The access is relaxed: it orders nothing. It is one access if sizeof(T) == alignof(T) <= 16 (element.h). The index
  /// is not checked against the memory's size: this is for inner loops.
  /// @tparam T      any trivially copyable type
  /// @param  index  which element, counted in T from the start of the peer's memory, which is aligned to T
  /// @return the element
  template <class T>
  PROXYCCL_DEVICE T read(uint64_t index) const {
    return loadElement(reinterpret_cast<const T*>(dst) + index);
  }

  /// Writes one element of the peer's memory; otherwise it works like read(). A later signal() tells the peer that the
  /// element is there.
  /// @param index  which element, counted in T
  /// @param value  the value to write
  template <class T>
  PROXYCCL_DEVICE void write(uint64_t index, const T& value) const {
    storeElement(reinterpret_cast<T*>(dst) + index, value);
  }

  /// Copies local memory to the peer's. A group of threads calls it together; each copies its part: of the words,
  /// thread t copies number t, t + numThreads, … , on every target. So a thread may put what it has written itself
  /// without a barrier. copyInTurn() describes the words.
  ///
  /// When the call returns, the thread's part may still be in flight. The peer may read the data after a signal() that
  /// follows a syncThreadsSystem() of the block; local memory may be written again immediately.
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

  /// Copies the peer's memory to local memory. A group of threads calls it together; each copies its part, as in put().
  ///
  /// After the wait() for a signal, a get reads what the peer wrote before that signal. When the call returns, a thread
  /// may read its own part. After a __syncthreads() the group may read all parts.
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

  /// Writes local memory as packets to the peer's memory. A group of threads calls it together: thread t writes packet
  /// t, t + numThreads, … , on every target. So a thread may send what it has written itself without a barrier.
  ///
  /// No fence and no signal are needed: the peer's getPackets() with the same flag waits for each packet.
  /// @tparam Packet      LL16Packet (16 bytes that carry 8) or LL8Packet (8 that carry 4): twice `bytes` are written
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

  /// Waits for the packets that the peer puts into this rank's packet buffer, and writes their data to local memory. A
  /// group of threads calls it together: thread t takes packet t, t + numThreads, … . The thread may use the data of
  /// its own packets immediately; after a __syncthreads() the group may use all data.
  ///
  /// If a wait fails, zeros are written, and the communicator ends or has ended; a time-out ends it with a
  /// WaitTimeoutError.
  /// @param packetOffset offset in the packet buffer, in bytes: the sender's packetOffset, if the buffer is its target
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

  /// Adds one to the peer's semaphore of this channel. Any number of threads may call it concurrently, unless the link
  /// to the peer adds nothing atomically (GPUs joined by PCIe alone): then one thread at a time calls it.
  ///
  /// The peer that waits for the signal sees what this thread wrote before it, and what its block wrote before a
  /// syncThreadsSystem().
  PROXYCCL_DEVICE void signal() const { semaphoreHandle().signal(); }

  /// Raises the count of the peer's semaphore to `value`, as if this rank had sent signals until the count was `value`.
  /// The memory order is that of signal(). The peer waits with waitUntil(value), or calls wait() once for each signal.
  /// @param value  greater than every earlier count, or the communicator ends with a TriggerError
  PROXYCCL_DEVICE void signal(uint64_t value) const {
    uint64_t count;
    if (!semaphoreHandle().signal(value, &count))
      recordError(control, PROXYCCL_ERROR_SIGNAL_VALUE, {PROXYCCL_WAIT_SM_SIGNAL, peer, channel, count}, value);
  }

  /// signal() without ordering, for a signal that announces no data.
  PROXYCCL_DEVICE void relaxedSignal() const { semaphoreHandle().relaxedSignal(); }

  /// Waits for the peer's next signal and consumes it. Any number of threads may call it concurrently: each consumes
  /// one signal. If one thread calls it for its block, the others continue after a __syncthreads().
  /// @return false if the communicator has ended or the time-out passed: the kernel must then give up its work
  PROXYCCL_DEVICE bool wait() const { return semaphoreHandle().wait(control, PROXYCCL_WAIT_SM_SIGNAL, peer, channel); }

  /// Waits until the peer's signals have reached `value`, and consumes them. If they have reached it already, it
  /// returns true immediately. Otherwise it waits like wait().
  /// @param value  a count of signals since the channel was made
  PROXYCCL_DEVICE bool waitUntil(uint64_t value) const {
    return semaphoreHandle().waitUntil(control, PROXYCCL_WAIT_SM_SIGNAL, peer, channel, value);
  }

  /// wait() without ordering, for a signal that announces no data.
  PROXYCCL_DEVICE bool relaxedWait() const {
    return semaphoreHandle().relaxedWait(control, PROXYCCL_WAIT_SM_SIGNAL, peer, channel);
  }

  /// Consumes the peer's next signal if it has arrived. Any number of threads may call it concurrently.
  ///
  /// It never waits, so a loop around it must itself end when the communicator ends:
  /// `while (!channel.poll()) if (aborted(channel.control)) return;`
  /// @return whether there was a signal; if so, the peer's earlier writes may be read
  PROXYCCL_DEVICE bool poll() const { return semaphoreHandle().poll(); }

 private:
  PROXYCCL_DEVICE SharedSemaphore semaphoreHandle() const { return {semaphore}; }

  // Whether a range lies in a memory, and its offset and size are multiples of `unit`, a power of two known at compile
  // time.
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
