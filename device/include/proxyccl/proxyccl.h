// Everything that a kernel needs.
#pragma once

#include "proxyccl/proxy_channel.h"
#include "proxyccl/reduce.h"
#include "proxyccl/semaphore.h"
#include "proxyccl/sm_channel.h"
#include "proxyccl/sync.h"

namespace proxyccl {

// DeviceHandle<ProxyChannel>, as in MSCCL++: the device handle of a host-side class. MSCCL++ has used both pairs of
// names; since 2025 the channels are MemoryChannel and PortChannel.
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
