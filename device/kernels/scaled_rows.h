// Converts values to float8 elements; each 128 elements share a scale (float8_scales.h).
#pragma once

#include "experts/expert_team.h"
#include "float8_scales.h"

namespace proxyccl {

// One thread's part of a block of 128 elements that share a scale. A group converts kBlocks blocks at a time.
template <class T>
struct ScaledPart {
  static constexpr uint32_t kEach = PROXYCCL_ON_HOST ? PROXYCCL_SCALED_ELEMENTS : sizeof(T) == 2 ? 8 : 4;
  static constexpr uint32_t kLanes = PROXYCCL_SCALED_ELEMENTS / kEach, kBlocks = kGroupLanes / kLanes;
  struct alignas(16) Values {
    T at[kEach];
  };
  struct alignas(4) Elements {  // aligned only to 4 bytes, because scales may lie between rows
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
  // Called by a group: converts the values to float8 elements. Returns the greatest magnitude in the thread's block.
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

// Converts blocks [first, last) of a row, which may contain infinities and NaNs. The same kLanes threads convert
// several blocks; thread n of these threads returns the greatest magnitude of the n-th block.
template <class T, class StoreParts>
PROXYCCL_DEVICE float scaleValues(const Group& group, const T* row, uint32_t first, uint32_t last, bool aligned,
                                  StoreParts storeParts) {
  using Part = ScaledPart<T>;
  const uint32_t own = group.lane / Part::kLanes, lane = group.lane % Part::kLanes;
  float kept = 0;
#pragma unroll 1
  for (uint32_t begin = first, n = 0; begin < last; begin += Part::kBlocks, ++n) {
    const uint32_t block = begin + own;
    Part held;
    held.load(row + (block < last ? block : first) * PROXYCCL_SCALED_ELEMENTS + lane * Part::kEach, aligned);
    typename Part::Elements elements[1];
    const float greatest = held.quantize(group, elements);
    storeParts(elements, begin * Part::kLanes + group.lane, last * Part::kLanes);
    if (lane == n) kept = greatest;
  }
  return kept;
}

#ifdef PROXYCCL_HAS_FLOATS_TO_E4M3
// Converts aligned 16-bit values without infinities and NaNs. The class takes a third of ScaledPart's instructions,
// because magnitudes are compared as integers, two at a time, and a thread has twice as many elements. Each step is
// done for kParts parts together, because with a single part a thread would wait for each step's result.
template <class T, uint32_t kParts>
class ScaledNumbers {
 public:
  static constexpr uint32_t kEach = 16, kLanes = PROXYCCL_SCALED_ELEMENTS / kEach, kBlocks = kGroupLanes / kLanes;
  static_assert(kParts <= kLanes, "there is a lane for the scale of each part");
  struct alignas(16) Elements {
    uint32_t at[kEach / 4];
  };

  // Called by a group: loads blocks [first, last), at most kParts * kBlocks of them, and zeros from `last` on.
  PROXYCCL_DEVICE void load(const Group& group, const T* row, uint32_t first, uint32_t last) {
    const Half* words = inGlobal(reinterpret_cast<const Half*>(row));
#pragma unroll
    for (uint32_t i = 0; i < kParts; ++i) {
      const uint32_t part = first * kLanes + group.lane + i * kGroupLanes;
      const bool exists = part < last * kLanes;
#pragma unroll
      for (uint32_t h = 0; h < kHalves; ++h) parts_[i].halves[h] = exists ? words[part * kHalves + h] : Half{};
    }
  }
  // Called by a group: converts the values to elements. In thread n of the kLanes threads of a block, *kept receives
  // the greatest magnitude of the block in part n. Returns false to the whole group, with invalid elements, if there
  // was an infinity or a NaN.
  PROXYCCL_DEVICE bool quantize(const Group& group, Elements* elements, float* kept) const {
    uint32_t most[kParts];
#pragma unroll
    for (uint32_t i = 0; i < kParts; ++i) {
      most[i] = 0;
#pragma unroll
      for (uint32_t w = 0; w < kWords; ++w) most[i] = maxHalves(most[i], parts_[i].word(w) & 0x7fff7fff);
    }
#pragma unroll
    for (uint32_t distance = kLanes / 2; distance > 0; distance /= 2)
#pragma unroll
      for (uint32_t i = 0; i < kParts; ++i) most[i] = maxHalves(most[i], shuffle(most[i], group.lane ^ distance));
    const uint32_t lane = group.lane % kLanes;
    uint32_t own = 0;
#pragma unroll
    for (uint32_t i = 0; i < kParts; ++i) own = lane == i ? most[i] : own;
    *kept = widen(max(own & 0xffff, own >> 16));
    const float own_factor = factorOf(*kept);  // one division serves all parts
#pragma unroll
    for (uint32_t i = 0; i < kParts; ++i) {
      const float factor = shuffle(own_factor, group.lane - lane + i);
#pragma unroll
      for (uint32_t w = 0; w < kWords; w += 2) {
        const uint32_t one = parts_[i].word(w), other = parts_[i].word(w + 1);
        elements[i].at[w / 2] = floatsToE4M3(widen(one) * factor, widen(one >> 16) * factor, widen(other) * factor,
                                             widen(other >> 16) * factor);
      }
    }
    return ballotWarp(*kept - *kept != 0) == 0;
  }

 private:
  static constexpr uint32_t kWords = kEach / 2, kHalves = 2;
  struct alignas(16) Half {
    uint32_t at[kWords / kHalves];
  };
  struct Part {
    Half halves[kHalves];
    PROXYCCL_DEVICE uint32_t word(uint32_t i) const { return halves[i / (kWords / 2)].at[i % (kWords / 2)]; }
  };
  static PROXYCCL_DEVICE float widen(uint32_t bits) {
    return static_cast<float>(Element<T>::widen(T{static_cast<uint16_t>(bits)}));
  }
  Part parts_[kParts];
};
#endif

// Called by a group: converts blocks [first, last) of a row, at most kParts / 8 times as many as the group has threads.
// Each thread calls storeParts(parts, at, end) with an array of parts: part i belongs at index at + i * kGroupLanes of
// the row, counted in parts, if this index is less than `end`. storeScale(block, scale) is called once for each block.
// `aligned` tells whether the row is aligned to 16 bytes.
template <uint32_t kParts, class T, class StoreParts, class StoreScale>
PROXYCCL_DEVICE void scaleBlocks(const Group& group, const T* row, uint32_t first, uint32_t last, bool aligned,
                                 StoreParts storeParts, StoreScale storeScale) {
  // A scale costs a division, so each thread computes one block's scale. The group's scales are stored contiguously.
  auto storeScales = [&](uint32_t lanes, float kept) {
    const uint32_t block = first + group.lane % lanes * (kGroupLanes / lanes) + group.lane / lanes;
    if (block < last) storeScale(block, scaleOf(kept));
  };
#ifdef PROXYCCL_HAS_FLOATS_TO_E4M3
  if constexpr (sizeof(T) == 2) {
    using Numbers = ScaledNumbers<T, kParts>;
    if (aligned) {
      Numbers numbers;
      typename Numbers::Elements elements[kParts];
      float kept;
      numbers.load(group, row, first, last);
      if (numbers.quantize(group, elements, &kept)) {
        storeParts(elements, first * Numbers::kLanes + group.lane, last * Numbers::kLanes);
        return storeScales(Numbers::kLanes, kept);
      }
    }
  }
#endif
  storeScales(ScaledPart<T>::kLanes, scaleValues(group, row, first, last, aligned, storeParts));
}

}  // namespace proxyccl
