// The header of host code. Kernels that include it mean the device's side.
#ifndef MSCCLPP_CONCURRENCY_HPP_
#define MSCCLPP_CONCURRENCY_HPP_

#include "mscclpp/concurrency_device.hpp"

#endif
