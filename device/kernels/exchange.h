// Rounds in which every rank hands something to every other: the skeleton of the bandwidth-bound collectives.
//
// In a round a block sends into a slot that it owns in each peer's scratch, signals every peer, waits for every
// peer's signal, and reads its own slots. Slots are double-buffered by the parity of the round, and nothing else
// guards them: a rank starts round r + 2 only after it has seen every peer's signal of round r + 1, which each peer
// sends only after it has read what came in round r. The same holds for the proxied source in the staging area, and from
// one kernel to the next whatever the grid of each: a peer that has started a kernel has ended the one before.
#ifndef PROXYCCL_EXCHANGE_H
#define PROXYCCL_EXCHANGE_H

#include "proxyccl/proxyccl.h"
#include "team.h"

namespace proxyccl {

PROXYCCL_DEVICE uint64_t minimum(uint64_t a, uint64_t b) { return a < b ? a : b; }

// Ends a kernel of the team: the last block to arrive advances the counter of rounds by what the kernel used.
PROXYCCL_DEVICE void finishKernel(ProxycclTeam* team, uint64_t rounds) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  if (fetchAddAcqRelDevice<uint32_t>(&team->blocks_done, 1) != gridDim.x - 1) return;
  storeRelaxedDevice<uint32_t>(&team->blocks_done, 0);
  storeRelaxedDevice<uint64_t>(&team->round, team->round + rounds);
}

// One block's links and its share of one parity's scratch, cut into `slots` slots.
class Lanes {
 public:
  PROXYCCL_DEVICE Lanes(ProxycclTeam* team, uint32_t slots)
      : team_(team),
        links_(team->links + static_cast<uint64_t>(blockIdx.x) * team->world_size),
        slots_(slots),
        slot_bytes_(team->exchange_bytes / (static_cast<uint64_t>(gridDim.x) * slots) & ~127ull) {}

  PROXYCCL_DEVICE uint64_t slotBytes() const { return slot_bytes_; }
  PROXYCCL_DEVICE char* inbox(uint64_t round, uint32_t slot) const {
    return team_->scratch + exchangeOffset(round, slot);
  }

  // Where to write what `peer` shall find in its slot `remote_slot`; `local_slot` is unique to it among this block's
  // sends.
  PROXYCCL_DEVICE char* outbox(uint64_t round, uint32_t peer, uint32_t remote_slot, uint32_t local_slot) const {
    const ProxycclLink& link = links_[peer];
    return link.proxied ? team_->scratch + stagingOffset(round, local_slot)
                        : link.remote + exchangeOffset(round, remote_slot);
  }

  // By one thread, after a syncThreadsSystem(): makes the outbox of `peer` arrive, and says so.
  PROXYCCL_DEVICE void post(uint64_t round, uint32_t peer, uint32_t remote_slot, uint32_t local_slot,
                            uint64_t bytes) const {
    const ProxycclLink& link = links_[peer];
    if (!link.proxied) return Semaphore{link.semaphore}.signal();
    const ProxyChannelDeviceHandle channel{link.proxy};
    if (bytes == 0) return channel.signal();
    channel.putWithSignal(exchangeOffset(round, remote_slot), stagingOffset(round, local_slot), bytes);
  }

  // By one thread: waits for the next post of `peer`.
  PROXYCCL_DEVICE void await(uint32_t peer) const {
    const ProxycclLink& link = links_[peer];
    if (link.proxied) {
      ProxyChannelDeviceHandle{link.proxy}.wait();
    } else {
      Semaphore{link.semaphore}.wait(team_->control, PROXYCCL_WAIT_SM_SIGNAL, peer, 0);
    }
  }

 private:
  PROXYCCL_DEVICE uint64_t slotOffset(uint64_t round, uint32_t slot) const {
    return (round & 1) * team_->exchange_bytes + (static_cast<uint64_t>(blockIdx.x) * slots_ + slot) * slot_bytes_;
  }
  PROXYCCL_DEVICE uint64_t exchangeOffset(uint64_t round, uint32_t slot) const {
    return slotOffset(round, slot);
  }
  PROXYCCL_DEVICE uint64_t stagingOffset(uint64_t round, uint32_t slot) const {
    return team_->staging_offset + slotOffset(round, slot);
  }

  ProxycclTeam* team_;
  const ProxycclLink* links_;
  uint32_t slots_;
  uint64_t slot_bytes_;
};

// All-pairs rounds. Needs at least world_size threads in a block: thread p talks to rank p.
class Exchange {
 public:
  PROXYCCL_DEVICE explicit Exchange(ProxycclTeam* team)
      : team_(team), lanes_(team, team->world_size), first_round_(team->round), round_(team->round), outgoing_(0) {}

  PROXYCCL_DEVICE uint64_t slotBytes() const { return lanes_.slotBytes(); }

  // By all threads of the block: `bytes` (at most slotBytes()) for `peer`.
  PROXYCCL_DEVICE void send(uint32_t peer, const void* src, uint64_t bytes) {
    copyBytes(outbox(peer), src, bytes, threadIdx.x, blockDim.x);
    announce(peer, bytes);
  }

  // The two halves of send(), for data that is not in one piece: where to write it, and how much there was.
  PROXYCCL_DEVICE char* outbox(uint32_t peer) const { return lanes_.outbox(round_, peer, team_->rank, peer); }
  PROXYCCL_DEVICE void announce(uint32_t peer, uint64_t bytes) {
    if (threadIdx.x == peer) outgoing_ = bytes;
  }

  // By all threads: announces what was sent and waits until inbox() holds what every peer sent.
  PROXYCCL_DEVICE void swap() {
    syncThreadsSystem();
    const uint32_t peer = threadIdx.x;
    if (peer < team_->world_size && peer != team_->rank) {
      lanes_.post(round_, peer, team_->rank, peer, outgoing_);
      lanes_.await(peer);
    }
    outgoing_ = 0;
    ++round_;
    __syncthreads();
  }

  PROXYCCL_DEVICE const char* inbox(uint32_t peer) const { return lanes_.inbox(round_ - 1, peer); }

  PROXYCCL_DEVICE void finish() { finishKernel(team_, round_ - first_round_); }

 private:
  ProxycclTeam* team_;
  Lanes lanes_;
  uint64_t first_round_, round_;
  uint64_t outgoing_;
};

// Calls piece(offset, length) for this block's share of [0, total), at most `longest` at a time; every block makes as
// many calls.
template <class Piece>
PROXYCCL_DEVICE void forEachPiece(uint64_t total, uint64_t longest, Piece piece) {
  const uint64_t stride = longest * gridDim.x;
  for (uint64_t start = 0; start < total; start += stride) {
    const uint64_t offset = minimum(start + blockIdx.x * longest, total);
    piece(offset, minimum(longest, total - offset));
  }
}

PROXYCCL_DEVICE void copyUnlessSame(char* dst, const char* src, uint64_t bytes) {
  if (dst != src) copyBytes(dst, src, bytes, threadIdx.x, blockDim.x);
}

// Every rank's `bytes` bytes at out + rank * bytes, on every rank; `in` may be this rank's place there.
PROXYCCL_DEVICE void gatherBytes(Exchange& exchange, ProxycclTeam* team, const char* in, char* out, uint64_t bytes) {
  const uint32_t rank = team->rank, ranks = team->world_size;
  forEachPiece(bytes, exchange.slotBytes(), [&](uint64_t offset, uint64_t size) {
    for (uint32_t i = 1; i < ranks; ++i) exchange.send((rank + i) % ranks, in + offset, size);
    copyUnlessSame(out + rank * bytes + offset, in + offset, size);
    exchange.swap();
    for (uint32_t i = 1; i < ranks; ++i) {
      const uint32_t peer = (rank + i) % ranks;
      copyBytes(out + peer * bytes + offset, exchange.inbox(peer), size, threadIdx.x, blockDim.x);
    }
  });
}

}  // namespace proxyccl

#endif
