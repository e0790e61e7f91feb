// Stands in for MSCCL++'s host header: kernels that include it get the device declarations.
#include "mscclpp/device.hpp"
