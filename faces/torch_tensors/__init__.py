"""Implements functions of communicators and layers that depend on torch's tensors. Unlike `proxyccl.torch`, this
package registers no torch.distributed backend.

`proxyccl` passes the names of these modules to `proxyccl.channels.array_libraries`, which imports a module when a call
first needs it.
"""
