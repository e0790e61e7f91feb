#include "mscclpp/fifo_device.hpp"
