// Rounds in which every rank hands something to every other: the skeleton of the bandwidth-bound collectives.
//
// In a round a lane sends into a slot that it owns in each peer's scratch, signals every peer, waits for every
// peer's signal, and reads its own slots. Slots are double-buffered by the parity of the round, and nothing else
// guards them: a rank starts round r + 2 only after it has seen every peer's signal of round r + 1, which each peer
// sends only after it has read what came in round r. The same holds for the proxied source in the staging area, and
// from one kernel to the next whatever the grid of each: a peer that has started a kernel has ended the one before.
#ifndef PROXYCCL_EXCHANGE_H
#define PROXYCCL_EXCHANGE_H

#include "proxyccl/proxyccl.h"
#include "team.h"

namespace proxyccl {

PROXYCCL_DEVICE uint64_t minimum(uint64_t a, uint64_t b) { return a < b ? a : b; }
PROXYCCL_DEVICE uint64_t divideUp(uint64_t n, uint64_t by) { return (n + by - 1) / by; }

// Ends a kernel of the team: the last block to arrive advances the counter of rounds by what the kernel used.
PROXYCCL_DEVICE void finishKernel(ProxycclTeam* team, uint64_t rounds) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  if (fetchAddAcqRelDevice<uint32_t>(&team->blocks_done, 1) != gridDim.x - 1) return;
  storeRelaxedDevice<uint32_t>(&team->blocks_done, 0);
  storeRelaxedDevice<uint64_t>(&team->round, team->round + rounds);
}

// Kept out of line: one thread seldom does it, and what it needs of registers would be taken from all.
PROXYCCL_OUT_OF_LINE void postThroughProxy(const ProxycclProxyChannel* handle, uint64_t dst_offset, uint64_t src_offset,
                                           uint64_t bytes) {
  const ProxyChannelDeviceHandle channel{*handle};
  if (bytes == 0) return channel.signal();
  channel.putWithSignal(dst_offset, src_offset, bytes);
}
PROXYCCL_OUT_OF_LINE void awaitThroughProxy(const ProxycclProxyChannel* handle) {
  ProxyChannelDeviceHandle{*handle}.wait();
}

// This block's lane: its links, its share of each buffer, cut into `slots` slots, and the threads that work on it.
// Thread p of the lane's first block talks to rank p.
class Lane {
 public:
  PROXYCCL_DEVICE Lane(ProxycclTeam* team, uint32_t slots)
      : team_(team),
        together_(team->lanes == 1),
        number_(together_ ? 0 : blockIdx.x),
        slot_bytes_(team->exchange_bytes / (static_cast<uint64_t>(count()) * slots) & ~127ull),
        offset_(static_cast<uint64_t>(number_) * slots * slot_bytes_) {
    // Where each peer's slots begin, or those to stage what it gets: looked up for every piece, so kept close at hand.
    if (threadIdx.x < team->world_size) {
      const ProxycclLink& link = linkTo(threadIdx.x);
      outboxes().proxied[threadIdx.x] = link.proxied;
      outboxes().base[threadIdx.x] = (link.proxied ? team->scratch + team->staging_offset : link.remote) + offset_;
    }
    __syncthreads();
  }

  PROXYCCL_DEVICE uint32_t number() const { return number_; }
  PROXYCCL_DEVICE uint32_t count() const { return together_ ? 1 : gridDim.x; }
  PROXYCCL_DEVICE uint32_t thread() const { return together_ ? blockIdx.x * blockDim.x + threadIdx.x : threadIdx.x; }
  PROXYCCL_DEVICE uint32_t threads() const { return together_ ? gridDim.x * blockDim.x : blockDim.x; }
  PROXYCCL_DEVICE bool talksTo(uint32_t peer) const {
    return blockIdx.x == number_ && threadIdx.x == peer && peer < team_->world_size && peer != team_->rank;
  }

  // By all threads of the lane: what any of them wrote before, all of them see after.
  PROXYCCL_DEVICE void meet() const {
    if (together_) {
      reinterpret_cast<DeviceSyncer*>(team_->grid_barrier)->sync(gridDim.x, team_->control);
    } else {
      __syncthreads();
    }
  }
  // The same before a post(), which tells a peer of it.
  PROXYCCL_DEVICE void meetBeforePost() const {
    syncThreadsSystem();
    if (together_) meet();
  }

  PROXYCCL_DEVICE uint64_t slotBytes() const { return slot_bytes_; }
  PROXYCCL_DEVICE char* inbox(uint32_t buffer, uint32_t slot) const {
    return team_->scratch + slotOffset(buffer, slot);
  }

  // Where to write what `peer` shall find in its slot `remote_slot`; `local_slot` is unique to it among the lane's
  // sends.
  PROXYCCL_DEVICE char* outbox(uint32_t buffer, uint32_t peer, uint32_t remote_slot, uint32_t local_slot) const {
    const uint32_t slot = outboxes().proxied[peer] ? local_slot : remote_slot;
    return outboxes().base[peer] + buffer * team_->exchange_bytes + slot * slot_bytes_;
  }

  // By the thread that talks to `peer`, after meetBeforePost(): makes the outbox arrive, and says so.
  PROXYCCL_DEVICE void post(uint32_t buffer, uint32_t peer, uint32_t remote_slot, uint32_t local_slot,
                            uint64_t bytes) const {
    const ProxycclLink& link = linkTo(peer);
    if (!outboxes().proxied[peer]) return Semaphore{link.semaphore}.signal();
    postThroughProxy(&link.proxy, slotOffset(buffer, remote_slot),
                     team_->staging_offset + slotOffset(buffer, local_slot), bytes);
  }

  // By the thread that talks to `peer`: waits for its next post.
  PROXYCCL_DEVICE void await(uint32_t peer) const {
    const ProxycclLink& link = linkTo(peer);
    if (outboxes().proxied[peer]) {
      awaitThroughProxy(&link.proxy);
    } else {
      Semaphore{link.semaphore}.wait(team_->control, PROXYCCL_WAIT_SM_SIGNAL, link.peer, 0);
    }
  }

 private:
  struct Outboxes {
    char* base[PROXYCCL_MAX_BLOCK_THREADS];
    bool proxied[PROXYCCL_MAX_BLOCK_THREADS];
  };
  static PROXYCCL_DEVICE Outboxes& outboxes() {
    __shared__ Outboxes outboxes;
    return outboxes;
  }

  PROXYCCL_DEVICE const ProxycclLink& linkTo(uint32_t peer) const {
    return team_->links[static_cast<uint64_t>(number_) * team_->world_size + peer];
  }
  PROXYCCL_DEVICE uint64_t slotOffset(uint32_t buffer, uint32_t slot) const {
    return buffer * team_->exchange_bytes + offset_ + slot * slot_bytes_;
  }

  ProxycclTeam* team_;
  bool together_;
  uint32_t number_;
  uint64_t slot_bytes_;
  uint64_t offset_;
};

// All-pairs rounds.
class Exchange {
 public:
  PROXYCCL_DEVICE explicit Exchange(ProxycclTeam* team)
      : team_(team), lane_(team, team->world_size), first_round_(team->round), round_(team->round), outgoing_(0) {}

  PROXYCCL_DEVICE const Lane& lane() const { return lane_; }
  PROXYCCL_DEVICE uint64_t slotBytes() const { return lane_.slotBytes(); }

  // By all threads of the lane: `bytes` (at most slotBytes()) for `peer`.
  PROXYCCL_DEVICE void send(uint32_t peer, const void* src, uint64_t bytes) {
    copy(outbox(peer), src, bytes);
    announce(peer, bytes);
  }
  PROXYCCL_DEVICE void copy(void* dst, const void* src, uint64_t bytes) const {
    copyBytes(dst, src, bytes, lane_.thread(), lane_.threads());
  }

  // The two halves of send(), for data that is not in one piece: where to write it, and how much there was.
  PROXYCCL_DEVICE char* outbox(uint32_t peer) const { return lane_.outbox(buffer(round_), peer, team_->rank, peer); }
  PROXYCCL_DEVICE void announce(uint32_t peer, uint64_t bytes) {
    if (threadIdx.x == peer) outgoing_ = bytes;
  }

  // By all threads: announces what was sent and waits until inbox() holds what every peer sent.
  PROXYCCL_DEVICE void swap() {
    lane_.meetBeforePost();
    const uint32_t peer = threadIdx.x;
    if (lane_.talksTo(peer)) {
      lane_.post(buffer(round_), peer, team_->rank, peer, outgoing_);
      lane_.await(peer);
    }
    outgoing_ = 0;
    ++round_;
    lane_.meet();
  }

  PROXYCCL_DEVICE const char* inbox(uint32_t peer) const { return lane_.inbox(buffer(round_ - 1), peer); }

  // Calls piece(offset, length) for this lane's share of [0, total) elements of `size` bytes, as few times as slots
  // allow; every lane makes as many calls, and has as much to do but for the rounding to cache lines.
  template <class Piece>
  PROXYCCL_DEVICE void forEachPiece(uint64_t total, uint64_t size, Piece piece) const {
    if (total == 0) return;
    const uint64_t lanes = lane_.count(), line = 128 / size;
    const uint64_t rounds = divideUp(total, lanes * (slotBytes() / size));
    const uint64_t length = divideUp(total, rounds * lanes * line) * line;
    for (uint64_t start = 0; start < total; start += length * lanes) {
      const uint64_t offset = minimum(start + lane_.number() * length, total);
      piece(offset, minimum(length, total - offset));
    }
  }

  PROXYCCL_DEVICE void finish() const { finishKernel(team_, round_ - first_round_); }

 private:
  static PROXYCCL_DEVICE uint32_t buffer(uint64_t round) { return round % PROXYCCL_ROUND_BUFFERS; }

  ProxycclTeam* team_;
  Lane lane_;
  uint64_t first_round_, round_;
  uint64_t outgoing_;
};

// Every rank's `bytes` bytes at out + rank * bytes, on every rank; `in` may be this rank's place there.
PROXYCCL_DEVICE void gatherBytes(Exchange& exchange, ProxycclTeam* team, const char* in, char* out, uint64_t bytes) {
  const uint32_t rank = team->rank, ranks = team->world_size;
  exchange.forEachPiece(bytes, 1, [&](uint64_t offset, uint64_t size) {
    for (uint32_t i = 1; i < ranks; ++i) exchange.send((rank + i) % ranks, in + offset, size);
    char* own = out + rank * bytes + offset;
    if (own != in + offset) exchange.copy(own, in + offset, size);
    exchange.swap();
    for (uint32_t i = 1; i < ranks; ++i) {
      const uint32_t peer = (rank + i) % ranks;
      exchange.copy(out + peer * bytes + offset, exchange.inbox(peer), size);
    }
  });
}

}  // namespace proxyccl

#endif
