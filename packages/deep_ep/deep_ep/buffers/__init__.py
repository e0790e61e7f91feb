"""The modules of the buffers in DeepEP 2."""
