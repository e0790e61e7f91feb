// The former name of port_channel_device.hpp, used until 2025.
#include "mscclpp/port_channel_device.hpp"
