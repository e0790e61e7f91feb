// The name that memory_channel_device.hpp had until 2025.
#ifndef MSCCLPP_SM_CHANNEL_DEVICE_HPP_
#define MSCCLPP_SM_CHANNEL_DEVICE_HPP_

#include "mscclpp/memory_channel_device.hpp"

#endif
