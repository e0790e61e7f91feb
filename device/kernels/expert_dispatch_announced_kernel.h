// The kernel of dispatches whose ids are announced (ProxycclExperts.id_packets).
#ifndef PROXYCCL_EXPERT_DISPATCH_ANNOUNCED_KERNEL_H
#define PROXYCCL_EXPERT_DISPATCH_ANNOUNCED_KERNEL_H

#include "expert_dispatch.h"

extern "C" __global__ void __launch_bounds__(PROXYCCL_EXPERT_THREADS, 1)
    expert_dispatch_announced(const ProxycclExperts experts, const ProxycclDispatch call) {
  ::proxyccl::dispatchExperts<::proxyccl::DispatchMode<true>>(experts, call);
}
PROXYCCL_EXPORT_KERNEL(expert_dispatch_announced)

#endif
