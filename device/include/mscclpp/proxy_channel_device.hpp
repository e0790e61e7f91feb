// The name that port_channel_device.hpp had until 2025.
#ifndef MSCCLPP_PROXY_CHANNEL_DEVICE_HPP_
#define MSCCLPP_PROXY_CHANNEL_DEVICE_HPP_

#include "mscclpp/port_channel_device.hpp"

#endif
