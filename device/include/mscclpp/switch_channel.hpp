// MSCCL++'s host header. Kernels that include it need the device side.
#include "mscclpp/switch_channel_device.hpp"
