// MSCCL++'s host header. Kernels that include it need the device side.
#ifndef MSCCLPP_SM_CHANNEL_HPP_
#define MSCCLPP_SM_CHANNEL_HPP_

#include "mscclpp/sm_channel_device.hpp"

#endif
