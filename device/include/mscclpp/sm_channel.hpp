// The header of host code. Kernels that include it mean the device's side.
#ifndef MSCCLPP_SM_CHANNEL_HPP_
#define MSCCLPP_SM_CHANNEL_HPP_

#include "mscclpp/sm_channel_device.hpp"

#endif
