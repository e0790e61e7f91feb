// CUDA's header of floats of 8 bits, for the host and for NVRTC without a toolkit.
#include "proxyccl/cuda_floats.h"
