// The addresses of the peers' output arrays, for a team whose members are all mapped. Each rank tells every peer the
// address at which that peer reaches its output, or tells all of them null. If it tells an address, it may also offer
// its input, which lies at the same address. So all ranks know whether every output is reached and every input offered,
// and they choose the same algorithm.
//
// Blocks with the same number tell each other in packets, which need no post. There are two packets per peer, chosen by
// the parity of a block's epoch: a rank reuses a packet two kernels later, and starts that kernel when all blocks have
// ended this one.
#pragma once

#include "proxyccl/proxyccl.h"
#include "team.h"

namespace proxyccl {

class Outputs {
 public:
  PROXYCCL_DEVICE explicit Outputs(const ProxycclTeam& team)
      : team_(team), peer_(threadIdx.x), flag_(peer_ < team.world_size ? team.epochs[blockIdx.x] + 1 : 0) {}

  // Whether all peers reach this rank's output.
  PROXYCCL_DEVICE bool ownIsReached() const { return team_.reached_at[team_.rank] != nullptr; }

  // Called by all threads: tells every peer this rank's output, and whether this rank offers its input.
  PROXYCCL_DEVICE void tell(bool offers = false) const {
    if (!handlesPeer()) return;
    const uint64_t address = reinterpret_cast<uint64_t>(team_.reached_at[peer_]) | (offers ? kOffered : 0);
    packet(team_.remote[peer_], team_.rank)
        ->write({static_cast<uint32_t>(address), static_cast<uint32_t>(address >> 32)}, flag_);
  }

  // Called by all threads: waits for every peer's message, and returns whether every output is reached.
  PROXYCCL_DEVICE bool learn() const {
    if (peer_ < team_.world_size) outputs()[peer_] = handlesPeer() ? told() : own();
    endEpoch();
    for (uint32_t rank = 0; rank < team_.world_size; ++rank)
      if (outputs()[rank] == 0) return false;
    return true;
  }
  // Called instead of learn() if this rank's output is not reached: learn() would then return false on all ranks.
  PROXYCCL_DEVICE void ignore() const { endEpoch(); }

  // To be called after learn(): returns a rank's output.
  PROXYCCL_DEVICE char* of(uint32_t rank) const { return reinterpret_cast<char*>(outputs()[rank] & ~kOffered); }
  // To be called after learn(): whether every other rank offers its input.
  PROXYCCL_DEVICE bool peersOffer() const {
    for (uint32_t rank = 0; rank < team_.world_size; ++rank)
      if (rank != team_.rank && (outputs()[rank] & kOffered) == 0) return false;
    return true;
  }
  // To be called after learn(): whether this thread handles a peer that offers its input.
  PROXYCCL_DEVICE bool handlesOffer() const { return handlesPeer() && (outputs()[peer_] & kOffered) != 0; }

 private:
  static constexpr uint64_t kOffered = 1ull << 63;  // a bit that no address has

  static PROXYCCL_DEVICE uint64_t* outputs() {
    __shared__ uint64_t outputs[PROXYCCL_MAX_MAPPED_RANKS];
    return outputs;
  }
  PROXYCCL_DEVICE bool handlesPeer() const { return peer_ < team_.world_size && peer_ != team_.rank; }
  PROXYCCL_DEVICE uint64_t own() const { return reinterpret_cast<uint64_t>(team_.reached_at[team_.rank]); }

  // Ends the epoch. Called by all threads, after they have read the block's epoch.
  PROXYCCL_DEVICE void endEpoch() const {
    __syncthreads();
    if (threadIdx.x == 0) team_.epochs[blockIdx.x] = flag_;
  }

  // Returns the packet from rank `from` in a rank's scratch memory.
  PROXYCCL_DEVICE LLPacket* packet(char* scratch, uint32_t from) const {
    const uint64_t row = static_cast<uint64_t>(flag_ % 2) * team_.lanes + blockIdx.x;
    return reinterpret_cast<LLPacket*>(scratch + team_.outputs_offset) + row * team_.world_size + from;
  }
  PROXYCCL_DEVICE uint64_t told() const {
    const LLPacket::Payload told =
        readPacket(packet(team_.scratch, peer_), flag_, team_.control, peer_, PROXYCCL_NO_CHANNEL);
    return static_cast<uint64_t>(told.y) << 32 | told.x;
  }

  const ProxycclTeam& team_;
  uint32_t peer_;  // the number of the peer that this thread handles
  uint32_t flag_;
};

}  // namespace proxyccl
