// MSCCL++'s host header. Kernels that include it need the device side.
#ifndef MSCCLPP_NUMA_HPP_
#define MSCCLPP_NUMA_HPP_

#include "mscclpp/device.hpp"

#endif
