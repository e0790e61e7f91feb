// send_receive makes transfers of any sizes between pairs of ranks in one launch. A rank waits only for the ranks with
// which it exchanges data.
//
// Each block works on one lane of one transfer. The sender writes a piece into a slot of the receiver's scratch memory
// and signals. The receiver copies the piece out of the slot and signals back; this signal is a credit. The sender
// waits for a credit before each piece except a flow's first pieces, one for each slot. So a slot is overwritten only
// after it was read, and the staging slot of a proxy's put only after the put is complete.
#pragma once

#include "exchange.h"
#include "flows.h"
#include "instance.h"

namespace proxyccl {

// This rank's endpoint of one lane of a flow. All threads of a block call its methods.
class FlowEnd {
 public:
  PROXYCCL_DEVICE FlowEnd(const ProxycclFlows& flows, const ProxycclTransfer& transfer, uint32_t lane, bool sends)
      : flows_(flows), transfer_(transfer) {
    const bool upwards = sends == (flows.rank < transfer.peer);
    const uint64_t end = (2ull * lane + (upwards ? 0 : 1)) * flows.world_size + transfer.peer;
    link_ = &flows.links[end];
    pieces_ = &flows.pieces[end];
    piece_ = *pieces_;
    // The receiver's slots are numbered by their sender, the staging slots by their receiver.
    incoming_ = (static_cast<uint64_t>(lane) * flows.world_size + transfer.peer) * flows.slots;
    outgoing_ = (static_cast<uint64_t>(lane) * flows.world_size + flows.rank) * flows.slots;
    __syncthreads();  // after this barrier, all threads have read piece_, which finish() changes
  }

  PROXYCCL_DEVICE void send(const char* src, uint64_t bytes) {
    while (bytes > 0) {
      const uint64_t size = minimum(bytes, capacity());
      const uint64_t slot = piece_ % flows_.slots * flows_.slot_bytes;
      const uint64_t remote = outgoing_ * flows_.slot_bytes + slot;
      const uint64_t staged = flows_.staging_offset + incoming_ * flows_.slot_bytes + slot;
      if (piece_ >= flows_.slots) await();
      char* const target = link_->proxied ? flows_.scratch + staged : link_->remote + remote;
      if (threadIdx.x == 0) *reinterpret_cast<uint64_t*>(target) = transfer_.bytes;
      copyBytes(target + PROXYCCL_FLOW_HEADER_BYTES, src, size, threadIdx.x, blockDim.x);
      syncThreadsSystem();
      if (threadIdx.x == 0) {
        if (link_->proxied)
          postThroughProxy(&link_->proxy, remote, staged, PROXYCCL_FLOW_HEADER_BYTES + size);
        else
          Semaphore{link_->semaphore}.signal();
      }
      src += size;
      bytes -= size;
      ++piece_;
    }
    finish();
  }

  PROXYCCL_DEVICE void receive(char* dst, uint64_t bytes) {
    while (bytes > 0) {
      const uint64_t size = minimum(bytes, capacity());
      const char* const slot = flows_.scratch + (incoming_ + piece_ % flows_.slots) * flows_.slot_bytes;
      await();
      if (threadIdx.x == 0) check(*reinterpret_cast<const uint64_t*>(slot));
      copyBytes(dst, slot + PROXYCCL_FLOW_HEADER_BYTES, size, threadIdx.x, blockDim.x);
      syncThreadsSystem();
      if (threadIdx.x == 0) {
        if (link_->proxied)
          postThroughProxy(&link_->proxy, 0, 0, 0);
        else
          Semaphore{link_->semaphore}.signal();
      }
      dst += size;
      bytes -= size;
      ++piece_;
    }
    finish();
  }

 private:
  PROXYCCL_DEVICE uint64_t capacity() const { return flows_.slot_bytes - PROXYCCL_FLOW_HEADER_BYTES; }

  PROXYCCL_DEVICE void await() const {
    if (threadIdx.x == 0) {
      if (link_->proxied)
        awaitThroughProxy(&link_->proxy);
      else
        Semaphore{link_->semaphore}.wait(flows_.control, PROXYCCL_WAIT_SM_SIGNAL, link_->peer, PROXYCCL_NO_CHANNEL);
    }
    __syncthreads();
  }

  // Records an error if the sender's transfer has another size than the receiver's. After an abort no error is
  // recorded, because the slot may hold the size of an older transfer.
  PROXYCCL_DEVICE void check(uint64_t sent) const {
    if (sent == transfer_.bytes || aborted(flows_.control)) return;
    const WaitFor what = {PROXYCCL_WAIT_NONE, link_->peer, PROXYCCL_NO_CHANNEL, transfer_.bytes};
    recordError(flows_.control, PROXYCCL_ERROR_TRANSFER_SIZE, what, sent);
  }

  PROXYCCL_DEVICE void finish() const {
    if (threadIdx.x == 0) *pieces_ = piece_;
  }

  const ProxycclFlows& flows_;
  const ProxycclTransfer& transfer_;
  const ProxycclLink* link_;
  uint64_t* pieces_;
  uint64_t piece_;
  uint64_t incoming_, outgoing_;
};

}  // namespace proxyccl

PROXYCCL_TEAM_KERNEL send_receive(const ProxycclFlows flows) {
  using namespace proxyccl;
  uint32_t lane = blockIdx.x, number = 0;
  for (; lane >= flows.transfers[number].lanes; ++number) lane -= flows.transfers[number].lanes;
  const ProxycclTransfer& transfer = flows.transfers[number];
  const uint64_t offset = minimum(lane * transfer.lane_bytes, transfer.bytes);
  const uint64_t bytes = minimum(transfer.lane_bytes, transfer.bytes - offset);
  if (transfer.peer == flows.rank)
    copyBytes(transfer.dst + offset, transfer.src + offset, bytes, threadIdx.x, blockDim.x);
  else if (transfer.src != nullptr)
    FlowEnd(flows, transfer, lane, true).send(transfer.src + offset, bytes);
  else
    FlowEnd(flows, transfer, lane, false).receive(transfer.dst + offset, bytes);
}

PROXYCCL_EXPORT_KERNEL(send_receive)
