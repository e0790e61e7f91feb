// Declares MSCCL++'s names for bulk copies through shared memory, which are not implemented.
#pragma once

#include "mscclpp/poll_device.hpp"

/// 1 if bulk copies are available to kernels, else 0.
#define MSCCLPP_BULK_AVAILABLE 0

namespace mscclpp {

/// A bulk copy's barrier in shared memory, declared so that kernels can use its sizeof.
struct BulkBarrier {
  uint64_t storage_;
};

#define MSCCLPP_NO_BULK(name)                                                                        \
  template <class... T>                                                                              \
  PROXYCCL_DEVICE void name(T&&...) {                                                                \
    static_assert(sizeof...(T) == ~size_t(0),                                                        \
                  #name " is not offered: ProxyCCL has no bulk copies; see MSCCLPP_BULK_AVAILABLE"); \
  }
MSCCLPP_NO_BULK(bulkLoad)
MSCCLPP_NO_BULK(bulkStore)
MSCCLPP_NO_BULK(bulkReduceStore)
MSCCLPP_NO_BULK(bulkStoreCommit)
MSCCLPP_NO_BULK(bulkStoreWait)
MSCCLPP_NO_BULK(bulkStoreWaitSource)
MSCCLPP_NO_BULK(bulkFence)
#undef MSCCLPP_NO_BULK

}  // namespace mscclpp
