// MSCCL++'s host header. Kernels that include it need the device side.
#ifndef MSCCLPP_SEMAPHORE_HPP_
#define MSCCLPP_SEMAPHORE_HPP_

#include "mscclpp/semaphore_device.hpp"

#endif
