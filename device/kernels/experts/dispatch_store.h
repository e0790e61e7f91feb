// The sending part of a dispatch to output buffers, for tokens with one row per rank: when all counts are known, the
// sender stores each row directly at its final address on every rank that gets it.
//
// A rank's routing or announcement names the output buffer in which the rank wants the rows. The buffer is named when
// the rank's stream has reached this dispatch, so earlier work no longer uses it. Rows are converted to float8 on the
// fly, once for each token.
#pragma once

#include "exclusive_scan.h"
#include "experts/dispatch_block.h"
#include "scaled_rows.h"

namespace proxyccl {

template <class Mode>
PROXYCCL_DEVICE void Dispatch<Mode>::placeOutgoing() const {
  const uint32_t ranks = team_->world_size, segments = team_->segments, own = team_->rank;
  uint32_t* first = firstRowsThere();
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < ranks; i += blockDim.x) {
    outgoing()[i].buffer = segmentOf(i, 0).output_buffer;
    checkBufferOn(i);
  }
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < (own + 1) * segments * ranks; i += blockDim.x) {
    const uint32_t source = i / ranks / segments, segment = i / ranks % segments, rank = i % ranks;
    const uint32_t rows = countsOf(slabOf(source) + team_.routingAt(segment))[rank];
    if (source == own) {
      first[rank * segments + segment] = rows;
    } else if (rows != 0) {
      atomicAdd(&outgoing()[rank].row, rows);
    }
  }
  __syncthreads();
#pragma unroll 1
  for (uint32_t rank = threadIdx.x; rank < ranks; rank += blockDim.x) {
    uint32_t row = outgoing()[rank].row;
    for (uint32_t i = rank * segments; i < (rank + 1) * segments; ++i) {
      const uint32_t rows = first[i];
      first[i] = row;
      row += rows;
    }
  }
  __syncthreads();
}

template <class Mode>
PROXYCCL_DEVICE uint32_t Dispatch<Mode>::placeIncoming() const {
  const uint32_t segments = team_->segments, n = team_->world_size * segments;
  uint32_t* first = firstRowsHere();
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < n; i += blockDim.x)
    first[i] = countsOf(slabOf(i / segments) + team_.routingAt(i % segments))[team_->rank];
  setSegments(threadIdx.x, blockDim.x);
  __syncthreads();
  return exclusiveScan(first, nullptr, n);
}

template <class Mode>
template <class Find>
PROXYCCL_DEVICE void Dispatch<Mode>::storeItems(const Group& group, Stored stored, uint32_t n, Find find) const {
  uint32_t* next_item = &team_->counters->next_item[number_ % 2][stored == Stored::own];
  auto take = [&]() -> uint32_t { return group.lane == 0 ? fetchAddRelaxedDevice<uint32_t>(next_item, 1) : 0; };
  uint32_t taken = take();
  for (;;) {
    const uint32_t item = group.ofFirst(taken), token = item / kStoredPieces;
    if (token >= call_.tokens) return;
    taken = take();  // the next item's number is fetched while this item is stored
    storeRow(group, token, {token, 1, kStoredPiecesLog2}, item, n, [&](uint32_t i, uint32_t* rank, int32_t* row) {
      return find(item, i, rank, row) && (stored == Stored::all || (stored == Stored::own) == (*rank == team_->rank));
    });
  }
}

template <class Mode>
template <class Describe, class Find>
PROXYCCL_DEVICE void Dispatch<Mode>::storeInTurns(const Group& group, uint32_t rows, uint32_t n, Describe describe,
                                                  Find find) const {
  const bool stores = blockIdx.x < storingBlocks();
  const uint32_t groups = describingGroups();
  if (stores && group.number < groups)
    describe((blockIdx.x * groups + group.number) * kGroupLanes + group.lane, storingBlocks() * groups * kGroupLanes);
  storeItems(group, storesAll() ? Stored::all : stores ? Stored::of_peers : Stored::own, n, find);
  syncThreadsSystem();
  if (stores && group.number == 0) {
    publishSent(group);
    awaitStored(group);
  }
  clearPastEnd(rows, blockIdx.x * blockDim.x + threadIdx.x, team_->blocks * blockDim.x);
}

template <class Mode>
PROXYCCL_DEVICE void Dispatch<Mode>::describeAll(uint32_t thread, uint32_t threads) const {
  const uint32_t segments = team_->segments;
  for (uint32_t source = 0; source < team_->world_size; ++source) {
    const char* slab = slabOf(source);
    const uint32_t tokens = tokensOf()[source];
#pragma unroll 1
    for (uint32_t n = thread; n < tokens * topk_; n += threads) {
      const uint32_t token = n / topk_, segment = Segment::numberOf(tokens, token, segments);
      const char* routing = slab + team_.routingAt(segment);
      const uint32_t first = (token - Segment::of(tokens, segment, segments).begin) * topk_;
      const uint32_t k = n % topk_;
      describeSlot(source, token, k,
                   findOwnChoice(k, firstRowsHere()[source * segments + segment], weightIn(routing, first + k),
                                 [&](uint32_t other) { return slotsOf(routing)[first + other]; }));
    }
  }
}

template <class Mode>
template <class Find>
PROXYCCL_DEVICE void Dispatch<Mode>::storeRow(const Group& group, uint64_t token, const Segment& segment, uint32_t item,
                                              uint32_t n, Find find) const {
  if constexpr (kQuantizes) return storeQuantized(group, token, segment, item, n, find);
  const Piece piece(call_.row_bytes, segment, item);
  const char* from = call_.input + token * call_.row_bytes;
  const uint64_t scales = call_.row_bytes - call_.scale_bytes;  // offset of the scales in the row
  const uint64_t end = piece.end < scales ? piece.end : scales;
  const GroupSpace& space = group.space();
  auto listParts = [&](uint64_t offset, uint64_t bytes) {  // lists target addresses of elements or of scales
    group.list(n, [&](uint32_t i, RowEntry* entry) {
      uint32_t rank = 0;
      if (!find(i, &rank, &entry->number)) return false;
      entry->at = bufferOn(rank) + offset + static_cast<uint64_t>(entry->number) * bytes;
      return true;
    });
  };
  listParts(0, scales);
  if (piece.begin < end)
    copyToEach<7>(space.at, space.count, piece.begin, from + piece.begin, end - piece.begin, group.lane);
  group.sync();
  if (piece.end <= scales) return;
  listParts(team_->output_scales, call_.scale_bytes);
  const uint64_t begin = piece.begin > scales ? piece.begin : scales;
  copyToEach(space.at, space.count, begin - scales, from + begin, piece.end - begin, group.lane);
  group.sync();
}

template <class Mode>
template <class Find>
PROXYCCL_DEVICE void Dispatch<Mode>::storeQuantized(const Group& group, uint64_t token, const Segment& segment,
                                                    uint32_t item, uint32_t n, Find find) const {
  using T = typename Mode::Quantized;
  const uint64_t hidden = call_.row_bytes - call_.scale_bytes;
  const uint32_t blocks = static_cast<uint32_t>(hidden / PROXYCCL_SCALED_ELEMENTS), piece = segment.pieceOf(item);
  const uint32_t first = blocks * piece >> segment.pieces_log2, end = blocks * (piece + 1) >> segment.pieces_log2;
  const T* row = reinterpret_cast<const T*>(call_.input) + token * hidden;
  const bool aligned = reinterpret_cast<uintptr_t>(call_.input) % 16 == 0;
  const GroupSpace& space = group.space();
  group.list(n, [&](uint32_t i, RowEntry* entry) {
    uint32_t rank = 0;
    if (!find(i, &rank, &entry->number)) return false;
    entry->at = bufferOn(rank) + static_cast<uint64_t>(entry->number) * hidden;
    return true;
  });
  const uint32_t targets = space.count;
  auto storeParts = [&](const auto& parts, uint32_t at, uint32_t end) {
    constexpr uint32_t kCount = sizeof(parts) / sizeof(parts[0]);
    struct alignas(sizeof(parts[0]) < 16 ? sizeof(parts[0]) : 16) Wide {
      uint32_t at[sizeof(parts[0]) / 4];
    };
#pragma unroll 1
    for (uint32_t target = 0; target < targets; ++target) {
      // NVRTC 13.0 can't compile inGlobal() for a pointer to a local type.
      Wide* to = reinterpret_cast<Wide*>(inGlobal(space.at[target])) + at;
#pragma unroll
      for (uint32_t i = 0; i < kCount; ++i)
        if (at + i * kGroupLanes < end) to[i * kGroupLanes] = __builtin_bit_cast(Wide, parts[i]);
    }
  };
  auto storeScale = [&](uint32_t block, float scale) {
#pragma unroll 1
    for (uint32_t target = 0; target < targets; ++target) {
      const uint64_t number = static_cast<uint64_t>(space.number[target]);
      char* scales = space.at[target] - number * hidden + team_->output_scales + number * call_.scale_bytes;
      inGlobal(reinterpret_cast<float*>(scales))[block] = scale;
    }
  };
  // Parts beyond a piece's end also take time, so kParts is the number of parts of a usual piece: half a row of 7168
  // elements has seven parts; in a dispatch of few tokens a piece has fewer.
  constexpr uint32_t kParts = kFewMasks ? 4 : 7;
  if (targets > 0 && end - first <= kGroupLanes * kParts / 8) {
    scaleBlocks<kParts>(group, row, first, end, aligned, storeParts, storeScale);
  } else {
#pragma unroll 1
    for (uint32_t chunk = first; targets > 0 && chunk < end; chunk += kGroupLanes)
      scaleBlocks<8>(group, row, chunk, chunk + kGroupLanes < end ? chunk + kGroupLanes : end, aligned, storeParts,
                     storeScale);
  }
  group.sync();
}

template <class Mode>
PROXYCCL_DEVICE void Dispatch<Mode>::storeCountedRows(const Group& group) const {
  if (blockIdx.x == team_->blocks - 1) {  // only this block spends time on reporting the counts
    Gathered gathered;
    if (!gatherCounts(group, &gathered)) return giveUp();
    if ((call_.phases & PROXYCCL_EXPERT_GATHER) && threadIdx.x == 0) publishReceivedRows(gathered);
    setSegments(threadIdx.x, blockDim.x);
    writeCounts(gathered.rows);
    __syncthreads();
  }
  awaitRouting();
  clearOutgoing();
  if (!hasRouting()) return giveUp();
  const bool stores = blockIdx.x < storingBlocks();
  if (stores) placeOutgoing();
  const uint32_t rows = placeIncoming(), segments = team_->segments;
  const uint32_t* first = stores ? firstRowsThere() : firstRowsHere();  // other blocks need only this rank's rows
  const char* slab = slabOf(team_->rank);
  storeInTurns(
      group, rows, topk_, [&](uint32_t thread, uint32_t threads) { describeAll(thread, threads); },
      [&](uint32_t item, uint32_t k, uint32_t* rank, int32_t* row) {
        const uint32_t token = item / kStoredPieces, segment = Segment::numberOf(call_.tokens, token, segments);
        const uint32_t i = token - Segment::of(call_.tokens, segment, segments).begin;
        const ProxycclExpertSlot slot = slotsOf(slab + team_.routingAt(segment))[i * topk_ + k];
        const bool exists = slot.expert != PROXYCCL_NO_EXPERT;
        *rank = slot.expert;
        *row = rowAtRank(
            slot, exists && (stores || slot.expert == team_->rank) ? first[slot.expert * segments + segment] : 0);
        if (stores && item % kStoredPieces == 0)
          call_.layout.sent_rows[static_cast<uint64_t>(token) * topk_ + k] = *row;
        return *row >= 0;
      });
  acknowledge();
}

}  // namespace proxyccl
