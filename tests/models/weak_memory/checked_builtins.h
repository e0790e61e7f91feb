/* Maps the compiler's atomic built-ins to accesses to checked memory, so that the shipped headers and C files are
 * explored unchanged, on the host's platform header. The build includes this header before all other code.
 */
#ifndef PROXYCCL_CHECKED_BUILTINS_H
#define PROXYCCL_CHECKED_BUILTINS_H

#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "checked_memory.h"

#define __atomic_load_n(p, order) ((__typeof__(*(p)))checked_load((p), sizeof *(p), order, CHECKED_HERE))
#define __atomic_store_n(p, value, order) checked_store((p), (uint64_t)(value), sizeof *(p), order, CHECKED_HERE)
#define __atomic_exchange_n(p, value, order) \
  ((__typeof__(*(p)))checked_exchange((p), (uint64_t)(value), sizeof *(p), order, CHECKED_HERE))
#define __atomic_fetch_add(p, value, order) \
  ((__typeof__(*(p)))checked_fetch_add((p), (uint64_t)(value), sizeof *(p), order, CHECKED_HERE))
#define __atomic_compare_exchange_n(p, expected, desired, weak, success, failure) \
  checked_compare_exchange((p), (expected), (uint64_t)(desired), sizeof *(p), success, failure, CHECKED_HERE)
#define __atomic_thread_fence(order) checked_fence(order, CHECKED_HERE)
#define __builtin_frame_address(level) checked_frame()
#define __builtin_memcpy(to, from, bytes) checked_copy((to), (from), (bytes), CHECKED_HERE)

/* Replaces the shipped function, whose header test_weak_memory.py empties. */
#define proxyccl_memmove(to, from, bytes) checked_copy((to), (from), (bytes), CHECKED_HERE)

#ifdef __cplusplus /* the engine's C headers use _Alignas */
#define _Alignas alignas
#endif

#endif
