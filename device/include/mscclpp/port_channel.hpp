// MSCCL++'s host header. Kernels that include it need the device side.
#ifndef MSCCLPP_PORT_CHANNEL_HPP_
#define MSCCLPP_PORT_CHANNEL_HPP_

#include "mscclpp/port_channel_device.hpp"

#endif
