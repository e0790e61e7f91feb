// MoE combine: the experts' rows go back to the ranks of their tokens, and each token's rows are summed.
//
// If a slot's expert is in the node of the token's rank, the slot's row goes to the token's rank. If the expert is in
// another node, the row goes to the counterpart of the token's rank: the rank of the expert's node with the same number
// within the node. The counterpart sums its node's rows of the token, and only the sum crosses the network. With
// local_combine each rank first sums its own rows of a token. Rows are added in the order of their slots or, if a token
// has one row per rank, in rank order. A sum uses the accumulator's type and is rounded once.
//
// combine_signalled is for rows that another kernel still computes: a group waits for a row's counter before it reads
// the row. Few blocks send the rows, so that the other kernel has most multiprocessors. The send stage waits for the
// counters of all rows, even of rows that it does not send. So the receive stages, which take all blocks, read no
// counters, and the caller may reuse the counters after the send stage. combine_signalled requires padded rows.
//
// If ranks have output buffers, rows in such a buffer are not sent: the token's rank loads them from the buffer. Each
// rank announces with a flag in which buffer its rows are, and ends the combine only when the other ranks have loaded
// these rows.
#pragma once

#include "experts/expert_team.h"

namespace proxyccl {

#if !PROXYCCL_ON_HOST
template <class T>
struct Word {  // 16 bytes of elements, the width of the widest access
  static constexpr uint32_t kEach = 16 / sizeof(T);
  T at[kEach];
};
template <class T, class A>
PROXYCCL_DEVICE void addWord(A* sum, const Bytes16& held, A weight) {
  const Word<T> word = __builtin_bit_cast(Word<T>, held);
#pragma unroll
  for (uint32_t i = 0; i < word.kEach; ++i) sum[i] += weight * Element<T>::widen(word.at[i]);
}
template <class T, class A>
PROXYCCL_DEVICE Bytes16 narrowWord(const A* sum) {
  if constexpr (sizeof(T) == 2) {  // packed in registers, because compilers make long code for an array of eight
                                   // elements
    uint32_t pairs[4];
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i)
      pairs[i] = Element<T>::narrow(sum[2 * i]).bits | static_cast<uint32_t>(Element<T>::narrow(sum[2 * i + 1]).bits)
                                                           << 16;
    return {pairs[0] | static_cast<uint64_t>(pairs[1]) << 32, pairs[2] | static_cast<uint64_t>(pairs[3]) << 32};
  } else {
    Word<T> word;
#pragma unroll
    for (uint32_t i = 0; i < word.kEach; ++i) word.at[i] = Element<T>::narrow(sum[i]);
    return __builtin_bit_cast(Bytes16, word);
  }
}

// Called by a group: computes words [begin, end) of the sum of kCount rows, each multiplied by its weight. The count is
// a template parameter, because otherwise branches would separate the loads, which would then wait for one another.
template <class T, uint32_t kCount>
PROXYCCL_DEVICE void sumWords(char* out, char* const* rows, const float* weights, uint32_t begin, uint32_t end) {
  using A = typename Element<T>::Accumulator;
  constexpr uint32_t kWords = kCount == 1   ? 8
                              : kCount == 2 ? 7
                                            : 12 / kCount;  // more loads in flight would take too many registers
  const Bytes16* from[kCount];
  A weight[kCount];
#pragma unroll
  for (uint32_t k = 0; k < kCount; ++k) {
    from[k] = inGlobal(reinterpret_cast<const Bytes16*>(rows[k]));
    weight[k] = static_cast<A>(weights[k]);
  }
  Bytes16* to = inGlobal(reinterpret_cast<Bytes16*>(out));
#pragma unroll 1
  for (uint32_t word = begin + threadIdx.x % kGroupLanes; word < end; word += kWords * kGroupLanes) {
    Bytes16 held[kWords][kCount];
#pragma unroll
    for (uint32_t w = 0; w < kWords; ++w) {
      const uint32_t next = word + w * kGroupLanes, at = next < end ? next : word;  // past the end, any valid word
#pragma unroll
      for (uint32_t k = 0; k < kCount; ++k) held[w][k] = from[k][at];
    }
#pragma unroll
    for (uint32_t w = 0; w < kWords; ++w) {
      A sum[Word<T>::kEach] = {};
#pragma unroll
      for (uint32_t k = 0; k < kCount; ++k) addWord<T>(sum, held[w][k], weight[k]);
      if (word + w * kGroupLanes < end) to[word + w * kGroupLanes] = narrowWord<T>(sum);
    }
  }
}
template <class T>
PROXYCCL_DEVICE void sumManyWords(char* out, char* const* rows, const float* weights, uint32_t count, uint32_t begin,
                                  uint32_t end) {
  using A = typename Element<T>::Accumulator;
#pragma unroll 1
  for (uint32_t word = begin + threadIdx.x % kGroupLanes; word < end; word += kGroupLanes) {
    A sum[Word<T>::kEach] = {};
#pragma unroll 4
    for (uint32_t k = 0; k < count; ++k)
      addWord<T>(sum, reinterpret_cast<const Bytes16*>(rows[k])[word], static_cast<A>(weights[k]));
    reinterpret_cast<Bytes16*>(out)[word] = narrowWord<T>(sum);
  }
}
#endif

template <class T>
PROXYCCL_DEVICE void sumRows(char* out, char* const* rows, const float* weights, uint32_t count, const Piece& piece,
                             uint32_t lane) {
  using A = typename Element<T>::Accumulator;
  auto scaled = [&](uint32_t k, T value) { return static_cast<A>(weights[k]) * Element<T>::widen(value); };
  uint64_t begin = piece.begin / sizeof(T);
  const uint64_t end = piece.end / sizeof(T);
#if PROXYCCL_ON_HOST
  constexpr uint32_t kTile = 64;  // long enough for the compiler to vectorise the loop
  for (; begin + kTile <= end; begin += kTile) {
    A sum[kTile] = {};
    for (uint32_t k = 0; k < count; ++k)
      for (uint32_t i = 0; i < kTile; ++i) sum[i] += scaled(k, reinterpret_cast<const T*>(rows[k])[begin + i]);
    for (uint32_t i = 0; i < kTile; ++i) reinterpret_cast<T*>(out)[begin + i] = Element<T>::narrow(sum[i]);
  }
#else
  uint64_t misaligned = reinterpret_cast<uintptr_t>(out) | piece.begin;
  for (uint32_t k = 0; k < count; ++k) misaligned |= reinterpret_cast<uintptr_t>(rows[k]);
  if (misaligned % 16 == 0) {
    const uint32_t first = static_cast<uint32_t>(piece.begin / 16), words = static_cast<uint32_t>(piece.end / 16);
#define PROXYCCL_SUM(kCount)                               \
  case kCount:                                             \
    sumWords<T, kCount>(out, rows, weights, first, words); \
    break;
    switch (count) {
      PROXYCCL_SUM(1)
      PROXYCCL_SUM(2)
      PROXYCCL_SUM(3)
      PROXYCCL_SUM(4)
      PROXYCCL_SUM(5)
      PROXYCCL_SUM(6)
      PROXYCCL_SUM(7)
      PROXYCCL_SUM(8)
      default:
        sumManyWords<T>(out, rows, weights, count, first, words);
    }
#undef PROXYCCL_SUM
    begin = static_cast<uint64_t>(words) * Word<T>::kEach;
  }
#endif
#pragma unroll 1
  for (uint64_t i = begin + lane; i < end; i += kGroupLanes) {
    A sum = 0;
#pragma unroll 1
    for (uint32_t k = 0; k < count; ++k) sum += scaled(k, reinterpret_cast<const T*>(rows[k])[i]);
    reinterpret_cast<T*>(out)[i] = Element<T>::narrow(sum);
  }
}

enum class CombineStage : uint32_t {
  send,       // send to each rank this rank's rows of that rank's tokens, or sums of these rows
  sum_node,   // sum the rows of this node's ranks, for the tokens of this rank and of its counterparts
  sum_nodes,  // add the sums of all nodes, for this rank's tokens
};
constexpr uint32_t kCombineStages = 3;
constexpr uint32_t kBufferBits =
    16;  // the lowest bits of a flag `loadable` hold an output buffer's number, the upper bits the combine's number

template <class T, bool kSignalled>
class Combine {
 public:
  PROXYCCL_DEVICE Combine(const ProxycclExperts& experts, const ProxycclCombine& call, uint32_t block)
      : team_(experts),
        call_(call),
        number_(experts.counters->combines + 1),
        block_(block),
        topk_(experts.topk),
        by_rank_(experts.chosen_per_rank != 0 && experts.local_size < experts.topk),
        row_bytes_(call.hidden * sizeof(T)),
        stride_(rowStride(row_bytes_) + kMaxPieces * sizeof(float)),
        own_(Segment::of(call.tokens, block, experts.blocks)) {
    for (uint32_t s = threadIdx.x; s < experts.world_size; s += blockDim.x) {
      const uint32_t tokens = static_cast<uint32_t>(call.layout.tokens[s]);
      team_.segmentOf(s) = Segment::of(tokens, block_, team_->blocks);
      if (team_->nodes > 1) team_.batchFrom(s) = team_.batchOf(tokens, block_);
    }
    team_.loadLookup();
  }

  // Called by the block: waits until the node's ranks have summed the rows of combine number_ - kept_calls, whose
  // memory this combine reuses.
  PROXYCCL_DEVICE void awaitSummed() const {
    if (threadIdx.x < team_->local_size)
      team_.await(team_.summed(threadIdx.x, block_), number_ - team_->kept_calls, team_.nearRank(threadIdx.x));
    __syncthreads();
  }

  // Called by every group: processes items of one stage until no item is left. The stages list an item's rows
  // differently, but share the code that sums these rows, because this code is long.
  PROXYCCL_DEVICE void run(CombineStage stage, const Group& group, uint32_t* next_item) const {
    const uint32_t ranks = team_->world_size, most = team_.mostItems();
    const uint32_t sources = stage == CombineStage::send ? ranks : stage == CombineStage::sum_node ? team_->nodes : 1;
    for (;;) {
      const uint32_t next = group.next(next_item);
      if (next >= most * sources) return;
      // The send stage serves the ranks in turn. The sum_node stage begins with tokens of other nodes, because their
      // sums must cross the network.
      uint32_t item = next % most, source = team_->rank;
      if (stage == CombineStage::send) {
        item = next / ranks;
        source = (team_->rank + 1 + next) % ranks;
      } else if (stage == CombineStage::sum_node) {
        source = team_.member((team_->node + 1 + next / most) % team_->nodes, team_->local_rank);
      }
      const Segment& segment = team_.segmentOf(source);
      if (item >= segment.items()) continue;
      const GroupSpace& space = group.space();
      // A row that is sent unsummed is treated as a sum of one row, so that the summing code copies it with many loads
      // in flight.
      const bool alone = stage == CombineStage::send && !team_->local_combine;
      char* to = nullptr;
      if (alone) {
        listSlots(group, item, source);
      } else if (stage == CombineStage::send) {
        to = listOwnRows(group, item, source);
      } else if (stage == CombineStage::sum_node) {
        to = listNodeRows(group, item, source);
      } else {
        to = listNodeSums(group, item);
      }
      const Piece piece(row_bytes_, segment, item);
      const uint32_t sums = alone ? space.count : to != nullptr;
#pragma unroll 1
      for (uint32_t n = 0; n < sums; ++n) {
        if (alone) to = slotOf(source, segment.tokenOf(item), static_cast<uint32_t>(space.number[n]));
        const uint32_t count = alone ? space.at[n] != nullptr : space.count;
        sumRows<T>(to, space.at + n, space.weight + n, count, piece, group.lane);
      }
      group.sync();
    }
  }

  // Called by the block after it has sent its rows: raises the block's flag on every rank of the node. A single release
  // covers all rows, because each release waits for all stores in flight.
  PROXYCCL_DEVICE void raiseReturned() const {
    syncThreadsSystem();
    if (threadIdx.x < team_->local_size) team_.raise(threadIdx.x, team_.returned(team_->local_rank, block_), number_);
  }
  // Called by the block: waits until all ranks of the node have sent their rows, or have announced that their rows can
  // be loaded.
  PROXYCCL_DEVICE void awaitSenders() const {
    if (threadIdx.x < team_->local_size) {
      const uint32_t l = threadIdx.x, rank = team_.nearRank(l);
      const bool loads = hasBuffers() && awaitLoadable(l);
      if (!loads) team_.await(team_.returned(l, block_), number_, rank);
    }
    __syncthreads();
  }

  // -- rows in output buffers ---
  PROXYCCL_DEVICE bool hasBuffers() const { return team_->output_buffers != 0 && !team_->local_combine; }
  // Called by the block before it sends anything: tells the node's ranks in which buffer this rank's rows are, or that
  // this rank sends its rows.
  PROXYCCL_DEVICE void raiseLoadable() const {
    if (hasBuffers() && threadIdx.x < team_->local_size)
      team_.raiseBehindLoads(threadIdx.x, team_.loadable(number_, team_->local_rank, block_),
                             number_ << kBufferBits | call_.rows_buffer);
  }
  // Called by the block before it waits for flags: looks up the rows of its tokens while the flags are in flight. The
  // block may use the results after the next barrier.
  PROXYCCL_DEVICE void cacheRows() const {
    if (!cachesRows()) return;
#pragma unroll 1
    for (uint32_t s = threadIdx.x; s < own_.tokens * topk_; s += blockDim.x)
      cachedRows()[s] = findSlotRow(team_->rank, own_.begin + s / topk_, s % topk_);
  }
  // Called by the block: waits until all ranks of the node have loaded their rows from this rank's buffer.
  PROXYCCL_DEVICE void awaitLoaded() const {
    if (call_.rows_buffer != 0 && threadIdx.x < team_->local_size)
      team_.await(team_.summed(threadIdx.x, block_), number_, team_.nearRank(threadIdx.x));
  }

  // Called by a group when no item is left. The last caller among all groups of all blocks of a batch posts the batch's
  // sums to the other nodes, because this caller has acquired the sums of all other groups.
  PROXYCCL_DEVICE void post(const Group& group, uint32_t* finished) const {
    if (team_->nodes == 1 || group.lane != 0) return;
    if (fetchAddAcqRelDevice<uint32_t>(finished, 1) + 1 != Group::count()) return;
    for (uint32_t node = 0; node < team_->nodes; ++node) {
      if (node == team_->node) continue;
      const uint32_t source = team_.member(node, team_->local_rank);
      const Batch& batch = team_.batchFrom(source);
      if (!team_.completes(team_.arrivals(node, batch.first), batch.segments())) continue;
      const int32_t* places = placesOf(source) + batch.begin;
      const uint64_t first = partialRow(batch.first, 0), rows = rowsPlaced(places, batch.tokens);
      team_.post(team_.channel(team_->back_channels, node, batch.first),
                 partial(team_->partial_in, team_->node) + first, partial(team_->partial_out, node) + first,
                 rows * stride_);
    }
  }

  // Called by the block after post(): waits for the other nodes' sums. The first block of a batch waits for the batch's
  // message, and raises a flag for the batch's other blocks.
  PROXYCCL_DEVICE void awaitNodes() const {
    __syncthreads();
    if (threadIdx.x < team_->nodes && threadIdx.x != team_->node) {
      const uint32_t node = threadIdx.x;
      const Batch& batch = team_.batchFrom(team_->rank);
      const uint64_t flag = team_.crossed(node, batch.first);
      if (batch.first != block_) {
        team_.await(flag, number_, team_.member(node, team_->local_rank));
      } else {
        team_.awaitPost(team_.channel(team_->back_channels, node, block_));
        if (batch.segments() > 1)  // only blocks of this device read the flag, so the release has device scope
          storeReleaseDevice<uint64_t>(reinterpret_cast<uint64_t*>(team_->workspace + flag), number_);
      }
    }
    __syncthreads();
  }

  PROXYCCL_DEVICE void acknowledge() const {
    __syncthreads();
    if (threadIdx.x < team_->local_size)
      team_.raiseBehindLoads(threadIdx.x, team_.summed(team_->local_rank, block_), number_);
  }

 private:
  // Called by one thread: waits until a rank of the node has announced where its rows are, and stores the buffer's
  // number in buffers(). Returns whether the rows can be loaded.
  PROXYCCL_DEVICE bool awaitLoadable(uint32_t local) const {
    const uint64_t flag = team_.loadable(number_, local, block_);
    team_.await(flag, number_ << kBufferBits, team_.nearRank(local));
    const uint64_t said = loadRelaxedSystem(reinterpret_cast<const uint64_t*>(team_->workspace + flag));
    buffers()[local] = static_cast<uint32_t>(said & ((1u << kBufferBits) - 1));
    return buffers()[local] != 0;
  }
  // For each rank of the node, the number of the buffer that holds its rows, counted from 1, or 0 if no buffer does.
  static PROXYCCL_DEVICE uint32_t* buffers() {
    __shared__ uint32_t buffers[PROXYCCL_MAX_EXPERT_RANKS];
    return buffers;
  }
  // The location of a slot's row: `local` is the number, within this node, of the rank that has the row, and `row` the
  // row's number on that rank. `row` is PROXYCCL_NO_ROW if this rank neither has the row nor can load it.
  struct SlotRow {
    uint32_t local;
    int32_t row;
  };
  static constexpr uint32_t kNotHere = ~0u;  // value of `local` if the slot has no row in this node
  // Finds the row of slot k of a token. The token's source is this rank or one of its counterparts.
  PROXYCCL_DEVICE SlotRow findSlotRow(uint32_t source, uint64_t token, uint32_t k) const {
    const uint64_t of_node = static_cast<uint64_t>(team_.nodeOf(source)) * team_->max_tokens + token;
    const uint32_t rank = static_cast<uint32_t>(call_.layout.expert_ids[of_node * topk_ + k]) / team_->experts_per_rank;
    if (rank >= team_->world_size || !team_.isNear(rank)) return {kNotHere, PROXYCCL_NO_ROW};
    int32_t row = PROXYCCL_NO_ROW;
    if (rank == team_->rank) {
      row = rowsOfToken(source, token)[k];
    } else if (call_.layout.sent_rows != nullptr) {  // null if the dispatch did not use output buffers
      row = call_.layout.sent_rows[token * topk_ + k];
    }
    return {team_.localOf(rank), row};
  }
  PROXYCCL_DEVICE bool cachesRows() const { return hasBuffers() && own_.tokens * topk_ <= PROXYCCL_CACHED_ROWS; }
  static PROXYCCL_DEVICE SlotRow* cachedRows() {
    __shared__ SlotRow rows[PROXYCCL_CACHED_ROWS];
    return rows;
  }
  PROXYCCL_DEVICE const int32_t* rowsOfToken(uint32_t source, uint64_t token) const {
    return call_.layout.rows + (static_cast<uint64_t>(source) * team_->max_tokens + token) * topk_;
  }
  PROXYCCL_DEVICE uint64_t partial(uint64_t area, uint32_t node) const {
    return area + (number_ % 2 * team_->nodes + node) * team_->partial_bytes;
  }
  PROXYCCL_DEVICE uint64_t partialRow(uint32_t segment, uint32_t place) const {
    return segment * team_->return_segment_bytes + place * stride_;
  }
  // Returns the array of the positions that the rows of a source's tokens have in their batches.
  PROXYCCL_DEVICE const int32_t* placesOf(uint32_t source) const {
    return call_.layout.places + static_cast<uint64_t>(source) * team_->max_tokens;
  }
  // Returns the offset, in the workspace of the rank that sums, of the row that rank `from` of the node sends for slot
  // k of the source's token i in this segment. Each token has memory for one row per slot or, if by_rank_, per rank of
  // the node.
  PROXYCCL_DEVICE uint64_t slotRow(uint32_t source, uint32_t i, uint32_t k, uint32_t from) const {
    const uint32_t places = by_rank_ ? team_->local_size : topk_;
    const uint64_t segment = places * team_->return_segment_bytes;
    const uint64_t area = team_.isNear(source)
                              ? team_->returns + (number_ & (team_->kept_calls - 1)) * team_->blocks * segment
                              : team_->return_rails + team_.nodeOf(source) * team_->blocks * segment;
    return area + block_ * segment + (i * places + (by_rank_ ? from : k)) * stride_;
  }
  // Returns a reference to a piece's copy of the row's weight. Each piece has a copy after the row's data, because
  // different groups write the pieces.
  PROXYCCL_DEVICE float& weightOf(char* row, uint32_t piece) const {
    return reinterpret_cast<float*>(row + rowStride(row_bytes_))[piece];
  }
  // With local_combine, returns the workspace offset of the sum that a rank of the node sends for token i.
  PROXYCCL_DEVICE uint64_t sumRow(uint32_t local, uint32_t i) const {
    return team_->returns + (local * team_->blocks + block_) * team_->return_segment_bytes + i * stride_;
  }

  // Called by a group: lists this rank's rows for an item of a source. Returns the address to which the rows' sum goes,
  // or null if there are no rows. listNodeRows() and listNodeSums() return the same for the rows that they list.
  PROXYCCL_DEVICE char* listOwnRows(const Group& group, uint32_t item, uint32_t source) const {
    const Segment& segment = team_.segmentOf(source);
    const uint32_t i = segment.tokenOf(item);
    const int32_t* rows = rowsOfToken(source, segment.begin + i);
    // A token whose rows did not fit in the output has the sum zero, which is sent because the receiver waits for it.
    if (!group.any(topk_, [&](uint32_t k) { return rows[k] != PROXYCCL_NO_ROW; })) return nullptr;
    group.list(topk_, [&](uint32_t k, RowEntry* entry) {
      if constexpr (kSignalled) awaitRow(rows[k]);
      return ownRow(rows[k], entry);
    });
    return team_.peer(team_.localOf(source)) + sumRow(team_->local_rank, i);
  }

  // Called by a group: lists this rank's rows for an item of a source and sends their weights.
  PROXYCCL_DEVICE void listSlots(const Group& group, uint32_t item, uint32_t source) const {
    const Segment& segment = team_.segmentOf(source);
    const uint32_t i = segment.tokenOf(item);
    const int32_t* rows = rowsOfToken(source, segment.begin + i);
    const bool own = team_.localOf(source) == team_->local_rank;  // this rank sums its own rows without a copy
    group.list(topk_, [&](uint32_t k, RowEntry* entry) {
      if constexpr (kSignalled) awaitRow(rows[k]);
      if (own || rows[k] == PROXYCCL_NO_ROW) return false;
      ownRow(rows[k], entry);  // a row that did not fit in the output gets a null address and weight 0
      if (call_.weights != nullptr) weightOf(slotOf(source, i, k), segment.pieceOf(item)) = entry->weight;
      entry->number = static_cast<int32_t>(k);
      entry->weight = 1;
      return true;
    });
  }
  PROXYCCL_DEVICE char* slotOf(uint32_t source, uint32_t i, uint32_t k) const {
    return team_.peer(team_.localOf(source)) + slotRow(source, i, k, team_->local_rank);
  }

  PROXYCCL_DEVICE bool ownRow(int32_t row, RowEntry* entry) const {
    if (row < 0) return false;
    entry->weight = call_.weights != nullptr ? call_.weights[row] : 1;
    entry->at = const_cast<char*>(call_.rows) + row * row_bytes_;
    return true;
  }

  // Called by one thread in the send stage: waits until a row of this rank's experts is complete, if the row exists.
  PROXYCCL_DEVICE void awaitRow(int32_t number) const {
    if (number < 0) return;
    const uint32_t row = static_cast<uint32_t>(number);
    const uint32_t expert = row / call_.expert_rows, block = row % call_.expert_rows / call_.block_rows;
    const uint32_t* counter = call_.signals + expert * call_.expert_blocks + block;
    const WaitFor what = {PROXYCCL_WAIT_CONDITION, PROXYCCL_NO_PEER, PROXYCCL_NO_CHANNEL, call_.threshold};
    waitUntil(team_->control, what, [&](uint64_t* seen) {
      *seen = loadAcquireDevice<uint32_t>(counter);
      return *seen >= call_.threshold;
    });
  }

  // Called by a group: lists the rows or, with local_combine, the sums of this node's ranks for an item. The item's
  // source is this rank or one of its counterparts.
  PROXYCCL_DEVICE char* listNodeRows(const Group& group, uint32_t item, uint32_t source) const {
    const Segment& segment = team_.segmentOf(source);
    const uint32_t i = segment.tokenOf(item), node = team_.nodeOf(source);
    const uint64_t token = segment.begin + i;
    char* target = call_.output + token * row_bytes_;
    if (team_->nodes > 1) {
      const bool near = node == team_->node;
      const int32_t place = near ? static_cast<int32_t>(i) : placesOf(source)[token];
      if (place == PROXYCCL_NO_ROW) return nullptr;
      target = team_->workspace + partial(near ? team_->partial_in : team_->partial_out, node) +
               partialRow(near ? block_ : team_.batchFrom(source).first, static_cast<uint32_t>(place));
    }
    const uint32_t begun = team_->nodes == 1 ? countAdded() : 0;
    if (team_->local_combine) {
      const int32_t* ids = call_.layout.expert_ids + (static_cast<uint64_t>(node) * team_->max_tokens + token) * topk_;
      const bool ordered = call_.order_ids != nullptr;
      group.list(begun + (ordered ? topk_ : team_->local_size), [&](uint32_t n, RowEntry* entry) {
        if (n < begun) return addedRow(n, token, entry);
        if (!ordered) return findSum(ids, i, n - begun, entry);
        const uint32_t k = slotInOrder(token, n - begun);
        return k < topk_ && findSum(ids, i, team_.localOf(orderedRank(token, k)), entry);
      });
    } else {
      group.list(begun + topk_, [&](uint32_t n, RowEntry* entry) {
        if (n < begun) return addedRow(n, token, entry);
        const uint32_t k = slotInOrder(token, n - begun);
        if (k == topk_) return false;
        const SlotRow slot = cachesRows() ? cachedRows()[i * topk_ + k] : findSlotRow(source, token, k);
        if (slot.local == kNotHere) return false;
        entry->number = static_cast<int32_t>(slot.local);
        if (slot.local == team_->local_rank) {
          if (!ownRow(slot.row, entry)) return false;
        } else if (hasBuffers() && buffers()[slot.local] != 0) {
          if (slot.row < 0) return false;
          entry->at = team_.outputOf(slot.local, buffers()[slot.local]) + slot.row * row_bytes_;
          entry->weight = 1;
        } else {
          entry->at = team_->workspace + slotRow(source, i, k, slot.local);
          entry->weight = call_.weights != nullptr ? weightOf(entry->at, segment.pieceOf(item)) : 1;
        }
        if (call_.slot_weights != nullptr) entry->weight *= call_.slot_weights[token * topk_ + k];
        return true;
      });
      // If a token has one row per rank, entries are ordered by rank, and numbered by the rank's number in the node.
      if (team_->chosen_per_rank != 0 && call_.order_ids == nullptr) group.orderByNumber(begun);
    }
    return target;
  }

  PROXYCCL_DEVICE uint32_t countAdded() const {
    return call_.added[0] == nullptr ? 0 : call_.added[1] == nullptr ? 1 : 2;
  }
  PROXYCCL_DEVICE bool addedRow(uint32_t n, uint64_t token, RowEntry* entry) const {
    entry->at = const_cast<char*>(call_.added[n]) + token * row_bytes_;
    entry->weight = 1;
    return true;
  }

  // Returns the rank of a slot's expert according to order_ids; world_size if the slot has no expert.
  PROXYCCL_DEVICE uint32_t orderedRank(uint64_t token, uint32_t k) const {
    const uint64_t slot = token * topk_ + k;
    const int64_t id = call_.id_bytes == 8 ? reinterpret_cast<const int64_t*>(call_.order_ids)[slot]
                                           : reinterpret_cast<const int32_t*>(call_.order_ids)[slot];
    const uint32_t per_rank = team_->chosen_per_rank != 0 ? team_->chosen_per_rank : team_->experts_per_rank;
    const bool exists = static_cast<uint64_t>(id) < static_cast<uint64_t>(per_rank) * team_->world_size;
    return exists ? static_cast<uint32_t>(id) / per_rank : team_->world_size;
  }
  // Called by one thread: returns the slot whose row is added at position k. Without order_ids, returns k. With
  // order_ids, returns topk (no row) unless slot k is the token's last slot for its rank, and then returns the token's
  // first slot for that rank.
  PROXYCCL_DEVICE uint32_t slotInOrder(uint64_t token, uint32_t k) const {
    if (call_.order_ids == nullptr) return k;
    const uint32_t rank = orderedRank(token, k);
    if (rank == team_->world_size) return topk_;
    uint32_t first = k;
#pragma unroll 1
    for (uint32_t other = topk_; other-- > 0;) {
      if (orderedRank(token, other) != rank) continue;
      if (other > k) return topk_;
      first = other;
    }
    return first;
  }

  PROXYCCL_DEVICE char* listNodeSums(const Group& group, uint32_t item) const {
    const uint32_t i = own_.tokenOf(item);
    const uint64_t token = own_.begin + i;
    const uint32_t begun = countAdded(), first = team_.batchFrom(team_->rank).first;
    group.list(begun + team_->nodes, [&](uint32_t n, RowEntry* entry) {
      if (n < begun) return addedRow(n, token, entry);
      const uint32_t node = n - begun;
      const int32_t place = call_.layout.sent_places[static_cast<uint64_t>(node) * team_->max_tokens + token];
      entry->at = team_->workspace + partial(team_->partial_in, node) +
                  (node == team_->node ? partialRow(block_, i) : partialRow(first, static_cast<uint32_t>(place)));
      entry->weight = 1;
      return place != PROXYCCL_NO_ROW;
    });
    return call_.output + token * row_bytes_;
  }

  // Called by one thread: finds a rank's sum of a token's rows. Returns false if the rank has no row of the token.
  PROXYCCL_DEVICE bool findSum(const int32_t* ids, uint32_t i, uint32_t local, RowEntry* entry) const {
    const uint32_t rank = team_.nearRank(local);
    bool chosen = false;
    const uint32_t first = rank * team_->experts_per_rank;
#pragma unroll 8
    for (uint32_t k = 0; k < topk_; ++k) chosen |= static_cast<uint32_t>(ids[k]) - first < team_->experts_per_rank;
    if (!chosen) return false;
    entry->at = team_->workspace + sumRow(local, i);
    entry->weight = 1;
    return true;
  }

  const ExpertTeam team_;
  const ProxycclCombine& call_;
  const uint64_t number_;
  const uint32_t block_, topk_;
  const bool by_rank_;                 // whether `returns` has room for one row per rank of a token instead of one per
                                       // slot
  const uint64_t row_bytes_, stride_;  // bytes of a row; bytes from one row to the next, including the pieces' weights
  const Segment own_;
};

template <class T, bool kSignalled>
PROXYCCL_DEVICE void combineBlock(const ProxycclExperts& experts, const ProxycclCombine& call, uint32_t block) {
  __shared__ uint32_t finished, has_failed, next_item[kCombineStages];
  const Combine<T, kSignalled> combine(experts, call, block);
  const Group group;
  const bool sends = call.phases & PROXYCCL_EXPERT_SEND, receives = call.phases & PROXYCCL_EXPERT_RECEIVE;
  if (threadIdx.x < kCombineStages) next_item[threadIdx.x] = 0;
  if (threadIdx.x == 0) {
    finished = 0;
    has_failed = loadRelaxedDevice<uint32_t>(&experts.counters->has_failed);
  }
  if (sends) combine.raiseLoadable();
  if (sends && call.rows_buffer == 0) combine.awaitSummed();
  if (receives) combine.cacheRows();
  __syncthreads();
  if (has_failed) return;  // the dispatch failed before it wrote the layout, whose numbers are arbitrary
#pragma unroll 1
  for (uint32_t number = 0; number < kCombineStages; ++number) {
    const CombineStage stage = static_cast<CombineStage>(number);
    if (stage == CombineStage::send ? !sends || call.rows_buffer != 0 : !receives) continue;
    if (stage == CombineStage::sum_nodes && experts.nodes == 1) continue;
    if (stage == CombineStage::sum_node) combine.awaitSenders();
    if (stage == CombineStage::sum_nodes) combine.awaitNodes();
    combine.run(stage, group, &next_item[number]);
    if (stage == CombineStage::send) combine.raiseReturned();
    if (stage == CombineStage::sum_node) combine.post(group, &finished);
  }
  if (receives) combine.acknowledge();
  combine.awaitLoaded();
  __syncthreads();
  if (threadIdx.x == 0 && receives) advance(experts, &experts.counters->combines);
}

template <class T>
PROXYCCL_DEVICE void combine(const ProxycclExperts& experts, const ProxycclCombine& call) {
  combineBlock<T, false>(experts, call, blockIdx.x);
}

template <class T>
PROXYCCL_DEVICE void combine_signalled(const ProxycclExperts& experts, const ProxycclCombine& call) {
  const uint32_t blocks = call.phases & PROXYCCL_EXPERT_RECEIVE ? experts.blocks : call.senders;
  if (blockIdx.x >= blocks) return;
#pragma unroll 1
  for (uint32_t block = blockIdx.x; block < experts.blocks; block += blocks)
    combineBlock<T, true>(experts, call, block);
}

}  // namespace proxyccl
