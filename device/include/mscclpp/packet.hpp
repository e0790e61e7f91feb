// The header of host code. Kernels that include it mean the device's side.
#ifndef MSCCLPP_PACKET_HPP_
#define MSCCLPP_PACKET_HPP_

#include "mscclpp/packet_device.hpp"

#endif
