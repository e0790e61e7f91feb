// MoE combine: the experts' rows go back the way the tokens came, and each token's are summed.
//
// Every slot's row goes to the token's rank, or across nodes to the rank of the same node that has the token's rank's
// number (its rail), which sums what its node made of the token; only that sum crosses. With local_combine each rank
// sums its own rows of a token first. A sum is made in the order of k, in the accumulator's type, and rounded once.
#ifndef PROXYCCL_EXPERT_COMBINE_H
#define PROXYCCL_EXPERT_COMBINE_H

#include "expert_team.h"

namespace proxyccl {

// By a group: bytes [begin, end) of the sum of the rows that it has listed, each times its weight.
template <class T>
PROXYCCL_DEVICE void sumRows(char* out, const GroupSpace& space, const Piece& piece, uint32_t lane) {
  using A = typename Element<T>::Accumulator;
  const uint32_t count = space.count;
  auto scaled = [&](uint32_t k, T value) { return static_cast<A>(space.weight[k]) * Element<T>::widen(value); };
  uint64_t begin = piece.begin / sizeof(T);
  const uint64_t end = piece.end / sizeof(T);
#if PROXYCCL_ON_HOST
  constexpr uint32_t kTile = 64;  // long enough to be vectorised
  for (; begin + kTile <= end; begin += kTile) {
    A sum[kTile] = {};
    for (uint32_t k = 0; k < count; ++k)
      for (uint32_t i = 0; i < kTile; ++i) sum[i] += scaled(k, reinterpret_cast<const T*>(space.at[k])[begin + i]);
    for (uint32_t i = 0; i < kTile; ++i) reinterpret_cast<T*>(out)[begin + i] = Element<T>::narrow(sum[i]);
  }
#else
  uint64_t misaligned = reinterpret_cast<uintptr_t>(out) | piece.begin;
  for (uint32_t k = 0; k < count; ++k) misaligned |= reinterpret_cast<uintptr_t>(space.at[k]);
  if (misaligned % 16 == 0) {
    constexpr uint32_t kEach = 16 / sizeof(T), kWords = 4, kRows = 4;
    struct Word {
      T at[kEach];
    };
    const uint64_t words = piece.end / 16;
    for (uint64_t word = piece.begin / 16 + lane; word < words; word += kWords * kGroupLanes) {
      A sum[kWords][kEach] = {};
      for (uint32_t first = 0; first < count; first += kRows) {
        Bytes16 held[kRows][kWords];
#pragma unroll
        for (uint32_t k = 0; k < kRows; ++k)
#pragma unroll
          for (uint32_t w = 0; w < kWords; ++w)
            if (first + k < count && word + w * kGroupLanes < words)
              held[k][w] = reinterpret_cast<const Bytes16*>(space.at[first + k])[word + w * kGroupLanes];
#pragma unroll
        for (uint32_t k = 0; k < kRows; ++k) {
          if (first + k >= count) break;
#pragma unroll
          for (uint32_t w = 0; w < kWords; ++w) {
            const Word values = __builtin_bit_cast(Word, held[k][w]);
#pragma unroll
            for (uint32_t i = 0; i < kEach; ++i) sum[w][i] += scaled(first + k, values.at[i]);
          }
        }
      }
#pragma unroll
      for (uint32_t w = 0; w < kWords; ++w) {
        if (word + w * kGroupLanes >= words) break;
        Word values;
#pragma unroll
        for (uint32_t i = 0; i < kEach; ++i) values.at[i] = Element<T>::narrow(sum[w][i]);
        reinterpret_cast<Bytes16*>(out)[word + w * kGroupLanes] = __builtin_bit_cast(Bytes16, values);
      }
    }
    begin = words * kEach > begin ? words * kEach : begin;
  }
#endif
  for (uint64_t i = begin + lane; i < end; i += kGroupLanes) {
    A sum = 0;
    for (uint32_t k = 0; k < count; ++k) sum += scaled(k, reinterpret_cast<const T*>(space.at[k])[i]);
    reinterpret_cast<T*>(out)[i] = Element<T>::narrow(sum);
  }
}

// One combine, as one block sees it.
template <class T>
class Combine {
 public:
  PROXYCCL_DEVICE Combine(const ProxycclExperts& experts, const ProxycclCombine& call)
      : team_(experts),
        call_(call),
        number_(experts.counters->combines + 1),
        block_(blockIdx.x),
        topk_(experts.topk),
        row_bytes_(call.hidden * sizeof(T)),
        stride_(rowStride(row_bytes_) + kMaxPieces * sizeof(float)),
        own_(Segment::of(call.tokens, blockIdx.x, experts.blocks)) {
    for (uint32_t s = threadIdx.x; s < experts.world_size; s += blockDim.x)
      team_.segmentOf(s) = Segment::of(static_cast<uint32_t>(call.layout.tokens[s]), block_, experts.blocks);
    team_.enter();
  }

  // Waits until the node has summed what the combine before brought.
  PROXYCCL_DEVICE void awaitTakers() const {
    if (threadIdx.x < team_->local_size)
      team_.await(team_.taken(threadIdx.x, block_), number_ - 1, team_.nearRank(threadIdx.x));
    __syncthreads();
  }

  PROXYCCL_DEVICE void send(const Group& group) const {
    const uint32_t groups = Group::count(), ranks = team_->world_size, most = team_.mostItems();
    for (uint32_t item = group.number; item < most; item += groups) {
      for (uint32_t i = 1; i <= ranks; ++i) sendItem(group, item, (team_->rank + i) % ranks);
      group.sync();
      for (uint32_t l = group.lane; l < team_->local_size; l += kGroupLanes)
        team_.raise(l, team_.returned(team_->local_rank, block_, group.number), flagValue(number_, item / groups + 1));
    }
  }

  PROXYCCL_DEVICE void receive(const Group& group, uint32_t* finished) const {
    const uint32_t groups = Group::count();
    for (uint32_t i = 1; i <= team_->nodes; ++i) {  // other nodes' tokens first: their sums have the longer way
      const uint32_t source = team_.member((team_->node + i) % team_->nodes, team_->local_rank);
      const uint32_t items = team_.segmentOf(source).items();
      for (uint32_t item = group.number; item < items; item += groups) takeItem(group, item, source);
    }
    if (team_->nodes == 1 || group.lane != 0) return;
    // The last group to come has all the others' rows, and the proxy reads them behind its release.
    if (fetchAddAcqRelDevice<uint32_t>(finished, 1) + 1 != groups) return;
    for (uint32_t node = 0; node < team_->nodes; ++node) {
      if (node == team_->node) continue;
      const uint64_t first = partialRow(0);
      team_.post(team_->back_channels, node, partial(team_->partial_in, team_->node) + first,
                 partial(team_->partial_out, node) + first, rowsFrom(node) * stride_);
    }
  }

  // By the block, when receive() is done: the nodes' sums of each token become its row of the output.
  PROXYCCL_DEVICE void sumNodes(const Group& group) const {
    __syncthreads();
    if (threadIdx.x < team_->nodes && threadIdx.x != team_->node)
      team_.awaitPost(team_->back_channels, threadIdx.x);
    __syncthreads();
    for (uint32_t item = group.number; item < own_.items(); item += Group::count()) {
      const uint32_t i = own_.tokenOf(item);
      const uint64_t token = own_.begin + i;
      group.list(team_->nodes, [&](uint32_t node, RowEntry* entry) {
        const int32_t place = call_.layout.sent_places[static_cast<uint64_t>(node) * team_->max_tokens + token];
        entry->at = team_->workspace + partial(team_->partial_in, node) +
                    partialRow(node == team_->node ? i : static_cast<uint32_t>(place));
        entry->weight = 1;
        return place != PROXYCCL_NO_ROW;
      });
      sumRows<T>(call_.output + token * row_bytes_, group.space(), Piece(row_bytes_, own_, item), group.lane);
      group.sync();
    }
  }

  PROXYCCL_DEVICE void acknowledge() const {
    __syncthreads();
    if (threadIdx.x < team_->local_size)
      team_.raise(threadIdx.x, team_.taken(team_->local_rank, block_), number_);
  }

 private:
  PROXYCCL_DEVICE const int32_t* rowsOf(uint32_t source, uint64_t token) const {
    return call_.layout.rows + (static_cast<uint64_t>(source) * team_->max_tokens + token) * topk_;
  }
  PROXYCCL_DEVICE uint64_t partial(uint64_t area, uint32_t node) const {
    return area + (number_ % 2 * team_->nodes + node) * team_->partial_bytes;
  }
  PROXYCCL_DEVICE uint64_t partialRow(uint32_t place) const {
    return block_ * team_->return_segment_bytes + place * stride_;
  }
  // Where, in the workspace of the rank that sums token i of a source, slot k's row goes.
  PROXYCCL_DEVICE uint64_t slotRow(uint32_t source, uint32_t i, uint32_t k) const {
    const uint64_t segment = topk_ * team_->return_segment_bytes;
    const uint64_t area = team_.isNear(source)
                              ? team_->returns
                              : team_->return_rails + team_.nodeOf(source) * team_->blocks * segment;
    return area + block_ * segment + (i * topk_ + k) * stride_;
  }
  // Behind a row, for each of its pieces: different groups bring them.
  PROXYCCL_DEVICE float& weightOf(char* row, uint32_t piece) const {
    return reinterpret_cast<float*>(row + rowStride(row_bytes_))[piece];
  }
  // With local_combine: where the sum of a rank of the node goes.
  PROXYCCL_DEVICE uint64_t sumRow(uint32_t local, uint32_t i) const {
    return team_->returns + (local * team_->blocks + block_) * team_->return_segment_bytes + i * stride_;
  }
  PROXYCCL_DEVICE uint64_t rowsFrom(uint32_t node) const {
    const uint32_t source = team_.member(node, team_->local_rank);
    const Segment& segment = team_.segmentOf(source);
    return rowsPlaced(call_.layout.places + static_cast<uint64_t>(source) * team_->max_tokens + segment.begin,
                      segment.tokens);
  }

  // By a group: returns what this rank has of an item of a source.
  PROXYCCL_DEVICE void sendItem(const Group& group, uint32_t item, uint32_t source) const {
    const Segment& segment = team_.segmentOf(source);
    if (item >= segment.items()) return;
    const uint32_t to = team_.localOf(source), i = segment.tokenOf(item);
    if (to == team_->local_rank && !team_->local_combine) return;  // read where it is
    const Piece piece(row_bytes_, segment, item);
    const int32_t* rows = rowsOf(source, segment.begin + i);
    if (team_->local_combine) return sendSum(group, rows, piece, team_.peer(to) + sumRow(team_->local_rank, i));
    GroupSpace& space = group.space();
    group.list(topk_, [&](uint32_t k, RowEntry* entry) {
      *entry = {team_.peer(to) + slotRow(source, i, k), rows[k], 0};
      return entry->number != PROXYCCL_NO_ROW;
    });
    for (uint32_t slot = 0; slot < space.count; ++slot) {
      char* target = space.at[slot];
      const int64_t row = space.number[slot];
      if (row >= 0) {
        copyToEach(&space.at[slot], 1, piece.begin, call_.rows + row * row_bytes_ + piece.begin,
                   piece.end - piece.begin, group.lane);
      } else {  // it did not fit in the output, and counts as zero
        for (uint64_t at = piece.begin + group.lane; at < piece.end; at += kGroupLanes) target[at] = 0;
      }
      if (call_.weights != nullptr && group.lane == 0)
        weightOf(target, segment.pieceOf(item)) = row >= 0 ? call_.weights[row] : 0;
    }
    group.sync();
  }

  PROXYCCL_DEVICE void sendSum(const Group& group, const int32_t* rows, const Piece& piece, char* target) const {
    // Also where no row of the token fitted in the output a sum is awaited; it is zero.
    if (!group.any(topk_, [&](uint32_t k) { return rows[k] != PROXYCCL_NO_ROW; })) return;
    group.list(topk_, [&](uint32_t k, RowEntry* entry) { return ownRow(rows[k], entry); });
    sumRows<T>(target, group.space(), piece, group.lane);
    group.sync();
  }
  PROXYCCL_DEVICE bool ownRow(int32_t row, RowEntry* entry) const {
    if (row < 0) return false;
    entry->weight = call_.weights != nullptr ? call_.weights[row] : 1;
    entry->at = const_cast<char*>(call_.rows) + row * row_bytes_;
    return true;
  }

  // By a group: sums what this rank's node made of an item of a source: this rank, or one that has its number.
  PROXYCCL_DEVICE void takeItem(const Group& group, uint32_t item, uint32_t source) const {
    const Segment& segment = team_.segmentOf(source);
    const uint32_t i = segment.tokenOf(item), node = team_.nodeOf(source);
    const uint64_t token = segment.begin + i;
    const Piece piece(row_bytes_, segment, item);
    char* target = call_.output + token * row_bytes_;
    if (team_->nodes > 1) {
      const int32_t place =
          node == team_->node
              ? static_cast<int32_t>(i)
              : call_.layout.places[static_cast<uint64_t>(source) * team_->max_tokens + token];
      if (place == PROXYCCL_NO_ROW) return;
      target = team_->workspace + partial(node == team_->node ? team_->partial_in : team_->partial_out, node) +
               partialRow(static_cast<uint32_t>(place));
    }
    const int32_t* ids = call_.layout.expert_ids + (static_cast<uint64_t>(node) * team_->max_tokens + token) * topk_;
    const uint64_t value = flagValue(number_, item / Group::count() + 1);
    if (team_->local_combine) {
      group.list(team_->local_size,
                 [&](uint32_t l, RowEntry* entry) { return findSum(group, ids, value, i, l, entry); });
    } else {
      const int32_t* rows = rowsOf(source, token);
      group.list(topk_, [&](uint32_t k, RowEntry* entry) {
        const uint32_t rank = static_cast<uint32_t>(ids[k]) / team_->experts_per_rank;
        if (rank >= team_->world_size || !team_.isNear(rank)) return false;
        if (rank == team_->rank) return ownRow(rows[k], entry);
        team_.await(team_.returned(team_.localOf(rank), block_, group.number), value, rank);
        entry->at = team_->workspace + slotRow(source, i, k);
        entry->weight = call_.weights != nullptr ? weightOf(entry->at, segment.pieceOf(item)) : 1;
        return true;
      });
    }
    sumRows<T>(target, group.space(), piece, group.lane);
    group.sync();
  }

  // By one thread: the sum that a rank of the node made of its rows of a token, when it is there.
  PROXYCCL_DEVICE bool findSum(const Group& group, const int32_t* ids, uint64_t value, uint32_t i, uint32_t local,
                               RowEntry* entry) const {
    const uint32_t rank = team_.nearRank(local);
    bool chosen = false;
    const uint32_t first = rank * team_->experts_per_rank;
#pragma unroll 8
    for (uint32_t k = 0; k < topk_; ++k) chosen |= static_cast<uint32_t>(ids[k]) - first < team_->experts_per_rank;
    if (!chosen) return false;
    team_.await(team_.returned(local, block_, group.number), value, rank);
    entry->at = team_->workspace + sumRow(local, i);
    entry->weight = 1;
    return true;
  }

  const ExpertTeam team_;
  const ProxycclCombine& call_;
  const uint64_t number_;
  const uint32_t block_, topk_;
  const uint64_t row_bytes_, stride_;  // behind a row its pieces' weights
  const Segment own_;
};

template <class T>
PROXYCCL_DEVICE void expert_combine(const ProxycclExperts& experts, const ProxycclCombine& call) {
  __shared__ uint32_t finished;
  const Combine<T> combine(experts, call);
  const Group group;
  const bool sends = call.phases & PROXYCCL_EXPERT_SEND, receives = call.phases & PROXYCCL_EXPERT_RECEIVE;
  if (threadIdx.x == 0) finished = 0;
  if (sends) combine.awaitTakers();
  __syncthreads();
  if (sends) combine.send(group);
  if (receives) combine.receive(group, &finished);
  if (receives && experts.nodes > 1) combine.sumNodes(group);
  if (receives) combine.acknowledge();
  finishExperts(experts, &experts.counters->combines, receives);
}

// output[tokens][hidden] = each row times its weight. The two arrays may be one.
template <class T>
PROXYCCL_DEVICE void expert_scale(const ProxycclExperts&, const ProxycclCombine& call) {
  using A = typename Element<T>::Accumulator;
  const T* rows = reinterpret_cast<const T*>(call.rows);
  forEach(call.tokens * call.hidden, blockIdx.x * blockDim.x + threadIdx.x, gridDim.x * blockDim.x, [&](size_t i) {
    const A weight = static_cast<A>(call.weights[i / call.hidden]);
    reinterpret_cast<T*>(call.output)[i] = Element<T>::narrow(weight * Element<T>::widen(rows[i]));
  });
}

}  // namespace proxyccl

#endif
