// Declares SwitchChannelDeviceHandle only by name: multicast by a switch is not supported, so its use does not compile.
#pragma once

#include "mscclpp/gpu_data_types.hpp"
#include "mscclpp/semaphore_device.hpp"

#define MSCCLPP_NO_SWITCH(T) \
  static_assert(sizeof(T) == 0, "SwitchChannel is not offered: ProxyCCL has no channel that multicasts by a switch")

namespace mscclpp {

struct SwitchDevice2DeviceSemaphoreDeviceHandle {
  template <class T = char>
  PROXYCCL_DEVICE void signal() const {
    MSCCLPP_NO_SWITCH(T);
  }
  template <class T = char>
  PROXYCCL_DEVICE void relaxedSignal() const {
    MSCCLPP_NO_SWITCH(T);
  }
  template <class T = char>
  PROXYCCL_DEVICE void wait(int64_t = -1) const {
    MSCCLPP_NO_SWITCH(T);
  }
  template <class T = char>
  PROXYCCL_DEVICE void relaxedWait(int64_t = -1) const {
    MSCCLPP_NO_SWITCH(T);
  }
};

struct SwitchChannelDeviceHandle : SwitchDevice2DeviceSemaphoreDeviceHandle {
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
  template <class T, class Accumulator = void>
  static PROXYCCL_DEVICE T multimemLoadReduce(T*) {
    MSCCLPP_NO_SWITCH(T);
    return T();
  }
  template <class T, class Pointer>
  static PROXYCCL_DEVICE void multimemStore(const T&, Pointer*) {
    MSCCLPP_NO_SWITCH(T);
  }
  template <class T, class Pointer>
  static PROXYCCL_DEVICE void multimemStoreReduce(const T&, Pointer*) {
    MSCCLPP_NO_SWITCH(T);
  }
};

struct SwitchChannel {
  using DeviceHandle = SwitchChannelDeviceHandle;
};

}  // namespace mscclpp

#undef MSCCLPP_NO_SWITCH
