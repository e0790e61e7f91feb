// MSCCL++'s host header. Kernels that include it need the device side.
#ifndef MSCCLPP_CORE_HPP_
#define MSCCLPP_CORE_HPP_

#include "mscclpp/memory_channel_device.hpp"
#include "mscclpp/port_channel_device.hpp"

#endif
