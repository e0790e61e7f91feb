// Element types and reduction operations.
//
// Each type names its accumulator type; for example, 16-bit floats accumulate in float, and the result is rounded once.
// A kernel that has the contributions of all ranks reduces them in rank order, so that every rank gets the same bits. A
// NaN's bits could still differ between ranks, so finishReduction() replaces every NaN by the same NaN.
#pragma once

#include "proxyccl/platform.h"

namespace proxyccl {

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

// An element type's attributes. kScaled says whether an average scales the values before it adds them. The values must
// be scaled if the accumulator has the range of the type itself, because then the sum may overflow although the average
// does not.
template <class T>
struct Element {
  using Accumulator = T;
  static constexpr bool kScaled = false;
  static PROXYCCL_DEVICE T widen(T value) { return value; }
  static PROXYCCL_DEVICE T narrow(T value) { return value; }
};

template <>
struct Element<Half> {
  using Accumulator = float;
  static constexpr bool kScaled = false;
  static PROXYCCL_DEVICE float widen(Half value) { return halfToFloat(value.bits); }
  static PROXYCCL_DEVICE Half narrow(float value) { return {floatToHalf(value)}; }
  // Returns two elements packed in 32 bits; the lower half holds the first.
  static PROXYCCL_DEVICE uint32_t narrowTwo(float low, float high) {
#ifdef PROXYCCL_HAS_FLOAT_TO_BFLOAT16
    return floatsToHalf(low, high);
#else
    return floatToHalf(low) | static_cast<uint32_t>(floatToHalf(high)) << 16;
#endif
  }
};

template <>
struct Element<BFloat16> {
  using Accumulator = float;
  static constexpr bool kScaled = true;
  static PROXYCCL_DEVICE float widen(BFloat16 value) {
    return __builtin_bit_cast(float, static_cast<uint32_t>(value.bits) << 16);
  }
  static PROXYCCL_DEVICE BFloat16 narrow(float value) {
#ifdef PROXYCCL_HAS_FLOAT_TO_BFLOAT16
    return {floatToBFloat16(value)};
#else
    const uint32_t bits = __builtin_bit_cast(uint32_t, value);
    if (value != value) return {static_cast<uint16_t>(bits >> 16 | 0x40)};     // a NaN stays a (quiet) NaN
    return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};  // round to nearest, ties to even
#endif
  }
  static PROXYCCL_DEVICE uint32_t narrowTwo(float low, float high) {
#ifdef PROXYCCL_HAS_FLOAT_TO_BFLOAT16
    return floatsToBFloat16(low, high);
#else
    return narrow(low).bits | static_cast<uint32_t>(narrow(high).bits) << 16;
#endif
  }
};

// scale() takes a rank's value and the number of ranks, finish() the combined value and the number of ranks. combine()
// is associative up to rounding. Minimum and maximum propagate NaN. The average of integers truncates towards zero, as
// in NCCL.
struct Unscaled {
  template <class T, class A>
  static PROXYCCL_DEVICE A scale(A a, uint32_t) {
    return a;
  }
  template <class T, class A>
  static PROXYCCL_DEVICE A finish(A a, uint32_t) {
    return a;
  }
};
#define PROXYCCL_UNSCALED(Name, combination)     \
  struct Name : Unscaled {                       \
    template <class A>                           \
    static PROXYCCL_DEVICE A combine(A a, A b) { \
      return combination;                        \
    }                                            \
  };
PROXYCCL_UNSCALED(Sum, a + b)
PROXYCCL_UNSCALED(Prod, a* b)
PROXYCCL_UNSCALED(Min, a < b || a != a ? a : b)
PROXYCCL_UNSCALED(Max, a > b || a != a ? a : b)
// Bitwise operations, which only integers have.
PROXYCCL_UNSCALED(Band, a& b)
PROXYCCL_UNSCALED(Bor, a | b)
PROXYCCL_UNSCALED(Bxor, a ^ b)
#undef PROXYCCL_UNSCALED
struct Avg {
  template <class A>
  static PROXYCCL_DEVICE A combine(A a, A b) {
    return a + b;
  }
  // Divides values by the least power of two >= `ranks`, because a float holds this quotient of a bfloat16 exactly.
  template <class T, class A>
  static PROXYCCL_DEVICE A scale(A a, uint32_t ranks) {
    if constexpr (Element<T>::kScaled) return a * inverse(ranks);
    return a;
  }
  template <class T, class A>
  static PROXYCCL_DEVICE A finish(A a, uint32_t ranks) {
    if constexpr (!Element<T>::kScaled)
      return divide(a, ranks);
    else
      return isPowerOfTwo(ranks) ? a : a / (static_cast<float>(ranks) * inverse(ranks));
  }

 private:
  template <class A>
  static PROXYCCL_DEVICE A divide(A a, uint32_t ranks) {
    return a / static_cast<decltype(a + a)>(ranks);  // divides in a wider type, because an 8-bit A may not hold `ranks`
  }
  // If `ranks` is a power of two, its reciprocal is exact, so a multiplication replaces the division. On a GPU a
  // division takes some 30 instructions, which would slow down a kernel of few blocks.
  static PROXYCCL_DEVICE float divide(float a, uint32_t ranks) {
    return isPowerOfTwo(ranks) ? a * inverse(ranks) : a / static_cast<float>(ranks);
  }
  static PROXYCCL_DEVICE double divide(double a, uint32_t ranks) {
    return isPowerOfTwo(ranks) ? a * static_cast<double>(inverse(ranks)) : a / static_cast<double>(ranks);
  }
  static PROXYCCL_DEVICE bool isPowerOfTwo(uint32_t ranks) { return (ranks & (ranks - 1)) == 0; }
  // Returns the reciprocal of the least power of two >= `ranks`.
  static PROXYCCL_DEVICE float inverse(uint32_t ranks) {
    uint32_t bits = ranks - 1;  // the next lines set all bits below the highest set bit
    for (uint32_t shift = 1; shift < 32; shift *= 2) bits |= bits >> shift;
    return __builtin_bit_cast(float, (127u - countBits(bits)) << 23);
  }
};

// Replaces any NaN by one fixed NaN, which has no sign and no payload.
template <class A>
PROXYCCL_DEVICE A withOneNan(A value) {
  return value;
}
PROXYCCL_DEVICE float withOneNan(float value) {
  return value == value ? value : __builtin_bit_cast(float, 0x7fc00000u);
}
PROXYCCL_DEVICE double withOneNan(double value) {
  return value == value ? value : __builtin_bit_cast(double, 0x7ff8000000000000ull);
}

template <class T, class Op>
PROXYCCL_DEVICE typename Element<T>::Accumulator contribution(T value, uint32_t ranks) {
  return Op::template scale<T>(Element<T>::widen(value), ranks);
}

// Returns a reduction's result from the combined values of all ranks. A sum or product of two NaNs has the sign and
// payload of one of the two; which one depends on the device and on the compiler's order of operands. So a NaN result
// gets neither sign nor payload.
template <class T, class Op>
PROXYCCL_DEVICE typename Element<T>::Accumulator finished(typename Element<T>::Accumulator combined, uint32_t ranks) {
  return withOneNan(Op::template finish<T>(combined, ranks));
}
template <class T, class Op>
PROXYCCL_DEVICE T finishReduction(typename Element<T>::Accumulator combined, uint32_t ranks) {
  return Element<T>::narrow(finished<T, Op>(combined, ranks));
}

}  // namespace proxyccl
