// An empty <stdint.h> for run-time compilers, which lack one; proxyccl/types.h declares its names.
