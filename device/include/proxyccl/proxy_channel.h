// ProxyChannel: a kernel's thread pushes triggers, and the proxy moves the data by copy engine or network.
//
// Names and argument order are those of MSCCL++'s PortChannelDeviceHandle. Offsets and sizes are in bytes, of any
// alignment. A destination offset counts from the start of the peer's memory, a source offset from the start of local
// memory.
//
// One thread makes a call for its whole block; if several threads call put(), they make several puts. A put transfers
// data that the calling thread wrote before the put, and data that the thread's block wrote before a
// syncThreadsSystem(). The operations of one thread on a channel are executed in the order of its calls: a get reads
// what earlier puts wrote, and the get's data arrives before a later put reads the data and before a later signal
// arrives. Over a fabric that does not order writes, puts may overtake one another, and so may gets. If a range leaves
// its memory, nothing moves and the communicator ends with a TriggerError.
//
// A put or get returns a ticket, or kNoTicket if the call could not push a trigger. isComplete() and waitComplete()
// tell, without a flush, when the ticket's operation and all earlier operations on the channel are complete.
#pragma once

#include "proxyccl/element.h"
#include "proxyccl/fifo.h"
#include "proxyccl/shared_semaphore.h"

namespace proxyccl {

/// Makes a trigger for Fifo::push (trigger.h).
/// @param op          bits of PROXYCCL_OP_DATA, _SIGNAL and _FLUSH; _DATA | _GET for a get; PROXYCCL_OP_CUSTOM for a
///                    Python handler
/// @param channel     channel id
/// @param dst_memory  first memory id of the destination
/// @param dst_offset  in bytes from that memory's start
/// @param src_memory  first memory id of the source
/// @param src_offset  in bytes from that memory's start
/// @param size        in bytes, at most PROXYCCL_MAX_TRIGGER_BYTES; any 32 bits without PROXYCCL_OP_DATA
PROXYCCL_DEVICE ProxycclTrigger makeTrigger(uint32_t op, uint32_t channel, uint32_t dst_memory, uint64_t dst_offset,
                                            uint32_t src_memory, uint64_t src_offset, uint64_t size) {
  // An offset of 4 GiB or more lies in a later window of the memory, which has the next memory ids.
  const uint64_t dst_id = dst_memory + (dst_offset >> PROXYCCL_OFFSET_BITS);
  const uint64_t src_id = src_memory + (src_offset >> PROXYCCL_OFFSET_BITS);
  const uint64_t size_bits = op & PROXYCCL_OP_DATA ? (1u << PROXYCCL_SIZE_BITS) - 1 : 0xffffffffu;
  const uint64_t get = op & PROXYCCL_OP_GET ? 1u << PROXYCCL_GET_SHIFT : 0;
  ProxycclTrigger trigger;
  trigger.word0 = (size & size_bits) | get | src_offset << PROXYCCL_SRC_OFFSET_SHIFT;
  trigger.word1 = (dst_offset & 0xffffffffu) | src_id << PROXYCCL_SRC_MEMORY_SHIFT |
                  dst_id << PROXYCCL_DST_MEMORY_SHIFT |
                  static_cast<uint64_t>(op & ((1u << PROXYCCL_OP_BITS) - 1)) << PROXYCCL_OP_SHIFT |
                  static_cast<uint64_t>(channel) << PROXYCCL_CHANNEL_SHIFT;
  return trigger;
}

/// Makes a trigger that carries a value instead of a source's memory id. The other parameters are those of
/// makeTrigger().
/// @param value  1, 2, 4 or 8 bytes
PROXYCCL_DEVICE ProxycclTrigger makeValueTrigger(uint32_t op, uint32_t channel, uint32_t dst_memory,
                                                 uint64_t dst_offset, uint64_t value, uint32_t bytes) {
  const uint32_t kind = PROXYCCL_VALUE_8_BYTES - (bytes == 8 ? 0 : bytes == 4 ? 1 : bytes == 2 ? 2 : 3);
  ProxycclTrigger trigger = makeTrigger(op, channel, dst_memory, dst_offset, kind, 0, 0);
  trigger.word0 = value;
  return trigger;
}

struct ProxyChannelDeviceHandle : ProxycclProxyChannel {
  static constexpr uint32_t kHandleKind = PROXYCCL_HANDLE_PROXY_CHANNEL;

  /// Starts a copy from local memory to the peer's. put() returns immediately, unless the ring is full.
  ///
  /// The source may be overwritten when the put is complete. The peer may read the data once it has received a later
  /// signal().
  /// @param dstOffset  offset in the peer's memory, in bytes
  /// @param srcOffset  offset in local memory, in bytes
  /// @param size       number of bytes
  /// @return the put's ticket, for isComplete() and waitComplete()
  PROXYCCL_DEVICE uint64_t put(uint64_t dstOffset, uint64_t srcOffset, uint64_t size) const {
    return push(PROXYCCL_OP_DATA, dst_memory, dstOffset, src_memory, srcOffset, size);
  }
  /// put() with one offset for both memories.
  PROXYCCL_DEVICE uint64_t put(uint64_t offset, uint64_t size) const { return put(offset, offset, size); }
  /// put() between memories other than the channel's defaults.
  /// @param dstMemory  the peer's memory: in Python RegisteredMemory.peer_id(peer)
  /// @param srcMemory  local memory: in Python RegisteredMemory.source_id(peer)
  PROXYCCL_DEVICE uint64_t put(uint32_t dstMemory, uint64_t dstOffset, uint32_t srcMemory, uint64_t srcOffset,
                               uint64_t size) const {
    return push(PROXYCCL_OP_DATA, dstMemory, dstOffset, srcMemory, srcOffset, size);
  }

  /// Starts a copy from the peer's memory to local memory. get() returns immediately, unless the ring is full. The
  /// peer's kernels take no part.
  ///
  /// After the wait() for a signal, a get reads the data that the peer wrote before that signal. The data may be read
  /// when the get is complete. A later signal() tells the peer that it may overwrite the memory that the get has read.
  /// @param dstOffset  offset in local memory, in bytes: the target comes first, as in put()
  /// @param srcOffset  offset in the peer's memory, in bytes
  /// @param size       number of bytes
  /// @return the get's ticket, for isComplete() and waitComplete()
  PROXYCCL_DEVICE uint64_t get(uint64_t dstOffset, uint64_t srcOffset, uint64_t size) const {
    return push(PROXYCCL_OP_DATA | PROXYCCL_OP_GET, src_memory, dstOffset, dst_memory, srcOffset, size);
  }
  /// get() with one offset for both memories.
  PROXYCCL_DEVICE uint64_t get(uint64_t offset, uint64_t size) const { return get(offset, offset, size); }
  /// get() between memories other than the channel's defaults.
  /// @param dstMemory  local memory: in Python RegisteredMemory.source_id(peer)
  /// @param srcMemory  the peer's memory: in Python RegisteredMemory.peer_id(peer)
  PROXYCCL_DEVICE uint64_t get(uint32_t dstMemory, uint64_t dstOffset, uint32_t srcMemory, uint64_t srcOffset,
                               uint64_t size) const {
    return push(PROXYCCL_OP_DATA | PROXYCCL_OP_GET, dstMemory, dstOffset, srcMemory, srcOffset, size);
  }

  /// Writes a value of 1, 2, 4 or 8 bytes to the peer's memory. The trigger carries the value, so the proxy reads no
  /// memory of the kernel.
  /// @param dstOffset  offset in the peer's memory, in bytes, of any alignment
  /// @param value      of any trivially copyable type
  /// @return the put's ticket, as for put()
  template <class T>
  PROXYCCL_DEVICE uint64_t putValue(uint64_t dstOffset, T value) const {
    return pushValue(PROXYCCL_OP_DATA, dstOffset, value);
  }
  /// Does putValue() and signal() as one operation.
  template <class T>
  PROXYCCL_DEVICE uint64_t putValueWithSignal(uint64_t dstOffset, T value) const {
    return pushValue(PROXYCCL_OP_DATA | PROXYCCL_OP_SIGNAL, dstOffset, value);
  }

  /// Adds one to the peer's semaphore; the signal arrives after the data of all earlier puts and gets on the channel.
  PROXYCCL_DEVICE void signal() const { push(PROXYCCL_OP_SIGNAL, 0, 0, 0, 0, 0); }

  /// Raises the count of the peer's semaphore to `value`, as if this rank had called signal() until the count was
  /// `value`. The memory order is that of signal(). The peer waits with waitUntil(value), or calls wait() once for each
  /// signal.
  /// @param value  greater than every earlier count, or the communicator ends with a TriggerError
  PROXYCCL_DEVICE void signal(uint64_t value) const {
    Fifo{fifo}.push(makeValueTrigger(PROXYCCL_OP_SIGNAL, channel, 0, 0, value, 8), control);
  }

  /// Does put() and signal() as one operation, which is cheaper than two. See put() for the parameters and the result.
  PROXYCCL_DEVICE uint64_t putWithSignal(uint64_t dstOffset, uint64_t srcOffset, uint64_t size) const {
    return push(PROXYCCL_OP_DATA | PROXYCCL_OP_SIGNAL, dst_memory, dstOffset, src_memory, srcOffset, size);
  }
  /// putWithSignal() with one offset for both memories.
  PROXYCCL_DEVICE uint64_t putWithSignal(uint64_t offset, uint64_t size) const {
    return putWithSignal(offset, offset, size);
  }
  /// putWithSignal() between memories other than the channel's defaults.
  PROXYCCL_DEVICE uint64_t putWithSignal(uint32_t dstMemory, uint64_t dstOffset, uint32_t srcMemory, uint64_t srcOffset,
                                         uint64_t size) const {
    return push(PROXYCCL_OP_DATA | PROXYCCL_OP_SIGNAL, dstMemory, dstOffset, srcMemory, srcOffset, size);
  }

  /// Does put(), signal() and flush() as one operation, with the parameters of put() and the result of flush().
  PROXYCCL_DEVICE bool putWithSignalAndFlush(uint64_t dstOffset, uint64_t srcOffset, uint64_t size) const {
    return waitFlushed(push(PROXYCCL_OP_DATA | PROXYCCL_OP_SIGNAL | PROXYCCL_OP_FLUSH, dst_memory, dstOffset,
                            src_memory, srcOffset, size));
  }
  /// putWithSignalAndFlush() with one offset for both memories.
  PROXYCCL_DEVICE bool putWithSignalAndFlush(uint64_t offset, uint64_t size) const {
    return putWithSignalAndFlush(offset, offset, size);
  }

  /// Waits until all earlier operations on this channel are complete. Then the kernel may overwrite the sources of puts
  /// and read the results of gets.
  /// @return false if the communicator has ended or the time-out passed: the kernel must then give up its work
  PROXYCCL_DEVICE bool flush() const { return waitFlushed(push(PROXYCCL_OP_FLUSH, 0, 0, 0, 0, 0)); }

  /// Requests a flush and returns immediately.
  /// @return the flush's ticket, for isFlushed() and waitFlushed(); kNoTicket if the communicator has ended
  PROXYCCL_DEVICE uint64_t flushAsync() const { return push(PROXYCCL_OP_FLUSH, 0, 0, 0, 0, 0); }

  /// Returns whether the flush with this ticket is complete; like poll(), never waits.
  /// @param ticket  from flushAsync()
  PROXYCCL_DEVICE bool isFlushed(uint64_t ticket) const {
    return ticket != kNoTicket && loadAcquireSystem(flushed) > ticket;
  }

  /// Waits for the flush with this ticket.
  /// @param ticket  from flushAsync(); for kNoTicket it returns false immediately
  /// @return see flush()
  PROXYCCL_DEVICE bool waitFlushed(uint64_t ticket) const { return waitPast(ticket, flushed, PROXYCCL_WAIT_FLUSH); }

  /// Returns whether the operation with this ticket and all earlier operations on the channel are complete, in the
  /// sense of flush(). Like poll(), it never waits. Over a fabric, a flush lets isComplete() return true sooner.
  /// @param ticket  from any call on this channel that returns one
  PROXYCCL_DEVICE bool isComplete(uint64_t ticket) const {
    return ticket != kNoTicket && loadAcquireSystem(completed) > ticket;
  }

  /// Waits until isComplete() returns true for this ticket.
  /// @param ticket  from any call on this channel that returns one; for kNoTicket it returns false immediately
  /// @return see flush()
  PROXYCCL_DEVICE bool waitComplete(uint64_t ticket) const {
    return waitPast(ticket, completed, PROXYCCL_WAIT_COMPLETION);
  }

  /// Sends three numbers of the program's choice to the channel's Python handler.
  /// @param size       what the handler sees as the trigger's size
  /// @param dstOffset  what the handler sees as the destination offset
  /// @param srcOffset  what the handler sees as the source offset
  /// @return the trigger's ticket, for Fifo::sync and waitComplete(), which waits for the handler; kNoTicket if the
  /// communicator has ended or the ring stayed full
  PROXYCCL_DEVICE uint64_t custom(uint32_t size, uint32_t dstOffset = 0, uint32_t srcOffset = 0) const {
    return Fifo{fifo}.push(makeTrigger(PROXYCCL_OP_CUSTOM, channel, 0, dstOffset, 0, srcOffset, size), control);
  }

  /// Waits for the peer's next signal and consumes it. The kernel may then read the data that the peer put before the
  /// signal. Any number of threads may call wait() concurrently: each consumes one signal. If one thread calls wait()
  /// for its block, the block's other threads continue after a __syncthreads().
  /// @return false if the communicator has ended or the time-out passed: the kernel must then give up its work
  PROXYCCL_DEVICE bool wait() const {
    return semaphoreHandle().wait(control, PROXYCCL_WAIT_PROXY_SIGNAL, peer, channel);
  }

  /// Waits like wait() until the count of the peer's signals has reached `value`, and consumes these signals. If the
  /// count has already reached `value`, it returns true immediately.
  /// @param value number of signals since the channel was made
  PROXYCCL_DEVICE bool waitUntil(uint64_t value) const {
    return semaphoreHandle().waitUntil(control, PROXYCCL_WAIT_PROXY_SIGNAL, peer, channel, value);
  }

  /// Consumes the peer's next signal if it has arrived. Any number of threads may call poll() concurrently.
  ///
  /// poll() never waits, so a loop around it must itself end when the communicator ends:
  /// `while (!channel.poll()) if (aborted(channel.control)) return;`
  /// @return whether there was a signal; if so, the kernel may read the data that the peer put before the signal
  PROXYCCL_DEVICE bool poll() const { return semaphoreHandle().poll(); }

 private:
  PROXYCCL_DEVICE SharedSemaphore semaphoreHandle() const { return {semaphore}; }

  // `word` holds a ticket, not a count, because two threads that flush the same channel may push in either order. When
  // an operation is complete, all operations with lower tickets are complete as well. The load pairs with the
  // transport's write of `word`, which follows the channel's data.
  PROXYCCL_DEVICE bool waitPast(uint64_t ticket, const uint64_t* word, uint32_t kind) const {
    if (ticket == kNoTicket) return false;
    return proxyccl::waitUntil(control, {kind, peer, channel, ticket + 1},
                               [&](uint64_t* seen) { return (*seen = loadAcquireSystem(word)) > ticket; });
  }

  // Checks that a range lies in its memory. The engine can't check this, because an offset beyond the memory's last
  // window would address the ids of another memory. The limit in host memory is read only for a range that leaves the
  // first window.
  PROXYCCL_DEVICE bool reaches(uint32_t memory, uint64_t offset, uint64_t size) const {
    if (memory >= PROXYCCL_MAX_MEMORIES) return false;
    if (offset < PROXYCCL_WINDOW_BYTES && size <= PROXYCCL_WINDOW_BYTES - offset) return true;
    if (memory_limits == nullptr) return true;
    const uint64_t bytes = loadRelaxedSystem(&memory_limits[memory]);
    return offset <= bytes && size <= bytes - offset;
  }

  PROXYCCL_DEVICE uint64_t refuse(uint32_t op, uint32_t kind, uint32_t memory, uint64_t offset, uint64_t size) const {
    const bool known = memory_limits != nullptr && memory < PROXYCCL_MAX_MEMORIES;
    recordError(control, PROXYCCL_ERROR_BAD_TRIGGER, {kind, peer, channel, memory},
                known ? loadRelaxedSystem(&memory_limits[memory]) : 0, {op, offset, size});
    return kNoTicket;
  }

  template <class T>
  PROXYCCL_DEVICE uint64_t pushValue(uint32_t op, uint64_t dstOffset, const T& value) const {
    static_assert(sizeof(T) == 1 || sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8, "a trigger carries such sizes");
    const auto pieces = __builtin_bit_cast(Pieces<T>, value);
    uint64_t carried = 0;
    for (size_t i = 0; i < Pieces<T>::kCount; ++i)
      carried |= static_cast<uint64_t>(pieces.pieces[i]) << 8 * sizeof(typename Pieces<T>::Piece) * i;
    if (!reaches(dst_memory, dstOffset, sizeof(T)))
      return refuse(op, PROXYCCL_SM_PEER_MEMORY, dst_memory, dstOffset, sizeof(T));
    return Fifo{fifo}.push(makeValueTrigger(op, channel, dst_memory, dstOffset, carried, sizeof(T)), control);
  }

  // Pushes an operation, in triggers of at most PROXYCCL_MAX_TRIGGER_BYTES, and returns the last trigger's ticket.
  PROXYCCL_DEVICE uint64_t push(uint32_t op, uint32_t dstMemory, uint64_t dstOffset, uint32_t srcMemory,
                                uint64_t srcOffset, uint64_t size) const {
    if (op & PROXYCCL_OP_DATA) {
      const bool is_get = op & PROXYCCL_OP_GET;
      if (!reaches(dstMemory, dstOffset, size))
        return refuse(op, is_get ? PROXYCCL_SM_OWN_MEMORY : PROXYCCL_SM_PEER_MEMORY, dstMemory, dstOffset, size);
      if (!reaches(srcMemory, srcOffset, size))
        return refuse(op, is_get ? PROXYCCL_SM_PEER_MEMORY : PROXYCCL_SM_OWN_MEMORY, srcMemory, srcOffset, size);
    }
    const Fifo ring{fifo};
    while (size > PROXYCCL_MAX_TRIGGER_BYTES) {
      if (ring.push(makeTrigger(op & (PROXYCCL_OP_DATA | PROXYCCL_OP_GET), channel, dstMemory, dstOffset, srcMemory,
                                srcOffset, PROXYCCL_MAX_TRIGGER_BYTES),
                    control) == kNoTicket)
        return kNoTicket;
      dstOffset += PROXYCCL_MAX_TRIGGER_BYTES;
      srcOffset += PROXYCCL_MAX_TRIGGER_BYTES;
      size -= PROXYCCL_MAX_TRIGGER_BYTES;
    }
    return ring.push(makeTrigger(op, channel, dstMemory, dstOffset, srcMemory, srcOffset, size), control);
  }
};

}  // namespace proxyccl
