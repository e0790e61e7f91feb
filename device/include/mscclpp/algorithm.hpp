// MSCCL++'s host header. Kernels that include it need the device side.
#include "mscclpp/gpu_data_types.hpp"
