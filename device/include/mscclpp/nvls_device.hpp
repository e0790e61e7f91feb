// MSCCL++'s name of switch_channel_device.hpp until 2025.
#include "mscclpp/switch_channel_device.hpp"
