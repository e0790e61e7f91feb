// MSCCL++'s names for bulk copies through shared memory. Only the names are here: MSCCLPP_BULK_AVAILABLE is 0.
#ifndef MSCCLPP_BULK_DEVICE_HPP_
#define MSCCLPP_BULK_DEVICE_HPP_

#include "mscclpp/poll_device.hpp"

/// 0: bulk copies are not available. Kernels use bulk copies only if this macro is 1.
#define MSCCLPP_BULK_AVAILABLE 0

namespace mscclpp {

/// The barrier of a bulk copy in shared memory, declared so that a kernel may take its size.
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

#endif
