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
    for (uint32_t i = 0; i < kCount; i += 4) {
      const uint32_t four = floatsToE4M3(values[i], values[i + 1], values[i + 2], values[i + 3]);
      for (uint32_t k = 0; k < 4; ++k) to[i + k] = static_cast<uint8_t>(four >> 8 * k);
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

PROXYCCL_DEVICE float scaleOf(float greatest) { return greatest > 0 ? greatest / 448 : 1; }
PROXYCCL_DEVICE float factorOf(float greatest) { return 448 / (greatest > 0 ? greatest : 448); }

// One thread's part of the elements that share a scale. A group holds the elements of kBlocks scales.
template <class T>
struct ScaledPart {
  static constexpr uint32_t kEach = PROXYCCL_ON_HOST ? PROXYCCL_SCALED_ELEMENTS : sizeof(T) == 2 ? 8 : 4;
  static constexpr uint32_t kLanes = PROXYCCL_SCALED_ELEMENTS / kEach, kBlocks = kGroupLanes / kLanes;
  struct alignas(16) Values {
    T at[kEach];
  };
  struct alignas(4) Elements {  // as rows are, if scales lie between them
    uint8_t at[kEach];
  };
  static_assert(kBlocks > 0, "a block has too many lanes");
  Values given;

  PROXYCCL_DEVICE void load(const T* from, bool aligned) {
    if (aligned) {
      given = *reinterpret_cast<const Values*>(from);
    } else {
      for (uint32_t i = 0; i < kEach; ++i) given.at[i] = from[i];
    }
  }
  // By a group. Returns the greatest magnitude.
  PROXYCCL_DEVICE float quantize(const Group& group, Elements* elements) const {
    float values[kEach], greatest = 0;
    for (uint32_t i = 0; i < kEach; ++i) {
      values[i] = static_cast<float>(Element<T>::widen(given.at[i]));
      greatest = greaterMagnitude(greatest, values[i]);
    }
#if !PROXYCCL_ON_HOST
    for (uint32_t distance = kLanes / 2; distance > 0; distance /= 2)
      greatest = greaterMagnitude(greatest, shuffle(greatest, group.lane ^ distance));
#endif
    const float factor = factorOf(greatest);
    for (uint32_t i = 0; i < kEach; ++i) values[i] *= factor;
    floatsToE4M3<kEach>(elements->at, values);
    return greatest;
  }
};

// Makes blocks [first, last) of a row, whatever its values are. The lane with number n among a block's keeps the
// greatest magnitude of the n-th block that its lanes hold.
template <class T, class StoreElements>
PROXYCCL_DEVICE float scaleValues(const Group& group, const T* row, uint32_t first, uint32_t last, bool aligned,
                                  StoreElements storeElements) {
  using Part = ScaledPart<T>;
  const uint32_t own = group.lane / Part::kLanes, lane = group.lane % Part::kLanes;
  float kept = 0;
#pragma unroll 1
  for (uint32_t begin = first, n = 0; begin < last; begin += Part::kBlocks, ++n) {
    const uint32_t block = begin + own;
    Part held;
    held.load(row + (block < last ? block : first) * PROXYCCL_SCALED_ELEMENTS + lane * Part::kEach, aligned);
    typename Part::Elements elements;
    const float greatest = held.quantize(group, &elements);
    if (block < last) storeElements(block * Part::kLanes + lane, elements);
    if (lane == n) kept = greatest;
  }
  return kept;
}

#ifdef PROXYCCL_HAS_FLOATS_TO_E4M3
// The same for 16-bit elements, aligned and all of them numbers, in a third of the instructions: magnitudes are
// compared as integers, two at a time, and a thread has twice the elements.
template <class T>
struct ScaledNumbers {
  static constexpr uint32_t kEach = 16, kLanes = PROXYCCL_SCALED_ELEMENTS / kEach, kBlocks = kGroupLanes / kLanes;
  static constexpr uint32_t kWords = kEach / 2;
  struct alignas(16) Half {
    uint32_t at[kWords / 2];
  };
  struct alignas(16) Elements {
    uint32_t at[kEach / 4];
  };
  Half halves[2];

  PROXYCCL_DEVICE void load(const T* from) {
    const Half* words = inGlobal(reinterpret_cast<const Half*>(from));
    halves[0] = words[0];
    halves[1] = words[1];
  }
  PROXYCCL_DEVICE uint32_t word(uint32_t i) const { return halves[i / (kWords / 2)].at[i % (kWords / 2)]; }
  static PROXYCCL_DEVICE float widen(uint32_t bits) {
    return static_cast<float>(Element<T>::widen(T{static_cast<uint16_t>(bits)}));
  }
  // By a group. Returns the greatest magnitude of the block; an infinity or a NaN is greater than all numbers.
  PROXYCCL_DEVICE float greatest(const Group& group) const {
    uint32_t most = 0;
#pragma unroll
    for (uint32_t i = 0; i < kWords; ++i) most = maxHalves(most, word(i) & 0x7fff7fff);
#pragma unroll
    for (uint32_t distance = kLanes / 2; distance > 0; distance /= 2)
      most = maxHalves(most, shuffle(most, group.lane ^ distance));
    return widen(max(most & 0xffff, most >> 16));
  }
  PROXYCCL_DEVICE Elements elements(float factor) const {
    Elements elements;
#pragma unroll
    for (uint32_t i = 0; i < kWords; i += 2)
      elements.at[i / 2] = floatsToE4M3(widen(word(i)) * factor, widen(word(i) >> 16) * factor,
                                        widen(word(i + 1)) * factor, widen(word(i + 1) >> 16) * factor);
    return elements;
  }
};

// Returns false to the whole group if there was an infinity or a NaN; then the blocks must be made again.
template <class T, class StoreElements>
PROXYCCL_DEVICE bool scaleNumbers(const Group& group, const T* row, uint32_t first, uint32_t last, float* kept,
                                  StoreElements storeElements) {
  using Part = ScaledNumbers<T>;
  constexpr uint32_t kInFlight = 4;
  const uint32_t own = group.lane / Part::kLanes, lane = group.lane % Part::kLanes;
  bool numbers = true;
#pragma unroll 1
  for (uint32_t begin = first, n = 0; begin < last; begin += kInFlight * Part::kBlocks, n += kInFlight) {
    Part held[kInFlight];
#pragma unroll
    for (uint32_t i = 0; i < kInFlight; ++i) {
      const uint32_t block = begin + i * Part::kBlocks + own;
      held[i].load(row + (block < last ? block : first) * PROXYCCL_SCALED_ELEMENTS + lane * Part::kEach);
    }
#pragma unroll
    for (uint32_t i = 0; i < kInFlight; ++i) {
      const uint32_t block = begin + i * Part::kBlocks + own;
      const float greatest = held[i].greatest(group);
      numbers &= greatest - greatest == 0;
      if (lane == n + i) *kept = greatest;
      const typename Part::Elements elements = held[i].elements(factorOf(greatest));
      if (block < last) storeElements(block * Part::kLanes + lane, elements);
    }
  }
  return ballotWarp(!numbers) == 0;
}
#endif

// Called by a group: makes blocks [first, last) of a row, at most as many as it has lanes. Calls storeElements(i,
// elements) by each thread, where part i of the row has the size of these elements, and storeScale(block, scale) once
// for each block. The row is aligned to 16 bytes or not.
template <class T, class StoreElements, class StoreScale>
PROXYCCL_DEVICE void scaleBlocks(const Group& group, const T* row, uint32_t first, uint32_t last, bool aligned,
                                 StoreElements storeElements, StoreScale storeScale) {
  // A scale costs a division, so each thread makes one when all are known, and they are stored side by side.
  auto storeScales = [&](uint32_t lanes, float kept) {
    const uint32_t block = first + group.lane % lanes * (kGroupLanes / lanes) + group.lane / lanes;
    if (block < last) storeScale(block, scaleOf(kept));
  };
#ifdef PROXYCCL_HAS_FLOATS_TO_E4M3
  if constexpr (sizeof(T) == 2) {
    float kept = 0;
    if (aligned && scaleNumbers(group, row, first, last, &kept, storeElements)) {
      storeScales(ScaledNumbers<T>::kLanes, kept);
      return;
    }
    group.sync();  // other threads store over what was stored
  }
#endif
  storeScales(ScaledPart<T>::kLanes, scaleValues(group, row, first, last, aligned, storeElements));
}

}  // namespace proxyccl

#endif
