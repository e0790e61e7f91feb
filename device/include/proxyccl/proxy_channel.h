// ProxyChannel: one thread pushes triggers, the proxy moves the data by copy engine or RDMA.
//
// Names and argument order are those of MSCCL++'s ProxyChannelDeviceHandle. Only one thread calls a method at a time;
// what other threads wrote and the put shall carry is ordered by a syncThreadsSystem() before it.
#ifndef PROXYCCL_PROXY_CHANNEL_H
#define PROXYCCL_PROXY_CHANNEL_H

#include "proxyccl/fifo.h"
#include "proxyccl/semaphore.h"

namespace proxyccl {

PROXYCCL_DEVICE ProxycclTrigger makeTrigger(uint32_t op, uint32_t channel, uint32_t dst_memory, uint64_t dst_offset,
                                            uint32_t src_memory, uint64_t src_offset, uint64_t size) {
  // An offset of 4 GiB or more lies in one of the windows that follow the memory's first.
  const uint64_t dst_id = dst_memory + (dst_offset >> PROXYCCL_OFFSET_BITS);
  const uint64_t src_id = src_memory + (src_offset >> PROXYCCL_OFFSET_BITS);
  ProxycclTrigger trigger;
  trigger.word0 = (size & 0xffffffffu) | src_offset << PROXYCCL_SRC_OFFSET_SHIFT;
  trigger.word1 = (dst_offset & 0xffffffffu) | src_id << PROXYCCL_SRC_MEMORY_SHIFT |
                  dst_id << PROXYCCL_DST_MEMORY_SHIFT | static_cast<uint64_t>(op) << PROXYCCL_OP_SHIFT |
                  static_cast<uint64_t>(channel) << PROXYCCL_CHANNEL_SHIFT;
  return trigger;
}

struct ProxyChannelDeviceHandle : ProxycclProxyChannel {
  // Starts a copy from own memory to the peer's. The source may be overwritten after a flush().
  PROXYCCL_DEVICE void put(uint64_t dstOffset, uint64_t srcOffset, uint64_t size) const {
    push(PROXYCCL_OP_DATA, dst_memory, dstOffset, src_memory, srcOffset, size);
  }
  PROXYCCL_DEVICE void put(uint64_t offset, uint64_t size) const { put(offset, offset, size); }
  // The same between memories given by id (RegisteredMemory.id; ProxyChannel.memory_id).
  PROXYCCL_DEVICE void put(uint32_t dstMemory, uint64_t dstOffset, uint32_t srcMemory, uint64_t srcOffset,
                           uint64_t size) const {
    push(PROXYCCL_OP_DATA, dstMemory, dstOffset, srcMemory, srcOffset, size);
  }

  // Adds one to the peer's semaphore, behind every put pushed on this channel before.
  PROXYCCL_DEVICE void signal() const { push(PROXYCCL_OP_SIGNAL, 0, 0, 0, 0, 0); }

  PROXYCCL_DEVICE void putWithSignal(uint64_t dstOffset, uint64_t srcOffset, uint64_t size) const {
    push(PROXYCCL_OP_DATA | PROXYCCL_OP_SIGNAL, dst_memory, dstOffset, src_memory, srcOffset, size);
  }
  PROXYCCL_DEVICE void putWithSignal(uint64_t offset, uint64_t size) const { putWithSignal(offset, offset, size); }
  PROXYCCL_DEVICE void putWithSignal(uint32_t dstMemory, uint64_t dstOffset, uint32_t srcMemory, uint64_t srcOffset,
                                     uint64_t size) const {
    push(PROXYCCL_OP_DATA | PROXYCCL_OP_SIGNAL, dstMemory, dstOffset, srcMemory, srcOffset, size);
  }

  PROXYCCL_DEVICE bool putWithSignalAndFlush(uint64_t dstOffset, uint64_t srcOffset, uint64_t size) const {
    return waitFlushed(push(PROXYCCL_OP_DATA | PROXYCCL_OP_SIGNAL | PROXYCCL_OP_FLUSH, dst_memory, dstOffset,
                            src_memory, srcOffset, size));
  }
  PROXYCCL_DEVICE bool putWithSignalAndFlush(uint64_t offset, uint64_t size) const {
    return putWithSignalAndFlush(offset, offset, size);
  }

  // Waits until all that was pushed on this channel before is complete; other channels' work is not waited for.
  PROXYCCL_DEVICE bool flush() const { return waitFlushed(push(PROXYCCL_OP_FLUSH, 0, 0, 0, 0, 0)); }

  // For the channel of a Python handler: three numbers of the user's own (of 32 bits each), as the trigger's size and
  // destination and source offset. Returns the ticket, for Fifo::sync.
  PROXYCCL_DEVICE uint64_t custom(uint32_t size, uint32_t dstOffset = 0, uint32_t srcOffset = 0) const {
    return Fifo{fifo}.push(makeTrigger(PROXYCCL_OP_CUSTOM, channel, 0, dstOffset, 0, srcOffset, size), control);
  }

  // Waits for, and consumes, the next signal from the peer.
  PROXYCCL_DEVICE bool wait() const {
    return semaphoreHandle().wait(control, PROXYCCL_WAIT_PROXY_SIGNAL, peer, channel);
  }
  PROXYCCL_DEVICE bool poll() const { return semaphoreHandle().poll(); }

 private:
  PROXYCCL_DEVICE Semaphore semaphoreHandle() const { return {semaphore}; }

  // Whether the range lies in the memory, as far as the engine can't tell: an offset past the first window goes to the
  // ids that follow, and behind the last window those are another memory's. Only then is the word in host memory read.
  PROXYCCL_DEVICE bool reaches(uint32_t memory, uint64_t offset, uint64_t size) const {
    if (memory >= PROXYCCL_MAX_MEMORIES) return false;
    if (offset < PROXYCCL_WINDOW_BYTES && size <= PROXYCCL_WINDOW_BYTES - offset) return true;
    if (extents == nullptr) return true;
    const uint64_t bytes = loadRelaxedSystem(&extents[memory]);
    return offset <= bytes && size <= bytes - offset;
  }

  // Pushes an operation, in several triggers if it is longer than one can say. Returns the last one's ticket.
  PROXYCCL_DEVICE uint64_t push(uint32_t op, uint32_t dstMemory, uint64_t dstOffset, uint32_t srcMemory,
                                uint64_t srcOffset, uint64_t size) const {
    if ((op & PROXYCCL_OP_DATA) && !(reaches(dstMemory, dstOffset, size) && reaches(srcMemory, srcOffset, size))) {
      reportError(control, PROXYCCL_ERROR_BAD_TRIGGER, {PROXYCCL_WAIT_NONE, peer, channel, 0}, 0,
                  {op, reaches(dstMemory, dstOffset, size) ? srcOffset : dstOffset, size});
      return kNoTicket;
    }
    const Fifo ring{fifo};
    while (size > PROXYCCL_MAX_TRIGGER_BYTES) {
      if (ring.push(makeTrigger(PROXYCCL_OP_DATA, channel, dstMemory, dstOffset, srcMemory, srcOffset,
                                PROXYCCL_MAX_TRIGGER_BYTES),
                    control) == kNoTicket)
        return kNoTicket;
      dstOffset += PROXYCCL_MAX_TRIGGER_BYTES;
      srcOffset += PROXYCCL_MAX_TRIGGER_BYTES;
      size -= PROXYCCL_MAX_TRIGGER_BYTES;
    }
    return ring.push(makeTrigger(op, channel, dstMemory, dstOffset, srcMemory, srcOffset, size), control);
  }

  // The flushed word holds a ticket, not a count: two threads that flush the same channel may push in either order,
  // and the later ticket's completion implies the earlier's. Pairs with the transport's write behind the channel's
  // data.
  PROXYCCL_DEVICE bool waitFlushed(uint64_t ticket) const {
    if (ticket == kNoTicket) return false;
    const WaitFor what = {PROXYCCL_WAIT_FLUSH, peer, channel, ticket + 1};
    return waitUntil(control, what, [&](uint64_t* seen) { return (*seen = loadAcquireSystem(flushed)) > ticket; });
  }
};

}  // namespace proxyccl

#endif
