// send_receive makes transfers of any sizes between pairs of ranks in one launch. A rank waits only for the ranks with
// which it exchanges data.
//
// Each block works on one lane of one transfer. The sender writes a piece into a slot of the receiver's scratch memory.
// The receiver copies the piece out of the slot and signals back; this signal is a credit. The sender waits for a
// credit before each piece except a flow's first pieces, one for each slot. So a slot is overwritten only after it was
// read, and the staging slot of a proxy's put only after the put is complete.
//
// A slot begins with a word that holds the number of its piece and the size of the whole transfer. If a lane's data fit
// in the slot's lines (lines.h), the sender writes the word before the lines, whose flags signal their arrival.
// Otherwise the word is written after the data, as the release that shows the data's arrival.
#pragma once

#include "exchange.h"
#include "flows.h"
#include "instance.h"
#include "lines.h"

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
      const uint64_t remote = slotOffset(outgoing_);
      const uint64_t staged = flows_.staging_offset + slotOffset(incoming_);
      if (piece_ >= flows_.slots) awaitCredit();
      char* const slot = link_->proxied ? flows_.scratch + staged : link_->remote + remote;
      uint64_t* const word = reinterpret_cast<uint64_t*>(slot);
      if (inLines()) {
        if (threadIdx.x == 0) storeRelaxedSystem(word, wordOfPiece());
        sendLines(linesOf(slot), src, size);
      } else {
        copyBytes(slot + flows_.data_offset, src, size, threadIdx.x, blockDim.x);
        if (threadIdx.x == 0 && link_->proxied) *word = wordOfPiece();
        syncThreadsSystem();
        if (threadIdx.x == 0) {
          if (link_->proxied)
            postThroughProxy(&link_->proxy, remote, staged, flows_.data_offset + size);
          else
            storeReleaseSystem(word, wordOfPiece());
        }
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
      char* const slot = flows_.scratch + slotOffset(incoming_);
      if (threadIdx.x == 0) awaitWord(reinterpret_cast<const uint64_t*>(slot));
      if (inLines()) {
        receiveLines(linesOf(slot), dst, size);
      } else {
        __syncthreads();
        copyBytes(dst, slot + flows_.data_offset, size, threadIdx.x, blockDim.x);
      }
      __syncthreads();
      if (threadIdx.x == 0) {
        if (link_->proxied)
          postThroughProxy(&link_->proxy, 0, 0, 0);
        else
          Semaphore{link_->semaphore}.signalLoads();
      }
      dst += size;
      bytes -= size;
      ++piece_;
    }
    finish();
  }

 private:
  static constexpr uint32_t kNumberBits = 16;
  static constexpr uint64_t kNumberMask = (1u << kNumberBits) - 1;

  PROXYCCL_DEVICE bool inLines() const { return transfer_.lane_bytes <= flows_.line_bytes; }
  PROXYCCL_DEVICE uint64_t capacity() const { return flows_.slot_bytes - flows_.data_offset; }
  PROXYCCL_DEVICE uint64_t slotOffset(uint64_t first) const {
    return (first + piece_ % flows_.slots) * flows_.slot_bytes;
  }
  static PROXYCCL_DEVICE LL16Packet* linesOf(char* slot) {
    return reinterpret_cast<LL16Packet*>(slot + PROXYCCL_FLOW_HEADER_BYTES);
  }

  // Returns the word at the beginning of the piece's slot. Only the low bits of the piece's number fit, but the slot's
  // previous word has the number of the slot's previous piece, or is 0.
  PROXYCCL_DEVICE uint64_t wordOfPiece() const { return transfer_.bytes << kNumberBits | ((piece_ + 1) & kNumberMask); }

  PROXYCCL_DEVICE void sendLines(LL16Packet* lines, const char* src, uint64_t bytes) const {
    const uint64_t units = divideUp(bytes, sizeof(Bytes16));
    LineForm::forEach(LineForm::packetsOf(units), [&](uint64_t p) {
      LineForm::write(lines, p, LineForm::load(src, bytes, units, 0, p), piece_ + 1);
    });
  }
  PROXYCCL_DEVICE void receiveLines(const LL16Packet* lines, char* dst, uint64_t bytes) const {
    const uint64_t units = divideUp(bytes, sizeof(Bytes16));
    LineForm::forEach(LineForm::packetsOf(units), [&](uint64_t p) {
      LineForm::store(dst, bytes, units, 0, p,
                      receivePacket<LineForm>(flows_.control, link_->peer, lines, p, piece_ + 1));
    });
  }

  PROXYCCL_DEVICE void awaitCredit() const {
    if (threadIdx.x == 0) {
      if (link_->proxied)
        awaitThroughProxy(&link_->proxy);
      else
        Semaphore{link_->semaphore}.wait(flows_.control, PROXYCCL_WAIT_SM_SIGNAL, link_->peer, PROXYCCL_NO_CHANNEL);
    }
    __syncthreads();
  }

  // Waits for the piece's word, and records an error if the sender's transfer has another size than the receiver's.
  // After an abort no error is recorded, because the slot may hold the size of an older transfer.
  PROXYCCL_DEVICE void awaitWord(const uint64_t* word) const {
    if (link_->proxied) awaitThroughProxy(&link_->proxy);
    uint64_t found = 0;
    const uint64_t number = (piece_ + 1) & kNumberMask;
    waitUntil(flows_.control, {PROXYCCL_WAIT_SM_SIGNAL, link_->peer, PROXYCCL_NO_CHANNEL, number}, [&](uint64_t* seen) {
      found = loadAcquireSystem(word);
      return (*seen = found & kNumberMask) == number;
    });
    const uint64_t sent = found >> kNumberBits;
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
