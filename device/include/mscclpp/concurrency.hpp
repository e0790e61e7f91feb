#include "mscclpp/concurrency_device.hpp"
