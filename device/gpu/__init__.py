"""The GPU runtime, and the drivers and compilers of NVIDIA and AMD."""
