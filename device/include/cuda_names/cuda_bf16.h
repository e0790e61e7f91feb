// CUDA's header of bfloat16, for the host and for NVRTC without a toolkit.
#include "proxyccl/cuda_floats.h"
