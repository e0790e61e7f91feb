// The kernel of dispatches that announce expert ids.
#ifndef PROXYCCL_EXPERT_DISPATCH_IDS_KERNEL_H
#define PROXYCCL_EXPERT_DISPATCH_IDS_KERNEL_H

#include "experts/dispatch.h"

extern "C" __global__ void __launch_bounds__(PROXYCCL_EXPERT_THREADS, 1)
    expert_dispatch_ids(const ProxycclExperts experts, const ProxycclDispatch call) {
  ::proxyccl::dispatchExperts<::proxyccl::DispatchMode<::proxyccl::IdAnnouncement>>(experts, call);
}
PROXYCCL_EXPORT_KERNEL(expert_dispatch_ids)

#endif
