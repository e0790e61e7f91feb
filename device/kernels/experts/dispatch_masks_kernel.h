// The kernel of dispatches that announce masks of few tokens.
#ifndef PROXYCCL_EXPERT_DISPATCH_MASKS_KERNEL_H
#define PROXYCCL_EXPERT_DISPATCH_MASKS_KERNEL_H

#include "experts/dispatch.h"

extern "C" __global__ void __launch_bounds__(PROXYCCL_EXPERT_THREADS, 1)
    expert_dispatch_masks(const ProxycclExperts experts, const ProxycclDispatch call) {
  ::proxyccl::dispatchExperts<::proxyccl::DispatchMode<::proxyccl::MaskAnnouncement<false>>>(experts, call);
}
PROXYCCL_EXPORT_KERNEL(expert_dispatch_masks)

#endif
