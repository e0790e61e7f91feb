// Dispatch by announced masks, for tokens with one row per rank: from all masks every block knows which tokens go to
// which rank, and a row's number is the number of tokens before it that go to the same rank. With output buffers, rows
// are stored as soon as the masks of all ranks have arrived.
#pragma once

#include "experts/dispatch_block.h"

namespace proxyccl {

template <class Mode>
PROXYCCL_DEVICE bool Dispatch<Mode>::awaitMasks(Gathered* gathered) const {
  const bool collected = call_.phases & PROXYCCL_EXPERT_ROUTE;
  if (!announced_.await(collected, threadIdx.x, blockDim.x)) announcedState().incomplete = true;
  syncThreadsSystem();  // this barrier also orders the stores of the block's sent rows before publishSent()
  if (announcedState().incomplete) return false;
  if constexpr (kSharedMasks) {
    announced_.sumUp(threadIdx.x, blockDim.x);
    __syncthreads();
  }
  if (blockIdx.x == 0 && tellsChosen()) countChosen();
  placeArriving(threadIdx.x, blockDim.x);
  __syncthreads();
  *gathered = arriving();
  return true;
}

template <class Mode>
PROXYCCL_DEVICE void Dispatch<Mode>::placeLeaving(const Group& group) const {
#pragma unroll 1
  for (uint32_t rank = group.lane; rank < team_->world_size; rank += kGroupLanes) {
    uint32_t row = 0;
    for (uint32_t source = 0; source < team_->rank; ++source) row += announced_.count(source, rank);
    outgoing()[rank] = {row, announced_.outputBuffer(rank)};
    checkBufferOn(rank);
  }
}

template <class Mode>
PROXYCCL_DEVICE void Dispatch<Mode>::placeArriving(uint32_t thread, uint32_t threads) const {
  const uint32_t ranks = team_->world_size;
  setSegments(thread, threads);
  AnnouncedState& state = announcedState();
#pragma unroll 1
  for (uint32_t i = thread; i <= ranks; i += threads) {
    uint32_t row = 0;
    for (uint32_t source = 0; source < i; ++source) row += announced_.count(source, team_->rank);
    bases()[i] = row;
    if (i == ranks) continue;
    if (announced_.badSlot(i) != ~0u) atomicMin(&state.bad_slot, i << 16);
    if (announced_.wantedTokens(i) != 0) atomicMax(&state.wanted_tokens, announced_.wantedTokens(i));
  }
}

template <class Mode>
PROXYCCL_DEVICE void Dispatch<Mode>::countChosen() const {
  const uint32_t per_rank = team_->chosen_per_rank;
  auto count = [&](uint32_t chosen_expert) {
    const uint32_t expert = chosen_expert - team_->rank * per_rank;
    if (expert < per_rank) atomicAdd(&chosen()[expert], 1u);
  };
  announced_.forEachArriving(threadIdx.x, blockDim.x, count);
}

template <class Mode>
PROXYCCL_DEVICE bool Dispatch<Mode>::findMasked(uint32_t token, uint32_t i, uint32_t* rank, int32_t* row) const {
  *rank = (team_->rank + 1 + i) % team_->world_size;
  const auto mask = announced_.to(*rank);
  if (!mask.has(token)) return false;
  *row = inBuffer(outgoing()[*rank].row + mask.countBefore(token));
  return *row >= 0;
}

template <class Mode>
PROXYCCL_DEVICE void Dispatch<Mode>::listPiece(const Group& group, uint32_t piece) const {
  const uint32_t token = piece / piecesOfRow(), ranks = team_->world_size;
  group.list(ranks, [&](uint32_t i, RowEntry* entry) {
    // The row for this rank comes first, because its stores would otherwise wait behind stores over a busy link. Each
    // group begins with a different peer.
    const uint32_t peer = i == 0 ? 0 : 1 + (i - 1 + group.number) % (ranks - 1);
    const uint32_t rank = (team_->rank + peer) % ranks;
    entry->number = static_cast<int32_t>(rank << 16 | announced_.to(rank).countBefore(token));
    return announced_.to(rank).has(token);
  });
}

template <class Mode>
PROXYCCL_DEVICE void Dispatch<Mode>::storePiece(const Group& group, uint32_t piece, const Bytes16* words) const {
  const GroupSpace& space = group.space();
#pragma unroll 1
  for (uint32_t target = 0; target < space.count; ++target) {
    const uint32_t rank = static_cast<uint32_t>(space.number[target]) >> 16;
    const int32_t row = inBuffer(outgoing()[rank].row + (space.number[target] & 0xffff));
    if (row < 0) continue;
    Bytes16* to = inGlobal(reinterpret_cast<Bytes16*>(bufferOn(rank) + static_cast<uint64_t>(row) * call_.row_bytes));
    forEachWord(group, piece, [&](uint32_t w, uint32_t at) { to[at] = words[w]; });
  }
  group.sync();
}

template <class Mode>
PROXYCCL_DEVICE void Dispatch<Mode>::storeManyRows(const Group& group) const {
  if (!announced_.await(true, threadIdx.x, blockDim.x)) announcedState().incomplete = true;
  __syncthreads();
  if (!announcedState().incomplete) {
    announced_.sumUp((threadIdx.x + blockDim.x / 2) % blockDim.x, blockDim.x);
    placeArriving(threadIdx.x, blockDim.x);
    if (group.number == Group::count() - 1) placeLeaving(group);
    __syncthreads();
    const Gathered gathered = arriving();
    const bool tells = blockIdx.x == team_->blocks - 1;  // the last block reports counts, the others store rows
    if (tells && tellsChosen()) {
      countChosen();
      __syncthreads();
    }
    if (tells && group.number == 0) {
      writeMaskCounts(group, gathered.rows);
      if (group.lane == 0 && call_.phases & PROXYCCL_EXPERT_GATHER) publishReceivedRows(gathered);
    }
    storeInTurns(
        group, gathered.rows, team_->world_size,
        [&](uint32_t thread, uint32_t threads) {
          describeMasked(thread, threads);
          describeSent(thread, threads);
        },
        [&](uint32_t item, uint32_t i, uint32_t* rank, int32_t* row) {
          return findMasked(item / kStoredPieces, i, rank, row);
        });
  }
  if (announcedState().incomplete) giveUp();
  acknowledge();
  if (threadIdx.x == 0) countCall();
}

template <class Mode>
PROXYCCL_DEVICE void Dispatch<Mode>::storeFewRows(const Group& group, uint32_t* next_item) const {
  const uint32_t describing = describingBlocks(), holding = Group::count() - 1;
  const uint32_t storing = team_->blocks > 1 ? team_->blocks - describing : 1;
  const bool describes = blockIdx.x < describing, stores = !describes || team_->blocks == 1;
  // Pieces are dealt in turn to the groups of all storing blocks, because some tokens go to more ranks than others.
  const uint32_t place = stores ? team_->blocks - 1 - blockIdx.x : 0, first = group.number * storing + place;
  const uint32_t pieces = stores && holdsRows() ? call_.tokens * piecesOfRow() : 0;
  const bool waits = group.number == holding;
  Bytes16 held[kHeldWords];
  // One group waits for announcements while the other groups load rows. The waiting group loads no row, because a wait
  // calls a function, and values that live across a call are kept in memory instead of registers.
  if (waits) {
    if (!announced_.await(true, group.lane, kGroupLanes)) announcedState().incomplete = true;
    group.sync();
    placeLeaving(group);
  } else if (first < pieces) {
    loadPiece(group, first, held);
    listPiece(group, first);
  }
  __syncthreads();
  if (announcedState().incomplete) {
    giveUp();
    if (threadIdx.x == 0) countCall();
    return;
  }
  if (!waits && first < pieces) storePiece(group, first, held);
#pragma unroll 1
  for (uint32_t piece = waits ? first : first + (holding + 1) * storing; piece < pieces;
       piece += (holding + 1) * storing) {
    loadPiece(group, piece, held);
    listPiece(group, piece);
    storePiece(group, piece, held);
  }
  const Segment segment = Segment::of(call_.tokens, place, storing);
#pragma unroll 1
  while (stores && !holdsRows()) {
    const uint32_t item = group.next(next_item);
    if (item >= segment.items()) break;
    const uint32_t token = segment.begin + segment.tokenOf(item);
    storeRow(group, token, segment, item, team_->world_size,
             [&](uint32_t i, uint32_t* rank, int32_t* row) { return findMasked(token, i, rank, row); });
  }
  if (stores) {
    syncThreadsSystem();
    if (waits) publishSent(group);
  }
  if (group.number == 1) awaitPreviousReaders(group);
  if (describes) {
    const bool tells = blockIdx.x == 0;
    if (tells && tellsChosen()) countChosen();
    placeArriving(threadIdx.x, blockDim.x);
    __syncthreads();
    const Gathered gathered = arriving();
    if (!waits) {
      const uint32_t of_block = blockDim.x - kGroupLanes, threads = describing * of_block;
      const uint32_t thread = blockIdx.x * of_block + threadIdx.x;
      describeMasked(thread, threads);
      describeSent(threads - 1 - thread, threads);
      clearPastEnd(gathered.rows, thread, threads);
    } else if (tells) {
      writeMaskCounts(group, gathered.rows);
      if (group.lane == 0 && call_.phases & PROXYCCL_EXPERT_GATHER) publishReceivedRows(gathered);
    }
  }
  if (threadIdx.x == 0) countCall();
  if (stores && waits) awaitStored(group);
}

template <class Mode>
PROXYCCL_DEVICE void Dispatch<Mode>::describeMasked(uint32_t thread, uint32_t threads) const {
  announced_.forEachChoice(
      thread, threads,
      [&](uint32_t source, uint32_t slot) {
        if (announced_.from(source).has(slot / topk_)) return true;
        call_.layout.rows[source * static_cast<uint64_t>(team_->max_tokens) * topk_ + slot] = PROXYCCL_NO_ROW;
        return false;
      },
      [&](uint32_t source, uint32_t slot, const auto& choice) {
        const uint32_t token = slot / topk_;
        const bool here = choice.expert - team_->rank * team_->chosen_per_rank < team_->chosen_per_rank;
        describeSlot(source, token, slot % topk_,
                     {maskedRow(source, token), choice.is_first && here, choice.expert, choice.weight});
      });
}

template <class Mode>
PROXYCCL_DEVICE void Dispatch<Mode>::describeSent(uint32_t thread, uint32_t threads) const {
#pragma unroll 1
  for (uint32_t token = thread; token < call_.tokens; token += threads)
    choices_.forEachSlot(token, [&](const Choices::Slot& slot) {
      const uint32_t number = token * topk_ + slot.k;
      if (call_.phases & PROXYCCL_EXPERT_ROUTE)
        idsOf(team_->node, 0)[number] = static_cast<int32_t>(slot.is_first ? slot.rank : team_->world_size);
      int32_t row = PROXYCCL_NO_ROW;
      if (slot.is_first) row = inBuffer(outgoing()[slot.rank].row + announced_.to(slot.rank).countBefore(token));
      call_.layout.sent_rows[number] = row;
    });
}

template <class Mode>
PROXYCCL_DEVICE void Dispatch<Mode>::writeMaskCounts(const Group& group, uint32_t rows) const {
  const uint32_t ranks = team_->world_size;
  writeTotals(group, rows, [&](uint32_t rank) {
    uint32_t of_rank = 0;
#pragma unroll 1
    for (uint32_t source = 0; source < ranks; ++source) {
      const uint32_t count = announced_.count(source, rank);
      call_.layout.counts[source * ranks + rank] = static_cast<int32_t>(count);
      of_rank += count;
    }
    call_.layout.tokens[rank] = static_cast<int32_t>(tokensOf()[rank]);
    return of_rank;
  });
}

}  // namespace proxyccl
