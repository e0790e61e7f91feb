// reduce_arrived: the reduction of a schedule's transfers (channels/schedules/DESIGN.md).
//
// The stream launches it when the first piece is there, or when all ranks have joined: a kernel that waited for ranks
// that are late would keep others from starting. It waits for the other pieces, which are in flight, as a launch for
// each would take longer. On CUDA its blocks are single warps of few registers, so they start beside a matrix product
// that fills all multiprocessors. Blocks take chunks in turn: those for which a busy GPU has no room start when others
// have ended. They wait for the proxy; for the block with a piece's first chunk, which hears from it; and to open the
// gate, for the block that ends the piece before: always for blocks that took earlier chunks, and so run.
#ifndef PROXYCCL_REDUCE_ARRIVED_H
#define PROXYCCL_REDUCE_ARRIVED_H

#include "arrived.h"
#include "instance.h"
#include "proxyccl/wait.h"
#include "reduce_ranks.h"

#if PROXYCCL_SMALL_BLOCKS  // then each kernel is compiled by itself
#undef PROXYCCL_REDUCTION_KERNEL
#define PROXYCCL_REDUCTION_KERNEL PROXYCCL_SMALL_KERNEL
#endif

namespace proxyccl {

// A single warp needs neither a multiprocessor's barriers nor its shared memory: a busy one may have none to give.
//
// A barrier of the block, after which one thread's release covers what all have written.
PROXYCCL_DEVICE void meetInBlock() {
#if PROXYCCL_SMALL_BLOCKS
  syncWarp();
#else
  syncThreadsSystem();
#endif
}

// The first thread's value, and what it has acquired. By all threads of a block.
PROXYCCL_DEVICE uint32_t ofFirstThread(uint32_t value) {
#if PROXYCCL_SMALL_BLOCKS
  syncWarp();
  return shuffle(value, 0);
#else
  __shared__ uint32_t shared;
  __syncthreads();  // all have read the value before
  if (threadIdx.x == 0) shared = value;
  __syncthreads();
  return shared;
#endif
}

// The next chunk that no block has taken; beyond the last one, none is left. By all threads of a block.
PROXYCCL_DEVICE uint32_t takeChunk(const ProxycclArrived& arrived) {
  return ofFirstThread(threadIdx.x == 0 ? fetchAddRelaxedDevice<uint32_t>(arrived.taken, 1) : 0);
}

template <class Ready>
PROXYCCL_DEVICE bool awaitProxy(const ProxycclArrived& arrived, uint64_t expected, Ready ready) {
  const WaitFor what = {PROXYCCL_WAIT_STAGE, PROXYCCL_NO_PEER, PROXYCCL_NO_CHANNEL, expected};
  return waitUntil(arrived.control, what, ready);
}

// Waits for the transfers of a piece. By all threads of a block; false if the communicator has ended.
//
// One thread of the grid reads the proxy's word: the more read a word of host memory at once, the later each sees it
// change. It has the piece's first chunk, and was the first to take one.
PROXYCCL_DEVICE bool awaitPiece(const ProxycclArrived& arrived, uint32_t piece, bool first) {
  const uint64_t transfers = piece == 0 ? arrived.first : arrived.transfers;
  if (transfers == 0) return true;
  bool complete = true;
  if (threadIdx.x == 0) {
    uint32_t* const here = &arrived.here[piece];
    if (first) {
      complete = awaitProxy(arrived, transfers, [&](uint64_t* seen) {
        return (*seen = loadAcquireSystem(&arrived.stages[piece])) >= transfers;
      });
      if (complete && gridDim.x > 1) storeReleaseDevice<uint32_t>(here, 1);
    } else {
      complete = awaitProxy(arrived, transfers, [&](uint64_t*) { return loadAcquireDevice(here) != 0; });
    }
  }
  return ofFirstThread(complete) != 0;
}

// Lets the proxy send a piece's result, after those of the pieces before it.
PROXYCCL_DEVICE void openGate(const ProxycclArrived& arrived, uint32_t piece) {
  if (arrived.gate == nullptr) return;
  auto isNext = [&](uint64_t* seen) { return (*seen = loadAcquireDevice(arrived.opened)) >= piece; };
  if (!awaitProxy(arrived, piece, isNext)) return;  // an earlier piece may not be reduced
  storeReleaseSystem<uint64_t>(arrived.gate, piece + 1);
  if (piece + 1 < arrived.pieces) storeReleaseDevice<uint32_t>(arrived.opened, piece + 1);
}

// Ends a block's work on a chunk. After the last one of a piece its words are reset, which nobody counts up from then
// on: a write of the stream would take longer, and the gate's release would wait for a store.
PROXYCCL_DEVICE void endChunk(const ProxycclArrived& arrived, uint32_t piece) {
  meetInBlock();
  if (threadIdx.x != 0) return;
  if (arrived.chunks > 1) {
    if (fetchAddAcqRelDevice<uint32_t>(&arrived.chunks_done[piece], 1) != arrived.chunks - 1) return;
    storeRelaxedDevice<uint32_t>(&arrived.chunks_done[piece], 0);
  }
  openGate(arrived, piece);
  storeRelaxedSystem<uint64_t>(&arrived.stages[piece], 0);
}

// Ends a block. The last one resets the words of the grid.
PROXYCCL_DEVICE void endBlock(const ProxycclArrived& arrived) {
  if (threadIdx.x != 0) return;
  if (gridDim.x > 1) {
    if (fetchAddAcqRelDevice<uint32_t>(arrived.blocks_done, 1) != gridDim.x - 1) return;
    storeRelaxedDevice<uint32_t>(arrived.blocks_done, 0);
    for (uint32_t piece = 0; piece < arrived.pieces; ++piece) storeRelaxedDevice<uint32_t>(&arrived.here[piece], 0);
  }
  storeRelaxedDevice<uint32_t>(arrived.taken, 0);
  storeRelaxedDevice<uint32_t>(arrived.opened, 0);
  if (arrived.joined != nullptr) storeRelaxedSystem<uint64_t>(arrived.joined, 0);
}

#if !PROXYCCL_ON_HOST
// Reduces `units` units of 16 bytes, all aligned. A thread has several of them in flight from each rank: few threads
// would otherwise wait for memory most of the time.
template <class T, class Op, class Source>
PROXYCCL_DEVICE void reduceUnits(const ProxycclArrived& arrived, uint32_t units, Source source, T* out) {
  constexpr uint32_t kUnits = PROXYCCL_SMALL_BLOCKS ? 1 : sizeof(T) == 1 ? 2 : 4;
  Bytes16* const to = reinterpret_cast<Bytes16*>(out);
#pragma unroll 1
  for (uint32_t first = threadIdx.x; first < units; first += kUnits * blockDim.x) {
    auto inside = [=](uint32_t u) { return first + u * blockDim.x < units; };
    Bytes16 results[kUnits];
    combineUnits<T, Op, kUnits, Loads::kAhead>(
        arrived.world_size, arrived.divisor,
        [&](uint32_t rank) {
          return [=, from = reinterpret_cast<const Bytes16*>(source(rank)) + first](uint32_t u) {
            return inside(u) ? from[u * blockDim.x] : Bytes16{};
          };
        },
        results);
#pragma unroll
    for (uint32_t u = 0; u < kUnits; ++u)
      if (inside(u)) store128(to + first + u * blockDim.x, results[u].low, results[u].high);
  }
}

// The same of two ranks, whose sums need no register until all values are there.
template <class T, class Op>
PROXYCCL_DEVICE void reduceUnitsOfTwo(uint32_t divisor, uint32_t units, const Bytes16* first, const Bytes16* second,
                                      Bytes16* to) {
  constexpr uint32_t kUnits = PROXYCCL_SMALL_BLOCKS ? 2 : 4, kWide = 16 / sizeof(T);
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < units; i += kUnits * blockDim.x) {
    Bytes16 a[kUnits], b[kUnits];
#pragma unroll
    for (uint32_t u = 0; u < kUnits; ++u) {
      const bool inside = u == 0 || i + u * blockDim.x < units;
      a[u] = inside ? first[i + u * blockDim.x] : Bytes16{};
      b[u] = inside ? second[i + u * blockDim.x] : Bytes16{};
    }
#pragma unroll
    for (uint32_t u = 0; u < kUnits; ++u) {
      const Unit<T> x = __builtin_bit_cast(Unit<T>, a[u]), y = __builtin_bit_cast(Unit<T>, b[u]);
      Unit<T> result;
#pragma unroll
      for (uint32_t v = 0; v < kWide; ++v)
        result.values[v] = finishReduction<T, Op>(
            Op::combine(Element<T>::widen(x.values[v]), Element<T>::widen(y.values[v])), divisor);
      const Bytes16 bytes = __builtin_bit_cast(Bytes16, result);
      if (u == 0 || i + u * blockDim.x < units) store128(to + i + u * blockDim.x, bytes.low, bytes.high);
    }
  }
}
#endif

#if PROXYCCL_SMALL_BLOCKS
// Brings a chunk of all ranks into the device's cache. A warp has too few registers for as many loads in flight as
// would keep the memory busy; this takes none.
template <class T, class Source>
PROXYCCL_DEVICE void fetchChunk(const ProxycclArrived& arrived, uint32_t bytes, Source source) {
  constexpr uint32_t kLine = 128;
#pragma unroll 1
  for (uint32_t rank = 0; rank < arrived.world_size; ++rank) {
    const char* const from = reinterpret_cast<const char*>(source(rank));
#pragma unroll 1
    for (uint32_t at = kLine * threadIdx.x; at < bytes; at += kLine * PROXYCCL_WARP_SIZE) prefetchToDevice(from + at);
  }
}
#endif

// out[0, count) = the combination, in rank order, of source(rank)[0, count) of all ranks. By a block.
template <class T, class Op, class Source>
PROXYCCL_DEVICE void reduceChunk(const ProxycclArrived& arrived, uint64_t count, Source source, T* out) {
  uint64_t done = 0;
#if !PROXYCCL_ON_HOST
  if (isAligned16(source(arrived.rank)) && isAligned16(out)) {
    constexpr uint32_t kWide = 16 / sizeof(T);
    const uint32_t units = static_cast<uint32_t>(count / kWide);
#if PROXYCCL_SMALL_BLOCKS
    fetchChunk<T>(arrived, 16 * units, source);
#endif
    auto of = [&](uint32_t rank) { return reinterpret_cast<const Bytes16*>(source(rank)); };
    if (arrived.world_size == 2)
      reduceUnitsOfTwo<T, Op>(arrived.divisor, units, of(0), of(1), reinterpret_cast<Bytes16*>(out));
    else
      reduceUnits<T, Op>(arrived, units, source, out);
    done = count / kWide * kWide;
  }
#endif
  reduceRanks<T, Op>(
      arrived.world_size, arrived.divisor, count - done, false, threadIdx.x, blockDim.x,
      [&](uint32_t rank) { return source(rank) + done; },
      [&](uint64_t i, const auto& sum) { sum.store(out + done + i); });
}

// out[0, count) = the combination, in rank order, of in[0, count) and of the data that arrives from every peer.
template <class T, class Op>
PROXYCCL_DEVICE void reduce_arrived(const ProxycclArrived& arrived, const T* in, T* out, uint64_t count) {
  const uint32_t chunks = arrived.pieces * arrived.chunks;
  uint32_t awaited = 0;  // pieces whose transfers this block has seen: some peers' whole shares come with the first
#pragma unroll 1
  for (uint32_t taken = takeChunk(arrived); taken < chunks; taken = takeChunk(arrived)) {
    const uint32_t piece = taken / arrived.chunks, chunk = taken % arrived.chunks;
    for (; awaited <= piece; ++awaited)
      if (!awaitPiece(arrived, awaited, taken == awaited * arrived.chunks)) return;
    const uint64_t end = minimum((piece + 1) * arrived.piece, count);
    const uint64_t begin = minimum(piece * arrived.piece + chunk * arrived.chunk, end);
    auto source = [&](uint32_t rank) {
      if (rank == arrived.rank) return in + begin;
      const uint32_t slot = rank < arrived.rank ? rank : rank - 1;
      return reinterpret_cast<const T*>(arrived.slots + slot * arrived.slot_bytes) + begin;
    };
    reduceChunk<T, Op>(arrived, minimum(arrived.chunk, end - begin), source, out + begin);
    endChunk(arrived, piece);
  }
  endBlock(arrived);
}

}  // namespace proxyccl

#endif
