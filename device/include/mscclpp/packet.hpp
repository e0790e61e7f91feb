// MSCCL++'s host header. Kernels that include it need the device side.
#ifndef MSCCLPP_PACKET_HPP_
#define MSCCLPP_PACKET_HPP_

#include "mscclpp/packet_device.hpp"

#endif
