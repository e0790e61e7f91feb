"""Support of torch's tensors in ProxyCCL's own calls. Unlike `proxyccl.torch`, this package needs no torch.distributed
and registers no backend.

`proxyccl` passes the names of these modules to `proxyccl.channels.array_libraries`, which imports a module when a call
first needs it.
"""
