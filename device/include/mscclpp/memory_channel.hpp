// The header of host code. Kernels that include it mean the device's side.
#ifndef MSCCLPP_MEMORY_CHANNEL_HPP_
#define MSCCLPP_MEMORY_CHANNEL_HPP_

#include "mscclpp/memory_channel_device.hpp"

#endif
