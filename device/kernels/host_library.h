// Instances of the shipped kernels for the host, compiled into the wheel, so that collectives need no compiler at run
// time.
//
// setup.py builds one library for each element type, in parallel.
#pragma once

#include "all_reduce_by_proxy.h"
#include "all_reduce_one_shot.h"
#include "all_reduce_recursive_doubling.h"
#include "all_reduce_ring.h"
#include "all_reduce_two_shot.h"
#include "all_reduce_two_shot_packets.h"
#include "reduce_arrived.h"
#include "reduce_scatter.h"

#define FOR_EACH_ALGORITHM(T, type, Op, op)                                                             \
  PROXYCCL_REDUCTION(all_reduce_one_shot, all_reduce_one_shot_##type##_##op, T, Op)                     \
  PROXYCCL_REDUCTION(all_reduce_one_shot_lines, all_reduce_one_shot_lines_##type##_##op, T, Op)         \
  PROXYCCL_REDUCTION(all_reduce_recursive_doubling, all_reduce_recursive_doubling_##type##_##op, T, Op) \
  PROXYCCL_REDUCTION(all_reduce_two_shot_packets, all_reduce_two_shot_packets_##type##_##op, T, Op)     \
  PROXYCCL_REDUCTION(all_reduce_two_shot_lines, all_reduce_two_shot_lines_##type##_##op, T, Op)         \
  PROXYCCL_REDUCTION(all_reduce_two_shot, all_reduce_two_shot_##type##_##op, T, Op)                     \
  PROXYCCL_REDUCTION(all_reduce_by_proxy, all_reduce_by_proxy_##type##_##op, T, Op)                     \
  PROXYCCL_REDUCTION(all_reduce_ring, all_reduce_ring_##type##_##op, T, Op)                             \
  PROXYCCL_REDUCTION(reduce_scatter, reduce_scatter_##type##_##op, T, Op)                               \
  PROXYCCL_REDUCTION(reduce_arrived, reduce_arrived_##type##_##op, T, Op)

#define FOR_EACH_OPERATION(T, type)       \
  FOR_EACH_ALGORITHM(T, type, Sum, sum)   \
  FOR_EACH_ALGORITHM(T, type, Prod, prod) \
  FOR_EACH_ALGORITHM(T, type, Min, min)   \
  FOR_EACH_ALGORITHM(T, type, Max, max)   \
  FOR_EACH_ALGORITHM(T, type, Avg, avg)

#define FOR_EACH_BITWISE_OPERATION(T, type) \
  FOR_EACH_ALGORITHM(T, type, Band, band)   \
  FOR_EACH_ALGORITHM(T, type, Bor, bor)     \
  FOR_EACH_ALGORITHM(T, type, Bxor, bxor)
