// Defines <stdint.h>'s limits of the integers for run-time compilers, which lack that header.
#pragma once

#ifndef UINT32_MAX
#define INT8_MIN (-128)
#define INT16_MIN (-32767 - 1)
#define INT32_MIN (-2147483647 - 1)
#define INT8_MAX (127)
#define INT16_MAX (32767)
#define INT32_MAX (2147483647)
#define UINT8_MAX (255)
#define UINT16_MAX (65535)
#define UINT32_MAX (4294967295U)
#if defined(__CUDACC_RTC__) || defined(__HIPCC_RTC__)
#define INT64_MIN (-9223372036854775807LL - 1)
#define INT64_MAX (9223372036854775807LL)
#define UINT64_MAX (18446744073709551615ULL)
#else
#ifndef __INT64_C
#define __INT64_C(c) c##L
#define __UINT64_C(c) c##UL
#endif
#define INT64_MIN (-__INT64_C(9223372036854775807) - 1)
#define INT64_MAX (__INT64_C(9223372036854775807))
#define UINT64_MAX (__UINT64_C(18446744073709551615))
#endif
#define SIZE_MAX (18446744073709551615UL)
#endif
