#include "mscclpp/memory_channel_device.hpp"
#include "mscclpp/port_channel_device.hpp"
