// Scales of float8 elements.
//
// The format is e4m3 without infinities (OCP 8-bit floating point, E4M3), whose greatest value is 448. If m is the
// greatest magnitude of the values that share a scale, the scale is m / 448, and an element is its value times 448 / m.
// If m is at most kLeastMagnitude, the scale and the factor are 1.
#pragma once

#include "proxyccl/float8.h"

namespace proxyccl {

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

// Returns the greater of a magnitude and a value's magnitude; a NaN is ignored.
PROXYCCL_DEVICE float greaterMagnitude(float greatest, float value) {
#if PROXYCCL_ON_HOST
  const float magnitude = __builtin_fabsf(value);
  return magnitude > greatest ? magnitude : greatest;
#else
  return fmaxf(greatest, fabsf(value));  // the host's code above would not compile to a single instruction
#endif
}

// For much smaller magnitudes the factor 448 / m would be infinite.
constexpr float kLeastMagnitude = 1e-30f;
PROXYCCL_DEVICE float scaleOf(float greatest) { return greatest > kLeastMagnitude ? greatest / 448 : 1; }
PROXYCCL_DEVICE float factorOf(float greatest) { return 448 / (greatest > kLeastMagnitude ? greatest : 448); }

}  // namespace proxyccl
