// Defines MSCCL++'s names for what differs between targets.
//
// The headers in this folder implement MSCCL++'s names and signatures by ProxyCCL's channels, so that a kernel written
// for MSCCL++ compiles unchanged. This folder's host headers (core.hpp, …) only include the device headers. Two things
// differ. The communicator's time-out bounds each wait, and MSCCL++'s bounds in spins (maxSpinCount) are ignored. Where
// MSCCL++ aborts the kernel, ProxyCCL ends the communicator with an exception. See docs/coming_from_mscclpp.md.
#pragma once

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
// A barrier of a block's threads, after which they see each other's writes to shared memory.
#define __syncshm() __syncthreads()

namespace mscclpp {

/// The device handle of a host-side class, as in DeviceHandle<PortChannel>.
template <class Channel>
using DeviceHandle = typename Channel::DeviceHandle;

}  // namespace mscclpp
