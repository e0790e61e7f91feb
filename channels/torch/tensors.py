"""Tensors as flat, contiguous memory, and back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's elements in order: its own memory where that is contiguous, else a copy. Without its gradient."""
    return tensor.detach().contiguous().view(-1)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of `flat`: for what only moves, of any type."""
    return flat(tensor).view(torch.uint8)


def put_back(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Copies what a call left in `flat` of a tensor, or in `as_bytes` of it, to the tensor, unless it is there."""
    if values.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(values.view(tensor.dtype).view(tensor.shape))


def require_dense(tensors: Iterable[torch.Tensor]) -> None:
    """Raises RuntimeError for a tensor that is no dense one on a CPU or a GPU."""
    for tensor in tensors:
        if tensor.layout != torch.strided:
            raise RuntimeError(f"tensor: has layout {tensor.layout}; expected a dense tensor (torch.strided)")
        if tensor.device.type not in ("cpu", "cuda"):
            raise RuntimeError(f"tensor: lies on {tensor.device}; expected cpu or cuda")


def require_same_dtype(tensors: Sequence[torch.Tensor]) -> None:
    """Raises TypeError for tensors of several types."""
    for tensor in tensors[1:]:
        if tensor.dtype != tensors[0].dtype:
            raise TypeError(f"tensor: has type {tensor.dtype}; expected that of the others, {tensors[0].dtype}")
