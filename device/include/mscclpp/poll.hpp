// MSCCL++'s host header. Kernels that include it need the device side.
#ifndef MSCCLPP_POLL_HPP_
#define MSCCLPP_POLL_HPP_

#include "mscclpp/poll_device.hpp"

#endif
