"""torch's tensors in the core's own calls. Unlike `proxyccl.torch` it needs no torch.distributed and registers nothing.

`proxyccl` names these modules to `proxyccl.channels.array_libraries`, which imports one when a call first needs it.
"""
