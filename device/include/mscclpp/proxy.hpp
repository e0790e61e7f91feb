// MSCCL++'s host header. Kernels that include it need the device side.
#ifndef MSCCLPP_PROXY_HPP_
#define MSCCLPP_PROXY_HPP_

#include "mscclpp/fifo_device.hpp"

#endif
