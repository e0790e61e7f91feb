// Rows for dispatch in float8: 128 elements have a scale in common, and the scales of a row lie behind its elements.
//
// The format is e4m3 without infinities (OCP 8-bit floating point, E4M3), whose greatest is 448. A scale is the
// greatest magnitude of its values over that, and an element is its value times 448 over it; both factors are 1 where
// all values are zero.
#ifndef PROXYCCL_EXPERT_QUANTIZE_H
#define PROXYCCL_EXPERT_QUANTIZE_H

#include "expert_team.h"

namespace proxyccl {

// To nearest, ties to even; what is beyond the greatest becomes that. A NaN stays one.
PROXYCCL_DEVICE uint8_t floatToE4M3(float value) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, value), magnitude = bits & 0x7fffffff;
  uint32_t result;
  if (magnitude > 0x7f800000) {
    result = 0x7f;
  } else if (magnitude >= 0x43e00000) {  // 448 and more
    result = 0x7e;
  } else if (magnitude < 0x3c800000) {  // below 2^-6: next to 2^14 a float's last bit is worth what e4m3's is here
    result = __builtin_bit_cast(uint32_t, __builtin_bit_cast(float, magnitude) + 16384.0f) - 0x46800000;
  } else {
    result = ((magnitude + 0x7ffff + (magnitude >> 20 & 1)) >> 20) - (120 << 3);
  }
  return static_cast<uint8_t>(result | (bits >> 24 & 0x80));
}

// output[tokens][hidden + 4 * hidden / 128] = the rows in float8, and their scales.
template <class T>
PROXYCCL_DEVICE void expert_quantize(const ProxycclExperts&, const ProxycclCombine& call) {
  constexpr float kGreatest = 448;
  constexpr uint32_t kBlock = PROXYCCL_SCALED_ELEMENTS, kEach = kBlock / kGroupLanes;
  // What a thread reads and writes, as few accesses.
  constexpr uint32_t kTogether = kEach < 4 ? kEach : 4;
  struct alignas(kTogether * sizeof(T)) Values {
    T at[kEach];
  };
  struct alignas(kTogether) Elements {
    uint8_t at[kEach];
  };
  const Group group;
  const uint64_t blocks = call.hidden / kBlock, stride = call.hidden + blocks * sizeof(float);
  const uint32_t groups = gridDim.x * Group::count();
  for (uint64_t b = blockIdx.x * Group::count() + group.number; b < call.tokens * blocks; b += groups) {
    const uint64_t token = b / blocks, first = b % blocks * kBlock + group.lane * kEach;
    const T* from = reinterpret_cast<const T*>(call.rows) + token * call.hidden + first;
    T given[kEach];
    float values[kEach], greatest = 0;
    if (reinterpret_cast<uintptr_t>(call.rows) % alignof(Values) == 0) {  // as one access, where it can be
      const Values together = *reinterpret_cast<const Values*>(from);
      for (uint32_t i = 0; i < kEach; ++i) given[i] = together.at[i];
    } else {
      for (uint32_t i = 0; i < kEach; ++i) given[i] = from[i];
    }
    for (uint32_t i = 0; i < kEach; ++i) {
      values[i] = static_cast<float>(Element<T>::widen(given[i]));
      const float magnitude = values[i] < 0 ? -values[i] : values[i];
      greatest = magnitude > greatest ? magnitude : greatest;
    }
#if !PROXYCCL_ON_HOST
    for (uint32_t distance = kGroupLanes / 2; distance > 0; distance /= 2) {
      const float other = shuffle(greatest, group.lane ^ distance);
      greatest = other > greatest ? other : greatest;
    }
#endif
    const float scale = greatest > 0 ? greatest / kGreatest : 1, factor = greatest > 0 ? kGreatest / greatest : 1;
    char* row = call.output + token * stride;
    Elements elements;
    for (uint32_t i = 0; i < kEach; ++i) elements.at[i] = floatToE4M3(values[i] * factor);
    *reinterpret_cast<Elements*>(row + first) = elements;
    if (group.lane == 0) *reinterpret_cast<float*>(row + call.hidden + b % blocks * sizeof(float)) = scale;
  }
}

}  // namespace proxyccl

// The same from rows that are in float8 already: packed[tokens][row_bytes + scale_bytes].
extern "C" __global__ void __launch_bounds__(PROXYCCL_EXPERT_THREADS, 1)
    expert_pack(const char* rows, const char* scales, char* packed, uint32_t tokens, uint64_t row_bytes,
                uint64_t scale_bytes) {
  using namespace proxyccl;
  const Group group;
  const uint64_t stride = row_bytes + scale_bytes;
  for (uint64_t token = blockIdx.x * Group::count() + group.number; token < tokens;
       token += gridDim.x * Group::count()) {
    copyBytes(packed + token * stride, rows + token * row_bytes, row_bytes, group.lane, kGroupLanes);
    copyBytes(packed + token * stride + row_bytes, scales + token * scale_bytes, scale_bytes, group.lane, kGroupLanes);
  }
}
PROXYCCL_EXPORT_KERNEL(expert_pack)

#endif
