// Defines how the expert-parallel kernels (experts/experts.h) divide work: segments, groups of threads, items, flags.
//
// A group is the threads that move a piece of a row together: a warp on a GPU, a single fiber on a CPU, where one fiber
// copies faster than many. On every rank, block b handles segment b of every source, so each block has its own flags. A
// dispatch sends its items in parts; if some blocks only send, each group of these blocks sends one part. Each part has
// a flag with the number of its items that have arrived.
#pragma once

#include "experts/experts.h"
#include "proxyccl/copy.h"
#include "proxyccl/kernel.h"
#include "proxyccl/proxyccl.h"

namespace proxyccl {

constexpr uint32_t kGroupLanes = PROXYCCL_ON_HOST ? 1 : PROXYCCL_WARP_SIZE;
constexpr uint32_t kMaxGroups = PROXYCCL_EXPERT_THREADS / kGroupLanes;
constexpr uint32_t kMaxPieces = 4;  // maximum number of pieces of a row
// The upper 37 bits of a flag's value hold the call's number, the lower 27 the number of items that have arrived: at
// most kMaxPieces for each of 2^24 tokens.
constexpr uint32_t kItemBits = 27;
constexpr uint64_t kAllItems = (1ull << kItemBits) - 1;
static_assert(kMaxPieces << 24 <= kAllItems, "the number of items fits in a flag");

PROXYCCL_DEVICE uint64_t flagValue(uint64_t call, uint64_t items) { return call << kItemBits | items; }

// hasReached() returns whether a flag has reached a value. Flags wrap around, so only the difference of flag and value
// matters: a flag that has reached the value exceeds it by less than `ahead`. A larger difference means that the flag
// has not reached the value.
constexpr uint64_t kHalfOfAll = 1ull << 63;  // the value of `ahead` for flags that every call raises
// The value of `ahead` for flags that count items; not every call raises such a flag. Calls of different ranks wait for
// each other, so no flag is more than one call ahead. hasReached() returns false for a flag that was last raised long
// ago, unless call numbers have wrapped around to the flag's call.
constexpr uint64_t kTwoCalls = 2ull << kItemBits;
PROXYCCL_DEVICE bool hasReached(uint64_t seen, uint64_t value, uint64_t ahead) { return seen - value < ahead; }

// An entry in a group's list of rows: the row's address, number and weight.
struct RowEntry {
  char* at;
  int32_t number;
  float weight;
};

struct GroupSpace {
  char* at[PROXYCCL_MAX_TOPK + PROXYCCL_ADDED];
  int32_t number[PROXYCCL_MAX_TOPK + PROXYCCL_ADDED];
  float weight[PROXYCCL_MAX_TOPK + PROXYCCL_ADDED];
  int32_t row[PROXYCCL_MAX_TOPK];
  uint32_t count;
};

struct Group {
  uint32_t number, lane;
  PROXYCCL_DEVICE Group() : number(threadIdx.x / kGroupLanes), lane(threadIdx.x % kGroupLanes) {}
  static PROXYCCL_DEVICE uint32_t count() { return PROXYCCL_ON_HOST ? blockDim.x : kMaxGroups; }
  PROXYCCL_DEVICE GroupSpace& space() const {
    __shared__ GroupSpace spaces[kMaxGroups];
    return spaces[number];
  }
  // Returns whether test(i) is true for any i < n. One thread tests each i.
  template <class Test>
  PROXYCCL_DEVICE bool any(uint32_t n, Test test) const {
    bool found = false;
    for (uint32_t i = lane; i < n; i += kGroupLanes) found |= test(i);
    return ballot(found) != 0;
  }
  // Returns a word with one bit per thread of the group: that thread's `bit`.
  PROXYCCL_DEVICE uint64_t ballot(bool bit) const {
#if PROXYCCL_ON_HOST
    return bit;
#else
    return ballotWarp(bit);
#endif
  }

  // A barrier of the group, after which the group's threads see each other's earlier writes.
  PROXYCCL_DEVICE void sync() const {
#if !PROXYCCL_ON_HOST
    syncWarp();
#endif
  }

  PROXYCCL_DEVICE uint32_t ofFirst(uint32_t value) const {
#if PROXYCCL_ON_HOST
    return value;
#else
    return shuffle(value, 0);
#endif
  }

  // Increments a counter of the block, and returns the previous value to all threads of the group.
  PROXYCCL_DEVICE uint32_t next(uint32_t* counter) const {
    GroupSpace& space = this->space();
    if (lane == 0) space.count = atomicAdd(counter, 1u);
    sync();
    const uint32_t number = space.count;
    sync();
    return number;
  }

  // Lists in space() the entries for which find(i, &entry) returns true, in order of i < n. One thread calls find() for
  // each i. At most PROXYCCL_MAX_TOPK entries may be listed.
  template <class Find>
  PROXYCCL_DEVICE void list(uint32_t n, Find find) const {
    GroupSpace& space = this->space();
    uint32_t count = 0;
    for (uint32_t first = 0; first < n; first += kGroupLanes) {
      RowEntry entry = {};
      const bool found = first + lane < n && find(first + lane, &entry);
      const uint64_t all = ballot(found);
      if (found) {
        const uint32_t slot = count + countBits(all & ((1ull << lane) - 1));
        space.at[slot] = entry.at;
        space.number[slot] = entry.number;
        space.weight[slot] = entry.weight;
      }
      count += countBits(all);
    }
    if (lane == 0) space.count = count;
    sync();
  }

  // Sorts the listed entries from `begin` on, at most PROXYCCL_MAX_TOPK, by their numbers, which all differ. Only the
  // fields `at` and `weight` are moved.
  PROXYCCL_DEVICE void orderByNumber(uint32_t begin) const {
    GroupSpace& space = this->space();
    constexpr uint32_t kEach = (PROXYCCL_MAX_TOPK + kGroupLanes - 1) / kGroupLanes;
    RowEntry moved[kEach];  // `number` is the entry's new index
    const uint32_t end = space.count, first = begin + lane;
    for (uint32_t i = 0, from = first; i < kEach && from < end; ++i, from += kGroupLanes) {
      uint32_t to = begin;
#pragma unroll 1
      for (uint32_t other = begin; other < end; ++other) to += space.number[other] < space.number[from];
      moved[i] = {space.at[from], static_cast<int32_t>(to), space.weight[from]};
    }
    sync();
    for (uint32_t i = 0, from = first; i < kEach && from < end; ++i, from += kGroupLanes) {
      space.at[moved[i].number] = moved[i].at;
      space.weight[moved[i].number] = moved[i].weight;
    }
    sync();
  }
};

// A segment of a source's tokens. An item is one of 2^pieces_log2 pieces of a token's row, so that a segment of few
// tokens also keeps all groups busy.
struct Segment {
  uint32_t begin, tokens, pieces_log2;
  static PROXYCCL_DEVICE uint32_t longest(uint32_t source_tokens, uint32_t segments) {
    return (source_tokens + segments - 1) / segments;
  }
  static PROXYCCL_DEVICE Segment of(uint32_t source_tokens, uint32_t number, uint32_t segments) {
    const uint32_t begin = source_tokens * number / segments;
    Segment segment = {begin, source_tokens * (number + 1) / segments - begin, 0};
#if !PROXYCCL_ON_HOST
    // All ranks must compute the same number of pieces, so this number depends only on the source's number of tokens,
    // which all ranks know.
    const uint32_t most = longest(source_tokens, segments);
    while (segment.pieces() < kMaxPieces && most * segment.pieces() < 2 * Group::count()) ++segment.pieces_log2;
#endif
    return segment;
  }
  static PROXYCCL_DEVICE uint32_t numberOf(uint32_t source_tokens, uint32_t token, uint32_t segments) {
    return ((token + 1) * segments - 1) / source_tokens;
  }
  PROXYCCL_DEVICE uint32_t pieces() const { return 1u << pieces_log2; }
  PROXYCCL_DEVICE uint32_t items() const { return tokens << pieces_log2; }
  PROXYCCL_DEVICE uint32_t tokenOf(uint32_t item) const { return item >> pieces_log2; }  // within the segment
  PROXYCCL_DEVICE uint32_t pieceOf(uint32_t item) const { return item & (pieces() - 1); }
};

// Consecutive segments of a source, [first, end), whose rows are sent to another node as one message. `begin` is the
// first token of these segments, `tokens` their number of tokens.
struct Batch {
  uint32_t first, end, begin, tokens;
  PROXYCCL_DEVICE uint32_t segments() const { return end - first; }
};

// Returns the bytes from one row to the next in a slab, rounded up so that 16-byte accesses are aligned. Slabs have
// room for the layer's longest rows.
PROXYCCL_DEVICE uint64_t rowStride(uint64_t row_bytes) { return (row_bytes + 15) / 16 * 16; }

// The bytes [begin, end) of a row that an item moves. All pieces but the last have whole words of 16 bytes.
struct Piece {
  uint64_t begin, end;
  PROXYCCL_DEVICE Piece(uint64_t row_bytes, const Segment& segment, uint32_t item) {
    const uint64_t words = (row_bytes + 15) / 16;
    const uint32_t piece = segment.pieceOf(item);
    begin = (words * piece >> segment.pieces_log2) * 16;
    end = piece + 1 == segment.pieces() ? row_bytes : (words * (piece + 1) >> segment.pieces_log2) * 16;
    if (begin > end) begin = end;
  }
};

// awaitWord() is not inlined, because fetching each inlined copy of its code would take as long as a call.
PROXYCCL_OUT_OF_LINE void awaitWord(ProxycclControl* control, const uint64_t* word, uint64_t value, uint32_t peer,
                                    uint64_t ahead) {
  waitUntil(control, {PROXYCCL_WAIT_SM_SIGNAL, peer, PROXYCCL_NO_CHANNEL, value},
            [&](uint64_t* seen) { return hasReached(*seen = loadAcquireSystem(word), value, ahead); });
}

class ExpertTeam {
 public:
  PROXYCCL_DEVICE explicit ExpertTeam(const ProxycclExperts& experts) : e_(experts) {}
  PROXYCCL_DEVICE const ProxycclExperts* operator->() const { return &e_; }
  PROXYCCL_DEVICE const ProxycclExperts& operator*() const { return e_; }

  PROXYCCL_DEVICE uint32_t experts() const { return e_.world_size * e_.experts_per_rank; }
  // Called by the block, before anything else: copies values that are read for every row to shared memory, because
  // every acquire invalidates the multiprocessor's L1 cache.
  PROXYCCL_DEVICE void loadLookup() const {
    Lookup& lookup = ExpertTeam::lookup();
    // The last threads copy the values, because the first threads usually wait for other loads.
    const uint32_t first = blockDim.x - 1 - threadIdx.x;
    for (uint32_t i = first; i < e_.world_size; i += blockDim.x) lookup.places[i] = e_.places[i];
    for (uint32_t i = first; i < e_.local_size; i += blockDim.x) {
      lookup.peers[i] = e_.peers[i];
      lookup.ranks[i] = member(e_.node, i);
    }
    __syncthreads();
  }

  PROXYCCL_DEVICE uint32_t placeOf(uint32_t rank) const { return lookup().places[rank]; }
  PROXYCCL_DEVICE uint32_t nodeOf(uint32_t rank) const { return placeOf(rank) >> 16; }
  PROXYCCL_DEVICE uint32_t localOf(uint32_t rank) const { return placeOf(rank) & 0xffff; }
  PROXYCCL_DEVICE uint32_t nearRank(uint32_t local) const { return lookup().ranks[local]; }
  PROXYCCL_DEVICE char* peer(uint32_t local) const { return lookup().peers[local]; }
  static PROXYCCL_DEVICE char* const* peers() { return lookup().peers; }
  // Returns the variable in shared memory in which the caller keeps this block's segment of a source's tokens.
  static PROXYCCL_DEVICE Segment& segmentOf(uint32_t source) { return lookup().segments[source]; }
  PROXYCCL_DEVICE uint32_t mostItems() const {
    uint32_t most = 0;
    for (uint32_t s = 0; s < e_.world_size; ++s) {
      const uint32_t items = segmentOf(s).items();
      most = items > most ? items : most;
    }
    return most;
  }
  PROXYCCL_DEVICE bool isNear(uint32_t rank) const { return nodeOf(rank) == e_.node; }
  PROXYCCL_DEVICE uint32_t member(uint32_t node, uint32_t local) const {
    return e_.members[node * e_.local_size + local];
  }

  // -- slabs ---
  // Returns a source's slab in inbox `number` (0 or 1) of a rank of the node.
  PROXYCCL_DEVICE char* inbox(uint32_t number, uint32_t local, uint32_t source_local) const {
    return peer(local) + e_.inbox + (number * e_.local_size + source_local) * e_.slab_bytes;
  }
  // The following functions return offsets in a workspace.
  PROXYCCL_DEVICE uint64_t rail(uint64_t call, uint32_t node) const {
    return e_.rail + (call % 2 * e_.nodes + node) * e_.slab_bytes;
  }
  PROXYCCL_DEVICE uint64_t outbox(uint64_t call, uint32_t node) const {
    return e_.outbox + (call % 2 * e_.nodes + node) * e_.slab_bytes;
  }
  PROXYCCL_DEVICE uint64_t routingAt(uint32_t segment) const { return segment * e_.routing_bytes; }
  PROXYCCL_DEVICE uint64_t rowAt(uint32_t segment, uint32_t place, uint64_t stride) const {
    return e_.segments * e_.routing_bytes + segment * e_.segment_bytes + place * stride;
  }

  // Returns the number of parts of a dispatch. Item i of segment s has number n = i * segments + s in the dispatch, and
  // is item n / parts() of part n % parts().
  PROXYCCL_DEVICE uint32_t parts() const {
    return (e_.segments < e_.blocks ? e_.blocks - e_.segments : e_.blocks) * Group::count();
  }

  // Returns the address of an output buffer of a rank of the node. Buffers are numbered from 1.
  PROXYCCL_DEVICE char* outputOf(uint32_t local, uint32_t buffer) const {
    return peer(local) + e_.outputs + (buffer - 1) * e_.output_bytes;
  }

  // -- flags, as offsets in a workspace ---
  // Returns the flag that is raised when block `block` of `source` has sent its counts. For a source on another node,
  // block 0's flag covers the counts of all blocks.
  PROXYCCL_DEVICE uint64_t routed(uint32_t source, uint32_t block) const {
    return e_.routed + 8ull * (source * e_.segments + block);
  }
  // Returns the flag that counts the arrived items of a part of a source's dispatch. For a source on another node, the
  // flag of a batch's first segment is raised when the whole batch has arrived.
  PROXYCCL_DEVICE uint64_t sent(uint32_t source, uint32_t part) const {
    return e_.sent + 8ull * (static_cast<uint64_t>(source) * parts() + part);
  }
  // Returns the flag that block `block` of the node's rank `local` raises when it has read a dispatch's data.
  PROXYCCL_DEVICE uint64_t read(uint32_t local, uint32_t block) const {
    return e_.read + 8ull * (local * e_.segments + block);
  }
  // Returns the flag that block `block` of the node's rank `local` raises when it has sent its rows of a combine.
  PROXYCCL_DEVICE uint64_t returned(uint32_t local, uint32_t block) const {
    return e_.returned + 8ull * (local * e_.blocks + block);
  }
  // Returns the flag that block `block` of the node's rank `local` raises when it has summed a combine's data.
  PROXYCCL_DEVICE uint64_t summed(uint32_t local, uint32_t block) const {
    return e_.summed + 8ull * (local * e_.blocks + block);
  }
  // Returns the flag with the number of the output buffer in which the node's rank `local` has its rows of a combine.
  // Even and odd combines have separate flags, so combine n + 2 overwrites a flag of combine n. The overwritten flag is
  // no longer needed: before combine n + 2 a rank has seen every rank's flag of combine n + 1, which a rank raises only
  // after it has ended combine n.
  PROXYCCL_DEVICE uint64_t loadable(uint64_t call, uint32_t local, uint32_t block) const {
    return e_.loadable + 8ull * ((call % 2 * e_.local_size + local) * e_.blocks + block);
  }
  // Returns the flag that a block raises, only on this rank, when a batch of sums of a combine has arrived from `node`.
  // `block` is the batch's first block.
  PROXYCCL_DEVICE uint64_t crossed(uint32_t node, uint32_t block) const {
    return e_.crossed + 8ull * (node * e_.blocks + block);
  }
  PROXYCCL_DEVICE void raise(uint32_t local, uint64_t flag, uint64_t value) const {
    storeReleaseSystem(reinterpret_cast<uint64_t*>(peer(local) + flag), value);
  }
  // Raises a flag by storeReleaseLoadsSystem(), which orders only the block's earlier loads and the stores of earlier
  // kernels before the flag.
  PROXYCCL_DEVICE void raiseBehindLoads(uint32_t local, uint64_t flag, uint64_t value) const {
    storeReleaseLoadsSystem(reinterpret_cast<uint64_t*>(peer(local) + flag), value);
  }
  PROXYCCL_DEVICE void await(uint64_t flag, uint64_t value, uint32_t peer, uint64_t ahead = kHalfOfAll) const {
    awaitWord(e_.control, reinterpret_cast<const uint64_t*>(e_.workspace + flag), value, peer, ahead);
  }
  PROXYCCL_DEVICE void awaitSent(uint32_t source, uint32_t part, uint64_t call, uint64_t items) const {
    await(sent(source, part), flagValue(call, items), source, kTwoCalls);
  }

  // -- transfers to other nodes; a layer on several nodes has one segment per block ---

  // Returns the variable in shared memory in which the caller keeps the batch (batchOf()) that contains this block's
  // segment of a source.
  static PROXYCCL_DEVICE Batch& batchFrom(uint32_t source) {
    __shared__ Batch batches[PROXYCCL_MAX_EXPERT_RANKS];
    return batches[source];
  }
  // Returns the batch that contains segment `segment`, if its source has `source_tokens` tokens. If these tokens are
  // few, all segments form one batch, because one long message uses the network better than several short ones.
  PROXYCCL_DEVICE Batch batchOf(uint32_t source_tokens, uint32_t segment) const {
    const uint32_t segments = e_.blocks, wanted = source_tokens / e_.batch_tokens;
    const uint32_t batches = wanted == 0 ? 1 : wanted < segments ? wanted : segments;
    const uint32_t number = Segment::numberOf(segments, segment, batches);
    const uint32_t first = segments * number / batches, end = segments * (number + 1) / batches;
    const uint32_t begin = source_tokens * first / segments;
    return {first, end, begin, source_tokens * end / segments - begin};
  }
  // Called by one thread of each of `blocks` blocks when the block's part of a message is stored. Returns whether the
  // block is the last to call completes(). The last block has acquired the parts of all other blocks, and the proxy
  // sees these parts after a later post by the last block.
  PROXYCCL_DEVICE bool completes(uint32_t* arrivals, uint32_t blocks) const {
    if (fetchAddAcqRelDevice<uint32_t>(arrivals, 1) + 1 != blocks) return false;
    storeRelaxedDevice<uint32_t>(arrivals, 0);
    return true;
  }
  // Return the arrival counters of the routing, and of the batch for `node` that begins with segment `first`.
  PROXYCCL_DEVICE uint32_t* routingArrivals() const { return e_.arrivals + e_.nodes * e_.blocks; }
  PROXYCCL_DEVICE uint32_t* arrivals(uint32_t node, uint32_t first) const {
    return e_.arrivals + node * e_.blocks + first;
  }
  // Return the channel to a node for the routing, and for the batch that begins with segment `first`. `channels` is
  // out_channels or back_channels. The routing has a separate channel, because a batch may be sent before the routing.
  PROXYCCL_DEVICE const ProxycclProxyChannel& routingChannel(uint32_t node) const { return e_.routing_channels[node]; }
  PROXYCCL_DEVICE const ProxycclProxyChannel& channel(const ProxycclProxyChannel* channels, uint32_t node,
                                                      uint32_t first) const {
    return channels[node * e_.blocks + first];
  }
  PROXYCCL_DEVICE void post(const ProxycclProxyChannel& to, uint64_t dst, uint64_t src, uint64_t bytes) const {
    const ProxyChannelDeviceHandle channel{to};
    if (bytes == 0) return channel.signal();
    channel.putWithSignal(dst, src, bytes < e_.least_message ? e_.least_message : bytes);
  }
  PROXYCCL_DEVICE static void awaitPost(const ProxycclProxyChannel& from) { ProxyChannelDeviceHandle{from}.wait(); }

 private:
  struct Lookup {
    Segment segments[PROXYCCL_MAX_EXPERT_RANKS];
    char* peers[PROXYCCL_MAX_EXPERT_RANKS];
    uint32_t ranks[PROXYCCL_MAX_EXPERT_RANKS], places[PROXYCCL_MAX_EXPERT_RANKS];
  };
  static PROXYCCL_DEVICE Lookup& lookup() {
    __shared__ Lookup lookup;
    return lookup;
  }

  const ProxycclExperts& e_;
};

// Returns the number of rows in a batch. `places` has the position of each token's row in the batch, or PROXYCCL_NO_ROW
// for a token without a row.
PROXYCCL_DEVICE uint64_t rowsPlaced(const int32_t* places, uint32_t tokens) {
  for (uint32_t i = tokens; i > 0; --i)
    if (places[i - 1] != PROXYCCL_NO_ROW) return places[i - 1] + 1;
  return 0;
}

// Called by one thread of each block, after all threads of the block have read the counters: the last block increments
// `calls`. Returns whether this block is the last.
PROXYCCL_DEVICE bool advance(const ProxycclExperts& e, uint64_t* calls) {
  if (fetchAddAcqRelDevice<uint32_t>(&e.counters->blocks_done, 1) != gridDim.x - 1) return false;
  storeRelaxedDevice<uint32_t>(&e.counters->blocks_done, 0);
  storeRelaxedDevice<uint64_t>(calls, *calls + 1);
  return true;
}

// The type of a kernel's second parameter; the first is ProxycclExperts.
template <class Kernel>
struct CallOf;
template <class Call>
struct CallOf<void (*)(const ProxycclExperts&, const Call&)> {
  using Type = Call;
};

// Called by a group: copies `bytes` bytes from `src` to each of `count` targets. The source is read once; each thread
// has kInFlight loads of 16 bytes in flight.
template <uint32_t kInFlight = 4>
PROXYCCL_DEVICE void copyToEach(char* const* targets, uint32_t count, uint64_t offset, const char* src, uint64_t bytes,
                                uint32_t lane) {
#if !PROXYCCL_ON_HOST
  uint64_t misaligned = reinterpret_cast<uintptr_t>(src) | bytes | offset;
  for (uint32_t k = 0; k < count; ++k) misaligned |= reinterpret_cast<uintptr_t>(targets[k]);
  if (misaligned % 16 == 0) {
    const Bytes16* from = inGlobal(reinterpret_cast<const Bytes16*>(src));
    const uint32_t words = bytes / 16;
    for (uint32_t first = lane; first < words; first += kInFlight * kGroupLanes) {
      Bytes16 held[kInFlight];
#pragma unroll
      for (uint32_t i = 0; i < kInFlight; ++i)
        if (first + i * kGroupLanes < words) held[i] = from[first + i * kGroupLanes];
      for (uint32_t k = 0; k < count; ++k) {
        Bytes16* to = inGlobal(reinterpret_cast<Bytes16*>(targets[k] + offset));
#pragma unroll
        for (uint32_t i = 0; i < kInFlight; ++i)
          if (first + i * kGroupLanes < words) to[first + i * kGroupLanes] = held[i];
      }
    }
    return;
  }
#endif
  for (uint32_t k = 0; k < count; ++k) copyBytes(targets[k] + offset, src, bytes, lane, kGroupLanes);
}

}  // namespace proxyccl

// Defines a kernel `name` from the template `kernel` for one element type. The kernel is in the namespace instead of
// being extern "C", so that profilers show the names for which scripts search: proxyccl::dispatch… and
// proxyccl::combine….
#define PROXYCCL_TYPED_KERNEL(kernel, name, T)                                                         \
  namespace proxyccl {                                                                                 \
  __global__ void __launch_bounds__(PROXYCCL_EXPERT_THREADS, 1)                                        \
      name(const ProxycclExperts experts, const CallOf<decltype(&::proxyccl::kernel<T>)>::Type call) { \
    ::proxyccl::kernel<T>(experts, call);                                                              \
  }                                                                                                    \
  PROXYCCL_EXPORT_KERNEL(name)                                                                         \
  }
