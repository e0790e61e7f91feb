// The header of host code. Kernels that include it mean the device's side.
#ifndef MSCCLPP_PROXY_CHANNEL_HPP_
#define MSCCLPP_PROXY_CHANNEL_HPP_

#include "mscclpp/proxy_channel_device.hpp"

#endif
