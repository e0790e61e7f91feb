// Stands in for MSCCL++'s host header: kernels that include it get the device declarations.
#include "mscclpp/switch_channel_device.hpp"
