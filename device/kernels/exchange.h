// Rounds in which every rank sends to every other rank. The bandwidth-bound collectives consist of such rounds.
//
// In a round a lane writes to its slot in each peer's scratch memory, signals every peer, waits for every peer's signal
// and reads the slots in its own scratch memory. A post is a signal, with or without data. Kernels that work in pieces
// use the same buffers as kernels that work in rounds (dataBuffer()).
//
// Slots are double-buffered by the parity of the round. No flag protects a slot, in scratch memory or in the staging
// area: a rank starts round r + 2 after it has received every peer's signal of round r + 1, which a peer sends after it
// has read its slots of round r. The next kernel may also reuse slots, whatever its grid, because a peer that has
// started a kernel has ended the previous kernel.
#pragma once

#include "integers.h"
#include "proxyccl/proxyccl.h"
#include "team.h"

namespace proxyccl {

// Ends a kernel of the team: the last block to call it adds the kernel's rounds to the team's counter of rounds.
PROXYCCL_DEVICE void finishKernel(const ProxycclTeam& team, uint64_t rounds) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  ProxycclTeamCounters& counters = *team.counters;
  if (gridDim.x > 1) {
    if (fetchAddAcqRelDevice<uint32_t>(&counters.blocks_done, 1) != gridDim.x - 1) return;
    storeRelaxedDevice<uint32_t>(&counters.blocks_done, 0);
  }
  storeRelaxedDevice<uint64_t>(&counters.round, counters.round + rounds);
}

// These functions are not inlined, because only one thread calls them, rarely, while inlining would take registers from
// all threads.
PROXYCCL_OUT_OF_LINE void postThroughProxy(const ProxycclProxyChannel* handle, uint64_t dst_offset, uint64_t src_offset,
                                           uint64_t bytes) {
  const ProxyChannelDeviceHandle channel{*handle};
  if (bytes == 0) return channel.signal();
  channel.putWithSignal(dst_offset, src_offset, bytes);
}
PROXYCCL_OUT_OF_LINE void awaitThroughProxy(const ProxycclProxyChannel* handle) {
  ProxyChannelDeviceHandle{*handle}.wait();
}

// Returns the number of lanes. A lane is a group of blocks that shares a link to each peer: if some peer is reached
// through the proxy, all blocks form one lane; otherwise each block is a separate lane.
PROXYCCL_DEVICE uint32_t lanesOf(const ProxycclTeam& team) { return team.lanes == 1 ? 1 : gridDim.x; }

// Returns the size of a slot if each lane has `slots` slots in a buffer for rounds.
PROXYCCL_DEVICE uint64_t roundSlotBytes(const ProxycclTeam& team, uint32_t slots) {
  return team.data_bytes / (static_cast<uint64_t>(lanesOf(team)) * slots) & ~127ull;
}

PROXYCCL_DEVICE uint64_t bufferOffset(const ProxycclTeam& team, uint32_t buffer) {
  const uint64_t data = minimum(buffer, PROXYCCL_PIPELINE_DEPTH);
  return data * team.data_bytes + (buffer - data) * team.result_bytes;
}

// Returns the number of the buffer in which peers store the data of piece k. `next` is the number of the round that
// would come next. The previous kernel may have worked in rounds, so a peer may still read its buffer of the last
// round. Every peer has read its buffer of the round before the last one, and all pieces of earlier kernels. So a
// peer's buffer for round `next` is free at once, and its buffer of the last round is free when the peer's data of
// piece 0 has arrived.
PROXYCCL_DEVICE uint32_t dataBuffer(uint64_t k, uint64_t next = 0) {
  const uint32_t i = static_cast<uint32_t>(k % PROXYCCL_PIPELINE_DEPTH);
  return i == 0 ? PROXYCCL_ROUND_BUFFERS : static_cast<uint32_t>(next + i - 1) % PROXYCCL_ROUND_BUFFERS;
}
PROXYCCL_DEVICE uint32_t resultBuffer(uint64_t k) {
  return PROXYCCL_PIPELINE_DEPTH + static_cast<uint32_t>(k % PROXYCCL_PIPELINE_DEPTH);
}

// This block's lane: its links, its `slots` slots of `slot_bytes` bytes in each buffer, and its threads. Thread p of
// the lane's first block handles rank p: it signals rank p and waits for the signals of rank p.
class Lane {
 public:
  PROXYCCL_DEVICE Lane(const ProxycclTeam& team, uint64_t slot_bytes, uint32_t slots)
      : team_(team),
        one_lane_(team.lanes == 1),
        number_(one_lane_ ? 0 : blockIdx.x),
        slot_bytes_(slot_bytes),
        offset_(static_cast<uint64_t>(number_) * slots * slot_bytes) {
    // For each peer, shared memory keeps the address of the lane's slots at that peer or, if the proxy sends, of the
    // local slots that stage the data, because every piece needs this address.
    const uint32_t peer = threadIdx.x;
    if (peer < team.world_size) {
      char* base = peer < PROXYCCL_MAX_MAPPED_RANKS ? team.remote[peer] : nullptr;
      bool proxied = false;
      if (base == nullptr) {
        const ProxycclLink& link = linkTo(peer);
        proxied = link.proxied;
        base = proxied ? team.proxied + team.staging_offset : link.remote;
      }
      outboxes().proxied[peer] = proxied;
      outboxes().base[peer] = base + offset_;
    }
    __syncthreads();
  }

  PROXYCCL_DEVICE uint32_t number() const { return number_; }
  PROXYCCL_DEVICE uint32_t count() const { return lanesOf(team_); }
  PROXYCCL_DEVICE uint32_t thread() const { return one_lane_ ? blockIdx.x * blockDim.x + threadIdx.x : threadIdx.x; }
  PROXYCCL_DEVICE uint32_t threads() const { return one_lane_ ? gridDim.x * blockDim.x : blockDim.x; }
  PROXYCCL_DEVICE bool handles(uint32_t peer) const {
    return blockIdx.x == number_ && threadIdx.x == peer && peer < team_.world_size && peer != team_.rank;
  }

  // A barrier for all threads of the lane, after which they see each other's earlier writes.
  PROXYCCL_DEVICE void sync() const {
    if (one_lane_) {
      reinterpret_cast<DeviceSyncer*>(team_.counters->grid_barrier)->sync(gridDim.x, team_.control);
    } else {
      __syncthreads();
    }
  }
  // A barrier of the lane before a post(), so that a peer that sees the signal also sees all that the lane wrote.
  PROXYCCL_DEVICE void syncBeforePost() const {
    syncThreadsSystem();
    if (one_lane_) sync();
  }

  PROXYCCL_DEVICE uint64_t slotBytes() const { return slot_bytes_; }
  // Returns the local address of slot `slot`, at which data of `peer` arrives.
  PROXYCCL_DEVICE char* inbox(uint32_t buffer, uint32_t peer, uint32_t slot) const {
    return (outboxes().proxied[peer] ? team_.proxied : team_.scratch) + slotOffset(buffer, slot);
  }

  // Returns the address at which to write data for slot `remote_slot` of `peer`. If the proxy sends, the address is
  // that of the local slot `local_slot`, in which no other send of the lane may stage data.
  PROXYCCL_DEVICE char* outbox(uint32_t buffer, uint32_t peer, uint32_t remote_slot, uint32_t local_slot) const {
    const uint32_t slot = outboxes().proxied[peer] ? local_slot : remote_slot;
    return outboxes().base[peer] + bufferOffset(team_, buffer) + slot * slot_bytes_;
  }

  // Called by the thread that handles `peer`, after syncBeforePost(): sends the outbox's data and signals the peer.
  PROXYCCL_DEVICE void post(uint32_t buffer, uint32_t peer, uint32_t remote_slot, uint32_t local_slot,
                            uint64_t bytes) const {
    const ProxycclLink& link = linkTo(peer);
    if (!outboxes().proxied[peer]) return Semaphore{link.semaphore}.signal();
    postThroughProxy(&link.proxy, slotOffset(buffer, remote_slot),
                     team_.staging_offset + slotOffset(buffer, local_slot), bytes);
  }

  // Called by the thread that handles `peer`: waits for the peer's next post.
  PROXYCCL_DEVICE void await(uint32_t peer) const {
    const ProxycclLink& link = linkTo(peer);
    if (outboxes().proxied[peer]) {
      awaitThroughProxy(&link.proxy);
    } else {
      Semaphore{link.semaphore}.wait(team_.control, PROXYCCL_WAIT_SM_SIGNAL, link.peer, PROXYCCL_NO_CHANNEL);
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
    return team_.links[static_cast<uint64_t>(number_) * team_.world_size + peer];
  }
  PROXYCCL_DEVICE uint64_t slotOffset(uint32_t buffer, uint32_t slot) const {
    return bufferOffset(team_, buffer) + offset_ + slot * slot_bytes_;
  }

  const ProxycclTeam& team_;
  bool one_lane_;
  uint32_t number_;
  uint64_t slot_bytes_, offset_;
};

class Exchange {
 public:
  PROXYCCL_DEVICE explicit Exchange(const ProxycclTeam& team)
      : team_(team),
        lane_(team, roundSlotBytes(team, slotsOf(team)), slotsOf(team)),
        first_round_(team.counters->round),
        round_(first_round_),
        outgoing_(0),
        owed_(0) {}

  PROXYCCL_DEVICE const Lane& lane() const { return lane_; }
  PROXYCCL_DEVICE uint64_t slotBytes() const { return lane_.slotBytes(); }

  // Called by all threads of the lane: sends `bytes` bytes, at most slotBytes(), to `peer`.
  PROXYCCL_DEVICE void send(uint32_t peer, const void* src, uint64_t bytes) {
    copy(outbox(peer), src, bytes);
    announce(peer, bytes);
  }
  PROXYCCL_DEVICE void copy(void* dst, const void* src, uint64_t bytes) const {
    copyBytes(dst, src, bytes, lane_.thread(), lane_.threads());
  }

  // outbox() and announce() are the two halves of send(), for data that is not contiguous: the first returns the
  // address at which to write, the second records the number of bytes written.
  PROXYCCL_DEVICE char* outbox(uint32_t peer) const {
    return lane_.outbox(buffer(round_), peer, slotOf(peer, team_.rank), slotOf(team_.rank, peer));
  }
  PROXYCCL_DEVICE void announce(uint32_t peer, uint64_t bytes) {
    if (threadIdx.x == peer) outgoing_ = bytes;
  }

  // Called by all threads of the lane: posts the sent data to the peers and waits until inbox() holds the data of every
  // peer.
  PROXYCCL_DEVICE void swap() {
    lane_.syncBeforePost();
    const uint32_t peer = threadIdx.x;
    if (lane_.handles(peer)) {
      lane_.post(buffer(round_), peer, slotOf(peer, team_.rank), slotOf(team_.rank, peer), outgoing_);
      for (; owed_ > 0; --owed_) lane_.await(peer);
      lane_.await(peer);
    }
    outgoing_ = owed_ = 0;
    ++round_;
    lane_.sync();
  }

  // post() signals every peer without data, and await() waits for every peer's post. All threads call post() and
  // await(), outside of rounds.
  PROXYCCL_DEVICE void post() const {
    lane_.syncBeforePost();
    const uint32_t peer = threadIdx.x;
    if (lane_.handles(peer)) lane_.post(buffer(round_), peer, slotOf(peer, team_.rank), slotOf(team_.rank, peer), 0);
  }
  PROXYCCL_DEVICE void await() const {
    const uint32_t peer = threadIdx.x;
    if (lane_.handles(peer)) lane_.await(peer);
    lane_.sync();
  }
  // Makes the next swap() also wait for one earlier post of each peer, for which no await() was called.
  PROXYCCL_DEVICE void oweAwait() { ++owed_; }

  PROXYCCL_DEVICE const char* inbox(uint32_t peer) const {
    return lane_.inbox(buffer(round_ - 1), peer, slotOf(team_.rank, peer));
  }

  // Runs rounds for this lane's share of `total` elements of `size` bytes. Each round calls send(offset, length) to
  // send a piece, and then take(offset, length) to process the previous piece, whose data inbox() holds for every peer.
  // So a piece crosses the links while the previous piece is processed.
  template <class Send, class Take>
  PROXYCCL_DEVICE void forEachRound(uint64_t total, uint64_t size, Send send, Take take) {
    if (total == 0) return;
    const uint64_t lanes = lane_.count(), length = pieceLength(total, size);
    uint64_t begin = 0, taken = 0;  // bounds of the previous piece
    for (uint64_t start = 0;; start += length * lanes) {
      const uint64_t offset = minimum(start + lane_.number() * length, total), n = minimum(length, total - offset);
      if (start < total) send(offset, n);
      if (start > 0) take(begin, taken);
      if (start >= total) break;
      swap();
      begin = offset, taken = n;
    }
  }

  // Calls part(offset, length) once, with this lane's share of [0, total) bytes.
  template <class Part>
  PROXYCCL_DEVICE void forLanePart(uint64_t total, Part part) const {
    const uint64_t length = divideUp(divideUp(total, lane_.count()), 128) * 128;
    const uint64_t offset = minimum(lane_.number() * length, total);
    part(offset, minimum(length, total - offset));
  }

  PROXYCCL_DEVICE void finish() const { finishKernel(team_, round_ - first_round_); }

 private:
  // Returns a piece's number of elements: whole cache lines, at most a slot, in equal shares for all lanes.
  PROXYCCL_DEVICE uint64_t pieceLength(uint64_t total, uint64_t size) const {
    const uint64_t lanes = lane_.count(), line = 128 / size;
    const uint64_t rounds = divideUp(total, lanes * (slotBytes() / size));
    return divideUp(total, rounds * lanes * line) * line;
  }

  static PROXYCCL_DEVICE uint32_t buffer(uint64_t round) { return round % PROXYCCL_ROUND_BUFFERS; }

  static PROXYCCL_DEVICE uint32_t slotsOf(const ProxycclTeam& team) {
    return team.world_size > 1 ? team.world_size - 1 : 1;
  }

  const ProxycclTeam& team_;
  Lane lane_;
  uint64_t first_round_, round_;
  uint64_t outgoing_;
  uint32_t owed_;
};

}  // namespace proxyccl
