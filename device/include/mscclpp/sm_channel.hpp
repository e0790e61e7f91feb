// MSCCL++'s host header. Kernels that include it need the device side.
#include "mscclpp/sm_channel_device.hpp"
