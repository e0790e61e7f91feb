// Replaces CUDA's header of bfloat16 on the host and for NVRTC without a toolkit.
#include "proxyccl/cuda_floats.h"
