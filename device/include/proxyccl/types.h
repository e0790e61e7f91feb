/* Fixed-width integers without a system header, for run-time compilers that have none.
 *
 * The spellings are those of glibc on LP64 Linux, so that a translation unit that also includes
 * <stdint.h> (the C engine, a user's host code) sees the same types twice and not two types.
 */
#ifndef PROXYCCL_TYPES_H
#define PROXYCCL_TYPES_H

typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
#if defined(__HIPCC_RTC__) /* HIPRTC predefines some of these names, which ones depends on its version; these as here */
typedef long long int64_t;
typedef unsigned long long uint64_t;
#else
typedef long int64_t;
typedef unsigned long uint64_t;
#endif
typedef unsigned long uintptr_t;
typedef unsigned long size_t;

#endif
