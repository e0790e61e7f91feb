// reduce_arrived reduces the data of a schedule's transfers (channels/schedules/DESIGN.md).
//
// The stream launches the kernel only when the first piece has arrived or all ranks have joined the call, because a
// kernel that waited for late ranks would keep other kernels from starting. The kernel itself waits for the other
// pieces, because one launch per piece would take longer. On CUDA the kernel's blocks are single warps with few
// registers, so that these blocks start beside a matrix product that fills all multiprocessors. Each block takes the
// next chunk from a counter, so that blocks may also start late, when a busy GPU has room for them. The block with a
// piece's first chunk waits for the proxy, and the piece's other blocks wait for that block. The block that completes a
// piece waits until the previous piece is complete, and then opens the gate, which lets the proxy send the result. So a
// block waits only for blocks that took earlier chunks and therefore run.
#pragma once

#include "arrived.h"
#include "instance.h"
#include "integers.h"
#include "proxyccl/wait.h"
#include "reduce_ranks.h"

#if PROXYCCL_SMALL_BLOCKS  // with small blocks, each kernel is compiled in its own module
#undef PROXYCCL_REDUCTION_KERNEL
#define PROXYCCL_REDUCTION_KERNEL PROXYCCL_SMALL_KERNEL
#endif

namespace proxyccl {

// A block of a single warp uses neither block barriers nor shared memory, because a busy multiprocessor may have
// neither left.
//
// Called by all threads of a block: a barrier. A later release by one thread covers the earlier writes of all threads.
PROXYCCL_DEVICE void meetInBlock() {
#if PROXYCCL_SMALL_BLOCKS
  syncWarp();
#else
  syncThreadsSystem();
#endif
}

// Called by all threads of a block: returns the first thread's value. All threads then see the writes that the first
// thread has acquired.
PROXYCCL_DEVICE uint32_t ofFirstThread(uint32_t value) {
#if PROXYCCL_SMALL_BLOCKS
  syncWarp();
  return shuffle(value, 0);
#else
  __shared__ uint32_t shared;
  __syncthreads();  // after this barrier, all threads have read the earlier value
  if (threadIdx.x == 0) shared = value;
  __syncthreads();
  return shared;
#endif
}

// Called by all threads of a block: returns the next chunk's number; if none is left, at least the number of chunks.
PROXYCCL_DEVICE uint32_t takeChunk(const ProxycclArrived& arrived) {
  return ofFirstThread(threadIdx.x == 0 ? fetchAddRelaxedDevice<uint32_t>(arrived.taken, 1) : 0);
}

// Waits for the proxy, if `kind` is PROXYCCL_WAIT_STAGE, or for other blocks, if `kind` is PROXYCCL_WAIT_GRID.
template <class Ready>
PROXYCCL_DEVICE bool awaitOthers(const ProxycclArrived& arrived, uint32_t kind, uint64_t expected, Ready ready) {
  const WaitFor what = {kind, PROXYCCL_NO_PEER, PROXYCCL_NO_CHANNEL, expected};
  return waitUntil(arrived.control, what, ready);
}

// Called by all threads of a block: waits for the transfers of a piece. Returns false if the communicator has ended.
//
// Only a thread of the block with the piece's first chunk reads the proxy's word, because the more threads read a word
// of host memory concurrently, the later each sees a change.
PROXYCCL_DEVICE bool awaitPiece(const ProxycclArrived& arrived, uint32_t piece, bool first) {
  const uint64_t transfers = piece == 0 ? arrived.first : arrived.transfers;
  if (transfers == 0) return true;
  bool complete = true;
  if (threadIdx.x == 0) {
    uint32_t* const here = &arrived.here[piece];
    if (first) {
      complete = awaitOthers(arrived, PROXYCCL_WAIT_STAGE, transfers, [&](uint64_t* seen) {
        return (*seen = loadAcquireSystem(&arrived.stages[piece])) >= transfers;
      });
      if (complete && gridDim.x > 1) storeReleaseDevice<uint32_t>(here, 1);
    } else {
      complete = awaitOthers(arrived, PROXYCCL_WAIT_GRID, 1, [&](uint64_t*) { return loadAcquireDevice(here) != 0; });
    }
  }
  return ofFirstThread(complete) != 0;
}

// Allows the proxy to send a piece's result, once the earlier pieces are reduced.
PROXYCCL_DEVICE void openGate(const ProxycclArrived& arrived, uint32_t piece) {
  if (arrived.gate == nullptr) return;
  auto isNext = [&](uint64_t* seen) { return (*seen = loadAcquireDevice(arrived.opened)) >= piece; };
  if (!awaitOthers(arrived, PROXYCCL_WAIT_GRID, piece, isNext))
    return;  // the wait is needed, because an earlier piece may not be reduced yet
  storeReleaseSystem<uint64_t>(arrived.gate, piece + 1);
  if (piece + 1 < arrived.pieces) storeReleaseDevice<uint32_t>(arrived.opened, piece + 1);
}

// Ends a block's work on a chunk. The block that ends a piece's last chunk also resets the piece's words, because
// a reset by the stream would take longer. After the last chunk, no other block changes the piece's words. The reset
// follows openGate(), whose release would otherwise wait for this store.
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

// The last block resets the words that all blocks share.
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

// Maps a rank to its elements of a chunk: this rank's are in its array, other ranks' in slots.
template <class T>
struct ChunkSource {
  const T* own;
  const char* slots;
  uint64_t slot_bytes;
  uint32_t rank;

  PROXYCCL_DEVICE const T* operator()(uint32_t source) const {
    if (source == rank) return own;
    return reinterpret_cast<const T*>(slots + slotOf(rank, source) * slot_bytes);
  }
};

#if PROXYCCL_SMALL_BLOCKS
// Prefetches all ranks' data of a chunk into the device's cache. A warp has too few registers for enough loads to keep
// the memory busy, but a prefetch needs no register.
template <class T>
PROXYCCL_DEVICE void fetchChunk(const ProxycclArrived& arrived, uint32_t bytes, const ChunkSource<T>& source) {
  constexpr uint32_t kLine = 128;
#pragma unroll 1
  for (uint32_t rank = 0; rank < arrived.world_size; ++rank) {
    const char* const from = reinterpret_cast<const char*>(source(rank));
#pragma unroll 1
    for (uint32_t at = kLine * threadIdx.x; at < bytes; at += kLine * PROXYCCL_WARP_SIZE) prefetchToDevice(from + at);
  }
}

// Reduces `units` aligned units of 16 bytes. The number of ranks is a template parameter, so that all values are loaded
// before sums need registers. A thread has several loads in flight, because the kernel's few threads would otherwise
// mostly wait for memory. The function is not inlined, because the caller's variables would leave the threads of a
// small block too few registers.
template <class T, class Op, uint32_t kRanks, uint32_t kUnits>
PROXYCCL_OUT_OF_LINE void reduceUnitsOf(uint32_t divisor, uint32_t units, const ChunkSource<T> source, Bytes16* to) {
  constexpr uint32_t kWide = 16 / sizeof(T);
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < units; i += kUnits * blockDim.x) {
    Bytes16 values[kUnits][kRanks];
#pragma unroll
    for (uint32_t u = 0; u < kUnits; ++u)
#pragma unroll
      for (uint32_t rank = 0; rank < kRanks; ++rank) {
        const bool inside = u == 0 || i + u * blockDim.x < units;
        values[u][rank] = inside ? reinterpret_cast<const Bytes16*>(source(rank))[i + u * blockDim.x] : Bytes16{};
      }
#pragma unroll
    for (uint32_t u = 0; u < kUnits; ++u) {
      Unit<T> result;
#pragma unroll
      for (uint32_t v = 0; v < kWide; ++v) {
        auto sum = contribution<T, Op>(__builtin_bit_cast(Unit<T>, values[u][0]).values[v], divisor);
#pragma unroll
        for (uint32_t rank = 1; rank < kRanks; ++rank)
          sum = Op::combine(sum, contribution<T, Op>(__builtin_bit_cast(Unit<T>, values[u][rank]).values[v], divisor));
        result.values[v] = finishReduction<T, Op>(sum, divisor);
      }
      if (u == 0 || i + u * blockDim.x < units) result.store(reinterpret_cast<T*>(to + i + u * blockDim.x));
    }
  }
}

template <class T, class Op>
PROXYCCL_OUT_OF_LINE void reduceUnitsOfAny(uint32_t ranks, uint32_t divisor, uint32_t units,
                                           const ChunkSource<T> source, Bytes16* to) {
  constexpr uint32_t kWide = 16 / sizeof(T), kAtOnce = 4;  // number of ranks whose values are in flight
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < units; i += blockDim.x) {
    typename Element<T>::Accumulator sums[kWide];
#pragma unroll 1
    for (uint32_t first = 0; first < ranks; first += kAtOnce) {
      Bytes16 values[kAtOnce];
#pragma unroll
      for (uint32_t r = 0; r < kAtOnce; ++r)
        values[r] = reinterpret_cast<const Bytes16*>(source(first + r < ranks ? first + r : first))[i];
#pragma unroll
      for (uint32_t r = 0; r < kAtOnce; ++r) {
        const Unit<T> unit = __builtin_bit_cast(Unit<T>, values[r]);
#pragma unroll
        for (uint32_t v = 0; v < kWide; ++v) {
          const auto value = contribution<T, Op>(unit.values[v], divisor);
          if (first + r == 0)
            sums[v] = value;
          else if (first + r < ranks)
            sums[v] = Op::combine(sums[v], value);
        }
      }
    }
    Unit<T> result;
#pragma unroll
    for (uint32_t v = 0; v < kWide; ++v) result.values[v] = finishReduction<T, Op>(sums[v], divisor);
    result.store(reinterpret_cast<T*>(to + i));
  }
}

template <class T, class Op>
PROXYCCL_DEVICE void reduceUnits(uint32_t ranks, uint32_t divisor, uint32_t units, const ChunkSource<T>& source,
                                 Bytes16* to) {
  switch (ranks) {
    case 2:
      return reduceUnitsOf<T, Op, 2, 2>(divisor, units, source, to);
    case 3:
      return reduceUnitsOf<T, Op, 3, 1>(divisor, units, source, to);
    case 4:
      return reduceUnitsOf<T, Op, 4, 1>(divisor, units, source, to);
    default:
      reduceUnitsOfAny<T, Op>(ranks, divisor, units, source, to);
  }
}
#elif !PROXYCCL_ON_HOST
// Reduces `units` aligned units of 16 bytes. The function is not inlined, because its code is long.
template <class T, class Op>
PROXYCCL_OUT_OF_LINE void reduceUnits(uint32_t ranks, uint32_t divisor, uint32_t units, const ChunkSource<T> source,
                                      Bytes16* to) {
  constexpr uint32_t kUnits = sizeof(T) == 1 ? 2 : 4;
#pragma unroll 1
  for (uint32_t first = threadIdx.x; first < units; first += kUnits * blockDim.x) {
    auto inside = [=](uint32_t u) { return first + u * blockDim.x < units; };
    Bytes16 results[kUnits];
    combineUnits<T, Op, kUnits, Loads::kAhead>(
        ranks, divisor,
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
#endif

template <class T, class Op>
PROXYCCL_DEVICE void reduceChunk(const ProxycclArrived& arrived, uint64_t count, const ChunkSource<T>& source, T* out) {
  uint64_t done = 0;
#if PROXYCCL_SMALL_BLOCKS
  fetchChunk(arrived, static_cast<uint32_t>(count * sizeof(T)), source);
#endif
#if !PROXYCCL_ON_HOST
  if (isAligned16(source(arrived.rank)) && isAligned16(out)) {
    constexpr uint32_t kWide = 16 / sizeof(T);
    const uint32_t units = static_cast<uint32_t>(count / kWide);
    reduceUnits<T, Op>(arrived.world_size, arrived.divisor, units, source, reinterpret_cast<Bytes16*>(out));
    done = count / kWide * kWide;
  }
#endif
  reduceRanks<T, Op>(
      arrived.world_size, arrived.divisor, count - done, false, threadIdx.x, blockDim.x,
      [&](uint32_t rank) { return source(rank) + done; },
      [&](uint64_t i, const auto& sum) { sum.store(out + done + i); });
}

// Sets out[0, count) to the combination, in rank order, of in[0, count) and of the data that arrives from every peer.
template <class T, class Op>
PROXYCCL_DEVICE void reduce_arrived(const ProxycclArrived& arrived, const T* in, T* out, uint64_t count) {
  const uint32_t chunks = arrived.pieces * arrived.chunks;
  uint32_t awaited = 0;  // number of pieces whose transfers this block has waited for; some peers' whole shares arrive
                         // with the first piece
#pragma unroll 1
  for (uint32_t taken = takeChunk(arrived); taken < chunks; taken = takeChunk(arrived)) {
    const uint32_t piece = taken / arrived.chunks, chunk = taken % arrived.chunks;
    for (; awaited <= piece; ++awaited)
      if (!awaitPiece(arrived, awaited, taken == awaited * arrived.chunks)) return;
    const uint64_t end = minimum((piece + 1) * arrived.piece, count);
    const uint64_t begin = minimum(piece * arrived.piece + chunk * arrived.chunk, end);
    const ChunkSource<T> source = {in + begin, arrived.slots + begin * sizeof(T), arrived.slot_bytes, arrived.rank};
    reduceChunk<T, Op>(arrived, minimum(arrived.chunk, end - begin), source, out + begin);
    endChunk(arrived, piece);
  }
  endBlock(arrived);
}

}  // namespace proxyccl
