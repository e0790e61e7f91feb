// MSCCL++'s host header. Kernels that include it need the device side.
#include "mscclpp/semaphore_device.hpp"
