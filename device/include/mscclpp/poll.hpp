#include "mscclpp/poll_device.hpp"
