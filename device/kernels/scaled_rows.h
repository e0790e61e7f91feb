// Float8 elements that share a scale (float8_scales.h): a group of threads makes them from 128 values.
#pragma once

#include "experts/expert_team.h"
#include "float8_scales.h"

namespace proxyccl {

// One thread's part of the elements that share a scale. A group holds the elements of kBlocks scales.
template <class T>
struct ScaledPart {
  static constexpr uint32_t kEach = PROXYCCL_ON_HOST ? PROXYCCL_SCALED_ELEMENTS : sizeof(T) == 2 ? 8 : 4;
  static constexpr uint32_t kLanes = PROXYCCL_SCALED_ELEMENTS / kEach, kBlocks = kGroupLanes / kLanes;
  struct alignas(16) Values {
    T at[kEach];
  };
  struct alignas(4) Elements {  // aligned like rows with scales between them
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
  // Called by a group: converts its values to float8 elements. Returns the greatest magnitude of the values.
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

// Makes blocks [first, last) of a row; its values may be infinities or NaNs. Of the lanes that make a block, lane n
// keeps the greatest magnitude of the n-th block that these lanes make.
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
// Does the same for aligned 16-bit elements without infinities and NaNs, in a third of the instructions: magnitudes are
// compared as integers, two at a time, and a thread has twice the elements. A group makes kParts parts together, each
// step for all parts, because with a single part a thread would wait for each step.
template <class T, uint32_t kParts>
class ScaledNumbers {
 public:
  static constexpr uint32_t kEach = 16, kLanes = PROXYCCL_SCALED_ELEMENTS / kEach, kBlocks = kGroupLanes / kLanes;
  static_assert(kParts <= kLanes, "there is a lane for the scale of each part");
  struct alignas(16) Elements {
    uint32_t at[kEach / 4];
  };

  // Called by a group: loads blocks [first, last), at most kParts * kBlocks, and zeros for blocks past them.
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
  // Called by a group: makes the elements. *kept is the greatest magnitude of a block: the lane with number n among a
  // block's lanes has the magnitude of part n. Returns false to the whole group if there was an infinity or a NaN; then
  // the elements are invalid.
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

// Called by a group: makes blocks [first, last) of a row, at most kParts / 8 of as many as it has lanes. Each thread
// calls storeParts(parts, at, end) with an array: part i belongs at index at + i * kGroupLanes of the row, counted in
// such parts, if that is less than `end`; and storeScale(block, scale) is called once for each block. The row is
// aligned to 16 bytes or not.
template <uint32_t kParts, class T, class StoreParts, class StoreScale>
PROXYCCL_DEVICE void scaleBlocks(const Group& group, const T* row, uint32_t first, uint32_t last, bool aligned,
                                 StoreParts storeParts, StoreScale storeScale) {
  // Each thread makes the scale of one block, because that costs a division. The scales are stored side by side.
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
