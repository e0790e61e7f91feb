/* Fixed-width integers without a system header, because run-time compilers have none.
 *
 * A translation unit may also include other headers that declare the same names; both declarations must then name the
 * same type. So each target has the spellings of its own headers: glibc's on LP64 Linux (the C engine, a user's host
 * code, nvcc), those of libcu++ under NVRTC (<cuda/atomic>, <cooperative_groups.h>), and under HIPRTC those of the
 * names that it predefines, which depend on its version.
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
