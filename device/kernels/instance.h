// PROXYCCL_TEAM_KERNEL name(…) declares a kernel with blocks of at most PROXYCCL_MAX_BLOCK_THREADS threads. Without
// this bound the compiler could use more registers than such a block can have, and the launch would fail.
//
// PROXYCCL_REDUCTION(kernel, name, T, Op) defines a kernel `name` from the template `kernel` for one element type and
// operation.
#pragma once

#include "proxyccl/kernel.h"
#include "team.h"

namespace proxyccl {

// The type of a template's team parameter, without the reference.
template <class Template>
struct TeamParameter;
template <class Team, class T>
struct TeamParameter<void (*)(const Team&, const T*, T*, uint64_t)> {
  using Type = Team;
};
template <class Template>
using TeamOf = typename TeamParameter<Template>::Type;

}  // namespace proxyccl

#define PROXYCCL_TEAM_KERNEL extern "C" __global__ void __launch_bounds__(PROXYCCL_MAX_BLOCK_THREADS, 1)
#define PROXYCCL_REDUCTION_KERNEL PROXYCCL_TEAM_KERNEL

// 1 if the target has PROXYCCL_SMALL_KERNEL, which declares kernels whose blocks are single warps; else 0.
#ifdef PROXYCCL_SMALL_KERNEL
#define PROXYCCL_SMALL_BLOCKS 1
#else
#define PROXYCCL_SMALL_BLOCKS 0
#endif

#define PROXYCCL_REDUCTION(kernel, name, T, Op)                                                                   \
  PROXYCCL_REDUCTION_KERNEL name(const ::proxyccl::TeamOf<decltype(&::proxyccl::kernel<T, ::proxyccl::Op>)> team, \
                                 const T* in, T* out, uint64_t count) {                                           \
    ::proxyccl::kernel<T, ::proxyccl::Op>(team, in, out, count);                                                  \
  }                                                                                                               \
  PROXYCCL_EXPORT_KERNEL(name)
