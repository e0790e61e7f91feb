// Everything a user's kernel needs.
#ifndef PROXYCCL_PROXYCCL_H
#define PROXYCCL_PROXYCCL_H

#include "proxyccl/proxy_channel.h"
#include "proxyccl/reduce.h"
#include "proxyccl/sm_channel.h"
#include "proxyccl/sync.h"

namespace proxyccl {

// DeviceHandle<ProxyChannel>, as MSCCL++ spells it: the host-side class names its device handle.
struct SmChannel {
  using DeviceHandle = SmChannelDeviceHandle;
};
struct ProxyChannel {
  using DeviceHandle = ProxyChannelDeviceHandle;
};
template <class Channel>
using DeviceHandle = typename Channel::DeviceHandle;

}  // namespace proxyccl

#endif
