#include "mscclpp/semaphore_device.hpp"
