/* Fixed-width integers without a system header, because run-time compilers have none.
 *
 * Another header of the translation unit may declare the same names, which must then be the same types. So these types
 * are spelled as in each target's own headers: as in glibc for the C engine, a user's host code and nvcc (LP64 Linux),
 * as in libcu++ for NVRTC, and as HIPRTC predefines them.
 */
#pragma once

typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
#if defined(__HIPCC_RTC__) || defined(__CUDACC_RTC__)
typedef long long int64_t;
typedef unsigned long long uint64_t;
#else
typedef long int64_t;
typedef unsigned long uint64_t;
#endif
#if defined(__CUDACC_RTC__)
typedef unsigned long long uintptr_t;
#else
typedef unsigned long uintptr_t;
#endif
typedef unsigned long size_t;

#ifdef __cplusplus
namespace proxyccl {
template <class T>
struct SameType {
  using Type = T;
};
// Names T in a non-deduced context, so that atomicAdd(&counter, 1) converts the 1 to T.
template <class T>
using Same = typename SameType<T>::Type;
}  // namespace proxyccl
#endif
