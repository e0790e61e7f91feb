// MSCCL++'s host header. Kernels that include it need the device side.
#ifndef MSCCLPP_PROXY_CHANNEL_HPP_
#define MSCCLPP_PROXY_CHANNEL_HPP_

#include "mscclpp/proxy_channel_device.hpp"

#endif
