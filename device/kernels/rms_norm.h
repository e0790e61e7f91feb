// Rows that have been reduced: their residuals are added, and they are normed.
//
// A value is added to its residual in T, as torch adds them. Then the block norms the row: it multiplies each value by
// 1 / sqrt(mean of squares + eps) and by its weight, in float, and rounds once (RMSNorm, Zhang and Sennrich, 2019).
//
// A row consists of packets (packets.h), whether they were sent or not. A thread keeps those that it added, and norms
// the same ones. So it reads nothing that other threads stored, and squares are added in an order that depends on the
// row's width, the block's size and the form of the packets.
#ifndef PROXYCCL_RMS_NORM_H
#define PROXYCCL_RMS_NORM_H

#include "float8_scales.h"
#include "lines.h"

namespace proxyccl {

PROXYCCL_DEVICE float squareRoot(float value) {
#if PROXYCCL_ON_HOST
  return __builtin_sqrtf(value);
#else
  return sqrtf(value);
#endif
}

// Called by a block of whole warps: returns the combination of its threads' values, in an order that depends on the
// block's size alone. Between two calls with the same kNumber there must be a barrier.
template <uint32_t kNumber, class Combine>
PROXYCCL_DEVICE float combineInBlock(float value, Combine combine) {
  __shared__ float of_warps[PROXYCCL_MAX_BLOCK_THREADS / PROXYCCL_WARP_SIZE];
  const uint32_t lane = threadIdx.x % PROXYCCL_WARP_SIZE, warps = blockDim.x / PROXYCCL_WARP_SIZE;
  auto combineInWarp = [&](float own) {
#pragma unroll
    for (uint32_t distance = PROXYCCL_WARP_SIZE / 2; distance > 0; distance /= 2)
      own = combine(own, shuffle(own, lane ^ distance));
    return own;
  };
  value = combineInWarp(value);
  if (lane == 0) of_warps[threadIdx.x / PROXYCCL_WARP_SIZE] = value;
  __syncthreads();
  return combineInWarp(lane < warps ? of_warps[lane] : 0);
}

// The arrays of a call, and how rows lie in packets.
template <class T>
struct Rows {
  const T* x;          // [rows, width]
  const T* residual;   // [rows, width]; null: nothing is added
  const T* weight;     // [width]; null: rows are not normed
  void* out;           // [rows, width] of T, or of e4m3 if there is a scale
  T* residual_out;     // [rows, width]: the sums
  float* scales;       // [rows]: each row's scale, which the block computes; null: none
  const float* scale;  // the scale of all rows; null: none
  uint64_t rows;
  uint32_t width;
  float eps;
  uint32_t share;       // chunks of a row
  uint32_t packets;     // packets of a row that a block has at a time
  uint32_t row_epochs;  // how often, for a whole row
  uint32_t keeps;       // 1: dynamic shared memory has room for a row's packets
};

template <class Form, class T>
class NormedRow {
 public:
  using Payload = typename Form::Payload;

  PROXYCCL_DEVICE explicit NormedRow(const Rows<T>& rows) : rows_(rows) {
#if !PROXYCCL_ON_HOST
    if (rows.weight == nullptr) return;
    forEachPacket([&](uint64_t p) {
      Form::forChunks(p, rows.share, [&](uint32_t, uint64_t chunk) { prefetch(rows.weight + chunk * kEach); });
    });
#endif
  }

  PROXYCCL_DEVICE void begin(uint64_t row) { row_ = row, squares_ = 0; }
  PROXYCCL_DEVICE bool exists() const { return row_ < rows_.rows; }

  // Loads data of packet p of this row in an array of rows; of a row that does not exist or of no array, zeros.
  PROXYCCL_DEVICE Payload load(const T* array, uint64_t p) const {
    if (array == nullptr || !exists()) return {};
    return Form::load(array + row_ * rows_.width, rows_.width, rows_.share, 0, p);
  }
  // Takes the sum of packet p, and the residual, which is loaded before the sum arrives.
  PROXYCCL_DEVICE void take(uint64_t p, const Payload& sum, const Payload& residual) {
    Values values = __builtin_bit_cast(Values, sum);
    if (rows_.residual != nullptr) {
      const Values added = __builtin_bit_cast(Values, residual);
#pragma unroll
      for (uint32_t k = 0; k < kCount; ++k)
        values.at[k] = Element<T>::narrow(Element<T>::widen(values.at[k]) + Element<T>::widen(added.at[k]));
    }
#pragma unroll
    for (uint32_t k = 0; k < kCount; ++k) {
      const float value = Element<T>::widen(values.at[k]);
      squares_ += value * value;
    }
    if (!exists()) return;
    const Payload payload = __builtin_bit_cast(Payload, values);
    if (rows_.keeps) kept()[p] = payload;
    Form::store(rows_.residual_out + row_ * rows_.width, rows_.width, rows_.share, 0, p, payload);
  }

  // Called by the block when it has taken all packets of the row.
  PROXYCCL_DEVICE void norm() {
    if (rows_.weight == nullptr || !exists()) return;
    const auto add = [](float a, float b) { return a + b; };
    const float mean = combineInBlock<0>(squares_, add) / static_cast<float>(rows_.width);
    const float factor = 1 / squareRoot(mean + rows_.eps);
    float to_float8 = 0;
    if (rows_.scales != nullptr) {
      float greatest = 0;
      forEachPacket([&](uint64_t p) {
        forNormed(p, factor, [&](uint32_t, uint64_t, float* values) {
#pragma unroll
          for (uint32_t k = 0; k < kEach; ++k) greatest = greaterMagnitude(greatest, values[k]);
        });
      });
      greatest = combineInBlock<1>(greatest, greaterMagnitude);
      if (threadIdx.x == 0) rows_.scales[row_] = scaleOf(greatest);
      to_float8 = factorOf(greatest);
    } else if (rows_.scale != nullptr) {
      to_float8 = 1 / *rows_.scale;
    }
    const bool quantizes = rows_.scales != nullptr || rows_.scale != nullptr;
    forEachPacket([&](uint64_t p) {
      Values narrowed{};
      forNormed(p, factor, [&](uint32_t c, uint64_t chunk, float* values) {
        if (quantizes) return storeFloat8(chunk, values, to_float8);
#pragma unroll
        for (uint32_t k = 0; k < kEach; ++k) narrowed.at[c * kEach + k] = Element<T>::narrow(values[k]);
      });
      if (quantizes) return;
      Form::store(static_cast<T*>(rows_.out) + row_ * rows_.width, rows_.width, rows_.share, 0, p,
                  __builtin_bit_cast(Payload, narrowed));
    });
    __syncthreads();  // between two calls of combineInBlock
  }

  // Calls body(p) for this thread's packets of a row.
  template <class Body>
  PROXYCCL_DEVICE void forEachPacket(Body body) const {
    for (uint32_t epoch = 0; epoch < rows_.row_epochs; ++epoch)
      Form::forEach(rows_.packets, [&](uint64_t p) { body(static_cast<uint64_t>(epoch) * rows_.packets + p); });
  }

 private:
  static constexpr uint32_t kCount = sizeof(Payload) / sizeof(T), kEach = Form::kChunkBytes / sizeof(T);
  struct Values {
    T at[kCount];
  };

  PROXYCCL_DEVICE Payload* kept() const { return static_cast<Payload*>(dynamicShared()); }

  // Calls body(c, chunk, values) with the normed values of each chunk of packet p.
  template <class Body>
  PROXYCCL_DEVICE void forNormed(uint64_t p, float factor, Body body) const {
    const auto sums = __builtin_bit_cast(Values, rows_.keeps ? kept()[p] : load(rows_.residual_out, p));
    const auto weights = __builtin_bit_cast(Values, Form::load(rows_.weight, rows_.width, rows_.share, 0, p));
    Form::forChunks(p, rows_.share, [&](uint32_t c, uint64_t chunk) {
      float values[kEach];
#pragma unroll
      for (uint32_t k = 0; k < kEach; ++k)
        values[k] = Element<T>::widen(sums.at[c * kEach + k]) * factor * Element<T>::widen(weights.at[c * kEach + k]);
      body(c, chunk, values);
    });
  }
  PROXYCCL_DEVICE void storeFloat8(uint64_t chunk, float* values, float factor) const {
    struct alignas(kEach) Elements {
      uint8_t at[kEach];
    } elements;
#pragma unroll
    for (uint32_t k = 0; k < kEach; ++k) values[k] *= factor;
    floatsToE4M3<kEach>(elements.at, values);
    const uint64_t first = chunk * kEach;
    uint8_t* to = static_cast<uint8_t*>(rows_.out) + row_ * rows_.width + first;
    if (first + kEach <= rows_.width && reinterpret_cast<uintptr_t>(to) % kEach == 0) {
      *reinterpret_cast<Elements*>(to) = elements;
      return;
    }
    for (uint32_t k = 0; k < kEach && first + k < rows_.width; ++k) to[k] = elements.at[k];
  }

  const Rows<T>& rows_;
  uint64_t row_ = 0;
  float squares_ = 0;  // of this thread's sums
};

}  // namespace proxyccl

#define PROXYCCL_ROWS_PARAMETERS(T)                                                                              \
  const T *x, const T *residual, const T *weight, void *out, T *residual_out, float *scales, const float *scale, \
      uint64_t rows, uint32_t width, float eps, uint32_t share, uint32_t packets, uint32_t row_epochs, uint32_t keeps
#define PROXYCCL_ROWS_ARGUMENTS \
  x, residual, weight, out, residual_out, scales, scale, rows, width, eps, share, packets, row_epochs, keeps

#endif
