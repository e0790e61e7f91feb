// MSCCL++'s host header. Kernels that include it need the device side.
#ifndef MSCCLPP_ALGORITHM_HPP_
#define MSCCLPP_ALGORITHM_HPP_

#include "mscclpp/gpu_data_types.hpp"

#endif
