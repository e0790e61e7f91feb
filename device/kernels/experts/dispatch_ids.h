// Dispatch by announced ids: every block receives the expert ids of all ranks' slots and counts them itself.
#pragma once

#include "exclusive_scan.h"
#include "experts/dispatch_block.h"

namespace proxyccl {

template <class Mode>
PROXYCCL_DEVICE bool Dispatch<Mode>::awaitIds(Gathered* gathered) const {
  const uint32_t ranks = team_->world_size, per_rank = team_->experts_per_rank, own = team_->rank * per_rank;
  const uint32_t n = team_.experts();
  uint32_t *first = bases(), *before = first + n;
  AnnouncedState& state = announcedState();
  if (!announced_.await()) state.incomplete = true;
  syncThreadsSystem();  // this barrier also orders the stores of the block's sent rows before publishSent()
  if (state.incomplete) return false;
  setSegments(threadIdx.x, blockDim.x);
#pragma unroll 1
  for (uint32_t s = threadIdx.x; s < ranks; s += blockDim.x)
    if (announced_.wantedTokens(s) != 0) atomicMax(&state.wanted_tokens, announced_.wantedTokens(s));
  uint32_t rows_before = 0;  // number of rows on ranks with lower numbers
  announced_.forEachSlot(0, ranks, threadIdx.x, blockDim.x, [&](uint32_t source, uint32_t slot, uint32_t expert) {
    if (expert == IdAnnouncement::kBadExpert) atomicMin(&state.bad_slot, source << 16 | slot);
    rows_before += expert < own;
    if (expert - own >= per_rank) return;
    const uint32_t i = (expert - own) * ranks + source;
    atomicAdd(&first[i], 1u);
    // The segment's first token is computed here, not loaded, because no barrier has followed the other thread's store
    // of this number.
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
PROXYCCL_DEVICE void Dispatch<Mode>::numberOwnSlots() const {
  const uint32_t slots = segmentSlots(), per_rank = team_->experts_per_rank;
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < team_->world_size * slots; i += blockDim.x) {
    const uint32_t source = i / slots, slot = i % slots;
    const Segment& segment = team_.segmentOf(source);
    if (slot >= segment.tokens * topk_) continue;
    const uint32_t first = segment.begin * topk_, expert = announced_.expert(source, first + slot);
    if (expert - team_->rank * per_rank >= per_rank) continue;
    uint32_t position = 0;
#pragma unroll 8
    for (uint32_t other = 0; other < slot; ++other) position += announced_.expert(source, first + other) == expert;
    positions()[i] = static_cast<uint16_t>(position);
  }
}

template <class Mode>
PROXYCCL_DEVICE void Dispatch<Mode>::writeIdCounts(const Group& group, uint32_t rows) const {
  const uint32_t experts = team_.experts(), ranks = team_->world_size, segments = team_->segments;
  uint32_t* counts = bases() + experts;  // reuses the counters `before` of awaitIds(), which has returned
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
  writeTotals(group, rows, [&](uint32_t rank) {
    uint32_t of_rank = 0, most = 0;
#pragma unroll 1
    for (uint32_t e = 0; e < team_->experts_per_rank; ++e) {
      const uint32_t own = alignedRows(counts[rank * team_->experts_per_rank + e]);
      of_rank += own;
      most = own > most ? own : most;
    }
    return isPadded() ? most : of_rank;
  });
}

}  // namespace proxyccl
