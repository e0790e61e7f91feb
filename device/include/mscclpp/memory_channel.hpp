// MSCCL++'s host header. Kernels that include it need the device side.
#ifndef MSCCLPP_MEMORY_CHANNEL_HPP_
#define MSCCLPP_MEMORY_CHANNEL_HPP_

#include "mscclpp/memory_channel_device.hpp"

#endif
