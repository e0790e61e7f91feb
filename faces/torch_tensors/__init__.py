"""Support of torch's tensors in the core's own calls. Unlike `proxyccl.torch`, this package needs no torch.distributed
and registers no backend.

`proxyccl` names these modules to `proxyccl.channels.array_libraries`, which imports one when a call first needs it.
"""
