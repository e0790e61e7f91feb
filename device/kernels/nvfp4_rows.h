// Rows in NVFP4: float4 values (OCP Microscaling Formats, E2M1); each 16 values share a scale in float8 (E4M3).
#pragma once

#include "float8_scales.h"
#include "proxyccl/kernel.h"

namespace proxyccl {

constexpr uint32_t kNvfp4Values = 16;  // values that share a scale

// Rounds to the nearest of 0, 0.5, 1, 1.5, 2, 3, 4 and 6, ties to the even code, and saturates. A NaN becomes 6.
PROXYCCL_DEVICE uint32_t floatToE2M1(float value) {
  const uint32_t sign = __builtin_bit_cast(uint32_t, value) >> 31 << 3;
  const float magnitude = value < 0 ? -value : value;
  if (magnitude != magnitude) return 7;
  return sign | ((magnitude > 0.25f) + (magnitude >= 0.75f) + (magnitude > 1.25f) + (magnitude >= 1.75f) +
                 (magnitude > 2.5f) + (magnitude >= 3.5f) + (magnitude > 5));
}

struct alignas(16) Nvfp4Input {
  BFloat16 at[kNvfp4Values];
};
struct alignas(8) Nvfp4Output {
  uint32_t at[2];
};

}  // namespace proxyccl

// Converts `count` blocks of 16 consecutive values. With m the greatest magnitude of a block and g the global scale
// (1 if `global_scale` is null), the block's scale is s = float8(g * (m * (1 / 6))), and a value v becomes float4(v *
// (1 / (s * (1 / g)))); all operations round to float32. The values of a block whose scale is zero become zeros. The
// first of two values of a byte is in the low bits. Rows are aligned to 16 bytes.
extern "C" __global__ void nvfp4_rows(const char* rows, const float* global_scale, char* packed, uint8_t* scales,
                                      uint64_t count) {
  using namespace proxyccl;
  const float global = global_scale == nullptr ? 1 : *global_scale;
  for (uint64_t block = static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x; block < count;
       block += static_cast<uint64_t>(gridDim.x) * blockDim.x) {
    const Nvfp4Input given = reinterpret_cast<const Nvfp4Input*>(rows)[block];
    float values[kNvfp4Values], greatest = 0;
    for (uint32_t i = 0; i < kNvfp4Values; ++i) {
      values[i] = Element<BFloat16>::widen(given.at[i]);
      greatest = greaterMagnitude(greatest, values[i]);
    }
    const uint8_t scale = floatToE4M3(global * (greatest * (1.0f / 6)));
    const float rounded = e4m3ToFloat(scale);
    const float factor = rounded != 0 ? 1 / (rounded * (1 / global)) : 0;
    Nvfp4Output made = {{0, 0}};
    for (uint32_t i = 0; i < kNvfp4Values; ++i) made.at[i / 8] |= floatToE2M1(values[i] * factor) << i % 8 * 4;
    reinterpret_cast<Nvfp4Output*>(packed)[block] = made;
    scales[block] = scale;
  }
}
PROXYCCL_EXPORT_KERNEL(nvfp4_rows)
