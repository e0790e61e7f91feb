// The sending part of a dispatch: writes a token's row once to every rank of this node that has one of the token's
// experts, and once to every other node that has one.
#pragma once

#include "experts/dispatch_block.h"

namespace proxyccl {

template <class Mode>
PROXYCCL_DEVICE void Dispatch<Mode>::send(const Group& group, uint32_t block, uint32_t blocks,
                                          uint32_t* finished) const {
  const uint32_t parts = team_.parts(), segments = team_->segments;
  const uint32_t all = (Segment::longest(call_.tokens, segments) << own_.pieces_log2) * segments;
#pragma unroll 1
  for (uint32_t round = 0; round * parts < all; ++round)
#pragma unroll 1
    for (uint32_t part = group.number * blocks + block; part < parts; part += blocks * Group::count())
      sendItem(group, part, round);
  if (!crossesNodes() || group.lane != 0) return;
  // The last group of the last block has acquired the rows of all other groups and blocks.
  if (fetchAddAcqRelDevice<uint32_t>(finished, 1) + 1 != Group::count()) return;
  const Batch& batch = team_.batchFrom(team_->rank);
  if (!team_.completes(team_.arrivals(team_->node, batch.first), batch.segments())) return;
  for (uint32_t node = 0; node < team_->nodes; ++node) {
    if (node == team_->node) continue;
    const int32_t* places = call_.layout.sent_places + static_cast<uint64_t>(node) * team_->max_tokens + batch.begin;
    const uint64_t first = batchRowAt(batch, 0), rows = rowsPlaced(places, batch.tokens);
    team_.post(team_.channel(team_->out_channels, node, batch.first), team_.rail(number_, team_->node) + first,
               team_.outbox(number_, node) + first, rows * rowStride(call_.row_bytes));
  }
}

template <class Mode>
PROXYCCL_DEVICE void Dispatch<Mode>::sendItem(const Group& group, uint32_t part, uint32_t round) const {
  const uint32_t number = round * team_.parts() + part, item = number / team_->segments;
  const uint32_t at = kAnnounced ? segment_ : number % team_->segments;
  const Segment segment = kAnnounced ? own_ : Segment::of(call_.tokens, at, team_->segments);
  if (item >= segment.items()) return;
  GroupSpace& space = group.space();
  const uint32_t i = segment.tokenOf(item);
  const uint64_t token = segment.begin + i;
  const bool own = at == segment_ && !onlySends();
  // A slot's row goes to a rank of this node or to another node. The destination is the rank's number within this node,
  // or the other node's number with the bit kOtherNode set.
  constexpr int32_t kOtherNode = 1 << 16;
#pragma unroll 1
  for (uint32_t k = group.lane; k < topk_; k += kGroupLanes) {
    const uint32_t expert = static_cast<uint32_t>(own ? ownIds(i)[k] : choices_.id(token * topk_ + k));
    int32_t destination = PROXYCCL_NO_ROW;
    if (expert < team_.experts()) {
      const uint32_t rank = expert / team_->experts_per_rank, place = team_.placeOf(rank);
      if (!kAnnounced && place >> 16 != team_->node) {
        destination = kOtherNode | static_cast<int32_t>(place >> 16);
      } else if (rank != team_->rank) {  // rows for this rank are read from the input
        destination = static_cast<int32_t>(place & 0xffff);
      }
    }
    space.row[k] = destination;
  }
  group.sync();
  group.list(topk_, [&](uint32_t k, RowEntry* entry) {
    const int32_t destination = space.row[k];
    if (destination == PROXYCCL_NO_ROW) return false;
#pragma unroll 1
    for (uint32_t other = 0; other < k; ++other)
      if (space.row[other] == destination) return false;
    entry->number = destination;
    if (!kAnnounced && destination & kOtherNode) {
      const uint32_t node = static_cast<uint32_t>(destination & ~kOtherNode);
      entry->at = team_->workspace + team_.outbox(number_, node) +
                  batchRowAt(team_.batchFrom(team_->rank), sentPlaces(node)[i]);
    } else {
      entry->at =
          inbox(static_cast<uint32_t>(destination), team_->local_rank) + team_.rowAt(at, i, rowStride(call_.row_bytes));
    }
    return true;
  });
  const Piece piece(call_.row_bytes, segment, item);
  copyToEach(space.at, space.count, piece.begin, call_.input + token * call_.row_bytes + piece.begin,
             piece.end - piece.begin, group.lane);
  group.sync();
  if constexpr (!kAnnounced) {  // if choices are announced, publishSent() raises one flag for all items
#pragma unroll 1
    for (uint32_t target = group.lane; target < space.count; target += kGroupLanes)
      if (!(space.number[target] & kOtherNode))
        team_.raise(static_cast<uint32_t>(space.number[target]), team_.sent(team_->rank, part),
                    flagValue(number_, round + 1));
    group.sync();
  }
}

}  // namespace proxyccl
