// The header of host code. Kernels that include it mean the device's side.
#ifndef MSCCLPP_FIFO_HPP_
#define MSCCLPP_FIFO_HPP_

#include "mscclpp/fifo_device.hpp"

#endif
