// The kernel of dispatches that announce masks of few tokens.
#ifndef PROXYCCL_EXPERT_DISPATCH_MASKS_KERNEL_H
#define PROXYCCL_EXPERT_DISPATCH_MASKS_KERNEL_H

#include "experts/dispatch.h"

namespace proxyccl {

__global__ void __launch_bounds__(PROXYCCL_EXPERT_THREADS, 1)
    dispatch_masks(const ProxycclExperts experts, const ProxycclDispatch call) {
  dispatchExperts<DispatchMode<MaskAnnouncement<false>>>(experts, call);
}
PROXYCCL_EXPORT_KERNEL(dispatch_masks)

}  // namespace proxyccl

#endif
