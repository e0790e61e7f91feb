// Reads rows that ranks store in pinned host memory, which every rank's device maps. In profiles the kernel has the
// name of DeepEP's kernel.
#pragma once

#include "proxyccl/kernel.h"
#include "proxyccl/proxyccl.h"

namespace proxyccl {

struct alignas(16) StoredWord {
  uint64_t at[2];
};

template <class T>
PROXYCCL_DEVICE void fetchRow(char* out, const char* row, uint32_t bytes, uint32_t lane, uint32_t lanes) {
  const T* from = reinterpret_cast<const T*>(row);
  T* to = reinterpret_cast<T*>(out);
  for (uint32_t i = lane; i < bytes / sizeof(T); i += lanes) to[i] = from[i];
}

}  // namespace proxyccl

// Copies row indices[i] to out[i], or fills out[i] with zeros if row indices[i] does not exist. Rows are numbered rank
// by rank, with `entries` rows per rank; `stores` has the address of each rank's first row. A row's size is a multiple
// of 2 bytes.
extern "C" __global__ void engram_fetch_impl(const uint64_t* stores, uint32_t ranks, uint32_t entries,
                                             uint32_t row_bytes, const int32_t* indices, uint64_t count, char* out) {
  constexpr uint32_t kLanes = PROXYCCL_ON_HOST ? 1 : 32;
  const uint32_t lane = threadIdx.x % kLanes, groups = blockDim.x / kLanes;
  const bool aligned = row_bytes % sizeof(proxyccl::StoredWord) == 0;
  const uint64_t rows = static_cast<uint64_t>(ranks) * entries;
  for (uint64_t i = static_cast<uint64_t>(blockIdx.x) * groups + threadIdx.x / kLanes; i < count;
       i += static_cast<uint64_t>(gridDim.x) * groups) {
    char* to = out + i * row_bytes;
    const int32_t index = indices[i];
    if (index < 0 || static_cast<uint64_t>(index) >= rows) {
      for (uint32_t byte = lane; byte < row_bytes; byte += kLanes) to[byte] = 0;
      continue;
    }
    const uint64_t row = static_cast<uint64_t>(index) % entries * row_bytes;
    const char* from = reinterpret_cast<const char*>(stores[static_cast<uint32_t>(index) / entries]) + row;
    if (aligned)
      proxyccl::fetchRow<proxyccl::StoredWord>(to, from, row_bytes, lane, kLanes);
    else
      proxyccl::fetchRow<char>(to, from, row_bytes, lane, kLanes);
  }
}
PROXYCCL_EXPORT_KERNEL(engram_fetch_impl)
