// Includes switch_channel_device.hpp under the name that MSCCL++ used until 2025.
#include "mscclpp/switch_channel_device.hpp"
