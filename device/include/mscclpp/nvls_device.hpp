// The former name of switch_channel_device.hpp, used until 2025.
#include "mscclpp/switch_channel_device.hpp"
