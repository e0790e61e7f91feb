// Arithmetic of sizes.
#ifndef PROXYCCL_INTEGERS_H
#define PROXYCCL_INTEGERS_H

#include "proxyccl/platform.h"

namespace proxyccl {

PROXYCCL_DEVICE uint64_t minimum(uint64_t a, uint64_t b) { return a < b ? a : b; }
PROXYCCL_DEVICE uint64_t divideUp(uint64_t n, uint64_t by) { return (n + by - 1) / by; }

}  // namespace proxyccl

#endif
