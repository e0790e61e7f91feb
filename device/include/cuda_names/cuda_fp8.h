// Replaces CUDA's header of 8-bit floats on the host and for NVRTC without a toolkit.
#include "proxyccl/cuda_floats.h"
