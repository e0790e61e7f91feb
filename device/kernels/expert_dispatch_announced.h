// Dispatch by announcements: every block has the expert ids of all ranks and counts them itself. In
// expert_dispatch_counts.h it receives these counts from the other ranks.
#ifndef PROXYCCL_EXPERT_DISPATCH_ANNOUNCED_H
#define PROXYCCL_EXPERT_DISPATCH_ANNOUNCED_H

#include "exclusive_scan.h"
#include "expert_dispatch_block.h"

namespace proxyccl {

template <class Mode>
PROXYCCL_DEVICE bool Dispatch<Mode>::awaitAnnouncements(Gathered* gathered) const {
  const uint32_t ranks = team_->world_size, per_rank = team_->experts_per_rank, own = team_->rank * per_rank;
  const uint32_t n = team_.experts();
  uint32_t *first = bases(), *before = first + n;
  AnnouncedState& state = announcedState();
  if (!announced_.awaitAnnouncements()) state.incomplete = true;
  if (storesRows()) {
    __syncthreads();
  } else {
    syncThreadsSystem();  // also for what the block has sent: publishSent() follows
  }
  if (state.incomplete) return false;
  setSegments();
  for (uint32_t rank = threadIdx.x; storesRows() && rank < ranks; rank += blockDim.x)
    outgoing()[rank].buffer = announced_.outputBuffer(rank);
  if (blockIdx.x == 0) countWanted();
  if (blockIdx.x == 0 && tellsChosen()) countChosen();
  uint32_t rows_before = 0;  // rows of lower ranks
  const bool by_rank = !PROXYCCL_ON_HOST && team_->chosen_per_rank != 0;
  if (by_rank) countAnnouncedRanks(first, before);
  announced_.forEachSlot(0, ranks, threadIdx.x, blockDim.x, [&](uint32_t source, uint32_t slot, uint32_t expert) {
    if (expert == Announcement::kBadExpert) atomicMin(&state.bad_slot, source << 16 | slot);
    if (by_rank) return;
    rows_before += expert < own;
    const bool earlier = source < team_->rank || (source == team_->rank && slot < own_.begin * topk_);
    if (storesRows() && earlier && expert < n) atomicAdd(&outgoing()[expert].row, 1u);
    if (expert - own >= per_rank) return;
    const uint32_t i = (expert - own) * ranks + source;
    atomicAdd(&first[i], 1u);
    // The segment's begin is computed again: another thread sets it, and no barrier is in between.
    if (slot < announced_.tokens(source) * segment_ / team_->segments * topk_) atomicAdd(&before[i], 1u);
  });
  if (call_.scatter != nullptr && rows_before != 0) atomicAdd(&ownRows().first, rows_before);
  __syncthreads();
  numberOwnSlots();
  *gathered = {placeRows(first, before), state.bad_slot >> 16, state.bad_slot & 0xffff, state.wanted_tokens};
  if (state.bad_slot == ~0u) gathered->bad_rank = gathered->bad_slot = ~0u;
  if (call_.scatter == nullptr) return true;
  if (threadIdx.x == 0) ownRows().count = gathered->rows;
  __syncthreads();
  return true;
}

template <class Mode>
PROXYCCL_DEVICE void Dispatch<Mode>::countAnnouncedRanks(uint32_t* first, uint32_t* before) const {
  const uint32_t ranks = team_->world_size, own = team_->rank, packets = team_->id_packets;
  const uint32_t lane = threadIdx.x % PROXYCCL_WARP_SIZE;
  auto add = [&](uint32_t* counter, bool counts) {
    const uint64_t all = ballotWarp(counts);
    if (lane == 0 && all != 0) atomicAdd(counter, countBits(all));
  };
#pragma unroll 1
  for (uint32_t source = 0; source < ranks; ++source) {
    const uint32_t begin = announced_.tokens(source) * segment_ / team_->segments * topk_;
#pragma unroll 1
    for (uint32_t start = 0; start < packets; start += blockDim.x) {
      const uint32_t packet = start + threadIdx.x, slot = packet * PROXYCCL_IDS_PER_PACKET;
      const uint64_t four = packet < packets ? announced_.idsOf(source, packet) : ~0ull;
#pragma unroll 1
      for (uint32_t rank = source > own ? own : 0; rank < (source > own ? own + 1 : ranks); ++rank)
#pragma unroll
        for (uint32_t k = 0; k < PROXYCCL_IDS_PER_PACKET; ++k) {
          const bool chosen = Announcement::idAt(four, k) == rank, is_before = chosen && slot + k < begin;
          if (rank == own) {
            add(&first[source], chosen);
            add(&before[source], is_before);
          }
          if (storesRows() && source <= own) add(&outgoing()[rank].row, source == own ? is_before : chosen);
        }
    }
  }
}

template <class Mode>
PROXYCCL_DEVICE void Dispatch<Mode>::countWanted() const {
#pragma unroll 1
  for (uint32_t s = threadIdx.x; s < team_->world_size; s += blockDim.x)
    if (announced_.wantedTokens(s) != 0) atomicMax(&announcedState().wanted_tokens, announced_.wantedTokens(s));
}

template <class Mode>
PROXYCCL_DEVICE void Dispatch<Mode>::countChosen() const {
  const uint32_t ranks = team_->world_size, per_rank = team_->chosen_per_rank;
  const uint32_t slots = team_->max_tokens * topk_;
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < ranks * slots; i += blockDim.x) {
    const uint32_t source = i / slots, slot = i % slots;
    if (slot >= announced_.tokens(source) * topk_) continue;
    const auto choice = __builtin_bit_cast(ProxycclExpertChoice, announced_.weight(source, slot));
    const uint32_t expert = static_cast<uint32_t>(choice.expert) - team_->rank * per_rank;
    if (expert < per_rank) atomicAdd(&chosen()[expert], 1u);
  }
}

template <class Mode>
PROXYCCL_DEVICE void Dispatch<Mode>::numberOwnSlots() const {
  const uint32_t slots = segmentSlots(), per_rank = team_->experts_per_rank;
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < team_->world_size * slots; i += blockDim.x) {
    const uint32_t source = i / slots, slot = i % slots;
    const Segment& segment = team_.segmentOf(source);
    if (slot >= segment.tokens * topk_) continue;
    const uint32_t first = segment.begin * topk_, expert = announced_.expert(source, first + slot);
    if (expert - team_->rank * per_rank >= per_rank && !(storesRows() && source == team_->rank)) continue;
    uint32_t position = 0;
#pragma unroll 8
    for (uint32_t other = 0; other < slot; ++other) position += announced_.expert(source, first + other) == expert;
    positions()[i] = static_cast<uint16_t>(position);
  }
}

template <class Mode>
PROXYCCL_DEVICE void Dispatch<Mode>::writeAnnouncedCounts(const Group& group, uint32_t rows) const {
#pragma unroll 1
  for (uint32_t l = group.lane; l < team_->local_size; l += kGroupLanes)
    team_.await(team_.read(l, segment_), number_ - 1, team_.nearRank(l));
  const uint32_t experts = team_.experts(), ranks = team_->world_size, segments = team_->segments;
  uint32_t* counts = bases() + experts;  // awaitAnnouncements() no longer needs these
  auto count = [&](uint32_t first, uint32_t sources) {
#pragma unroll 1
    for (uint32_t e = group.lane; e < experts; e += kGroupLanes) counts[e] = 0;
    group.sync();
    announced_.forEachSlot(first, sources, group.lane, kGroupLanes, [&](uint32_t, uint32_t, uint32_t expert) {
      if (expert < experts) atomicAdd(&counts[expert], 1u);
    });
    group.sync();
  };
#pragma unroll 1
  for (uint32_t s = segment_; s < ranks; s += segments) {
    count(s, 1);
#pragma unroll 1
    for (uint32_t e = group.lane; e < experts; e += kGroupLanes)
      call_.layout.counts[s * experts + e] = static_cast<int32_t>(counts[e]);
    if (group.lane == 0) call_.layout.tokens[s] = static_cast<int32_t>(tokensOf()[s]);
    group.sync();
  }
  if (segment_ != segments - 1) return;
  count(0, ranks);
  uint32_t& most = group.space().count;
  if (group.lane == 0) most = 0;
  group.sync();
#pragma unroll 1
  for (uint32_t rank = group.lane; rank < ranks; rank += kGroupLanes) {
    uint32_t of_rank = 0;
#pragma unroll 1
    for (uint32_t e = 0; e < team_->experts_per_rank; ++e)
      of_rank += alignedRows(counts[rank * team_->experts_per_rank + e]);
    atomicMax(&most, of_rank);
  }
  group.sync();
  if (group.lane == 0) writeRowTotals(rows, most);
  group.sync();
}

}  // namespace proxyccl

#endif
