// Adds residuals to reduced rows, and normalizes the rows.
//
// A value and its residual are added in float and rounded to T, as in torch. Then each value of a row is multiplied by
// 1 / sqrt(mean of squares + eps) and by its weight plus a bias, in float, and rounded once (RMSNorm, Zhang and
// Sennrich, 2019).
//
// A row is divided into packets (packets.h), even in kernels that send no packets. The packets of a warp's threads form
// a group. One block handles a row, or the blocks of a cluster each handle a part of the row. A thread normalizes the
// packets to which it added residuals. Of other threads' results a thread needs only each group's sum of squares. All
// threads add the groups' sums in the same order, which depends only on the row's width and on the packets' form.
//
// The code is short rather than unrolled, because most blocks run it for only one row, and instructions that are not
// cached take longer to fetch than to execute.
#pragma once

#include "float8_scales.h"
#include "lines.h"

namespace proxyccl {

PROXYCCL_DEVICE float inverseRoot(float value) {
#if PROXYCCL_ON_HOST
  return 1 / __builtin_sqrtf(value);
#else
  return rsqrtf(value);
#endif
}

// Called by a whole warp: returns the combination of the threads' values; all threads get the same bits.
template <class Combine>
PROXYCCL_DEVICE float combineInWarp(float value, Combine combine) {
  const uint32_t lane = threadIdx.x % PROXYCCL_WARP_SIZE;
#pragma unroll
  for (uint32_t distance = PROXYCCL_WARP_SIZE / 2; distance > 0; distance /= 2)
    value = combine(value, shuffle(value, lane ^ distance));
  return value;
}

PROXYCCL_DEVICE float added(float a, float b) { return a + b; }

// Exchanges numbers between the blocks of a row: tell() sends a number to all blocks. A block calls start() first,
// awaitStart() before its first tell(), and meet() between tell() and its reads of the numbers, with the size of all
// numbers. Only threads with `waits` may read numbers.
template <uint32_t kBlocks>
struct RowBlocks;
template <>
struct RowBlocks<1> {
  PROXYCCL_DEVICE void start() {}
  static PROXYCCL_DEVICE void awaitStart() {}
  PROXYCCL_DEVICE void tell(float* at, float number) { *at = number; }
  PROXYCCL_DEVICE void meet(uint32_t, bool) { __syncthreads(); }
};
#if PROXYCCL_HAS_CLUSTERS
// A barrier of the cluster would wait for all earlier stores to global memory, those to peers included. So the numbers
// themselves complete a barrier of each block. There are two barriers, used in turn: a block that is one meeting ahead
// uses the other one. No block is two meetings ahead of another, because every block tells a number in each meeting.
// A warp without `waits` may lag by more meetings, because it uses no numbers.
template <uint32_t kBlocks>
struct RowBlocks {
  PROXYCCL_DEVICE void start() {
    if (threadIdx.x == 0)
      for (uint32_t k = 0; k < 2; ++k) initInCluster(barriers() + k);
    arriveInCluster();
  }
  static PROXYCCL_DEVICE void awaitStart() { awaitCluster(); }
  PROXYCCL_DEVICE void tell(float* at, float number) {
    for (uint32_t block = 0; block < kBlocks; ++block) storeInCluster(at, barriers() + meetings_ % 2, block, number);
  }
  PROXYCCL_DEVICE void meet(uint32_t bytes, bool waits) {
    uint64_t* const barrier = barriers() + meetings_ % 2;
    if (threadIdx.x == 0) expectInCluster(barrier, bytes);
    if (waits)
      while (!hasArrivedInCluster(barrier, meetings_ / 2 % 2)) {}
    ++meetings_;
  }

 private:
  static PROXYCCL_DEVICE uint64_t* barriers() {
    __shared__ uint64_t both[2];
    return both;
  }
  uint32_t meetings_ = 0;
};
#endif

template <class T>
struct Rows {
  const T* x;          // [rows, width]
  const T* residual;   // [rows, width]; null if nothing is added
  const T* weight;     // [width]; null if rows are not normalized
  void* out;           // [rows, width] of T, or of e4m3 if `scales` or `scale` is not null
  T* residual_out;     // [rows, width]: the sums of `x` and `residual`
  float* scales;       // [rows]: receives each row's scale, which the kernel computes; or null
  const float* scale;  // the caller's one scale for all rows; or null
  uint64_t rows;
  uint32_t width;
  float eps;
  float bias;      // added to each weight
  uint32_t share;  // number of chunks of a row
  uint32_t row_packets;
  uint32_t packets;     // number of packets of a block per epoch, a multiple of a group's packets
  uint32_t row_epochs;  // number of epochs per row
  uint32_t keeps;  // what dynamic shared memory holds: 0: nothing; 1: the sums of a block's part of a row; 2: also the
                   // weights
};

// A block's part of the current row; the block handles its rows one after the other. kWhole means that all arrays are
// aligned to 16 bytes, and that a row's size is a multiple of 16 bytes. kBlocks is the number of blocks in a cluster,
// which share a row.
//
// Dynamic shared memory holds two numbers per group, once for even and once for odd rows; then, depending on `keeps`,
// the sums and the weights.
template <class Form, class T, bool kWhole, uint32_t kBlocks>
class NormedRow {
 public:
  using Payload = typename Form::Payload;
  using Blocks = RowBlocks<kBlocks>;

  PROXYCCL_DEVICE explicit NormedRow(const Rows<T>& rows) : rows_(rows) {
    begin(blockIdx.x / kBlocks);
    blocks_.start();
  }

  PROXYCCL_DEVICE bool exists() const { return row_ < rows_.rows; }
  // The numbers of the current row and of the block's next row, which need not exist.
  PROXYCCL_DEVICE uint64_t number() const { return row_; }
  PROXYCCL_DEVICE uint64_t next() const { return row_ + gridDim.x / kBlocks; }
  PROXYCCL_DEVICE void goOn() {
    parity_ ^= 1;
    begin(next());
  }

  // Returns the values of `x` in the block's packet p of an epoch of a row, or zeros if the row does not exist.
  PROXYCCL_DEVICE Payload load(uint32_t epoch, uint32_t p, uint64_t row) const {
    return row < rows_.rows ? loadFrom(rows_.x + row * rows_.width, inRow(epoch, p)) : Payload{};
  }
  // Prefetches packet p of two later rows: of `residual` for the block's next row, of `x` for the row after the next.
  PROXYCCL_DEVICE void prefetchRows(uint32_t epoch, uint32_t p) const {
    const uint64_t stride = gridDim.x / kBlocks * static_cast<uint64_t>(rows_.width);
    Form::forChunks(inRow(epoch, p), rows_.share, [&](uint32_t, uint32_t chunk) {
      const uint64_t at = first_ + stride + chunk * kEach;
      if (rows_.residual != nullptr && next() < rows_.rows) prefetch(rows_.residual + at);
      if (next() + gridDim.x / kBlocks < rows_.rows) prefetch(rows_.x + at + stride);
    });
  }
  PROXYCCL_DEVICE Payload residual(uint32_t epoch, uint32_t p) const {
    return rows_.residual != nullptr && exists() ? loadFrom(rows_.residual + first_, inRow(epoch, p)) : Payload{};
  }
  // Called once per packet, before the block waits for data: if `keeps` is 2, copies the packet's weights to shared
  // memory.
  PROXYCCL_DEVICE void keepWeights(uint32_t epoch, uint32_t p) const {
    if (rows_.keeps == 2) weights()[epoch * rows_.packets + p] = loadFrom(rows_.weight, inRow(epoch, p));
  }

  // Called by whole warps: processes a packet's sum. The caller loads the residual before the sum arrives.
  PROXYCCL_DEVICE void take(uint32_t epoch, uint32_t p, const Payload& sum, const Payload& residual) {
    Words words = __builtin_bit_cast(Words, sum);
    if (rows_.residual != nullptr) {
      const Words of_residual = __builtin_bit_cast(Words, residual);
#pragma unroll
      for (uint32_t k = 0; k < kWords; ++k)
        words.at[k] = Element<T>::narrowTwo(low(words.at[k]) + low(of_residual.at[k]),
                                            high(words.at[k]) + high(of_residual.at[k]));
    }
    const Payload payload = __builtin_bit_cast(Payload, words);
    const uint32_t in_row = inRow(epoch, p);
    if (exists()) {
      if (rows_.keeps) kept()[epoch * rows_.packets + p] = payload;
      storeTo(rows_.residual_out + first_, in_row, payload);
    }
    if (rows_.weight == nullptr) return;
    float squares = 0;
#pragma unroll
    for (uint32_t k = 0; k < kWords; ++k) {
      squares += low(words.at[k]) * low(words.at[k]);
      squares += high(words.at[k]) * high(words.at[k]);
    }
    tell(0, in_row, combineInWarp(squares, added));
  }

  // Called by the row's blocks after take() of all packets of the row: normalizes the row.
  PROXYCCL_DEVICE void norm() {
    if (rows_.weight == nullptr) return;
    meet();
    if (!exists()) return;
    const float mean = told(0, added) / static_cast<float>(rows_.width), factor = inverseRoot(mean + rows_.eps);
    if (__builtin_expect(rows_.scales != nullptr || rows_.scale != nullptr, false)) return quantize(factor);
    forEachPacket([&](uint32_t epoch, uint32_t p) {
      Words narrowed{};
      forNormed(epoch, p, factor, [&](uint32_t c, uint32_t, float* values) {
#pragma unroll
        for (uint32_t k = 0; k < kEach; k += 2)
          narrowed.at[(c * kEach + k) / 2] = Element<T>::narrowTwo(values[k], values[k + 1]);
      });
      storeTo(static_cast<T*>(rows_.out) + first_, inRow(epoch, p), __builtin_bit_cast(Payload, narrowed));
    });
  }

  template <class Body>
  PROXYCCL_DEVICE void forEachPacket(Body body) const {
    for (uint32_t epoch = 0; epoch < rows_.row_epochs; ++epoch) forEachOfEpoch([&](uint32_t p) { body(epoch, p); });
  }
  // Calls body(p) for this thread's packets of an epoch; a warp's threads handle one group of packets at a time.
  template <class Body>
  PROXYCCL_DEVICE void forEachOfEpoch(Body body) const {
#pragma unroll 1
    for (uint32_t p = threadIdx.x; p < rows_.packets; p += blockDim.x) body(p);
  }

 private:
  static_assert(sizeof(T) == 2, "a word has two elements");
  static constexpr uint32_t kWords = sizeof(Payload) / sizeof(uint32_t);
  static constexpr uint32_t kEach = sizeof(typename Form::Chunk) / sizeof(T);
  struct Words {
    uint32_t at[kWords];
  };
  static PROXYCCL_DEVICE float low(uint32_t word) { return Element<T>::widen(T{static_cast<uint16_t>(word)}); }
  static PROXYCCL_DEVICE float high(uint32_t word) { return Element<T>::widen(T{static_cast<uint16_t>(word >> 16)}); }

  PROXYCCL_DEVICE void begin(uint64_t row) { row_ = row, first_ = row * rows_.width; }
  PROXYCCL_DEVICE uint32_t inRow(uint32_t epoch, uint32_t p) const {
    return (epoch * kBlocks + blockIdx.x % kBlocks) * rows_.packets + p;
  }

  // Normalizes the row to float8. A function of its own keeps these instructions apart from those of other rows.
  PROXYCCL_DEVICE void quantize(float factor) {
    float to_float8 = 0;
    if (rows_.scales != nullptr) {
      forEachPacket([&](uint32_t epoch, uint32_t p) {
        float greatest = 0;
        forNormed(epoch, p, factor, [&](uint32_t, uint32_t, float* values) {
#pragma unroll
          for (uint32_t k = 0; k < kEach; ++k) greatest = greaterMagnitude(greatest, values[k]);
        });
        tell(1, inRow(epoch, p), combineInWarp(greatest, greaterMagnitude));
      });
      meet();
      const float greatest = told(1, greaterMagnitude);
      if (threadIdx.x == 0 && blockIdx.x % kBlocks == 0) rows_.scales[row_] = scaleOf(greatest);
      to_float8 = factorOf(greatest);
    } else {
      to_float8 = 1 / *rows_.scale;
    }
    forEachPacket([&](uint32_t epoch, uint32_t p) {
      forNormed(epoch, p, factor,
                [&](uint32_t, uint32_t chunk, float* values) { storeFloat8(chunk, values, to_float8); });
    });
  }

  PROXYCCL_DEVICE float* numbers(uint32_t kind) const {
    return static_cast<float*>(dynamicShared()) + (2 * parity_ + kind) * groups();
  }
  // The groups that tell numbers: those with packets of the row, and the first group of each block (see RowBlocks).
  PROXYCCL_DEVICE uint32_t groups() const {
    const uint32_t of_row = (rows_.row_packets + PROXYCCL_WARP_SIZE - 1) / PROXYCCL_WARP_SIZE;
    const uint32_t of_blocks = (kBlocks - 1) * (rows_.packets / PROXYCCL_WARP_SIZE) + 1;
    return of_row > of_blocks ? of_row : of_blocks;
  }
  // Returns the kept sums, which are aligned to 16 bytes, because four numbers of 4 bytes per group precede the sums.
  PROXYCCL_DEVICE Payload* kept() const {
    return reinterpret_cast<Payload*>(static_cast<float*>(dynamicShared()) + 4 * groups());
  }
  PROXYCCL_DEVICE Payload* weights() const { return kept() + rows_.row_epochs * rows_.packets; }

  // Sends the number that a packet's group has computed to all blocks of the row, which read it after meet(). The
  // memory is reused for the row after the next one. By then every block has read the number, because a block reads it
  // before it calls meet() for the next row.
  PROXYCCL_DEVICE void tell(uint32_t kind, uint32_t in_row, float number) {
    const uint32_t group = in_row / PROXYCCL_WARP_SIZE;
    if (in_row % PROXYCCL_WARP_SIZE != 0 || group >= groups()) return;
    blocks_.tell(numbers(kind) + group, number);
  }
  // A warp that tells no number has no packets of the row, so it uses no numbers.
  PROXYCCL_DEVICE void meet() {
    blocks_.meet(groups() * sizeof(float), inRow(0, threadIdx.x) / PROXYCCL_WARP_SIZE < groups());
  }
  template <class Combine>
  PROXYCCL_DEVICE float told(uint32_t kind, Combine combine) const {
    const float* of_groups = numbers(kind);
    float own = 0;
#pragma unroll 1  // not unrolled, because most rows have fewer groups than a warp has threads
    for (uint32_t group = threadIdx.x % PROXYCCL_WARP_SIZE; group < groups(); group += PROXYCCL_WARP_SIZE)
      own = combine(own, of_groups[group]);
    return combineInWarp(own, combine);
  }

  PROXYCCL_DEVICE Payload loadFrom(const T* row, uint32_t in_row) const {
    if constexpr (kWhole) {
      Payload payload{};
      Form::forChunks(in_row, rows_.share, [&](uint32_t c, uint32_t chunk) {
        Form::setChunk(payload, c, reinterpret_cast<const typename Form::Chunk*>(row)[chunk]);
      });
      return payload;
    } else {
      return Form::load(row, rows_.width, rows_.share, 0, in_row);
    }
  }
  PROXYCCL_DEVICE void storeTo(T* row, uint32_t in_row, const Payload& payload) const {
    if constexpr (kWhole) {
      Form::forChunks(in_row, rows_.share, [&](uint32_t c, uint32_t chunk) {
        reinterpret_cast<typename Form::Chunk*>(row)[chunk] = Form::chunkOf(payload, c);
      });
    } else {
      Form::store(row, rows_.width, rows_.share, 0, in_row, payload);
    }
  }

  // Calls body(c, chunk, values) with the normalized values of each chunk of a packet.
  template <class Body>
  PROXYCCL_DEVICE void forNormed(uint32_t epoch, uint32_t p, float factor, Body body) const {
    const uint32_t in_row = inRow(epoch, p), in_block = epoch * rows_.packets + p;
    const auto sums =
        __builtin_bit_cast(Words, rows_.keeps ? kept()[in_block] : loadFrom(rows_.residual_out + first_, in_row));
    const auto scaled =
        __builtin_bit_cast(Words, rows_.keeps == 2 ? weights()[in_block] : loadFrom(rows_.weight, in_row));
    Form::forChunks(in_row, rows_.share, [&](uint32_t c, uint32_t chunk) {
      float values[kEach];
#pragma unroll
      for (uint32_t k = 0; k < kEach; k += 2) {
        const uint32_t sum = sums.at[(c * kEach + k) / 2], weight = scaled.at[(c * kEach + k) / 2];
        values[k] = low(sum) * factor * (low(weight) + rows_.bias);
        values[k + 1] = high(sum) * factor * (high(weight) + rows_.bias);
      }
      body(c, chunk, values);
    });
  }
  PROXYCCL_DEVICE void storeFloat8(uint32_t chunk, float* values, float factor) const {
    struct alignas(kEach) Elements {
      uint8_t at[kEach];
    } elements;
#pragma unroll
    for (uint32_t k = 0; k < kEach; ++k) values[k] *= factor;
    floatsToE4M3<kEach>(elements.at, values);
    const uint32_t first = chunk * kEach;
    uint8_t* to = static_cast<uint8_t*>(rows_.out) + first_ + first;
    if constexpr (kWhole) {
      *reinterpret_cast<Elements*>(to) = elements;
    } else {
      for (uint32_t k = 0; k < kEach && first + k < rows_.width; ++k) to[k] = elements.at[k];
    }
  }

  const Rows<T>& rows_;
  uint64_t row_ = 0, first_ = 0;  // the current row's number, and the index of the row's first element
  uint32_t parity_ = 0;
  Blocks blocks_;
};

}  // namespace proxyccl

#define PROXYCCL_ROWS_PARAMETERS(T)                                                                                 \
  const T *x, const T *residual, const T *weight, void *out, T *residual_out, float *scales, const float *scale,    \
      uint64_t rows, uint32_t width, float eps, float bias, uint32_t share, uint32_t row_packets, uint32_t packets, \
      uint32_t row_epochs, uint32_t keeps
#define PROXYCCL_ROWS_ARGUMENTS                                                                               \
  x, residual, weight, out, residual_out, scales, scale, rows, width, eps, bias, share, row_packets, packets, \
      row_epochs, keeps
