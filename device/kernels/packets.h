// The packet half of the scratch memory, and values as packet payloads.
#ifndef PROXYCCL_PACKETS_H
#define PROXYCCL_PACKETS_H

#include "exchange.h"
#include "instance.h"

namespace proxyccl {

// As many values of T as one packet carries.
template <class T>
struct alignas(8) PayloadOf {
  static constexpr uint32_t kCount = sizeof(LL16Packet::Payload) / sizeof(T);
  T values[kCount];

  PROXYCCL_DEVICE LL16Packet::Payload pack() const { return __builtin_bit_cast(LL16Packet::Payload, *this); }
  static PROXYCCL_DEVICE PayloadOf unpack(LL16Packet::Payload payload) {
    return __builtin_bit_cast(PayloadOf, payload);
  }
};

// One epoch's packets, cut into `slots` slots that all blocks share. A slot is written by one rank in an epoch.
class PacketLanes {
 public:
  PROXYCCL_DEVICE PacketLanes(ProxycclTeam* team, uint32_t slots)
      : team_(team),
        capacity_(team->packet_bytes / slots / sizeof(LL16Packet)),
        first_epoch_(team->epoch),
        epoch_(team->epoch) {}

  PROXYCCL_DEVICE uint64_t capacity() const { return capacity_; }  // packets in a slot
  // Epochs count from 0 without a gap; flag 0 is what fresh memory holds, so the flag is one more, and skips 0 when
  // it wraps.
  PROXYCCL_DEVICE uint32_t flag() const { return epoch_ == ~0u ? 1u << 31 : epoch_ + 1; }
  PROXYCCL_DEVICE LL16Packet* local(uint32_t slot) const { return at(team_->scratch, slot); }
  PROXYCCL_DEVICE LL16Packet* remote(uint32_t peer, uint32_t slot) const {
    return at(team_->links[blockIdx.x * team_->world_size + peer].remote, slot);
  }
  // Plain local memory for one value a packet. Not among the packets: stray data there could pass for a flag.
  PROXYCCL_DEVICE char* accumulators() const { return team_->scratch + 2 * team_->packet_bytes; }
  PROXYCCL_DEVICE void nextEpoch() { ++epoch_; }
  PROXYCCL_DEVICE void finish() { finishKernel(team_, 0, epoch_ - first_epoch_); }

 private:
  PROXYCCL_DEVICE LL16Packet* at(char* scratch, uint32_t slot) const {
    return reinterpret_cast<LL16Packet*>(scratch + (epoch_ & 1) * team_->packet_bytes) + slot * capacity_;
  }

  ProxycclTeam* team_;
  uint64_t capacity_;
  uint32_t first_epoch_, epoch_;
};

}  // namespace proxyccl

#endif
