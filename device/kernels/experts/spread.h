// Arranges one value per row as a matrix, so that a combine of the matrix returns each value to its slot.
#pragma once

#include "experts/choices.h"

// Sets matrix[rows][topk] to each row's value in the column of the row's slot, and to zero in the other columns.
extern "C" __global__ void __launch_bounds__(PROXYCCL_EXPERT_THREADS, 1)
    expert_spread(const char* values, const int32_t* row_slots, char* matrix, uint32_t rows, uint32_t topk,
                  uint32_t bytes) {
  using namespace proxyccl;
  forEach(static_cast<uint64_t>(rows) * topk, blockIdx.x * blockDim.x + threadIdx.x, gridDim.x * blockDim.x,
          [&](size_t i) {
            const size_t row = i / topk;
            const bool own = row_slots[row] == static_cast<int32_t>(i % topk);
            storeRaw(matrix + i * bytes, own ? loadRaw(values + row * bytes, bytes) : 0, bytes);
          });
}
PROXYCCL_EXPORT_KERNEL(expert_spread)
