// The name that switch_channel_device.hpp had until 2025.
#include "mscclpp/switch_channel_device.hpp"
