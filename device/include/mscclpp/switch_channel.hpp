#include "mscclpp/switch_channel_device.hpp"
