// Replaces CUDA's header of 16-bit floats on the host and for NVRTC without a toolkit.
#include "proxyccl/cuda_floats.h"
