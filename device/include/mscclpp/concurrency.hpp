// MSCCL++'s host header. Kernels that include it need the device side.
#ifndef MSCCLPP_CONCURRENCY_HPP_
#define MSCCLPP_CONCURRENCY_HPP_

#include "mscclpp/concurrency_device.hpp"

#endif
