// For run-time compilers, which lack this header: its names are there without it (proxyccl/types.h).
