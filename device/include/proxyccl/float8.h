// Floats of 8 bits (OCP 8-bit floating point): E4M3, without infinities, and E5M2. Execution plans and MSCCL++'s
// vectors reduce these types in float, and round the result once.
#pragma once

#include "proxyccl/reduce.h"

namespace proxyccl {

struct Float8E4M3 {
  uint8_t bits;
};
struct Float8E5M2 {
  uint8_t bits;
};

// Converts a float to a sign, an exponent of bias kBias and a mantissa of kMantissa bits: rounds to nearest, ties to
// even, and saturates at the greatest finite value, `greatest`. A NaN stays a NaN, 0x7f.
template <uint32_t kMantissa, uint32_t kBias>
PROXYCCL_DEVICE uint8_t floatToFloat8(float value, uint32_t greatest) {
  constexpr uint32_t kDropped = 23 - kMantissa, kRebias = 127 - kBias;
  const uint32_t bits = __builtin_bit_cast(uint32_t, value), magnitude = bits & 0x7fffffff;
  uint32_t result;
  if (magnitude > 0x7f800000) {
    result = 0x7f;
  } else if (magnitude >= (greatest << kDropped) + (kRebias << 23)) {
    result = greatest;
  } else if (magnitude < (kRebias + 1) << 23) {  // subnormal: a float near kNear has the same unit in the last place as
                                                 // the result
    constexpr uint32_t kNear = (kRebias + 1 + kDropped) << 23;
    result =
        __builtin_bit_cast(uint32_t, __builtin_bit_cast(float, magnitude) + __builtin_bit_cast(float, kNear)) - kNear;
  } else {
    result =
        ((magnitude + (1u << (kDropped - 1)) - 1 + (magnitude >> kDropped & 1)) >> kDropped) - (kRebias << kMantissa);
  }
  return static_cast<uint8_t>(result | (bits >> 24 & 0x80));
}
// Saturates at 448.
PROXYCCL_DEVICE uint8_t floatToE4M3(float value) { return floatToFloat8<3, 7>(value, 0x7e); }
// Saturates at 57344.
PROXYCCL_DEVICE uint8_t floatToE5M2(float value) { return floatToFloat8<2, 15>(value, 0x7b); }

// Shifts an E4M3's bits to their positions in a half, whose exponent bias is greater by 8.
PROXYCCL_DEVICE float e4m3ToFloat(uint8_t bits) {
  if ((bits & 0x7f) == 0x7f) return __builtin_bit_cast(float, 0x7fc00000u);
  return 256 * halfToFloat(static_cast<uint16_t>((bits & 0x80) << 8 | (bits & 0x7f) << 7));
}
// An E5M2 has the same bits as the upper byte of a half.
PROXYCCL_DEVICE float e5m2ToFloat(uint8_t bits) { return halfToFloat(static_cast<uint16_t>(bits << 8)); }

template <>
struct Element<Float8E4M3> {
  using Accumulator = float;
  static PROXYCCL_DEVICE float widen(Float8E4M3 value) { return e4m3ToFloat(value.bits); }
  static PROXYCCL_DEVICE Float8E4M3 narrow(float value) { return {floatToE4M3(value)}; }
};
template <>
struct Element<Float8E5M2> {
  using Accumulator = float;
  static PROXYCCL_DEVICE float widen(Float8E5M2 value) { return e5m2ToFloat(value.bits); }
  static PROXYCCL_DEVICE Float8E5M2 narrow(float value) { return {floatToE5M2(value)}; }
};

}  // namespace proxyccl
