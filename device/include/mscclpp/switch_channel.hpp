// MSCCL++'s host header. Kernels that include it need the device side.
#ifndef MSCCLPP_SWITCH_CHANNEL_HPP_
#define MSCCLPP_SWITCH_CHANNEL_HPP_

#include "mscclpp/switch_channel_device.hpp"

#endif
