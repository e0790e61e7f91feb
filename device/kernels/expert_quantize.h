// Rows for dispatch in float8: each 128 elements share a scale, and the scales of a row lie behind its elements.
//
// The format is e4m3 without infinities (OCP 8-bit floating point, E4M3), whose greatest value is 448. With m the
// greatest magnitude of the 128 values, the scale is m / 448 and an element is its value times 448 / m. If all values
// are zero, both factors are 1.
#ifndef PROXYCCL_EXPERT_QUANTIZE_H
#define PROXYCCL_EXPERT_QUANTIZE_H

#include "expert_team.h"

namespace proxyccl {

// Rounds to nearest, ties to even, and saturates at 448. A NaN stays a NaN.
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

template <uint32_t kCount>
PROXYCCL_DEVICE void floatsToE4M3(uint8_t* to, const float* values) {
#ifdef PROXYCCL_HAS_FLOATS_TO_E4M3
  bool numbers = true;
  for (uint32_t i = 0; i < kCount; ++i) numbers &= values[i] == values[i];
  if (numbers) {
    for (uint32_t i = 0; i < kCount; i += 2) {
      const uint16_t pair = floatsToE4M3(values[i], values[i + 1]);
      to[i] = static_cast<uint8_t>(pair);
      to[i + 1] = static_cast<uint8_t>(pair >> 8);
    }
    return;
  }
#endif
  for (uint32_t i = 0; i < kCount; ++i) to[i] = floatToE4M3(values[i]);
}

// The greater of a magnitude and the magnitude of a value; NaN is ignored.
PROXYCCL_DEVICE float greaterMagnitude(float greatest, float value) {
#if PROXYCCL_ON_HOST
  const float magnitude = value < 0 ? -value : value;
  return magnitude > greatest ? magnitude : greatest;
#else
  return fmaxf(greatest, fabsf(value));  // one instruction, which compilers don't make of the above
#endif
}

// One thread's part of the elements that share a scale, as wide as the widest access. A group holds the elements of
// kBlocks scales.
template <class T>
struct ScaledPart {
  static constexpr uint32_t kEach = PROXYCCL_ON_HOST ? PROXYCCL_SCALED_ELEMENTS : sizeof(T) == 2 ? 8 : 4;
  static constexpr uint32_t kLanes = PROXYCCL_SCALED_ELEMENTS / kEach, kBlocks = kGroupLanes / kLanes;
  static constexpr uint32_t kTogether = kEach < 16 / sizeof(T) ? kEach : 16 / sizeof(T);
  struct alignas(kTogether * sizeof(T)) Values {
    T at[kEach];
  };
  struct alignas(4) Elements {  // as rows are, since scales lie between them
    uint8_t at[kEach];
  };
  Values given;

  PROXYCCL_DEVICE void load(const T* from, bool aligned) {
    if (aligned) {
      given = *reinterpret_cast<const Values*>(from);
    } else {
      for (uint32_t i = 0; i < kEach; ++i) given.at[i] = from[i];
    }
  }
  // By a group. Returns the scale.
  PROXYCCL_DEVICE float quantize(const Group& group, Elements* elements) const {
    constexpr float kGreatest = 448;
    float values[kEach], greatest = 0;
    for (uint32_t i = 0; i < kEach; ++i) {
      values[i] = static_cast<float>(Element<T>::widen(given.at[i]));
      greatest = greaterMagnitude(greatest, values[i]);
    }
#if !PROXYCCL_ON_HOST
    for (uint32_t distance = kLanes / 2; distance > 0; distance /= 2)
      greatest = greaterMagnitude(greatest, shuffle(greatest, group.lane ^ distance));
#endif
    const float factor = greatest > 0 ? kGreatest / greatest : 1;
    for (uint32_t i = 0; i < kEach; ++i) values[i] *= factor;
    floatsToE4M3<kEach>(elements->at, values);
    return greatest > 0 ? greatest / kGreatest : 1;
  }
};

// output[tokens][hidden + 4 * hidden / 128] = the rows in float8, and their scales. A group has kInFlight accesses to a
// row in flight.
template <class T>
PROXYCCL_DEVICE void expert_quantize(const ProxycclExperts&, const ProxycclCombine& call) {
  using Part = ScaledPart<T>;
  constexpr uint32_t kBlock = PROXYCCL_SCALED_ELEMENTS;
  constexpr uint32_t kInFlight = PROXYCCL_ON_HOST ? 1 : 64 / sizeof(typename Part::Values);
  const Group group;
  const uint32_t blocks = static_cast<uint32_t>(call.hidden / kBlock);  // of a row
  const uint32_t parts = (blocks + kInFlight * Part::kBlocks - 1) / (kInFlight * Part::kBlocks);
  const uint32_t own = group.lane / Part::kLanes, lane = group.lane % Part::kLanes;
  const T* rows = reinterpret_cast<const T*>(call.rows) + lane * Part::kEach;
  const bool aligned = reinterpret_cast<uintptr_t>(call.rows) % alignof(typename Part::Values) == 0;
  const uint32_t groups = gridDim.x * Group::count(), first = blockIdx.x * Group::count() + group.number;
  // The part is advanced by addition, as a division takes about as long as an access.
  uint32_t part = first % parts;
  for (uint32_t token = first / parts; token < call.tokens; token += groups / parts) {
    const uint32_t begin = part * kInFlight * Part::kBlocks;
    const T* row = rows + token * call.hidden;
    char* out = call.output + token * (call.hidden + blocks * sizeof(float));
    Part held[kInFlight];
#pragma unroll
    for (uint32_t i = 0; i < kInFlight; ++i) {
      const uint32_t block = begin + i * Part::kBlocks + own;
      held[i].load(row + (block < blocks ? block : begin) * kBlock, aligned);  // past the last, any block
    }
#pragma unroll
    for (uint32_t i = 0; i < kInFlight; ++i) {
      const uint32_t block = begin + i * Part::kBlocks + own;
      typename Part::Elements elements;
      const float scale = held[i].quantize(group, &elements);
      if (block >= blocks) continue;
      reinterpret_cast<typename Part::Elements*>(out + block * kBlock)[lane] = elements;
      if (lane == 0) reinterpret_cast<float*>(out + call.hidden)[block] = scale;
    }
    part += groups % parts;
    if (part >= parts) {
      part -= parts;
      ++token;
    }
  }
}

}  // namespace proxyccl

// The same for rows that are already in float8: packed[tokens][row_bytes + scale_bytes].
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
