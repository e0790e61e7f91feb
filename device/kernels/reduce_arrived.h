// reduce_arrived: the reduction of a schedule's transfers (channels/schedules/DESIGN.md), by few blocks.
//
// The stream launches it when the first piece is there, or when all ranks have joined, so no multiprocessor waits for
// ranks that are late. It waits for the other pieces, which are in flight: a launch for each would wait for a
// free multiprocessor every time. Blocks wait for the proxy, and for the first block, which hears from it.
#ifndef PROXYCCL_REDUCE_ARRIVED_H
#define PROXYCCL_REDUCE_ARRIVED_H

#include "arrived.h"
#include "instance.h"
#include "proxyccl/wait.h"
#include "reduce_ranks.h"

namespace proxyccl {

// Waits for this many transfers of a piece. By all threads of a block; false if the communicator has ended.
//
// One thread of the grid reads the proxy's word: the more read a word of host memory at once, the later each sees it
// change.
PROXYCCL_DEVICE bool awaitPiece(const ProxycclArrived& arrived, uint32_t piece, uint64_t transfers) {
  __shared__ uint32_t complete;
  if (threadIdx.x == 0) {
    const WaitFor what = {PROXYCCL_WAIT_STAGE, PROXYCCL_NO_PEER, PROXYCCL_NO_CHANNEL, transfers};
    uint32_t* const here = &arrived.here[piece];
    if (blockIdx.x == 0) {
      complete = waitUntil(arrived.control, what, [&](uint64_t* seen) {
        return (*seen = loadAcquireSystem(&arrived.stages[piece])) >= transfers;
      });
      if (complete != 0) storeReleaseDevice<uint32_t>(here, 1);
    } else {
      complete = waitUntil(arrived.control, what, [&](uint64_t*) { return loadAcquireDevice(here) != 0; });
    }
  }
  __syncthreads();
  return complete != 0;
}

// Ends a block's work on a piece. The last block lets the proxy send the result. The gate only grows: whoever opened it
// for the piece before did so before it ended its work on this one. Then that block resets the words of the piece,
// which nobody counts up from then on: a write of the stream would take longer, and the gate's release would wait for a
// store.
PROXYCCL_DEVICE void endPiece(const ProxycclArrived& arrived, uint32_t piece) {
  syncThreadsSystem();
  if (threadIdx.x != 0) return;
  if (fetchAddAcqRelDevice<uint32_t>(&arrived.blocks_done[piece], 1) != gridDim.x - 1) return;
  storeRelaxedDevice<uint32_t>(&arrived.blocks_done[piece], 0);
  storeRelaxedDevice<uint32_t>(&arrived.here[piece], 0);
  if (arrived.gate != nullptr) storeReleaseSystem<uint64_t>(arrived.gate, piece + 1);
  storeRelaxedSystem<uint64_t>(&arrived.stages[piece], 0);
  if (piece == 0 && arrived.joined != nullptr) storeRelaxedSystem<uint64_t>(arrived.joined, 0);
}

#if !PROXYCCL_ON_HOST
// Reduces `units` units of 16 bytes, all aligned. A thread has several of them in flight from each rank: few blocks
// would otherwise wait for memory most of the time.
template <class T, class Op, class Source>
PROXYCCL_DEVICE void reduceUnits(const ProxycclArrived& arrived, uint64_t units, Source source, T* out) {
  constexpr uint32_t kUnits = sizeof(T) == 1 ? 2 : 4;  // sums of one byte take a register each too
  const uint64_t threads = static_cast<uint64_t>(gridDim.x) * blockDim.x;
  Bytes16* const to = reinterpret_cast<Bytes16*>(out);
#pragma unroll 1
  for (uint64_t first = static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x; first < units;
       first += kUnits * threads) {
    auto inside = [=](uint32_t u) { return first + u * threads < units; };
    Bytes16 results[kUnits];
    combineUnits<T, Op, kUnits, Loads::kAhead>(
        arrived.world_size, arrived.divisor,
        [&](uint32_t rank) {
          return [=, from = reinterpret_cast<const Bytes16*>(source(rank)) + first](uint32_t u) {
            return inside(u) ? from[u * threads] : Bytes16{};
          };
        },
        results);
#pragma unroll
    for (uint32_t u = 0; u < kUnits; ++u)
      if (inside(u)) store128(to + first + u * threads, results[u].low, results[u].high);
  }
}
#endif

// out[0, count) = the combination, in rank order, of source(rank)[0, count) of all ranks.
template <class T, class Op, class Source>
PROXYCCL_DEVICE void reducePiece(const ProxycclArrived& arrived, uint64_t count, Source source, T* out) {
  uint64_t done = 0;
#if !PROXYCCL_ON_HOST
  if (isAligned16(source(arrived.rank)) && isAligned16(out)) {
    constexpr uint32_t kWide = 16 / sizeof(T);
    reduceUnits<T, Op>(arrived, count / kWide, source, out);
    done = count / kWide * kWide;
  }
#endif
  reduceRanks<T, Op>(
      arrived.world_size, arrived.divisor, count - done, false, blockIdx.x * blockDim.x + threadIdx.x,
      gridDim.x * blockDim.x, [&](uint32_t rank) { return source(rank) + done; },
      [&](uint64_t i, const auto& sum) { sum.store(out + done + i); });
}

// out[0, count) = the combination, in rank order, of in[0, count) and of the data that arrives from every peer.
template <class T, class Op>
PROXYCCL_DEVICE void reduce_arrived(const ProxycclArrived& arrived, const T* in, T* out, uint64_t count) {
#pragma unroll 1
  for (uint32_t piece = 0; piece < arrived.pieces; ++piece) {
    const uint64_t transfers = piece == 0 ? arrived.first : arrived.transfers;
    if (transfers != 0 && !awaitPiece(arrived, piece, transfers)) return;
    const uint64_t begin = minimum(piece * arrived.piece, count);
    auto source = [&](uint32_t rank) {
      if (rank == arrived.rank) return in + begin;
      const uint32_t slot = rank < arrived.rank ? rank : rank - 1;
      return reinterpret_cast<const T*>(arrived.slots + slot * arrived.slot_bytes) + begin;
    };
    reducePiece<T, Op>(arrived, minimum(arrived.piece, count - begin), source, out + begin);
    endPiece(arrived, piece);
  }
}

}  // namespace proxyccl

#endif
