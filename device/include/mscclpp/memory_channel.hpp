#include "mscclpp/memory_channel_device.hpp"
