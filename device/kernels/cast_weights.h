// Casts floating-point elements of weights, and measures greatest magnitudes (amax), from which float8 scales are made.
#pragma once

#include "float8_scales.h"
#include "integers.h"
#include "proxyccl/kernel.h"

namespace proxyccl {

// Elements that share a float8 scale form a block of at most kBlockExtent x kBlockExtent elements.
constexpr uint64_t kBlockExtent = 128;

// The codes of element types in `WeightTile`. kScale stands for a float32 scale, which is made from an amax.
enum WeightType : uint64_t { kFloat32, kFloat16, kBFloat16, kFloat8E4M3, kScale };

// A matrix of a tensor's elements. The matrix's rows and columns may begin and end within blocks. Strides are counted
// in elements.
struct WeightTile {
  uint64_t from, to;  // addresses of the first element
  uint64_t from_type, to_type;
  uint64_t from_stride, to_stride;  // distance from one row to the next
  uint64_t rows, columns;
  uint64_t row, column;               // the first element's position in its block
  uint64_t scales;                    // address of the scale, or of the amax, of the first block; 0 for none
  uint64_t scale_stride, scale_step;  // from one row of blocks to the next, and from one block of a row to the next
  uint64_t first;                     // number of blocks in all earlier tiles of the list
};

// A tile's elements in one block.
struct TileBlock {
  uint64_t row, column, rows, columns;  // the first element in the tile, and the extent
  float* scale;                         // null if the tile has no scales
};

constexpr uint32_t kTileLanes = PROXYCCL_ON_HOST ? 1 : 32;  // threads that share a block

PROXYCCL_DEVICE uint64_t extentInBlock(uint64_t position, uint64_t index, uint64_t extent, uint64_t* first) {
  const uint64_t begin = index * kBlockExtent, end = begin + kBlockExtent;
  *first = begin > position ? begin - position : 0;
  return minimum(end - position, extent) - *first;
}

// Calls handle(tile, block, lane) for each block of the tiles, by kTileLanes threads together.
template <class Handle>
PROXYCCL_DEVICE void forEachBlock(const WeightTile* tiles, uint64_t count, uint64_t blocks, Handle handle) {
  const uint32_t groups = blockDim.x / kTileLanes, lane = threadIdx.x % kTileLanes;
  for (uint64_t i = static_cast<uint64_t>(blockIdx.x) * groups + threadIdx.x / kTileLanes; i < blocks;
       i += static_cast<uint64_t>(gridDim.x) * groups) {
    uint64_t low = 0, high = count;  // the tile is in [low, high)
    while (high - low > 1) {
      const uint64_t middle = (low + high) / 2;
      (tiles[middle].first <= i ? low : high) = middle;
    }
    const WeightTile tile = tiles[low];
    const uint64_t across = divideUp(tile.column + tile.columns, kBlockExtent), index = i - tile.first;
    TileBlock block;
    block.rows = extentInBlock(tile.row, index / across, tile.rows, &block.row);
    block.columns = extentInBlock(tile.column, index % across, tile.columns, &block.column);
    const uint64_t scale = index / across * tile.scale_stride + index % across * tile.scale_step;
    block.scale = tile.scales == 0 ? nullptr : reinterpret_cast<float*>(tile.scales) + scale;
    handle(tile, block, lane);
  }
}

template <class T>
struct alignas(4 * sizeof(T)) FourElements {
  T at[4];
};

// Visits the elements of a block. visit.one(row, i) takes element i of a row of the block; visit.four(row, i), which is
// used if `four` is true, takes the four elements from 4 * i on.
template <class Visit>
PROXYCCL_DEVICE void forEachElement(const TileBlock& block, uint32_t lane, bool four, Visit& visit) {
  const uint64_t words = four ? block.columns / 4 : 0;
  for (uint64_t row = 0; row < block.rows; ++row) {
    for (uint64_t i = lane; i < words; i += kTileLanes) visit.four(row, i);
    for (uint64_t i = words * 4 + lane; i < block.columns; i += kTileLanes) visit.one(row, i);
  }
}

// The rows of a block, at the tile's source or at its target.
template <class T>
struct BlockRows {
  T* first;
  uint64_t stride;

  PROXYCCL_DEVICE BlockRows(uint64_t address, uint64_t stride, const TileBlock& block)
      : first(reinterpret_cast<T*>(address) + block.row * stride + block.column), stride(stride) {}
  PROXYCCL_DEVICE bool aligned() const {
    return reinterpret_cast<uintptr_t>(first) % sizeof(FourElements<T>) == 0 && stride % 4 == 0;
  }
  PROXYCCL_DEVICE T& one(uint64_t row, uint64_t i) const { return first[row * stride + i]; }
  PROXYCCL_DEVICE FourElements<T>& four(uint64_t row, uint64_t i) const {
    return reinterpret_cast<FourElements<T>*>(first + row * stride)[i];
  }
};

template <class From, class To>
struct CastVisit {
  BlockRows<From> from;
  BlockRows<To> to;
  float factor;

  PROXYCCL_DEVICE void one(uint64_t row, uint64_t i) const {
    to.one(row, i) = Element<To>::narrow(Element<From>::widen(from.one(row, i)) * factor);
  }
  PROXYCCL_DEVICE void four(uint64_t row, uint64_t i) const {
    const FourElements<From> given = from.four(row, i);
    FourElements<To> made;
    for (uint32_t k = 0; k < 4; ++k) made.at[k] = Element<To>::narrow(Element<From>::widen(given.at[k]) * factor);
    to.four(row, i) = made;
  }
};

template <class From, class To>
PROXYCCL_DEVICE void castBlock(const WeightTile& tile, const TileBlock& block, uint32_t lane) {
  const BlockRows<From> from(tile.from, tile.from_stride, block);
  const BlockRows<To> to(tile.to, tile.to_stride, block);
  // Multiplies by the scale's reciprocal, as vLLM does, instead of dividing by the scale.
  const float factor = block.scale == nullptr ? 1 : 1 / *block.scale;
  const CastVisit<From, To> visit{from, to, factor};
  forEachElement(block, lane, from.aligned() && to.aligned(), visit);
}

// A float32 scale of float8 elements, made from their amax.
struct ScaleOfAmax {
  float value;
};
template <>
struct Element<ScaleOfAmax> {
  static PROXYCCL_DEVICE ScaleOfAmax narrow(float amax) { return {scaleOf(amax)}; }
};

template <class From>
PROXYCCL_DEVICE void castBlockTo(const WeightTile& tile, const TileBlock& block, uint32_t lane) {
  switch (tile.to_type) {
    case kFloat32:
      return castBlock<From, float>(tile, block, lane);
    case kFloat16:
      return castBlock<From, Half>(tile, block, lane);
    case kBFloat16:
      return castBlock<From, BFloat16>(tile, block, lane);
    case kFloat8E4M3:
      return castBlock<From, Float8E4M3>(tile, block, lane);
    default:
      return castBlock<From, ScaleOfAmax>(tile, block, lane);
  }
}

template <class From>
struct AmaxVisit {
  BlockRows<From> from;
  float greatest[4];  // four, so that comparisons do not wait for each other

  PROXYCCL_DEVICE void one(uint64_t row, uint64_t i) {
    greatest[0] = greaterMagnitude(greatest[0], Element<From>::widen(from.one(row, i)));
  }
  PROXYCCL_DEVICE void four(uint64_t row, uint64_t i) {
    const FourElements<From> given = from.four(row, i);
    for (uint32_t k = 0; k < 4; ++k) greatest[k] = greaterMagnitude(greatest[k], Element<From>::widen(given.at[k]));
  }
};

template <class From>
PROXYCCL_DEVICE void measureBlock(const WeightTile& tile, const TileBlock& block, uint32_t lane) {
  AmaxVisit<From> visit{BlockRows<From>(tile.from, tile.from_stride, block), {0, 0, 0, 0}};
  forEachElement(block, lane, visit.from.aligned(), visit);
  float greatest = visit.greatest[0];
  for (uint32_t k = 1; k < 4; ++k) greatest = greaterMagnitude(greatest, visit.greatest[k]);
#if !PROXYCCL_ON_HOST
  const uint32_t own = threadIdx.x % PROXYCCL_WARP_SIZE;
  for (uint32_t distance = kTileLanes / 2; distance > 0; distance /= 2)
    greatest = greaterMagnitude(greatest, shuffle(greatest, own ^ distance));
#endif
  if (lane == 0) *block.scale = greatest;
}

}  // namespace proxyccl

// Casts each tile's elements from `from` to `to`, rounding to nearest, ties to even. If the tile has scales, each
// element is first multiplied by the reciprocal of its block's scale. Float8 saturates at 448. `blocks` is the number
// of blocks of all `count` tiles.
extern "C" __global__ void cast_weights(const proxyccl::WeightTile* tiles, uint64_t count, uint64_t blocks) {
  using namespace proxyccl;
  forEachBlock(tiles, count, blocks, [](const WeightTile& tile, const TileBlock& block, uint32_t lane) {
    switch (tile.from_type) {
      case kFloat32:
        return castBlockTo<float>(tile, block, lane);
      case kFloat16:
        return castBlockTo<Half>(tile, block, lane);
      default:
        return castBlockTo<BFloat16>(tile, block, lane);
    }
  });
}
PROXYCCL_EXPORT_KERNEL(cast_weights)

// Stores the amax of each block of the tiles, ignoring NaNs, at the block's place in the tile's scales.
extern "C" __global__ void amax_of_weights(const proxyccl::WeightTile* tiles, uint64_t count, uint64_t blocks) {
  using namespace proxyccl;
  forEachBlock(tiles, count, blocks, [](const WeightTile& tile, const TileBlock& block, uint32_t lane) {
    switch (tile.from_type) {
      case kFloat32:
        return measureBlock<float>(tile, block, lane);
      case kFloat16:
        return measureBlock<Half>(tile, block, lane);
      default:
        return measureBlock<BFloat16>(tile, block, lane);
    }
  });
}
PROXYCCL_EXPORT_KERNEL(amax_of_weights)
