"""Implements functions of communicators and layers that depend on torch's tensors. Unlike `proxyccl.torch`, this
package registers no torch.distributed backend.

`proxyccl` passes these modules' names to `proxyccl.channels.array_libraries`, which imports them when needed.
"""
