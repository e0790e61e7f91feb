// Dispatch by counts: each block counts its segment's slots by expert and sends the counts to all ranks.
//
// The number of a slot's row is a sum of three numbers: the first row that the slot's expert gets from the slot's
// source, the number of slots with that expert in the source's earlier segments, and the number of such slots before
// the slot in its own segment. The expert's first row and the number in earlier segments are sums of counts; the number
// in the slot's own segment is in the segment's routing.
#pragma once

#include "exclusive_scan.h"
#include "experts/dispatch_block.h"

namespace proxyccl {

template <class Mode>
PROXYCCL_DEVICE void Dispatch<Mode>::route() const {
  char* own = inbox(team_->local_rank, team_->local_rank) + team_.routingAt(segment_);
  uint32_t* counts = countsOf(own);
  const uint32_t n = own_.tokens * topk_, experts = team_.experts();
  const uint32_t chosen = team_->world_size * team_->chosen_per_rank;

  __shared__ uint32_t bad_slot;
  if (threadIdx.x == 0) bad_slot = ~0u;
  for (uint32_t e = threadIdx.x; e < experts + chosen; e += blockDim.x) counts[e] = 0;
  __syncthreads();
#pragma unroll 1
  for (uint32_t s = threadIdx.x; s < n; s += blockDim.x) {
    const int32_t target = choices_.target(own_.begin * topk_ + s);
    const uint64_t carried = choices_.areCarried() ? choices_.carried(own_.begin * topk_ + s) : 0;
    if (keepsTargets()) {
      keptTargets()[s] = static_cast<uint16_t>(target);
    } else {
      writeId(s, choices_.id(own_.begin * topk_ + s));
    }
    if (target < 0) atomicMin(&bad_slot, own_.begin * topk_ + s);
    if (!choices_.areCarried()) continue;
    toNode([&](char* routing) {
      storeRaw(routing + team_->weights_offset + s * static_cast<uint64_t>(team_->weight_bytes), carried,
               team_->weight_bytes);
    });
    if (chosen == 0) continue;
    const uint32_t choice = static_cast<uint32_t>(__builtin_bit_cast(ProxycclExpertChoice, carried).expert);
    if (choice < chosen) atomicAdd(&counts[experts + choice], 1u);
  }
  __syncthreads();
  if (keepsTargets() && choices_.byRank()) dropLaterTargets();
  countSlots(n, counts);
  syncThreadsDevice();
  const ProxycclExpertSegment head = {call_.tokens, bad_slot, call_.wanted_tokens, call_.output_buffer};
  toNode([&](char* routing) {
    if (threadIdx.x == 0) *reinterpret_cast<ProxycclExpertSegment*>(routing) = head;
    for (uint32_t e = threadIdx.x; routing != own && e < experts + chosen; e += blockDim.x)
      countsOf(routing)[e] = counts[e];
  });
  if (crossesNodes()) {
    placeTokens();
    syncThreadsDevice();
  }
  for (uint32_t node = 0; node < team_->nodes; ++node) {
    if (node == team_->node) continue;
    char* to = team_->workspace + team_.outbox(number_, node) + team_.routingAt(segment_);
    const uint64_t weights = choices_.areCarried() ? static_cast<uint64_t>(n) * team_->weight_bytes : 0;
    copyBytes(to, own, team_->slots_offset + n * sizeof(ProxycclExpertSlot), threadIdx.x, blockDim.x);
    copyBytes(to + team_->weights_offset, own + team_->weights_offset, weights, threadIdx.x, blockDim.x);
    const int32_t* places = sentPlaces(node);
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < own_.tokens; i += blockDim.x) placesOf(to)[i] = places[i];
  }
  syncThreadsSystem();
  if (threadIdx.x < team_->local_size) team_.raise(threadIdx.x, team_.routed(team_->rank, segment_), number_);
  if (!crossesNodes()) return;
  __shared__ bool posts;
  if (threadIdx.x == 0) posts = team_.completes(team_.routingArrivals(), team_->segments);
  __syncthreads();
  if (posts && threadIdx.x < team_->nodes && threadIdx.x != team_->node)
    team_.post(team_.routingChannel(threadIdx.x), team_.rail(number_, team_->node), team_.outbox(number_, threadIdx.x),
               team_->segments * team_->routing_bytes);
}

template <class Mode>
PROXYCCL_DEVICE void Dispatch<Mode>::dropLaterTargets() const {
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < own_.tokens; i += blockDim.x) {
    uint16_t* targets = keptTargets() + i * topk_;
    uint64_t seen[PROXYCCL_MAX_EXPERT_RANKS / 64] = {};  // one bit per rank, 64 ranks per word
#pragma unroll 1
    for (uint32_t k = 0; k < topk_; ++k) {
      const uint32_t rank = targets[k];
      if (rank >= team_->world_size) continue;
      bool first = true;
#pragma unroll
      for (uint32_t w = 0; w < PROXYCCL_MAX_EXPERT_RANKS / 64;
           ++w) {  // unrolled, because a variable index would move the words from registers to memory
        const uint64_t bit = rank / 64 == w ? 1ull << rank % 64 : 0;
        first &= (seen[w] & bit) == 0;
        seen[w] |= bit;
      }
      if (!first) targets[k] = static_cast<uint16_t>(team_->world_size);
    }
  }
  __syncthreads();
}

template <class Mode>
PROXYCCL_DEVICE void Dispatch<Mode>::countSlots(uint32_t n, uint32_t* counts) const {
  __shared__ uint16_t before[kScratch];  // for each word of bits, the number of the expert's bits before this word
  uint32_t* bits = scratch();
  const uint32_t experts = team_.experts();
  const uint32_t some = experts < kScratch ? experts : kScratch, words = kScratch / some;
  for (uint32_t start = 0; start < n; start += 32 * words) {
    const uint32_t size = n - start < 32 * words ? n - start : 32 * words;
    for (uint32_t first = 0; first < experts; first += some) {
#pragma unroll 1
      for (uint32_t i = threadIdx.x; i < some * words; i += blockDim.x) bits[i] = 0;
      __syncthreads();
#pragma unroll 1
      for (uint32_t i = threadIdx.x; i < size; i += blockDim.x) {
        const uint32_t expert = countedId(start + i);
        if (expert - first < some && expert < experts) {
          atomicOr(&bits[(expert - first) * words + i / 32], 1u << i % 32);
        } else if (first == 0 && expert >= experts) {
          storeSlot(start + i, {PROXYCCL_NO_EXPERT, 0});
        }
        if (first == 0 && keepsTargets()) writeId(start + i, static_cast<int32_t>(expert));
      }
      __syncthreads();
      const uint32_t used = (size + 31) / 32;
#pragma unroll 1
      for (uint32_t i = threadIdx.x; i < some * used; i += blockDim.x) {
        const uint32_t* of_expert = bits + i / used * words;
        const uint32_t word = i % used;
        uint32_t count = 0;
#pragma unroll 4
        for (uint32_t w = 0; w < word; ++w) count += countBits(of_expert[w]);
        before[i / used * words + word] = static_cast<uint16_t>(count);
      }
      __syncthreads();
#pragma unroll 1
      for (uint32_t i = threadIdx.x; i < size; i += blockDim.x) {
        const uint32_t expert = countedId(start + i), at = (expert - first) * words + i / 32;
        if (expert - first >= some || expert >= experts) continue;
        const uint32_t in_tile = before[at] + countBits(bits[at] & ((1u << i % 32) - 1));
        storeSlot(start + i, {expert, (start == 0 ? 0 : counts[expert]) + in_tile});
      }
      __syncthreads();
      for (uint32_t e = threadIdx.x; e < some && first + e < experts; e += blockDim.x) {
        const uint32_t last = e * words + used - 1;
        counts[first + e] += before[last] + countBits(bits[last]);
      }
      __syncthreads();
    }
  }
}

template <class Mode>
PROXYCCL_DEVICE void Dispatch<Mode>::placeTokens() const {
  const Group group;
  const uint32_t begin = team_.batchFrom(team_->rank).begin, end = own_.begin + own_.tokens;
  for (uint32_t node = group.number; node < team_->nodes; node += Group::count()) {
    uint32_t placed = 0;
    for (uint32_t first = begin; first < end; first += kGroupLanes) {
      const uint32_t token = first + group.lane;
      const bool goes =
          token < end && choices_.anyRank(token, [&](uint32_t rank) { return team_.nodeOf(rank) == node; });
      const uint64_t all = group.ballot(goes);
      const uint32_t place = placed + countBits(all & ((1ull << group.lane) - 1));
      if (token >= own_.begin && token < end)
        sentPlaces(node)[token - own_.begin] = goes ? static_cast<int32_t>(place) : PROXYCCL_NO_ROW;
      placed += countBits(all);
    }
  }
}

template <class Mode>
PROXYCCL_DEVICE void Dispatch<Mode>::forwardRouting() const {
  const uint32_t node = threadIdx.x;
  if (blockIdx.x != 0 || node >= team_->nodes || node == team_->node) return;
  team_.awaitPost(team_.routingChannel(node));
  for (uint32_t l = 0; l < team_->local_size; ++l)
    team_.raise(l, team_.routed(team_.member(node, team_->local_rank), 0), number_);
}

template <class Mode>
PROXYCCL_DEVICE void Dispatch<Mode>::awaitRouting() const {
  const uint32_t segments = team_->segments;
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < team_->world_size * segments; i += blockDim.x)
    if (isNear(i / segments) || i % segments == 0)  // another node's routing raises only flag 0
      team_.await(team_.routed(i / segments, i % segments), number_, i / segments);
  __syncthreads();
}

template <class Mode>
PROXYCCL_DEVICE bool Dispatch<Mode>::gatherCounts(const Group& group, Gathered* gathered) const {
  __shared__ uint32_t bad_rank, wanted_tokens;
  const uint32_t ranks = team_->world_size, segments = team_->segments, per_rank = team_->experts_per_rank;
  const uint32_t n = ranks * per_rank, own = team_->rank * per_rank;
  const bool tells = tellsChosen() && blockIdx.x == (storesCounted() ? team_->blocks - 1 : 0);
  uint32_t *first = bases(), *before = first + n;
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < countersUsed(); i += blockDim.x) first[i] = 0;
  if (threadIdx.x == 0) {
    bad_rank = ~0u;
    wanted_tokens = 0;
  }
  awaitRouting();
  for (uint32_t i = group.number; i < ranks * segments; i += Group::count()) {
    const uint32_t source = i / segments, segment = i % segments;
    const char* routing = slabOf(source) + team_.routingAt(segment);
    const auto* head = reinterpret_cast<const ProxycclExpertSegment*>(routing);
    if (group.lane == 0 && head->bad_slot != ~0u) atomicMin(&bad_rank, source);
    if (group.lane == 0 && head->wanted_tokens != 0) atomicMax(&wanted_tokens, head->wanted_tokens);
#pragma unroll 1
    for (uint32_t e = group.lane; e < per_rank; e += kGroupLanes) {
      const uint32_t slots = countsOf(routing)[own + e];
      if (slots == 0) continue;
      atomicAdd(&first[e * ranks + source], slots);
      if (segment < segment_) atomicAdd(&before[e * ranks + source], slots);
    }
    const uint32_t* choices = countsOf(routing) + n + team_->rank * team_->chosen_per_rank;
#pragma unroll 1
    for (uint32_t e = group.lane; tells && e < team_->chosen_per_rank; e += kGroupLanes)
      if (choices[e] != 0) atomicAdd(&chosen()[e], choices[e]);
  }
  if (!hasRouting()) return false;
  *gathered = {placeRows(first, before), bad_rank, ~0u, wanted_tokens};
  for (uint32_t segment = 0; bad_rank != ~0u && segment < segments; ++segment) {
    const uint32_t slot = segmentOf(bad_rank, segment).bad_slot;
    gathered->bad_slot = slot < gathered->bad_slot ? slot : gathered->bad_slot;
  }
  return true;
}

template <class Mode>
PROXYCCL_DEVICE uint32_t Dispatch<Mode>::placeRows(uint32_t* first, const uint32_t* before) const {
  const uint32_t ranks = team_->world_size, experts = team_->experts_per_rank, room = call_.padded_rows;
  if (team_->expert_alignment != 0) alignExperts(first);
  if (!isPadded()) return exclusiveScan(first, before, ranks * experts);
  __shared__ uint32_t rows;
  if (threadIdx.x == 0) rows = 0;
  __syncthreads();
#pragma unroll 1
  for (uint32_t e = threadIdx.x; e < experts; e += blockDim.x) {
    uint32_t row = e * room;
    for (uint32_t i = e * ranks; i < (e + 1) * ranks; ++i) {
      const uint32_t slots = first[i];
      first[i] = row + before[i];
      row += slots;
    }
    const uint32_t came = row - e * room, kept = came < room ? came : room;  // rows beyond the room are dropped
    atomicAdd(&rows, kept);
    if (blockIdx.x == 0) call_.layout.expert_rows[e] = static_cast<int32_t>(kept);
  }
  __syncthreads();
  return rows;
}

template <class Mode>
PROXYCCL_DEVICE void Dispatch<Mode>::alignExperts(uint32_t* rows) const {
  const uint32_t ranks = team_->world_size;
  const bool tells = blockIdx.x == 0 && call_.phases & PROXYCCL_EXPERT_GATHER;
#pragma unroll 1
  for (uint32_t e = threadIdx.x; e < team_->experts_per_rank; e += blockDim.x) {
    uint32_t own = 0;
    for (uint32_t source = 0; source < ranks; ++source) own += rows[e * ranks + source];
    rows[(e + 1) * ranks - 1] += alignedRows(own) - own;
    if (tells) storeRelaxedSystem(&team_->chosen_rows[e], own);
  }
  syncThreadsSystem();  // orders the stores of all threads before the release in publishReceivedRows()
}

template <class Mode>
PROXYCCL_DEVICE void Dispatch<Mode>::prepareReceive(uint32_t rows) const {
  if (kAnnounced && !call_.redispatch) return;  // gather() has set the segments and the range
  setSegments(threadIdx.x, blockDim.x);
  Range& range = ownRows();
  if (threadIdx.x == 0) range = {0, rows};
  syncThreadsSystem();  // this barrier also orders the stores of the block's sent rows before publishSent()
  if (call_.scatter == nullptr || call_.redispatch) return;
  const uint32_t before = team_->rank * team_->experts_per_rank, n = team_->world_size * team_->segments;
  uint32_t own = 0;
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < n * before; i += blockDim.x) {
    const uint32_t segment = i / before;
    own += countsOf(slabOf(segment / team_->segments) + team_.routingAt(segment % team_->segments))[i % before];
  }
  if (own != 0) atomicAdd(&range.first, own);
  __syncthreads();
}

template <class Mode>
PROXYCCL_DEVICE void Dispatch<Mode>::publishReceivedRows(const Gathered& gathered) const {
  ProxycclReceivedRows* to = team_->received_rows;
  storeRelaxedSystem(&to->rows, gathered.rows);
  if (gathered.bad_rank != PROXYCCL_NO_PEER) {  // no dispatch resets bad_rank, because the CPU may read bad_rank late
    storeRelaxedSystem(&to->bad_slot, gathered.bad_slot);
    storeRelaxedSystem(&to->bad_rank, gathered.bad_rank);
  }
  storeRelaxedSystem(&to->wanted_tokens, gathered.wanted_tokens);
#pragma unroll 1
  for (uint32_t e = 0; tellsChosen() && e < team_->chosen_per_rank; ++e)
    storeRelaxedSystem(&team_->chosen_rows[e], chosen()[e]);
  storeReleaseSystem(&to->ticket, call_.ticket);
}

template <class Mode>
PROXYCCL_DEVICE void Dispatch<Mode>::writeCounts(uint32_t rows) const {
  __shared__ uint32_t most;
  const uint32_t experts = team_.experts(), ranks = team_->world_size;
  __syncthreads();  // after this barrier, all threads have read the sources' token counts
  if (threadIdx.x == 0) most = 0;
  __syncthreads();
  // The array of the sources' token counts, which have been read, is reused for the number of rows of each rank.
  uint32_t* rows_of = tokensOf();
#pragma unroll 1
  for (uint32_t s = threadIdx.x; s < ranks; s += blockDim.x) {
    call_.layout.tokens[s] = static_cast<int32_t>(rows_of[s]);
    rows_of[s] = 0;
  }
  __syncthreads();
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < ranks * experts; i += blockDim.x) {
    const char* slab = slabOf(i / experts);
    uint32_t slots = 0;
#pragma unroll 8
    for (uint32_t b = 0; b < team_->segments; ++b) slots += countsOf(slab + team_.routingAt(b))[i % experts];
    call_.layout.counts[i] = static_cast<int32_t>(slots);
    if (slots != 0 && !isPadded()) atomicAdd(&rows_of[i % experts / team_->experts_per_rank], slots);
  }
  __syncthreads();
#pragma unroll 1
  for (uint32_t e = threadIdx.x; (team_->expert_alignment > 1 || isPadded()) && e < experts; e += blockDim.x) {
    uint32_t own = 0;
    for (uint32_t s = 0; s < ranks; ++s) own += static_cast<uint32_t>(call_.layout.counts[s * experts + e]);
    uint32_t* of_rank = &rows_of[e / team_->experts_per_rank];
    if (isPadded()) {
      atomicMax(of_rank, own);
    } else {
      atomicAdd(of_rank, alignedRows(own) - own);
    }
  }
  __syncthreads();
  for (uint32_t rank = threadIdx.x; rank < ranks; rank += blockDim.x) atomicMax(&most, rows_of[rank]);
  __syncthreads();
  if (threadIdx.x == 0) writeRowTotals(rows, most);
}

template <class Mode>
template <class RowsOf>
PROXYCCL_DEVICE void Dispatch<Mode>::writeTotals(const Group& group, uint32_t rows, RowsOf rowsOf) const {
  uint32_t& most = group.space().count;
  if (group.lane == 0) most = 0;
  group.sync();
#pragma unroll 1
  for (uint32_t rank = group.lane; rank < team_->world_size; rank += kGroupLanes) atomicMax(&most, rowsOf(rank));
  group.sync();
  if (group.lane == 0) writeRowTotals(rows, most);
  group.sync();
}

}  // namespace proxyccl
