#include "mscclpp/device.hpp"
