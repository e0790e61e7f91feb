// MSCCL++'s host header. Kernels that include it need the device side.
#include "mscclpp/port_channel_device.hpp"
