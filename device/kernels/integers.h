#pragma once

#include "proxyccl/platform.h"

namespace proxyccl {

PROXYCCL_DEVICE uint64_t minimum(uint64_t a, uint64_t b) { return a < b ? a : b; }
PROXYCCL_DEVICE uint64_t divideUp(uint64_t n, uint64_t by) { return (n + by - 1) / by; }

// Returns the number of the slot for rank `of` on rank `at`, which has one slot per peer, in rank order.
PROXYCCL_DEVICE uint32_t slotOf(uint32_t at, uint32_t of) { return of < at ? of : of - 1; }

}  // namespace proxyccl
