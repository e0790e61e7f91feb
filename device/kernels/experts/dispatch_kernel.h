// The kernel of dispatches that send counts. Each kind has its own file, because a layer needs only one of them and
// each takes long to compile.
#ifndef PROXYCCL_EXPERT_DISPATCH_KERNEL_H
#define PROXYCCL_EXPERT_DISPATCH_KERNEL_H

#include "experts/dispatch.h"

namespace proxyccl {

__global__ void __launch_bounds__(PROXYCCL_EXPERT_THREADS, 1)
    dispatch(const ProxycclExperts experts, const ProxycclDispatch call) {
  dispatchExperts<DispatchMode<void>>(experts, call);
}
PROXYCCL_EXPORT_KERNEL(dispatch)

}  // namespace proxyccl

#endif
