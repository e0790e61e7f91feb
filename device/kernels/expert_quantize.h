// Rows for dispatch in float8 (scaled_rows.h): the scales of a row lie behind its elements.
#ifndef PROXYCCL_EXPERT_QUANTIZE_H
#define PROXYCCL_EXPERT_QUANTIZE_H

#include "scaled_rows.h"

namespace proxyccl {

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
      const float scale = Part::scaleOf(held[i].quantize(group, &elements));
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
