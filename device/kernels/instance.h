// PROXYCCL_REDUCTION(kernel, name, T, Op): a kernel `name` from the template `kernel` for one element type and
// operation.
#ifndef PROXYCCL_INSTANCE_H
#define PROXYCCL_INSTANCE_H

#include "proxyccl/kernel.h"

#define PROXYCCL_REDUCTION(kernel, name, T, Op)                                              \
  extern "C" __global__ void name(ProxycclTeam* team, const T* in, T* out, uint64_t count) { \
    ::proxyccl::kernel<T, ::proxyccl::Op>(team, in, out, count);                             \
  }                                                                                          \
  PROXYCCL_EXPORT_KERNEL(name)

#endif
