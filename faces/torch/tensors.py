"""Tensors as flat, contiguous memory, and back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from proxyccl.device.arrays.libraries import require_tensor_memory
from proxyccl.torch_tensors.flat import flat_view
from torch.distributed._functional_collectives import AsyncCollectiveTensor


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory holds its elements in order: it is contiguous, and not a lazy view."""
    return tensor.is_contiguous() and not (tensor.is_neg() or tensor.is_conj())


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's elements in order: its own memory if that holds them in order, else a copy. Without its gradient."""
    return flat_view(tensor.contiguous().resolve_conj().resolve_neg())


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of `flat`, for data of any type that is only moved."""
    return flat(tensor).view(torch.uint8)


def put_back(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Copies a call's result from `flat` of a tensor, or from `as_bytes` of it, to the tensor, unless they share
    memory."""
    if values.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(values.view(tensor.dtype).view(tensor.shape))


def put_back_all(tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """`put_back` of copies to several tensors: by one kernel, except lazy views and those that are not contiguous."""
    plain = [is_plain(tensor) for tensor in tensors]
    targets = [tensor.detach() for tensor, chosen in zip(tensors, plain, strict=True) if chosen]
    copies = [each.view(tensor.shape) for each, tensor, chosen in zip(values, tensors, plain, strict=True) if chosen]
    if targets:
        torch._foreach_copy_(targets, copies)
    for tensor, each, chosen in zip(tensors, values, plain, strict=True):
        if not chosen:
            put_back(tensor, each)


def in_memory(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors; each result of a functional collective is replaced by the tensor that it wraps, once that is
    complete.

    Raises:
        RuntimeError: one is not a dense tensor on a CPU or a GPU.
        ArgumentError: one has no memory: it is a DTensor, or its storage was freed.
    """
    found = [tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor for tensor in tensors]
    for tensor in found:
        if tensor.layout != torch.strided:
            raise RuntimeError(f"tensor: has layout {tensor.layout}; expected a dense tensor (torch.strided)")
        if tensor.device.type not in ("cpu", "cuda"):
            raise RuntimeError(f"tensor: lies on {tensor.device}; expected cpu or cuda")
        require_tensor_memory(tensor, "tensor")
    return found


def require_same_dtype(tensors: Sequence[torch.Tensor]) -> None:
    """Raises TypeError for tensors of several types."""
    for tensor in tensors[1:]:
        if tensor.dtype != tensors[0].dtype:
            raise TypeError(f"tensor: has type {tensor.dtype}; expected that of the others, {tensors[0].dtype}")
