// The kernel of dispatches that announce expert ids.
#ifndef PROXYCCL_EXPERT_DISPATCH_IDS_KERNEL_H
#define PROXYCCL_EXPERT_DISPATCH_IDS_KERNEL_H

#include "experts/dispatch.h"

namespace proxyccl {

__global__ void __launch_bounds__(PROXYCCL_EXPERT_THREADS, 1)
    dispatch_ids(const ProxycclExperts experts, const ProxycclDispatch call) {
  dispatchExperts<DispatchMode<IdAnnouncement>>(experts, call);
}
PROXYCCL_EXPORT_KERNEL(dispatch_ids)

}  // namespace proxyccl

#endif
