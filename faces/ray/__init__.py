"""Transports tensors directly between Ray's actors, with ProxyCCL's agents.

    import proxyccl.ray

    proxyccl.ray.register()  # in the driver, before it defines its actors' classes

    @ray.remote
    class Trainer:
        @ray.method(tensor_transport="proxyccl")
        def weights(self): ...

This module imports Ray only when `register` is called. See `proxyccl.ray.transport` for Ray's interface.
"""

from __future__ import annotations

from collections.abc import Sequence

NAME = "proxyccl"
"""The name of the transport. Ray ignores the case of names."""

__all__ = ["NAME", "register"]


def register(data_type: type | None = None, devices: Sequence[str] = ("cuda", "cpu")) -> None:
    """Registers the transport with Ray (`ray.experimental.register_tensor_transport`), under the name "proxyccl".

    The driver calls this function before the driver defines the classes of the actors that use the transport. ProxyCCL
    must also be installed where the actors run.

    Args:
        data_type: `torch.Tensor` (also if None), or `numpy.ndarray`.
        devices: the types of devices that tensors may be on.

    Raises:
        ImportError: Ray is not installed, or too old for direct transports; or `data_type` is None and torch is not
            installed.
        ValueError: the transport is already registered.
    """
    from proxyccl.ray.transport import ProxyCCLTransport
    from ray.experimental import register_tensor_transport

    if data_type is None:
        import torch

        data_type = torch.Tensor
    register_tensor_transport(NAME, list(devices), ProxyCCLTransport, data_type)
