// The kernel of dispatches whose blocks each announce masks of a share of many tokens.
#ifndef PROXYCCL_EXPERT_DISPATCH_SHARED_MASKS_KERNEL_H
#define PROXYCCL_EXPERT_DISPATCH_SHARED_MASKS_KERNEL_H

#include "experts/dispatch.h"

namespace proxyccl {

__global__ void __launch_bounds__(PROXYCCL_EXPERT_THREADS, 1)
    dispatch_shared_masks(const ProxycclExperts experts, const ProxycclDispatch call) {
  dispatchExperts<DispatchMode<MaskAnnouncement<true>>>(experts, call);
}
PROXYCCL_EXPORT_KERNEL(dispatch_shared_masks)

}  // namespace proxyccl

#endif
