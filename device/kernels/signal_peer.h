// A kernel of one thread that signals on a ProxyChannel, so that the CPU can enqueue a signal after the stream's work.
#pragma once

#include "proxyccl/kernel.h"
#include "proxyccl/proxyccl.h"

// Adds one to the peer's count or, if `value` is not 0, raises the count to `value`.
extern "C" __global__ void signal_peer(const proxyccl::ProxyChannelDeviceHandle channel, uint64_t value) {
  if (threadIdx.x != 0 || blockIdx.x != 0) return;
  if (value == 0)
    channel.signal();
  else
    channel.signal(value);
}
PROXYCCL_EXPORT_KERNEL(signal_peer)
