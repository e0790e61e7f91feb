// Floats of 8 bits (OCP 8-bit floating point): E4M3, without infinities, and E5M2. Execution plans and MSCCL++'s
// vectors reduce them, in float, rounded once.
#pragma once

#include "proxyccl/reduce.h"

namespace proxyccl {

struct Float8E4M3 {
  uint8_t bits;
};
struct Float8E5M2 {
  uint8_t bits;
};

// Converts to E4M3: rounds to nearest, ties to even, and saturates at 448. A NaN stays a NaN.
PROXYCCL_DEVICE uint8_t floatToE4M3(float value) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, value), magnitude = bits & 0x7fffffff;
  uint32_t result;
  if (magnitude > 0x7f800000) {
    result = 0x7f;
  } else if (magnitude >= 0x43e00000) {  // 448 and more
    result = 0x7e;
  } else if (magnitude < 0x3c800000) {  // below 2^-6: near 2^14 a float's last bit has the weight of e4m3's here
    result = __builtin_bit_cast(uint32_t, __builtin_bit_cast(float, magnitude) + 16384.0f) - 0x46800000;
  } else {
    result = ((magnitude + 0x7ffff + (magnitude >> 20 & 1)) >> 20) - (120 << 3);
  }
  return static_cast<uint8_t>(result | (bits >> 24 & 0x80));
}
// Converts to E5M2: rounds to nearest, ties to even, and saturates at 57344. A NaN stays a NaN.
PROXYCCL_DEVICE uint8_t floatToE5M2(float value) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, value), magnitude = bits & 0x7fffffff;
  uint32_t result;
  if (magnitude > 0x7f800000) {
    result = 0x7f;
  } else if (magnitude >= 0x47600000) {  // 57344 and more
    result = 0x7b;
  } else if (magnitude < 0x38800000) {  // below 2^-14: near 2^7 a float's last bit has the weight of e5m2's here
    result = __builtin_bit_cast(uint32_t, __builtin_bit_cast(float, magnitude) + 128.0f) - 0x43000000;
  } else {
    result = ((magnitude + 0xfffff + (magnitude >> 21 & 1)) >> 21) - (112 << 2);
  }
  return static_cast<uint8_t>(result | (bits >> 24 & 0x80));
}

// Shifts the bits to those of a half, whose exponent's bias is greater by 8.
PROXYCCL_DEVICE float e4m3ToFloat(uint8_t bits) {
  if ((bits & 0x7f) == 0x7f) return __builtin_bit_cast(float, 0x7fc00000u);
  return 256 * halfToFloat(static_cast<uint16_t>((bits & 0x80) << 8 | (bits & 0x7f) << 7));
}
// An E5M2 is the upper byte of a half.
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
