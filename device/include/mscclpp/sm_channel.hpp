#include "mscclpp/sm_channel_device.hpp"
