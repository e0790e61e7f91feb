// Signals on a ProxyChannel for the CPU's program: a kernel of one thread signals, after the stream's work.
#pragma once

#include "proxyccl/kernel.h"
#include "proxyccl/proxyccl.h"

// Signals the peer. If `value` is not 0, raises the count to `value`.
extern "C" __global__ void signal_peer(const proxyccl::ProxyChannelDeviceHandle channel, uint64_t value) {
  if (threadIdx.x != 0 || blockIdx.x != 0) return;
  if (value == 0)
    channel.signal();
  else
    channel.signal(value);
}
PROXYCCL_EXPORT_KERNEL(signal_peer)
