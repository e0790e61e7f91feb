#include "mscclpp/port_channel_device.hpp"
