// Stands in for MSCCL++'s host header: kernels that include it get the device declarations.
#include "mscclpp/memory_channel_device.hpp"
#include "mscclpp/port_channel_device.hpp"
