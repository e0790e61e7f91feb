// The kernel of dispatches whose blocks each announce masks of a share of many tokens.
#ifndef PROXYCCL_EXPERT_DISPATCH_SHARED_MASKS_KERNEL_H
#define PROXYCCL_EXPERT_DISPATCH_SHARED_MASKS_KERNEL_H

#include "experts/dispatch.h"

extern "C" __global__ void __launch_bounds__(PROXYCCL_EXPERT_THREADS, 1)
    expert_dispatch_shared_masks(const ProxycclExperts experts, const ProxycclDispatch call) {
  ::proxyccl::dispatchExperts<::proxyccl::DispatchMode<::proxyccl::MaskAnnouncement<true>>>(experts, call);
}
PROXYCCL_EXPORT_KERNEL(expert_dispatch_shared_masks)

#endif
