// The name that memory_channel_device.hpp had until 2025.
#include "mscclpp/memory_channel_device.hpp"
