// MSCCL++'s name of port_channel_device.hpp until 2025.
#include "mscclpp/port_channel_device.hpp"
