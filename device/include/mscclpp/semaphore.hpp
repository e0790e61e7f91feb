// The header of host code. Kernels that include it mean the device's side.
#ifndef MSCCLPP_SEMAPHORE_HPP_
#define MSCCLPP_SEMAPHORE_HPP_

#include "mscclpp/semaphore_device.hpp"

#endif
