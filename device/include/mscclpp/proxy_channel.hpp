// MSCCL++'s host header. Kernels that include it need the device side.
#include "mscclpp/proxy_channel_device.hpp"
