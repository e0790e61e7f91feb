// The former name of memory_channel_device.hpp, used until 2025.
#include "mscclpp/memory_channel_device.hpp"
