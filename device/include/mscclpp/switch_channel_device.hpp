// SwitchChannelDeviceHandle, in name only: multicast by a switch is not supported, and using it does not compile.
#ifndef MSCCLPP_SWITCH_CHANNEL_DEVICE_HPP_
#define MSCCLPP_SWITCH_CHANNEL_DEVICE_HPP_

#include "mscclpp/device.hpp"

#define MSCCLPP_NO_SWITCH(T) \
  static_assert(sizeof(T) == 0, "SwitchChannel is not offered: ProxyCCL has no channel that multicasts by a switch")

namespace mscclpp {

struct SwitchChannelDeviceHandle {
  void* devicePtr;
  void* mcPtr;
  size_t bufferSize;

  template <class T>
  PROXYCCL_DEVICE T reduce(uint64_t) const {
    MSCCLPP_NO_SWITCH(T);
    return T();
  }
  template <class T>
  PROXYCCL_DEVICE void broadcast(uint64_t, const T&) const {
    MSCCLPP_NO_SWITCH(T);
  }
  template <class T>
  static PROXYCCL_DEVICE T multimemLoadReduce(T*) {
    MSCCLPP_NO_SWITCH(T);
    return T();
  }
  template <class T, class Pointer>
  static PROXYCCL_DEVICE void multimemStore(const T&, Pointer*) {
    MSCCLPP_NO_SWITCH(T);
  }
};

struct SwitchChannel {
  using DeviceHandle = SwitchChannelDeviceHandle;
};

}  // namespace mscclpp

#undef MSCCLPP_NO_SWITCH

#endif
