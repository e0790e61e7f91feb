// Converts float16 to float32 and back for hierarchical reductions, whose partial sums may exceed float16's range.
#pragma once

#include "proxyccl/copy.h"
#include "proxyccl/kernel.h"
#include "proxyccl/reduce.h"

namespace proxyccl {

template <class Convert>
PROXYCCL_DEVICE void convertAll(uint64_t count, Convert convert) {
  const uint64_t stride = static_cast<uint64_t>(gridDim.x) * blockDim.x;
  for (uint64_t i = static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += stride) convert(i);
}

}  // namespace proxyccl

extern "C" __global__ void widen_float16(const proxyccl::Half* in, float* out, uint64_t count) {
  proxyccl::convertAll(count, [&](uint64_t i) { out[i] = proxyccl::Element<proxyccl::Half>::widen(in[i]); });
}
PROXYCCL_EXPORT_KERNEL(widen_float16)

extern "C" __global__ void narrow_float16(const float* in, proxyccl::Half* out, uint64_t count) {
  proxyccl::convertAll(count, [&](uint64_t i) { out[i] = proxyccl::Element<proxyccl::Half>::narrow(in[i]); });
}
PROXYCCL_EXPORT_KERNEL(narrow_float16)
