// Exchanges the addresses of the ranks' output arrays, in a team whose members map each other's memory. Each rank sends
// every peer the address at which that peer maps the rank's output, or sends null to all peers. A rank that sends
// addresses may also offer its input, which has the same address as its output (in-place calls). So all ranks know
// whether all outputs are mapped and all inputs offered, and choose the same algorithm.
//
// Blocks with the same number send each other the addresses in packets, which need no signal. There are two packets per
// peer, for even and odd epochs of a block: a packet of kernel n is reused in kernel n + 2, which a rank starts only
// when all blocks of all ranks have ended kernel n.
#pragma once

#include "proxyccl/proxyccl.h"
#include "team.h"

namespace proxyccl {

class Outputs {
 public:
  PROXYCCL_DEVICE explicit Outputs(const ProxycclTeam& team)
      : team_(team), peer_(threadIdx.x), flag_(peer_ < team.world_size ? team.epochs[blockIdx.x] + 1 : 0) {}

  // Returns whether all peers map this rank's output.
  PROXYCCL_DEVICE bool ownIsReached() const { return team_.reached_at[team_.rank] != nullptr; }

  // Called by all threads: sends every peer the address of this rank's output, and whether this rank offers its input.
  PROXYCCL_DEVICE void tell(bool offers = false) const {
    if (!handlesPeer()) return;
    const uint64_t address = reinterpret_cast<uint64_t>(team_.reached_at[peer_]) | (offers ? kOffered : 0);
    packet(team_.remote[peer_], team_.rank)
        ->write({static_cast<uint32_t>(address), static_cast<uint32_t>(address >> 32)}, flag_);
  }

  // Called by all threads: waits for every peer's address, and returns whether all outputs are mapped.
  PROXYCCL_DEVICE bool learn() const {
    if (peer_ < team_.world_size) outputs()[peer_] = handlesPeer() ? told() : own();
    endEpoch();
    for (uint32_t rank = 0; rank < team_.world_size; ++rank)
      if (outputs()[rank] == 0) return false;
    return true;
  }
  // Called instead of learn() if this rank's output is not mapped, because learn() then returns false on all ranks.
  PROXYCCL_DEVICE void ignore() const { endEpoch(); }

  // Returns the address of a rank's output. Called only after learn().
  PROXYCCL_DEVICE char* of(uint32_t rank) const { return reinterpret_cast<char*>(outputs()[rank] & ~kOffered); }
  // Returns whether all other ranks offer their inputs. Called only after learn().
  PROXYCCL_DEVICE bool peersOffer() const {
    for (uint32_t rank = 0; rank < team_.world_size; ++rank)
      if (rank != team_.rank && (outputs()[rank] & kOffered) == 0) return false;
    return true;
  }
  // Returns whether this thread handles a peer that offers its input. Called only after learn().
  PROXYCCL_DEVICE bool handlesOffer() const { return handlesPeer() && (outputs()[peer_] & kOffered) != 0; }

 private:
  static constexpr uint64_t kOffered = 1ull << 63;  // this bit is 0 in all addresses

  static PROXYCCL_DEVICE uint64_t* outputs() {
    __shared__ uint64_t outputs[PROXYCCL_MAX_MAPPED_RANKS];
    return outputs;
  }
  PROXYCCL_DEVICE bool handlesPeer() const { return peer_ < team_.world_size && peer_ != team_.rank; }
  PROXYCCL_DEVICE uint64_t own() const { return reinterpret_cast<uint64_t>(team_.reached_at[team_.rank]); }

  // Ends the epoch. Called by all threads after they have read the block's epoch.
  PROXYCCL_DEVICE void endEpoch() const {
    __syncthreads();
    if (threadIdx.x == 0) team_.epochs[blockIdx.x] = flag_;
  }

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
  uint32_t peer_;  // the peer that this thread handles
  uint32_t flag_;
};

}  // namespace proxyccl
