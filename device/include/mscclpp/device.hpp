// MSCCL++'s names for the differences between targets.
//
// The headers in this folder have MSCCL++'s names and signatures, and are written for ProxyCCL's channels: a kernel
// written for MSCCL++ compiles unchanged. Two things differ throughout. Waits are bounded by the communicator's
// time-out, so MSCCL++'s bounds in spins (maxSpinCount) are accepted and ignored. And where MSCCL++ aborts
// the kernel, the communicator ends with an exception. See docs/coming_from_mscclpp.md.
#ifndef MSCCLPP_DEVICE_HPP_
#define MSCCLPP_DEVICE_HPP_

#include "proxyccl/platform.h"

#define MSCCLPP_DEVICE_COMPILE
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define MSCCLPP_DEVICE_CUDA
#elif defined(__HIP__) || defined(__HIPCC_RTC__)
#define MSCCLPP_DEVICE_HIP
#endif

#define MSCCLPP_DEVICE_INLINE PROXYCCL_DEVICE
#define MSCCLPP_HOST_DEVICE_INLINE PROXYCCL_DEVICE
#define MSCCLPP_INLINE inline
#define WARP_SIZE PROXYCCL_WARP_SIZE
// A barrier of the block after which shared memory is visible. (MSCCL++ has a cheaper barrier on AMD.)
#define __syncshm() __syncthreads()

namespace mscclpp {

/// The device's side of a channel: DeviceHandle<PortChannel>.
template <class Channel>
using DeviceHandle = typename Channel::DeviceHandle;

}  // namespace mscclpp

#endif
