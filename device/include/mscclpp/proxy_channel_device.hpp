// The name that port_channel_device.hpp had until 2025.
#include "mscclpp/port_channel_device.hpp"
