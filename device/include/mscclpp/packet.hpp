#include "mscclpp/packet_device.hpp"
