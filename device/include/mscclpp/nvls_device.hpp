// The name that switch_channel_device.hpp had until 2025.
#ifndef MSCCLPP_NVLS_DEVICE_HPP_
#define MSCCLPP_NVLS_DEVICE_HPP_

#include "mscclpp/switch_channel_device.hpp"

#endif
