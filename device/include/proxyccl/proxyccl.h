// Includes all device headers of ProxyCCL.
#pragma once

#include "proxyccl/proxy_channel.h"
#include "proxyccl/reduce.h"
#include "proxyccl/semaphore.h"
#include "proxyccl/sm_channel.h"
#include "proxyccl/sync.h"

namespace proxyccl {

// DeviceHandle<ProxyChannel> is the device handle of a host-side class, as in MSCCL++. MSCCL++'s channels were called
// SmChannel and ProxyChannel until 2025, and MemoryChannel and PortChannel since.
using MemoryChannelDeviceHandle = SmChannelDeviceHandle;
using PortChannelDeviceHandle = ProxyChannelDeviceHandle;

struct SmChannel {
  using DeviceHandle = SmChannelDeviceHandle;
};
struct ProxyChannel {
  using DeviceHandle = ProxyChannelDeviceHandle;
};
using MemoryChannel = SmChannel;
using PortChannel = ProxyChannel;
template <class Channel>
using DeviceHandle = typename Channel::DeviceHandle;

}  // namespace proxyccl
