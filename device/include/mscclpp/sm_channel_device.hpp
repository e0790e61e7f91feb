// MSCCL++'s name of memory_channel_device.hpp until 2025.
#include "mscclpp/memory_channel_device.hpp"
