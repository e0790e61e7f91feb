"""The cache of compiled kernels."""
