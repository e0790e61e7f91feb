// The header of host code. Kernels that include it mean the device's side.
#ifndef MSCCLPP_SWITCH_CHANNEL_HPP_
#define MSCCLPP_SWITCH_CHANNEL_HPP_

#include "mscclpp/switch_channel_device.hpp"

#endif
