#include "mscclpp/proxy_channel_device.hpp"
