// The header of host code. Kernels that include it mean the device's side.
#ifndef MSCCLPP_POLL_HPP_
#define MSCCLPP_POLL_HPP_

#include "mscclpp/poll_device.hpp"

#endif
