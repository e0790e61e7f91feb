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
//
// Flags are 32 bits, and a slot may stay unused for long. Before a flag can come round again, the packets of its parity
// are cleared: at the end of an epoch, when this rank has read all of it and no peer can have sent its next but one.
class PacketLanes {
 public:
  PROXYCCL_DEVICE PacketLanes(ProxycclTeam* team, uint32_t slots)
      : team_(team),
        capacity_(team->packet_bytes / slots / sizeof(LL16Packet)),
        first_epoch_(team->epoch),
        epoch_(team->epoch),
        cleared_{team->cleared[0], team->cleared[1]} {}

  // Packets to exchange in each epoch to move `packets` in all. Every epoch of a kernel exchanges as many, the last one
  // padded: so each thread has packets of its own in every epoch, and one that has received its packets of an epoch
  // knows that its counterparts have read theirs of the epoch before.
  PROXYCCL_DEVICE uint64_t packetsPerEpoch(uint64_t packets) const {
    const uint64_t epochs = (packets + capacity_ - 1) / capacity_;
    return (packets + epochs - 1) / epochs;
  }
  // Epochs count from 0 without a gap; flag 0 is what fresh memory holds, so the flag is one more, and skips 0 when it
  // wraps.
  PROXYCCL_DEVICE uint32_t flag() const { return epoch_ == ~0u ? 1u << 31 : epoch_ + 1; }
  PROXYCCL_DEVICE LL16Packet* local(uint32_t slot) const { return at(team_->scratch, slot); }
  PROXYCCL_DEVICE LL16Packet* remote(uint32_t peer, uint32_t slot) const {
    return at(team_->links[blockIdx.x * team_->world_size + peer].remote, slot);
  }
  // Plain local memory for one value a packet. Not among the packets: stray data there could pass for a flag.
  PROXYCCL_DEVICE char* accumulators() const { return team_->scratch + 2 * team_->packet_bytes; }

  // By all threads of the grid, when they have read this epoch's packets.
  PROXYCCL_DEVICE void nextEpoch() {
    if (epoch_ - cleared_[epoch_ & 1] >= kClearInterval) clear();
    ++epoch_;
  }

  PROXYCCL_DEVICE void finish() {
    if (!finishKernel(team_, 0, epoch_ - first_epoch_)) return;
    team_->cleared[0] = cleared_[0];
    team_->cleared[1] = cleared_[1];
  }

 private:
  static constexpr uint32_t kClearInterval = 1u << 30;

  PROXYCCL_DEVICE LL16Packet* at(char* scratch, uint32_t slot) const {
    return reinterpret_cast<LL16Packet*>(scratch + (epoch_ & 1) * team_->packet_bytes) + slot * capacity_;
  }

  PROXYCCL_DEVICE void clear() {
    auto* grid = reinterpret_cast<DeviceSyncer*>(&team_->grid_arrived);
    LL16Packet* packets = at(team_->scratch, 0);
    grid->sync(gridDim.x, team_->control);
    forEach(team_->packet_bytes / sizeof(LL16Packet), blockIdx.x * blockDim.x + threadIdx.x, gridDim.x * blockDim.x,
            [&](uint64_t p) { packets[p].write({0, 0}, 0); });
    grid->sync(gridDim.x, team_->control);
    cleared_[epoch_ & 1] = epoch_;
  }

  ProxycclTeam* team_;
  uint64_t capacity_;
  uint32_t first_epoch_, epoch_;
  uint32_t cleared_[2];
};

}  // namespace proxyccl

#endif
