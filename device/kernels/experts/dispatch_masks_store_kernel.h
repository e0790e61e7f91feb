// The kernel of whole dispatches of few tokens, by masks, to output buffers.
#ifndef PROXYCCL_EXPERT_DISPATCH_MASKS_STORE_KERNEL_H
#define PROXYCCL_EXPERT_DISPATCH_MASKS_STORE_KERNEL_H

#include "experts/dispatch.h"

namespace proxyccl {

__global__ void __launch_bounds__(PROXYCCL_EXPERT_THREADS, 1)
    dispatch_masks_store(const ProxycclExperts experts, const ProxycclDispatch call) {
  dispatchExperts<DispatchMode<MaskAnnouncement<false>, void, true>>(experts, call);
}
PROXYCCL_EXPORT_KERNEL(dispatch_masks_store)

}  // namespace proxyccl

#endif
