// The receiving part of a dispatch: copies each received row to the rows of its experts on this rank, and writes the
// numbers of those rows to the layout.
#pragma once

#include "experts/dispatch_block.h"

namespace proxyccl {

template <class Mode>
PROXYCCL_DEVICE void Dispatch<Mode>::receive(const Group& group, uint32_t* next_item, const Gathered& gathered) const {
  if (crossesNodes() && group.number == Group::count() - 1 && movesRows()) forwardRows(group);
  const uint32_t ranks = team_->world_size;
  // In a dispatch by announcements, groups without a row to copy write the layout's tables. The table of counts is the
  // first task, before the rows, because this task keeps one group busy longest; the other tables come after the rows.
  const bool describes = describesApart(), counts = kAnnounced && describes;
  const uint32_t most = team_.mostItems();
  const uint32_t copies = (movesRows() && !storesRows()) || !describes ? most * ranks : 0;
  const uint32_t described = describes && !kMasks && !describesSlots() ? team_->segment_tokens * ranks : 0;
  uint64_t arrived = 0;
  for (;;) {
    uint32_t next = group.next(next_item);
    if (counts && next-- == 0) {
      if constexpr (kAnnounced) awaitPreviousReaders(group);
      if constexpr (kIds) writeIdCounts(group, gathered.rows);
      if constexpr (kMasks)
        if (blockIdx.x == 0) writeMaskCounts(group, gathered.rows);
    } else if (next < copies) {
      // This rank's own rows come first, because they need no wait. In a dispatch by counts, the rows of all other
      // ranks arrive one by one, so the sources are served in turn. In a dispatch by announcements, all rows of a
      // source arrive together.
      const uint32_t item = kAnnounced ? next % most : next / ranks, turn = kAnnounced ? next / most : next;
      receiveItem(group, item, (team_->rank + turn) % ranks, &arrived);
    } else if (next - copies < described) {
      if constexpr (!kMasks) describeToken(group, (next - copies) % ranks, (next - copies) / ranks);
    } else {
      return;
    }
  }
}

template <class Mode>
PROXYCCL_DEVICE void Dispatch<Mode>::forwardRows(const Group& group) const {
  for (uint32_t node = 0; node < team_->nodes; ++node) {
    if (node == team_->node) continue;
    const uint32_t source = team_.member(node, team_->local_rank);
    if (team_.batchFrom(source).first != segment_) continue;
    if (group.lane == 0) team_.awaitPost(team_.channel(team_->out_channels, node, segment_));
    group.sync();
    for (uint32_t l = group.lane; l < team_->local_size; l += kGroupLanes)
      team_.raise(l, team_.sent(source, segment_), flagValue(number_, kAllItems));
  }
}

template <class Mode>
PROXYCCL_DEVICE void Dispatch<Mode>::awaitItem(const Group& group, uint32_t item, uint32_t source,
                                               uint64_t* arrived) const {
  if (!kAnnounced) {
    const uint32_t number = item * team_->segments + segment_, parts = team_.parts();
    if (group.lane == 0) {
      if (isNear(source)) {
        team_.awaitSent(source, number % parts, number_, number / parts + 1);
      } else {
        team_.awaitSent(source, team_.batchFrom(source).first, number_, kAllItems);
      }
    }
    group.sync();
    return;
  }
  if (source < 64 && *arrived >> source & 1) return;
#if !PROXYCCL_ON_HOST
  const uint64_t all = flagValue(number_, kAllItems);
  // Each thread loads the flag of another rank, because several loads take no longer than one.
  const char* flag = team_->workspace + team_.sent(group.lane, segment_);
  const bool polls = group.lane < team_->world_size;
  *arrived |=
      ballotWarp(polls && hasReached(loadAcquireSystem(reinterpret_cast<const uint64_t*>(flag)), all, kTwoCalls));
  group.sync();
  if (source < 64 && *arrived >> source & 1) return;
#endif
  if (group.lane == 0) team_.awaitSent(source, segment_, number_, kAllItems);
  group.sync();
  if (source < 64) *arrived |= 1ull << source;
}

template <class Mode>
PROXYCCL_DEVICE void Dispatch<Mode>::receiveItem(const Group& group, uint32_t item, uint32_t source,
                                                 uint64_t* arrived) const {
  const Segment& segment = team_.segmentOf(source);
  if (item >= segment.items()) return;
  GroupSpace& space = group.space();
  const uint32_t i = segment.tokenOf(item);
  const bool describe = segment.pieceOf(item) == 0 && !call_.redispatch && !describesApart();
  const uint64_t token = segment.begin + i;
  int32_t place = static_cast<int32_t>(i);
  if (!isNear(source)) {
    int32_t& layout_place = call_.layout.places[static_cast<uint64_t>(source) * team_->max_tokens + token];
    place = call_.redispatch ? layout_place : placesOf(routingOf(source))[i];
    if (describe && group.lane == 0) layout_place = place;
  }
  findTokenRows(group, source, i, describe);
  group.list(topk_, [&](uint32_t k, RowEntry* entry) {
    const int32_t row = space.row[k];
    if (row < 0) return false;
    entry->at = call_.output + row * (call_.row_bytes - call_.scale_bytes);
    entry->number = row;
    return true;
  });
  if (space.count != 0) {
    if (movesRows()) {
      const char* from = call_.input + token * call_.row_bytes;
      if (source != team_->rank) {
        awaitItem(group, item, source, arrived);
        const char* slab = kAnnounced ? inbox(team_->local_rank, team_.localOf(source)) : slabOf(source);
        from = slab + (isNear(source) ? rowAt(place) : batchRowAt(team_.batchFrom(source), place));
      }
      const Piece piece(call_.row_bytes, segment, item);
      const uint64_t scales = call_.row_bytes - call_.scale_bytes;  // offset of the scales in the row
      const uint64_t end = piece.end < scales ? piece.end : scales;
      if (piece.begin < end)
        copyToEach(space.at, space.count, piece.begin, from + piece.begin, end - piece.begin, group.lane);
      if (piece.end > scales) copyScales(group, from, piece.begin > scales ? piece.begin : scales, piece.end);
    }
    if (describe) describeRows(group, source, i);
  }
  group.sync();
}

template <class Mode>
PROXYCCL_DEVICE void Dispatch<Mode>::findTokenRows(const Group& group, uint32_t source, uint32_t i,
                                                   bool describe) const {
  GroupSpace& space = group.space();
  const uint64_t token = team_.segmentOf(source).begin + i;
  int32_t* rows = call_.layout.rows + (static_cast<uint64_t>(source) * team_->max_tokens + token) * topk_;
#pragma unroll 1
  for (uint32_t k = group.lane; k < topk_; k += kGroupLanes) {
    if (call_.redispatch) {
      space.row[k] = rows[k];
      continue;
    }
    if constexpr (kMasks) {
      space.row[k] = k == 0 ? maskedRow(source, token) : static_cast<int32_t>(PROXYCCL_NO_ROW);
      continue;
    }
    const ProxycclExpertSlot slot = slotOf(source, i, k);
    space.row[k] = rowOf(slot, source, token, k);
    if (!describe) continue;
    rows[k] = space.row[k];
    if (!isNear(source) && team_.localOf(source) == team_->local_rank)
      idsOf(team_.nodeOf(source), token)[k] =
          static_cast<int32_t>(slot.expert == PROXYCCL_NO_EXPERT ? team_.experts() : slot.expert);
  }
  group.sync();
}

template <class Mode>
PROXYCCL_DEVICE int32_t Dispatch<Mode>::rowOf(const ProxycclExpertSlot& slot, uint32_t source, uint64_t token,
                                              uint32_t k) const {
  const uint32_t expert = slot.expert - team_->rank * team_->experts_per_rank;
  if (slot.expert == PROXYCCL_NO_EXPERT || expert >= team_->experts_per_rank) return PROXYCCL_NO_ROW;
  uint64_t row = bases()[expert * team_->world_size + source] + slot.position;
  // If tokens choose an expert twice, the expert may get more rows than it has room for.
  if (isPadded() && row >= (expert + 1) * static_cast<uint64_t>(call_.padded_rows)) return PROXYCCL_PAST_END;
  if (call_.scatter != nullptr) {
    uint64_t before = token;
    for (uint32_t s = 0; s < source; ++s) before += tokensOf()[s];
    if (before < call_.scatter_tokens)
      row = static_cast<uint64_t>(static_cast<int64_t>(call_.scatter[before * topk_ + k]) - ownRows().first);
    if (before >= call_.scatter_tokens || row >= ownRows().count) {
      storeRelaxedSystem<uint32_t>(&team_->received_rows->bad_index, 1);
      return PROXYCCL_PAST_END;
    }
  }
  return within(row);
}

template <class Mode>
PROXYCCL_DEVICE void Dispatch<Mode>::copyScales(const Group& group, const char* from, uint64_t begin,
                                                uint64_t end) const {
  const GroupSpace& space = group.space();
  const float* scales = reinterpret_cast<const float*>(from + begin);
  const uint64_t first = (begin - (call_.row_bytes - call_.scale_bytes)) / sizeof(float);
  const uint64_t columns = call_.scale_bytes / sizeof(float);
#pragma unroll 1
  for (uint64_t i = group.lane; i < (end - begin) / sizeof(float); i += kGroupLanes) {
    const float scale = scales[i];
#pragma unroll 1
    for (uint32_t slot = 0; slot < space.count; ++slot) {
      const uint32_t row = static_cast<uint32_t>(space.number[slot]);
      const uint64_t at = call_.scale_column == 0 ? row * columns + first + i : placeInColumn(row, columns, first + i);
      reinterpret_cast<float*>(call_.output_scales)[at] = scale;
    }
  }
}

template <class Mode>
PROXYCCL_DEVICE void Dispatch<Mode>::describeCounted() const {
  const uint32_t slots = segmentSlots();
#pragma unroll 1
  for (uint32_t n = threadIdx.x; n < team_->world_size * slots; n += blockDim.x) {
    const uint32_t source = n / slots, i = n % slots / topk_;
    const Segment& segment = team_.segmentOf(source);
    const uint32_t k = n % topk_;
    if (i < segment.tokens)
      describeSlot(source, segment.begin + i, k,
                   findOwnChoice(k, bases()[source], weightOf(source, i, k),
                                 [&](uint32_t other) { return slotOf(source, i, other); }));
  }
}

template <class Mode>
template <class SlotOf>
PROXYCCL_DEVICE typename Dispatch<Mode>::OwnChoice Dispatch<Mode>::findOwnChoice(uint32_t k, uint32_t first,
                                                                                 uint64_t carried,
                                                                                 SlotOf slotOf) const {
  // The token's row on this rank is the row of the slot that names this rank, if there is one.
  const auto choice = __builtin_bit_cast(ProxycclExpertChoice, carried);
  uint32_t at = topk_, position = 0;
#pragma unroll 8
  for (uint32_t other = 0; other < topk_; ++other) {
    const ProxycclExpertSlot slot = slotOf(other);
    if (slot.expert != team_->rank) continue;
    at = other;
    position = slot.position;
  }
  const int32_t row = at < topk_ ? within(first + position) : static_cast<int32_t>(PROXYCCL_NO_ROW);
  return {row, at == k, static_cast<uint32_t>(choice.expert), choice.weight};
}

template <class Mode>
PROXYCCL_DEVICE void Dispatch<Mode>::describeSlot(uint32_t source, uint64_t token, uint32_t k,
                                                  const OwnChoice& own) const {
  const int32_t row = own.row, own_row = own.is_first ? row : static_cast<int32_t>(PROXYCCL_NO_ROW);
  call_.layout.rows[(source * static_cast<uint64_t>(team_->max_tokens) + token) * topk_ + k] = own_row;
  if (row < 0) return;
  const uint64_t entry = static_cast<uint64_t>(row) * topk_ + k;
  const uint32_t expert = own.expert - team_->rank * team_->chosen_per_rank;
  const bool here = expert < team_->chosen_per_rank;
  call_.layout.token_rows[entry] = own_row;
  storeOwnExpert(entry, here ? static_cast<int32_t>(expert) : PROXYCCL_NO_ROW);
  if (call_.output_weights != nullptr) reinterpret_cast<float*>(call_.output_weights)[entry] = here ? own.weight : 0;
  if (!own.is_first) return;
  call_.layout.first_rows[row] = row;
  call_.layout.row_slots[row] = static_cast<int32_t>(k);
  call_.layout.row_tokens[row] = static_cast<int32_t>(token);
}

template <class Mode>
PROXYCCL_DEVICE void Dispatch<Mode>::describeRows(const Group& group, uint32_t source, uint32_t i) const {
  const GroupSpace& space = group.space();
  int32_t first = PROXYCCL_NO_ROW;
#pragma unroll 1
  for (uint32_t k = topk_; k > 0; --k)
    if (space.row[k - 1] >= 0) first = space.row[k - 1];
#pragma unroll 1
  for (uint32_t k = group.lane; k < topk_; k += kGroupLanes) {
    const int32_t row = space.row[k];
    if (row < 0) continue;
    // With `scatter` the caller chooses the rows. A row's entry in first_rows is PROXYCCL_NO_ROW until a slot uses the
    // row, so a second use of the row is detected.
    if (call_.scatter == nullptr) {
      call_.layout.first_rows[row] = first;
    } else if (atomicExch(&call_.layout.first_rows[row], first) != PROXYCCL_NO_ROW) {
      storeRelaxedSystem<uint32_t>(&team_->received_rows->bad_index, 1);
    }
    call_.layout.row_slots[row] = static_cast<int32_t>(k);
    if (call_.layout.row_tokens != nullptr)
      call_.layout.row_tokens[row] = static_cast<int32_t>(team_.segmentOf(source).begin + i);
    if (call_.output_weights != nullptr && team_->chosen_per_rank == 0)
      storeRaw(call_.output_weights + static_cast<uint64_t>(row) * team_->weight_bytes, weightOf(source, i, k),
               team_->weight_bytes);
  }
#pragma unroll 1
  for (uint32_t pair = group.lane; pair < topk_ * topk_; pair += kGroupLanes) {
    const int32_t row = space.row[pair / topk_], other = space.row[pair % topk_];
    if (row >= 0)
      call_.layout.token_rows[static_cast<uint64_t>(row) * topk_ + pair % topk_] =
          row == first && other >= 0 ? other : PROXYCCL_NO_ROW;
  }
  if (team_->chosen_per_rank != 0 && first >= 0) describeChoices(group, source, i, first);
}

template <class Mode>
PROXYCCL_DEVICE void Dispatch<Mode>::describeChoices(const Group& group, uint32_t source, uint32_t i,
                                                     int32_t row) const {
  const uint32_t per_rank = team_->chosen_per_rank, own = team_->rank * per_rank;
  const uint64_t first = static_cast<uint64_t>(row) * topk_;
  float* weights = reinterpret_cast<float*>(call_.output_weights) + first;
#pragma unroll 1
  for (uint32_t k = group.lane; k < topk_; k += kGroupLanes) {
    const auto choice = __builtin_bit_cast(ProxycclExpertChoice, weightOf(source, i, k));
    const uint32_t expert = static_cast<uint32_t>(choice.expert) - own;
    storeOwnExpert(first + k, expert < per_rank ? static_cast<int32_t>(expert) : PROXYCCL_NO_ROW);
    if (call_.output_weights != nullptr) weights[k] = expert < per_rank ? choice.weight : 0;
  }
}

}  // namespace proxyccl
