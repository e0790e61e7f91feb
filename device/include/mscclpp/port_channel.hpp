// The header of host code. Kernels that include it mean the device's side.
#ifndef MSCCLPP_PORT_CHANNEL_HPP_
#define MSCCLPP_PORT_CHANNEL_HPP_

#include "mscclpp/port_channel_device.hpp"

#endif
