// Float8 elements that share a scale, as a group of threads makes them of 128 values.
//
// The format is e4m3 without infinities (OCP 8-bit floating point, E4M3), whose greatest value is 448. With m the
// greatest magnitude of the 128 values, the scale is m / 448 and an element is its value times 448 / m. If all values
// are zero, both factors are 1.
#ifndef PROXYCCL_SCALED_ROWS_H
#define PROXYCCL_SCALED_ROWS_H

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
  // The scale of elements whose greatest magnitude is this.
  static PROXYCCL_DEVICE float scaleOf(float greatest) { return greatest > 0 ? greatest / 448 : 1; }
  // By a group. Returns the greatest magnitude.
  PROXYCCL_DEVICE float quantize(const Group& group, Elements* elements) const {
    constexpr float kGreatest = 448;
    float values[kEach], greatest = 0;
#ifdef PROXYCCL_HAS_FLOATS_TO_E4M3
    if constexpr (sizeof(T) == 2) {
      if (quantizeNumbers(group, elements, &greatest)) return greatest;
      greatest = 0;
    }
#endif
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
    return greatest;
  }

#ifdef PROXYCCL_HAS_FLOATS_TO_E4M3
 private:
  // The same, for elements of 16 bits: their magnitudes are compared as integers, two at a time. Returns false to the
  // whole warp if there is an infinity or a NaN, which are greater than all numbers.
  PROXYCCL_DEVICE bool quantizeNumbers(const Group& group, Elements* elements, float* greatest) const {
    struct Pairs {
      uint32_t at[kEach / 2];
    };
    const Pairs pairs = __builtin_bit_cast(Pairs, given);
    uint32_t high = 0, low = 0;  // of the upper elements, and of the lower ones, in the upper half
#pragma unroll
    for (uint32_t i = 0; i < kEach / 2; ++i) {
      const uint32_t magnitudes = pairs.at[i] & 0x7fff7fff;
      high = max(high, magnitudes);
      low = max(low, magnitudes << 16);
    }
    uint32_t most = max(high, low) >> 16;
#pragma unroll
    for (uint32_t distance = kLanes / 2; distance > 0; distance /= 2)
      most = max(most, shuffle(most, group.lane ^ distance));
    const float magnitude = static_cast<float>(Element<T>::widen(T{static_cast<uint16_t>(most)}));
    if (ballotWarp(magnitude - magnitude != 0) != 0) return false;
    *greatest = magnitude;
    const float factor = magnitude > 0 ? 448 / magnitude : 1;
    struct Out {
      uint16_t at[kEach / 2];
    } out;
#pragma unroll
    for (uint32_t i = 0; i < kEach / 2; ++i) {
      const float lower = static_cast<float>(Element<T>::widen(given.at[2 * i]));
      const float upper = static_cast<float>(Element<T>::widen(given.at[2 * i + 1]));
      out.at[i] = floatsToE4M3(lower * factor, upper * factor);
    }
    *elements = __builtin_bit_cast(Elements, out);
    return true;
  }
#endif
};

}  // namespace proxyccl

#endif
