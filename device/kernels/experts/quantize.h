// Converts rows to float8 for a dispatch (scaled_rows.h): a row's elements are followed by its scales.
#pragma once

#include "scaled_rows.h"

namespace proxyccl {

// Sets output[tokens][hidden + 4 * hidden / 128] to the rows in float8, each followed by its scales. A group handles
// kBlocks blocks at a time.
template <class T>
PROXYCCL_DEVICE void expert_quantize(const ProxycclExperts&, const ProxycclCombine& call) {
  constexpr uint32_t kBlocks = PROXYCCL_ON_HOST ? 1 : 8;
  const Group group;
  const uint32_t blocks = static_cast<uint32_t>(call.hidden / PROXYCCL_SCALED_ELEMENTS);  // scales of a row
  const uint32_t parts = (blocks + kBlocks - 1) / kBlocks;
  const T* rows = reinterpret_cast<const T*>(call.rows);
  const bool aligned = reinterpret_cast<uintptr_t>(rows) % 16 == 0;
  const uint32_t groups = gridDim.x * Group::count(), number = blockIdx.x * Group::count() + group.number;
  // The loop advances `part` by additions, because a division takes about as long as a memory access.
  uint32_t part = number % parts;
  for (uint32_t token = number / parts; token < call.tokens; token += groups / parts) {
    const uint32_t first = part * kBlocks, last = first + kBlocks < blocks ? first + kBlocks : blocks;
    char* out = call.output + token * (call.hidden + blocks * sizeof(float));
    scaleBlocks<2>(
        group, rows + token * call.hidden, first, last, aligned,
        [&](const auto& parts, uint32_t at, uint32_t end) {
          struct alignas(4) Words {  // because of the scales between them, rows are aligned only to 4 bytes
            uint32_t at[sizeof(parts[0]) / 4];
          };
#pragma unroll
          for (uint32_t i = 0; i < sizeof(parts) / sizeof(parts[0]); ++i)
            if (at + i * kGroupLanes < end)
              reinterpret_cast<Words*>(out)[at + i * kGroupLanes] = __builtin_bit_cast(Words, parts[i]);
        },
        [&](uint32_t block, float scale) { reinterpret_cast<float*>(out + call.hidden)[block] = scale; });
    part += groups % parts;
    if (part >= parts) {
      part -= parts;
      ++token;
    }
  }
}

}  // namespace proxyccl

// Copies float8 rows and their scales to packed[tokens][row_bytes + scale_bytes].
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
