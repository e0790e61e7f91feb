// Includes port_channel_device.hpp under the name that MSCCL++ used until 2025.
#include "mscclpp/port_channel_device.hpp"
