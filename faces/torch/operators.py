"""Defines `communicator_of`, and `torch.ops.proxyccl.all_reduce_rms_norm` for torch.compile and CUDA graphs."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from proxyccl.channels.communicator import Communicator
from proxyccl.device.errors import ArgumentError
from proxyccl.torch.collectives import with_index
from proxyccl.torch.errors import torch_errors
from proxyccl.torch.process_group import NAME, ProcessGroupProxyCCL

_library = torch.library.Library("proxyccl", "FRAGMENT")  # torch unregisters the operators when this object is freed
_library.define(
    "all_reduce_rms_norm(Tensor x, Tensor(a!) residual, Tensor? weight, float eps, str group_name, *, "
    "Tensor(b!)? out=None, Tensor(c!)? scales=None, Tensor? scale=None, bool add=True, float weight_bias=0.0) -> ()"
)


def communicator_of(
    group: dist.ProcessGroup | None = None,
    device: torch.device | str | None = None,
    *,
    suspendable: bool | None = None,
) -> Communicator:
    """Returns the communicator of a process group's collectives on a device. The program's calls on the communicator
    and the group's collectives run one after the other. The group closes the communicator.

    All ranks of the group must call this function, because it makes the communicator if none exists.

    Args:
        group: a process group of the backend ``"proxyccl"``; None for the default group.
        device: the device; None for the current GPU if torch has GPUs, else the CPU.
        suspendable: whether the group can be suspended (see `Options`). All ranks pass the same value. None keeps the
            group's setting.

    Raises:
        ArgumentError: the group has another backend for the device, or a communicator whose `suspendable` differs.
        RuntimeUnavailableError: the device's driver can't suspend memory.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    where = with_index(torch.device(device))
    backend = _backend_of(dist.group.WORLD if group is None else group, where)
    with torch_errors():
        if suspendable is not None:
            backend.endpoints.set_suspendable(where, suspendable)
        return backend.endpoints.of_all(where)


def _backend_of(group: Any, device: torch.device) -> ProcessGroupProxyCCL:
    backend = group._get_backend(device)
    if not isinstance(backend, ProcessGroupProxyCCL):
        raise ArgumentError("group", f"its backend for {device.type} is {backend.name()}; expected {NAME}")
    return backend


def _all_reduce_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    group_name: str,
    *,
    out: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    add: bool = True,
    weight_bias: float = 0.0,
) -> None:
    """Implements ``torch.ops.proxyccl.all_reduce_rms_norm`` on the current stream, by a process group's communicator.

    Args:
        x, weight, eps, weight_bias: passed to `Communicator.all_reduce_rms_norm`.
        residual: receives the sums.
        group_name: the process group's name.
        out: receives the normalized rows, in the type of `x`, or in float8_e4m3fn if `scales` or `scale` is given; None
            if and only if `weight` is None.
        scales: receives one scale for each row; None without such scales.
        scale: a tensor of one float32, by which all rows are scaled; None without such a scale.
        add: whether the values in `residual` are added to the sums before the sums are written to `residual`.

    Raises the errors of `Communicator.all_reduce_rms_norm`, and ArgumentError for a tensor that requires a gradient
    while torch records gradients.
    """
    _refuse_gradients(x=x, residual=residual, weight=weight, out=out, scales=scales, scale=scale)
    if out is None and weight is not None:
        raise ArgumentError("out", "expected a tensor, because the rows are normed by `weight`")
    group = torch._C._distributed_c10d._resolve_process_group(group_name)
    options = torch._C._distributed_c10d.AllreduceOptions()
    options.asyncOp = False

    def call(comm: Communicator) -> None:
        if scales is not None and scale is not None:
            raise ArgumentError("scale", "expected None, because `scales` asks for a scale of each row")
        comm.all_reduce_rms_norm(
            x,
            residual if add else None,
            weight,
            eps,
            weight_bias=weight_bias,
            out=out,
            residual_out=residual,
            scales=scales,
            quantize=scale if scales is None else "float8",
        )

    given = [each for each in (x, weight, scale) if each is not None]
    made = [each for each in (residual, out, scales) if each is not None]
    _backend_of(group, x.device).calls.collective("all_reduce_rms_norm", made, given, options, call)


def _refuse_gradients(**tensors: torch.Tensor | None) -> None:
    if torch.is_grad_enabled():
        for name, each in tensors.items():
            if each is not None and each.requires_grad:
                raise ArgumentError(name, "requires a gradient, which the operator lacks; expected torch.no_grad()")


_library.impl("all_reduce_rms_norm", _all_reduce_rms_norm, "CompositeExplicitAutograd")


@torch.library.register_fake("proxyccl::all_reduce_rms_norm", lib=_library)
def _fake(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, *_: Any, **options: Any) -> None:
    """Returns None, because the operator only writes to its arguments."""
    named = {name: options.get(name) for name in ("out", "scales", "scale")}
    _refuse_gradients(x=x, residual=residual, weight=weight, **named)
